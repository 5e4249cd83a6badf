"""Fuzz: every input that comes from outside ends in a normal result or in the project's own error.

    python -m tests.faults.fuzz FOLDER [inputs=10000] [seed=1]

Inputs run in child processes, some hundred in each, so that memory and crashes are seen. What fails is written to the
folder with its traceback; the same seed makes the same inputs.
"""

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType

import torch

from sd_training.checkpoint.folder import folder_name, verify_checkpoint
from sd_training.checkpoint.save import open_checkpoint, write_state, write_tensors
from sd_training.cli import run_cli
from sd_training.config.data_schema import RemoteConfig
from sd_training.config.filters import parse_filters
from sd_training.config.load import load_config
from sd_training.data.samples.image import decode, image_size
from sd_training.data.sources.arrow import ArrowSource
from sd_training.data.sources.tar import TarSource
from sd_training.data.storage.files import open_bytes
from sd_training.errors import BadSample, ConfigError, UserError
from tests.checkpoints import write_sealed
from tests.faults.fuzz_inputs import Inputs
from tests.faults.hostile_files import TAR_END, tar_member
from tests.faults.row import Row

SEED = 1
QUICK, FULL = 600, 10_000
"""Inputs in all [count]."""
PER_CHILD = 250
MEMORY_MIB = 512
"""Most that a child may grow by over its inputs [MiB]; images are limited to `MAX_PIXELS` [pixels]."""
LONGEST_S = 30
"""Longest time for one input [s]."""
MAX_PIXELS = 4_000_000
_BASE = ("experiment.log_dir=runs", "experiment.num_examples_to_see=100", "model.pretrained=a/b")


class TooLong(BaseException):
    """An input took longer than `LONGEST_S`."""


def read_tar(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """Indexes a shard and decodes its images; False where something was wrong with it."""
    path = folder / "input.tar"
    path.write_bytes(data)
    source = TarSource([str(path)], RemoteConfig())
    (shard,) = source.shards()
    columns, problems = source.scan(shard)
    is_whole = not problems.total()
    with closing(open_bytes(shard, source.access)) as file:
        spans = zip(*(columns[name].to_pylist() for name in ("at:image_offset", "at:image_length")), strict=True)
        for offset, length in spans if len(columns["key"]) else ():
            try:
                decode(file.pread(min(length, len(data)), offset), MAX_PIXELS)
            except (BadSample, UserError):
                is_whole = False
    return is_whole


def read_sidecar(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """Indexes a shard whose metadata this is."""
    return read_tar(tar_member("a.jpg", inputs.images[0]) + tar_member("a.json", data) + TAR_END, folder, inputs)


def read_image(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """Header, then pixels."""
    import io

    image_size(io.BytesIO(data))
    try:
        decode(data, MAX_PIXELS)
    except BadSample:
        return False
    return True


def read_filter(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """As a field's condition, and with fields in the text."""
    text = data.decode("utf-8", "surrogateescape")
    return not parse_filters({"width": text})[1] or not parse_filters({"where": text})[1]


def read_config(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """A file and overrides."""
    text, _, overrides = data.partition(b"\n-----\n")
    (folder / "input.yaml").write_bytes(text)
    words = overrides.decode("utf-8", "surrogateescape").splitlines()
    try:
        load_config([f"config={folder / 'input.yaml'}", *_BASE, *words])
    except ConfigError:
        return False
    return True


def read_saved_dataset(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """Lists the Arrow files of a folder as `save_to_disk` writes it."""
    name, _, content = data.partition(b"\n")
    saved = folder / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    saved.mkdir()
    (saved / "x.arrow").touch()
    (saved / name.decode()).write_bytes(content)
    return bool(ArrowSource([str(saved)], RemoteConfig(), saved=True).shards())


def read_checkpoint(data: bytes, folder: Path, inputs: Inputs) -> bool:
    """Verifies a damaged checkpoint, and reads it as if that had passed."""
    name, _, seed = data.decode().partition("\n")
    whole, damaged = folder / "whole", folder / "damaged" / folder_name(3)
    if not whole.exists():
        _make_checkpoint(whole)
    shutil.rmtree(damaged.parent, ignore_errors=True)
    shutil.copytree(whole / folder_name(3), damaged)
    before = (damaged / name).read_bytes()
    after = inputs.damaged_json(before, int(seed))
    (damaged / name).write_bytes(after)
    if verify_checkpoint(damaged) == [] and after != before:
        raise AssertionError("damage was not found")
    try:
        parts = open_checkpoint(damaged).parts
        for tensors in parts.values():
            for tensor in tensors:
                tensors[tensor]
    except UserError:
        return False
    return after == before


def _make_checkpoint(root: Path) -> None:
    def write(partial: Path) -> None:
        write_tensors(partial, "weights", {"a": torch.ones(4), "b": torch.zeros(2, 3)}, 0, 1)
        write_state(partial, {"global_step": 3, "moment": torch.ones(3, 2).t(), "nested": {"a": (1.5, [None, True])}})

    write_sealed(root, 3, write, {"world_size": 1})


TARGETS: dict[str, Callable[[bytes, Path, Inputs], bool]] = {
    "tar": read_tar,
    "JSON sidecar": read_sidecar,
    "image": read_image,
    "filter text": read_filter,
    "config text": read_config,
    "saved dataset": read_saved_dataset,
    "checkpoint": read_checkpoint,
}


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise TooLong


def run_one(surface: str, number: int, folder: Path, inputs: Inputs) -> str:
    """`accepted`, `refused` or `failed`; what failed is kept."""
    data = inputs.makers()[surface](inputs.chance(surface, number))
    (folder / "last_input").write_bytes(data)  # still there where the process dies
    signal.alarm(LONGEST_S)
    try:
        return "accepted" if TARGETS[surface](data, folder, inputs) else "refused"
    except UserError:
        return "refused"
    except (Exception, TooLong):
        signal.alarm(0)
        name = f"{surface.replace(' ', '_')}_{number}"
        (folder.parent / name).write_bytes(data)
        (folder.parent / f"{name}.txt").write_text(traceback.format_exc(), encoding="utf-8", errors="replace")
        return "failed"
    finally:
        signal.alarm(0)


def _child(surface: str, numbers: range, folder: Path, inputs: Inputs) -> None:
    signal.signal(signal.SIGALRM, _alarm)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = Counter(run_one(surface, number, folder, inputs) for number in numbers)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (folder / "result.json").write_text(json.dumps({"counts": counts, "mib": grown_kib / 1024}))


def run_in_child(surface: str, numbers: range, folder: Path, inputs: Inputs) -> tuple[Counter[str], float]:
    """Counts by outcome, and how far memory grew [MiB]. A child that dies is one more failure."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (child := os.fork()) == 0:
        status = 1
        try:
            _child(surface, numbers, folder, inputs)
            status = 0
        finally:
            os._exit(status)
    os.waitpid(child, 0)
    result = folder / "result.json"
    if not result.exists():
        shutil.copy(folder / "last_input", folder.parent / f"{surface.replace(' ', '_')}_died_after_{numbers.start}")
        return Counter(failed=1), 0.0
    found = json.loads(result.read_text())
    return Counter(found["counts"]), float(found["mib"])


def run_surface(surface: str, count: int, folder: Path, inputs: Inputs, canary: Path) -> Row:
    """One row of the table."""
    counts, peak_mib = Counter[str](), 0.0
    for start in range(0, count, PER_CHILD):
        numbers = range(start, min(count, start + PER_CHILD))
        found, mib = run_in_child(surface, numbers, folder / "work", inputs)
        counts, peak_mib = counts + found, max(peak_mib, mib)
    fired = int(canary.exists())
    figure = (
        f"{counts['accepted']:,} read, {counts['refused']:,} refused, {counts['failed']} tracebacks, {fired} canaries "
        f"fired, memory at most +{peak_mib:.0f} MiB (seed {inputs.seed})"
    )
    promise = f"our own error or a result, nothing runs, within {MEMORY_MIB} MiB and {LONGEST_S} s"
    is_kept = not counts["failed"] and not fired and peak_mib <= MEMORY_MIB
    return Row(f"fuzzed {surface}", promise, count, figure, is_kept)


def fuzz(folder: Path, count: int, seed: int) -> list[Row]:
    """Shares `count` inputs among the surfaces."""
    folder.mkdir(parents=True, exist_ok=True)
    canary = folder.resolve() / "canary"
    shutil.rmtree(canary, ignore_errors=True)
    inputs = Inputs(seed, canary)
    share = -(-count // len(TARGETS))
    rows = [run_surface(surface, share, folder / "fuzz", inputs, canary) for surface in TARGETS]
    shutil.rmtree(folder / "fuzz" / "work", ignore_errors=True)
    return rows


def run(folder: Path, is_quick: bool) -> list[Row]:
    """As every part of the campaign."""
    return fuzz(folder, QUICK if is_quick else FULL, SEED)


def main() -> None:
    """Parse, run, print."""
    words = sys.argv[1:]
    given = dict(word.partition("=")[::2] for word in words[1:])
    if not words or given.keys() - {"inputs", "seed"} or not all(value.isdigit() for value in given.values()):
        raise ConfigError("python -m tests.faults.fuzz FOLDER [inputs=10000] [seed=1]")
    rows = fuzz(Path(words[0]), int(given.get("inputs", FULL)), int(given.get("seed", SEED)))
    for row in rows:
        print(f"{'kept  ' if row.is_kept else 'BROKEN'} {row.fault}, {row.trials:,} inputs: {row.figure}")
    if not all(row.is_kept for row in rows):
        raise UserError(f"some inputs failed; they are in {Path(words[0]) / 'fuzz'}")


if __name__ == "__main__":
    run_cli(main)
