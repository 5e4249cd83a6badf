"""`--fit`: micro-batch, accumulation, recomputation and strategy that fit a GPU, without changing the global batch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sd_training.build.estimate import Workload, measure, meta_networks, run_memory
from sd_training.build.memory import Memory
from sd_training.config.check import parallel_problems, recomputation_problems
from sd_training.config.fit_target import FitTarget
from sd_training.config.plan import find_layout
from sd_training.config.schema import Config, DistributedConfig, StrategyName
from sd_training.errors import ConfigError

USABLE_SHARE = 0.9
"""Of a GPU's memory. The rest is for what the estimate does not see: the CUDA context, work space of cuDNN and cuBLAS,
NCCL's buffers, gradients of activations on their way, and the gaps of the allocator."""
SHOWN = 5
RECOMPUTATIONS: Mapping[bool | Literal["selective"], str] = {False: "no", "selective": "selective", True: "all"}
"""Values of `model.gradient_checkpointing` by rising time of a step, and their words in the table."""


@dataclass(frozen=True)
class Proposal:
    """One way to run."""

    config: Config
    """The given one with other batch, recomputation and strategy."""
    strategy: str
    memory: Memory
    rank: tuple[int, ...]
    """Smaller is probably faster."""

    def overrides(self, given: Config) -> list[str]:
        """What to add to the command line of the given config."""
        system, distributed = self.config.system, self.config.distributed
        words = {
            "system.batch_size": system.batch_size,
            "system.gradient_accumulation": system.gradient_accumulation,
            "model.gradient_checkpointing": str(self.config.model.gradient_checkpointing).lower(),
        }
        if given.dataset.params.batch_size is not None:
            words["dataset.params.batch_size"] = system.batch_size
        if distributed != given.distributed:
            words["distributed.strategy"] = distributed.strategy
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(distributed, name) != getattr(given.distributed, name):
                words[f"distributed.{name}"] = "true"
        return [f"{key}={value}" for key, value in words.items()]


def propose(config: Config, target: FitTarget) -> str:
    """The report of `--fit`.

    Raises:
        ConfigError: nothing fits, or parts cannot be made or do not fit together.
    """
    networks, family = meta_networks(config)
    workload = measure(config, networks, family, config.model.mixed_precision)
    gpus = _num_gpus(config, target)
    every = list(_proposals(config, workload, gpus))
    fitting = [one for one in every if one.memory.device <= target.gpu_gib * USABLE_SHARE * 2**30]
    if not fitting:
        raise ConfigError(_least(min(every, key=lambda one: one.memory.device), config, target, gpus))
    layout = find_layout(fitting[0].config.distributed, gpus, _gpus_per_machine(config, gpus))
    if family is not None:
        family.check_tensor_axis(layout.mesh.tensor)
    return _report(_best(fitting), config, target, gpus, layout.mesh.data_ranks, workload.picture)


def _num_gpus(config: Config, target: FitTarget) -> int:
    devices = config.trainer.devices if isinstance(config.trainer.devices, int) else 1
    return target.gpus or devices * (config.trainer.num_nodes or 1)


def _gpus_per_machine(config: Config, gpus: int) -> int:
    """Eight where nobody says; only hsdp asks."""
    return config.trainer.devices if isinstance(config.trainer.devices, int) else min(gpus, 8)


def micro_batches(per_process: int) -> list[int]:
    """What divides the samples per process and optimizer step."""
    return [size for size in range(1, per_process + 1) if per_process % size == 0]


def strategies(config: Config, gpus: int) -> list[DistributedConfig]:
    """What may run this config, the simplest first; only its own where it names one."""
    own = config.distributed
    if own.strategy != "auto" or own.mesh.is_set:
        return [own]
    names: tuple[StrategyName, ...] = ("single",) if gpus == 1 else ("ddp", "fsdp", "deepspeed_2", "deepspeed_3")
    choices = [
        *(replace(own, strategy=name) for name in names),
        replace(own, strategy="deepspeed_2", offload_optimizer=True),
        replace(own, strategy="deepspeed_3", offload_optimizer=True, offload_parameters=True),
    ]
    plain = replace(config, model=replace(config.model, gradient_checkpointing=False))  # others are tried with each
    return [choice for choice in choices if not list(parallel_problems(replace(plain, distributed=choice)))]


def _may_run(config: Config) -> bool:
    return not [*recomputation_problems(config), *parallel_problems(config)]


def _proposals(config: Config, workload: Workload, gpus: int) -> Iterator[Proposal]:
    per_process = config.system.batch_size * config.system.gradient_accumulation
    for simplicity, distributed in enumerate(strategies(config, gpus)):
        layout = find_layout(distributed, gpus, _gpus_per_machine(config, gpus))
        is_offloaded = distributed.offload_optimizer or distributed.offload_parameters
        for slowness, recompute in enumerate(RECOMPUTATIONS):
            for samples in micro_batches(per_process):
                changed = replace(
                    config,
                    distributed=distributed,
                    model=replace(config.model, gradient_checkpointing=recompute),
                    system=replace(config.system, batch_size=samples, gradient_accumulation=per_process // samples),
                )
                if _may_run(changed):
                    memory = run_memory(workload, changed, layout)
                    yield Proposal(changed, layout.strategy, memory, (is_offloaded, slowness, -samples, simplicity))


def _best(fitting: list[Proposal]) -> list[Proposal]:
    """The largest micro-batch of each strategy and recomputation, the probably fastest first."""
    found: dict[tuple[int, int], Proposal] = {}
    for one in sorted(fitting, key=lambda one: one.rank):
        found.setdefault((one.rank[1], one.rank[3]), one)
    return list(found.values())[:SHOWN]


def _report(
    best: list[Proposal], config: Config, target: FitTarget, gpus: int, shares: int, picture: tuple[int, int]
) -> str:
    per_process = config.system.batch_size * config.system.gradient_accumulation
    processes = f"{gpus} GPUs" if shares == gpus else f"{shares} groups of {gpus // shares} GPUs that share samples,"
    lines = [
        f"an estimate, not a measurement: what fits {USABLE_SHARE:.0%} of {target.gpu_gib:g} GiB at {picture[0]} × "
        f"{picture[1]} pixels; global batch {per_process * shares:,} = {per_process:,} × {processes} as configured",
        f"{'micro-batch':>11}  {'accumulation':>12}  {'recomputation':>13}  {'strategy':<22}"
        f"{'GPU GiB':>8}{'CPU GiB':>9}",
        *(_row(one) for one in best),
        "overrides of the first row, probably the fastest:",
        " ".join(best[0].overrides(config)),
    ]
    return "\n".join(lines)


def _row(one: Proposal) -> str:
    system, memory = one.config.system, one.memory
    recompute = RECOMPUTATIONS[one.config.model.gradient_checkpointing]
    return (
        f"{system.batch_size:>11}  {system.gradient_accumulation:>12}  {recompute:>13}  {_name(one):<22}"
        f"{memory.device / 2**30:>8.1f}{memory.cpu / 2**30:>9.1f}"
    )


def _name(one: Proposal) -> str:
    options = one.config.distributed
    return one.strategy + (" + offload" if options.offload_optimizer or options.offload_parameters else "")


def _least(one: Proposal, config: Config, target: FitTarget, gpus: int) -> str:
    needed = one.memory.device / 2**30
    return (
        f"gpu_gib: {target.gpu_gib:g} GiB on {gpus} GPUs is too little; the least estimated need is {needed:.1f} GiB, "
        f"{needed / USABLE_SHARE:.1f} GiB with the reserve, by {' '.join(one.overrides(config))}; take larger or more "
        "GPUs, a smaller dataset.params.resolution, or optimizer.name=lion or adamw_8bit"
    )
