"""Bytes that a forward pass keeps for the backward pass, counted on the real graph without computing anything.

The network runs on fake tensors, which have shapes, types and storages and no memory. Every storage that autograd saves
is counted once. torch's own `MemTracker` finds the same bytes, but takes a minute where this takes a second.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sd_training.models.cost import blank_batch
from sd_training.models.fake import DEVICE, cuda_autocast, fake_copy
from sd_training.models.family import Family

OUTSIDE = -1
"""Stands for the network's own part, outside its repeated blocks."""
KEPT_BY_SELECTIVE = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operations of aten whose results `gradient_checkpointing: selective` keeps."""


@dataclass
class _Storage:
    """What is known of one storage; blocks by number, `OUTSIDE` for none."""

    storage: torch.UntypedStorage
    saved_in: set[int] = field(default_factory=set)
    input_of: set[int] = field(default_factory=set)
    product_of: set[int] = field(default_factory=set)


class Recorder:
    """Follows one forward pass: which storages are saved where, which are inputs of blocks, which are products.

    Args:
        networks: whose parameters and buffers do not count.
        blocks: the repeated blocks.
    """

    def __init__(self, networks: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self._inside = [OUTSIDE]
        self._own = {t.untyped_storage()._cdata for n in networks for t in (*n.parameters(), *n.buffers())}
        self._seen: dict[int, _Storage] = {}  # storages are held, so that no address is used twice

    @property
    def storages(self) -> list[_Storage]:
        """In the order in which they were first met, which does not depend on the number of samples."""
        return list(self._seen.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward passes inside this scope."""
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                for handle in self._hooks(number, block):
                    stack.callback(handle.remove)
            stack.enter_context(_Products(self))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor))
            yield

    def _hooks(self, number: int, block: nn.Module) -> Iterator[Any]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
                self._mark(tensor, "input_of", number)
            self._inside.append(number)

        def leave(*_: Any) -> None:
            self._inside.pop()

        yield block.register_forward_pre_hook(enter, with_kwargs=True)
        yield block.register_forward_hook(leave)

    def _save(self, tensor: Tensor) -> Tensor:
        self._mark(tensor, "saved_in", self._inside[-1])
        return tensor

    def product(self, tensor: Tensor) -> None:
        """Notes a result that selective recomputation would keep."""
        if self._inside[-1] != OUTSIDE:
            self._mark(tensor, "product_of", self._inside[-1])

    def _mark(self, tensor: Tensor, role: str, number: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            getattr(self._seen.setdefault(storage._cdata, _Storage(storage)), role).add(number)


class _Products(TorchDispatchMode):
    """Tells a recorder of the results of matrix products and attention."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in KEPT_BY_SELECTIVE:
            for tensor in (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)):
                self.recorder.product(tensor)
        return results


@dataclass(frozen=True)
class Saved:
    """One storage of the graph."""

    fixed_bytes: int
    """Whatever the number of samples; almost all of it copies of weights that autocast makes."""
    sample_bytes: int
    """Per sample."""
    saved_in: frozenset[int]
    """Blocks whose backward pass reads it, `OUTSIDE` among them."""
    input_of: frozenset[int]
    product_of: frozenset[int]


@dataclass(frozen=True)
class Activations:
    """What lives at each moment that may be the worst one: (fixed bytes, bytes per sample)."""

    moments: tuple[tuple[int, int], ...]

    def num_bytes(self, samples: int, *, has_copies: bool = True) -> int:
        """At the worst moment.

        Args:
            samples: micro-batch.
            has_copies: whether autocast makes narrow copies of the weights; not where the weights it meets are narrow.
        """
        return max(fixed * has_copies + per_sample * samples for fixed, per_sample in self.moments)


@dataclass(frozen=True)
class Graph:
    """Everything that a forward pass saves, from which any choice of recomputation follows."""

    saved: tuple[Saved, ...]
    num_blocks: int

    def activations(self, recompute: bool | str = False, every: int = 1) -> Activations:
        """Bytes under `model.gradient_checkpointing` and `gradient_checkpointing_every`.

        A recomputed block keeps its inputs (Chen et al. 2016, arXiv:1604.06174), `selective` its products as well. The
        worst moment is the end of the forward pass, when autocast still holds its copies of all weights, or the
        backward pass of one recomputed block, when all that this block saves is there again.
        """
        recomputed = frozenset(range(0, self.num_blocks, every)) if recompute else frozenset()
        kept, extra = Counter[str](), {block: Counter[str]() for block in recomputed}
        every_fixed = 0
        for one in self.saved:
            own = {"fixed": one.fixed_bytes, "sample": one.sample_bytes}
            is_product = recompute == "selective" and one.product_of & recomputed
            if one.saved_in - recomputed or one.input_of & recomputed or is_product:
                kept.update(own)
            else:
                for block in one.saved_in:
                    extra[block].update(own)
            every_fixed += one.fixed_bytes if one.saved_in else 0
        at_work = ((kept["fixed"] + more["fixed"], kept["sample"] + more["sample"]) for more in extra.values())
        return Activations(((every_fixed, kept["sample"]), *at_work))


def graph_of(networks: Sequence[nn.Module], blocks: Sequence[nn.Module], forward: Callable[[int], object]) -> Graph:
    """The graph of `forward(samples)`, which is run for two and for three samples.

    Not for one: where a batch of one may be viewed, a larger one is copied.
    """
    runs = []
    for samples in (2, 3):
        recorder = Recorder(networks, blocks)
        with recorder.recording():
            result = forward(samples)
        del result
        runs.append(recorder.storages)
    return Graph(tuple(_saved(of_two, of_three) for of_two, of_three in zip(*runs, strict=True)), len(blocks))


def _saved(of_two: _Storage, of_three: _Storage) -> Saved:
    """bytes(n) = fixed + n · per sample, from n = 2 and n = 3."""
    two, three = of_two.storage.nbytes(), of_three.storage.nbytes()
    marks = (frozenset(of_two.saved_in), frozenset(of_two.input_of), frozenset(of_two.product_of))
    return Saved(3 * two - 2 * three, three - two, *marks)


def family_graph(
    family: Family,
    size: tuple[int, int],
    *,
    precision: str,
    is_text_trained: bool = False,
    has_bf16_weights: bool = False,
) -> Graph:
    """The graph of a family's training step, without its loss.

    Args:
        family: with or without weights; it is not changed.
        size: height and width [pixels].
        precision: no, bf16 or fp16.
        is_text_trained: count the text encoders too.
        has_bf16_weights: the trained weights are narrow already, so that autocast does not copy them.
    """
    with FakeTensorMode(), cuda_autocast(precision):
        fake = fake_family(family, is_text_trained)
        networks = [network.train() for network in fake.trained_networks(is_text_trained).values()]
        if has_bf16_weights:
            for parameter in (p for network in networks for p in network.parameters()):
                parameter.data = parameter.data.to(torch.bfloat16)
        return graph_of(networks, fake.blocks(), lambda samples: run_family(fake, size, samples, is_text_trained))


def vae_graph(vae: AutoencoderKL, size: tuple[int, int], *, precision: str) -> Graph:
    """The graph of a training step of an autoencoder, without its loss; arguments as of `family_graph`."""
    with FakeTensorMode(), cuda_autocast(precision):
        fake: Any = fake_copy(vae).train()
        encoder, decoder = fake.encoder, fake.decoder
        # What diffusers recomputes.
        blocks = [*encoder.down_blocks, encoder.mid_block, decoder.mid_block, *decoder.up_blocks]

        def forward(samples: int) -> Tensor:
            posterior = fake.encode(torch.zeros(samples, fake.config.in_channels, *size, device=DEVICE)).latent_dist
            answer: Tensor = fake.decode(posterior.mean + posterior.std).sample
            return answer

        return graph_of([fake], blocks, forward)


def fake_family(family: Family, is_text_trained: bool = False) -> Family:
    """The family with copies of its trained networks; called where tensors are fake."""
    fake = copy.copy(family)
    trained = family.trained_networks(is_text_trained)
    fake.parts = {**family.parts, **{name: fake_copy(network) for name, network in trained.items()}}
    return fake


def run_family(family: Family, size: tuple[int, int], samples: int, is_text_trained: bool = False) -> list[Any]:
    """A forward pass of what is trained, on blank input on `DEVICE`."""
    results: list[Any] = []
    noised, conditioning = blank_batch(family, *size, samples, DEVICE)
    if is_text_trained:
        for encoder in family.text_encoders().values():
            length = encoder.config.max_position_embeddings
            results.append(encoder(torch.zeros(samples, length, dtype=torch.long, device=DEVICE)))
        conditioning.states = [states.requires_grad_() for states in conditioning.states]
    return [*results, family.predict(family.denoiser, noised, conditioning)]
