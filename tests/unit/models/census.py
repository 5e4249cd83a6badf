"""Bytes that an eager denoiser moves under CUDA's autocast in bf16, counted on fake tensors.

    python -m tests.unit.models.census     # the published sizes at 512 pixels: the table of docs/memory.md; two minutes

Every operation reads its inputs and writes its results once; views are free. A picture counts as the difference between
batches of two and four, so that what weights and their gradients take is left out.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import yaml
from diffusers import PixArtTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sd_training.build.dry_run import cuda_autocast
from sd_training.models.execution import narrow_norms
from sd_training.models.mmdit_rope import MMDiTRope
from tests.integration.training import ROOT

FREE = ("prim.", "aten.view", "aten.detach", "aten._unsafe_view", "aten.empty", "aten.t.")
CAST = "aten._to_copy.default"


class Census(TorchDispatchMode):
    """Operation → bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not str(func).startswith(FREE):
            tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
            self.num_bytes[str(func)] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def text(samples: int, tokens: int, width: int) -> Tensor:
    return torch.zeros(samples, tokens, width)


def sd2(samples: int, **changes: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    latents, times = torch.zeros(samples, 4, 64, 64), torch.zeros(samples)
    return UNet2DConditionModel(**published("sd2_base") | changes), (latents, times, text(samples, 77, 1024))


def sd3(samples: int, **changes: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    latents, states = torch.zeros(samples, 16, 64, 64), text(samples, 333, 4096)
    network = SD3Transformer2DModel(**published("sd3_medium") | changes)
    return network, (latents, states, torch.zeros(samples, 2048), torch.zeros(samples))


def mmdit_rope(samples: int, **changes: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    latents, states = torch.zeros(samples, 16, 64, 64), [text(samples, 77, 2304), text(samples, 77, 1024)]
    masks = [torch.ones(samples, 77, dtype=torch.bool)] * 2
    network = MMDiTRope(**published("mmdit_rope") | changes)
    return network, (latents, torch.zeros(samples), states, torch.zeros(samples, 768), masks)


def pixart(samples: int, **changes: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    latents, times = torch.zeros(samples, 4, 64, 64), torch.zeros(samples)
    sizes, mask = {"resolution": None, "aspect_ratio": None}, torch.ones(samples, 300, dtype=torch.bool)
    network = PixArtTransformer2DModel(**published("pixart_sigma") | changes)
    return network, (latents, text(samples, 300, 4096), times, sizes, None, None, None, mask)


DENOISERS: Mapping[str, Callable[..., tuple[nn.Module, tuple[Any, ...]]]] = {
    "sd2": sd2,
    "sd3": sd3,
    "mmdit_rope": mmdit_rope,
    "pixart": pixart,
}


def published(name: str) -> dict[str, Any]:
    """Parameters of the denoiser of a shipped config."""
    model = yaml.safe_load((ROOT / "configs" / "models" / f"{name}.yaml").read_text(encoding="utf-8"))["model"]
    return dict((model.get("unet") or model["transformer"])["params"])


def count(name: str, samples: int, *, is_narrow: bool = False, **changes: Any) -> tuple[Counter[str], int]:
    """Operation → bytes of a forward and a backward pass, and bytes that are kept for the latter."""
    kept: dict[int, torch.UntypedStorage] = {}
    with FakeTensorMode():
        network, inputs = DENOISERS[name](samples, **changes)
        if is_narrow:
            narrow_norms(network)
        own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return tensor

        with Census() as census:
            with cuda_autocast("bf16"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = network.train()(*inputs).sample.float().square().mean()
            loss.backward()
    return census.num_bytes, sum(storage.nbytes() for storage in kept.values())


def per_picture(name: str, **options: Any) -> tuple[dict[str, float], float]:
    """As `count`, of one picture."""
    (two, kept), (four, more_kept) = (count(name, samples, **options) for samples in (2, 4))
    return {kind: (four[kind] - two[kind]) / 2 for kind in four}, (more_kept - kept) / 2


if __name__ == "__main__":
    for name in DENOISERS:
        for is_narrow in (False, True):
            moved, kept = per_picture(name, is_narrow=is_narrow)
            total = sum(moved.values()) / 1e9
            print(f"{name}, {is_narrow=}: {total:.2f} GB, casts {moved[CAST] / 1e9:.2f}, kept {kept / 1e9:.3f}")
