"""The options of the model: its family, its parts, and how the trained one is run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from sd_training.config.value_types import DENOISER, SCHEMA, Int, PositiveInt, read_with, used_with

FamilyName = Literal["stable_diffusion", "sdxl", "sd3", "pixart", "flux", "mmdit_rope"]
FAMILY_PARTS: Mapping[str, tuple[str, ...]] = {
    "stable_diffusion": ("vae", "text_encoder", "tokenizer", "unet"),
    "sdxl": ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "unet"),
    "sd3": ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer"),
    "pixart": ("vae", "text_encoder", "tokenizer", "transformer"),
    "flux": ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer"),
    "mmdit_rope": ("vae", "transformer"),
}
"""Parts that a family cannot do without."""
OPTIONAL_PARTS: Mapping[str, tuple[str, ...]] = {"sd3": ("text_encoder_3", "tokenizer_3")}
DENOISER_CLASSES: Mapping[str, FamilyName] = {
    "SD3Transformer2DModel": "sd3",
    "PixArtTransformer2DModel": "pixart",
    "FluxTransformer2DModel": "flux",
    "MMDiTRope": "mmdit_rope",
}
"""Class of `model.transformer.target` → family."""


def _yaml_no(value: Any) -> Any:
    """An unquoted `no` is false in YAML, and an empty value is null: both mean the word "no" here."""
    return "no" if value is False or value is None else value


@dataclass(config=SCHEMA, kw_only=True)
class PartConfig:
    """One part of the pipeline: loaded from `pretrained`, or made by `target` and `params` with random weights."""

    pretrained: str | None = None
    """Local diffusers folder or hub id: the pipeline's root, or the part's own folder."""
    subfolder: Annotated[str | None, read_with("pretrained")] = None
    """Folder of the part below `pretrained`; null looks for the part's usual name, then for the part itself."""
    revision: Annotated[str | None, read_with("pretrained")] = None
    """Hub branch, tag or commit; null is the hub's main."""
    target: str | None = None
    """Class name from the allow-list in `models/load.py`, with or without the package in front."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that class; for a pretrained noise scheduler they override its stored settings."""


@dataclass(config=SCHEMA, kw_only=True)
class TextOptions:
    """What is taken from one text encoder of `mmdit_rope`; its pipeline stores them too."""

    layer: Annotated[Int, Field(le=-1)] | None = -1
    """Hidden layer of the states: -1 the last one, -2 the one before, …; null: the pooled vector only."""
    apply_final_norm: bool = True
    """Whether the states go through the encoder's final norm. Encoders whose layers end in a norm have none."""
    pooling: Literal["none", "eos", "mean", "projection"] = "none"
    """Vector of the whole caption, of the last layer with its norm: `eos`: state of the end-of-text token. `mean`: mean
    of the unmasked tokens. `projection`: CLIP's `text_embeds`."""
    max_tokens: PositiveInt = 77
    """L: captions are truncated and padded to this many tokens [count]."""
    use_mask: bool = True
    """Whether encoder and denoiser get a mask of the padding. Stable Diffusion's CLIP does not."""


@dataclass(config=SCHEMA, kw_only=True)
class TextEncoderEntry(TextOptions, PartConfig):
    """One text encoder of `mmdit_rope`: any encoder or decoder of transformers, with its tokenizer."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; null: as `pretrained`."""


_DenoiserPart = Annotated[PartConfig, DENOISER]
_FrozenPrecision = Annotated[Literal["fp32", "bf16", "fp16"] | None, DENOISER]


@dataclass(config=SCHEMA, kw_only=True)
class ModelConfig:
    """The pipeline's parts and how the trained one is run."""

    pretrained: str | None = None
    """Pipeline folder or hub id for every part at once; wins over the parts' own settings, as in sd-training."""
    revision: Annotated[str | None, read_with("pretrained")] = None
    """Hub branch, tag or commit of `model.pretrained`."""
    family: Annotated[FamilyName | None, DENOISER] = None
    """Kind of pipeline; null: that of `pretrained`, or inferred from the given parts."""
    train: Literal["denoiser", "vae"] = "denoiser"
    """Which part is trained: the denoiser (a UNet or a transformer), or the autoencoder itself."""
    vae: PartConfig = Field(default_factory=PartConfig)
    """Image autoencoder; frozen unless `model.train` is `vae`."""
    text_encoder: _DenoiserPart = Field(default_factory=PartConfig)
    """Frozen text encoder."""
    tokenizer: _DenoiserPart = Field(default_factory=PartConfig)
    """Tokenizer of the text encoder."""
    text_encoder_2: _DenoiserPart = Field(default_factory=PartConfig)
    """Second text encoder (sdxl, sd3, flux)."""
    tokenizer_2: _DenoiserPart = Field(default_factory=PartConfig)
    """Its tokenizer."""
    text_encoder_3: _DenoiserPart = Field(default_factory=PartConfig)
    """Third text encoder (sd3); may be left out."""
    tokenizer_3: _DenoiserPart = Field(default_factory=PartConfig)
    """Its tokenizer."""
    text_encoders: Annotated[list[TextEncoderEntry], read_with("family", None, "mmdit_rope"), DENOISER] = Field(
        default_factory=list, json_schema_extra={"allowed": "a list of up to three text encoders"}
    )
    """mmdit_rope: the text encoders, each with `pretrained` or `target` and `params`, and `tokenizer`, `layer`,
    `apply_final_norm`, `pooling`, `max_tokens`, `use_mask`."""
    unet: _DenoiserPart = Field(default_factory=PartConfig)
    """Denoiser of stable_diffusion and sdxl."""
    transformer: _DenoiserPart = Field(default_factory=PartConfig)
    """Denoiser of all other families."""
    noise_scheduler_training: _DenoiserPart = Field(default_factory=PartConfig)
    """Noise schedule and prediction type of the training objective."""
    noise_scheduler_inference: _DenoiserPart = Field(default_factory=PartConfig)
    """Sampler of previews and of the exported pipeline; its noise schedule and prediction type are set from training.
    """
    train_text_encoder: Annotated[bool, DENOISER] = False
    """stable_diffusion, sdxl: train the text encoders as well; `optimizer.rates_by_part: {text_encoder: …}` gives them
    a learning rate of their own."""
    use_ema: bool = False
    """Keep an exponential moving average of the trained weights on the CPU; previews and exports use it."""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_yaml_no)] = "bf16"
    """Autocast type of the trained module; its weights stay fp32 (but see `bf16_weights`)."""
    bf16_weights: Annotated[bool, DENOISER] = False
    """Keep the trained weights themselves in bf16, without fp32 ones: half the memory. Needs `mixed_precision: bf16`
    and `optimizer.stochastic_rounding`, or small updates would be rounded away; an EMA stays fp32."""
    vae_precision: _FrozenPrecision = None
    """Autocast type of the frozen autoencoder; null: bf16 under bf16, otherwise fp32, because some overflow in fp16."""
    text_encoder_precision: _FrozenPrecision = None
    """Autocast type of the frozen text encoder; null: as `mixed_precision`."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations of the denoiser's blocks in the backward pass: less memory, about a third more time.
    `selective` keeps the results of attention and matrix products, which are slow to make again."""
    gradient_checkpointing_every: Annotated[PositiveInt, used_with("gradient_checkpointing"), DENOISER] = 1
    """Recompute every so many-th block only; 1 is all of them."""
    vae_slicing: Annotated[bool, DENOISER] = False
    """Encode one picture at a time: less memory for the autoencoder."""
    vae_tiling: Annotated[bool, DENOISER] = False
    """Encode large pictures in overlapping tiles: less memory still; the latents differ slightly at the seams."""
    vae_scaling_factor: Annotated[Literal["auto", "keep", "measure"], read_with("train", "vae")] = "auto"
    """`model.train=vae`: the `scaling_factor` of the exported autoencoder. `keep`: the one it started with. `measure`:
    1 / standard deviation of this run's latents, and their mean as `shift_factor` where it has one. `auto`: `keep` for
    pretrained weights, so that denoisers trained on them still fit, `measure` from scratch."""
    xformers: Annotated[bool, DENOISER] = False
    """Use xformers attention on CUDA where it works; elsewhere PyTorch's fused attention. A log line says which of them
    runs. An error for networks that have no attention xformers could run, such as `MMDiTRope`."""


def is_set(part: PartConfig) -> bool:
    """Whether a part was given."""
    return part.pretrained is not None or part.target is not None or bool(part.params)


def family_of_parts(model: ModelConfig) -> FamilyName:
    """`model.family`, or the family inferred from the given parts."""
    if model.family is not None:
        return model.family
    target = (model.transformer.target or "").rpartition(".")[2]
    if target in DENOISER_CLASSES:
        return DENOISER_CLASSES[target]
    if model.text_encoders:
        return "mmdit_rope"
    return "sdxl" if is_set(model.text_encoder_2) else "stable_diffusion"
