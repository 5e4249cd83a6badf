"""How one of several processes ends: the first one says why, all have its status, nobody else adds a traceback."""

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from sd_training.cli import print_error, tell_torchrun
from sd_training.errors import UserError
from sd_training.exit_status import UNEXPECTED
from sd_training.rank_log import get_logger, is_main_process
from sd_training.redaction import redacted
from sd_training.run_log import RunLog
from sd_training.watch.first_end import End, FirstEnd
from sd_training.watch.status_file import tell_status

log = get_logger(__name__)

_OTHER_S = 10.0
"""A process that fails because another one does learns of it within this time."""
_OF_THE_NETWORK = re.compile(
    r"gloo|nccl|Connection (?:reset|closed|refused)|Broken pipe|recv.*bytes|TCPStore|socket", re.IGNORECASE
)
"""In the text of an error of torch: a collective, or the store of the processes, lost another one."""
_MAX_REASON = 500
"""Of what the first one said, in the sentence of another [characters]."""


def is_of_the_network(error: BaseException) -> bool:
    """Whether an error is what a process meets when another one of the run has ended; RuntimeError is what torch raises
    in a collective, also inside a backward pass."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _OF_THE_NETWORK.search(str(error)) is not None


@contextmanager
def ended_together(
    first_end: FirstEnd,
    *,
    is_child: bool,
    local_peers: Callable[[], Mapping[int, int]] = lambda: MappingProxyType({}),
    run_log: RunLog | None = None,
) -> Iterator[None]:
    """Around everything that several processes do together.

    Args:
        first_end: note of the process that ends first.
        is_child: started by the first process, which is killed at once when a child ends with another status than 0.
        local_peers: gives rank and process id of the others on this machine.
        run_log: gets what is printed here.

    Raises:
        SystemExit: another process ended first, or this is a child; what there is to say has been said.
    """
    try:
        yield
    except Exception as error:
        # Launchers end by SIGTERM who outlives another process; this one still has to say something.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status = error.exit_status if isinstance(error, UserError) else UNEXPECTED
        other = first_end.wait_for_another(_OTHER_S, local_peers()) if is_of_the_network(error) else None
        text = redacted(f"{type(error).__name__}: {error}")
        if other is None and not first_end.claim(status, text):
            other = first_end.of_another()
        tell_status(status if other is None else other.status)
        if other is not None:
            _name(other, first_end.rank)
            raise SystemExit(0 if is_child else other.status) from None
        tell_torchrun(text)
        # A mistake of all is else told by the first process, which has just left it to this one.
        is_left_to_this = isinstance(error, UserError) and not is_main_process() and first_end.is_own()
        if not is_child and not is_left_to_this:
            raise
        if isinstance(error, UserError):
            print_error(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # the one without secrets
        if run_log is not None:
            run_log.add_exception(error)
        raise SystemExit(0 if is_child else status) from None


def _name(end: End, rank: int) -> None:
    """The lowest of the other ranks says who ended first. Mistakes are sentences, which that one has said itself."""
    if end.status == UNEXPECTED and rank == int(end.rank == 0):
        said = " ".join(end.text.split())
        log.error(f"rank {end.rank} ended first, so the others end too: {said:.{_MAX_REASON}}")
