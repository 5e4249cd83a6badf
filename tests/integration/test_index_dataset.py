from pathlib import Path

import pytest

from scripts import index_dataset
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from tests import makers

ROOT = Path(__file__).resolve().parents[2]


def config_of(*arguments: object) -> Config:
    return index_dataset.read_config(index_dataset.parse_arguments([str(argument) for argument in arguments]))


def test_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    makers.caption_shards(tmp_path / "data", shards=2, per_shard=20)
    index_dataset.main([str(tmp_path / "data" / "000.tar"), str(tmp_path / "data" / "001.tar")])
    text = capsys.readouterr().out
    assert "data: 40 samples in 2 shards" in text
    for words in ("step", "the run sees", "1,000,000"):  # nobody asked for a run
        assert words not in text


def test_a_run_is_projected_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    makers.caption_shards(tmp_path / "data", shards=1, per_shard=20)
    index_dataset.main([str(tmp_path / "data"), "--images", "50"])
    text = capsys.readouterr().out
    assert "= 1 image per optimizer step; 50 images = 50 steps; batch_size 1 is assumed, and config=…" in text
    assert "enlarged" not in text  # the size that they are trained at is not known
    assert "the run sees 20 samples 2.50 times each, in 50 steps" in text


def test_the_data_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    makers.caption_shards(tmp_path / "data")
    config = f"config={ROOT / 'configs' / 'finetune_config.yaml'}"
    options = [f"dataset.params.path={tmp_path / 'data'}", "experiment.num_examples_to_see=64"]
    index_dataset.main([config, *options, "dataset.params.filters.pwatermark=<0.5"])
    assert "filter pwatermark < 0.5:" in capsys.readouterr().out


def test_a_model_from_scratch_is_not_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """The stand-in for a missing model would win over its parts."""
    config = config_of(f"config={ROOT / 'configs' / 'models' / 'sd15.yaml'}", "dataset.params.path=x")
    assert config.model.pretrained is None and "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lang=en", "a.b=c", "😀", "${a}", "sp ace [1]", "x: y", "007"])
def test_any_name_can_be_a_path(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    makers.caption_shards(tmp_path / name, shards=1)
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name):
        assert config_of(path).dataset.params.path == [str(path)]


def test_a_few_samples_with_problems_have_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = makers.caption_samples(6)
    del samples[3]["txt"]
    makers.write_shard(tmp_path / "${a}=😀" / "a.tar", samples)
    index_dataset.main([str(tmp_path / "${a}=😀")])
    text = capsys.readouterr().out
    assert "data: 6 samples in 1 shard; 5 have all members" in text
    assert "caption missing 1" in text


def test_options_of_the_script_are_options_of_the_config() -> None:
    config = config_of("--type", "Parquet", "--images", "5000", "dataset.params.path=x.parquet")
    assert (config.dataset.type, config.experiment.num_examples_to_see) == ("Parquet", 5000)
    assert config.dataset.params.path == "x.parquet"
    assert config_of("x.csv", "--type", "Table").dataset.type == "Table"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.tar", "--processes", "0"], "--processes: is 0; give 1 or more"),
        (["a.tar", "--processes", "-1"], "--processes: is -1; give 1 or more"),
        (["a.tar", "--images", "0"], "experiment.num_examples_to_see"),
        (["a.tar", "--type", "Tar"], "dataset.type"),
        (["a.tar", "dataset.params.path=b"], "not both"),
        (["--type", "Table", "dataset.type=Parquet", "dataset.params.path=x"], "--type: is dataset.type"),
    ],
)
def test_mistakes_are_said_before_the_work(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*arguments)
