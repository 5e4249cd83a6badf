"""`${another.option}`: what it may stand for, and what is said of one that means nothing or asks for more."""

from pathlib import Path

import pytest

from sd_training.config.load import load_config
from tests.unit.config.loading import BASE, only, problems, write


def test_interpolation_reads_other_options_and_defaults() -> None:
    config = load_config(
        [*BASE, "dataset.params.batch_size=${system.batch_size}", "system.dist_backend=${distributed.dist_backend}"]
    )
    assert config.system.batch_size == 32
    assert config.distributed.dist_backend == "nccl"


def test_interpolation_to_an_unknown_option() -> None:
    line = only(*BASE, "dataset.params.workers=${system.worker}")
    assert line.startswith("dataset.params.workers: is ${system.worker}: Interpolation key 'system.worker' not found; ")


def test_interpolation_to_a_missing_value_is_reported_where_it_must_be_filled() -> None:
    argv = [item for item in BASE if "experiment.name" not in item]
    line = only(*argv, "wandb.entity=${experiment.name}")
    assert line.startswith("experiment.name: is required (a text that can name a folder")


def test_a_required_option_taken_from_a_missing_value() -> None:
    argv = [item for item in BASE if "log_dir" not in item]
    line = only(*argv, "experiment.log_dir=${wandb.entity2}", "wandb.entity=x")
    assert line.startswith("experiment.log_dir: is ${wandb.entity2}: Interpolation key")
    line = only(*argv, "experiment.log_dir=${SCRATCH}/runs")
    assert line.endswith("only ${another.option} is read, nothing from outside the files")
    report = problems(*[item for item in argv if "name" not in item], "experiment.log_dir=a/${experiment.name}")
    assert [line.partition(" (")[0] for line in report] == [
        "experiment.log_dir: is required",
        "experiment.name: is required",
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ("model.vae=${model}",),
        ("experiment.project=${wandb.entity}", "wandb.entity=${experiment.project}"),
        ("model.unet.params.a=${model.unet.params}",),
        ("experiment.project=${..zz}",),
    ],
)
def test_impossible_interpolations_are_problems(argv: tuple[str, ...]) -> None:
    assert problems(*BASE, *argv)


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "a/${oc.env:HOME}/b", "${model.vae} } ${oc.env:HOME}", "${oc.decode:${oc.env:HOME}}"]
)
def test_resolvers_are_refused_by_name(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "secret-home")
    file = write(tmp_path / "a.yaml", f'experiment:\n  project: "{value}"\n')
    for argv in ([*BASE, f"experiment.project={value}"], [f"config={file}", *BASE]):
        line = only(*argv)
        assert line.startswith("experiment.project: is ") and "Unsupported interpolation type oc." in line
        assert "secret-home" not in line


def test_a_url_after_an_interpolation_is_no_resolver() -> None:
    config = load_config([*BASE, "checkpoint.mirror=s3://${experiment.name}:80"])
    assert config.checkpoint.mirror == "s3://first:80"


@pytest.mark.parametrize(
    ("word", "null"),
    [
        ("experiment.log_dir=runs/${wandb.entity}", "wandb.entity"),
        ("experiment.log_dir=${experiment.name}/${wandb.entity}", "wandb.entity"),
        ("experiment.project=of ${.eval_caption_file}", ".eval_caption_file"),
        ("sampling.prompts=[a, 'a ${dataset.params.captions.text} b']", "dataset.params.captions.text"),
    ],
)
def test_null_inside_a_text_is_no_word(word: str, null: str) -> None:
    """It would be written as `None`."""
    option, _, value = word.partition("=")
    name, inside = (option, value) if value[0] != "[" else (f"{option}.1", "a ${dataset.params.captions.text} b")
    base = [item for item in BASE if not item.startswith(f"{option}=")]
    assert only(*base, word) == f"{name}: is {inside}, but {null} is null; give {null} a value, or {name} another one"
    if null == "wandb.entity":
        assert "None" not in load_config([*base, word, "wandb.entity=x"]).experiment.log_dir


def test_null_alone_and_written_signs_stay() -> None:
    config = load_config([*BASE, "experiment.eval_caption_file=${wandb.entity}", r"experiment.project=a/\${x}"])
    assert (config.experiment.eval_caption_file, config.experiment.project) == (None, "a/${x}")
