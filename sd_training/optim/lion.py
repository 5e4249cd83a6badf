"""Lion (Chen et al. 2023, arXiv:2302.06675) from lion-pytorch, with few kernels for all tensors."""

from typing import Any

from sd_training.optim.skipped_steps import SkippingOptimizer


def lion(library: Any) -> Any:
    """`Lion` as a class that skips marked steps and parts without a gradient.

    Args:
        library: the module `lion_pytorch.foreach`.
    """

    class Lion(SkippingOptimizer, library.Lion):
        """The library's own step fails on a group without any gradient."""

        def update(self) -> None:
            every = self.param_groups
            self.param_groups = [group for group in every if any(p.grad is not None for p in group["params"])]
            try:
                library.Lion.step(self)
            finally:
                self.param_groups = every

    return Lion
