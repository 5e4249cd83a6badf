"""scripts/generate_examples.py as a user runs it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from diffusers import EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from PIL import Image

from scripts import generate_examples
from sd_training.cli import run_cli
from sd_training.export.additions import samplers_for
from tests import makers
from tests.family_makers import save_pipeline
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import TORCHRUN
from tests.integration.commands import ROOT, fails


def draw(pipeline: Path, out: Path, *more: str | Path) -> list[dict[str, Any]]:
    """Runs generate_examples and returns metadata.jsonl."""
    argv = ["--pipeline", pipeline, "--out", out, "--steps", "2", "--height", "16", "--width", "16", *more]
    generate_examples.main([str(word) for word in argv])
    return [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]


def contents(folder: Path, pattern: str = "*.png") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


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
        "000000.png",
        "000001.png",
        "000002.png",
        "000003.png",
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


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("sd3", FlowMatchEulerDiscreteScheduler(shift=3.0)),
        ("mmdit_rope", FlowMatchEulerDiscreteScheduler()),
        ("stable_diffusion", UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)),
        ("stable_diffusion", EDMEulerScheduler(sigma_data=1.0)),
    ],
    ids=["flow", "flow_of_ours", "flow_of_a_unet", "edm"],
)
def test_every_sampler_of_another_kind_of_model_draws_or_is_refused(family: str, own: Any, tmp_path: Path) -> None:
    pipeline = save_pipeline(family, tmp_path / "pipeline")
    own.save_pretrained(pipeline / "scheduler")
    index = json.loads((pipeline / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(own).__name__]
    (pipeline / "model_index.json").write_text(json.dumps(index))
    drawn, refused = set(), set()
    for name in samplers_for(own.config):
        words = ("--prompt", "red square", "--scheduler", name, "--steps", "4")
        if family == "stable_diffusion" and name.startswith("FlowMatch"):
            assert "is none of those that can follow this model" in fails(
                generate_examples.main, "--pipeline", pipeline, "--out", tmp_path / name, *words
            )
            refused.add(name)
            continue
        (line,) = draw(pipeline, tmp_path / name, *words)
        assert line["scheduler"] == name
        assert len(Image.open(tmp_path / name / "000000.png").getcolors(256) or range(257)) > 50, name
        drawn.add(name)
    assert drawn | refused == set(samplers_for(own.config)) and drawn
    assert ("FlowMatchHeunDiscreteScheduler" in drawn) == (family in ("sd3", "mmdit_rope"))


def test_generate_under_torchrun_draws_the_same(pipeline_dir: Path, tmp_path: Path, prompts: Path) -> None:
    lines = draw(pipeline_dir, tmp_path / "one", "--prompts", prompts, "--batch-size", "1")
    words = [ROOT / "scripts/generate_examples.py", "--pipeline", pipeline_dir, "--prompts", prompts]
    words += ["--out", tmp_path / "two", "--steps", "2", "--height", "16", "--width", "16"]
    words += ["--batch-size", "1", "--device", "cpu"]
    log = tmp_path / "log.txt"
    command = ["--standalone", "--nproc_per_node", "2", *map(str, words)]
    assert shared_server().start(TORCHRUN, command, log, os.environ).wait(300) == 0, log.read_text()
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert [json.loads(x) for x in (tmp_path / "two/metadata.jsonl").read_text().splitlines()] == lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", " "], "prompt 000000 is empty"),
        (["--prompts", "empty.txt"], "has no prompts"),
        (["--prompts", "nowhere.txt"], "cannot be read"),
        (["--prompts", "grid.csv"], "'grid' is taken"),
        (["--prompt", "a", "--scheduler", "Best"], "scheduler Best: is none of those that can follow this model: DDIM"),
        (["--prompt", "a", "--steps", "2000"], "more than the 1000 timesteps"),
        (["--prompt", "a", "--height", "20"], "--height: 20 must be a multiple of 8"),
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "blocked"], "blocked/metadata.jsonl: Is a directory; "),
        (["--out", "file/below"], "--out: file/below cannot be made (Not a directory)"),
        (["--out", "/proc/nowhere"], "--out: /proc/nowhere cannot be made (No such file or directory)"),
        (["--out", "taken"], "taken/000000.png: Is a directory; "),
        (["--lora", "folder.safetensors"], "--lora: folder.safetensors/pytorch_lora_weights.safetensors is no "),
        (["--init-image", "."], "init_image: . is not there, or is no JPEG, PNG or WebP file"),
    ],
)
def test_places_that_cannot_be_read_or_written(
    pipeline_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("blocked/metadata.jsonl", "taken/000000.png", "folder.safetensors"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    words = ["--prompt", "a red square", *options]
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: draw(pipeline_dir, tmp_path / "out", *words))
    assert ended.value.code == 2 and said in capsys.readouterr().err
