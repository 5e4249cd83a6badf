"""Histograms of the noise levels that are trained against analytic distribution functions."""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sd_training.config.data_schema import DatasetParams
from sd_training.config.schema import ObjectiveConfig, ShiftConfig, TimestepDensityConfig
from sd_training.data.order.buckets import BucketTable
from sd_training.data.samples.sample import DrawSettings, TrainingSamples
from sd_training.types import LatentGrid
from tests.conformance import densities
from tests.conformance.cases import objective_for
from tests.conformance.densities import DENSITIES, Cdf
from tests.conformance.reference import Array, Setting

NUM_DRAWS = 200_000
FLOW = Setting(prediction="flow_prediction", schedule="flow")
_SIZE, _STEPS = 128, 160


def distance(samples: Array, cdf: Cdf) -> float:
    """Kolmogorov-Smirnov distance of samples from a distribution function."""
    ordered = np.sort(samples.astype(np.float64))
    expected, count = cdf(ordered), len(ordered)
    above = np.arange(1, count + 1) / count - expected
    return float(max(above.max(), (expected - np.arange(count) / count).max()))


def _draws(stratified: bool = True) -> torch.Tensor:
    """Uniform float32 numbers in [0, 1), one in each of `NUM_DRAWS` equal parts, or independent."""
    inside = torch.rand(NUM_DRAWS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    draws = (torch.arange(NUM_DRAWS) + inside) / NUM_DRAWS if stratified else inside
    return draws.float().clamp(max=1 - 2.0**-24)


def _flow(density: dict[str, Any], **options: Any) -> ObjectiveConfig:
    return ObjectiveConfig(
        prediction_type="flow_prediction", timestep_density=TimestepDensityConfig(**density), **options
    )


def check_density(name: str) -> None:
    """One density of flow models, where time is σ itself."""
    options, cdf, bound = DENSITIES[name]
    objective = objective_for(FLOW, _flow(options))
    assert distance(objective.times(_draws(), 64).numpy(), cdf) < bound
    # Independent draws: the distance exceeds 1.95 / √N once in a thousand times; the seed is fixed.
    assert distance(objective.times(_draws(stratified=False), 64).numpy(), cdf) < 1.95 / NUM_DRAWS**0.5


def check_log_normal() -> None:
    """EDM: ln σ ~ N(P_mean, P_std²), and the preset's P_mean is -1.2 for latents of deviation ½, moved by ln 2σ_d."""
    for mean, std in ((-1.2, 1.2), (0.4, 0.7)):
        density = TimestepDensityConfig(name="log_normal", mean=mean, std=std)
        options = ObjectiveConfig(prediction_type="edm", timestep_density=density)
        objective = objective_for(Setting(prediction="edm", schedule="edm"), options)
        times = objective.times(_draws(), 64)
        assert distance(times.numpy(), partial(densities.log_normal, mean, std)) < 2e-5
        np.testing.assert_allclose(objective.schedule.levels(times).noise.log(), times, atol=2e-6)
    preset = objective_for(Setting(prediction="edm", schedule="edm"), ObjectiveConfig(preset="edm"))
    median = float(preset.schedule.levels(preset.times(torch.tensor([0.5]), 64)).noise)
    assert abs(np.log(median) - (-1.2 + np.log(2 * preset.sigma_data))) < 0.01


def check_static_shift() -> None:
    """σ' = aσ / (1 + (a - 1)σ), from the options and from the scheduler."""
    for density in ("uniform", "logit_normal"):
        given, cdf, _ = DENSITIES[density]
        options = _flow(given, shift=ShiftConfig(mode="static", value=3.0))
        times = objective_for(FLOW, options).times(_draws(), 64).numpy()
        assert distance(times, partial(densities.shifted, 3.0, cdf)) < 3e-5


def check_token_shift() -> None:
    """a = e^μ of the image tokens: FLUX' figures at 256 and 4096 tokens, patches of 2 × 2 latent cells."""
    options = _flow({"name": "logit_normal"}, shift=ShiftConfig(mode="tokens"))
    objective = objective_for(FLOW, options, patch_size=2)
    for height, width in ((32, 32), (64, 96), (128, 128)):
        factor = densities.token_shift(height * width // 4, 256, 4096, 0.5, 1.15)
        times = objective.times(_draws(), height * width).numpy()
        cdf = DENSITIES["logit_normal"][1]
        assert distance(times, partial(densities.shifted, factor, cdf)) < 3e-5
    assert np.isclose(densities.token_shift(256, 256, 4096, 0.5, 1.15), np.exp(0.5))


def check_timestep_histogram(density: str) -> None:
    """Discrete schedules: step t is trained as often as F((t + 1) / T) - F(t / T) says."""
    options, cdf, bound = DENSITIES[density]
    chosen = ObjectiveConfig(prediction_type="epsilon", timestep_density=TimestepDensityConfig(**options))  # type: ignore[arg-type]
    objective = objective_for(Setting(), chosen)
    timesteps = objective.schedule.levels(objective.times(_draws(), 64)).model_time
    counts = np.bincount(timesteps.numpy(), minlength=1000) / NUM_DRAWS
    np.testing.assert_allclose(counts, np.diff(cdf(np.arange(1001) / 1000)), atol=2 * bound)


def loader_draws(stratified: bool) -> NDArray[np.float32]:
    """[steps, G] draws as the loader makes them."""
    settings = DrawSettings(seed=3, grid=LatentGrid(4, 8), is_stratified=stratified)
    samples = TrainingSamples([], BucketTable(((8, 8),)), DatasetParams(path="none"), {}, settings, _SIZE)
    draws = [samples._timestep_draw(position) for position in range(_SIZE * _STEPS)]
    return np.array(draws, dtype=np.float32).reshape(_STEPS, _SIZE)


def check_stratified() -> None:
    """One draw from each of G parts at every step, and the same density as independent draws."""
    draws = loader_draws(stratified=True)
    assert draws.min() >= 0 and draws.max() < 1
    parts = np.sort(np.floor(draws.astype(np.float64) * _SIZE), axis=1)
    np.testing.assert_array_equal(parts, np.broadcast_to(np.arange(_SIZE), parts.shape))
    # Which slot gets which part is drawn anew at every step, or slot 0 would only ever train one level.
    slots = draws.mean(axis=0)
    assert slots.std() < 1.5 * (1 / 12 / _STEPS) ** 0.5
    options, cdf, _ = DENSITIES["logit_normal"]
    objective = objective_for(FLOW, _flow(options))
    flat = torch.from_numpy(draws.ravel())
    assert distance(objective.times(flat, 64).numpy(), cdf) < 0.25 * 1.95 / flat.numel() ** 0.5
    independent = torch.from_numpy(loader_draws(stratified=False).ravel())
    assert distance(objective.times(independent, 64).numpy(), cdf) < 1.95 / flat.numel() ** 0.5
