"""Each optimizer against its paper's formulas, written here in float64 and plain tensor arithmetic."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_training.callbacks.ema import evaluation_weights
from sd_training.errors import ConfigError
from sd_training.optim.optimizers import make_optimizer
from tests.unit.optim.toy import config, toy

SHAPES = ((5,), (4, 3), (3, 2, 4, 5))
RATES = (0.02, 0.05, 0.05, 0.01)
BETA1, BETA2, DECAY, EPS = 0.8, 0.97, 0.1, 1e-3
WD = {"weight_decay": DECAY}
LION: dict[str, float] = {"beta1": BETA1, "beta2": BETA2, **WD}
ADAM: dict[str, float] = {**LION, "epsilon": EPS}


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


GRADIENTS = [[gradient + 1 for gradient in draw(100 + step)] for step in range(len(RATES))]
"""With a direction in common, so that Prodigy's estimate grows."""


def run(name: str, options: dict[str, Any], scale: float = 1.0) -> tuple[list[Tensor], Any]:
    """Weights after the steps of `RATES`, and the optimizer."""
    weights = [nn.Parameter(weight) for weight in draw(0)]
    named = [(f"denoiser.{index}", weight) for index, weight in enumerate(weights)]
    optimizer = make_optimizer(config(name, **options), named, learning_rate=1.0, fused=True)
    for rate, gradients in zip(RATES, GRADIENTS, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = scale * rate * group["lr_factor"]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


def each(update: Callable[[Tensor, list[Tensor]], Tensor]) -> list[Tensor]:
    """A reference that treats every tensor by itself: start, gradients of all steps → end."""
    return [update(start.clone(), [g[i] for g in GRADIENTS]) for i, start in enumerate(draw(0))]


def adamw(w: Tensor, gradients: list[Tensor]) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g**2
        w = w - rate * ((m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS) + DECAY * w)
    return w


def lion(w: Tensor, gradients: list[Tensor]) -> Tensor:
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2; the decay multiplies the weight first, as the library does."""
    m = torch.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        w = w * (1 - rate * DECAY) - rate * torch.sign(BETA1 * m + (1 - BETA1) * g)
        m = BETA2 * m + (1 - BETA2) * g
    return w


def adafactor(w: Tensor, gradients: list[Tensor]) -> Tensor:
    """Shazeer & Stern 2018, algorithms 4 and 5 with ρ given from outside and no scaling by the weight's size."""
    r, c, v = 0.0, 0.0, 0.0
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        beta = 1 - t**-0.8
        square = g**2 + 1e-30
        if g.ndim == 1:
            v = beta * v + (1 - beta) * square
            estimate = v
        else:
            r = beta * r + (1 - beta) * square.sum(-1)
            c = beta * c + (1 - beta) * square.sum(-2)
            estimate = r[..., :, None] * c[..., None, :] / r.sum(-1)[..., None, None]
        u = g / estimate.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item())
        w = w - rate * DECAY * w - rate * u
    return w


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [("adamw", ADAM, adamw), ("lion", LION, lion), ("adafactor", WD, adafactor)],
)
def test_steps_agree_with_the_paper(name: str, options: dict[str, float], reference: Any) -> None:
    weights, _ = run(name, options)
    for got, wanted in zip(weights, each(reference), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def prodigy(d: float, scale: float) -> tuple[list[Tensor], float]:
    """Mishchenko & Defazio 2023, algorithm 4, with bias correction, decoupled decay and the safeguard: s sums d² g
    instead of d² γ g. Inner products go over all tensors together."""
    starts, d0 = draw(0), d
    xs = [start.clone() for start in starts]
    m, v, s = ([torch.zeros_like(x) for x in xs] for _ in range(3))
    numerator, beta3, d_max = 0.0, math.sqrt(BETA2), d
    for k, (rate, gradients) in enumerate(zip(RATES, GRADIENTS, strict=True), start=1):
        step = d * scale * rate * math.sqrt(1 - BETA2**k) / (1 - BETA1**k)
        numerator *= beta3
        for i, g in enumerate(gradients):
            numerator += d * step * (g * (starts[i] - xs[i])).sum().item()
            m[i] = BETA1 * m[i] + (1 - BETA1) * d * g
            v[i] = BETA2 * v[i] + (1 - BETA2) * d**2 * g**2
            s[i] = beta3 * s[i] + d * d * g
        estimate = numerator / sum(x.abs().sum().item() for x in s)
        if d == d0:
            d = max(d, estimate)
        d_max = max(d_max, estimate)
        previous, d = d, max(d, d_max)
        for i in range(len(xs)):
            xs[i] = xs[i] - step * DECAY * xs[i] - step * m[i] / (v[i].sqrt() + previous * EPS)
    return xs, d


def test_prodigy_agrees_with_the_paper() -> None:
    weights, optimizer = run("prodigy", {**ADAM, "d0": 1e-3}, scale=50)
    wanted, d = prodigy(1e-3, scale=50)
    assert d > 1.2e-3
    assert optimizer.param_groups[0]["d"] == pytest.approx(d, rel=1e-9)
    for got, reference in zip(weights, wanted, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-6, atol=1e-9)


def test_prodigy_finds_the_scale_of_the_problem() -> None:
    """|x - 3| from 0: the distance estimate grows from 1e-6 by orders of magnitude, and x arrives."""
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = make_optimizer(config("prodigy", weight_decay=0.0), [("denoiser.x", x)], learning_rate=1.0, fused=True)
    for _ in range(300):
        x.grad = 2 * (x.detach() - 3)
        optimizer.step()
    assert 0.1 < optimizer.param_groups[0]["d"] < 3
    assert x.item() == pytest.approx(3, abs=0.05)


def schedule_free(z: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Defazio et al. 2024 (arXiv:2405.15682), algorithm 1 with x written out; the average weighs a step by its largest
    learning rate so far, squared, and the bias correction stands at v, as in the authors' code.

    Returns:
        y (trained) and x (evaluated).
    """
    x, v, total, highest = z.clone(), torch.zeros_like(z), 0.0, 0.0
    for t, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        y = (1 - BETA1) * z + BETA1 * x
        v = BETA2 * v + (1 - BETA2) * g**2
        z = z - rate * (g / ((v / (1 - BETA2**t)).sqrt() + EPS) + DECAY * y)
        highest = max(highest, rate)
        total += highest**2
        x = (1 - highest**2 / total) * x + highest**2 / total * z
    return (1 - BETA1) * z + BETA1 * x, x


def test_schedule_free_agrees_with_the_paper() -> None:
    weights, optimizer = run("schedule_free_adamw", ADAM)
    wanted = [schedule_free(start, [g[i] for g in GRADIENTS]) for i, start in enumerate(draw(0))]
    for got, (y, _) in zip(weights, wanted, strict=True):
        torch.testing.assert_close(got, y, rtol=1e-9, atol=1e-12)
    with evaluation_weights(optimizer):
        for got, (_, x) in zip(weights, wanted, strict=True):
            torch.testing.assert_close(got, x, rtol=1e-9, atol=1e-12)


def test_fused_adamw_is_torchs_own_class() -> None:
    """The class is looked at elsewhere: it tells that a gradient scaler may stay on the device."""
    optimizer = make_optimizer(config("adamw"), toy(), learning_rate=0.1, fused=True)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["fused"]
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["lion", "prodigy", "schedule_free_adamw"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"lion": "lion_pytorch.foreach", "prodigy": "prodigyopt", "schedule_free_adamw": "schedulefree"}[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"optimizer\.name: {name} needs the package .*pip install"):
        make_optimizer(config(name), toy(), learning_rate=0.1, fused=True)


def test_bitsandbytes_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs the package bitsandbytes"):
        make_optimizer(config("adamw_8bit"), toy(), learning_rate=0.1, fused=True)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "prodigy", "schedule_free_adamw", "muon"])
def test_a_peak_of_zero_is_allowed_and_trains_nothing(name: str) -> None:
    parameters = toy()
    optimizer = make_optimizer(config(name), parameters, learning_rate=0.0, fused=True)
    before = [parameter.detach().clone() for _, parameter in parameters]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, w) for (_, p), w in zip(parameters, before, strict=True))
