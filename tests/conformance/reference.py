"""The papers' formulas in float64 numpy. Nothing of the project and nothing of diffusers is used here.

A sample is one row: α, σ, u are [B]; pictures are [B, C, h, w].
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

Array = NDArray[np.float64]
DISCRETE = ("epsilon", "v_prediction", "sample")
PREDICTIONS = (*DISCRETE, "flow_prediction", "edm")
WEIGHTINGS = (
    "constant",
    "min_snr",
    "soft_min_snr",
    "p2",
    "debiased",
    "sigma_sqrt",
    "cosmap",
    "edm",
)
TRAINED_BETAS = [0.002 * 1.25**i for i in range(20)]
BETAS: dict[str, dict[str, Any]] = {
    "linear": {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"},
    "scaled_linear": {
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
    },
    "cosine": {"num_train_timesteps": 1000, "beta_schedule": "squaredcos_cap_v2"},
    "trained": {"num_train_timesteps": 20, "trained_betas": TRAINED_BETAS},
}
"""Discrete schedule → settings of a diffusers scheduler."""
SCHEDULES = (*BETAS, *(f"zero_snr_{name}" for name in BETAS))


def betas(name: str) -> Array:
    """β_t (Ho et al. 2020, section 4; Rombach et al. 2022, appendix D; Nichol & Dhariwal 2021, eq. 17)."""
    settings = BETAS[name]
    if name == "trained":
        return np.array(TRAINED_BETAS)
    count = settings["num_train_timesteps"]
    if name == "cosine":
        f = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * np.pi / 2) ** 2
        return np.minimum(1 - (f / f[0])[1:] / (f / f[0])[:-1], 0.999)
    ramp, first, last = np.arange(count) / (count - 1), settings["beta_start"], settings["beta_end"]
    if name == "linear":
        return first + ramp * (last - first)
    return (first**0.5 + ramp * (last**0.5 - first**0.5)) ** 2


def alpha_bar(schedule: str) -> Array:
    """ᾱ_t = Π (1 - β_s), rescaled to zero terminal SNR (Lin et al. 2023, algorithm 1) where the name says so."""
    plain = np.exp(np.cumsum(np.log1p(-betas(schedule.removeprefix("zero_snr_")))))
    if not schedule.startswith("zero_snr_"):
        return plain
    root = np.sqrt(plain)
    moved = root - root[-1]
    return np.square(moved * (root[0] / moved[0]))


@dataclass(frozen=True)
class Setting:
    """One product of the objective, in plain numbers."""

    prediction: str = "epsilon"
    schedule: str = "scaled_linear"
    """Of `SCHEDULES`, or `flow`, or `edm`."""
    weighting: str = "constant"
    loss: str = "l2"
    """`l2`, or `huber_` and the schedule of δ."""
    noise: dict[str, Any] = field(default_factory=dict, hash=False)
    """Offset noise and input perturbation as the options name them."""
    gamma: float = 5.0
    p2_gamma: float = 1.0
    p2_k: float = 1.0
    huber_delta: float = 0.1
    sigma_data: float = 1.0
    log_mean: float = 0.0
    log_std: float = 1.0


@dataclass(frozen=True)
class Example:
    """What one training example must be."""

    alpha: Array
    sigma: Array
    timesteps: Array
    model_input: Array
    target: Array
    weight: Array


def levels(setting: Setting, u: Array) -> tuple[Array, Array, Array]:
    """α, σ and what the denoiser is told, of uniform draws."""
    if setting.prediction == "flow_prediction":  # Liu et al. 2022, eq. 1: the straight path
        return 1 - u, u, 1000 * u
    if setting.prediction == "edm":  # Karras et al. 2022, table 1: ln σ ~ N(P_mean, P_std²), c_noise = ¼ ln σ
        log_sigma = setting.log_mean + setting.log_std * norm.ppf(u)
        return np.ones_like(u), np.exp(log_sigma), log_sigma / 4
    table = alpha_bar(setting.schedule)
    timesteps = np.minimum(np.floor(u * len(table)), len(table) - 1).astype(int)
    return np.sqrt(table[timesteps]), np.sqrt(1 - table[timesteps]), timesteps


def _wide(row: Array) -> Array:
    return row[:, None, None, None]


def noises(setting: Setting, eps: Array, eta: Array, xi: Array) -> tuple[Array, Array]:
    """The noise the denoiser is asked for, and the one it sees.

    Offset noise belongs to both; input perturbation (Ning et al. 2023) to what it sees alone.
    """
    options = setting.noise
    asked = eps + (options.get("offset_noise", 0.0) * eta)[:, :, None, None]
    return asked, asked + options.get("input_perturbation", 0.0) * xi


def target(prediction: str, x0: Array, eps: Array, alpha: Array, sigma: Array, sigma_data: float) -> Array:
    """The right answer. α, σ are broadcastable to pictures."""
    if prediction == "epsilon":
        return eps
    if prediction == "sample":
        return x0
    if prediction == "v_prediction":  # Salimans & Ho 2022: v = α ε - σ x
        return alpha * eps - sigma * x0
    if prediction == "flow_prediction":
        return eps - x0
    # Karras et al. 2022, eq. 8: (y - c_skip (y + n)) / c_out. With table 1 this is (σ y / σ_d - σ_d ε) / √(σ² + σ_d²),
    # in which nothing cancels at small σ.
    return (sigma * x0 / sigma_data - sigma_data * eps) / np.sqrt(sigma**2 + sigma_data**2)


def example(setting: Setting, u: Array, x0: Array, eps: Array, eta: Array, xi: Array) -> Example:
    """One training example per row."""
    alpha, sigma, timesteps = levels(setting, u)
    asked, seen = noises(setting, eps, eta, xi)
    a, s = _wide(alpha), _wide(sigma)
    noisy = a * x0 + s * seen
    c_in = 1 / np.sqrt(s**2 + setting.sigma_data**2) if setting.prediction == "edm" else 1.0
    goal = target(setting.prediction, x0, asked, a, s, setting.sigma_data)
    return Example(alpha, sigma, timesteps, c_in * noisy, goal, weight(setting, alpha, sigma))


def x0_weight(setting: Setting, snr: Array) -> Array:
    """Weight of the squared error of x_0 as a function of SNR = α² / σ²."""
    match setting.weighting:
        case "min_snr":  # Hang et al. 2023, section 3.4
            return np.minimum(snr, setting.gamma)
        case "soft_min_snr":  # Crowson et al. 2024: 1 / (σ² + 1/γ), with α = 1
            return 1 / (1 / snr + 1 / setting.gamma)
        case "p2":  # Choi et al. 2022, eq. 8: λ_t / (k + SNR)^γ, with λ_t of the simple loss, SNR for x_0
            return snr / (setting.p2_k + snr) ** setting.p2_gamma
        case _:  # debiased, Yu et al. 2023: 1 / √SNR for ε
            return np.sqrt(snr)


def per_answer(setting: Setting, alpha: Array, sigma: Array) -> Array:
    """(∂x_0 / ∂answer)² at fixed x_t: turns a weight of x_0 into one of the answer."""
    match setting.prediction:
        case "epsilon":  # x_0 = (x_t - σ ε) / α
            return (sigma / alpha) ** 2
        case "v_prediction":  # x_0 = α x_t - σ v
            return sigma**2
        case "sample":
            return np.ones_like(sigma)
        case "flow_prediction":  # x_0 = x_t - σ v
            return sigma**2
        case _:  # x_0 = c_skip x_t + c_out F
            return (sigma * setting.sigma_data) ** 2 / (sigma**2 + setting.sigma_data**2)


def weight(setting: Setting, alpha: Array, sigma: Array) -> Array:
    """Weight of the squared error of the answer, at 0 < SNR < ∞ or where the formula has its limit by itself."""
    match setting.weighting:
        case "constant":
            return np.ones_like(sigma)
        case "sigma_sqrt":  # diffusers' word for σ⁻²
            return sigma**-2.0
        case "cosmap":  # Esser et al. 2024, section 3.1: π(t) = 2 / (π - 2πt + 2πt²)
            return 2 / (np.pi - 2 * np.pi * sigma + 2 * np.pi * sigma**2)
        case "edm":  # Karras et al. 2022, table 1: λ(σ) = (σ² + σ_d²) / (σ σ_d)²
            lambda_ = (sigma**2 + setting.sigma_data**2) / (sigma * setting.sigma_data) ** 2
            return lambda_ * per_answer(setting, alpha, sigma)
        case _:
            with np.errstate(divide="ignore"):
                return x0_weight(setting, alpha**2 / sigma**2) * per_answer(setting, alpha, sigma)


def huber_delta(setting: Setting, made: Example) -> Array:
    """δ of each row (Khrapov et al. 2024, section 4)."""
    delta, num = setting.huber_delta, 1000 if setting.prediction == "flow_prediction" else None
    match setting.loss:
        case "huber_snr":
            with np.errstate(divide="ignore"):
                return (1 - delta) / (1 + made.sigma / made.alpha) ** 2 + delta
        case "huber_exponential":  # exp(t/T ln δ); EDM has no T and runs over σ / (1 + σ)
            if setting.prediction == "edm":
                return np.exp(np.log(delta) * made.sigma / (1 + made.sigma))
            return np.exp(np.log(delta) * made.timesteps / (num or len(alpha_bar(setting.schedule))))
        case _:
            return np.full_like(made.sigma, delta)


def cell_losses(setting: Setting, made: Example, answer: Array) -> Array:
    """[B, C, h, w] weighted error of each latent cell."""
    error = answer - made.target
    if setting.loss == "l2":
        size = error**2
    else:
        delta = _wide(huber_delta(setting, made))
        size = 2 * delta * (np.sqrt(error**2 + delta**2) - delta)
    return _wide(made.weight) * size


def loss(setting: Setting, made: Example, answer: Array) -> Array:
    """[B] weighted mean error of each row."""
    return cell_losses(setting, made, answer).mean(axis=(1, 2, 3))
