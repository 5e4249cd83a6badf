"""Configuration files from elsewhere: nothing runs, sizes are bounded, and no permission is given by a file."""

from pathlib import Path

import pytest

from sd_training.config import load
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from tests.unit.config.loading import BASE, only, write

PARAMS = "model.unet.params"


def in_params(text: str) -> str:
    return f"model: {{unet: {{params: {{{text}}}}}}}\n"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{PARAMS}.x=" + "[" * 3000 + "]" * 3000, "nested too deeply"),
        (f"{PARAMS}.{'a.' * 2000}b=1", "nested too deeply"),
        ("experiment.project=a${model.${experiment.name}}", "only ${another.option} is read"),
    ],
)
def test_nested_overrides_are_problems(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("$", r"\$").replace("{", r"\{").replace("}", r"\}")):
        load_config([*BASE, override])


@pytest.mark.parametrize("value", ["1" * 5000, "2024-99-99", "\udc80", "!!python/object/apply:os.mkdir [canary]"])
def test_a_value_that_yaml_cannot_read_is_text(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config([*BASE, f"experiment.project={value}"]).experiment.project == value
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["python/object/apply:os.mkdir [canary]", "python/name:os.mkdir ''", "python/tuple []"])
def test_tags_make_no_objects(tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not readable as YAML" in only(f"config={write(tmp_path / 'a.yaml', in_params(f'x: !!{tag}'))}")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "torch.load", "diffusers.models.x", "__main__.x"])
def test_a_dotted_target_is_no_class(target: str) -> None:
    from sd_training.models.load import ALLOWED, class_of

    for part in ALLOWED:
        with pytest.raises(ConfigError, match="is not allowed; use one of"):
            class_of(part, target)
    assert "unknown option" in only(*BASE, f"model.unet._target_={target}")


def test_a_file_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_FILE_BYTES", 100)
    load_config([f"config={write(tmp_path / 'a.yaml', '#' * 100)}", *BASE])
    assert "larger than 100 bytes" in only(f"config={write(tmp_path / 'b.yaml', '#' * 101)}")
    assert "larger than 100 bytes" in only("config=/dev/zero")


@pytest.mark.parametrize(
    "text",
    [
        "dataset: {params: {allow_pipe: true}}",
        "dataset: {params: {allow_pipe: 'yes'}}",
        "dataset: {params: '${model.unet.params}'}\nmodel: {unet: {params: {allow_pipe: true}}}",
        "dataset: {mix: [{params: {path: 'pipe:true', allow_pipe: true}}]}",
    ],
)
def test_a_file_cannot_permit_shell_commands(text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", text)
    with pytest.raises(ConfigError, match=r"allow_pipe: is .* in .*a\.yaml; this permission is given on"):
        load_config([f"config={file}", *BASE])


@pytest.mark.parametrize(
    "text",
    [
        "dataset: {<<: {params: {allow_pipe: true, path: 'pipe:touch x'}}}",
        "dataset: {params: {<<: {allow_pipe: true}}}",
        "dataset: {params: {<<: [{<<: {allow_pipe: 'yes'}}]}}",
        "dataset: {params: {allow_pipe: '${checkpoint.asynchronous}'}}",
        "<<: {dataset: {<<: {mix: [{<<: {params: {<<: {allow_pipe: true}}}}]}}}",
    ],
)
@pytest.mark.parametrize(
    "more", [["dataset={type: WebDataset}"], ["dataset.params={crop: random}"], ["dataset.mix=[]"], []]
)
def test_a_group_set_on_the_command_line_lends_a_file_no_permission(text: str, more: list[str], tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", text)
    with pytest.raises(ConfigError, match=r"allow_pipe: is .* in .*a\.yaml; this permission is given on"):
        load_config([f"config={file}", *BASE, *more])


def test_a_permission_that_a_file_gives_is_told_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "dataset: {params: {allow_pipe: true}}")
    told = f"dataset.params.allow_pipe: is true in {file}; this permission is given on the command line only"
    assert only(f"config={file}", *BASE) == f"{told} (dataset.params.allow_pipe=true)"
    refused = write(tmp_path / "b.yaml", "dataset: {params: {allow_pipe: false}}")
    assert not load_config([f"config={refused}", *BASE]).dataset.params.allow_pipe


def test_the_command_line_permits_shell_commands(tmp_path: Path) -> None:
    permit = "dataset.params.allow_pipe=true"
    assert load_config([*BASE, permit]).dataset.params.allow_pipe
    mix = write(tmp_path / "b.yaml", "dataset: {mix: [{params: {path: 'pipe:true'}}]}")
    loaded = load_config([f"config={mix}", *BASE, "dataset.mix[0].params.allow_pipe=true"])
    assert loaded.dataset.mix[0].params.allow_pipe and not loaded.dataset.params.allow_pipe


def test_prompt_files_are_read_within_bounds(tmp_path: Path) -> None:
    argv = [*BASE, "dataset.type=ClassificationWebDataset"]
    for text in ('{"' + "9" * 5000 + '": "x"}', '{"1": "x"}'):
        load_config([*argv, f"dataset.params.idx_to_prompt={write(tmp_path / 'p.json', text)}"])
    deep = write(tmp_path / "d.json", "[" * 100_000)
    for path in (deep, "~nobody-of-this-name/p.json"):
        assert "idx_to_prompt: " in only(*argv, f"dataset.params.idx_to_prompt={path}")
