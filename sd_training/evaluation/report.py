"""The page of one or several runs: one HTML file with options, curves, pictures and incidents, which needs no network
and no other file.

Everything comes from the run folders. A run may be training, may have been killed, and may have been written by
somebody else: what is missing or damaged is left out, and every text is escaped (by Jinja in HTML, by `_script_json`
for the script). The page's policy allows exactly its own script and no request.

Curves are drawn in the browser by uPlot (MIT; an unchanged copy is in `page/`): 50 kB instead of plotly's 4.5 MB, with
zoom and values under the cursor, which SVG of matplotlib would lack.
"""

import base64
import csv
import hashlib
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from sd_training.checkpoint.folder import replace_text
from sd_training.config.changes import CONFIG, RECORD, batch_plan_of, differences, read_starts
from sd_training.config.fields import options, place_of
from sd_training.config.plan import counted
from sd_training.errors import ConfigError

PAGE = "report.html"
"""In the run folder."""
_SOURCES = Path(__file__).parent / "page"
_UPLOT = "uPlot-1.6.32.min"
_MAX_POINTS = 800
"""Of a curve; more rows are combined."""
_MAX_PICTURE_BYTES = 3_600_000
"""Of all pictures together, in base64."""
_MAX_PAGE_BYTES = 4_900_000
"""Of the page without the tags of its pictures; what else is on it leaves the rest to them."""
_MAX_READ_PIXELS = 100_000_000
"""Of all files that pictures are made of: about two seconds."""
_MAX_SIDE, _MAX_LOSSLESS_SIDE = 1280, 400
"""Pictures are reduced to the first [pixels]; up to the second they are stored without loss."""
_LOG_LINES = 40

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4c9a", "#8c6d31")
"""Of runs: Okabe and Ito's, which colour-blind readers tell apart."""
SECTION_COLOURS = {
    "data_wait": "#d55e00", "upload": "#e69f00", "encode": "#f3d27a",
    "forward": "#9ecae1", "backward": "#4a98c9", "optimizer": "#1764ab", "average": "#083d7f",
    "logging": "#d9d9d9", "validation": "#a1d99b", "drawing": "#4bb062", "saving": "#157f3b", "other": "#969696",
}  # fmt: skip
"""Of the sections of the time ledger, in the order of the stack: data, training, what is beside it."""
_CHARTS = (
    ("loss", "Training loss", ""),
    ("learning_rate", "Learning rate", ""),
    ("grad_norm", "Gradient norm before clipping", ""),
    ("images_per_s", "Speed", "images/s"),
    ("mfu", "Model FLOPs utilisation", "share of the peak"),
    ("device_memory_gib", "Device memory", "GiB"),
)
_LARGEST = ("grad_norm", "device_memory_gib")
"""Of several rows that make a point, the largest counts; of other columns the mean."""
_LOGARITHMIC = {"loss", "grad_norm", "l1", "l2", "kl", "perceptual"}
_NOT_DRAWN = {"step_s", "images_per_s_per_device", "images_seen", "optimizer_step", "ema_decay", "tflops_per_s"}
_NOT_MEASURED = {"optimizer_step", "weights", "quantile", "timestep", "samples"}
_WEIGHTS = {"average": "EMA", "ema": "EMA", "trained": "raw", "raw": "raw"}
"""Names of weights in files → on the page."""


Rows = list[dict[str, Any]]


def write_report(run_dirs: Sequence[Path], path: Path) -> None:
    """Writes the page of these runs, replacing the file at once.

    Raises:
        ConfigError: a folder is no run's.
        OSError: the page cannot be written.
    """
    has_names = len({folder.absolute().name for folder in run_dirs}) == len(run_dirs)
    runs = [
        Run(folder, folder.absolute().name if has_names else str(folder), number)
        for number, folder in enumerate(run_dirs)
    ]
    charts = [chart for chart in _charts(runs) if chart["series"]]
    script = "\n".join(_source(name) for name in (f"{_UPLOT}.js", "page.js"))
    page = Environment(loader=FileSystemLoader(_SOURCES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"moment": _moment, "text": _text}
    render = partial(
        page.get_template("page.html").render,
        runs=runs,
        charts=charts,
        facts=_by_row([run.facts() for run in runs]),
        options=_by_row([run.chosen() for run in runs]),
        defaults={key: option.default for key, option in options().items()},
        versions=_by_row([_mapping(run.start.get("versions")) for run in runs]),
        max_points=_MAX_POINTS,
        section_colours=SECTION_COLOURS,
        now=time.time(),
        data={"runs": [run.marks() for run in runs], "charts": charts},
        style=Markup(_source(f"{_UPLOT}.css") + _source("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        license=Markup(_source("uPlot-LICENSE")),
    )
    left = _MAX_PAGE_BYTES - len(render(pictures={}).encode())
    replace_text(path, render(pictures=_pictures(runs, min(max(left, 0), _MAX_PICTURE_BYTES))))


def _source(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


class Run:
    """What a run folder holds; a part that is missing or damaged is empty.

    Args:
        path: the run folder.
        label: its name on the page.
        number: its place among the runs of the page.
    """

    def __init__(self, path: Path, label: str, number: int) -> None:
        if not any((path / name).is_file() for name in (RECORD, "metrics.jsonl")):
            raise ConfigError(f"{path}: is no run folder, it has neither {RECORD} nor metrics.jsonl; give log_dir/name")
        self.path, self.label, self.number, self.colour = path, label, number, COLOURS[number % len(COLOURS)]
        self.starts = read_starts(path / RECORD)
        self.start = self.starts[-1] if self.starts else {}
        self.config = _values(_loaded(path / CONFIG))
        """Dotted option → value."""
        rows = {_step(row): row for row in _rows(path / "metrics.jsonl")}
        self.metrics = [rows[step] for step in sorted(rows) if step >= 0]
        self.steps = np.array([_step(row) for row in self.metrics], dtype=int)
        self.validation, self.evaluation = _rows(path / "validation.csv"), _rows(path / "evaluation.csv")
        files = [*path.glob("incidents/step=*.json"), path / "first_failure.json"]
        self.incidents = sorted(({"kind": f.stem, **_loaded(f)} for f in files if f.is_file()), key=_step)

    def column(self, name: str) -> NDArray[np.float64]:
        """[rows] values of the metrics; NaN where there is none."""
        return np.array([_number(row.get(name)) for row in self.metrics])

    def marks(self) -> dict[str, Any]:
        """What the script knows of the run beside its curves."""
        resumes = [step for start in self.starts if (step := int(_number(start.get("first_optimizer_step"), 0))) > 0]
        incidents = [step for incident in self.incidents if (step := _step(incident)) >= 0]
        per_step = _number(self.start.get("global_batch"), 0)
        return {"colour": self.colour, "images_per_step": per_step, "resumes": resumes, "incidents": incidents}

    def facts(self) -> dict[str, str]:
        """The summary."""
        start, length, done = self.start, "", f"{self.steps.max(initial=0):,} optimizer steps are logged"
        if (plan := batch_plan_of(start)) is not None:
            length, steps = plan.sentence(), int(self.steps.max(initial=0))
            done = f"{steps:,} of {plan.num_steps:,} optimizer steps, {counted(steps * plan.global_batch, 'image')}"
        losses, speeds = (own[np.isfinite(own)] for own in (self.column("loss"), self.column("images_per_s")))
        means = [row for row in self.validation if row.get("quantile") == "all"]
        measured = [row for row in self.evaluation if math.isfinite(_number(row.get("value")))]
        data, bad = start.get("data"), len(_rows(self.path / "bad_samples.jsonl"))
        facts = {
            "run folder": str(self.path),
            "length": length,
            "progress": done,
            **{name: _text(start.get(name, "")) for name in ("model", "devices", "device", "seed")},
            "time in training": str(timedelta(seconds=round(min(sum(self.seconds.values()), 1e12)))),
            "training loss, last tenth": f"{losses[-max(len(losses) // 10, 1) :].mean():.4g}" if len(losses) else "",
            "speed, median": f"{np.median(speeds):,.4g} images/s" if len(speeds) else "",
            # Of each of these the newest stays.
            **{f"validation loss, {_weights(row)}": _measurement(row, "loss") for row in means},
            **{f"{row.get('metric')}, {_weights(row)}": _measurement(row, "value") for row in measured},
            "data": "\n".join(map(str, data)) if isinstance(data, list) else "",
            "data fingerprint": str(start.get("data_fingerprint", ""))[:16],
            "bad samples": f"{bad:,} lines in bad_samples.jsonl" if bad else "",
            "code": str(start.get("git_revision") or "")[:12],
        }
        return {name: fact for name, fact in facts.items() if fact}

    def chosen(self) -> dict[str, Any]:
        """Options that are not at their default."""
        return {key: value for key, value in self.config.items() if value != options()[key].default}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Section → seconds of the whole run: a row has means over the steps since the row before it."""
        windows = np.diff(self.steps, prepend=0)
        return {name: float(np.nansum(self.column(f"{name}_s") * windows)) for name in SECTION_COLOURS}

    def changes(self) -> list[list[str]]:
        """Of each start, the options and versions that differ from the start before."""
        found, before = list[list[str]](), dict[str, Any]()
        for number, start in enumerate(self.starts):
            now = {**before, "versions": start.get("versions"), "code": start.get("git_revision")}
            if isinstance(lines := start.get("config"), list):
                with suppress(yaml.YAMLError, ValueError, RecursionError):
                    now |= _values(_mapping(yaml.safe_load("\n".join(map(str, lines)))))
            changed = [str(change) for key in now for change in differences(key, before.get(key), now[key])]
            found.append(changed if number else [])
            before = now
        return found

    def warnings(self) -> list[str]:
        """The newest warnings and errors of `train.log`."""
        lines = list[str]()
        with suppress(OSError):
            lines = (self.path / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if " warning: " in line or " error: " in line][-_LOG_LINES:]


# --- Reading ---


def _rows(path: Path) -> Rows:
    """Whole rows of a CSV file or of lines of JSON, which a kill may have cut short."""
    lines = list[str]()
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    lines = [line for line in lines if line.endswith("\n") and "\0" not in line]
    if path.suffix == ".csv":
        return [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]
    rows = list[Any]()
    for line in lines:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _loaded(path: Path) -> dict[str, Any]:
    """The mapping in a file of YAML or JSON."""
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        text = path.read_text(encoding="utf-8")
        return _mapping(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
    return {}


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted option → value, of the options of this version."""
    places = {key: place_of(config, key) for key in options()}
    return {key: group[name] for key, (group, name) in places.items() if name in group}


def _number(value: Any, default: float = math.nan) -> float:
    """A finite number, or the default."""
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(value)):
            return number
    return default


def _step(row: Mapping[str, Any]) -> int:
    """Optimizer step of a row or an incident; -1 where there is none."""
    step = _number(row.get("optimizer_step", row.get("step")), -1)
    return int(step) if step < 2**53 else -1


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- Texts ---


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _moment(seconds: Any) -> str:
    """UTC; empty where it is no time."""
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(seconds)))
    return ""


def _weights(row: Mapping[str, Any]) -> str:
    return _WEIGHTS.get(str(row.get("weights")), str(row.get("weights")))


def _measurement(row: Mapping[str, Any], name: str) -> str:
    """A value, with its interval where there is one."""
    low, high = _bounds(row, name)
    between = f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{_number(row.get(name)):.4g}{between} after step {_step(row):,}"


def _bounds(row: Mapping[str, Any], name: str) -> tuple[float, float]:
    low, high = ("low", "high") if name == "value" else (f"{name}_low", f"{name}_high")
    return _number(row.get(low)), _number(row.get(high))


def _by_row(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Row → a cell for each run; a row is where any run has one."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [_text(column.get(key, "")) for column in columns] for key in keys}


# --- Curves ---


def _charts(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys(name for run in runs for row in run.metrics for name in row)
    known = {*_NOT_DRAWN, *(name for name, _, _ in _CHARTS), *(f"{name}_s" for name in SECTION_COLOURS)}
    others = [name for name in names if name not in known and "/" not in name]
    for name, title, unit in (*_CHARTS, *((name, name, "") for name in others)):
        curves = [_curve(run, name, run.label, run.colour) for run in runs]
        is_smooth = name in ("loss", "grad_norm", *others)
        yield _chart("training", title, curves, unit=unit, smooth=is_smooth, log=name in _LOGARITHMIC)
    for run in runs:
        of_run = f", {run.label}" if len(runs) > 1 else ""
        groups = [name for name in names if name.startswith("grad_norm/")]
        curves = [_curve(run, name, name[10:], _shade(i, groups)) for i, name in enumerate(groups)]
        yield _chart("training", f"Gradient norm by layer group{of_run}", curves, log=True)
        stack = [_curve(run, f"{name}_s", name, colour, 1e3) for name, colour in SECTION_COLOURS.items()]
        yield _chart("time", f"Where the time goes{of_run}", stack, unit="ms per optimizer step", stacked=True)
    yield from _validation_charts(runs)
    for metric in dict.fromkeys(row.get("metric") for run in runs for row in run.evaluation):
        own = [(run, [row for row in run.evaluation if row.get("metric") == metric]) for run in runs]
        yield _chart("evaluation", str(metric), _by_weights(own, "value"))


def _validation_charts(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Means over the steps; and by noise level, over the level at the newest step, and over the steps."""
    means = [(run, [row for row in run.validation if row.get("quantile") == "all"]) for run in runs]
    for name in dict.fromkeys(name for _, rows in means for row in rows for name in row):
        if name not in _NOT_MEASURED and not name.endswith(("_low", "_high")):
            yield _chart("validation", f"Validation {name}", _by_weights(means, name), log=name == "loss")
    levels = [(run, [row for row in run.validation if row.get("quantile") != "all"]) for run in runs]
    newest = [(run, [row for row in rows if _step(row) == _step(rows[-1])]) for run, rows in levels]
    curves = _by_weights(newest, "loss", over="timestep")
    yield _chart("validation", "Newest validation loss by noise level", curves, x="mean timestep", log=True)
    for run, rows in levels:
        weights = "EMA" if any(_weights(row) == "EMA" for row in rows) else "raw"
        quantiles = sorted({_number(row.get("quantile"), 0) for row in rows if _weights(row) == weights})
        series = [
            _measured(run, own, "loss", f"quantile {quantile:.3g}", _shade(i, quantiles))
            for i, quantile in enumerate(quantiles)
            if (own := [r for r in rows if (_number(r.get("quantile"), 0), _weights(r)) == (quantile, weights)])
        ]
        of_run = f", {run.label}" if len(runs) > 1 else ""
        yield _chart("validation", f"Validation loss of each level, {weights}{of_run}", series, log=True)


def _chart(part: str, title: str, curves: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What `page.js` draws. `more`: `unit`; `x`, the name of its axis where that is not the optimizer step; and whether
    it is `stacked`, `smooth` or `log`arithmic."""
    return {"part": part, "title": title, "series": [c for c in curves if any(y is not None for y in c["y"])], **more}


def _curve(run: Run, name: str, label: str, colour: str, factor: float = 1.0) -> dict[str, Any]:
    """A column of the metrics, at most `_MAX_POINTS`: the mean or the largest of equally many rows."""
    curve = {"run": run.number, "label": label, "colour": colour, "x": [], "y": []}
    values = factor * run.column(name)
    if not np.isfinite(values).any():
        return curve
    starts = np.arange(0, len(values), -(-len(values) // _MAX_POINTS))
    counts = np.add.reduceat(np.isfinite(values), starts)
    if name.startswith(_LARGEST):
        combined = np.maximum.reduceat(np.nan_to_num(values, nan=-np.inf), starts)
    else:
        combined = np.add.reduceat(np.nan_to_num(values), starts) / np.maximum(counts, 1)
    ends = [*(starts[1:] - 1), len(values) - 1]
    points = [_rounded(value) if count else None for value, count in zip(combined, counts, strict=True)]
    return curve | {"x": run.steps[ends].tolist(), "y": points}


def _by_weights(rows_of_runs: Iterable[tuple[Run, Rows]], name: str, over: str = "") -> Iterator[dict[str, Any]]:
    """A curve for each run and kind of weights; raw ones are dashed."""
    for run, rows in rows_of_runs:
        for weights in dict.fromkeys(map(_weights, rows)):
            own = [row for row in rows if _weights(row) == weights]
            curve = _measured(run, own, name, f"{run.label} {weights}", run.colour, over)
            yield curve | {"dashed": weights == "raw"}


def _measured(run: Run, rows: Rows, name: str, label: str, colour: str, over: str = "") -> dict[str, Any]:
    """A curve of measurements with their intervals, over the optimizer step or another column."""
    at = {_number(row.get(over)) if over else _step(row): row for row in rows}
    places = sorted(x for x in at if math.isfinite(x) and x >= 0)
    places = [places[i] for i in np.linspace(0, len(places) - 1, min(len(places), _MAX_POINTS)).astype(int)]
    low, high = ([_rounded(_bounds(at[x], name)[end]) for x in places] for end in (0, 1))
    curve = {"run": run.number, "label": label, "colour": colour, "x": places}
    curve["y"] = [_rounded(_number(at[x].get(name))) for x in places]
    return curve | ({"low": low, "high": high} if any(bound is not None for bound in low) else {})


def _rounded(value: float) -> float | None:
    """Five digits, more than a screen shows; null where there is no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _shade(number: int, of: Sequence[Any]) -> str:
    """The colour of a member of an ordered sequence, from blue to red."""
    return f"hsl({240 - 240 * number / max(len(of) - 1, 1):.0f} 65% 42%)"


# --- Pictures ---


def _pictures(runs: Sequence[Run], max_bytes: int) -> dict[str, list[dict[str, Any]]]:
    """Set → strips: the pictures (optimizer step → data URI) of one run, drawn with one kind of weights."""
    found: dict[str, dict[tuple[int, str], dict[int, Path]]] = {}
    for run in runs:
        for path in sorted(run.path.glob("samples/step_*/*.png")):
            if (step := path.parent.name.removeprefix("step_")).isdecimal():
                whole = path.stem.removesuffix("_grid")
                name, _, weights = whole.rpartition("_")
                if weights not in _WEIGHTS:
                    is_average = run.config.get("model.use_ema") and whole in ("previews", "previews_denoising", "eval")
                    name, weights = whole, "average" if is_average else ""
                found.setdefault(name, {}).setdefault((run.number, weights), {})[int(step)] = path
    count = sum(map(len, found.values()))
    return {
        name: [
            {"run": runs[number].label, "weights": _WEIGHTS.get(weights, ""), **_strip(paths, count, max_bytes)}
            for (number, weights), paths in sorted(strips.items())
        ]
        for name, strips in sorted(found.items(), key=lambda item: (item[0] == "batch", item[0]))
    }


def _strip(paths: Mapping[int, Path], num_strips: int, max_bytes: int) -> dict[str, Any]:
    """As many steps as a share of the limits allows, at equal distances, with the first and the last one. The newest
    picture tells how many there is room for."""
    steps, left, pictures, captions = sorted(paths), max_bytes // num_strips, {}, {}
    newest, num_pixels, is_small = _picture(paths[steps[-1]])
    room = min(_MAX_READ_PIXELS // num_strips // num_pixels, left // len(newest)) if newest else len(steps)
    places = np.linspace(0, len(steps) - 1, max(2, min(room, len(steps)))).round().astype(int)
    for step in sorted({steps[place] for place in places}, key=lambda step: (step != steps[0], -step)):
        uri, _, _ = _picture(paths[step])
        if 0 < len(uri) <= left:
            pictures[step], left = uri, left - len(uri)
            with suppress(OSError):
                captions[step] = paths[step].with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
                left -= len(captions[step].encode())
    return {"pictures": pictures, "captions": captions, "num_found": len(steps), "is_small": is_small}


def _picture(path: Path) -> tuple[str, int, bool]:
    """Data URI, pixels of the file, and whether it is small; an empty URI for a file that cannot be read."""
    try:
        with Image.open(path, formats=["PNG"]) as file:
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "", 1, False
    num_pixels, is_small, stream = image.width * image.height, max(image.size) <= _MAX_LOSSLESS_SIDE, io.BytesIO()
    image.thumbnail((_MAX_SIDE, 4 * _MAX_SIDE))
    image.save(stream, "WEBP", lossless=is_small, quality=80)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}", num_pixels, is_small
