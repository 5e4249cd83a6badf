"""Optimizers by name, as one call: parameter groups, then the optimizer over them; before a step, the norm of the
gradients and their clipping.

Every optimizer skips the whole step of a non-finite gradient. Norms are taken over full tensors, whether parameters are
replicated or sharded (DTensor). Two optimizers are this project's own: AdamW with stochastic rounding of bf16 weights,
and Muon with AdamW beside it.
"""

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd_training.config.schema import LRScheduleConfig, OptimizerConfig, warmup_length
from sd_training.errors import ConfigError

Group: TypeAlias = dict[str, Any]
LRSchedule = Callable[[int], float]
"""Optimizer steps completed → factor of the peak learning rate for the next step, in [0, 1]."""


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scales gradients in place so that their norm is at most `max_norm`; returns the norm before.

    Gradients are already averaged over processes; DTensors may have different meshes.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    if max_norm is not None:
        # DTensors of different meshes cannot be scaled in one call, their local tensors can.
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The Euclidean norm over all gradients, the same on every process; nothing is read on the host. Collective where
    they are sharded."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    groups: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else gradient.device
        groups.setdefault(key, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


class SkippingOptimizer(torch.optim.Optimizer):
    """Leaves weights, state and step counts alone when `found_inf` is not zero.

    `found_inf` is a float tensor that the closure sets on the optimizer; it holds for one step. The host reads it once
    per step and waits for the device there. Fused AdamW needs none of this: its kernel reads the flag.
    """

    found_inf: Tensor

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure` (forward, backward, clipping), then update, unless the gradient was marked.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Removed, because torch's own optimizers refuse to run with a flag that they do not read.
        found_inf = self.__dict__.pop("found_inf", None)
        if found_inf is None or not found_inf.item():
            with torch.no_grad():
                self.update()
        return loss

    def update(self) -> None:
        """The step itself, from the gradients as they are."""
        raise NotImplementedError


@cache
def skipping(optimizer: type[torch.optim.Optimizer]) -> Any:
    """`optimizer` as a class of the same name, with the same arguments, that skips marked steps."""
    return type(optimizer.__name__, (SkippingOptimizer, optimizer), {"update": optimizer.step})


@dataclass(frozen=True)
class Optimization:
    """How a module is updated."""

    config: OptimizerConfig
    learning_rate: float
    """Peak learning rate."""
    schedule: LRSchedule
    """Optimizer step → factor of the peak."""
    is_offloaded: bool = False
    """DeepSpeed keeps the optimizer state in CPU memory and updates there."""
    seed: int = 0
    """Of stochastic rounding."""
    has_gradient_scaler: bool = False
    """fp16 training: the scaler, not the module, skips non-finite steps."""


def make_optimizer(plan: Optimization, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer that `plan.config` describes, over every trained part.

    The caller sets `group["lr"] = peak × schedule(step) × group["lr_factor"]` before each step. It marks a non-finite
    gradient by setting the float tensor `optimizer.found_inf`, from inside the closure that `step` calls: the whole
    step is then skipped. Fused AdamW reads the flag on the device; for all other optimizers the host reads it, once per
    step. With a gradient scaler AdamW is not fused: that kernel unscales by itself, after the gradient was clipped.

    Args:
        plan: its config is checked by `config.check`.
        named_parameters: what is trained; names begin with the part: `denoiser.…`, `text_encoder.…`.

    Raises:
        ConfigError: the package of the optimizer is not installed, or it cannot update these weights.
    """
    config, fused = plan.config, not plan.has_gradient_scaler
    params, name = config.params, config.name
    groups = parameter_groups(config, named_parameters, plan.learning_rate)
    adam: dict[str, Any] = {"betas": (params.beta1, params.beta2), "eps": params.epsilon}
    if plan.is_offloaded:  # compiled by g++ at its first use
        return _module("deepspeed.ops.adam", name, "deepspeed").DeepSpeedCPUAdam(groups, adamw_mode=True, **adam)
    # Where `lr` is given, the library only checks it: every group has its own.
    match name:
        case "adamw" if config.stochastic_rounding:
            return StochasticRoundingAdamW(groups, seed=plan.seed, fused=fused, **adam)
        case "adamw":
            return (torch.optim.AdamW if fused else skipping(torch.optim.AdamW))(groups, fused=fused, **adam)
        case "muon":
            return MuonWithAdamW(groups, momentum=params.momentum, fused=fused, **adam)
        case "adamw_8bit":  # Dettmers et al. 2022 (arXiv:2110.02861)
            if not torch.cuda.is_available():
                raise ConfigError("optimizer.name: adamw_8bit needs a CUDA device; use optimizer.name=adamw")
            return skipping(_module("bitsandbytes.optim", name, "bitsandbytes").AdamW8bit)(groups, **adam)
        case "adafactor":
            # Shazeer & Stern 2018 (arXiv:1804.04235) with the paper's constants, except that the schedule alone gives
            # the learning rate: neither the paper's 1/√t nor the size of the weight scales it.
            adafactor = skipping(importlib.import_module("transformers.optimization").Adafactor)
            return adafactor(groups, lr=1.0, relative_step=False, scale_parameter=False, warmup_init=False)
        case "lion":  # Chen et al. 2023 (arXiv:2302.06675)
            return skipping(_module("lion_pytorch", name, "lion-pytorch").Lion)(groups, lr=1.0, betas=adam["betas"])
        case "prodigy":
            # Mishchenko & Defazio 2023 (arXiv:2306.06101, algorithm 4) with what its authors advise for diffusion
            # models and warm-ups: bias correction, and a distance estimate that a small learning rate does not inflate.
            prodigy = skipping(_module("prodigyopt", name, "prodigyopt").Prodigy)
            advice = {"use_bias_correction": True, "safeguard_warmup": True}
            return prodigy(groups, lr=1.0, d0=params.d0, d_coef=params.d_coef, **advice, **adam)


def _module(module: str, name: str, package: str) -> Any:
    """A library that only one optimizer needs."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # a compiled library may not fit to the machine
        remedy = f"pip install {package}, or use optimizer.name=adamw"
        raise ConfigError(f"optimizer.name: {name} needs the package {package} ({error}); {remedy}") from error


_AT_THE_ENDS = re.compile(
    r"(^|\.)[^.]*embed[^.]*\.|(^|\.)conv_(in|out)\.|^[^.]+\.(proj_(in|out)[^.]*|final_layer|lm_head)\."
    r"|^[^.]+\.(patchify|unpatchify|text_projections|pooled_projection|caption_projection|final_modulation)\."
)
"""Embeddings, and the first and last layer of a network, by their usual names in diffusers and transformers."""


def parameter_groups(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float
) -> list[Group]:
    """The parameters by part, by weight decay, by device mesh and, with `muon`, by how they are updated.

    Weight decay may leave out biases, weights of norms and scales. One kernel updates one mesh only, and what tensor
    parallelism shards has another one.

    Args:
        named_parameters: names begin with the part: `denoiser.…`, `text_encoder.…`.
        learning_rate: peak learning rate of parts that have none of their own.

    Returns:
        Groups in the order of their first parameter, with the keys `params`, `part`, `lr`, `lr_factor` (the part's peak
        as a share of `learning_rate`), `weight_decay` and `is_matrix` (updated by Muon).

    Raises:
        ConfigError: `optimizer.rates_by_part` names a part that is not trained.
    """
    groups: dict[object, Group] = {}
    for name, parameter in named_parameters:
        part = name.partition(".")[0]
        has_decay = not config.no_decay_on_norms_and_biases or (parameter.ndim > 1 and not name.endswith(".bias"))
        is_matrix = config.name == "muon" and is_hidden_matrix(name, parameter)
        rate = config.rates_by_part.get(part, learning_rate)
        group: Group = {
            "params": [],
            "part": part,
            "lr": rate,
            "lr_factor": 1.0 if rate == learning_rate else rate / learning_rate,
            "weight_decay": config.params.weight_decay if has_decay else 0.0,
            "is_matrix": is_matrix,
        }
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((part, has_decay, is_matrix, mesh), group)["params"].append(parameter)
    parts = {group["part"] for group in groups.values()}
    if unknown := sorted(set(config.rates_by_part) - parts):
        names, trained = ", ".join(unknown), ", ".join(sorted(parts))
        raise ConfigError(f"optimizer.rates_by_part: {names} is not trained; trained parts: {trained}")
    return list(groups.values())


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates it: the weight of a linear layer or a convolution between the first and the last layer
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; a kernel [out, in, …] is a matrix [out, in · …])."""
    is_matrix = name.endswith(".weight") and parameter.ndim >= 2 and min(parameter.shape[:2]) > 1
    return is_matrix and not _AT_THE_ENDS.search(name)


_DEFAULT_DECAY_SHARE = 0.2  # of the run; longer decays gain little (arXiv:2405.18392)


def lr_schedule(config: LRScheduleConfig, *, num_steps: int, global_batch: int) -> LRSchedule:
    """The schedule that `config` describes.

    Args:
        num_steps: length of the run [optimizer steps].
        global_batch: samples per optimizer step over all processes; it converts a warm-up given in images.

    Raises:
        ConfigError: warm-up and decay of `wsd` are longer than the run.
    """
    params, warmup_steps = config.params, warmup_length(config.params, global_batch)
    start = warmup_steps
    if config.scheduler == "wsd":
        length = params.decay_length
        if length is None:
            length = max(1, min(round(_DEFAULT_DECAY_SHARE * num_steps), num_steps - warmup_steps))
        elif warmup_steps + length > num_steps:
            sizes = f"{length:,} steps after {warmup_steps:,} of warm-up do not fit into a run of {num_steps:,} steps"
            raise ConfigError(f"lr_scheduler.params.decay_length: {sizes}; shorten it, or leave it out")
        start = num_steps - length

    def factor(step: int) -> float:
        """A linear warm-up, (step + 1) / warmup_steps as in sd-training, then what the schedule makes of x, which runs
        from 0 at `start` to 1 at the end, falling to `end_factor` instead of 0."""
        is_rising = step < warmup_steps
        rise = (step + 1) / warmup_steps if is_rising else 1.0
        x = min(1.0, max(0.0, (step - start) / max(1, num_steps - start)))
        match config.scheduler:
            case "constant" | "ConstantWithWarmup":
                return rise
            case "inverse_sqrt":  # 1 / √max(t / t_ref, 1) (EDM2: Karras et al. 2024, arXiv:2312.02696), from the start
                return rise / math.sqrt(max(step / params.reference_length, 1.0))
            case "cosine" | "CosineWithWarmup":  # Loshchilov & Hutter 2017 (arXiv:1608.03983, eq. 5)
                fall = 0.5 * (1.0 + math.cos(math.pi * x))
            case "linear":
                fall = 1.0 - x
            case "polynomial":
                fall = (1.0 - x) ** params.power
            case "wsd":  # Hu et al. 2024 (arXiv:2404.06395); 1 - √x: Hägele et al. 2024 (arXiv:2405.18392)
                fall = 1.0 - (x if params.decay_shape == "linear" else math.sqrt(x))
        return rise if is_rising else params.end_factor + (1.0 - params.end_factor) * fall

    return factor


_COPIED_AT_ONCE = 16
"""Weights whose fp32 copies, and those of their gradients, are in memory at the same time."""


class StochasticRoundingAdamW(SkippingOptimizer):
    """`torch.optim.AdamW` computed in fp32; bf16 weights are rounded stochastically, fp32 weights are not rounded.

    The averages are kept in fp32.

    Args:
        groups: parameter groups with `lr` and `weight_decay`.
        seed: of the rounding; the number of the step is the other half of the key.
        betas: of AdamW.
        eps: of AdamW.
        fused: AdamW in one kernel.
    """

    def __init__(self, groups: list[Group], *, seed: int, betas: tuple[float, float], eps: float, fused: bool) -> None:
        self._adamw = torch.optim.AdamW([torch.zeros(1)], betas=betas, eps=eps, fused=fused)
        self._seed = seed
        super().__init__([{**self._adamw.defaults, "num_steps": 0, **group} for group in groups], {})

    def update(self) -> None:
        """One step."""
        first = self.param_groups[0]
        generator = rounding_generator(self._seed, first["num_steps"] + 1, first["params"][0].device)
        for group in self.param_groups:
            group["num_steps"] += 1
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for start in range(0, len(weights), _COPIED_AT_ONCE):
                self._update(weights[start : start + _COPIED_AT_ONCE], group, generator)

    def _update(self, weights: list[Tensor], group: Group, generator: torch.Generator) -> None:
        copies = [weight.detach().float() for weight in weights]  # fp32 weights are updated in place
        for weight, copy in zip(weights, copies, strict=True):
            assert weight.grad is not None
            copy.grad = weight.grad.float()
            self._adamw.state[copy] = self.state[weight]
        self._adamw.param_groups = [{**group, "params": copies}]
        self._adamw.step()
        self._adamw.state.clear()
        for weight, copy in zip(weights, copies, strict=True):
            if weight.dtype == torch.bfloat16:
                weight.copy_(round_stochastically(copy, generator))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast the averages to the type of the weights."""
        super().load_state_dict(state_dict)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, saved in state_dict["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[weights[index]][name] = saved[name].to(weights[index].device, copy=True)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to one of the two neighbouring bf16 values, with probabilities that keep the mean (Gupta et al. 2015,
    arXiv:1502.02551, section 3).

    Args:
        values: fp32, any shape. What bf16 can hold, infinities and NaN are kept.
        generator: of the device of `values`.

    Returns:
        bf16, the same shape.
    """
    # bf16 is the upper half of fp32: a uniform draw added to the lower half carries as often as the value is near
    # the upper neighbour.
    bits = values.contiguous().view(torch.int32)
    draws = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + draws) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def rounding_generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The generator of one optimizer step: the same on every rank, so that replicas stay equal."""
    key = np.random.SeedSequence([seed % 2**64, step]).generate_state(1, np.uint32)  # torch's CPU generator: 32 bits
    return torch.Generator(device).manual_seed(int(key[0]))


class MuonWithAdamW(SkippingOptimizer):
    """Groups with `is_matrix` go to `torch.optim.Muon`, the others to `torch.optim.AdamW`.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the averaged gradient of a matrix by a
    nearly orthogonal one. Its learning rate is multiplied by 0.2 √max(rows, columns) (Liu et al. 2025,
    arXiv:2502.16982, eq. 4), which gives the update AdamW's usual size, so that one learning rate and one weight decay
    serve both. Kernels are seen as matrices [out, in · height · width].

    Args:
        groups: parameter groups with `lr`, `weight_decay` and `is_matrix`.
        momentum: decay of the gradient average of matrices.
        betas: of AdamW.
        eps: of AdamW.
        fused: AdamW in one kernel.
    """

    def __init__(
        self, groups: list[Group], *, momentum: float, betas: tuple[float, float], eps: float, fused: bool
    ) -> None:
        placeholder = [torch.zeros(1, 1)]
        self._muon = torch.optim.Muon(placeholder, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(placeholder, betas=betas, eps=eps, fused=fused)
        defaults = {True: self._muon.defaults, False: self._adamw.defaults}
        super().__init__([{**defaults[group["is_matrix"]], **group} for group in groups], {})

    def update(self) -> None:
        """One step of both."""
        for group in self.param_groups:
            if group["is_matrix"]:
                self._update_matrices(group)
        self._adamw.param_groups = [group for group in self.param_groups if not group["is_matrix"]]
        self._adamw.state = self.state
        self._adamw.step()

    def _update_matrices(self, group: Group) -> None:
        """Views are created again at every step: weights may have moved or changed their layout since the last one."""
        weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
        matrices = [weight.detach().flatten(1) for weight in weights]
        for weight, matrix in zip(weights, matrices, strict=True):
            assert weight.grad is not None
            matrix.grad = weight.grad.flatten(1)
        self._muon.param_groups = [{**group, "params": matrices}]
        self._muon.state = defaultdict(dict, zip(matrices, [self.state[weight] for weight in weights], strict=True))
        self._muon.step()
        for weight, matrix in zip(weights, matrices, strict=True):
            if matrix.data_ptr() != weight.data_ptr():  # channels-last kernels cannot be viewed as matrices
                weight.copy_(matrix.view(weight.shape))
        self._muon.state.clear()  # it is ours: where it is replaced, the old one must not stay in memory
