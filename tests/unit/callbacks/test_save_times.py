"""How long a save takes: until it is sealed, not until training goes on."""

import time

from sd_training.callbacks.save import SaveTimes


def test_a_save_that_is_waited_for() -> None:
    times = SaveTimes()
    with times.saving(3, asynchronous=False):
        time.sleep(0.02)
    assert times.longest_s >= 0.02 and times.last_step == 3 and times.num_in_flight == 0


def test_a_save_in_the_background_counts_from_its_beginning_to_its_end() -> None:
    times = SaveTimes()
    began_s = time.monotonic()
    with times.saving(3, asynchronous=True):
        times.in_flight(began_s - 30)
    assert times.num_in_flight == 1 and times.longest_s >= 30
    times.written()
    assert times.num_in_flight == 0 and 30 <= times.longest_s < 40


def test_copies_alone_are_no_save() -> None:
    times = SaveTimes()
    with times.saving(3, asynchronous=True):
        time.sleep(0.02)
    assert times.longest_s == 0 and times.since_last_s < 10
