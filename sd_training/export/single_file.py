"""A pipeline folder of Stable Diffusion 1.x, 2.x or XL as one file in the original layout, which ComfyUI, A1111 and
diffusers' `from_single_file` read.

diffusers converts from that layout only. Names are mapped here the other way round, with its tables where it has them,
and before a file is written diffusers' own conversion must give back every tensor of the folder, to the bit.

model.diffusion_model.…                          the UNet
first_stage_model.…                              the autoencoder
cond_stage_model.transformer.text_model.…        1.x: OpenAI's CLIP, named as transformers does
cond_stage_model.model.…                         2.x: OpenCLIP
conditioner.embedders.0.transformer.text_model.… XL: CLIP
conditioner.embedders.1.model.…                  XL: OpenCLIP
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders import single_file_utils as diffusers_names
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sd_training.checkpoint.folder import whole_file
from sd_training.errors import ConfigError, DataError
from sd_training.export.pipeline import bit_differences, modelspec, save_sorted

UNET, VAE = "model.diffusion_model.", "first_stage_model."
_TABLES: Any = diffusers_names.DIFFUSERS_TO_LDM_MAPPING
_RESNET = {
    **{"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3"},
    **{"time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"},
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "fc1": "c_fc", "fc2": "c_proj", "self_attn": "attn"}
_OPEN_CLIP_H_LAYERS = 23
"""diffusers leaves the last of 24 layers out, because Stable Diffusion 2 reads the states before it."""
_POSITIONS = "text_model.embeddings.position_ids"
"""0, 1, …: stored by CLIP's first versions."""
Tensors = Mapping[str, Tensor]


def write_single_file(folder: Path, target: Path) -> int:
    """Writes a pipeline folder as one file, which appears when it is whole; returns the number of tensors.

    Raises:
        ConfigError: the folder holds no pipeline that has such a layout.
        DataError: diffusers would not read back what is in the folder, or the file cannot be written.
    """
    tensors = original_layout(folder)
    files = ("unet/config.json", "vae/config.json", "scheduler/scheduler_config.json")
    unet, vae, scheduler = (json.loads((folder / name).read_bytes()) for name in files)
    family = "sdxl" if (folder / "text_encoder_2").is_dir() else "stable_diffusion"
    side = unet["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
    spec = modelspec(family, unet, scheduler.get("prediction_type", "epsilon"), side, target.stem, is_adapter=False)
    try:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with whole_file(target) as beside:
            save_sorted(whole, beside, spec)
            os.umask(umask := os.umask(0o077))
            beside.chmod(0o666 & ~umask)  # safetensors creates files that only the owner can read
    except (OSError, SafetensorError) as error:
        raise DataError(f"{target}: cannot be written: {error}; name another place") from error
    return len(tensors)


def original_layout(folder: Path) -> dict[str, Tensor]:
    """The tensors of a pipeline folder by their original names. Raises as `write_single_file`."""
    try:
        kind = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        settings = {path.parent.name: json.loads(path.read_bytes()) for path in folder.glob("*/*config.json")}
        weights = {part: _weights(folder / part) for part in settings}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        adapters = "; it holds adapters alone, which model.lora.merge=true also adds to the weights"
        is_lora = (folder / LORA_WEIGHT_NAME_SAFE).is_file()
        raise ConfigError(f"{folder}: is no pipeline folder: {error}{adapters * is_lora}") from error
    if kind not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise ConfigError(f"{folder}: is a {kind}; only Stable Diffusion 1.x, 2.x and XL have such a file")
    scheduler = settings.get("scheduler", {})
    sampler, prediction = str(scheduler.get("_class_name")), scheduler.get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction") or sampler.startswith(("FlowMatch", "EDM")):
        raise ConfigError(
            f"{folder}/scheduler: {sampler} with prediction_type={prediction}; readers of such a file know epsilon and "
            "v_prediction of a discrete noise schedule alone: share the pipeline folder instead"
        )
    other = f"{folder}: is of an architecture that the original layout does not have"
    try:
        found = renamed(settings, weights)
        problems = list(_differences(settings, weights, found))
    except (LookupError, TypeError, ValueError) as error:  # of a name or setting that has no place in it
        raise DataError(f"{other}: {error!r}") from error
    if problems:
        raise DataError(f"{other}: {problems[0]}")
    return found


def renamed(settings: Mapping[str, Any], weights: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """The tensors of all parts by their original names, without a check.

    Args:
        settings: part → its stored config; that of the scheduler as well.
        weights: part → its tensors by name.
    """
    found = {UNET + _unet_name(name, settings["unet"], weights["unet"]): t for name, t in weights["unet"].items()}
    num_blocks = len(settings["vae"]["block_out_channels"])
    for name, tensor in weights["vae"].items():
        original = VAE + _vae_name(name, num_blocks)  # whose attention is made of convolutions of one cell
        found[original] = tensor[..., None, None] if ".attn_1." in original and tensor.ndim == 2 else tensor
    for part, (prefix, is_open_clip) in _text_places(settings).items():
        text = {_text_name(name): tensor for name, tensor in weights[part].items()}
        found |= {f"{prefix}{name}": tensor for name, tensor in (_open_clip if is_open_clip else _clip)(text).items()}
    if "text_encoder_2" in settings:  # empty tensors by whose names ComfyUI and A1111 know what an SDXL predicts
        scheduler = settings["scheduler"]
        is_v, has_zero_snr = scheduler.get("prediction_type") == "v_prediction", scheduler.get("rescale_betas_zero_snr")
        found |= {name: torch.zeros(0) for name, is_set in (("v_pred", is_v), ("ztsnr", has_zero_snr)) if is_set}
    return found


def _text_places(settings: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
    """Text encoder → prefix of its names, and whether they are OpenCLIP's. Of Stable Diffusion 1 and 2 the activation
    says which."""
    if "text_encoder_2" in settings:
        first = ("conditioner.embedders.0.transformer.", False)
        return {"text_encoder": first, "text_encoder_2": ("conditioner.embedders.1.model.", True)}
    is_open_clip = settings["text_encoder"]["hidden_act"] != "quick_gelu"
    return {
        "text_encoder": ("cond_stage_model.model." if is_open_clip else "cond_stage_model.transformer.", is_open_clip)
    }


def _differences(settings: Mapping[str, Any], weights: Mapping[str, Tensors], found: Tensors) -> Iterator[str]:
    """What diffusers would read back differently."""
    stored = dict(found)
    converted = {
        "unet": diffusers_names.convert_ldm_unet_checkpoint(stored, config=settings["unet"]),
        "vae": diffusers_names.convert_ldm_vae_checkpoint(stored, config=settings["vae"]),
    }
    for part, (prefix, is_open_clip) in _text_places(settings).items():
        if is_open_clip:
            encoder = SimpleNamespace(config=SimpleNamespace(**settings[part]))
            converted[part] = diffusers_names.convert_open_clip_checkpoint(encoder, stored, prefix)
        else:
            converted[part] = diffusers_names.convert_ldm_clip_checkpoint(stored)
            converted[part].pop(_POSITIONS)
    for part, tensors in converted.items():
        expected = {_text_name(n): t for n, t in weights[part].items()} if "text" in part else dict(weights[part])
        expected.pop(_POSITIONS, None)
        yield from (f"{part}: {problem}" for problem in bit_differences(expected, tensors))


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for old, new in words.items():
        text = re.sub(rf"(^|\.){re.escape(old)}(\.|$)", rf"\g<1>{new}\g<2>", text)
    return text


def _unet_name(name: str, config: Mapping[str, Any], names: Iterable[str]) -> str:
    """Blocks are numbered through: of n residual layers a block has n + 1 places on the way down, the last of which
    downsamples, and on the way up n + 1 with a residual layer each, the last of which also upsamples."""
    fixed: dict[str, str] = _TABLES["unet"]["layers"] | _TABLES["unet"]["addition_embed_type"]
    if name in fixed:
        return fixed[name]
    places, words = config["layers_per_block"] + 1, name.split(".")
    if words[0] == "mid_block":
        words.insert(1, "0")
    way, block, kind, layer, rest = words[0], int(words[1]), words[2], int(words[3]), ".".join(words[4:])
    if kind == "resnets":
        rest = _replaced(rest, _RESNET)
    if way == "mid_block":
        return f"middle_block.{2 * layer + (kind == 'attentions')}.{rest}"
    if kind == "downsamplers":
        return f"input_blocks.{(block + 1) * places}.0.op.{words[-1]}"
    if kind == "upsamplers":
        beside = 1 + any(other.startswith(f"up_blocks.{block}.attentions.") for other in names)
        return f"output_blocks.{(block + 1) * places - 1}.{beside}.{rest}"
    side = 0 if kind == "resnets" else 1
    if way == "down_blocks":
        return f"input_blocks.{block * places + layer + 1}.{side}.{rest}"
    return f"output_blocks.{block * places + layer}.{side}.{rest}"


def _vae_name(name: str, num_blocks: int) -> str:
    fixed: dict[str, str] = _TABLES["vae"]
    if name in fixed:
        return fixed[name]
    half, _, *words = name.split(".")
    if "mid_block" in name:
        if words[0] == "attentions":
            return f"{half}.mid.attn_1.{_replaced('.'.join(words[2:]), _VAE_ATTENTION)}"
        return f"{half}.mid.block_{int(words[1]) + 1}.{'.'.join(words[2:])}"
    way, number = ("down", int(words[0])) if half == "encoder" else ("up", num_blocks - 1 - int(words[0]))
    if words[1] == "resnets":
        rest = ".".join(words[2:]).replace("conv_shortcut", "nin_shortcut")
        return f"{half}.{way}.{number}.block.{rest}"
    return f"{half}.{way}.{number}.{way}sample.{'.'.join(words[3:])}"


def _text_name(name: str) -> str:
    """As all versions of transformers read it; newer ones leave the wrapper out."""
    return name if name == "text_projection.weight" else f"text_model.{name.removeprefix('text_model.')}"


def _clip(weights: Tensors) -> dict[str, Tensor]:
    return {**weights, _POSITIONS: torch.arange(len(weights["text_model.embeddings.position_embedding.weight"]))[None]}


def _open_clip(weights: Tensors) -> dict[str, Tensor]:
    """What generation does not read and the folder lacks is filled in: the layer that Stable Diffusion 2 leaves out as
    a copy of the one before, its projection as the identity, and the scale of CLIP's own loss at its upper bound."""
    found, joined = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for name, tensor in weights.items():
        if (fixed := _TABLES["openclip"]["layers"].get(name)) is not None:
            found[fixed] = tensor.T if fixed == "text_projection" else tensor
        elif name != _POSITIONS:
            _, _, _, number, *words = name.split(".")
            layer = f"transformer.resblocks.{number}"
            if words[0] == "self_attn" and words[1] != "out_proj":
                joined.setdefault(f"{layer}.attn.in_proj_{words[-1]}", {})[words[1]] = tensor
            else:
                found[f"{layer}.{_replaced('.'.join(words), _OPEN_CLIP)}"] = tensor
    found |= {name: torch.cat([three[f"{own}_proj"] for own in "qkv"]) for name, three in joined.items()}
    if len(joined) == 2 * _OPEN_CLIP_H_LAYERS:  # weights and biases
        last, new = (f"resblocks.{number}." for number in (_OPEN_CLIP_H_LAYERS - 1, _OPEN_CLIP_H_LAYERS))
        found |= {name.replace(last, new): tensor.clone() for name, tensor in found.items() if last in name}
    norm = found["ln_final.weight"]
    found.setdefault("text_projection", torch.eye(len(norm), dtype=norm.dtype))
    return found | {"logit_scale": torch.tensor(math.log(100.0))}
