from collections.abc import Callable

import pytest

from sd_training.cli import run_cli
from sd_training.errors import ConfigError


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


def test_defects_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_cli(raising(ZeroDivisionError()))


def test_success_returns() -> None:
    done: list[int] = []
    run_cli(lambda: done.append(1))
    assert done == [1]
