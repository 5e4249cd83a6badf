"""Muon for hidden matrices and AdamW for everything else, as one optimizer."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from sd_training.optim.parameter_groups import Group
from sd_training.optim.skipped_steps import SkippingOptimizer


class MuonWithAdamW(SkippingOptimizer):
    """Groups with `is_matrix` go to `torch.optim.Muon`, the others to `torch.optim.AdamW`.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the averaged gradient of a matrix by a
    nearly orthogonal one. Its learning rate is multiplied by 0.2 √max(rows, columns) (Liu et al. 2025,
    arXiv:2502.16982, eq. 4), which gives the update AdamW's usual size, so that one learning rate and one weight decay
    serve both. Kernels are seen as matrices [out, in · height · width].

    Args:
        groups: parameter groups with `lr`, `weight_decay` and `is_matrix`.
        momentum: decay of the gradient average of matrices.
        betas: of AdamW.
        eps: of AdamW.
        fused: AdamW in one kernel.
    """

    def __init__(
        self, groups: list[Group], *, momentum: float, betas: tuple[float, float], eps: float, fused: bool
    ) -> None:
        placeholder = [torch.zeros(1, 1)]
        self._muon = torch.optim.Muon(placeholder, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(placeholder, betas=betas, eps=eps, fused=fused)
        super().__init__([{**self._defaults(group), **group} for group in groups], {})

    def update(self) -> None:
        """One step of both."""
        for group in self.param_groups:
            if group["is_matrix"]:
                self._update_matrices(group)
        self._adamw.param_groups = [group for group in self.param_groups if not group["is_matrix"]]
        self._adamw.state = self.state
        self._adamw.step()

    def _defaults(self, group: Group) -> dict[str, Any]:
        return (self._muon if group["is_matrix"] else self._adamw).defaults

    def _update_matrices(self, group: Group) -> None:
        """Views are made anew at every step: weights may have moved or changed their layout since the last one."""
        weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
        matrices = [weight.detach().flatten(1) for weight in weights]
        for weight, matrix in zip(weights, matrices, strict=True):
            assert weight.grad is not None
            matrix.grad = weight.grad.flatten(1)
        self._muon.param_groups = [{**group, "params": matrices}]
        self._muon.state = defaultdict(dict, zip(matrices, [self.state[weight] for weight in weights], strict=True))
        self._muon.step()
        for weight, matrix in zip(weights, matrices, strict=True):
            if matrix.data_ptr() != weight.data_ptr():  # channels-last kernels cannot be viewed as matrices
                weight.copy_(matrix.view(weight.shape))
