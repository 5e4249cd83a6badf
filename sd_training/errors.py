"""Errors that are the user's to fix: they are printed as text, without a traceback, and exit with a status of their
own.

The exit statuses of a run, for launchers and batch files.

Numbers of 126 and more belong to shells and signals, 64 to 78 to sysexits.h (69 is its EX_UNAVAILABLE, 74 its EX_IOERR,
75 its EX_TEMPFAIL, "try again"), and torchrun, srun and Python itself use 1 and 2. So 86 to 89 can come from this
program only.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

EXIT_UNEXPECTED = 1
"""An unexpected error, or a process of the run that ended on its own; Python's status after an exception."""
EXIT_MISTAKE = 2
"""The user can fix it: an option, a file, a data set. Starting again gives the same message."""
EXIT_TAKEN_OVER = 69
"""Another start of the same run writes in its folder now; this one must not."""
EXIT_UNWRITABLE = 74
"""Saves fail, so further training would be lost. Older checkpoints are intact."""
EXIT_STOPPED = 75
"""Asked to stop by a signal or a time limit, and saved; or storage does not respond. Restart with the same command."""
EXIT_NUMERIC = 86
"""The numerics failed and did not recover: non-finite gradients or a loss that does not come back."""
EXIT_HANG = 87
"""A process did nothing for longer than `watch` allows. Starting again often helps, on another node."""
EXIT_BAD_DATA = 88
"""More samples could not be used than `dataset.params` allows."""
EXIT_INTEGRITY = 89
"""Checkpoints exist and none of them is whole, or weights that must be equal on several processes are not."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, the status that shells use: the user stopped the run (and it saved); do not restart it automatically."""


Result = TypeVar("Result")


class UserError(Exception):
    """Something outside the program is wrong. The message names the option or file, the value and the remedy."""

    exit_status: ClassVar[int] = EXIT_MISTAKE
    """What a command ends with."""


class ConfigError(UserError):
    """One or more configuration problems, reported together.

    Args:
        problems: one sentence each, starting with the option's dotted name.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(UserError):
    """The data set cannot be used: a missing or damaged shard, nothing left after filters, too many bad samples."""


class BadSample(Exception):
    """Raised while one sample is read; the sample is skipped, counted and named. The message is its reason."""


class BadSamplesError(DataError):
    """More samples could not be used than the options allow."""

    exit_status = EXIT_BAD_DATA


class OutageError(DataError):
    """Storage, of data or of the mirror, did not respond after all retries: another start may succeed."""

    exit_status = EXIT_STOPPED


class EncoderError(UserError):
    """An encoder process cannot go on: it was killed, lacks memory, or has failed."""

    exit_status = EXIT_UNEXPECTED


class CheckpointError(UserError):
    """Checkpoints exist but none of them verifies, or one belongs to another run."""


class DamagedCheckpointsError(CheckpointError):
    """Checkpoints exist, and none of them is whole."""

    exit_status = EXIT_INTEGRITY


class SaveError(UserError):
    """Saves fail, so further training would be lost. Older checkpoints are intact."""

    exit_status = EXIT_UNWRITABLE


class TakenOverError(UserError):
    """Another start of the same run writes in its folder now; this one must not."""

    exit_status = EXIT_TAKEN_OVER


class NumericError(UserError):
    """The run makes no progress any more: non-finite steps or loss spikes, and no rollback left. Starting it again does
    not help."""

    exit_status = EXIT_NUMERIC


class IntegrityError(UserError):
    """Weights that must be equal on several processes are not: memory, a device or the communication is at fault."""

    exit_status = EXIT_INTEGRITY


class Checks:
    """Runs steps that do not depend on each other, so that the mistakes of all of them are reported together."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def run(self, step: Callable[[], Result]) -> Result | None:
        """The result of a step, or None where it raised a `UserError`, which is kept."""
        try:
            return step()
        except UserError as error:
            self.errors.append(error)
            return None

    def finish(self) -> None:
        """Raises what the steps raised: one error as it is, several as one error, equal ones once.

        Raises:
            UserError: a step failed. A mistake takes precedence over an outage, which may be gone at the next start.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        lines = [line for text in dict.fromkeys(map(str, self.errors)) for line in text.splitlines()]
        if any(error.exit_status == EXIT_MISTAKE for error in self.errors):
            raise ConfigError(lines) from self.errors[0]
        if self.errors:
            raise type(self.errors[0])("\n".join(lines)) from self.errors[0]
