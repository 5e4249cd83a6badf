"""Published sizes of the models that have a config: what a full-size build must show."""

from collections.abc import Mapping
from typing import Any


def clip(width: int, layers: int, heads: int, projection: int, activation: str = "gelu") -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "projection_dim": projection,
        "hidden_act": activation,
    }


def vae(latent_channels: int) -> dict[str, Any]:
    has_shift = latent_channels == 16
    return {
        "latent_channels": latent_channels,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "use_quant_conv": not has_shift,
        "use_post_quant_conv": not has_shift,
    }


def deep_autoencoder() -> dict[str, Any]:
    """DC-AE (Chen et al. 2024, arXiv:2410.10733) of factor 32, as Sana's."""
    kinds = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
    return {
        "latent_channels": 32,
        "encoder_block_types": kinds,
        "decoder_block_types": kinds,
        "downsample_block_type": "Conv",
        "upsample_block_type": "interpolate",
        "scaling_factor": 0.41407,
    }


CLIP_L = clip(768, 12, 12, 768, "quick_gelu")
CLIP_H = clip(1024, 23, 16, 512)
CLIP_G = clip(1280, 32, 20, 1280)
T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
GEMMA_2B: dict[str, Any] = {"vocab_size": 256_000, "hidden_size": 2304, "num_hidden_layers": 26}
QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "text_config": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128_000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    "tie_word_embeddings": False,
}
MODERNBERT_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2624,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_SD1: dict[str, Any] = {"vae": vae(4), "text_encoder": CLIP_L}
_SD2: dict[str, Any] = {"vae": vae(4), "text_encoder": CLIP_H}
FROZEN: Mapping[str, dict[str, Any]] = {
    "sd14": _SD1,
    "sd15": _SD1,
    "sd2_base": _SD2,
    "sd21_v": _SD2,
    "sdxl_base": {"vae": vae(4), "text_encoder": CLIP_L, "text_encoder_2": CLIP_G},
    "sd3_medium": {"vae": vae(16), "text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL},
    "pixart_sigma": {"vae": vae(4), "text_encoder": T5_XXL},
    "flux": {"vae": vae(16), "text_encoder": CLIP_L, "text_encoder_2": T5_XXL},
    "sana_1600m": {"vae": deep_autoencoder(), "text_encoder": GEMMA_2B},
    "qwen_image": {"vae": {"z_dim": 16}, "text_encoder": QWEN2_5_VL_7B},
    "z_image": {"vae": vae(16), "text_encoder": QWEN3_4B},
    "flux2_klein": {"vae": {"latent_channels": 32}, "text_encoder": QWEN3_4B | {"tie_word_embeddings": True}},
    "mmdit_rope": {"vae": vae(16), "text_encoders": [GEMMA_2B, MODERNBERT_LARGE, CLIP_L]},
}
"""What stands on the hub: arguments of the frozen parts, of the published sizes."""

PARAMETERS: Mapping[str, Mapping[str, float]] = {
    "sd14": {"unet": 859.5, "vae": 83.7, "text_encoder": 123.1},
    "sd15": {"unet": 859.5, "vae": 83.7, "text_encoder": 123.1},
    "sd2_base": {"unet": 865.9, "vae": 83.7, "text_encoder": 340.4},
    "sd21_v": {"unet": 865.9, "vae": 83.7, "text_encoder": 340.4},
    "sdxl_base": {"unet": 2567.5, "text_encoder": 123.1, "text_encoder_2": 694.7},
    "sd3_medium": {"transformer": 2028.3, "text_encoder_2": 694.7, "text_encoder_3": 4762.3},
    "pixart_sigma": {"transformer": 610.9, "vae": 83.7, "text_encoder": 4762.3},
    "flux": {"transformer": 11901.4, "text_encoder": 123.1, "text_encoder_2": 4762.3},
    "sana_1600m": {"transformer": 1604.5, "vae": 312.3, "text_encoder": 2614.3},
    "qwen_image": {"transformer": 20430.4, "vae": 126.9, "text_encoder": 8292.2},
    "z_image": {"transformer": 6154.9, "text_encoder": 4022.5},
    "flux2_klein": {"transformer": 3875.5, "vae": 84.0, "text_encoder": 4022.5},
    "mmdit_rope": {"transformer": 1247.5},
}
"""Published counts [millions]."""

FORWARD_GFLOP: Mapping[str, Mapping[tuple[int, int], str]] = {
    "sd15": {(256, 77): "180.1", (512, 77): "803.3"},
    "sd2_base": {(256, 77): "181.1", (512, 77): "804.3"},
    "sd21_v": {(768, 77): "2149"},
    "sdxl_base": {(256, 77): "427.8", (512, 77): "1588.8", (1024, 77): "6761"},
    "sd3_medium": {(256, 154): "578.8", (512, 154): "1802.6", (1024, 154): "8437"},
    "pixart_sigma": {(256, 120): "298", (512, 120): "1236", (1024, 120): "6510"},
    "flux": {(256, 256): "6807"},
    "qwen_image": {(512, 512): "22639", (1024, 512): "78304"},
    "z_image": {(512, 512): "18534", (1024, 512): "62506"},
    "flux2_klein": {(512, 512): "10173", (1024, 512): "34820"},
    "sana_1600m": {(512, 300): "836.6", (1024, 300): "2966.7"},
}
"""(pixels along a side, text tokens) → forward pass of the denoiser for one picture, counted once by hand-written
calls of diffusers' classes on the meta device. FLUX's agrees with the 20.3 TFLOP per trained sample of NVIDIA's MLPerf
entry."""

_SD1_NOISE = ("scaled_linear", 0.00085, 0.012)
UNSEEN: Mapping[str, tuple[dict[str, Any], str, tuple[str, float, float] | float | None]] = {
    "sd14": ({"attention_head_dim": 8, "sample_size": 64}, "epsilon", _SD1_NOISE),
    "sd15": ({"attention_head_dim": 8, "sample_size": 64}, "epsilon", _SD1_NOISE),
    "sd2_base": ({"attention_head_dim": [5, 10, 20, 20], "sample_size": 64}, "epsilon", _SD1_NOISE),
    "sd21_v": ({"attention_head_dim": [5, 10, 20, 20], "sample_size": 96}, "v_prediction", _SD1_NOISE),
    "sdxl_base": ({"attention_head_dim": [5, 10, 20], "sample_size": 128}, "epsilon", _SD1_NOISE),
    "sd3_medium": ({"num_attention_heads": 24, "pos_embed_max_size": 192, "sample_size": 128}, "flow_prediction", 3.0),
    "pixart_sigma": (
        {"num_attention_heads": 16, "interpolation_scale": 2, "sample_size": 128},
        "epsilon",
        ("linear", 0.0001, 0.02),
    ),
    "flux": ({"num_attention_heads": 24, "axes_dims_rope": [16, 56, 56]}, "flow_prediction", None),
    "sana_1600m": ({"num_attention_heads": 70, "num_cross_attention_heads": 20}, "flow_prediction", 3.0),
    "qwen_image": ({"num_attention_heads": 24, "axes_dims_rope": [16, 56, 56]}, "flow_prediction", None),
    "z_image": ({"n_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]}, "flow_prediction", 3.0),
    "flux2_klein": (
        {"num_attention_heads": 24, "axes_dims_rope": [32, 32, 32, 32], "rope_theta": 2000, "guidance_embeds": False},
        "flow_prediction",
        None,
    ),
    "mmdit_rope": ({"num_attention_heads": 19}, "flow_prediction", 1.0),
}
"""Published settings that no count shows: of the denoiser; prediction type; betas, or the shift of a flow (None: by
tokens)."""

_SD1_HEADS, _SD2_HEADS = {(40, False): 10, (80, False): 10, (160, False): 12}, {(64, False): 32}
ATTENTION: Mapping[str, dict[tuple[int, bool], int]] = {
    "sd14": _SD1_HEADS,
    "sd15": _SD1_HEADS,
    "sd2_base": _SD2_HEADS,
    "sd21_v": _SD2_HEADS,
    "sdxl_base": {(64, False): 140},
    "sd3_medium": {(64, False): 24},
    "pixart_sigma": {(72, False): 28, (72, True): 28},
    "flux": {(128, False): 57},
    "sana_1600m": {(112, True): 20},
    "qwen_image": {(128, True): 60},
    "z_image": {(128, False): 2, (128, True): 32},
    "flux2_klein": {(128, False): 25},
    "mmdit_rope": {(64, True): 19},
}
"""Width of a head, and whether there is a mask → attention calls per forward pass. Of CUDA's kernels flash takes no
mask, and cuDNN no head that is wider than 128 or no multiple of 8; both take bf16 and fp16 only."""

_T5_WIDTH = {"d_model": 2048}
WRONG_TEXT: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "sd14": ("text_encoder", CLIP_H, "cross_attention_dim"),
    "sd15": ("text_encoder", CLIP_H, "cross_attention_dim"),
    "sd2_base": ("text_encoder", CLIP_L, "cross_attention_dim"),
    "sd21_v": ("text_encoder", CLIP_L, "cross_attention_dim"),
    "sdxl_base": ("text_encoder_2", CLIP_H, "projection_class_embeddings_input_dim"),
    "sd3_medium": ("text_encoder_3", T5_XXL | _T5_WIDTH, "joint_attention_dim"),
    "pixart_sigma": ("text_encoder", T5_XXL | _T5_WIDTH, "caption_channels"),
    "flux": ("text_encoder_2", T5_XXL | _T5_WIDTH, "joint_attention_dim"),
    "z_image": ("text_encoder", QWEN3_4B | {"hidden_size": 2048}, "cap_feat_dim"),
    "flux2_klein": ("text_encoder", QWEN3_4B | {"hidden_size": 2048}, "joint_attention_dim"),
    "sana_1600m": ("text_encoder", GEMMA_2B | {"hidden_size": 2048}, "caption_channels"),
}
"""Model → a text encoder of another width, and the denoiser's option that does not fit it."""
