"""Channels last changes where numbers lie, not what they are."""

import filecmp
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sd_training.models.execution import use_channels_last, wants_channels_last
from tests import makers
from tests.unit.models.denoiser_steps import load_tiny, loss_and_gradients


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_auto_is_cuda_only() -> None:
    assert wants_channels_last("auto", "cuda") and wants_channels_last(True, "cpu")
    assert not wants_channels_last("auto", "cpu") and not wants_channels_last(False, "cuda")


def test_convolutions_of_a_unet_work_in_channels_last(tmp_path: Path) -> None:
    plain, family = (load_tiny("stable_diffusion", tmp_path / "pipeline") for _ in range(2))
    use_channels_last(family.denoiser)
    inner, layouts = [m for m in family.denoiser.modules() if type(m).__name__ == "ResnetBlock2D"], []
    for block in inner:
        for conv in (block.conv1, block.conv2):
            conv.register_forward_hook(lambda _, given, out: layouts.append(is_channels_last(given[0])))
            conv.register_forward_hook(lambda _, given, out: layouts.append(is_channels_last(out)))
    (loss, gradients), (expected_loss, expected) = loss_and_gradients(family), loss_and_gradients(plain)
    assert len(layouts) == 4 * len(inner) and all(layouts)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_convolutions_of_the_autoencoder_work_in_channels_last() -> None:
    vae, pixels, layouts = makers.tiny_vae().eval(), torch.randn(2, 3, 16, 16), []
    expected = vae.encode(pixels).latent_dist.mean
    use_channels_last(vae)
    for block in vae.encoder.modules():
        if type(block).__name__ == "ResnetBlock2D":
            block.conv2.register_forward_hook(lambda _, given, out: layouts.append(is_channels_last(given[0])))
    torch.testing.assert_close(vae.encode(pixels).latent_dist.mean, expected, rtol=1e-4, atol=1e-5)
    assert layouts and all(layouts)


@pytest.mark.parametrize("part", ["unet", "vae"])
def test_exports_are_the_same_files(part: str, tmp_path: Path) -> None:
    network = getattr(makers.tiny_pipeline(), part)
    network.save_pretrained(tmp_path / "plain")
    use_channels_last(network)
    assert any(is_channels_last(p) and not p.is_contiguous() for p in nn.Module.parameters(network))
    network.save_pretrained(tmp_path / "channels_last")
    names = [path.name for path in (tmp_path / "plain").iterdir()]
    assert "diffusion_pytorch_model.safetensors" in names
    assert filecmp.cmpfiles(tmp_path / "plain", tmp_path / "channels_last", names, shallow=False)[0] == names
