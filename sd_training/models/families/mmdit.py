"""The project's own MMDiT with rotary positions: any text encoders of transformers, listed in the config."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from sd_training.config.schema import ModelConfig, PartConfig, TextOptions
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from sd_training.models.families.mmdit_pipeline import MMDiTRopePipeline
from sd_training.models.family import FLOW_ONLY, TEXT_PARTS, Family, is_stored, mlp_plan
from sd_training.models.load import make_network, make_tokenizer
from sd_training.models.text_states import encode_texts, is_clip, read_text_options
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

OPTIONS = "text_options"
"""Name of the options beside the parts."""


class MMDiT(Family):
    """Rectified flow; text of every encoder with its own mask, pooled vectors side by side."""

    name = "mmdit_rope"
    pipeline_class = MMDiTRopePipeline
    denoiser_part = "transformer"
    block_classes = ("JointBlock",)
    predictions = FLOW_ONLY
    classes: ClassVar[Mapping[str, str]] = {"transformer": "MMDiTRope"}

    @classmethod
    def listed_parts(cls, model: ModelConfig, index: Mapping[str, Any], *, seed: int, meta: bool) -> dict[str, Any]:
        """Text encoders, tokenizers and their options from `model.text_encoders`; of a stored pipeline the options.

        Raises:
            ConfigError: the list is empty or too long, or an entry cannot be loaded.
        """
        if index:
            return {OPTIONS: index.get(OPTIONS, {})}
        if not 1 <= len(model.text_encoders) <= len(TEXT_PARTS):
            raise ConfigError(
                f"model.text_encoders: has {len(model.text_encoders)} entries; one to {len(TEXT_PARTS)} text encoders "
                "are needed with model.family=mmdit_rope"
            )
        parts: dict[str, Any] = {OPTIONS: {}}
        for number, (name, entry) in enumerate(zip(TEXT_PARTS, model.text_encoders, strict=False)):
            tokenizer, option = TEXT_PARTS[name], f"model.text_encoders.{number}"
            words = PartConfig(pretrained=entry.tokenizer or entry.pretrained, revision=entry.revision)
            try:
                parts[name] = make_network(name, entry, seed=seed, meta=meta)
                parts[tokenizer] = make_tokenizer(tokenizer, words, default="AutoTokenizer")
            except ConfigError as error:
                text = str(error).replace(f"model.{tokenizer}", option).replace(f"model.{name}", option)
                raise ConfigError(text.splitlines()) from error
            parts[OPTIONS][name] = {field.name: getattr(entry, field.name) for field in fields(TextOptions)}
        return parts

    @classmethod
    def optional_parts(cls, model: ModelConfig, index: Mapping[str, Any]) -> list[str]:
        """All text encoders of a stored pipeline."""
        return [name for name in index if name.startswith(("text_encoder", "tokenizer")) and is_stored(index[name])]

    @classmethod
    def class_of_part(cls, part: str, index: Mapping[str, Any]) -> str | None:
        """As in the stored pipeline; a tokenizer's own files name its class."""
        if part.startswith("tokenizer"):
            return "AutoTokenizer"
        return str(index[part][1]) if part in index else super().class_of_part(part, index)

    @cached_property
    def options(self) -> dict[str, TextOptions]:
        """Text encoder → what is taken from it."""
        return read_text_options(self.parts.get(OPTIONS, {}), list(self.text_encoders()))

    def tokenizers(self) -> dict[str, Tokenizer]:
        return {name: Tokenizer(self.parts[TEXT_PARTS[name]], own.max_tokens) for name, own in self.options.items()}

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `Family.encode`."""
        names = list(self.options)
        return encode_texts(
            [self.parts[name] for name in names],
            [batch.tokens[name] for name in names],
            [batch.token_masks[name] for name in names],
            list(self.options.values()),
        )

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        answer: Tensor = denoiser(
            noised.noised_latents,
            noised.timesteps,
            conditioning.states,
            conditioning.pooled,
            encoder_attention_mask=conditioning.masks,
        ).sample
        return answer

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """As `Family.tensor_plan`. Attention is replicated: keys and values are one matrix."""
        streams = ("image", "text")
        first = [f"{stream}.mlp.{matrix}" for stream in streams for matrix in ("gate", "up")]
        return mlp_plan(block, first, [f"{stream}.mlp.down" for stream in streams])

    def blank_conditioning(self, count: int, device: torch.device) -> Conditioning:
        """As `Family.blank_conditioning`."""
        config = self.denoiser.config
        lengths = [option.max_tokens for option in self.options.values() if option.layer is not None]
        pairs = zip(lengths, config.text_dims, strict=True)
        return Conditioning(
            states=[torch.zeros(count, length, width, device=device) for length, width in pairs],
            masks=[None] * len(lengths),
            pooled=torch.zeros(count, config.pooled_dim, device=device) if config.pooled_dim else None,
        )

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`, and what the text encoders cannot give."""
        problems, widths, pooled_width = [], [], 0
        for number, (name, own) in enumerate(self.options.items()):
            encoder, place = self.parts[name], f"model.text_encoders.{number}"
            deepest, has_projection = -1 - int(encoder.config.num_hidden_layers), hasattr(encoder, "text_projection")
            if own.layer is None and own.pooling == "none":
                problems.append(f"{place}.layer: null with pooling none takes nothing from it; set one of them")
            if own.layer is not None:
                widths.append(encoder.config.hidden_size)
                if own.layer < deepest:
                    problems.append(f"{place}.layer: {own.layer}, but the encoder has layers -1 to {deepest}")
            if own.pooling == "projection" and not has_projection:
                problems.append(f"{place}.pooling: projection, but {type(encoder).__name__} has none; use eos or mean")
            if not own.use_mask and (own.pooling == "mean" or (own.pooling == "eos" and not is_clip(encoder))):
                problems.append(f"{place}.pooling: {own.pooling} needs use_mask: true, to leave out the padding")
            if own.pooling != "none":
                projects = own.pooling == "projection" and has_projection
                pooled_width += encoder.config.projection_dim if projects else encoder.config.hidden_size
        if not problems:
            problems = self._width_problem("pooled_dim", pooled_width, "the pooled vectors are")
        if widths != (dims := list(self.denoiser.config.text_dims)):
            problems.append(f"model.transformer.params.text_dims: {dims}, but the text encoders are {widths} wide")
        return problems + self._channel_problems(out_key=None) + self._vocabulary_problems()
