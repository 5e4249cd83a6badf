"""What the denoiser is asked to answer, given x_t = √ᾱ x_0 + √(1 - ᾱ) ε. Shapes: every tensor [B, C, h, w] or
broadcastable to it."""

from typing import Literal

from torch import Tensor

PredictionType = Literal["epsilon", "v_prediction"]


def noised(latents: Tensor, noise: Tensor, signal_level: Tensor, noise_level: Tensor) -> Tensor:
    """x_t = √ᾱ x_0 + √(1 - ᾱ) ε (Ho et al. 2020, arXiv:2006.11239, eq. 4)."""
    return signal_level * latents + noise_level * noise


def velocity(latents: Tensor, noise: Tensor, signal_level: Tensor, noise_level: Tensor) -> Tensor:
    """v = √ᾱ ε - √(1 - ᾱ) x_0 (Salimans & Ho 2022, arXiv:2202.00512, section 4)."""
    return signal_level * noise - noise_level * latents


def target_of(
    prediction_type: PredictionType, latents: Tensor, noise: Tensor, signal_level: Tensor, noise_level: Tensor
) -> Tensor:
    """The right answer of the denoiser for `prediction_type`."""
    match prediction_type:
        case "epsilon":
            return noise
        case "v_prediction":
            return velocity(latents, noise, signal_level, noise_level)
        case _:
            raise ValueError(f"prediction_type {prediction_type!r} is not one of epsilon, v_prediction")
