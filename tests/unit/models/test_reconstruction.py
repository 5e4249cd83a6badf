"""Distances in features, the discriminator, and the adaptive weight."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.image.fid import FrechetInceptionDistance
from transformers import Dinov2Config, Dinov2Model, ResNetConfig, ResNetModel

from sd_training.config.schema import AdversarialConfig
from sd_training.errors import ConfigError
from sd_training.models.reconstruction import (
    PatchDiscriminator,
    PooledFeatures,
    adaptive_weight,
    hinge_loss,
    last_layer_gradients,
    load_perceptual,
    smallest_side,
)
from tests import makers


def pictures(count: int, side: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def lpips(folder: Path, one: Tensor, two: Tensor) -> Tensor:
    """Written anew from the package lpips: for the layers of torchvision's VGG16, in float64."""
    tensors = {name: t.double() for file in folder.iterdir() for name, t in load_file(file).items()}
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]).double(), torch.tensor([0.458, 0.448, 0.450]).double()

    def slices(x: Tensor) -> Iterator[Tensor]:
        x = (x.double() - shift[None, :, None, None]) / scale[None, :, None, None]
        for layer in range(31):  # 4, 9, 16, 23, 30 pool; after a convolution comes its ReLU
            if f"features.{layer}.weight" in tensors:
                x = functional.conv2d(x, tensors[f"features.{layer}.weight"], tensors[f"features.{layer}.bias"], 1, 1)
            elif layer in (4, 9, 16, 23, 30):
                x = functional.max_pool2d(x, 2, 2)
            else:
                x = functional.relu(x)
            if layer in (3, 8, 15, 22, 29):
                yield x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)

    total = torch.zeros(len(one), dtype=torch.float64)
    for stage, (a, b) in enumerate(zip(slices(one), slices(two), strict=True)):
        total += functional.conv2d((a - b) ** 2, tensors[f"lin{stage}.model.1.weight"]).mean((1, 2, 3))
    return total


def test_lpips_is_that_of_its_package(tmp_path: Path) -> None:
    folder = makers.perceptual_folder(tmp_path / "perceptual")
    perceptual, one, two = load_perceptual(folder), pictures(3, 32), pictures(3, 32, seed=1)
    assert torch.allclose(perceptual(one, two).double(), lpips(folder, one, two), rtol=1e-5)
    assert perceptual(one, one).abs().max() == 0.0


def test_the_frechet_distance_is_that_of_its_formula(tmp_path: Path) -> None:
    """Against a matrix square root in float64, in two batches; of a picture's features as the network gives them."""
    perceptual = load_perceptual(makers.perceptual_folder(tmp_path / "perceptual"))
    sets = [pictures(40, 32), 0.5 * pictures(40, 32, seed=1)]
    metric, moments = FrechetInceptionDistance(PooledFeatures(perceptual)), []
    with torch.no_grad():
        for number, own in enumerate(sets):
            for batch in own.split(25):
                metric.update(batch, real=number == 0)
            features = perceptual.pooled(own).double().numpy()
            assert features.shape == (40, 8)
            moments.append((features.mean(0), np.cov(features, rowvar=False)))
    (mean, covariance), (other, its) = moments
    root = scipy.linalg.sqrtm(covariance @ its).real
    expected = ((mean - other) ** 2).sum() + np.trace(covariance + its - 2 * root)
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)


def test_backbones_of_transformers(tmp_path: Path) -> None:
    resnet = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    dinov2 = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=8, image_size=32)
    for name, network in {"resnet": ResNetModel(resnet), "dinov2": Dinov2Model(dinov2)}.items():
        network.eval().save_pretrained(tmp_path / name)
        one, two = pictures(2, 32), pictures(2, 32, seed=1)
        perceptual, (mean, std) = load_perceptual(tmp_path / name), (torch.tensor(v).view(3, 1, 1) for v in _SCALES)
        inputs = [(x - mean) / std for x in (one, two)]
        states = [network(pixel_values=x, output_hidden_states=True).hidden_states for x in inputs]
        axis = 1 if name == "resnet" else 2
        angles = [functional.cosine_similarity(*pair, dim=axis).flatten(1) for pair in zip(*states, strict=True)]
        expected = sum(2.0 - 2.0 * cosines.mean(1) for cosines in angles)
        assert torch.allclose(perceptual(one, two), expected, atol=1e-4), name


_SCALES = ((-0.030, -0.088, -0.188), (0.458, 0.448, 0.450))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "is a 'bert'; those known are convnext, convnextv2, dinov2, resnet"),
        ({"model_type": "resnet", "quantization_config": {"a": 1}}, "has quantization_config"),
        ({"model_type": "resnet"}, "cannot be loaded: "),
        (None, "have no tensor 'lin4.model.1.weight'"),
    ],
)
def test_what_cannot_be_loaded(config: dict[str, object] | None, said: str, tmp_path: Path) -> None:
    folder = makers.perceptual_folder(tmp_path / "perceptual")
    heads = load_file(folder / "lpips.safetensors")
    save_file({name: head for name, head in heads.items() if "lin4" not in name}, folder / "lpips.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"objective\.reconstruction\.perceptual_path") as error:
        load_perceptual(folder)
    assert said in str(error.value)


def test_the_discriminator_is_that_of_patches_of_70_pixels() -> None:
    discriminator = PatchDiscriminator(AdversarialConfig(weight=0.5), seed=0)
    assert discriminator(pictures(1, 256)).shape == (1, 1, 30, 30)
    seen = pictures(1, 256).requires_grad_()
    with_no_norms = nn.Sequential(*(layer for layer in discriminator if not isinstance(layer, nn.GroupNorm)))
    with_no_norms(seen)[0, 0, 15, 15].backward()
    assert seen.grad is not None
    rows = seen.grad.abs().sum((0, 1, 3)).nonzero().flatten()
    assert rows[-1] - rows[0] + 1 == 70
    two = pictures(2, 64)
    assert torch.allclose(discriminator(two)[1:], discriminator(two[1:]), atol=1e-5)  # no batch statistics


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_smallest_picture(layers: int) -> None:
    config = AdversarialConfig(weight=0.5, channels=4, layers=layers)
    discriminator, side = PatchDiscriminator(config, seed=0), smallest_side(config)
    assert discriminator(pictures(1, side)).shape == (1, 1, 1, 1)
    with pytest.raises((RuntimeError, ValueError)):
        discriminator(pictures(1, side - 1))


def test_hinge_loss_stops_at_one() -> None:
    real, fake = torch.tensor([2.0, 0.5]), torch.tensor([-3.0, 0.0])
    assert float(hinge_loss(real, fake)) == 0.5 * (0.25 + 0.5)


def test_adaptive_weight_in_half_precision_is_that_of_its_formula() -> None:
    """λ = |∇ L_rec| / (|∇ L_GAN| + δ) by the last layer (Esser et al. 2021, eq. 7), by autograd in float64."""
    layer, generator = nn.Conv2d(8, 3, 3, padding=1), torch.Generator().manual_seed(0)
    layer.to(torch.float64)
    features = torch.randn(4, 8, 64, 64, generator=generator).half()
    target = torch.randn(4, 3, 64, 64, generator=generator).double()
    picture = layer(features.double())
    losses = [(picture - target).abs().mean(), picture[..., ::2].sin().mean()]
    by_weight = [torch.autograd.grad(loss, layer.weight, retain_graph=True)[0] for loss in losses]
    by_picture = [torch.autograd.grad(loss, picture, retain_graph=True)[0].float() for loss in losses]
    expected = by_weight[0].norm() / (by_weight[1].norm() + 1e-4)
    found = adaptive_weight(last_layer_gradients(features, layer.weight.shape, by_picture))
    assert found.double() == pytest.approx(float(expected), rel=1e-4)
    assert float(adaptive_weight(torch.tensor([[3.0], [0.0]]))) == 1e4
