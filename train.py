"""Train a latent text-to-image diffusion model.

    python train.py config=configs/x.yaml [config options as a.b.c=value …] [--dry-run]
    torchrun --nproc_per_node 8 -m train config=configs/x.yaml
    python train.py --help [GROUP or OPTION …]

The same command again resumes the run, also after SIGTERM or SIGUSR1: then it has saved and ended with status 75
(docs/watch.md lists the others).
"""

import gc
import json
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sd_training import __version__
from sd_training.cli import prepare_cpu, run_cli, set_passive_wait
from sd_training.config.fields import Option, groups, is_below, options, suggest_option
from sd_training.config.plan import counted
from sd_training.errors import EXIT_HANG, ConfigError
from sd_training.log import RunLog, get_logger, global_rank, is_main_process, quiet_libraries
from sd_training.signals import StopSignals

if TYPE_CHECKING:
    from sd_training.build.plan import Plan

log = get_logger("sd_training.train")

_WIDTH = 118
"""Of a line of `--help` [characters]."""


def main() -> None:
    """Parse, check, say what will happen, build, fit."""
    argv = sys.argv[1:]
    if not argv or "-h" in argv or "--help" in argv:
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
        prepare_cpu(plan.launch.devices)  # encoder processes have as many threads, and so the same bits
    if config.system.workers and not plan.encoders:
        worker_context()  # the server imports its libraries while the model is loaded
    train(plan, signals, run_log)


def help_text(usage: str, topics: Iterable[str]) -> str:
    """The page that `--help` prints: every option in one line, or the options of each topic in full.

    Args:
        usage: first lines of the page without a topic.
        topics: names of groups or options.

    Raises:
        ConfigError: a topic is neither a group nor an option; names the nearest one.
    """
    if pages := [_topic(topic.partition("=")[0]) for topic in topics]:
        return "\n\n".join(pages)
    lines = [f"{_head(option):44} {' '.join(option.doc.split())}" for option in options().values()]
    lines = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 2]} …" for line in lines]
    title = "\nOptions (option=default; * has to be given); `--help GROUP` and `--help OPTION` say more:"
    return "\n".join([usage, title, *lines, "\nAll of this on one page: docs/config.md."])


def _topic(name: str) -> str:
    lines = [f"{name}: {groups()[name].description}"] if name in groups() else []
    for option in (option for key, option in options().items() if is_below(key, [name])):
        meaning = f"({option.allowed}) {' '.join(option.doc.split())}"
        lines += [_head(option), textwrap.indent(textwrap.fill(meaning, _WIDTH - 6), " " * 6)]
    if not lines:
        near = suggest_option(name)
        hint = f"did you mean {near}?" if near else f"groups are {', '.join(g for g in groups() if '.' not in g)}"
        raise ConfigError(f"--help {name}: is neither a group of options nor an option; {hint}")
    return "\n".join(lines)


def _head(option: Option) -> str:
    default = json.dumps(option.default, ensure_ascii=False)
    return f"  *{option.key}=" if option.required else f"  {option.key}={default}"


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
        from sd_training.build.run import build_run
        from sd_training.config.schema import SECTIONS
        from sd_training.data.loader import BAD_SAMPLES_FILE, read_bad_samples
        from sd_training.watchdog import HangWatch, exit_together

    limits_s = {section: getattr(plan.config.watch, f"{section}_s") for section in SECTIONS}
    watch = HangWatch(limits_s, plan.run_dir, global_rank(), status=0 if plan.is_child else EXIT_HANG)
    together: AbstractContextManager[None] = nullcontext()
    if plan.launch.processes > 1:
        together = exit_together(watch.first_failure, is_child=plan.is_child, run_log=run_log)
    with together, watch.running():
        run = build_run(plan, signals, watch, run_log)
        gc.collect()
        gc.freeze()  # collections between steps pass over networks and data, which stay to the end of the process
        try:
            run.trainer.fit(run.module, datamodule=run.data)
        except SystemExit as ended:  # Lightning makes status 1 of a Ctrl-C before the first step
            if isinstance(ended.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
    if run.exit_status:
        log.info(
            f"stopped after {counted(run.trainer.global_step, 'optimizer step')} and saved; "
            "the same command resumes the run"
        )
        signals.leave(run.exit_status)
    bad_samples = plan.run_dir / BAD_SAMPLES_FILE
    if is_main_process() and (named := len(read_bad_samples(bad_samples))):
        log.warning(f"{bad_samples} names {counted(named, 'sample')} that could not be used")
    log.info(f"done: {plan.run_dir / 'current_pipeline'}{_written_page(plan.run_dir) if is_main_process() else ''}")


def _written_page(run_dir: Path) -> str:
    """Writes the page of the run; returns where it is, in words. The run is done, so whatever goes wrong here is a
    warning."""
    try:
        from sd_training.evaluation.report import PAGE, write_report

        write_report([run_dir], run_dir / PAGE)
    except Exception as error:
        log.warning(f"the page of the run could not be written ({type(error).__name__}: {error})")
        return ""
    return f", and a page about the run: {run_dir / PAGE}"


def command() -> None:
    """`sd-train` of an installed package."""
    run_cli(main, explains_files=False)


if __name__ == "__main__":
    command()
