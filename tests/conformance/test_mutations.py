"""Deliberately broken variants of the objective: each must make the checks that are named beside it fail."""

import pytest

from tests.conformance.mutation_list import MUTATIONS
from tests.conformance.mutations import Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_broken_variant_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)
    for check in mutation.caught_by:
        with pytest.raises(AssertionError):
            check()


def test_the_same_checks_pass_without_a_mutation() -> None:
    unique = {(check.func, check.args): check for mutation in MUTATIONS for check in mutation.caught_by}
    for check in unique.values():
        check()


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
