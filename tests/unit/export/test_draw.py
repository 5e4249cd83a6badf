"""Drawing, and samplers by name."""

import random
from collections.abc import Sequence
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray

from sd_training.errors import ConfigError
from sd_training.export.additions import SAMPLERS, make_sampler, samplers_for
from sd_training.export.draw import _clean_latents, _decoded, draw_images
from tests import makers

PROMPTS = ["a red square", "a blue circle", "a big digit"]


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    return makers.tiny_pipeline()


def draw(
    pipeline: StableDiffusionPipeline, seeds: Sequence[int], batch_size: int, **kw: Any
) -> list[NDArray[np.uint8]]:
    settings: dict[str, Any] = {"height": 16, "width": 24, "num_inference_steps": 3, "guidance_scale": 3.0, **kw}
    return [
        np.asarray(i) for i in draw_images(pipeline, PROMPTS[: len(seeds)], seeds, batch_size=batch_size, **settings)
    ]


@pytest.mark.parametrize("sampler", ["DDIMScheduler", "EulerAncestralDiscreteScheduler", "DDPMScheduler"])
def test_picture_depends_on_its_seed_only(pipeline: StableDiffusionPipeline, sampler: str) -> None:
    pipeline.scheduler = make_sampler(pipeline.scheduler.config, sampler)
    alone, together = draw(pipeline, [5, 6, 7], 1), draw(pipeline, [5, 6, 7], 3)
    assert [image.shape for image in alone] == [(16, 24, 3)] * 3
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1  # batched kernels may round the last bit apart
    assert np.array_equal(draw(pipeline, [5], 1)[0], alone[0])
    assert np.abs(draw(pipeline, [6], 1)[0].astype(int) - alone[0].astype(int)).max() > 5


def test_guidance_reaches_the_pipeline(pipeline: StableDiffusionPipeline) -> None:
    assert not np.array_equal(
        draw(pipeline, [5], 1, guidance_scale=1.0)[0], draw(pipeline, [5], 1, guidance_scale=9.0)[0]
    )


def test_nothing_is_disturbed(capfd: pytest.CaptureFixture[str]) -> None:
    pipeline = makers.tiny_pipeline()
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert len(draw(pipeline, [1, 2, 3], 2)) == 3
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state and np.array_equal(np.random.get_state()[1], numpy_state[1])
    assert all(p.grad is None for p in pipeline.unet.parameters())
    assert "it/s" not in capfd.readouterr().err


def test_the_decoder_is_spared_from_autocast_to_fp16() -> None:
    """The reason is overflow in the decoder's activations; here its last layer's are made large."""
    pipeline, seen = makers.tiny_pipeline(), []
    pipeline.vae.decoder.conv_out.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    expected = draw(pipeline, [1], 1)[0]
    with torch.no_grad():
        pipeline.vae.decoder.conv_in.weight.mul_(1e6)
        pipeline.vae.decoder.conv_in.bias.mul_(1e6)
        large = draw(pipeline, [1], 1)[0]
        with torch.autocast("cpu", dtype=torch.float16):
            found = draw(pipeline, [1], 1, on_step=lambda *_: None)[0]
            assert pipeline.vae.decode.__name__ == "decode" and "decode" not in vars(pipeline.vae)
    assert set(seen) == {torch.float32}
    assert np.abs(found.astype(int) - large.astype(int)).mean() < 2 and not np.array_equal(large, expected)


def test_latents_with_a_mean_per_channel_are_decoded_as_the_pipeline_does() -> None:
    pipeline = makers.tiny_pipeline()
    pipeline.vae.register_to_config(latents_mean=[0.5, -0.5, 1.0, 0.0], latents_std=[2.0, 1.0, 0.5, 3.0])
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(pipeline.vae.config[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std"))
    with torch.no_grad():
        pixels = pipeline.vae.decode(latents * std / pipeline.vae.config.scaling_factor + mean).sample
        picture = _decoded(pipeline, latents, None, None)[0]
    assert np.array_equal(picture, pipeline.image_processor.postprocess(pixels, output_type="pil")[0])


def config(**changes: Any) -> dict[str, Any]:
    return dict(makers.tiny_pipeline(**changes).scheduler.config)


@pytest.mark.parametrize("name", samplers_for({}))
def test_noise_schedule_and_prediction_type_carry_over(name: str) -> None:
    sampler = make_sampler(config(prediction_type="v_prediction"), name)
    assert type(sampler).__name__ == name
    assert sampler.config.prediction_type == "v_prediction" and sampler.config.beta_end == 0.012
    expected = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    torch.testing.assert_close(sampler.betas.double(), expected, rtol=1e-5, atol=0)


def test_a_sampler_that_would_drop_zero_snr_is_refused() -> None:
    zero_snr = config(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert make_sampler(zero_snr, "EulerDiscreteScheduler").config.rescale_betas_zero_snr
    with pytest.raises(ConfigError, match="PNDMScheduler: cannot follow this model's rescale_betas_zero_snr"):
        make_sampler(zero_snr, "PNDMScheduler")


@pytest.mark.parametrize("name", ["Euler", "SchedulerMixin", "os.system"])
def test_only_allowed_names(name: str) -> None:
    with pytest.raises(ConfigError, match="is none of those that can follow this model: DDIMScheduler"):
        make_sampler(config(), name)


FLOWS = {
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0},
    "UniPCMultistepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
}


@pytest.mark.parametrize("own", FLOWS)
def test_samplers_of_flow_models_start_where_the_model_was_trained(own: str) -> None:
    config = dict(getattr(diffusers, own)(**FLOWS[own]).config)
    for name in samplers_for(config):
        sampler = make_sampler(config, name)
        sampler.set_timesteps(10)
        # shift 3 of σ = ½ is ¾: half of the steps are spent above it.
        assert sampler.sigmas[0] > 0.99 and 0.7 < float(sampler.sigmas[len(sampler.sigmas) // 2]) < 0.8, name


def test_samplers_of_other_models_are_refused() -> None:
    edm = dict(diffusers.EDMEulerScheduler(sigma_data=1.0).config)
    assert make_sampler(edm, "EDMDPMSolverMultistepScheduler").config.sigma_data == 1.0
    for config, name in ((edm, "DDIMScheduler"), ({"shift": 1.0}, "DDIMScheduler"), ({}, "EDMEulerScheduler")):
        with pytest.raises(ConfigError, match=f"{name}: is none of those"):
            make_sampler(config, name)
    by_tokens = {"shift": 1.0, "use_dynamic_shifting": True}
    with pytest.raises(ConfigError, match=r"follow this model: FlowMatchEulerDiscreteScheduler$"):
        make_sampler(by_tokens, "UniPCMultistepScheduler")
    assert len(set(SAMPLERS)) == len(SAMPLERS)


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_pipelines_that_scale_the_input_need_a_sampler_that_can(name: str) -> None:
    config = dict(diffusers.UniPCMultistepScheduler(**FLOWS["UniPCMultistepScheduler"]).config)
    assert make_sampler(config, name, "StableDiffusion3Pipeline")
    with pytest.raises(ConfigError, match=f"{name}: is none of those that can follow this model: DPM.*, UniPC"):
        make_sampler(config, name, "StableDiffusionPipeline")


def test_flux_chooses_its_own_levels() -> None:
    config = dict(diffusers.FlowMatchEulerDiscreteScheduler().config)
    assert make_sampler(config, "UniPCMultistepScheduler", "FluxPipeline").config.use_flow_sigmas
    with pytest.raises(ConfigError, match=r"is none of those .*: FlowMatchEuler.*, UniPC"):
        make_sampler(config, "FlowMatchHeunDiscreteScheduler", "FluxPipeline")


SPACED = {"timestep_spacing": "leading"}


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_parameters_win_over_what_the_pipelines_own_sampler_had_by_default(spacing: str) -> None:
    own = diffusers.DDIMScheduler.from_config({"beta_end": 0.012}).config  # a file of an early version
    sampler = make_sampler(own, "EulerDiscreteScheduler", params={"timestep_spacing": spacing})
    assert (sampler.config.timestep_spacing, sampler.config.beta_end) == (spacing, 0.012)
    assert make_sampler(own, "EulerDiscreteScheduler").config.timestep_spacing == "linspace"  # its own default


FILMED = [(name, "epsilon") for name in samplers_for({}) if name != "LCMScheduler"]  # which mixes it with the sample
FILMED += [("PNDMScheduler", "v_prediction"), *((name, "flow_prediction") for name in samplers_for({"shift": 3.0}))]


@pytest.mark.parametrize(("name", "kind"), FILMED)
def test_a_film_shows_what_each_step_takes_for_the_finished_picture(name: str, kind: str) -> None:
    """The answers are those of a model that knows the picture, by the noise schedule's own formula."""
    own = {"shift": 3.0} if kind == "flow_prediction" else {**config(prediction_type=kind), "clip_sample": False}
    scheduler: Any = make_sampler(own, name, params={} if kind == "flow_prediction" else SPACED)
    kept = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000).square()).cumprod(0)
    clean, sample = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(5)
    with _clean_latents(scheduler) as found:
        for step, timestep in enumerate(scheduler.timesteps):
            if kind == "flow_prediction":
                answer = (sample - clean) / scheduler.sigmas[step]
            else:
                signal, noise = kept[int(timestep)].sqrt(), (1 - kept[int(timestep)]).sqrt()
                scaled = scheduler.scale_model_input(sample, timestep)
                answer = (scaled - signal * clean) / noise
                answer = answer if kind == "epsilon" else (signal * scaled - clean) / noise
            sample = scheduler.step(answer, timestep, sample, return_dict=False)[0]
            # Eight roundings, of values as large as σ ≤ 14.6 times the noise, which is below 4.
            torch.testing.assert_close(found[-1], clean, rtol=0, atol=8 * 14.6 * 4 * 2**-24)
    assert "step" not in vars(scheduler)
