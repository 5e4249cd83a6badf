"""The command that makes pipelines with averages that a run did not keep."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from safetensors.torch import load_file
from torch import Tensor

from scripts import posthoc_ema
from sd_training.callbacks.ema import gamma_of, snapshot_path, track_decay, write_snapshot
from sd_training.errors import UserError
from sd_training.export.pipeline import export_pipeline, load_pipeline
from tests import makers
from tests.family_makers import save_pipeline
from tests.integration.commands import ROOT, forked

TRACKS, KEPT = (0.05, 0.1), (0.075, 0.15)
NUM_STEPS, SNAPSHOT_EVERY = 200, 10


def random_walk(network: torch.nn.Module, run_dir: Path) -> dict[float, dict[str, Tensor]]:
    """Moves a network's weights about, writes snapshots of two tracks, and returns the averages of `KEPT`."""
    torch.manual_seed(0)
    weights = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    averages = {width: {n: torch.zeros_like(w) for n, w in weights.items()} for width in (*TRACKS, *KEPT)}
    for step in range(1, NUM_STEPS + 1):
        for weight in weights.values():
            weight += 0.003 * torch.randn_like(weight)
        for width, average in averages.items():
            share = 1.0 - track_decay(step, gamma_of(width))
            torch._foreach_lerp_(list(average.values()), list(weights.values()), share)
        for width in TRACKS if step % SNAPSHOT_EVERY == 0 else ():
            write_snapshot(run_dir, step, width, averages[width])
    return {width: averages[width] for width in KEPT}


@pytest.fixture(scope="module")
def kept_and_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[float, dict[str, Tensor]], Path]:
    """Averages that were kept directly, and the run folder."""
    run_dir = tmp_path_factory.mktemp("runs") / "x"
    pipeline = makers.tiny_pipeline()
    export_pipeline(pipeline, run_dir / "current_pipeline")
    return random_walk(pipeline.unet, run_dir), run_dir


@pytest.fixture
def run_dir(kept_and_run: tuple[Any, Path]) -> Path:
    return kept_and_run[1]


def call(run: Path, output: Path, *sigma_rel: float, step: int | None = None) -> None:
    words = [run, "--out", output, "--sigma-rel", *(sigma_rel or [0.075]), *([] if step is None else ["--step", step])]
    posthoc_ema.main([str(word) for word in words])


def fails(*words: object) -> str:
    with pytest.raises(UserError) as caught:
        posthoc_ema.main([str(word) for word in words])
    return str(caught.value)


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    squares = [
        ((found[n].double() - t.double()).square().sum(), t.double().square().sum()) for n, t in expected.items()
    ]
    return float((sum(error for error, _ in squares) / sum(size for _, size in squares)) ** 0.5)


def test_averages_are_those_that_were_kept(
    kept_and_run: tuple[dict[float, dict[str, Tensor]], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, run_dir = kept_and_run
    call(run_dir, tmp_path / "made", 0.075, 0.15)
    said = capsys.readouterr().out
    assert "sigma_rel=0.075 at step 200: 40 snapshots, relative residual of the profile 2.3e-03" in said
    assert "warning" not in said and sorted(os.listdir(tmp_path / "made")) == ["sigma_rel=0.075", "sigma_rel=0.150"]
    for width, folder in ((0.075, "sigma_rel=0.075"), (0.15, "sigma_rel=0.150")):
        made = StableDiffusionPipeline.from_pretrained(tmp_path / "made" / folder, local_files_only=True)
        assert relative_error(dict(made.unet.named_parameters()), kept[width]) < 1e-3
    template = load_file(run_dir / "current_pipeline/text_encoder/model.safetensors")
    assert all(torch.equal(template[n], t) for n, t in made.text_encoder.state_dict().items())
    latest = load_file(run_dir / "current_pipeline/unet/diffusion_pytorch_model.safetensors")
    assert relative_error(latest, kept[0.15]) > 5e-3  # the template is not near by itself


def test_a_kept_track_at_an_earlier_step_is_its_snapshot(run_dir: Path, tmp_path: Path) -> None:
    call(run_dir, tmp_path / "made", 0.1, step=150)
    stored = load_file(snapshot_path(run_dir, 150, 0.1))
    found = dict(load_pipeline(tmp_path / "made").unet.named_parameters())
    assert all(torch.equal(found[name].detach(), tensor) for name, tensor in stored.items())


def test_a_rough_average_is_said_to_be_one(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(run_dir, tmp_path / "narrow", 0.01)
    assert "warning: the residual is above 0.02" in (said := capsys.readouterr().out)
    assert "(ema.snapshot_every) or tracks nearer to this width (ema.sigma_rels) would help" in said
    call(run_dir, tmp_path / "between", step=155)
    assert "a step that has a snapshot (160, 170, 180, 190, 200, …)" in capsys.readouterr().out


def test_mistakes_are_sentences(run_dir: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "made", "--sigma-rel")
    said = fails("nowhere", *out, "0.3", "0", "0.1", "--step", "0")
    for width in ("0.3", "0.0"):
        assert f"--sigma-rel: {width} is no width; give numbers above 0 and at most 0.2886" in said
    assert "--step: is 0; give a number of optimizer steps, 1 or more" in said
    assert "nowhere: is no folder; give the folder of a run" in said
    assert "--step: is 300, but the last snapshot of" in fails(run_dir, *out, "0.1", "--step", "300")
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "made/sigma_rel=0.050").mkdir(parents=True)
    out = ("--out", tmp_path / "made", "--sigma-rel")
    assert "made exists; remove it or choose another" in fails(run_dir, *out, "0.1")
    assert "sigma_rel=0.050 exists; remove it" in fails(run_dir, *out, "0.05", "0.1")
    assert os.listdir(tmp_path / "made") == ["sigma_rel=0.050"]


def test_a_run_without_snapshots_or_without_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    words = (tmp_path / "run", "--out", tmp_path / "made", "--sigma-rel", "0.1")
    assert "has no snapshots; they are kept when the run trains with ema.sigma_rels" in fails(*words)
    write_snapshot(tmp_path / "run", 10, 0.05, {"a": torch.zeros(2)})
    assert "current_pipeline: is no pipeline; the run has not saved yet" in fails(*words)
    makers.save_tiny_pipeline(tmp_path / "run/current_pipeline")
    assert "tensors do not fit the network of the pipeline, e.g. a: (2,) in the snapshot" in fails(*words)
    assert not (tmp_path / "made").exists()


def test_transformers_with_text_encoders_and_autoencoders(tmp_path: Path) -> None:
    save_pipeline("sd3", tmp_path / "a/current_pipeline")
    denoiser = load_pipeline(tmp_path / "a/current_pipeline").transformer
    write_snapshot(tmp_path / "a", 10, 0.1, {n: p + 1 for n, p in denoiser.named_parameters()})
    call(tmp_path / "a", tmp_path / "sd3", 0.1)
    found = load_pipeline(tmp_path / "sd3").transformer
    assert torch.equal(found.proj_out.bias, denoiser.proj_out.bias + 1)

    vae = makers.tiny_vae()
    export_pipeline(vae, tmp_path / "b/current_pipeline")
    write_snapshot(tmp_path / "b", 10, 0.1, {n: p + 1 for n, p in vae.named_parameters()})
    call(tmp_path / "b", tmp_path / "vae", 0.1)
    assert torch.equal(AutoencoderKL.from_pretrained(tmp_path / "vae").quant_conv.bias, vae.quant_conv.bias + 1)


def test_the_command_as_a_user_runs_it(run_dir: Path, tmp_path: Path) -> None:
    command = [ROOT / "scripts/posthoc_ema.py", run_dir, "--sigma-rel", "0.075", "--out"]
    done, wrong = (forked(*command, out, cwd=tmp_path) for out in ("made", "gs://b/x"))
    assert done.returncode == 0 and done.stdout.endswith("written: made\n"), done.stderr
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "gs://b/x" in wrong.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["made"]
