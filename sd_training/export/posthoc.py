"""An average that was never kept, from snapshots of others: which of them, and their sum put into a network."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sd_training.errors import DataError
from sd_training.export.ema_snapshots import Snapshot
from sd_training.optim.power_function_ema import Profile, gamma_of, reconstruct

_NEGLIGIBLE = 1e-10
"""Snapshots with a smaller weight are not read: the weights sum to 1."""
_GROUP_VALUES = 2**24
"""Values that are summed at once, 128 MiB; opening a file anew for every tensor takes longer than reading it."""
_DENOISER = "denoiser."
"""Begins the denoiser's names where text encoders are trained beside it."""


@dataclass(frozen=True)
class Mixture:
    """What to add up for one average."""

    parts: list[tuple[Snapshot, float]]
    """Snapshots with their weights, which sum to 1; at least one."""
    residual: float
    """Relative residual of the profile, 0 where it is met exactly."""


def plan_mixture(snapshots: Sequence[Snapshot], step: int, sigma_rel: float) -> Mixture:
    """The snapshots to add up for the average of this width at this step.

    Those up to `step` are used and, for a step between two snapshots, the next ones: later ones do not help (the
    residual changes by less than a thousandth).

    Args:
        step: optimizer steps completed; at most that of the last snapshot.
    """
    end = min(snapshot.step for snapshot in snapshots if snapshot.step >= step)
    used = [snapshot for snapshot in snapshots if snapshot.step <= end]
    fit = reconstruct([snapshot.profile for snapshot in used], Profile(step, gamma_of(sigma_rel)))
    parts = [(s, float(weight)) for s, weight in zip(used, fit.weights, strict=True) if abs(weight) > _NEGLIGIBLE]
    return Mixture(parts, fit.residual)


def averaged_parameters(pipeline: Any, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters of a pipeline (or of a single network) that snapshots with these names belong to.

    A run that trains text encoders as well stores `denoiser.NAME` and `text_encoder.NAME`, others the network's names.
    """
    if not hasattr(pipeline, "components"):
        return dict(pipeline.named_parameters())
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    denoiser = parts["unet"] if "unet" in parts else parts["transformer"]
    if not any(name.startswith(_DENOISER) for name in names):
        return dict(denoiser.named_parameters())
    trained = {_DENOISER[:-1]: denoiser, **{n: part for n, part in parts.items() if n.startswith("text_encoder")}}
    return {f"{n}.{name}": p for n, part in trained.items() for name, p in part.named_parameters()}


def snapshot_shapes(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """Shapes by parameter name; no weights are read."""
    with safe_open(snapshot.path, framework="pt") as stored:
        names = stored.keys()
        return {name: tuple(stored.get_slice(name).get_shape()) for name in names}


def check_fit(mixture: Mixture, parameters: Mapping[str, Tensor]) -> None:
    """All snapshots hold exactly these parameters.

    Raises:
        DataError: names a snapshot and a parameter that do not fit.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for snapshot, _ in mixture.parts:
        found = snapshot_shapes(snapshot)
        odd = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        if odd:
            raise DataError(
                f"{snapshot.path}: {len(odd)} tensors do not fit the network of the pipeline, e.g. {odd[0]}: "
                f"{found.get(odd[0], 'missing')} in the snapshot, {expected.get(odd[0], 'missing')} in the network"
            )


@torch.no_grad()
def load_mixture(mixture: Mixture, parameters: Mapping[str, Tensor]) -> None:
    """Overwrites the parameters by the sum of the snapshots, a group of parameters after the other.

    A snapshot is closed after every group: a mapped file counts as memory of the process once it was read, and all
    snapshots together are many times the network. Sums are float64, since the weights have both signs.

    Raises:
        DataError: as `check_fit`; nothing is overwritten then.
    """
    check_fit(mixture, parameters)
    for group in _groups(parameters):
        sums = {name: torch.zeros(parameters[name].shape, dtype=torch.float64) for name in group}
        for snapshot, weight in mixture.parts:
            with safe_open(snapshot.path, framework="pt") as stored:
                for name, total in sums.items():
                    total.add_(stored.get_tensor(name), alpha=weight)
        for name, total in sums.items():
            parameters[name].copy_(total)


def _groups(parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of parameters that are summed at once: as many as stay below `_GROUP_VALUES`, at least one."""
    group: list[str] = []
    for name, parameter in parameters.items():
        if group and sum(parameters[other].numel() for other in group) + parameter.numel() > _GROUP_VALUES:
            yield group
            group = []
        group.append(name)
    if group:
        yield group
