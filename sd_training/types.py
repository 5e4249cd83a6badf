"""What flows from disk to loss. Shape letters: B samples, C latent channels, H W pixels, h w latent cells,
L text tokens, D text width."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
"""Of tensors in a block of memory [bytes]: of a cache line, and of AVX-512."""


@dataclass(frozen=True)
class LatentGrid:
    """How an autoencoder maps pictures to latents."""

    channels: int
    """C."""
    downscale: int
    """Pixels per latent cell along one side."""

    def shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the latents of a picture [pixels]."""
        return self.channels, height // self.downscale, width // self.downscale


class Form(NamedTuple):
    """What a tensor of a batch is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_channels_last: bool = False
    """Order in memory of four axes."""

    @property
    def nbytes(self) -> int:
        """Size [bytes]."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """What this tensor is like; contiguous, or in the order of channels-last."""
        is_channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(tensor.shape), tensor.dtype, is_channels_last and not tensor.is_contiguous())

    def inside(self, memory: Tensor) -> Tensor:
        """The tensor at the beginning of a block of bytes."""
        own = memory[: self.nbytes].view(self.dtype)
        if self.is_channels_last:
            count, channels, height, width = self.shape
            return own.view(count, height, width, channels).permute(0, 3, 1, 2)
        return own.view(self.shape)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The same memory as an array; bf16, which numpy lacks, as the integers of the same bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@dataclass
class Draws:
    """The random numbers of the forward process, one set per sample.

    Every random number that training needs is drawn by the loader from a generator keyed by the sample's position in
    the global order, so it does not depend on ranks, workers, micro-batch size or device (design contract 3).
    """

    noise: Tensor
    """[B, C, h, w] float32 standard normal ε; empty (B, 0) for autoencoder training."""
    timestep_draw: Tensor
    """[B] float32, uniform in [0, 1)."""
    offset_noise: Tensor
    """[B, C] float32 standard normal η of offset noise; empty (B, 0) where there is none."""
    input_noise: Tensor
    """[B, C, h, w] float32 standard normal ξ of input perturbation; empty (B, 0) where there is none."""
    mask: Tensor
    """[B, 1, H, W] uint8, how much each pixel counts in a masked loss, 255 fully; empty (B, 0) where there is none."""


@dataclass
class PixelBatch(Draws):
    """A micro-batch as the loader delivers it."""

    pixels: Tensor
    """[B, 3, H, W] uint8 in 0..255; the module scales it to [-1, 1] on the device."""
    tokens: dict[str, Tensor]
    """Text encoder → [B, L] int64 caption tokens, of the empty caption where that encoder was dropped."""
    token_masks: dict[str, Tensor]
    """Text encoder → [B, L] bool, false where a token only fills up."""
    dropped: dict[str, Tensor]
    """Conditioner (text encoders, `size`, `crop`) → [B] bool, true where it is replaced by its null conditioning."""
    posterior_noise: Tensor
    """[B, C, h, w] float32 standard normal: the draw from the autoencoder's posterior."""
    original_size: Tensor
    """[B, 2] int64 height and width of the upright image file [pixels]."""
    crop_top_left: Tensor
    """[B, 2] int64 top and left edge of the cut in the resized image, as the (perhaps mirrored) picture shows it."""
    target_size: Tensor
    """[B, 2] int64 height and width of the picture."""
    positions: Tensor
    """[B] int64 position of each sample in the global order of the run."""
    sample_ids: Tensor
    """[B] int64 index of each sample in the data set's index; further data sets are counted on."""
    moments: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """[B, 2C, h, w] mean and standard deviation of the autoencoder's posterior, in the type they are stored in, where a
    cache delivers them; `pixels` are then empty (B, 0), and where it does not these."""
    text_states: dict[str, Tensor] = field(default_factory=dict)
    """Text encoder → [B, L, D] states that a cache delivers, empty (B, 0) where only its pooled vector is read; without
    the encoders that run, and `tokens` without those that a cache delivers."""
    text_pooled: dict[str, Tensor] = field(default_factory=dict)
    """Text encoder → [B, P] pooled vectors, likewise."""

    def to(self, device: torch.device) -> "PixelBatch":
        """The same batch on `device`; copies from pinned memory do not wait for the host."""
        if self.positions.device == device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def copied(self, *, is_pinned: bool) -> "PixelBatch":
        """The same batch in a block of its own, perhaps page-locked; of a batch that `allocate` has made."""
        storage = self.positions.untyped_storage()
        block = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
        own = block.copy_(_bytes_of(storage)).untyped_storage()

        def at_its_place(tensor: Tensor) -> Tensor:
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            return torch.empty(0, dtype=tensor.dtype).set_(own, *place)

        return self._map(at_its_place)

    @classmethod
    def allocate(cls, forms: Mapping[str, Any], memory: Callable[[int], Tensor]) -> "PixelBatch":
        """A batch to be filled, in one block of memory: a loader process sends one file descriptor, not one per tensor.

        Args:
            forms: field → `Form`, or dict of them.
            memory: gives a block of so many bytes, or more.
        """
        leaves = [form for v in forms.values() for form in (v.values() if isinstance(v, dict) else (v,))]
        sizes = [-(-form.nbytes // _ALIGNMENT) * _ALIGNMENT for form in leaves]
        starts, block = accumulate(sizes, initial=0), memory(sum(sizes))
        each = partial(each_leaf, lambda form: form.inside(block[next(starts) :]))
        return cls(**{name: each(value) for name, value in forms.items()})

    def packed(self) -> tuple[dict[str, Any], Tensor]:
        """The forms of `allocate`, and the block of bytes that it fills with these tensors."""
        forms = {name: each_leaf(Form.of, value) for name, value in vars(self).items()}
        copy = PixelBatch.allocate(forms, private_memory)
        for own, given in zip(copy.tensors(), self.tensors(), strict=True):
            own.copy_(given)
        return forms, _bytes_of(copy.positions.untyped_storage())

    def tensors(self) -> list[Tensor]:
        """All of them, in the order of `allocate`."""
        return [leaf for v in vars(self).values() for leaf in (v.values() if isinstance(v, dict) else (v,))]

    def arrays(self) -> dict[str, Any]:
        """Field → array of the same memory, or dict of them."""
        return {f.name: each_leaf(as_array, getattr(self, f.name)) for f in fields(self)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PixelBatch":
        return PixelBatch(**{f.name: each_leaf(change, getattr(self, f.name)) for f in fields(self)})


def private_memory(num_bytes: int) -> Tensor:
    """A block of bytes of this process."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def shared_memory(num_bytes: int) -> Tensor:
    """A block of bytes that other processes can map, as torch's own `collate` makes it in loader processes."""
    return _bytes_of(torch.UntypedStorage._new_shared(num_bytes))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def each_leaf(change: Callable[[Any], Any], value: Any) -> Any:
    """A field of a batch with something changed: what it is, or each value of the dict that it is."""
    return {name: change(own) for name, own in value.items()} if isinstance(value, dict) else change(value)


_NOT_READ = torch.empty(0)


class TextOutput(NamedTuple):
    """What is read from one text encoder."""

    states: Tensor = _NOT_READ
    """[B, L, D]; empty where only the pooled vector is read."""
    pooled: Tensor = _NOT_READ
    """[B, P]; empty where only states are read."""


@dataclass
class Conditioning:
    """Conditioning passed to the denoiser. The model family decides which fields are set."""

    states: list[Tensor]
    """[B, L_i, D_i] hidden states of text; one entry, unless the denoiser keeps its text encoders apart."""
    masks: list[Tensor | None] = field(default_factory=list)
    """[B, L_i] bool beside each of `states`, false for tokens that the denoiser must not look at; None: it may."""
    pooled: Tensor | None = None
    """[B, P] one vector for the whole caption."""
    size_numbers: Tensor | None = None
    """[B, 6] float32 original height and width, crop top and left, target height and width [pixels]; NaN where
    unknown."""


@dataclass
class NoisedBatch:
    """One draw of the objective: the input of the denoiser, its target, and the weight of the error."""

    noised_latents: Tensor
    """[B, C, h, w], scaled as the denoiser expects it."""
    timesteps: Tensor
    """[B] the noise level passed to the denoiser: int64 in 0..T-1, or float32 (see `Levels.model_time`)."""
    target: Tensor
    """[B, C, h, w]."""
    weight: Tensor
    """[B] float32."""
    signal: Tensor
    """[B] α of x_t = α x_0 + σ ε."""
    sigma: Tensor
    """[B] σ."""
    mask: Tensor | None = None
    """[B, 1, h, w] in [0, 1], how much each latent cell counts; None: all of them fully."""
