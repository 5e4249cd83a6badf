"""One line of the reliability table: a fault, what is promised, and what was seen."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What came of one kind of fault."""

    fault: str
    """What was done to the runs, in a few words."""
    promise: str
    """What a run promises under it."""
    trials: int
    """How many times it was done."""
    figure: str
    """What was counted or measured, with units."""
    is_kept: bool
    """Whether the promise held every time."""
