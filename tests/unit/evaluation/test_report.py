"""The page of a run: what it shows of folders that a run wrote, and of damaged and hostile ones. That Chromium draws it
without an error was looked at by hand (docs/run_page.md)."""

import base64
import hashlib
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
from PIL import Image

from sd_training.callbacks.metrics import COLUMNS, JsonRows, MetricRows
from sd_training.callbacks.run_record import RunRecord
from sd_training.config.changes import resolved_yaml
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from sd_training.evaluation import report
from sd_training.evaluation.report import PAGE, SECTION_COLOURS, write_report
from sd_training.log import write_incident
from sd_training.training import SECTIONS
from tests.unit.config.loading import BASE

VALIDATION = ("optimizer_step", "weights", "quantile", "timestep", "loss", "samples")
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """Tags with their attributes, texts, and what is in script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        return json.loads(next(text for text in self.texts if text.startswith('{"charts":')))

    def chart(self, title: str) -> list[dict[str, Any]]:
        return next(chart["series"] for chart in self.data()["charts"] if chart["title"] == title)


def write_run(folder: Path, *overrides: str, steps: int = 30, first_step: int = 0, **metrics: float) -> Path:
    """A start of a run, by those that write one; `first_step` > 0 resumes it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config([*BASE, "model.use_ema=true", *overrides])
    batch_plan = {"micro_batch": 4, "accumulation": 2, "processes": 1, "num_examples": 240}
    more = {"global_batch": 8, "batch_plan": batch_plan, "data": ["data: 9 samples in 1 shard"], "devices": "cpu"}
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = first_step
    RunRecord(folder, resolved_yaml(config), lambda: more, str).on_train_start(trainer, pl.LightningModule())
    rows = JsonRows(folder / "metrics.jsonl", COLUMNS)
    rows.keep_until(first_step)
    for step in range(first_step + 1, steps + 1):
        sections = {f"{name}_s": "0.25" for name in SECTIONS}
        row = {"loss": 1 / step, "grad_norm": step % 7, "learning_rate": 0.1, "images_per_s": 2.0, **metrics}
        rows.add({"optimizer_step": str(step), **{name: f"{value:.9g}" for name, value in row.items()}, **sections})
    return folder


def page_of(*runs: Path) -> Elements:
    path = runs[0].parent / PAGE
    write_report(runs, path)
    return Elements(path.read_text(encoding="utf-8"))


def test_it_shows_what_a_run_wrote(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", steps=20)
    write_run(run, "experiment.save_every=5", first_step=10, perceptual=0.5, mfu=0.25)
    write_incident(run, "skipped", 12, ranks=[3])
    validation = MetricRows(run / "validation.csv", [*VALIDATION, "loss_low", "loss_high"])
    validation.keep_until(-1)
    for step in (0, 10):
        for quantile, loss in (("all", 2.0), ("0.25", 3.0), ("0.75", 1.0)):
            row = {"quantile": quantile, "timestep": "" if quantile == "all" else f"{1000 * float(quantile):g}"}
            numbers = {"loss": f"{loss}", "loss_low": f"{loss - 0.5}", "loss_high": f"{loss + 0.5}", "samples": "9"}
            validation.add(
                *({"optimizer_step": str(step), "weights": w, **row, **numbers} for w in ("trained", "average"))
            )
    (run / "evaluation.csv").write_text(
        "step,weights,metric,value,low,high,images,reason\n10,average,fid,9.5,9,10,50,\n10,average,kid,,,,,no weights\n"
    )
    page = page_of(run)
    text = " ".join(page.texts)
    assert "30 of 30 optimizer steps, 240 images" in text and "data: 9 samples in 1 shard" in text
    assert "experiment.save_every" in text and "experiment.save_every: 2000 -> 5" in text
    assert "9.5 [9, 10] after step 10" in text and "no weights" in text and '"ranks": [3]' in text
    assert "2 [1.5, 2.5] after step 10" in text
    assert "nan" not in text.split("uPlot=")[0]
    assert [chart["title"] for chart in page.data()["charts"] if chart["part"] == "evaluation"] == ["fid"]
    (shown,) = page.data()["runs"]
    assert (shown["resumes"], shown["incidents"], shown["images_per_step"]) == ([10], [12], 8)
    (loss,) = page.chart("Training loss")
    assert loss["x"] == [*range(1, 31)] and loss["y"] == [pytest.approx(1 / step, rel=1e-4) for step in range(1, 31)]
    for name, value in {"perceptual": 0.5, "Model FLOPs utilisation": 0.25}.items():
        (series,) = page.chart(name)
        assert series["y"] == [None] * 10 + [value] * 20
    raw, average = page.chart("Validation loss")
    assert (raw["dashed"], average["dashed"]) == (True, False)
    assert (average["x"], average["y"], average["low"], average["high"]) == ([0, 10], [2, 2], [1.5] * 2, [2.5] * 2)
    newest = page.chart("Newest validation loss by noise level")
    assert [(series["x"], series["y"]) for series in newest] == [([250, 750], [3, 1])] * 2
    levels = page.chart("Validation loss of each level, EMA")
    assert [(series["x"], series["y"]) for series in levels] == [([0, 10], [3, 3]), ([0, 10], [1, 1])]
    stack = page.chart("Where the time goes")
    assert [series["label"] for series in stack] == [*SECTION_COLOURS] and stack[0]["y"] == [250] * 30


def test_the_sections_are_those_of_the_ledger() -> None:
    assert set(SECTION_COLOURS) == set(SECTIONS)


def test_texts_are_escaped_and_nothing_is_requested(tmp_path: Path) -> None:
    run = write_run(tmp_path / EVIL.replace("/", ""), f"sampling.prompts=['{EVIL.replace(chr(39), chr(34))}']")
    rows = JsonRows(run / "metrics.jsonl", COLUMNS)
    rows.add({"optimizer_step": "31", EVIL: "1"}, {"optimizer_step": "32", f"grad_norm/{EVIL}": "1"})
    write_incident(run, "skipped", 1, cause=EVIL, **{EVIL: EVIL})
    starts = json.loads((run / "run.json").read_text())
    for key in ("command", "versions", "git_revision", "world_size", "started_unix_s", "data", "model", "devices"):
        starts["starts"].append({key: EVIL})
    starts["starts"].append({"versions": {EVIL: EVIL}, "command": [EVIL], "data": [EVIL], "config": [f"seed: {EVIL}"]})
    (run / "run.json").write_text(json.dumps(starts))
    (run / "train.log").write_text(f"2026 warning: {EVIL}\n")
    quoted = '"' + EVIL + '"'
    (run / "evaluation.csv").write_text(
        f"step,weights,metric,value,low,high,images,reason\n1,{quoted},{quoted},1,,,,\n{quoted},raw,fid,,,,,{quoted}\n"
    )
    (run / "samples" / "step_1").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(run / "samples" / "step_1" / "<img src=x onerror=alert(1)>.png")
    page = page_of(run)
    (policy,) = (meta["content"] for meta in page.of("meta") if meta.get("http-equiv"))
    scripts = [text for text in page.texts if "uPlot=function" in text]
    (script,) = scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None and f"'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    assert [attributes.get("type") for attributes in page.of("script")] == ["application/json", None]
    assert all("onerror" not in attributes for _, attributes in page.tags)
    sources = [attributes[name] for _, attributes in page.tags for name in ("src", "href") if name in attributes]
    assert sources and all(str(source).startswith("data:") for source in sources)
    assert " ".join(page.texts).count("alert(1)") >= 12


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.json", "config.yaml", "validation.csv", "incidents/step=1.x.json"]
)
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_a_damaged_file_costs_its_part_alone(tmp_path: Path, name: str, damage: str) -> None:
    run = write_run(tmp_path / "run")
    write_incident(run, "x", 1)
    (run / "validation.csv").write_text(f"{','.join(VALIDATION)}\n1,trained,all,,0.5,9\n")
    content = (run / name).read_bytes()
    if damage == "gone":
        (run / name).unlink()
    else:
        (run / name).write_bytes(content[: len(content) * 2 // 3] if damage == "cut" else b"\0\xff[{:\n" * 3)
    page = page_of(run)
    if name == "metrics.jsonl" and damage == "cut":
        (loss,) = page.chart("Training loss")
        assert 15 < len(loss["x"]) < 30
    elif name != "metrics.jsonl":
        assert len(page.chart("Training loss")[0]["x"]) == 30


@pytest.mark.parametrize("value", ["[1]", '"x"', "true", "{}", "NaN", "1e999", "1e300", "null", '"9" ', "-5"])
def test_odd_values_are_left_out(tmp_path: Path, value: str) -> None:
    run = write_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(f'{{"optimizer_step": {value}, "loss": 1}}\n{{"optimizer_step": 4, "loss": {value}}}\n')
    starts = [
        {key: json.loads(value) for key in ("global_batch", "batch_plan", "config", "data", "versions", "command")}
    ]
    (run / "run.json").write_text(json.dumps({"starts": starts}))
    (loss,) = page_of(run).chart("Training loss")
    assert all(y is None or math.isfinite(y) for y in loss["y"]) and loss["x"][-1] <= 9


def test_no_run_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        write_report([write_run(tmp_path / "run"), tmp_path], tmp_path / PAGE)
    assert not (tmp_path / PAGE).exists()


def test_runs_are_overlaid(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", steps=5)
    other = write_run(tmp_path / "other" / "one", "experiment.seed=7", steps=9)
    page = page_of(one, other)
    series = page.chart("Training loss")
    assert [own["label"] for own in series] == [str(one), str(other)]  # of one name
    assert [len(own["x"]) for own in series] == [5, 9] and series[0]["colour"] != series[1]["colour"]
    assert len(page.data()["runs"]) == 2
    titles = [chart["title"] for chart in page.data()["charts"]]
    assert [title for title in titles if title.startswith("Where")] == [
        f"Where the time goes, {own}" for own in (one, other)
    ]
    # The seed is the only option that differs; the first run has it at its default.
    assert sum(attributes.get("class") == "differs" for attributes in page.of("tr")) == 1


def test_many_rows_become_few_points(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    losses = np.random.default_rng(0).random(4001)
    with (run / "metrics.jsonl").open("a") as stream:
        for step, loss in enumerate(losses, 2):
            stream.write(json.dumps({"optimizer_step": step, "loss": loss, "grad_norm": float(step == 777)}) + "\n")
    page = page_of(run)
    (loss,), (norm,) = page.chart("Training loss"), page.chart("Gradient norm before clipping")
    assert len(loss["x"]) == math.ceil(4002 / 6) <= report._MAX_POINTS and loss["x"][-1] == 4002
    assert loss["y"][1] == pytest.approx(losses[5:11].mean(), rel=1e-4)
    assert norm["y"][loss["x"].index(780)] == 1 and sum(norm["y"][1:]) == 1


def test_pictures_fit_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, chance = write_run(tmp_path / "run"), np.random.default_rng(0)
    for step in range(0, 300, 10):
        folder = run / "samples" / f"step_{step}"
        folder.mkdir(parents=True)
        pixels = chance.integers(0, 255, (48, 64, 3), np.uint8)
        pixels[: 40 * step // 300] = 0  # later ones take fewer bytes, so that there is less room than for the newest
        Image.fromarray(pixels).save(folder / "previews_grid.png")
        Image.new("RGB", (8, 8)).save(folder / "reconstructions_trained.png")
    (run / "samples/step_290/batch.txt").write_text(f"a cat\n{EVIL}\n")
    Image.new("RGB", (8, 8)).save(run / "samples/step_290/batch.png")
    (run / "samples/step_140/reconstructions_trained.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    without = len((run.parent / PAGE).read_bytes()) if page_of(write_run(tmp_path / "bare")) else 0
    monkeypatch.setattr(report, "_MAX_PICTURE_BYTES", 200_000)
    page = page_of(run)
    steps = [int(str(image["data-step"])) for image in page.of("img") if str(image["alt"]).startswith("previews")]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 290 and 3 < len(steps) < 20
    assert f"{len(steps)} of 30 steps are on this page" in " ".join(page.texts)
    reconstructions = [image for image in page.of("img") if str(image["alt"]).startswith("reconstructions")]
    assert len(reconstructions) == 29
    (captions,) = (image["data-captions"] for image in page.of("img") if "data-captions" in image)
    assert captions == f"a cat\n{EVIL}\n"
    assert len((run.parent / PAGE).read_bytes()) < without + 210_000 < 400_000
    monkeypatch.setattr(report, "_MAX_PICTURE_BYTES", 3_600_000)
    monkeypatch.setattr(report, "_MAX_PAGE_BYTES", without + 100_000)  # what else is on the page has taken the rest
    page_of(run)
    assert without + 20_000 < len((run.parent / PAGE).read_bytes()) < without + 110_000
    monkeypatch.setattr(report, "_MAX_READ_PIXELS", 64 * 48 * 12)  # of three strips
    steps = [
        int(str(image["data-step"])) for image in page_of(run).of("img") if str(image["alt"]).startswith("previews")
    ]
    assert len(steps) == 4


def test_previews_of_the_average_and_of_the_raw_weights(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in (10, 20):
        folder = run / "samples" / f"step_{step}"
        folder.mkdir(parents=True)
        for name in ("previews_grid", "previews_trained_grid"):
            Image.new("RGB", (8, 8), (step, 0, 0)).save(folder / f"{name}.png")
    page = page_of(run)
    shown = [(image["alt"], image["data-step"]) for image in page.of("img")]
    assert shown == [(f"previews after step {step}", str(step)) for step in (10, 20)] * 2
    assert [text.strip() for text in page.texts if text.strip() in ("EMA", "raw")] == ["EMA", "raw"]


def test_uplot_is_the_published_one() -> None:
    """As npm has it (uplot 1.6.32); the first bytes name version and license."""
    library = (Path(report.__file__).parent / "page" / "uPlot-1.6.32.min.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
