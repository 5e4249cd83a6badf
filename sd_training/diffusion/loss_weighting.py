"""Loss weights per noise level, and the learned uncertainty of each noise level.

Most weightings are published for one prediction type. All of them are functions of the noise level that multiply the
squared error of x_0; here they are written as w·σ², which is finite everywhere, and turned into a weight of the error
of the denoiser's output. With a = α² and s = σ²: SNR = a / s.

The uncertainty (Karras et al. 2024, arXiv:2312.02696, section 2.2 and eq. 21) is trained beside the denoiser and ends
at the logarithm of the expected loss, so that every noise level contributes equally; it is not exported.
"""

import math

import torch
from torch import Tensor, nn

from sd_training.config.schema import LossWeightingConfig, PredictionType

_TINY = 1e-12
_SMALLEST_SIGMA = 1e-3
"""Below, σ⁻² would be larger than on diffusers' grid of a thousand steps."""


def _per_target(prediction_type: PredictionType, a: Tensor, s: Tensor, sigma_data: float) -> Tensor:
    """(squared error of x_0) / (squared error of the output) / σ²."""
    match prediction_type:
        case "epsilon":  # x_0 = (x_t - σε) / α
            return 1.0 / a
        case "v_prediction" | "flow_prediction":  # x_0 = αx_t - σv with α² + σ² = 1; x_0 = x_t - σv with α + σ = 1
            return torch.ones_like(s)
        case "sample":
            return 1.0 / s
        case "edm":  # c_out²
            return sigma_data**2 / (s + sigma_data**2)


def min_snr(a: Tensor, s: Tensor, gamma: float) -> Tensor:
    """min(SNR, γ)·σ² (Hang et al. 2023, arXiv:2303.09556, eq. 8)."""
    return torch.minimum(a, gamma * s)


def soft_min_snr(a: Tensor, s: Tensor, gamma: float) -> Tensor:
    """SNR γ / (SNR + γ)·σ² (Crowson et al. 2024, arXiv:2401.11605)."""
    return a * gamma * s / (a + gamma * s)


def p2(a: Tensor, s: Tensor, gamma: float, k: float) -> Tensor:
    """SNR / (k + SNR)^γ·σ² (Choi et al. 2022, arXiv:2204.00227, section 4)."""
    return a * (s / (k * s + a)) ** gamma


def debiased(a: Tensor, s: Tensor) -> Tensor:
    """√SNR·σ², which is 1 / √SNR for ε (Yu et al. 2023, arXiv:2310.08442)."""
    return (a * s).sqrt()


def edm(s: Tensor, sigma_data: float) -> Tensor:
    """(σ² + σ_data²) / (σ σ_data)²·σ² (Karras et al. 2022, arXiv:2206.00364, table 1)."""
    return (s + sigma_data**2) / sigma_data**2


def loss_weights(
    config: LossWeightingConfig, prediction_type: PredictionType, signal: Tensor, sigma: Tensor, sigma_data: float
) -> Tensor:
    """[B] float32 weights of the squared error of the denoiser's output.

    Args:
        signal: [B] α.
        sigma: [B] σ.
    """
    a, s = signal.double().square(), sigma.double().square()
    if prediction_type == "epsilon":
        a = a.clamp(min=_TINY)  # the limit at SNR 0, instead of 0 / 0
    elif prediction_type == "sample":
        s = s.clamp(min=_TINY)
    match config.name:
        case None | "constant" | "learned_uncertainty":  # the uncertainty is added where the loss is taken
            return torch.ones_like(sigma, dtype=torch.float32)
        case "sigma_sqrt":  # Esser et al. 2024 (arXiv:2403.03206, section 3.1), as a weight of the flow velocity
            return s.clamp(min=_SMALLEST_SIGMA**2).reciprocal().float()
        case "cosmap":  # the same, as a weight instead of a density
            return (2.0 / (math.pi * (1.0 - 2.0 * sigma.double() + 2.0 * s))).float()
        case "min_snr":
            weight = min_snr(a, s, config.gamma)
        case "soft_min_snr":
            weight = soft_min_snr(a, s, config.gamma)
        case "p2":
            weight = p2(a, s, config.p2_gamma, config.p2_k)
        case "debiased":
            weight = debiased(a, s)
        case "edm":
            weight = edm(s, sigma_data)
    return (weight * _per_target(prediction_type, a, s, sigma_data)).float()


CHANNELS = 128
_MIN_LEVEL = 1e-6


class LevelUncertainty(nn.Module):
    """u(σ): random Fourier features of ¼ ln(σ / α) and one linear map, which starts at 0.

    Args:
        seed: of the features, which are never trained.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("frequencies", 2 * math.pi * torch.randn(CHANNELS, generator=generator))
        self.register_buffer("phases", 2 * math.pi * torch.rand(CHANNELS, generator=generator))
        self.weight = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, signal: Tensor, sigma: Tensor) -> Tensor:
        """[B] u from α and σ [B]."""
        ratio = sigma.float().clamp(min=_MIN_LEVEL) / signal.float().clamp(min=_MIN_LEVEL)
        features = math.sqrt(2) * torch.cos(torch.outer(ratio.log() / 4, self.frequencies) + self.phases)
        return features @ self.weight / math.sqrt(CHANNELS)
