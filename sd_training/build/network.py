"""How the denoiser is run: layout, recomputation, compilation."""

from sd_training.build.plan import Plan
from sd_training.config.check_parallel import is_deepspeed, is_fsdp
from sd_training.data.sizes import training_sizes
from sd_training.errors import ConfigError
from sd_training.models.compilation import compile_blocks, compile_whole, require_compiler
from sd_training.models.family import Family
from sd_training.models.memory_format import use_channels_last, wants_channels_last
from sd_training.models.recompute import recompute_activations


def prepare_network(family: Family, plan: Plan) -> None:
    """Changes the networks of `family` in place, before anything wraps or shards them.

    Raises:
        ConfigError: `trainer.compile` without a compiler.
    """
    config, blocks = plan.config, family.blocks()
    if wants_channels_last(config.trainer.channels_last, plan.launch.accelerator):
        use_channels_last(family.vae)
        # Transformers have no convolutions to speak of; FSDP2 and DeepSpeed take contiguous weights only.
        is_cut = is_fsdp(config.distributed) or is_deepspeed(config.distributed)
        if family.denoiser_part == "unet" and not is_cut:
            use_channels_last(family.denoiser)
    recomputation = config.model.gradient_checkpointing
    if recomputation:
        every = config.model.gradient_checkpointing_every
        recompute_activations(blocks, every=every, is_selective=recomputation == "selective")
    if config.trainer.compile:
        require_compiler(plan.launch.accelerator)
        _refuse_bf16_on_cpus(plan)
        num_sizes = len(training_sizes(config.dataset.params).sizes)
        if config.trainer.compile == "full":
            compile_whole(family.denoiser, num_sizes=num_sizes)
        else:
            compile_blocks(blocks, num_sizes=num_sizes)


def _refuse_bf16_on_cpus(plan: Plan) -> None:
    """Gradients of compiled layer norms came out non-finite under bf16 autocast (torch 2.13, inductor for CPUs; with
    the backend aot_eager and in fp32 they are right)."""
    if plan.launch.accelerator == "cpu" and plan.precision == "bf16":
        raise ConfigError(
            "trainer.compile: on a CPU PyTorch's compiled code gives non-finite gradients in bf16; use "
            "model.mixed_precision=no or trainer.compile=false"
        )
