"""The parts of a model: loaded from a diffusers folder or hub id, or made with random weights from their parameters.

Nothing from outside is executed. Classes come from the allow-list below, weights from safetensors, and the JSON files
of a model repository are checked before a library reads them: transformers would fetch and run an attention kernel that
a config.json names, or start a quantizer. Every failure is a sentence that names the option.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from sd_training.config.check import PARTS
from sd_training.config.fields import suggest
from sd_training.config.schema import DENOISERS, ModelConfig, PartConfig
from sd_training.errors import ConfigError
from sd_training.hub import hub_problem
from sd_training.models.mmdit_rope import MMDiTRope

# diffusers reads this before it would download and import Python files that a repository carries.
os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"] = "1"
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()


_CLASSES: Mapping[str, str] = {
    "vae": "AutoencoderKL AutoencoderDC AutoencoderKLFlux2 AutoencoderKLQwenImage",
    "unet": "UNet2DConditionModel",
    "transformer": (
        "SD3Transformer2DModel FluxTransformer2DModel MMDiTRope PixArtTransformer2DModel SanaTransformer2DModel "
        "Flux2Transformer2DModel QwenImageTransformer2DModel ZImageTransformer2DModel"
    ),
    "text_encoder": (
        "CLIPTextModel BertModel CLIPTextModelWithProjection Gemma2Model LlamaModel ModernBertModel Qwen2Model "
        "Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3Model T5EncoderModel XLMRobertaModel"
    ),
    "tokenizer": "CLIPTokenizer AutoTokenizer CLIPTokenizerFast T5Tokenizer T5TokenizerFast",
    "controlnet": "ControlNetModel FluxControlNetModel SD3ControlNetModel",
    "clip": "CLIPModel",
    "dinov2": "Dinov2Model",
    "noise_scheduler": (
        "DDPMScheduler DDIMScheduler DPMSolverMultistepScheduler EDMDPMSolverMultistepScheduler EDMEulerScheduler "
        "EulerAncestralDiscreteScheduler EulerDiscreteScheduler FlowMatchEulerDiscreteScheduler HeunDiscreteScheduler "
        "FlowMatchHeunDiscreteScheduler LMSDiscreteScheduler PNDMScheduler UniPCMultistepScheduler"
    ),
}
"""Kind of part → its classes, the usual one first."""
EVALUATORS = ("clip", "dinov2")
"""Networks that drawn pictures are compared in."""
_NETWORKS = ("vae", "unet", "text_encoder", "text_encoder_2")
"""Parts of a file in the original layout."""
_USUAL_SAMPLER = "DDIMScheduler"
ALLOWED: Mapping[str, Sequence[str]] = {
    part: next(names.split() for kind, names in _CLASSES.items() if part.startswith(kind))
    for part in (*PARTS, "controlnet", *EVALUATORS)
}
"""Part → the classes that a config may name; a ControlNet is drawn with only. Nothing else is ever constructed or
loaded."""
_REFUSED = {
    "quantization_config": "quantized weights are not trained or drawn with",
    "custom_pipeline": "code of a repository is never run",
    "custom_pipelines": "code of a repository is never run",
}
_KERNELS = ("attn_implementation", "kernel_config")
_ADAPTER = "adapter_config.json"
"""Beside a text encoder's files it makes transformers load adapters and, from a hub, the model that it names, whose
settings nobody has checked."""


def class_of(part: str, target: str | None, option: str | None = None) -> Any:
    """The class for `model.<part>.target`; null is the part's usual class.

    Args:
        target: class name, with or without `diffusers.` or `transformers.` in front.

    Raises:
        ConfigError: for a class that is not on the list.
    """
    allowed = ALLOWED[part]
    name = target or (_USUAL_SAMPLER if part == "noise_scheduler_inference" else allowed[0])
    bare = name.removeprefix("diffusers.").removeprefix("transformers.")
    if bare not in allowed:
        option = _beside(option or f"model.{part}.pretrained", "target")
        raise ConfigError(f"{option}: {name!r} is not allowed; use one of {', '.join(sorted(allowed))}")
    if bare == MMDiTRope.__name__:
        return MMDiTRope
    return getattr(transformers if part.startswith(("text_encoder", "tokenizer", *EVALUATORS)) else diffusers, bare)


class SingleFilePart(PartConfig):
    """A network whose settings are in the folder `pretrained`, and whose weights are in a file."""

    file: str


def effective_part(model: ModelConfig, part: str) -> PartConfig:
    """The part's settings, with `model.pretrained` winning over its own, as in sd-training, unless a denoiser is asked
    for by itself.

    Raises:
        ConfigError: there is no stored architecture of a denoiser that begins with random weights.
    """
    config: PartConfig = getattr(model, part)
    if part in DENOISERS and model.from_scratch:
        place = model.single_file_config or model.pretrained
        own = config if config.pretrained else config.replace(pretrained=place, revision=model.revision)
        return _from_scratch(part, own)
    if model.pretrained is None or (part in DENOISERS and config.pretrained is not None):
        return config
    if model.single_file_config is not None and part in _NETWORKS:
        return SingleFilePart(pretrained=model.single_file_config, file=model.pretrained or "")
    # A noise scheduler keeps its `params`: they override single stored settings (e.g. prediction_type).
    params = config.params if part.startswith("noise_scheduler") else {}
    target = config.target if part == "noise_scheduler_inference" else None
    place = model.single_file_config or model.pretrained
    return PartConfig(pretrained=place, revision=model.revision, params=params, target=target)


def _from_scratch(part: str, config: PartConfig) -> PartConfig:
    """The stored class with its stored settings, overridden by `params`, and without weights."""
    cls, option = class_of(part, None), "model.from_scratch"
    with _failing_as(option, cls, config):
        stored = cls.load_config(config.pretrained, **_checked_place(part, cls, config, option))
        accepted = inspect.signature(class_of(part, stored["_class_name"], option)).parameters
    params = {name: value for name, value in stored.items() if name in accepted}
    return PartConfig(target=stored["_class_name"], params=params | config.params)


def load_part(part: str, config: PartConfig, *, seed: int, meta: bool = False, option: str | None = None) -> Any:
    """A network in fp32, loaded or randomly initialised from `seed` and the part's name; or a tokenizer, from files.

    Args:
        part: its name in a pipeline.
        meta: make networks without weights, for counting parameters.
        option: the option that says from where it is loaded; None is `model.<part>.pretrained`.

    Raises:
        ConfigError: naming the option, when it cannot be loaded or made.
    """
    option = option or f"model.{part}.pretrained"
    cls, device = class_of(part, config.target, option), torch.device("meta" if meta else "cpu")
    with _failing_as(option, cls, config):
        if config.pretrained is None:
            if part.startswith("tokenizer"):
                raise ConfigError(f"{option}: a tokenizer needs a folder or hub id")
            digest = hashlib.sha256(f"{seed}:init {part}".encode()).digest()
            with torch.random.fork_rng(devices=[]), device:
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                return _construct(option, cls, config.params)
        place = _checked_place(part, cls, config, option)
        if part.startswith("tokenizer"):
            # Without the option, AutoTokenizer would prompt at the terminal, where one process of many waits forever.
            # Padded as in training: pipelines pad with the tokenizer's own preference.
            tokenizer = cls.from_pretrained(config.pretrained, **place, trust_remote_code=False, padding_side="right")
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            return tokenizer
        if meta:
            with device:
                if issubclass(cls, PreTrainedModel):
                    return cls(cls.config_class.from_pretrained(config.pretrained, **place))
                return cls.from_config(cls.load_config(config.pretrained, **place))
        if isinstance(config, SingleFilePart):
            return _from_single_file(cls, config, place, option)
        options = {**place, **loaded_as(cls, torch.float32), "use_safetensors": True, "output_loading_info": True}
        network, info = cls.from_pretrained(config.pretrained, **options)
        if missing := sorted(info["missing_keys"]):  # they would silently start from random numbers
            raise ConfigError(f"{option}: {config.pretrained!r} lacks {len(missing)} tensors, e.g. {missing[0]}")
        return network


def _from_single_file(cls: Any, config: SingleFilePart, place: Mapping[str, Any], option: str) -> Any:
    """By diffusers' conversion, without a network; of a text encoder by its part that takes tensors."""
    options = {"config": config.pretrained, "subfolder": place.get("subfolder", ""), "local_files_only": True}
    try:
        if issubclass(cls, PreTrainedModel):
            network: Any = create_diffusers_clip_model_from_ldm(cls, load_file(config.file), **options)
        else:
            network = cls.from_single_file(config.file, **options)
        return network.to("cpu", torch.float32)
    except NotImplementedError as error:  # torch's, of a tensor without values
        settings = f"a {cls.__name__} with the settings of {config.pretrained!r}"
        raise ConfigError(f"{option}: {config.file!r} lacks tensors of {settings}") from error


def load_noise_scheduler(model: ModelConfig, part: str) -> Any:
    """A diffusers scheduler: stored settings overridden by `params`, or `target(**params)`.

    Its class is `target`, else the one the stored config names if it is on the list, else the part's usual class.
    """
    config, option = effective_part(model, part), f"model.{part}.pretrained"
    cls = class_of(part, config.target, option)
    with _failing_as(option, cls, config):
        if config.pretrained is None:
            return _construct(option, cls, config.params)
        stored = cls.load_config(config.pretrained, **_checked_place(part, cls, config, option))
        if config.target is None:
            cls = class_of(part, stored.get("_class_name"), option)
        check_params(option, cls, config.params)
        return cls.from_config(stored, **config.params)


def loaded_as(cls: type, dtype: torch.dtype) -> dict[str, Any]:
    """The option of `from_pretrained` for the type of the weights: diffusers before 0.40 knows no `dtype`, and
    transformers warns of `torch_dtype`."""
    return {"torch_dtype" if issubclass(cls, diffusers.ModelMixin) else "dtype": dtype}


@contextmanager
def _failing_as(option: str, cls: type, config: PartConfig) -> Iterator[None]:
    """Hostile and damaged files make the libraries raise many kinds of errors."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        place = config.file if isinstance(config, SingleFilePart) else config.pretrained
        what = f"{option}: {place!r} cannot be loaded as {cls.__name__}"
        if config.pretrained is None:
            what = f"{_beside(option, 'params')}: {cls.__name__} cannot be made from them"
        raise ConfigError(f"{what}: {first_line(error)}") from error


def _beside(option: str, name: str) -> str:
    """The option of that name of the same part."""
    return option.removesuffix("pretrained") + name


def first_line(error: Exception) -> str:
    """Of what a library says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _construct(option: str, cls: Any, params: Mapping[str, Any]) -> Any:
    """`cls(**params)`; a transformers model is made from its config class."""
    constructor = cls.config_class if issubclass(cls, PreTrainedModel) else cls
    check_params(option, constructor, params)
    made = constructor(**params)
    return made if constructor is cls else cls(made)


def check_params(option: str, constructor: Any, params: Mapping[str, Any]) -> None:
    """Configs of transformers would take any name.

    Raises:
        ConfigError: names the parameters that `constructor` does not have, as `params` beside the option.
    """
    accepted = [name for name in inspect.signature(constructor).parameters if name not in {"self", "kwargs"}]
    problems = []
    for name in (name for name in params if name not in accepted):
        near = suggest(name, accepted)
        hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(accepted)}"
        problems.append(f"{_beside(option, 'params')}.{name}: {constructor.__qualname__} has no such parameter; {hint}")
    if problems:
        raise ConfigError(problems)


def _checked_place(part: str, cls: Any, config: PartConfig, option: str) -> dict[str, Any]:
    """Revision and subfolder for the libraries, once the part is known to be available and safe to read.

    The part lies in the given folder below `pretrained`, in the one of its usual name, or is `pretrained` itself. Of a
    hub id the settings are checked; which files its index may name, the hub's client and the flag for safetensors
    decide.
    """
    assert config.pretrained is not None
    if problem := hub_problem(config.pretrained, config.revision, option):
        raise ConfigError(problem)
    root, usual = Path(config.pretrained), "scheduler" if part.startswith("noise_scheduler") else part
    asked = {"revision": config.revision, "_raise_exceptions_for_missing_entries": False}
    is_itself = not (root / usual).is_dir() and cached_file(config.pretrained, "model_index.json", **asked) is None
    subfolder = usual if config.subfolder is None and not is_itself else config.subfolder
    place, folder = {"revision": config.revision}, root / (subfolder or "")
    if subfolder:
        place["subfolder"] = subfolder
    problems = []
    if folder.is_dir():
        problems = folder_settings_problems(folder)
    elif root.is_dir():
        problems = [f"{config.pretrained!r} has no folder {subfolder!r} and is no {part} itself"]
    elif issubclass(cls, PreTrainedModel):
        settings, _ = cls.config_class.get_config_dict(config.pretrained, **place)
        problems = list(refused_settings(settings, f"{config.pretrained}/{subfolder}"))
        if cached_file(config.pretrained, _ADAPTER, **{**asked, **place}) is not None:
            problems.append(f"{config.pretrained!r} has {_ADAPTER}; merge the adapters first")
    if problems:
        raise ConfigError([f"{option}: {problem}" for problem in problems])
    return place


def folder_settings_problems(folder: Path) -> list[str]:
    """Refused content of the JSON files of a part's folder: settings, and shards that an index names, which must be
    files of the same folder in the format that holds no code."""
    problems = [f"{path}: adapters are not loaded with a model; merge them first" for path in folder.glob(_ADAPTER)]
    for path in sorted([*folder.glob("*config.json"), *folder.glob("*.safetensors.index.json")]):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            problems += refused_settings(value, str(path))
            names = set(value["weight_map"].values()) if path.name.endswith(".index.json") else set()
            outside = (n for n in names if Path(n).name != n or "\\" in n or not n.endswith(".safetensors"))
            problems += (f"{path}: names {n[:80]!r}, which is no *.safetensors file of its folder" for n in outside)
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            problems.append(f"{path}: is not readable as JSON of its kind ({str(error)[:100]})")
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
