"""What may be trained beside the denoiser: text encoders; and weights that are bf16 themselves."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd_training.errors import ConfigError
from sd_training.export.pipeline import bit_differences
from sd_training.training import DiffusionModule
from tests.family_makers import save_pipeline
from tests.integration.training import CrashAfter, Interrupted, options, prepare, train, train_in_processes

TEXT = {"model__train_text_encoder": True, "experiment__num_examples_to_see": 32}


def text_weights(folder: Path, part: str) -> dict[str, Tensor]:
    return load_file(folder / part / "model.safetensors")


@pytest.mark.parametrize(("name", "parts"), [("stable_diffusion", 1), ("sdxl", 2)])
def test_text_encoders_are_trained_saved_resumed_and_exported(
    name: str, parts: int, shards_dir: Path, tmp_path: Path
) -> None:
    folder = save_pipeline(name, tmp_path / "pipeline")
    rates = {"optimizer__rates_by_part": "{text_encoder: 1e-4}"}
    changes = {**TEXT, **rates, "experiment__save_every": 2}
    whole, cut = (options(tmp_path / run, folder, shards_dir, **changes) for run in ("whole", "cut"))
    train(whole)
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(3))
    train(cut)
    for part in ["text_encoder", "text_encoder_2"][:parts]:
        before, after = text_weights(folder, part), text_weights(tmp_path / "whole" / "current_pipeline", part)
        again = text_weights(tmp_path / "cut" / "current_pipeline", part)
        assert all(torch.equal(after[name], again[name]) for name in after)
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert any("layers.0" in name for name in changed)


def test_sdxl_text_encoders_train_in_two_processes(shards_dir: Path, tmp_path: Path) -> None:
    """Parameters that nothing reads would make distributed training wait for their gradients."""
    folder = save_pipeline("sdxl", tmp_path / "pipeline")
    changes = {**TEXT, "experiment__num_examples_to_see": 16}
    train(options(tmp_path / "one", folder, shards_dir, **changes))
    train_in_processes(options(tmp_path / "two", folder, shards_dir, **changes, system__batch_size=4), 2)
    for part in ("text_encoder", "text_encoder_2"):
        one, two = (text_weights(tmp_path / run / "current_pipeline", part) for run in ("one", "two"))
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-5)


def test_other_families_refuse_to_train_text(shards_dir: Path, tmp_path: Path) -> None:
    folder = save_pipeline("pixart", tmp_path / "pipeline")
    with pytest.raises(ConfigError, match=r"model\.train_text_encoder: is only known for stable_diffusion and sdxl"):
        prepare(options(tmp_path / "run", folder, shards_dir, **TEXT))


def test_bf16_weights_learn_by_stochastic_rounding_and_resume(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    changes = {
        "model__bf16_weights": True,
        "model__mixed_precision": "bf16",
        "optimizer__stochastic_rounding": True,
        "optimizer__params__learning_rate": 1e-4,
        "experiment__num_examples_to_see": 64,
    }
    whole, cut = (options(tmp_path / run, pipeline_dir, shards_dir, **changes) for run in ("whole", "cut"))
    module = train(whole).module
    assert {p.dtype for p in module.network.parameters()} == {torch.bfloat16}
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(5))
    train(cut)
    before = load_file(pipeline_dir / "unet" / "diffusion_pytorch_model.safetensors")
    one, two = (
        load_file(tmp_path / run / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
        for run in ("whole", "cut")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16}
    assert isinstance(module, DiffusionModule) and module.family.vae.quant_conv.weight.dtype == torch.bfloat16
    for path in pipeline_dir.glob("[vt]*/*.safetensors"):  # frozen parts: bf16 on the device, exported as they were
        frozen = load_file(tmp_path / "whole" / "current_pipeline" / path.relative_to(pipeline_dir))
        assert not bit_differences(load_file(path), frozen)
    # Eight steps of 1e-4 are less than half a unit of bf16 at 0.1: rounding to the nearest would move nothing there.
    large = torch.cat([before[name].flatten() for name in before]).abs() > 0.1
    moved = torch.cat([(one[name].float() != before[name].bfloat16().float()).flatten() for name in before])
    assert 0.02 < float(moved[large].float().mean()) < 0.98
