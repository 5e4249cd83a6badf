"""What follows from config and launcher alone: devices, batch arithmetic, folders, precision."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sd_training.config.paths import output_path
from sd_training.config.plan import BatchPlan, Layout, find_layout
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.log import get_logger, is_main_process
from sd_training.parallel.launch import Launch, find_launch

log = get_logger(__name__)


@dataclass(frozen=True)
class Plan:
    """Everything about a run that follows from the config and the launcher, before anything is loaded."""

    config: Config
    launch: Launch
    layout: Layout
    batch: BatchPlan
    run_dir: Path
    precision: str
    """no, bf16 or fp16, as this device can do it."""

    @property
    def is_child(self) -> bool:
        """Whether Lightning's launcher started this process. It kills the first process, with a status of its own, when
        a child ends with another status than 0."""
        return self.launch.launcher == "own" and not is_main_process()


def make_plan(config: Config, *, is_described: bool = False) -> Plan:
    """Devices, batch arithmetic and folders.

    Args:
        is_described: the run is only described, and may be one of other machines than this one.

    Raises:
        ConfigError: when the config contradicts itself, the launcher or the machine.
    """
    launch = find_launch(config.trainer, is_described=is_described)
    layout = find_layout(config.distributed, launch.processes, launch.devices)
    if layout.strategy.startswith("deepspeed") and find_spec("deepspeed") is None:
        raise ConfigError(
            f"distributed.strategy: {layout.strategy} needs the package deepspeed; pip install deepspeed, or use fsdp"
        )
    batch = BatchPlan(
        micro_batch=config.system.batch_size,
        accumulation=config.system.gradient_accumulation,
        processes=layout.mesh.data_ranks,
        num_examples=config.experiment.num_examples_to_see,
        sharing=layout.mesh.tensor,
    )
    precision = config.model.mixed_precision
    if precision == "fp16" and launch.accelerator == "cpu":
        log.info("model.mixed_precision: a CPU cannot train in fp16, so bf16 is used here")
        precision = "bf16"
    run_dir = output_path(config.experiment.log_dir) / config.experiment.name
    return Plan(config, launch, layout, batch, run_dir, precision)
