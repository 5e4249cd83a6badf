import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sd_training import log as rank_log
from sd_training.checkpoint.folder import acquire_run_lock
from sd_training.errors import EXIT_UNEXPECTED, BadSamplesError
from sd_training.log import hide_in_tracebacks
from sd_training.watchdog import FirstFailure, exit_together
from tests.unit.checkpoint.test_folder import listening_to_the_log


def ends(folder: Path) -> tuple[FirstFailure, FirstFailure]:
    return FirstFailure(folder, 0), FirstFailure(folder, 1)


def test_one_process_is_the_first(tmp_path: Path) -> None:
    first, second = ends(tmp_path)
    assert first.of_another() is None
    assert first.claim(88, "why") and not second.claim(2, "something else")
    end = second.of_another()
    assert end is not None and (end.rank, end.status, end.text) == (0, 88, "why")
    assert first.of_another() is None and second.wait_for_another(0) == end
    first.clear()
    assert second.wait_for_another(0.2) is None
    assert list(tmp_path.iterdir()) == []


def test_a_note_older_than_the_process_is_of_an_earlier_start(tmp_path: Path) -> None:
    first, second = ends(tmp_path)
    assert first.claim(87, "before")
    os.utime(first.path, (0, 0))
    assert second.of_another() is None
    assert first.claim(88, "now") and not second.claim(1, "because of it")
    end = second.of_another()
    assert end is not None and end.text == "now"


def test_a_process_of_a_start_that_lost_the_run_writes_no_note(tmp_path: Path) -> None:
    first, _ = ends(tmp_path)
    first.check_owner = acquire_run_lock(tmp_path).check
    acquire_run_lock(tmp_path).release()
    assert not first.claim(69, "another start has the run") and not first.path.exists()


def test_a_process_that_was_slow_to_start_hears_of_one_that_failed_meanwhile(tmp_path: Path) -> None:
    assert FirstFailure(tmp_path, 0).claim(2, "at once")
    late = FirstFailure(tmp_path, 1)
    assert not late.claim(2, "the same") and late.of_another() is not None


@pytest.mark.parametrize("text", ["", "{", '{"rank": 1}', "[]"])
def test_a_file_that_is_none_says_nothing(text: str, tmp_path: Path) -> None:
    first, _ = ends(tmp_path)
    first.path.write_text(text)
    assert first.of_another() is None and first.claim(2, "why")


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    first = FirstFailure(tmp_path / "missing", 0)
    assert not first.claim(2, "why") and first.of_another() is None


def test_of_two_that_fail_at_once_one_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), is_first = ends(tmp_path), []
    current = first._current

    def meanwhile() -> object:
        found = current()
        is_first.append(second.claim(1, "second"))
        return found

    monkeypatch.setattr(first, "_current", meanwhile)
    is_first.append(first.claim(1, "first"))
    assert is_first.count(True) == 1


def test_where_no_note_can_be_written_rank_0_prints_a_mistake_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(BadSamplesError), exit_together(FirstFailure(tmp_path / "missing", 1), is_child=False):
        raise BadSamplesError("too many")
    assert capsys.readouterr().err == ""


def test_a_mistake_is_told_by_the_first_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ends(tmp_path)
    with pytest.raises(BadSamplesError), exit_together(first, is_child=False):
        raise BadSamplesError("too many")
    with pytest.raises(SystemExit) as ended, exit_together(second, is_child=False):
        raise BadSamplesError("too many here as well")
    assert ended.value.code == 88 and capsys.readouterr().err == ""


def test_a_mistake_that_another_process_was_first_with_is_told_by_that_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process leaves it to that one, and its launcher would end that one before it says anything."""
    first, second = ends(tmp_path)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended, exit_together(second, is_child=False):
        raise BadSamplesError("too many")
    assert ended.value.code == 88 and capsys.readouterr().err == "error: too many\n"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended, exit_together(first, is_child=False):
        raise BadSamplesError("too many")
    assert ended.value.code == 88 and capsys.readouterr().err == ""


def test_who_fails_because_of_another_adds_no_traceback(tmp_path: Path) -> None:
    first, second = ends(tmp_path)
    second.claim(88, "too many")
    with pytest.raises(SystemExit) as ended, exit_together(first, is_child=False):
        raise RuntimeError("connection closed by peer")
    assert ended.value.code == 88


def test_a_child_says_it_itself_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ends(tmp_path)
    with pytest.raises(SystemExit) as ended, exit_together(second, is_child=True):
        raise BadSamplesError("too many")
    assert ended.value.code == 0 and capsys.readouterr().err == "error: too many\n"
    with pytest.raises(SystemExit) as ended, exit_together(first, is_child=False):
        raise RuntimeError("connection closed by peer")
    assert ended.value.code == 88


def test_a_child_prints_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sd_training.watchdog._NOTE_WAIT_S", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    hide_in_tracebacks()
    with pytest.raises(SystemExit), exit_together(ends(tmp_path)[1], is_child=True):
        raise RuntimeError("\x1b[2J canary-1 https://u:canary-2@h/x?sig=canary-3")
    said = capsys.readouterr().err
    assert "canary" not in said and "RuntimeError: \\u001b[2J (hidden) https://h/x?(hidden)" in said


def test_a_defect_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sd_training.watchdog._NOTE_WAIT_S", 0.0)
    first, second = ends(tmp_path)
    with pytest.raises(SystemExit), exit_together(second, is_child=True):
        raise ZeroDivisionError
    assert "Traceback" in capsys.readouterr().err
    end = first.of_another()
    assert end is not None and end.status == EXIT_UNEXPECTED
    first.clear()
    with pytest.raises(ZeroDivisionError), exit_together(first, is_child=False):
        raise ZeroDivisionError


@pytest.mark.parametrize("act", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_peer_that_is_gone_without_a_word_is_named(
    act: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = ends(tmp_path)
    peer = subprocess.Popen([sys.executable, "-c", f"import os; {act}"])
    # Its parent has not asked for its status yet.
    first.local_peers = {1: peer.pid}
    together = exit_together(first, is_child=False)
    with listening_to_the_log(), pytest.raises(SystemExit) as ended, together:
        raise RuntimeError("NCCL error: remote process exited")
    assert ended.value.code == EXIT_UNEXPECTED
    end = first.of_another()
    assert end is not None and (end.rank, end.status) == (1, EXIT_UNEXPECTED)
    assert "rank 1 failed first, so the others end too: it ended without a message" in caplog.text
    peer.wait()
    first.clear()
    end = first.wait_for_another(5)
    assert end is not None and end.text == "it ended without a message"


def test_the_first_to_fail_is_the_first_to_end(tmp_path: Path) -> None:
    """torchrun names the one whose end it sees first, and that one may take a while to print its traceback."""
    first, second = ends(tmp_path)
    peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"])
    second.claim(EXIT_UNEXPECTED, "RuntimeError: a defect")
    first.local_peers = {1: peer.pid}
    with pytest.raises(SystemExit), exit_together(first, is_child=False):
        raise RuntimeError("NCCL error: remote process exited")
    assert peer.poll() == 0


def test_the_sentence_comes_from_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log._console, "stream", console := io.StringIO())
    others = [FirstFailure(tmp_path, rank) for rank in range(3)]
    others[0].claim(EXIT_UNEXPECTED, "ValueError: of\ntwo lines")
    for follower in others[1:]:
        with pytest.raises(SystemExit), exit_together(follower, is_child=False):
            raise RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer")
    assert console.getvalue().count("rank 0 failed first, so the others end too: ValueError: of two lines") == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # of a launcher, which would cut the way out short
