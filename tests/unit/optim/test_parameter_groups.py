"""Who gets weight decay, whose learning rate, and which weights are matrices for Muon."""

import pytest
import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel, UNet2DConditionModel
from torch import nn

from sd_training.errors import ConfigError
from sd_training.optim.optimizers import is_hidden_matrix, is_norm_or_bias, parameter_groups
from tests.unit.optim.toy import Toy, config, named, toy

BLOCKS = {"norm_num_groups": 4, "block_out_channels": (8, 16)}


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **BLOCKS,
    )


def test_the_default_is_one_group_of_everything_in_order() -> None:
    parameters = toy()
    (group,) = parameter_groups(config("adamw"), parameters, 0.02)
    assert [id(p) for p in group["params"]] == [id(p) for _, p in parameters]
    assert (group["lr"], group["lr_factor"], group["weight_decay"], group["part"]) == (0.02, 1.0, 0.01, "denoiser")


def test_norms_and_biases_without_decay() -> None:
    parameters = toy()
    options = config("adamw", no_decay_on_norms_and_biases=True, weight_decay=0.3)
    names = {id(parameter): name for name, parameter in parameters}
    decays = {names[id(p)]: g["weight_decay"] for g in parameter_groups(options, parameters, 1.0) for p in g["params"]}
    weights = {f"denoiser.{layer}.weight" for layer in ("conv_in", "conv", "linear")}
    assert decays == {name: 0.3 if name in weights else 0.0 for name, _ in parameters}


def test_a_norms_weight_and_a_bias_are_found_in_a_real_network(unet: nn.Module) -> None:
    norms = tuple(f"{name}." for name, m in unet.named_modules() if isinstance(m, (nn.GroupNorm, nn.LayerNorm)))
    expected = {n for n, _ in unet.named_parameters() if n.endswith("bias") or n.startswith(norms)}
    assert {n for n, p in unet.named_parameters() if is_norm_or_bias(n, p)} == expected
    assert is_norm_or_bias("denoiser.blocks.0.bias", torch.zeros(4, 4))


def test_parts_have_their_own_rates() -> None:
    parameters = [*toy(), *named(Toy(), "text_encoder")]
    options = config("adamw", rates_by_part={"text_encoder": 1e-6})
    denoiser, encoder = parameter_groups(options, parameters, 1e-4)
    assert (denoiser["part"], denoiser["lr"], denoiser["lr_factor"]) == ("denoiser", 1e-4, 1.0)
    assert (encoder["part"], encoder["lr"]) == ("text_encoder", 1e-6)
    assert encoder["lr_factor"] == pytest.approx(0.01)
    assert len(denoiser["params"]) == len(encoder["params"]) == 8


def test_an_unknown_part_is_named() -> None:
    options = config("adamw", rates_by_part={"text_encoder": 1e-6, "denoiser": 1e-5})
    with pytest.raises(ConfigError, match=r"optimizer\.rates_by_part: text_encoder is not trained.*: denoiser"):
        parameter_groups(options, toy(), 1e-4)


def test_muons_matrices_of_a_unet_are_all_weights_between_the_ends(unet: nn.Module) -> None:
    weights = {n for n, m in unet.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    ends = {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}
    found = {n for n, p in named(unet) if is_hidden_matrix(n, p)}
    assert found == {f"denoiser.{n}.weight" for n in weights - ends}
    assert "denoiser.down_blocks.0.attentions.0.proj_in.weight" in found


def test_muons_matrices_of_an_autoencoder_and_a_transformer() -> None:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS
    )
    found = {n for n, p in named(vae) if is_hidden_matrix(n, p)}
    assert "denoiser.encoder.conv_in.weight" not in found
    assert "denoiser.decoder.conv_out.weight" not in found
    assert "denoiser.encoder.mid_block.attentions.0.to_q.weight" in found
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1, sample_size=8, num_embeds_ada_norm=10
    )
    found = {n for n, p in named(transformer) if is_hidden_matrix(n, p)}
    assert "denoiser.transformer_blocks.0.attn1.to_q.weight" in found
    assert not [n for n in found if "embed" in n or "proj_out" in n]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("denoiser.scale_shift_table", (6, 8)),
        ("text_encoder.text_model.embeddings.token_embedding.weight", (20, 8)),
        ("denoiser.proj_out.weight", (16, 8)),
        ("denoiser.blocks.0.depthwise.weight", (8, 1, 3, 3)),
        ("denoiser.blocks.0.norm.weight", (8,)),
    ],
)
def test_what_is_no_hidden_matrix(name: str, shape: tuple[int, ...]) -> None:
    assert not is_hidden_matrix(name, torch.zeros(shape))


def test_only_muon_asks_for_matrices() -> None:
    assert [g["is_matrix"] for g in parameter_groups(config("muon"), toy(), 1.0)] == [False, True]
    assert [g["is_matrix"] for g in parameter_groups(config("adamw"), toy(), 1.0)] == [False]
