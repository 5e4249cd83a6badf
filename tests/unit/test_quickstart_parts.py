"""The quickstart's parts: its data, its text side, its score, its plan. The whole of it runs as `make quickstart`."""

import io
import json
import subprocess
import sys
import tarfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer

from scripts import make_digits, quickstart, score_digits
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from sd_training.evaluation.measure import ROWS, read_rows
from sd_training.evaluation.report import PAGE
from sd_training.export.pipeline import EXPORTED_STEP
from tests.unit.evaluation.test_report import write_run

# --- data and text side


def test_every_digit_is_met_in_every_wording_with_its_own_label() -> None:
    samples = list(make_digits.digit_samples(make_digits.real_digits()))
    assert len(samples) == 1797
    assert {sample["txt"] for sample in samples} == set(make_digits.all_captions())
    for sample in samples:
        metadata = json.loads(sample["json"])
        assert make_digits.DIGIT_WORDS[metadata["label"]] in sample["txt"]
        assert 0 < metadata["ink"] < 1


def test_a_picture_keeps_the_ink_of_its_digit() -> None:
    ink = make_digits.real_digits(1).ink[0]
    picture = make_digits.digit_picture(ink)
    assert (picture.size, picture.mode) == ((16, 16), "L")
    assert np.asarray(picture).mean() / 255 == pytest.approx(ink.mean(), abs=0.01)
    assert np.corrcoef(score_digits.features(score_digits.grey([picture]))[0], ink.ravel())[0, 1] > 0.95


def test_shards_hold_picture_caption_and_metadata(tmp_path: Path) -> None:
    samples = make_digits.digit_samples(make_digits.real_digits(40))
    assert make_digits.write_shards(tmp_path, samples, per_shard=16) == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000.tar", "001.tar", "002.tar"]
    with tarfile.open(tmp_path / "000.tar") as shard:
        assert {Path(name).suffix for name in shard.getnames()} == {".png", ".txt", ".json"}
        member = shard.extractfile("digit_0003.png")
        assert member is not None
        assert Image.open(io.BytesIO(member.read())).size == (16, 16)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    make_digits.write_text_parts(folder)
    return folder


def test_the_tokenizer_knows_each_word_of_the_captions_as_one_token(text_dir: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(text_dir / "tokenizer")
    assert tokenizer.model_max_length == make_digits.TOKENS
    rows = set()
    for caption in make_digits.all_captions():
        ids = tokenizer(caption).input_ids
        assert len(ids) == len(caption.split()) + 2 <= make_digits.TOKENS
        rows.add(tuple(ids))
    assert len(rows) == len(make_digits.all_captions())
    assert tokenizer.unk_token_id not in tokenizer("purple cats, 7!").input_ids[1:-1]


def test_words_outweigh_positions_in_the_text_states(text_dir: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(text_dir / "tokenizer")
    encoder = CLIPTextModel.from_pretrained(text_dir / "text_encoder")
    prompts = [make_digits.WORDINGS[0].format(word) for word in make_digits.DIGIT_WORDS]
    ids = tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        states = encoder(ids).last_hidden_state
    assert states.shape == (10, make_digits.TOKENS, make_digits.TEXT_WIDTH)
    # Token 3 is the digit's word. With CLIP's own starting values its states differ by 0.3 of their size.
    assert states[:, 3].std(dim=0).mean() > 0.6


def test_the_text_encoder_depends_on_its_seed_alone(text_dir: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(text_dir / "tokenizer")
    before = torch.random.get_rng_state()
    first, again, other = (make_digits.make_text_encoder(tokenizer, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [dict(encoder.named_parameters()) for encoder in (first, again, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][name]) for name, value in weights[0].items())


# --- score


def test_mean_distance_is_the_mean_over_pairs() -> None:
    pictures = np.zeros((3, 16, 16), dtype=np.float32)
    pictures[1, 0, 0], pictures[2, 0, :4] = 1.0, 1.0
    assert score_digits.mean_distance(pictures) == pytest.approx((1 + 2 + 3**0.5) / 3)
    assert score_digits.mean_distance(pictures[:1]) == 0


def test_variety_is_one_for_the_real_digits_and_zero_for_one_repeated_picture() -> None:
    real, labels = score_digits.real_pictures()
    assert score_digits.variety(real, labels, real, labels) == pytest.approx([1.0] * 10)
    asked = np.arange(30) % 10
    stuck = np.stack([real[np.flatnonzero(labels == digit)[0]] for digit in asked])
    assert score_digits.variety(stuck, asked, real, labels) == pytest.approx([0.0] * 10, abs=1e-3)


def test_the_classifier_reads_real_digits_and_not_noise() -> None:
    real, labels = score_digits.real_pictures()
    classifier, accuracy = score_digits.train_classifier(real, labels)
    assert accuracy > 0.97
    noise = np.random.default_rng(0).random((200, 16, 16), dtype=np.float32)
    asked = np.arange(200) % 10
    assert (classifier.predict(score_digits.features(noise)) == asked).mean() < 0.3


def test_the_fid_of_real_digits_is_far_below_that_of_noise() -> None:
    real, labels = score_digits.real_pictures()
    floor = score_digits.real_digits_fid(real, labels, 500)
    noise = np.random.default_rng(0).random((500, 16, 16), dtype=np.float32)
    assert floor[1] < floor[0] < floor[2] < 20 < 30 * floor[0] < score_digits.digits_fid(noise, real)[1]


def _score(recognised: int, variety: float) -> score_digits.Score:
    return score_digits.Score(2.0, 500, recognised, [recognised // 10] * 10, [variety] * 10, (9.0, 8.0, 10.0), 1.0)


@pytest.mark.parametrize(
    ("guided", "unguided", "variety", "missed"),
    [(480, 450, 0.8, []), (479, 450, 0.8, ["digits"]), (480, 449, 0.7, ["without", "variety"])],
)
def test_each_missed_bound_is_one_sentence(guided: int, unguided: int, variety: float, missed: list[str]) -> None:
    bounds = Namespace(min_guided=480, min_unguided=450, min_variety=0.8)
    sentences = score_digits.shortfalls(_score(guided, variety), _score(unguided, variety), bounds)
    assert [sentence.split()[0].rstrip(":") for sentence in sentences] == missed


def test_scoring_draws_reads_and_says_what_is_missed(
    pipeline_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--pipeline", str(pipeline_dir), "--out", str(tmp_path), "--per-digit", "2", "--steps", "1"]
    score_digits.main(argv)
    output = capsys.readouterr().out
    assert "digits recognised: " in output and "FID of as many real digits against as many others: " in output
    report = json.loads((tmp_path / "score.json").read_text())
    assert report["guided"]["drawn"] == report["unguided"]["drawn"] == 20
    assert Image.open(tmp_path / "digits.png").size == (2 * 16 * 4, 10 * 16 * 4)
    with pytest.raises(SystemExit) as exit_:
        score_digits.main([*argv, "--min-guided", "21"])
    assert exit_.value.code == 1
    assert "is less than the 21 it should be" in capsys.readouterr().err


# --- plan


@pytest.mark.parametrize(
    ("gpus", "accelerator", "processes"), [(0, "cpu", 2), (1, "cuda", 1), (3, "cuda", 2), (8, "cuda", 8)]
)
def test_the_global_batch_is_the_same_on_every_machine(gpus: int, accelerator: str, processes: int) -> None:
    machine = quickstart.choose_machine(gpus)
    assert (machine.accelerator, machine.processes) == (accelerator, processes)
    assert machine.processes * machine.micro_batch == quickstart.GLOBAL_BATCH


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with the shipped configs, where both quickstart folders have the parts that configs name."""
    (tmp_path / "configs").symlink_to(quickstart.ROOT / "configs")
    for folder in (tmp_path / quickstart.DEFAULT_FOLDER, tmp_path / "elsewhere"):
        for part in ("text/tokenizer", "text/text_encoder", "runs/autoencoder/current_pipeline", "data"):
            (folder / part).mkdir(parents=True)
            (folder / part / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _config_words(command: list[str]) -> list[str]:
    return command[command.index("train") + 1 :]


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_training_commands_are_valid_and_stay_in_the_folder(
    is_quick: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project / "elsewhere"
    machine = quickstart.Machine("cpu", 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (quickstart.vae_command, quickstart.unet_command):
        config = load_config(_config_words(make(folder, machine, is_quick)))
        plan = make_plan(config)
        assert plan.batch.global_batch == quickstart.GLOBAL_BATCH
        assert plan.batch.num_steps == 4 if is_quick else plan.batch.num_steps >= 100
        assert plan.run_dir.is_relative_to(folder)
        assert Path(str(config.dataset.params.path)).is_relative_to(folder)


def test_the_configs_alone_mean_the_default_folder(project: Path) -> None:
    machine, folder = quickstart.Machine("cpu", 2), quickstart.DEFAULT_FOLDER
    for make in (quickstart.vae_command, quickstart.unet_command):
        bare, moved = make(folder, machine, False), make(Path("elsewhere"), machine, False)
        stated = {word.split("=", 1)[0]: word.split("=", 1)[1] for word in moved[len(bare) :]}
        plain = load_config(_config_words(bare))
        for option, value in stated.items():
            found: object = plain
            for name in option.split("."):
                found = getattr(found, name)
            assert found == value.replace("elsewhere", str(folder)), option


def test_previews_ask_as_the_score_does(project: Path) -> None:
    config = load_config(["config=configs/quickstart_unet.yaml"])
    assert config.sampling.prompts == [make_digits.WORDINGS[0].format(word) for word in make_digits.DIGIT_WORDS]
    assert config.sampling.guidance_scale == quickstart.GUIDANCE_SCALE
    assert config.model.unet.params["cross_attention_dim"] == make_digits.TEXT_WIDTH


def test_variants_are_valid_and_begin_with_the_quickstarts_model(project: Path) -> None:
    folder, loaded = quickstart.pipeline_dir(quickstart.DEFAULT_FOLDER), {}
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (quickstart.DEFAULT_FOLDER / "cross").mkdir()
    for name in ("lora", "dreambooth"):
        config = loaded[name] = load_config([f"config=configs/quickstart_{name}.yaml"])
        assert config.model.pretrained == str(folder) and config.sampling.guidance_scale == quickstart.GUIDANCE_SCALE
    captions, label = loaded["lora"].dataset.params.captions, next(iter(loaded["lora"].dataset.params.captions.fields))
    assert label in json.loads(next(make_digits.digit_samples(make_digits.real_digits(1)))["json"])
    assert loaded["lora"].sampling.prompts == [f"{captions.prefix}{digit}" for digit in range(10)]


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="did not write"):
        quickstart.prepare_folder(tmp_path, is_resumed=False, is_quick=False)
    assert (tmp_path / "thesis.txt").exists()


def test_a_new_start_removes_the_old_one_and_resume_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    quickstart.prepare_folder(folder, is_resumed=False, is_quick=True)
    (folder / "runs").mkdir()
    quickstart.prepare_folder(folder, is_resumed=True, is_quick=True)
    assert (folder / "runs").exists()
    with pytest.raises(ConfigError, match="with --quick"):
        quickstart.prepare_folder(folder, is_resumed=True, is_quick=False)
    quickstart.prepare_folder(folder, is_resumed=False, is_quick=False)
    assert [path.name for path in folder.iterdir()] == [quickstart.MARKER]


def test_the_score_is_on_the_page_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "digits")
    (run / EXPORTED_STEP).write_text("30\n")
    own = {"drawn": 500, "recognised": 473, "fid": [11.5, 8.25, 15.75]}
    score = {"guided": own | {"recognised": 500, "fid": [17.25, 13.5, 22.5]}, "unguided": own}
    (tmp_path / "score.json").write_text(json.dumps(score))
    quickstart.show_score(tmp_path)
    text = (run / PAGE).read_text()
    for said in (
        "digits_fid",
        "17.25 [13.5, 22.5] after step 30",
        "11.5 [8.25, 15.75] after step 30",
        "0.946 after step",
    ):
        assert said in text
    assert len(read_rows(run / ROWS)) == 4
    machine = quickstart.choose_machine(0)
    assert str(run / PAGE) in quickstart.summary(tmp_path, machine)


def test_a_failed_step_ends_the_quickstart_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        quickstart.run_step("a step", [sys.executable, "-c", "raise SystemExit(3)"], {})
    assert exit_.value.code == 3
    assert "a step: the command above ended with status 3" in capsys.readouterr().err


def test_the_process_of_the_proof_has_no_network() -> None:
    attempt = "\nimport socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
    result = subprocess.run(
        [sys.executable, "-c", quickstart.NO_NETWORK + attempt], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "this process has no network" in result.stderr


def test_the_proof_draws_with_a_pipeline_folder_alone(pipeline_dir: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", quickstart.OFFLINE_PROOF, str(pipeline_dir)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "drew (16, 16)" in result.stdout
