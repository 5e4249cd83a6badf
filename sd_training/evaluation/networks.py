"""Networks whose features pictures are compared in, from local files or a hub, each with the preprocessing that its
published distances were computed with:

    inception  the Inception-v3 of FID, 2,048 features; 299 x 299 by TensorFlow 1's bilinear rule, which does not blur
               before it makes a picture smaller; (value - 128) / 128
    dinov2     the class token after the final norm; 224 x 224 by Pillow's bicubic filter; ImageNet's mean and deviation
    clip       projected embeddings of pictures and of prompts; side of the model (224 or 336) by Pillow's bicubic
               filter; CLIP's mean and deviation

A picture that is no square is squeezed, not cut.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sd_training.config.schema import EvaluationConfig, PartConfig
from sd_training.errors import ConfigError
from sd_training.models.load import first_line, load_part

_DINOV2_SIDE = 224
"""Of FD-DINOv2 (Stein et al. 2023, arXiv:2306.04675); the model's own config says 518."""
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@dataclass(frozen=True)
class FeatureNetwork:
    """A frozen network and what it is given."""

    module: nn.Module
    prepare: Callable[[Image.Image], Tensor]
    """RGB picture → [3, H, W] float32."""
    encode: Callable[[Tensor], Tensor]
    """[B, 3, H, W] → [B, D]."""
    encode_texts: Callable[[Sequence[str]], Tensor] | None = None
    """Texts → [B, D]."""

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.module.parameters()).device

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """[B, D] float32 on the CPU."""
        pixels = torch.stack([self.prepare(image.convert("RGB")) for image in images])
        # TF32, which cuDNN's convolutions use by default, keeps three digits.
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self.encode(pixels.to(self.device)).float().cpu()

    def fingerprint(self) -> str:
        """sha256 of its weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(name.encode() + np.ascontiguousarray(tensor.cpu().numpy()).tobytes())
        return digest.hexdigest()


def load_networks(config: EvaluationConfig) -> dict[str, Callable[[], FeatureNetwork]]:
    """Name → loads the network, on the CPU in fp32, for those that the config names.

    The loaders raise ConfigError: it cannot be loaded.
    """
    loaders = {"inception": load_inception, "dinov2": load_dinov2, "clip": load_clip}
    named = {name: getattr(config, name) for name in loaders}
    return {name: partial(loaders[name], place) for name, place in named.items() if place is not None}


def load_clip(place: str) -> FeatureNetwork:
    """A CLIPModel with its tokenizer."""
    model, tokenizer = (_load(part, place, "evaluation.clip") for part in ("clip", "tokenizer"))
    length = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def encode_texts(texts: Sequence[str]) -> Tensor:
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        features: Tensor = model.get_text_features(**tokens.to(model.device)).pooler_output
        return features.float().cpu()

    prepare = _resized(model.config.vision_config.image_size, *_CLIP)
    return FeatureNetwork(model, prepare, lambda x: model.get_image_features(x).pooler_output, encode_texts)


def load_dinov2(place: str) -> FeatureNetwork:
    """A Dinov2Model."""
    model = _load("dinov2", place, "evaluation.dinov2")
    return FeatureNetwork(model, _resized(_DINOV2_SIDE, *_IMAGENET), lambda x: model(x).pooler_output)


def _load(part: str, place: str, option: str) -> Any:
    loaded = load_part(part, PartConfig(pretrained=place), seed=0, option=option)
    return loaded.requires_grad_(False).eval() if isinstance(loaded, nn.Module) else loaded


def _resized(side: int, mean: Sequence[float], std: Sequence[float]) -> Callable[[Image.Image], Tensor]:
    def prepare(image: Image.Image) -> Tensor:
        pixels = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32) / 255
        return (torch.from_numpy(pixels) - torch.tensor(mean)).div(torch.tensor(std)).permute(2, 0, 1)

    return prepare


_STEM = "1a_3x3/2v 2a_3x3v 2b_3x3 max/2 3b_1x1 4a_3x3v max/2"
_MIXED = {
    "5b 5c 5d": ("1x1", "5x5_1 5x5_2", "3x3dbl_1 3x3dbl_2 3x3dbl_3", "mean pool"),
    "6a": ("3x3/2v", "3x3dbl_1 3x3dbl_2 3x3dbl_3/2v", "max/2"),
    "6b 6c 6d 6e": ("1x1", "7x7_1 7x7_2 7x7_3", "7x7dbl_1 7x7dbl_2 7x7dbl_3 7x7dbl_4 7x7dbl_5", "mean pool"),
    "7a": ("3x3_1 3x3_2/2v", "7x7x3_1 7x7x3_2 7x7x3_3 7x7x3_4/2v", "max/2"),
    "7b": ("1x1", "3x3_1 3x3_2a,3x3_2b", "3x3dbl_1 3x3dbl_2 3x3dbl_3a,3x3dbl_3b", "mean pool"),
    "7c": ("1x1", "3x3_1 3x3_2a,3x3_2b", "3x3dbl_1 3x3dbl_2 3x3dbl_3a,3x3dbl_3b", "max pool"),
}
"""Blocks → branches of layers, by the names of the published weights: `/2` is a stride, `v` stands for no padding, and
layers with a comma between them have one input. `max/2` has no padding; the other poolings keep the size, and the mean
leaves the padding out. Where the published network takes a maximum in 7c, Szegedy et al. 2015 (arXiv:1512.00567) have a
mean; distances are computed with the maximum."""
_PUBLISHED = "pt_inception-2015-12-05-6726825d.pth of pytorch-fid"
_INCEPTION_SIDE = 299
_EPSILON = 1e-3
"""Of its batch norms."""


class Inception(nn.Module):
    """Inception-v3 of 2015-12-05 up to its last pooling. Shapes are those of the weights; batch norms are merged into
    the convolutions.

    Args:
        tensors: the published state dict, `_PUBLISHED`.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.kernels, self.biases = nn.ParameterDict(), nn.ParameterDict()
        for name in (key.removesuffix(".conv.weight") for key in tensors if key.endswith(".conv.weight")):
            kernel, *norm = (tensors[f"{name}.{key}"].double() for key in ("conv.weight", "bn.weight", "bn.bias"))
            mean, variance = (tensors[f"{name}.bn.running_{key}"].double() for key in ("mean", "var"))
            scale = norm[0] / (variance + _EPSILON).sqrt()
            merged = (kernel * scale.view(-1, 1, 1, 1)).float()
            # Channels last: 1.4 times as fast on a CPU.
            self.kernels[name.replace(".", "/")] = merged.contiguous(memory_format=torch.channels_last)
            self.biases[name.replace(".", "/")] = (norm[1] - mean * scale).float()
        self.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, 299, 299] in [-1, 1] → [B, 2048]."""
        features = self._run(_STEM, "Conv2d_", pixels)
        for names, branches in _MIXED.items():
            for name in names.split():
                features = torch.cat([self._run(branch, f"Mixed_{name}/branch", features) for branch in branches], 1)
        return features.mean((2, 3))

    def _run(self, layers: str, prefix: str, features: Tensor) -> Tensor:
        for layer in layers.split():
            if layer == "max/2":
                features = functional.max_pool2d(features, 3, 2)
            elif layer == "max":
                features = functional.max_pool2d(features, 3, 1, 1)
            elif layer == "mean":
                features = functional.avg_pool2d(features, 3, 1, 1, count_include_pad=False)
            else:
                features = torch.cat([self._convolved(one, prefix, features) for one in layer.split(",")], 1)
        return features

    def _convolved(self, layer: str, prefix: str, features: Tensor) -> Tensor:
        name, _, stride = layer.removesuffix("v").partition("/")
        name = f"{prefix}{'_' if name == 'pool' else ''}{name}"
        kernel = self.kernels[name]
        padding = (0, 0) if layer.endswith("v") else (kernel.shape[2] // 2, kernel.shape[3] // 2)
        return functional.conv2d(features, kernel, self.biases[name], int(stride or 1), padding).relu()


def load_inception(place: str, option: str = "evaluation.inception") -> FeatureNetwork:
    """The published tensors as .safetensors, which `scripts/convert_checkpoint.py` makes of the .pth.

    Raises:
        ConfigError: the file cannot be read, or lacks layers.
    """
    try:
        model = Inception(load_file(place)).eval()
        model(torch.zeros(1, 3, _INCEPTION_SIDE, _INCEPTION_SIDE))
    except Exception as error:  # damaged files make the libraries raise many kinds of errors
        remedy = f"give {_PUBLISHED}, converted by scripts/convert_checkpoint.py"
        raise ConfigError(f"{option}: {place} cannot be loaded ({first_line(error)}); {remedy}") from error

    def prepare(image: Image.Image) -> Tensor:
        return _prepared_for_inception(torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1))

    return FeatureNetwork(model, prepare, model)


class InceptionFeatures(nn.Module):
    """[B, 3, H, W] in [-1, 1] → [B, 2048]: features of pictures that are on the device, for metrics of torchmetrics.

    Args:
        model: on the CPU.
    """

    num_features = 2048

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model(_prepared_for_inception((pixels + 1.0) * 127.5))
        return features


def _prepared_for_inception(pixels: Tensor) -> Tensor:
    """[..., H, W] from 0 to 255 → [..., 299, 299] by TensorFlow 1's `resize_bilinear`: output i lies at input
    i · (in / out), between its two neighbours there."""
    for axis in (-2, -1):
        size = pixels.shape[axis]
        places = torch.arange(_INCEPTION_SIDE, dtype=torch.float32, device=pixels.device) * (size / _INCEPTION_SIDE)
        below = places.long()
        share = (places - below).view(-1, 1) if axis == -2 else places - below
        low, high = (pixels.index_select(axis, index) for index in (below, (below + 1).clamp(max=size - 1)))
        pixels = low + (high - low) * share
    return (pixels - 128) / 128
