"""Qwen-Image (Wu et al. 2025, arXiv:2508.02324): text and image streams of a dual transformer, over latents of an
autoencoder of films, as diffusers' `QwenImagePipeline` runs it."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import QwenImagePipeline
from torch import Tensor

from sd_training.data.samples.captions import Tokenizer
from sd_training.models.families.dits import TokenFamily
from sd_training.models.family import run_text_encoder
from sd_training.types import Conditioning, PixelBatch, TextOutput

_PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
_EMPTY: Any = QwenImagePipeline(**dict.fromkeys(_PARTS))
"""It has the words around a caption as attributes."""
PREFIX, SUFFIX = _EMPTY.prompt_template_encode.split("{}")
UNREAD = int(_EMPTY.prompt_template_encode_start_idx)
"""Tokens at the beginning that the transformer does not get."""
LENGTH = int(inspect.signature(QwenImagePipeline.__call__).parameters["max_sequence_length"].default)
"""Tokens that it gets."""


class QwenImage(TokenFamily):
    """Rectified flow on tokens of 2 × 2 latent cells; last states of Qwen 2.5-VL's language model with their mask."""

    name = "qwen_image"
    pipeline_class = QwenImagePipeline
    block_classes = ("QwenImageTransformerBlock",)
    tile_setting = "tile_sample_min_height"
    has_text_mask = True
    num_text_tokens = LENGTH
    classes: ClassVar[Mapping[str, str]] = {
        "vae": "AutoencoderKLQwenImage",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "AutoTokenizer",
        "transformer": "QwenImageTransformer2DModel",
    }

    def tokenizers(self) -> dict[str, Tokenizer]:
        """As `Family.tokenizers`."""
        return {"text_encoder": Tokenizer(self.parts["tokenizer"], UNREAD + LENGTH, prefix=PREFIX, suffix=SUFFIX)}

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """As `Family.posterior`; a picture is a film of one frame."""
        mean, std = super().posterior(pixels[:, :, None])
        return mean[:, :, 0], std[:, :, 0]

    def decode(self, latents: Tensor) -> Tensor:
        """As `Family.decode`."""
        return super().decode(latents[:, :, None])[:, :, 0]

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `QwenImagePipeline.encode_prompt`."""
        output = run_text_encoder(self.text_network(name), tokens, attention_mask=mask)
        return TextOutput(output.last_hidden_state[:, UNREAD:])

    def text_network(self, name: str) -> Any:
        """As `Family.text_network`: neither eyes nor logits."""
        return self.parts[name].model.language_model

    def freeze_unread(self) -> None:
        """As `Family.freeze_unread`: what the last block makes of the caption."""
        for name, parameter in self.blocks()[-1].named_parameters():
            if name.startswith(("attn.to_add_out.", "txt_mlp.")):
                parameter.requires_grad_(False)

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        return Conditioning([texts["text_encoder"].states], [batch.token_masks["text_encoder"][:, UNREAD:]])

    def token_inputs(self, latents: Tensor, conditioning: Conditioning, rows: int, columns: int) -> dict[str, Any]:
        """As `TokenFamily.token_inputs`."""
        shapes = [[(1, rows, columns)]] * len(latents)
        return {"encoder_hidden_states_mask": conditioning.masks[0], "img_shapes": shapes}

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`; tokens go in whole, and their cells come out. Models that edit have pipelines of
        their own."""
        needed, config = super().needed_settings(), self.denoiser.config
        needed |= {"in_channels": needed["in_channels"] * self.patch_size**2}
        off = dict.fromkeys(("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"), False)
        return {**needed, **off, "attention_head_dim": sum(config.axes_dims_rope)}
