"""The golden record: what the trainer computes today, so that a redesign can show that it changed form only.

    python -m tests.golden.record            # compare with the stored record
    python -m tests.golden.record --write    # replace it; the commit says which lines changed and why

Five JSON files lie beside this one. `data.json` holds, for 20 optimizer steps of every source type and of the options
that shape the stream, the sample ids, image sizes and digests of every draw, which must be equal to the bit.
`losses.json` holds the losses of the same runs, of every model family and every objective preset; a loss is a float32
sum whose order depends on the CPU, so it has a tolerance. `schedulers.json` holds the exported scheduler configs,
`configs.json` the resolved form of all shipped YAML files, `filters.json` which of 240 rows pass 2,000 random filters.

Only the functions under "The project" import the package: a redesign changes those and no figure.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
FILES = ("data", "losses", "schedulers", "configs", "filters")
STEPS, BATCH = 20, 4

LOSS_RTOL = 2e-4
"""Of a loss after up to 20 steps. Two orders of summation differ by at most about sqrt(n) eps per reduction, n < 2^16
terms and eps = 2^-24: 1.5e-5 for the first loss; Adam's normalised updates multiply such a difference by about one
per step and parameter, which leaves an order of magnitude. A change of the objective, of the data or of one update
moves losses by percents. Measured between the instruction sets `default` and `avx512` of one CPU: 2.8e-6 at most, and
not one bit of the data."""

Record = dict[str, Any]


# --- The project ---


def resolved(words: Sequence[str]) -> Record:
    """The resolved configuration of a command line."""
    from sd_training.config.changes import to_plain
    from sd_training.config.load import load_config

    return to_plain(load_config(list(words)))


def build(words: Sequence[str]) -> Any:
    """A run, ready to fit."""
    from tests.integration.training import prepare

    return prepare(list(words))


def batches(run: Any) -> Iterator[Any]:
    """The run's micro-batches from its first optimizer step on."""
    yield from run.data.loader(0, lambda: 0)


def fingerprint(run: Any) -> str:
    """Of samples, buckets and order."""
    return str(run.data.fingerprint())


def fit(run: Any) -> None:
    """Train to the end; the run folder then has metrics.csv and current_pipeline."""
    run.trainer.fit(run.module, datamodule=run.data)


def options_with_defaults() -> Record:
    """Dotted option → default, of the whole schema."""
    from sd_training.config.fields import options

    return {key: option.default for key, option in options().items() if not option.required}


def presets() -> list[str]:
    """Names for `objective.preset`."""
    from sd_training.config.schema import PRESETS

    return list(PRESETS)


class Filters:
    """Rows of metadata, stored as a shard and indexed, and which of them pass a filter."""

    def __init__(self, rows: Sequence[bytes | None], folder: Path) -> None:
        from sd_training.data.index.store import load_index
        from sd_training.data.sources.tar import TarSource
        from tests import makers
        from tests.unit.data.making import ACCESS

        members = [{} if row is None else {"json": row} for row in rows]
        samples = [{"__key__": f"{i:04d}", "jpg": b"x", "txt": "x", **member} for i, member in enumerate(members)]
        shard = makers.write_shard(folder / "rows.tar", samples)
        self.index = load_index(TarSource([str(shard)], ACCESS), folder / "index", FIELDS)

    def passing(self, filters: Mapping[str, Any]) -> Any:
        """[N] bool, or None where the filter is refused."""
        from sd_training.config.filters import parse_filters
        from sd_training.data.index.selection import evaluate

        rules, problems = parse_filters(filters)
        if problems:
            return None
        masks = [evaluate(rule, self.index.columns, len(self.index)) for rule in rules]
        return np.logical_and.reduce(masks)


# --- Data: every source type, and every option that shapes the stream ---

TYPES = {
    "tar": "WebDataset",
    "parquet": "Parquet",
    "csv": "Table",
    "tsv": "Table",
    "jsonl": "Table",
    "beside": "ImageFolder",
    "images_captions": "ImageFolder",
    "img_txt": "ImageFolder",
    "tags": "TagFolder",
    "huggingface": "HuggingFace",
}
"""Case of tests/unit/data/source_cases.py → `dataset.type`."""
STREAMS: Mapping[str, Sequence[str]] = {
    "ladder": ("dataset.params.buckets={mode: ladder, step: 4, min_side: 8, max_side: 32, max_aspect: 2.0}",),
    "table": ("dataset.params.buckets={mode: table, sizes: [[16, 16], [8, 16], [16, 8]]}",),
    "captions": (
        "dataset.params.captions={fields: {caption: 2.0, style: 1.0}, tag_separator: ' ', shuffle_tags_prob: 0.5, "
        "drop_tag_prob: 0.2, num_kept_tags: 1, prefix: 'x '}",
    ),
    "filters": ('dataset.params.filters={score: ">=3", style: ink}',),
    "lanes": ("dataset.params.lanes=2", "dataset.params.window=2"),
    "resampled": ("dataset.params.resampled=true",),
    "corrupt": ("dataset.params.max_bad_fraction=1.0",),
    "mixture": (
        "dataset.mix=[{type: Table, params: {path: {csv}}, weight: 2.0, start_step: 3, end_step: 15}]",
        "dataset.weight=1.0",
    ),
    "draws": (
        "objective.offset_noise=0.1",
        "objective.input_perturbation=0.1",
        "objective.timestep_density.stratified=true",
        "conditioning.dropout_prob=0.3",
    ),
    "seed": ("experiment.seed=12345",),
    "accumulation": ("system.batch_size=2", "system.gradient_accumulation=2"),
    "masked": ("objective.masked_loss=alpha",),
    "shuffled_tags": ("dataset.params.tags.shuffle_tag_p=0.5",),
    "sdxl_dropout": (
        "conditioning.encoder_dropout_prob=0.3",
        "conditioning.size_dropout_prob=0.3",
        "conditioning.crop_dropout_prob=0.3",
    ),
}
"""Options on top of the data of this name, or of the tar shards."""
OWN_DATA = ("corrupt", "masked", "shuffled_tags")
"""Streams with data of their own."""
SHAPES_THE_BATCH_ONLY = (
    *(f"source_{name}" for name in TYPES if name != "tar"),
    *(f"stream_{name}" for name in ("ladder", "table", "captions", "lanes", "resampled", "corrupt", "seed")),
)
"""Cases whose losses follow from their batches, which are equal to the bit, by the step that the other cases take."""


def written_samples() -> list[Any]:
    """30 captioned images of several shapes and formats."""
    from tests.unit.data.source_cases import make_sample

    return [make_sample(number) for number in range(30)]


def write_data(home: Path) -> dict[str, tuple[str, Path]]:
    """Name → `dataset.type` and path, with the same samples in three units each."""
    from tests import makers
    from tests.unit.data.source_cases import CASES, write_tar

    samples = written_samples()
    places = {}
    for case in CASES:
        folder = home / "data" / case.name
        folder.mkdir(parents=True)
        for unit in range(3):
            case.write(folder, f"unit{unit}", samples[unit * 10 : unit * 10 + 10])
        places[case.name] = (TYPES[case.name], folder)
    corrupt = home / "data" / "corrupt"
    corrupt.mkdir()
    for sample in samples[4::7]:
        sample.image = sample.image[:-100]
    write_tar(corrupt, "unit0", samples)
    places["corrupt"] = ("WebDataset", corrupt)
    places["masked"] = ("WebDataset", write_cut_out(home / "data" / "masked"))
    places["shuffled_tags"] = ("TagFolder", write_several_tags(home / "data" / "shuffled_tags"))
    classes = home / "data" / "classes"
    members = [{"__key__": f"{i:03d}", "jpg": makers.encode(makers.picture(i)), "cls": str(i % 3)} for i in range(30)]
    makers.write_shard(classes / "unit0.tar", members)
    places["classes"] = ("ClassificationWebDataset", classes)
    return places


def write_cut_out(folder: Path) -> Path:
    """The samples as PNGs with an alpha that goes from nothing on the left to everything on the right."""
    import io

    from PIL import Image

    from tests import makers
    from tests.unit.data.source_cases import write_tar

    samples = written_samples()
    for sample in samples:
        picture = Image.open(io.BytesIO(sample.image)).convert("RGB")
        alpha = np.tile(np.linspace(0, 255, picture.width).astype(np.uint8), (picture.height, 1))
        picture.putalpha(Image.fromarray(alpha))
        sample.image, sample.extension = makers.encode(picture, "PNG"), "png"
    folder.mkdir()
    write_tar(folder, "unit0", samples)
    return folder


def write_several_tags(folder: Path) -> Path:
    """The samples with four tags each, so short that all fit in the tiny tokenizer."""
    from tests.unit.data.source_cases import write_tags

    folder.mkdir()
    write_tags(folder, "unit0", written_samples())
    for number, path in enumerate(sorted(folder.glob("metadata/*/*.json"))):
        record = json.loads(path.read_text()) | {"tags": ["d", "b", str(number % 10), "a"]}
        path.write_text(json.dumps(record))
    return folder


def source_words(kind: str, path: Path) -> list[str]:
    """Options of a source type on its folder."""
    places = [f"[{', '.join(str(unit) for unit in sorted(path.iterdir()))}]"] if kind == "HuggingFace" else [str(path)]
    words = [f"dataset.type={kind}", f"dataset.params.path={places[0]}"]
    if kind == "ClassificationWebDataset":
        words.append('dataset.params.idx_to_prompt={"0": a red picture, "1": [a green one, green], "2": blue}')
    if kind == "TagFolder":
        words.append("dataset.params.tags={abs_min_score: -1, min_score: -1, aspect_range: [0.1, 10]}")
    return words


def tiny_words(run_dir: Path, pipeline: Path, data: Sequence[str], *more: str) -> list[str]:
    """The command line of a small fp32 run of 20 steps."""
    return [
        f"experiment.log_dir={run_dir.parent}",
        f"experiment.name={run_dir.name}",
        f"experiment.num_examples_to_see={STEPS * BATCH}",
        f"experiment.save_every={STEPS}",
        f"system.batch_size={BATCH}",
        "system.workers=0",
        f"model.pretrained={pipeline}",
        "model.mixed_precision=no",
        "optimizer.params.learning_rate=0.001",
        "lr_scheduler.params.warmup_length=3",
        "dataset.params.resolution=16",
        "dataset.params.crop=random",
        "dataset.params.flip_prob=0.5",
        "logging.every=1",
        "logging.progress_bar=false",
        "trainer.accelerator=cpu",
        *data,
        *more,
    ]


def digest(*tensors: torch.Tensor) -> str:
    """Of shapes, types and bits; 64 bits are enough to see a difference."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


DRAWS = (
    "pixels",
    "posterior_noise",
    "noise",
    "timestep_draw",
    "offset_noise",
    "input_noise",
    "mask",
    "original_size",
    "crop_top_left",
)


def stream_of(run: Any) -> Record:
    """Sample ids, positions and sizes of each micro-batch, and a digest of each draw over the whole run."""
    steps, found = [], {name: hashlib.sha256() for name in (*DRAWS, "tokens", "token_masks", "dropped")}
    for batch in batches(run):
        size = "x".join(map(str, batch.target_size[0].tolist()))
        assert (batch.target_size == batch.target_size[0]).all()
        steps.append([size, int(batch.positions[0]), *batch.sample_ids.tolist()])
        for name in DRAWS:
            found[name].update(digest(getattr(batch, name)).encode())
        for name in ("tokens", "token_masks", "dropped"):
            values = getattr(batch, name)
            found[name].update(digest(*(values[part].to(torch.int64) for part in sorted(values))).encode())
    return {
        "fingerprint": fingerprint(run),
        "size, first position, sample ids": steps,
        "draws": {name: value.hexdigest()[:16] for name, value in found.items()},
    }


# --- Losses and exported schedulers ---


def losses_of(run_dir: Path) -> list[float]:
    """One per optimizer step, with the digits of a float32."""
    import csv

    with (run_dir / "metrics.csv").open(newline="") as stream:
        return [float(f"{float(row['loss']):.8g}") for row in csv.DictReader(stream)]


def scheduler_of(run_dir: Path) -> Record:
    """The exported pipeline's scheduler, without the library's version."""
    text = (run_dir / "current_pipeline" / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8")
    return {key: value for key, value in json.loads(text).items() if key != "_diffusers_version"}


def run_cases(home: Path) -> Iterator[tuple[str, list[str], bool]]:
    """Name, command line, and whether the stream of data is recorded, of every run."""
    from tests.family_makers import PIPELINES, save_pipeline

    pipelines = {name: save_pipeline(name, home / "pipelines" / name) for name in PIPELINES}
    places, sd = write_data(home), pipelines["stable_diffusion"]
    tar = source_words(*places["tar"])

    def case(name: str, pipeline: Path, data: Sequence[str], *more: str) -> list[str]:
        return tiny_words(home / "runs" / name, pipeline, data, f"dataset.params.index_dir={home / 'index'}", *more)

    for name, place in places.items():
        if name not in OWN_DATA:
            yield f"source_{name}", case(f"source_{name}", sd, source_words(*place)), True
    for name, more in STREAMS.items():
        filled = [word.replace("{csv}", str(places["csv"][1])) for word in more]
        data = source_words(*places[name if name in OWN_DATA else "tar"])
        pipeline = pipelines["sdxl"] if name == "sdxl_dropout" else sd
        yield f"stream_{name}", case(f"stream_{name}", pipeline, data, *filled), True
    for name, pipeline in pipelines.items():
        yield f"family_{name}", case(f"family_{name}", pipeline, tar), False
    for name in presets():
        yield f"preset_{name}", case(f"preset_{name}", sd, tar, f"objective.preset={name}"), False
    vae = ("model.train=vae", "objective.kl_weight=1e-6")
    yield "autoencoder", case("autoencoder", sd, tar, *vae), False


def runs(home: Path, without_losses: Collection[str]) -> dict[str, Record]:
    """`data`, `losses` and `schedulers`.

    Args:
        home: to write in.
        without_losses: cases of which the data alone is computed.
    """
    found: dict[str, Record] = {"data": {}, "losses": {}, "schedulers": {}}
    images = hashlib.sha256(b"".join(sample.image for sample in written_samples())).hexdigest()[:16]
    found["data"]["encoded images"] = images
    for name, words, has_stream in run_cases(home):
        run = build(words)
        if has_stream:
            found["data"][name] = stream_of(run)
        if name in without_losses:
            continue
        fit(run)
        found["losses"][name] = losses_of(home / "runs" / name)
        scheduler = scheduler_of(home / "runs" / name) if name != "autoencoder" else None
        if scheduler is not None and not name.startswith(("source_", "stream_")):
            found["schedulers"][name] = scheduler
        shutil.rmtree(home / "runs" / name)
    return found


# --- Configs ---


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def configs(home: Path) -> Record:
    """Of every shipped YAML: the resolved options that differ from the schema's defaults; and those defaults."""
    from tests.test_configs import SHIPPED, filled

    os.chdir(ROOT)
    captions = home / "captions.csv"
    defaults = dict(flat(json.loads(json.dumps(options_with_defaults(), default=str))))
    found: Record = {"defaults": defaults}
    for path in SHIPPED:
        values = json.loads(json.dumps(resolved(filled(path, captions)), default=str).replace(str(home), "HOME"))
        name = str(path.relative_to(ROOT / "configs"))
        found[name] = {key: value for key, value in flat(values) if defaults.get(key, ...) != value}
    return found


# --- Filters ---

FIELDS = ("a", "b", "c", "name", "big", "flag", "nested.x", "absent")
_NUMBERS = ("0", "1", "-1", "0.5", "2", "7.25", "1e3", "-3.5e-2", "512")
_BIG = ("9007199254740991", "9007199254740992", "9007199254740993", "9007199254740994", "-9007199254740993")
_TEXTS = ('"ink"', '"oil, thick"', '"Ink"', '""', '"5"', '"0.5"', '"nan"', '"true"', '"9007199254740993"', '"ü"')


def metadata_rows(chance: random.Random) -> list[bytes | None]:
    """240 JSON texts with every kind of value in every field; some rows have none."""

    def value(field: str) -> str:
        kinds = {"name": _TEXTS, "big": _BIG, "flag": ("true", "false", '"True"', "0", "1")}
        usual = kinds.get(field, _NUMBERS)
        odd = ("null", "NaN", "[5]", "true", *_TEXTS[:6], *_NUMBERS[:3], *_BIG[:3])
        return chance.choice(usual if chance.random() < 0.75 else odd)

    rows: list[bytes | None] = []
    for _ in range(240):
        present = [field for field in FIELDS[:-1] if chance.random() < 0.85]
        members = [f'"{field}": {value(field)}' for field in present if field != "nested.x"]
        if "nested.x" in present:
            members.append(f'"nested.x": {value("nested.x")}')
        rows.append(None if chance.random() < 0.04 else f"{{{', '.join(members)}}}".encode())
    return rows


def random_filter(chance: random.Random) -> dict[str, Any]:
    """Any form that docs/data.md names, and now and then a broken one."""

    def literal() -> str:
        text = chance.choice(("ink", "'oil, thick'", '"Ink"', "''", "'5'", "true", "'9007199254740993'", "'ü'"))
        return chance.choice((*_NUMBERS, *_BIG)) if chance.random() < 0.65 else text

    def condition() -> str:
        number = chance.choice((*_NUMBERS, *_BIG))
        low, high = sorted(chance.sample([-3.5, -1, 0, 0.5, 2, 7.25, 512, 1e16], 2))
        forms = (
            f"{chance.choice(['>=', '<=', '>', '<'])}{number}",
            f"{chance.choice(['==', '!='])}{literal()}",
            f"{low:g}..{high:g}",
            f"{low:g}..",
            f"..{high:g}",
            f"in [{', '.join(literal() for _ in range(chance.randint(1, 4)))}]",
            f"not in [{literal()}, {literal()}]",
            "null",
            "not null",
        )
        return chance.choice(forms)

    def expression(depth: int, has_field: bool) -> str:
        if depth == 0 or chance.random() < 0.4:
            return f"{chance.choice(FIELDS)} {condition()}" if has_field else condition()
        parts = [expression(depth - 1, has_field) for _ in range(chance.randint(1, 3))]
        text = f" {chance.choice(['and', 'or'])} ".join(f"({part})" for part in parts)
        return f"not ({text})" if chance.random() < 0.25 else text

    kind = chance.random()
    if kind < 0.35:
        written: dict[str, Any] = {"where": expression(3, True)}
    elif kind < 0.7:
        written = {field: expression(2, False) for field in chance.sample(FIELDS, chance.randint(1, 3))}
    elif kind < 0.8:
        written = {chance.choice(FIELDS): chance.choice((True, False, 5, 0.5, 2**53 + 1, "ink", "512", "true"))}
    else:
        entries = [{chance.choice(FIELDS): condition() for _ in range(2)} for _ in range(chance.randint(1, 3))]
        written = {chance.choice(("any_of", "all_of")): entries}
    if chance.random() < 0.04:
        key = next(iter(written))
        written[key] = chance.choice(("=>5", "5...7", "and", "((", f"{written[key]} extra", ">= large"))
    return written


def filters(home: Path) -> Record:
    """Rows, and for each filter the rows that pass: 240 bits as hexadecimal, or `refused`."""
    chance = random.Random(20261122)
    rows = metadata_rows(chance)
    data = Filters(rows, home)
    results: list[list[Any]] = []
    for _ in range(2000):
        written = random_filter(chance)
        mask = data.passing(written)
        results.append([written, "refused" if mask is None else np.packbits(mask).tobytes().hex()])
    return {"rows": [None if row is None else row.decode() for row in rows], "results": results}


def compute(home: Path, without_losses: Collection[str] = ()) -> dict[str, Record]:
    """The record as the project computes it now."""
    return {**runs(home, without_losses), "configs": configs(home), "filters": filters(home)}


# --- Comparison ---


def stored(name: str) -> Record:
    """A file of the record."""
    found: Record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def differences(before: Any, now: Any, path: str = "", rtol: float = 0.0) -> Iterator[str]:
    """One line per value that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            place = f"{path}/{key}"
            if key not in before or key not in now:
                yield f"{place}: only {'now' if key in now else 'in the record'}"
            else:
                yield from differences(before[key], now[key], place, rtol)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{path}/{number}", rtol)
    elif isinstance(before, float) and isinstance(now, float) and rtol:
        if not abs(before - now) <= rtol * max(abs(before), abs(now)):
            yield f"{path}: {before} in the record, now {now}"
    elif before != now or type(before) is not type(now):
        yield f"{path}: {before!r} in the record, now {now!r}"


def all_differences(now: Mapping[str, Record]) -> list[str]:
    """Against the stored record."""
    found = []
    for name in FILES:
        rtol = LOSS_RTOL if name == "losses" else 0.0
        plain = json.loads(json.dumps(now[name], ensure_ascii=False))
        found += [f"{name}.json{line}" for line in differences(stored(name), plain, rtol=rtol)]
    return found


def write(record: Mapping[str, Record]) -> None:
    """One line per entry, so that a change can be read in a diff."""
    for name in FILES:
        entries = []
        for key, value in record[name].items():
            if name == "filters":
                lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in value)
                text = f"[\n{lines}\n]"
            else:
                text = json.dumps(value, ensure_ascii=False)
            entries.append(f"{json.dumps(key)}: {text}")
        (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def main() -> int:
    """Compare or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the stored record")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CACHE_HOME"] = f"{home}/cache"
        record = compute(Path(home))
    if arguments.write:
        write(record)
        return 0
    found = all_differences(record)
    print("\n".join(found) or "no differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
