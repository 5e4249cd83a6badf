"""Wrong numbers: a NaN on one of two ranks, many of them in a row, a loss spike, a flipped bit; and none of it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sd_training.callbacks.numerics import RECENT, AnomalyDetector
from sd_training.config.schema import NumericsConfig
from sd_training.errors import UserError
from tests.faults.numeric_runs import Fault, Outcome, run_one, write_outcome
from tests.faults.row import Row
from tests.faults.tiny_run import run_as_torchrun
from tests.strategy_report import make_models
from tests.tiny_options import tiny_run_options

STEPS = 12
BAD_STEP = 5
SPIKE_STEPS = 90
SPIKE_AT = 75
LOGGED_EVERY = 2
DIGEST_EVERY = 3
SIMULATED_STEPS = 10_000


@dataclass(frozen=True)
class Job:
    """A run with a fault."""

    name: str
    fault: Fault
    options: tuple[str, ...] = ()
    processes: int = 2
    steps: int = STEPS
    save_every: int = STEPS

    def arguments(self, folder: Path) -> list[str]:
        """Of the trainer."""
        return [
            *tiny_run_options(folder, folder / "runs", self.name),
            f"experiment.num_examples_to_see={4 * self.processes * self.steps}",
            f"experiment.save_every={self.save_every}",
            "dataset.params.resolution=32",
            "system.batch_size=4",
            f"logging.every={LOGGED_EVERY}",
            f"numerics.digest_every={DIGEST_EVERY}",
            *self.options,
        ]


def jobs_of(is_quick: bool) -> list[Job]:
    """All runs; those that end with an error come last."""
    strategies = ["ddp", "fsdp"] if is_quick else ["ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"]
    nan = Fault("nan", [BAD_STEP], rank=1)
    jobs = [Job(f"nan_{name}", nan, (f"distributed.strategy={name}",)) for name in strategies]
    clean = ["ddp"] if is_quick else ["ddp", "fsdp"]
    jobs += [Job(f"clean_{name}", Fault("none"), (f"distributed.strategy={name}",)) for name in clean]
    three = ("numerics.max_skipped_in_a_row=3",)
    for name in strategies[: 1 if is_quick else None]:
        options = (*three, f"distributed.strategy={name}")
        jobs.append(Job(f"back_{name}", Fault("nan", [5, 6, 7], rank=1), options, save_every=4))
    jobs.append(Job("hopeless", Fault("nan", list(range(5, STEPS)), rank=1), (*three, "numerics.max_rollbacks=0")))
    jobs.append(Job("bit", Fault("bit", [BAD_STEP - 1], rank=1), save_every=4))
    spike = Fault("outlier", list(range(SPIKE_AT, SPIKE_AT + 3)))
    rollback = ("numerics.on_spike=rollback",)
    return [*jobs, Job("spike", spike, rollback, processes=1, steps=SPIKE_STEPS, save_every=60)]


def start_pair(folder: Path, jobs: list[Job]) -> None:
    """Runs all jobs of two processes.

    Raises:
        UserError: the processes did not end well.
    """
    listing, log = folder / "jobs.json", folder / "log.txt"
    described = [{"name": job.name, "argv": job.arguments(folder), "fault": asdict(job.fault)} for job in jobs]
    listing.write_text(json.dumps(described), encoding="utf-8")
    words = ["tests.faults.numeric_runs", str(listing)]
    if any(run_as_torchrun(words, log, 2, limit_s=7200)):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise UserError(f"the runs of two processes failed; see {log}\n{tail}")


def outcomes(folder: Path, job: Job) -> list[Outcome]:
    """Of each rank."""
    stored = [json.loads((folder / f"{job.name}_{rank}.json").read_text()) for rank in range(job.processes)]
    return [
        replace(Outcome(**one), digests={int(step): digest for step, digest in one["digests"].items()})
        for one in stored
    ]


def incidents(folder: Path, job: Job) -> Mapping[str, Any]:
    """File name → content."""
    paths = sorted((folder / "runs" / job.name / "incidents").glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def saved(folder: Path, job: Job) -> list[int]:
    """Steps of the run's checkpoints."""
    return sorted(int(p.name.removeprefix("step=")) for p in (folder / "runs" / job.name / "checkpoints").iterdir())


def nan_row(folder: Path, jobs: list[Job]) -> Row:
    """One NaN on one rank, with every strategy."""
    kept = 0
    for job in jobs:
        ranks, told = outcomes(folder, job), incidents(folder, job)
        is_skipped = all(_unchanged(rank.digests) == [BAD_STEP] for rank in ranks)
        is_equal = job.name != "nan_ddp" or ranks[0].digests == ranks[1].digests
        is_whole = all(rank.is_finite and rank.steps == STEPS for rank in ranks)
        name = f"step={BAD_STEP}.skipped.json"
        is_named = list(told) == [name] and told[name]["ranks_with_non_finite_loss"] == [1]
        kept += is_skipped and is_equal and is_whole and is_named and told[name]["samples"][0]["loss"] == "nan"
    names = ", ".join(job.name.removeprefix("nan_") for job in jobs)
    return Row(
        "a NaN in one sample of one rank of two",
        "all ranks skip the step, weights stay finite and equal, the incident names rank and sample",
        len(jobs),
        f"{kept} of {len(jobs)} runs ({names})",
        kept == len(jobs),
    )


def _unchanged(digests: Mapping[int, int]) -> list[int]:
    """Steps that left the weights alone [optimizer steps completed before them]."""
    return [step for step in digests if step + 1 in digests and digests[step] == digests[step + 1]]


def back_row(folder: Path, backs: list[Job], hopeless: Job) -> Row:
    """Three in a row, with a rollback left and without."""
    kept = 0
    for job in backs:
        ranks, done = outcomes(folder, job), incidents(folder, job).get("step=7.rollback.json", {})
        is_back = (done.get("to"), done.get("at")) == (4, 8)
        is_back &= job.name != "back_ddp" or ranks[0].digests == ranks[1].digests
        kept += is_back and all(
            rank.digests[8] == rank.digests[4] and rank.steps == STEPS and not rank.status for rank in ranks
        )
    has_ended = all(rank.status == 86 and "step=7.skipped.json" in rank.message for rank in outcomes(folder, hopeless))
    names = ", ".join(job.name.removeprefix("back_") for job in backs)
    return Row(
        "three NaNs in a row on one rank of two",
        "all ranks go back to the checkpoint before them, and on; without a rollback left, they end with status 86",
        len(backs) + 1,
        f"{kept} of {len(backs)} went back from 8 to 4 steps ({names}); ended alike with 86: {has_ended}",
        kept == len(backs) and has_ended,
    )


def bit_row(folder: Path, job: Job) -> Row:
    """One bit of one weight of one replica."""
    ranks = outcomes(folder, job)
    found_at = [max(rank.digests, default=0) + 1 for rank in ranks]
    is_found = all(rank.status == 89 for rank in ranks) and "differing_ranks" in str(incidents(folder, job))
    newest = max(saved(folder, job), default=0)
    return Row(
        "one flipped bit in one of two replicas",
        f"found within {DIGEST_EVERY} steps on all ranks, status 89, no checkpoint of it",
        1,
        f"flipped in step {BAD_STEP}, found after {found_at[0]}; newest checkpoint after {newest}",
        is_found and newest < BAD_STEP and all(step < BAD_STEP + DIGEST_EVERY for step in found_at),
    )


def spike_row(folder: Path, job: Job) -> Row:
    """Three steps of outliers in a real run."""
    (one,) = outcomes(folder, job)
    told = incidents(folder, job)
    found = [entry for name, entry in told.items() if name.endswith(".spike.json")]
    backs = [entry for name, entry in told.items() if name.endswith(".rollback.json")]
    is_found = len(found) == 1 and SPIKE_AT <= found[0]["optimizer_step"] < SPIKE_AT + RECENT
    is_back = len(backs) == 1 and backs[0]["to"] < SPIKE_AT and one.steps == SPIKE_STEPS and one.status == 0
    is_back = is_back and one.digests[backs[0]["at"]] == one.digests[backs[0]["to"]]
    when = found[0]["optimizer_step"] - SPIKE_AT + 1 if found else math.nan
    return Row(
        "three optimizer steps of outliers in a run",
        f"a spike within {RECENT} steps, none elsewhere, and a way back to weights from before it",
        1,
        f"found {when} steps after it began; went back to step {backs[0]['to'] if backs else None}",
        is_found and is_back,
    )


def simulated(seed: int, freedom: float) -> np.ndarray:
    """Losses of `SIMULATED_STEPS` steps: a falling trend with heavy-tailed, correlated noise of the logarithm."""
    chance = np.random.default_rng(seed)
    noise = 0.1 * chance.standard_t(freedom, SIMULATED_STEPS)
    drift = np.convolve(chance.normal(0, 0.02, SIMULATED_STEPS + 50), np.ones(50) / 50**0.5, "valid")
    trend = 1.5 * np.exp(-np.arange(SIMULATED_STEPS) / 300) + drift[:SIMULATED_STEPS]
    losses: np.ndarray = 0.1 * np.exp(trend + noise)
    return losses


def _found(losses: np.ndarray) -> Iterator[int]:
    detector = AnomalyDetector(NumericsConfig(spike_threshold=6.0))
    yield from (step for step, loss in enumerate(losses) if detector.add(step, float(loss)) is not None)


def detector_rows(num_series: int) -> list[Row]:
    """The detector alone: false alarms, and delay of one injected spike per series."""
    false, late, delays = 0, 0, []
    for seed in range(num_series):
        losses = simulated(seed, freedom=3.0 if seed % 2 else 10.0)
        false += sum(1 for _ in _found(losses))
        at = 1000 + 37 * seed
        losses[at : at + 20] *= 5.0
        when = next(iter(_found(losses)), None)
        late += when is None or not at <= when < at + RECENT
        delays.append(math.inf if when is None else when - at + 1)
    steps = num_series * SIMULATED_STEPS
    # With no event in n steps, the rate is below 3 / n with 95 % confidence.
    bound = f"below {3 / steps:.1e} per step (95 %)" if not false else "see trials"
    return [
        Row(
            "losses with Student-t tails of 3 and 10 degrees of freedom, no spike",
            "no spike is reported",
            num_series,
            f"{false} in {steps:,} steps, {bound}",
            false == 0,
        ),
        Row(
            "the same with 20 steps of 5 times the loss",
            f"found within {RECENT} steps",
            num_series,
            f"{num_series - late} of {num_series}; slowest {max(delays)} steps",
            late == 0,
        ),
    ]


def clean_row(folder: Path, jobs: list[Job]) -> Row:
    """Nothing goes wrong."""
    alarms = sum(len(incidents(folder, job)) for job in jobs)
    has_ended = all(one.steps == STEPS and one.status == 0 for job in jobs for one in outcomes(folder, job))
    return Row(
        "nothing",
        "no incident, no rollback, no difference of replicas",
        len(jobs),
        f"{alarms} incidents in {len(jobs) * STEPS} steps",
        alarms == 0 and has_ended,
    )


def run(folder: Path, is_quick: bool) -> list[Row]:
    """All rows.

    Args:
        folder: empty; runs and logs are left in it.
        is_quick: two strategies and 2 simulated series, one for each kind of tail, instead of five and 100.
    """
    make_models(folder)
    jobs = jobs_of(is_quick)
    start_pair(folder, [job for job in jobs if job.processes == 2])
    for job in jobs:
        if job.processes == 1:
            write_outcome(folder, job.name, run_one(job.arguments(folder), job.fault))
    by_name = {job.name: job for job in jobs}
    return [
        nan_row(folder, [job for job in jobs if job.name.startswith("nan_")]),
        back_row(folder, [job for job in jobs if job.name.startswith("back_")], by_name["hopeless"]),
        bit_row(folder, by_name["bit"]),
        spike_row(folder, by_name["spike"]),
        *detector_rows(2 if is_quick else 100),
        clean_row(folder, [job for job in jobs if job.name.startswith("clean_")]),
    ]
