"""Pages of `--help`, and what an unknown key or a wrong value probably meant."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.config.fields import ELSEWHERE, SPELLINGS, groups, options, suggest_option
from sd_training.errors import ConfigError
from tests.unit.config.loading import BASE, only
from train import help_text

ROOT = Path(__file__).resolve().parents[3]


def test_the_first_page_names_every_option() -> None:
    page = help_text("usage", [])
    assert page.startswith("usage\n") and "docs/config.md" in page
    shown = re.findall(r"^  (\*?)([a-z0-9_.]+)=.* (\S.*)$", page, re.MULTILINE)
    assert [key for _, key, _ in shown] == list(options())
    assert {key for mark, key, _ in shown if mark} == {key for key, option in options().items() if option.required}
    assert max(map(len, page.splitlines())) < 200


def test_a_group_an_option_and_a_mistake() -> None:
    page = help_text("usage", ["ema", "system.batch_size=4"])
    assert "usage" not in page and "ema.decay=0.9999" in page and "ema.snapshot_every=1000" in page
    assert "system.batch_size=32\n      (a whole number of at least 1) Micro-batch" in page
    with pytest.raises(ConfigError, match=r"--help optimiser: is neither .*; did you mean optimizer\?"):
        help_text("usage", ["optimiser"])
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.params\.learning_rate\?"):
        help_text("usage", ["optimizer.lr"])
    with pytest.raises(ConfigError, match="groups are experiment, dataset, model"):
        help_text("usage", ["zzz"])


def test_help_needs_no_torch() -> None:
    program = "import sys, train; sys.argv[1:] = ['--help', 'model']; train.main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    *page, modules = done.stdout.splitlines()
    assert "  model.use_ema=false" in page
    assert {"torch", "diffusers", "transformers", "numpy"}.isdisjoint(modules.split())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("system.batchsize", "system.batch_size"),
        ("experiment.nmae", "experiment.name"),
        ("learning_rate", "optimizer.params.learning_rate"),
        ("optimiser.params.learning_rate", "optimizer.params.learning_rate"),
        ("optimizer.learning_rate", "optimizer.params.learning_rate"),
        ("dataset.batch_size", "system.batch_size"),
        ("dataset.param.path", "dataset.params.path"),
        ("modle", "model"),
        ("model.use_em", "model.use_ema"),
        ("zzzzzzzz", None),
        ("", None),
    ],
)
def test_suggest(key: str, expected: str | None) -> None:
    assert suggest_option(key) == expected


def test_names_of_other_trainers_lead_to_options_that_exist() -> None:
    for name, here in ELSEWHERE.items():
        assert name not in {*options(), *groups()}
        for word in here.replace(",", " ").replace(":", " ").split():
            assert "." not in word or word.partition("=")[0] in options(), (name, here)
    words = {word for option in options().values() for word in option.words}
    assert {word for meant in SPELLINGS.values() for word in meant} <= words


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=1e-4", "did you mean optimizer.params.learning_rate?"),
        ("lr=1e-4", "did you mean optimizer.params.learning_rate?"),
        ("system.bs=4", "did you mean system.batch_size?"),
        ("sampling.steps=20", "did you mean sampling.num_inference_steps?"),
        ("batch_size=4", "did you mean system.batch_size?"),
        ("seed=3", "did you mean experiment.seed?"),
        ("epochs=4", "did you mean experiment.num_epochs?"),
        ("max_train_steps=4", "did you mean experiment.num_steps?"),
        ("output_dir=x", "did you mean experiment.log_dir?"),
        ("gradient_accumulation_steps=2", "did you mean system.gradient_accumulation?"),
        ("model.mixed_precision=bfloat16", "allowed: no, bf16 or fp16; did you mean bf16?"),
        ("model.mixed_precision=float16", "did you mean fp16?"),
        ("model.mixed_precision=fp32", "did you mean no?"),
        ("model.mixed_precision=16", "did you mean fp16?"),
        ("model.vae_precision=float32", "did you mean fp32?"),
        ("optimizer.name=adam", "did you mean adamw?"),
        ("optimizer.name=AdamW8bit", "did you mean adamw_8bit?"),
        ("dataset.type=imagefolder", "did you mean ImageFolder?"),
        ("dataset.type=jsonl", "did you mean Table?"),
        ("lr_scheduler.scheduler=constant_with_warmup", "did you mean ConstantWithWarmup?"),
    ],
)
def test_words_of_other_trainers_have_a_hint(override: str, expected: str) -> None:
    assert expected in only(*BASE, override)


def test_a_word_like_no_other_has_no_hint() -> None:
    assert "did you mean" not in only(*BASE, "model.mixed_precision=int4")
