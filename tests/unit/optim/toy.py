"""A tiny network with every kind of parameter, and gradients that depend on the step alone."""

from typing import Any

import torch
from torch import nn

from sd_training.config.schema import OptimizerConfig, OptimizerParams
from sd_training.optim import Optimization, make_optimizer

NAMES = ("adamw", "adafactor", "adamw_8bit", "lion", "prodigy", "muon")
PARAMS = {"learning_rate", "beta1", "beta2", "weight_decay", "epsilon", "momentum", "d0", "d_coef"}


class Toy(nn.Module):
    """First layer, hidden kernel, norm, hidden matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3)
        self.conv = nn.Conv2d(8, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.linear = nn.Linear(6, 10)


def named(module: nn.Module, part: str = "denoiser") -> list[tuple[str, nn.Parameter]]:
    return [(f"{part}.{name}", parameter) for name, parameter in module.named_parameters()]


def toy(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return named(Toy().to(dtype))


def config(name: str, **options: Any) -> OptimizerConfig:
    """Hyper-parameters and options of the optimizer in one line."""
    params = {key: options.pop(key) for key in PARAMS & set(options)}
    return OptimizerConfig(name=name, params=OptimizerParams(**params), **options)


def make(
    options: OptimizerConfig,
    parameters: list[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    fused: bool = True,
    seed: int = 0,
) -> Any:
    plan = Optimization(options, learning_rate, lambda step: 1.0, seed=seed, has_gradient_scaler=not fused)
    return make_optimizer(plan, parameters)


def build(name: str, parameters: list[tuple[str, nn.Parameter]], rate: float = 0.01, **options: Any) -> Any:
    return make(config(name, **options), parameters, learning_rate=rate, fused=name != "adafactor", seed=7)


def set_gradients(parameters: list[tuple[str, nn.Parameter]], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for _, parameter in parameters:
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (0.1 * draw).to(parameter.dtype)


def train(optimizer: Any, parameters: list[tuple[str, nn.Parameter]], first: int, last: int) -> None:
    """Optimizer steps `first` to `last` - 1."""
    for step in range(first, last):
        set_gradients(parameters, step)
        optimizer.step()


def values(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for _, parameter in parameters]
