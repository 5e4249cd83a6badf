"""Does this run resume to the same result? Before a week of training, a minute of proof on the same devices.

    python scripts/check_resume.py config=my.yaml [a.b.c=value …] [steps=4] [folder=build/check_resume]
    torchrun --nproc_per_node 8 scripts/check_resume.py config=my.yaml …

Trains 2 × `steps` optimizer steps with a save in the middle, resumes from that save in the same processes, and compares
the losses after it, the weights, their average and the optimizer state. The exit status is 1 where they differ.
"""

import csv
import gc
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.cli import run_cli
from sd_training.config.load import load_config
from sd_training.errors import ConfigError, UserError
from sd_training.log import is_main_process, quiet_libraries

quiet_libraries()

from torch import Tensor, distributed

from sd_training.build.plan import Plan, make_plan
from sd_training.build.run import build_run
from sd_training.checkpoint.save import open_checkpoint

_OPTIONS = {"steps": "4", "folder": str(ROOT / "build" / "check_resume")}
_WITHOUT_EXTRAS = (
    "checkpoint.keep_best=0",
    "checkpoint.milestone_every=0",
    "checkpoint.mirror=null",
    "checkpoint.save_every_minutes=null",
    "experiment.max_hours=null",
    "experiment.requeue=true",
    "logging.every=1",
    "validation.path=null",
    "wandb.mode=disabled",
)
_WITHOUT_PICTURES = ("experiment.eval_caption_file=null", "sampling.every=0")


def main() -> None:
    """Parse, train twice, compare."""
    given = [word for word in sys.argv[1:] if word.partition("=")[0] in _OPTIONS]
    own = _OPTIONS | dict(word.split("=", 1) for word in given)
    words = [word for word in sys.argv[1:] if word not in given]
    steps, folder = own["steps"], Path(own["folder"]).resolve()
    if not steps.isdigit() or int(steps) < 1:
        raise UserError(f"steps: is {steps!r}; a whole number of at least 1 is needed")
    plans = [_plan(words, int(steps), folder, name) for name in ("whole", "resumed")]
    if plans[0].launch.launcher == "own" and plans[0].launch.processes > 1:
        raise ConfigError(
            f"trainer.devices: this machine would train with {plans[0].launch.processes} processes; start this script "
            f"with torchrun --nproc_per_node {plans[0].launch.processes}, or set trainer.devices=1"
        )
    if is_main_process():
        shutil.rmtree(folder, ignore_errors=True)
    _train(plans[0])
    if is_main_process():
        later = shutil.ignore_patterns(f"step={2 * int(steps)}", "exported_step")
        shutil.copytree(plans[0].run_dir, plans[1].run_dir, ignore=later)
    if distributed.is_initialized():
        distributed.barrier()
    _train(plans[1])
    if is_main_process():
        differences = compare(plans[0].run_dir, plans[1].run_dir, int(steps))
        sys.exit(report(differences, tolerance(plans[0])))


def _plan(words: list[str], steps: int, folder: Path, name: str) -> Plan:
    """Of a run of 2 × `steps` optimizer steps."""
    more = [f"experiment.num_steps={2 * steps}", "experiment.num_examples_to_see=null", "experiment.num_epochs=null"]
    more += [f"experiment.log_dir={folder}", f"experiment.name={name}", "dataset.params.num_examples_to_see=null"]
    pictures = () if "model.train=vae" in words else _WITHOUT_PICTURES
    return make_plan(load_config([*words, *_WITHOUT_EXTRAS, *pictures, *more, f"experiment.save_every={steps}"]))


def _train(plan: Plan) -> None:
    run = build_run(plan)
    run.trainer.fit(run.module, datamodule=run.data)
    if run.exit_status:
        raise UserError("stopped by a signal; nothing was compared")
    del run
    gc.collect()  # the second run needs the memory of the first


def compare(whole: Path, resumed: Path, steps: int) -> dict[str, float]:
    """Largest relative difference of the losses after the resume, and of each kind of tensor after the last step."""
    losses = [_losses(folder, steps) for folder in (whole, resumed)]
    found = {"losses": max(_difference(a, b) for a, b in zip(*losses, strict=True))}
    stored = [open_checkpoint(folder / "checkpoints" / f"step={2 * steps}").parts for folder in (whole, resumed)]
    for part in stored[0]:
        found[part] = _distance(stored[0][part], stored[1].get(part, {}))
    return found


def _losses(run_dir: Path, first_step: int) -> list[float]:
    with (run_dir / "metrics.csv").open(newline="") as stream:
        return [float(row["loss"]) for row in csv.DictReader(stream) if int(row["optimizer_step"]) > first_step]


def _difference(one: float, other: float) -> float:
    if not math.isfinite(one) or not math.isfinite(other):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to the largest number in them."""
    if one.keys() != other.keys():
        return math.inf
    largest = max((float(tensor.abs().max()) for tensor in one.values() if tensor.numel()), default=0.0)
    differences = (float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel())
    return max(differences, default=0.0) / max(largest, 1e-30)


def tolerance(plan: Plan) -> float:
    """0 for one CPU process, which repeats its bits; several processes add in another order, and a GPU may choose
    another kernel."""
    is_exact = plan.launch.processes == 1 and plan.launch.accelerator == "cpu" and plan.layout.strategy == "single"
    return 0.0 if is_exact else 1e-5 if plan.precision == "no" else 1e-2


def report(differences: Mapping[str, float], allowed: float) -> int:
    """Prints the comparison; returns the exit status."""
    for what, difference in differences.items():
        verdict = "ok" if difference <= allowed else "DIFFERENT"
        print(f"{what:24} largest relative difference {difference:.1e} (allowed {allowed:.0e})  {verdict}")
    is_same = all(difference <= allowed for difference in differences.values())
    print("the run resumes" if is_same else "the run does not resume to the same result")
    return 0 if is_same else 1


if __name__ == "__main__":
    run_cli(main)
