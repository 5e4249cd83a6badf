"""The schema as a flat table of dotted options: for messages, the reference, what reads which one, and what an unknown
option or a wrong value probably meant."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sd_training.config.schema import Config, drop_final_norm
from sd_training.config.value_types import OptionGroup, ReadWith
from sd_training.log import get_logger

log = get_logger(__name__)

SECRETS = frozenset({"wandb.api_key"})
"""Options whose values are never printed or written."""
OLD_NAMES: Mapping[str, str] = {
    "dataset.params.batch_size": "system.batch_size",
    "dataset.params.class_mapping": "dataset.params.idx_to_prompt",
    "dataset.params.num_examples_to_see": "experiment.num_examples_to_see",
    "dataset.params.workers": "system.workers",
    "ema.tracks": "ema.sigma_rels",
    "model.ema.path": "ema.path",
    "model.max_grad_norm": "optimizer.max_grad_norm",
    "system.dist_backend": "distributed.dist_backend",
}
"""Name of an option in sd-training, or in an earlier version → its name here."""
OLD_WORDS: Mapping[str, Mapping[Any, str]] = {
    "dataset.type": {"ParquetDataset": "Parquet"},
    "model.train": {"unet": "denoiser"},
    "trainer.compile": {False: "off", True: "blocks"},  # an unquoted `off` is false in YAML, too
}
"""Option → word of sd-training, or of an earlier version → the word here."""
RETIRED: Mapping[str, Any] = {
    "checkpoint.best_by": "validation_loss",
    "dataset.params.icc_to_srgb": True,
    "dataset.params.max_bad_in_row": 50,
    "dataset.params.max_bad_shard_fraction": 1.0,
    "dataset.params.remote.mode": "cache",
    "model.gradient_checkpointing_every": 1,
    "objective.timestep_density.bias": "none",
    "objective.timestep_density.bias_portion": 0.25,
    "objective.timestep_density.bias_range": [0.0, 1.0],
    "system.save_signals": ["SIGUSR2"],
    "system.stop_signals": ["SIGTERM", "SIGUSR1"],
    **dict.fromkeys(("checkpoint.rehearse", "dataset.params.buckets.constant_area", "experiment.eval_tar"), False),
    **dict.fromkeys(("dataset.params.captions.template", "distributed.deepspeed_config"), None),
    **dict.fromkeys(("distributed.dist_url", "system.dist_url"), "env://"),
    **dict.fromkeys((f"objective.timestep_density.{name}" for name in ("alpha", "beta", "bias_multiplier")), 1.0),
    "objective.input_perturbation_steps": None,
    "objective.offset_noise_by_level": False,
}
"""Name of an option that is gone → its value that is the only behaviour now; `config.yaml` of older runs names it."""
_FORMER_DEFAULTS = {"checkpoint.best_by": "training_loss", "dataset.params.icc_to_srgb": False}
_FORMER_DEFAULTS |= {"dataset.params.max_bad_shard_fraction": 0.2}
"""Of these, where it was another value, which every `config.yaml` of an older run has."""

_SHOWN_CHARACTERS = 80
_ONE = {"string": "a text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_BOUNDS |= {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
"""In a JSON schema; a bound after a validator has pydantic's own name."""


@dataclass(frozen=True)
class Option:
    """One leaf of the schema."""

    key: str
    """Dotted name."""
    required: bool
    default: Any
    doc: str
    annotation: Any
    """Type, with its bounds inside `Annotated`."""
    readers: Mapping[str, ReadWith]
    """Dotted name of another option → with which of its values this one is read."""

    @cached_property
    def _type(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.annotation)

    @cached_property
    def allowed(self) -> str:
        """Type and bounds in plain words."""
        return _describe(self._type.json_schema())

    @cached_property
    def words(self) -> list[str]:
        """The words that it allows; none where it takes no fixed words."""
        schema = self._type.json_schema()
        return [str(word) for member in schema.get("anyOf", [schema]) for word in _words(member)]

    def accepts(self, value: Any) -> bool:
        """Whether a value is right as it stands, without conversion."""
        try:
            self._type.validate_python(value, strict=True)
        except ValidationError:
            return False
        return True


def group_of(field: FieldInfo) -> type[OptionGroup] | None:
    """The class of a field that holds options of its own."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, OptionGroup) else None


def walk(
    group: type[OptionGroup] = Config,
    around: tuple[tuple[str, type[OptionGroup]], ...] = (),
    above: Mapping[str, ReadWith] | None = None,
    prefix: str = "",
) -> Iterator[tuple[str, FieldInfo, dict[str, ReadWith]]]:
    """Every group and every option in the order of the schema: dotted name, field, and what decides whether it is read.

    Of two rules about the same deciding option, the one of the inner group or field holds.

    Args:
        around: prefix and class of the groups that this one is in, the innermost first.
        above: what decides about this group.
    """
    around = ((prefix, group), *around)
    for name, field in group.model_fields.items():
        readers = dict(above or {})
        for rule in (item for item in field.metadata if isinstance(item, ReadWith)):
            holders = (at for at, other in around if rule.option.partition(".")[0] in other.model_fields)
            readers |= {f"{holder}{rule.option}": rule for holder in [*holders][:1]}
        yield prefix + name, field, readers
        if inner := group_of(field):
            yield from walk(inner, around, readers, f"{prefix}{name}.")


@cache
def options(group: type[OptionGroup] = Config) -> dict[str, Option]:
    """Every option of a group by its dotted name inside the group."""
    return {
        key: Option(
            key,
            field.is_required(),
            None if field.is_required() else field.default,
            field.description or "",
            Annotated[(field.annotation, Field(json_schema_extra=field.json_schema_extra), *field.metadata)],
            readers,
        )
        for key, field, readers in walk(group)
        if not group_of(field)
    }


@cache
def groups() -> dict[str, FieldInfo]:
    """Every group of options by its dotted name."""
    return {key: field for key, field, _ in walk() if group_of(field)}


def option_of(key: str) -> Option:
    """The option that a place inside its value, such as `dataset.mix.0.weight`, belongs to."""
    while key and key not in options():
        key = key.rpartition(".")[0]
    return options()[key]


def rename_old(values: Any, origins: dict[str, str]) -> dict[str, str]:
    """Puts values under the names of `OLD_NAMES` where today's names are, in place, and likewise words; and removes
    options that are gone.

    Args:
        values: plain containers of a configuration.
        origins: where the options come from that were given; those must not contradict an old name.

    Returns:
        Old name → what is wrong with its value.
    """
    problems = {}
    for old, new in OLD_NAMES.items():
        (source, old_name), (group, name) = place_of(values, old), place_of(values, new)
        value = source.pop(old_name, None)
        if value is None:
            continue
        if not group:  # with nothing but comments below it in a file
            group = values.setdefault(new.partition(".")[0], {})
        if any(is_below(place, [new]) for place in origins) and group.get(name, value) != value:
            problems[old] = f"is {shown(value)}, but {new} is {shown(group[name])}; remove {old}, a second name of it"
            continue
        group[name] = value
        if old in origins:
            origins.setdefault(new, origins[old])
    for entry in _entries(values, "dataset.mix"):
        captions, name = place_of(entry, "params.captions.template")
        if captions.get(name) is None:  # as in `RETIRED`
            captions.pop(name, None)
    for entry in _entries(values, "model.text_encoders"):
        drop_final_norm(entry)
    model, ema = place_of(values, "model.ema")
    if not model.get(ema):  # a group of sd-training, which is empty now
        model.pop(ema, None)
    for key, only in RETIRED.items():
        group, name = place_of(values, key)
        if (value := group.pop(name, None)) in (None, only):
            continue
        if value == _FORMER_DEFAULTS.get(key, only):
            log.warning(f"{key}: {shown(value)} is not read any more; there is only {shown(only)} now")
        else:
            problems[key] = f"is {shown(value)}, but this option is gone: there is only {shown(only)} now; remove it"
    replace_old_words(values)
    return problems


def replace_old_words(values: Any) -> None:
    """Puts today's words in the place of those of `OLD_WORDS`."""
    for key, words in OLD_WORDS.items():
        group, name = place_of(values, key)
        if isinstance(group.get(name), (str, bool)):
            group[name] = words.get(group[name], group[name])


def _entries(values: Any, key: str) -> list[dict[str, Any]]:
    """The mappings in a list of the options."""
    group, name = place_of(values, key)
    found = group.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def place_of(values: Any, key: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds a dotted option, an empty one where there is none, and the option's name in it."""
    *above, name = key.split(".")
    for step in above:
        values = values.get(step) if isinstance(values, dict) else None
    return (values if isinstance(values, dict) else {}), name


def value_of(group: Any, key: str) -> Any:
    """The value of a dotted option of a group."""
    return reduce(getattr, key.split("."), group)


def shown(value: Any, key: str = "") -> str:
    """A value as it would stand in YAML, shortened; values of secret options are not shown."""
    if key in SECRETS:
        return "(hidden)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def is_below(key: str, groups_or_options: Iterable[str]) -> bool:
    """Whether a dotted key is one of these or stands inside one of them."""
    return any(key == other or key.startswith(f"{other}.") for other in groups_or_options)


def either(words: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _describe(schema: Mapping[str, Any], *, many: bool = False) -> str:
    """The JSON schema of a type in plain words: "a whole number of at least 1"."""
    if "allowed" in schema:
        return str(schema["allowed"])
    if "anyOf" in schema:
        # Short words first: "a text or a mapping of … to … or null" reads unambiguously.
        named = [_describe(member, many=many) for member in schema["anyOf"]]
        return " or ".join(sorted(named, key=lambda word: (word == "null", word.startswith("a mapping"))))
    if words := _words(schema):
        return either([str(word) for word in words])
    match schema.get("type"):
        case None:
            return "groups of options" if "$ref" in schema else "any values" if many else "any value"
        case "array":
            return f"{'lists' if many else 'a list'} of {_describe(schema['items'], many=True)}"
        case "object":
            values = schema["additionalProperties"]
            return f"a mapping of texts to {_describe({} if values is True else values, many=True)}"
        case kind:
            named_kind = _ONE.get(kind, kind)
            bounds = [f"{word} {schema[name]:g}" for name, word in _BOUNDS.items() if name in schema]
            between = " of " if bounds and bounds[0].startswith("at") else " " * bool(bounds)
            return (f"{named_kind[2:]}s" if many else named_kind) + between + " and ".join(bounds)


def _words(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


# --- What a name or a value probably meant ---

_CLOSE = 0.6
"""Similarity (difflib ratio) from which two names count as close."""
_NAMES: Mapping[str, str] = {
    "dataset.params.captions.prefix and dataset.params.captions.suffix": "template",
    "dataset.params.idx_to_prompt": "class_mapping",
    "optimizer.params.learning_rate": "lr",
    "optimizer.scale_lr=linear": "scale_lr",
    "optimizer.params.beta1 and optimizer.params.beta2": "betas",
    "optimizer.params.weight_decay": "adam_weight_decay",
    "optimizer.max_grad_norm": "clip_grad_norm gradient_clip_val",
    "lr_scheduler.params.warmup_length": "lr_warmup_steps warmup_steps warmup",
    "experiment.num_epochs": "epochs num_train_epochs max_train_epochs",
    "experiment.num_steps": "steps max_steps max_train_steps",
    "dataset.params.max_samples": "max_train_samples",
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
