"""The objective against float64 references written here from the papers' formulas."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from sd_training.config.schema import ObjectiveConfig, with_preset
from sd_training.diffusion import Objective, discrete_schedule_of
from sd_training.errors import ConfigError

SD = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def reference_alpha_bar(name: str, start: float, end: float, count: int) -> np.ndarray:
    """ᾱ in float64."""
    if name == "linear":
        betas = np.linspace(start, end, count)
    elif name == "scaled_linear":
        betas = np.linspace(np.sqrt(start), np.sqrt(end), count) ** 2
    else:
        time = np.arange(count + 1) / count
        f = np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - f[1:] / f[:-1], 0.999)
    return np.cumprod(1 - betas)


@pytest.mark.parametrize("name", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("count", [10, 1000])
def test_alpha_bar_agrees_with_float64_and_with_diffusers(name: str, count: int) -> None:
    config = {**SD, "beta_schedule": name, "num_train_timesteps": count}
    ours = discrete_schedule_of(config).alphas_cumprod
    np.testing.assert_allclose(ours.double(), reference_alpha_bar(name, 0.00085, 0.012, count), rtol=1e-6, atol=1e-8)
    theirs = DDPMScheduler(**config).alphas_cumprod
    # Theirs are float32 all the way; ours are float64 until the end.
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-6)


def test_trained_betas_win() -> None:
    schedule = discrete_schedule_of({**SD, "trained_betas": [0.1, 0.2]})
    torch.testing.assert_close(schedule.alphas_cumprod, torch.tensor([0.9, 0.72]))


def test_unknown_beta_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="'sigmoid' is not one of"):
        discrete_schedule_of({**SD, "beta_schedule": "sigmoid"})


def test_zero_terminal_snr_keeps_the_first_step_and_ends_in_pure_noise() -> None:
    plain = np.sqrt(reference_alpha_bar("scaled_linear", 0.00085, 0.012, 1000))
    rescaled = (plain - plain[-1]) * plain[0] / (plain[0] - plain[-1])
    schedule = discrete_schedule_of({**SD, "rescale_betas_zero_snr": True})
    np.testing.assert_allclose(schedule.alphas_cumprod.double().sqrt(), rescaled, rtol=1e-5, atol=1e-7)
    assert schedule.alphas_cumprod[-1] == 0.0
    assert schedule.alphas_cumprod[0] == pytest.approx(plain[0] ** 2, rel=1e-6)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("gamma", [None, 1.0, 5.0])
def test_loss_agrees_with_float64(prediction_type: str, zero_snr: bool, gamma: float | None) -> None:
    config = {**SD, "rescale_betas_zero_snr": zero_snr}
    options = with_preset(ObjectiveConfig(snr_gamma=gamma, prediction_type=prediction_type))  # type: ignore[arg-type]
    objective = Objective(options, discrete_schedule_of(config))
    rng = np.random.default_rng(0)
    x0, noise, answer = (rng.standard_normal((6, 2, 3, 3)) for _ in range(3))
    draw = np.array([0.0, 0.1, 0.5, 0.9, 0.9985, 0.9995])

    alpha_bar = reference_alpha_bar("scaled_linear", 0.00085, 0.012, 1000)
    if zero_snr:
        root = np.sqrt(alpha_bar)
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    timesteps = np.floor(draw * 1000).astype(int)
    ab = alpha_bar[timesteps]
    signal, level = np.sqrt(ab)[:, None, None, None], np.sqrt(1 - ab)[:, None, None, None]
    target = noise if prediction_type == "epsilon" else signal * noise - level * x0
    snr = ab / (1 - ab)
    with np.errstate(divide="ignore", invalid="ignore"):
        x0_weight = np.minimum(snr, gamma) if gamma else None
        if x0_weight is None:
            weight = np.ones(6)
        elif prediction_type == "epsilon":
            weight = np.where(snr == 0, 1.0, x0_weight / snr)
        else:
            weight = x0_weight / (snr + 1)
    expected = weight * ((answer - target) ** 2).mean(axis=(1, 2, 3))

    tensors = [torch.tensor(a, dtype=torch.float32) for a in (x0, noise, draw)]
    draws = SimpleNamespace(noise=tensors[1], timestep_draw=tensors[2])
    batch = objective.draw(tensors[0], draws)  # type: ignore[arg-type]
    assert batch.timesteps.tolist() == timesteps.tolist()
    np.testing.assert_allclose(batch.noised_latents, signal * x0 + level * noise, rtol=1e-4, atol=1e-5)
    loss = objective.loss(torch.tensor(answer, dtype=torch.float32), batch)
    np.testing.assert_allclose(loss, expected, rtol=2e-4, atol=1e-6)


def test_a_masked_loss_counts_what_the_mask_shows() -> None:
    objective = Objective(ObjectiveConfig(masked_loss="alpha"), discrete_schedule_of(SD))
    latents, noise = torch.randn(2, 4, 3, 2), torch.randn(2, 4, 3, 2)
    mask = torch.zeros(2, 1, 6, 4, dtype=torch.uint8)
    mask[0, 0, :2] = 255  # the first row of cells
    mask[1, 0, 0, 0] = 255  # a quarter of the first cell
    draws = SimpleNamespace(noise=noise, timestep_draw=torch.tensor([0.2, 0.7]), mask=mask)
    batch = objective.draw(latents, draws)  # type: ignore[arg-type]
    answer = torch.randn(2, 4, 3, 2)
    error = (answer - noise).square()
    expected = torch.stack([error[0, :, 0].sum(), error[1, :, 0, 0].sum() / 4]) / (4 * 3 * 2)
    torch.testing.assert_close(objective.loss(answer, batch), expected)
