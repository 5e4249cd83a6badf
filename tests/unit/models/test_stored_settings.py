"""Model repositories with code, kernels and pickles in them: refused with a sentence, and nothing runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_training.config.model_schema import ModelConfig
from sd_training.errors import ConfigError, DataError
from sd_training.export.folder import load_pipeline
from sd_training.models.load import load_network, load_noise_scheduler, load_tokenizer, refused_settings
from tests.faults.hostile_files import canary_pickle


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


def pickled_shard(folder: Path, weights: str, name: str) -> None:
    (folder / weights).rename(folder.parent / "elsewhere.safetensors")
    (folder / "x.bin").write_bytes(canary_pickle(folder.parents[1] / "canary"))
    (folder / f"{weights}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))


UNET, TEXT = "diffusion_pytorch_model.safetensors", "model.safetensors"
HOSTILE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "kernel": (
        "text_encoder",
        lambda p: edit(p / "text_encoder/config.json", _attn_implementation="someone/kernel"),
        "kernels from elsewhere are never",
    ),
    "quantizer": (
        "text_encoder",
        lambda p: edit(p / "text_encoder/config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "has quantization_config",
    ),
    "pickled unet": ("unet", lambda p: pickled_shard(p / "unet", UNET, "x.bin"), "names 'x.bin'"),
    "unet elsewhere": ("unet", lambda p: pickled_shard(p / "unet", UNET, "../elsewhere.safetensors"), "names '../else"),
    "pickled text": ("text_encoder", lambda p: pickled_shard(p / "text_encoder", TEXT, "x.bin"), "names 'x.bin'"),
    "no index": ("unet", lambda p: rewrite(p / "unet" / f"{UNET}.index.json", "[]"), "no JSON object"),
    "deep": ("unet", lambda p: rewrite(p / "unet/config.json", "[" * 9999), "not readable as JSON"),
    "huge": ("unet", lambda p: edit(p / "unet/config.json", block_out_channels=[8, 10**9]), "cannot be"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parts_are_refused(name: str, tmp_path: Path, pipeline_dir: Path) -> None:
    part, change, reason = HOSTILE[name]
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    change(folder)
    for is_meta in (False, True):
        with pytest.raises(ConfigError, match=rf"model\.{part}\.pretrained: .*{reason}"):
            load_network(ModelConfig(pretrained=str(folder)), part, seed=0, meta=is_meta)
    with pytest.raises(DataError):
        load_pipeline(folder)
    assert not (tmp_path / "canary").exists()


def test_code_of_a_tokenizer_is_not_run_nor_asked_about(
    tmp_path: Path, pipeline_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    code = f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\nfrom transformers import CLIPTokenizer as Custom\n"
    (folder / "tokenizer" / "custom.py").write_text(code)
    mark = {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}, "tokenizer_class": "Custom"}
    edit(folder / "tokenizer/tokenizer_config.json", **mark)
    config = ModelConfig(pretrained=str(folder))
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.pretrained: .* cannot be loaded as AutoTokenizer"):
        load_tokenizer(config, "tokenizer", "AutoTokenizer")
    load_tokenizer(config, "tokenizer")
    assert not (tmp_path / "canary").exists() and "[y/N]" not in capfd.readouterr().out


def test_a_scheduler_that_asks_for_everything_is_a_sentence(tmp_path: Path, pipeline_dir: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    edit(folder / "scheduler/scheduler_config.json", num_train_timesteps=10**15)
    with pytest.raises(ConfigError, match="cannot be made from its stored settings"):
        load_noise_scheduler(ModelConfig(pretrained=str(folder)), "noise_scheduler_training")


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "sdpa", "_attn_implementation_autoset": True, "attn_implementation": None},
        {"text_config": {"attn_implementation": {"text": "flash_attention_2"}}},
        {"auto_map": {"AutoModel": "x.Y"}, "quantization_config": None},
    ],
)
def test_usual_settings_pass(settings: dict[str, object]) -> None:
    assert list(refused_settings(settings, "x")) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"text_config": {"attn_implementation": {"text": "a/b"}}},
        {"layers": [{"attn_implementation_internal": "a@b"}]},
        {"kernel_config": {"x": "a/b:c"}},
    ],
)
def test_kernels_are_found_wherever_they_stand(settings: dict[str, object]) -> None:
    assert len(list(refused_settings(settings, "x"))) == 1
