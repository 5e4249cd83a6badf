"""The commands in scripts/ and the batch file, as a user runs them."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts import download_diffusers, generate_examples, make_webdataset
from sd_training.errors import UserError
from sd_training.export.samplers import samplers_for
from tests import makers

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def fails(main: Any, *argv: str | Path) -> str:
    """The sentence of the user error that a command ends with."""
    with pytest.raises(UserError) as caught:
        main([str(word) for word in argv])
    return str(caught.value)


def draw(pipeline: Path, out: Path, *more: str | Path) -> list[dict[str, Any]]:
    """Runs generate_examples and returns metadata.jsonl."""
    argv = ["--pipeline", pipeline, "--out", out, "--steps", "2", "--height", "16", "--width", "16", *more]
    generate_examples.main([str(word) for word in argv])
    return [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]


def contents(folder: Path, pattern: str = "*.png") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a red square\n\na blue circle\na green picture\n")
    return path


def test_generate_writes_pictures_records_and_grid(pipeline_dir: Path, tmp_path: Path, prompts: Path) -> None:
    lines = draw(pipeline_dir, tmp_path / "out", "--prompts", prompts, "--seed", "40", "--guidance-scale", "3")
    assert [(x["file"], x["prompt"], x["seed"]) for x in lines] == [
        ("000000.png", "a red square", 40),
        ("000001.png", "a blue circle", 41),
        ("000002.png", "a green picture", 42),
    ]
    assert {(x["scheduler"], x["guidance"], x["steps"]) for x in lines} == {("DDIMScheduler", 3.0, 2)}
    assert Image.open(tmp_path / "out/000001.png").size == (16, 16)
    assert Image.open(tmp_path / "out/grid.png").size == (32, 32)
    assert not list((tmp_path / "out").glob(".*"))


def test_generate_resumes_with_the_same_pictures(pipeline_dir: Path, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    first = draw(pipeline_dir, out, "--prompts", prompts)
    before = contents(out)
    kept = (out / "000000.png").stat().st_mtime_ns
    (out / "000001.png").unlink()
    (out / "000002.png").write_bytes(before["000002.png"][:150])
    (out / ".000001.png.partial").write_bytes(b"half")
    assert draw(pipeline_dir, out, "--prompts", prompts, "--batch-size", "1") == first
    assert contents(out) == before and (out / "000000.png").stat().st_mtime_ns == kept
    assert not list(out.glob(".*"))


def test_generate_does_not_mix_ways_of_drawing(pipeline_dir: Path, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    draw(pipeline_dir, out, "--prompts", prompts)
    before = contents(out)
    said = fails(draw_argv(pipeline_dir, out), "--prompts", prompts, "--guidance-scale", "2")
    assert "000000.png: is there already, made with guidance 7.5 instead of 2.0" in said
    other = makers.save_tiny_pipeline(tmp_path / "other", seed=1)
    assert "weights" in fails(draw_argv(other, out), "--prompts", prompts)
    assert contents(out) == before
    prompts.write_text(prompts.read_text() + "one more\n")
    assert [x["prompt"] for x in draw(pipeline_dir, out, "--prompts", prompts)][-1] == "one more"
    assert [x["file"] for x in draw(pipeline_dir, out, "--prompt", "a red square")] == [
        "000001.png",
        "000002.png",
        "000003.png",
        "000000.png",
    ]


def draw_argv(pipeline: Path, out: Path) -> Any:
    return lambda argv: draw(pipeline, out, *argv)


def test_generate_from_csv_with_several_pictures_per_prompt(pipeline_dir: Path, tmp_path: Path) -> None:
    table = tmp_path / "captions.csv"
    table.write_text("uid,prompt\nx/y,a red square\nb,a blue circle\n")
    lines = draw(pipeline_dir, tmp_path / "out", "--prompts", table, "--images-per-prompt", "3", "--dtype", "bfloat16")
    assert [x["file"] for x in lines] == ["x%2Fy_0.png", "x%2Fy_1.png", "x%2Fy_2.png", "b_0.png", "b_1.png", "b_2.png"]
    assert [x["seed"] for x in lines] == list(range(6))
    pictures = contents(tmp_path / "out", "*_*.png")
    assert len(set(pictures.values())) == 6
    assert Image.open(tmp_path / "out/grid.png").size == (48, 32)


@pytest.mark.parametrize("name", samplers_for({}))
def test_generate_with_every_sampler(pipeline_dir: Path, tmp_path: Path, name: str) -> None:
    (line,) = draw(pipeline_dir, tmp_path / "out", "--prompt", "a red square", "--scheduler", name, "--steps", "4")
    assert line["scheduler"] == name
    assert len(Image.open(tmp_path / "out/000000.png").getcolors(256) or range(257)) > 50


def test_generate_on_two_processes_draws_the_same(pipeline_dir: Path, tmp_path: Path, prompts: Path) -> None:
    lines = draw(pipeline_dir, tmp_path / "one", "--prompts", prompts, "--batch-size", "1")
    assert draw(pipeline_dir, tmp_path / "two", "--prompts", prompts, "--batch-size", "1", "--processes", "2") == lines
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_generate_under_torchrun_draws_the_same(pipeline_dir: Path, tmp_path: Path, prompts: Path) -> None:
    lines = draw(pipeline_dir, tmp_path / "one", "--prompts", prompts, "--batch-size", "1")
    script = [ROOT / "scripts/generate_examples.py", "--pipeline", pipeline_dir, "--prompts", prompts, "--out", "two"]
    options = ["--steps", "2", "--height", "16", "--width", "16", "--batch-size", "1", "--device", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ended = run(*torchrun, *script, *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert [json.loads(x) for x in (tmp_path / "two/metadata.jsonl").read_text().splitlines()] == lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", " "], "prompt 000000 is empty"),
        (["--prompts", "empty.txt"], "has no prompts"),
        (["--prompts", "nowhere.txt"], "cannot be read"),
        (["--prompts", "grid.csv"], "'grid' is taken"),
        (["--prompt", "a", "--scheduler", "Best"], "scheduler 'Best' is not one of DDIM"),
        (["--prompt", "a", "--steps", "2000"], "more than the 1000 timesteps"),
        (["--prompt", "a", "--height", "20"], "--height: 20 is not a multiple of 8"),
        (
            ["--prompt", "a", "--guidance-scale", "0.5", "--batch-size", "0"],
            "--batch-size: 0 must be 1 or more\n--guid",
        ),
        (["--prompt", "a", "--device", "cuda:77"], "this machine has cpu"),
        (["--prompt", "a", "--pipeline", "nowhere"], "nowhere: no such folder"),
        (["--prompt", "a", "--pipeline", "."], "is not a diffusers pipeline"),
    ],
)
def test_generate_user_errors(
    pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "grid.csv").write_text("uid,caption\ngrid,a\n")
    assert said in fails(draw_argv(pipeline_dir, tmp_path / "out"), *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["generate_examples", "make_webdataset"])
def test_a_mistake_is_one_sentence_and_status_2(script: str, tmp_path: Path) -> None:
    arguments = {
        "generate_examples": ["--pipeline", "nowhere", "--prompt", "a", "--out", "out"],
        "make_webdataset": ["nowhere", "--out", "out"],
    }
    ended = run(sys.executable, ROOT / "scripts" / f"{script}.py", *arguments[script], cwd=tmp_path)
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 2 and len(said) == 1 and ended.stdout == ""
    assert "Traceback" not in ended.stderr and not (tmp_path / "out").exists()


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
    from sd_training.export.folder import load_pipeline

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
    assert "no *.safetensors" in fails(download_diffusers.main, "-m", broken, "-o", tmp_path / "out")
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
    make_webdataset.main([str(photos), "--out", str(out), "--samples-per-shard", "2"])
    said = capsys.readouterr().out
    assert "4 samples in 3 shards" in said and "skipped 1: caption is missing" in said and str(out) in said
    assert json.loads((out / "report.json").read_text())["reasons"] == {"caption is missing": 1}
    assert json.loads((out / "skipped.jsonl").read_text()) == {
        "sample": "sub/3.jpg",
        "reason": "caption is missing: 3.txt",
    }
    assert sorted(p.name for p in out.glob("*.tar*")) == ["00000.tar", "00001.tar", "00002.tar"]
    with tarfile.open(out / "00001.tar") as tar:
        assert tar.getnames() == ["000000002.jpg", "000000002.json", "000000002.txt"]
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
        assert json.loads(members["json"].read()) == {"original_width": 40, "original_height": 32, "pwatermark": 0.25}  # type: ignore[union-attr]
        assert Image.open(members["png"]).size == (20, 16)  # type: ignore[arg-type]


def test_make_webdataset_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    (tmp_path / "a.txt").write_text("a cat")
    said = fails(make_webdataset.main, tmp_path, "--out", tmp_path / "out")
    assert "no sample can be used" in said and "a.jpg" in said
    assert "--workers: 0" in fails(make_webdataset.main, tmp_path, "--out", tmp_path / "o", "--workers", "0")
    assert "cannot be made" in fails(make_webdataset.main, tmp_path, "--out", tmp_path / "a.jpg")


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
