"""What autoencoder training compares pictures by, beside their values: the features of a frozen network, and a
discriminator that is trained against the autoencoder.

Pixels are [B, 3, H, W] in [-1, 1]. Callers switch autocast off: all of this is computed in fp32.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from sd_training.config.schema import AdversarialConfig
from sd_training.errors import ConfigError
from sd_training.models.load import first_line, folder_settings_problems

_OPTION = "objective.reconstruction.perceptual_path"
_MEAN, _STD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""ImageNet's, of pixels in [-1, 1], with the digits of LPIPS."""
_VGG16 = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
"""Convolutions of each stage, by their number in torchvision's `features`; a stage begins by halving the sides."""
_BACKBONES = {
    "convnext": "ConvNextModel",
    "convnextv2": "ConvNextV2Model",
    "dinov2": "Dinov2Model",
    "resnet": "ResNetModel",
}
"""`model_type` of a config.json → class of transformers. Nothing else is loaded."""


class Perceptual:
    """The distance of two pictures in the features of a frozen network (Zhang et al. 2018, arXiv:1801.03924, eq. 1).

    Args:
        network: frozen; gives a batch's features of several depths, [B, C, h, w] or [B, L, C] each.
        heads: weight of each channel at each depth, [C]; None: 1.
    """

    def __init__(self, network: nn.Module, heads: Sequence[Tensor] | None = None) -> None:
        self.network, self.heads = network.requires_grad_(False).eval(), heads
        self._mean, self._std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))

    def to(self, device: torch.device) -> None:
        """Moves all of it."""
        self.network.to(device)
        self.heads = self.heads and [head.to(device) for head in self.heads]
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    def __call__(self, pixels: Tensor, targets: Tensor) -> Tensor:
        """[B]; gradients flow to `pixels` only."""
        with torch.no_grad():
            wanted = self._features(targets)
        total = pixels.new_zeros(len(pixels))
        for depth, (own, other) in enumerate(zip(self._features(pixels), wanted, strict=True)):
            squares = (own - other).square()
            weighted = squares if self.heads is None else squares * self.heads[depth]
            total = total + weighted.sum(-1).mean(1)
        return total

    def pooled(self, pixels: Tensor) -> Tensor:
        """[B, C] the deepest features, averaged over the positions."""
        deepest = self._states(pixels)[-1]
        return deepest.mean((2, 3) if deepest.ndim == 4 else 1)

    def _features(self, pixels: Tensor) -> list[Tensor]:
        """[B, positions, C] of each depth, of unit length at each position."""
        flat = [each.flatten(2).transpose(1, 2) if each.ndim == 4 else each for each in self._states(pixels)]
        return [functional.normalize(each, dim=-1, eps=1e-10) for each in flat]

    def _states(self, pixels: Tensor) -> Sequence[Tensor]:
        states: Sequence[Tensor] = self.network((pixels - self._mean) / self._std)
        return states


class PooledFeatures(nn.Module):
    """The deepest features, averaged over the picture."""

    def __init__(self, perceptual: Perceptual) -> None:
        super().__init__()
        self.num_features, self.perceptual = len(perceptual.pooled(torch.zeros(1, 3, 64, 64))[0]), perceptual

    def forward(self, pixels: Tensor) -> Tensor:
        return self.perceptual.pooled(pixels)


class _Vgg16(nn.Module):
    """Features before each halving and at the end (Simonyan & Zisserman 2015, arXiv:1409.1556, table 1, D)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for stage, numbers in enumerate(_VGG16):
            layers: list[nn.Module] = [nn.MaxPool2d(2)] if stage else []
            for number in numbers:
                weight, bias = (tensors[f"features.{number}.{name}"].float() for name in ("weight", "bias"))
                convolution = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
                convolution.load_state_dict({"weight": weight, "bias": bias})
                layers += [convolution, nn.ReLU()]
            self.stages.append(nn.Sequential(*layers))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        features = [pixels]
        for stage in self.stages:
            features.append(stage(features[-1]))
        return features[1:]


class _Backbone(nn.Module):
    """A network of transformers; its hidden states are the features."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Sequence[Tensor]:
        return tuple(self.network(pixel_values=pixels, output_hidden_states=True).hidden_states)


def load_perceptual(folder: Path) -> Perceptual:
    """A backbone of transformers, where the folder has a config.json; else LPIPS, from all of its *.safetensors: the
    convolutions under the names of torchvision's VGG16, the heads under those of the package lpips.

    Raises:
        ConfigError: the folder cannot be read as either.
    """
    try:
        if (folder / "config.json").is_file():
            if problems := folder_settings_problems(folder):
                raise ConfigError([f"{_OPTION}: {problem}" for problem in problems])
            kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
            if kind not in _BACKBONES:
                raise ConfigError(f"{_OPTION}: {folder} is a {kind!r}; those known are {', '.join(_BACKBONES)}")
            options = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
            network = getattr(transformers, _BACKBONES[kind]).from_pretrained(folder, **options)
            return Perceptual(_Backbone(network))
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        heads = [tensors[f"lin{stage}.model.1.weight"].float().flatten() for stage in range(len(_VGG16))]
        return Perceptual(_Vgg16(tensors), heads)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(
            f"{_OPTION}: the *.safetensors files of {folder} have no tensor {error}; they must hold those of VGG16 and "
            "of LPIPS (docs/autoencoder.md says how to make them)"
        ) from error
    except Exception as error:  # damaged files make the libraries raise many kinds of errors
        raise ConfigError(f"{_OPTION}: {folder} cannot be loaded: {first_line(error)}") from error


class PatchDiscriminator(nn.Sequential):
    """One logit for each patch of a picture: above 0 for real ones (Isola et al. 2017, arXiv:1611.07004, section
    3.2.2), as in VQGAN, but with group norms: logits depend on no other picture of the batch, and so not on the number
    of processes.

    Args:
        config: width and depth.
        seed: of the initial weights.
    """

    def __init__(self, config: AdversarialConfig, seed: int) -> None:
        widths = [3, *(config.channels * min(2**number, 8) for number in range(config.layers + 1))]
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for number, (before, after) in enumerate(pairwise(widths)):
                layers.append(nn.Conv2d(before, after, 4, 2 if number < config.layers else 1, 1, bias=not number))
                layers += [nn.GroupNorm(math.gcd(32, after), after)] if number else []
                layers.append(nn.LeakyReLU(0.2))
            layers.append(nn.Conv2d(widths[-1], 1, 4, 1, 1))
        super().__init__(*layers)


def smallest_side(config: AdversarialConfig) -> int:
    """Of a picture that the discriminator can take [pixels]."""
    return 3 * 2**config.layers


def hinge_loss(real: Tensor, fake: Tensor) -> Tensor:
    """[] what the discriminator minimises (Lim & Ye 2017, arXiv:1705.02894, eq. 3), halved as in VQGAN.

    Args:
        real, fake: logits of any shape.
    """
    return 0.5 * (functional.relu(1.0 - real).mean() + functional.relu(1.0 + fake).mean())


_ADAPTIVE_EPSILON = 1e-4
_MAX_ADAPTIVE = 1e4
"""As in the code of VQGAN."""


def last_layer_gradients(features: Tensor, kernel: torch.Size, gradients: Sequence[Tensor]) -> Tensor:
    """[N, ...] gradients of N losses by the weights of the decoder's last convolution, in fp32 whatever autocast has
    computed in, and without the layer: its weights may be sharded.

    Args:
        features: [B, C, H, W] its input.
        kernel: shape of its weights; the sides of the picture stay as they are.
        gradients: [B, 3, H, W] of each loss by its output.
    """
    features, padding = features.float(), kernel[-1] // 2
    return torch.stack([conv2d_weight(features, list(kernel), each, padding=padding) for each in gradients])


def adaptive_weight(gradients: Tensor) -> Tensor:
    """[] how much the adversarial loss weighs, so that it moves the decoder's last layer as much as reconstruction does
    (Esser et al. 2021, arXiv:2012.09841, eq. 7).

    Args:
        gradients: [2, ...] of the reconstruction loss and of the adversarial loss by the weights of that layer.
    """
    reconstruction, adversarial = gradients.flatten(1).norm(dim=1)
    return (reconstruction / (adversarial + _ADAPTIVE_EPSILON)).clamp(max=_MAX_ADAPTIVE)
