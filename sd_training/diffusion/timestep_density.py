"""How often each timestep is trained."""

from torch import Tensor


def uniform_timesteps(draw: Tensor, num_timesteps: int) -> Tensor:
    """[B] int64 timesteps, each of 0..T-1 equally likely, from uniform draws [B] in [0, 1)."""
    return (draw * num_timesteps).long().clamp_(max=num_timesteps - 1)
