"""The project's own MMDiT with rotary positions: any text encoders of transformers, listed in the config."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from sd_training.config.schema import ConditioningConfig, ModelConfig, PartConfig, TextOptions
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from sd_training.models.families.mmdit_pipeline import MMDiTRopePipeline
from sd_training.models.family import FLOW_ONLY, TEXT_PARTS, Family, is_stored
from sd_training.models.load import effective_part
from sd_training.models.text_states import encode_texts, read_text_options
from sd_training.types import Conditioning, NoisedBatch, PixelBatch


class MMDiT(Family):
    """Rectified flow; text of every encoder with its own mask, pooled vectors side by side."""

    name = "mmdit_rope"
    pipeline_class = MMDiTRopePipeline
    denoiser_part = "transformer"
    block_classes = ("JointBlock",)
    predictions = FLOW_ONLY
    # Attention is replicated: keys and values are one matrix.
    tensor_mlps = tuple(((f"{own}.mlp.gate", f"{own}.mlp.up"), f"{own}.mlp.down") for own in ("image", "text"))
    classes: ClassVar[Mapping[str, str]] = {"transformer": "MMDiTRope"}

    @classmethod
    def part_configs(cls, model: ModelConfig, index: Mapping[str, Any]) -> dict[str, tuple[str, PartConfig]]:
        """As `Family.part_configs`; text encoders and tokenizers are those of the stored pipeline, or those of
        `model.text_encoders`. A tokenizer's own files name its class.

        Raises:
            ConfigError: the list is empty or too long.
        """
        found = super().part_configs(model, index)
        if not index and not 1 <= len(model.text_encoders) <= len(TEXT_PARTS):
            raise ConfigError(
                f"model.text_encoders: has {len(model.text_encoders)} entries; one to {len(TEXT_PARTS)} text encoders "
                "are needed with model.family=mmdit_rope"
            )
        entries = [] if index else model.text_encoders
        for number, (name, entry) in enumerate(zip(TEXT_PARTS, entries, strict=False)):
            option = f"model.text_encoders.{number}"
            words = PartConfig(
                pretrained=entry.tokenizer or entry.pretrained, revision=entry.revision, target="AutoTokenizer"
            )
            found |= {name: (option, entry), TEXT_PARTS[name]: (option, words)}
        for name in (name for name in (*TEXT_PARTS, *TEXT_PARTS.values()) if is_stored(index.get(name))):
            target = "AutoTokenizer" if name.startswith("tokenizer") else str(index[name][1])
            found[name] = f"model.{name}", replace(effective_part(model, name), target=target)
        return found

    @classmethod
    def settings_of(
        cls, model: ModelConfig, conditioning: ConditioningConfig, index: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is taken from each text encoder."""
        listed = {
            name: {field.name: getattr(entry, field.name) for field in fields(TextOptions)}
            for name, entry in zip(TEXT_PARTS, model.text_encoders, strict=False)
        }
        return {"text_options": index.get("text_options", {}) if index else listed}

    @cached_property
    def options(self) -> dict[str, TextOptions]:
        """Text encoder → what is taken from it."""
        return read_text_options(self.settings["text_options"], list(self.text_encoders()))

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

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        given = ((self.parts[name].config, own) for name, own in self.options.items())
        shapes = [(own.max_tokens, config.hidden_size) for config, own in given if own.layer is not None]
        return shapes, self.denoiser.config.pooled_dim

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`."""
        pooled_dim, config = 0, self.denoiser.config
        for name, own in self.options.items():
            encoder = self.parts[name].config
            width = {"none": 0, "projection": getattr(encoder, "projection_dim", 0)}
            pooled_dim += width.get(own.pooling, encoder.hidden_size)
        text_dims = type(config.text_dims)(width for _, width in self.text_shapes()[0])
        return {"in_channels": self.vae.config.latent_channels, "text_dims": text_dims, "pooled_dim": pooled_dim}

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`, and what the text encoders cannot give."""
        problems = []
        for number, (name, own) in enumerate(self.options.items()):
            encoder, place = self.parts[name], f"model.text_encoders.{number}"
            deepest = -1 - int(encoder.config.num_hidden_layers)
            if own.layer is not None and own.layer < deepest:
                problems.append(f"{place}.layer: {own.layer}, but the encoder has layers -1 to {deepest}")
            if own.pooling == "projection" and not hasattr(encoder, "text_projection"):
                problems.append(f"{place}.pooling: projection, but {type(encoder).__name__} has none; use eos or mean")
        return problems or super().fit_problems()
