"""The pieces of the project's own denoiser, each against its formula in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_training.models.families.mmdit_rope import (
    JointBlock,
    SwiGLU,
    TextProjection,
    TimestepEmbedding,
    axial_angles,
    modulate,
    position_scale,
    rotate,
    sinusoids,
)

CPU = torch.device("cpu")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def turned(x: Tensor, row: float, column: float, theta: float = 1e4) -> Tensor:
    """One vector [E] as E/2 complex numbers, the first half turned by the row, the second by the column."""
    numbers = torch.view_as_complex(x.double().reshape(-1, 2))
    per_axis = len(numbers) // 2
    rates = [theta ** (-2 * j / (2 * per_axis)) for j in range(per_axis)]
    angles = torch.tensor([row * rate for rate in rates] + [column * rate for rate in rates], dtype=torch.float64)
    return torch.view_as_real(numbers * torch.exp(1j * angles)).reshape(-1)


def test_rotation_against_complex_numbers() -> None:
    x = torch.randn(1, 1, 3 * 5, 16, generator=torch.Generator().manual_seed(0))
    result = rotate(x, axial_angles(3, 5, 16, 100.0, 0.7, CPU))
    for row in range(3):
        for column in range(5):
            expected = turned(x[0, 0, row * 5 + column], 0.7 * row, 0.7 * column, theta=100.0)
            assert torch.allclose(result[0, 0, row * 5 + column].double(), expected, atol=1e-5)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    angles = axial_angles(6, 7, 16, 1e4, 1.0, CPU)
    queries = rotate(query.expand(1, 1, 42, 16), angles)[0, 0].unflatten(0, (6, 7))
    keys = rotate(key.expand(1, 1, 42, 16), angles)[0, 0].unflatten(0, (6, 7))
    products = torch.einsum("abe,cde->abcd", queries, keys)
    assert torch.allclose(products[1:, 2:, 1:, 2:], products[:-1, :-2, :-1, :-2], atol=1e-4)
    assert not torch.allclose(products[0, 0, 0, 1], products[0, 0, 0, 0], atol=1e-2)
    assert not torch.allclose(products[0, 0, 1, 0], products[0, 0, 0, 1], atol=1e-2)
    assert torch.allclose(queries.norm(dim=-1), query.norm(), atol=1e-5)


def test_interpolation_spans_the_same_angles_at_every_size() -> None:
    def angles(rows: int, columns: int, scaling: str) -> Tensor:
        scale = position_scale(rows, columns, 8, scaling)
        return axial_angles(rows, columns, 16, 1e4, scale, CPU).unflatten(0, (rows, columns))

    base = angles(8, 8, "none")
    assert torch.equal(angles(8, 8, "interpolate"), base)
    assert torch.allclose(angles(16, 16, "interpolate")[::2, ::2], base)
    assert torch.allclose(angles(4, 4, "interpolate"), base[::2, ::2])
    assert torch.equal(angles(16, 16, "none")[:8, :8], base)
    wide = angles(4, 16, "interpolate")  # the same area: nothing is squeezed
    assert torch.equal(wide[:, :8], base[:4])


def test_sinusoids() -> None:
    positions = torch.tensor([0.0, 3.0, 812.5])
    result = sinusoids(positions, 6).double()
    for b, t in enumerate(positions.tolist()):
        rates = [t / 10000 ** (2 * i / 6) for i in range(3)]
        expected = [math.sin(r) for r in rates] + [math.cos(r) for r in rates]
        assert torch.allclose(result[b], torch.tensor(expected, dtype=torch.float64), atol=1e-4)


def test_time_embedding_scales_sigma() -> None:
    embedding = TimestepEmbedding(6, 300.0)
    expected = embedding.linear(sinusoids(torch.tensor([0.0, 75.0, 300.0]), 6))
    assert torch.allclose(embedding(torch.tensor([0.0, 250.0, 1000.0])), expected, atol=1e-5)
    embedding(torch.tensor([250.0])).sum().backward()
    assert embedding.scale.grad is not None and embedding.scale.grad.abs() > 0


@torch.no_grad()
def test_swiglu() -> None:
    mlp, x = SwiGLU(6, 10), torch.randn(2, 6)
    w1, w3, w2 = (layer.weight.double() for layer in (mlp.gate, mlp.up, mlp.down))
    expected = (silu(x.double() @ w1.T) * (x.double() @ w3.T)) @ w2.T
    assert torch.allclose(mlp(x).double(), expected, atol=1e-6)


@torch.no_grad()
def test_text_projection() -> None:
    projection, x = TextProjection(6, 8, 0.01), 1000 * torch.randn(2, 3, 6)
    projection.norm.weight.normal_()
    expected = 0.01 * rms_norm(x.double(), projection.norm.weight.double()) @ projection.linear.weight.double().T
    assert torch.allclose(projection(x).double(), expected, atol=1e-7)
    assert projection.linear.bias is None


def test_modulation() -> None:
    x, scale, shift = torch.randn(2, 5, 6), torch.randn(2, 1, 6), torch.randn(2, 1, 6)
    expected = layer_norm(x.double()) * (1 + scale.double()) + shift.double()
    assert torch.allclose(modulate(x, scale, shift).double(), expected, atol=1e-5)


def reference_block(block: JointBlock, image: Tensor, text: Tensor, condition: Tensor, kept: Tensor, grid: int) -> Any:
    """A block for one sample, token by token, from the equations; float64."""
    head_dim = block.image.head_dim
    y = silu(condition @ block.condition.weight.T + block.condition.bias)
    parts: dict[str, Any] = {}
    for name, x in (("text", text), ("image", image)):
        stream = getattr(block, name)
        a1, b1, *rest = (y @ stream.modulation.weight.T + stream.modulation.bias).split(len(y))
        h = layer_norm(x) * (1 + a1) + b1
        k, v = ((h @ w.T).reshape(len(x), -1, head_dim) for w in stream.key_value.weight.split(len(y)))
        k = rms_norm(k, stream.key_norm.weight)
        q = torch.zeros_like(k)
        if stream.has_output:
            q = rms_norm((h @ stream.query.weight.T).reshape(len(x), -1, head_dim), stream.query_norm.weight)
        if name == "image":
            q, k = (
                torch.stack([torch.stack([turned(h, i // grid, i % grid) for h in p[i]]) for i in range(len(p))])
                for p in (q, k)
            )
        parts[name] = (q, k, v, rest)
    q, k, v = (torch.cat([parts["text"][i], parts["image"][i]]) for i in range(3))
    scores = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(head_dim)
    weights = torch.exp(scores) * kept
    attended = torch.einsum("hqk,khe->qhe", weights / weights.sum(dim=-1, keepdim=True), v).flatten(1)
    results = []
    for name, x, heard in (("image", image, attended[len(text) :]), ("text", text, attended[: len(text)])):
        stream = getattr(block, name)
        if not stream.has_output:
            results.append(x)
            continue
        g1, a2, b2, g2 = parts[name][3]
        x = x + g1 * (heard @ stream.out.weight.T)
        h = layer_norm(x) * (1 + a2) + b2
        mlp = stream.mlp
        results.append(x + g2 * ((silu(h @ mlp.gate.weight.T) * (h @ mlp.up.weight.T)) @ mlp.down.weight.T))
    return results


@torch.no_grad()
@pytest.mark.parametrize("text_has_output", [True, False])
def test_block_against_its_equations(text_has_output: bool) -> None:
    torch.manual_seed(0)
    block = JointBlock(16, 8, 24, text_has_output)
    for parameter in block.parameters():
        parameter.normal_(std=0.4)
    image, text, condition = torch.randn(2, 6, 16), torch.randn(2, 4, 16), torch.randn(2, 16)
    kept = torch.ones(2, 10, dtype=torch.bool)
    kept[0, 2:4] = False
    result = block(image, text, condition, axial_angles(2, 3, 8, 1e4, 1.0, CPU), kept[:, None, None])
    block.double()
    for b in range(2):
        expected = reference_block(block, image[b].double(), text[b].double(), condition[b].double(), kept[b], 3)
        for ours, theirs in zip(result, expected, strict=True):
            assert torch.allclose(ours[b].double(), theirs, atol=1e-4)
