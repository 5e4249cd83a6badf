"""Optimizers by name."""

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from sd_training.config.optimizer_schema import OptimizerConfig
from sd_training.errors import ConfigError
from sd_training.optim.eight_bit import eight_bit_adamw, require_cuda
from sd_training.optim.lion import lion
from sd_training.optim.muon import MuonWithAdamW
from sd_training.optim.parameter_groups import Group, by_mesh, parameter_groups
from sd_training.optim.skipped_steps import skipping
from sd_training.optim.stochastic_rounding import StochasticRoundingAdamW

_FROM_OPTIONS = ("lr_factor", "weight_decay", "betas", "eps", "momentum", "d_coef")
"""What a group takes from the options of today instead of a checkpoint."""


def make_optimizer(
    config: OptimizerConfig,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    fused: bool,
    seed: int = 0,
    is_offloaded: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer that `config` describes, over every trained part.

    The caller sets `group["lr"] = peak × schedule(step) × group["lr_factor"]` before each step; a checkpoint does not
    override what the options say. It marks a non-finite gradient by setting the float tensor `optimizer.found_inf`,
    from inside the closure that `step` calls: the whole step is then skipped. Fused AdamW reads the flag on the device;
    for all other optimizers the host reads it, once per step.

    Args:
        config: checked by `optimizer_problems`.
        named_parameters: what is trained; names begin with the part: `denoiser.…`, `text_encoder.…`.
        learning_rate: peak learning rate.
        fused: AdamW in one kernel for all tensors. Not with a gradient scaler: the fused kernel unscales by itself,
            after the gradient was clipped.
        seed: of stochastic rounding.
        is_offloaded: AdamW as DeepSpeed's vectorised code for CPUs, which DeepSpeed wants for state in CPU memory.

    Raises:
        ConfigError: the package of the optimizer is not installed, or it cannot update these weights.
    """
    groups = by_mesh(parameter_groups(config, named_parameters, learning_rate))
    optimizer = _deepspeed_cpu_adamw(config, groups) if is_offloaded else _make(config, groups, fused, seed)
    # A resumed run follows its options, as it does for the learning rate.
    own = [{key: group[key] for key in _FROM_OPTIONS if key in group} for group in optimizer.param_groups]
    optimizer.register_load_state_dict_post_hook(partial(_set_options, own))
    return optimizer


def _make(config: OptimizerConfig, groups: list[Group], fused: bool, seed: int) -> torch.optim.Optimizer:
    params = config.params
    adam: dict[str, Any] = {"betas": (params.beta1, params.beta2), "eps": params.epsilon}
    match config.name:
        case "adamw" if config.stochastic_rounding:
            _check_dtypes(groups)
            return StochasticRoundingAdamW(groups, seed=seed, fused=fused, **adam)
        case "adamw":
            return (torch.optim.AdamW if fused else skipping(torch.optim.AdamW))(groups, fused=fused, **adam)
        case "muon":
            return MuonWithAdamW(groups, momentum=params.momentum, fused=fused, **adam)
        case "adamw_8bit":
            require_cuda()
            library = _module("bitsandbytes.optim", config.name, "bitsandbytes")
            return eight_bit_adamw(library)(groups, **adam)
        case "adafactor":
            return _adafactor(groups)
        case "lion":
            library = _module("lion_pytorch.foreach", config.name, "lion-pytorch")
            # The default rate is only checked: every group has its own.
            return lion(library)(groups, lr=1.0, betas=adam["betas"])
        case "prodigy":
            return _prodigy(groups, config, adam)
        case "schedule_free_adamw":
            optimizer = skipping(_module("schedulefree", config.name, "schedulefree").AdamWScheduleFree)(groups, **adam)
            optimizer.train()
            return optimizer


def _deepspeed_cpu_adamw(config: OptimizerConfig, groups: list[Group]) -> torch.optim.Optimizer:
    """Compiled by g++ at its first use."""
    library = _module("deepspeed.ops.adam", config.name, "deepspeed")
    params = config.params
    optimizer: torch.optim.Optimizer = library.DeepSpeedCPUAdam(
        groups, betas=(params.beta1, params.beta2), eps=params.epsilon, adamw_mode=True
    )
    return optimizer


def _adafactor(groups: list[Group]) -> torch.optim.Optimizer:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) with the paper's constants, except that the learning rate is
    the schedule's alone: neither the paper's 1/√t nor the size of the weight scales it."""
    adafactor = importlib.import_module("transformers.optimization").Adafactor
    return skipping(adafactor)(groups, lr=1.0, relative_step=False, scale_parameter=False, warmup_init=False)


def _prodigy(groups: list[Group], config: OptimizerConfig, adam: dict[str, Any]) -> torch.optim.Optimizer:
    """Prodigy (Mishchenko & Defazio 2023, arXiv:2306.06101, algorithm 4) with what its authors advise for diffusion
    models and warm-ups: bias correction, and a distance estimate that a small learning rate does not inflate."""
    prodigy = _module("prodigyopt", config.name, "prodigyopt").Prodigy
    return skipping(prodigy)(
        groups,
        lr=1.0,
        d0=config.params.d0,
        d_coef=config.params.d_coef,
        use_bias_correction=True,
        safeguard_warmup=True,
        **adam,
    )


def _module(module: str, name: str, package: str) -> Any:
    """A library that only one optimizer needs."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a compiled library may not fit to the machine
        raise ConfigError(
            f"optimizer.name: {name} needs the package {package}, which cannot be imported ({error}); "
            f"pip install {package}, or use optimizer.name=adamw"
        ) from error


def _check_dtypes(groups: list[Group]) -> None:
    dtypes = {weight.dtype for group in groups for weight in group["params"]}
    if torch.bfloat16 not in dtypes or not dtypes <= {torch.bfloat16, torch.float32}:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"optimizer.stochastic_rounding: is true, but the trained weights are {found}; it rounds bfloat16 weights, "
            "fp32 weights need none: set it to false"
        )


def _set_options(own: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)
