"""What a model family is: its parts, how captions become conditioning, and how the denoiser predicts from it.

A new family is one file with one subclass, listed in `families/__init__.py` and `config/schema.py`. It says how
captions are encoded, and what else the denoiser is given; the rest are class attributes.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, TypeAlias

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sd_training.config.schema import (
    FAMILY_PARTS,
    OPTIONAL_PARTS,
    ConditioningConfig,
    FamilyName,
    ModelConfig,
    PartConfig,
    PredictionType,
    is_set,
)
from sd_training.data.order.buckets import level_channels, size_problems
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from sd_training.models.load import effective_part
from sd_training.models.schedulers import Schedulers
from sd_training.types import Conditioning, LatentGrid, NoisedBatch, PixelBatch, TextOutput

NULL_IS_ZEROS = "force_zeros_for_empty_prompt"
"""Argument of the pipelines that know zeros as text: whether a dropped caption is zeros instead of the encoded empty
caption."""
TEXT_PARTS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2", "text_encoder_3": "tokenizer_3"}
"""Text encoder → its tokenizer; parts may also lack the later ones."""
SIZE_NUMBERS = 6
"""Original height and width, crop top and left, target height and width."""
_PLACE = "CAPTION"
_ATTENTION_IN = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_ATTENTION_OUT = ("to_out.0", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
AUTOCAST_DTYPE = {"fp32": None, "no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Index: TypeAlias = Mapping[str, Any]
"""`model_index.json` of `model.pretrained`; empty without one."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to `precision` on `device`; fp32 also switches an outer autocast off."""
    dtype = AUTOCAST_DTYPE[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _kept_mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
    """transformers' own, but never left out: to see whether a mask hides nothing, the host would wait for the device,
    and the kernel for a caption would depend on the length of those beside it."""
    if attention_mask is not None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, attention_mask=attention_mask, **options)


AttentionMaskInterface.register("sdpa", _kept_mask)


def run_text_encoder(encoder: Any, tokens: Tensor, **options: Any) -> Any:
    """Its output. A decoder would keep keys and values of every layer for tokens that it is to write."""
    if "use_cache" in inspect.signature(type(encoder).forward).parameters:
        options["use_cache"] = False
    return encoder(tokens, **options)


class Family(ABC):
    """A pipeline's parts, and what they mean to each other.

    Args:
        parts: networks and tokenizers by their name in the pipeline; the same objects, not copies.
        schedulers: objective, noise schedule and sampler.
        settings: see `settings_of`.
    """

    name: ClassVar[FamilyName]
    pipeline_class: ClassVar[type[DiffusionPipeline]]
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the pipeline; a part wins over an option of its name."""
    denoiser_part: ClassVar[str] = "transformer"
    block_classes: ClassVar[tuple[str, ...]]
    """Classes of the denoiser's repeated blocks: what is sharded, recomputed and compiled one by one."""
    classes: ClassVar[Mapping[str, str]] = {}
    """Part → class, where it is not the part's usual one, and of every text encoder whose outputs `encode` reads."""
    predictions: ClassVar[tuple[PredictionType, ...]] = ("flow_prediction",)
    """Prediction types that the family's pipeline can sample."""
    sets_noise_levels: ClassVar[bool] = False
    """Whether the pipeline gives the sampler its noise levels, which not every sampler takes."""
    text_lengths: ClassVar[Mapping[str, int]] = {}
    """Text encoder → tokens per caption, where it is not the tokenizer's `model_max_length`."""
    num_text_tokens: ClassVar[int | None] = None
    """Tokens of the single text encoder that the denoiser gets, where these are not all of a caption."""
    has_fixed_text: ClassVar[bool] = True
    """Whether the denoiser gets all captions at one length."""
    tile_setting: ClassVar[str] = "tile_sample_min_size"
    """Attribute of the autoencoder with the side of its tiles [pixels]."""
    packing: ClassVar[int] = 1
    """Latent cells along one side of what the denoiser calls a cell."""
    text_width: ClassVar[str] = "joint_attention_dim"
    """Setting of the denoiser for the width of the text states."""
    has_lowercase_text: ClassVar[bool] = False
    """Whether the pipeline writes captions in small letters."""
    has_text_mask: ClassVar[bool] = False
    """Whether the denoiser gets a mask of the padding with its text states."""
    has_size_numbers: ClassVar[bool] = False
    """Whether the denoiser gets original size and crop of the picture (SDXL)."""
    has_zero_text: ClassVar[bool] = False
    """Whether dropped captions may be zeros."""
    free_text: ClassVar[tuple[str, ...]] = ()
    """Text encoders of which the pipeline reads sequences of states alone, so that any class will do."""
    lora_targets: ClassVar[tuple[str, ...]] = (*_ATTENTION_IN, *_ATTENTION_OUT)
    """Names of the denoiser's attention matrices, where it has them: what `model.lora` adapts by default."""
    tensor_attention: ClassVar[tuple[str, ...]] = ()
    """Attention layers of a block, by diffusers' class, that tensor parallelism shards by heads."""
    head_axis: ClassVar[int] = 1
    """Axis of the heads where queries and keys are normed."""
    tensor_mlps: ClassVar[tuple[tuple[tuple[str, ...], str], ...]] = ()
    """MLPs of a block that tensor parallelism shards: matrices into the hidden width, and the one out of it."""
    levels_differ: ClassVar[bool] = False
    """Whether blocks differ in their number of heads: attention whose heads cannot be divided then stays whole."""

    def __init__(self, parts: Mapping[str, Any], schedulers: Schedulers, settings: Index | None = None) -> None:
        self.parts, self.schedulers, self.settings = dict(parts), schedulers, dict(settings or {})
        self._channel_scales = dict[torch.device, list[Tensor]]()

    @classmethod
    def part_configs(cls, model: ModelConfig, index: Index) -> dict[str, tuple[str, PartConfig]]:
        """Part → the option that says from where it is loaded, and how it is loaded or made."""
        optional = OPTIONAL_PARTS.get(cls.name, ())
        has = [part for part in optional if (is_stored(index.get(part)) if index else is_set(getattr(model, part)))]
        found, other = {}, set()  # tokenizers of text encoders of another class than the usual one
        for part in (*FAMILY_PARTS[cls.name], *has):
            config, usual = effective_part(model, part), cls.classes.get(part)
            stored = index[part][1] if part in TEXT_PARTS and is_stored(index.get(part)) else None
            target = config.target or stored or ("AutoTokenizer" if part in other else usual)
            if part in cls.free_text and str(target).rpartition(".")[2] != usual:
                other.add(TEXT_PARTS[part])
            found[part] = f"model.{part}.pretrained", config.replace(target=target)
        return found

    @classmethod
    def settings_of(cls, model: ModelConfig, conditioning: ConditioningConfig, index: Index) -> dict[str, Any]:
        """Arguments of the pipeline that are no parts and follow from the options or the stored pipeline."""
        if not cls.has_zero_text:
            return {}
        given = conditioning.null_text
        return {NULL_IS_ZEROS: bool(index.get(NULL_IS_ZEROS, False)) if given is None else given == "zeros"}

    @property
    def text_settings(self) -> Any:
        """What decides the states of a caption, beside weights and tokenizers; None: nothing."""
        return None

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

    def text_encoders(self) -> dict[str, Any]:
        """By name, in the order in which they are concatenated."""
        return {name: self.parts[name] for name in TEXT_PARTS if self.parts.get(name) is not None}

    def text_network(self, name: str) -> Any:
        """What `encode_text` runs of a text encoder."""
        return self.parts[name]

    def networks(self) -> dict[str, Any]:
        """Everything with weights; the denoiser first."""
        return {self.denoiser_part: self.denoiser, "vae": self.vae, **self.text_encoders()}

    def trained_networks(self, train_text_encoder: bool) -> dict[str, Any]:
        """By name; the denoiser first."""
        return {self.denoiser_part: self.denoiser, **(self.text_encoders() if train_text_encoder else {})}

    def with_parts(self, parts: Mapping[str, Any]) -> "Family":
        """The same family with some parts replaced."""
        other = copy(self)
        other.parts = {**self.parts, **parts}
        return other

    def tokenizers(self) -> dict[str, Tokenizer]:
        """Text encoder → caption → tokens."""
        lengths, lower = self.text_lengths, self.has_lowercase_text
        return {
            name: Tokenizer(self.parts[TEXT_PARTS[name]], lengths.get(name, 0), is_lowercase=lower)
            for name in self.text_encoders()
        }

    @property
    def patch_size(self) -> int:
        """Latent cells along one side of an image token, 1 of UNets; sides of latents are multiples of it."""
        return int(self.denoiser.config.get("patch_size", 1)) * self.packing

    @torch.no_grad()
    def moments(self, pixels: Tensor, precision: str, at_once: int = 0) -> Tensor:
        """[B, 2C, h, w] mean and standard deviation of the autoencoder's posterior in fp32: what a cache keeps of a
        picture, because every visit draws its own latents from them. Contiguous, because a denoiser's kernels are
        chosen by the layout of its input.

        Args:
            pixels: [B, 3, H, W] in [-1, 1].
            precision: autocast's. Some autoencoders (SDXL's) overflow in fp16.
            at_once: pictures that are encoded together; 0: all.
        """
        parts = []
        with autocast(pixels.device, precision):
            for part in pixels.split(at_once or len(pixels)):
                # Copied at once: the next call of an encoder in a CUDA graph overwrites what this one gave.
                parts.append(torch.cat([each.float() for each in self.posterior(part)], dim=1))
        return torch.cat(parts).contiguous()

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents, each [B, C, h, w], of pictures [B, 3, H, W] in [-1, 1]."""
        found = self.vae.encode(pixels).latent_dist
        return found.mean, found.std

    @property
    def tile_side(self) -> int:
        """Of the largest picture [pixels] that the autoencoder encodes at once with `model.vae_tiling`."""
        return int(getattr(self.vae, self.tile_setting))

    def draw_latents(self, moments: Tensor, posterior_noise: Tensor) -> Tensor:
        """Scaled latents [B, C, h, w], one draw from the posterior.

        Args:
            moments: [B, 2C, h, w] fp32, as `moments` gives them.
            posterior_noise: [B, C, h, w] standard normal.
        """
        mean, std = moments.chunk(2, dim=1)
        return self.scaled(mean + std * posterior_noise)

    def scaled(self, latents: Tensor) -> Tensor:
        """What the pipeline undoes before it decodes, per channel where the autoencoder has such a scale."""
        config, scales = self.vae.config, self._channel_scales
        factor, values = config.get("scaling_factor", 1.0), (config.get("latents_mean"), config.get("latents_std"))
        if None in values:
            return (latents - (config.get("shift_factor") or 0.0)) * factor
        if latents.device not in scales:  # once: the host waits for an upload
            scales[latents.device] = [latents.new_tensor(each).view(1, -1, 1, 1) for each in values]
        mean, std = scales[latents.device]
        return (latents - mean) * factor / std

    def decode(self, latents: Tensor) -> Tensor:
        """[B, 3, H, W] of latents [B, C, h, w] that are not scaled."""
        pixels: Tensor = self.vae.decode(latents).sample
        return pixels

    def encode(self, batch: PixelBatch) -> Conditioning:
        """The denoiser's conditioning for a batch. Runs the text encoders of which the batch has tokens as they are
        (device, autocast, autograd); a cache has delivered what the others give."""
        texts = {}
        for name in self.text_encoders():
            if name in batch.tokens:
                texts[name] = self.encode_text(name, batch.tokens[name], batch.token_masks[name])
            else:
                texts[name] = TextOutput(batch.text_states[name].float(), batch.text_pooled[name].float())
        return self.condition(texts, batch)

    @abstractmethod
    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """What `condition` reads from one text encoder; a row depends on the caption alone, so a cache may keep it.

        Args:
            name: of the text encoder.
            tokens: [B, L] int64.
            mask: [B, L] bool, false where a token only fills up.
        """

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """Puts the outputs of all text encoders together; here of a single one, whose states are all that is read.

        Args:
            texts: by the encoder's name.
            batch: its masks, sizes, and which conditioners are dropped; not its tokens.
        """
        mask = batch.token_masks["text_encoder"] if self.has_text_mask else None
        return Conditioning([texts["text_encoder"].states], [mask])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """[B, C, h, w] the denoiser's output, in the prediction type of the objective."""
        named = {"timestep": noised.timesteps, "encoder_hidden_states": conditioning.states[0]}
        return denoiser(noised.noised_latents, **{**named, **self.inputs(conditioning)}).sample

    def inputs(self, conditioning: Conditioning) -> dict[str, Any]:
        """Arguments of the denoiser beside latents, timestep and the first sequence of text states."""
        return {}

    def pipeline(self) -> DiffusionPipeline:
        """The parts as a pipeline of diffusers; the same modules."""
        options = {**self.pipeline_options, **self.settings, **self.parts}
        return self.pipeline_class(**options, scheduler=self.schedulers.sampler)

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """Tokens L and width D of each sequence that `encode` makes, and width of the pooled vector (0: none); here of
        the states of a single text encoder."""
        width = self.parts["text_encoder"].config.get_text_config().hidden_size
        return [(self.num_text_tokens or self.tokenizers()["text_encoder"].length, width)], 0

    def has_masks(self) -> list[bool]:
        """Whether the denoiser gets a mask of the padding with each sequence of `text_shapes`."""
        return [self.has_text_mask] * len(self.text_shapes()[0])

    def blank_conditioning(self, count: int, device: torch.device) -> Conditioning:
        """Conditioning of the right shapes for `count` samples, all zeros: to count FLOPs, memory and kernels."""
        shapes, pooled = self.text_shapes()
        full = [torch.ones(count, length, dtype=torch.bool, device=device) for length, _ in shapes]
        return Conditioning(
            states=[torch.zeros(count, *shape, device=device) for shape in shapes],
            masks=[mask if has else None for mask, has in zip(full, self.has_masks(), strict=True)],
            pooled=torch.zeros(count, pooled, device=device) if pooled else None,
            size_numbers=torch.zeros(count, SIZE_NUMBERS, device=device) if self.has_size_numbers else None,
        )

    def needed_settings(self) -> dict[str, Any]:
        """Setting of the denoiser → the value that the other parts need."""
        ((_, width), *_), pooled = self.text_shapes()
        count, config = latent_grid(self.vae).channels * self.packing**2, self.denoiser.config
        needed = {"in_channels": count, "out_channels": count, self.text_width: width, "pooled_projection_dim": pooled}
        return {key: value for key, value in needed.items() if config.get(key) is not None}

    def fit_problems(self) -> list[str]:
        """How parts do not fit together, one sentence each; first of all text encoders that the family cannot read."""
        config, problems, wanted = self.denoiser.config, [], self.classes.get("vae", "AutoencoderKL")
        if (found := type(self.vae).__name__) != wanted:
            problems.append(f"model.vae: is a {found}, but {self.name} needs a {wanted}")
        for name, encoder in self.text_encoders().items():
            if self.parts.get(TEXT_PARTS[name]) is None:
                problems.append(f"model.{TEXT_PARTS[name]}: is required with model.{name}")
            wanted = self.classes.get(name, type(encoder).__name__)
            if name in self.free_text:
                if type(encoder).__name__.endswith(("Projection", "CausalLM", "Generation")):
                    problems.append(f"model.{name}: is a {type(encoder).__name__}, but {self.name} reads states alone")
            elif type(encoder).__name__ != wanted:
                problems.append(f"model.{name}: is a {type(encoder).__name__}, but {self.name} needs a {wanted}")
        if problems:
            return problems
        for key, needed in self.needed_settings().items():
            if config[key] != needed:
                place = f"model.{self.denoiser_part}.params.{key}"
                problems.append(f"{place}: is {config[key]}, but the other parts need {needed}")
        for name, tokenizer in self.tokenizers().items():
            place, encoder = f"model.{TEXT_PARTS[name]}", self.parts[name].config.get_text_config()
            if (count := len(self.parts[TEXT_PARTS[name]])) > encoder.vocab_size:
                problems.append(f"{place}: {count} tokens, but {name} knows {encoder.vocab_size}")
            most = getattr(encoder, "max_position_embeddings", None)
            if most is not None and tokenizer.length > most:
                problems.append(f"{place}: {tokenizer.length} tokens per caption, but {name} takes {most}")
        return problems

    def size_problems(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """A problem for each height or width [pixels] that the model cannot take."""
        factor = latent_grid(self.vae).downscale
        problems, side = size_problems(factor, sizes, self.patch_size), max(max(size) for size in sizes)
        largest = (self.denoiser.config.get("pos_embed_max_size") or side) * self.patch_size * factor
        if side > largest:
            place = "dataset.params.resolution"
            problems.append(f"{place}: {side} pixels, but pos_embed_max_size of the transformer allows {largest}")
        return problems

    def freeze_unread(self) -> None:  # noqa: B027 - most families read everything
        """Freezes parameters of trained networks that nothing is read from: they have no gradient, which distributed
        training takes for a mistake."""

    def set_default_size(self, resolution: int) -> None:
        """Makes the exported pipeline draw at the size that was trained [pixels] by default.

        Only of UNets: in transformers the same setting takes part in the embedding of positions.
        """
        if self.denoiser_part == "unet":
            self.denoiser.register_to_config(sample_size=resolution // latent_grid(self.vae).downscale)

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """How a block's matrices are sharded over `size` processes; sets the layers' local number of heads.

        The first matrix of a pair is sharded by columns, the second by rows, so that one sum per pair is all that
        processes exchange (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Norms of queries and keys see the local
        heads only, so the gradients of their weights are summed over the processes.

        Raises:
            ConfigError: this family's blocks cannot be sharded so.
        """
        if not self.tensor_mlps:
            raise ConfigError(f"distributed.mesh.tensor: {self.name} has no plan for it; use distributed.mesh.fsdp")
        modules: dict[str, Any] = dict(block.named_modules())
        plan: dict[str, ParallelStyle] = {}
        for name in (name for name in self.tensor_attention if name in modules):
            if (heads := modules[name].heads) % size:
                if self.levels_differ:
                    continue
                raise ConfigError(f"distributed.mesh.tensor: {size} does not divide the {heads} attention heads")
            modules[name].heads = heads // size
            plan |= {f"{name}.{matrix}": ColwiseParallel() for matrix in _ATTENTION_IN}
            plan |= {f"{name}.{matrix}": RowwiseParallel() for matrix in _ATTENTION_OUT}
            norm = SequenceParallel(sequence_dim=self.head_axis, use_local_output=True)
            plan |= {f"{name}.{own}": norm for own in _NORMS}
        for into, out in self.tensor_mlps:
            # Its output is halved into values and gates, so that it has to be whole.
            is_gated = type(modules.get(into[0].rpartition(".")[0])).__name__ == "GEGLU"
            between = Replicate() if is_gated else None
            plan |= {name: ColwiseParallel(output_layouts=between) for name in into}
            plan[out] = RowwiseParallel(input_layouts=between)
        return {name: style for name, style in plan.items() if name in modules}


def chat_tokenizer(own: Any, length: int, *, enable_thinking: bool) -> Tokenizer:
    """Each caption as a user's message, in the words of the tokenizer's chat template; `length` tokens with these.

    Raises:
        ConfigError: it has none.
    """
    if own.chat_template is None:
        raise ConfigError("model.tokenizer: has no chat template, in which the pipeline puts captions")
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": enable_thinking}
    message = [{"role": "user", "content": _PLACE}]
    prefix, _, suffix = own.apply_chat_template(message, **options).partition(_PLACE)
    return Tokenizer(own, length, prefix=prefix, suffix=suffix)


def is_stored(entry: Any) -> bool:
    """Whether a pair of library and class in `model_index.json` names something; `[null, null]` is a part left out."""
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and entry[1] is not None


def latent_grid(vae: AutoencoderKL) -> LatentGrid:
    """Latent channels and downscale factor."""
    channels = vae.config.get("latent_channels") or vae.config.z_dim
    return LatentGrid(int(channels), 2 ** (len(level_channels(vae.config)) - 1))


def blank_batch(
    family: Family, height: int, width: int, count: int, device: torch.device
) -> tuple[NoisedBatch, Conditioning]:
    """Inputs of the denoiser of the right shapes for `count` pictures."""
    latents = torch.zeros(count, *latent_grid(family.vae).shape(height, width), device=device)
    per_sample = torch.zeros(count, device=device)
    noised = NoisedBatch(latents, per_sample, latents, per_sample, per_sample, per_sample)
    return noised, family.blank_conditioning(count, device)
