"""Targets of the denoiser, given x_t = α x_0 + σ ε. Shapes: every tensor [B, C, h, w] or broadcastable to
it; `sigma_data` is the standard deviation of x_0, which EDM alone reads."""

from torch import Tensor

from sd_training.config.objective_schema import PredictionType


def noised(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """x_t = α x_0 + σ ε (Ho et al. 2020, arXiv:2006.11239, eq. 4)."""
    return signal * latents + sigma * noise


def velocity(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """v = α ε - σ x_0 (Salimans & Ho 2022, arXiv:2202.00512, section 4)."""
    return signal * noise - sigma * latents


def flow_velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """dx_t/dσ = ε - x_0 of the straight path (Liu et al. 2022, arXiv:2209.03003, eq. 1; from data to noise)."""
    return noise - latents


def preconditioned_target(latents: Tensor, noise: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """(x_0 - c_skip x_t) / c_out, the output of F (Karras et al. 2022, arXiv:2206.00364, eq. 7 and table 1)."""
    # The same, without the difference of two nearly equal numbers at small σ.
    return (sigma / sigma_data * latents - sigma_data * noise) * (sigma.square() + sigma_data**2).rsqrt()


def input_scale(prediction_type: PredictionType, sigma: Tensor, sigma_data: float) -> Tensor | float:
    """c_in, what x_t is multiplied by before the denoiser sees it: 1 / √(σ² + σ_data²) for EDM (table 1)."""
    return (sigma.square() + sigma_data**2).rsqrt() if prediction_type == "edm" else 1.0


def target_of(
    prediction_type: PredictionType, latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor, sigma_data: float
) -> Tensor:
    """The target of the denoiser for `prediction_type`."""
    match prediction_type:
        case "epsilon":
            return noise
        case "v_prediction":
            return velocity(latents, noise, signal, sigma)
        case "sample":
            return latents
        case "flow_prediction":
            return flow_velocity(latents, noise)
        case "edm":
            return preconditioned_target(latents, noise, sigma, sigma_data)
        case _:
            raise ValueError(f"prediction_type {prediction_type!r} is not known")
