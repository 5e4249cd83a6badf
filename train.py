"""Train a latent text-to-image diffusion model.

    python train.py config=configs/x.yaml [config options as a.b.c=value …] [--dry-run]
    torchrun --nproc_per_node 8 -m train config=configs/x.yaml
    python train.py --help [GROUP or OPTION …]

The same command again resumes the run, also after SIGTERM or SIGUSR1: then it has saved and ended with status 75
(docs/watch.md lists the others).
"""

import gc
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from sd_training import __version__
from sd_training.cli import run_cli, set_passive_wait, share_cores
from sd_training.config.plan import counted
from sd_training.errors import ConfigError
from sd_training.log import RunLog, get_logger, is_main_process, quiet_libraries
from sd_training.signals import StopSignals

if TYPE_CHECKING:
    from sd_training.build.plan import Plan

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


def _start(argv: list[str], signals: StopSignals, run_log: RunLog) -> None:
    dry_run, words = "--dry-run" in argv, [word for word in argv if word != "--dry-run"]
    if unknown := [word for word in words if word.startswith("-")]:
        raise ConfigError([f"{word}: unknown option; use --dry-run, --help or a.b.c=value" for word in unknown])
    configs = " ".join(word for word in words if word.startswith("config=")) or "no config file"
    log.info(f"sd_training {__version__}, Python {platform.python_version()}: {configs}; loading PyTorch and diffusers")
    # pydantic takes a second to import, torch and its friends several: what comes before need not wait for them.
    with _importing():
        from sd_training.build.preflight import local_problems
        from sd_training.config.load import load_config

    config = load_config(words, local_problems)

    quiet_libraries()
    set_passive_wait()
    with _importing():
        from sd_training.build.plan import make_plan
        from sd_training.data.loader import worker_context

    plan = make_plan(config, is_described=dry_run)
    if dry_run:
        with _importing():
            from sd_training.build.dry_run import describe

        if is_main_process():
            print(describe(plan))
        return
    if plan.launch.accelerator == "cpu":
        share_cores(plan.launch.devices)
    if config.system.workers:
        worker_context()  # the server imports its libraries while the model is loaded
    train(plan, signals, run_log)


@contextmanager
def _importing() -> Iterator[None]:
    """Imports without garbage collection, which takes a fifth of their time; later collections skip what they made."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def train(plan: "Plan", signals: StopSignals, run_log: RunLog) -> None:
    """Builds and fits, watched; all processes of the run end together."""
    with _importing():
        from sd_training.build.run import build_run, make_watch
        from sd_training.watchdog import exit_together

    watch = make_watch(plan)
    together: AbstractContextManager[None] = nullcontext()
    if plan.launch.processes > 1:
        together = exit_together(watch.first_failure, is_child=plan.is_child, run_log=run_log)
    with together, watch.running():
        run = build_run(plan, signals, watch, run_log)
        try:
            run.trainer.fit(run.module, datamodule=run.data)
        except SystemExit as ended:  # Lightning makes status 1 of a Ctrl-C before the first step
            if isinstance(ended.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
    if run.exit_status:
        log.info(
            f"stopped after {counted(run.trainer.global_step, 'optimizer step')} and saved; the same command goes on"
        )
        signals.leave(run.exit_status)
    log.info(f"done: {plan.run_dir / 'current_pipeline'}")


if __name__ == "__main__":
    run_cli(main)
