"""One forward and backward pass of a tiny family, and the memory that its activations take."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sd_training.config.schema import ConditioningConfig, ModelConfig, ObjectiveConfig
from sd_training.models.families import load_family
from sd_training.models.family import Family, latent_grid
from sd_training.types import NoisedBatch
from tests.family_makers import save_pipeline


def load_tiny(name: str, folder: Path) -> Family:
    """A family of random weights in training mode; no weight is zero."""
    pipeline = folder if folder.exists() else save_pipeline(name, folder)
    family = load_family(ModelConfig(pretrained=str(pipeline)), ObjectiveConfig(), ConditioningConfig(), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in family.denoiser.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    family.denoiser.train()
    return family


def tokens_of(family: Family, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """[B, L] tokens and mask of captions, for the only text encoder."""
    rows = [family.tokenizers()["text_encoder"].encode(caption) for caption in captions]
    tokens, masks = (torch.stack([torch.from_numpy(value) for value in column]) for column in zip(*rows, strict=True))
    return tokens, masks


def loss_of(family: Family, height: int = 16, width: int = 16, batch: int = 2) -> Tensor:
    """A loss that depends on everything the denoiser is given; the same numbers in every call."""
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(batch, *latent_grid(family.vae).shape(height, width), generator=generator)
    conditioning = family.blank_conditioning(batch, torch.device("cpu"))
    conditioning.states = [torch.randn(s.shape, generator=generator) for s in conditioning.states]
    times = torch.linspace(0.2, 0.8, batch)
    model_times = times if family.name == "flux" else times * 1000
    noised = NoisedBatch(latents, model_times, latents, times, times, times)
    return (family.predict(family.denoiser, noised, conditioning) - latents).square().mean()


def loss_and_gradients(family: Family, **size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the denoiser's parameters by name."""
    family.denoiser.zero_grad()
    loss = loss_of(family, **size)
    loss.backward()
    named = family.denoiser.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


class _Results(TorchDispatchMode):
    """Remembers the storages of all results without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = (reference, storage.nbytes())
        return result


def activation_bytes(family: Family) -> int:
    """What is still in memory of the forward pass when only the loss is held."""
    results = _Results()
    with results:
        loss = loss_of(family)
    gc.collect()
    alive = sum(size for reference, size in results.storages.values() if not reference.expired())
    del loss
    return alive


def saved_bytes(family: Family) -> int:
    """What autograd is given to keep; of compiled blocks that is everything."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(family)
    weights = {p.untyped_storage().data_ptr() for p in family.denoiser.parameters()}
    return sum(size for address, size in sizes.items() if address not in weights)
