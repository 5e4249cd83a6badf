"""From nothing to pictures: real digits as shards, an autoencoder, a text-to-image UNet from scratch, and their score.

    python scripts/quickstart.py            # everything from scratch in build/quickstart
    python scripts/quickstart.py --resume   # continue where the last call stopped
    python scripts/quickstart.py --quick    # a few steps of everything; shows that it runs, draws noise

Each step is a command of this project and is printed before it runs, so that it can be repeated by hand.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError
from sd_training.log import quiet_libraries

DEFAULT_FOLDER = Path("build/quickstart")
"""The one the configs name."""
GLOBAL_BATCH = 64
MIN_GUIDED, MIN_UNGUIDED, MIN_VARIETY = 480, 450, 0.8
GUIDANCE_SCALE = 2.0
MARKER = "quickstart.json"
"""Says that a folder was made here and may be removed; written first."""
DATA_DONE = "digits.json"
"""Written when shards and text side are complete."""

# An audit hook sees every connection and name look-up of the process, whichever library asks for it.
NO_NETWORK = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise OSError("this process has no network: " + event)
sys.addaudithook(refuse)
"""
OFFLINE_PROOF = f"""{NO_NETWORK}
import torch
from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
image = pipeline("a handwritten seven", height=16, width=16, num_inference_steps=2,
                 generator=torch.Generator().manual_seed(0)).images[0]
print("without network: StableDiffusionPipeline.from_pretrained loaded the pipeline and drew", image.size)
"""


@dataclass(frozen=True)
class Machine:
    """How many processes train, and on what."""

    accelerator: str
    """cuda or cpu."""
    processes: int

    @property
    def micro_batch(self) -> int:
        """Samples per process that make the global batch."""
        return GLOBAL_BATCH // self.processes


def choose_machine(num_gpus: int) -> Machine:
    """One process per GPU, as many as divide the global batch evenly; two processes on the CPU where there is none."""
    if num_gpus == 0:
        return Machine("cpu", 2)
    return Machine("cuda", max(n for n in range(1, num_gpus + 1) if GLOBAL_BATCH % n == 0))


def child_environment(environment: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """What every step runs with: no network, and one thread per process on the CPU.

    Two threads that wait for each other on two busy cores make a small convolution twenty times slower.
    """
    chosen = {**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if machine.accelerator == "cpu":
        chosen["OMP_NUM_THREADS"] = "1"
    return chosen


def train_command(config: str, machine: Machine, overrides: Sequence[str]) -> list[str]:
    """A training run on every process of the machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", str(machine.processes), "-m", "train", f"config={config}"]
    batch = [f"system.batch_size={machine.micro_batch}"] if machine.processes != 2 else []
    return [*launcher, f"trainer.accelerator={machine.accelerator}", *batch, *overrides]


def data_overrides(folder: Path) -> list[str]:
    """Where shards and runs lie; nothing where the configs say so already."""
    runs, params = f"experiment.log_dir={folder / 'runs'}", "dataset.params"
    own = [runs, f"{params}.path={folder / 'data'}", f"{params}.index_dir={folder / 'index'}"]
    return [] if folder == DEFAULT_FOLDER else own


def part_overrides(folder: Path) -> list[str]:
    """Where the frozen parts lie; nothing where the config says so already."""
    text, vae = folder / "text", folder / "runs" / "autoencoder" / "current_pipeline"
    places = {"vae": vae, "text_encoder": text, "tokenizer": text}
    return [f"model.{part}.pretrained={p}" for part, p in places.items() if folder != DEFAULT_FOLDER]


def quick_overrides() -> list[str]:
    """Four optimizer steps, one save."""
    length = [f"experiment.num_examples_to_see={4 * GLOBAL_BATCH}", "lr_scheduler.params.warmup_length=1"]
    return [*length, "experiment.save_every=4", "logging.every=1"]


def vae_command(folder: Path, machine: Machine, is_quick: bool) -> list[str]:
    """Trains the autoencoder."""
    quick = quick_overrides() if is_quick else []
    return train_command("configs/quickstart_vae.yaml", machine, [*data_overrides(folder), *quick])


def unet_command(folder: Path, machine: Machine, is_quick: bool) -> list[str]:
    """Trains the denoiser."""
    quick = [*quick_overrides(), "sampling.every=4", "sampling.num_inference_steps=2"] if is_quick else []
    overrides = [*data_overrides(folder), *part_overrides(folder), *quick]
    return train_command("configs/quickstart_unet.yaml", machine, overrides)


def pipeline_dir(folder: Path) -> Path:
    """The result."""
    return folder / "runs" / "digits" / "current_pipeline"


def score_command(folder: Path, is_quick: bool) -> list[str]:
    """Draws and scores; without bounds when quick."""
    command = [sys.executable, "scripts/score_digits.py", "--pipeline", str(pipeline_dir(folder)), "--out", str(folder)]
    command += ["--guidance-scale", f"{GUIDANCE_SCALE:g}"]
    if is_quick:
        return [*command, "--per-digit", "2", "--steps", "2"]
    bounds = {"--min-guided": MIN_GUIDED, "--min-unguided": MIN_UNGUIDED, "--min-variety": MIN_VARIETY}
    return command + [word for name, value in bounds.items() for word in (name, f"{value:g}")]


def empty(folder: Path) -> None:
    """Removes what lies in a quickstart's folder; the marker last, so that an interrupted removal can be repeated."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def prepare_folder(folder: Path, *, is_resumed: bool, is_quick: bool) -> None:
    """An empty folder with its marker, or the one to continue in.

    Raises:
        ConfigError: the folder holds something else, or a run of the other length is to be resumed.
    """
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is a file")
    is_taken = folder.exists() and any(folder.iterdir())
    if is_taken and not marker.is_file():
        raise ConfigError(f"--folder: {folder} holds files that the quickstart did not write; choose another folder")
    if is_resumed and is_taken:
        if json.loads(marker.read_text(encoding="utf-8")) != {"quick": is_quick}:
            raise ConfigError(f"--resume: the run in {folder} was started {'without' if is_quick else 'with'} --quick")
        return
    if is_resumed:
        print(f"--resume: nothing to resume in {folder}, so everything starts from scratch")
    if is_taken:
        print(f"removing the earlier quickstart in {folder}")
        empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"quick": is_quick}) + "\n", encoding="utf-8")


def readable(command: Sequence[str]) -> str:
    """The command as one would type it in the project's folder; inline code is left out."""
    python = Path(sys.executable)
    shown_python = str(python.relative_to(ROOT)) if python.is_relative_to(ROOT) else sys.executable
    words = [shown_python if word == sys.executable else word for word in command]
    return " ".join("'...'" if "\n" in word else shlex.quote(word) for word in words)


def run_step(title: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs one command.

    Raises:
        SystemExit: with the status of a command that failed, after saying which one.
    """
    print(f"\n=== {title}\n$ {readable(command)}", flush=True)
    started = time.monotonic()
    status = subprocess.run(command, env=dict(environment), check=False).returncode
    if status:
        print(f"error: {title}: the command above ended with status {status}", file=sys.stderr)
        raise SystemExit(status if status > 0 else 1)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


def write_digits(folder: Path, environment: Mapping[str, str]) -> None:
    """Shards and text side, unless an interrupted run already has them all."""
    if (folder / DATA_DONE).exists():
        print("\n=== 1/5 real digits: already written")
        return
    command = [sys.executable, "scripts/make_digits.py", str(folder)]
    run_step("1/5 real digits as WebDataset shards, tokenizer, text encoder", command, environment)
    (folder / DATA_DONE).write_text(json.dumps({"shards": len(list((folder / "data").glob("*.tar")))}) + "\n")


def summary(folder: Path, machine: Machine) -> str:
    """Where everything lies and what to try next."""
    generate = [sys.executable, "scripts/generate_examples.py", "--pipeline", str(pipeline_dir(folder))]
    generate += ["--prompt", "a handwritten seven", "--images-per-prompt", "16", "--out", str(folder / "sevens")]
    generate += ["--height", "16", "--width", "16", "--guidance-scale", f"{GUIDANCE_SCALE:g}"]
    longer = unet_command(folder, machine, is_quick=False)
    longer += ["experiment.name=digits_longer", "experiment.num_examples_to_see=268800"]
    digits = folder / "runs" / "digits"
    return f"""
pictures      {folder / "digits.png"} (one digit per row), digits_without_guidance.png beside it
score         {folder / "score.json"}
pipeline      {pipeline_dir(folder)}
run page      {digits / "report.html"}: curves, pictures, score and options of the training run, in a browser
training run  {digits}: config.yaml, metrics.csv, samples/, tensorboard/, checkpoints/
shards        {folder / "data"}

Next, sixteen sevens:
  {readable(generate)}
and a run twice as long (dataset.params.path=… trains on your own shards):
  {readable(longer)}"""


def run_all(folder: Path, machine: Machine, is_quick: bool, environment: Mapping[str, str]) -> None:
    """The five steps."""
    write_digits(folder, environment)
    proof = [sys.executable, "-c", OFFLINE_PROOF, str(pipeline_dir(folder))]
    for title, command in (
        ("2/5 autoencoder: 16 x 16 pixels to 8 x 8 x 4 latents", vae_command(folder, machine, is_quick)),
        ("3/5 UNet from scratch: noise and a caption to latents", unet_command(folder, machine, is_quick)),
        ("4/5 the result in a process without network", proof),
        ("5/5 drawing and scoring", score_command(folder, is_quick)),
    ):
        run_step(title, command, environment)


def show_score(folder: Path) -> None:
    """Puts the score on the page of the run, as measurements of its export."""
    from sd_training.evaluation.measure import ROWS, write_rows
    from sd_training.evaluation.report import PAGE, write_report
    from sd_training.export.pipeline import exported_step

    run, rows = folder / "runs" / "digits", []
    found = json.loads((folder / "score.json").read_text(encoding="utf-8"))
    measured = {"step": str(exported_step(run)), "weights": "average"}
    for name, own in (("", found["guided"]), ("_without_guidance", found["unguided"])):
        measured["images"] = str(own["drawn"])
        value, low, high = map(str, own["fid"])
        rows.append({**measured, "metric": f"digits_fid{name}", "value": value, "low": low, "high": high})
        share = {"metric": f"digits_recognised{name}", "value": str(own["recognised"] / own["drawn"])}
        rows.append({**measured, **share, "low": "", "high": ""})
    write_rows(run / ROWS, rows)
    write_report([run], run / PAGE)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=path_argument, default=ROOT / DEFAULT_FOLDER, help=f"default {DEFAULT_FOLDER}")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, no bound on the score")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier call has done")
    options = parser.parse_args(argv)
    started = time.monotonic()
    quiet_libraries()
    folder: Path = options.folder.absolute()
    prepare_folder(folder, is_resumed=options.resume, is_quick=options.quick)
    # Every command runs, and can be repeated, in the project's folder.
    os.chdir(ROOT)
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    import torch

    machine = choose_machine(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    print(f"{machine.processes} training processes on {machine.accelerator}, files in {folder}")
    run_all(folder, machine, options.quick, child_environment(os.environ, machine))
    show_score(folder)
    print(f"\nquickstart finished in {(time.monotonic() - started) / 60:.1f} minutes\n{summary(folder, machine)}")


if __name__ == "__main__":
    run_cli(main)
