"""Which encoder process makes what, how it arrives at a training process, and how their time is compared."""

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sd_training.data.encoded import (
    EncoderProcesses,
    EncoderShares,
    EncoderTimes,
    Link,
    TrainerGone,
    _receive,
    address_of,
    send_end,
    send_result,
)
from sd_training.data.samples.sample import WorkerResult
from sd_training.data.sources.base import SkippedSample
from sd_training.errors import EXIT_BAD_DATA, EXIT_STOPPED, BadSamplesError, EncoderError, OutageError
from sd_training.types import Form, PixelBatch, private_memory


def test_every_micro_batch_has_one_encoder() -> None:
    for num, ranks in ((1, range(2)), (2, range(4, 7)), (3, range(2))):
        shares = EncoderShares(num, ranks, 1)
        made = [shares.micro_batch_at(place) for number in range(num) for place in shares.places_of(number, 5, 40)]
        assert sorted(made) == [(number, rank) for number in range(5, 40) for rank in ranks]
        for number in range(num):
            own = [shares.micro_batch_at(place) for place in shares.places_of(number, 5, 40)]
            assert own == sorted(own) and all(shares.encoder_of(*each) == number for each in own)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Of a connection: the encoder process', and the training process'."""
    here, there = socket.socketpair()
    encoder, trainer = Link(here), Link(there)
    with here, there:
        yield encoder, trainer


def random_batch(seed: int) -> PixelBatch:
    """With every kind of tensor that an encoded batch has."""
    forms = {
        "noise": Form((2, 4, 3, 5)),
        **dict.fromkeys(("timestep_draw", "positions", "sample_ids"), Form((2,), torch.int64)),
        **dict.fromkeys(("offset_noise", "input_noise", "mask", "pixels"), Form((2, 0), torch.uint8)),
        **dict.fromkeys(("original_size", "crop_top_left", "target_size"), Form((2, 2), torch.int64)),
        "tokens": {},
        "token_masks": {"text_encoder": Form((2, 7), torch.bool)},
        "dropped": {"size": Form((2,), torch.bool)},
        "posterior_noise": Form((2, 4, 3, 5)),
        "moments": Form((2, 8, 3, 5), torch.bfloat16, is_channels_last=True),
        "text_states": {"text_encoder": Form((2, 7, 6), torch.float16)},
    }
    batch = PixelBatch.allocate(forms, private_memory)
    torch.manual_seed(seed)
    for tensor in batch.tensors():
        tensor.copy_(torch.randint(0, 2, tensor.shape))
    return batch


def test_micro_batches_arrive_as_they_were_sent(ends: tuple[Link, Link]) -> None:
    """Also one that could not be read, between two others."""
    encoder, trainer = ends
    skipped = [SkippedSample("000.tar", "7", "image cannot be decoded", 3)]
    sent = [
        WorkerResult(random_batch(0), skipped),
        WorkerResult(None, [], BadSamplesError("too many")),
        WorkerResult(random_batch(1), []),
    ]
    for number, result in enumerate(sent):
        send_result([encoder], result, float(number))
    for number, result in enumerate(sent):
        delivery = _receive(trainer)
        assert not isinstance(delivery, Exception) and delivery.encode_s == number
        found = delivery.result
        assert found.skipped == result.skipped and (found.batch is None) == (result.batch is None)
        assert str(found.error) == str(result.error) and type(found.error) is type(result.error)
        if found.batch is not None and result.batch is not None:
            for own, given in zip(found.batch.tensors(), result.batch.tensors(), strict=True):
                assert (own.dtype, own.shape, own.stride()) == (given.dtype, given.shape, given.stride())
                assert torch.equal(own, given)


def test_training_that_ends_blames_no_encoder_process(caplog: pytest.LogCaptureFixture) -> None:
    """As after a signal: the thread that receives is woken by the end of its connections."""
    shares, code = EncoderShares(1, range(1), 1), 2**40 + os.getpid()
    ended = subprocess.Popen(["true"])  # what it would be blamed for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address_of(code, 0))
        listener.listen()
        results = EncoderProcesses(shares, EncoderTimes(shares), 0, code, [ended]).results(3, 9)
        with ThreadPoolExecutor(1) as training:
            first = training.submit(next, results)
            connection, _ = listener.accept()
            with connection:
                link = Link(connection)
                assert link.receive()[:2] == (0, 3)
                send_result([link], WorkerResult(None, []), 0.5)
                assert first.result().batch is None
                results.close()
                for thread in (own for own in threading.enumerate() if own.name == "encoded batches"):
                    thread.join(60)
                    assert not thread.is_alive()
    ended.wait()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("cause", "kind", "status", "text"),
    [
        (torch.OutOfMemoryError("CUDA"), EncoderError, 1, "encoder process 0: out of memory; set model.vae_batch"),
        (ValueError("negative"), EncoderError, 1, "encoder process 0: ValueError: negative"),
        (BadSamplesError("all bad"), BadSamplesError, EXIT_BAD_DATA, "encoder process 0: all bad"),
        (OutageError("no answer"), OutageError, EXIT_STOPPED, "encoder process 0: no answer"),
        (TrainerGone(), ConnectionError, None, "another process of the run has ended"),
    ],
)
def test_the_end_has_its_cause_and_status(
    cause: Exception, kind: type, status: int | None, text: str, ends: tuple[Link, Link]
) -> None:
    encoder, trainer = ends
    send_end([encoder], cause, "encoder process 0")
    end = _receive(trainer)
    assert type(end) is kind and text in str(end) and getattr(end, "exit_status", None) == status


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


def test_processes_that_share_their_micro_batches_are_devices_as_well(caplog: pytest.LogCaptureFixture) -> None:
    """Two pairs of training processes: the same with twice the devices that train."""
    times = EncoderTimes(EncoderShares(1, range(2), 2))
    with caplog.at_level(logging.INFO, "sd_training"):
        for _ in range(3):
            times.add(50 * 0.5)
            times.take(50, 0.5, 0.1)
    # 5 × 0.5 / (0.5 + 2 × 0.4)
    assert "or with 1.9 of 5 devices for encoding" in caplog.text


def test_encoders_that_read_slowly_are_not_advised_to_be_more(caplog: pytest.LogCaptureFixture) -> None:
    times = EncoderTimes(EncoderShares(2, range(2), 1))
    with caplog.at_level(logging.INFO, "sd_training"):
        for _ in range(3):
            times.add(5.0)
            times.take(50, 0.5, 0.1)
    assert "encoding keeps up and reading does not: raise system.workers" in caplog.text
