"""Eight points on a circle, one small network, every prediction type: trained by the objective, drawn by the sampler
that would be exported, each must find all eight points, under the same budget."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from sd_training.build.models import objective_of
from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.diffusion import Objective
from sd_training.models.schedulers import Schedulers, load_schedulers

STEPS, BATCH, DRAWN, INFERENCE_STEPS = 1200, 512, 2000, 50
SPREAD = 0.15
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
OBJECTIVES = {
    "epsilon": ObjectiveConfig(preset="sd"),
    "v": ObjectiveConfig(prediction_type="v_prediction"),
    "v, zero SNR": ObjectiveConfig(preset="sd_v"),
    "sample": ObjectiveConfig(prediction_type="sample"),
    "flow": ObjectiveConfig(preset="sd3"),
    "edm": ObjectiveConfig(preset="edm"),
}


def circle(count: int, generator: torch.Generator) -> Tensor:
    """[count, 2, 1, 1] of unit variance in each coordinate."""
    angle = torch.randint(0, 8, (count,), generator=generator) * (math.pi / 4)
    points = math.sqrt(2) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return (points + SPREAD * torch.randn(count, 2, generator=generator))[..., None, None]


class Network(nn.Module):
    """Points and level → answer."""

    def __init__(self, time_scale: float) -> None:
        super().__init__()
        self.time_scale = time_scale
        self.register_buffer("frequencies", 2.0 ** torch.arange(6))
        self.layers = nn.Sequential(
            nn.Linear(2 + 12 + 12, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(),
            nn.Linear(128, 2),
        )  # fmt: skip

    def forward(self, noised: Tensor, time: Tensor) -> Tensor:
        angles = (time.float() / self.time_scale)[:, None] * self.frequencies
        points = noised.flatten(1)
        waves = (points[:, :, None] * self.frequencies[:3]).flatten(1)
        features = [points, waves.sin(), waves.cos(), angles.sin(), angles.cos()]
        return self.layers(torch.cat(features, dim=1))[..., None, None]


def schedulers_of(options: ObjectiveConfig) -> Schedulers:
    training = PartConfig(target="DDPMScheduler", params=NOISE)
    return load_schedulers(ModelConfig(noise_scheduler_training=training), options, has_unet=True)


def train(objective: Objective, network: Network) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, fused=True)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / STEPS)
        points = circle(BATCH, generator)
        strata = torch.rand(BATCH, generator=generator)
        draws = SimpleNamespace(noise=torch.randn(points.shape, generator=generator), timestep_draw=strata)
        batch = objective.draw(points, draws)  # type: ignore[arg-type]
        loss = objective.loss(network(batch.noised_latents, batch.timesteps), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def draw(sampler: object, network: Network) -> Tensor:
    """As StableDiffusionPipeline does."""
    generator = torch.Generator().manual_seed(2)
    sampler.set_timesteps(INFERENCE_STEPS)  # type: ignore[attr-defined]
    points = torch.randn(DRAWN, 2, 1, 1, generator=generator) * sampler.init_noise_sigma  # type: ignore[attr-defined]
    for time in sampler.timesteps:  # type: ignore[attr-defined]
        seen = sampler.scale_model_input(points, time)  # type: ignore[attr-defined]
        points = sampler.step(network(seen, time.expand(DRAWN)), time, points).prev_sample  # type: ignore[attr-defined]
    return points.flatten(1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_prediction_type_finds_all_points(name: str) -> None:
    torch.manual_seed(0)
    schedulers = schedulers_of(OBJECTIVES[name])
    family = SimpleNamespace(schedulers=schedulers, patch_size=1)
    objective = objective_of(family)  # type: ignore[arg-type]
    network = Network(time_scale=1.0 if name == "edm" else 1000.0)
    train(objective, network)
    points = draw(schedulers.sampler, network)
    angle = torch.atan2(points[:, 1], points[:, 0]) / (math.pi / 4)
    nearest = angle.round()
    at = math.sqrt(2) * torch.stack([(nearest * math.pi / 4).cos(), (nearest * math.pi / 4).sin()], dim=1)
    distance = (points - at).norm(dim=1)
    share = float((distance < 0.5).float().mean())
    counts = torch.bincount(nearest.long() % 8, minlength=8) / DRAWN
    print(f"{name}: {share:.1%} nearer than half way to the next point; rarest point {counts.min():.1%}, of 12.5 %")
    assert share > 0.93
    assert counts.min() > 0.08 and counts.max() < 0.17
