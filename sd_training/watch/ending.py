"""How one of several processes ends: the first one says why, all have its status, nobody adds a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sd_training.cli import print_error
from sd_training.errors import UserError
from sd_training.rank_log import is_main_process
from sd_training.redaction import redacted
from sd_training.watch.first_end import FirstEnd
from sd_training.watch.status_file import tell_status

DEFECT = 1
"""Python's status after an exception."""
_OTHER_S = 10.0
"""A process that fails because another one does learns of it within this time."""


@contextmanager
def ended_together(first_end: FirstEnd, *, is_child: bool) -> Iterator[None]:
    """Around everything that several processes do together.

    Args:
        first_end: note of the process that ends first.
        is_child: started by the first process, which is killed at once when a child ends with another status than 0.

    Raises:
        SystemExit: another process ended first, or this is a child; what there is to say has been said.
    """
    try:
        yield
    except Exception as error:
        is_mistake = isinstance(error, UserError)
        status = error.exit_status if isinstance(error, UserError) else DEFECT
        other = None if is_mistake else first_end.wait_for_another(_OTHER_S)
        if other is None and not first_end.claim(status, redacted(f"{type(error).__name__}: {error}")):
            other = first_end.of_another()
        tell_status(status if other is None else other.status)
        if other is not None:
            raise SystemExit(0 if is_child else other.status) from None
        # A mistake of all is else told by the first process, which has just left it to this one.
        is_left_to_this = isinstance(error, UserError) and not is_main_process() and first_end.is_own()
        if not is_child and not is_left_to_this:
            raise
        if isinstance(error, UserError):
            print_error(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # the one without secrets
        raise SystemExit(0 if is_child else status) from None
