"""A configuration problem and the words it is told in: option, value, what is allowed.

What an unknown option or a wrong value most probably meant: names of other trainers, then the nearest name.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sd_training.config.fields import SECRETS, Option, accepts, groups, options, words_of

_CLOSE = 0.6
"""Similarity (difflib ratio) from which two names count as close."""
_LENGTH = "experiment.num_examples_to_see, which counts samples: "
ELSEWHERE: Mapping[str, str] = {
    # the same last name means something else in this group
    "sampling.steps": "sampling.num_inference_steps",
    "sampling.num_steps": "sampling.num_inference_steps",
    # optimizer and schedule
    "lr": "optimizer.params.learning_rate",
    "betas": "optimizer.params.beta1 and optimizer.params.beta2",
    "adam_beta1": "optimizer.params.beta1",
    "adam_beta2": "optimizer.params.beta2",
    "adam_epsilon": "optimizer.params.epsilon",
    "eps": "optimizer.params.epsilon",
    "adam_weight_decay": "optimizer.params.weight_decay",
    "optimizer_type": "optimizer.name",
    "use_8bit_adam": "optimizer.name=adamw_8bit",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "lr_scheduler_type": "lr_scheduler.scheduler",
    "lr_warmup_steps": "lr_scheduler.params.warmup_length",
    "warmup_steps": "lr_scheduler.params.warmup_length",
    "warmup": "lr_scheduler.params.warmup_length",
    # length, saves, names
    "epochs": _LENGTH + "epochs × samples of the data",
    "num_epochs": _LENGTH + "epochs × samples of the data",
    "num_train_epochs": _LENGTH + "epochs × samples of the data",
    "max_train_epochs": _LENGTH + "epochs × samples of the data",
    "steps": _LENGTH + "steps × images per optimizer step",
    "num_steps": _LENGTH + "steps × images per optimizer step",
    "max_steps": _LENGTH + "steps × images per optimizer step",
    "max_train_steps": _LENGTH + "steps × images per optimizer step",
    "num_examples": "experiment.num_examples_to_see",
    "seed": "experiment.seed",
    "output_dir": "experiment.log_dir",
    "logging_dir": "experiment.log_dir",
    "output_name": "experiment.name",
    "run_name": "experiment.name",
    "tracker_project_name": "experiment.project",
    "wandb_project": "experiment.project",
    "report_to": "wandb.mode",
    "checkpointing_steps": "experiment.save_every",
    "save_steps": "experiment.save_every",
    "save_every_n_steps": "experiment.save_every",
    "checkpoints_total_limit": "checkpoint.keep",
    "save_total_limit": "checkpoint.keep",
    "resume": "experiment.requeue: the same command resumes its run",
    "resume_from_checkpoint": "experiment.requeue: the same command resumes its run",
    "logging_steps": "logging.every",
    "log_every": "logging.every",
    # batch and machine
    "batch_size": "system.batch_size",
    "batch": "system.batch_size",
    "bs": "system.batch_size",
    "train_batch_size": "system.batch_size",
    "per_device_train_batch_size": "system.batch_size",
    "gradient_accumulation_steps": "system.gradient_accumulation",
    "grad_accum": "system.gradient_accumulation",
    "accumulate_grad_batches": "system.gradient_accumulation",
    "num_workers": "system.workers",
    "dataloader_num_workers": "system.workers",
    "max_data_loader_n_workers": "system.workers",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "num_processes": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "torch_compile": "trainer.compile",
    # model
    "pretrained_model_name_or_path": "model.pretrained",
    "pretrained_model": "model.pretrained",
    "model_path": "model.pretrained",
    "model_name": "model.pretrained",
    "checkpoint_path": "model.pretrained",
    "precision": "model.mixed_precision",
    "dtype": "model.mixed_precision",
    "bf16": "model.mixed_precision=bf16",
    "fp16": "model.mixed_precision=fp16",
    "ema_decay": "ema.decay",
    "enable_xformers_memory_efficient_attention": "model.xformers",
    # data
    "train_data_dir": "dataset.params.path",
    "dataset_name": "dataset.params.path",
    "data_dir": "dataset.params.path",
    "data_path": "dataset.params.path",
    "data": "dataset.params.path",
    "image_size": "dataset.params.resolution",
    "img_size": "dataset.params.resolution",
    "center_crop": "dataset.params.crop=center",
    "random_crop": "dataset.params.crop=random",
    "random_flip": "dataset.params.flip_prob=0.5",
    "flip_aug": "dataset.params.flip_prob=0.5",
    "enable_bucket": "dataset.params.buckets.mode=ladder",
    "min_bucket_reso": "dataset.params.buckets.min_side",
    "max_bucket_reso": "dataset.params.buckets.max_side",
    "bucket_reso_steps": "dataset.params.buckets.step",
    "bucket_no_upscale": "dataset.params.buckets.upscale=false",
    "shuffle_caption": "dataset.params.captions.shuffle_tags_prob",
    "keep_tokens": "dataset.params.captions.num_kept_tags",
    "caption_tag_dropout_rate": "dataset.params.captions.drop_tag_prob",
    # objective and conditioning
    "caption_dropout_rate": "conditioning.dropout_prob",
    "proportion_empty_prompts": "conditioning.dropout_prob",
    "cfg_dropout": "conditioning.dropout_prob",
    "min_snr_gamma": "objective.snr_gamma",
    "noise_offset": "objective.offset_noise",
    "ip_noise_gamma": "objective.input_perturbation",
    "v_parameterization": "objective.prediction_type=v_prediction",
    "zero_terminal_snr": "objective.rescale_betas_zero_snr",
    # pictures and validation
    "validation_prompt": "sampling.prompts",
    "validation_prompts": "sampling.prompts",
    "sample_prompts": "sampling.prompts",
    "sample_every_n_steps": "sampling.every",
    "validation_steps": "sampling.every for pictures, validation.every for a loss",
}
"""Name of an option in diffusers' scripts, kohya's sd-scripts or Lightning → the option here, perhaps with a value or a
remark after it."""
SPELLINGS: Mapping[str, Sequence[str]] = {
    "bfloat16": ("bf16",),
    "bf16mixed": ("bf16",),
    "float16": ("fp16",),
    "half": ("fp16",),
    "16": ("fp16",),
    "16mixed": ("fp16",),
    "fp32": ("no",),
    "float32": ("fp32", "no"),
    "float": ("fp32", "no"),
    "full": ("fp32", "no"),
    "32": ("fp32", "no"),
    "none": ("no",),
    "adam": ("adamw",),
    "adam8bit": ("adamw_8bit",),
    "schedulefree": ("schedule_free_adamw",),
    "v": ("v_prediction",),
    "vpred": ("v_prediction",),
    "velocity": ("v_prediction",),
    "eps": ("epsilon",),
    "noise": ("epsilon",),
    "flow": ("flow_prediction",),
    "rectifiedflow": ("flow_prediction",),
    "x0": ("sample",),
    "tar": ("WebDataset",),
    "wds": ("WebDataset",),
    "csv": ("Table",),
    "tsv": ("Table",),
    "jsonl": ("Table",),
    "folder": ("ImageFolder",),
    "images": ("ImageFolder",),
    "hf": ("HuggingFace",),
    "arrow": ("HuggingFace",),
}
"""Value as others spell it, in small letters and digits → the words of an option that may mean it."""


def suggest(key: str, known: Iterable[str]) -> str | None:
    """Nearest known dotted key: a sibling, then the same last name elsewhere, then any key.

    Args:
        key: the unknown dotted key.
        known: every dotted key of the schema, groups included.

    Returns:
        A full dotted key, or None when nothing is close.
    """
    keys = list(known)
    parent, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    namesakes = [k for k in keys if k.rpartition(".")[2] == name]
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=_CLOSE):
        return siblings[near[0]]
    if namesakes:
        return max(namesakes, key=lambda k: difflib.SequenceMatcher(None, key, k).ratio())
    return next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=_CLOSE)), None)


def elsewhere(key: str) -> str | None:
    """What an option of another trainer is called here, by its whole name or else its last one."""
    return ELSEWHERE.get(key) or ELSEWHERE.get(key.rpartition(".")[2].lstrip("-"))


def suggest_value(value: str, words: Sequence[str]) -> str | None:
    """The word of an option that a wrong text most probably meant.

    Args:
        value: what was given.
        words: what the option allows.
    """
    plain = {_plain(word): word for word in reversed(words)}
    if _plain(value) in plain:
        return plain[_plain(value)]
    for word in SPELLINGS.get(_plain(value), ()):
        if word in words:
            return word
    near = difflib.get_close_matches(_plain(value), plain, n=1, cutoff=_CLOSE)
    return plain[near[0]] if near else None


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


COMMAND_LINE = "command line"
"""Where an option was set, when no file set it."""
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Problem:
    """What is wrong with one option or source."""

    key: str
    """Dotted option, or the file or argument."""
    text: str
    is_option: bool = True
    """False when `key` is a file or an argument that was not understood."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def shown(value: Any, key: str = "") -> str:
    """A value as it would stand in YAML, shortened; values of secret options are not shown."""
    if key in SECRETS:
        return "(hidden)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def where(key: str, origins: dict[str, str]) -> str:
    """The file and line (or the command line) that set a key, in brackets; empty when unknown."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return f" ({origins[key]})" if key else ""


def unknown_key(key: str, origins: dict[str, str]) -> Problem:
    """A key that nothing reads, with what it is called here, or else the nearest known one."""
    near = elsewhere(key) or suggest(key, [*options(), *groups()])
    hint = f"; did you mean {near}?" if near else "; docs/config.md lists every option"
    return Problem(key, f"unknown option{where(key, origins)}{hint}")


def not_a_group(key: str, value: Any, origins: dict[str, str]) -> Problem:
    """A single value where options are expected."""
    members = [name for name in (*options(), *groups()) if name.rpartition(".")[0] == key]
    return Problem(key, f"is {shown(value)}{where(key, origins)}, but it is a group of options such as {members[0]}")


def required(option: Option, source: str = "") -> Problem:
    """An option without which there is no run."""
    taken = f"; it is taken from {source}, which has no value" if source else ""
    return Problem(option.key, f"is required{taken} ({option.allowed}): {option.doc}")


def wrong_values(error: ValidationError, values: dict[str, Any], origins: dict[str, str]) -> list[Problem]:
    """One problem for each wrong value, in plain words.

    Pydantic reports every branch of a union; the option's own description says it once.
    """
    found: dict[str, tuple[Option, Any]] = {}
    for item in error.errors(include_url=False):
        path, value = _locate(item["loc"], values)
        option = _option_of(path)
        if option is not None:
            found[path] = (option, value)
    deepest = [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return [_wrong_value(path, *found[path], origins) for path in deepest]


def _wrong_value(path: str, option: Option, value: Any, origins: dict[str, str]) -> Problem:
    quotable = isinstance(value, (int, float)) and accepts(option.annotation, str)
    hint = "; put it in quotes to make it a text" if quotable else ""
    if value is None and option.key == "dataset.params.filters":
        hint = f"; quote it on the command line ('{path}=>=512'), or the shell takes > as a redirection"
    if isinstance(value, (str, int)) and (near := suggest_value(str(value), words_of(option.annotation))):
        hint = f"; did you mean {near}?"
    allowed = option.allowed if path == option.key else f"{option.allowed} for {option.key}"
    return Problem(path, f"is {shown(value, option.key)}{where(path, origins)}; allowed: {allowed}{hint}")


def _locate(location: Iterable[int | str], values: Any) -> tuple[str, Any]:
    """The part of pydantic's location that exists in the values: it also names union branches."""
    path: list[str] = []
    for step in location:
        if isinstance(values, dict):
            step = next((key for key in values if str(key) == str(step)), step)
        if not (isinstance(values, dict) and step in values) and not _is_index(step, values):
            continue
        values = values[step]
        path.append(str(step))
    return ".".join(path), values


def _is_index(step: Any, values: Any) -> bool:
    return isinstance(values, list) and isinstance(step, int) and step < len(values)


def _option_of(path: str) -> Option | None:
    while path and path not in options():
        path = path.rpartition(".")[0]
    return options().get(path)


def is_below(key: str, groups_or_options: Iterable[str]) -> bool:
    """Whether a dotted key is one of these or stands inside one of them."""
    return any(key == other or key.startswith(f"{other}.") for other in groups_or_options)


def mentions(text: str, keys: Sequence[str]) -> bool:
    """Whether a sentence is about one of these options, or about a group above or below one of them."""
    words = {word.strip(".,:;()'\"`") for word in text.replace("=", " ").split()}
    about = text.split(maxsplit=1)[0].rstrip(":")
    return is_below(about, keys) or any(key in words or is_below(key, [about]) for key in keys)
