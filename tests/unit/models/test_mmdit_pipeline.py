"""The pipeline of the project's own denoiser: what it computes, what it refuses, and that its folder gives it back."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sd_training.errors import ConfigError
from sd_training.export.draw import draw_images
from sd_training.export.pipeline import differences
from sd_training.models.families.mmdit import MMDiTRopePipeline
from sd_training.models.mmdit_rope import MMDiTRope
from tests import makers
from tests.faults.fork_server import shared_server
from tests.offline import refuse_connections

ROOT = Path(__file__).resolve().parents[3]
OPTIONS: dict[str, Any] = {
    "text_encoder": {"layer": None, "pooling": "projection", "max_tokens": 16, "use_mask": False},
    "text_encoder_2": {"max_tokens": 6},
    "text_encoder_3": {"layer": -2, "pooling": "mean", "max_tokens": 8},
}
WORDS = ["<p>", "</s>", "?", "a", "red", "green", "blue", "picture"]


def load(words: list[str]) -> None:
    """In a process that may not open a connection: two loads, the second by diffusers' own class."""
    refuse_connections()
    for name, cls in (("own", MMDiTRopePipeline), ("plain", diffusers.DiffusionPipeline)):
        pipeline = cls.from_pretrained(words[0], low_cpu_mem_usage=False)
        assert type(pipeline) is MMDiTRopePipeline
        generator = torch.Generator().manual_seed(5)
        asked = {"num_inference_steps": 3, "output_type": "np", "height": 16, "width": 24, "generator": generator}
        np.save(f"{words[1]}/{name}.npy", pipeline(["a red picture"], **asked).images)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<p>", eos_token="</s>", model_max_length=32)


def parts() -> dict[str, Any]:
    """CLIP for the pooled vector, T5 and Gemma for states (Gemma pools as well); a token is 4 × 4 pixels."""
    clip_tokenizer = makers.tiny_tokenizer()
    sizes = {"vocab_size": len(WORDS), "hidden_size": 12, "intermediate_size": 24, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    clip = makers.tiny_text_encoder(len(clip_tokenizer)).config
    clip.projection_dim = 10
    return {
        "vae": makers.tiny_vae(shift_factor=0.3),
        "transformer": MMDiTRope(
            in_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            text_dims=[16, 12],
            pooled_dim=10 + 12,
            rope_base_size=4,
            text_scale_init=1.0,
            zero_init=False,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": transformers.CLIPTextModelWithProjection(clip),
        "tokenizer": clip_tokenizer,
        "text_encoder_2": transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        ),
        "tokenizer_2": word_tokenizer(),
        "text_encoder_3": transformers.Gemma2Model(
            transformers.Gemma2Config(**sizes, **special, num_hidden_layers=2, num_key_value_heads=1, head_dim=8)
        ),
        "tokenizer_3": word_tokenizer(),
    }


def tiny_mmdit_pipeline(**changes: Any) -> MMDiTRopePipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = parts() | {"text_options": OPTIONS} | changes
        for part in given.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        pipeline = MMDiTRopePipeline(**given)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def pipeline() -> MMDiTRopePipeline:
    """Read-only by convention."""
    return tiny_mmdit_pipeline()


def noise(count: int = 1, height: int = 8, width: int = 8) -> Tensor:
    return torch.randn(count, 4, height, width, generator=torch.Generator().manual_seed(3))


def tokenize(tokenizer: Any, prompts: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the right."""
    padding = {"padding": "max_length", "padding_side": "right", "truncation": True, "max_length": length}
    found = tokenizer(prompts, return_tensors="pt", **padding)
    return found.input_ids, found.attention_mask.bool()


def conditioning(pipeline: Any, prompts: list[str]) -> dict[str, Any]:
    """Text states by hand, from the encoders themselves."""
    clip = tokenize(pipeline.tokenizer, prompts, 16)[0]
    t5, gemma = tokenize(pipeline.tokenizer_2, prompts, 6), tokenize(pipeline.tokenizer_3, prompts, 8)
    first = pipeline.text_encoder_2(t5[0], attention_mask=t5[1].long()).last_hidden_state
    output = pipeline.text_encoder_3(gemma[0], attention_mask=gemma[1].long(), output_hidden_states=True)
    kept = gemma[1][..., None]
    mean = (output.last_hidden_state * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
    return {
        "encoder_hidden_states": [first * t5[1][..., None], output.hidden_states[-2] * kept],
        "encoder_attention_mask": [t5[1], gemma[1]],
        "pooled_projections": torch.cat([pipeline.text_encoder(clip).text_embeds, mean], dim=1),
    }


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_latents_follow_the_guided_velocity(pipeline: MMDiTRopePipeline, scale: float) -> None:
    prompts, null = ["a red picture", "blue"], "green"
    steps, x = 4, noise(2)
    result = pipeline(
        prompts, null, 16, 16, num_inference_steps=steps, guidance_scale=scale, latents=x, output_type="latent"
    ).images
    sigmas = pipeline.scheduler.sigmas
    assert len(sigmas) == steps + 1 and sigmas[0] == 1 and sigmas[-1] == 0
    for sigma, following in pairwise(sigmas):
        t = torch.full((2,), float(sigma * 1000))
        conditioned = pipeline.transformer(x, t, **conditioning(pipeline, prompts)).sample
        plain = pipeline.transformer(x, t, **conditioning(pipeline, [null] * 2)).sample
        x = x + float(following - sigma) * (plain + scale * (conditioned - plain))
    assert torch.allclose(result, x, atol=1e-4)
    assert not torch.allclose(result, noise(2), atol=0.1)


@pytest.mark.parametrize(("scale", "batches"), [(1, [2, 2, 2]), (3.0, [4, 4, 4])])
def test_one_call_of_the_denoiser_per_step(pipeline: MMDiTRopePipeline, scale: float, batches: list[int]) -> None:
    seen: list[int] = []
    hook = pipeline.transformer.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    pipeline(["red", "blue"], num_inference_steps=3, guidance_scale=scale, latents=noise(2), output_type="latent")
    hook.remove()
    assert seen == batches


@torch.no_grad()
def test_pictures_undo_scale_and_shift(pipeline: MMDiTRopePipeline) -> None:
    given: dict[str, Any] = {"latents": noise(), "num_inference_steps": 2}
    latents = pipeline("red", **given, output_type="latent").images
    pixels = pipeline.vae.decode(latents / 0.7 + 0.3).sample
    expected = (pixels / 2 + 0.5).clamp(0, 1)
    assert torch.allclose(pipeline("red", **given, output_type="pt").images, expected, atol=1e-6)
    arrays = pipeline("red", **given, output_type="np").images
    assert np.allclose(arrays, expected.permute(0, 2, 3, 1).numpy(), atol=1e-6)
    picture = pipeline("red", **given).images[0]
    assert np.abs(np.asarray(picture) - arrays[0] * 255).max() <= 1


def test_sizes(pipeline: MMDiTRopePipeline) -> None:
    few: dict[str, Any] = {"num_inference_steps": 1, "output_type": "latent"}
    assert pipeline("red", **few).images.shape == (1, 4, 8, 8)  # 4 tokens of 4 pixels, 2 pixels per cell
    assert pipeline("red", **few, height=8, width=28).images.shape == (1, 4, 4, 14)
    with pytest.raises(ValueError, match="18 × 16 pixels; both must be multiples of 4"):
        pipeline("red", height=18, width=16)


def test_generator_decides_the_picture_and_neighbours_do_not(pipeline: MMDiTRopePipeline) -> None:
    size: dict[str, Any] = {"height": None, "width": None, "num_inference_steps": 2, "guidance_scale": 3.0}
    alone = [
        np.asarray(next(draw_images(pipeline, [prompt], [seed], **size, batch_size=1)), dtype=float)
        for prompt, seed in (("red", 1), ("a green picture", 2))
    ]
    before = torch.random.get_rng_state()
    together = [
        np.asarray(picture, dtype=float)
        for picture in draw_images(pipeline, ["red", "a green picture"], [1, 2], **size, batch_size=2)
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(np.abs(a - b).max() <= 1 for a, b in zip(alone, together, strict=True))
    assert np.abs(alone[0] - alone[1]).max() > 10


def test_padding_is_no_text(pipeline: MMDiTRopePipeline) -> None:
    """Longer padding of the masked encoders leaves the picture as it is."""
    given: dict[str, Any] = {"latents": noise(), "num_inference_steps": 2, "output_type": "latent"}
    longer = {name: dict(option) for name, option in OPTIONS.items()}
    longer["text_encoder_2"]["max_tokens"] = longer["text_encoder_3"]["max_tokens"] = 11
    changed = tiny_mmdit_pipeline(text_options=longer)
    assert torch.allclose(pipeline("a red", **given).images, changed("a red", **given).images, atol=1e-4)


def test_dynamic_shift_grows_with_the_picture() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=16, max_image_seq_len=64
    )
    pipeline = tiny_mmdit_pipeline(scheduler=scheduler)
    for side, mu in ((16, 0.5), (32, 1.15), (24, 0.5 + 0.65 * 20 / 48)):
        pipeline("red", height=side, width=side, num_inference_steps=3, output_type="latent")
        uniform = torch.linspace(1, 1 / 1000, 3).double()
        expected = torch.exp(torch.tensor(mu)) / (torch.exp(torch.tensor(mu)) + 1 / uniform - 1)
        assert torch.allclose(scheduler.sigmas[:-1].double(), expected, atol=1e-4)


def test_one_encoder_alone() -> None:
    """A decoder gives states and nothing pools; options that are not given have their defaults."""
    nobody = {f"{part}_{i}": None for part in ("text_encoder", "tokenizer") for i in (2, 3)}
    given = parts()
    gemma = {"text_encoder": given["text_encoder_3"], "tokenizer": given["tokenizer_3"]}
    transformer = MMDiTRope(
        in_channels=4, num_layers=1, num_attention_heads=1, attention_head_dim=8, text_dims=[12], pooled_dim=0
    )
    alone = tiny_mmdit_pipeline(**gemma, **nobody, transformer=transformer, text_options=None)
    assert alone.config.text_options["text_encoder"]["max_tokens"] == 77
    result = alone("red", height=16, width=16, num_inference_steps=1, output_type="pt").images
    assert result.shape == (1, 3, 16, 16) and result.isfinite().all()


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"text_options\.text_encoder\.layers"):
        tiny_mmdit_pipeline(text_options={"text_encoder": {"layers": -1}})


def test_half_precision_draws_the_same_picture_nearly(pipeline: MMDiTRopePipeline) -> None:
    given: dict[str, Any] = {"latents": noise(), "num_inference_steps": 2, "output_type": "pt"}
    half = tiny_mmdit_pipeline().to(torch.bfloat16)
    assert (half("red", **given).images - pipeline("red", **given).images).abs().mean() < 0.02


def test_folder_gives_back_the_same_picture_without_network(pipeline: MMDiTRopePipeline, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    pipeline.save_pretrained(folder)
    assert differences(pipeline, folder) == []
    assert [path.name for path in folder.rglob("*") if path.suffix in {".py", ".bin", ".pt", ".pkl"}] == []
    index = json.loads((folder / "model_index.json").read_text())
    assert index["transformer"] == ["sd_training.models.mmdit_rope", "MMDiTRope"]
    assert index["_class_name"] == "MMDiTRopePipeline"
    assert index["text_options"]["text_encoder_3"]["layer"] == -2
    expected = pipeline(
        ["a red picture"],
        num_inference_steps=3,
        output_type="np",
        height=16,
        width=24,
        generator=torch.Generator().manual_seed(5),
    ).images
    log = tmp_path / "log"
    shared_server().call("tests.unit.models.test_mmdit_pipeline:load", [str(folder), str(tmp_path)], log)
    said = log.read_text()
    assert "expected" not in said and "ignored" not in said  # diffusers' words for parts it doubts
    for name in ("own", "plain"):
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), expected)
