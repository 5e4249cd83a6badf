"""What is remembered of a micro-batch until the host next looks: small tensors that stay on the device."""

from typing import NamedTuple

from torch import Tensor


class SeenMicroBatch(NamedTuple):
    """One forward pass of this process. Nothing here holds a graph."""

    loss: Tensor
    """[] as it was minimised."""
    sample_losses: Tensor
    """[B] its shares."""
    positions: Tensor
    """[B] int64, as in the batch."""
    sample_ids: Tensor
    """[B] int64, as in the batch."""
    timesteps: Tensor | None
    """[B] what the denoiser was told of the noise level; None for autoencoders."""
