"""Configurations of other trainers become files that `train.py` takes, and every key of theirs is accounted for.

`other_trainers/` has keys and values of public configurations, with their source.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.convert_config import CONVERSIONS, TRAINERS, Converter, gather, main, problems, report, written
from sd_training.build.dry_run import describe
from sd_training.build.plan import make_plan
from sd_training.config.fields import is_below, options
from sd_training.config.load import load_config
from tests import makers
from tests.family_makers import save_pipeline
from tests.integration.training import losses, train
from tests.unit.test_coming_from import keys

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = {"text_encoder_lr1", "text_encoder_lr2"}
"""Keys of the guides that the trainers themselves do not know."""
MANY = 10**6
"""Training images, so that lengths in epochs are known."""


def examples(trainer: str) -> list[Any]:
    """Configurations, of which some change the one with the number `like`."""
    entries = yaml.safe_load((Path(__file__).parent / "other_trainers" / f"{trainer}.yaml").read_text(encoding="utf-8"))
    for entry in (entry for entry in entries if "like" in entry):
        entry["files"] = entries[entry["like"]]["files"] | entry["files"]
    return entries


EVERY = [(trainer, number) for trainer in TRAINERS for number in range(len(examples(trainer)))]


def toml_value(value: Any) -> str:
    inline = [f"{key} = {toml_value(entry)}" for key, entry in value.items()] if isinstance(value, dict) else []
    is_list = isinstance(value, list)
    return (
        f"{{{', '.join(inline)}}}"
        if inline
        else f"[{', '.join(map(toml_value, value))}]"
        if is_list
        else json.dumps(value)
    )


def text_of(name: str, values: Any) -> str:
    """A file as the trainer reads it."""
    if name.endswith(".json"):
        return json.dumps(values)
    if name.endswith(".toml"):
        return "\n".join(f"{key} = {toml_value(value)}" for key, value in values.items())
    if name.endswith(".sh"):
        flags = (f"--{key}" if value is True else f"--{key}={shlex.quote(str(value))}" for key, value in values.items())
        return "#!/bin/sh\naccelerate launch --num_processes 1 train.py \\\n  " + " \\\n  ".join(flags) + "\n"
    return yaml.safe_dump(values)


def convert(trainer: str, files: dict[str, Any], words: list[str], folder: Path, **given: int) -> Converter:
    for name, values in files.items():
        (folder / name).write_text(text_of(name, values), encoding="utf-8")
    run = Converter(trainer, **given)
    run.convert(*gather([folder / name for name in files], words))
    return run


def paths_in(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys above and of all values that are no mappings."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from paths_in(value, (*path, str(key).removeprefix("--")))
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for entry in tree:
            yield from paths_in(entry, path)
    else:
        yield path


def entries_of(run: Converter) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, entry in run.keys.items():
        for one in entry if isinstance(entry, list) else [entry]:
            yield key, {"to": one} if isinstance(one, str) else one


@pytest.mark.parametrize("trainer", TRAINERS)
def test_tables_and_pages_have_the_same_keys(trainer: str) -> None:
    run = Converter(trainer)
    page = (ROOT / "docs" / f"coming_from_{trainer}.md").read_text(encoding="utf-8")
    assert set(keys(page)) == set(run.page)
    named = [*run.by_hand, *run.whole, *run.defaults]
    assert [key for key in named if key not in run.page] == []
    assert [key for key in run.keys if key not in run.page and key.rpartition(".")[0] not in run.page] == []
    beside = yaml.safe_load((ROOT / "scripts" / "convert" / f"{trainer}.yaml").read_text(encoding="utf-8")).get(
        "beside", []
    )
    assert set(beside) <= set(run.page)
    handled = {*run.keys, *run.by_hand, *run.whole, *beside, *(key.rpartition(".")[0] for key in run.keys)}
    for key, cell in run.page.items():
        starts = cell.startswith(("not ", "not,", "always", "without ", "the default", "`--"))
        named = [name for name in re.findall(r"`([a-z_]+\.[a-z_.0-9]+)[=`]", cell) if name in options()]
        assert starts or not named or key in handled, f"{key}: the page names {named}"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_tables_name_options_and_words_that_exist(trainer: str) -> None:
    run = Converter(trainer)
    for key, entry in entries_of(run):
        assert entry.keys() <= {"to", "by", "set", "values", "when"}, key
        to = entry.get("to", [])
        to = [to] if isinstance(to, str) else to
        results = list(entry.get("values", {}).values())
        fixed = [entry.get("set", {}), *(result for result in results if isinstance(result, dict))]
        assert all(is_below(name, options()) for name in [*to, *(name for one in fixed for name in one)]), key
        for one in fixed:
            assert all(options()[name].accepts(value) for name, value in one.items()), key
        words = [word for word in results if word is not None and not isinstance(word, dict) and word != "="]
        assert all(str(word).startswith("not, ") or options()[to[0]].accepts(word) for word in words), key
        assert all(
            other.rpartition(".")[2] in {k.rpartition(".")[2] for k in (*run.page, *run.keys)}
            for other in entry.get("when", {})
        )


def test_every_conversion_is_used() -> None:
    used = {entry.get("by") for trainer in TRAINERS for _, entry in entries_of(Converter(trainer))}
    assert used - {None} == set(CONVERSIONS)


@pytest.mark.parametrize(("trainer", "number"), EVERY)
def test_public_configurations_load(trainer: str, number: int, tmp_path: Path) -> None:
    example = examples(trainer)[number]
    run = convert(trainer, example["files"], example.get("words", []), tmp_path, devices=2, images=MANY)
    rows = report(run)
    assert {one.name for one in run.rows if not one.key} <= UNKNOWN
    told = {one.name.rpartition(".")[2] for one in run.rows}
    assert [path for path in paths_in(list(example["files"].values())) if told.isdisjoint(path)] == []
    text = written(run, trainer)
    assert [problem.partition(":")[0] for problem in problems(run, text)] == example.get("problems", [])
    assert all(line.startswith("# ") for line in text.splitlines()[: len(rows) + 1])
    values = yaml.safe_load(text)
    assert values["experiment"]["num_examples_to_see"] != "???" or trainer == "lunnova"  # without max_epochs: for ever


COMMAND = {"pretrained_model_name_or_path": "m", "train_data_dir": "d", "output_dir": "o", "output_name": "n"}
MAXDIFFUSION = {"run_name": "n", "output_dir": "o", "pretrained_model_name_or_path": "sd", "dataset_name": "a/b"}


@pytest.mark.parametrize(
    ("trainer", "given", "expected"),
    [
        # lengths are steps × global batch; 3 × 2 × 4 devices
        (
            "kohya",
            {"train_batch_size": 3, "gradient_accumulation_steps": 2, "max_train_steps": 100},
            {"experiment.num_examples_to_see": 2400},
        ),
        ("kohya", {"max_train_steps": 100, "max_train_epochs": 3}, {"experiment.num_examples_to_see": 3000}),
        (
            "maxdiffusion",
            {"per_device_batch_size": 2, "max_train_steps": 800},
            {"experiment.num_examples_to_see": 6400},
        ),
        # theirs where the file is silent
        (
            "kohya",
            {},
            {
                "experiment.num_examples_to_see": 6400,
                "optimizer.max_grad_norm": 1.0,
                "optimizer.params.beta2": 0.999,
                "lr_scheduler.params.warmup_length": 0,
                "model.mixed_precision": "no",
                "conditioning.dropout_prob": 0,
            },
        ),
        ("kohya", {"network_module": "networks.lora"}, {"model.lora.alpha": 1, "model.lora.rank": 4}),
        ("kohya", {"network_module": "networks.lora"}, {"model.lora.text_encoder": True}),
        ("kohya", {"network_module": "networks.lora_flux"}, {"model.lora.text_encoder": False}),
        ("kohya", {"network_dim": 8}, {"model.lora.alpha": 1, "model.lora.rank": 8}),
        ("kohya", {"optimizer_type": "Lion"}, {"optimizer.params.beta2": 0.99, "optimizer.params.weight_decay": 0}),
        ("simpletuner", {"model_family": "sdxl"}, {"optimizer.params.beta2": 0.999, "optimizer.max_grad_norm": None}),
        (
            "simpletuner",
            {"model_family": "flux"},
            {
                "objective.shift.mode": "static",
                "objective.shift.value": 3,
                "objective.timestep_density.name": "logit_normal",
            },
        ),
        ("simpletuner", {"model_family": "flux", "flow_schedule_auto_shift": True}, {"objective.shift.value": None}),
        ("simpletuner", {"max_grad_norm": 0.5, "grad_clip_method": "norm"}, {"optimizer.max_grad_norm": 0.5}),
        # shares, ratios, units
        ("kohya", {"lr_warmup_steps": 0.1, "max_train_steps": 500}, {"lr_scheduler.params.warmup_length": 50}),
        (
            "maxdiffusion",
            {"warmup_steps_fraction": 0.1, "max_train_steps": 500},
            {"lr_scheduler.params.warmup_length": 50},
        ),
        (
            "kohya",
            {"min_timestep": 100, "max_timestep": 900},
            {"objective.timestep_density.low": 0.1, "objective.timestep_density.high": 0.9},
        ),
        (
            "simpletuner",
            {"lr_scheduler": "polynomial", "learning_rate": "1e-4", "lr_end": "1e-5"},
            {"lr_scheduler.params.end_factor": 0.1, "optimizer.params.learning_rate": 1e-4},
        ),
        ("kohya", {"ddp_timeout": 60}, {"watch.collective_timeout_s": 3600}),
        # off is off, and words of theirs
        ("kohya", {"max_grad_norm": 0}, {"optimizer.max_grad_norm": None}),
        (
            "kohya",
            {"noise_offset": 0.05, "min_snr_gamma": 5},
            {"objective.offset_noise": 0.05, "objective.snr_gamma": 5},
        ),
        ("maxdiffusion", {"snr_gamma": -1.0}, {"objective.snr_gamma": None}),
        ("maxdiffusion", {"activations_dtype": "float32"}, {"model.mixed_precision": "no"}),
        (
            "maxdiffusion",
            {"max_grad_norm": 1.0, "opt_enable_grad_global_norm_clipping": False},
            {"optimizer.max_grad_norm": None},
        ),
        ("kohya", {"mixed_precision": "fp16"}, {"model.mixed_precision": "fp16"}),
        ("kohya", {"lr_scheduler": "cosine_with_restarts"}, {"lr_scheduler.scheduler": "cosine"}),
        (
            "kohya",
            {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 3},
            {"lr_scheduler.scheduler": None},
        ),
        # what theirs ignore with another choice, and ours refuses
        ("kohya", {"loss_type": "l2", "huber_c": 0.1}, {"objective.loss.huber_delta": None}),
        # several options of one key
        ("kohya", {"resolution": "512,768", "enable_bucket": True}, {"dataset.params.resolution": 576}),
        ("kohya", {"optimizer_args": ["betas=0.9,0.95", "weight_decay=0.1"]}, {"optimizer.params.beta2": 0.95}),
        ("kohya", {"text_encoder_lr": [1e-5, 2e-5]}, {"optimizer.rates_by_part.text_encoder_2": 2e-5}),
        ("kohya", {"text_encoder_lr": 1e-5}, {"optimizer.rates_by_part.text_encoder_2": None}),
        (
            "kohya",
            {"text_encoder_lr": 1e-5, "pretrained_model_name_or_path": "sdxl"},
            {"optimizer.rates_by_part.text_encoder": 1e-5, "optimizer.rates_by_part.text_encoder_2": 1e-5},
        ),
        (
            "kohya",
            {"text_encoder_lr": 1e-5, "network_train_unet_only": True},
            {"optimizer.rates_by_part.text_encoder": None},
        ),
        (
            "maxdiffusion",
            {"output_dir": "gs://b/runs"},
            {"checkpoint.mirror": "gs://b/runs", "experiment.log_dir": None},
        ),
        (
            "maxdiffusion",
            {"pretrained_model_name_or_path": "sdxl", "checkpoint_every": 80},
            {"experiment.save_every": 20},
        ),
        ("maxdiffusion", {"checkpoint_every": 80}, {"experiment.save_every": 80}),
        (
            "maxdiffusion",  # its FLUX has the prediction type of another model in its file, and does not read it
            {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", "time_shift": True, "max_shift": 1.2}
            | {
                "diffusion_scheduler_config": {
                    "_class_name": "FlaxEulerDiscreteScheduler",
                    "prediction_type": "epsilon",
                }
            },
            {"objective.prediction_type": None, "objective.shift.mode": "tokens", "objective.shift.max_shift": 1.2}
            | {"model.noise_scheduler_inference.target": "EulerDiscreteScheduler"},
        ),
        (
            "maxdiffusion",  # a batch of DreamBooth has pairs, which saves count once
            {"instance_data_dir": "i", "class_data_dir": "c", "class_prompt": "dog", "max_train_steps": 10}
            | {"checkpoint_every": 80},
            {"system.batch_size": 2, "experiment.num_examples_to_see": 80, "experiment.save_every": 20},
        ),
        ("simpletuner", {"resolution": 1.0, "resolution_type": "area"}, {"dataset.params.resolution": 1024}),
        ("kohya", {"output_name": "007"}, {"experiment.name": "007"}),
        (
            "maxdiffusion",
            {"scale_lr": True, "max_train_samples": 500},
            {"optimizer.scale_lr": "linear", "dataset.params.max_samples": 500},
        ),
        ("maxdiffusion", {"scale_lr": False, "max_train_samples": -1}, {"dataset.params.max_samples": None}),
        ("simpletuner", {"lr_scale": True, "lr_scale_sqrt": True}, {"optimizer.scale_lr": "sqrt"}),
        ("simpletuner", {"lr_scale": True}, {"optimizer.scale_lr": "linear"}),
        ("kohya", {"max_train_steps": "many", "max_grad_norm": [1]}, {"experiment.num_examples_to_see": None}),
    ],
)
def test_conversions(trainer: str, given: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    base = {"kohya": COMMAND, "maxdiffusion": MAXDIFFUSION, "simpletuner": {"model_type": "lora"}}[trainer]
    name = {"kohya": "c.toml", "maxdiffusion": "c.yml", "simpletuner": "c.json"}[trainer]
    run = convert(trainer, {name: base | given}, [], tmp_path, devices=4, images=1000)
    assert {key: run.options.get(key) for key in expected} == expected


def test_lunnova_rates_are_multiplied(tmp_path: Path) -> None:
    """By accumulation, devices and batch, as their launcher does."""
    values = {
        "model": {"base_learning_rate": "5e-6"},
        "data": {"params": {"batch_size": 3, "train": {"params": {"metadata_params": {"min_score": 9}}}}},
        "lightning": {"trainer": {"accumulate_grad_batches": 2, "gpus": "0,1,", "max_epochs": 2}},
    }
    run = convert("lunnova", {"c.yaml": values}, [], tmp_path, images=1000)
    assert run.options["optimizer.params.learning_rate"] == pytest.approx(5e-6 * 3 * 2 * 2)
    assert run.options["experiment.num_examples_to_see"] == 2000
    assert run.options["dataset.type"] == "TagFolder"
    assert run.options["dataset.params.tags.min_score"] == 9


def test_validation_of_lunnova_does_not_change_training(tmp_path: Path) -> None:
    run = convert("lunnova", examples("lunnova")[2]["files"], [], tmp_path)
    assert "dataset.params.tags.consider_every_nth" not in run.options
    assert run.options["dataset.params.flip_prob"] == 0.333


def test_data_sets_are_mixed_and_class_images_are_a_prior(tmp_path: Path) -> None:
    sets = [
        {"image_dir": "a", "class_tokens": "x dog", "num_repeats": 2},
        {"image_dir": "b", "caption_prefix": "art"},
        {"image_dir": "c", "class_tokens": "dog", "is_reg": True},
    ]
    general = {"shuffle_caption": True, "enable_bucket": True}  # class images are squares
    data = {"general": general, "datasets": [{"batch_size": 4, "resolution": 64, "subsets": sets}]}
    command = {
        "pretrained_model_name_or_path": "m",
        "dataset_config": "data.toml",
        "output_dir": "o",
        "output_name": "n",
    }
    (tmp_path / "data.toml").write_text(text_of("data.toml", data))
    run = convert("kohya", {"train.sh": command}, [], tmp_path)  # names the other file
    assert run.options["system.batch_size"] == 4
    assert run.options["dataset.params.path"] == "a"
    captions = {"shuffle_tags_prob": 1, "tag_separator": ", "}
    mixed = [{"type": "ImageFolder", "params": {"path": "b", "captions": captions | {"prefix": "art "}}}]
    assert run.options["dataset.mix"] == mixed
    assert run.options["dataset.prior.path"] == "c"
    assert run.options["dataset.prior.prompt"] == "dog"
    assert any("num_repeats=2 → BY HAND" in row for row in report(run))


def test_a_script_with_variables(tmp_path: Path) -> None:
    script = 'base="m/x" # mine\nexport name=n\naccelerate launch \\\n'
    script += "  train_network.py --pretrained_model_name_or_path=$base \\\n"
    script += '  --output_name "${name}_1" --sdpa --optimizer_args "a=1" b=2 # end\n'
    (tmp_path / "run.sh").write_text(script)
    tree, _ = gather([tmp_path / "run.sh"])
    expected = {
        "pretrained_model_name_or_path": "m/x",
        "output_name": "n_1",
        "sdpa": True,
        "optimizer_args": ["a=1", "b=2"],
    }
    assert tree == expected


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown key is named and is status 1, unless told; secrets and line breaks stay out of the file."""
    (tmp_path / "c.toml").write_text(
        text_of("c.toml", COMMAND | {"no_such": 1, "wandb_api_key": "s3cret", "log_prefix": "a\u2028x: y"})
    )
    with pytest.raises(SystemExit) as end:
        main(["--from", "kohya", str(tmp_path / "c.toml")])
    printed = capsys.readouterr()
    assert end.value.code == 1
    assert "error: no_such: is no key that is known of kohya" in printed.err
    assert "# no_such=1 → UNKNOWN" in printed.out
    assert "s3cret" not in printed.out
    assert "\u2028" not in printed.out
    out = tmp_path / "mine.yaml"
    main(["--from", "kohya", "--ignore-unknown", str(tmp_path / "c.toml"), f"out={out}", "devices=2"])
    assert load_config([f"config={out}"]).experiment.num_examples_to_see == 3200
    assert f"written: {out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--from", "kohya", "no_such.toml"], "no_such.toml: cannot be read"),
        (["--from", "kohya", "a=1"], "a=1: is not known"),
        (["--from", "kohya", "devices=0"], "devices: 0 is no whole number"),
        (["--from", "kohya", "/dev/null", "out=/dev/null"], "out: /dev/null cannot be written: File exists"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        main(argv)


@pytest.mark.parametrize(("trainer", "number"), [("maxdiffusion", 6), ("lunnova", 2), ("kohya", 8), ("simpletuner", 1)])
def test_two_steps_of_a_converted_run(trainer: str, number: int, tmp_path: Path) -> None:
    """On a tiny pipeline and a folder of pictures, with all else as it was converted."""
    example = examples(trainer)[number]
    run = convert(trainer, example["files"], example.get("words", []), tmp_path, images=MANY)
    file, folder = tmp_path / "mine.yaml", tmp_path / "data"
    file.write_text(written(run, trainer), encoding="utf-8")
    tags = run.options.get("dataset.type") == "TagFolder"
    for number in range(4):
        image = folder / ("images" if tags else ".") / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        makers.picture(number).save(image)
        image.with_suffix(".txt").write_text("a red picture")
        if tags:
            record = {"path": f"images/{number}.png", "score": 500, "tags": ["red", "picture"], "aspect_ratio": 1.25}
            (folder / "metadata" / "0").mkdir(parents=True, exist_ok=True)
            (folder / "metadata" / "0" / f"{number}.json").write_text(json.dumps(record))
    changes = {
        "experiment.log_dir": tmp_path / "runs",
        "experiment.name": "mine",
        "experiment.num_examples_to_see": 2 * run.global_batch,
        "model.pretrained": save_pipeline("stable_diffusion", tmp_path / "tiny"),
        "model.mixed_precision": "no",
        "model.attention": "auto",
        "optimizer.name": "adamw",
        "checkpoint.mirror": "null",
        "model.xformers": False,
        "dataset.type": "TagFolder" if tags else "ImageFolder",
        "dataset.params.path": folder,
        "dataset.params.resolution": 16,
        "dataset.params.resampled": True,
        "dataset.params.filters": "null",
        "system.workers": 0,
        "logging.every": 1,
        "logging.progress_bar": False,
        "ema.update_every": 1,
    }
    if run.options.get("dataset.params.buckets.mode") == "ladder":
        changes |= {
            f"dataset.params.buckets.{key}": size for key, size in (("step", 4), ("min_side", 8), ("max_side", 32))
        }
    argv = [f"config={file}", *(f"{key}={value}" for key, value in changes.items())]
    argv += [f"dataset.params.{key}=null" for key in ("image_column", "caption_column")]
    assert "2 steps" in describe(make_plan(load_config(argv)))
    train(argv)
    assert len(losses(tmp_path / "runs" / "mine")) == 2
