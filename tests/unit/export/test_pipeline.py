"""Exports: what is written, compared and recovered."""

import itertools
import json
import os
import random
import re
import resource
import shutil
import socket
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline

from sd_training.export.pipeline import (
    ExportError,
    bit_differences,
    differences,
    export_pipeline,
    frozen_parts,
    keep_export,
    recover_exports,
)
from tests import makers
from tests.unit.kill import killed_after


@pytest.fixture(scope="module")
def pipelines() -> list[StableDiffusionPipeline]:
    """Two pipelines with other weights and other noise schedules."""
    return [
        makers.tiny_pipeline(0),
        makers.tiny_pipeline(1, prediction_type="v_prediction", rescale_betas_zero_snr=True),
    ]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(folder: Path, pipeline: StableDiffusionPipeline) -> None:
    """The folder loads as any user would load it, with every weight and setting of `pipeline`."""
    loaded = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    for name in ("unet", "vae", "text_encoder"):
        expected, found = getattr(pipeline, name), getattr(loaded, name)
        assert bit_differences(expected.state_dict(), found.state_dict()) == []
    assert loaded.scheduler.config.prediction_type == pipeline.scheduler.config.prediction_type
    assert torch.equal(loaded.scheduler.alphas_cumprod, pipeline.scheduler.alphas_cumprod)
    assert loaded.vae.config.scaling_factor == 0.7
    assert loaded.tokenizer("a red circle").input_ids == pipeline.tokenizer("a red circle").input_ids


def test_an_export_replaces_the_one_before(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    for pipeline in (*pipelines, pipelines[0]):
        export_pipeline(pipeline, tmp_path / "run" / "current_pipeline")
        assert names(tmp_path / "run") == ["current_pipeline"]
        assert_holds(tmp_path / "run" / "current_pipeline", pipeline)


def test_loading_needs_no_network(
    tmp_path: Path, pipelines: list[StableDiffusionPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    export_pipeline(pipelines[0], tmp_path / "p")
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "p")
    assert type(loaded.scheduler) is DDIMScheduler


def test_the_export_draws_the_same_picture(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    export_pipeline(pipelines[1], tmp_path / "p")
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "p", local_files_only=True)
    drawn = []
    for pipeline in (pipelines[1], loaded):
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        drawn.append(pipeline("a red circle", num_inference_steps=2, generator=generator, output_type="np").images)
    assert (drawn[0] == drawn[1]).all()


def test_one_model_is_a_folder_of_its_own(tmp_path: Path) -> None:
    vae = makers.tiny_vae().bfloat16()
    export_pipeline(vae, tmp_path / "vae")
    assert names(tmp_path / "vae") == ["config.json", "diffusion_pytorch_model.safetensors"]
    loaded = AutoencoderKL.from_pretrained(tmp_path / "vae", local_files_only=True, torch_dtype=torch.bfloat16)
    assert bit_differences(vae.state_dict(), loaded.state_dict()) == []


def test_only_safetensors_and_nobody_else_can_write(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    before = os.umask(0o002)  # which commands set (`cli.py`)
    try:
        export_pipeline(pipelines[0], tmp_path / "p")
    finally:
        os.umask(before)
    paths = list((tmp_path / "p").rglob("*"))
    assert {path.suffix for path in paths if path.is_file()} == {".json", ".safetensors"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o775, 0o664}


def test_training_is_not_disturbed(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    pipelines[0].unet.train()
    before = torch.random.get_rng_state()
    export_pipeline(pipelines[0], tmp_path / "p")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert pipelines[0].unet.training and all(p.requires_grad for p in pipelines[0].unet.parameters())


def test_frozen_parts_are_written_once(tmp_path: Path) -> None:
    """Later exports are linked to the same files, unless somebody has changed one."""
    pipeline = makers.tiny_pipeline(0)
    for part in (pipeline.vae, pipeline.text_encoder):
        part.requires_grad_(False)

    def inodes(step: int) -> dict[str, int]:
        files = (tmp_path / "pipelines" / f"step_{step}").glob("*/*.safetensors")
        return {path.parent.name: path.stat().st_ino for path in files}

    def next_export(step: int) -> dict[str, int]:
        written = frozen_parts(pipeline, (tmp_path / "current_pipeline").resolve())
        assert set(written) == {"vae", "text_encoder"}
        torch.nn.init.normal_(next(pipeline.unet.parameters()))
        assert_holds(keep_export(pipeline, tmp_path, step, written=written), pipeline)
        return inodes(step)

    keep_export(pipeline, tmp_path, 1)
    assert tree(tmp_path / "pipelines" / "step_1").keys() == tree(tmp_path / "current_pipeline").keys()
    first, second = inodes(1), next_export(2)
    assert {name for name in first if first[name] == second[name]} == {"vae", "text_encoder"}
    assert tree(tmp_path / "pipelines" / "step_1").keys() == tree(tmp_path / "pipelines" / "step_2").keys()

    written = frozen_parts(pipeline, tmp_path / "pipelines" / "step_2")
    damaged = tmp_path / "pipelines" / "step_2" / "vae" / "diffusion_pytorch_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert_holds(keep_export(pipeline, tmp_path, 3, written=written), pipeline)
    third = inodes(3)
    assert {name for name in first if first[name] == third[name]} == {"text_encoder"}

    shutil.rmtree(tmp_path / "pipelines" / "step_2" / "text_encoder")
    assert_holds(keep_export(pipeline, tmp_path, 4, written=written), pipeline)


def test_kept_exports_and_the_link_to_the_newest(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    keep_export(pipelines[0], tmp_path, 10)
    assert keep_export(pipelines[1], tmp_path, 20) == tmp_path / "pipelines" / "step_20"
    assert names(tmp_path) == ["current_pipeline", "pipelines"]
    assert os.readlink(tmp_path / "current_pipeline") == "pipelines/step_20"
    shutil.move(tmp_path / "pipelines", tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "pipelines")
    assert_holds(tmp_path / "current_pipeline", pipelines[1])
    assert_holds(tmp_path / "pipelines" / "step_10", pipelines[0])


def test_switching_between_keeping_and_replacing(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    current = tmp_path / "current_pipeline"
    export_pipeline(pipelines[0], current)
    keep_export(pipelines[1], tmp_path, 20)
    assert current.is_symlink()
    export_pipeline(pipelines[0], current)
    assert not current.is_symlink() and names(tmp_path) == ["current_pipeline", "pipelines"]
    assert_holds(current, pipelines[0])
    assert_holds(tmp_path / "pipelines" / "step_20", pipelines[1])


def test_a_full_disk_leaves_the_old_export(tmp_path: Path, pipelines: list[StableDiffusionPipeline]) -> None:
    export_pipeline(pipelines[0], tmp_path / "p")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="GiB are free") as error:
            export_pipeline(pipelines[1], tmp_path / "p")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path / "p") in str(error.value)
    assert names(tmp_path) == ["p"]
    assert_holds(tmp_path / "p", pipelines[0])


class Forgetful(AutoencoderKL):
    """Writes a weight that is not the one in memory, as a bug or a bad disk would."""

    def save_pretrained(self, *args: object, **options: object) -> None:
        with torch.no_grad():
            self.decoder.conv_in.bias[0] += 1
            super().save_pretrained(*args, **options)
            self.decoder.conv_in.bias[0] -= 1


def test_an_export_that_is_not_what_was_in_memory_is_refused(tmp_path: Path) -> None:
    vae = makers.tiny_vae()
    export_pipeline(vae, tmp_path / "vae")
    old = tree(tmp_path / "vae")
    vae.__class__ = Forgetful
    with pytest.raises(ExportError, match=r"decoder\.conv_in\.bias differs"):
        export_pipeline(vae, tmp_path / "vae")
    assert names(tmp_path) == ["vae"] and tree(tmp_path / "vae") == old


def test_recovery_of_every_state_a_kill_can_leave(tmp_path: Path) -> None:
    def folder(name: str, content: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(content)

    current = tmp_path / "current_pipeline"
    folder("current_pipeline.partial", "half written")
    recover_exports(tmp_path)  # killed in the very first export
    assert names(tmp_path) == []
    folder("current_pipeline.old", "old")
    folder("current_pipeline.partial", "new")
    recover_exports(tmp_path)  # killed between the two renames
    assert names(tmp_path) == ["current_pipeline"] and (current / "content").read_text() == "old"
    folder("current_pipeline.old", "old")
    recover_exports(tmp_path)  # killed while the old one was deleted
    assert names(tmp_path) == ["current_pipeline"]
    folder("kept", "kept")
    (tmp_path / "current_pipeline.partial").symlink_to("kept")
    recover_exports(tmp_path)  # killed before the link was put in place
    assert names(tmp_path) == ["current_pipeline", "kept"]


def export_for_ever(
    run_dir: Path, pipelines: list[StableDiffusionPipeline], keep: bool, first: int, done: Callable[[int], None]
) -> None:
    for step in itertools.count(first):
        if keep:
            keep_export(pipelines[step % 2], run_dir, step % 3)
        else:
            export_pipeline(pipelines[step % 2], run_dir / "current_pipeline")
        done(step)


@pytest.mark.parametrize(("keep", "kills"), [(False, 10), (True, 5)], ids=["replace", "keep"])
def test_every_kill_leaves_an_export(
    tmp_path: Path, pipelines: list[StableDiffusionPipeline], keep: bool, kills: int
) -> None:
    chance, step = random.Random(1), 0
    start = time.perf_counter()
    for _ in range(2):
        export_pipeline(pipelines[0], tmp_path / "pace")
    pace = (time.perf_counter() - start) / 2
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for kill in itertools.count(1):
        assert kill < 6 * kills, f"only {step} exports"
        work = partial(export_for_ever, run_dir, pipelines, keep, step + 1)
        steps = killed_after(chance.uniform(0, 3 * pace), work)
        pace *= 1 if steps else 1.1
        step = max([step, *steps])
        recover_exports(run_dir)
        if step == 0:
            continue
        assert set(names(run_dir)) <= {"current_pipeline", "pipelines"}
        same = [not differences(pipeline, run_dir / "current_pipeline") for pipeline in pipelines]
        assert sum(same) == 1, "the export is one of the two, whole"
        step += step % 2 != same.index(True)  # put in place, but killed before it could say so
        if kill >= kills and step >= 2:
            break
    assert_holds(run_dir / "current_pipeline", pipelines[step % 2])


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    return makers.tiny_pipeline()


def edit(file: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))

    return change


def flip_last_bit(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[-1] ^= 1
        (folder / file).write_bytes(content)

    return change


def delete(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (edit("scheduler/scheduler_config.json", prediction_type="v_prediction"), "setting prediction_type is 'v_pred"),
        (edit("model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"]), "scheduler loads as Euler"),
        (edit("model_index.json", unet=["diffusers", "UNet2DModel"]), "unet"),
        (edit("vae/config.json", scaling_factor=0.18215), "vae: setting scaling_factor is 0.18215, not 0.7"),
        (edit("text_encoder/config.json", hidden_act="gelu"), "text_encoder: setting hidden_act is 'gelu'"),
        (edit("tokenizer/tokenizer_config.json", model_max_length=8), "tokenizer gives other token ids"),
        (flip_last_bit("unet/diffusion_pytorch_model.safetensors"), "unet: .* differs"),
        (flip_last_bit("text_encoder/model.safetensors"), "text_encoder: .* differs"),
        (delete("vae/diffusion_pytorch_model.safetensors"), "does not load"),
        (delete("model_index.json"), "does not load"),
        (delete("tokenizer/tokenizer.json"), "tokenizer|does not load"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_difference_is_found(
    tmp_path: Path, pipeline: StableDiffusionPipeline, change: Callable[[Path], None], problem: str
) -> None:
    pipeline.save_pretrained(tmp_path)
    assert differences(pipeline, tmp_path) == []
    change(tmp_path)
    found = differences(pipeline, tmp_path)
    assert any(re.search(problem, line) for line in found), found


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert bit_differences({"a": nan, "b": zero}, {"a": nan.clone(), "b": zero.clone()}) == []
    assert bit_differences({"a": zero}, {"a": -zero}) == ["a differs"]
    assert bit_differences({"a": zero}, {"a": zero.double()}) == ["a differs"]
    assert bit_differences({"a": zero, "b": zero}, {"a": zero, "c": zero}) == ["b is missing", "c is extra"]
