"""Parameter groups: what is trained at which share of the learning rate, with or without weight decay."""

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd_training.config.optimizer_schema import OptimizerConfig
from sd_training.errors import ConfigError

Group: TypeAlias = dict[str, Any]

_AT_THE_ENDS = re.compile(
    r"(^|\.)[^.]*embed[^.]*\.|(^|\.)conv_(in|out)\.|^[^.]+\.(proj_(in|out)[^.]*|final_layer|lm_head)\."
    r"|^[^.]+\.(patchify|unpatchify|text_projections|pooled_projection|caption_projection|final_modulation)\."
)
"""Embeddings, and the first and last layer of a network, by their usual names in diffusers and transformers."""


def parameter_groups(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float
) -> list[Group]:
    """The parameters by part, by weight decay and, with `muon`, by how they are updated.

    Args:
        named_parameters: names begin with the part: `denoiser.…`, `text_encoder.…`.
        learning_rate: peak learning rate of parts that have none of their own.

    Returns:
        Groups in the order of their first parameter, with the keys `params`, `part`, `lr`, `lr_factor` (the part's peak
        as a share of `learning_rate`), `weight_decay` and `is_matrix` (updated by Muon).

    Raises:
        ConfigError: `optimizer.rates_by_part` names a part that is not trained.
    """
    groups: dict[tuple[str, bool, bool], Group] = {}
    for name, parameter in named_parameters:
        part = name.partition(".")[0]
        has_decay = not (config.no_decay_on_norms_and_biases and is_norm_or_bias(name, parameter))
        is_matrix = config.name == "muon" and is_hidden_matrix(name, parameter)
        key = (part, has_decay, is_matrix)
        if key not in groups:
            rate = config.rates_by_part.get(part, learning_rate)
            groups[key] = {
                "params": [],
                "part": part,
                "lr": rate,
                "lr_factor": 1.0 if rate == learning_rate else rate / learning_rate,
                "weight_decay": config.params.weight_decay if has_decay else 0.0,
                "is_matrix": is_matrix,
            }
        groups[key]["params"].append(parameter)
    _check_parts(config, {part for part, _, _ in groups})
    return list(groups.values())


def is_norm_or_bias(name: str, parameter: Tensor) -> bool:
    """Whether weight decay makes little sense: a bias, the weight of a norm, a scale."""
    return parameter.ndim <= 1 or name.endswith(".bias")


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates it: the weight of a linear layer or a convolution between the first and the last layer
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; a kernel [out, in, …] is a matrix [out, in · …])."""
    is_weight = name.endswith(".weight") and parameter.ndim >= 2
    return is_weight and min(parameter.shape[:2]) > 1 and not _AT_THE_ENDS.search(name)


def _check_parts(config: OptimizerConfig, parts: set[str]) -> None:
    unknown = sorted(set(config.rates_by_part) - parts)
    if unknown:
        raise ConfigError(
            f"optimizer.rates_by_part: {', '.join(unknown)} is not trained; trained parts: {', '.join(sorted(parts))}"
        )


def by_mesh(groups: Iterable[Group]) -> list[Group]:
    """Groups of parameters that one kernel can update: those that tensor parallelism cuts lie over other processes."""
    split: list[Group] = []
    for group in groups:
        parts: dict[object, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            parts.setdefault(mesh, []).append(parameter)
        split += [{**group, "params": parameters} for parameters in parts.values()]
    return split
