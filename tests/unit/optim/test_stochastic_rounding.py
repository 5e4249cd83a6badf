"""Rounding at random: unbiased, reproducible, and able to move bf16 weights by updates below their resolution."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_training.errors import ConfigError
from sd_training.optim.optimizers import make_optimizer, round_stochastically, rounding_generator
from tests.unit.optim.toy import build, config, set_gradients, toy, train, values

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, -0.0001234, 1e-30, 255.7, -65000.3, 1e-40])
def test_the_mean_is_the_value_and_only_neighbours_come_out(value: float) -> None:
    count = 200_000
    rounded = round_stochastically(torch.full((count,), value), generator())
    exact = torch.tensor(value).double().item()
    found = sorted(rounded.double().unique().tolist())
    assert len(found) == 2
    low, high = found
    assert low < exact < high
    # One unit in the last place apart: no bf16 value lies between.
    bits = torch.tensor(found).to(torch.bfloat16).view(torch.int16).int()
    assert (bits[1] - bits[0]).abs().item() == 1
    share = (exact - low) / (high - low)
    deviation = (high - low) * math.sqrt(share * (1 - share) / count)
    assert abs(rounded.double().mean().item() - exact) < 5 * deviation


def test_what_bf16_holds_and_what_is_no_number_stay() -> None:
    exact = torch.randn(1000, generator=generator()).to(torch.bfloat16)
    assert torch.equal(round_stochastically(exact.float(), generator(1)), exact)
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    rounded = round_stochastically(special, generator(2))
    assert torch.equal(rounded.float(), special)
    assert torch.equal(rounded.signbit(), special.signbit())
    for bits in (0x7FC00000, 0x7FFFFFFF):  # a draw on the second one would carry into the sign
        nan = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
        assert round_stochastically(nan, generator(3)).isnan().all()


def test_draws_are_keyed_by_seed_and_step() -> None:
    value = torch.full((4000,), 1.003)

    def rounded(seed: int, step: int) -> Tensor:
        return round_stochastically(value, rounding_generator(seed, step, CPU))

    assert torch.equal(rounded(1, 5), rounded(1, 5))
    assert rounded(-1, 5).shape == value.shape
    for seed, step in [(1, 6), (2, 5), (5, 1), (2**32 + 1, 5)]:
        agreement = (rounded(1, 5) == rounded(seed, step)).double().mean().item()
        # The two neighbours have shares 0.616 and 0.384: independent draws agree with probability 0.527.
        assert agreement == pytest.approx(0.527, abs=0.05)


def test_a_layout_other_than_contiguous_is_rounded_in_place() -> None:
    values_ = torch.randn(4, 5, generator=generator()).T
    rounded = round_stochastically(values_, generator())
    assert (rounded.float() - values_).abs().max() < 0.02
    assert rounded.shape == values_.shape


def test_tiny_updates_move_bf16_weights_on_average_where_plain_adamw_stands_still() -> None:
    """Steps of 1e-4 at 1.0, where neighbours are 0.0039 or 0.0078 apart: 100 of them must add up to 0.01."""
    ends = {}
    for rounding in (False, True):
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        options = config("adamw", weight_decay=0.0, stochastic_rounding=rounding)
        optimizer = make_optimizer(options, [("denoiser.w", weight)], learning_rate=1e-4, fused=True, seed=3)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends[rounding] = weight.detach().double().mean().item()
        # Every step draws anew: a share of 1 - (1 - 1e-4 / 0.0039)^100 = 0.92 has moved at least once.
        assert (weight.detach() != 1).double().mean().item() == pytest.approx(0.92 * rounding, abs=0.03)
    assert ends[False] == 1.0
    # Deviation of one weight: below √(100 · 1e-4 · 0.0039) = 0.0062, of the mean of 4096: 1e-4.
    assert ends[True] == pytest.approx(0.99, abs=5e-4)


def test_arithmetic_and_averages_are_fp32() -> None:
    """The weights land on one of the two bf16 neighbours of what an fp32 AdamW computes from the same numbers."""
    weight = nn.Parameter(torch.randn(512, generator=generator()).to(torch.bfloat16))
    start = weight.detach().float()
    optimizer: Any = build("adamw", [("denoiser.w", weight)], stochastic_rounding=True, weight_decay=0.1)
    gradient = torch.randn(512, generator=generator(1)).to(torch.bfloat16)
    weight.grad = gradient.clone()
    optimizer.step()
    wanted = start.double() - 0.01 * (gradient.double() / (gradient.double().abs() + 1e-8) + 0.1 * start.double())
    spacing = 2.0 ** (torch.floor(torch.log2(wanted.abs())) - 7)
    assert ((weight.detach().double() - wanted).abs() < spacing * 1.001).all()
    assert {value.dtype for value in optimizer.state[weight].values()} == {torch.float32}


def test_fp32_weights_beside_bf16_ones_are_updated_as_by_adamw() -> None:
    mixed, plain = toy(), toy()
    mixed[1][1].data = mixed[1][1].data.to(torch.bfloat16)
    first, second = build("adamw", mixed, stochastic_rounding=True), build("adamw", plain)
    train(first, mixed, 0, 3)
    train(second, plain, 0, 3)
    equal = [torch.equal(a, b) for a, b in zip(values(mixed), values(plain), strict=True)]
    assert equal == [True, False, *[True] * 6]


def test_a_restored_state_continues_exactly_with_fp32_averages() -> None:
    straight, resumed = toy(torch.bfloat16), toy(torch.bfloat16)
    optimizer = build("adamw", straight, stochastic_rounding=True)
    train(optimizer, straight, 0, 3)
    for (_, parameter), value in zip(resumed, values(straight), strict=True):
        parameter.data.copy_(value)
    second = build("adamw", resumed, stochastic_rounding=True)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, straight, 3, 6)
    train(second, resumed, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(values(straight), values(resumed), strict=True))
    assert second.state[resumed[0][1]]["exp_avg_sq"].dtype == torch.float32


def test_a_marked_step_is_skipped_and_draws_nothing() -> None:
    skipped, plain = toy(torch.bfloat16), toy(torch.bfloat16)
    first = build("adamw", skipped, stochastic_rounding=True)
    second = build("adamw", plain, stochastic_rounding=True)
    set_gradients(skipped, 9)
    first.found_inf = torch.ones(())
    first.step()
    train(first, skipped, 0, 2)
    train(second, plain, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(values(skipped), values(plain), strict=True))


def test_chunks_change_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = toy(torch.bfloat16), toy(torch.bfloat16)
    train(build("adamw", whole, stochastic_rounding=True), whole, 0, 2)
    monkeypatch.setattr("sd_training.optim.optimizers._MAX_COPIED_ELEMENTS", 100)
    train(build("adamw", cut, stochastic_rounding=True), cut, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(cut), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_it_cannot_round_are_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.stochastic_rounding: is true, but .* are float"):
        build("adamw", toy(dtype), stochastic_rounding=True)
