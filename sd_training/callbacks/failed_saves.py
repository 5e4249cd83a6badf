"""What happens when a save fails: it is told, the run goes on, and too many in a row end it."""

from pathlib import Path

from sd_training.checkpoint.durable import free_bytes
from sd_training.errors import SaveError
from sd_training.incident_log import note_incident
from sd_training.rank_log import get_logger, is_main_process

log = get_logger(__name__)


class FailedSaves:
    """Counts failed saves in a row; the same on every process.

    Args:
        run_dir: the run folder; `incidents.jsonl` in it gets a line for each.
        most: so many in a row end the run.
    """

    def __init__(self, run_dir: Path, most: int) -> None:
        self.run_dir = run_dir
        self.most = most
        self.in_a_row = 0

    def succeeded(self) -> None:
        """Counting starts anew."""
        self.in_a_row = 0

    def failed(self, step: int, error: OSError, *, is_last: bool) -> None:
        """Told loudly.

        Args:
            step: optimizer steps completed.
            error: the same on every process, naming folder and free space.
            is_last: whether no other save will follow.

        Raises:
            SaveError: this one counts too many, or was the last one.
        """
        self.in_a_row += 1
        if is_main_process():
            log.error(f"save of step {step:,} failed ({self.in_a_row} in a row): {error}")
            facts = {"cause": str(error), "free_bytes": _free(self.run_dir), "failed_in_a_row": self.in_a_row}
            note_incident(self.run_dir, "save failed", step, **facts)
        kept = f"older checkpoints in {self.run_dir / 'checkpoints'} are intact; the same command goes on from them"
        if is_last:
            raise SaveError(f"the last save of this run, of step {step:,}, failed: {error}; {kept}")
        if self.in_a_row >= self.most:
            raise SaveError(f"{self.in_a_row} saves in a row failed (checkpoint.max_failed_saves): {error}; {kept}")


def _free(folder: Path) -> int | None:
    try:
        return free_bytes(folder)
    except OSError:
        return None
