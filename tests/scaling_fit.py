"""Published images/s against scripts/scaling_model.py: `python -m tests.scaling_fit` prints the constants that fit the
rows marked so, and the table of docs/scaling.md.

MLPerf's rows are read from the submitters' own logs (mlcommons/training_results_v3.1 d06288b, v4.0 6fe9543, v4.1
b87b9e3, v5.0 and v5.1, `…/results/SYSTEM/{stable_diffusion,flux1}/result_*.txt`): the median, over all runs of a
system, of the rates of its blocks of 100 steps but the first (SD), or between two printed losses (FLUX). MosaicML's are
the table of its README (mosaicml/diffusion 066e68f).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from scripts import scaling_model
from scripts.scaling_model import GPUS, Gpu, Work, predict
from sd_training.config.plan import Layout, Mesh

WORK = {
    "sd2-512px": Work(865.9e6, 2.4087e12, blocks=39, gradient_bytes=2),
    "sd2-256px": Work(865.9e6, 0.5393e12, blocks=39, gradient_bytes=2),
    # 19 blocks of two streams and 38 of one; each sums the outputs of attention and MLP for 256 + 256 tokens.
    "flux-256px": Work(11.89e9, 20.42e12, 58, 2, 2, 11.89e9, (19 + 38) * 2 * 512 * 3072, 19 * 4 + 38 * 2),
}
"""Gradients are reduced in the type of the weights, and Megatron splits all blocks."""

_ROWS = """
h100-2023 sd2-512px MLPerf 3.1: Dell 8×64 939 fitted; eos 64×32 6780; eos 512×4 23856; eos 1024×2 28176
h100-2024 sd2-512px MLPerf 4.0: eos 8×64 1008 fitted; eos 64×16 7071; eos 512×4 37657 fitted; eos 1024×2 49927
h100-2024 sd2-512px MLPerf 4.0: Oracle 64×16 6907; Oracle 128×8 11751
h100 sd2-512px MLPerf 4.1: eos 8×32 1099 fitted; eos 64×16 7976; eos 512×4 39320 fitted
h100 sd2-512px MLPerf 4.1: Dell 4×64 580; Fujitsu 4×64 574; Supermicro 8×32 1084
h200 sd2-512px MLPerf 5.0: Dell 8×32 1148 fitted; HPE 8×64 1197 fitted; Dell 16×32 2273
h200 sd2-512px MLPerf 5.0: HPE 32×32 4467; Lenovo 32×32 4330
b200 flux-256px MLPerf 5.1: Oracle 16×32 820.6 fitted; Florida 16×32 824.7; Florida 32×32 1661.5; Nebius 32×32 1647.4
b200 flux-256px MLPerf 5.1: Florida 64×32 3250.8; Florida 72×32 3656.6; Oracle 72×32 3685.8; Florida 128×32 6306.4
gb200 flux-256px MLPerf 5.1: tyche 16×32 902.7 fitted; tyche 72×32 4013.2
gb200 flux-256px MLPerf 5.1: tyche 512/4×16 11130.4 fitted; hsg 1152/4×8 17336.3
gb300 flux-256px MLPerf 5.1: theia 16×64 1114.7 fitted; theia 72×32 4509.7 fitted; Supermicro 72×32 4459.1
gb300 flux-256px MLPerf 5.1: theia 512/4×16 11969.6
a100-256px sd2-256px MosaicML: 8×256 1100 fitted; 16×128 2180; 32×64 4080; 64×32 8530; 128×16 11600
a100 sd2-512px MosaicML: 8×256 290 fitted; 16×128 585; 32×64 1195; 64×32 2340; 128×16 4590
"""
"""GPU, model and source: system, GPUs (/ the tensor axis) × images per GPU (or per tensor axis), images/s."""

FITTED = ("BYTES_PER_PARAMETER", "HOP_S", "SPLIT_S")
"""Constants of the model that are fitted, beside `Gpu.tflops`."""


@dataclass(frozen=True)
class Published:
    """Steady images/s that somebody measured."""

    name: str
    gpu: str
    work: str
    gpus: int
    tensor: int
    batch: int
    images_per_s: float
    is_fitted: bool

    def predicted(self, gpu: Gpu) -> float:
        """Images/s. MLPerf's entries shard the optimizer; MosaicML's A100s shard gradients too, and accumulate
        micro-batches of 16. An NVL72 rack that has all GPUs of a run is one node."""
        if gpu.per_node > 8 and self.gpus <= 72:
            gpu = replace(gpu, per_node=72)
        ranks, batch = self.gpus // self.tensor, self.batch
        layout = Layout("deepspeed_1", Mesh(ranks, 1, self.tensor))
        if "MosaicML" in self.name:
            layout, batch = Layout("fsdp", Mesh(1, ranks, 1)), 16
        ahead = self.work.startswith("flux")  # weights are gathered while the forward pass runs
        step = predict(WORK[self.work], gpu, layout, batch, self.batch // batch, ahead)
        return ranks * self.batch / step.seconds

    def error(self) -> float:
        """Of the model, relative."""
        return self.predicted(GPUS[self.gpu]) / self.images_per_s - 1


def rows() -> Iterator[Published]:
    """Everything that is published."""
    for line in _ROWS.strip().splitlines():
        head, _, tail = line.partition(": ")
        gpu, work, source = head.split(" ", 2)
        for run in tail.split("; "):
            found = re.fullmatch(r"(?:(\w+) )?(\d+)(?:/(\d+))?×(\d+) ([\d.]+)( fitted)?", run)
            assert found is not None, run
            system, gpus, tensor, batch, rate, fitted = found.groups()
            name = f"{source} {system or ''}".strip()
            yield Published(name, gpu, work, int(gpus), int(tensor or 1), int(batch), float(rate), bool(fitted))


def fit() -> dict[str, float]:
    """Constant or GPU → its value, by least squares of the relative errors of the fitted rows."""
    chosen = [row for row in rows() if row.is_fitted]
    start = {name: getattr(scaling_model, name) for name in FITTED}

    def residuals(factors: Sequence[float]) -> list[float]:
        for name, factor in zip(FITTED, factors, strict=False):
            setattr(scaling_model, name, start[name] * factor)
        rates = dict(zip(GPUS, factors[len(FITTED) :], strict=True))
        gpus = {name: replace(gpu, tflops=gpu.tflops * rates[name]) for name, gpu in GPUS.items()}
        return [float(np.log(row.predicted(gpus[row.gpu]) / row.images_per_s)) for row in chosen]

    try:
        factors = least_squares(residuals, np.ones(len(FITTED) + len(GPUS))).x
    finally:
        for name, value in start.items():
            setattr(scaling_model, name, value)
    values = [*start.values(), *(gpu.tflops for gpu in GPUS.values())]
    return {name: v * f for name, v, f in zip((*FITTED, *GPUS), values, factors, strict=True)}


def table() -> str:
    """What is published against what the model gives."""
    lines = ["| run | GPUs | images per GPU | images/s per GPU | model | error |", "|---|---|---|---|---|---|"]
    for row in rows():
        error = "fitted" if row.is_fitted else f"{row.error():+.1%}"
        split = f" (tensor {row.tensor})" if row.tensor > 1 else ""
        model = row.predicted(GPUS[row.gpu]) / row.gpus
        lines.append(
            f"| {row.name}, {row.gpu.partition('-')[0].upper()}, {row.work} | {row.gpus:,}{split} | "
            f"{row.batch / row.tensor:g} | {row.images_per_s / row.gpus:.1f} | {model:.1f} | {error} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    for name, value in fit().items():
        print(f"{name} {value:.4g}")
    print(table())
