"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv:2106.09685, section 4.1): W + (alpha / r) · B A with a frozen W, of
which A [r, in] and B [out, r] are trained.

peft puts them into the layers of a network; the names of the network's own modules stay, but for one more level,
`base_layer`, in an adapted layer. Here is how that is done, and how trained adapters leave a run: as the tensors of
a file that other programs load, or added to the weights of the network that the run began with.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import peft
import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from torch import Tensor, nn

from sd_training.config.fields import suggest
from sd_training.config.schema import LoraConfig
from sd_training.errors import ConfigError
from sd_training.models.execution import autocast_weights
from sd_training.models.family import Family

TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Attention matrices of CLIP."""
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names of A and B in a network."""
_TEXT_ROOT = "text_model."
"""Begins the names of CLIP's layers in every file, but no longer in all versions of transformers."""


def attach_adapters(family: Family, config: LoraConfig, *, seed: int) -> None:
    """Puts adapters into the family's denoiser, and into its text encoders where asked. What they are put into is
    frozen.

    Args:
        family: changed in place; on the meta device the adapters are there as well.
        config: with a rank.
        seed: of A; B starts at 0, so that the network does what it did before.

    Raises:
        ConfigError: a target is no linear layer or convolution of the denoiser.
    """
    for part, network in family.trained_networks(config.text_encoder).items():
        targets: Sequence[str] = TEXT_TARGETS
        if part == family.denoiser_part:
            targets = config.targets or [name for name in family.lora_targets if _adaptable(network, name)]
        adapt(network, part, targets, config, seed=seed)


def adapt(network: nn.Module, part: str, targets: Sequence[str], config: LoraConfig, *, seed: int) -> None:
    """As `attach_adapters`, of one network.

    Args:
        part: its name in the pipeline.
        targets: ends of the dotted names of layers.
    """
    for name in targets:
        if not _adaptable(network, name):
            near = suggest(name, sorted({layer.rpartition(".")[2] for layer in _adaptable(network)}))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"model.lora.targets: {part} has no linear layer or convolution named {name!r}{hint}")
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.rank * scale_of(config),
        lora_dropout=config.dropout,
        target_modules=[layer for name in targets for layer in _adaptable(network, name)],
        init_lora_weights=True if config.init == "kaiming" else "gaussian",
    )
    digest = hashlib.sha256(f"{seed}:lora {part}".encode()).digest()
    with torch.random.fork_rng(devices=[]), next(network.parameters()).device:
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        peft.inject_adapter_in_model(settings, network)


def _adaptable(network: nn.Module, end: str = "") -> list[str]:
    """Linear layers and convolutions whose dotted name is, or ends with, a name."""
    layers = (name for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d)))
    return [name for name in layers if not end or f".{name}".endswith(f".{end}")]


def narrow_base(network: nn.Module, dtype: torch.dtype | None) -> None:
    """Keeps the frozen weights that autocast casts to `dtype` in it: less memory, and the same results."""
    for parameter in autocast_weights(network):
        if dtype is not None and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def scale_of(config: LoraConfig) -> float:
    """Factor of B A."""
    return 1.0 if config.alpha is None else config.alpha / config.rank


def _pairs(adapters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Adapted layer, A, and B times the scale, in fp32."""
    for name in (name for name in adapters if name.endswith(_DOWN)):
        layer = name.removesuffix(_DOWN)
        yield layer, adapters[name].float(), adapters[f"{layer}{_UP}"].float() * scale


@torch.no_grad()
def merge(network: nn.Module, adapters: Mapping[str, Tensor], scale: float) -> None:
    """Adds trained adapters to the weights of a network without any.

    Args:
        network: changed in place.
        adapters: by name in the adapted network.
        scale: as `scale_of` gives it.
    """
    for layer, down, up in _pairs(adapters, scale):
        weight = network.get_submodule(layer).weight
        assert isinstance(weight, Tensor), "an adapted layer has a weight"
        weight += (up.flatten(1) @ down.flatten(1)).view_as(weight)  # of a convolution: A has the kernel, B is 1 × 1


def file_tensors(part: str, adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """One network's adapters by the names that other programs read: for transformers those of diffusers, for UNets and
    their text encoders those of kohya's scripts, which diffusers, ComfyUI and AUTOMATIC1111 all know. The scale is part
    of B, because not every program reads the same record of it.

    Args:
        part: the network's name in the pipeline.
        adapters, scale: as in `merge`.
    """
    tensors: dict[str, Tensor] = {}
    for layer, down, up in _pairs(adapters, scale):
        root = _TEXT_ROOT if part.startswith("text_encoder") and not layer.startswith(_TEXT_ROOT) else ""
        tensors |= {f"{part}.{root}{layer}.lora_A.weight": down, f"{part}.{root}{layer}.lora_B.weight": up.contiguous()}
    return tensors if part == "transformer" else convert_state_dict_to_kohya(tensors)
