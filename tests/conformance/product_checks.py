"""Objective.draw and Objective.loss against the float64 references, over all valid products."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from sd_training.types import NoisedBatch
from tests.conformance import reference
from tests.conformance.cases import draws_of, numbers, objective_for, options_of, settings, tensor, varied
from tests.conformance.reference import Array, Setting

_DRAWS = [0.0105, 0.0375, 0.1205, 0.2805, 0.4505, 0.5, 0.6205, 0.7705, 0.9005, 0.9605, 0.9985, 0.9995]
"""Away from the edges of a thousand steps, where float32 rounds to the other side."""
_SHAPE = (len(_DRAWS), 3, 2, 4)
_X0 = 0.25 + 0.75 * numbers(1, *_SHAPE)
_EPS, _XI, _ANSWER = (numbers(seed, *_SHAPE) for seed in (2, 3, 4))
_ETA = numbers(5, *_SHAPE[:2])
_WEIGHT_TOLERANCE = 1e-3
"""ᾱ is kept in float32: 1 - ᾱ of the cosine schedule's first step, 4·10⁻⁵, is off by up to 7·10⁻⁴ of itself."""


def check_product(prediction: str, schedule: str, weighting: str) -> None:
    """Every loss and noise of one product."""
    check_settings(settings(prediction, schedule, weighting))


def check_settings(cases: Iterable[Setting]) -> None:
    """Settings that share prediction type and schedule."""
    base = None
    for setting in cases:
        base = objective_for(setting) if base is None else base
        objective = varied(base, setting)
        x0 = _X0.astype(np.float32).astype(np.float64)
        draws = draws_of(np.array(_DRAWS), _EPS, _ETA, _XI)
        made = objective.draw(tensor(x0), draws)
        u = draws.timestep_draw.double().numpy()
        expected = reference.example(setting, u, x0, _EPS, _ETA, _XI)
        _compare_example(made, expected)
        loss = objective.loss(tensor(_ANSWER), made)
        wanted = reference.loss(setting, expected, _ANSWER)
        np.testing.assert_allclose(loss, wanted, rtol=_WEIGHT_TOLERANCE, atol=1e-6)


def _compare_example(made: NoisedBatch, expected: reference.Example) -> None:
    np.testing.assert_allclose(made.timesteps, expected.timesteps, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made.signal, expected.alpha, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(made.sigma, expected.sigma, rtol=4e-4, atol=1e-7)
    np.testing.assert_allclose(made.noised_latents, expected.model_input, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made.target, expected.target, rtol=1e-4, atol=3e-5)
    np.testing.assert_allclose(made.weight, expected.weight, rtol=_WEIGHT_TOLERANCE, atol=1e-9)


def check_published_weights() -> None:
    """The forms that the papers print for a prediction type; the references above derive them from x_0."""
    for prediction, printed in {
        "epsilon": {
            "min_snr": lambda snr: np.minimum(3.0 / snr, 1),
            "p2": lambda snr: 1 / (1.3 + snr) ** 0.7,
            "debiased": lambda snr: 1 / np.sqrt(snr),
            "soft_min_snr": lambda snr: 3.0 / (snr + 3.0),
        },
        "v_prediction": {"min_snr": lambda snr: np.minimum(3.0, snr) / (snr + 1)},
        "sample": {"min_snr": lambda snr: np.minimum(3.0, snr)},
    }.items():
        for weighting, formula in printed.items():
            setting = settings(prediction, "scaled_linear", weighting)[0]
            made = objective_for(setting).draw(tensor(_X0), draws_of(np.array(_DRAWS), _EPS))
            table = reference.alpha_bar("scaled_linear")[made.timesteps.numpy()]
            np.testing.assert_allclose(made.weight, formula(table / (1 - table)), rtol=1e-4)


def check_target_ignores_perturbation() -> None:
    """Input perturbation changes what the denoiser sees and nothing that it is asked (Ning et al. 2023, section 4)."""
    for prediction in reference.PREDICTIONS:
        schedule = {"flow_prediction": "flow", "edm": "edm"}.get(prediction, "scaled_linear")
        plain = settings(prediction, schedule, "constant")[0]
        base, draws = objective_for(plain), draws_of(np.array(_DRAWS), _EPS, _ETA, _XI)
        both = (plain, replace(plain, noise={"input_perturbation": 0.2}))
        without, with_it = (varied(base, setting).draw(tensor(_X0), draws) for setting in both)
        assert torch.equal(without.target, with_it.target), prediction
        assert not torch.allclose(without.noised_latents, with_it.noised_latents), prediction


def check_masked_loss() -> None:
    """Each latent cell counts with the mean of its pixels' mask. Masked cells still count in the mean's divisor, so
    that every other cell pulls as hard as without a mask."""
    height, width, scale = _SHAPE[2], _SHAPE[3], 8
    pixels = (_SHAPE[0], 1, height * scale, width * scale)
    mask = np.random.default_rng(9).integers(0, 256, pixels).astype(np.uint8)
    mask[0], mask[1] = 0, 255
    per_cell = mask.reshape(_SHAPE[0], 1, height, scale, width, scale).mean(axis=(3, 5), dtype=np.float64) / 255
    for setting in settings("v_prediction", "scaled_linear", "min_snr"):
        if setting.noise:
            continue
        objective = objective_for(setting, options_of(setting).replace(masked_loss="alpha"))
        made = objective.draw(tensor(_X0), draws_of(np.array(_DRAWS), _EPS, mask=mask))
        each = reference.cell_losses(
            setting, reference.example(setting, np.array(_DRAWS), _X0, _EPS, _ETA, _XI), _ANSWER
        )
        wanted = (per_cell * each).mean(axis=(1, 2, 3))
        np.testing.assert_allclose(objective.loss(tensor(_ANSWER), made), wanted, rtol=_WEIGHT_TOLERANCE, atol=1e-6)


def check_x0_is_found() -> None:
    """The right answer gives x_0 back: ε, v, flow and EDM as their papers invert them."""
    for prediction in reference.PREDICTIONS:
        schedule = {"flow_prediction": "flow", "edm": "edm"}.get(prediction, "scaled_linear")
        setting = settings(prediction, schedule, "constant")[0]
        made = objective_for(setting).draw(tensor(_X0), draws_of(np.array(_DRAWS), _EPS))
        np.testing.assert_allclose(_x0_of(made, setting), _X0, rtol=1e-4, atol=5e-5, err_msg=prediction)


def _x0_of(made: NoisedBatch, setting: Setting) -> Array:
    alpha, sigma = (row.double().numpy()[:, None, None, None] for row in (made.signal, made.sigma))
    answer, seen = made.target.double().numpy(), made.noised_latents.double().numpy()
    match setting.prediction:
        case "epsilon":
            found = (seen - sigma * answer) / alpha
        case "v_prediction":
            found = alpha * seen - sigma * answer
        case "flow_prediction":
            found = seen - sigma * answer
        case "edm":  # c_skip x_t + c_out F, with x_t = seen / c_in
            root = np.hypot(sigma, setting.sigma_data)
            found = (setting.sigma_data / root) ** 2 * seen * root + sigma * setting.sigma_data / root * answer
        case _:
            found = answer
    return np.asarray(found)
