"""How large an error is. Every function keeps the shape of `error`."""

from torch import Tensor

from sd_training.config.objective_schema import LossConfig


def pseudo_huber(error: Tensor, delta: Tensor | float) -> Tensor:
    """2δ (√(e² + δ²) - δ): e² for small errors, 2δ|e| for large ones (Khrapov et al. 2024, arXiv:2403.16728)."""
    square = error.square()
    return 2.0 * delta * square / ((square + delta**2).sqrt() + delta)


def huber_delta(config: LossConfig, signal: Tensor, sigma: Tensor, time: Tensor) -> Tensor | float:
    """δ of each sample (arXiv:2403.16728, section 4).

    Args:
        signal, sigma: [B] α and σ.
        time: [B] noise level in [0, 1].
    """
    match config.huber_schedule:
        case "constant":
            return config.huber_delta
        case "snr":
            return (1.0 - config.huber_delta) / (1.0 + sigma / signal.clamp(min=1e-6)).square() + config.huber_delta
        case "exponential":
            return config.huber_delta**time
