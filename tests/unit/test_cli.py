import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sd_training.cli import run_cli
from sd_training.errors import ConfigError
from tests.integration.commands import ROOT


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def test_user_error_is_sentences_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_cli(raising(ConfigError(["a: is wrong", "b: is wrong too"])))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a: is wrong\nerror: b: is wrong too\n"


def test_interrupt_is_status_130() -> None:
    with pytest.raises(SystemExit) as ended:
        run_cli(raising(KeyboardInterrupt()))
    assert ended.value.code == 130


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_reader_of_the_output_may_leave(lines: int) -> None:
    """As `| head -1` does, before all is printed or after."""
    program = f"from sd_training.cli import run_cli; run_cli(lambda: print(*range({lines}), sep='\\n'))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == "" and done.returncode in (0, 128 + signal.SIGPIPE)


def test_defects_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cli(raising(ZeroDivisionError()))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda folder: (folder / "none").read_text(), "{folder}/none: No such file or directory"),
        (lambda folder: folder.read_text(), "{folder}: Is a directory"),
        (lambda folder: (folder / "file" / "x").write_text(""), "{folder}/file/x: Not a directory"),
        (lambda folder: os.replace(folder / "file", folder), "{folder}: Directory not empty"),
        (lambda folder: (folder / ("x" * 300)).mkdir(), "File name too long"),
        (lambda folder: Path("/dev/full").write_text("x"), "error: No space left on device; free space, or name"),
    ],
)
def test_files_that_a_command_cannot_use_are_mistakes(
    act: Callable[[Path], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: act(tmp_path))
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and said.format(folder=tmp_path) in printed
    assert printed.endswith(", or name another place\n")


def test_other_errors_of_the_system_keep_their_traceback(tmp_path: Path) -> None:
    """Those that no path mends, that name no file, and all of a training."""
    for error in (OSError(errno.EIO, "an error", "x"), PermissionError(errno.EPERM, "of a signal")):
        with pytest.raises(OSError) as raised:
            run_cli(raising(error))
        assert raised.value is error
    with pytest.raises(IsADirectoryError):
        run_cli(lambda: tmp_path.write_text(""), explains_files=False)


def test_success_returns() -> None:
    done: list[int] = []
    run_cli(lambda: done.append(1))
    assert done == [1]


GROUP_ENDS = """
import atexit, sys, time
import torch, torch.distributed as distributed
from sd_training.cli import run_cli
from sd_training.errors import ConfigError

def at_exit():
    print("at exit")
    sys.setswitchinterval(100)  # from now on a thread that wants the interpreter waits to the end
    distributed.all_reduce(torch.ones(3), async_op=True)
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        pass

def main():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    atexit.register(at_exit)
    END

run_cli(main)
"""
"""A thread of gloo drops the tensor while the process ends."""


@pytest.mark.parametrize(
    ("end", "status"), [("pass", 0), ("sys.exit(75)", 75), ("raise ConfigError('x: is wrong')", 2)]
)
def test_a_process_with_a_process_group_ends_with_its_status(end: str, status: int) -> None:
    program = GROUP_ENDS.replace("END", end, 1)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert done.stdout.endswith("at exit\n")  # gloo of torch 2.10 prints as well


def test_torchrun_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch reads it for the block that it prints."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("HF_TOKEN", "canary-1234")
    with pytest.raises(SystemExit):
        run_cli(raising(ConfigError("a: canary-1234 is wrong")))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert "traceback : a: (hidden) is wrong\n" in str(ChildFailedError("train", {0: failure}))
