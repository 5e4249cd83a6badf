"""Every option of a run: groups of fields, one docstring with its unit per field.

Pydantic checks types and bounds and reports every problem at once. Keys of the sd-training README keep their names,
meanings and defaults. `docs/config.md` is generated from this file and `data_schema.py`. Rules between options are in
`check.py`. Importable without torch.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sd_training.config.data_schema import DatasetConfig
from sd_training.config.value_types import (
    DENOISER,
    BelowOne,
    Count,
    Int,
    NonNegative,
    Number,
    OptionGroup,
    Positive,
    PositiveInt,
    Probability,
    read_with,
    text,
    used_with,
)

FamilyName = Literal[
    "stable_diffusion", "sdxl", "sd3", "pixart", "flux", "mmdit_rope", "sana", "z_image", "qwen_image", "flux2"
]
_WITH_ONE_TEXT_ENCODER = ("vae", "text_encoder", "tokenizer", "transformer")
FAMILY_PARTS: Mapping[str, tuple[str, ...]] = {
    "stable_diffusion": ("vae", "text_encoder", "tokenizer", "unet"),
    "sdxl": ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "unet"),
    "sd3": ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer"),
    "flux": ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer"),
    "mmdit_rope": ("vae", "transformer"),
    **dict.fromkeys(("pixart", "sana", "qwen_image", "z_image", "flux2"), _WITH_ONE_TEXT_ENCODER),
}
"""Parts that a family cannot do without."""
DENOISERS = ("unet", "transformer")
OPTIONAL_PARTS: Mapping[str, tuple[str, ...]] = {"sd3": ("text_encoder_3", "tokenizer_3")}
DENOISER_CLASSES: Mapping[str, FamilyName] = {
    "SD3Transformer2DModel": "sd3",
    "PixArtTransformer2DModel": "pixart",
    "FluxTransformer2DModel": "flux",
    "MMDiTRope": "mmdit_rope",
    "SanaTransformer2DModel": "sana",
    "ZImageTransformer2DModel": "z_image",
    "QwenImageTransformer2DModel": "qwen_image",
    "Flux2Transformer2DModel": "flux2",
}
"""Class of `model.transformer.target` → family."""


def _yaml_no(value: Any) -> Any:
    """An unquoted `no` is false in YAML, and an empty value is null: both mean the word "no" here."""
    return "no" if value is False or value is None else value


def _spliced(value: Any) -> Any:
    """A list in which another option stands as `${…}` that is one text, several, or null."""
    if not isinstance(value, list):
        return value
    entries = (entry if isinstance(entry, list) else [entry] for entry in value if entry is not None)
    return [text for texts in entries for text in texts]


class PartConfig(OptionGroup):
    """One part of the pipeline: loaded from `pretrained`, or made by `target` and `params` with random weights."""

    pretrained: str | None = None
    """Local diffusers folder or hub id: the pipeline's root, or the part's own folder."""
    subfolder: Annotated[str | None, read_with("pretrained")] = None
    """Folder of the part below `pretrained`; null looks for the part's usual name, then for the part itself."""
    revision: Annotated[str | None, read_with("pretrained")] = None
    """Hub branch, tag or commit; null is the hub's main."""
    target: str | None = None
    """Class name from the allow-list in `models/load.py`, with or without the package in front."""
    params: dict[str, Any] = Field(default={})
    """Arguments of that class; for a pretrained noise scheduler they override its stored settings."""


class TextOptions(OptionGroup):
    """What is taken from one text encoder of `mmdit_rope`; its pipeline stores them too."""

    layer: Annotated[Int, Field(le=-1)] | None = -1
    """Hidden layer of the states: -1 the last one with the encoder's final norm, -2 the one before as it is, …; null:
    the pooled vector only."""
    pooling: Literal["none", "mean", "projection"] = "none"
    """Vector of the whole caption, of the last layer with its norm: `mean`: mean of the caption's tokens.
    `projection`: CLIP's `text_embeds`, for `CLIPTextModelWithProjection`."""
    max_tokens: PositiveInt = 77
    """L: captions are truncated and padded to this many tokens [count]."""
    use_mask: bool = True
    """Whether encoder and denoiser get a mask of the padding. Stable Diffusion's CLIP does not."""


def drop_final_norm(options: dict[str, Any]) -> None:
    """Removes `apply_final_norm`, an option of earlier versions, where its value is what is done now: the encoder's
    final norm for the last layer, and none for the others. With another value it stays, as an unknown option."""
    layer = options.get("layer", -1)
    if layer is None or options.get("apply_final_norm") is (layer == -1):
        options.pop("apply_final_norm", None)


class TextEncoderEntry(TextOptions, PartConfig):
    """One text encoder of `mmdit_rope`: any encoder or decoder of transformers, with its tokenizer."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; null: as `pretrained`."""


_ADAPTED = read_with("rank")


class LoraConfig(OptionGroup):
    """Low-rank adapters (LoRA, arXiv:2106.09685) beside frozen weights: only they are trained, averaged and
    checkpointed. They are exported as `pytorch_lora_weights.safetensors`."""

    rank: Count = 0
    """r: an adapted layer of `in` inputs and `out` outputs gets r · (in + out) weights; 0: no LoRA, all weights are
    trained [count]."""
    alpha: Annotated[Positive | None, _ADAPTED] = None
    """What the adapters add is multiplied by alpha / r; null: r, which is a factor of 1."""
    dropout: Annotated[BelowOne, _ADAPTED] = 0.0
    """Share of an adapter's inputs that is set to 0 in training."""
    targets: Annotated[list[str], _ADAPTED] = Field(default=[], json_schema_extra={"allowed": "a list of names"})
    """Layers that are adapted, by the ends of their dotted names in the denoiser, such as `to_q` or `ff.net.2`: linear
    layers and convolutions. Empty: all matrices of its attention."""
    text_encoder: Annotated[bool, _ADAPTED] = False
    """stable_diffusion, sdxl: adapt the attention of the text encoders as well."""
    init: Annotated[Literal["kaiming", "gaussian"], _ADAPTED] = "kaiming"
    """Initial A: uniform as in torch's linear layers, or normal with standard deviation 1 / r. B starts at 0."""
    base: Annotated[Literal["auto", "int8"], _ADAPTED] = "auto"
    """Type of the frozen weights: `auto`: that of `mixed_precision`; `int8`: those of the linear layers in the
    denoiser's blocks have 8 bits, which rounds them. One process or `ddp`."""
    merge: Annotated[bool, _ADAPTED] = True
    """Export a whole pipeline with the adapters added to the weights in fp32, beside the file of the adapters; false:
    that file alone."""


_DenoiserPart = Annotated[PartConfig, DENOISER]
_FrozenPrecision = Annotated[Literal["fp32", "bf16", "fp16"] | None, DENOISER]


class ModelConfig(OptionGroup):
    """The pipeline's parts and how the trained one is run."""

    pretrained: str | None = None
    """Pipeline folder or hub id for every part at once; wins over the parts' own settings, as in sd-training, but for
    `model.unet.pretrained` and `model.transformer.pretrained`, which replace that part only."""
    revision: Annotated[str | None, read_with("pretrained")] = None
    """Hub branch, tag or commit of `model.pretrained`."""
    single_file_config: Annotated[str | None, read_with("pretrained"), DENOISER] = None
    """Where `pretrained` is one `*.safetensors` file of stable_diffusion or sdxl in the original layout: a local
    pipeline folder of the same architecture, with its settings, tokenizers and scheduler; its weights are not read."""
    from_scratch: Annotated[bool, read_with("pretrained"), DENOISER] = False
    """Beside `pretrained`: begin the denoiser alone with random weights, in its stored architecture with the `params`
    of `model.unet` or `model.transformer` on top."""
    family: Annotated[FamilyName | None, DENOISER] = None
    """Kind of pipeline; null: that of `pretrained`, or inferred from the given parts."""
    train: Literal["denoiser", "vae"] = "denoiser"
    """Which part is trained: the denoiser (a UNet or a transformer), or the autoencoder itself."""
    vae: PartConfig = PartConfig()
    """Image autoencoder; frozen unless `model.train` is `vae`."""
    text_encoder: _DenoiserPart = PartConfig()
    """Frozen text encoder."""
    tokenizer: _DenoiserPart = PartConfig()
    """Tokenizer of the text encoder."""
    text_encoder_2: _DenoiserPart = PartConfig()
    """Second text encoder (sdxl, sd3, flux)."""
    tokenizer_2: _DenoiserPart = PartConfig()
    """Its tokenizer."""
    text_encoder_3: _DenoiserPart = PartConfig()
    """Third text encoder (sd3); may be left out."""
    tokenizer_3: _DenoiserPart = PartConfig()
    """Its tokenizer."""
    text_encoders: Annotated[list[TextEncoderEntry], read_with("family", None, "mmdit_rope"), DENOISER] = Field(
        default=[], json_schema_extra={"allowed": "a list of up to three text encoders"}
    )
    """mmdit_rope: the text encoders, each with `pretrained` or `target` and `params`, and `tokenizer`, `layer`,
    `pooling`, `max_tokens`, `use_mask`."""
    unet: _DenoiserPart = PartConfig()
    """Denoiser of stable_diffusion and sdxl."""
    transformer: _DenoiserPart = PartConfig()
    """Denoiser of all other families."""
    noise_scheduler_training: _DenoiserPart = PartConfig()
    """Noise schedule and prediction type of the training objective."""
    noise_scheduler_inference: _DenoiserPart = PartConfig()
    """Sampler of previews and of the exported pipeline; its noise schedule and prediction type are set from training.
    """
    train_text_encoder: Annotated[bool, DENOISER] = False
    """stable_diffusion, sdxl: train the text encoders as well; `optimizer.rates_by_part: {text_encoder: …}` gives them
    a learning rate of their own."""
    lora: Annotated[LoraConfig, DENOISER] = LoraConfig()
    """Train adapters instead of the weights of `pretrained`."""
    use_ema: bool = False
    """Keep an exponential moving average of the trained weights; previews and exports use it."""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_yaml_no)] = "bf16"
    """Autocast type of the trained module; its weights stay fp32 (but see `bf16_weights`)."""
    bf16_weights: Annotated[bool, DENOISER] = False
    """Keep the trained weights themselves in bf16, without fp32 ones: half the memory. Needs `mixed_precision: bf16`
    and `optimizer.stochastic_rounding`, or small updates would be rounded away; an EMA stays fp32."""
    float8: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, DENOISER] = None
    """Compute the linear layers in the blocks of a transformer in float8: which recipe of torchao, all with scales that
    follow every tensor, or every row of it. Weights, checkpoints and exports stay as they are. Needs the package
    torchao, a GPU of compute capability 8.9 or more and `mixed_precision: bf16`; is meant for `trainer.compile`."""
    bf16_norms: Annotated[bool, DENOISER] = False
    """Keep activations around the denoiser's layer norms in bf16 on CUDA, where autocast makes them fp32; mean and
    deviation stay fp32. Saves memory and traffic without `trainer.compile`, which fuses the conversions away. Group
    norms stay as they are."""
    vae_precision: _FrozenPrecision = None
    """Autocast type of the frozen autoencoder; null: bf16 under bf16, otherwise fp32, because some overflow in fp16."""
    text_encoder_precision: _FrozenPrecision = None
    """Autocast type of the frozen text encoder; null: as `mixed_precision`."""
    gradient_checkpointing: bool = False
    """Recompute activations of the denoiser's blocks in the backward pass: less memory, about a third more time."""
    vae_slicing: Annotated[bool, DENOISER] = False
    """Encode one picture at a time: less memory for the autoencoder."""
    vae_tiling: Annotated[bool, DENOISER] = False
    """Encode large pictures in overlapping tiles: less memory still; the latents differ slightly at the seams."""
    vae_trained: Annotated[Literal["all", "decoder"], read_with("train", "vae")] = "all"
    """`model.train=vae`: the whole autoencoder, or the decoder alone: latents stay what they are, so that existing
    denoisers fit."""
    vae_scaling_factor: Annotated[Literal["auto", "keep", "measure"], read_with("train", "vae")] = "auto"
    """`model.train=vae`: the `scaling_factor` of the exported autoencoder. `keep`: the one it started with. `measure`:
    1 / standard deviation of this run's latents, and their mean as `shift_factor` where it has one. `auto`: `keep` for
    pretrained weights, so that denoisers trained on them still fit, `measure` from scratch."""
    vae_batch: Annotated[Count, DENOISER] = 0
    """Encode so many pictures at a time: less memory for the autoencoder; 0: the whole micro-batch [count]."""
    attention: Annotated[Literal["auto", "cudnn", "flash", "efficient", "math", "xformers"], DENOISER] = "auto"
    """Attention kernel. `auto`: torch's choice. `cudnn`, `flash`, `efficient` and `math` are those of torch's
    `scaled_dot_product_attention`; they hold for all networks of the run, and where one cannot run a call, torch takes
    another. `xformers` is for the denoiser. An error where it can run no attention of the denoiser on this device. A
    log line says which kernels run."""
    xformers: Annotated[bool, DENOISER] = False
    """sd-training's name of `model.attention=xformers`, for files that are shared between machines: without CUDA or
    xformers it is torch's choice, as a log line says. An error for networks that have no attention xformers could run,
    such as `MMDiTRope`."""

    @property
    def trains_text(self) -> bool:
        """Whether text encoders, or adapters in them, are trained."""
        return self.train_text_encoder or self.lora.text_encoder

    @property
    def text_option(self) -> str:
        """The option that says so."""
        return "model.lora.text_encoder" if self.lora.text_encoder else "model.train_text_encoder"


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


PredictionType = Literal["epsilon", "v_prediction", "sample", "flow_prediction", "edm"]
DensityName = Literal["uniform", "logit_normal", "mode", "cosmap", "log_normal"]
WeightingName = Literal["constant", "min_snr", "soft_min_snr", "p2", "debiased", "sigma_sqrt", "cosmap", "edm"]
PresetName = Literal["sd", "sd_v", "sdxl", "sd3", "edm"]
_NORMAL = read_with("name", "logit_normal", "log_normal")
_LEVELS = read_with("name", None, "uniform", "logit_normal", "mode", "cosmap")
_TOKENS = read_with("mode", "tokens")
_HUBER = read_with("name", "huber")
_DISCRETE = read_with("prediction_type", None, "epsilon", "v_prediction", "sample")


class TimestepDensityConfig(OptionGroup):
    """How often each noise level is trained. Noise levels run from 0 (clean) to 1 (pure noise)."""

    name: DensityName | None = None
    """`uniform`; of Esser et al. 2024 (arXiv:2403.03206, section 3.1) `logit_normal`, `mode`, `cosmap`; and
    for EDM `log_normal` (Karras et al. 2022, arXiv:2206.00364, table 1). null: the preset's, or uniform."""
    mean: Annotated[Number | None, _NORMAL] = None
    """`logit_normal`: m; `log_normal`: mean of ln σ. null: 0; of `log_normal` −1.2 + ln(2 σ_data),
    as EDM."""
    std: Annotated[Positive | None, _NORMAL] = None
    """`logit_normal`: s; `log_normal`: standard deviation of ln σ. null: the preset's, or 1."""
    mode_scale: Annotated[Number, Field(ge=-1, le=2 / (math.pi - 2)), read_with("name", "mode")] = 1.29
    """`mode`: s; flat at 0, peaked in the middle above. Beyond 2 / (π − 2) levels would run backwards."""
    low: Annotated[Probability, _LEVELS] = 0.0
    """The density is squeezed into low..high."""
    high: Annotated[Probability, _LEVELS] = 1.0
    """See `low`."""
    stratified: bool = False
    """Draw one noise level from each of G equal parts of the density at every optimizer step of G samples, instead of
    independently: the same density, less variance."""


class ShiftConfig(OptionGroup):
    """Flow models: σ' = aσ / (1 + (a − 1)σ) (Esser et al. 2024, eq. 23), in training and in the exported sampler."""

    mode: Annotated[Literal["scheduler", "static", "tokens"], read_with("prediction_type", None, "flow_prediction")] = (
        "scheduler"
    )
    """`scheduler`: as the training noise scheduler says. `static`: a = `value`. `tokens`: a = exp(μ), μ linear in the
    image tokens, as in FLUX."""
    value: Annotated[Positive, read_with("mode", "static")] = 1.0
    """`static`: a; 1 is no shift."""
    base_tokens: Annotated[PositiveInt, _TOKENS] = 256
    """`tokens`: μ is `base_shift` here [count]."""
    max_tokens: Annotated[PositiveInt, _TOKENS] = 4096
    """`tokens`: μ is `max_shift` here [count]."""
    base_shift: Annotated[Number, _TOKENS] = 0.5
    """See `base_tokens`."""
    max_shift: Annotated[Number, _TOKENS] = 1.15
    """See `max_tokens`."""


class LossWeightingConfig(OptionGroup):
    """How much the error at a noise level weighs."""

    name: WeightingName | None = None
    """`min_snr` (arXiv:2303.09556), `soft_min_snr` (arXiv:2401.11605), `p2` (arXiv:2204.00227), `debiased`
    (arXiv:2310.08442); for flow models `sigma_sqrt` and `cosmap` (arXiv:2403.03206); for EDM `edm` (arXiv:2206.00364).
    null: the preset's, or constant."""
    gamma: Annotated[Positive, read_with("name", "min_snr", "soft_min_snr")] = 5.0
    """`min_snr`, `soft_min_snr`: γ."""
    p2_gamma: Annotated[NonNegative, read_with("name", "p2")] = 1.0
    """`p2`: γ."""
    p2_k: Annotated[Positive, read_with("name", "p2")] = 1.0
    """`p2`: k."""


class LossConfig(OptionGroup):
    """How large an error is."""

    name: Literal["l2", "huber"] = "l2"
    """Squared error, or pseudo-Huber 2δ(√(e² + δ²) − δ)."""
    huber_delta: Annotated[Positive, _HUBER] = 0.1
    """`huber`: δ; with a schedule its smallest value."""
    huber_schedule: Annotated[Literal["constant", "snr", "exponential"], _HUBER] = "snr"
    """`huber`: δ constant, (1 − δ) / (1 + σ/α)² + δ, or δ^t over the noise levels t (arXiv:2403.16728)."""


_TRAINED_VAE = read_with("model.train", "vae")
_TRAINED_ENCODER = read_with("model.vae_trained", "all")
_PERCEPTUAL = read_with("perceptual_path")
_ADVERSARIAL = read_with("weight")


class ReconstructionConfig(OptionGroup):
    """Autoencoder training: how far a reconstruction is from its picture (docs/autoencoder.md)."""

    loss: Literal["l1", "l2"] = "l1"
    """Absolute or squared error, mean per pixel value; pixels are in [-1, 1]."""
    perceptual_path: str | None = None
    """Local folder of a frozen network whose features are compared as well: `*.safetensors` of VGG16 and of LPIPS's
    heads, or a ResNet, ConvNeXt or DINOv2 of transformers. null: no perceptual term."""
    perceptual_weight: Annotated[NonNegative, _PERCEPTUAL] = 1.0
    """Weight of the perceptual term beside `loss`."""


class AdversarialConfig(OptionGroup):
    """Autoencoder training: a discriminator of patches that is trained against the autoencoder (docs/autoencoder.md).
    It is a part of its own in `optimizer.rates_by_part`."""

    weight: NonNegative = 0.0
    """Weight of the adversarial term; 0: no discriminator."""
    start: Annotated[Count, _ADVERSARIAL] = 0
    """Train the discriminator, and add the adversarial term, after so many optimizer steps [count]."""
    adaptive: Annotated[bool, _ADVERSARIAL] = True
    """Multiply the weight by the ratio of the norms of the gradients of reconstruction and adversarial term at the
    decoder's last layer (Esser et al. 2021, arXiv:2012.09841, eq. 7)."""
    channels: Annotated[PositiveInt, _ADVERSARIAL] = 64
    """Channels of the discriminator's first layer; the next ones double them, up to 8 times as many [count]."""
    layers: Annotated[PositiveInt, _ADVERSARIAL] = 3
    """Layers that halve the sides: 3 make patches of 70 × 70 pixels (Isola et al. 2017, arXiv:1611.07004) [count]."""


class ObjectiveConfig(OptionGroup):
    """What the denoiser is asked to predict, and how errors are weighted."""

    preset: PresetName | None = None
    """Settings that go together; every option given beside it wins. `sd`: ε. `sd_v`: v with zero terminal SNR. `sdxl`:
    ε with offset noise 0.05. `sd3`: rectified flow, logit-normal. `edm`: EDM preconditioning."""
    prediction_type: PredictionType | None = None
    """Target of the denoiser; null takes the preset's, or the training noise scheduler's. It is written into the
    exported scheduler."""
    rescale_betas_zero_snr: Annotated[bool | None, _DISCRETE] = None
    """Zero terminal SNR (Lin et al. 2023, arXiv:2305.08891, algorithm 1); null takes the preset's, or the training
    noise scheduler's."""
    timestep_density: TimestepDensityConfig = TimestepDensityConfig()
    """Timestep density."""
    shift: ShiftConfig = ShiftConfig()
    """Resolution-dependent shift."""
    loss_weighting: LossWeightingConfig = LossWeightingConfig()
    """Loss weighting."""
    snr_gamma: Positive | None = None
    """Short for `loss_weighting: {name: min_snr, gamma: …}`."""
    loss: LossConfig = LossConfig()
    """Loss."""
    offset_noise: NonNegative | None = None
    """s of ε + s·η with one η per channel, which is also what ε-models are asked for; null: the preset's, or 0."""
    input_perturbation: NonNegative = 0.0
    """γ of noising with ε + γξ while the target keeps ε (Ning et al. 2023, arXiv:2301.11706)."""
    masked_loss: Literal["none", "alpha"] = "none"
    """`alpha`: multiply the error of each latent cell by how opaque the image is there (PNG and WebP with alpha; other
    images count fully). What is transparent is trained as white, with no weight."""
    sigma_data: Annotated[Positive | None, read_with("prediction_type", None, "edm")] = None
    """EDM: standard deviation of the latents; null: the training noise scheduler's, or 1, which scaled latents have."""
    kl_weight: Annotated[NonNegative, _TRAINED_VAE, _TRAINED_ENCODER] = 1e-6
    """Autoencoder training: weight of the KL term beside the L1 term, both averaged per pixel value."""
    kl_warmup: Annotated[Count, _TRAINED_VAE, _TRAINED_ENCODER] = 0
    """Autoencoder training: let `kl_weight` grow linearly from 0 [optimizer steps]; 0: at once."""
    reconstruction: Annotated[ReconstructionConfig, _TRAINED_VAE] = ReconstructionConfig()
    """Reconstruction loss."""
    adversarial: Annotated[AdversarialConfig, _TRAINED_VAE] = AdversarialConfig()
    """Adversarial loss."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Rombach et al. 2022 (arXiv:2112.10752).
    "sd": {"prediction_type": "epsilon"},
    # Salimans & Ho 2022 (arXiv:2202.00512) with Lin et al. 2023 (arXiv:2305.08891).
    "sd_v": {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    # Podell et al. 2023 (arXiv:2307.01952, section 2.5): the last stage has offset noise 0.05.
    "sdxl": {"prediction_type": "epsilon", "offset_noise": 0.05},
    # Esser et al. 2024 (arXiv:2403.03206, section 5.1): rf/lognorm(0, 1).
    "sd3": {
        "prediction_type": "flow_prediction",
        "timestep_density": {"name": "logit_normal", "mean": 0.0, "std": 1.0},
    },
    # Karras et al. 2022 (arXiv:2206.00364, table 1). P_mean follows from the deviation of the latents.
    "edm": {
        "prediction_type": "edm",
        "timestep_density": {"name": "log_normal", "std": 1.2},
        "loss_weighting": {"name": "edm"},
    },
}


def with_preset(objective: ObjectiveConfig) -> ObjectiveConfig:
    """The options with what they leave null filled in from their preset and from `snr_gamma`."""
    chosen = dict(PRESETS[objective.preset]) if objective.preset else {}
    density = _filled(objective.timestep_density, chosen.pop("timestep_density", {}))
    weighting = _filled(objective.loss_weighting, chosen.pop("loss_weighting", {}))
    is_given = weighting.gamma not in (LossWeightingConfig().gamma, objective.snr_gamma)
    if objective.snr_gamma is not None and weighting.name in (None, "min_snr") and not is_given:
        weighting = weighting.replace(name="min_snr", gamma=objective.snr_gamma)
    return _filled(objective, chosen).replace(timestep_density=density, loss_weighting=weighting)


def _filled(group: Any, settings: Mapping[str, Any]) -> Any:
    """A group with another name of its own takes nothing from the preset's."""
    if getattr(group, "name", None) not in (None, settings.get("name")):
        return group
    return group.replace(**{name: value for name, value in settings.items() if getattr(group, name) is None})


StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"]
MeshAxis = Annotated[Int, Field(ge=-1)]
MESH_AXES = ("data", "fsdp", "tensor")
_DEEPSPEED = read_with("strategy", "deepspeed_1", "deepspeed_2", "deepspeed_3")


class MeshConfig(OptionGroup):
    """Processes as a block of `data` × `fsdp` × `tensor`, instead of a strategy; the product is the number of
    processes. At most one is -1: as many as are left. All 1: not set."""

    @property
    def is_set(self) -> bool:
        """Whether the run is laid out by axes."""
        return any(getattr(self, axis) != 1 for axis in MESH_AXES)

    data: MeshAxis = 1
    """Copies of the weights, each with its own samples."""
    fsdp: MeshAxis = 1
    """Processes that share one copy of the weights, each with its own samples."""
    tensor: MeshAxis = 1
    """Processes that share the matrices of a transformer block and its samples."""


class DistributedConfig(OptionGroup):
    """How weights, gradients and optimizer state lie over the processes; the numbers of a run do not depend on it."""

    strategy: Literal["auto"] | StrategyName = "auto"
    """`auto`: `mesh` where it is set; otherwise `ddp`, and no process group for a single process. `fsdp` shards
    weights, gradients and optimizer state over all processes, `hsdp` over those of a machine. `deepspeed_1` shards the
    optimizer state, `deepspeed_2` the gradients too, `deepspeed_3` the weights too. See docs/scaling.md."""
    mesh: MeshConfig = MeshConfig()
    """Processes by axis, such as `{data: -1, fsdp: 8, tensor: 1}`."""
    reshard_after_forward: bool = True
    """fsdp, hsdp: reshard the weights of a block after its forward pass. False is faster and needs more memory."""
    offload_optimizer: Annotated[bool, _DEEPSPEED] = False
    """Keep the optimizer state in CPU memory and update there."""
    offload_parameters: bool = False
    """fsdp, hsdp: keep weights, gradients and optimizer state in CPU memory. deepspeed_3: the weights."""
    dist_backend: Literal["nccl", "gloo"] = "nccl"
    """Communication library; `nccl` becomes `gloo` on a machine without CUDA, with one line saying so."""
    encoders: Literal["auto"] | Count = 0
    """Processes per machine that read the data and run the autoencoder and the frozen text encoders, on devices of
    their own, beside the training processes; 0: every training process does; `auto`: as many as keep up, by FLOPs, or
    as a launcher leaves GPUs. The numbers of a run do not depend on it. See docs/encoders.md."""
    encoder_devices: list[Count] = Field(default=[])
    """GPU of each encoder process; empty: the last ones of the machine."""


_COMPILED = read_with("compile", "blocks", "full")


class TrainerConfig(OptionGroup):
    """Which devices train, and how the network is run on them. torchrun and SLURM decide the number of processes
    themselves."""

    accelerator: Literal["auto", "cpu", "cuda", "gpu", "mps"] = "auto"
    """Device kind; ROCm devices are `cuda`."""
    devices: Literal["auto"] | PositiveInt = "auto"
    """Processes on this machine when started with plain `python`; `auto`: every GPU, or one CPU process."""
    num_nodes: PositiveInt | None = None
    """Machines; null takes it from torchrun or SLURM."""
    compile: Annotated[Literal["off", "blocks", "full"], DENOISER] = "off"
    """torch.compile of the denoiser and of the frozen autoencoder's encoder. `blocks`: the denoiser's repeated blocks,
    one after the other, which starts soon. `full`: the whole denoiser as one graph. One set of graphs per bucket size.
    The compiled code is kept in the run folder for the next start."""
    compile_mode: Annotated[Literal["default", "max-autotune", "reduce-overhead"], _COMPILED] = "default"
    """`mode` of torch.compile. `max-autotune`: tries more kernels, which takes minutes to hours at the start; on CUDA
    with CUDA graphs, unless gradients are accumulated or weights sharded. `reduce-overhead`: CUDA graphs alone, for
    small batches; CUDA only, without accumulation and sharding."""
    activation_budget: Annotated[Probability, _COMPILED] = 1.0
    """Share of the activations that a compiled graph may keep for its backward pass: 1 keeps what torch.compile
    chooses, 0 as little as full recomputation of the graph."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Matrix products in fp32: `highest` in fp32, `high` in TF32 on CUDA, `medium` also in bf16 where that is faster.
    Products that autocast runs in bf16 or fp16 are not affected."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its convolution algorithms at the first step of each shape and take the fastest; the choice, and
    so the rounding, may then differ from start to start. Only for CUDA."""
    channels_last: Literal["auto"] | bool = "auto"
    """Lay out convolutional denoisers and the autoencoder with channels last; `auto`: on CUDA, and a frozen autoencoder
    on a CPU."""


_BUCKET = text(r"^((s3|gs)://[^/@]+(/.*)?|file:///.*)$", "a URL of s3://, gs:// or file:/// without user or key")


class CheckpointConfig(OptionGroup):
    """Resumable state beside the exported pipeline (docs/checkpoints.md)."""

    keep: Annotated[Int, Field(ge=2)] = 2
    """Newest checkpoints kept; at least two, so that a damaged newest one never loses the run [count]."""
    save_every_minutes: Positive | None = None
    """Save as well when the last save is this long ago [minutes]; null: only every `experiment.save_every` steps."""
    milestone_every: Count = 0
    """Save every so many optimizer steps as well, and never delete these checkpoints; 0: none."""
    keep_best: Count = 0
    """Keep so many checkpoints with the lowest validation loss of the exported weights, beside the newest ones; needs
    `validation.path`. 0: none. It is never a reason to save [count]."""
    max_failed_saves: PositiveInt = 3
    """A save that fails (full disk, quota, read-only folder) is logged and retried when the next one is due; this many
    in a row end the run with status 74 [count]. The last save of a run must succeed."""
    asynchronous: bool = False
    """Copy what is saved to CPU memory after the optimizer step, and write, hash, flush and export it in the background
    while training continues. The same bytes. One save at a time: the next one and the end of the run wait for it. Extra
    CPU memory: on each rank its part of a checkpoint, on rank 0 the exported network as well."""
    mirror: Annotated[str, _BUCKET] | None = None
    """URL of a folder (`s3://…`, `gs://…` or `file:///…`) that gets copies of the checkpoints, in the background, at
    `<mirror>/<experiment.name>/checkpoints`; a run resumes from them where its own folder has no checkpoint as new.
    Keys and endpoints come from the environment."""


class ValidationConfig(OptionGroup):
    """The loss on pictures that are not trained on, always with the same noise at the same noise levels
    (docs/validation.md)."""

    path: str | list[str] | None = None
    """Held-out data, read as `dataset.params.path` is: of the type, and with the filters, captions and sizes of
    `dataset`, but cut from the middle and not mirrored. null: no validation."""
    every: Annotated[PositiveInt, used_with("path")] = 1000
    """Measure every so many optimizer steps, before the first one and after the last one."""
    num_samples: Annotated[PositiveInt, used_with("path")] = 512
    """Samples, spread evenly over the held-out data; all of them where there are fewer [count]."""
    inception: Annotated[str | None, used_with("path"), _TRAINED_VAE] = None
    """As `evaluation.inception`; measures `rfid`, the Fréchet distance of pictures and reconstructions in its features.
    null: it is not measured."""
    num_levels: Annotated[PositiveInt, used_with("path"), DENOISER] = 8
    """Noise levels at which each sample is measured: the middles of so many equally likely parts of
    `objective.timestep_density` [count]."""


SECTIONS = ("start", "data", "step", "save", "validate")
"""What a process does, in the words of the options `watch.<section>_s`."""


class WatchConfig(OptionGroup):
    """The hang watch (docs/watch.md): a process that stays in one section for longer writes its stacks and ends the run
    with status 87. null: no limit."""

    start_s: Positive | None = 1800.0
    """From the loading of the model to the end of the first optimizer step, compilation included [s]."""
    data_s: Positive | None = 600.0
    """Waiting for a micro-batch [s]."""
    step_s: Positive | None = 600.0
    """Forward, backward, optimizer and metrics of a micro-batch [s]."""
    save_s: Positive | None = 1800.0
    """A checkpoint and its export [s]."""
    validate_s: Positive | None = 1800.0
    """Drawing previews or evaluation images, or a whole validation [s]."""
    collective_timeout_s: Positive = 2400.0
    """How long the processes of a group wait for each other; above the limits of the sections, whose reports are more
    precise [s]."""


class NumericsConfig(OptionGroup):
    """Non-finite steps, loss spikes, and replicas that no longer agree (docs/numerics.md)."""

    max_skipped_in_a_row: PositiveInt = 10
    """A step with a non-finite loss or gradient is skipped. After so many in a row the run rolls back to a checkpoint
    before the first of them [optimizer steps]."""
    max_rollbacks: Count = 3
    """The run ends with status 86 instead of another rollback; 0 ends it the first time [count]."""
    on_spike: Literal["record", "rollback"] = "record"
    """After a loss spike, `record` writes an incident file; `rollback` also resumes from a checkpoint before it."""
    spike_threshold: Positive = 6.0
    """A spike is a median of the last 5 steps' log loss that lies so many robust standard deviations (1.4826 × median
    absolute deviation) above the median of the 200 steps before."""
    digest_every: Count = 1000
    """Compare the trained weights of all replicas, bit for bit, every so many optimizer steps and before every save;
    0: never. Only with ddp and hsdp."""


class WandbConfig(OptionGroup):
    """Weights & Biases. Off without a key (here, in `WANDB_API_KEY`, of `wandb login`), unless `mode` asks for it."""

    api_key: str | None = Field(default=None, repr=False)
    """API key. The normal way in is the environment variable `WANDB_API_KEY`; a key given here is used and never
    written anywhere."""
    entity: str | None = None
    """User or team that owns the project; null is the account's default."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: the environment variable `WANDB_MODE`; without it `online` with a key and `disabled` without one.
    `online` is refused without a key; `offline` writes to the run folder for a later `wandb sync`."""


class SystemConfig(OptionGroup):
    """Batch arithmetic and loader processes."""

    gradient_accumulation: PositiveInt = 1
    """Micro-batches per optimizer step and process [count]."""
    batch_size: PositiveInt = 32
    """Micro-batch: samples per process and forward pass. Global batch = batch_size × gradient_accumulation ×
    processes."""
    workers: Count = 6
    """Loader processes per training process; 0 reads in the training process. SLURM: equal to cpus-per-task."""


_FOLDER_NAME = text(
    r"^(?:[^/\\$~.]|\.+[^/\\$.])[^/\\$]*$", "a text that can name a folder, without slashes and $, not beginning with ~"
)


LENGTHS = ("num_examples_to_see", "num_steps", "num_epochs")
"""Options of `experiment` of which one is given."""


class ExperimentConfig(OptionGroup):
    """Where a run lives, how long it is, and what it leaves behind."""

    log_dir: str
    """Local or mounted folder of all runs; this run lives in `log_dir/name`. `~` and `$NAME`, a variable of the
    environment with the same value on all machines, are expanded. Copies of checkpoints in object stores:
    `checkpoint.mirror`."""
    name: Annotated[str, _FOLDER_NAME]
    """Name of the run, its folder and its W&B run."""
    project: str = "sd_training"
    """W&B project."""
    num_examples_to_see: PositiveInt | None = None
    """Length of the run [samples over all processes]; optimizer steps = num_examples_to_see // global batch. Required,
    or `num_steps`, or `num_epochs`."""
    num_steps: PositiveInt | None = None
    """Length of the run [optimizer steps], instead of `num_examples_to_see`."""
    num_epochs: Positive | None = None
    """Length of the run [passes over the selected samples of `dataset.params`], instead of `num_examples_to_see`. Not
    with `dataset.mix` or `dataset.prior`."""
    save_only_most_recent: bool = True
    """True: `current_pipeline/` is replaced at each save. False: every `pipelines/step_N/` is kept and
    `current_pipeline` points at the newest."""
    save_every: PositiveInt = 2000
    """Interval between saves [optimizer steps]."""
    max_hours: Positive | None = None
    """Save and end with status 75 before a start of the run has taken this long [hours]; null: no limit. The time limit
    of a SLURM job is always respected."""
    requeue: bool = True
    """The same command again resumes from the newest checkpoint that verifies. False: an existing run folder is an
    error."""
    start_from: str | None = None
    """Begin a new run with the weights and the state of another run's checkpoint: its folder
    `RUN/checkpoints/step=N`, or `RUN` for the newest that verifies. Only read; once this run has a checkpoint of its
    own, it resumes from that (docs/checkpoints.md)."""
    start_from_average: Annotated[bool, read_with("start_from")] = False
    """Begin with the average of `start_from` as weights, instead of the raw ones."""
    reset: Annotated[list[Literal["optimizer", "ema", "data", "wandb"]], read_with("start_from")] = Field(default=[])
    """What begins anew instead of continuing from `start_from`. `optimizer`: its state and the loss scale. `ema`: the
    averages, at the weights. `data`: the order of the samples, and with it the count of optimizer steps and the
    learning-rate schedule. `wandb`: the W&B run."""
    allow_changed: list[str] = Field(default=[])
    """Options that a resumed run may change although they decide what it exports, such as `[model.use_ema]`; any other
    change of such an option is refused (docs/checkpoints.md)."""
    eval_caption_file: Annotated[str | None, DENOISER] = None
    """CSV with the columns `uid,caption`; at each save one image per row is drawn into `samples/step_N/eval/`. Null:
    no evaluation images."""
    num_eval_images: Annotated[PositiveInt, used_with("eval_caption_file"), DENOISER] = 1000
    """At most this many rows of `eval_caption_file` [images over all processes]."""
    seed: Int = 0
    """Seed of every random draw of the run: data order, crops, noise, timesteps, initial weights."""

    @property
    def length_option(self) -> str:
        """Name of the option that gives the length of the run."""
        return next(f"experiment.{name}" for name in LENGTHS if getattr(self, name) is not None)


OptimizerName = Literal["adamw", "adafactor", "adamw_8bit", "lion", "prodigy", "muon"]
ScheduleName = Literal[
    "ConstantWithWarmup", "CosineWithWarmup", "constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd"
]
_ADAM = ("adamw", "adamw_8bit", "prodigy", "muon")
_MOMENTUM = read_with("name", *_ADAM, "lion")
_FALLING = read_with("scheduler", "linear", "cosine", "CosineWithWarmup", "polynomial", "wsd")


class OptimizerParams(OptionGroup):
    """Hyper-parameters; those of AdamW are eq. 12 of Loshchilov & Hutter 2019 (arXiv:1711.05101)."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate [1/optimizer step]; see `scale_lr`. `prodigy` finds the rate itself and multiplies it by this:
    1 is usual. `lion` wants about a third to a tenth of AdamW's."""
    beta1: Annotated[BelowOne, _MOMENTUM] = 0.9
    """Decay of the gradient average [per optimizer step]."""
    beta2: Annotated[BelowOne, _MOMENTUM] = 0.98
    """Decay of the squared-gradient average, with `lion` of the momentum [per optimizer step]."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay [× learning rate per optimizer step]."""
    epsilon: Annotated[Positive, read_with("name", *_ADAM)] = 1e-8
    """Added to the denominator."""
    momentum: Annotated[BelowOne, read_with("name", "muon")] = 0.95
    """`muon`: decay of the gradient average of matrices [per optimizer step]."""
    d0: Annotated[Positive, read_with("name", "prodigy")] = 1e-6
    """`prodigy`: first estimate of the distance to the solution."""
    d_coef: Annotated[Positive, read_with("name", "prodigy")] = 1.0
    """`prodigy`: factor of the estimated learning rate."""


class OptimizerConfig(OptionGroup):
    """Which optimizer updates the trained parts."""

    name: OptimizerName = "adamw"
    """Optimizer by name. `adamw_8bit` needs CUDA. `muon` orthogonalizes the updates of hidden matrices and kernels, at
    AdamW's learning rate, and leaves the rest to AdamW."""
    params: OptimizerParams = OptimizerParams()
    """Its hyper-parameters."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply all learning rates by the global batch, or by its square root: they are then rates of a batch of 1.
    `linear` is `--scale_lr` of diffusers' scripts."""
    max_grad_norm: Positive | None = None
    """Clip the global L2 norm of the gradient, once per optimizer step; null: no clipping."""
    no_decay_on_norms_and_biases: bool = False
    """No weight decay on biases and on parameters with one dimension (weights of norms, scales)."""
    rates_by_part: dict[str, NonNegative] = Field(default={})
    """Peak learning rates of named parts, such as `{text_encoder: 1e-6}`, with the same schedule; the others take
    `params.learning_rate`. Not with `prodigy`."""
    stochastic_rounding: Annotated[bool, read_with("name", "adamw"), read_with("model.bf16_weights")] = False
    """`adamw` on bf16 weights: compute in fp32 and round at random, without bias, so that small updates are not lost.
    Weights that are kept in fp32 (the normal case) need no rounding."""


class LRScheduleParams(OptionGroup):
    """Shape of the learning-rate schedule."""

    learning_rate: NonNegative | None = None
    """Peak learning rate; null takes `optimizer.params.learning_rate`. As in sd-training, the schedule's value wins."""
    warmup_length: Count = 500
    """Linear warm-up [optimizer steps]."""
    warmup_images: PositiveInt | None = None
    """Linear warm-up [samples over all processes], instead of `warmup_length`."""
    end_factor: Annotated[Probability, _FALLING] = 0.0
    """`linear`, `cosine`, `polynomial`, `wsd`: learning rate at the end of the run [share of the peak]."""
    power: Annotated[Positive, read_with("scheduler", "polynomial")] = 1.0
    """`polynomial`: exponent."""
    reference_length: Annotated[PositiveInt, read_with("scheduler", "inverse_sqrt")] = 70_000
    """`inverse_sqrt`: the learning rate falls after this many optimizer steps [count]."""
    decay_length: Annotated[PositiveInt | None, read_with("scheduler", "wsd")] = None
    """`wsd`: length of the final decay [optimizer steps]; null: a fifth of the run."""
    decay_shape: Annotated[Literal["linear", "1-sqrt"], read_with("scheduler", "wsd")] = "1-sqrt"
    """`wsd`: 1 - x or 1 - √x, x from 0 to 1 over the decay."""


class LRScheduleConfig(OptionGroup):
    """Learning rate as a pure function of the optimizer step."""

    scheduler: ScheduleName = "ConstantWithWarmup"
    """Shape after the warm-up. `ConstantWithWarmup` is `constant`, `CosineWithWarmup` is `cosine`: half a cosine from
    the end of the warm-up to the end of the run. `wsd`: warm-up, stable, decay."""
    params: LRScheduleParams = LRScheduleParams()
    """Its numbers."""


class EmaConfig(OptionGroup):
    """Averages of the trained weights, kept in fp32, each process its share."""

    decay: BelowOne = 0.9999
    """Decay per optimizer step. Half-life = ln 2 / -ln(decay) optimizer steps."""
    update_every: PositiveInt = 1
    """Average every so many optimizer steps, with decay^update_every, so that the half-life stays [optimizer steps]."""
    warmup: bool = True
    """Ramp min(decay, (1 + n) / (10 + n)) over optimizer steps n, so that early averages forget the initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where averages are kept and updated. `cuda`: on the device of the weights, which costs 4 bytes per parameter and
    average, divided among the processes. `auto`: there, if after the first optimizer step a tenth of the device's
    memory stays free beside them; else in CPU memory."""
    path: str | None = None
    """Start the average from these weights: a pipeline folder, or the part's own folder."""
    sigma_rels: Annotated[list[Annotated[Number, Field(gt=0, le=0.2886)]], read_with("model.use_ema")] = Field(
        default=[]
    )
    """Widths of further averages [share of the training so far], such as [0.05, 0.10]; from their snapshots
    `scripts/posthoc_ema.py` rebuilds an average of any width after the training (docs/ema.md)."""
    snapshot_every: PositiveInt = 1000
    """Interval between snapshots of `sigma_rels` [optimizer steps]; a multiple of `update_every`."""


class ConditioningConfig(OptionGroup):
    """Conditioning during training. Everything is decided per sample, anew at every visit."""

    dropout_prob: Probability = 0.1
    """Share of samples trained with the null text in all text encoders at once, so that guidance works."""
    encoder_dropout_prob: Probability | dict[str, Probability] = Field(
        default=0.0, json_schema_extra={"allowed": "a number of at least 0 and at most 1, or one by text encoder"}
    )
    """Probability of each text encoder to get the null text, independently of the others and of `dropout_prob`; or of
    named ones, such as `{text_encoder: 0.1, text_encoder_3: 0.3}`, and 0 of the others."""
    null_text: Literal["empty", "zeros"] | None = None
    """The null text: encoded empty caption, or zeros; written into the exported pipeline. null: as the pretrained
    pipeline says, or empty. Only sdxl and mmdit_rope know zeros."""

    size_dropout_prob: Probability = 0.0
    """sdxl: share of samples trained without conditioning on the image's original size."""
    crop_dropout_prob: Probability = 0.0
    """sdxl: share of samples trained without conditioning on the crop position."""


class SamplingConfig(OptionGroup):
    """Preview pictures from fixed prompts and seeds, and the settings of evaluation images."""

    every: Count = 0
    """Draw previews before the first optimizer step of a run, and every so many steps; 0: none."""
    prompts: Annotated[list[str], BeforeValidator(_spliced), used_with("every")] = Field(default=[])
    """One preview image per prompt."""
    raw: Annotated[bool, used_with("every"), used_with("model.use_ema")] = False
    """Draw the previews with the trained weights, too, beside those drawn with the average."""
    denoising: Annotated[bool, used_with("every")] = False
    """Keep a row for each prompt as well: what up to eight of the denoising steps take for the finished picture."""
    num_inference_steps: PositiveInt = 50
    """Denoiser evaluations per image [count]."""
    guidance_scale: Annotated[Number, Field(ge=1)] = 7.5
    """Classifier-free guidance; 1 is off."""
    seed: Count = 0
    """Image i is drawn from seed + i."""
    batch_size: PositiveInt = 8
    """Images drawn at once per process."""


class EvaluationConfig(OptionGroup):
    """Metrics of drawn pictures, measured by `scripts/evaluate.py` (docs/evaluation.md); pictures are drawn with the
    settings of `sampling`."""

    inception: str | None = None
    """The Inception-v3 of FID, a .safetensors file of the tensors of `pt_inception-2015-12-05-6726825d.pth`: `fid`,
    `fid_infinity`, `kid`, `precision`, `recall`. null: none of them."""
    dinov2: str | None = None
    """Folder or hub id of a Dinov2Model: `fd_dinov2`, `fd_dinov2_infinity`. null: neither."""
    clip: str | None = None
    """Folder or hub id of a CLIPModel with its tokenizer: `cmmd`, `clip_score`. null: neither."""
    path: str | list[str] | None = None
    """Real pictures, read as `validation.path` is; null: those of `validation.path`."""
    num_real: PositiveInt = 10_000
    """Real pictures, spread evenly; all of them where there are fewer [count]."""
    prompts: str | None = None
    """Text file with a prompt in each line, or CSV with a column `caption`; null: the captions of real pictures."""
    num_images: PositiveInt = 1000
    """Pictures drawn; prompts begin again where there are fewer of them [count]."""
    every: Count = 0
    """Beside the run, a process of its own evaluates the newest export whose optimizer step is a multiple of this, and
    the last one; 0: none."""
    device: Annotated[str, used_with("every")] = "cpu"
    """Where that process computes: `cpu`, with the lowest priority, or a GPU that does not train, as
    CUDA_VISIBLE_DEVICES takes it, such as `7`."""


_Range = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class LoggingConfig(OptionGroup):
    """Metrics, speed, and where the time goes (docs/memory.md)."""

    every: PositiveInt = 10
    """Write averaged metrics every so many optimizer steps; the only moment when the host waits for the device."""
    progress_bar: bool = True
    """Show images seen, images/s, time left and loss on the terminal."""
    peak_tflops: Positive | None = None
    """Peak of one device, of which `mfu` is a share [TFLOP/s]; null: by the name of the GPU, of dense matrices in the
    type of `mixed_precision`; unknown on the CPU, where `mfu` is empty."""
    profile_steps: _Range | None = Field(
        default=None, json_schema_extra={"allowed": "the first and the last optimizer step, such as [20, 22]"}
    )
    """Run torch's profiler over these optimizer steps, `[first, last]`, on rank 0: a trace and a table of kernels in
    the run folder's `profile/`."""
    gradient_norms: bool = False
    """Norm of the gradient of each layer group at the logged steps, in `metrics.jsonl`, TensorBoard and W&B; not with
    DeepSpeed, which keeps the gradients."""
    batch_every: Count = 0
    """Every so many optimizer steps, and at the last one, keep the first pictures of rank 0's micro-batch as the
    network gets them, cropped and flipped, and their captions: `samples/step_N/batch.png` and `batch.txt`, both in
    the loggers; also what the autoencoder makes of the first 16, `batch_reconstructions.png`; 0: never."""


class Config(OptionGroup):
    """A whole run."""

    experiment: ExperimentConfig
    """Where the run lives and how long it is."""
    dataset: DatasetConfig
    """Training data."""
    model: ModelConfig = ModelConfig()
    """Parts of the pipeline."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    system: SystemConfig = SystemConfig()
    """Batch arithmetic and loader processes."""
    distributed: DistributedConfig = DistributedConfig()
    """Process group."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    lr_scheduler: LRScheduleConfig = LRScheduleConfig()
    """Learning-rate schedule."""
    ema: Annotated[EmaConfig, used_with("model.use_ema")] = EmaConfig()
    """Moving average of the weights, used when `model.use_ema` is true."""
    objective: Annotated[ObjectiveConfig, DENOISER] = ObjectiveConfig()
    """Training objective."""
    conditioning: Annotated[ConditioningConfig, DENOISER] = ConditioningConfig()
    """Text conditioning."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Resumable state."""
    numerics: NumericsConfig = NumericsConfig()
    """Numbers that went wrong."""
    validation: ValidationConfig = ValidationConfig()
    """Loss on held-out data."""
    sampling: Annotated[SamplingConfig, DENOISER] = SamplingConfig()
    """Preview pictures."""
    evaluation: Annotated[EvaluationConfig, DENOISER] = EvaluationConfig()
    """Metrics of drawn pictures."""
    logging: LoggingConfig = LoggingConfig()
    """Metrics."""
    watch: WatchConfig = WatchConfig()
    """Hangs."""
    trainer: TrainerConfig = TrainerConfig()
    """Devices."""


def warmup_length(params: LRScheduleParams, global_batch: int) -> int:
    """Length of the warm-up [optimizer steps]; images that do not fill a step count as one."""
    return params.warmup_length if params.warmup_images is None else -(-params.warmup_images // global_batch)
