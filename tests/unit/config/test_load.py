"""From command line to Config: merging, overrides, and every problem in one plain report."""

import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.config.load import load_config
from tests.unit.config.loading import BASE, only, problems, write


def test_overrides_alone_make_a_config() -> None:
    config = load_config(BASE)
    assert config.dataset.params.path == "data/{000..999}.tar"
    assert config.experiment.num_examples_to_see == 100_000
    assert config.optimizer.params.beta2 == 0.98


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (">=512", ">=512"),
        ('">=512"', ">=512"),
        ("<=0.5", "<=0.5"),
        (">5", ">5"),
        ("!=en", "!=en"),
        ("3", 3),
        ("==a", "==a"),
    ],
)
def test_filters_need_no_quotes(value: str, expected: str | int) -> None:
    config = load_config([*BASE, f"dataset.params.filters.original_width={value}"])
    assert config.dataset.params.filters == {"original_width": expected}


def test_filter_override_joins_the_filters_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", 'dataset:\n  params:\n    filters:\n      pwatermark: "<=0.5"\n')
    config = load_config([f"config={file}", *BASE, "dataset.params.filters.original_width=>=512"])
    assert config.dataset.params.filters == {"pwatermark": "<=0.5", "original_width": ">=512"}


def test_filters_with_comments_only_are_none(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "dataset:\n  params:\n    filters: # none yet\n      # a: 1\n")
    assert load_config([f"config={file}", *BASE]).dataset.params.filters is None


def test_a_file_may_have_a_comma_in_its_path(tmp_path: Path) -> None:
    (tmp_path / "a, b").mkdir()
    file = write(tmp_path / "a, b" / "c.yaml", "system:\n  workers: 3\n")
    assert load_config([f"config={file}", *BASE]).system.workers == 3
    assert "cannot read this file" in problems(f"config={'x' * 5000}")[0]


def test_a_filter_eaten_by_the_shell_says_so() -> None:
    assert "quote it" in only(*BASE, "dataset.params.filters.original_width=")


def test_files_merge_left_to_right_and_overrides_win(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "system: {batch_size: 4, workers: 1}\nsampling: {prompts: [a, b]}\n")
    second = write(tmp_path / "b.yaml", "system: {batch_size: 8}\nsampling: {prompts: [c]}\n")
    config = load_config([*BASE, "system.workers=3", f"config={first},{second}"])
    assert (config.system.batch_size, config.system.workers) == (8, 3)
    assert config.sampling.prompts == ["c"]


def test_blanks_at_the_ends_of_a_text_are_part_of_it() -> None:
    words = [
        "dataset.params.captions.prefix=a photo, ",
        "dataset.params.captions.suffix= in oil",
        "experiment.seed= 3 ",
    ]
    config = load_config([*BASE, *words, "model.mixed_precision= no"])
    assert (config.dataset.params.captions.prefix, config.dataset.params.captions.suffix) == ("a photo, ", " in oil")
    assert (config.experiment.seed, config.model.mixed_precision) == (3, "no")


def test_a_length_on_the_command_line_replaces_that_of_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "experiment:\n  num_examples_to_see: 800\n")
    base = [word for word in BASE if "num_examples_to_see" not in word]
    experiment = load_config([f"config={file}", *base, "experiment.num_steps=7"]).experiment
    assert (experiment.num_steps, experiment.num_examples_to_see, experiment.num_epochs) == (7, None, None)
    assert load_config([f"config={file}", *base]).experiment.num_examples_to_see == 800
    assert "given by" in only(f"config={file}", *base, "experiment.num_steps=7", "experiment.num_examples_to_see=9")


def test_a_file_without_its_option_is_the_one_thing_that_is_said() -> None:
    assert (
        only("configs/finetune_sd2.yaml")
        == "configs/finetune_sd2.yaml: is no option; did you mean config=configs/finetune_sd2.yaml?"
    )
    assert only("--config", "a.yml", "--batch_size", "4").startswith("a.yml: is no option")


@pytest.mark.parametrize("name", ["007", "1e5", "on", "2024-01-01", "12:30", "a: b", "{a,b}"])
def test_text_stays_as_it_was_typed(name: str) -> None:
    assert load_config([*BASE, f"experiment.project={name}"]).experiment.project == name


def test_values_are_yaml() -> None:
    others = [item for item in BASE if "path" not in item]
    config = load_config([*others, "dataset.params.path=[a.tar, b.tar]", "model.use_ema=on"])
    assert config.dataset.params.path == ["a.tar", "b.tar"]
    assert config.model.use_ema is True


@pytest.mark.parametrize("value", ["no", "False", "", "null"])
def test_mixed_precision_no_needs_no_quotes(value: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", f"model:\n  mixed_precision: {value}\n")
    assert load_config([f"config={file}", *BASE]).model.mixed_precision == "no"
    assert load_config([*BASE, f"model.mixed_precision={value}"]).model.mixed_precision == "no"


def test_empty_groups_and_params_mean_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "wandb:\nmodel:\n  unet:\n    params:\n")
    config = load_config([f"config={file}", *BASE])
    assert config.wandb.api_key is None
    assert config.model.unet.params == {}


def test_missing_marker_on_optional_keys_is_the_default(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "wandb:\n  api_key: ???\nexperiment:\n  project: ???\n  eval_caption_file: ???\n")
    config = load_config([f"config={file}", *BASE])
    assert config.wandb.api_key is None
    assert config.experiment.project == "sd_training"


def test_missing_marker_inside_free_parameters_is_an_error() -> None:
    assert only(*BASE, "model.noise_scheduler_training.params.beta_end=???").endswith("is required (it is ???)")
    assert only(*BASE, "dataset.params.filters.width=???").endswith("is required (it is ???)")
    assert only(*BASE, "model.pretraind=???").startswith("model.pretraind: unknown option")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "line 2: not readable as YAML: found duplicate key a"),
        ("a: [1\nb: 2\n", "not readable as YAML"),
        ("- a\n- b\n", "must be a mapping"),
        ("just words\n", "must be a mapping"),
        ("a: !!python/object:os.system {}\n", "not readable as YAML"),
        ("a: '${'\n", "not readable as YAML"),
        ("a: " + "[" * 3000, "maximum recursion depth"),
    ],
)
def test_bad_files_are_named(text: str, expected: str, tmp_path: Path) -> None:
    file = write(tmp_path / "bad.yaml", text)
    line = only(f"config={file}")
    assert line.startswith(f"config={file}")
    assert expected in line


def test_missing_folder_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    report = problems(f"config={tmp_path}/none.yaml,{tmp_path},{tmp_path}/x.yaml")
    assert ["No such file" in report[0], "directory" in report[1], "utf-8" in report[2]] == [True] * 3


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert "expansion exceeds" in only(f"config={write(tmp_path / 'a.yaml', 'l0: &l0 [x]' + chr(10) + levels)}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("experiment.name", "or option=value"),
        ("a.yaml", "did you mean config=a.yaml"),
        ("dataset.params.filters.w>=5", "as in dataset.params.filters.width='>=512'"),
        ("a..b=1", "dotted names"),
        ("=1", "dotted names"),
        ("sampling.prompts[7]=x", "cannot be set"),
        ("experiment.project=${", "cannot be set"),
        ("system.batchsize=3", "unknown option (command line); did you mean system.batch_size?"),
        ("learning_rate=3", "did you mean optimizer.params.learning_rate?"),
        (
            "dataset.param.path=x",
            "dataset.param: unknown option; did you mean dataset.params?",
        ),
        ("model=3", "it is a group of options"),
        ("system.batch_size=abc", 'system.batch_size: is "abc" (command line); allowed: a whole number of at least 1'),
        ("system.batch_size=0", "allowed: a whole number of at least 1"),
        ("system.batch_size=true", "system.batch_size: is true"),
        ("optimizer.params.beta1=1", "allowed: a number of at least 0 and below 1"),
        ("optimizer.params.learning_rate=.inf", "allowed: a number of at least 0"),
        ("model.mixed_precision=int8", "allowed: no, bf16 or fp16"),
        ("trainer.devices=0", "allowed: auto or a whole number of at least 1"),
        ("experiment.save_every.x=1", "experiment.save_every"),
        ("dataset.params.filters.w=[1]", "dataset.params.filters.w: [1] is not a filter"),
    ],
)
def test_bad_overrides_say_what_is_wrong(override: str, expected: str) -> None:
    line = only(*BASE, override)
    assert expected in line


@pytest.mark.parametrize("name", ["a/b", "..", "", "a\\b"])
def test_a_run_name_must_be_a_folder_name(name: str) -> None:
    argv = [item for item in BASE if "experiment.name" not in item]
    assert only(*argv, f"experiment.name='{name}'").startswith("experiment.name: is ")


def test_an_option_given_twice_is_an_unquoted_brace_pattern() -> None:
    argv = [item for item in BASE if "path" not in item]
    assert "given 2 times" in only(*argv, "dataset.params.path=0.tar", "dataset.params.path=1.tar")


def test_wrong_values_name_file_and_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "system:\n  workers: many\nexperiment:\n  project: 3\n  nam: x\n")
    report = problems(f"config={file}", *BASE)
    assert f'system.workers: is "many" ({file}, line 2); allowed: a whole number of at least 0' in report
    assert f"experiment.project: is 3 ({file}, line 4); allowed: a text" in report
    assert f"experiment.nam: unknown option ({file}, line 5); did you mean experiment.name?" in report


def test_every_kind_of_problem_in_one_report(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "experiment:\n  name: ???\n  log_dir: x\nsistem: {workers: 3}\n")
    report = problems(
        f"config={file}",
        "nonsense",
        "system.batch_size=abc",
        "dataset.params.filters.w=os.system()",
        "sampling.every=3",
        "wandb.entity=${nothing.here}",
        "ema.path=${oc.env:HOME}",
        "model.vae.pretrained=./not/there",
        "checkpoint.mirror=http://x",
    )
    expected = (
        "nonsense",
        "sistem: unknown option",
        "system.batch_size: is",
        "experiment.name: is required",
        "experiment.num_examples_to_see: is required",
        "dataset.params.path: is required",
        "wandb.entity: is ${nothing.here}",
        "ema.path: is ${oc.env:HOME}: Unsupported interpolation type oc.env",
        "dataset.params.filters.w: ",
        "sampling.prompts: is empty",
        "model.unet: is required",
        "model.vae.pretrained: './not/there' does not exist",
        'checkpoint.mirror: is "http://x"',
    )
    for start in expected:
        assert sum(line.startswith(start) for line in report) == 1, (start, report)


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "wandb:\n  api_key: 123456789\n")
    for argv in ([f"config={file}", *BASE], [*BASE, "--wandb.api_key=123456789"], [*BASE, "wandb.api_key=[123456789]"]):
        assert "123456789" not in only(*argv)


def test_warnings_do_not_stop_a_run(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    load_config([*BASE, "ema.decay=0.5"])
    assert "ema.decay: is not used, because model.use_ema is false" in caplog.text + capsys.readouterr().err


def test_config_is_importable_without_torch() -> None:
    code = "import sys, sd_training.config.load, sd_training.config.changes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0
