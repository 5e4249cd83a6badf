"""`--fit` on tiny models: what it proposes fits, is right arithmetic, and can be pasted."""

import re
from pathlib import Path
from typing import Any

import pytest

from sd_training.build.estimate import measure, meta_networks, run_memory
from sd_training.build.fit_memory import USABLE_SHARE, micro_batches, propose, strategies
from sd_training.config.fit_target import FitTarget
from sd_training.config.load import load_config
from sd_training.config.plan import find_layout
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from tests.family_makers import save_pipeline


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("stable_diffusion", tmp_path_factory.mktemp("pipeline"))


def words(pipeline: Path, **changes: Any) -> list[str]:
    values = {
        "experiment.log_dir": "runs",
        "experiment.name": "fit",
        "experiment.num_examples_to_see": 10_000,
        "dataset.type": "WebDataset",
        "dataset.params.path": "nowhere",
        "dataset.params.resolution": 32,
        "system.batch_size": 12,
        "system.gradient_accumulation": 4,
        "model.pretrained": pipeline,
        "model.use_ema": True,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def needed_gib(config: Config, gpus: int) -> float:
    """Of the config as it is."""
    networks, family = meta_networks(config)
    workload = measure(config, networks, family, config.model.mixed_precision)
    return run_memory(workload, config, find_layout(config.distributed, gpus, gpus)).device / 2**30


def rows(report: str) -> list[tuple[str, ...]]:
    """Micro-batch, accumulation, recomputation, strategy."""
    return [
        tuple(found) for found in re.findall(r"^ +(\d+) +(\d+) +(\w+)  (\w+(?: \+ offload)?)", report, re.MULTILINE)
    ]


def test_micro_batches() -> None:
    assert micro_batches(48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert micro_batches(10) == [1, 2, 5, 10]
    assert micro_batches(1) == [1]


def test_plenty_of_room_needs_nothing(pipeline: Path) -> None:
    report = propose(load_config(words(pipeline)), FitTarget(80, 4))
    assert "an estimate, not a measurement" in report
    assert "global batch 192 = 48 × 4 GPUs" in report
    assert rows(report)[0] == ("48", "1", "no", "ddp")
    assert len(rows(report)) == 5


def test_the_overrides_are_what_was_promised(pipeline: Path) -> None:
    """With room for half of what the config needs: the proposal fits, and the config does not."""
    given = load_config(words(pipeline, system__batch_size=48, system__gradient_accumulation=1))
    gib = 0.6 * needed_gib(given, 1) / USABLE_SHARE
    report = propose(given, FitTarget(gib, 1))
    overrides = report.splitlines()[-1].split()
    changed = load_config([*words(pipeline), *overrides])
    assert needed_gib(changed, 1) <= USABLE_SHARE * gib < needed_gib(given, 1)
    assert changed.system.batch_size * changed.system.gradient_accumulation == 48
    assert changed.distributed.strategy == rows(report)[0][3] == "single"
    found = rows(report)
    assert found[0][2] == "no"
    assert ("single", "all") in {(row[3], row[2]) for row in found}
    of_single = {row[2]: int(row[0]) for row in found if row[3] == "single"}
    assert of_single["all"] > of_single["no"]


def test_twice_the_micro_batch_would_not_fit(pipeline: Path) -> None:
    given = load_config(words(pipeline, system__batch_size=64, system__gradient_accumulation=1))
    gib = 0.6 * needed_gib(given, 1) / USABLE_SHARE
    micro = int(rows(propose(given, FitTarget(gib, 1)))[0][0])
    more = load_config(words(pipeline, system__batch_size=2 * micro, system__gradient_accumulation=1))
    assert needed_gib(more, 1) > USABLE_SHARE * gib


def test_nothing_fits(pipeline: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu_gib: 0\.0001 GiB on 2 GPUs is too little; the least estimated need is"):
        propose(load_config(words(pipeline)), FitTarget(0.0001, 2))


def test_a_chosen_strategy_stays(pipeline: Path) -> None:
    config = load_config(words(pipeline, distributed__strategy="fsdp"))
    report = propose(config, FitTarget(80, 4))
    assert {row[3] for row in rows(report)} == {"fsdp"}
    assert "distributed" not in report.splitlines()[-1]


def test_sharding_is_not_proposed_where_it_is_refused(pipeline: Path) -> None:
    config = load_config(words(pipeline, optimizer__name="adafactor"))
    assert [choice.strategy for choice in strategies(config, 4)] == ["ddp"]
    fp16 = load_config(words(pipeline, model__mixed_precision="fp16"))
    assert {choice.strategy for choice in strategies(fp16, 4)} == {"ddp", "deepspeed_2", "deepspeed_3"}


def test_gpus_follow_the_trainer(pipeline: Path) -> None:
    config = load_config(words(pipeline, trainer__devices=2, trainer__num_nodes=3))
    assert "48 × 6 GPUs" in propose(config, FitTarget(80))


def test_the_partner_of_the_batch_size_follows(pipeline: Path) -> None:
    config = load_config(words(pipeline, dataset__params__batch_size=12))
    overrides = propose(config, FitTarget(80, 1)).splitlines()[-1].split()
    assert load_config([*words(pipeline, dataset__params__batch_size=12), *overrides]).system.batch_size == 48


@pytest.mark.parametrize("option", ["vae_slicing", "vae_tiling"])
def test_low_memory_encoding(pipeline: Path, option: str) -> None:
    """The autoencoder's tiles are 16 pixels wide."""
    found = {}
    for is_on in (False, True):
        config = load_config([*words(pipeline), f"model.{option}={is_on}"])
        networks, family = meta_networks(config)
        workload = measure(config, networks, family, "no")
        found[is_on] = run_memory(workload, config, find_layout(config.distributed, 1, 1)).encoding
    share = 12 if option == "vae_slicing" else 4
    assert found[True] == pytest.approx(found[False] / share, rel=0.1)


def test_an_autoencoder_is_fitted_too(pipeline: Path) -> None:
    report = propose(load_config([*words(pipeline), "model.train=vae"]), FitTarget(80, 2))
    assert {row[3] for row in rows(report)} == {"ddp"}


@pytest.mark.parametrize("changes", [{"distributed__strategy": "deepspeed_3"}, {"model__train": "vae"}])
def test_recomputation_is_not_proposed_where_it_is_refused(pipeline: Path, changes: dict[str, str]) -> None:
    report = propose(load_config(words(pipeline, **changes)), FitTarget(80, 2))
    assert {row[2] for row in rows(report)} == {"no", "all"}


def test_a_strategy_is_tried_with_other_recomputation_than_given(pipeline: Path) -> None:
    config = load_config(words(pipeline, model__gradient_checkpointing="selective"))
    assert "deepspeed_3" in {choice.strategy for choice in strategies(config, 4)}
