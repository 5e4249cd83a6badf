"""Which optimizer steps of a run saw a sample, or will see it, and which samples a step saw; with crop, flip, caption.

    python scripts/find_sample.py RUN KEY [option=value …]          KEY, or SHARD/KEY where several samples have the key
    python scripts/find_sample.py RUN --step N [--sheet sheet.png]

Start it in the folder that the run was started in, so that paths mean the same. The steps are computed from the options
of every start (`run.json` in the run folder) and the index of the data. The loader then reads each visit again, so a
sample that cannot be used is listed with the one that replaces it. The run folder is only read.

Steps count from 1, as in metrics.csv: the checkpoint step=N has seen the samples of steps 1 to N.
"""

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.log import quiet_libraries

quiet_libraries()

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from scripts.index_dataset import is_option
from scripts.replay_step import plan_of_start
from sd_training.build.data import make_data
from sd_training.build.dry_run import meta_networks
from sd_training.checkpoint.folder import last_saved_step
from sd_training.cli import run_cli
from sd_training.config.changes import RECORD, batch_plan_of, read_starts
from sd_training.config.plan import counted
from sd_training.config.value_types import output_path, path_argument
from sd_training.data.datamodule import TrainingData
from sd_training.data.loader import BAD_SAMPLES_FILE, read_bad_samples
from sd_training.data.samples.cache import LatentCache
from sd_training.data.samples.image import place
from sd_training.data.samples.sample import SampleRequest
from sd_training.data.sources.base import SkippedSample, printable
from sd_training.data.storage.files import shown
from sd_training.errors import BadSample, ConfigError, DataError, UserError
from sd_training.export.draw import picture_grid
from sd_training.models.family import latent_grid

FINGERPRINT = "data_fingerprint"
LISTED = 10
"""Samples of an ambiguous key that are named."""
SHEET_COLUMNS = 8
THUMBNAIL = 256
"""Longer side of a picture of the sheet [pixels]; smaller ones are not enlarged."""


class Stretch(NamedTuple):
    """Optimizer steps of a run with the same options."""

    first: int
    """Optimizer steps before it."""
    end: int
    data: TrainingData
    is_same: bool
    """Whether the data are what the run has seen."""
    bad: Sequence[tuple[int, int]]
    """Data set and index of the samples that could not be used, as far as the run has met them."""


class Visit(NamedTuple):
    """What the loader delivers for a slot of an optimizer step."""

    data: TrainingData
    step: int
    """Optimizer steps before it."""
    request: SampleRequest
    """With the sample that is delivered."""
    skipped: Sequence[SkippedSample]
    """What it replaces, because it cannot be used."""
    original_size: Sequence[int]
    """Height and width [pixels]."""
    caption: str


def open_run(run_dir: Path, changes: Sequence[str]) -> list[Stretch]:
    """The optimizer steps of a run, to the last that is planned. What a start did beyond the step that a later one
    resumed from was done again, and counts once.

    Raises:
        UserError: the run has no record, or its model or data cannot be opened.
    """
    starts, stretches, before = read_starts(run_dir / RECORD), list[Stretch](), None
    plans = [own for start in starts if (own := batch_plan_of(start)) is not None]
    is_whole = all(start.keys() >= {"first_optimizer_step", FINGERPRINT} for start in starts)
    if not starts or len(plans) < len(starts) or not is_whole:
        raise UserError(f"{run_dir / RECORD}: does not say how a run was started; give the folder of a run")
    for number, (start, batch) in enumerate(zip(starts, plans, strict=True)):
        first = start["first_optimizer_step"]
        end = min([batch.num_steps, *(later["first_optimizer_step"] for later in starts[number + 1 :])])
        if end <= first:
            continue
        configs = [earlier["config"] for earlier in starts[: number + 1] if "config" in earlier]
        options = (configs[-1:], batch, start[FINGERPRINT])
        if options == before:
            stretches[-1] = stretches[-1]._replace(end=end)
            continue
        before, plan = options, plan_of_start(run_dir, starts[: number + 1], batch, "cpu", changes)
        if plan.config.dataset.reuse_batch:
            raise UserError(f"{run_dir}: with dataset.reuse_batch every step sees the first micro-batches of the run")
        (networks, family), cached = meta_networks(plan.config), plan.config.dataset.cache.path
        cache = None if cached is None else LatentCache(output_path(cached))
        data = make_data(plan, family, latent_grid(networks["vae"]), cache)
        is_same = data.fingerprint() == start[FINGERPRINT]
        bad = find_named(data, read_bad_samples(run_dir / BAD_SAMPLES_FILE)) if is_same else []
        stretches.append(Stretch(first, end, data, is_same, bad))
    return stretches


def spelled(shard: str, key: str) -> str:
    """`SHARD/KEY`, relative to the current folder where it is inside."""
    return f"{shard}/{key}".removeprefix(f"{os.getcwd()}/")


def find_named(data: TrainingData, names: Collection[tuple[str, str]]) -> list[tuple[int, int]]:
    """Data set and index of the samples with these shards and keys."""
    keys, found = pa.array({key for _, key in names}, pa.large_string()), list[tuple[int, int]]()
    for number, dataset in enumerate(data.datasets):
        samples = np.flatnonzero(pc.is_in(dataset.index.columns["key"], keys).to_numpy()).tolist()
        found += [(number, sample) for sample in samples if dataset.index.name(sample) in names]
    return found


def read_visit(data: TrainingData, step: int, slot: int) -> Visit:
    """Reads a sample of a step as the loader does.

    Raises:
        DataError: it cannot be read, and no other instead of it.
    """
    bucket, chosen, datasets = data.order.at(step)
    request = SampleRequest(step * len(chosen) + slot, int(datasets[slot]), int(chosen[slot]), bucket)
    samples = data.samples()
    result = samples[[request]]
    if result.batch is None:
        raise result.error or DataError("no batch")
    request = request._replace(sample=int(result.batch.sample_ids[0]) - samples.first_ids[request.dataset])
    caption, is_dropped = samples.caption(request)
    dropped = [name for name in is_dropped if is_dropped[name]]
    if dropped:
        is_whole = set(samples.tokenizers) <= set(dropped)
        caption = "(dropped)" if is_whole else f"{caption} (dropped: {', '.join(dropped)})"
    return Visit(data, step, request, result.skipped, result.batch.original_size[0].tolist(), caption)


def visits_of(stretch: Stretch, dataset: int, sample: int) -> list[Visit]:
    """The visits of a sample; also those at which another one replaces it, and those at which it replaces a bad one."""
    order, own = stretch.data.order, stretch.data.datasets[dataset]
    planned = set(order.visits(dataset, sample))
    candidates = own.selected[np.isin(own.bucket_of, own.bucket_of[own.selected == sample])]
    bad = [other for number, other in stretch.bad if number == dataset and other in candidates]
    slots = sorted(planned.union(*(order.visits(dataset, other) for other in bad)))
    found = {slot: read_visit(stretch.data, *slot) for slot in slots if stretch.first <= slot[0] < stretch.end}
    return [visit for slot, visit in found.items() if slot in planned or visit.request.sample == sample]


def visits_of_key(stretches: Sequence[Stretch], key: str) -> list[Visit]:
    """Prints how often the sample is visited in which steps, and why it is left out.

    Raises:
        ConfigError: no sample has the key, or several have.
    """
    lines, visits, names = list[str](), list[Visit](), set[str]()
    for stretch in stretches:
        datasets = stretch.data.datasets
        shards = {shown(shard.location) for dataset in datasets for shard in dataset.index.shards}
        # SHARD/KEY, or the picture's own URL beside the shard; a shard may be given as a relative path.
        keys, places = (key, os.path.abspath(key)), {(s, start) for s in shards for start in (s, os.path.dirname(s))}
        named = {(s, k.removeprefix(f"{start}/")) for s, start in places for k in keys}
        for number, sample in find_named(stretch.data, named):
            names.add(spelled(*datasets[number].index.name(sample)))
            if not stretch.is_same:
                said = "unknown, because the data have changed since"
            elif why := datasets[number].exclusion(sample, stretch.data.table):
                said = f"left out: {why}"
            else:
                visits += (own := visits_of(stretch, number, sample))
                said = counted(len(own), "visit")
            lines.append(f"steps {stretch.first + 1:,} to {stretch.end:,}, data set {number + 1}: {said}")
    if len(names) != 1:
        remedy = f"give one as SHARD/KEY: {', '.join(sorted(names)[:LISTED])}" if names else "--step 1 lists some keys"
        raise ConfigError(f"KEY: {counted(len(names), 'sample')} of this run's data have the key {key!r}; {remedy}")
    print("\n".join([*names, *lines, ""]))
    return visits


def visits_of_step(stretches: Sequence[Stretch], number: int) -> list[Visit]:
    """What the loader delivers for an optimizer step, counted from 1.

    Raises:
        ConfigError: it is not one of the run's, or the data have changed since.
    """
    for first, end, data, is_same, _ in stretches:
        if first < number <= end and is_same:
            return [read_visit(data, number - 1, slot) for slot in range(data.plan.global_batch)]
    known = ", ".join(f"{first + 1:,} to {end:,}" for first, end, _, is_same, _ in stretches if is_same) or "none"
    raise ConfigError(f"--step: is {number:,}, but the steps of this run on data that have not changed are {known}")


def table(visits: Sequence[Visit], done: int) -> list[str]:
    """A line per visit below a heading, without columns that are empty. Sizes are height×width [pixels].

    Args:
        done: optimizer steps that are saved.
    """
    rows: list[tuple[str, ...]] = [
        ("step", "position", "", "size", "left,top-right,bottom", "of", "", "sample", "caption")
    ]
    for visit in visits:
        crop, _ = visit.data.samples().crop(visit.request)
        height, width = visit.original_size
        left, top, right, bottom = (f"{edge:.0f}" for edge in place(height, width, crop)[0])
        size, box, whole = f"{crop.height}×{crop.width}", f"{left},{top}-{right},{bottom}", f"{height}×{width}"
        name = spelled(*visit.data.datasets[visit.request.dataset].index.name(visit.request.sample))
        name += "".join(f" instead of {spelled(bad.shard, bad.key)} ({bad.reason})" for bad in visit.skipped)
        when, flip = "seen" if visit.step < done else "to come", "flipped" * crop.flip
        cells = (visit.step + 1, visit.request.position, when, size, box, whole, flip, name, visit.caption)
        rows.append(tuple(printable(str(cell), 1000) for cell in cells))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]


def write_sheet(path: Path, visits: Sequence[Visit]) -> None:
    """Thumbnails of the pictures as they are trained on, row by row in the order of the table.

    Raises:
        UserError: the file cannot be written, or a picture cannot be read.
    """
    pictures = []
    try:
        for data, _, request, *_ in visits:
            reader, limit = data.datasets[request.dataset].reader, data.dataset.params.max_image_pixels
            pixels = reader.picture(request.sample, data.samples().crop(request)[0], limit).pixels
            pictures.append(Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))))
            pictures[-1].thumbnail((THUMBNAIL, THUMBNAIL))
        picture_grid(pictures, SHEET_COLUMNS).save(path)
    except (OSError, ValueError, BadSample) as error:
        raise UserError(f"--sheet: {path} cannot be written: {error}") from error


def main() -> None:
    """Open, find, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("words", nargs="*", metavar="KEY or a.b.c=value", help="a sample; options of the run")
    parser.add_argument("--step", type=int, metavar="N", help="list the samples of this optimizer step, from 1")
    parser.add_argument(
        "--sheet",
        type=path_argument,
        metavar="FILE",
        help="write thumbnails of the trained pictures",
    )
    given = parser.parse_intermixed_args()
    keys = [word for word in given.words if not is_option(word)]
    if len(keys) + (given.step is not None) != 1:
        raise ConfigError("KEY: give the key of one sample, or --step N instead")
    stretches = open_run(given.run, [word for word in given.words if is_option(word)])
    visits = visits_of_key(stretches, *keys) if keys else visits_of_step(stretches, given.step)
    if given.sheet is not None and visits:
        write_sheet(given.sheet, visits)
    saved = last_saved_step(given.run) or ""
    if visits:
        print("\n".join(table(visits, int(saved) if saved.isdigit() else 0)))


if __name__ == "__main__":
    run_cli(main)
