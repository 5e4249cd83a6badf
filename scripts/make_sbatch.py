"""Write a SLURM batch file for a run.

    python scripts/make_sbatch.py config=configs/x.yaml nodes=16 gpus_per_node=8 time=24:00:00 partition=gpu \\
        [account=…] [qos=…] [efa=true] [container=image.sif] [a.b.c=value …] > x.sbatch

Options of the run (with a dot, as on the command line of train.py) are checked, quoted and put into the file, which is
printed: `… | sbatch` works as well. See docs/slurm.md.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import run_cli
from sd_training.config.load import load_config, split_words
from sd_training.config.plan import BatchPlan, find_layout
from sd_training.config.schema import Config
from sd_training.errors import ConfigError

TEMPLATES = Path(__file__).resolve().parents[1] / "batch_files"

DIRECTIVES = {
    "name": "job-name",
    "nodes": "nodes",
    "gpus_per_node": "gpus-per-node",
    "cpus_per_gpu": "cpus-per-task",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "save_s": "signal",
}
"""Option → line `#SBATCH --…=`; `save_s` is the time kept for the last save, before the time limit [s]."""

VARIABLES = {
    "python": "RUN_PYTHON",
    "project_dir": "RUN_PROJECT_DIR",
    "container": "RUN_CONTAINER",
    "mounts": "RUN_MOUNTS",
}
"""Option → line `RUN_…=`."""

OPTIONS = ("config", *DIRECTIVES, *VARIABLES, "efa")

_WHOLE_NUMBERS = ("nodes", "gpus_per_node", "cpus_per_gpu", "save_s")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_PLAIN = re.compile(r"[A-Za-z0-9_.,@+-]+")
"""What may stand in a #SBATCH line, which no shell reads."""


def read_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of this script by name, and the overrides of the run.

    Raises:
        ConfigError: every option that is unknown, given twice, or has a value that cannot be used.
    """
    given: dict[str, str] = {}
    own, overrides, problems = split_words(argv, OPTIONS, "make_sbatch")
    for name, value in own:
        if name in given:
            problems.append(f"{name}: is given twice")
        else:
            given[name] = value
            problems += _problems_of(name, value)
    problems += _problems_between(given)
    if problems:
        raise ConfigError(problems)
    return given, overrides


def _problems_of(name: str, value: str) -> list[str]:
    if name in _WHOLE_NUMBERS and not re.fullmatch(r"[1-9]\d*", value, re.ASCII):
        return [f"{name}: {value!r} is no whole number of at least 1"]
    if name == "time" and not _TIME.fullmatch(value):
        return [f"time: {value!r} is no time of SLURM; give minutes, hours:minutes:seconds or days-hours"]
    if name in DIRECTIVES and name != "time" and not _PLAIN.fullmatch(value):
        return [f"{name}: {value!r} may hold letters, digits and _ . , @ + - only"]
    if name == "efa" and value not in ("true", "false"):
        return [f"efa: {value!r} is neither true nor false"]
    return [f"{name}: is empty"] if not value else []


def _seconds(time: str) -> int:
    """Of a time as SLURM reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours:minutes:seconds."""
    days, is_with_days, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    first_s = 3600 if is_with_days or len(numbers) == 3 else 60
    return int(days or 0) * 86_400 + sum(n * first_s // 60**place for place, n in enumerate(numbers))


def _problems_between(given: dict[str, str]) -> list[str]:
    problems = [] if "config" in given else ["config: is missing; name the run's YAML file, config=configs/x.yaml"]
    if "mounts" in given and "container" not in given:
        problems.append("mounts: is for a container; give container=image as well")
    kept_s = given.get("save_s") or _directive(_template("template"), "signal").partition("@")[2]
    time = given.get("time", "")
    if kept_s.isdigit() and _TIME.fullmatch(time) and _seconds(time) <= int(kept_s):
        problems.append(f"time: {time} is no longer than save_s, the {kept_s} s that are kept for the last save")
    return problems


def batch_file(given: dict[str, str], overrides: Sequence[str], config: Config) -> str:
    """The text of the batch file.

    Args:
        given: options of this script, checked.
        overrides: options of the run, as `a.b.c=value`.
        config: of the run.
    """
    base = "container" if "container" in given else "efa" if given.get("efa") == "true" else "template"
    text = _template(base)
    if base == "container" and given.get("efa") == "true":
        text = text.replace(_section(text, "run"), _section(_template("efa"), "Elastic") + _section(text, "run"))
    for name, directive in DIRECTIVES.items():
        if name in given:
            text = _with_directive(text, directive, f"USR1@{given[name]}" if name == "save_s" else given[name])
    gpus, encoders = int(_directive(text, "gpus-per-node")), config.distributed.encoders
    if encoders == "auto":
        from sd_training.build.plan import balanced_encoders  # imports diffusers, which takes seconds

        encoders = balanced_encoders(config, gpus)
    shared = config.distributed.encoder_devices and config.trainer.devices != "auto"
    tasks = gpus if shared else gpus - encoders  # one for each GPU that trains
    if tasks < 1:
        raise ConfigError(f"distributed.encoders: {encoders} of the GPUs of a node leave none to train; give fewer")
    text = _with_directive(text, "ntasks-per-node", str(tasks))
    cores = int(_directive(text, "cpus-per-task")) * gpus // tasks  # those of the GPUs that encode as well
    text = _with_directive(text, "cpus-per-task", str(cores))
    for name, variable in VARIABLES.items():
        if name in given:
            text = _with_variable(text, variable, shlex.quote(given[name]))
    text = _with_variable(text, "RUN_CONFIG", shlex.quote(given["config"]))
    return _with_variable(text, "RUN_OVERRIDES", f"({' '.join(map(shlex.quote, overrides))})")


def problems_with_run(text: str, config: Config) -> Iterator[str]:
    """What the run's options say against the nodes and GPUs of the batch file."""
    nodes, tasks = (int(_directive(text, name)) for name in ("nodes", "ntasks-per-node"))
    try:
        layout = find_layout(config.distributed, nodes * tasks, tasks)
        system, examples = config.system, config.experiment.num_examples_to_see
        if examples is not None:
            _ = BatchPlan(system.batch_size, system.gradient_accumulation, layout.mesh.data_ranks, examples).num_steps
    except ConfigError as error:
        yield from error.problems
    cores = int(_directive(text, "cpus-per-task"))
    if config.system.workers >= cores:
        yield (
            f"system.workers: {config.system.workers} loader processes and the one that trains want more than the "
            f"{cores} cores of cpus_per_gpu; give at most {cores - 1}"
        )
    if config.wandb.api_key:
        yield "wandb.api_key: would stand in the batch file for all to read; set WANDB_API_KEY when you submit it"
    if config.trainer.devices not in ("auto", tasks):
        yield f"trainer.devices: is {config.trainer.devices}, but {tasks} GPUs of a node train"
    if config.trainer.num_nodes not in (None, nodes):
        yield f"trainer.num_nodes: is {config.trainer.num_nodes}, but nodes is {nodes}"


def _directive(text: str, name: str) -> str:
    """What stands behind `#SBATCH --name=`."""
    found = re.search(rf"^#SBATCH --{name}=(\S+)", text, re.MULTILINE)
    assert found is not None, name  # the templates have it
    return found[1]


def _template(name: str) -> str:
    return (TEMPLATES / f"multinode-{name}.sbatch").read_text(encoding="utf-8")


def _section(text: str, title: str) -> str:
    """From the line `# ---- title …` to the next one of that kind."""
    start = text.index(f"# ---- {title}")
    return text[start : text.index("\n# ---- ", start) + 1]


def _with_directive(text: str, directive: str, value: str) -> str:
    """The line `#SBATCH --directive=`, which may be commented out or missing, with this value."""
    line = f"#SBATCH --{directive}={value}"
    if not re.search(rf"^##?SBATCH --{directive}=", text, re.MULTILINE):
        return text.replace("#SBATCH --requeue\n", f"#SBATCH --requeue\n{line}\n", 1)
    return re.sub(rf"^##?SBATCH --{directive}=.*$", lambda _: line, text, count=1, flags=re.MULTILINE)


def _with_variable(text: str, variable: str, value: str) -> str:
    return re.sub(rf"^{variable}=.*$", lambda _: f"{variable}={value}", text, count=1, flags=re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> None:
    """Check, write, say how to start it."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
        return
    given, overrides = read_options(words)
    config = load_config([f"config={given['config']}", *overrides])
    text = batch_file(given, overrides, config)
    if problems := list(problems_with_run(text, config)):
        raise ConfigError(problems)
    print(text, end="")


if __name__ == "__main__":
    run_cli(main)
