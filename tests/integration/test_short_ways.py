"""The two paths in docs/architecture.md, a sample's to its loss and a save's, list exactly the files of the package.

A real run is profiled: every call of a function of the package is noted with its file while a micro-batch is read and
sent through `training_step`, and while a checkpoint is written.
"""

import re
import sys
import threading
from collections import defaultdict
from types import FrameType
from typing import Any

import pytest
import pytorch_lightning as pl

from tests import makers
from tests.integration.training import ROOT, options, train

PACKAGE = ROOT / "sd_training"
ROOTS = {
    ("data/loader.py", "__next__"): "sample",
    ("data/loader.py", "__iter__"): "sample",
    ("training.py", "training_step"): "sample",
    ("callbacks/save.py", "_begin_checkpoint"): "save",
    ("callbacks/save.py", "seal"): "save",
}
"""Where the ways begin: (file, function) → way."""
OTHERS = {"state_dict", "on_save_checkpoint"}
"""Where a save asks callbacks, the module and the data for what they want to be saved; that is theirs."""


class Calls(pl.Callback):
    """Notes files from the second optimizer step on, when everything that is made once is made."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = defaultdict(set)
        """Way → files."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            threading.setprofile(self._note)
            sys.setprofile(self._note)

    def on_train_end(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            return
        file = _file(frame)
        above: FrameType | None = frame
        while above is not None and above.f_code.co_name not in OTHERS:
            way = ROOTS.get((_file(above), above.f_code.co_name))
            if way is not None:
                self.files[way].add(file)
                return
            above = above.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")


def listed(heading: str) -> list[str]:
    """Files of a numbered list of the page, one per item."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"### {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Way → files, of one run without averages."""
    home = tmp_path_factory.mktemp("ways")
    pipeline, shards = makers.save_tiny_pipeline(home / "pipeline"), makers.caption_shards(home / "shards")
    noted = Calls()
    changes = {"experiment__num_examples_to_see": 24, "model__use_ema": False}
    train(options(home / "run", pipeline, shards, **changes), noted)
    return noted.files


@pytest.mark.parametrize(
    ("way", "heading", "most"),
    [("sample", "Path of a sample, from its place in a shard to its loss", 12), ("save", "Path of a save", 4)],
)
def test_exactly_the_listed_files_take_part(way: str, heading: str, most: int, calls: dict[str, set[str]]) -> None:
    files = listed(heading)
    assert len(files) <= most and sorted(calls[way]) == sorted(files)
