"""Which steps saw which samples: computed, against what the steps of a run with restarts have recorded."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts import find_sample
from sd_training.errors import UserError
from tests import makers
from tests.integration.http_files import web_files
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


def test_a_sample_is_named_by_its_shard_where_its_key_is_not_enough(run_dir: Path, printed: Any) -> None:
    with pytest.raises(UserError, match=r"2 samples .* '000003'; give one as SHARD/KEY: \S+first/0.tar/000003, "):
        printed("000003")
    name = f"{run_dir.parent}/data/second/0.tar/000003"
    said, *counts, blank, heading = (lines := printed(name))[:6]
    assert said == name and blank == "" and heading.split()[:2] == ["step", "position"]
    assert all(re.fullmatch(r"steps \d+ to \d+, data set 2: \d visits?", line) for line in counts)
    for row, batch in ((lines[6], 4), (lines[-1], 6)):
        step, position = map(int, row.split()[:2])
        assert position // batch == step - 1
        assert row.split() in map(str.split, printed("--step", str(step)))


def test_what_is_left_out_is_told_with_its_reason(run_dir: Path, printed: Any) -> None:
    first = f"{run_dir.parent}/data/first"
    said = printed(f"{first}/2.tar/{FILTERED:06d}")
    assert said[1:3] == [f"steps {steps}, data set 1: left out: filter keep == 1" for steps in ("1 to 10", "11 to 20")]
    assert re.fullmatch(r"steps 21 to 40, data set 1: \d visits", said[3])
    small = printed(f"{first}/1.tar/{SMALL:06d}")
    assert len(small) == 5 and small[3].endswith("1: left out: no bucket for 4 × 4 pixels (0 is unknown)")
    corrupt = printed(f"{first}/2.tar/{CORRUPT:06d}")[6:]
    assert all(f"instead of {first}/2.tar/{CORRUPT:06d} (image cannot be decoded: " in line for line in corrupt)
    assert {" seen " in line for line in corrupt} == {True, False} == {" to come " in line for line in corrupt}


def test_what_is_shown_of_a_visit_is_what_the_loader_delivers(run_dir: Path, printed: Any, tmp_path: Path) -> None:
    listed = printed("--step", "25", "--sheet", str(tmp_path / "sheet.png"))
    stretches = find_sample.open_run(run_dir, ())
    data = stretches[-1].data
    batch = data.samples()[data.loader(0, lambda: 24).request(24, 0)].batch
    assert batch is not None
    sheet = np.asarray(Image.open(tmp_path / "sheet.png")).transpose(2, 0, 1)
    assert np.array_equal(sheet, np.concatenate(list(batch.pixels.numpy()), axis=2))
    for row, visit in enumerate(find_sample.visits_of_step(stretches, 25)):
        height, width = batch.original_size[row].tolist()
        (top, left), (size_y, size_x) = batch.crop_top_left[row].tolist(), batch.target_size[row].tolist()
        cells = listed[row + 1].split()
        shown = [int(edge) for corner in cells[4].split("-") for edge in corner.split(",")]
        assert cells[3] == f"{size_y}×{size_x}" and cells[5] == f"{height}×{width}"
        if "flipped" in cells:  # `crop_top_left` is that of the mirrored picture
            shown[0], shown[2] = width - shown[2], width - shown[0]
        scale = max(size_y / height, size_x / width)
        wanted = np.array([left, top, left + size_x, top + size_y]) / scale
        # Half a pixel of the print, and half a pixel of the picture resized as a whole, along its longer side.
        assert np.abs(shown - wanted).max() <= 0.5 + 0.5 / scale
        is_dropped = bool(batch.dropped["text_encoder"][row])
        assert (visit.caption == "(dropped)") == is_dropped and visit.caption in listed[row + 1]
        tokens = data.tokenizers["text_encoder"].encode("" if is_dropped else visit.caption).tokens
        assert np.array_equal(tokens, batch.tokens["text_encoder"][row].numpy())
    with pytest.raises(UserError, match=r"--step: is 41, but .* are 1 to 10, 11 to 20, 21 to 40"):
        printed("--step", "41")


def test_a_sample_of_a_web_server_is_named_by_its_url(tmp_path: Path, pipeline_dir: Path, printed: Any) -> None:
    names = [f"images/{number}.jpg" for number in range(8)]
    with web_files() as server:
        server.files = {f"/{name}": makers.encode(makers.picture(i, 24, 24)) for i, name in enumerate(names)}
        rows = "".join(f"{name},a picture\n" for name in names)
        server.files["/table.csv"] = f"image,caption\n{rows}".encode()
        (tmp_path / "ids").mkdir()
        changes: dict[str, Any] = {
            "dataset__type": "Table",
            "dataset__params__index_dir": tmp_path / "index",
            "system__batch_size": 4,
        }
        changes |= {"dataset__params__path": f"{server.url}/table.csv", "experiment__num_examples_to_see": 24}
        train(options(tmp_path / "run", pipeline_dir, Path("x"), **changes), RecordIds(tmp_path / "ids"))
        seen = {step + 1 for step, pairs in read_ids(tmp_path / "ids").items() if 3 in (sample for _, sample in pairs)}
        lines = printed(f"{server.url}/table.csv/{names[3]}", run_dir=tmp_path / "run")
        assert {int(line.split()[0]) for line in lines[4:]} == seen and len(seen) == 3
        assert lines[0] == f"{server.url}/table.csv/{names[3]}"
        assert printed(names[3], run_dir=tmp_path / "run") == lines
        assert printed(f"{server.url}/{names[3]}", run_dir=tmp_path / "run") == lines


def test_of_data_that_have_changed_nothing_is_told(run_dir: Path, printed: Any, tmp_path: Path) -> None:
    other, name = "dataset.mix=[]", f"{run_dir.parent}/data/first/0.tar/000003"
    assert all(line.endswith("1: unknown, because the data have changed since") for line in printed(name, other)[1:4])
    with pytest.raises(UserError, match="on data that have not changed are none"):
        printed("--step", "1", other)
    with pytest.raises(UserError, match="give the key of one sample, or --step N"):
        printed()
    with pytest.raises(UserError, match="0 samples of this run's data have the key 'nowhere'"):
        printed("nowhere")
    with pytest.raises(UserError, match=r"run\.json: does not say how a run was started"):
        printed(name, run_dir=tmp_path)
