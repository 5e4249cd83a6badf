"""Rules between options, one sentence each. They run before torch is imported and before anything is loaded.

That an option belongs to a choice which was not made is no rule of its own: it follows from `ReadWith` in the schema.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sd_training.config import schema
from sd_training.config.changes import EXPORTED
from sd_training.config.data_schema import DatasetConfig, MixEntry, read_class_prompts
from sd_training.config.fields import either, is_below, options, shown, value_of
from sd_training.config.filters import parse_filters
from sd_training.config.schema import Config, ModelConfig, ObjectiveConfig, PartConfig
from sd_training.config.value_types import is_url, output_path, output_problem

SHARDED_OPTIMIZERS = ("adamw", "lion")
"""Optimizers that treat every number alone, so that a shard of a tensor is updated as the whole would be."""
PARTS = tuple(name for name, field in ModelConfig.model_fields.items() if isinstance(field.default, PartConfig))
_MODEL_FILES = ("model_index.json", "config.json", "scheduler_config.json", "tokenizer_config.json")
_ONLY = {"sigma_sqrt": "flow_prediction", "cosmap": "flow_prediction", "edm": "edm"}
"""Weighting → the prediction type it is defined for."""


def check(config: Config) -> list[str]:
    """Everything that is wrong between options, one sentence each; each starts with the option's dotted name."""
    if config.model.train == "denoiser":
        config = config.replace(objective=schema.with_preset(config.objective))
    found = list(unread(config))
    for key in ("dataset.mix", "model.text_encoders"):
        for number, entry in enumerate(value_of(config, key)):
            found += unread(entry, f"{key}.{number}.")
    for rules in (_length, _parts, _optimizer, _paths, _data, _model, _saves, _logging, _sharding):
        found += rules(config)
    if config.model.train == "denoiser":
        found += objective_problems(config.objective)  # and once more when a noise scheduler says what is null here
    return list(dict.fromkeys(found))


def warnings(config: Config) -> list[str]:
    """What is allowed but probably not meant, one sentence each."""
    return [*unread(config, is_refused=False), *_unused_parts(config.model), *_schedule(config), *_mixed(config)]


def _mixed(config: Config) -> Iterator[str]:
    for number, entry in enumerate(config.dataset.mix if config.dataset.params.filters else ()):
        if not entry.params.filters:
            yield f"dataset.mix.{number}.params.filters: has none; those of dataset.params are not used for it"


def unread(group: Any, prefix: str = "", *, is_refused: bool = True) -> Iterator[str]:
    """Options that were given although the choice that was made does not read them.

    Args:
        group: a `Config`, or a group of it.
        prefix: dotted name of the group with a final dot, for the sentences.
        is_refused: which kind: options of other choices, or options of features that are off.
    """
    table = options(type(group))  # type: ignore[arg-type]  # mypy takes classes for unhashable
    for key, option in table.items():
        value = value_of(group, key)
        if value == option.default or not (value or option.default):
            continue
        for decider, rule in option.readers.items():
            chosen = value_of(group, decider)
            if rule.is_refused != is_refused or (chosen in rule.values if rule.values else chosen):
                continue
            if not is_refused:
                yield f"{prefix}{key}: is not used, because {prefix}{decider} is {shown(chosen)}"
            else:
                readers = [word for word in rule.values if word is not None]
                choice = f"={either(readers)}, not {chosen or 'null'}" if readers else f", which is {shown(chosen)}"
                yield f"{prefix}{key}: is {shown(value)}, but is only read with {prefix}{decider}{choice}; remove it"
            break


def _parts(config: Config) -> Iterator[str]:
    """The parts that a pipeline is made of, where `model.pretrained` does not name it as a whole."""
    model = config.model
    if model.pretrained is not None:
        return
    family, given = schema.family_of_parts(model), [part for part in PARTS if schema.is_set(getattr(model, part))]
    # `noise_scheduler_inference` may be left out: the exported sampler then follows the training scheduler.
    needed = ("vae",) if model.train == "vae" else (*schema.FAMILY_PARTS[family], "noise_scheduler_training")
    known = {*schema.FAMILY_PARTS[family], *schema.OPTIONAL_PARTS.get(family, ()), *PARTS[-2:]}
    if not given and model.train == "denoiser":
        parts = ", ".join(f"model.{part}" for part in needed)
        yield f"model.pretrained: is required: a pipeline folder or hub id for all parts; or give each of {parts}"
        return
    if model.train == "vae" and (model.vae.target or "").endswith(("AutoencoderDC", "QwenImage", "KLFlux2")):
        yield f"model.vae.target: {model.vae.target} is not trained; use AutoencoderKL"
    for part in PARTS:
        key, own = f"model.{part}", getattr(model, part)
        is_tokenizer = part.startswith("tokenizer")
        if own.pretrained is None:
            if is_tokenizer and (part in needed or part in given):
                yield f"{key}.pretrained: is required: a folder or hub id; it cannot be made from params"
            elif part in needed and part not in given:
                yield f"{key}: is required: give `pretrained` (a folder or hub id), or `target` and `params`"
        elif not part.startswith("noise_scheduler"):
            # The class of a text encoder or tokenizer is another one than the family's where that is allowed.
            for name in ("params",) if is_tokenizer or part.startswith("text_encoder") else ("target", "params"):
                if getattr(own, name):
                    yield f"{key}.{name}: is not read together with {key}.pretrained; remove it ({key}.{name}=null)"
        if part in given and part not in known and model.train == "denoiser":
            yield f"{key}: family {family} has no such part; it has {', '.join(schema.FAMILY_PARTS[family])}"


def _unused_parts(model: ModelConfig) -> Iterator[str]:
    if model.pretrained is None:
        return
    if model.text_encoders:
        yield "model.text_encoders: is not used, because model.pretrained is set, which has its own"
    for part in PARTS:
        own: PartConfig = getattr(model, part)
        # A noise scheduler's params, and the class of the inference sampler, still override what was stored.
        is_read, remedy = part.startswith("noise_scheduler") and own.pretrained is None, ""
        if part in schema.DENOISERS:
            is_read = model.from_scratch or (own.pretrained is not None and not own.params)
            remedy = "; model.from_scratch=true begins with random weights"
        if schema.is_set(own) and not is_read:
            yield f"model.{part}: its own settings are not used, because model.pretrained is set{remedy}"


def objective_problems(objective: ObjectiveConfig) -> list[str]:
    """What is wrong with an objective.

    Args:
        objective: with its preset filled in; rules about a prediction type that is still null are left out.
    """
    return [*unread(objective, "objective."), *(f"objective.{text}" for text in _objective_rules(objective))]


def _objective_rules(objective: ObjectiveConfig) -> Iterator[str]:
    density, weighting, shift = objective.timestep_density, objective.loss_weighting, objective.shift
    if density.low >= density.high:
        yield f"timestep_density.low: {density.low:g} must be below timestep_density.high, {density.high:g}"
    if shift.base_tokens >= shift.max_tokens:
        yield f"shift.base_tokens: {shift.base_tokens} must be below shift.max_tokens, {shift.max_tokens}"
    if objective.loss.huber_schedule == "exponential" and objective.loss.huber_delta > 1:
        yield "loss.huber_delta: must be at most 1 with loss.huber_schedule=exponential, or δ would grow without bound"
    if objective.snr_gamma is not None and weighting.name not in (None, "min_snr"):
        yield f"snr_gamma: means loss_weighting.name=min_snr, but that is {weighting.name}; keep one"
    elif objective.snr_gamma not in (None, weighting.gamma):
        yield f"snr_gamma: means loss_weighting.gamma, but that is {weighting.gamma:g}; keep one"
    prediction, drawn = objective.prediction_type, density.name or "uniform"
    if prediction is None:
        return
    if (only := _ONLY.get(weighting.name or "", prediction)) != prediction:
        yield f"loss_weighting.name: {weighting.name} is defined for prediction_type={only}, not {prediction}"
    if (drawn == "log_normal") != (prediction == "edm"):
        remedy = "EDM draws ln σ from log_normal, all others a level in [0, 1]"
        yield f"timestep_density.name: {drawn} cannot be used with prediction_type={prediction}; {remedy}"
    if objective.offset_noise and prediction == "flow_prediction":
        yield "offset_noise: must be 0 with flow_prediction: samplers start from plain noise, which it would not train"
    if objective.rescale_betas_zero_snr and prediction == "epsilon":
        yield "rescale_betas_zero_snr: true needs prediction_type v_prediction or sample: at zero SNR, ε says nothing"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer, schedule, model = config.optimizer, config.lr_scheduler, config.model
    own = schedule.params.learning_rate
    where = "optimizer.params.learning_rate" if own is None else "lr_scheduler.params.learning_rate"
    peak = optimizer.params.learning_rate if own is None else own
    if config.objective.adversarial.weight and optimizer.name == "prodigy":
        yield "optimizer.name: prodigy estimates one learning rate, but a discriminator needs its own; use adamw"
    if optimizer.rates_by_part and optimizer.name == "prodigy":
        yield "optimizer.rates_by_part: prodigy estimates one learning rate for all parts; remove it"
    elif optimizer.rates_by_part and peak == 0:
        yield f"{where}: is 0, but optimizer.rates_by_part follow the same schedule; give the peak a value above 0"
    if optimizer.name == "prodigy" and peak < 1e-2:
        yield f"{where}: is {peak:g}, but prodigy multiplies the rate that it finds by it; set it to 1"
    is_exact = model.mixed_precision == "bf16" and optimizer.stochastic_rounding
    if optimizer.name == "prodigy" and optimizer.scale_lr != "none":
        yield "optimizer.scale_lr: prodigy finds the rate of any batch itself; set it to none"
    if model.bf16_weights and model.train == "denoiser" and not is_exact:
        yield "model.bf16_weights: true needs model.mixed_precision=bf16 and optimizer.stochastic_rounding=true"


def _schedule(config: Config) -> Iterator[str]:
    """Warnings about the length of the run."""
    params, rate = config.lr_scheduler.params, config.optimizer.params.learning_rate
    least_batch = config.system.batch_size * config.system.gradient_accumulation
    steps, warmup = _most_steps(config), schema.warmup_length(params, least_batch)
    if steps is not None and warmup > steps:
        key = "warmup_length" if params.warmup_images is None else "warmup_images"
        yield f"lr_scheduler.params.{key}: {warmup:,} steps of warm-up in a run of at most {steps:,} steps"
    if params.learning_rate not in (None, rate):
        own = f"lr_scheduler.params.learning_rate={params.learning_rate}"
        yield f"optimizer.params.learning_rate: {rate} is not used; {own} wins"


def _length(config: Config) -> Iterator[str]:
    experiment, dataset = config.experiment, config.dataset
    given = [f"experiment.{name}" for name in schema.LENGTHS if getattr(experiment, name) is not None]
    if not given:
        yield "experiment.num_examples_to_see: is required, or experiment.num_steps or experiment.num_epochs instead"
    elif len(given) > 1:
        yield f"{given[-1]}: the length of the run is given by {given[0]} as well; set one of them to null"
    if experiment.num_epochs is not None and (dataset.mix or dataset.prior.path is not None):
        key = "dataset.mix" if dataset.mix else "dataset.prior.path"
        yield f"experiment.num_epochs: with {key} a pass over the data is not defined; use experiment.num_steps"


def _most_steps(config: Config) -> int | None:
    """Optimizer steps of the run with one process, more of which make it shorter; None: that depends on the data."""
    experiment, system = config.experiment, config.system
    if experiment.num_examples_to_see is None:
        return experiment.num_steps
    return experiment.num_examples_to_see // (system.batch_size * system.gradient_accumulation)


def _paths(config: Config) -> Iterator[str]:
    for key, path in model_paths(config):
        yield from model_path_problems(config, key, path)
    file, folder = config.model.pretrained or "", config.model.single_file_config
    if folder is not None and not (file.endswith(".safetensors") and Path(file).is_file()):
        yield f"model.pretrained: {file!r} is no *.safetensors file, which model.single_file_config is for"
    folders = (
        "dataset.params.remote.cache_dir",
        "dataset.params.index_dir",
        "dataset.cache.path",
        "dataset.prior.path",
    )
    for key in ("experiment.log_dir", *folders):
        if (folder := value_of(config, key)) is not None and (problem := output_problem(folder)):
            hint = "; checkpoint.mirror copies the checkpoints of a run to an object store"
            yield f"{key}: {problem}{hint if key == 'experiment.log_dir' and is_url(folder) else ''}"


def model_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Dotted option and value of every folder or hub id that is read."""
    model, keys = config.model, ["model.pretrained", "ema.path"]
    if model.single_file_config is not None:
        keys[0] = "model.single_file_config"
    keys += [f"model.{part}.pretrained" for part in (PARTS if model.pretrained is None else schema.DENOISERS)]
    if model.pretrained is None:
        for number, entry in enumerate(model.text_encoders):
            named = {"pretrained": entry.pretrained, "tokenizer": entry.tokenizer}
            yield from ((f"model.text_encoders.{number}.{name}", path) for name, path in named.items() if path)
    yield from ((key, path) for key in keys if (path := value_of(config, key)) is not None)


def model_path_problems(config: Config, key: str, text: str) -> Iterator[str]:
    """A path that does not exist, or is no model. A relative one may be made before the run (`build/preflight.py` looks
    then), and hub ids are not asked for here."""
    path = Path(text).absolute()
    if not path.exists():
        if text.startswith(("/", "./", "../", "~")):
            yield f"{key}: {text!r} does not exist{' (~ is not expanded)' if text.startswith('~') else ''}"
        return
    is_pipeline = key in ("model.pretrained", "model.single_file_config") and config.model.train == "denoiser"
    wanted = _MODEL_FILES[:1] if is_pipeline else _MODEL_FILES

    def is_model(folder: Path) -> bool:
        return any((folder / name).is_file() for name in wanted)

    runs = (path, *path.parents[:2])
    near = next(filter(is_model, (*(run / "current_pipeline" for run in runs), *runs[1:])), None)
    has_parts = not is_pipeline and not (path / "current_pipeline").exists() and any(map(is_model, path.glob("*")))
    if not (is_model(path) or has_parts):
        remedy = "docs/models.md says how to convert a file"
        if near:
            remedy = f"write {key}={near}"
        elif text.endswith(".safetensors") and is_pipeline:
            remedy = "of a file in the original layout, give model.single_file_config as well"
        kind = "pipeline" if is_pipeline else "model"
        yield f"{key}: {text!r} is no {kind} that diffusers saved: it has no {' or '.join(wanted[:2])}; {remedy}"


def data_sets(dataset: DatasetConfig) -> list[tuple[str, DatasetConfig | MixEntry]]:
    """Dotted name and options of every data set that is trained on."""
    return [("dataset", dataset), *((f"dataset.mix.{number}", entry) for number, entry in enumerate(dataset.mix))]


def _data(config: Config) -> Iterator[str]:
    buckets = config.dataset.params.buckets
    for prefix, entry in data_sets(config.dataset):
        if not entry.params.path and entry.type != "Synthetic":
            yield f"{prefix}.params.path: is required: the shards; dataset.type=Synthetic needs none"
        problems = parse_filters(entry.params.filters)[1]
        if entry.type == "ClassificationWebDataset":
            problems += read_class_prompts(entry.params)[1]
        yield from (problem.replace("dataset.", f"{prefix}.", 1) for problem in problems)
        if entry.end_step is not None and entry.end_step <= entry.start_step:
            yield f"{prefix}.end_step: is {entry.end_step}, not after {prefix}.start_step={entry.start_step}"
    if config.dataset.prior.path is not None:
        yield from _prior(config)
    if buckets.mode == "table" and not buckets.sizes:
        yield "dataset.params.buckets.sizes: is required with buckets.mode=table: a list of [height, width] pairs"


def _prior(config: Config) -> Iterator[str]:
    if not all(config.dataset.prior.prompts or [""]):
        yield "dataset.prior.prompt: is required with dataset.prior.path: the caption of the class images"
    own = config.dataset.params.path
    for path in filter(None, [own] if isinstance(own, str) else own):
        folder = Path(path).expanduser()
        if folder.is_dir() and output_path(str(config.dataset.prior.path)).resolve().is_relative_to(folder.resolve()):
            yield f"dataset.prior.path: lies in {path}, so its images would be the subject's as well; give another"
    if config.system.batch_size % 2:
        yield f"system.batch_size: is {config.system.batch_size}; half of it are class images, so give an even number"
    if config.dataset.mix:
        yield "dataset.mix: every sample of the subject has one of dataset.prior beside it; use one of the two"
    if config.dataset.params.buckets.mode != "off":
        yield "dataset.params.buckets.mode: class images are squares of dataset.params.resolution; use off"


def _model(config: Config) -> Iterator[str]:
    model, ema, sampling = config.model, config.ema, config.sampling
    if model.xformers and model.attention not in ("auto", "xformers"):
        yield f"model.xformers: true means model.attention=xformers, but that is {model.attention}; keep one"
    if model.train_text_encoder and ema.path is not None:
        yield "ema.path: holds one network, but model.train_text_encoder trains several; remove one of them"
    if model.bf16_norms and model.mixed_precision != "bf16":
        yield f"model.bf16_norms: true needs model.mixed_precision=bf16, not {model.mixed_precision}"
    yield from _lora(config)
    yield from _float8(config)
    if ema.sigma_rels and ema.snapshot_every % ema.update_every:
        yield f"ema.snapshot_every: {ema.snapshot_every} is no multiple of ema.update_every={ema.update_every}"
    if ema.device == "cuda" and config.distributed.offload_parameters:
        yield "ema.device: cuda, but distributed.offload_parameters keeps the weights in CPU memory; use auto or cpu"
    if model.train == "denoiser" and sampling.every > 0 and not sampling.prompts:
        yield f"sampling.prompts: is empty, but sampling.every={sampling.every} asks for previews; give one"


def _lora(config: Config) -> Iterator[str]:
    """What does not go with adapters."""
    model, ema = config.model, config.ema
    if not model.lora.rank:
        return
    if model.pretrained is None and not (model.unet.pretrained or model.transformer.pretrained):
        yield "model.lora.rank: adapters belong to trained weights, and these would be random; give model.pretrained"
    if model.from_scratch:
        yield "model.from_scratch: makes random weights, and model.lora.rank freezes them; set it to false"
    if config.evaluation.every and not model.lora.merge:
        yield "evaluation.every: draws from exported pipelines; set model.lora.merge=true, which exports them"
    if model.train_text_encoder:
        yield "model.train_text_encoder: model.lora.rank trains adapters only; use model.lora.text_encoder"
    if model.bf16_weights:
        yield "model.bf16_weights: model.lora.rank keeps frozen weights in the type of mixed_precision; set it to false"
    if ema.path is not None or ema.sigma_rels:
        key = "ema.sigma_rels" if ema.path is None else "ema.path"
        yield f"{key}: is of whole networks, and model.lora.rank averages adapters; remove it"
    if config.distributed.mesh.tensor > 1:
        yield "distributed.mesh.tensor: cannot split adapted layers (model.lora.rank); use distributed.mesh.fsdp"
    elif model.lora.base == "int8" and (
        config.distributed.strategy not in ("auto", "ddp") or config.distributed.mesh.fsdp != 1
    ):
        yield "model.lora.base: int8 weights are not sharded; use distributed.strategy=ddp, or model.lora.base=auto"


def _float8(config: Config) -> Iterator[str]:
    """What does not go with float8."""
    model, distributed = config.model, config.distributed
    if model.float8 is None:
        return
    if model.mixed_precision != "bf16":
        yield f"model.float8: needs model.mixed_precision=bf16 for all the rest, and that is {model.mixed_precision}"
    if model.lora.rank:
        yield "model.float8: is for weights that are trained, and model.lora.rank freezes them; remove it"
    if distributed.strategy.startswith("deepspeed"):
        yield f"model.float8: is not known to work with {distributed.strategy}; use ddp or fsdp"
    if distributed.mesh.tensor != 1:
        yield "distributed.mesh.tensor: cannot split layers that compute in float8; use distributed.mesh.fsdp"


def _saves(config: Config) -> Iterator[str]:
    """Held-out data, the best checkpoints, evaluation and time limits."""
    validation, checkpoint, watch = config.validation, config.checkpoint, config.watch
    evaluation, save_every = config.evaluation, config.experiment.save_every
    if evaluation.every % save_every:
        yield f"evaluation.every: {evaluation.every:,} is no multiple of experiment.save_every={save_every:,}"
    if evaluation.every and not (evaluation.inception or evaluation.dinov2 or evaluation.clip):
        yield "evaluation.every: needs a network: evaluation.inception, evaluation.dinov2 or evaluation.clip"
    if evaluation.every and evaluation.path is None and validation.path is None:
        yield "evaluation.every: needs real pictures, evaluation.path or validation.path"
    if validation.path == config.dataset.params.path:
        yield "validation.path: is the data that is trained on; keep some shards out of dataset.params.path"
    if checkpoint.keep_best and validation.path is None:
        yield f"checkpoint.keep_best: is {checkpoint.keep_best}, which needs validation.path, the held-out data"
    elif checkpoint.keep_best and config.experiment.save_every % validation.every:
        every = f"{validation.every:,} does not divide experiment.save_every={config.experiment.save_every:,}"
        yield f"validation.every: {every}; checkpoint.keep_best compares losses measured at each save"
    options, ema = config.experiment, config.ema
    is_average_kept = config.model.use_ema and options.start_from is not None and "ema" not in options.reset
    if is_average_kept and "data" in options.reset and (ema.warmup or ema.sigma_rels):
        forgets = "steps are counted from 0, so the warm-up of the average would forget what it has"
        yield f"experiment.reset: data without ema: {forgets}; add ema, or set ema.warmup=false and no ema.sigma_rels"
    for key in config.experiment.allow_changed:
        if not is_below(key, EXPORTED):
            needing = ", ".join(EXPORTED)
            yield f"experiment.allow_changed: {key!r} needs no permission or is unknown; those that do are {needing}"
    for section in schema.SECTIONS:
        limit_s = getattr(watch, f"{section}_s")
        if limit_s is not None and limit_s >= watch.collective_timeout_s:
            limits = f"{watch.collective_timeout_s:g} is not above watch.{section}_s={limit_s:g}"
            yield f"watch.collective_timeout_s: {limits}; a network error would hide the report of a hang"


def _logging(config: Config) -> Iterator[str]:
    logging, strategy = config.logging, config.distributed.strategy
    if logging.profile_steps is not None:
        first, last = logging.profile_steps
        steps = _most_steps(config)
        if first > last:
            yield f"logging.profile_steps: the first step, {first}, is after the last one, {last}; swap them"
        elif steps is not None and last > steps:
            yield f"logging.profile_steps: {last} is beyond the end of the run, which has at most {steps:,} steps"
    if logging.gradient_norms and strategy.startswith("deepspeed"):
        yield f"logging.gradient_norms: {strategy} keeps the gradients itself; set it to false, or use fsdp"


def _sharding(config: Config) -> Iterator[str]:
    """What the strategies cannot do."""
    distributed, mesh = config.distributed, config.distributed.mesh
    fsdp = distributed.strategy in ("fsdp", "hsdp") or mesh.fsdp != 1 or mesh.tensor != 1
    deepspeed = distributed.strategy.startswith("deepspeed")
    if mesh.is_set and distributed.strategy != "auto":
        yield f"distributed.strategy: {distributed.strategy}, but distributed.mesh is set as well; give one of them"
    if distributed.offload_parameters and not (fsdp or distributed.strategy == "deepspeed_3"):
        yield "distributed.offload_parameters: is only read with fsdp, hsdp and deepspeed_3"
    if not distributed.reshard_after_forward and not fsdp:
        yield "distributed.reshard_after_forward: is only read with fsdp and hsdp"
    if distributed.encoders and config.model.train == "vae":
        yield "distributed.encoders: the autoencoder is trained, so there is nothing to encode; use 0"
    if distributed.encoders and config.dataset.cache.path is not None:
        yield "distributed.encoders: the cache holds what they would encode; use 0, or dataset.cache.path=null"
    named = distributed.encoder_devices
    if named and len(named) != distributed.encoders:
        yield f"distributed.encoder_devices: has {len(named)}; set distributed.encoders={len(named)}"
    if len({*named}) < len(named):
        yield f"distributed.encoder_devices: {shown(named)} names a GPU twice; name each once"
    if config.trainer.compile_mode == "reduce-overhead" and config.system.gradient_accumulation > 1:
        yield "trainer.compile_mode: CUDA graphs overwrite gradients that are accumulated; use default"
    if not (fsdp or deepspeed):
        return
    name = distributed.strategy if distributed.strategy != "auto" else "distributed.mesh"
    model, trainer, optimizer = config.model, config.trainer, config.optimizer.name
    if optimizer not in SHARDED_OPTIMIZERS:
        remedy = f"use {' or '.join(SHARDED_OPTIMIZERS)}, or distributed.strategy=ddp"
        yield f"optimizer.name: {optimizer} needs whole tensors, which {name} shards; {remedy}"
    if model.bf16_weights:
        yield f"model.bf16_weights: {name} keeps sharded fp32 weights already; set it to false"
    if model.train == "vae" and (deepspeed or mesh.tensor != 1):
        other = name if deepspeed else "distributed.mesh.tensor"
        yield f"model.train: vae is trained with single, ddp, fsdp or hsdp, not with {other}"
    if trainer.channels_last is True:
        yield f"trainer.channels_last: true, but {name} shards contiguous weights only; use auto or false"
    if trainer.compile_mode == "reduce-overhead":
        yield f"trainer.compile_mode: CUDA graphs need weights that stay in place, which {name} moves; use default"
    if trainer.compile == "full":
        yield f"trainer.compile: full does not work with {name}; use blocks"
    elif trainer.compile == "blocks" and deepspeed:
        yield f"trainer.compile: is not known to work with {name}"
    if fsdp and model.mixed_precision == "fp16":
        yield f"model.mixed_precision: fp16 needs a loss scale that {name} does not share; use bf16, or deepspeed_2"
    if deepspeed and model.trains_text:
        yield f"{model.text_option}: {name} trains the denoiser only; use ddp or fsdp"
    if distributed.offload_optimizer and optimizer != "adamw":
        yield f"optimizer.name: {optimizer} cannot be offloaded; use adamw"
