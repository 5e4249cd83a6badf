"""The trained module of a run, with what the callbacks and the data need to know of its model family."""

import errno
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_training.build.plan import Plan
from sd_training.config.schema import Config, ModelConfig
from sd_training.config.value_types import output_path
from sd_training.data.order.buckets import size_problems, training_sizes
from sd_training.data.samples.cache import LatentCache
from sd_training.diffusion import Objective
from sd_training.errors import ConfigError
from sd_training.export.pipeline import LoraExport, modelspec
from sd_training.log import get_logger, is_main_process
from sd_training.models.attention import choose_attention, set_attention, use_fast_attention, xformers_problems
from sd_training.models.execution import (
    autocast_copy,
    compile_blocks,
    keep_compiled_code,
    narrow_norms,
    recompute_activations,
    require_compiler,
    require_float8,
    use_float8,
    wants_channels_last,
)
from sd_training.models.families import load_family
from sd_training.models.family import AUTOCAST_DTYPE, TEXT_PARTS, Family, latent_grid
from sd_training.models.load import effective_part, load_part
from sd_training.models.lora import attach_adapters, file_tensors, merge, narrow_base, round_base, scale_of
from sd_training.models.reconstruction import PatchDiscriminator, load_perceptual, smallest_side
from sd_training.models.schedulers import prediction_warning
from sd_training.optim import Optimization, lr_schedule
from sd_training.parallel.strategies import ShardingSpec
from sd_training.training import PART, AutoencoderModule, DiffusionModule, TrainedModule
from sd_training.types import LatentGrid

log = get_logger(__name__)


@dataclass(frozen=True)
class Trained:
    """A module ready to train."""

    module: TrainedModule
    latent_grid: LatentGrid
    family: Family | None
    """As it trains and draws; null for autoencoder training."""
    exported: Callable[[Mapping[str, Tensor] | None], Any]
    """What a save exports: around a copy of the network with these full weights by name, or around the live one.
    Collective: an autoencoder's scale is measured on all ranks."""
    sharding: ShardingSpec
    """What of it strategies may shard."""


def build_model(plan: Plan) -> Trained:
    """The module that `model.train` asks for.

    Raises:
        ConfigError: a part cannot be loaded, parts do not fit together or to the resolution, or there is no compiler
            for `trainer.compile`.
    """
    return _autoencoder(plan) if plan.config.model.train == "vae" else _diffusion(plan)


def _diffusion(plan: Plan) -> Trained:
    """Denoiser training on frozen encoders."""
    config, model = plan.config, plan.config.model
    family = load_family(model, config.objective, config.conditioning, seed=config.experiment.seed)
    if problems := fit_problems(config, family, latent_grid(family.vae)):
        raise ConfigError(problems)
    for warning in prediction_warnings(model, family):
        log.warning(warning)
    if model.lora.rank:
        attach_adapters(family, model.lora, seed=config.experiment.seed)
        if model.lora.base == "int8":
            round_base(family.blocks())
        for network in family.trained_networks(model.trains_text).values():
            narrow_base(network, AUTOCAST_DTYPE[plan.precision])
    blocks, accelerator = family.blocks(), plan.launch.accelerator
    family.set_default_size(config.dataset.params.resolution)
    if model.bf16_weights:
        for network in family.trained_networks(model.trains_text).values():
            for parameter in network.parameters():  # tables of positions are buffers, and stay fp32
                parameter.data = parameter.data.to(torch.bfloat16)
    sizes, device = training_sizes(config.dataset.params).sizes, torch.device(accelerator)  # of a GPU the current one
    if not (model.xformers and model.attention == "auto" and use_fast_attention(family.denoiser, device)):
        choose_attention(family, model.attention, sizes, plan.precision, device)
    if model.bf16_norms:
        narrow_norms(family.denoiser)
    if model.float8 is not None:
        require_float8(accelerator)
        log.info(f"model.float8: {use_float8(blocks, model.float8)}")
    # Memory format, recomputation, copies and compilation, before anything wraps or shards the networks.
    # Transformers have few convolutions; FSDP2 and DeepSpeed take contiguous weights only.
    is_contiguous = family.denoiser_part != "unet" or plan.layout.strategy not in ("single", "ddp")
    if wants_channels_last(config.trainer.channels_last, accelerator) and not is_contiguous:
        family.denoiser.to(memory_format=torch.channels_last)
    if model.gradient_checkpointing:
        recompute_activations(blocks)
    family, originals = with_frozen_ready(family, plan)
    if config.trainer.compile != "off":
        compile_networks(plan, family)
    module = DiffusionModule(
        family,
        objective_of(family),
        optimization(plan),
        vae_precision=vae_precision(model, plan.precision),
        text_precision=text_precision(model, plan.precision),
        is_text_trained=model.trains_text,
        vae_batch=model.vae_batch,
        idle=idle_parts(config),
        prior_weight=None if config.dataset.prior.path is None else config.dataset.prior.weight,
        lora=model.lora,
    )

    def exported(weights: Mapping[str, Tensor] | None) -> Any:
        whole = family.with_parts(originals)
        if model.lora.rank and weights is not None:
            return _lora_export(plan, whole, module, weights)
        return whole.pipeline() if weights is None else _with_weights(whole, module, weights).pipeline()

    roots = list(family.trained_networks(model.trains_text).values())
    sharding = ShardingSpec(roots, blocks, family.tensor_plan)
    return Trained(module, latent_grid(family.vae), family, exported, sharding)


def compile_networks(plan: Plan, family: Family, *, has_denoiser: bool = True) -> None:
    """The denoiser or its blocks, and the autoencoder's encoder: not of tiles, which have too many shapes, and not of
    slices, because a CUDA graph overwrites what it gave for the slice before."""
    trainer, accelerator = plan.config.trainer, plan.launch.accelerator
    num_sizes = len(training_sizes(plan.config.dataset.params).sizes)
    require_compiler(accelerator, trainer.compile_mode)
    # By machine: code is made for its processor, and on a shared file system machines would wait for locks.
    keep_compiled_code(plan.run_dir / "compiled" / platform.node())
    networks: list[nn.Module] = []
    if has_denoiser:
        networks += [family.denoiser] if trainer.compile == "full" else family.blocks()
    networks += [] if plan.config.model.vae_tiling or plan.config.model.vae_slicing else [family.vae.encoder]
    mode: str = trainer.compile_mode
    if mode == "max-autotune" and (plan.batch.accumulation > 1 or plan.layout.strategy not in ("single", "ddp")):
        mode = "max-autotune-no-cudagraphs"  # as reduce-overhead, which is refused there (config/check.py)
    compile_blocks(networks, num_sizes=num_sizes, mode=mode, budget=trainer.activation_budget)


def optimization(plan: Plan) -> Optimization:
    """Optimizer, peak learning rate and schedule of a run."""
    config, peak = plan.config, plan.config.lr_scheduler.params.learning_rate
    peak = config.optimizer.params.learning_rate if peak is None else peak
    factors = {"none": 1, "linear": plan.batch.global_batch, "sqrt": plan.batch.global_batch**0.5}
    factor = factors[config.optimizer.scale_lr]
    rates = {part: rate * factor for part, rate in config.optimizer.rates_by_part.items()}
    schedule = lr_schedule(config.lr_scheduler, num_steps=plan.batch.num_steps, global_batch=plan.batch.global_batch)
    return Optimization(
        config.optimizer.replace(rates_by_part=rates),
        peak * factor,
        schedule,
        seed=config.experiment.seed,
        is_offloaded=config.distributed.offload_optimizer,
        has_gradient_scaler=plan.precision == "fp16",
    )


def prediction_warnings(model: ModelConfig, family: Family) -> list[str]:
    """Where the pretrained weights predict something else than the run trains."""
    warning = prediction_warning(model, family.denoiser_part, family.schedulers.objective.prediction_type)
    return [warning] if warning else []


def fit_problems(config: Config, family: Family | None, grid: LatentGrid) -> list[str]:
    """What this model cannot do: sizes, xformers, float8, more preview steps than its noise schedule has; and whether
    the perceptual network is missing.

    Args:
        family: None for autoencoder training.
        grid: latents of the autoencoder.
    """
    sizes = training_sizes(config.dataset.params).sizes
    if family is None:
        adversarial, side = config.objective.adversarial, min(map(min, sizes))
        problems, features = size_problems(grid.downscale, sizes), config.objective.reconstruction.perceptual_path
        if features is not None and not Path(features).is_dir():
            remedy = "docs/autoencoder.md says how to make it"
            problems.append(f"objective.reconstruction.perceptual_path: {features!r} is no local folder; {remedy}")
        if adversarial.weight and side < (least := smallest_side(adversarial)):
            too_deep = f"{adversarial.layers} need pictures of at least {least} pixels, but a side is {side}"
            problems.append(f"objective.adversarial.layers: {too_deep}; use fewer layers")
        return problems
    problems = family.size_problems(sizes)
    if config.model.attention == "xformers":
        problems += xformers_problems(family.denoiser, "model.attention: xformers")
    elif config.model.xformers:
        problems += xformers_problems(family.denoiser)
    if config.model.float8 is not None and family.denoiser_part == "unet":
        problems.append(f"model.float8: is for the blocks of a transformer, and {family.name} has a UNet; remove it")
    if config.trainer.compile != "off" and not family.has_fixed_text:
        lengths = f"{family.name} gives the denoiser every caption at its own length, each of which would be compiled"
        problems.append(f"trainer.compile: {config.trainer.compile}, but {lengths}; use off")
    wanted, most = config.sampling.num_inference_steps, family.schedulers.objective.schedule.num_timesteps
    if wanted > most:
        problems.append(f"sampling.num_inference_steps: {wanted}, but the noise schedule has {most} steps")
    return problems


def vae_precision(model: ModelConfig, precision: str) -> str:
    """Autocast type of the frozen autoencoder in a run of this precision: some overflow in fp16."""
    return model.vae_precision or ("bf16" if precision == "bf16" else "fp32")


def text_precision(model: ModelConfig, precision: str) -> str:
    """Autocast type of the text encoders in a run of this precision."""
    return model.text_encoder_precision or precision


def autocast_parts(model: ModelConfig, precision: str, family: Family) -> list[str]:
    """Frozen networks that run under the autocast of a run of this precision wherever they run, in training and in
    previews: copies in its type take their place, and their own weights stay in CPU memory for exports."""
    own = {"vae": vae_precision(model, precision)}
    if not model.trains_text:
        own |= dict.fromkeys(family.text_encoders(), text_precision(model, precision))
    return [name for name, given in own.items() if given == precision and AUTOCAST_DTYPE[precision] is not None]


def parts_encoded_elsewhere(config: Config) -> list[str]:
    """Networks that do not run in a training step, because a cache or encoder processes deliver what they give.

    Raises:
        ConfigError: there is no cache where `dataset.cache.path` says.
    """
    if config.distributed.encoders:
        return ["vae", *(() if config.model.trains_text else TEXT_PARTS)]
    path = config.dataset.cache.path
    return [] if path is None else ["vae", *LatentCache(output_path(path)).storage.text_shapes]


def idle_parts(config: Config) -> list[str]:
    """Of `parts_encoded_elsewhere` those that training processes never run, because neither validation nor pictures
    need them: they stay in CPU memory, for exports."""
    sampling = config.sampling
    draws = (sampling.every and sampling.prompts) or config.experiment.eval_caption_file is not None
    return [] if draws or config.validation.path is not None else parts_encoded_elsewhere(config)


def with_frozen_ready(family: Family, plan: Plan) -> tuple[Family, dict[str, Any]]:
    """The family with its frozen networks as training runs them: without gradients, memory format, slices, tiles, and
    copies of `autocast_parts`; and the originals of these by name, on rank 0, which alone exports: the other ranks drop
    them."""
    config, precision = plan.config, plan.precision
    for network in [family.vae, *([] if config.model.trains_text else family.text_encoders().values())]:
        network.requires_grad_(False).eval()
    if wants_channels_last(config.trainer.channels_last, plan.launch.accelerator, is_frozen=True):
        for parameter in (own for own in family.vae.parameters() if own.ndim == 4):  # others may be of films
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    if config.model.vae_slicing:
        family.vae.enable_slicing()
    if config.model.vae_tiling:
        family.vae.enable_tiling()
    copied, dtype = autocast_parts(config.model, precision, family), AUTOCAST_DTYPE[precision]
    originals = {name: family.parts[name] for name in copied if is_main_process()}
    copies = {name: autocast_copy(family.parts[name], dtype) for name in copied if dtype is not None}
    return family.with_parts(copies), originals


def frozen_family(plan: Plan) -> Family:
    """The family without a denoiser, for a process that only encodes. Torch gets the settings that a training process
    has when it encodes."""
    config, trainer = plan.config, plan.config.trainer
    set_attention(config.model.attention)
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    torch.backends.cudnn.benchmark = trainer.cudnn_benchmark
    seed = config.experiment.seed
    family = load_family(config.model, config.objective, config.conditioning, seed=seed, has_denoiser=False)
    return with_frozen_ready(family, plan)[0]


def objective_of(family: Family) -> Objective:
    """The objective that the family's schedulers and options describe."""
    return replace(family.schedulers.objective, latents_per_token=family.patch_size**2)


def _with_weights(family: Family, module: DiffusionModule, weights: Mapping[str, Tensor]) -> Family:
    """The family around copies of what was trained."""
    own = _by_part(family, module, weights)
    return family.with_parts({part: copy_with_weights(family.parts[part], own[part]) for part in own})


def _by_part(family: Family, module: DiffusionModule, weights: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    """Part → its weights by their names in it."""
    if not module.is_text_trained:
        return {family.denoiser_part: weights}
    found: dict[str, Mapping[str, Tensor]] = {}
    for part in family.trained_networks(True):
        prefix = f"{PART if part == family.denoiser_part else part}."
        found[part] = {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)}
    return found


def _lora_export(plan: Plan, family: Family, module: DiffusionModule, adapters: Mapping[str, Tensor]) -> LoraExport:
    """The file of the adapters and, where asked, a pipeline of merged weights. These are made of the ones that the run
    began with, read again: in training they may be rounded, and lie in pieces."""
    config, model = plan.config, plan.config.model
    own, scale = _by_part(family, module, adapters), scale_of(model.lora)

    def merged() -> Any:
        try:
            parts = {}
            for part in own:
                source = effective_part(model, part)
                source = source.replace(target=source.target or family.classes.get(part))
                parts[part] = load_part(part, source, seed=config.experiment.seed)
                merge(parts[part], own[part], scale)
        except ConfigError as error:  # a save may fail and the run goes on
            raise OSError(errno.EIO, str(error)) from error
        whole = family.with_parts(parts)
        whole.set_default_size(config.dataset.params.resolution)
        return whole.pipeline()

    tensors = {name: t for part in own for name, t in file_tensors(part, own[part], scale).items()}
    prediction, side = family.schedulers.objective.prediction_type, config.dataset.params.resolution
    title = config.experiment.name
    header = modelspec(family.name, family.denoiser.config, prediction, side, title, is_adapter=True)
    return LoraExport(tensors, header, merged if model.lora.merge else None)


def copy_with_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A network of the same class and settings on the CPU, with other weights.

    Args:
        network: its weights are not read, unless they are missing in `weights`; FSDP2 may have sharded it.
        weights: by parameter name; used as they are, not copied.
    """
    copy = meta_twin(network)
    own = network.state_dict(keep_vars=True)
    names = {id(value): name for name, value in own.items() if name in weights}  # tied weights have further names
    copied = {n: weights[names[id(v)]] if id(v) in names else v.detach().cpu() for n, v in own.items()}
    copy.load_state_dict(copied, assign=True)
    for name, buffer in network.named_buffers():  # also those that are computed at construction and not stored
        parent, _, leaf = name.rpartition(".")
        setattr(copy.get_submodule(parent), leaf, buffer.detach().cpu())
    for name, module in network.named_modules():  # tensors that are no buffers are without values in the twin
        loose = {key: value.cpu() for key, value in vars(module).items() if isinstance(value, Tensor)}
        vars(copy.get_submodule(name)).update(loose)
    return copy


def meta_twin(network: nn.Module) -> nn.Module:
    """A network of the same class and settings without weights, on the meta device, in evaluation mode."""
    from diffusers import ModelMixin  # here: sd_training.models must be what imports diffusers first

    cls: Any = next(c for c in type(network).__mro__ if not c.__name__.startswith("FSDP"))
    settings: Any = network.config
    if issubclass(cls, ModelMixin):  # from_config leaves out what was a default once, even where it was changed since
        settings = {name: value for name, value in settings.items() if name != "_use_default_values"}
    with torch.device("meta"):  # no memory, no random numbers
        twin: nn.Module = cls.from_config(settings) if issubclass(cls, ModelMixin) else cls(settings)
    return twin.eval()


def _autoencoder(plan: Plan) -> Trained:
    """Autoencoder training; `model.vae_scaling_factor` decides which scale the exported config carries."""
    config = plan.config
    part = effective_part(config.model, "vae")
    vae = load_part("vae", part, seed=config.experiment.seed)
    if "batch_norm_eps" in vae.config:  # that of FLUX.2 loads as an AutoencoderKL
        raise ConfigError("model.vae: an AutoencoderKLFlux2 is not trained; use an AutoencoderKL")
    is_measured = config.model.vae_scaling_factor == "measure"
    if config.model.vae_scaling_factor == "auto":
        is_measured = part.pretrained is None
    is_measured = is_measured and vae.config.latents_std is None  # else it has a scale per channel, not one number
    if problems := fit_problems(config, None, latent_grid(vae)):
        raise ConfigError(problems)
    if config.model.gradient_checkpointing:
        vae.enable_gradient_checkpointing()
    is_contiguous = plan.layout.strategy not in ("single", "ddp")
    if wants_channels_last(config.trainer.channels_last, plan.launch.accelerator) and not is_contiguous:
        vae.to(memory_format=torch.channels_last)
    objective, perceptual, discriminator = config.objective, config.objective.reconstruction.perceptual_path, None
    network = None if perceptual is None else load_perceptual(Path(perceptual))
    if network is not None:
        least = min(min(size) for size in training_sizes(config.dataset.params).sizes)
        try:
            with torch.no_grad():
                network.pooled(torch.zeros(1, 3, least, least))
        except RuntimeError as error:  # it downscales more often than so few pixels can be
            raise ConfigError(
                f"objective.reconstruction.perceptual_path: {perceptual} cannot take pictures with a side of {least} "
                f"pixels ({str(error).splitlines()[0]}); raise dataset.params.resolution"
            ) from error
    if objective.adversarial.weight:
        discriminator = PatchDiscriminator(objective.adversarial, config.experiment.seed)
    module = AutoencoderModule(
        vae,
        objective,
        optimization(plan),
        is_decoder_only=config.model.vae_trained == "decoder",
        perceptual=network,
        discriminator=discriminator,
    )

    def exported(weights: Mapping[str, Tensor] | None) -> Any:
        _set_scale(vae, module.latent_statistics(), is_measured=is_measured)
        return vae if weights is None else copy_with_weights(vae, weights)

    # `encode` and `decode` are called, not `forward`.
    called = [part for part in (vae.encoder, vae.quant_conv, vae.post_quant_conv, vae.decoder) if part is not None]
    sharding = ShardingSpec([vae], called, fp32_roots=[] if discriminator is None else [discriminator])
    return Trained(module, latent_grid(vae), None, exported, sharding)


def _set_scale(vae: Any, statistics: tuple[float, float] | None, *, is_measured: bool) -> None:
    """Writes the measured scale into the config, or keeps the present one; logs which, with both values.

    Unit variance for the denoiser: 1 / standard deviation of the latents (Rombach et al. 2022, arXiv:2112.10752,
    section D.1).
    """
    if statistics is None:
        log.info(f"scaling_factor: {vae.config.scaling_factor:.5g} is exported; no latents were measured yet")
        return
    mean, std = statistics
    if is_measured:
        shift = {} if vae.config.shift_factor is None else {"shift_factor": mean}
        vae.register_to_config(scaling_factor=1 / std, **shift)
        origin = "measured on this run's latents"
    else:
        origin = (
            f"the value that training started with; this run's latents measure {1 / std:.5g}, shift_factor {mean:.5g} "
            "(exported with model.vae_scaling_factor=measure)"
        )
    log.info(f"scaling_factor: {vae.config.scaling_factor:.5g} is exported, {origin}")
