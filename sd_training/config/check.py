"""Rules between options. Everything here runs without torch, before anything is loaded."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from sd_training.config.changes import unknown_permissions
from sd_training.config.check_data import check_data, never_drawn
from sd_training.config.check_objective import objective_problems
from sd_training.config.check_parallel import parallel_problems, recomputation_problems
from sd_training.config.check_validation import unread_validation, validation_problems
from sd_training.config.check_watch import watch_problems
from sd_training.config.fields import options
from sd_training.config.local_paths import output_problem
from sd_training.config.model_schema import (
    FAMILY_PARTS,
    OPTIONAL_PARTS,
    ModelConfig,
    PartConfig,
    family_of_parts,
    is_set,
)
from sd_training.config.objective_presets import with_preset
from sd_training.config.optimizer_schema import optimizer_problems, warmup_length
from sd_training.config.schema import Config

PARTS = tuple(field.name for field in fields(ModelConfig) if isinstance(getattr(ModelConfig(), field.name), PartConfig))
_OBJECTIVE = tuple(key for key in options() if key.startswith("objective.") and key != "objective.kl_weight")

_PARTNERS = (
    ("dataset.params.batch_size", "system.batch_size"),
    ("dataset.params.workers", "system.workers"),
    ("dataset.params.num_examples_to_see", "experiment.num_examples_to_see"),
    ("system.dist_backend", "distributed.dist_backend"),
    ("system.dist_url", "distributed.dist_url"),
)
IGNORED = {
    "vae": (
        *_OBJECTIVE,
        *(key for key in options() if key.startswith(("conditioning.", "dataset.params.captions.", "sampling."))),
        "experiment.eval_caption_file",
        "experiment.eval_tar",
        "experiment.num_eval_images",
        "model.bf16_weights",
        "model.family",
        "model.gradient_checkpointing_every",
        "model.text_encoder_precision",
        "model.text_encoders",
        "model.train_text_encoder",
        "model.vae_precision",
        "model.vae_slicing",
        "model.vae_tiling",
        "model.xformers",
        "trainer.compile",
        "validation.num_levels",
    ),
    "unet": ("objective.kl_weight", "model.vae_scaling_factor"),
}
"""Options that training this part does not read."""

_MODEL_FILES = ("model_index.json", "config.json", "scheduler_config.json", "tokenizer_config.json")
_PICKLES = (".ckpt", ".pt", ".pth", ".bin")
_MIRROR_HINT = "; checkpoint.mirror copies the checkpoints of a run to an object store (docs/checkpoints.md)"
_RENDEZVOUS = re.compile(r"env://|tcp://[^\s/:]+:([0-9]{1,5})")


def check(config: Config) -> list[str]:
    """Everything that is wrong between options, one sentence each; each starts with the option's dotted name."""
    rules: tuple[Callable[[Config], Iterator[str]], ...] = (
        _partners,
        _length,
        _parts,
        _foreign,
        _objective,
        _optimizer,
        _local_paths,
        _dataset,
        _ignored,
        _trained_text,
        _bf16_weights,
        _tracks,
        unknown_permissions,
        recomputation_problems,
        _previews,
        validation_problems,
        _processes,
        parallel_problems,
        watch_problems,
    )
    return [problem for rule in rules for problem in rule(config)]


def warnings(config: Config) -> list[str]:
    """What is allowed but probably not meant, one sentence each."""
    rules = (_short_run, _never_drawn, _two_learning_rates, _unread, unread_validation)
    return [problem for rule in rules for problem in rule(config)]


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted option."""
    value: Any = config
    for step in key.split("."):
        value = getattr(value, step)
    return value


def _is_default(config: Config, key: str) -> bool:
    return bool(value_of(config, key) == options()[key].default)


def _partners(config: Config) -> Iterator[str]:
    """sd-training names some values twice; two different values leave open which is meant."""
    for copy, original in _PARTNERS:
        first, second = value_of(config, copy), value_of(config, original)
        if first is not None and first != second:
            yield f"{copy}: is {first}, but {original} is {second}; leave {copy} out or write ${{{original}}}"


def _least_batch(config: Config) -> int:
    """Samples per optimizer step of one process; how many there are is not known here."""
    return config.system.batch_size * config.system.gradient_accumulation


def _most_steps(config: Config) -> int:
    return config.experiment.num_examples_to_see // _least_batch(config)


def _length(config: Config) -> Iterator[str]:
    batch = _least_batch(config)
    if config.experiment.num_examples_to_see < batch:
        yield (
            f"experiment.num_examples_to_see: is {config.experiment.num_examples_to_see:,}, less than one optimizer "
            f"step (batch_size {config.system.batch_size} × accumulation {config.system.gradient_accumulation})"
        )


def _parts(config: Config) -> Iterator[str]:
    model = config.model
    if model.pretrained is not None:
        return
    if model.revision is not None:
        yield "model.revision: is only read together with model.pretrained"
    needed = _needed(model)
    if not any(is_set(getattr(model, part)) for part in PARTS):
        parts = ", ".join(f"model.{part}" for part in needed)
        yield f"model.pretrained: is required: a pipeline folder or hub id for all parts; or give each of {parts}"
        return
    for part in PARTS:
        yield from _part(part, getattr(model, part), part in needed)


def _part(name: str, part: PartConfig, needed: bool) -> Iterator[str]:
    if part.pretrained is None:
        if name.startswith("tokenizer") and (needed or is_set(part)):
            yield f"model.{name}.pretrained: is required: a folder or hub id; it cannot be made from params"
        elif needed and not is_set(part):
            yield f"model.{name}: is required: give `pretrained` (a folder or hub id), or `target` and `params`"
        yield from (
            f"model.{name}.{key}: is only read together with model.{name}.pretrained"
            for key in ("subfolder", "revision")
            if getattr(part, key) is not None
        )
    elif not name.startswith(("noise_scheduler", "tokenizer")) and part.target is not None:
        yield (
            f"model.{name}.target: stands beside model.{name}.pretrained; keep one: `pretrained` loads weights, "
            f"`target` and `params` start from random ones (model.{name}.target=null model.{name}.params=null)"
        )
    elif part.params and not name.startswith("noise_scheduler"):
        yield f"model.{name}.params: is not read beside model.{name}.pretrained; remove it (model.{name}.params=null)"


def _needed(model: ModelConfig) -> tuple[str, ...]:
    """`noise_scheduler_inference` may be left out: the exported sampler then follows the training scheduler."""
    if model.train == "vae":
        return ("vae",)
    return (*FAMILY_PARTS[family_of_parts(model)], "noise_scheduler_training")


def _foreign(config: Config) -> Iterator[str]:
    """Parts that the family has no place for."""
    model = config.model
    if model.pretrained is not None or model.train == "vae" or not any(is_set(getattr(model, part)) for part in PARTS):
        return
    family = family_of_parts(model)
    known = {*FAMILY_PARTS[family], *OPTIONAL_PARTS.get(family, ()), *PARTS[-2:]}
    for part in PARTS:
        if part not in known and is_set(getattr(model, part)):
            yield f"model.{part}: family {family} has no such part; it has {', '.join(FAMILY_PARTS[family])}"
    if model.text_encoders and family != "mmdit_rope":
        yield f"model.text_encoders: is only read with model.family=mmdit_rope, not {family}"


def _objective(config: Config) -> Iterator[str]:
    """Rules that need no noise scheduler; the rest waits until it is loaded."""
    if config.model.train == "unet":
        yield from objective_problems(with_preset(config.objective))


def _optimizer(config: Config) -> Iterator[str]:
    yield from optimizer_problems(config.optimizer, config.lr_scheduler, use_ema=config.model.use_ema)


def _local_paths(config: Config) -> Iterator[str]:
    for key, path in model_paths(config):
        yield from _model_path(config, key, path)
    mirror = config.checkpoint.mirror
    if mirror is not None and re.match(r"(s3|gs)://[^/]|file:///", mirror) is None:
        yield f"checkpoint.mirror: {mirror!r} is no URL of a folder; write s3://…, gs://… or file:///…"
    elif mirror is not None and "@" in mirror.partition("://")[2].partition("/")[0]:
        yield "checkpoint.mirror: has a user or a key before @; give keys by the environment (docs/security.md)"
    for key in ("experiment.log_dir", "dataset.params.remote.cache_dir", "dataset.params.index_dir"):
        folder = value_of(config, key)
        if folder is not None and (problem := output_problem(folder)):
            is_store = key == "experiment.log_dir" and "://" in folder
            yield f"{key}: {problem}{_MIRROR_HINT if is_store else ''}"
    captions = config.experiment.eval_caption_file
    if captions is not None and "://" in captions:
        yield f"experiment.eval_caption_file: {captions!r} is a URL; download the file and give its path"
    elif captions is not None and not Path(captions).is_file():
        yield f"experiment.eval_caption_file: {captions!r} does not exist or is no file"


def model_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Dotted option and value of every folder or hub id that is read."""
    model = config.model
    keys = ["model.pretrained", "ema.path"]
    if model.pretrained is None:
        keys += [f"model.{part}.pretrained" for part in PARTS]
        for number, entry in enumerate(model.text_encoders):
            named = {"pretrained": entry.pretrained, "tokenizer": entry.tokenizer}
            yield from ((f"model.text_encoders.{number}.{name}", path) for name, path in named.items() if path)
    yield from ((key, path) for key in keys if (path := value_of(config, key)) is not None)


def _model_path(config: Config, key: str, path: str) -> Iterator[str]:
    """A hub id cannot start like a path, so a path that does not exist is a mistake."""
    if not os.path.exists(path):
        if path.startswith(("/", "./", "../", "~")):
            yield f"{key}: {path!r} does not exist{' (~ is not expanded)' if path.startswith('~') else ''}"
    elif os.path.isfile(path):
        yield f"{key}: {path!r} is a file; {_instead_of_file(key, Path(path))}"
    else:
        yield from model_folder_problems(config, key, path)


def model_folder_problems(config: Config, key: str, path: str) -> Iterator[str]:
    """A folder that exists and holds no model, or one part where a whole pipeline is needed."""
    is_pipeline = key == "model.pretrained" and config.model.train == "unet"
    folder, names = Path(path), ("model_index.json",) if is_pipeline else _MODEL_FILES
    if any((folder / name).is_file() for name in names):
        return
    run = list(_instead_of_run(key, folder))
    if run:
        yield from run
    elif not is_pipeline:
        if not any(True for name in _MODEL_FILES for _ in folder.glob(f"*/{name}")):
            yield f"{key}: {path!r} holds no model: it has no config.json, and no folder in it has one"
    elif (folder.absolute().parent / "model_index.json").is_file():
        yield f"{key}: {path!r} is one part of a pipeline; write {key}={folder.absolute().parent}"
    elif any((folder / name).is_file() for name in _MODEL_FILES):
        part = folder.absolute().name
        option = f"model.{part if part in PARTS else 'unet'}.pretrained"
        yield f"{key}: {path!r} is one part, not a pipeline; give each part by its own option, such as {option}"
    else:
        yield f"{key}: {path!r} is no pipeline folder: it has no model_index.json"


def _instead_of_file(key: str, path: Path) -> str:
    """A file inside a model folder stands for the folder; a checkpoint of one file has to be converted."""
    wanted = "model_index.json" if key == "model.pretrained" else "config.json"
    if folder := next((folder for folder in path.parents[:2] if (folder / wanted).is_file()), None):
        return f"write its folder: {key}={folder}"
    if path.suffix not in (".safetensors", *_PICKLES):
        return "a folder that diffusers saved, or a hub id, is needed"
    first = ""
    if path.suffix in _PICKLES:
        source, path = path, path.with_suffix(".safetensors")
        first = f"python scripts/convert_checkpoint.py {source} {path}, then "
    load = f"StableDiffusionPipeline.from_single_file('{path}').save_pretrained('models/{path.stem}')"
    return (
        f"a folder that diffusers saved is needed. Convert it: {first}in Python {load} (StableDiffusionXLPipeline for "
        f"SDXL; from diffusers, needs the hub once), and write {key}=models/{path.stem}"
    )


def _instead_of_run(key: str, path: Path) -> Iterator[str]:
    """A run folder, or a folder of its checkpoints, stands for the pipeline that the run exported."""
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / "current_pipeline" / "model_index.json").is_file():
            yield f"{key}: {str(path)!r} is the folder of a run; write {key}={folder / 'current_pipeline'}"
            return
    if (path / "checkpoints").is_dir() and (path / "config.yaml").is_file():
        yield f"{key}: {str(path)!r} is the folder of a run that has not exported a pipeline; let it save first"


def _dataset(config: Config) -> Iterator[str]:
    yield from check_data(config.dataset)


def _ignored(config: Config) -> Iterator[str]:
    for key in IGNORED[config.model.train]:
        if not _is_default(config, key):
            value, train = value_of(config, key), config.model.train
            yield f"{key}: is {value}, but nothing reads it with model.train={train}; remove it"
    for part in PARTS if config.model.train == "vae" else ():
        keys = (f"model.{part}.{field.name}" for field in fields(PartConfig))
        if part != "vae" and not all(_is_default(config, key) for key in keys):
            yield f"model.{part}: is given, but nothing reads it with model.train=vae; remove it"


def _trained_text(config: Config) -> Iterator[str]:
    if config.model.train_text_encoder and config.ema.path is not None:
        yield "ema.path: holds one network, but model.train_text_encoder trains several; remove one of them"


def _bf16_weights(config: Config) -> Iterator[str]:
    has_rounding = config.optimizer.stochastic_rounding
    if config.model.train == "vae" and config.model.bf16_weights:
        return  # refused with all that is not read then
    if config.model.bf16_weights and not (config.model.mixed_precision == "bf16" and has_rounding):
        yield "model.bf16_weights: true needs model.mixed_precision=bf16 and optimizer.stochastic_rounding=true"
    elif has_rounding and not config.model.bf16_weights:
        yield "optimizer.stochastic_rounding: is only read with model.bf16_weights=true; fp32 weights need no rounding"


def _tracks(config: Config) -> Iterator[str]:
    ema = config.ema
    if ema.tracks and not config.model.use_ema:
        yield f"ema.tracks: {ema.tracks} needs model.use_ema=true"
    if len(set(ema.tracks)) < len(ema.tracks):
        yield f"ema.tracks: {ema.tracks} names a width twice"
    if ema.tracks and ema.snapshot_every % ema.update_every:
        yield f"ema.snapshot_every: {ema.snapshot_every} is no multiple of ema.update_every={ema.update_every}"


def _previews(config: Config) -> Iterator[str]:
    if config.model.train == "unet" and config.sampling.every > 0 and not config.sampling.prompts:
        yield f"sampling.prompts: is empty, but sampling.every={config.sampling.every} asks for previews; give one"


def _processes(config: Config) -> Iterator[str]:
    trainer, distributed = config.trainer, config.distributed
    devices = trainer.devices if isinstance(trainer.devices, int) else 1
    if distributed.strategy == "single" and max(devices, trainer.num_nodes or 1) > 1:
        yield (
            "distributed.strategy: `single` is one process, but "
            f"trainer.devices={trainer.devices} and trainer.num_nodes={trainer.num_nodes} ask for more; use ddp or auto"
        )
    url = _RENDEZVOUS.fullmatch(distributed.dist_url)
    if not url or (url[1] and not 0 < int(url[1]) < 65536):
        yield f"distributed.dist_url: is {distributed.dist_url!r}; allowed: env:// or tcp://host:port"


def _never_drawn(config: Config) -> Iterator[str]:
    yield from never_drawn(config.dataset, _most_steps(config))


def _short_run(config: Config) -> Iterator[str]:
    params, steps = config.lr_scheduler.params, _most_steps(config)
    key = "warmup_length" if params.warmup_images is None else "warmup_images"
    warmup = warmup_length(params, _least_batch(config))
    if warmup > steps:
        yield f"lr_scheduler.params.{key}: {warmup:,} steps of warm-up in a run of at most {steps:,} steps"


def _two_learning_rates(config: Config) -> Iterator[str]:
    schedule, optimizer = config.lr_scheduler.params.learning_rate, config.optimizer.params.learning_rate
    if schedule is not None and schedule != optimizer:
        wins = f"lr_scheduler.params.learning_rate={schedule} wins"
        yield f"optimizer.params.learning_rate: {optimizer} is not used; {wins}"


def _unread(config: Config) -> Iterator[str]:
    if not config.model.use_ema:
        for key in options():
            if key.startswith("ema.") and not _is_default(config, key):
                yield f"{key}: is not used, because model.use_ema is false"
    if config.model.gradient_checkpointing_every > 1 and not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing_every: is not used, because model.gradient_checkpointing is false"
    for key in ("experiment.eval_tar", "experiment.num_eval_images"):
        if config.experiment.eval_caption_file is None and not _is_default(config, key):
            yield f"{key}: is not used, because experiment.eval_caption_file is not set"
    if config.sampling.prompts and not config.sampling.every:  # model files set the other options of previews
        yield "sampling.prompts: is not used, because sampling.every is 0"
    if config.model.pretrained is not None and config.model.text_encoders:
        yield "model.text_encoders: is not used, because model.pretrained is set, which has its own"
    for part in PARTS if config.model.pretrained is not None else ():
        own: PartConfig = getattr(config.model, part)
        # A noise scheduler's params, and the class of the inference sampler, still override what was stored.
        overrides = part.startswith("noise_scheduler") and own.pretrained is None
        if is_set(own) and not overrides:
            yield f"model.{part}: its own settings are not used, because model.pretrained is set"
