"""The trained module of a run, with what the callbacks and the data need to know of its model family."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sd_training.build.plan import Plan
from sd_training.data.sizes import training_sizes
from sd_training.diffusion.noise_schedule import noise_schedule_of
from sd_training.diffusion.objective import Objective
from sd_training.errors import ConfigError
from sd_training.models.frozen import FrozenEncoders
from sd_training.models.load import load_network
from sd_training.models.stable_diffusion import (
    StableDiffusionParts,
    check_sizes,
    latent_grid,
    load_stable_diffusion,
    use_fast_attention,
)
from sd_training.optim.lr_schedules import lr_schedule
from sd_training.training.autoencoder_module import AutoencoderModule
from sd_training.training.base_module import Optimization, TrainedModule
from sd_training.training.diffusion_module import DiffusionModule
from sd_training.types import LatentGrid


@dataclass(frozen=True)
class Trained:
    """A module ready to train."""

    module: TrainedModule
    latent_grid: LatentGrid
    parts: StableDiffusionParts | None
    """Null for autoencoder training."""
    exported: Callable[[], Any]
    """What a save exports; collective."""


def build_model(plan: Plan) -> Trained:
    """The module that `model.train` asks for.

    Raises:
        ConfigError: a part cannot be loaded, or parts do not fit together or to the resolution.
    """
    return _autoencoder(plan) if plan.config.model.train == "vae" else _diffusion(plan)


def _optimization(plan: Plan) -> Optimization:
    config = plan.config
    peak = config.lr_scheduler.params.learning_rate
    schedule = lr_schedule(
        config.lr_scheduler.scheduler,
        warmup_steps=config.lr_scheduler.params.warmup_length,
        num_steps=plan.batch.num_steps,
    )
    return Optimization(config.optimizer, config.optimizer.params.learning_rate if peak is None else peak, schedule)


def _diffusion(plan: Plan) -> Trained:
    """Denoiser training on frozen encoders."""
    config, model = plan.config, plan.config.model
    parts = load_stable_diffusion(model, config.objective, seed=config.experiment.seed)
    problems = check_sizes(parts.vae, training_sizes(config.dataset.params).sizes)
    if problems:
        raise ConfigError(problems)
    if model.gradient_checkpointing:
        parts.unet.enable_gradient_checkpointing()
    if model.xformers:
        use_fast_attention(parts.unet, torch.device(plan.launch.accelerator))
    objective = Objective.make(
        noise_schedule_of(parts.schedule_config), parts.schedule_config["prediction_type"], config.objective.snr_gamma
    )
    vae_precision = model.vae_precision or ("bf16" if plan.precision == "bf16" else "fp32")
    encoders = FrozenEncoders(
        parts.vae, parts.text_encoder, vae_precision, model.text_encoder_precision or plan.precision
    )
    module = DiffusionModule(
        parts.unet, encoders, objective, _optimization(plan), has_gradient_scaler=plan.precision == "fp16"
    )
    return Trained(module, parts.latent_grid(), parts, parts.pipeline)


def _autoencoder(plan: Plan) -> Trained:
    """Autoencoder training; the exported config carries the measured scaling factor."""
    config = plan.config
    vae = load_network(config.model, "vae", seed=config.experiment.seed)
    problems = check_sizes(vae, training_sizes(config.dataset.params).sizes)
    if problems:
        raise ConfigError(problems)
    if config.model.gradient_checkpointing:
        vae.enable_gradient_checkpointing()
    module = AutoencoderModule(
        vae, config.objective.kl_weight, _optimization(plan), has_gradient_scaler=plan.precision == "fp16"
    )

    def exported() -> Any:
        vae.register_to_config(scaling_factor=module.scaling_factor())
        return vae

    return Trained(module, latent_grid(vae), None, exported)
