"""Batch arithmetic, done once: micro-batch × accumulation × processes = images per optimizer step."""

from dataclasses import dataclass

from sd_training.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How the images of a run are cut into optimizer steps."""

    micro_batch: int
    """Samples per process and forward pass."""
    accumulation: int
    """Micro-batches per optimizer step and process."""
    processes: int
    """Training processes over all machines that draw samples of their own."""
    num_examples: int
    """Length of the run [samples over all processes]."""
    sharing: int = 1
    """Processes that work together on the same samples (tensor parallelism)."""

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all processes."""
        return self.micro_batch * self.accumulation * self.processes

    @property
    def num_steps(self) -> int:
        """Whole optimizer steps of the run.

        Raises:
            ConfigError: if the run is shorter than one optimizer step.
        """
        steps = self.num_examples // self.global_batch
        if steps == 0:
            raise ConfigError(
                f"experiment.num_examples_to_see: is {self.num_examples:,}, less than one optimizer step of "
                f"{self._product()}; raise it, or lower system.batch_size or system.gradient_accumulation"
            )
        return steps

    def sentence(self) -> str:
        """The arithmetic in one sentence."""
        return (
            f"{self._product()} per optimizer step; "
            f"{counted(self.num_examples, 'image')} = {counted(self.num_steps, 'step')}"
        )

    def _product(self) -> str:
        processes = counted(self.processes, "process", "processes")
        total = counted(self.global_batch, "image")
        return f"batch_size {self.micro_batch} × accumulation {self.accumulation} × {processes} = {total}"


def counted(number: int, one: str, several: str = "") -> str:
    """`1 step`, `2,500 steps`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
