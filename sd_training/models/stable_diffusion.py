"""The Stable Diffusion 1.x / 2.x family: AutoencoderKL, one CLIP text encoder, a UNet2DConditionModel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, PreTrainedTokenizerBase

from sd_training.config.schema import ModelConfig, ObjectiveConfig
from sd_training.errors import ConfigError
from sd_training.models.load import effective_part, load_network, load_noise_scheduler, load_tokenizer
from sd_training.rank_log import get_logger
from sd_training.types import LatentGrid

log = get_logger(__name__)

# What sampling must share with training; everything else (spacing, order, thresholds) is the sampler's own.
_TRAINING_KEYS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)


@dataclass
class StableDiffusionParts:
    """Everything a Stable Diffusion pipeline is made of."""

    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    tokenizer: PreTrainedTokenizerBase
    unet: UNet2DConditionModel
    schedule_config: dict[str, Any]
    """The diffusers scheduler config of the training objective."""
    sampler: Any
    """The diffusers scheduler of previews and of the exported pipeline."""

    def pipeline(self) -> StableDiffusionPipeline:
        """The parts as a pipeline; the very same modules, not copies."""
        return StableDiffusionPipeline(
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            scheduler=self.sampler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )

    def latent_grid(self) -> LatentGrid:
        """How the autoencoder maps pictures to latents."""
        return latent_grid(self.vae)


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels per latent cell along one side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_grid(vae: AutoencoderKL) -> LatentGrid:
    """Latent channels and downscale factor."""
    return LatentGrid(int(vae.config.latent_channels), downscale_factor(vae))


def check_sizes(vae: AutoencoderKL, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """A problem for each height or width [pixels] that is not a multiple of the autoencoder's downscale factor.

    The UNet needs no more: diffusers hands its upsamplers the size to reach when a level does not halve evenly.
    """
    factor = downscale_factor(vae)
    option = "dataset.params.resolution" if len(sizes) == 1 else "dataset.params.buckets"
    problems = []
    for side in sorted({side for size in sizes for side in size if side % factor}):
        below, above = side // factor * factor, (side // factor + 1) * factor
        near = f"{below} or {above}" if below else f"{above}"
        problems.append(
            f"{option}: {side} is not a multiple of the autoencoder's downscale factor {factor}; use {near}"
        )
    return problems


def check_fit(parts: StableDiffusionParts) -> list[str]:
    """Problems of parts that do not fit together: latent channels, text width, vocabulary."""
    unet, latent_channels = parts.unet.config, parts.vae.config.latent_channels
    width = parts.text_encoder.config.hidden_size
    problems = []
    for key in ("in_channels", "out_channels"):
        if unet[key] != latent_channels:
            problems.append(
                f"model.unet.params.{key}: {unet[key]}, but the autoencoder has {latent_channels} latent channels"
            )
    if unet.cross_attention_dim != width:
        problems.append(
            f"model.unet.params.cross_attention_dim: {unet.cross_attention_dim}, but the text encoder is {width} wide"
        )
    if len(parts.tokenizer) > parts.text_encoder.config.vocab_size:
        problems.append(
            f"model.tokenizer: {len(parts.tokenizer)} tokens, but the text encoder knows "
            f"{parts.text_encoder.config.vocab_size}"
        )
    return problems


def _schedule_config(model: ModelConfig, objective: ObjectiveConfig) -> dict[str, Any]:
    """The training noise scheduler's config with the objective's settings on top."""
    config = dict(load_noise_scheduler(model, "noise_scheduler_training").config)
    config.setdefault("prediction_type", "epsilon")
    if objective.prediction_type is not None:
        config["prediction_type"] = objective.prediction_type
    if objective.rescale_betas_zero_snr is not None:
        config["rescale_betas_zero_snr"] = objective.rescale_betas_zero_snr
    if config["prediction_type"] not in ("epsilon", "v_prediction"):
        raise ConfigError(
            f"objective.prediction_type: the training noise scheduler says {config['prediction_type']!r}; "
            "use epsilon or v_prediction"
        )
    if config.get("rescale_betas_zero_snr") and config["prediction_type"] == "epsilon":
        raise ConfigError(
            "objective.rescale_betas_zero_snr: true needs prediction_type v_prediction, because at zero SNR the noise "
            "says nothing about the picture"
        )
    return config


def _sampler(model: ModelConfig, schedule_config: dict[str, Any]) -> Any:
    """The inference scheduler with the training objective written into it (design contract 7)."""
    part = "noise_scheduler_inference"
    chosen = effective_part(model, part)
    if chosen.pretrained is None and chosen.target is None and not chosen.params:
        part = "noise_scheduler_training"
    sampler = load_noise_scheduler(model, part)
    agreed = {key: schedule_config[key] for key in _TRAINING_KEYS if key in schedule_config}
    if schedule_config.get("rescale_betas_zero_snr"):
        if "rescale_betas_zero_snr" not in sampler.config:
            raise ConfigError(
                f"model.noise_scheduler_inference: {type(sampler).__name__} cannot sample a zero-terminal-SNR model; "
                "use DDIMScheduler or EulerDiscreteScheduler"
            )
        # Only trailing spacing starts at the true last step (Lin et al. 2023, section 3.3).
        agreed["timestep_spacing"] = "trailing"
    known = {key: value for key, value in agreed.items() if key in sampler.config}
    return type(sampler).from_config(sampler.config, **known)


def load_stable_diffusion(
    model: ModelConfig, objective: ObjectiveConfig, *, seed: int, meta: bool = False
) -> StableDiffusionParts:
    """All parts, loaded or made, checked to fit together.

    Raises:
        ConfigError: naming every option that is wrong.
    """
    schedule_config = _schedule_config(model, objective)
    parts = StableDiffusionParts(
        vae=load_network(model, "vae", seed=seed, meta=meta),
        text_encoder=load_network(model, "text_encoder", seed=seed, meta=meta),
        tokenizer=load_tokenizer(model),
        unet=load_network(model, "unet", seed=seed, meta=meta),
        schedule_config=schedule_config,
        sampler=_sampler(model, schedule_config),
    )
    problems = check_fit(parts)
    if problems:
        raise ConfigError(problems)
    return parts


def use_fast_attention(unet: UNet2DConditionModel, device: torch.device) -> None:
    """xformers attention where it works, PyTorch's fused attention elsewhere; says which in one line."""
    if device.type != "cuda":
        log.info("model.xformers: no CUDA device here, so PyTorch's fused attention is used instead")
        return
    try:
        unet.enable_xformers_memory_efficient_attention()
    except (ImportError, ValueError, NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.info(
            f"model.xformers: xformers does not work here ({reason}), so PyTorch's fused attention is used instead"
        )
    else:
        log.info("model.xformers: xformers memory-efficient attention is used")
