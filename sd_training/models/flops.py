"""Floating-point operations of a picture, counted on networks without weights.

A multiply-add counts as two; a backward pass as two forward passes; recomputation not at all.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from sd_training.config.schema import Config
from sd_training.data.order.buckets import training_sizes
from sd_training.models.families import load_family
from sd_training.models.family import Family, blank_batch

META = torch.device("meta")


def flops(forward: Callable[[], Any]) -> int:
    """Of matrix products, convolutions and attention in a forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward()
    return int(counter.get_total_flops())


def forward_flops(family: Family, height: int, width: int) -> int:
    """FLOPs of the denoiser's forward pass for one picture [pixels].

    Args:
        family: on the meta device.
    """
    noised, conditioning = blank_batch(family, height, width, 1, META)
    return flops(lambda: family.predict(family.denoiser, noised, conditioning))


def autoencoder_flops(family: Family, height: int, width: int) -> int:
    """FLOPs of encoding one picture [pixels]; `family` is on the meta device."""
    return flops(partial(family.posterior, torch.zeros(1, 3, height, width, device=META)))


def text_flops(family: Family, names: Iterable[str]) -> int:
    """FLOPs of these text encoders for one caption; `family` is on the meta device."""
    lengths = {name: family.tokenizers()[name].length for name in names}
    tokens = {name: torch.zeros(1, length, dtype=torch.long, device=META) for name, length in lengths.items()}
    return sum(flops(partial(family.text_network(name), input_ids=own)) for name, own in tokens.items())


def picture_flops(
    family: Family, height: int, width: int, texts: int, *, has_adapters: bool, trains_text: bool, has_vae: bool = True
) -> tuple[int, int]:
    """FLOPs of frozen encoders, and of what is trained, for one picture [pixels] in a training step. What is trained
    counts three times its forward pass; with adapters, which do not count, twice: frozen weights have no gradient.

    Args:
        family: on the meta device.
        texts: `text_flops` of the text encoders that run.
        has_vae: whether the autoencoder runs.
    """
    passes, training = 2 if has_adapters else 3, forward_flops(family, height, width)
    encoding = autoencoder_flops(family, height, width) if has_vae else 0
    return (encoding, passes * (training + texts)) if trains_text else (encoding + texts, passes * training)


def encoding_share(config: Config) -> float:
    """Share of the frozen encoders in the FLOPs of a picture of the largest bucket.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
    """
    family = load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)
    height, width = max(training_sizes(config.dataset.params).sizes, key=lambda size: size[0] * size[1])
    model, texts = config.model, text_flops(family, family.tokenizers())
    encoding, training = picture_flops(
        family, height, width, texts, has_adapters=bool(model.lora.rank), trains_text=model.trains_text
    )
    return encoding / (encoding + training)
