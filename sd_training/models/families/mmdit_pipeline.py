"""The diffusers pipeline of the project's own denoiser `MMDiTRope`.

A saved folder loads by `MMDiTRopePipeline.from_pretrained(folder)`, and once this module has been imported also by
`diffusers.DiffusionPipeline.from_pretrained(folder)`. The folder names classes of this package; it holds no code.
"""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sd_training.models.family import TEXT_PARTS
from sd_training.models.mmdit_rope import MMDiTRope
from sd_training.models.text_states import encode_texts, read_text_options, tokenize
from sd_training.types import Conditioning


class MMDiTRopePipeline(DiffusionPipeline):
    """Text to image with a rectified flow.

    Args:
        vae: maps latents to pictures; its `shift_factor` and `scaling_factor` are undone.
        transformer: the denoiser.
        scheduler: its timesteps are σ × 1000.
        text_encoder, text_encoder_2, text_encoder_3: any text encoder or decoder of transformers.
        tokenizer, tokenizer_2, tokenizer_3: theirs.
        text_options: for each text encoder that there is, the fields of `TextOptions` that differ from its defaults.

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
    ) -> None:
        super().__init__()
        parts = {"vae": vae, "transformer": transformer, "scheduler": scheduler}
        parts |= {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3}
        parts |= {"tokenizer": tokenizer, "tokenizer_2": tokenizer_2, "tokenizer_3": tokenizer_3}
        self.register_modules(**parts)
        self.options = read_text_options(text_options or {}, [name for name in TEXT_PARTS if parts[name] is not None])
        # A mapping, as diffusers takes every list in model_index.json for a part of the pipeline.
        self.register_to_config(text_options={name: asdict(option) for name, option in self.options.items()})
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
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
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
            return_dict: False returns a tuple.

        Raises:
            ValueError: sizes or counts that do not fit.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        nulls = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
        if len(nulls) != len(prompts):
            raise ValueError(f"{len(nulls)} negative prompts for {len(prompts)} prompts")
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
        text = self.encode_prompts(nulls + prompts if guided else prompts)
        conditioning = {
            "encoder_hidden_states": [states.to(dtype) for states in text.states],
            "encoder_attention_mask": text.masks,
            "pooled_projections": None if text.pooled is None else text.pooled.to(dtype),
        }
        config, shift = self.scheduler.config, {}
        if config.use_dynamic_shifting:
            ends = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
            shift = {"mu": calculate_shift(latents[0, 0].numel() // own.patch_size**2, *ends)}
        self.scheduler.set_timesteps(num_inference_steps, device=device, **shift)
        is_random = "generator" in inspect.signature(self.scheduler.step).parameters
        draws: dict[str, Any] = {"generator": generator} if is_random else {}
        for timestep in self.progress_bar(self.scheduler.timesteps):
            inputs = torch.cat([latents, latents]) if guided else latents
            times = timestep.expand(len(inputs))
            velocity = self.transformer(inputs.to(dtype), times, return_dict=False, **conditioning)[0].float()
            if guided:
                null, conditioned = velocity.chunk(2)
                velocity = null + guidance_scale * (conditioned - null)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False, **draws)[0]
        images: Any = latents
        if output_type != "latent":
            unscaled = latents / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)
            pixels = self.vae.decode(unscaled.to(self.vae.dtype), return_dict=False)[0]
            images = self.image_processor.postprocess(pixels.float(), output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """States and pooled vectors of the prompts, on the pipeline's device."""
        device, options = self._execution_device, self.options
        pairs = [tokenize(getattr(self, TEXT_PARTS[name]), prompts, options[name].max_tokens) for name in options]
        return encode_texts(
            encoders=[getattr(self, name) for name in options],
            tokens=[tokens.to(device) for tokens, _ in pairs],
            masks=[mask.to(device) for _, mask in pairs],
            options=list(options.values()),
        )


# `DiffusionPipeline.from_pretrained` looks the class that model_index.json names up in diffusers' own namespace. Its
# `custom_pipeline` would do as well, but runs a file out of the folder.
diffusers.MMDiTRopePipeline = MMDiTRopePipeline
