"""Copies of networks around other weights."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from sd_training.build.models import copy_with_weights


def test_a_copy_has_the_settings_of_today() -> None:
    """Both were defaults when the network was made, and were changed since."""
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    vae.register_to_config(scaling_factor=0.5)
    assert copy_with_weights(vae, {}).config.scaling_factor == 0.5
    unet = UNet2DConditionModel(
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    )
    unet.register_to_config(sample_size=32)
    assert copy_with_weights(unet, {}).config.sample_size == 32


def test_a_copy_has_the_given_weights_and_the_rest_of_its_own() -> None:
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    given = torch.zeros_like(vae.encoder.conv_in.bias)
    copy = copy_with_weights(vae, {"encoder.conv_in.bias": given})
    assert copy.encoder.conv_in.bias.data_ptr() == given.data_ptr()
    assert torch.equal(copy.decoder.conv_in.bias, vae.decoder.conv_in.bias)
    assert not copy.training
