"""Load a part of a pipeline from a diffusers folder or hub id, or make it with random weights from its parameters.

Weights come from safetensors only, classes from the registry only, and no code of a model repository is ever run.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sd_training.config.model_schema import ModelConfig, PartConfig
from sd_training.errors import ConfigError
from sd_training.hub import hub_problem
from sd_training.models.registry import check_params, class_of
from sd_training.models.stored_settings import folder_settings_problems, refused_settings

# diffusers reads this before it would download and import Python files that a repository carries.
os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"] = "1"
# One bar per loaded file says nothing that the run's own lines do not say.
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()

_SUBFOLDER = {"noise_scheduler_training": "scheduler", "noise_scheduler_inference": "scheduler"}
_CONFIG_FILES = ("config.json", "scheduler_config.json", "tokenizer_config.json")


def effective_part(model: ModelConfig, part: str) -> PartConfig:
    """The part's settings, with `model.pretrained` winning over its own, as in sd-training."""
    config: PartConfig = getattr(model, part)
    if model.pretrained is None:
        return config
    # A noise scheduler keeps its `params`: they override single stored settings (e.g. prediction_type).
    params = config.params if part.startswith("noise_scheduler") else {}
    target = config.target if part == "noise_scheduler_inference" else None
    return PartConfig(pretrained=model.pretrained, revision=model.revision, params=params, target=target)


def subfolder_of(part: str, config: PartConfig) -> str | None:
    """Where the part lies below `pretrained`: the given folder, its usual name, or null for the part itself.

    Raises:
        ConfigError: when a local folder holds neither.
    """
    usual = _SUBFOLDER.get(part, part)
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


def _from_pretrained(part: str, cls: Any, config: PartConfig, **kwargs: Any) -> Any:
    """`cls.from_pretrained`, with every way it can fail turned into a sentence that names the option."""
    assert config.pretrained is not None
    subfolder = subfolder_of(part, config)
    _refuse_unavailable(part, config)
    _refuse_unsafe(part, cls, config, subfolder)
    if cls is transformers.AutoTokenizer:
        kwargs["trust_remote_code"] = False  # None would ask at the terminal, where one process of many waits for ever
    try:
        return cls.from_pretrained(
            config.pretrained, **{"subfolder": subfolder} if subfolder else {}, revision=config.revision, **kwargs
        )
    except Exception as error:  # hostile and damaged files make the libraries raise many kinds
        where = f"{config.pretrained!r}" + (f", folder {subfolder!r}" if subfolder else "")
        raise ConfigError(
            f"model.{part}.pretrained: {where} cannot be loaded as {cls.__name__}: {_first_line(error)}"
        ) from error


def _refuse_unavailable(part: str, config: PartConfig) -> None:
    assert config.pretrained is not None
    if problem := hub_problem(config.pretrained, config.revision, f"model.{part}.pretrained"):
        raise ConfigError(problem)


def _refuse_unsafe(part: str, cls: Any, config: PartConfig, subfolder: str | None) -> None:
    """Settings and indices that a library would follow to other code or other files.

    Of a hub id the settings are looked at; which files its index may name, the hub's client and the flag for
    safetensors decide.
    """
    assert config.pretrained is not None
    folder = Path(config.pretrained, subfolder or "")
    problems = folder_settings_problems(folder) if folder.is_dir() else []
    if not folder.is_dir() and issubclass(cls, PreTrainedModel):
        settings = _settings(part, cls.config_class.get_config_dict, config, subfolder)[0]
        problems = list(refused_settings(settings, f"{config.pretrained}/{subfolder or ''}"))
    if problems:
        raise ConfigError([f"model.{part}.pretrained: {problem}" for problem in problems])


def _settings(part: str, read: Callable[..., Any], config: PartConfig, subfolder: str | None, **kwargs: Any) -> Any:
    """What a library's `read` gives of a stored config, with every way it can fail turned into a sentence."""
    _refuse_unavailable(part, config)
    try:
        folder = {"subfolder": subfolder} if subfolder else {}
        return read(config.pretrained, revision=config.revision, **folder, **kwargs)
    except Exception as error:
        raise ConfigError(f"model.{part}.pretrained: {config.pretrained!r}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def stable_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose; unlike `hash()` the same in every process."""
    digest = hashlib.sha256(f"{seed}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _construct(part: str, cls: Any, params: Mapping[str, Any]) -> Any:
    """`cls(**params)`; a transformers model is made from its config class."""
    if issubclass(cls, PreTrainedModel):
        config_class: Any = cls.config_class
        problems = check_params(part, config_class, params)
        make = lambda: cls(config_class(**params))  # noqa: E731
    else:
        problems = check_params(part, cls, params)
        make = lambda: cls(**params)  # noqa: E731
    if problems:
        raise ConfigError(problems)
    try:
        return make()
    except (
        ValueError,
        TypeError,
        RuntimeError,
        KeyError,
        AttributeError,
        ZeroDivisionError,
        NotImplementedError,
    ) as error:
        raise ConfigError(f"model.{part}.params: {cls.__name__} cannot be made from them: {error}") from error


def _on_meta(part: str, cls: Any, config: PartConfig) -> Any:
    """The network without weights, from its stored or given parameters."""
    with torch.device("meta"):
        if config.pretrained is None:
            return _construct(part, cls, config.params)
        if issubclass(cls, PreTrainedModel):
            return cls(_from_pretrained(part, cls.config_class, config))
        subfolder = subfolder_of(part, config)
        _refuse_unsafe(part, cls, config, subfolder)
        return _from_settings(part, cls, _settings(part, cls.load_config, config, subfolder))


def _from_settings(part: str, cls: Any, stored: Any, **params: Any) -> Any:
    try:
        return cls.from_config(stored, **params)
    except Exception as error:
        text = f"{cls.__name__} cannot be made from its stored settings: {_first_line(error)}"
        raise ConfigError(f"model.{part}.pretrained: {text}") from error


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
    cls: Any = class_of(part, config.target or default)
    if meta:
        return _on_meta(part, cls, config)
    if config.pretrained is not None:
        network, info = _from_pretrained(
            part, cls, config, use_safetensors=True, output_loading_info=True, **loaded_as(cls, torch.float32)
        )
        _refuse_partial(part, config, sorted(info["missing_keys"]))
        return network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_seed(seed, f"init {part}"))
        return _construct(part, cls, config.params)


def loaded_as(cls: type, dtype: torch.dtype) -> dict[str, Any]:
    """The option of `from_pretrained` for the type of the weights: diffusers before 0.40 knows no `dtype`, and
    transformers warns of `torch_dtype`."""
    return {"torch_dtype" if issubclass(cls, diffusers.ModelMixin) else "dtype": dtype}


def _refuse_partial(part: str, config: PartConfig, missing: list[str]) -> None:
    """A tensor that the file lacks would silently start from random numbers."""
    if missing:
        raise ConfigError(
            f"model.{part}.pretrained: {config.pretrained!r} lacks {len(missing)} tensors, e.g. {missing[0]}"
        )


def load_tokenizer(model: ModelConfig, part: str, default: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer; always from files."""
    return make_tokenizer(part, effective_part(model, part), default)


def make_tokenizer(part: str, config: PartConfig, default: str | None = None) -> PreTrainedTokenizerBase:
    """As `load_tokenizer`, from the part's own settings."""
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
    cls: Any = class_of(part, config.target)
    if config.pretrained is None:
        return _construct(part, cls, config.params)
    subfolder = subfolder_of(part, config)
    _refuse_unsafe(part, cls, config, subfolder)
    stored, _ = _settings(part, cls.load_config, config, subfolder, return_unused_kwargs=True)
    if config.target is None:
        cls = class_of(part, stored.get("_class_name"))
    if problems := check_params(part, cls, config.params):
        raise ConfigError(problems)
    return _from_settings(part, cls, stored, **config.params)


def stored_scheduler(model: ModelConfig, part: str) -> dict[str, Any] | None:
    """Settings of the noise scheduler that is stored beside a part's weights; None where there is none."""
    config = effective_part(model, part)
    if config.pretrained is None:
        return None
    subfolder, root = subfolder_of(part, config), config.pretrained
    if subfolder is None:  # the part's own folder
        root, subfolder = str(Path(root).absolute().parent), part
    beside = PartConfig(pretrained=root, revision=config.revision)
    name = "noise_scheduler_training"
    try:
        cls: Any = class_of(name, None)
        folder = str(Path(subfolder).parent / _SUBFOLDER[name])
        stored, _ = _settings(name, cls.load_config, beside, folder, return_unused_kwargs=True)
    except ConfigError:
        return None
    return dict(stored)


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
