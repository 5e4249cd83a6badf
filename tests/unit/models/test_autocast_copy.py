"""Frozen networks with weights in autocast's type compute what autocast computes from fp32 weights."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sd_training.export.draw import draw_images
from sd_training.models.execution import autocast_copy, autocast_weights
from tests.family_makers import PIPELINES, drawn_size


class CountCasts(TorchDispatchMode):
    """Casts of a network's own parameters."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.own, self.count = {p.data_ptr() for p in network.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.own:
            self.count += 1
        return func(*args, **(kwargs or {}))


def pictures(vae: Any, count: int, size: tuple[int, int]) -> Tensor:
    """Zeros; for an autoencoder of films of one frame."""
    is_of_films = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    return torch.zeros(count, 3, *[1] * is_of_films, *size)


def states_and_picture(pipeline: Any, size: tuple[int, int]) -> dict[str, Tensor]:
    """Latent moments, what the text encoders give, and a picture, under bf16 autocast."""
    found: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        encoded = pipeline.vae.encode(pictures(pipeline.vae, 2, size).normal_(generator=generator))
        found["moments"] = encoded.latent if "latent" in encoded else encoded.latent_dist.parameters
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
            if getattr(pipeline, name, None) is not None:
                tokens = torch.randint(0, 20, (2, 16), generator=generator)
                output = getattr(pipeline, name)(tokens, output_hidden_states=True)
                found |= {f"{name} {number}": states for number, states in enumerate(output.hidden_states)}
                found[f"{name} first"] = output[0]
        height, width = size
        steps = {"num_inference_steps": 2, "guidance_scale": 2.0, "batch_size": 1}
        [picture] = draw_images(pipeline, ["a red one"], [3], height=height, width=width, **steps)
    return {**found, "picture": torch.from_numpy(np.array(picture))}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_bit_is_the_same_and_hardly_a_weight_is_cast(name: str) -> None:
    torch.manual_seed(0)
    pipeline: Any = PIPELINES[name]()
    networks = {
        part: network.eval()
        for part, network in pipeline.components.items()
        if part == "vae" or (part.startswith("text_encoder") and network is not None)
    }
    for network in networks.values():  # random networks begin with zeros as biases and ones as norms
        for parameter in network.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
    size = drawn_size(name)
    expected, before = (
        states_and_picture(pipeline, size),
        {n: p.clone() for n, p in networks["vae"].state_dict().items()},
    )
    copies: dict[str, Any] = {part: autocast_copy(network, torch.bfloat16) for part, network in networks.items()}
    pipeline.register_modules(**copies)
    found = states_and_picture(pipeline, size)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value.dtype == found[key].dtype and torch.equal(value, found[key]), key
    assert all(torch.equal(tensor, before[key]) for key, tensor in networks["vae"].state_dict().items())
    for part, network in copies.items():
        assert network.dtype == networks[part].dtype == torch.float32  # pipelines read it
        assert not any(parameter.requires_grad for parameter in autocast_weights(network))
    pixels, counts = pictures(networks["vae"], 1, (16, 16)), []
    for vae in (networks["vae"], copies["vae"]):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), CountCasts(vae) as casts:
            vae.encode(pixels)
        counts.append(casts.count)
    # Of the encoder's layers weights and biases; of the copy, the weight by which its type is told.
    encoder = [own for part, own in networks["vae"].named_children() if part in ("encoder", "quant_conv")]
    layers = [m for own in encoder for m in own.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d, nn.Linear))]
    assert counts == [sum(len([*layer.parameters()]) for layer in layers), 1]


def test_a_weight_that_an_embedding_shares_stays_fp32() -> None:
    network = nn.ModuleDict({"first": nn.Linear(2, 2), "words": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    network["head"].weight = network["words"].weight
    made = autocast_copy(network, torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in made.named_parameters(remove_duplicate=False)}
    fp32 = {"first.weight", "words.weight", "head.weight"}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == fp32 and len(types) == 5
    assert made["head"].weight is made["words"].weight
