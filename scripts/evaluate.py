"""Draws pictures with a run's newest export and measures them: FID, KID, CMMD, CLIP score … (docs/evaluation.md).

    python scripts/evaluate.py RUN evaluation.inception=inception.safetensors
    torchrun --nproc_per_node 8 scripts/evaluate.py RUN evaluation.clip=openai/clip-vit-large-patch14-336
    python scripts/evaluate.py PIPELINE --out FOLDER config=configs/x.yaml evaluation.dinov2=facebook/dinov2-large
    python scripts/evaluate.py RUN --watch          # every newest export, until the run has ended

Prompts are captions of the held-out data unless `evaluation.prompts` names a file. The averaged weights are evaluated
and, where the run has a checkpoint of that step, the raw ones. Rows go to `evaluation.csv` in the folder of the run;
pictures and features of real pictures are kept in its `evaluation/` and used again.
"""

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import prepare_cpu, set_passive_wait
from sd_training.log import quiet_libraries

set_passive_wait()
quiet_libraries()

import torch
from torch.utils.tensorboard import SummaryWriter

from scripts.generate_examples import choose_device, launched_group
from sd_training.build.data import ANY_GRID
from sd_training.cli import print_error, run_cli
from sd_training.config.changes import CONFIG, RECORD, batch_plan_of, read_starts
from sd_training.config.load import load_config
from sd_training.config.plan import BatchPlan
from sd_training.config.schema import Config, ValidationConfig
from sd_training.config.value_types import path_argument
from sd_training.data.datamodule import HeldOutData, TrainingData
from sd_training.data.samples.sample import DrawSettings
from sd_training.errors import ConfigError, DataError, UserError
from sd_training.evaluation.measure import ROWS, RealPictures, Row, measure, metrics_of, read_rows, write_rows
from sd_training.evaluation.networks import load_networks
from sd_training.evaluation.pictures import DrawnSet, Weights, weights_of_pipeline, weights_of_run
from sd_training.evaluation.report import PAGE, write_report
from sd_training.export.draw import read_rows as read_captions
from sd_training.export.pipeline import exported_step
from sd_training.models.load import first_line

Real = Callable[[], RealPictures]
_BATCH = 32
"""Real pictures read at once."""
_POLL_S = 5.0
"""Between two looks at the run."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a folder is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="RUN|PIPELINE", help="folder of a run, or of a pipeline")
    parser.add_argument("--step", type=int, help="of the run's kept pipelines (default: the newest)")
    parser.add_argument("--watch", action="store_true", help="evaluate every newest export until the run has ended")
    parser.add_argument("--beside", type=int, metavar="PID", help="the parent, whose end is that of the run as well")
    parser.add_argument("--out", type=path_argument, help="folder of rows and pictures (default: that of the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps, cuda:1")
    parser.add_argument("--dry-run", action="store_true", help="print what would be drawn")
    parser.add_argument("changes", nargs="*", metavar="a.b.c=value", help="options of the run, or config=FILE")
    args = parser.parse_intermixed_args(argv)
    if not args.target.is_dir():
        raise ConfigError(f"{args.target}: is no folder; give that of a run or of a pipeline")
    args.is_run = (args.target / CONFIG).is_file()
    if not args.is_run and (args.out is None or not any(word.startswith("config=") for word in args.changes)):
        raise ConfigError(f"{args.target}: is of no run; give --out FOLDER, and config=FILE for data and sampling")
    if args.watch and not args.is_run:
        raise ConfigError(f"--watch: {args.target} is the folder of no run")
    if args.step is not None and (args.watch or not args.is_run):
        raise ConfigError("--step: is of a run's kept pipelines, without --watch; remove it")
    args.out = args.out or args.target
    return args


def read_config(args: argparse.Namespace) -> Config:
    """Of the run, with changes.

    Raises:
        ConfigError: it cannot be used, or names no network.
    """
    config = load_config([*([f"config={args.target / CONFIG}"] if args.is_run else []), *args.changes])
    if config.model.train == "vae":
        raise ConfigError("model.train: an autoencoder draws nothing; see validation.csv for its reconstructions")
    if not load_networks(config.evaluation):
        raise ConfigError(
            "evaluation: names no network; give evaluation.inception, evaluation.dinov2 or evaluation.clip"
        )
    return config


def real_pictures(config: Config) -> RealPictures:
    """Opens them.

    Raises:
        UserError: there are none.
    """
    own = config.evaluation.path
    path, option = (config.validation.path, "validation.path") if own is None else (own, "evaluation.path")
    if path is None:
        raise ConfigError("evaluation.path: there are no real pictures to compare with; name some, or validation.path")
    data = TrainingData(
        dataset=config.dataset,
        plan=BatchPlan(micro_batch=_BATCH, accumulation=1, processes=1, num_examples=_BATCH),
        workers=0,
        tokenizers={},
        draws=DrawSettings(0, ANY_GRID, has_noise=False),
        captions_needed=config.evaluation.prompts is None,
        run_dir=None,
    )
    held_out = ValidationConfig(path=path, num_samples=config.evaluation.num_real)
    return RealPictures(HeldOutData(data, held_out, option))


def read_prompts(config: Config, real: Real) -> list[str]:
    """One per picture.

    Raises:
        UserError: there are none.
    """
    count, name = config.evaluation.num_images, config.evaluation.prompts
    if name is None:
        prompts = real().captions(count)
    elif name.endswith(".csv"):
        prompts = [row["caption"] for row in read_captions(Path(name), needs_uid=False).values()]
    else:
        try:
            prompts = [line for line in Path(name).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"evaluation.prompts: {name} cannot be read as text ({error})") from error
    if not prompts:
        raise DataError(f"evaluation.prompts: {name} has no prompts")
    return [prompts[i % len(prompts)] for i in range(count)]


def has_ended(args: argparse.Namespace) -> bool:
    """Whether this process was started beside a run that is no more."""
    return args.beside is not None and os.getppid() != args.beside


def publish(args: argparse.Namespace, weights: Weights, rows: Sequence[Row]) -> None:
    """Output, rows, and TensorBoard where the run has it; a run that trains sends the rows to W&B.

    Raises:
        UserError: the rows cannot be written.
    """
    for row in rows:
        interval = f" [{row['low']}, {row['high']}]" if "low" in row else ""
        print(f"{row['metric']:<20}{row.get('value') or 'failed: ' + row['reason']}{interval}", flush=True)
    try:
        write_rows(args.out / ROWS, rows)
    except OSError as error:
        raise DataError(f"{args.out}: the rows cannot be written: {error.strerror}") from error
    try:
        if (args.out / "tensorboard").is_dir():
            # A folder beside the run's own: a file has one writer.
            with SummaryWriter(str(args.out / "tensorboard" / "evaluation")) as writer:
                for row in rows:
                    if "value" in row:
                        writer.add_scalar(f"{row['metric']}_{weights.name}", float(row["value"]), weights.step)
    except OSError as error:
        print_error(DataError(f"{args.out / ROWS} is written, TensorBoard's file is not: {error}"))


def renew_page(args: argparse.Namespace) -> None:
    """Of a run that has ended: it was written before this was measured."""
    page = args.target / PAGE
    if args.dry_run or not args.is_run or not page.is_file():
        return
    try:
        write_report([args.target], page)
    except Exception as error:  # the rows are safe, whatever it is
        print_error(DataError(f"{page}: cannot be written: {first_line(error)}"))


def planned_steps(run_dir: Path) -> int:
    """Optimizer steps of the run; -1: they are not known."""
    starts = read_starts(run_dir / RECORD)
    plan = batch_plan_of(starts[-1]) if starts else None
    return -1 if plan is None else plan.num_steps


def newest_exports(args: argparse.Namespace, config: Config) -> Iterator[int]:
    """Waits for optimizer steps that are exported and not evaluated; those that come meanwhile are passed over, but for
    the last one. One process at a time: another one, of an earlier start, ends when it has evaluated its last.

    Raises:
        UserError: the lock or `evaluation.csv` cannot be used.
    """
    path, every = args.out / "evaluation" / "watch.lock", config.evaluation.every
    try:
        lock = path.open("w")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened ({error.strerror}); remove it, or give --out FOLDER") from error
    with suppress(OSError):  # some file systems have no locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    wanted, done = metrics_of(load_networks(config.evaluation)), set[int]()
    with lock:
        while True:
            step = exported_step(args.target)
            # A run that has gone back to an earlier step may have an export of its last step from before.
            is_last = has_ended(args) if args.beside is not None else 0 <= planned_steps(args.target) <= step
            if step >= 0 and step not in done and (is_last or step % (every or 1) == 0):
                done.add(step)
                with suppress(UserError):  # `main` finds it again, and says so
                    rows = [row for row in read_rows(args.out / ROWS) if row["step"] == str(step) and row["value"]]
                    measured = {(row["weights"], row["metric"]) for row in rows}
                    exported = [weights.name for weights in weights_of_run(args.target, step, config.model)]
                    if measured >= {(name, metric) for name in exported for metric in wanted}:
                        continue
                yield step
            elif is_last:
                return
            else:
                time.sleep(_POLL_S)


def steps_to_evaluate(args: argparse.Namespace, config: Config, rank: int, world: int) -> Iterator[int | None]:
    """Collective: the one that is asked for, or those of `--watch`, which the first process finds."""
    if not args.watch:
        yield args.step
        return
    found = newest_exports(args, config) if rank == 0 else iter(())
    while True:
        step = torch.tensor(next(found, -1))
        if world > 1:
            torch.distributed.broadcast(step, 0)
        if step < 0:
            return
        yield int(step)


def weights_to_draw(args: argparse.Namespace, config: Config, step: int | None, world: int) -> list[Weights]:
    """Collective: all at once, because the run may delete what one process has found before the others look.

    Raises:
        UserError: on every process, when one has found nothing or something else.
    """
    found, failure = list[Weights](), None
    try:
        found = list(weights_of_run(args.target, step, config.model)) if args.is_run else []
        found = found or [weights_of_pipeline(args.target)]
    except UserError as error:
        failure = error
    if world > 1:
        own = torch.tensor([len(found), found[0].step if found else -1])
        least = torch.stack((own, -own))
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        if not torch.equal(least[0], -least[1]):
            failure = failure or DataError(f"{args.target}: the run has replaced its export meanwhile")
    if failure is not None:
        raise failure
    return found


def evaluate(
    drawn: DrawnSet, real: Real, args: argparse.Namespace, device: torch.device, rank: int, world: int
) -> UserError | None:
    """Collective: all draw, the first one measures. Returns why its rows are lost, if they are: the other processes
    draw on.

    Raises:
        UserError: on every process, when some cannot draw.
    """
    failure: UserError | None = None
    weights = drawn.weights
    try:
        missing = sum(not path.is_file() for path in drawn.files)
        if rank == 0:
            count = f"{len(drawn.prompts)} pictures, {missing} to be drawn"
            print(f"step {weights.step}, {weights.name} weights: {count}", flush=True)
        if args.dry_run:
            return None
        drawn.draw(device, rank, world)
    except UserError as error:
        failure = error
    except OSError as error:
        failure = DataError(f"{error}; the run may have replaced it meanwhile")
    except Exception as error:  # of libraries and devices
        if not args.watch:
            raise
        failure = DataError(f"step {weights.step} cannot be drawn: {type(error).__name__}: {first_line(error)}")
    if world > 1:
        has_failed = torch.tensor(int(failure is not None))
        torch.distributed.all_reduce(has_failed)
        failure = failure or (DataError("another process cannot draw") if has_failed else None)
    if failure is not None:
        raise failure
    if rank == 0:
        networks, reasons = load_networks(drawn.config.evaluation), dict[str, str]()
        for name, load in networks.items():  # one that is killed has written the others'
            found = measure({name: load}, drawn.files, drawn.prompts, real, drawn.root, device)
            rows = [{"step": str(weights.step), "weights": weights.name} | row for row in found]
            if all(row.get("reason") for row in rows):
                reasons[name] = rows[0]["reason"]
            try:
                publish(args, weights, rows)
            except UserError as error:
                return error
        if len(reasons) == len(networks):
            said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            return DataError(f"step {weights.step}, {weights.name} weights: nothing could be measured; {said}")
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    config = read_config(args)
    real = cache(partial(real_pictures, config))  # opened once, and only where they are needed
    prompts, device = read_prompts(config, real), torch.device(choose_device(args.device))
    try:
        (args.out / "evaluation").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {args.out / 'evaluation'} cannot be made ({error.strerror})") from error
    with launched_group() as (rank, world):
        if device.type == "cpu":
            prepare_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        lost: list[UserError] = []
        for step in steps_to_evaluate(args, config, rank, world):
            try:
                for weights in weights_to_draw(args, config, step, world):
                    drawn = DrawnSet(weights, prompts, config, args.out / "evaluation")
                    if failure := evaluate(drawn, real, args, device, rank, world):
                        lost.append(failure)
                        if args.watch:
                            print_error(failure)
            except UserError as error:
                if not args.watch:
                    raise
                print_error(error)
            finally:
                if rank == 0:
                    renew_page(args)
    if lost and not args.watch:
        raise lost[0]


def command() -> None:
    """`sd-evaluate` of an installed package."""
    run_cli(main)


if __name__ == "__main__":
    command()
