"""Every model family: a tiny pipeline is trained, saved, resumed, loaded by diffusers without a network, and draws."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sd_training.models.family import latent_grid
from sd_training.training import DiffusionModule
from sd_training.types import NoisedBatch
from tests.family_makers import PIPELINES, drawn_size, save_pipeline
from tests.faults.fork_server import shared_server
from tests.integration.training import CrashAfter, Interrupted, options, train
from tests.offline import refuse_connections


def load_and_draw(words: list[str]) -> None:
    """In a process of its own: folder of a pipeline, file of the picture, family."""
    refuse_connections()
    import diffusers

    import sd_training.models.families.mmdit  # noqa: F401 - diffusers finds the class when it is imported
    from sd_training.export.draw import draw_images

    folder, file, name = words
    height, width = drawn_size(name)
    left_out = {"text_encoder_3": None, "tokenizer_3": None} if "without_t5" in name else {}
    load = diffusers.DiffusionPipeline.from_pretrained
    pipeline = load(folder, local_files_only=True, low_cpu_mem_usage=False, **left_out)
    options = {"num_inference_steps": 3, "guidance_scale": 2.0, "batch_size": 1}
    [picture] = draw_images(pipeline, ["a red picture"], [3], height=height, width=width, **options)
    np.save(file, np.asarray(picture))


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_pipeline(request.param, tmp_path_factory.mktemp(request.param) / "pipeline")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    part = next(name for name in ("unet", "transformer") if (folder / name).is_dir())
    return load_file(folder / part / "diffusion_pytorch_model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_trains_saves_resumes_loads_and_draws(pipeline: tuple[str, Path], shards_dir: Path, tmp_path: Path) -> None:
    name, folder = pipeline
    changes: dict[str, Any] = {"experiment__num_examples_to_see": 32, "experiment__save_every": 2}
    changes |= {"model__gradient_checkpointing": True}
    whole, cut = (options(tmp_path / run, folder, shards_dir, **changes) for run in ("whole", "cut"))
    train(whole)
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(3))
    train(cut)
    result = tmp_path / "whole" / "current_pipeline"
    assert equal(weights(tmp_path / "cut" / "current_pipeline"), weights(result))
    assert not equal(weights(result), weights(folder))

    picture = tmp_path / "picture.npy"
    words = [str(result), str(picture), name]
    shared_server().call("tests.integration.test_families:load_and_draw", words, tmp_path / "log")
    assert np.load(picture).shape == (*drawn_size(name), 3)
    assert (
        json.loads((result / "model_index.json").read_text()).keys()
        == json.loads((folder / "model_index.json").read_text()).keys()
    )


def test_training_gives_the_denoiser_what_the_pipeline_gives_it(
    pipeline: tuple[str, Path], shards_dir: Path, tmp_path: Path
) -> None:
    """Conditioning of captions, null included, latents and time: the same call of the denoiser."""
    name, folder = pipeline
    run = train(options(tmp_path / "run", folder, shards_dir, experiment__num_examples_to_see=8))
    module = run.module
    assert isinstance(module, DiffusionModule)
    family = module.family
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(family.denoiser.forward)
    family.denoiser.register_forward_hook(
        lambda _, args, kwargs, __: calls.append(signature.bind(*args, **kwargs).arguments), with_kwargs=True
    )
    batch = next(iter(run.data.loader(0, lambda: 0)))
    pipe = family.pipeline()
    caption = "a red picture"
    tokens = {n: t.encode(caption) for n, t in family.tokenizers().items()}
    batch.tokens = {n: torch.from_numpy(t.tokens)[None] for n, t in tokens.items()}
    batch.token_masks = {n: torch.from_numpy(t.mask)[None] for n, t in tokens.items()}
    batch.dropped = {n: torch.zeros(1, dtype=torch.bool) for n in (*tokens, "size", "crop")}
    batch.original_size = batch.target_size = torch.tensor([drawn_size(name)])
    batch.crop_top_left = torch.zeros(1, 2, dtype=torch.int64)
    extra: dict[str, Any] = {"use_resolution_binning": False} if name in ("pixart", "sana") else {}
    pipe.set_progress_bar_config(disable=True)
    height, width = drawn_size(name)
    extra |= {"height": height, "width": width, "guidance_scale": 0.0 if name == "z_image" else 1.0}  # off
    pipe(prompt=caption, num_inference_steps=1, output_type="latent", **extra)
    (theirs,) = calls
    latents = torch.zeros(1, *latent_grid(family.vae).shape(height, width))
    # One step of these samplers is at pure noise, and at timestep 1.
    time = torch.full((1,), 1.0 if family.schedulers.objective.prediction_type == "flow_prediction" else 0.0015)
    levels = module.objective.schedule.levels(time)
    noised = NoisedBatch(latents, levels.model_time, latents, time, levels.signal, levels.noise)
    with torch.no_grad():
        family.predict(family.denoiser, noised, family.encode(batch))
    ours, expected = _flat(calls[1]), _flat(theirs)
    if name == "qwen_image":  # pads one caption with nothing
        states, mask = (f"encoder_hidden_states{end}." for end in ("", "_mask"))
        ours[states] = ours[states][ours.pop(mask)][None]
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if key in ("sample.", "hidden_states.", "x.0.", "guidance."):  # noise, and what a user asks for
            assert ours[key].shape == value.shape, key
        else:
            close = torch.allclose(ours[key].float().squeeze(), value.float().squeeze(), atol=1e-5)
            assert close, f"{key}: {ours[key]} and {value}"


def _flat(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a nested call by path."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {}
    return {path: tensor for key, item in items for path, tensor in _flat(item, f"{prefix}{key}.").items()}
