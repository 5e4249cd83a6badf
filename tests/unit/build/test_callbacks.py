"""The order in which callbacks act after an optimizer step."""

from pathlib import Path

from tests import makers
from tests.integration.training import options, prepare

ORDER = [
    "Preemption",  # first: the others of the step see that the run is to stop
    "RunRecord",
    "Ema",
    "NumericGuard",  # goes back before anything of the step is logged, drawn or saved; what follows may fail, and the
    # step can still be saved
    "Metrics",  # before ProgressBar, which shows its loss
    "Validation",  # before Save, which keeps the best by its loss
    "Pictures",
    "Save",
    "ProgressBar",
    "Runtime",  # last: what the others do after a step belongs to the step, and nothing of it is left
]


def test_the_order(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, sampling__every=2, sampling__prompts="[a]")
    held_out = makers.caption_shards(tmp_path / "held out", shards=1, per_shard=8)
    run = prepare([*argv, f"validation.path={held_out}", "logging.progress_bar=true", "model.use_ema=true"])
    assert [type(callback).__name__ for callback in run.trainer.callbacks] == ORDER  # type: ignore[attr-defined]
