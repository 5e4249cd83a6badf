"""The commands in scripts/, as a user runs them; test_generate_examples.py has the pictures that one of them draws."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts import download_diffusers, make_webdataset
from tests import makers
from tests.integration.commands import ROOT, fails, forked
from tests.unit.data.making import training_data


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


MISTAKES = {
    "compare_checkpoints": ["nowhere", "nowhere"],
    "find_sample": ["nowhere", "key"],
    "generate_examples": ["--pipeline", "nowhere", "--prompt", "a", "--out", "out"],
    "index_dataset": ["none.tar"],
    "make_webdataset": ["nowhere", "--out", "out"],
    "report": ["nowhere", "--out", "out"],
}


@pytest.mark.parametrize("script", MISTAKES)
def test_a_mistake_is_one_sentence_and_status_2(script: str, tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / f"{script}.py"), *MISTAKES[script]]
    if script != "make_webdataset":
        ended = forked(*command, cwd=tmp_path)
    else:  # in a new interpreter, which has to find the project
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, *command]
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 2 and len(said) == 1 and ended.stdout == ""
    assert "Traceback" not in ended.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (make_webdataset.main, ["nowhere", "--out"]),
        (download_diffusers.main, ["-m", "nowhere", "-o"]),
    ],
    ids=lambda value: getattr(value, "__module__", ""),
)
def test_output_to_a_url_is_refused(
    main: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*words, "gs://bucket/x"])
    assert "'gs://bucket/x' is a URL, and files are written to local or mounted folders only" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_download_copies_a_local_pipeline(
    pipeline_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(pipeline_dir, tmp_path / "source"))
    for extra in ("unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.fp16.safetensors", "v1.ckpt"):
        shutil.copyfile(source / "unet/diffusion_pytorch_model.safetensors", source / extra)
    download_diffusers.main(["-m", str(source), "-o", str(tmp_path / "models/copy")])
    assert tree(tmp_path / "models/copy") == tree(pipeline_dir)
    assert f"model.pretrained={tmp_path / 'models/copy'}" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["copy"]


def test_download_converts_the_weights(pipeline_dir: Path, tmp_path: Path) -> None:
    from sd_training.export.pipeline import load_pipeline

    download_diffusers.main(["-m", str(pipeline_dir), "-o", str(tmp_path / "half"), "--dtype", "float16"])
    size = {
        folder: (folder / "unet/diffusion_pytorch_model.safetensors").stat().st_size
        for folder in (pipeline_dir, tmp_path / "half")
    }
    assert size[tmp_path / "half"] < 0.7 * size[pipeline_dir]
    original, half = load_pipeline(pipeline_dir).unet.state_dict(), load_pipeline(tmp_path / "half").unet.state_dict()
    assert all((half[name] == tensor.half().float()).all() for name, tensor in original.items())


def test_download_refuses(pipeline_dir: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pipeline_dir, tmp_path / "broken"))
    (broken / "vae/diffusion_pytorch_model.safetensors").rename(broken / "vae/diffusion_pytorch_model.bin")
    assert "diffusion_pytorch_model.safetensors" in fails(download_diffusers.main, "-m", broken, "-o", tmp_path / "out")
    assert "exists already" in fails(download_diffusers.main, "-m", pipeline_dir, "-o", broken)
    assert "neither a local folder nor" in fails(
        download_diffusers.main, "-m", "./not/a/folder", "-o", tmp_path / "out"
    )
    # the tests run without network, which is also what this says
    assert "hub cannot be reached" in fails(download_diffusers.main, "-m", "owner/model", "-o", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["broken"]


@pytest.mark.parametrize("half", [False, True])
def test_download_takes_one_precision_of_the_pipelines_parts(half: bool) -> None:
    weights = [
        "vae/d.safetensors",
        "vae/d.fp16.safetensors",
        "vae/d.bin",
        "vae/d.non_ema.safetensors",
        "unet/d.fp16.safetensors",
    ]
    rest = ["model_index.json", "unet/config.json", "tokenizer/vocab.json", "tokenizer/merges.txt", "LICENSE.md"]
    unwanted = [
        "v1-5.safetensors",
        "old/config.json",
        "unet/x.py",
        "unet/d.bin.index.json",
        "vae/flax_model.msgpack",
        "README.md",
    ]
    chosen = download_diffusers.choose_files([*weights, *rest, *unwanted], ["unet", "vae", "tokenizer"], half)
    vae = "vae/d.fp16.safetensors" if half else "vae/d.safetensors"
    assert chosen == sorted([*rest, vae, "unet/d.fp16.safetensors"])


def test_make_webdataset_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, out = tmp_path / "photos", tmp_path / "shards"
    (photos / "sub").mkdir(parents=True)
    for i in range(5):
        (photos / f"sub/{i}.jpg").write_bytes(makers.encode(makers.picture(i)))
        (photos / f"sub/{i}.txt").write_text(f"picture {i}")
    (photos / "sub/3.txt").unlink()
    (photos / "sub/0.txt").write_text("picture\n 0")
    (photos / "sub/4.txt").write_text("\n")
    make_webdataset.main([str(photos), "--out", str(out), "--samples-per-shard", "2"])
    said = capsys.readouterr().out
    assert "4 samples in 3 shards" in said and "skipped 1: caption is missing" in said and str(out) in said
    assert json.loads((out / "report.json").read_text())["reasons"] == {"caption is missing": 1}
    assert json.loads((out / "skipped.jsonl").read_text()) == {
        "sample": f"{photos}/sub/3.jpg",
        "reason": "caption is missing",
    }
    assert sorted(p.name for p in out.glob("*.tar*")) == ["00000.tar", "00001.tar", "00002.tar"]
    with tarfile.open(out / "00001.tar") as tar:
        assert tar.getnames() == ["000000002.jpg", "000000002.json", "000000002.txt"]
    for path, kind in ((photos, "ImageFolder"), (out, "WebDataset")):  # the same samples, whichever is trained on
        dataset = training_data(path, kind=kind).datasets[0]
        captions = sorted(dataset.reader.caption(int(sample)) for sample in dataset.selected)
        assert captions == ["", "picture 0", "picture 1", "picture 2"]
    assert "has shards already" in fails(make_webdataset.main, photos, "--out", out)


def test_make_webdataset_from_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(makers.encode(makers.picture(0, 40, 32), "PNG"))
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(
            [["path", "words", "pwatermark"], ["a.png", "a cat", "0.25"], ["b.png", "gone", "1"]]
        )
    argv = [str(tmp_path / "t.csv"), "--out", str(tmp_path / "out"), "--caption-column", "words", "--resize", "16"]
    make_webdataset.main([*argv, "--workers", "1", "--shuffle", "3"])
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        members = {name.split(".")[1]: tar.extractfile(name) for name in tar.getnames()}
        assert json.loads(members["json"].read()) == {"original_width": 40, "original_height": 32, "pwatermark": "0.25"}  # type: ignore[union-attr]
        assert Image.open(members["png"]).size == (20, 16)  # type: ignore[arg-type]


def test_make_webdataset_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    (tmp_path / "a.txt").write_text("a cat")
    said = fails(make_webdataset.main, tmp_path, "--out", tmp_path / "out")
    assert "no sample can be used" in said and "a.jpg" in said
    assert "--workers: is 0" in fails(make_webdataset.main, tmp_path, "--out", tmp_path / "o", "--workers", "0")
    assert "cannot be written" in fails(make_webdataset.main, tmp_path, "--out", tmp_path / "a.jpg")


def test_imagenet_prompts() -> None:
    prompts = json.loads((ROOT / "scripts/metadata/imagenet_idx_to_prompt.json").read_text())
    assert list(prompts) == [str(i) for i in range(1000)]
    assert len({prompt.lower() for prompt in prompts.values()}) == 1000
    known = {
        "0": "a tench",
        "207": "a golden retriever",
        "134": "a crane bird",
        "549": "an envelope",
        "999": "a toilet tissue",
    }
    assert {i: prompts[i] for i in known} == {i: f"a photo of {name}" for i, name in known.items()}
