import time

import numpy as np

from sd_training.data.order.order import generator


def draw(*key: int | str) -> list[float]:
    return generator(*key).random(4).tolist()  # type: ignore[arg-type]


def test_equal_keys_give_equal_bits_and_any_other_key_gives_others() -> None:
    assert draw(1, "crop", 5) == draw(1, "crop", 5)
    keys = [
        (1, "crop", 5),
        (2, "crop", 5),
        (1, "flip", 5),
        (1, "crop", 6),
        (1, "crop", 5, 1),
        (-1, "crop", 5),
        (1, "crop", 2**47),
    ]
    assert len({tuple(draw(*key)) for key in keys}) == len(keys)


def test_the_key_is_philox_key() -> None:
    """The short cut around entropy gathering must not change what is drawn."""
    ours = generator(0, "noise", 3)
    key = ours.bit_generator.state["state"]["key"]
    reference = np.random.Generator(np.random.Philox(key=key))
    assert np.array_equal(ours.standard_normal(100), reference.standard_normal(100))
    assert key[1] == 3


def test_neighbouring_positions_are_independent() -> None:
    noise = np.stack([generator(0, "noise", position).standard_normal(256) for position in range(400)])
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    correlation = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(correlation) < 0.015
    uniform = np.array([generator(0, "timestep", position).random() for position in range(4000)])
    counts = np.histogram(uniform, bins=10, range=(0, 1))[0]
    assert counts.min() > 320 and counts.max() < 480


def test_fast_enough_for_the_hot_path() -> None:
    def once() -> float:
        start = time.perf_counter()
        for position in range(500):
            generator(0, "noise", position)
        return (time.perf_counter() - start) / 500

    assert min(once() for _ in range(10)) < 60e-6  # 7 µs on an idle core
