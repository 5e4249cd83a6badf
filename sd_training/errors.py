"""Errors that are the user's to fix: they are printed as text, without a traceback, and exit with status 2."""

from collections.abc import Sequence


class UserError(Exception):
    """Something outside the program is wrong. The message names the option or file, the value and the remedy."""


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


class CheckpointError(UserError):
    """Checkpoints exist but none of them verifies, or one belongs to another run."""
