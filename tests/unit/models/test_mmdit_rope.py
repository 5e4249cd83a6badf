"""The project's own transformer and its pieces, against formulas written out here."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_training.models.mmdit_rope import (
    JointBlock,
    MMDiTRope,
    Stream,
    SwiGLU,
    TextProjection,
    TimestepEmbedding,
    axial_angles,
    from_patches,
    modulate,
    rotate,
    sinusoids,
    to_patches,
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
    x, scale, shift = torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    expected = layer_norm(x.double()) * (1 + scale.double()) + shift.double()
    norm = Stream(8, head_dim=4, hidden=8).norm
    assert torch.allclose(modulate(norm(x), scale, shift).double(), expected, atol=1e-5)


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


TINY: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "text_dims": [6, 10],
    "pooled_dim": 5,
    "mlp_ratio": 2.0,
    "rope_base_size": 4,
    "text_scale_init": 1.0,
    "zero_init": False,
}


def tiny(**changes: Any) -> MMDiTRope:
    torch.manual_seed(0)
    return MMDiTRope(**TINY | changes).eval()


def inputs(height: int = 8, width: int = 8, seed: int = 0) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(2, 4, height, width, generator=chance),
        "timestep": torch.tensor([30.0, 970.0]),
        "encoder_hidden_states": [torch.randn(2, 3, 6, generator=chance), torch.randn(2, 5, 10, generator=chance)],
        "pooled_projections": torch.randn(2, 5, generator=chance),
    }


def masks() -> list[Tensor]:
    first = torch.tensor([[True, True, True], [True, False, False]])
    return [first, torch.tensor([[True, True, False, False, False], [True, True, True, True, False]])]


def test_grids_of_other_areas_are_squeezed_into_the_base_grid() -> None:
    """As the same network with that base grid sees positions twice as near."""
    seen: list[Tensor] = []
    for base, side in ((4, 8), (4, 16), (8, 16)):
        model = tiny(rope_base_size=base)
        model.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[3]))
        model(**inputs(side, side))
    plain, squeezed, wide = (angles.unflatten(0, (side, side)) for angles, side in zip(seen, (4, 8, 8), strict=True))
    assert torch.allclose(squeezed[::2, ::2], plain) and torch.allclose(squeezed * 2, wide)


def test_patches_hold_their_own_square_and_come_back() -> None:
    latents = torch.randn(2, 4, 6, 10)
    patches = to_patches(latents, 2)
    assert patches.shape == (2, 15, 16)
    assert torch.equal(patches[1, 1 * 5 + 3], latents[1, :, 2:4, 6:8].flatten())
    assert torch.equal(from_patches(patches, 3, 2), latents)


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(8, 8), (4, 12), (14, 2), (2, 2)])
def test_any_aspect_ratio(height: int, width: int) -> None:
    sample = tiny()(**inputs(height, width)).sample
    assert sample.shape == (2, 4, height, width) and sample.isfinite().all() and sample.std() > 0.1


@torch.no_grad()
def test_everything_given_matters() -> None:
    model, given = tiny(), inputs()
    before = model(**given).sample
    other = inputs(seed=1)
    for name in ("hidden_states", "pooled_projections"):
        assert not torch.allclose(model(**given | {name: other[name]}).sample, before, atol=1e-3)
    assert not torch.allclose(model(**given | {"timestep": given["timestep"] + 20}).sample, before, atol=1e-3)
    for i in (0, 1):
        states = list(given["encoder_hidden_states"])
        states[i] = other["encoder_hidden_states"][i]
        assert not torch.allclose(model(**given | {"encoder_hidden_states": states}).sample, before, atol=1e-3)


@torch.no_grad()
def test_masked_text_cannot_influence_the_picture() -> None:
    model, given = tiny(), inputs()
    before = model(**given, encoder_attention_mask=masks()).sample
    pairs = zip(given["encoder_hidden_states"], masks(), strict=True)
    given["encoder_hidden_states"] = [states.masked_fill(~kept[..., None], float("nan")) for states, kept in pairs]
    assert torch.equal(model(**given, encoder_attention_mask=masks()).sample, before)
    assert not torch.allclose(before, model(**inputs()).sample, atol=1e-3)


@torch.no_grad()
def test_a_mask_is_the_same_as_leaving_the_tokens_out() -> None:
    model, given = tiny(), inputs()
    masked = model(**given, encoder_attention_mask=masks()).sample
    for b in range(2):
        alone = {name: value[b : b + 1] for name, value in given.items() if name != "encoder_hidden_states"}
        states = [s[b : b + 1, m[b]] for s, m in zip(given["encoder_hidden_states"], masks(), strict=True)]
        assert torch.allclose(model(**alone, encoder_hidden_states=states).sample[0], masked[b], atol=1e-5)


@torch.no_grad()
def test_masks_may_be_left_out_one_by_one() -> None:
    model, given = tiny(), inputs()
    first, second = masks()
    all_true = torch.ones_like(first)
    expected = model(**given, encoder_attention_mask=[all_true, second]).sample
    assert torch.equal(model(**given, encoder_attention_mask=[None, second]).sample, expected)
    unmasked = model(**given, encoder_attention_mask=[all_true, torch.ones_like(second)]).sample
    assert torch.allclose(model(**given, encoder_attention_mask=[None, None]).sample, unmasked, atol=1e-5)


@torch.no_grad()
def test_text_has_no_positions_and_the_image_has() -> None:
    model, given = tiny(), inputs()
    before = model(**given).sample
    reversed_text = [states.flip(1) for states in given["encoder_hidden_states"]]
    assert torch.allclose(model(**given | {"encoder_hidden_states": reversed_text}).sample, before, atol=1e-5)
    moved = given["hidden_states"].roll(2, dims=3)  # a whole patch to the right
    assert not torch.allclose(model(**given | {"hidden_states": moved}).sample, before.roll(2, dims=3), atol=1e-3)


def test_zero_initialisation_starts_as_the_identity() -> None:
    model = tiny(zero_init=True)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: seen.extend([i[0], o[0], i[1], o[1]]))
    sample = model(**inputs()).sample
    assert not sample.any()
    assert all(torch.equal(before, after) for before, after in zip(seen[::2], seen[1::2], strict=True))
    (sample - 1).square().mean().backward()
    assert model.unpatchify.bias.grad.abs().min() > 0  # it can leave zero
    assert tiny()(**inputs()).sample.std() > 0.1


def test_every_parameter_is_trained() -> None:
    model = tiny()
    model(**inputs(), encoder_attention_mask=masks()).sample.square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert not any(
        n.startswith("blocks.1.text.") and (".out." in n or ".mlp." in n or "query" in n)
        for n, _ in model.named_parameters()
    )


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny(rope_theta=500.0)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    loaded = MMDiTRope.from_pretrained(tmp_path, low_cpu_mem_usage=False)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(loaded(**inputs()).sample, model(**inputs()).sample)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {key: stored[key] for key in TINY} == TINY | {"zero_init": False} and stored["rope_theta"] == 500.0


@torch.no_grad()
def test_low_precision_stays_near(tmp_path: Path) -> None:
    model, given = tiny(), inputs()
    exact = model(**given, encoder_attention_mask=masks()).sample
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**given, encoder_attention_mask=masks()).sample
    assert (mixed.float() - exact).std() < 0.03 * exact.std()
    model.bfloat16()
    given |= {name: given[name].bfloat16() for name in ("hidden_states", "pooled_projections")}
    given["encoder_hidden_states"] = [s.bfloat16() for s in given["encoder_hidden_states"]]
    pure = model(**given, encoder_attention_mask=masks(), return_dict=False)[0]
    assert pure.dtype == torch.bfloat16 and (pure.float() - exact).std() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_head_dim": 6}, "attention_head_dim: 6 is not a multiple of 4"),
    ],
)
def test_parameters_that_make_no_network(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny(**changes)


def test_parameters_at_full_size() -> None:
    """19 blocks of width 1216: Gemma-2-2b and ModernBERT-large states, MetaCLIP pooled vector, 16 channels."""
    with torch.device("meta"):
        model = MMDiTRope()
    width, patch = 1216, 16 * 4
    stream = (6 * width + 6) * width + 3 * width**2 + width**2 + 3 * 4 * width**2 + 2 * 64
    silent = (2 * width + 2) * width + 2 * width**2 + 64
    blocks = 19 * (stream + width**2 + width) + 18 * stream + silent
    text = sum(dim + 1 + dim * width for dim in (2304, 1024))
    rest = (patch + 1) * width + (width + 1) * patch + width**2 + width + 1 + 769 * width + 2 * (width + 1) * width
    assert sum(p.numel() for p in model.parameters()) == blocks + text + rest == 1_247_517_187
