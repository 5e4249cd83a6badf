"""Makes pipelines with averages of other widths than those that a run kept, without training again (docs/ema.md).

    python scripts/posthoc_ema.py runs/x --out averaged --sigma-rel 0.075
    python scripts/posthoc_ema.py runs/x --out averaged --sigma-rel 0.05 0.1 0.15 --step 20000

The run has trained with `ema.sigma_rels` and `ema.snapshot_every`. With several widths the output is a folder of
pipelines, `sigma_rel=0.050` and so on. Everything but the averaged weights is taken from `current_pipeline` of the run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import run_cli
from sd_training.config.schema import PartConfig
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError
from sd_training.log import quiet_libraries
from sd_training.optim.power_function_ema import LARGE_RESIDUAL, MAX_SIGMA_REL, is_sigma_rel


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a value cannot be used.
    """
    low_max = int(MAX_SIGMA_REL * 10_000) / 10_000  # rounded down, so that the number that is named is accepted
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=path_argument, required=True, help="folder to make")
    parser.add_argument(
        "--sigma-rel", type=float, nargs="+", required=True, help=f"widths, shares of the training up to {low_max}"
    )
    parser.add_argument("--step", type=int, help="average up to this optimizer step (default: the last snapshot)")
    arguments = parser.parse_args(argv)
    problems = [
        f"--sigma-rel: {width} is no width; give numbers above 0 and at most {low_max}"
        for width in arguments.sigma_rel
        if not is_sigma_rel(width)
    ]
    if arguments.step is not None and arguments.step < 1:
        problems.append(f"--step: is {arguments.step}; give a number of optimizer steps, 1 or more")
    if not arguments.run.is_dir():
        problems.append(f"{arguments.run}: is no folder; give the folder of a run")
    if problems:
        raise ConfigError(problems)
    return arguments


def load_template(run: Path) -> Any:
    """The run's newest export, on the CPU in fp32: a pipeline, or the autoencoder that was trained."""
    from sd_training.export.pipeline import CURRENT, load_pipeline
    from sd_training.models.load import load_part

    folder = run / CURRENT
    if (folder / "model_index.json").is_file():
        return load_pipeline(folder)
    if (folder / "config.json").is_file():
        return load_part("vae", PartConfig(pretrained=str(folder)), seed=0)
    raise ConfigError(f"{folder}: is no pipeline; the run has not saved yet, or its pipeline was moved away")


def make_pipelines(run: Path, out: Path, widths: Sequence[float], step: int | None) -> None:
    """Writes the pipelines one after the other.

    Raises:
        UserError: snapshots or the pipeline cannot be used, or a folder exists.
    """
    from sd_training.export.ema_snapshots import averaged_parameters, find_snapshots, load_sum, plan_sum, width_name
    from sd_training.export.pipeline import export_pipeline

    targets = {width: out / width_name(width) if len(widths) > 1 else out for width in widths}
    if taken := [path for path in targets.values() if os.path.lexists(path)]:
        raise ConfigError([f"--out: {path} exists; remove it or choose another" for path in taken])
    snapshots = find_snapshots(run)
    steps = sorted({snapshot.step for snapshot in snapshots})
    step = step or steps[-1]
    if step > steps[-1]:
        raise ConfigError(f"--step: is {step}, but the last snapshot of {run} is of step {steps[-1]}")
    template = load_template(run)
    for width, target in targets.items():
        parts, residual = plan_sum(snapshots, step, width)
        print(
            f"sigma_rel={width:g} at step {step:,}: {len(parts)} snapshots, relative residual of the profile "
            f"{residual:.1e}"
        )
        if residual > LARGE_RESIDUAL:
            print(
                f"warning: the residual is above {LARGE_RESIDUAL}, the average is only roughly the one asked for; a "
                f"step that has a snapshot ({', '.join(map(str, steps[-5:]))}, …), more of them (ema.snapshot_every) "
                "or tracks nearer to this width (ema.sigma_rels) would help"
            )
        load_sum(parts, averaged_parameters(template, parts[0][0]))
        try:
            export_pipeline(template, target)
        except OSError as error:
            raise ConfigError(f"--out: {error.strerror}") from error
        print(f"written: {target}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    quiet_libraries()
    make_pipelines(arguments.run, arguments.out, arguments.sigma_rel, arguments.step)


if __name__ == "__main__":
    run_cli(main)
