"""Does the result of a run depend on how it is spread? Trains a tiny model with real data under every strategy, on CPU
processes over gloo, and prints one table (docs/scaling.md).

    python -m tests.strategy_report [steps=20] [folder=build/strategies]
"""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

from sd_training.log import quiet_libraries

quiet_libraries()

import csv

import torch
from safetensors.torch import load_file
from torch import Tensor

from sd_training.checkpoint.save import open_checkpoint
from sd_training.cli import run_cli
from sd_training.errors import UserError
from tests.faults.tiny_run import run_as_torchrun
from tests.tiny_options import tiny_run_options
from tests.tiny_parts import flux, save_picture_shards

GLOBAL_BATCH = 8
NOT_MEASURED = "validation.path=null"
"""Of runs that go on: what they are compared by is in their checkpoints."""


@dataclass(frozen=True)
class Engine:
    """A row of the table."""

    name: str
    processes: int
    options: tuple[str, ...] = ()
    sharing: int = 1
    """Processes that draw the same samples."""

    @property
    def micro_batch(self) -> int:
        """Samples per process and step."""
        return GLOBAL_BATCH * self.sharing // self.processes


ENGINES = (
    Engine("single", 1),
    Engine("ddp ×2", 2, ("distributed.strategy=ddp",)),
    Engine("fsdp ×2", 2, ("distributed.strategy=fsdp",)),
    Engine("tensor ×2", 2, ("distributed.mesh.tensor=2",), sharing=2),
    Engine("deepspeed_1 ×2", 2, ("distributed.strategy=deepspeed_1",)),
    Engine("deepspeed_2 ×2", 2, ("distributed.strategy=deepspeed_2",)),
    Engine("deepspeed_2 + offload ×2", 2, ("distributed.strategy=deepspeed_2", "distributed.offload_optimizer=true")),
    Engine("deepspeed_3 ×2", 2, ("distributed.strategy=deepspeed_3",)),
    Engine("hsdp 2 × 2", 4, ("distributed.mesh.data=2", "distributed.mesh.fsdp=2")),
)


@dataclass(frozen=True)
class Row:
    """What an engine did, against one process; differences of weights relative to the largest weight of the network."""

    engine: str
    loss: float
    """Largest relative difference of a step's loss."""
    validation: float
    """The same of a validation loss, of weights or average, at any noise level, and of the number of samples."""
    weights: float
    ema: float
    accumulation: float
    """Of the average, the losses and the learning rates with twice as many micro-batches of half the size."""
    resume: float
    """Of weights, average and optimizer state after a resume, with the same engine; 0 is the same bits."""
    moves: float
    """Of the average after one process went on from this engine's checkpoint, and this engine from one process's; in
    the quick form after this engine went on from the checkpoint of the row above, the first row from the last one's."""
    export: float
    """Of the exported weights to the average in the checkpoint; 0 is the same bits."""
    mib: tuple[float, float, float]
    """Weights, optimizer state and average of the fullest process."""


def make_models(folder: Path) -> None:
    """A tiny transformer pipeline and shards of pictures."""
    torch.manual_seed(0)
    flux().save_pretrained(folder / "pipeline")
    for name in ("shards", "held_out"):
        save_picture_shards(folder / name)


def arguments(
    folder: Path, name: str, engine: Engine, steps: int, *, accumulation: int = 1, validations: int = 2
) -> list[str]:
    """Options of a run of `steps` optimizer steps that saves in the middle and at the end, and is validated at its
    start and so often after it."""
    return [
        *tiny_run_options(folder, folder / "runs", name),
        f"experiment.num_examples_to_see={GLOBAL_BATCH * steps}",
        f"experiment.save_every={steps // 2}",
        "dataset.params.resolution=32",
        f"system.batch_size={engine.micro_batch // accumulation}",
        f"system.gradient_accumulation={accumulation}",
        "logging.every=1",
        f"validation.path={folder / 'held_out'}",
        f"validation.every={steps // validations}",
        "validation.num_samples=9",  # batches that cannot be dealt out evenly
        "validation.num_levels=2",
        *engine.options,
    ]


def run_jobs(folder: Path, jobs: list[dict[str, object]], processes: int) -> None:
    """All jobs in the same processes.

    Raises:
        UserError: one of them failed; the log says why.
    """
    listing, log = folder / f"jobs_{processes}.json", folder / f"log_{processes}.txt"
    listing.write_text(json.dumps(jobs))
    words = ["tests.strategy_runs", str(listing)]
    statuses = run_as_torchrun(words, log, processes, limit_s=7200)
    if any(statuses):
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise UserError(f"a run with {processes} processes failed; see {log}\n{tail}")


def slug(engine: Engine) -> str:
    """Folder name of an engine's runs."""
    return "".join(c if c.isalnum() else "_" for c in engine.name)


def engine_jobs(folder: Path, engine: Engine, steps: int, is_quick: bool) -> list[dict[str, object]]:
    """Whole, accumulated, resumed, and gone on from another engine's checkpoint. The quick form accumulates in all runs
    but those of one process, so that the comparison with it is one of both."""
    name = slug(engine)
    usual, often = (2 if is_quick and engine.processes > 1 else 1), (1 if is_quick else 2)
    whole = arguments(folder, name, engine, steps, accumulation=usual, validations=often)
    jobs: list[dict[str, object]] = [{"argv": whole}]
    if usual == 1:
        jobs.append({"argv": arguments(folder, f"{name}_accumulated", engine, steps, accumulation=2)})
    jobs.append(_going_on(folder, f"{name}_resumed", name, engine, steps, usual))
    if is_quick and engine.processes > 1:
        before = ENGINES[ENGINES.index(engine) - 1]
        jobs.append(_going_on(folder, f"{name}_from_other", slug(before), engine, steps, usual))
    elif not is_quick:
        jobs.append(_going_on(folder, f"{name}_from_other", "single", engine, steps, usual))
    return jobs


def _going_on(
    folder: Path, target: str, source: str, engine: Engine, steps: int, accumulation: int = 1
) -> dict[str, object]:
    """A run from the middle of another one, whose checkpoint it begins with."""
    runs, argv = folder / "runs", arguments(folder, target, engine, steps, accumulation=accumulation)
    places = {"copy": str(runs / source), "to": str(runs / target), "drop": f"step={steps}"}
    return {**places, "argv": [*argv, NOT_MEASURED]}


def make_runs(folder: Path, engines: Iterable[Engine], steps: int, is_quick: bool) -> None:
    """Every run that the table compares. `engines` begin with `single`."""
    single, *others = engines
    run_jobs(folder, engine_jobs(folder, single, steps, is_quick), 1)
    for processes in sorted({engine.processes for engine in others}):
        jobs = [j for e in others if e.processes == processes for j in engine_jobs(folder, e, steps, is_quick)]
        run_jobs(folder, jobs, processes)
    last = [("single_from_other", others[-1])]
    back = last if is_quick else [(f"{slug(engine)}_to_single", engine) for engine in others]
    run_jobs(folder, [_going_on(folder, target, slug(engine), single, steps) for target, engine in back], 1)


def tensors(run: Path, step: int, *parts: str) -> dict[str, Tensor]:
    """Tensors of a checkpoint by part and name."""
    stored = open_checkpoint(run / "checkpoints" / f"step={step}").parts
    return {f"{part}/{name}": t.float() for part in parts for name, t in stored[part].items()}


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Largest difference, relative to the largest number."""
    if left.keys() != right.keys():
        raise UserError(f"tensors differ in name: {sorted(left.keys() ^ right.keys())[:3]}")
    largest = max(float(t.abs().max()) for t in right.values())
    return max(float((left[name] - right[name]).abs().max()) for name in right) / largest


def difference(run: Path, other: Path, column: str, file: str = "metrics.csv") -> float:
    """Largest relative difference of a column over the rows of a file."""
    found = []
    for folder in (run, other):
        with (folder / file).open(newline="") as stream:
            found.append([float(row[column]) for row in csv.DictReader(stream)])
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(*found, strict=True))


def compare(folder: Path, engine: Engine, steps: int) -> Row:
    """One row of the table."""
    runs = folder / "runs"
    own, single, name = runs / slug(engine), runs / "single", slug(engine)
    other = runs / f"{name}_accumulated"
    reference = own if other.exists() else single
    accumulated = other if other.exists() else own
    state = ("weights", "ema", "optimizer")
    moved = [run for run in (runs / f"{name}_from_other", runs / f"{name}_to_single") if run.exists()]
    exported = load_file(own / "current_pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
    average = {key.rpartition("network.")[2]: t for key, t in tensors(own, steps, "ema").items()}
    sizes = [json.loads(path.read_text()) for path in own.glob("bytes_*.json")]
    return Row(
        engine=engine.name,
        loss=difference(own, single, "loss"),
        validation=max(
            difference(own, single, column, "validation.csv") for column in ("loss", "loss_low", "loss_high", "samples")
        ),
        weights=distance(tensors(own, steps, "weights"), tensors(single, steps, "weights")),
        ema=distance(tensors(own, steps, "ema"), tensors(single, steps, "ema")),
        accumulation=max(
            distance(tensors(accumulated, steps, "ema"), tensors(reference, steps, "ema")),
            *(difference(accumulated, reference, column) for column in ("loss", "learning_rate")),
        ),
        resume=distance(tensors(runs / f"{name}_resumed", steps, *state), tensors(own, steps, *state)),
        moves=max(distance(tensors(run, steps, "ema"), tensors(single, steps, "ema")) for run in moved),
        export=distance({key: exported[key] for key in average}, average),
        mib=tuple(max(size[kind] for size in sizes) / 2**20 for kind in ("weights", "optimizer", "ema")),
    )


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    heads = (
        "engine",
        "loss",
        "validation",
        "weights",
        "average",
        "accumulation",
        "resume",
        "moved",
        "export",
        "MiB per process",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        numbers = (row.loss, row.validation, row.weights, row.ema, row.accumulation, row.resume, row.moves, row.export)
        cells = [f"{number:.1e}" if number else "0" for number in numbers]
        lines.append(f"| {row.engine} | {' | '.join(cells)} | {' + '.join(f'{m:.3f}' for m in row.mib)} |")
    return "\n".join(lines)


def report(folder: Path, steps: int, is_quick: bool = False) -> list[Row]:
    """Makes models, runs and rows; what an earlier report left in the folder is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_models(folder)
    make_runs(folder, ENGINES, steps, is_quick)
    return [compare(folder, engine, steps) for engine in ENGINES]


def main() -> None:
    """Parse, run, print."""
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if unknown := given.keys() - {"steps", "folder"}:
        raise UserError(f"{sorted(unknown)[0]}: is no option; options are steps=20 and folder=build/strategies")
    steps = int(given.get("steps", "20"))
    if steps < 4 or steps % 2:
        raise UserError(f"steps: is {steps}; an even number of at least 4 is needed, because a run saves in its middle")
    print(table(report(Path(given.get("folder", ROOT / "build" / "strategies")).resolve(), steps)))


if __name__ == "__main__":
    run_cli(main)
