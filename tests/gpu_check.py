"""What `gpu_check.sh` does: the experiments of a part, one after the other, each in a process of its own.

Everything is imported once; a process is forked for every experiment, so that it starts at once, and an error, a crash,
a lack of memory or a hang is the result of that experiment only. This process never uses the GPU: after that a forked
one could not. Where a library does so when it is imported, processes are spawned, which import everything. One line of
JSON per experiment goes to stdout and to `out=`, as soon as it is known, with what was predicted for it before any of
this ran on a GPU.
"""

import ctypes
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PACKAGES = {
    **{name: name for name in ("torch", "pytorch_lightning", "diffusers", "transformers", "tokenizers", "safetensors")},
    **{name: name for name in ("huggingface_hub", "webdataset", "braceexpand", "omegaconf", "pydantic", "numpy")},
    **{name: name for name in ("simplejpeg", "pyarrow", "obstore", "tensorboard", "tqdm")},
    **{"yaml": "pyyaml", "PIL": "pillow"},
}
"""What is imported → what pip calls it."""
if missing := [pip for name, pip in PACKAGES.items() if find_spec(name) is None]:
    sys.exit(f"error: packages are missing: pip install {' '.join(missing)}")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries ask for GPUs when they are imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from scripts.bench_peers import save_pipeline
from sd_training.cli import run_cli
from sd_training.errors import UserError
from sd_training.log import quiet_libraries
from tests import gpu_experiments as measure
from tests.gpu_experiments import Result, Setting

_STOPS = 9
"""SIGKILL, by number for the kernel."""
_PR_SET_PDEATHSIG = 1
_LEAST_S = 5.0
"""Experiments for which less is left of the budget are left out [s]."""


@dataclass(frozen=True)
class Experiment:
    """One line of the result."""

    name: str
    run: Callable[[Setting], Result]
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """At full size on an H200, counted or estimated on a CPU; ranges as [lowest, highest]."""
    limit_s: float = 90.0
    needs: str = ""
    """"cuda", or the package that it needs."""


def run_of(name: str, *options: str, **settings: Any) -> Callable[[Setting], Result]:
    """A run of the trainer with options."""
    return partial(measure.trainer, name, options, **settings)


def short_run(name: str, *options: str) -> Callable[[Setting], Result]:
    """A short run of a tiny pipeline from start to export."""
    return partial(measure.finished_run, name, options)


def best_run(setting: Setting) -> Result:
    """The configuration that is expected to be the fastest, for long enough to see the clocks fall."""
    options = ["trainer.compile=full"] if setting.device == "cuda" else []
    return measure.trainer("best", options, setting, measured_s=setting.measured_s if setting.is_tiny else 120)


def tiny_runs() -> list[Experiment]:
    """Every way to train of which one GPU is enough: does anything crash."""
    ways: Mapping[str, tuple[str, ...]] = {
        "bf16": (),
        "fp16": ("model.mixed_precision=fp16",),
        "bf16 weights": ("model.bf16_weights=true", "optimizer.stochastic_rounding=true"),
        "recomputation": ("model.gradient_checkpointing=true",),
        "compiled blocks": ("trainer.compile=blocks",),
        "compiled in full": ("trainer.compile=full",),
        "xformers": ("model.xformers=true",),
        "8-bit AdamW": ("optimizer.name=adamw_8bit",),
        "fsdp": ("distributed.strategy=fsdp",),
        "deepspeed_2": ("distributed.strategy=deepspeed_2",),
    }
    needs = {"xformers": "xformers", "deepspeed_2": "deepspeed", "8-bit AdamW": "bitsandbytes"}
    on_cpu = ("bf16", "recomputation")
    return [
        Experiment(
            f"tiny run: {name}",
            short_run(name.replace(" ", "_"), *options),
            needs=needs.get(name, "" if name in on_cpu else "cuda"),
        )
        for name, options in ways.items()
    ]


PARTS: Mapping[str, list[Experiment]] = {
    "1": [
        *tiny_runs(),
        Experiment("tiny run: resumed", measure.resumed_run),
        Experiment("ceilings", measure.ceilings),
        Experiment("average on the CPU", measure.cpu_average, {"gb_per_s_with_1_threads": [16, 17]}),
        *(
            Experiment(f"attention: {backend}", partial(measure.attention, backend), limit_s=60)
            for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        ),
        Experiment("group norm", measure.group_norm),
        Experiment("SD2 step: nchw", partial(measure.bare_step, "nchw"), {"ms_per_image": 8.2}),
        Experiment("SD2 step: nhwc", partial(measure.bare_step, "nhwc")),
        Experiment("SD2 step: nhwc cudnn.benchmark", partial(measure.bare_step, "nhwc", benchmark=True)),
        Experiment(
            "SD2 step: nhwc compiled",
            partial(measure.bare_step, "nhwc", compiled=True),
            {"ms_per_image": 5.4},
            limit_s=180,
            needs="cuda",
        ),
    ],
    "2": [
        Experiment("trainer", run_of("eager", estimate=True), {"images_per_s": [59, 66]}, limit_s=120),
        Experiment("trainer: logged every 10", run_of("every10", "logging.every=10"), {"images_per_s": [59, 66]}),
        Experiment("trainer: logged every 1000", run_of("every1000", "logging.every=1000"), {"images_per_s": [71, 73]}),
        Experiment("trainer: no average", run_of("no_ema", "model.use_ema=false"), {"images_per_s": [71, 73]}),
        Experiment(
            "trainer: compiled in full",
            run_of("compiled", "trainer.compile=full"),
            {"images_per_s": [90, 110]},
            limit_s=200,
            needs="cuda",
        ),
        Experiment("encoder by batch", measure.encode, {"eager_64": 5.6, "compiled_16": 3.3}, limit_s=120),
        Experiment("trainer: fp16", run_of("fp16", "model.mixed_precision=fp16", estimate=True), needs="cuda"),
        Experiment(
            "trainer: fsdp with offload",
            run_of("fsdp", "distributed.strategy=fsdp", "distributed.offload_parameters=true", estimate=True),
            needs="cuda",
        ),
    ],
    "3": [
        *(
            Experiment(f"trainer: batch {batch}", run_of(f"batch{batch}", f"system.batch_size={batch}"), limit_s=60)
            for batch in (1, 2, 4)
        ),
        Experiment(
            "trainer: best configuration",
            best_run,
            {"images_per_s": [90, 110]},
            limit_s=400,
        ),
    ],
}


def in_child(experiment: Experiment, setting: Setting, parent: int, answer: Connection) -> None:
    """Runs the experiment and sends its result. A child never outlives its parent, which it would take the GPU from."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _STOPS)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    os.dup2(2, 1)  # stdout has the results only
    try:
        answer.send({"result": experiment.run(setting)})
    except BaseException as error:  # a run ends by SystemExit, too
        text = " ".join(str(error).split())[:500]
        answer.send({"error": f"{type(error).__name__}: {text}"})
    os._exit(0)  # without the threads and atexit functions of libraries


def use_gpu(setting: Setting) -> Result:
    """Uses the GPU once."""
    return {"gpu": torch.cuda.get_device_name(), "sum": float(torch.ones(4, device="cuda").sum())}


def start_method() -> str:
    """How processes that can use the GPU are started. Raises UserError where none can."""
    for method in ("fork", "spawn"):
        found = conducted(Experiment("GPU", use_gpu), Setting("cuda", True, Path(), 0.0), 120, method)
        if "result" in found:
            return method
    raise UserError(f"no GPU can be used here ({found['error']}); device=cpu size=tiny runs the same in small")


def conducted(experiment: Experiment, setting: Setting, limit_s: float, method: str = "fork") -> Result:
    """The result, error or end of an experiment."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=in_child, args=(experiment, setting, os.getpid(), sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            return {"error": f"no result within {limit_s:.0f} s"}
        return dict(receiver.recv())
    except EOFError:
        process.join()
        return {"error": f"ended with status {process.exitcode} without a result"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def lack(experiment: Experiment, setting: Setting) -> str:
    """What an experiment needs that is not here; empty if it can run."""
    if experiment.needs and setting.device == "cpu":
        return "needs cuda"
    is_package = experiment.needs not in ("", "cuda")
    return f"needs the package {experiment.needs}" if is_package and find_spec(experiment.needs) is None else ""


def about(given: Mapping[str, str]) -> Result:
    """What a reader of the lines must know of the machine."""
    ask = {"gpu": ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]}
    ask["commit"] = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found: Result = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    for name, command in ask.items():
        with suppress(OSError, subprocess.SubprocessError):
            found[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"date": time.strftime("%Y-%m-%d"), "options": dict(given), **found}


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The command line. Raises UserError."""
    known = {"part": "1", "seconds": "520", "size": "full", "device": "cuda", "only": "", "out": "", "folder": ""}
    given = dict(word.partition("=")[::2] for word in words)
    if unknown := given.keys() - known.keys():
        raise UserError(f"{min(unknown)}: unknown option; valid options are {', '.join(known)}")
    options = known | given
    allowed = {"part": ("1", "2", "3"), "size": ("full", "tiny"), "device": ("cuda", "cpu")}
    for name, values in allowed.items():
        for value in options[name].split(","):
            if value not in values:
                raise UserError(f"{name}: is {value!r}; allowed: {', '.join(values)}")
    if not options["seconds"].isdecimal():
        raise UserError(f"seconds: is {options['seconds']!r}; give a whole number of seconds")
    return options


def main() -> None:
    """Runs the experiments for which there is time."""
    options = options_of(sys.argv[1:])
    end_s, is_tiny = time.monotonic() + int(options["seconds"]), options["size"] == "tiny"
    quiet_libraries()
    method = start_method() if options["device"] == "cuda" else "fork"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the experiment under way is ended
    folder = Path(options["folder"] or tempfile.mkdtemp(prefix="gpu_check-")).resolve()
    wanted = [word.strip() for word in options["only"].split(",") if word.strip()]

    def write(line: Mapping[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False)
        print(text, flush=True)
        if options["out"]:
            with Path(options["out"]).open("a", encoding="utf-8") as stream:
                stream.write(f"{text}\n")

    try:
        write({"about": about(options)})
        for size in {"tiny", "tiny" if is_tiny else "sd2"}:
            if not (folder / size / "pipeline" / "model_index.json").exists():
                save_pipeline(folder / size / "pipeline", size)
        for part in options["part"].split(","):
            for experiment in PARTS[part]:
                if wanted and experiment.name not in wanted:
                    continue
                small = is_tiny or experiment.name.startswith("tiny run")
                where = folder / ("tiny" if small else "sd2")
                setting = Setting(options["device"], small, where, 0.05 if is_tiny else 12.0)
                start_s, left_s = time.monotonic(), end_s - time.monotonic()
                if reason := lack(experiment, setting):
                    found: Result = {"skipped": reason}
                elif left_s < _LEAST_S:
                    found = {"skipped": "no time is left; give more seconds, or name it in only="}
                else:
                    found = conducted(experiment, setting, min(experiment.limit_s, left_s), method)
                taken_s = round(time.monotonic() - start_s, 1)
                predicted = {"predicted": experiment.predicted} if experiment.predicted and not is_tiny else {}
                write({"part": part, "experiment": experiment.name, **found, **predicted, "seconds": taken_s})
    finally:
        if not options["folder"]:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_cli(main)
