"""Predicts step time, bytes per link and images/s of a model on 8 to 1,024 GPUs, before any of them is rented.

    python scripts/scaling_model.py model=configs/models/sd2_base.yaml gpus=8,64,512 strategy=hsdp \\
        [gpu=h100] [batch=32] [gpus_per_node=8] [tflops=180] [a.b.c=value …]

`tflops` is what one GPU of yours does at this batch (the column tflops_per_s of a run's metrics.csv); without it the
rate of an MLPerf entry counts, which is faster than a run that is not compiled. Tensor parallelism:
distributed.mesh.data=-1 distributed.mesh.tensor=4. docs/scaling.md has the formulas and how far they are from published
logs; `python -m tests.scaling_fit` fits the constants.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import run_cli
from sd_training.config.load import load_config, split_words
from sd_training.config.plan import Layout, find_layout
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.log import quiet_libraries

OPTIONS = ("model", "gpus", "strategy", "gpu", "batch", "gpus_per_node", "tflops")

BYTES_PER_PARAMETER = 68.1
"""Memory traffic of a step that grows with the parameters and not with the batch: casts, gradients, norm, buckets.
Fitted, as the next two and `Gpu.tflops`; a test repeats the fit."""
HOP_S = 5.83e-6
"""Time of one step from rank to rank, beside its bytes."""
SPLIT_S = 268e-6
"""Time that an all-reduce between the ranks of the tensor axis costs beside its bytes; none of them is hidden. That
narrower matrices run slower is in it."""
UPDATE_BYTES = 28
"""Of fused AdamW per parameter: weight, gradient and two moments are read, all but the gradient are written."""
BUCKET_BYTES = 25 * 2**20
"""Of gradients that DDP reduces at once."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with its links in one direction; what the data sheets give, but `tflops`, which is fitted."""

    tflops: float
    """Of the model in the published runs [TFLOP/s]."""
    memory: float
    """[GB/s], as the following two."""
    nvlink: float
    network: float
    """Of the network card of one GPU."""
    per_node: int = 8
    """GPUs that NVLink connects."""


GPUS = {
    "a100": Gpu(87.7, 2039, 300, 25),
    "a100-256px": Gpu(75.4, 2039, 300, 25),
    "h100": Gpu(362.6, 3350, 450, 50),
    "h100-2024": Gpu(319.5, 3350, 450, 50),
    "h100-2023": Gpu(294.6, 3350, 450, 50),
    "h200": Gpu(373.9, 4800, 450, 50),
    "b200": Gpu(1256.3, 8000, 900, 50),
    "gb200": Gpu(1410.1, 8000, 900, 50, 64),
    "gb300": Gpu(1600.8, 8000, 900, 100, 64),
}
"""A name with an addition is the same GPU with older software or at another size of picture. The three of Blackwell run
FLUX in mxfp8, the others Stable Diffusion 2 in fp16, compiled and as CUDA graphs. The network of a100 is an assumption:
its source does not name it."""


@dataclass(frozen=True)
class Work:
    """What a model costs."""

    parameters: float
    """That are trained."""
    flops: float
    """Of an image in a training step."""
    blocks: int = 1
    """That FSDP gathers one by one."""
    weight_bytes: int = 2
    """Of a weight that is gathered."""
    gradient_bytes: int = 4
    """Of a gradient that is reduced."""
    split_parameters: float = 0
    """Of these, in matrices that the tensor axis splits."""
    split_numbers: float = 0
    """Numbers of an image that the ranks of the tensor axis sum in a forward pass."""
    splits: int = 0
    """All-reduces that do this."""


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step, and bytes that a GPU sends in it over each kind of link."""

    compute: float
    parameters: float
    exposed: float
    nvlink_bytes: float
    network_bytes: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.parameters + self.exposed


@dataclass(frozen=True)
class Collective:
    """Bytes that ranks exchange, in rings or trees with the traffic of a ring."""

    volume: float
    """Of the full tensors [bytes]."""
    passes: int
    """1: all-gather, or reduce-scatter; 2: all-reduce, which is both."""
    ranks: int
    stride: int = 1
    """Between the numbers of these ranks."""
    parts: int = 1
    """Calls that the volume is cut into."""

    def cost(self, gpu: Gpu) -> tuple[float, float, float]:
        """Seconds, and bytes that a GPU sends over NVLink and over the network, where the rings of a node cross to the
        next one by a network card each."""
        local = max(1, min(self.ranks, gpu.per_node // self.stride))
        sent = self.passes * (self.ranks - 1) / self.ranks * self.volume
        nvlink, network = sent * (local > 1), sent / local * (self.ranks > local)
        hops = self.ranks - 1 if self.passes == 1 else 2 * log2(self.ranks)  # a ring; a tree up and down
        return max(nvlink / gpu.nvlink, network / gpu.network) / 1e9 + self.parts * hops * HOP_S, nvlink, network


def collectives(work: Work, layout: Layout, reshard: bool) -> Iterator[tuple[str, Collective]]:
    """When a collective runs (in the forward or backward pass of a micro-batch, in the last backward pass, or after
    it), and the collective."""
    mesh = layout.mesh
    local = work.parameters - work.split_parameters * (1 - 1 / mesh.tensor)
    weights, gradients = work.weight_bytes * local, work.gradient_bytes * local
    match layout.strategy:
        case "single" | "ddp":
            yield "last", Collective(gradients, 2, mesh.data, mesh.tensor, ceil(gradients / BUCKET_BYTES))
        case "deepspeed_1":
            yield "last", Collective(gradients, 1, mesh.data, mesh.tensor)
            yield "forward" if reshard else "after", Collective(weights, 1, mesh.data, mesh.tensor)
        case "fsdp" | "hsdp":
            gather = Collective(weights, 1, mesh.fsdp, mesh.tensor, work.blocks)
            yield from [("forward", gather), ("backward", gather)][: 1 + reshard]
            yield "backward", replace(gather, volume=gradients)
            stride = mesh.fsdp * mesh.tensor
            yield "backward", Collective(gradients / mesh.fsdp, 2, mesh.data, stride, work.blocks)
        case other:
            raise ConfigError(f"strategy: {other} is not modelled; use ddp, fsdp, hsdp or deepspeed_1")


def predict(work: Work, gpu: Gpu, layout: Layout, batch: int, accumulation: int = 1, reshard: bool = True) -> Step:
    """One optimizer step.

    Args:
        batch: images of a micro-batch of one rank, or of the ranks of a tensor axis together.
        reshard: `distributed.reshard_after_forward`; with deepspeed_1 whether weights are gathered while the next
            forward pass runs, as Megatron does, instead of after the update.
    """
    mesh = layout.mesh
    compute = batch * work.flops / mesh.tensor / gpu.tflops / 1e12
    seconds = dict.fromkeys(("forward", "backward", "last", "after"), 0.0)
    nvlink = network = 0.0
    for when, collective in collectives(work, layout, reshard):
        own, over_nvlink, over_network = collective.cost(gpu)
        times = accumulation if when in ("forward", "backward") else 1
        seconds[when] += own
        nvlink, network = nvlink + times * over_nvlink, network + times * over_network
    # As many in the backward pass: of the inputs' gradients.
    split = Collective(2 * 2 * work.split_numbers * batch, 2, mesh.tensor).cost(gpu)
    exposed = max(0.0, seconds["forward"] - compute / 3) + max(0.0, seconds["backward"] - compute * 2 / 3)
    exposed += split[0] + 2 * work.splits * SPLIT_S * (mesh.tensor > 1)
    last = max(0.0, seconds["last"] - compute * 2 / 3) + seconds["after"]
    local = work.parameters - work.split_parameters * (1 - 1 / mesh.tensor)
    shards = {"ddp": 1, "single": 1, "deepspeed_1": mesh.data}.get(layout.strategy, mesh.fsdp)
    traffic = (BYTES_PER_PARAMETER + UPDATE_BYTES / shards) * local
    return Step(
        accumulation * compute,
        traffic / gpu.memory / 1e9,
        accumulation * exposed + last,
        nvlink + accumulation * split[1],
        network + accumulation * split[2],
    )


# --- A run of this project ---


def read_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of this script by name, and the overrides of the run.

    Raises:
        ConfigError: every option that is unknown or has a value that cannot be used.
    """
    own, overrides, problems = split_words(argv, OPTIONS, "scaling_model")
    given = {"gpus": "8,64,512", "gpu": "h100"} | dict(own)
    for name in ("gpus", "batch", "gpus_per_node", "tflops"):
        whole = r"[1-9]\d*(,[1-9]\d*)*" if name == "gpus" else r"[1-9]\d*(\.\d+)?" if name == "tflops" else r"[1-9]\d*"
        if name in given and not re.fullmatch(whole, given[name], re.ASCII):
            problems.append(f"{name}: {given[name]!r} is no number above 0" + ", or several" * (name == "gpus"))
    if given["gpu"] not in GPUS:
        problems.append(f"gpu: {given['gpu']!r} is not known; choose from {', '.join(GPUS)}")
    if "model" not in given:
        problems.append("model: is missing; name the model's YAML file, model=configs/models/sd2_base.yaml")
    if problems:
        raise ConfigError(problems)
    return given, overrides


def work_of(config: Config, is_measured: bool) -> Work:
    """What the model of a run costs, counted without weights.

    Args:
        is_measured: the TFLOP/s are those of a run, which has recomputation in it.

    Raises:
        ConfigError: it is an autoencoder or has adapters.
    """
    from torch.distributed.tensor.parallel import RowwiseParallel  # as the following: takes seconds

    from sd_training.build.dry_run import largest_picture, meta_networks, model_size
    from sd_training.build.models import idle_parts
    from sd_training.models.flops import autoencoder_flops, forward_flops, text_flops

    networks, family = meta_networks(config)
    if family is None or config.model.lora.rank:
        raise ConfigError("model: autoencoders and adapters are not modelled; give the config of a denoiser")
    size = model_size(config, networks, family, config.model.mixed_precision)
    sums: list[int] = []
    for block in family.blocks() if config.distributed.mesh.tensor > 1 else []:
        for name, style in family.tensor_plan(block, 1).items():
            if isinstance(style, RowwiseParallel):
                layer: Any = block.get_submodule(name)
                layer.register_forward_hook(lambda layer, args, output: sums.append(output.numel()))
    picture, idle = largest_picture(config), idle_parts(config)
    passes = 4 if config.model.gradient_checkpointing and not is_measured else 3
    total = passes * forward_flops(family, *picture)
    total += 0 if "vae" in idle else autoencoder_flops(family, *picture)
    total += text_flops(family, set(family.tokenizers()) - set(idle)) * (3 if config.model.trains_text else 1)
    is_ddp = config.distributed.strategy in ("auto", "single", "ddp")
    gradient = size.weight_bytes if is_ddp else size.compute_bytes if "deepspeed" in config.distributed.strategy else 4
    blocks = len(family.blocks()) + 1  # what is in no block
    return Work(size.trained, total, blocks, size.compute_bytes, gradient, size.block_matrices, sum(sums), len(sums))


def layout_of(config: Config, gpus: int, per_node: int) -> Layout:
    """Strategy and mesh on so many GPUs; `hsdp` on one node is `fsdp`."""
    is_one = config.distributed.strategy == "hsdp" and gpus <= per_node
    options = config.distributed.model_copy(update={"strategy": "fsdp"}) if is_one else config.distributed
    return find_layout(options, gpus, per_node)


def table(given: dict[str, str], config: Config) -> Iterator[str]:
    """The prediction, a line for each number of GPUs."""
    gpu = GPUS[given["gpu"]]
    gpu = replace(gpu, per_node=int(given.get("gpus_per_node", gpu.per_node)))
    if "tflops" in given:  # of whole steps on one node: what the parameters cost is in it
        gpu = replace(gpu, tflops=float(given["tflops"]), memory=inf)
    work, batch = work_of(config, "tflops" in given), config.system.batch_size
    accumulation = config.system.gradient_accumulation
    yield (
        f"{work.parameters / 1e6:,.0f} M parameters, {work.flops / 1e12:.2f} TFLOP per image, {batch} images per "
        f"micro-batch, {accumulation} per step; {given['gpu']} at {gpu.tflops:g} TFLOP/s"
    )
    heads = ("GPUs", "step ms", "compute", "parameters", "exposed", "NVLink GB", "network GB", "images/s", "per GPU")
    yield "  ".join(f"{head:>10}" for head in heads)
    for gpus in map(int, given["gpus"].split(",")):
        layout = layout_of(config, gpus, gpu.per_node)
        step = predict(work, gpu, layout, batch, accumulation, config.distributed.reshard_after_forward)
        rate = layout.mesh.data_ranks * batch * accumulation / step.seconds
        times = [1e3 * part for part in (step.seconds, step.compute, step.parameters, step.exposed)]
        sent = [step.nvlink_bytes / 1e9, step.network_bytes / 1e9]
        cells = [f"{gpus:,}", *(f"{part:.1f}" for part in times), *(f"{part:.2f}" for part in sent)]
        yield "  ".join(f"{cell:>10}" for cell in (*cells, f"{rate:,.0f}", f"{rate / gpus:.1f}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or "-h" in words or "--help" in words:
        print((__doc__ or "").strip())
    else:
        given, overrides = read_options(words)
        short = {"strategy": "distributed.strategy", "batch": "system.batch_size"}
        quiet_libraries()
        # The data are not read; what the file leaves open gets a value.
        options = ["dataset.params.path=unread"] * ("dataset.params.path" not in str(overrides))
        options += [f"{key}={given[name]}" for name, key in short.items() if name in given]
        config = load_config([f"config={given['model']}", *options, *overrides])
        print("\n".join(table(given, config)))


if __name__ == "__main__":
    run_cli(main)
