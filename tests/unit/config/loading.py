"""A command line that loads, files for it, and the report of one that does not load."""

from pathlib import Path
from textwrap import dedent

import pytest

from sd_training.config.load import load_config
from sd_training.errors import ConfigError

BASE = (
    "experiment.log_dir=runs",
    "experiment.name=first",
    "experiment.num_examples_to_see=100_000",
    "dataset.params.path=data/{000..999}.tar",
    "model.pretrained=someone/pipeline",
)


def write(path: Path, text: str) -> str:
    path.write_text(dedent(text), encoding="utf-8")
    return str(path)


def problems(*argv: str) -> list[str]:
    """The report; every line of it in plain words."""
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    report = error.value.problems
    for jargon in ("Traceback", "[type=", "Input should", "validation error", "full_key", "pydantic", "omegaconf"):
        assert not any(jargon in line for line in report), report
    return report


def only(*argv: str) -> str:
    report = problems(*argv)
    assert len(report) == 1, report
    return report[0]
