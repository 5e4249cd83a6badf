"""Muon against its definition: the nearest orthogonal matrix by SVD, and the Newton-Schulz iteration in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_training.optim.optimizers import make_optimizer
from tests.unit.optim.toy import build, config, set_gradients, toy

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.05


def newton_schulz(gradient: Tensor) -> Tensor:
    """Jordan et al. 2024: five times X ← aX + b(XXᵀ)X + c(XXᵀ)²X, from a matrix of norm 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / gradient.norm()
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


def one_matrix(shape: tuple[int, ...], memory_format: torch.memory_format = torch.contiguous_format) -> nn.Parameter:
    torch.manual_seed(3)
    weight = torch.randn(shape)
    return nn.Parameter(weight.to(memory_format=memory_format))


def muon(weight: nn.Parameter) -> Any:
    options = {"momentum": MOMENTUM, "weight_decay": DECAY}
    named = [("denoiser.middle.weight", weight)]
    return make_optimizer(config("muon", **options), named, learning_rate=RATE, fused=True)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16), (12, 5, 3, 3)])
def test_two_steps_agree_with_the_definition(shape: tuple[int, ...]) -> None:
    weight = one_matrix(shape)
    optimizer = muon(weight)
    expected = weight.detach().double().flatten(1)
    rows, columns = expected.shape
    average = torch.zeros_like(expected)
    for seed in range(2):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        weight.grad = gradient.clone()
        optimizer.step()
        g = gradient.double().flatten(1)
        average = MOMENTUM * average + (1 - MOMENTUM) * g
        update = newton_schulz((1 - MOMENTUM) * g + MOMENTUM * average)
        expected = expected * (1 - RATE * DECAY) - RATE * 0.2 * math.sqrt(max(rows, columns)) * update
    # The iteration runs in bf16, which has 8 bits: relative 4e-3 per product.
    size = RATE * 0.2 * math.sqrt(max(rows, columns))
    torch.testing.assert_close(weight.detach().double().flatten(1), expected, rtol=0, atol=0.03 * size)


@pytest.mark.parametrize("shape", [(24, 10), (64, 64), (12, 5, 3, 3)])
def test_the_update_has_the_singular_vectors_of_the_gradient_and_singular_values_near_one(shape: Any) -> None:
    weight = one_matrix(shape)
    before = weight.detach().clone()
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    optimizer = muon(weight)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    rows, columns = before.flatten(1).shape
    update = (before - weight.detach()).flatten(1) / (RATE * 0.2 * math.sqrt(max(rows, columns)))
    u, _, vt = torch.linalg.svd(weight.grad.flatten(1), full_matrices=False)
    aligned = u.T @ update @ vt.T
    off_diagonal = aligned - aligned.diag().diag()
    well_conditioned = aligned.diag()[:-2] if rows == columns else aligned.diag()  # a square one has σ near 0
    assert off_diagonal.abs().max() < 0.03
    assert well_conditioned.min() > 0.6
    assert aligned.diag().max() < 1.3


def test_an_update_is_as_large_as_adamws() -> None:
    """Root mean square 0.2 × learning rate, whatever the shape."""
    for shape in [(40, 40), (20, 80), (80, 20)]:
        weight = one_matrix(shape)
        before = weight.detach().clone()
        weight.grad = torch.randn(shape)
        optimizer = muon(weight)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        assert (weight.detach() - before).square().mean().sqrt() / RATE == pytest.approx(0.2, rel=0.25)


def test_channels_last_kernels_are_updated_like_contiguous_ones() -> None:
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        weight = one_matrix((6, 4, 3, 3), memory_format)
        optimizer = muon(weight)
        for seed in range(2):
            weight.grad = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        results.append(weight.detach().contiguous())
    assert torch.equal(*results)
    assert not torch.equal(results[0], one_matrix((6, 4, 3, 3)).detach())


def test_everything_else_is_updated_as_by_adamw() -> None:
    options: dict[str, float] = {"weight_decay": 0.1, "beta2": 0.9}
    mixed, plain = toy(), toy()
    first, second = build("muon", mixed, **options), build("adamw", plain, **options)
    for step in range(3):
        for optimizer, parameters in ((first, mixed), (second, plain)):
            set_gradients(parameters, step)
            optimizer.step()
    equal = {name: torch.equal(a, b) for (name, a), (_, b) in zip(mixed, plain, strict=True)}
    assert {name for name, is_equal in equal.items() if not is_equal} == {
        "denoiser.conv.weight",
        "denoiser.linear.weight",
    }
