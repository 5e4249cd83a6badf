"""Makes pipelines with averages of other widths than those that a run kept, without training again (docs/ema.md).

    python scripts/posthoc_ema.py run=runs/x sigma_rel=0.075 output=averaged
    python scripts/posthoc_ema.py run=runs/x sigma_rel=0.05,0.1,0.15 step=20000 output=averaged

run: folder of a run that trained with `ema.sigma_rels` and `ema.snapshot_every`. sigma_rel: width of the average as a
share of the training, above 0 and at most 0.2886. step: optimizer step to average up to, by default that of the last
snapshot. output: folder to make, a pipeline; with several widths a folder of pipelines, `sigma_rel=0.050` and so on.
Everything but the averaged weights is taken from `current_pipeline` of the run.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import run_cli
from sd_training.config.help import suggest
from sd_training.config.model_schema import PartConfig
from sd_training.config.paths import output_path, output_problem
from sd_training.errors import ConfigError
from sd_training.log import quiet_libraries
from sd_training.optim.power_function_ema import LARGE_RESIDUAL, MAX_SIGMA_REL, is_sigma_rel

KEYS = ("run", "sigma_rel", "step", "output")


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    run: Path
    widths: list[float]
    """sigma_rel of every pipeline to make."""
    step: int | None
    """None is that of the last snapshot."""
    output: Path


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Raises ConfigError with everything that is wrong."""
    problems: list[str] = []
    given: dict[str, str] = {}
    for word in argv:
        key, sign, value = word.partition("=")
        if key not in KEYS or not sign:
            near = suggest(key, KEYS)
            problems.append(f"{word}: give {'=…, '.join(KEYS)}=…" + (f"; did you mean {near}?" if near else ""))
        elif key in given:
            problems.append(f"{key}: is given twice, {given[key]} and {value}; keep one of them")
        given[key] = value
    problems += [f"{key}: is missing; give {key}=…" for key in KEYS if key != "step" and not given.get(key)]
    widths = [_width(text, problems) for text in given.get("sigma_rel", "").split(",") if text.strip()]
    step = given.get("step")
    if step is not None and (not step.isdecimal() or int(step) < 1):
        problems.append(f"step: is {step}; give a number of optimizer steps, 1 or more")
    if problem := output_problem(given.get("output", "")):
        problems.append(f"output: {problem}")
    if problems:
        raise ConfigError(problems)
    output = output_path(given["output"])
    return Arguments(Path(given["run"]), list(dict.fromkeys(widths)), None if step is None else int(step), output)


def _width(text: str, problems: list[str]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not is_sigma_rel(value):
        low_max = int(MAX_SIGMA_REL * 10_000) / 10_000  # rounded down, so that the number that is named is accepted
        problems.append(f"sigma_rel: {text.strip()} is no width; give numbers above 0 and at most {low_max}")
    return value


def targets_of(arguments: Arguments) -> dict[float, Path]:
    """The folder of every width.

    Raises:
        ConfigError: one of them exists.
    """
    from sd_training.export.ema_snapshots import width_name

    if len(arguments.widths) == 1:
        targets = {arguments.widths[0]: arguments.output}
    else:
        targets = {width: arguments.output / width_name(width) for width in arguments.widths}
    taken = [
        f"output: {path} exists; remove it or choose another" for path in targets.values() if os.path.lexists(path)
    ]
    if taken:
        raise ConfigError(taken)
    return targets


def load_template(run: Path) -> Any:
    """The run's newest export, on the CPU in fp32: a pipeline, or the autoencoder that was trained."""
    from sd_training.export.folder import load_pipeline
    from sd_training.export.pipeline import CURRENT
    from sd_training.models.load import make_network

    folder = run / CURRENT
    if (folder / "model_index.json").is_file():
        return load_pipeline(folder)
    if (folder / "config.json").is_file():
        return make_network("vae", PartConfig(pretrained=str(folder)), seed=0)
    raise ConfigError(f"run: {folder} is no pipeline; the run has not saved yet, or its pipeline was moved away")


def make_pipelines(arguments: Arguments) -> None:
    """Plans all widths, then writes them one after the other."""
    from sd_training.export.ema_snapshots import (
        averaged_parameters,
        find_snapshots,
        load_sum,
        plan_sum,
        snapshot_shapes,
    )
    from sd_training.export.pipeline import export_pipeline

    if not arguments.run.is_dir():
        raise ConfigError(f"run: {arguments.run} is no folder; give the folder of a run")
    targets = targets_of(arguments)
    snapshots = find_snapshots(arguments.run)
    last = snapshots[-1].step
    step = last if arguments.step is None else arguments.step
    if step > last:
        raise ConfigError(f"step: is {step}, but the last snapshot of {arguments.run} is of step {last}")
    template = load_template(arguments.run)
    for width, target in targets.items():
        weighted = plan_sum(snapshots, step, width)
        report(weighted.residual, len(weighted.parts), step, width, nearest_steps(snapshots, step))
        parameters = averaged_parameters(template, snapshot_shapes(weighted.parts[0][0]))
        load_sum(weighted, parameters)
        try:
            export_pipeline(template, target)
        except OSError as error:
            raise ConfigError(f"output: {error.strerror}") from error
        print(f"written: {target}")


def nearest_steps(snapshots: Sequence[Any], step: int) -> list[int]:
    """Steps with a snapshot around `step`; `step` alone where it has one."""
    steps = sorted({snapshot.step for snapshot in snapshots})
    return [step] if step in steps else [*[s for s in steps if s < step][-1:], *[s for s in steps if s > step][:1]]


def report(residual: float, files: int, step: int, width: float, near: Sequence[int]) -> None:
    """Says how well the snapshots make up the average, and what to do where they do not."""
    print(f"sigma_rel={width:g} at step {step:,}: {files} snapshots, relative residual of the profile {residual:.1e}")
    if residual <= LARGE_RESIDUAL:
        return
    if step not in near:
        remedy = f"step {step} has no snapshot, take {' or '.join(f'step={s}' for s in near)}"
    else:
        remedy = "more snapshots (ema.snapshot_every) or tracks nearer to this width (ema.sigma_rels) would help"
    print(f"warning: the residual is above {LARGE_RESIDUAL}, the average is only roughly the one asked for; {remedy}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
        return
    arguments = parse_arguments(words)
    quiet_libraries()
    make_pipelines(arguments)


if __name__ == "__main__":
    run_cli(main)
