import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.generate_examples import fingerprint
from sd_training.errors import DataError
from sd_training.export.pipeline import folder_problems, load_pipeline

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(pipeline_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline_dir, tmp_path / "copy"))


def edit_index(folder: Path, **values: object) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_whole_folder_loads(folder: Path) -> None:
    assert folder_problems(folder) == []
    assert next(load_pipeline(folder, torch.bfloat16).unet.parameters()).dtype == torch.bfloat16


def test_all_problems_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")
    edit_index(folder, scheduler=["os", "system"])
    with pytest.raises(DataError) as caught:
        load_pipeline(folder)
    assert [line.partition(": ")[2][:10] for line in str(caught.value).splitlines()] == ["comes from", "is missing"]


def test_damaged_weights_and_weights_of_other_formats_are_not_loaded(folder: Path) -> None:
    whole = (folder / UNET).read_bytes()
    (folder / UNET).write_bytes(whole[:-100])
    with pytest.raises(DataError, match="diffusers cannot load it"):
        load_pipeline(folder)
    (folder / UNET).write_bytes(whole)
    weights = load_file(folder / "vae/diffusion_pytorch_model.safetensors")
    (folder / "vae/diffusion_pytorch_model.safetensors").unlink()
    torch.save(weights, folder / "vae/diffusion_pytorch_model.bin")
    with pytest.raises(DataError, match=r"diffusers cannot load it .*diffusion_pytorch_model\.safetensors"):
        load_pipeline(folder)


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    (folder / "unet" / "diffusers.py").write_text("raise SystemExit('code ran')")
    assert "python code" in folder_problems(folder)[0]
    (folder / "unet" / "diffusers.py").unlink()
    edit_index(folder, unet=["os", "system"])
    assert "comes from 'os'" in folder_problems(folder)[0]
    edit_index(folder, _class_name=["pipeline", "Mine"])
    with pytest.raises(DataError, match="_class_name"):
        load_pipeline(folder)


def test_unknown_class_is_a_sentence(folder: Path) -> None:
    edit_index(folder, _class_name="NoSuchPipeline")
    with pytest.raises(DataError, match="NoSuchPipeline"):
        load_pipeline(folder)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_not_a_pipeline(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(DataError, match=r"model_index\.json"):
        folder_problems(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        folder_problems(tmp_path / "nowhere")


def test_fingerprint_follows_content_not_place(folder: Path, pipeline_dir: Path) -> None:
    first = fingerprint(folder)
    assert first == fingerprint(pipeline_dir)
    weights = load_file(folder / UNET)
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, folder / UNET)
    assert fingerprint(folder) != first


def test_fingerprint_reads_the_end_of_large_files(folder: Path) -> None:
    with (folder / UNET).open("r+b") as stream:
        stream.truncate(3 << 20)
    first = fingerprint(folder)
    with (folder / UNET).open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    assert fingerprint(folder) != first
