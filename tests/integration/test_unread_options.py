"""No option is accepted without being read: a run reads it, a rule refuses it, or it belongs to a choice named here."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import train as program
from sd_training.build.plan import make_plan
from sd_training.config.fields import options as all_options
from sd_training.config.load import load_config
from sd_training.config.value_types import OptionGroup
from sd_training.log import RunLog
from sd_training.signals import StopSignals
from tests import makers
from tests.integration.training import options

OF_OTHER_CHOICES = {
    "experiment.num_eval_images": "experiment.eval_caption_file; a warning without",
    "experiment.project": "W&B",
    "wandb.entity": "W&B",
    "wandb.api_key": "W&B",
    "dataset.params.tags": "dataset.type=TagFolder; an error without",
    "dataset.params.synthetic": "dataset.type=Synthetic; an error without",
    "dataset.params.idx_to_prompt": "dataset.type=ClassificationWebDataset; an error without",
    **dict.fromkeys(
        (f"dataset.params.captions.{name}" for name in ("shuffle_tags_prob", "drop_tag_prob", "num_kept_tags")),
        "captions.tag_separator; an error without",
    ),
    "dataset.params.buckets.sizes": "buckets.mode=table; an error without",
    "dataset.params.remote": "remote data",
    "dataset.prior": "dataset.prior.path; an error without",
    "dataset.params.allow_change": "a resumed run",
    "experiment.allow_changed": "a resumed run",
    "distributed.reshard_after_forward": "fsdp; an error without",
    "trainer.compile_mode": "a compiled run; an error without",
    "trainer.activation_budget": "a compiled run; an error without",
    "distributed.offload_parameters": "fsdp, deepspeed_3; an error without",
    "distributed.dist_backend": "several processes",
    "experiment.start_from_average": "experiment.start_from; an error without",
    "experiment.reset": "experiment.start_from; an error without",
    "objective.reconstruction.perceptual_weight": "objective.reconstruction.perceptual_path; an error without",
    "objective.adversarial": "objective.adversarial.weight; an error without",
    "optimizer.params": "some optimizers; an error with others",
    "lr_scheduler.params": "some schedules; an error with others",
    "numerics.max_skipped_in_a_row": "a step that is not finite",
    "numerics.max_rollbacks": "a step that is not finite, or a spike",
    "numerics.on_spike": "a spike",
    "checkpoint.max_failed_saves": "a save that fails",
    "numerics.spike_threshold": "a history of losses that is long enough to show a spike",
    "model.revision": "model.pretrained from the hub",
    "model.vae.params": "a part from scratch",
}
OF_OTHER_DENOISERS = {
    "model": "parts and families are loaded by name, and checked by tests/unit/models/test_load.py",
    "objective": "choices of the objective; an error without",
    "evaluation": "scripts/evaluate.py",
    "sampling": "pictures; sampling.prompts without them is a warning",
}
READ_IN_VAIN = {
    "dataset.params.captions": "rules are made, but an autoencoder's run has no tokenizer and reads no caption",
    "dataset.prior.path": "whether there are class images: an autoencoder's run has none",
    "trainer.compile": "whether to count graphs: an autoencoder is not compiled",
    "validation.num_levels": "an autoencoder has one loss per sample, not one per noise level",
}
"""Options that are refused although some code looks at them."""
NOT_THE_RUN = ("pydantic", "sd_training.config.check", "sd_training.config.changes", "sd_training.config.fields")
"""Modules that look at every option, and use none."""


def record_reads(group: Any, reads: set[str], prefix: str = "") -> None:
    """Notes each option of a configuration that the code of a run reads from now on."""
    base = type(group)
    names = set(base.model_fields)
    for name in names:
        if isinstance(value := getattr(group, name), OptionGroup):
            record_reads(value, reads, f"{prefix}{name}.")

    def read(self: Any, name: str) -> Any:
        if name in names and not sys._getframe(1).f_globals["__name__"].startswith((*NOT_THE_RUN, __name__)):
            reads.add(prefix + name)
        return base.__getattribute__(self, name)

    object.__setattr__(group, "__class__", type(base.__name__, (base,), {"__getattribute__": read}))


def options_read(argv: list[str]) -> set[str]:
    """What a run, fitted to its end, reads."""
    config, reads = load_config(argv), set[str]()
    record_reads(config, reads)
    plan = make_plan(config)
    program.train(plan, StopSignals(), RunLog())
    return reads


def is_named(key: str, table: Mapping[str, str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in table)


@pytest.mark.parametrize("train", ["vae", "denoiser"])
def test_every_option_is_read_or_refused(train: str, pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    makers.caption_shards(tmp_path / "held out", shards=1)
    changes: dict[str, Any] = {
        "experiment__num_examples_to_see": 16,
        "model__train": train,
        "dataset__params__filters__original_width": ">=41",
        "dataset__params__buckets__mode": "ladder",
        "dataset__params__buckets__step": 8,
        "ema__sigma_rels": "[0.05]",
        "ema__snapshot_every": 2,
        "validation__path": tmp_path / "held out",
        "checkpoint__mirror": f"file://{tmp_path / 'mirror'}",
    }
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    readers = {key: option.readers.get("model.train") for key, option in all_options().items()}
    refused = {key for key, rule in readers.items() if rule and train not in rule.values}
    elsewhere = dict(OF_OTHER_CHOICES)
    if train == "vae":
        argv += ["model.pretrained=null", f"model.vae.pretrained={pipeline_dir}"]
    else:
        elsewhere |= OF_OTHER_DENOISERS
    reads = options_read(argv)
    assert {key for key in all_options() if key not in reads | refused and not is_named(key, elsewhere)} == set()
    assert [key for key in reads & refused if not is_named(key, READ_IN_VAIN)] == []
