"""FLUX.2 [klein] (Black Forest Labs 2026): two streams of text and image tokens, then one of both, over latents that
are normalised as tokens, as diffusers' `Flux2KleinPipeline` runs it."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import Flux2KleinPipeline
from torch import Tensor

from sd_training.config.schema import ConditioningConfig, ModelConfig
from sd_training.data.samples.captions import Tokenizer
from sd_training.models.families.dits import TokenFamily
from sd_training.models.family import Index, chat_tokenizer, run_text_encoder
from sd_training.models.mmdit_rope import from_patches, to_patches
from sd_training.types import Conditioning, TextOutput

_CALL = inspect.signature(Flux2KleinPipeline.__call__).parameters
LENGTH = int(_CALL["max_sequence_length"].default)
"""Tokens of a caption with the words of the chat around it; the transformer gets the padding, too."""
LAYERS = tuple(int(layer) for layer in _CALL["text_encoder_out_layers"].default)
"""Layers of the text encoder that are read; 0 would be its embeddings."""


class Flux2Klein(TokenFamily):
    """Rectified flow on tokens of 2 × 2 latent cells; states of three layers of Qwen 3, side by side."""

    name = "flux2"
    pipeline_class = Flux2KleinPipeline
    block_classes = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    packing = 2
    classes: ClassVar[Mapping[str, str]] = {
        "vae": "AutoencoderKLFlux2",
        "text_encoder": "Qwen3ForCausalLM",
        "tokenizer": "AutoTokenizer",
        "transformer": "Flux2Transformer2DModel",
    }
    # In blocks of one stream one matrix leads into attention and MLP, and one out of both.
    lora_targets = (*TokenFamily.lora_targets, "to_qkv_mlp_proj", "attn.to_out")

    @classmethod
    def settings_of(cls, model: ModelConfig, conditioning: ConditioningConfig, index: Index) -> dict[str, Any]:
        """As `Family.settings_of`: with a distilled model the pipeline ignores guidance."""
        return {"is_distilled": bool(index.get("is_distilled", False))}

    def tokenizers(self) -> dict[str, Tokenizer]:
        """As `Family.tokenizers`."""
        return {"text_encoder": chat_tokenizer(self.parts["tokenizer"], LENGTH, enable_thinking=False)}

    def text_network(self, name: str) -> Any:
        """As `Family.text_network`: no logits."""
        return self.parts[name].model

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `Flux2KleinPipeline.encode_prompt`."""
        options = {"attention_mask": mask, "output_hidden_states": True}
        states = run_text_encoder(self.text_network(name), tokens, **options).hidden_states
        return TextOutput(torch.cat([states[layer] for layer in LAYERS], dim=-1))

    def scaled(self, latents: Tensor) -> Tensor:
        """As `Family.scaled`, by the statistics that the autoencoder has for each channel of a token."""
        norm, size = self.vae.bn, self.packing  # in CPU memory where a cache delivers moments
        mean, variance = (own.to(latents, non_blocking=True) for own in (norm.running_mean, norm.running_var))
        tokens = (to_patches(latents, size) - mean) / (variance + self.vae.config.batch_norm_eps).sqrt()
        return from_patches(tokens, latents.shape[-2] // size, size)

    def token_inputs(self, latents: Tensor, conditioning: Conditioning, rows: int, columns: int) -> dict[str, Any]:
        """As `TokenFamily.token_inputs`. Positions are (0, row, column, 0) of an image token and (0, 0, 0, place) of a
        word."""
        counts = (1, rows, columns, conditioning.states[0].shape[1])
        one, *axes, words = (torch.arange(count, device=latents.device) for count in counts)
        image, text = torch.cartesian_prod(one, *axes, one), torch.cartesian_prod(one, one, one, words)
        return {"img_ids": image, "txt_ids": text}

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        return [(LENGTH, len(LAYERS) * self.parts["text_encoder"].config.hidden_size)], 0

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`. A transformer that is told its guidance ([dev]) has another pipeline."""
        head = sum(self.denoiser.config.axes_dims_rope)
        return {**super().needed_settings(), "patch_size": 1, "guidance_embeds": False, "attention_head_dim": head}

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        problems = super().fit_problems()
        if not problems and (count := self.parts["text_encoder"].config.num_hidden_layers) < max(LAYERS):
            problems.append(f"model.text_encoder: has {count} layers, but {self.name} reads layer {max(LAYERS)}")
        return problems
