"""The parts of a model: loaded from a diffusers folder or hub id, or made with random weights from their parameters.

Nothing from outside is executed. Classes come from the allow-list below, weights from safetensors, and the JSON files
of a model repository are checked before a library reads them: transformers would fetch and run an attention kernel that
a config.json names, or start a quantizer. Every failure is a sentence that names the option.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sd_training.config.check import PARTS
from sd_training.config.help import suggest
from sd_training.config.schema import ModelConfig, PartConfig
from sd_training.errors import ConfigError
from sd_training.hub import hub_problem
from sd_training.models.mmdit_rope import MMDiTRope

# diffusers reads this before it would download and import Python files that a repository carries.
os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"] = "1"
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()


_CLASSES: Mapping[str, str] = {
    "vae": "AutoencoderKL",
    "unet": "UNet2DConditionModel",
    "transformer": "SD3Transformer2DModel FluxTransformer2DModel MMDiTRope PixArtTransformer2DModel",
    "text_encoder": (
        "CLIPTextModel BertModel CLIPTextModelWithProjection Gemma2Model LlamaModel ModernBertModel Qwen2Model "
        "T5EncoderModel XLMRobertaModel"
    ),
    "tokenizer": "CLIPTokenizer AutoTokenizer CLIPTokenizerFast T5Tokenizer T5TokenizerFast",
    "noise_scheduler": (
        "DDPMScheduler DDIMScheduler DPMSolverMultistepScheduler EDMDPMSolverMultistepScheduler EDMEulerScheduler "
        "EulerAncestralDiscreteScheduler EulerDiscreteScheduler FlowMatchEulerDiscreteScheduler HeunDiscreteScheduler "
        "LMSDiscreteScheduler PNDMScheduler UniPCMultistepScheduler"
    ),
}
"""Kind of part → its classes, the usual one first."""
_USUAL_CLASS: Mapping[str, str] = {
    "text_encoder_2": "CLIPTextModelWithProjection",
    "text_encoder_3": "T5EncoderModel",
    "tokenizer_3": "T5TokenizerFast",
    "noise_scheduler_inference": "DDIMScheduler",
}
"""Part → its usual class, where it is not that of its kind."""
ALLOWED: Mapping[str, Sequence[str]] = {
    part: next(names.split() for kind, names in _CLASSES.items() if part.startswith(kind)) for part in PARTS
}
"""Part → the classes that a config may name. Nothing else is ever constructed or loaded."""
_CONFIG_FILES = ("config.json", "scheduler_config.json", "tokenizer_config.json")
_REFUSED = {
    "quantization_config": "quantized weights are not trained or drawn with",
    "custom_pipeline": "code of a repository is never run",
    "custom_pipelines": "code of a repository is never run",
}
_KERNELS = ("attn_implementation", "kernel_config")


def class_of(part: str, target: str | None) -> Any:
    """The class for `model.<part>.target`; null is the part's usual class.

    Args:
        target: class name, with or without `diffusers.` or `transformers.` in front.

    Raises:
        ConfigError: for a class that is not on the list.
    """
    allowed = ALLOWED[part]
    name = target or _USUAL_CLASS.get(part, allowed[0])
    bare = name.removeprefix("diffusers.").removeprefix("transformers.")
    if bare not in allowed:
        raise ConfigError(f"model.{part}.target: {name!r} is not allowed; use one of {', '.join(sorted(allowed))}")
    if bare == MMDiTRope.__name__:
        return MMDiTRope
    return getattr(transformers if part.startswith(("text_encoder", "tokenizer")) else diffusers, bare)


def effective_part(model: ModelConfig, part: str) -> PartConfig:
    """The part's settings, with `model.pretrained` winning over its own, as in sd-training."""
    config: PartConfig = getattr(model, part)
    if model.pretrained is None:
        return config
    # A noise scheduler keeps its `params`: they override single stored settings (e.g. prediction_type).
    params = config.params if part.startswith("noise_scheduler") else {}
    target = config.target if part == "noise_scheduler_inference" else None
    return PartConfig(pretrained=model.pretrained, revision=model.revision, params=params, target=target)


def load_network(model: ModelConfig, part: str, *, seed: int, meta: bool = False, default: str | None = None) -> Any:
    """A network in fp32, loaded or randomly initialised from `seed` and the part's name.

    Args:
        meta: make it without weights, for counting parameters.
        default: its class, unless `target` names one; None is the part's usual one.

    Raises:
        ConfigError: naming the option, when it cannot be loaded or made.
    """
    return make_network(part, effective_part(model, part), seed=seed, meta=meta, default=default)


def make_network(part: str, config: PartConfig, *, seed: int, meta: bool = False, default: str | None = None) -> Any:
    """As `load_network`, from the part's own settings."""
    cls = class_of(part, config.target or default)
    if meta:
        with torch.device("meta"):
            if config.pretrained is None:
                return _construct(part, cls, config.params)
            if issubclass(cls, PreTrainedModel):
                return cls(_from_pretrained(part, cls.config_class, config))
            return _from_settings(part, cls, _stored_settings(part, cls, config))
    if config.pretrained is not None:
        network, info = _from_pretrained(
            part, cls, config, use_safetensors=True, output_loading_info=True, **loaded_as(cls, torch.float32)
        )
        if missing := sorted(info["missing_keys"]):  # they would silently start from random numbers
            raise ConfigError(
                f"model.{part}.pretrained: {config.pretrained!r} lacks {len(missing)} tensors, e.g. {missing[0]}"
            )
        return network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_stable_seed(seed, f"init {part}"))
        return _construct(part, cls, config.params)


def make_tokenizer(part: str, config: PartConfig, default: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer, always from files."""
    if config.pretrained is None:
        raise ConfigError(
            f"model.{part}.pretrained: a folder or hub id is needed; a tokenizer cannot be made from params"
        )
    return _from_pretrained(part, class_of(part, config.target or default), config)


def load_noise_scheduler(model: ModelConfig, part: str) -> Any:
    """A diffusers scheduler: stored settings overridden by `params`, or `target(**params)`.

    Its class is `target`, else the one the stored config names if it is on the list, else the part's usual class.
    """
    config = effective_part(model, part)
    cls = class_of(part, config.target)
    if config.pretrained is None:
        return _construct(part, cls, config.params)
    stored = _stored_settings(part, cls, config)
    if config.target is None:
        cls = class_of(part, stored.get("_class_name"))
    _check_params(part, cls, config.params)
    return _from_settings(part, cls, stored, **config.params)


def stored_scheduler(model: ModelConfig, part: str) -> dict[str, Any] | None:
    """Settings of the noise scheduler in the pipeline that a part is loaded from; None where there is none."""
    config, scheduler = effective_part(model, part), "noise_scheduler_training"
    if config.pretrained is None:
        return None
    try:
        is_part = _subfolder_of(part, config) is None  # the folder of the part alone
        root = str(Path(config.pretrained).absolute().parent) if is_part else config.pretrained
        beside = PartConfig(pretrained=root, revision=config.revision)
        return dict(_stored_settings(scheduler, class_of(scheduler, None), beside))
    except ConfigError:
        return None


def load_weights(path: str, part: str, option: str, default: str | None = None) -> dict[str, torch.Tensor]:
    """Parameters by name of a stored part, fp32.

    Args:
        path: pipeline folder or hub id, or the part's own folder.
        option: the config option that named it, for errors.
        default: the part's class; None is its usual one.
    """
    try:
        network: nn.Module = make_network(part, PartConfig(pretrained=path), seed=0, default=default)
    except ConfigError as error:
        raise ConfigError([p.replace(f"model.{part}.pretrained", option) for p in error.problems]) from error
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def loaded_as(cls: type, dtype: torch.dtype) -> dict[str, Any]:
    """The option of `from_pretrained` for the type of the weights: diffusers before 0.40 knows no `dtype`, and
    transformers warns of `torch_dtype`."""
    return {"torch_dtype" if issubclass(cls, diffusers.ModelMixin) else "dtype": dtype}


@contextmanager
def _failing_as(text: str) -> Iterator[None]:
    """Hostile and damaged files make the libraries raise many kinds of errors."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{text}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _stable_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose; unlike `hash()` the same in every process."""
    digest = hashlib.sha256(f"{seed}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _construct(part: str, cls: Any, params: Mapping[str, Any]) -> Any:
    """`cls(**params)`; a transformers model is made from its config class."""
    constructor = cls.config_class if issubclass(cls, PreTrainedModel) else cls
    _check_params(part, constructor, params)
    with _failing_as(f"model.{part}.params: {cls.__name__} cannot be made from them"):
        made = constructor(**params)
        return made if constructor is cls else cls(made)


def _check_params(part: str, constructor: Callable[..., Any], params: Mapping[str, Any]) -> None:
    accepted = [name for name in inspect.signature(constructor).parameters if name not in {"self", "kwargs"}]
    problems = []
    for name in (name for name in params if name not in accepted):
        near = suggest(name, accepted)
        hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(accepted)}"
        problems.append(f"model.{part}.params.{name}: {constructor.__qualname__} has no such parameter; {hint}")
    if problems:
        raise ConfigError(problems)


def _from_pretrained(part: str, cls: Any, config: PartConfig, **options: Any) -> Any:
    place = _checked_place(part, cls, config)
    if cls is transformers.AutoTokenizer:
        options["trust_remote_code"] = False  # None would ask at the terminal, where one process of many waits for ever
    where = f"{config.pretrained!r}" + (f", folder {place['subfolder']!r}" if "subfolder" in place else "")
    with _failing_as(f"model.{part}.pretrained: {where} cannot be loaded as {cls.__name__}"):
        return cls.from_pretrained(config.pretrained, **place, **options)


def _stored_settings(part: str, cls: Any, config: PartConfig) -> dict[str, Any]:
    """The stored config of a class of diffusers."""
    place = _checked_place(part, cls, config)
    with _failing_as(f"model.{part}.pretrained: {config.pretrained!r}"):
        stored, _ = cls.load_config(config.pretrained, **place, return_unused_kwargs=True)
    settings: dict[str, Any] = stored
    return settings


def _from_settings(part: str, cls: Any, stored: Mapping[str, Any], **params: Any) -> Any:
    with _failing_as(f"model.{part}.pretrained: {cls.__name__} cannot be made from its stored settings"):
        return cls.from_config(stored, **params)


def _checked_place(part: str, cls: Any, config: PartConfig) -> dict[str, Any]:
    """Revision and subfolder for the libraries, once the part is known to be available and safe to read.

    Of a hub id the settings are checked; which files its index may name, the hub's client and the flag for safetensors
    decide.
    """
    assert config.pretrained is not None
    option, subfolder = f"model.{part}.pretrained", _subfolder_of(part, config)
    place = {"revision": config.revision, **({"subfolder": subfolder} if subfolder else {})}
    if problem := hub_problem(config.pretrained, config.revision, option):
        raise ConfigError(problem)
    folder, problems = Path(config.pretrained, subfolder or ""), []
    if folder.is_dir():
        problems = folder_settings_problems(folder)
    elif issubclass(cls, PreTrainedModel):
        with _failing_as(f"{option}: {config.pretrained!r}"):
            settings, _ = cls.config_class.get_config_dict(config.pretrained, **place)
        problems = list(refused_settings(settings, f"{config.pretrained}/{subfolder or ''}"))
    if problems:
        raise ConfigError([f"{option}: {problem}" for problem in problems])
    return place


def _subfolder_of(part: str, config: PartConfig) -> str | None:
    """Where the part lies below `pretrained`: the given folder, its usual name, or null for the part itself.

    Raises:
        ConfigError: when a local folder holds neither.
    """
    usual = "scheduler" if part.startswith("noise_scheduler") else part
    if config.pretrained is None or config.subfolder is not None:
        return config.subfolder
    root = Path(config.pretrained)
    if not root.exists():
        if config.pretrained.startswith((".", "/", "~")) or config.pretrained.count("/") > 1:
            raise ConfigError(f"model.{part}.pretrained: the folder {config.pretrained!r} does not exist")
        return usual
    if (root / usual).is_dir():
        return usual
    if any((root / name).is_file() for name in _CONFIG_FILES) and not (root / "model_index.json").exists():
        return None
    raise ConfigError(
        f"model.{part}.pretrained: {config.pretrained!r} has no folder {usual!r} and is no {part} itself "
        f"(none of {', '.join(_CONFIG_FILES)} in it)"
    )


def folder_settings_problems(folder: Path) -> list[str]:
    """Refused content of the JSON files of a part's folder: settings, and shards that an index names."""
    problems: list[str] = []
    for path in sorted([*folder.glob("*config.json"), *folder.glob("*.safetensors.index.json")]):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path}: is not readable as JSON ({str(error)[:100]})")
            continue
        if not isinstance(value, dict):
            problems.append(f"{path}: is no JSON object")
        elif path.name.endswith(".index.json"):
            problems += _index_problems(value, path)
        else:
            problems += refused_settings(value, str(path))
    return problems


def refused_settings(settings: Any, where: str) -> Iterator[str]:
    """One sentence per setting that would make a library run code from elsewhere.

    Args:
        settings: content of a config.json.
        where: what the sentences call it.
    """
    if isinstance(settings, list):
        for entry in settings:
            yield from refused_settings(entry, where)
    if not isinstance(settings, dict):
        return
    for name, value in settings.items():
        if name in _REFUSED and value:
            yield f"{where}: has {name}; {_REFUSED[name]}"
        elif any(word in str(name) for word in _KERNELS) and not _is_builtin(value):
            yield f"{where}: has {name}={json.dumps(value)[:80]}; kernels from elsewhere are never fetched or run"
        else:
            yield from refused_settings(value, where)


def _is_builtin(value: Any) -> bool:
    """Names without a slash, an `@` or a colon are in the library."""
    if isinstance(value, dict):
        return all(map(_is_builtin, value.values()))
    return value is None or isinstance(value, bool) or (isinstance(value, str) and value.replace("_", "").isalnum())


def _index_problems(value: dict[str, Any], path: Path) -> list[str]:
    """Shards are files of the same folder, in the format that holds no code."""
    names = value.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return [f"{path}: has no weight_map of tensor to file"]
    outside = (n for n in set(names.values()) if Path(n).name != n or "\\" in n or not n.endswith(".safetensors"))
    return [f"{path}: names {name[:80]!r}, which is no *.safetensors file of its folder" for name in sorted(outside)]
