"""The options of the optimizer and of the learning-rate schedule, and the rules between them."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sd_training.config.value_types import SCHEMA, BelowOne, Count, NonNegative, Positive, PositiveInt, Probability

OptimizerName = Literal["adamw", "adafactor", "adamw_8bit", "lion", "prodigy", "schedule_free_adamw", "muon"]
ScheduleName = Literal[
    "ConstantWithWarmup", "CosineWithWarmup", "constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"
]


@dataclass(config=SCHEMA, kw_only=True)
class OptimizerParams:
    """Hyper-parameters; those of AdamW are eq. 12 of Loshchilov & Hutter 2019 (arXiv:1711.05101)."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate [1/optimizer step]; not scaled by batch size or processes. `prodigy` finds the rate itself
    and multiplies it by this: 1 is usual. `lion` wants about a third to a tenth of AdamW's."""
    beta1: BelowOne = 0.9
    """Decay of the gradient average [per optimizer step]; `schedule_free_adamw`: interpolation towards the average of
    the weights. Not read by `adafactor`."""
    beta2: BelowOne = 0.98
    """Decay of the squared-gradient average, with `lion` of the momentum [per optimizer step]. Not read by
    `adafactor`."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay [× learning rate per optimizer step]."""
    epsilon: Positive = 1e-8
    """Added to the denominator. Not read by `adafactor` and `lion`."""
    momentum: BelowOne = 0.95
    """`muon`: decay of the gradient average of matrices [per optimizer step]."""
    d0: Positive = 1e-6
    """`prodigy`: first estimate of the distance to the solution."""
    d_coef: Positive = 1.0
    """`prodigy`: factor of the estimated learning rate."""


@dataclass(config=SCHEMA, kw_only=True)
class OptimizerConfig:
    """Which optimizer updates the trained parts."""

    name: OptimizerName = "adamw"
    """Optimizer by name. `adamw_8bit` needs CUDA. `muon` orthogonalizes the updates of hidden matrices and kernels, at
    AdamW's learning rate, and leaves the rest to AdamW. `schedule_free_adamw` wants a constant schedule and no EMA."""
    params: OptimizerParams = Field(default_factory=OptimizerParams)
    """Its hyper-parameters."""
    max_grad_norm: Positive | None = None
    """Clip the global L2 norm of the gradient, once per optimizer step; null: no clipping."""
    no_decay_on_norms_and_biases: bool = False
    """No weight decay on biases and on parameters with one dimension (weights of norms, scales)."""
    rates_by_part: dict[str, NonNegative] = Field(default_factory=dict)
    """Peak learning rates of named parts, such as `{text_encoder: 1e-6}`, with the same schedule; the others take
    `params.learning_rate`. Not with `prodigy`."""
    stochastic_rounding: bool = False
    """`adamw` on bf16 weights: compute in fp32 and round at random, without bias, so that small updates are not lost.
    Weights that are kept in fp32 (the normal case) need no rounding."""


@dataclass(config=SCHEMA, kw_only=True)
class LRScheduleParams:
    """Shape of the learning-rate schedule."""

    learning_rate: NonNegative | None = None
    """Peak learning rate; null takes `optimizer.params.learning_rate`. As in sd-training, the schedule's value wins."""
    warmup_length: Count = 500
    """Linear warm-up [optimizer steps]."""
    warmup_images: PositiveInt | None = None
    """Linear warm-up [samples over all processes], instead of `warmup_length`."""
    end_factor: Probability = 0.0
    """`linear`, `cosine`, `polynomial`, `wsd`: learning rate at the end of the run [share of the peak]."""
    power: Positive = 1.0
    """`polynomial`: exponent."""
    reference_length: PositiveInt = 70_000
    """`inverse_sqrt`: the learning rate falls after this many optimizer steps [count]."""
    decay_length: PositiveInt | None = None
    """`wsd`: length of the final decay [optimizer steps]; null: a fifth of the run."""
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """`wsd`: 1 - x or 1 - √x, x from 0 to 1 over the decay."""


@dataclass(config=SCHEMA, kw_only=True)
class LRScheduleConfig:
    """Learning rate as a pure function of the optimizer step."""

    scheduler: ScheduleName = "ConstantWithWarmup"
    """Shape after the warm-up. `ConstantWithWarmup` is `constant`, `CosineWithWarmup` is `cosine`: half a cosine from
    the end of the warm-up to the end of the run. `wsd`: warm-up, stable, decay."""
    params: LRScheduleParams = Field(default_factory=LRScheduleParams)
    """Its numbers."""


_ADAM = ("adamw", "adamw_8bit", "prodigy", "schedule_free_adamw", "muon")
_PARAM_READERS: dict[str, tuple[str, ...]] = {
    "beta1": (*_ADAM, "lion"),
    "beta2": (*_ADAM, "lion"),
    "epsilon": _ADAM,
    "momentum": ("muon",),
    "d0": ("prodigy",),
    "d_coef": ("prodigy",),
}
"""Hyper-parameters that some optimizers do not read."""

_FALLING = ("linear", "cosine", "CosineWithWarmup", "polynomial", "wsd")
_SCHEDULE_READERS: dict[str, tuple[str, ...]] = {
    "end_factor": _FALLING,
    "power": ("polynomial",),
    "reference_length": ("inverse_sqrt",),
    "decay_length": ("wsd",),
    "decay_shape": ("wsd",),
}
_CONSTANT = ("constant", "ConstantWithWarmup")
_LOWEST_PRODIGY_RATE = 1e-2


def optimizer_problems(optimizer: OptimizerConfig, schedule: LRScheduleConfig, *, use_ema: bool = False) -> list[str]:
    """What is wrong between the options of the optimizer and of the schedule, one sentence each.

    Args:
        use_ema: whether an exponential moving average of the weights is kept.
    """
    own = optimizer.params
    return [
        *_unread("optimizer.params", own, _PARAM_READERS, f"optimizer.name={optimizer.name}", optimizer.name),
        *_unread(
            "lr_scheduler.params",
            schedule.params,
            _SCHEDULE_READERS,
            f"lr_scheduler.scheduler={schedule.scheduler}",
            schedule.scheduler,
        ),
        *_two_warmups(schedule.params),
        *_roundings(optimizer),
        *_rates(optimizer, schedule),
        *_schedule_free(optimizer, schedule, use_ema),
    ]


def _unread(group: str, params: Any, readers: dict[str, tuple[str, ...]], chosen: str, name: str) -> Iterator[str]:
    """An option that only others read, set to something else than its default, was meant to do something."""
    for field in fields(params):
        value, used_by = getattr(params, field.name), readers.get(field.name)
        if used_by is not None and name not in used_by and value != getattr(type(params)(), field.name):
            yield f"{group}.{field.name}: is {value}, but nothing reads it with {chosen}; only {', '.join(used_by)}"


def _two_warmups(params: LRScheduleParams) -> Iterator[str]:
    if params.warmup_images is not None and params.warmup_length != LRScheduleParams().warmup_length:
        yield (
            f"lr_scheduler.params.warmup_images: is {params.warmup_images:,}, but lr_scheduler.params.warmup_length is "
            f"{params.warmup_length:,}; keep one of them"
        )


def _roundings(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.stochastic_rounding and optimizer.name != "adamw":
        yield f"optimizer.stochastic_rounding: is true, but {optimizer.name} cannot do it; use optimizer.name=adamw"


def _rates(optimizer: OptimizerConfig, schedule: LRScheduleConfig) -> Iterator[str]:
    own = schedule.params.learning_rate
    peak = optimizer.params.learning_rate if own is None else own
    where = "optimizer.params.learning_rate" if own is None else "lr_scheduler.params.learning_rate"
    if optimizer.rates_by_part and optimizer.name == "prodigy":
        yield "optimizer.rates_by_part: prodigy estimates one learning rate for all parts; remove it"
    elif optimizer.rates_by_part and peak == 0:
        yield f"{where}: is 0, but optimizer.rates_by_part follow the same schedule; give the peak a value above 0"
    if optimizer.name == "prodigy" and peak < _LOWEST_PRODIGY_RATE:
        yield f"{where}: is {peak:g}, but prodigy multiplies the rate that it finds by it; set it to 1"


def _schedule_free(optimizer: OptimizerConfig, schedule: LRScheduleConfig, use_ema: bool) -> Iterator[str]:
    if optimizer.name != "schedule_free_adamw":
        return
    if optimizer.params.beta1 == 0:
        yield "optimizer.params.beta1: is 0, but schedule_free_adamw needs a value above 0; 0.9 is usual"
    if schedule.scheduler not in _CONSTANT:
        yield (
            f"lr_scheduler.scheduler: is {schedule.scheduler}, but schedule_free_adamw averages weights instead of "
            "lowering the learning rate; use constant"
        )
    if use_ema:
        yield "model.use_ema: is true, but schedule_free_adamw averages the weights itself; set it to false"


def warmup_length(params: LRScheduleParams, global_batch: int) -> int:
    """Length of the warm-up [optimizer steps]; images that do not fill a step count as one."""
    return params.warmup_length if params.warmup_images is None else -(-params.warmup_images // global_batch)
