"""A checkpoint is not continued with an optimizer or objective that its state and weights do not belong to."""

from pathlib import Path
from typing import Any

import pytest

from sd_training.errors import CheckpointError
from tests.integration.training import CrashAfter, Interrupted, options, train

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer__name": "lion"}, "optimizer.name was adamw, now lion"),
    ({"optimizer__no_decay_on_norms_and_biases": True}, "no_decay_on_norms_and_biases was False, now True"),
    ({"objective__prediction_type": "v_prediction"}, "objective.prediction_type was epsilon, now v_prediction"),
    ({"model__train_text_encoder": True}, "model.train_text_encoder was False, now True"),
    ({"objective__loss_weighting__name": "learned_uncertainty"}, "learned_uncertainty was False, now True"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path) -> list[str]:
    argv = options(tmp_path_factory.mktemp("begun") / "run", pipeline_dir, shards_dir)
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(3))
    return argv


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=lambda value: str(value)[:40])
def test_other_options_are_named(begun: list[str], change: dict[str, Any], said: str) -> None:
    more = [f"{name.replace('__', '.')}={value}" for name, value in change.items()]
    with pytest.raises(CheckpointError, match=said):
        train([*begun, *more])


def test_hyper_parameters_follow_the_options(begun: list[str]) -> None:
    run = train([*begun, "optimizer.params.weight_decay=0.5", "optimizer.params.beta1=0.5"])
    (group,) = run.trainer.optimizers[0].param_groups
    assert (group["weight_decay"], group["betas"][0]) == (0.5, 0.5)
