"""The project's own denoiser as a whole, against what it promises. test_mmdit_blocks.py has its pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_training.models.families.mmdit_rope import MMDiTRope

TINY: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "text_dims": [6, 10],
    "pooled_dim": 5,
    "mlp_ratio": 2.0,
    "rope_base_size": 4,
    "text_scale_init": 1.0,
    "zero_init": False,
}


def tiny(**changes: Any) -> MMDiTRope:
    torch.manual_seed(0)
    return MMDiTRope(**TINY | changes).eval()


def inputs(height: int = 8, width: int = 8, seed: int = 0) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(2, 4, height, width, generator=chance),
        "timestep": torch.tensor([30.0, 970.0]),
        "encoder_hidden_states": [torch.randn(2, 3, 6, generator=chance), torch.randn(2, 5, 10, generator=chance)],
        "pooled_projections": torch.randn(2, 5, generator=chance),
    }


def masks() -> list[Tensor]:
    first = torch.tensor([[True, True, True], [True, False, False]])
    return [first, torch.tensor([[True, True, False, False, False], [True, True, True, True, False]])]


def test_scaling_changes_what_the_network_says_off_the_base_grid_only() -> None:
    plain, scaled = tiny(rope_scaling="none"), tiny(rope_scaling="interpolate")
    assert torch.equal(plain(**inputs(8, 8)).sample, scaled(**inputs(8, 8)).sample)
    assert not torch.allclose(plain(**inputs(16, 16)).sample, scaled(**inputs(16, 16)).sample, atol=1e-3)


def test_patches_hold_their_own_square_and_come_back() -> None:
    model = tiny()
    latents = torch.randn(2, 4, 6, 10)
    patches = model._to_patches(latents)
    assert patches.shape == (2, 15, 16)
    assert torch.equal(patches[1, 1 * 5 + 3], latents[1, :, 2:4, 6:8].flatten())
    assert torch.equal(model._from_patches(patches, 3, 5), latents)


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(8, 8), (4, 12), (14, 2), (2, 2)])
def test_any_aspect_ratio(height: int, width: int) -> None:
    sample = tiny()(**inputs(height, width)).sample
    assert sample.shape == (2, 4, height, width) and sample.isfinite().all() and sample.std() > 0.1


@pytest.mark.parametrize(("height", "width"), [(7, 8), (8, 9)])
def test_latents_that_do_not_divide_into_patches(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{height} × {width} cells: both must be multiples of the patch size 2"):
        tiny()(**inputs(height, width))


@torch.no_grad()
def test_everything_given_matters() -> None:
    model, given = tiny(), inputs()
    before = model(**given).sample
    other = inputs(seed=1)
    for name in ("hidden_states", "pooled_projections"):
        assert not torch.allclose(model(**given | {name: other[name]}).sample, before, atol=1e-3)
    assert not torch.allclose(model(**given | {"timestep": given["timestep"] + 20}).sample, before, atol=1e-3)
    for i in (0, 1):
        states = list(given["encoder_hidden_states"])
        states[i] = other["encoder_hidden_states"][i]
        assert not torch.allclose(model(**given | {"encoder_hidden_states": states}).sample, before, atol=1e-3)


@torch.no_grad()
def test_masked_text_cannot_influence_the_picture() -> None:
    model, given = tiny(), inputs()
    before = model(**given, encoder_attention_mask=masks()).sample
    pairs = zip(given["encoder_hidden_states"], masks(), strict=True)
    given["encoder_hidden_states"] = [states.masked_fill(~kept[..., None], float("nan")) for states, kept in pairs]
    assert torch.equal(model(**given, encoder_attention_mask=masks()).sample, before)
    assert not torch.allclose(before, model(**inputs()).sample, atol=1e-3)


@torch.no_grad()
def test_a_mask_is_the_same_as_leaving_the_tokens_out() -> None:
    model, given = tiny(), inputs()
    masked = model(**given, encoder_attention_mask=masks()).sample
    for b in range(2):
        alone = {name: value[b : b + 1] for name, value in given.items() if name != "encoder_hidden_states"}
        states = [s[b : b + 1, m[b]] for s, m in zip(given["encoder_hidden_states"], masks(), strict=True)]
        assert torch.allclose(model(**alone, encoder_hidden_states=states).sample[0], masked[b], atol=1e-5)


@torch.no_grad()
def test_masks_may_be_left_out_one_by_one() -> None:
    model, given = tiny(), inputs()
    first, second = masks()
    all_true = torch.ones_like(first)
    expected = model(**given, encoder_attention_mask=[all_true, second]).sample
    assert torch.equal(model(**given, encoder_attention_mask=[None, second]).sample, expected)
    unmasked = model(**given, encoder_attention_mask=[all_true, torch.ones_like(second)]).sample
    assert torch.allclose(model(**given, encoder_attention_mask=[None, None]).sample, unmasked, atol=1e-5)


@torch.no_grad()
def test_text_has_no_positions_and_the_image_has() -> None:
    model, given = tiny(), inputs()
    before = model(**given).sample
    reversed_text = [states.flip(1) for states in given["encoder_hidden_states"]]
    assert torch.allclose(model(**given | {"encoder_hidden_states": reversed_text}).sample, before, atol=1e-5)
    moved = given["hidden_states"].roll(2, dims=3)  # a whole patch to the right
    assert not torch.allclose(model(**given | {"hidden_states": moved}).sample, before.roll(2, dims=3), atol=1e-3)


@torch.no_grad()
def test_text_dims_and_counts_are_checked() -> None:
    model, given = tiny(), inputs()
    with pytest.raises(ValueError, match="1 text states and 1 masks for 2 text encoders"):
        model(**given | {"encoder_hidden_states": given["encoder_hidden_states"][:1]})
    with pytest.raises(ValueError, match="2 text states and 1 masks"):
        model(**given, encoder_attention_mask=masks()[:1])
    with pytest.raises(ValueError, match="none given to a model with pooled_dim 5"):
        model(**given | {"pooled_projections": None})
    unpooled = tiny(pooled_dim=0)
    assert unpooled(**given | {"pooled_projections": None}).sample.shape == (2, 4, 8, 8)
    with pytest.raises(ValueError, match="one given to a model with pooled_dim 0"):
        unpooled(**given)


def test_zero_initialisation_starts_as_the_identity() -> None:
    model = tiny(zero_init=True)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: seen.extend([i[0], o[0], i[1], o[1]]))
    sample = model(**inputs()).sample
    assert not sample.any()
    assert all(torch.equal(before, after) for before, after in zip(seen[::2], seen[1::2], strict=True))
    (sample - 1).square().mean().backward()
    assert model.unpatchify.bias.grad.abs().min() > 0  # it can leave zero
    assert tiny()(**inputs()).sample.std() > 0.1


def test_every_parameter_is_trained() -> None:
    model = tiny()
    model(**inputs(), encoder_attention_mask=masks()).sample.square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert not any(
        n.startswith("blocks.1.text.") and (".out." in n or ".mlp." in n or "query" in n)
        for n, _ in model.named_parameters()
    )


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = tiny().train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        model.blocks[0].register_forward_pre_hook(lambda m, i: calls.append(checkpointing))  # noqa: B023
        model(**inputs(), encoder_attention_mask=masks()).sample.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert calls == [False, True, True]  # recomputed in the backward pass


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny(rope_theta=500.0, rope_scaling="none")
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    loaded = MMDiTRope.from_pretrained(tmp_path, low_cpu_mem_usage=False)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(loaded(**inputs()).sample, model(**inputs()).sample)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {key: stored[key] for key in TINY} == TINY | {"zero_init": False} and stored["rope_theta"] == 500.0


@torch.no_grad()
def test_low_precision_stays_near(tmp_path: Path) -> None:
    model, given = tiny(), inputs()
    exact = model(**given, encoder_attention_mask=masks()).sample
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**given, encoder_attention_mask=masks()).sample
    assert (mixed.float() - exact).std() < 0.03 * exact.std()
    model.bfloat16()
    given |= {name: given[name].bfloat16() for name in ("hidden_states", "pooled_projections")}
    given["encoder_hidden_states"] = [s.bfloat16() for s in given["encoder_hidden_states"]]
    pure = model(**given, encoder_attention_mask=masks(), return_dict=False)[0]
    assert pure.dtype == torch.bfloat16 and (pure.float() - exact).std() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_head_dim": 6}, "attention_head_dim: 6 is not a multiple of 4"),
        ({"text_dims": []}, "text_dims"),
        ({"rope_scaling": "ntk"}, "'ntk' is not one of none, interpolate"),
        ({"rope_base_size": 0}, "rope_base_size"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_parameters_that_make_no_network(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny(**changes)


def test_parameters_at_full_size() -> None:
    """19 blocks of width 1216: Gemma-2-2b and ModernBERT-large states, MetaCLIP pooled vector, 16 channels."""
    with torch.device("meta"):
        model = MMDiTRope()
    width, patch = 1216, 16 * 4
    stream = (6 * width + 6) * width + 3 * width**2 + width**2 + 3 * 4 * width**2 + 2 * 64
    silent = (2 * width + 2) * width + 2 * width**2 + 64
    blocks = 19 * (stream + width**2 + width) + 18 * stream + silent
    text = sum(dim + 1 + dim * width for dim in (2304, 1024))
    rest = (patch + 1) * width + (width + 1) * patch + width**2 + width + 1 + 769 * width + 2 * (width + 1) * width
    assert sum(p.numel() for p in model.parameters()) == blocks + text + rest == 1_247_517_187
