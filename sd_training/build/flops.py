"""Floating-point operations: of a picture in a training step, and of known devices per second.

Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) is the first, times pictures per second,
over the second.
"""

import re
from collections.abc import Collection, Mapping
from functools import cached_property, partial

import torch

from sd_training.build.models import Trained, meta_twin
from sd_training.log import get_logger
from sd_training.models.family import Family
from sd_training.models.flops import META, flops, picture_flops, text_flops

log = get_logger(__name__)


class PictureFlops:
    """Height and width [latent cells] → FLOPs of one picture in a training step; None, with one warning, where a
    network cannot be counted. A new size takes about half a second.

    FLUX.1 has 20.4 TFLOP per picture of 256 pixels, which MLPerf's reference rounds to 20.3. Networks are counted as
    copies without weights, made at the first call, so that sharding, compilation and precision do not matter.

    Args:
        trained: what is trained.
        cached: encoders that do not run, because a cache or encoder processes deliver what they give.
    """

    def __init__(self, trained: Trained, cached: Collection[str] = ()) -> None:
        self._trained, self._cached = trained, cached
        self._known: dict[tuple[int, int], float | None] = {}

    def __call__(self, height: int, width: int) -> float | None:
        """See the class."""
        if (height, width) not in self._known:
            try:
                self._known[height, width] = self._count(height, width)
            except Exception as error:  # of code that was not made for the meta device; it costs two columns
                self._known[height, width] = None
                log.warning(f"FLOPs cannot be counted, tflops_per_s and mfu stay empty: {error}")
        return self._known[height, width]

    @cached_property
    def _family(self) -> Family | None:
        family = self._trained.family
        return family and family.with_parts({name: meta_twin(net) for name, net in family.networks().items()})

    @cached_property
    def _texts(self) -> int:
        """Of one caption, which does not depend on the picture's size."""
        assert self._family is not None, "is asked of families only"
        return text_flops(self._family, self._family.tokenizers().keys() - self._cached)

    def _count(self, height: int, width: int) -> float:
        trained = self._trained
        height, width = (side * trained.latent_grid.downscale for side in (height, width))
        if self._family is None:
            pixels = torch.zeros(1, 3, height, width, device=META)
            return 3 * flops(partial(meta_twin(trained.module.network), pixels))
        has_adapters, trains_text = trained.module.has_adapters, len(trained.sharding.roots) > 1
        kinds = {"has_adapters": has_adapters, "trains_text": trains_text, "has_vae": "vae" not in self._cached}
        return sum(picture_flops(self._family, height, width, self._texts, **kinds))


PEAK_TFLOPS: Mapping[str, tuple[float, float, float]] = {
    "H100 PCIe": (756, 378, 51),  # NVIDIA H100 datasheet
    "H100 NVL": (835.5, 417.5, 60),
    "H200 NVL": (835.5, 417.5, 60),  # NVIDIA H200 datasheet
    "H100": (989.5, 494.7, 67),
    "H200": (989.5, 494.7, 67),
    "A100": (312, 156, 19.5),  # NVIDIA A100 datasheet
    "L40S": (362, 183, 91.6),  # NVIDIA L40S datasheet
    "L4": (121, 60, 30.3),  # NVIDIA L4 datasheet
    "A10": (125, 62.5, 31.2),  # NVIDIA A10 datasheet
    "RTX 4090": (165.2, 82.6, 82.6),  # NVIDIA Ada GPU architecture, appendix A; tensor cores add up in fp32
    "RTX 3090": (71, 35.6, 35.6),  # NVIDIA Ampere GA102 GPU architecture, appendix A
}
"""Words of a device's name → TFLOP/s of dense matrices in bf16 and fp16, in TF32, and in fp32; the first match counts.
Datasheets give twice as much, with sparsity."""


def peak_tflops(device: str, precision: str) -> float | None:
    """The peak of a device [TFLOP/s]; None: the table does not know it.

    Args:
        device: as CUDA names it, such as `NVIDIA A100-SXM4-80GB`.
        precision: no, bf16 or fp16.
    """
    words = f" {' '.join(re.split('[ -]+', device))} "
    row = next((row for name, row in PEAK_TFLOPS.items() if f" {name} " in words), None)
    if row is None:
        return None
    return row[0] if precision != "no" else row[2] if torch.get_float32_matmul_precision() == "highest" else row[1]
