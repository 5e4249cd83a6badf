import numpy as np
import pytest

from sd_training.config.data_schema import DatasetParams, MixEntry, SourceParams
from sd_training.data.order.order import RunOrder, SampleOrder
from sd_training.errors import ConfigError


def share(weight: float, **steps: int) -> MixEntry:
    return MixEntry(params=SourceParams(path="x"), weight=weight, **steps)


class Steps:
    """Stands for the order of a data set: which of its own steps it is asked for."""

    def at(self, step: int) -> tuple[int, np.ndarray, int]:
        return 0, np.array([step]), 0


def mixture_of(shares: list[MixEntry], seed: int, num_steps: int) -> RunOrder:
    return RunOrder(shares, seed, num_steps, [Steps()] * len(shares), [np.arange(num_steps)] * len(shares))  # type: ignore[list-item]


def drawn(mixture: RunOrder, step: int) -> tuple[int, int]:
    """The data set of a step, and the number of earlier steps that drew from it."""
    _, (own_step,), dataset = mixture.at(step)
    return dataset, int(own_step)


def test_one_data_set_has_every_step() -> None:
    mixture = mixture_of([share(1.0)], seed=0, num_steps=10)
    assert [drawn(mixture, step) for step in range(10)] == [(0, step) for step in range(10)]


def test_a_long_run_of_one_data_set_has_no_array_of_its_steps() -> None:
    mixture = RunOrder([share(1.0)], 0, 10**15, [Steps()], [np.arange(10)])  # type: ignore[list-item]
    assert drawn(mixture, 7) == (0, 7) and mixture.steps_before(10**14, 0) == 10**14


def test_shares_are_kept_after_any_number_of_steps() -> None:
    weights = np.array([5.0, 2.0, 1.0])
    mixture = mixture_of([share(weight) for weight in weights], seed=3, num_steps=10_000)
    counts = np.cumsum(mixture.dataset_of[:, None] == np.arange(3), axis=0)
    wanted = np.arange(1, 10_001)[:, None] * weights / weights.sum()
    assert abs(counts - wanted).max() < 5
    assert [mixture.steps_before(10_000, dataset) for dataset in range(3)] == counts[-1].tolist()


def test_a_data_set_goes_on_where_it_was() -> None:
    mixture = mixture_of([share(1.0), share(2.0)], seed=1, num_steps=300)
    for dataset in (0, 1):
        own = [own for number, own in (drawn(mixture, step) for step in range(300)) if number == dataset]
        assert own == list(range(len(own)))


def test_start_and_end() -> None:
    mixture = mixture_of([share(1.0, end_step=60), share(1.0, start_step=30)], seed=2, num_steps=100)
    assert set(mixture.dataset_of[:30]) == {0}
    assert set(mixture.dataset_of[30:60]) == {0, 1}
    assert set(mixture.dataset_of[60:]) == {1}


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    shares = [share(1.0), share(3.0, start_step=5)]
    short, longer = mixture_of(shares, 4, 50), mixture_of(shares, 4, 500)
    assert np.array_equal(short.dataset_of, longer.dataset_of[:50])
    assert [drawn(short, step) for step in range(50)] == [drawn(longer, step) for step in range(50)]


def test_a_step_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="at step 20"):
        mixture_of([share(1.0, end_step=20), share(1.0, start_step=21)], seed=0, num_steps=100)


@pytest.mark.parametrize("is_paired", [False, True])
def test_the_visits_of_a_sample_are_the_inverse_of_the_order(is_paired: bool) -> None:
    """Of every sample of two data sets, of which one in three is not selected."""
    params, steps, orders = DatasetParams(path="."), 50, list[SampleOrder]()
    selected = [np.flatnonzero(np.arange(size) % 3) for size in (30, 45)]
    for number, own in enumerate(selected):
        zeros = np.zeros(len(own), dtype=np.int32)
        orders.append(SampleOrder(params, number, 4, zeros, zeros))
    shares = [share(1.0)] if is_paired else [share(2.0, end_step=40), share(1.0, start_step=10)]
    order = RunOrder(shares, 0, steps, orders, selected, is_paired=is_paired)
    planned: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for step in range(steps):
        _, samples, datasets = order.at(step)
        for slot, name in enumerate(zip(datasets.tolist(), samples.tolist(), strict=True)):
            planned.setdefault(name, []).append((step, slot))
    for dataset, size in enumerate((30, 45)):
        for sample in range(size):
            assert order.visits(dataset, sample) == planned.get((dataset, sample), [])
            assert bool(order.visits(dataset, sample)) == bool(sample % 3)
