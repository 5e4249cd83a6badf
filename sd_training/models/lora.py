"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv:2106.09685, section 4.1): W + (alpha / r) · B A with a frozen W, of
which A [r, in] and B [out, r] are trained.

peft puts them into the layers of a network; the names of the network's own modules stay, but for one more level,
`base_layer`, in an adapted layer. Here is how that is done, and how trained adapters leave a run: as the tensors of
a file that other programs load, or added to the weights of the network that the run began with.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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


class Int8Linear(nn.Module):
    """A frozen linear layer with weights of 8 bits: integers, and a factor for each output (the rows of LLM.int8,
    Dettmers et al. 2022, arXiv:2208.07339, section 2.1). Only the weights are rounded: they are multiplied out to the
    type of the activations in the forward pass and once more in the backward pass, which keeps none of it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        own = layer.weight.detach().float()
        scale = (own.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        # No buffers, which DDP sends around in every step.
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.weight = nn.Parameter((own / scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in the type that an ordinary layer computes in."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Int8Product.apply(x.to(dtype), self.weight, self.scale, bias)
        return product


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return nn.functional.linear(x, (weight * scale).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        return gradient @ (weight * scale).to(gradient.dtype), None, None, None


def frozen_linear(blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers without a gradient, each after its parent and its name in that."""
    return [
        (parent, name, layer)
        for block in blocks
        for parent in block.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad
    ]


def round_base(blocks: Iterable[nn.Module]) -> None:
    """Rounds the frozen weights of linear layers to 8 bits (`Int8Linear`)."""
    for parent, name, layer in frozen_linear(blocks):
        setattr(parent, name, Int8Linear(layer))


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
