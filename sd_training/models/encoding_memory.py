"""Bytes that the frozen autoencoder needs for a moment, before the denoiser's activations exist."""

import torch
from diffusers import AutoencoderKL
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from sd_training.models.fake import DEVICE, cuda_autocast, fake_copy


def encoding_bytes_per_sample(vae: AutoencoderKL, size: tuple[int, int], precision: str) -> int:
    """Peak while pictures are encoded without autograd, by torch's `MemTracker` on fake tensors.

    Args:
        vae: with or without weights; it is not changed.
        size: height and width [pixels].
        precision: fp32, bf16 or fp16.
    """
    one, two = (_peak_bytes(vae, size, precision, samples) for samples in (1, 2))
    return two - one


def _peak_bytes(vae: AutoencoderKL, size: tuple[int, int], precision: str, samples: int) -> int:
    with FakeTensorMode(), cuda_autocast(precision), torch.no_grad():
        fake = fake_copy(vae).eval()
        # Slices and tiles are told to MemTracker by its caller: it follows one call of each layer only.
        fake.disable_slicing()
        fake.disable_tiling()
        pixels = torch.zeros(samples, fake.config.in_channels, *size, device=DEVICE)
        tracker = MemTracker()
        tracker.track_external(fake)
        with tracker:
            fake.encode(pixels)
    return int(tracker.get_tracker_snapshot("peak")[DEVICE]["Total"])
