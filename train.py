"""Train a latent text-to-image diffusion model.

    python train.py config=configs/x.yaml [config options as a.b.c=value …] [--dry-run]
    python train.py config=configs/x.yaml --fit gpu_gib=80 [gpus=8]
    torchrun --nproc_per_node 8 -m train config=configs/x.yaml
    python train.py --help [GROUP or OPTION …]

The same command again resumes the run, also after SIGTERM or SIGUSR1: then it has saved and ended with status 75
(docs/watch.md lists the others).
"""

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from sd_training import __version__
from sd_training.cli import run_cli
from sd_training.config.batch_plan import counted
from sd_training.cpu_threads import let_threads_sleep, share_cores
from sd_training.errors import ConfigError
from sd_training.quiet import quiet_libraries
from sd_training.rank_log import get_logger, is_main_process
from sd_training.run_log import RunLog
from sd_training.stop_signals import StopSignals

if TYPE_CHECKING:
    from sd_training.build.plan import Plan
    from sd_training.build.run import Run

log = get_logger("sd_training.train")


def main() -> None:
    """Parse, check, say what will happen, build, fit."""
    argv = sys.argv[1:]
    if not argv or "-h" in argv or "--help" in argv:
        from sd_training.config.help import help_text

        print(help_text(__doc__.strip(), [word for word in argv if word not in ("-h", "--help")]))
        return
    signals = StopSignals()
    signals.expect_warning()
    with RunLog().kept() as run_log:
        _start(argv, signals, run_log)


def _start(argv: Sequence[str], signals: StopSignals, run_log: RunLog) -> None:
    dry_run, fit = "--dry-run" in argv, "--fit" in argv
    words = [word for word in argv if word not in ("--dry-run", "--fit")]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise ConfigError(
            [f"{word}: is no option; options are --dry-run, --fit, --help and a.b.c=value" for word in unknown]
        )
    if dry_run and fit:
        raise ConfigError("--fit: looks for a way to run, --dry-run describes the one given; give one of them")
    log.info(_first_line(words))
    # pydantic takes a second to import, torch and its friends several: what comes before need not wait for them.
    from sd_training.build.local_files import local_problems
    from sd_training.config.fit_target import take_target
    from sd_training.config.load import load_config

    target = None
    if fit:
        target, words = take_target(words)
    config = load_config(words, local_problems)

    quiet_libraries()
    let_threads_sleep()
    from sd_training.build.plan import make_plan
    from sd_training.data.worker_server import worker_context

    if target is not None:
        from sd_training.build.fit_memory import propose

        print(propose(config, target))
        return
    plan = make_plan(config, is_described=dry_run)
    if plan.launch.accelerator == "cpu" and not dry_run:
        share_cores(plan.launch.devices)
    if config.system.workers and not dry_run:
        worker_context()  # the server imports its libraries while the model is loaded
    if dry_run:
        from sd_training.build.dry_run import describe

        if is_main_process():
            print(describe(plan))
        return
    train(plan, signals, run_log)


def _first_line(words: Sequence[str]) -> str:
    """Printed at once: the imports that follow take seconds."""
    files = [name for word in words if word.startswith("config=") for name in word.removeprefix("config=").split(",")]
    num_options = sum(not word.startswith("config=") for word in words)
    given = [*files, f"{num_options} option{'' if num_options == 1 else 's'} on the command line"]
    return (
        f"sd_training {__version__}, Python {platform.python_version()}: {', '.join(given)}; loading PyTorch, "
        "Lightning and diffusers"
    )


def train(plan: "Plan", signals: StopSignals, run_log: RunLog) -> None:
    """Builds and fits, watched; all processes of the run end together."""
    from sd_training.build.run import build_run, make_watch
    from sd_training.watch.ending import ended_together

    watch, is_child = make_watch(plan), plan.launch.launcher == "own" and not is_main_process()
    together: AbstractContextManager[None] = nullcontext()
    if plan.launch.processes > 1:
        together = ended_together(
            watch.first_end, is_child=is_child, local_peers=lambda: watch.local_peers, run_log=run_log
        )
    with together, watch.running():
        run = build_run(plan, signals, watch, run_log)
        _fit(run)
    if run.exit_status:
        log.info(
            f"stopped after {counted(run.trainer.global_step, 'optimizer step')} and saved; the same command goes on"
        )
    else:
        log.info(f"done: {plan.run_dir / 'current_pipeline'}")
    if run.is_logger_left:
        sys.stdout.flush()
        os._exit(run.exit_status)  # a logger that hangs would keep Python from ending
    if run.exit_status:
        signals.leave(run.exit_status)


def _fit(run: "Run") -> None:
    """Lightning makes status 1 of a Ctrl-C before the first step, which is noted from then on only."""
    try:
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=run.resume_from)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


if __name__ == "__main__":
    run_cli(main)
