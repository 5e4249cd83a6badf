"""What `gpu_check` measures, each in a process of its own: ceilings of the machine, parts of a step, the trainer.

Every function returns the result of one experiment, plain values by name. Those with several shapes or sizes measure
what they can: where one fails, its error is its value.
"""

import csv
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook

import train
from scripts.bench_peers import SD2_UNET
from sd_training.build.dry_run import AT_MOST, meta_networks, run_memory
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config

Result = dict[str, Any]
_GB = 1e9
_NVIDIA_SMI = ("utilization.gpu", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@dataclass(frozen=True)
class Setting:
    """Where and how large everything runs."""

    device: str
    is_tiny: bool
    folder: Path
    """Holds `pipeline`; gets the runs."""
    measured_s: float
    """Of one run of the trainer, after its warm-up [s]."""

    @property
    def batch(self) -> int:
        """Of the trainer, where nothing else is said."""
        return 2 if self.is_tiny else 64

    @property
    def resolution(self) -> int:
        """Of a picture [pixels]."""
        return 32 if self.is_tiny else 512


def synchronize(device: str) -> None:
    """Wait for the device, before a clock is read."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Of one call: the median of some blocks of calls that take a tenth of a second, after three for the warm-up."""
    for _ in range(3):
        function()
    synchronize(device)
    start_s = time.perf_counter()
    function()
    synchronize(device)
    calls = max(1, min(100, int(0.1 / max(1e-6, time.perf_counter() - start_s))))
    blocks = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        blocks.append((time.perf_counter() - start_s) / calls)
    return statistics.median(blocks)


def each(cases: Mapping[str, Callable[[], Any]]) -> Result:
    """The results of some cases; an error, such as a shape that a kernel refuses, is the result of its case."""
    found: Result = {}
    for name, measure in cases.items():
        try:
            found[name] = measure()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return found


# --- Ceilings ---


def ceilings(setting: Setting) -> Result:
    """What the machine can do: matrix products, copies on the device, and to and from it."""
    side, count = (64, 1 << 12) if setting.is_tiny else (8192, 1 << 28)
    device = setting.device

    def gemm() -> float:
        left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * side**3 / seconds_of(lambda: left @ right, device) / 1e12

    def copy() -> float:
        source = torch.empty(count, device=device)
        target = torch.empty_like(source)
        return 8 * count / seconds_of(lambda: target.copy_(source), device) / _GB

    def transfer(is_upload: bool) -> float:
        host, there = torch.empty(count, pin_memory=device == "cuda"), torch.empty(count, device=device)
        target, source = (there, host) if is_upload else (host, there)
        return 4 * count / seconds_of(lambda: target.copy_(source, non_blocking=True), device) / _GB

    cases = {
        "bf16_gemm_tflops": gemm,
        "copy_gb_per_s": copy,
        "pinned_upload_gb_per_s": partial(transfer, True),
        "pinned_download_gb_per_s": partial(transfer, False),
    }
    return each(cases)


def cpu_average(setting: Setting) -> Result:
    """GB/s of the average of the weights on the CPU, by number of threads; it touches 12 bytes per parameter."""
    count = 1 << 12 if setting.is_tiny else 1 << 24
    average, weights = ([torch.zeros(count) for _ in range(8)] for _ in range(2))

    def with_threads(threads: int) -> float:
        torch.set_num_threads(threads)
        taken_s = seconds_of(lambda: torch._foreach_lerp_(average, weights, 1e-4), "cpu", repeats=3)
        return 12 * 8 * count / taken_s / _GB

    threads = [1] if setting.is_tiny else [n for n in (1, 4, 8, 16) if n <= (os.cpu_count() or 1)]
    return each({f"gb_per_s_with_{n}_threads": partial(with_threads, n) for n in threads})


# --- Kernels ---

_ATTENTION = {
    "sd2 self 64x64": (5, 4096, 4096, 64),
    "sd2 self 32x32": (10, 1024, 1024, 64),
    "sd2 cross 64x64": (5, 4096, 77, 64),
    "sd1 self 64x64": (8, 4096, 4096, 40),
    "sd3 joint": (24, 4250, 4250, 64),
}
"""Heads, queries, keys, width of a head."""


def attention(backend: str, setting: Setting) -> Result:
    """TFLOP/s of attention, forward and backward, in bf16 by shape, without a mask.

    Args:
        backend: name of torch's `SDPBackend`.
    """
    batch = 1 if setting.is_tiny else 16

    def one(heads: int, queries: int, keys: int, width: int) -> float:
        queries, keys = (min(length, 16) if setting.is_tiny else length for length in (queries, keys))
        q, k, v = (
            torch.randn(batch, heads, length, width, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
            for length in (queries, keys, keys)
        )
        gradient = torch.randn_like(q)

        def step() -> None:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                F.scaled_dot_product_attention(q, k, v).backward(gradient)

        # Two products forward and five backward, where the scores are computed again (Dao et al. 2022, algorithm 4).
        return 7 * 2 * batch * heads * queries * keys * width / seconds_of(step, setting.device) / 1e12

    return each({name: partial(one, *shape) for name, shape in _ATTENTION.items()})


def group_norm(setting: Setting) -> Result:
    """Milliseconds of GroupNorm with SiLU, forward and backward, by shape and memory format, bf16 input."""
    batch = 1 if setting.is_tiny else 32

    def one(channels: int, side: int, memory_format: torch.memory_format) -> float:
        side = min(side, 8) if setting.is_tiny else side
        norm = nn.GroupNorm(32, channels, device=setting.device)
        pixels = torch.randn(batch, channels, side, side, device=setting.device, dtype=torch.bfloat16)
        pixels = pixels.to(memory_format=memory_format).requires_grad_()
        gradient = torch.randn_like(pixels)

        def step() -> None:
            with torch.autocast(setting.device, torch.bfloat16):
                F.silu(norm(pixels)).backward(gradient)

        return seconds_of(step, setting.device) * 1e3

    formats = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
    return each(
        {
            f"{channels}x{side}x{side} {name}_ms": partial(one, channels, side, memory_format)
            for channels, side in ((320, 64), (1280, 16))
            for name, memory_format in formats.items()
        }
    )


def bare_step(layout: str, setting: Setting, *, benchmark: bool = False, compiled: bool = False) -> Result:
    """A step of Stable Diffusion 2's UNet alone: bf16 autocast, forward, backward, fused AdamW.

    Args:
        layout: nchw or nhwc.
        benchmark: let cuDNN try its algorithms.
        compiled: as one graph.
    """
    torch.backends.cudnn.benchmark = benchmark
    small = {
        **{"sample_size": 8, "block_out_channels": (32, 32), "attention_head_dim": 4, "cross_attention_dim": 16},
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    with torch.device(setting.device):
        unet = UNet2DConditionModel(**(small if setting.is_tiny else SD2_UNET)).train()
        side, width, batch = unet.config.sample_size, unet.config.cross_attention_dim, setting.batch
        latents, states = torch.randn(batch, 4, side, side), torch.randn(batch, 77, width)
        timesteps = torch.randint(0, 1000, (batch,))
    unet.to(memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format)
    latents = latents.to(memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5, fused=True)
    predict = torch.compile(unet) if compiled else unet

    def step() -> None:
        with torch.autocast(setting.device, torch.bfloat16):
            loss = predict(latents, timesteps, states).sample.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    taken_s = seconds_of(step, setting.device)
    return {"batch": batch, "images_per_s": batch / taken_s, "ms_per_image": taken_s / batch * 1e3, **memory(setting)}


def encode(setting: Setting) -> Result:
    """Milliseconds per image of the autoencoder's encoder, bf16, without autograd, eager and compiled, by batch."""
    widths = (8, 8) if setting.is_tiny else (128, 256, 512, 512)
    vae = AutoencoderKL(
        block_out_channels=widths,
        layers_per_block=1 if setting.is_tiny else 2,
        norm_num_groups=8 if setting.is_tiny else 32,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
    ).to(setting.device, torch.bfloat16)

    def one(encoder: Callable[[Tensor], Any], batch: int) -> float:
        side = setting.resolution
        pixels = torch.rand(batch, 3, side, side, device=setting.device, dtype=torch.bfloat16)
        with torch.no_grad():
            return seconds_of(lambda: encoder(pixels), setting.device, repeats=3) / batch * 1e3

    cases = {f"eager_{n}": partial(one, vae.encoder, n) for n in ((1, 2) if setting.is_tiny else (1, 8, 16, 32, 64))}
    if not setting.is_tiny:
        cases |= {f"compiled_{n}": partial(one, torch.compile(vae.encoder), n) for n in (16,)}
    return each(cases)


def memory(setting: Setting) -> Result:
    """The most that was allocated and reserved so far."""
    if setting.device != "cuda":
        return {}
    peak = {"allocated_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    return {name: count / 2**30 for name, count in peak.items()}


# --- The trainer ---


def words_of(setting: Setting, name: str, options: Sequence[str]) -> list[str]:
    """Command line of a run of the trainer on one made-up batch; `options` come last."""
    return [
        f"experiment.log_dir={setting.folder / 'runs'}",
        f"experiment.name={name}",
        "experiment.num_examples_to_see=100000000",
        "experiment.save_every=1000000",
        f"model.pretrained={setting.folder / 'pipeline'}",
        "model.use_ema=true",
        "dataset.type=Synthetic",
        "dataset.reuse_batch=true",
        "dataset.params.synthetic.num_samples=1000",
        f"dataset.params.resolution={setting.resolution}",
        f"dataset.params.index_dir={setting.folder / 'index'}",
        f"system.batch_size={setting.batch}",
        "system.workers=0",
        "trainer.devices=1",
        f"trainer.accelerator={'gpu' if setting.device == 'cuda' else 'cpu'}",
        "wandb.mode=disabled",
        "logging.progress_bar=false",
        *options,
    ]


class Measured(BaseException):
    """Ends a run when its speed is known; no exception that a run saves before it dies of."""


def trainer(
    name: str, options: Sequence[str], setting: Setting, *, measured_s: float | None = None, estimate: bool = False
) -> Result:
    """Speed and memory of a run of the trainer on one made-up batch, and clocks and power of the GPU meanwhile.

    The clock is read after optimizer steps between which the device was waited for, over whole windows of ten steps: a
    stall at every logged step counts with its share.

    Args:
        name: of the run folder.
        options: of the run.
        measured_s: at least, after the warm-up [s]; None takes the setting's.
        estimate: whether to compare its memory with that of `--dry-run`.
    """
    words = words_of(setting, name, options)
    config, found, gpu = load_config(words), Result(), GpuWatch()
    if estimate:
        found["dry_run_gib"] = run_memory(make_plan(config), *meta_networks(config))[AT_MOST] / 2**30
    window, done, start_s = (2 if setting.is_tiny else 10), 0, 0.0
    first = window if setting.is_tiny else 2 * window

    def after_step(*_: Any) -> None:
        nonlocal done, start_s
        done += 1
        if done < first or done % window:
            return
        synchronize(setting.device)
        now_s = time.perf_counter()
        if done == first:
            start_s = now_s
            gpu.start()
        elif now_s - start_s >= (measured_s or setting.measured_s):
            step_s = (now_s - start_s) / (done - first)
            found.update(steps=done - first, step_ms=step_s * 1e3, images_per_s=config.system.batch_size / step_s)
            raise Measured

    hook = register_optimizer_step_post_hook(after_step)
    try:
        run_train(words)
    except Measured:
        return {**found, **memory(setting), **last_row(setting.folder / "runs" / name), **gpu.stop()}
    finally:
        hook.remove()
    raise RuntimeError("the run ended before its speed was known")


def run_train(words: Sequence[str]) -> None:
    """`python train.py words…` in this process."""
    sys.argv = ["train.py", *words]
    train.main()


def last_row(run: Path) -> Result:
    """Step and loss of the last row that a run has logged."""
    path = run / "metrics.csv"
    rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    return {"logged_step": int(rows[-1]["optimizer_step"]), "loss": float(rows[-1]["loss"])} if rows else {}


def finished_run(name: str, options: Sequence[str], setting: Setting) -> Result:
    """A short run to its end, with its export; and its last row."""
    batch, run = 2, setting.folder / "runs" / name
    length = [f"experiment.num_examples_to_see={8 * batch}", f"system.batch_size={batch}", "logging.every=1"]
    run_train(words_of(setting, name, [*length, "dataset.reuse_batch=false", *options]))
    assert (run / "current_pipeline" / "model_index.json").exists(), "nothing was exported"
    return last_row(run)


def resumed_run(setting: Setting) -> Result:
    """A run that is stopped at half, and resumed; its last row has to be that of a run without a stop, such as `bf16`
    of the tiny runs."""
    whole = last_row(setting.folder / "runs" / "bf16") or finished_run("whole", [], setting)
    half = [f"experiment.num_examples_to_see={4 * 2}"]
    finished_run("cut", half, setting)
    cut = finished_run("cut", [], setting)
    assert cut == whole, f"resumed: {cut}, without a stop: {whole}"
    return cut


class GpuWatch:
    """Clocks, power and load of the first GPU; empty without nvidia-smi."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s, self._rows, self._stopped = every_s, list[list[float]](), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._command = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA_SMI)}", "--format=csv,noheader,nounits"]

    def start(self) -> None:
        """Begin to ask for them."""
        self._thread.start()

    def stop(self) -> Result:
        """[lowest, median, highest] by name."""
        self._stopped.set()
        self._thread.join()
        columns = zip(_NVIDIA_SMI, zip(*self._rows, strict=True), strict=False)
        return {name: [min(values), statistics.median(values), max(values)] for name, values in columns}

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                asked = subprocess.run(
                    [*self._command, "--id=0"], capture_output=True, text=True, timeout=30, check=True
                )
                self._rows.append([float(value) for value in asked.stdout.split(",")])
            except (OSError, subprocess.SubprocessError, ValueError):
                return
