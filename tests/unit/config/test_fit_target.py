"""The words of `--fit`."""

import pytest

from sd_training.config.fit_target import FitTarget, take_target
from sd_training.errors import ConfigError


def test_words_are_taken_out() -> None:
    target, rest = take_target(["config=a.yaml", "gpu_gib=79.5", "system.batch_size=2", "gpus=8"])
    assert target == FitTarget(79.5, 8)
    assert rest == ["config=a.yaml", "system.batch_size=2"]
    assert take_target(["gpu_gib=80"])[0] == FitTarget(80, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "gpu_gib: is required with --fit"),
        (["gpus=2"], "gpu_gib: is required with --fit"),
        *((["gpu_gib=" + text], f"gpu_gib: is '{text}'; allowed: ") for text in ("", "0", "-1", "many", "inf", "nan")),
        *((["gpu_gib=8", "gpus=" + text], f"gpus: is '{text}'; allowed: ") for text in ("", "0", "-1", "1.5", "all")),
    ],
)
def test_senseless_words(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        take_target(words)
    assert [problem for problem in error.value.problems if problem.startswith(said)] == error.value.problems


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        take_target(["gpus=none"])
    assert len(error.value.problems) == 2
