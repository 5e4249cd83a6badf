"""Which encoder process makes what, and how their time is compared with training."""

import logging

import pytest

from sd_training.data.encoded import EncoderShares, EncoderTimes


def test_every_micro_batch_has_one_encoder() -> None:
    for num, ranks in ((1, range(2)), (2, range(4, 7)), (3, range(2))):
        shares = EncoderShares(num, ranks, 1)
        made = [shares.micro_batch_at(place) for number in range(num) for place in shares.places_of(number, 5, 40)]
        assert sorted(made) == [(number, rank) for number in range(5, 40) for rank in ranks]
        for number in range(num):
            own = [shares.micro_batch_at(place) for place in shares.places_of(number, 5, 40)]
            assert own == sorted(own) and all(shares.encoder_of(*each) == number for each in own)


def test_encoding_is_compared_with_training_once(caplog: pytest.LogCaptureFixture) -> None:
    """Six training processes with two encoder processes: the two micro-batches of a step take 0.5 s to encode, and the
    step 0.4 s to train and 0.1 s of waiting. A slow first row does not count."""
    times = EncoderTimes(EncoderShares(2, range(6), 1))
    with caplog.at_level(logging.INFO, "sd_training"):
        for row in range(5):
            for _ in range(50 * 2):
                times.add(0.25)
            step_s, wait_s = (9.0, 8.0) if row == 0 else (0.5, 0.1)
            assert times.take(50, step_s, wait_s) == pytest.approx(0.5)
            assert len(caplog.records) == (row >= 2)
    said = caplog.records[0].getMessage()
    assert "a step takes 0.4 s to train, and its micro-batches 0.5 s to encode; 2 for 6 training" in said
    # 6 × 0.5 / 0.4, and 8 × 0.5 / (0.5 + 0.4)
    wanted = "it would not with 8 encoder processes, or with 4.4 of 8 devices for encoding"
    assert f"training waits 20% of the time; {wanted}" in said


def test_encoders_that_read_slowly_are_not_advised_to_be_more(caplog: pytest.LogCaptureFixture) -> None:
    times = EncoderTimes(EncoderShares(2, range(2), 1))
    with caplog.at_level(logging.INFO, "sd_training"):
        for _ in range(3):
            times.add(5.0)
            times.take(50, 0.5, 0.1)
    assert "encoding keeps up and reading does not: raise system.workers" in caplog.text
