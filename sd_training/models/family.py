"""What a model family is: its parts, how captions become conditioning, and how the denoiser predicts from it.

A new family is one file with one subclass, listed in `families/table.py` and `config/model_schema.py`.

At the end: tensor parallelism of transformer blocks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). The first
matrix of a pair is sharded by columns, the second by rows, so that one sum per pair is all that processes exchange.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from sd_training.config.schema import OPTIONAL_PARTS, FamilyName, ModelConfig, ObjectiveConfig, PredictionType, is_set
from sd_training.data.order.buckets import size_problems
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from sd_training.models.schedulers import Schedulers
from sd_training.types import Conditioning, LatentGrid, NoisedBatch, PixelBatch

FLOW_ONLY: tuple[PredictionType, ...] = ("flow_prediction",)
TEXT_PARTS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2", "text_encoder_3": "tokenizer_3"}
"""Text encoder → its tokenizer; parts may also lack the later ones."""


class Family(ABC):
    """A pipeline's parts, and what they mean to each other.

    Args:
        parts: networks and tokenizers by their name in the pipeline; the very same objects, not copies.
        schedulers: objective, noise schedule and sampler.
        null_is_zeros: dropped captions are zeros instead of the encoded empty caption.
    """

    name: ClassVar[FamilyName]
    pipeline_class: ClassVar[type[DiffusionPipeline]]
    denoiser_part: ClassVar[str]
    block_classes: ClassVar[tuple[str, ...]]
    """Classes of the denoiser's repeated blocks: what is sharded, recomputed and compiled one by one."""
    classes: ClassVar[Mapping[str, str]] = {}
    """Part → class, where it is not the part's usual one, and of every text encoder whose outputs `encode` reads."""
    predictions: ClassVar[tuple[PredictionType, ...]] = ("epsilon", "v_prediction", "sample", "flow_prediction", "edm")
    """Prediction types that the family's pipeline can sample."""
    text_lengths: ClassVar[Mapping[str, int]] = {}
    """Text encoder → tokens per caption, where it is not the tokenizer's `model_max_length`."""
    has_lowercase_text: ClassVar[bool] = False
    """Whether the pipeline writes captions in small letters."""
    may_null_be_zeros: ClassVar[bool] = False
    has_micro_conditioning: ClassVar[bool] = False
    may_train_text: ClassVar[bool] = False

    def __init__(self, parts: Mapping[str, Any], schedulers: Schedulers, null_is_zeros: bool = False) -> None:
        self.parts, self.schedulers, self.null_is_zeros = dict(parts), schedulers, null_is_zeros

    @classmethod
    def listed_parts(cls, model: ModelConfig, index: Mapping[str, Any], *, seed: int, meta: bool) -> dict[str, Any]:
        """Parts that have no option of their own under `model`; `index` is that of `model.pretrained`, or empty."""
        return {}

    @classmethod
    def optional_parts(cls, model: ModelConfig, index: Mapping[str, Any]) -> list[str]:
        """Parts that this pipeline has although its family could do without."""
        names = OPTIONAL_PARTS.get(cls.name, ())
        return [name for name in names if (is_stored(index.get(name)) if index else is_set(getattr(model, name)))]

    @classmethod
    def class_of_part(cls, part: str, index: Mapping[str, Any]) -> str | None:
        """The class of a part for which the config names none; None is the part's usual one."""
        return cls.classes.get(part)

    @property
    def denoiser(self) -> Any:
        """The network that is trained. (Typed as Any: the names that diffusers exports are placeholders to a type
        checker.)"""
        return self.parts[self.denoiser_part]

    def blocks(self) -> list[nn.Module]:
        """The denoiser's repeated blocks, in the order of its modules; none is inside another."""
        return [module for module in self.denoiser.modules() if type(module).__name__ in self.block_classes]

    @property
    def vae(self) -> AutoencoderKL:
        """The image autoencoder."""
        return self.parts["vae"]

    @property
    def objective(self) -> ObjectiveConfig:
        """The options of the objective, with nothing left to a preset."""
        return self.schedulers.objective

    def text_encoders(self) -> dict[str, Any]:
        """By name, in the order in which they are concatenated."""
        return {name: self.parts[name] for name in TEXT_PARTS if self.parts.get(name) is not None}

    def networks(self) -> dict[str, Any]:
        """Everything with weights; the denoiser first."""
        return {self.denoiser_part: self.denoiser, "vae": self.vae, **self.text_encoders()}

    def trained_networks(self, train_text_encoder: bool) -> dict[str, Any]:
        """By name; the denoiser first."""
        return {self.denoiser_part: self.denoiser, **(self.text_encoders() if train_text_encoder else {})}

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """How a block's matrices are sharded over `size` processes; sets the layers' local number of heads.

        Raises:
            ConfigError: this family's blocks cannot be sharded so.
        """
        raise ConfigError(
            f"distributed.mesh.tensor: is {size}, but {self.name} has no plan for tensor parallelism; use "
            "distributed.mesh.fsdp"
        )

    def check_tensor_axis(self, size: int) -> None:
        """Checks whether the blocks can be sharded over `size` processes; the blocks are of no use afterwards.

        Raises:
            ConfigError: they cannot.
        """
        for block in self.blocks() if size > 1 else ():
            self.tensor_plan(block, size)

    def with_parts(self, parts: Mapping[str, Any]) -> "Family":
        """The same family with some parts replaced."""
        other = copy(self)
        other.parts = {**self.parts, **parts}
        return other

    def tokenizers(self) -> dict[str, Tokenizer]:
        """Text encoder → caption → tokens."""
        lengths, lower = self.text_lengths, self.has_lowercase_text
        return {
            name: Tokenizer(self.parts[TEXT_PARTS[name]], lengths.get(name), is_lowercase=lower)
            for name in self.text_encoders()
        }

    @property
    def patch_size(self) -> int:
        """Latent cells along one side of an image token, 1 of UNets; sides of latents are multiples of it."""
        return int(self.denoiser.config.get("patch_size", 1))

    def latent_grid(self) -> LatentGrid:
        """How the autoencoder maps pictures to latents."""
        return latent_grid(self.vae)

    def scaled(self, latents: Tensor) -> Tensor:
        """What the pipeline undoes before it decodes."""
        return (latents - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    @abstractmethod
    def encode(self, batch: PixelBatch) -> Conditioning:
        """The denoiser's conditioning for a batch. Runs the text encoders as they are (device, autocast, autograd)."""

    @abstractmethod
    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """[B, C, h, w] the denoiser's output, in the prediction type of the objective."""

    def pipeline(self) -> DiffusionPipeline:
        """The parts as a pipeline of diffusers; the very same modules."""
        parts = {**self.pipeline_options(), **self.parts}
        return self.pipeline_class(**parts, scheduler=self.schedulers.sampler)

    def pipeline_options(self) -> dict[str, Any]:
        """Arguments of the pipeline beside its parts; a part wins over an option of its name."""
        return {}

    def text_shape(self) -> tuple[int, int, int]:
        """Tokens L and width D of the text states, and width of the pooled vector (0: none).

        A family with several sequences of states has `blank_conditioning` of its own instead.
        """
        raise NotImplementedError

    def blank_conditioning(self, count: int, device: torch.device) -> Conditioning:
        """Conditioning of the right shapes for `count` samples, all zeros: to count FLOPs and memory."""
        length, width, pooled = self.text_shape()
        states = [torch.zeros(count, length, width, device=device)]
        return Conditioning(states, pooled=torch.zeros(count, pooled, device=device) if pooled else None)

    @abstractmethod
    def fit_problems(self) -> list[str]:
        """How parts do not fit together, one sentence each."""

    def freeze_unread_text(self) -> None:  # noqa: B027 - most families read everything
        """Freezes parameters of trained text encoders that `encode` reads nothing from: they have no gradient, which
        distributed training takes for a mistake."""

    def set_default_size(self, resolution: int) -> None:
        """Makes the exported pipeline draw at the size that was trained [pixels] by default.

        Only of UNets: in transformers the same setting takes part in the embedding of positions.
        """
        if self.denoiser_part == "unet":
            self.denoiser.register_to_config(sample_size=resolution // downscale_factor(self.vae))

    def size_problems(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """A problem for each height or width [pixels] that the model cannot take."""
        return size_problems(downscale_factor(self.vae), sizes, self.patch_size)

    def _channel_problems(self, in_key: str = "in_channels", out_key: str | None = "out_channels") -> list[str]:
        latent_channels, config = self.vae.config.latent_channels, self.denoiser.config
        keys = [key for key in (in_key, out_key) if key is not None and config[key] is not None]
        return [
            f"model.{self.denoiser_part}.params.{key}: {config[key]}, but the autoencoder has {latent_channels} latent "
            "channels"
            for key in keys
            if config[key] != latent_channels
        ]

    def _vocabulary_problems(self) -> list[str]:
        problems, tokenizers = [], self.tokenizers()
        for name, encoder in self.text_encoders().items():
            tokenizer, size = self.parts[TEXT_PARTS[name]], encoder.config.vocab_size
            if len(tokenizer) > size:
                problems.append(f"model.{TEXT_PARTS[name]}: {len(tokenizer)} tokens, but {name} knows {size}")
            length, most = tokenizers[name].length, getattr(encoder.config, "max_position_embeddings", None)
            if most is not None and length > most:
                problems.append(f"model.{TEXT_PARTS[name]}: {length} tokens per caption, but {name} takes {most}")
        return problems

    def class_problems(self) -> list[str]:
        """Text encoders of a class that the family cannot read; checked before anything else."""
        problems = []
        for name, encoder in self.text_encoders().items():
            if self.parts.get(TEXT_PARTS[name]) is None:
                problems.append(f"model.{TEXT_PARTS[name]}: is required with model.{name}")
            wanted = self.classes.get(name, type(encoder).__name__)
            if type(encoder).__name__ != wanted:
                problems.append(f"model.{name}: is a {type(encoder).__name__}, but {self.name} needs a {wanted}")
        return problems

    def _width_problem(self, key: str, wanted: int, who: str) -> list[str]:
        """One sentence if the denoiser's setting `key` is not `wanted`; `who`: what is so wide, with its verb."""
        given = self.denoiser.config[key]
        return [] if given == wanted else [f"model.{self.denoiser_part}.params.{key}: {given}, but {who} {wanted} wide"]


def is_stored(entry: Any) -> bool:
    """Whether a pair of library and class in `model_index.json` names something; `[null, null]` is a part left out."""
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and entry[1] is not None


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels per latent cell along one side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_grid(vae: AutoencoderKL) -> LatentGrid:
    """Latent channels and downscale factor."""
    return LatentGrid(int(vae.config.latent_channels), downscale_factor(vae))


_ATTENTION_IN = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_ATTENTION_OUT = ("to_out.0", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def attention_plan(block: nn.Module, names: Iterable[str], size: int, head_axis: int) -> dict[str, ParallelStyle]:
    """diffusers' attention layers, sharded by heads; sets the layers' local number of heads.

    Args:
        names: attention layers of the block; those it lacks are left out.
        size: processes that shard a block.
        head_axis: axis of the heads where queries and keys are normed. Their norms see the local heads only, so the
            gradients of their weights are summed over the processes.

    Raises:
        ConfigError: the heads cannot be sharded evenly.
    """
    plan: dict[str, ParallelStyle] = {}
    for name in _present(block, names):
        layer: Any = block.get_submodule(name)
        if layer.heads % size:
            raise ConfigError(
                f"distributed.mesh.tensor: is {size}, but the attention layers have {layer.heads} heads, which it does "
                "not divide"
            )
        layer.heads //= size
        plan |= {f"{name}.{matrix}": ColwiseParallel() for matrix in _present(layer, _ATTENTION_IN)}
        plan |= {f"{name}.{matrix}": RowwiseParallel() for matrix in _present(layer, _ATTENTION_OUT)}
        norms = _present(layer, _NORMS)
        plan |= {f"{name}.{norm}": SequenceParallel(sequence_dim=head_axis, use_local_output=True) for norm in norms}
    return plan


def mlp_plan(block: nn.Module, first: Iterable[str], second: Iterable[str]) -> dict[str, ParallelStyle]:
    """Matrices into the hidden width by columns, out of it by rows."""
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _present(block, first)}
    return plan | {name: RowwiseParallel() for name in _present(block, second)}


def _present(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the submodules that there are."""
    found = dict(module.named_modules())
    return [name for name in names if name in found]
