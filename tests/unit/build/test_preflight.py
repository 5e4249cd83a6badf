"""Local files, hub ids and W&B's login, checked before torch is imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sd_training.build.preflight import local_problems, wandb_mode
from sd_training.config.load import load_config
from sd_training.config.schema import WandbConfig
from sd_training.errors import ConfigError
from tests import makers
from tests.integration.commands import ROOT
from tests.unit.config.loading import BASE

_WITHOUT_DATA = [word for word in BASE if not word.startswith("dataset.params.path=")]


def report(*argv: str) -> list[str]:
    """Problems of a command line; empty where it loads."""
    try:
        load_config([*_WITHOUT_DATA, *argv], local_problems)
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture(autouse=True)
def cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the hub that has the model of `BASE`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--someone--pipeline" / "snapshots" / "abc").mkdir(parents=True)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of images without captions."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(2):
        makers.picture(number).save(folder / f"{number}.png")
    return folder


def test_mistakes_of_every_kind_are_one_report_without_torch(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text("id,text\n1,a\n")
    words = [
        *_WITHOUT_DATA,
        f"model.pretrained={tmp_path}/no_model",
        f"dataset.params.path=[{tmp_path}/none,{tmp_path}/no*.tar]",
        f"dataset.mix=[{{params: {{path: {tmp_path}/no_mix}}}}]",
        f"validation.path={tmp_path}/held_out",
        f"experiment.eval_caption_file={tmp_path}/captions.csv",
        "dataset.params.resolution=30",
        "system.batch_size=0",
        "optimizer.lr=1",
    ]
    code = "import sys; import train; sys.modules['torch'] = None; train.run_cli(train.main)"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    said = done.stderr.replace(str(tmp_path), "")
    assert (done.returncode, "Traceback" in said) == (2, False), said
    assert [line.split(":")[1].strip() for line in said.splitlines() if line.startswith("error: ")] == [
        "system.batch_size",
        "optimizer.lr",
        "model.pretrained",
        "dataset.params.path",
        "dataset.params.path",
        "dataset.mix.0.params.path",
        "validation.path",
        "experiment.eval_caption_file",
        "dataset.params.resolution",
    ]
    assert "resolution: 30 is not a multiple of the autoencoder's downscale factor 8; use 24 or 32" in said
    assert "dataset.params.path: '/none' does not exist" in said
    assert "/captions.csv: the first line must name the columns uid and caption" in said


def test_what_is_not_local_or_not_seen_at_a_glance_is_no_problem() -> None:
    assert report("dataset.params.path=s3://bucket/{000..009}.tar") == []
    assert report("dataset.params.path=['gs://bucket/x.tar','s3://bucket/{000000..999999}.tar']") == []
    assert report("dataset.params.path=pipe:cat x.tar") == []


def test_data_of_another_type_is_recognised(tmp_path: Path, images: Path) -> None:
    def hint(path: Path, kind: str) -> str:
        lines = report(f"dataset.params.path={path}", f"dataset.type={kind}")
        assert len(lines) <= 1, lines
        return lines[0].rpartition("; ")[2] if lines else ""

    assert hint(images, "WebDataset") == f"'{images}' holds 0.png, which dataset.type=ImageFolder reads"
    assert hint(images, "Parquet").endswith("which dataset.type=ImageFolder reads")
    assert hint(images, "ImageFolder") == ""
    (tmp_path / "above").symlink_to(images.parent)
    assert (
        hint(tmp_path / "above", "Table")
        == f"'{tmp_path}/above' holds images/0.png, which dataset.type=ImageFolder reads"
    )
    (images / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": "a"}) + "\n")
    assert hint(images, "WebDataset") == f"'{images}' holds metadata.jsonl, which dataset.type=Table reads"
    assert hint(images / "metadata.jsonl", "WebDataset").endswith(
        "holds metadata.jsonl, which dataset.type=Table reads"
    )
    assert hint(images / "metadata.jsonl", "ImageFolder").endswith("which dataset.type=Table reads")
    shards = makers.caption_shards(tmp_path / "shards", shards=1, per_shard=1)
    assert hint(shards, "ImageFolder") == ""  # the folder is there; that it has no image is found by the index
    assert hint(shards, "Parquet") == f"'{shards}' holds 000.tar, which dataset.type=WebDataset reads"
    assert hint(shards / "000.tar", "Table").endswith("which dataset.type=WebDataset reads")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    assert hint(saved, "WebDataset") == f"'{saved}' holds state.json, which dataset.type=HuggingFace reads"
    (saved / "state.json").rename(saved / "notes")
    assert hint(saved, "WebDataset").startswith(f"dataset.params.path: the folder '{saved}' holds no *.tar file")


def test_what_a_model_path_should_have_been(tmp_path: Path, images: Path) -> None:
    def said(path: Path, option: str = "model.pretrained") -> str:
        lines = report(f"{option}={path}", f"dataset.params.path={images}", "dataset.type=ImageFolder")
        assert len(lines) == 1, lines
        return lines[0]

    run = tmp_path / "run"
    exported = run / "current_pipeline"
    (run / "checkpoints" / "step=2").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    assert said(run).endswith("docs/models.md says how to convert a file")
    (exported / "unet").mkdir(parents=True)
    (exported / "model_index.json").write_text("{}")
    (exported / "unet" / "config.json").write_text("{}")
    (exported / "unet" / "diffusion_pytorch_model.safetensors").write_text("")
    for path in (run, run / "checkpoints", run / "checkpoints" / "step=2"):
        assert said(path).endswith(f"it has no model_index.json; write model.pretrained={exported}")
    assert said(run, "ema.path").endswith(f"write ema.path={exported}")
    weights = exported / "unet" / "diffusion_pytorch_model.safetensors"
    assert said(weights).endswith(f"write model.pretrained={exported}")
    assert said(weights, "ema.path").endswith(f"write ema.path={exported / 'unet'}")
    (tmp_path / "v1-5.ckpt").write_text("")
    assert said(tmp_path / "v1-5.ckpt").endswith("docs/models.md says how to convert a file")
    assert said(tmp_path / "a" / "b" / "c").endswith("does not exist")
    assert said(exported / "unet").endswith(f"write model.pretrained={exported}")
    pipeline = shutil.copytree(exported, tmp_path / "pipeline")
    assert said(pipeline / "unet").endswith(f"write model.pretrained={pipeline}")
    assert "is no pipeline that diffusers saved: it has no model_index.json; docs" in said(images)
    assert "is no model that diffusers saved: it has no model_index.json or config.json; docs" in said(
        images, "ema.path"
    )
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    assert "is no pipeline that diffusers saved: it has no model_index.json; docs" in said(tmp_path / "unet")
    assert said(Path("models/a/b")) == "model.pretrained: 'models/a/b' does not exist"


def test_a_misspelt_option_hides_no_mistake_in_a_model(tmp_path: Path, images: Path) -> None:
    words = ["dataset.type=ImageFolder", f"dataset.params.path={images}", "dataset.params.resolution=30", "optim.x=1"]
    for model, said in (
        ("nobody/nothing", "'nobody/nothing' is no folder here, and it is not in the local cache"),
        (str(images), "is no pipeline that diffusers saved"),
    ):
        option, name, size = report(*words, f"model.pretrained={model}")
        assert size.startswith("dataset.params.resolution: 30 is not a multiple")
        assert option.startswith("optim: unknown option") and said in name and name.startswith("model.pretrained: ")


def test_a_size_is_compared_with_the_autoencoder_in_the_folder(tmp_path: Path, images: Path) -> None:
    """Also beside mistakes in the data: one report."""
    (tmp_path / "model" / "vae").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "model" / "vae" / "config.json").write_text('{"block_out_channels": [8, 8, 8]}')
    words = [f"model.pretrained={tmp_path / 'model'}", "dataset.params.resolution=30"]
    path, size = report(*words, f"dataset.params.path={tmp_path}/none")
    assert path.endswith("/none' does not exist")
    assert size.endswith("30 is not a multiple of the autoencoder's downscale factor 4; use 28 or 32")


def test_the_autoencoder_among_parts_in_folders_of_their_own_counts(tmp_path: Path) -> None:
    for part, settings in {"vae": '{"block_out_channels": [8, 8, 8]}', "unet": "{}"}.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(settings)
    sizes = ["dataset.params.path=s3://bucket/0.tar", "dataset.params.resolution=36"]
    parts = [
        "model.pretrained=null",
        f"model.unet.pretrained={tmp_path}",
        "model.unet.subfolder=unet",
        "model.noise_scheduler_training.target=DDPMScheduler",
        "model.noise_scheduler_training.params={beta_start: 0.1}",
        "model.text_encoder.target=CLIPTextModel",
        "model.text_encoder.params={hidden_size: 8}",
        "model.tokenizer.pretrained=someone/pipeline",
    ]
    assert report(*sizes, *parts, f"model.vae.pretrained={tmp_path}", "model.vae.subfolder=vae") == []
    mistaken = report(*sizes, *parts, "model.vae.pretrained=./none")
    assert [problem.split(":")[0] for problem in mistaken] == ["model.vae.pretrained", "dataset.params.resolution"]


KEY = "0123456789abcdef0123456789abcdef01234567"
ASKED = """
from sd_training.build.preflight import wandb_mode
from sd_training.config.schema import WandbConfig
print(wandb_mode(WandbConfig()))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    return tmp_path


def netrc(home: Path, key: str, machine: str = "api.wandb.ai") -> None:
    (home / ".netrc").write_text(f"machine {machine}\n  login user\n  password {key}\n")
    (home / ".netrc").chmod(0o600)


def refused(config: WandbConfig) -> str:
    """The sentence."""
    with pytest.raises(ConfigError) as error:
        wandb_mode(config)
    return str(error.value)


def test_a_login_in_netrc_is_found(home: Path) -> None:
    netrc(home, KEY)
    assert wandb_mode(WandbConfig()) == wandb_mode(WandbConfig(mode="online")) == ("online", None)


def test_what_wandb_itself_stores_is_found(home: Path) -> None:
    (home / "wandb").mkdir()
    (home / "wandb" / "settings").write_text(f"[default]\napi_key = {KEY}\n")
    # W&B reads this file once per process.
    asked = subprocess.run([sys.executable, "-c", ASKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout == "('online', None)\n" and KEY not in asked.stderr


@pytest.mark.parametrize("machine", [None, "example.com"])
def test_without_one_the_remedies_are_named(home: Path, machine: str | None) -> None:
    if machine is not None:
        netrc(home, KEY, machine)
    mode, reason = wandb_mode(WandbConfig())
    assert mode == "disabled" and reason is not None and reason.startswith("there is no key")
    assert reason.endswith("; set WANDB_API_KEY, run `wandb login`, or choose wandb.mode=offline")


def test_a_key_that_wandb_refuses_is_not_shown(home: Path) -> None:
    netrc(home, "tooshortasecret")
    mode, reason = wandb_mode(WandbConfig())
    assert mode == "disabled" and reason is not None and "wandb login" in reason and "tooshortasecret" not in reason


def test_a_key_of_the_options_or_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode(WandbConfig(api_key=KEY)) == ("online", None)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_mode(WandbConfig()) == ("online", None)


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_a_given_key_that_wandb_refuses_is_a_problem(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = refused(WandbConfig(api_key="tooshortasecret", mode=mode))
    assert problem.startswith("wandb.") and "must have 40+ characters, has 15; set WANDB_API_KEY" in problem
    monkeypatch.setenv("WANDB_API_KEY", "tooshortasecret")
    other = refused(WandbConfig(mode=mode))
    assert "WANDB_API_KEY invalid: API key must have 40+ characters" in other and "tooshort" not in problem + other
    assert wandb_mode(WandbConfig(api_key="tooshortasecret", mode="disabled")) == ("disabled", None)


def test_the_environment_chooses_the_mode_that_the_options_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode(WandbConfig())[0] == "disabled"
    for said, reason in (("offline", None), ("disabled", None)):
        monkeypatch.setenv("WANDB_MODE", said)
        assert wandb_mode(WandbConfig()) == (said, reason)
        assert refused(WandbConfig(mode="online")).startswith("wandb.mode: online, but there is no key")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    assert refused(WandbConfig()) == "WANDB_MODE: 'sometimes' is none of online, offline and disabled; unset it"
    assert refused(WandbConfig(api_key=KEY)).startswith("WANDB_MODE: 'sometimes'")
    monkeypatch.setenv("WANDB_MODE", "online")
    said = "WANDB_MODE=online in the environment, but there is no key; set WANDB_API_KEY"
    assert refused(WandbConfig()).startswith(said)
    assert wandb_mode(WandbConfig(mode="disabled")) == ("disabled", None)
