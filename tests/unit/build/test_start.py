"""How a run ends that cannot begin. Whole runs are in tests/integration."""

from pathlib import Path
from typing import Any

import pytest

from sd_training.build.models import optimization
from sd_training.build.plan import Start, find_start, make_plan
from sd_training.checkpoint.mirror import AT_START, Mirror
from sd_training.config.load import load_config
from sd_training.errors import EXIT_MISTAKE, EXIT_STOPPED, ConfigError, UserError
from tests import makers
from tests.integration.training import options


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("Generic S3 error: after 5 retries - Server returned non-2xx status code: 503 Slow Down", EXIT_STOPPED),
        ("Generic S3 error: after 5 retries - HTTP error: error sending request", EXIT_STOPPED),
        ("Generic HTTP error: HTTP error: error sending request: invalid peer certificate", EXIT_MISTAKE),
        ("Server returned non-2xx status code: 403 Forbidden", EXIT_MISTAKE),
        ("Not a directory (os error 20)", EXIT_MISTAKE),
    ],
)
def test_a_mirror_that_is_away_asks_for_another_start(cause: str, status: int) -> None:
    mirror, said = Mirror("s3://bucket/runs", "run"), r"checkpoint\.mirror: .*checkpoint\.mirror=null to continue"
    with pytest.raises(UserError, match=said) as error, mirror._errors_named(AT_START):
        raise OSError(cause)
    assert error.value.exit_status == status


def test_a_run_that_has_done_more_than_its_options_ask_for_says_so(tmp_path: Path) -> None:
    done = Start(tmp_path, num_steps=2, step=8, source="step=8").sentence()
    assert done.startswith("resumes from step=8, after 8 of 2 optimizer steps; make it longer ")
    assert "after 1 of 1 optimizer step;" in Start(tmp_path, num_steps=1, step=1, source="step=1").sentence()


@pytest.mark.parametrize(
    ("length", "num_steps"),
    [
        ({"experiment__num_steps": 7}, 7),
        ({"experiment__num_epochs": 2}, 6),  # of 24 samples, 8 in a step
        ({"experiment__num_epochs": 0.5}, 1),
        ({"experiment__num_epochs": 2, "dataset__params__max_samples": 16}, 4),
        ({"experiment__num_epochs": 1, "dataset__params__filters": "{original_width: '<48'}"}, 1),
    ],
)
def test_lengths_in_steps_and_epochs(length: dict[str, Any], num_steps: int, tmp_path: Path) -> None:
    shards = makers.caption_shards(tmp_path / "data", shards=3, per_shard=8)
    own = {"experiment__num_examples_to_see": "null", "dataset__params__index_dir": tmp_path / "index", **length}
    plan = make_plan(load_config(options(tmp_path / "run", Path("someone/pipeline"), shards, **own)))
    assert plan.batch.num_steps == num_steps
    assert plan.config.experiment.length_option == f"experiment.{next(iter(length)).removeprefix('experiment__')}"


@pytest.mark.parametrize(("scale", "factor"), [("none", 1), ("linear", 32), ("sqrt", 32**0.5)])
def test_learning_rates_by_the_global_batch(scale: str, factor: float, tmp_path: Path) -> None:
    own = {"optimizer__scale_lr": scale, "optimizer__rates_by_part": "{denoiser: 1e-5}", "dataset__type": "Synthetic"}
    own |= {"system__gradient_accumulation": 4, "dataset__params__path": "''"}
    plan = optimization(make_plan(load_config(options(tmp_path / "run", Path("someone/pipeline"), tmp_path, **own))))
    assert plan.learning_rate == pytest.approx(0.001 * factor, rel=1e-12)
    assert plan.config.rates_by_part == {"denoiser": pytest.approx(1e-5 * factor, rel=1e-12)}


def test_an_average_on_cuda_is_refused_on_the_cpu(tmp_path: Path) -> None:
    words = [
        *(f"experiment.log_dir={tmp_path}", "experiment.name=run", "experiment.num_examples_to_see=100"),
        *("dataset.params.path=data.tar", "model.pretrained=someone/pipeline", "trainer.accelerator=cpu"),
        *("model.use_ema=true", "ema.device=cuda"),
    ]
    with pytest.raises(ConfigError, match=r"ema\.device: cuda, but the run is on cpu; use auto or cpu"):
        make_plan(load_config(words))
    make_plan(load_config([*words, "ema.device=auto"]))


def test_a_file_where_the_run_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    plan = make_plan(load_config(options(tmp_path / "run", Path("someone/pipeline"), tmp_path)))
    with pytest.raises(ConfigError, match=r"experiment\.name: .*run cannot be a run folder: .*; take another one"):
        find_start(plan, None)
