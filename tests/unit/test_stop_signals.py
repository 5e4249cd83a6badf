import os
import signal

import pytest

from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.signals import StopSignals

ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def nothing_ignored(handlers_of_before: None) -> None:
    """As in a terminal; a shell may have started the tests in the background, with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (*ALL[:2], signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_however_often_it_comes(number: signal.Signals) -> None:
    signals = StopSignals()
    signals.listen()
    assert signals.status == 0
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert signals.status == EXIT_STOPPED


def test_ctrl_c_is_stronger_whichever_came_first() -> None:
    for order in ((signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)):
        signals = StopSignals()
        signals.listen()
        for number in order:
            os.kill(os.getpid(), number)
        assert signals.status == EXIT_INTERRUPTED


def test_handlers_return_unless_a_signal_came() -> None:
    before = [signal.getsignal(number) for number in ALL]
    signals = StopSignals()
    signals.listen()
    assert [signal.getsignal(number) for number in ALL] == [signals._note] * 3
    signals.restore()
    assert [signal.getsignal(number) for number in ALL] == before
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    signals.restore()
    assert [signal.getsignal(number) for number in ALL] == [signals._note] * 3


def test_a_late_warning_means_nothing() -> None:
    """A warning of SLURM's that comes when everything is saved must not kill the process on its way out."""
    before = [signal.getsignal(number) for number in ALL]
    signals = StopSignals()
    signals.expect_warning()
    assert [signal.getsignal(number) for number in ALL] == [before[0], signals._note, before[2]]
    signals.listen()
    signals.restore()
    assert [signal.getsignal(number) for number in ALL] == [before[0], signal.SIG_IGN, before[2]]


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    StopSignals().listen()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_nothing_changes_the_status_on_the_way_out() -> None:
    """Ignored, not handled: when the interpreter is taken down it puts back the default of its own handlers."""
    with pytest.raises(SystemExit) as ended:
        StopSignals().leave(EXIT_STOPPED)
    assert ended.value.code == EXIT_STOPPED
    assert [signal.getsignal(number) for number in ALL] == [signal.SIG_IGN] * 3


def test_a_save_is_asked_for_and_nothing_stops() -> None:
    signals = StopSignals()
    signals.expect_warning()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert (signals.status, signals.num_saves_asked) == (0, 2)
