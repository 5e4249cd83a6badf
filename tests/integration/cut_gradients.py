"""Gradients of every family's denoiser, whole and cut, in this process group; started by torchrun in tests."""

import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from sd_training.config.plan import Mesh
from sd_training.config.schema import ConditioningConfig, DistributedConfig, ModelConfig, ObjectiveConfig
from sd_training.models.execution import compile_blocks
from sd_training.models.families import load_family
from sd_training.models.family import Family, latent_grid
from sd_training.optim import clip_gradients
from sd_training.parallel.strategies import FSDP2Strategy, ShardingSpec
from sd_training.types import NoisedBatch


def family_of(folder: Path) -> Family:
    return load_family(ModelConfig(pretrained=str(folder)), ObjectiveConfig(), ConditioningConfig(), seed=0)


def backward(family: Family) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients by name, of inputs that are the same on every process."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, *latent_grid(family.vae).shape(32, 32), generator=generator)
    conditioning = family.blank_conditioning(2, torch.device("cpu"))
    conditioning.states = [torch.randn(s.shape, generator=generator) for s in conditioning.states]
    timesteps = torch.tensor([100.0, 700.0])
    noised = NoisedBatch(latents, timesteps, latents, timesteps / 1000, timesteps / 1000, timesteps)
    loss = family.predict(family.denoiser, noised, conditioning).square().mean()
    loss.backward()
    gradients = {n: p.grad for n, p in family.denoiser.named_parameters() if p.grad is not None}
    return float(loss), {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in gradients.items()}


def cut(family: Family, mesh: Mesh, backend: str) -> None:
    """As the strategy cuts, without a trainer; blocks are compiled where a backend is given."""
    if backend:
        compile_blocks(family.blocks(), num_sizes=1, backend=backend)
    spec = ShardingSpec([family.denoiser], family.blocks(), family.tensor_plan)
    strategy = FSDP2Strategy(mesh, spec, DistributedConfig(), None, process_group_backend="gloo")
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    strategy._device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "fsdp", "tensor"))
    strategy.shard_network()


def randomise(network: nn.Module) -> None:
    """Gates and last layers that start at zero would hide everything behind them."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def largest_difference(folder: Path, mesh: Mesh, backend: str) -> tuple[float, float]:
    """Of the loss, and of the gradients relative to the largest gradient of the same parameter."""
    whole, in_pieces = family_of(folder), family_of(folder)
    for family in (whole, in_pieces):
        randomise(family.denoiser)
    loss, gradients = backward(whole)
    cut(in_pieces, mesh, backend)
    cut_loss, cut_gradients = backward(in_pieces)
    assert gradients.keys() == cut_gradients.keys()
    norm = torch.nn.utils.get_total_norm(gradients.values())
    cut_norm = clip_gradients(in_pieces.denoiser.parameters(), 0.5 * float(norm))
    torch.testing.assert_close(cut_norm, norm, rtol=1e-5, atol=0)
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())  # biases of keys have none but rounding errors
    far = {
        n: float((g - cut_gradients[n]).abs().max()) / max(float(g.abs().max()), least) for n, g in gradients.items()
    }
    return abs(loss - cut_loss) / abs(loss), max(far.values())


def main() -> None:
    """Words `axis=size`, perhaps `compile=backend`, and pipeline folders; one line of differences per folder."""
    distributed.init_process_group("gloo")
    given = {k: v for k, _, v in (w.partition("=") for w in sys.argv[1:]) if v}
    backend = given.pop("compile", "")
    axes = {"data": 1, "fsdp": 1, "tensor": 1} | {axis: int(size) for axis, size in given.items()}
    for folder in (Path(word) for word in sys.argv[1:] if "=" not in word):
        loss, gradients = largest_difference(folder, Mesh(**axes), backend)
        if distributed.get_rank() == 0:
            print(f"{folder.name} {loss:.2e} {gradients:.2e}", flush=True)


if __name__ == "__main__":
    main()
