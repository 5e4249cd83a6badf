"""The family of the project's own denoiser `MMDiTRope`: any text encoders of transformers, listed in the config, and
its diffusers pipeline.

Training and pipeline call the same functions, so that sampling sees the conditioning of the training. A saved folder
loads by `MMDiTRopePipeline.from_pretrained(folder)`, and once this module has been imported also by
`diffusers.DiffusionPipeline.from_pretrained(folder)`. The folder names classes of this package; it holds no code.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.loaders import SanaLoraLoaderMixin
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sd_training.config.schema import ConditioningConfig, ModelConfig, PartConfig, TextOptions, drop_final_norm
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from sd_training.models.family import NULL_IS_ZEROS, TEXT_PARTS, Family, Index, is_stored, run_text_encoder
from sd_training.models.load import effective_part
from sd_training.models.mmdit_rope import MMDiTRope
from sd_training.types import Conditioning, PixelBatch, TextOutput

Tensors: TypeAlias = Mapping[str, Tensor]


def encode_texts(
    encoders: Mapping[str, Any],
    tokens: Tensors,
    masks: Tensors,
    options: Mapping[str, TextOptions],
    zeroed: Tensors | None = None,
) -> Conditioning:
    """Hidden states and pooled vectors of every encoder that has options, in the encoder's mode and precision.

    Args:
        encoders: by name, any text encoder or decoder of transformers.
        tokens: [B, L_i] int64 each.
        masks: [B, L_i] bool each, True for tokens of the caption. Without `use_mask` only pooling reads it; with it
            states of masked tokens are 0.
        options: layer (-1 is the last one with its norm, -N-1 the embeddings of an encoder of N layers) and pooling of
            the last layer.
        zeroed: as in `side_by_side`.
    """
    texts = {name: encode_text(encoders[name], tokens[name], masks[name], own) for name, own in options.items()}
    return side_by_side(texts, masks, options, zeroed)


def encode_text(encoder: Any, tokens: Tensor, mask: Tensor, option: TextOptions) -> TextOutput:
    """What is taken from one encoder, as `encode_texts` describes it."""
    is_last, result = option.layer in (None, -1), TextOutput()
    attention_mask = mask.long() if option.use_mask else None
    output = run_text_encoder(encoder, tokens, attention_mask=attention_mask, output_hidden_states=not is_last)
    last = output.last_hidden_state
    if option.layer is not None:
        states = last if is_last else output.hidden_states[option.layer]
        states = states.masked_fill(~mask[..., None], 0.0) if option.use_mask else states
        result = result._replace(states=states)
    if option.pooling == "mean":
        total = last.masked_fill(~mask[..., None], 0.0).sum(dim=1)
        result = result._replace(pooled=total / mask.sum(dim=1, keepdim=True).clamp(min=1))
    elif option.pooling == "projection":
        result = result._replace(pooled=output.text_embeds)
    return result


def side_by_side(
    texts: Mapping[str, TextOutput], masks: Tensors, options: Mapping[str, TextOptions], zeroed: Tensors | None = None
) -> Conditioning:
    """Hidden states of every encoder with its mask, and pooled vectors in one row.

    Args:
        zeroed: [B] bool of every encoder: captions whose states and pooled vector are zeros; None: no caption's.
    """
    for name, rows in (zeroed or {}).items():
        text = texts[name]
        if len(text.states):
            text = text._replace(states=text.states.masked_fill(rows[:, None, None], 0.0))
        if len(text.pooled):
            text = text._replace(pooled=text.pooled.masked_fill(rows[:, None], 0.0))
        texts = {**texts, name: text}
    read = [name for name, option in options.items() if option.layer is not None]
    pooled = [texts[name].pooled for name, option in options.items() if option.pooling != "none"]
    return Conditioning(
        states=[texts[name].states for name in read],
        masks=[masks[name] if options[name].use_mask else None for name in read],
        pooled=torch.cat(pooled, dim=-1) if pooled else None,
    )


def denoiser_inputs(conditioning: Conditioning, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Arguments of `MMDiTRope` beside latents and timestep; `dtype` None leaves the type as it is."""
    return {
        "encoder_hidden_states": [states.to(dtype) for states in conditioning.states],
        "encoder_attention_mask": conditioning.masks,
        "pooled_projections": None if conditioning.pooled is None else conditioning.pooled.to(dtype),
    }


def read_text_options(stored: Mapping[str, Any], encoders: Sequence[str]) -> dict[str, TextOptions]:
    """Text encoder → its options, as a pipeline stores them; what is left out has the defaults.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """
    problems, found = list[str](), dict[str, TextOptions]()
    for name in encoders:
        own = dict(stored.get(name) or {})
        drop_final_norm(own)
        try:
            found[name] = TextOptions(**own)
        except ValidationError as error:
            problems += [f"text_options.{name}.{e['loc'][0]}: is {e['input']!r}; {e['msg']}" for e in error.errors()]
    if problems:
        raise ConfigError(problems)
    return found


class MMDiTRopePipeline(SanaLoraLoaderMixin, DiffusionPipeline):  # whose LoRA is of a transformer and nothing else
    """Text to image with a rectified flow.

    Args:
        vae: maps latents to pictures; its `shift_factor` and `scaling_factor` are undone.
        transformer: the denoiser.
        scheduler: its timesteps are σ × 1000.
        text_encoder, text_encoder_2, text_encoder_3: any text encoder or decoder of transformers.
        tokenizer, tokenizer_2, tokenizer_3: theirs.
        text_options: for each text encoder that there is, the fields of `TextOptions` that differ from its defaults.
        force_zeros_for_empty_prompt: an empty prompt is zeros, instead of the encoded empty text.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    model_cpu_offload_seq = "text_encoder->text_encoder_2->text_encoder_3->transformer->vae"
    _optional_components = ["text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"]  # noqa: RUF012

    def __init__(
        self,
        vae: AutoencoderKL,
        transformer: MMDiTRope,
        scheduler: FlowMatchEulerDiscreteScheduler,
        text_encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder_2: PreTrainedModel | None = None,
        tokenizer_2: PreTrainedTokenizerBase | None = None,
        text_encoder_3: PreTrainedModel | None = None,
        tokenizer_3: PreTrainedTokenizerBase | None = None,
        text_options: dict[str, Any] | None = None,
        force_zeros_for_empty_prompt: bool = False,
    ) -> None:
        super().__init__()
        parts = {"vae": vae, "transformer": transformer, "scheduler": scheduler}
        parts |= {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3}
        parts |= {"tokenizer": tokenizer, "tokenizer_2": tokenizer_2, "tokenizer_3": tokenizer_3}
        self.register_modules(**parts)
        self.options = read_text_options(text_options or {}, [name for name in TEXT_PARTS if parts[name] is not None])
        # A mapping, as diffusers takes every list in model_index.json for a part of the pipeline.
        stored = {name: option.model_dump() for name, option in self.options.items()}
        self.register_to_config(text_options=stored, force_zeros_for_empty_prompt=force_zeros_for_empty_prompt)
        self.image_processor = VaeImageProcessor(vae_scale_factor=2 ** (len(vae.config.block_out_channels) - 1))

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] = "",
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 28,
        guidance_scale: float = 5.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callable[[Any, int, Tensor, dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> ImagePipelineOutput:
        """Draws one picture per prompt.

        Args:
            prompt: one or several.
            negative_prompt: one for all, or one for each prompt; only read when guidance is on.
            height, width: [pixels], multiples of the size of a token; None is the size of the transformer's base grid.
            num_inference_steps: calls of the scheduler.
            guidance_scale: s in v = v_null + s (v_cond - v_null) (Ho & Salimans 2022); 1 is off.
            generator: one, or one for each prompt.
            latents: [B, C, h, w] initial noise; None draws it.
            output_type: 'pil', 'np' ([B, H, W, 3] in [0, 1]), 'pt' ([B, 3, H, W] in [0, 1]) or 'latent'.
            callback_on_step_end: gets the pipeline, the number of the step, its timestep and `latents`, and returns
                those to go on with.

        Raises:
            ValueError: sizes that do not fit.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        own, device = self.transformer.config, self._execution_device
        cell = self.image_processor.config.vae_scale_factor
        token, guided, dtype = cell * own.patch_size, guidance_scale != 1, self.transformer.dtype
        height, width = (side or own.rope_base_size * token for side in (height, width))
        if height % token or width % token:
            raise ValueError(f"height and width are {height} × {width} pixels; both must be multiples of {token}")
        shape = (len(prompts), own.in_channels, height // cell, width // cell)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        latents = latents.to(device, torch.float32)
        negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
        text = self.encode_prompts(negatives + prompts if guided else prompts)
        conditioning = denoiser_inputs(text, dtype)
        config, shift = self.scheduler.config, {}
        if config.use_dynamic_shifting:
            ends = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
            shift = {"mu": calculate_shift(latents[0, 0].numel() // own.patch_size**2, *ends)}
        self.scheduler.set_timesteps(num_inference_steps, device=device, **shift)
        is_random = "generator" in inspect.signature(self.scheduler.step).parameters
        chance: dict[str, Any] = {"generator": generator} if is_random else {}
        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            inputs = torch.cat([latents, latents]) if guided else latents
            times = timestep.expand(len(inputs))
            velocity = self.transformer(inputs.to(dtype), times, return_dict=False, **conditioning)[0].float()
            if guided:
                null, conditioned = velocity.chunk(2)
                velocity = null + guidance_scale * (conditioned - null)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False, **chance)[0]
            if callback_on_step_end is not None:
                latents = callback_on_step_end(self, step, timestep, {"latents": latents})["latents"]
        images: Any = latents
        if output_type != "latent":
            unscaled = latents / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)
            pixels = self.vae.decode(unscaled.to(self.vae.dtype), return_dict=False)[0]
            images = self.image_processor.postprocess(pixels.float(), output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images)

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """States and pooled vectors of the prompts, on the pipeline's device."""
        tokens, masks = {}, {}
        for name, option in self.options.items():  # truncated and padded as in training
            encode = Tokenizer(getattr(self, TEXT_PARTS[name]), option.max_tokens).encode
            columns = (torch.from_numpy(np.stack(column)) for column in zip(*map(encode, prompts), strict=True))
            tokens[name], masks[name] = (column.to(self._execution_device) for column in columns)
        empty = torch.tensor([not prompt for prompt in prompts], device=self._execution_device)
        zeroed = dict.fromkeys(self.options, empty) if self.config.force_zeros_for_empty_prompt else None
        return encode_texts(self.components, tokens, masks, self.options, zeroed)


# `DiffusionPipeline.from_pretrained` looks the class that model_index.json names up in diffusers' own namespace. Its
# `custom_pipeline` would do as well, but runs a file out of the folder.
diffusers.MMDiTRopePipeline = MMDiTRopePipeline


class MMDiT(Family):
    """Rectified flow; text of every encoder with its own mask, pooled vectors side by side."""

    name = "mmdit_rope"
    pipeline_class = MMDiTRopePipeline
    block_classes = ("JointBlock",)
    has_zero_text = True
    lora_targets = ("query", "key_value", "out")
    # Attention is replicated: keys and values are one matrix.
    tensor_mlps = tuple(((f"{own}.mlp.gate", f"{own}.mlp.up"), f"{own}.mlp.down") for own in ("image", "text"))
    classes: ClassVar[Mapping[str, str]] = {"transformer": "MMDiTRope"}

    @classmethod
    def part_configs(cls, model: ModelConfig, index: Index) -> dict[str, tuple[str, PartConfig]]:
        """As `Family.part_configs`; text encoders and tokenizers are those of the stored pipeline, or those of
        `model.text_encoders`. A tokenizer's own files name its class.

        Raises:
            ConfigError: the list is empty or too long.
        """
        found = super().part_configs(model, index)
        if not index and not 1 <= len(model.text_encoders) <= len(TEXT_PARTS):
            count = len(model.text_encoders)
            raise ConfigError(f"model.text_encoders: model.family=mmdit_rope needs one to three, but {count} are given")
        entries = [] if index else model.text_encoders
        for number, (name, entry) in enumerate(zip(TEXT_PARTS, entries, strict=False)):
            option, place = f"model.text_encoders.{number}.pretrained", entry.tokenizer or entry.pretrained
            words = PartConfig(pretrained=place, revision=entry.revision, target="AutoTokenizer")
            found |= {name: (option, entry), TEXT_PARTS[name]: (option, words)}
        for name in (name for name in (*TEXT_PARTS, *TEXT_PARTS.values()) if is_stored(index.get(name))):
            target = "AutoTokenizer" if name.startswith("tokenizer") else str(index[name][1])
            found[name] = f"model.{name}.pretrained", effective_part(model, name).replace(target=target)
        return found

    @classmethod
    def settings_of(cls, model: ModelConfig, conditioning: ConditioningConfig, index: Index) -> dict[str, Any]:
        """What is taken from each text encoder."""
        listed = {
            name: {field: getattr(entry, field) for field in TextOptions.model_fields}
            for name, entry in zip(TEXT_PARTS, model.text_encoders, strict=False)
        }
        own = {"text_options": index.get("text_options", {}) if index else listed}
        return {**super().settings_of(model, conditioning, index), **own}

    @property
    def text_settings(self) -> Any:
        """As `Family.text_settings`: layer, pooling, length and mask."""
        return self.settings["text_options"]

    @cached_property
    def options(self) -> dict[str, TextOptions]:
        """Text encoder → what is taken from it."""
        return read_text_options(self.settings["text_options"], list(self.text_encoders()))

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {name: Tokenizer(self.parts[TEXT_PARTS[name]], own.max_tokens) for name, own in self.options.items()}

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `Family.encode_text`."""
        return encode_text(self.parts[name], tokens, mask, self.options[name])

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        zeroed = {name: batch.dropped[name] for name in texts} if self.settings[NULL_IS_ZEROS] else None
        return side_by_side(texts, batch.token_masks, self.options, zeroed)

    def inputs(self, conditioning: Conditioning) -> dict[str, Any]:
        """As `Family.inputs`, and the states of all text encoders."""
        return denoiser_inputs(conditioning)

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        given = [(self.parts[name].config, own) for name, own in self.options.items()]
        shapes = [(own.max_tokens, config.hidden_size) for config, own in given if own.layer is not None]
        pooled = sum(config.hidden_size for config, own in given if own.pooling == "mean")
        return shapes, pooled + sum(config.projection_dim for config, own in given if own.pooling == "projection")

    def has_masks(self) -> list[bool]:
        """As `Family.has_masks`."""
        return [own.use_mask for own in self.options.values() if own.layer is not None]

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`."""
        (shapes, pooled), dims = self.text_shapes(), self.denoiser.config.text_dims
        needed = {"text_dims": type(dims)(width for _, width in shapes), "pooled_dim": pooled}
        return {"in_channels": self.vae.config.latent_channels, **needed}

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`, and what the text encoders cannot give."""
        problems = []
        for number, (name, own) in enumerate(self.options.items()):
            encoder, place = self.parts[name], f"model.text_encoders.{number}"
            deepest = -1 - int(encoder.config.num_hidden_layers)
            if own.layer is not None and own.layer < deepest:
                problems.append(f"{place}.layer: {own.layer}, but the encoder has layers -1 to {deepest}")
            if own.pooling == "projection" and not hasattr(encoder, "text_projection"):
                problems.append(f"{place}.pooling: projection, but {type(encoder).__name__} has none; use mean")
        return problems or super().fit_problems()
