"""What is said about options: the pages of `--help`, and what an unknown option or a wrong value probably meant."""

import difflib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from sd_training.config.fields import Option, groups, is_below, options
from sd_training.errors import ConfigError

_WIDTH = 118
"""Of a line [characters]."""


def help_text(usage: str, topics: Iterable[str]) -> str:
    """The page that `--help` prints: every option in one line, or the options of each topic in full.

    Args:
        usage: first lines of the page without a topic.
        topics: names of groups or options.

    Raises:
        ConfigError: a topic is neither a group nor an option; names the nearest one.
    """
    if pages := [_topic(topic.partition("=")[0]) for topic in topics]:
        return "\n\n".join(pages)
    lines = [f"{_head(option):44} {' '.join(option.doc.split())}" for option in options().values()]
    lines = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 2]} …" for line in lines]
    title = "\nOptions (option=default; * has to be given); `--help GROUP` and `--help OPTION` say more:"
    return "\n".join([usage, title, *lines, "\nAll of this on one page: docs/config.md."])


def _topic(name: str) -> str:
    lines = [f"{name}: {groups()[name].description}"] if name in groups() else []
    for option in (option for key, option in options().items() if is_below(key, [name])):
        meaning = f"({option.allowed}) {' '.join(option.doc.split())}"
        lines += [_head(option), textwrap.indent(textwrap.fill(meaning, _WIDTH - 6), " " * 6)]
    if not lines:
        near = suggest_option(name)
        hint = f"did you mean {near}?" if near else f"groups are {', '.join(g for g in groups() if '.' not in g)}"
        raise ConfigError(f"--help {name}: is neither a group of options nor an option; {hint}")
    return "\n".join(lines)


def _head(option: Option) -> str:
    default = json.dumps(option.default, ensure_ascii=False)
    return f"  *{option.key}=" if option.required else f"  {option.key}={default}"


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
    namesakes = [known for known in options() if known.rpartition(".")[2] == key.rpartition(".")[2]]
    return here or suggest(key, namesakes, cutoff=0) or suggest(key, [*options(), *groups()])


def suggest(key: str, known: Iterable[str], cutoff: float = _CLOSE) -> str | None:
    """The nearest known name, at least as similar as `cutoff`."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=cutoff)), None)


def suggest_value(value: str, option: Option) -> str | None:
    """The word, among those that an option allows, that a wrong text most probably meant."""
    plain = {_plain(word): word for word in reversed(option.words)}
    meant = [plain.get(_plain(value)), *(word for word in SPELLINGS.get(_plain(value), ()) if word in option.words)]
    return next(filter(None, meant), plain.get(suggest(_plain(value), plain) or ""))


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())
