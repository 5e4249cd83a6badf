"""Other text encoders than the published ones: trained, saved, resumed, drawn; the same conditioning as the pipeline's;
widths and pooled vectors that do not fit; dropout by encoder; zeros as null text of mmdit_rope."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2Model

from sd_training.config.load import load_config
from sd_training.config.schema import ConditioningConfig, ModelConfig, ObjectiveConfig, PartConfig
from sd_training.data.samples.sample import NO_DROPOUT, draw_dropout
from sd_training.errors import ConfigError
from sd_training.export.pipeline import bit_differences
from sd_training.models.families import load_family
from sd_training.training import DiffusionModule
from tests import family_makers, makers
from tests.faults.fork_server import shared_server
from tests.integration import test_families
from tests.integration.training import checkpoint_tensors, options, train, train_in_processes, train_until_killed
from tests.tiny_parts import T5_WIDTH, WIDTH, clip, t5, t5_tokenizer, tiny_tokenizer


def bert(count: int, width: int) -> BertModel:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=count, max_position_embeddings=512, **sizes))


def qwen(count: int, width: int) -> Qwen2Model:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2Model(Qwen2Config(vocab_size=count, num_key_value_heads=1, **sizes))


def decoder_tokenizer() -> PreTrainedTokenizerBase:
    """Pads on the left, as those of decoders do."""
    words = tiny_tokenizer()
    words.padding_side = words.init_kwargs["padding_side"] = "left"  # only both are saved
    return words


def with_t5() -> Any:
    pieces = t5_tokenizer()
    pieces.model_max_length = 24
    sizes = {**makers.SMALLER_UNET, "cross_attention_dim": T5_WIDTH}
    pipeline = makers.tiny_pipeline(unet=sizes)
    pipeline.register_modules(text_encoder=t5(len(pieces)), tokenizer=pieces)
    return pipeline


def with_bert() -> Any:
    pipeline = makers.tiny_pipeline(unet=makers.SMALLER_UNET)
    encoder = bert(len(pipeline.tokenizer), WIDTH)
    encoder.config.use_attention_mask = True
    pipeline.register_modules(text_encoder=encoder)
    return pipeline


def sdxl_with_bert() -> Any:
    pipeline = family_makers.sdxl()
    pipeline.register_modules(text_encoder=bert(len(pipeline.tokenizer), WIDTH))  # type: ignore[attr-defined]
    return pipeline


def pixart_with_qwen() -> Any:
    words, pipeline = decoder_tokenizer(), family_makers.pixart()
    pipeline.register_modules(text_encoder=qwen(len(words), T5_WIDTH), tokenizer=words)
    return pipeline


def flux_with_bert() -> Any:
    words, pipeline = tiny_tokenizer(), family_makers.flux()
    pipeline.register_modules(text_encoder_2=bert(len(words), T5_WIDTH), tokenizer_2=words)
    return pipeline


def sd3_with_qwen() -> Any:
    words, pipeline = decoder_tokenizer(), family_makers.sd3()
    pipeline.register_modules(text_encoder_3=qwen(len(words), T5_WIDTH), tokenizer_3=words)
    return pipeline


PIPELINES: dict[str, tuple[str, Callable[[], Any]]] = {
    "t5": ("stable_diffusion", with_t5),
    "bert": ("stable_diffusion", with_bert),
    "sdxl_bert": ("sdxl", sdxl_with_bert),
    "pixart_qwen": ("pixart", pixart_with_qwen),
    "flux_bert": ("flux", flux_with_bert),
    "sd3_qwen": ("sd3", sd3_with_qwen),
}


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Family, and folder."""
    family, make = PIPELINES[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "pipeline"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        make().save_pretrained(folder)
    return family, folder


def test_training_gives_the_denoiser_what_the_pipeline_gives_it(
    pipeline: tuple[str, Path], shards_dir: Path, tmp_path: Path
) -> None:
    test_families.test_training_gives_the_denoiser_what_the_pipeline_gives_it(pipeline, shards_dir, tmp_path)


def test_trains_saves_resumes_loads_and_draws(shards_dir: Path, tmp_path: Path) -> None:
    family, make = PIPELINES["pixart_qwen"]
    make().save_pretrained(tmp_path / "pipeline")
    case = (family, tmp_path / "pipeline")
    test_families.test_trains_saves_resumes_loads_and_draws(case, shards_dir, tmp_path)


def test_two_processes_that_are_killed_continue_to_the_bit_and_draw(shards_dir: Path, tmp_path: Path) -> None:
    family, make = PIPELINES["t5"]
    make().save_pretrained(tmp_path / "pipeline")
    changes = {"experiment__num_examples_to_see": 32, "experiment__save_every": 2, "system__batch_size": 4}
    whole, cut = (options(tmp_path / run, tmp_path / "pipeline", shards_dir, **changes) for run in ("whole", "cut"))
    train_in_processes(whole, 2)
    train_until_killed(cut, 2, step=3)
    train_in_processes(cut, 2)
    assert bit_differences(*(checkpoint_tensors(tmp_path / run, 4) for run in ("whole", "cut"))) == []
    words = [str(tmp_path / "cut" / "current_pipeline"), str(tmp_path / "picture.npy"), family]
    shared_server().call("tests.integration.test_families:load_and_draw", words, tmp_path / "log")
    assert np.load(tmp_path / "picture.npy").shape == (24, 16, 3)


def family_of(folder: Path, conditioning: ConditioningConfig | None = None, **model: Any) -> Any:
    given = ModelConfig(pretrained=str(folder), **model)
    return load_family(given, ObjectiveConfig(), conditioning or ConditioningConfig(), seed=0, meta=True)


def test_parts_may_name_any_text_encoder_and_widths_are_checked(pipeline_dir: Path, tmp_path: Path) -> None:
    bert(len(tiny_tokenizer()), 24).save_pretrained(tmp_path / "text")
    tiny_tokenizer().save_pretrained(tmp_path / "text")
    place = {name: PartConfig(pretrained=str(pipeline_dir)) for name in ("vae", "noise_scheduler_training")}
    for width, problem in (
        (24, ""),
        (16, r"model\.unet\.params\.cross_attention_dim: is 16, but the other parts need 24"),
    ):
        model = ModelConfig(
            **place,
            text_encoder=PartConfig(pretrained=str(tmp_path / "text"), target="BertModel"),
            tokenizer=PartConfig(pretrained=str(tmp_path / "text")),
            unet=PartConfig(params={**makers.SMALLER_UNET, "cross_attention_dim": width}),
        )
        if problem:
            with pytest.raises(ConfigError, match=problem):
                load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0, meta=True)
        else:
            family = load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0, meta=True)
            assert family.text_shapes() == ([(16, 24)], 0)
            chosen = model.model_dump(exclude_defaults=True)
            path = tmp_path / "model.yaml"
            path.write_text(json.dumps({"model": chosen}))
            words = ["experiment.log_dir=x", "experiment.name=x", "experiment.num_steps=1", "dataset.params.path=x"]
            assert load_config([f"config={path}", *words]).model == model


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("t5", {"text_encoder": lambda: clip(96 * 2, has_projection=True)}, "text_encoder: is a CLIPTextModelWithProj"),
        ("sdxl_bert", {"tokenizer": lambda: long_tokenizer()}, r"model\.tokenizer: 40 tokens per caption .* has 16"),
        ("sdxl_bert", {"text_encoder_2": lambda: bert(200, WIDTH)}, "but sdxl needs a CLIPTextModelWithProjection"),
        ("flux_bert", {"text_encoder": lambda: clip(200, has_projection=True)}, "but flux needs a CLIPTextModel"),
        (
            "flux_bert",
            {"text_encoder_2": lambda: bert(200, 8)},
            "joint_attention_dim: is 32, but the other parts need 8",
        ),
        ("pixart_qwen", {"text_encoder": lambda: qwen(200, 8)}, "caption_channels: is 32, but the other parts need 8"),
        (
            "pixart_qwen",
            {"text_encoder": lambda: family_makers.flux2().text_encoder},  # type: ignore[attr-defined]
            "is a Qwen3ForCausalLM, but pixart reads states alone",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_data_is_read(name: str, change: Any, problem: str, tmp_path: Path) -> None:
    made = PIPELINES[name][1]()
    made.register_modules(**{part: make() for part, make in change.items()})
    made.save_pretrained(tmp_path / "p")
    with pytest.raises(ConfigError, match=problem):
        family_of(tmp_path / "p")


def long_tokenizer() -> Any:
    words = tiny_tokenizer()
    words.model_max_length = 40
    return words


def test_only_clip_is_trained(pipeline: tuple[str, Path]) -> None:
    if pipeline[0] in ("stable_diffusion", "sdxl"):
        with pytest.raises(
            ConfigError, match=r"model\.train_text_encoder: only CLIP is trained; model.text_encoder is"
        ):
            family_of(pipeline[1], train_text_encoder=True)


def test_dropout_by_text_encoder(tmp_path: Path) -> None:
    encoders = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    rates = {"text_encoder": 0.1, "text_encoder_3": 0.5}
    rules = NO_DROPOUT.replace(encoder_dropout_prob=rates)
    draws = [draw_dropout(rules, 3, position, encoders) for position in range(2000)]
    for name in encoders:
        share = sum(draw[name] for draw in draws) / len(draws)
        wanted = rates.get(name, 0.0)
        assert abs(share - wanted) <= 5 * (wanted * (1 - wanted) / len(draws)) ** 0.5
    one = NO_DROPOUT.replace(encoder_dropout_prob=0.5)  # a number is a mapping of all to it, draw by draw
    assert [draw_dropout(one, 3, p, encoders)["text_encoder_3"] for p in range(2000)] == [
        draw["text_encoder_3"] for draw in draws
    ]
    folder = family_makers.save_pipeline("sd3_without_t5", tmp_path / "p")
    with pytest.raises(
        ConfigError, match=r"conditioning\.encoder_dropout_prob: has no text_encoder_3; there are text_"
    ):
        family_of(folder, ConditioningConfig(encoder_dropout_prob=rates))


def test_zeros_are_the_null_text_of_mmdit_rope(shards_dir: Path, tmp_path: Path) -> None:
    folder = family_makers.save_pipeline("mmdit_rope", tmp_path / "p")
    argv = options(tmp_path / "run", folder, shards_dir, experiment__num_examples_to_see=8)
    run = train([*argv, "conditioning.null_text=zeros", "conditioning.encoder_dropout_prob={text_encoder_2: 1.0}"])
    module = run.module
    assert isinstance(module, DiffusionModule)
    batch = next(iter(run.data.loader(0, lambda: 0)))
    assert batch.dropped["text_encoder_2"].all() and not batch.dropped["text_encoder"].all()
    batch.dropped["text_encoder"][:2] = torch.tensor([True, False])
    with torch.no_grad():
        ours = module.family.encode(batch)
        assert ours.pooled is not None and not ours.pooled.any()
        assert not ours.states[0][0].any() and ours.states[0][1].any()
        exported = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "run" / "current_pipeline")
        assert exported.config.force_zeros_for_empty_prompt is True
        text = exported.encode_prompts(["", "a red picture"])
        assert not text.states[0][0].any() and text.states[0][1].any()
        assert not text.pooled[0].any() and text.pooled[1].any()
        plain = diffusers.DiffusionPipeline.from_pretrained(folder)
        assert plain.encode_prompts([""]).pooled.any()
    exported.set_progress_bar_config(disable=True)
    images = exported("a red picture", num_inference_steps=2, guidance_scale=2.0, output_type="np").images
    assert np.isfinite(images).all()
    again = family_of(tmp_path / "run" / "current_pipeline")  # null: as the pretrained pipeline says
    assert again.settings["force_zeros_for_empty_prompt"] is True
