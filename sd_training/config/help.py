"""What is said about options: the pages of `--help`, and what an unknown option or a wrong value probably meant."""

import difflib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from sd_training.config.fields import Option, groups, options, words_of
from sd_training.errors import ConfigError

_USUAL = (
    *("experiment.log_dir", "experiment.name", "experiment.num_examples_to_see", "experiment.save_every"),
    *("dataset.type", "dataset.params.path", "dataset.params.resolution"),
    *("system.batch_size", "system.gradient_accumulation", "system.workers"),
    *("model.pretrained", "model.train", "model.mixed_precision", "model.gradient_checkpointing", "model.use_ema"),
    *("distributed.strategy", "objective.preset", "optimizer.name", "optimizer.params.learning_rate"),
    *("lr_scheduler.scheduler", "validation.path", "sampling.every", "logging.every"),
    *("trainer.accelerator", "trainer.devices"),
)
"""Options of the README's table, and what every run needs."""
_WIDTH = 118


def help_text(usage: str, topics: Iterable[str]) -> str:
    """The page that `--help` prints.

    Args:
        usage: first lines of the page without a topic.
        topics: names of groups or options; none for the overview.

    Raises:
        ConfigError: a topic is neither a group nor an option; names the nearest one.
    """
    pages = [_topic(topic.partition("=")[0]) for topic in topics]
    return "\n\n".join(pages) if pages else _overview(usage)


def _overview(usage: str) -> str:
    held = (f"  {key:32} {_first_sentence(field.description or '')}" for key, field in groups().items())
    return "\n".join(
        [
            usage,
            "\nOptions that most runs set (option=default; * has to be given):",
            *(_entry(options()[key], is_short=True) for key in _USUAL),
            "\nGroups; `--help GROUP` lists all options of one, `--help OPTION` describes one:",
            *held,
            "\nAll options on one page: docs/config.md. How to start: README.md.",
        ]
    )


def _topic(name: str) -> str:
    if name in options():
        return _entry(options()[name], is_short=False)
    below = [option for key, option in options().items() if key.startswith(f"{name}.")]
    if name not in groups() or not below:
        near = suggest_option(name)
        hint = f"; did you mean {near}?" if near else f"; groups are {', '.join(g for g in groups() if '.' not in g)}"
        raise ConfigError(f"--help {name}: is neither a group of options nor an option{hint}")
    return "\n".join([f"{name}: {groups()[name].description}", *(_entry(option, is_short=False) for option in below)])


def _entry(option: Option, *, is_short: bool) -> str:
    """An option with its default, and below it what it means: in one line, or in full with the allowed values."""
    default = "" if option.required else json.dumps(option.default, ensure_ascii=False)
    head = f"  {'*' if option.required else ''}{option.key}={default}"
    if is_short:
        return f"{head:44} {textwrap.shorten(_first_sentence(option.doc), _WIDTH - 45, placeholder=' …')}"
    meaning = f"({option.allowed}) {' '.join(option.doc.split())}"
    return f"{head}\n{textwrap.fill(meaning, _WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 6)}"


def _first_sentence(text: str) -> str:
    """Up to the first full stop that a space follows."""
    text = " ".join(text.split())
    return text.partition(". ")[0].rstrip(".")


_CLOSE = 0.6
"""Similarity (difflib ratio) from which two names count as close."""
_LENGTH = "experiment.num_examples_to_see, which counts samples: "
_NAMES: Mapping[str, str] = {
    "optimizer.params.learning_rate": "lr",
    "optimizer.params.beta1 and optimizer.params.beta2": "betas",
    "optimizer.params.weight_decay": "adam_weight_decay",
    "optimizer.max_grad_norm": "clip_grad_norm gradient_clip_val",
    "lr_scheduler.params.warmup_length": "lr_warmup_steps warmup_steps warmup",
    _LENGTH + "epochs × samples of the data": "epochs num_epochs num_train_epochs max_train_epochs",
    _LENGTH + "steps × images per optimizer step": "steps num_steps max_steps max_train_steps",
    "experiment.seed": "seed",
    "experiment.log_dir": "output_dir logging_dir",
    "wandb.mode": "report_to",
    "experiment.save_every": "checkpointing_steps save_steps save_every_n_steps",
    "experiment.requeue: the same command resumes its run": "resume resume_from_checkpoint",
    "system.batch_size": "batch_size batch bs train_batch_size per_device_train_batch_size",
    "system.gradient_accumulation": "gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "system.workers": "num_workers dataloader_num_workers",
    "trainer.devices": "gpus num_gpus num_processes",
    "model.pretrained": "pretrained_model_name_or_path pretrained_model model_path",
    "model.use_ema and the group ema": "model.ema",
    "dataset.params.path": "train_data_dir dataset_name data_dir data_path data",
    "dataset.params.resolution": "image_size",
    "dataset.params.buckets.mode=ladder": "enable_bucket",
    "conditioning.dropout_prob": "caption_dropout_rate proportion_empty_prompts",
    "objective.snr_gamma": "min_snr_gamma",
    "objective.offset_noise": "noise_offset",
    "sampling.num_inference_steps": "sampling.steps",
    "sampling.prompts": "validation_prompt validation_prompts",
}
ELSEWHERE: Mapping[str, str] = {name: here for here, names in _NAMES.items() for name in names.split()}
"""Name of an option in diffusers' scripts, kohya's sd-scripts or Lightning → the option here, perhaps with a value or a
remark after it."""
_WORDS: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16 16 16mixed",
    "fp32 no": "fp32 float32 32",
    "adamw": "adam",
    "denoiser": "unet",
    "v_prediction": "v",
    "WebDataset": "tar",
    "Table": "csv jsonl",
}
SPELLINGS: Mapping[str, Sequence[str]] = {
    name: here.split() for here, names in _WORDS.items() for name in names.split()
}
"""Value as others spell it, in small letters and digits → the words of an option that may mean it."""


def suggest_option(key: str) -> str | None:
    """The option or group that an unknown dotted key probably means: by its name in another trainer, or the nearest."""
    here = ELSEWHERE.get(key) or ELSEWHERE.get(key.rpartition(".")[2].lstrip("-"))
    return here or suggest(key, [*options(), *groups()])


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


def suggest_value(value: str, option: Option) -> str | None:
    """The word, among those that an option allows, that a wrong text most probably meant."""
    words = words_of(option.annotation)
    plain = {_plain(word): word for word in reversed(words)}
    meant = [plain.get(_plain(value)), *(word for word in SPELLINGS.get(_plain(value), ()) if word in words)]
    near = difflib.get_close_matches(_plain(value), plain, n=1, cutoff=_CLOSE)
    return next(filter(None, meant), plain[near[0]] if near else None)


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())
