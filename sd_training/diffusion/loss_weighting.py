"""How much the error at a timestep weighs."""

import torch
from torch import Tensor

from sd_training.diffusion.prediction import PredictionType


def min_snr_weights(snr: Tensor, gamma: float, prediction_type: PredictionType) -> Tensor:
    """[T] min-SNR-γ weights (Hang et al. 2023, arXiv:2303.09556, eq. 8 and section 3.4).

    The paper weighs the x_0 error by min(SNR, γ). For ε that is min(SNR, γ) / SNR, written as min(1, γ / SNR) so that
    it is finite at SNR 0; for v it is min(SNR, γ) / (SNR + 1).

    Args:
        snr: [T] ᾱ / (1 - ᾱ), already of the rescaled schedule.
        gamma: γ, 5 in the paper.
    """
    match prediction_type:
        case "epsilon":
            return torch.clamp(gamma / snr, max=1.0)
        case "v_prediction":
            return torch.clamp(snr, max=gamma) / (snr + 1.0)
        case _:
            raise ValueError(f"prediction_type {prediction_type!r} is not one of epsilon, v_prediction")
