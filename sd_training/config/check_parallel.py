"""Rules between the options of `distributed` and everything else: what no engine can do, said before a run starts."""

from collections.abc import Iterator

from sd_training.config.parallel_schema import MESH_AXES, DistributedConfig
from sd_training.config.schema import Config

SHARDED_OPTIMIZERS = ("adamw", "lion")
"""Optimizers that treat every number alone, so that a piece of a tensor is updated as the whole would be."""


def is_deepspeed(config: DistributedConfig) -> bool:
    """Whether DeepSpeed runs the step."""
    return config.strategy.startswith("deepspeed")


def is_fsdp(config: DistributedConfig) -> bool:
    """Whether weights are cut by FSDP2 or tensor parallelism."""
    return config.strategy in ("fsdp", "hsdp") or config.mesh.fsdp != 1 or config.mesh.tensor != 1


def recomputation_problems(config: Config) -> Iterator[str]:
    """As `parallel_problems`, of `model.gradient_checkpointing` with whatever strategy."""
    if config.model.train == "vae" and config.model.gradient_checkpointing == "selective":
        yield "model.gradient_checkpointing: selective is for denoisers only; use true with model.train=vae"


def parallel_problems(config: Config) -> Iterator[str]:
    """One sentence per contradiction; each begins with the option."""
    distributed = config.distributed
    yield from _mesh_problems(distributed)
    yield from _offload_problems(distributed)
    if is_fsdp(distributed) or is_deepspeed(distributed):
        yield from _sharding_problems(config)


def _mesh_problems(config: DistributedConfig) -> Iterator[str]:
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    if config.mesh.is_set and config.strategy != "auto":
        yield f"distributed.strategy: {config.strategy}, but distributed.mesh is set as well; give one of them"
    yield from (f"distributed.mesh.{axis}: is 0; 1 leaves the axis out" for axis, size in sizes.items() if size == 0)
    if list(sizes.values()).count(-1) > 1:
        yield "distributed.mesh: more than one axis is -1; only one can be what is left"


def _offload_problems(config: DistributedConfig) -> Iterator[str]:
    if config.offload_optimizer and not is_deepspeed(config):
        yield (
            "distributed.offload_optimizer: only DeepSpeed does this; use distributed.strategy=deepspeed_2, or fsdp "
            "with distributed.offload_parameters"
        )
    if config.offload_parameters and not (is_fsdp(config) or config.strategy == "deepspeed_3"):
        yield "distributed.offload_parameters: only fsdp, hsdp and deepspeed_3 do this"
    if config.deepspeed_config is not None and not is_deepspeed(config):
        yield f"distributed.deepspeed_config: is read by deepspeed only, but distributed.strategy is {config.strategy}"
    if not config.reshard_after_forward and not is_fsdp(config):
        yield "distributed.reshard_after_forward: is read by fsdp and hsdp only"


def _sharding_problems(config: Config) -> Iterator[str]:
    name = config.distributed.strategy if config.distributed.strategy != "auto" else "distributed.mesh"
    if config.optimizer.name not in SHARDED_OPTIMIZERS:
        yield (
            f"optimizer.name: {config.optimizer.name} needs whole tensors, which {name} cuts; use "
            f"{' or '.join(SHARDED_OPTIMIZERS)}, or distributed.strategy=ddp"
        )
    if config.model.bf16_weights:
        yield f"model.bf16_weights: {name} keeps fp32 weights in pieces already; set it to false"
    if config.model.mixed_precision == "fp16" and is_fsdp(config.distributed):
        yield f"model.mixed_precision: fp16 needs a loss scale that {name} does not share; use bf16, or deepspeed_2"
    if config.model.train == "vae":
        yield f"model.train: vae is small and is trained with single or ddp, not with {name}"
    if config.trainer.channels_last is True and is_fsdp(config.distributed) and config.model.train == "unet":
        yield f"trainer.channels_last: true, but {name} cuts contiguous weights only; use auto, which leaves them so"
    if config.trainer.compile == "full":
        yield f"trainer.compile: full does not see through {name}; use blocks"
    if config.trainer.compile and config.distributed.mesh.tensor != 1:
        yield "trainer.compile: is not known to work with distributed.mesh.tensor; set it to false"
    if is_deepspeed(config.distributed):
        yield from _deepspeed_problems(config, name)


def _deepspeed_problems(config: Config, name: str) -> Iterator[str]:
    if config.trainer.compile in (True, "blocks"):
        yield f"trainer.compile: is not known to work with {name}; set it to false, or use fsdp"
    if config.trainer.channels_last is True:
        yield f"trainer.channels_last: {name} wants weights as they are usually laid out; use auto or false"
    if config.distributed.strategy == "deepspeed_3" and config.model.gradient_checkpointing == "selective":
        yield (
            "model.gradient_checkpointing: selective gives wrong gradients with deepspeed_3, whose linear layers "
            "change in place what it keeps; use true"
        )
    if config.model.train_text_encoder:
        yield f"model.train_text_encoder: {name} trains the denoiser only; use ddp or fsdp"
    if config.distributed.offload_optimizer and config.optimizer.name != "adamw":
        yield f"optimizer.name: {config.optimizer.name} cannot be offloaded; use adamw"
