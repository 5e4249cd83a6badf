"""Which steps saw which samples: computed, against what the steps of a run with restarts have recorded."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts import find_sample
from sd_training.errors import UserError
from tests import makers
from tests.integration.record_ids import RecordIds, read_ids
from tests.integration.training import CrashAfter, Interrupted, options, train

SHAPES = [(40, 40), (48, 24), (24, 48)]
CORRUPT, SMALL, FILTERED = 5, 7, 8


def write_data(folder: Path) -> None:
    """Two data sets with the same keys. In the first one of three shapes by turns, some samples are to be filtered out,
    one is too small and one corrupt."""
    samples = []
    for number in range(36):
        width, height = (4, 4) if number == SMALL else SHAPES[number % 3]
        (sample,) = makers.caption_samples(1, number, width=width, height=height)
        sample["jpg"] = sample["jpg"][:-200] if number == CORRUPT else sample["jpg"]
        samples.append({**sample, "json": json.dumps({"keep": int(number % 9 < 8)}).encode()})
    for shard in range(3):
        makers.write_shard(folder / "first" / f"{shard}.tar", samples[shard::3])
    makers.write_shard(folder / "second" / "0.tar", makers.caption_samples(15))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path) -> Path:
    """Three starts: after a crash with another accumulation, then with another seed, batch and filter. Each has done
    steps after the save that the next one resumes from; the last is to do more."""
    home = tmp_path_factory.mktemp("found")
    write_data(home / "data")
    buckets = {"mode": "ladder", "step": 8, "min_side": 8, "upscale": "false"}
    common: dict[str, Any] = {f"dataset__params__buckets__{name}": value for name, value in buckets.items()}
    common |= {
        "dataset__mix": f"[{{params: {{path: {home}/data/second}}, weight: 0.5}}]",
        "dataset__params__filters__keep": "1",
        "dataset__params__lanes": 2,
        "dataset__params__window": 2,
        "dataset__params__max_bad_fraction": 0.5,
        "dataset__params__index_dir": home / "index",
        "conditioning__dropout_prob": 0.3,
        "experiment__save_every": 5,
        "model__use_ema": False,
    }
    starts: list[tuple[dict[str, Any], int]] = [
        ({"system__batch_size": 4, "experiment__num_examples_to_see": 120}, 14),
        ({"system__batch_size": 2, "system__gradient_accumulation": 2, "experiment__num_examples_to_see": 120}, 2 * 12),
        (
            {
                "system__batch_size": 6,
                "experiment__num_examples_to_see": 240,
                "experiment__seed": 5,
                "dataset__params__filters__keep": "not null",
                "dataset__params__allow_change": True,
            },
            11,
        ),
    ]
    for number, (changes, micro_batches) in enumerate(starts):
        (home / f"ids{number}").mkdir()
        argv = options(home / "run", pipeline_dir, home / "data" / "first", **{**common, **changes})
        with pytest.raises(Interrupted):
            train(argv, RecordIds(home / f"ids{number}"), CrashAfter(micro_batches))
    return home / "run"


def recorded(run_dir: Path) -> dict[int, list[tuple[int, int]]]:
    """Step → position and sample id of what was trained on; what was done again counts once."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for number in range(3):
        own = read_ids(run_dir.parent / f"ids{number}")
        steps = {step: seen for step, seen in steps.items() if step < min(own)} | own
    return steps


def test_every_sample_is_found_where_it_was_seen_and_nowhere_else(run_dir: Path) -> None:
    steps, before = recorded(run_dir), sorted(run_dir.rglob("*"))
    assert sorted(steps) == list(range(31))
    stretches = find_sample.open_run(run_dir, ())
    assert [(stretch.first, stretch.end) for stretch in stretches] == [(0, 10), (10, 20), (20, 40)]
    num_replaced = 0
    for stretch in stretches:
        known, first_id = range(stretch.first, min(stretch.end, 31)), 0
        expected = [(step, *seen) for step in known for seen in steps[step]]
        found = []
        for number, dataset in enumerate(stretch.data.datasets):
            for sample in range(len(dataset.index)):
                visits = find_sample.visits_of(stretch, number, sample)
                own = [visit for visit in visits if visit.request.sample == sample]
                found += [(visit.step, visit.request.position, first_id + sample) for visit in own]
                num_replaced += sum(bool(visit.skipped) for visit in own)
                assert bool(visits) or sample != CORRUPT
                assert not (visits and dataset.exclusion(sample, stretch.data.table))
            first_id += len(dataset.index)
        assert sorted(entry for entry in found if entry[0] in known) == expected
        for step in known:
            listed = find_sample.visits_of_step(stretches, step + 1)
            firsts = stretch.data.samples().first_ids
            ids = [(v.request.position, firsts[v.request.dataset] + v.request.sample) for v in listed]
            assert ids == steps[step]
    assert num_replaced > 3
    assert sorted(run_dir.rglob("*")) == before


@pytest.fixture
def printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs the script on the run; gives the lines that it prints."""

    def run(*words: str, run_dir: Path = run_dir) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["find_sample.py", str(run_dir), *words])
        capsys.readouterr()
        find_sample.main()
        return capsys.readouterr().out.splitlines()

    return run
