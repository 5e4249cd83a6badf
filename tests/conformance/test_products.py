"""Every prediction type × schedule × weighting × loss × noise against float64."""

from dataclasses import replace

import pytest

from sd_training.config.check import objective_problems
from tests.conformance import product_checks
from tests.conformance.cases import is_valid, options_of, products, settings
from tests.conformance.reference import PREDICTIONS, WEIGHTINGS

PRODUCTS = list(products())


def test_there_are_several_hundred_products() -> None:
    assert sum(len(settings(*product)) for product in PRODUCTS) > 1700
    assert len(PRODUCTS) > 100


@pytest.mark.parametrize("product", PRODUCTS, ids="-".join)
def test_objective_agrees_with_float64(product: tuple[str, str, str]) -> None:
    product_checks.check_product(*product)


def test_weights_are_the_ones_that_the_papers_print() -> None:
    product_checks.check_published_weights()


def test_input_perturbation_leaves_the_target_alone() -> None:
    product_checks.check_target_ignores_perturbation()


def test_the_right_answer_gives_the_picture_back() -> None:
    product_checks.check_x0_is_found()


def test_masked_loss() -> None:
    product_checks.check_masked_loss()


@pytest.mark.parametrize("product", PRODUCTS, ids="-".join)
def test_valid_products_are_accepted(product: tuple[str, str, str]) -> None:
    for setting in settings(*product):
        assert objective_problems(options_of(setting)) == []


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weightings_of_other_predictions_are_refused(prediction: str, weighting: str) -> None:
    setting = settings(prediction, "flow" if prediction == "flow_prediction" else "scaled_linear", "constant")[0]
    problems = objective_problems(options_of(replace(setting, weighting=weighting)))
    assert (problems == []) == is_valid(prediction, weighting, "plain")
    assert all("loss_weighting.name" in problem for problem in problems)
