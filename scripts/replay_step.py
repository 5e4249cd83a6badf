"""Runs the step of an incident again, on one device: same samples, draws and micro-batches.

    python scripts/replay_step.py RUN/incidents/step=N.skipped.json [--device cuda] [option=value …]

Start it in the folder that the run was started in, so that paths mean the same. It takes the weights of the checkpoint
after N optimizer steps, or of the newest one before, and says which. It prints the loss of every sample, where the
first value arises that is not finite, and the norm of the gradient by block. The run folder is only read.

The options are those of the start in which it happened (`run.json` in the run folder). What they do not hold is given
again, as for train.py: the permission to run commands (dataset.params.allow_pipe=true), and URLs with keys
(dataset.params.path=…).
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.cli import prepare_cpu, set_passive_wait
from sd_training.log import quiet_libraries

quiet_libraries()
set_passive_wait()

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sd_training.build.cache import open_cache
from sd_training.build.data import make_data
from sd_training.build.models import Trained, build_model
from sd_training.build.plan import Plan, make_plan
from sd_training.callbacks.numerics import Rollback, newest_before
from sd_training.checkpoint.folder import folder_name, step_of
from sd_training.checkpoint.save import WEIGHTS, load_into, open_checkpoint
from sd_training.cli import run_cli
from sd_training.config.changes import CONFIG, RECORD, read_starts
from sd_training.config.load import load_config
from sd_training.config.plan import BatchPlan
from sd_training.config.schema import Config
from sd_training.data.datamodule import TrainingData
from sd_training.data.sources.base import printable
from sd_training.errors import DataError, UserError
from sd_training.models.family import autocast
from sd_training.types import PixelBatch

ON_ONE_DEVICE = (
    "checkpoint.keep_best=0",  # earlier versions kept the best by the training loss, which is refused today
    "distributed.strategy=single",
    "distributed.mesh={data: 1, fsdp: 1, tensor: 1}",
    "distributed.reshard_after_forward=true",
    "distributed.offload_optimizer=false",
    "distributed.offload_parameters=false",
    "distributed.encoders=0",
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "trainer.compile=off",
    "system.workers=0",
    "dataset.params.workers=null",
)
"""Options that make a run of several processes one process, which computes the same."""
SHOWN = 40
"""Samples printed."""


@dataclass(frozen=True)
class Incident:
    """What of the file is needed to run the step again."""

    run_dir: Path
    step: int
    batch: BatchPlan
    losses: dict[int, float]
    """Position → loss as it was recorded."""
    time_unix_s: float = math.inf
    """When it was written."""


@dataclass(frozen=True)
class ReplayedSample:
    """A sample of the step."""

    rank: int
    micro_batch: int
    position: int
    name: tuple[str, str]
    loss: float
    timestep: float | None


def read_incident(path: Path) -> Incident:
    """The file, which may be damaged.

    Raises:
        UserError: it is none.
    """
    try:
        incident = json.loads(path.read_text(encoding="utf-8"))
        recorded = {int(sample["position"]): float(sample["loss"]) for sample in incident.get("samples", ())}
        return Incident(
            path.resolve().parents[1],
            int(incident["optimizer_step"]),
            BatchPlan(**incident["batch_plan"]),
            recorded,
            float(incident.get("time_unix_s", math.inf)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: is no file of a run's incidents/ folder: {error}") from error


def plan_of(incident: Incident, device: str, changes: Sequence[str] = ()) -> Plan:
    """The config of the run's start in which it happened, with changes, on one device, with the run's batch
    arithmetic."""
    starts = [start for start in read_starts(incident.run_dir / RECORD) if "config" in start]  # oldest first
    begun = [start for start in starts if float(start["started_unix_s"]) <= incident.time_unix_s]
    return plan_of_start(incident.run_dir, begun, incident.batch, device, changes)


def plan_of_start(
    run_dir: Path, starts: Sequence[Mapping[str, Any]], batch: BatchPlan, device: str, changes: Sequence[str]
) -> Plan:
    """The config of the last of these starts of a run, with changes, on one device, with this batch arithmetic; that of
    the run folder where they have none.

    Args:
        starts: entries of `run.json`, oldest first.
    """
    begun = [start["config"] for start in starts if isinstance(start.get("config"), list)]
    words = [*changes, *ON_ONE_DEVICE, f"trainer.accelerator={device}"]
    text = "\n".join(begun[-1]) if begun else (run_dir / CONFIG).read_text(encoding="utf-8")
    return replace(make_plan(load_stored(text, words)), batch=batch, run_dir=run_dir)


def load_stored(text: str, words: Sequence[str]) -> Config:
    """A configuration that a run or a checkpoint holds as text, with changes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG
        path.write_text(text, encoding="utf-8")
        return load_config([f"config={path}", *words])


def checkpoint_before(incident: Incident) -> Path | None:
    """The newest checkpoint that verifies and that the step could have come from."""
    rollbacks = [_rollback(path) for path in (incident.run_dir / "incidents").glob("step=*.rollback.json")]
    done, root = [own for own in rollbacks if own.at <= incident.step], incident.run_dir / "checkpoints"
    found = newest_before(root, incident.step + 1, done)
    return None if found is None else root / folder_name(found)


def _rollback(path: Path) -> Rollback:
    try:
        incident = json.loads(path.read_text(encoding="utf-8"))
        return Rollback(at=int(incident["at"]), to=int(incident["to"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is damaged ({error}), so it is unknown which checkpoints that rollback left behind; move it away "
            "to continue as if there had been none"
        ) from error


def load_weights(incident: Incident, trained: Trained) -> bool:
    """Loads and says what was loaded; whether it is what the step began with."""
    folder = checkpoint_before(incident)
    if folder is None:
        print(f"weights: those that the run began with; the step was after {incident.step:,} optimizer steps")
        return incident.step == 0
    load_into(trained.module, open_checkpoint(folder).parts[WEIGHTS], str(folder))
    behind = incident.step - step_of(folder)
    print(f"weights: {folder}" + (f", {behind:,} optimizer steps older than the step's own" if behind else ""))
    return behind == 0


def micro_batches(incident: Incident, data: TrainingData) -> Iterator[tuple[int, int, PixelBatch]]:
    """Rank, micro-batch and batch of all that made the step.

    Raises:
        DataError: samples cannot be read any more.
    """
    for rank in range(incident.batch.processes):
        loader = data.loader(rank, lambda: incident.step)
        for micro in range(incident.batch.accumulation):
            result = loader.dataset[loader.request(incident.step * incident.batch.accumulation + micro, rank)]
            if result.batch is None:
                raise result.error or DataError("no batch")
            yield rank, micro, result.batch


class FirstNonFinite:
    """Where in a forward and backward pass the first value arises that is infinite or not a number; of nested modules
    the innermost one.

    Args:
        networks: by the name that findings use.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.has_found = False
        self._networks = dict(networks)
        self._found: list[str] = []
        self._has_output = self._has_gradient = False
        for part, network in networks.items():
            for name, module in network.named_modules():
                look = partial(self._look_at_output, f"{part}.{name}".rstrip("."))
                module.register_forward_hook(look, with_kwargs=True)

    def begin(self, batch: PixelBatch) -> None:
        """A new micro-batch: looks at the weights and at the batch itself."""
        self._found, self._has_output, self._has_gradient = [], False, False
        for part, network in self._networks.items():
            odd = [name for name, p in network.named_parameters() if not _is_finite(p)]
            if odd:
                self._tell(f"{len(odd)} weights of {part} are not finite to begin with, the first is {odd[0]}")
        for name, value in vars(batch).items():
            if isinstance(value, Tensor) and not _is_finite(value):
                rows = [i for i, row in enumerate(value) if not _is_finite(row)]
                self._tell(f"the batch's {name} is not finite in samples {rows[:20]}")

    def findings(self) -> list[str]:
        """What was found since `begin`, in the order of the computation; to be called after the backward pass."""
        return self._found

    def _tell(self, text: str) -> None:
        self.has_found = True
        self._found.append(text)

    def _look_at_output(self, name: str, module: nn.Module, inputs: Any, named_inputs: Any, output: Any) -> None:
        tensors = _floats(output)
        if not self._has_output and not all(map(_is_finite, tensors)):
            self._has_output = True
            given = [t.detach().abs().max() for t in _floats((inputs, named_inputs)) if t.numel()]
            kind, largest = type(module).__name__, max(map(float, given), default=0.0)
            is_cause = all(map(_is_finite, given))
            cause = f"inputs up to {largest:.4g}" if is_cause else "inputs that were not finite already"
            self._tell(f"first output that is not finite: {name} ({kind}), from {cause}")
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look_at_gradient, name))

    def _look_at_gradient(self, name: str, gradient: Tensor) -> None:
        if not self._has_gradient and not _is_finite(gradient):
            self._has_gradient = True
            self._tell(f"first gradient that is not finite: that of the output of {name}")


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _floats(value: Any) -> list[Tensor]:
    """Those inside tuples, lists and mappings, such as the outputs of diffusers and transformers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def replay(incident: Incident, plan: Plan, trained: Trained, data: TrainingData) -> list[ReplayedSample]:
    """Forward and backward of the whole step; gradients are left in the module, and the first non-finite value of
    every micro-batch that has one is printed."""
    module, device = trained.module, torch.device(plan.launch.accelerator)
    module.to(device)
    module.move_frozen_to(device)
    watch = FirstNonFinite(trained.family.networks() if trained.family else {"vae": trained.module.network})
    samples, batch_plan = list[ReplayedSample](), incident.batch
    for rank, micro, batch in micro_batches(incident, data):
        watch.begin(batch)
        # Dropout layers alone use torch's generator (see `TrainedModule.on_train_batch_start`).
        index = incident.step * batch_plan.accumulation + micro
        torch.manual_seed(index * batch_plan.processes + rank)
        with autocast(device, plan.precision):
            losses, timesteps, _ = module.sample_losses(batch.to(device))
        (losses.mean() / (batch_plan.accumulation * batch_plan.processes)).backward()
        times = [None] * len(losses) if timesteps is None else timesteps.tolist()
        for position, sample, loss, time in zip(
            batch.positions.tolist(), batch.sample_ids.tolist(), losses.tolist(), times, strict=True
        ):
            samples.append(ReplayedSample(rank, micro, position, data.name_of(sample), loss, time))
        for line in watch.findings():
            print(f"rank {rank}, micro-batch {micro}: {line}")
    if not watch.has_found:
        print("no value of the step is infinite or not a number")
    return samples


def gradient_norms(trained: Trained) -> dict[str, float]:
    """Block, or outermost part outside of the blocks → Euclidean norm of its gradient."""
    blocks = set() if trained.family is None else {id(block) for block in trained.family.blocks()}
    network = trained.module.network
    prefixes = [name for name, module in network.named_modules() if id(module) in blocks]
    squares: dict[str, float] = defaultdict(float)
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            inside = next((p for p in prefixes if name.startswith(f"{p}.")), name.partition(".")[0])
            squares[inside] += float(parameter.grad.double().square().sum())
    return {name: math.sqrt(square) for name, square in squares.items()}


def print_samples(samples: list[ReplayedSample], incident: Incident, is_exact: bool) -> None:
    """Those that are not finite first, then by loss."""
    ordered = sorted(samples, key=lambda s: (math.isfinite(s.loss), -s.loss if math.isfinite(s.loss) else 0.0))
    print(f"\nloss per sample, {min(SHOWN, len(ordered))} of {len(ordered)}:")
    print("       loss  recorded  timestep  position  rank  micro  sample")
    for sample in ordered[:SHOWN]:
        recorded = incident.losses.get(sample.position)
        columns = f"{sample.loss:11.5g} {_number(recorded)} {_number(sample.timestep)} {sample.position:9d}"
        name = printable(" ".join(sample.name))
        print(f"{columns}  {sample.rank:4d}  {sample.micro_batch:5d}  {name}")
    if is_exact and incident.losses:
        pairs = [(s.loss, incident.losses[s.position]) for s in samples if s.position in incident.losses]
        finite = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        unlike = sum(math.isfinite(a) != math.isfinite(b) for a, b in pairs)
        print(f"against the record: differences up to {max(finite, default=0.0):.1e}, {unlike} finite in one only")


def _number(value: float | None) -> str:
    return "        -" if value is None else f"{value:9.4g}"


def main() -> None:
    """Parse, build, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("incident", type=Path, help="a file of the run's incidents/ folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("changes", nargs="*", metavar="a.b.c=value", help="options of the run")
    given = parser.parse_intermixed_args()
    incident = read_incident(given.incident)
    plan = plan_of(incident, given.device, given.changes)
    if plan.launch.accelerator == "cpu":
        prepare_cpu(1)
    trained = build_model(plan)
    cache = open_cache(plan, trained.family) if trained.family else None
    data = make_data(plan, trained.family, trained.latent_grid, cache)
    print(f"optimizer step {incident.step:,} of {incident.run_dir}, {incident.batch.global_batch} samples")
    is_exact = load_weights(incident, trained)
    samples = replay(incident, plan, trained, data)
    print_samples(samples, incident, is_exact)
    print("\nnorm of the gradient by block:")
    for name, norm in gradient_norms(trained).items():
        print(f"{norm:11.5g}  {name}")


if __name__ == "__main__":
    run_cli(main)
