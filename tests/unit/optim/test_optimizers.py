"""Each optimizer against its paper's formulas, written here in float64 and plain tensor arithmetic."""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

from sd_training.errors import ConfigError
from sd_training.optim import (
    is_hidden_matrix,
    parameter_groups,
    round_stochastically,
    rounding_generator,
)
from tests.unit.optim.toy import Toy, build, config, make, named, set_gradients, toy, train, values

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
    optimizer = make(config(name, **options), named, learning_rate=1.0, fused=True)
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
    optimizer = make(config("prodigy", weight_decay=0.0), [("denoiser.x", x)], learning_rate=1.0, fused=True)
    for _ in range(300):
        x.grad = 2 * (x.detach() - 3)
        optimizer.step()
    assert 0.1 < optimizer.param_groups[0]["d"] < 3
    assert x.item() == pytest.approx(3, abs=0.05)


def test_fused_adamw_is_torchs_own_class() -> None:
    """The class is looked at elsewhere: it tells that a gradient scaler may stay on the device."""
    optimizer = make(config("adamw"), toy(), learning_rate=0.1, fused=True)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["fused"]
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["lion", "prodigy"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"lion": "lion_pytorch", "prodigy": "prodigyopt"}[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"optimizer\.name: {name} needs the package .*pip install"):
        make(config(name), toy(), learning_rate=0.1, fused=True)


def test_bitsandbytes_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs the package bitsandbytes"):
        make(config("adamw_8bit"), toy(), learning_rate=0.1, fused=True)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "prodigy", "muon"])
def test_a_peak_of_zero_is_allowed_and_trains_nothing(name: str) -> None:
    parameters = toy()
    optimizer = make(config(name), parameters, learning_rate=0.0, fused=True)
    before = [parameter.detach().clone() for _, parameter in parameters]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, w) for (_, p), w in zip(parameters, before, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: adamw_8bit needs a CUDA device"):
        build("adamw_8bit", toy())


def large() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [("denoiser.linear.weight", nn.Parameter(torch.randn(64, 128)))]


@pytest.mark.usefixtures("any_device")
def test_steps_are_near_those_of_fp32_and_state_is_a_quarter() -> None:
    eight, full, start = large(), large(), large()
    optimizer = build("adamw_8bit", eight)
    train(optimizer, eight, 0, 5)
    train(build("adamw", full), full, 0, 5)
    moved = (full[0][1] - start[0][1]).detach()
    error = (eight[0][1] - full[0][1]).detach()
    assert error.norm() < 0.1 * moved.norm()
    state = optimizer.state[eight[0][1]]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8


@pytest.mark.usefixtures("any_device")
def test_a_restored_8_bit_state_continues_exactly() -> None:
    straight, resumed = large(), large()
    optimizer = build("adamw_8bit", straight)
    train(optimizer, straight, 0, 3)
    resumed[0][1].data.copy_(straight[0][1].data)
    second = build("adamw_8bit", resumed)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, straight, 3, 6)
    train(second, resumed, 3, 6)
    assert torch.equal(values(straight)[0], values(resumed)[0])


RATE, MOMENTUM, MUON_DECAY = 0.1, 0.9, 0.05


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
    options = {"momentum": MOMENTUM, "weight_decay": MUON_DECAY}
    named = [("denoiser.middle.weight", weight)]
    return make(config("muon", **options), named, learning_rate=RATE, fused=True)


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
        expected = expected * (1 - RATE * MUON_DECAY) - RATE * 0.2 * math.sqrt(max(rows, columns)) * update
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


BLOCKS = {"norm_num_groups": 4, "block_out_channels": (8, 16)}


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **BLOCKS,
    )


def test_the_default_is_one_group_of_everything_in_order() -> None:
    parameters = toy()
    (group,) = parameter_groups(config("adamw"), parameters, 0.02)
    assert [id(p) for p in group["params"]] == [id(p) for _, p in parameters]
    assert (group["lr"], group["lr_factor"], group["weight_decay"], group["part"]) == (0.02, 1.0, 0.01, "denoiser")


def test_norms_and_biases_without_decay() -> None:
    parameters = toy()
    options = config("adamw", no_decay_on_norms_and_biases=True, weight_decay=0.3)
    names = {id(parameter): name for name, parameter in parameters}
    decays = {names[id(p)]: g["weight_decay"] for g in parameter_groups(options, parameters, 1.0) for p in g["params"]}
    weights = {f"denoiser.{layer}.weight" for layer in ("conv_in", "conv", "linear")}
    assert decays == {name: 0.3 if name in weights else 0.0 for name, _ in parameters}


def test_a_norms_weight_and_a_bias_are_found_in_a_real_network(unet: nn.Module) -> None:
    norms = tuple(f"{name}." for name, m in unet.named_modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm)))
    expected = {id(p) for n, p in unet.named_parameters() if n.endswith("bias") or n.startswith(norms)}
    options = config("adamw", no_decay_on_norms_and_biases=True)
    groups = parameter_groups(
        options, [*named(unet), ("denoiser.x.bias", (wide := nn.Parameter(torch.ones(4, 4))))], 1.0
    )
    assert {id(p) for group in groups if not group["weight_decay"] for p in group["params"]} == expected | {id(wide)}


def test_parts_have_their_own_rates() -> None:
    parameters = [*toy(), *named(Toy(), "text_encoder")]
    options = config("adamw", rates_by_part={"text_encoder": 1e-6})
    denoiser, encoder = parameter_groups(options, parameters, 1e-4)
    assert (denoiser["part"], denoiser["lr"], denoiser["lr_factor"]) == ("denoiser", 1e-4, 1.0)
    assert (encoder["part"], encoder["lr"]) == ("text_encoder", 1e-6)
    assert encoder["lr_factor"] == pytest.approx(0.01)
    assert len(denoiser["params"]) == len(encoder["params"]) == 8


def test_an_unknown_part_is_named() -> None:
    options = config("adamw", rates_by_part={"text_encoder": 1e-6, "denoiser": 1e-5})
    with pytest.raises(ConfigError, match=r"optimizer\.rates_by_part: text_encoder is not trained.*: denoiser"):
        parameter_groups(options, toy(), 1e-4)


def test_muons_matrices_of_a_unet_are_all_weights_between_the_ends(unet: nn.Module) -> None:
    weights = {n for n, m in unet.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    ends = {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}
    found = {n for n, p in named(unet) if is_hidden_matrix(n, p)}
    assert found == {f"denoiser.{n}.weight" for n in weights - ends}
    assert "denoiser.down_blocks.0.attentions.0.proj_in.weight" in found


def test_muons_matrices_of_an_autoencoder_and_a_transformer() -> None:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS
    )
    found = {n for n, p in named(vae) if is_hidden_matrix(n, p)}
    assert "denoiser.encoder.conv_in.weight" not in found
    assert "denoiser.decoder.conv_out.weight" not in found
    assert "denoiser.encoder.mid_block.attentions.0.to_q.weight" in found
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1, sample_size=8, num_embeds_ada_norm=10
    )
    found = {n for n, p in named(transformer) if is_hidden_matrix(n, p)}
    assert "denoiser.transformer_blocks.0.attn1.to_q.weight" in found
    assert not [n for n in found if "embed" in n or "proj_out" in n]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("denoiser.scale_shift_table", (6, 8)),
        ("text_encoder.text_model.embeddings.token_embedding.weight", (20, 8)),
        ("denoiser.proj_out.weight", (16, 8)),
        ("denoiser.blocks.0.depthwise.weight", (8, 1, 3, 3)),
        ("denoiser.blocks.0.norm.weight", (8,)),
    ],
)
def test_what_is_no_hidden_matrix(name: str, shape: tuple[int, ...]) -> None:
    assert not is_hidden_matrix(name, torch.zeros(shape))


def test_only_muon_asks_for_matrices() -> None:
    assert [g["is_matrix"] for g in parameter_groups(config("muon"), toy(), 1.0)] == [False, True]
    assert [g["is_matrix"] for g in parameter_groups(config("adamw"), toy(), 1.0)] == [False]


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
        optimizer = make(options, [("denoiser.w", weight)], learning_rate=1e-4, fused=True, seed=3)
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
    monkeypatch.setattr("sd_training.optim._COPIED_AT_ONCE", 1)
    train(build("adamw", cut, stochastic_rounding=True), cut, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(cut), strict=True))
