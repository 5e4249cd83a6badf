"""Micro-batches that encoder processes have encoded (`build/encoders.py`), on their way to a training process.

Each training process connects to all encoder processes of its machine. Which of them makes a micro-batch follows from
its number, so the order and every draw are those of a run without them. Addresses are in Linux's abstract namespace,
which leaves no file behind, and hold a random number; both ends check that the other one belongs to the same user. A
micro-batch is a header in JSON and one block of bytes, which is received into page-locked memory for CUDA.
"""

import json
import math
import os
import queue
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sd_training.data.samples.sample import WorkerResult
from sd_training.data.sources.base import SkippedSample
from sd_training.errors import BadSamplesError, ConfigError, DataError, EncoderError, OutageError, UserError
from sd_training.log import get_logger
from sd_training.types import Form, PixelBatch, each_leaf, private_memory

log = get_logger(__name__)

AHEAD = 2
"""Micro-batches that a training process holds beside the one it trains on: one waits, one is being received."""
_LENGTH = struct.Struct("!Q")
_CONNECT_S = 600.0
"""An encoder process listens once it has imported its libraries; it loads its networks after that."""
_EXIT_STATUS_S = 2.0
"""The exit status of a process is known a moment after its connections have closed."""
_COMPARED = 100
"""Optimizer steps over which encoding and training are compared, after the first row of the metrics."""
_MUCH = 0.05
"""Share of the time that training may wait without a reason to change anything."""
_ERRORS = {error.__name__: error for error in (ConfigError, DataError, BadSamplesError, OutageError, EncoderError)}
_DTYPES = {str(d): d for d in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool)}


class TrainerGone(Exception):
    """A training process has closed its connection."""


@dataclass(frozen=True)
class EncoderShares:
    """Which encoder process of a machine makes which micro-batch."""

    num_encoders: int
    """Of the machine."""
    ranks: range
    """Data ranks of the machine."""
    sharing: int
    """Training processes of a data rank, which all get its micro-batches."""

    def encoder_of(self, micro_batch: int, rank: int) -> int:
        """Number of the encoder process."""
        return (micro_batch * len(self.ranks) + rank - self.ranks.start) % self.num_encoders

    def places_of(self, encoder: int, first: int, end: int) -> range:
        """What an encoder process makes of micro-batches `first` to `end`, as `micro_batch_at` reads it."""
        start = first * len(self.ranks)
        return range(start + (encoder - start) % self.num_encoders, end * len(self.ranks), self.num_encoders)

    def micro_batch_at(self, place: int) -> tuple[int, int]:
        """Its number and data rank."""
        micro_batch, number = divmod(place, len(self.ranks))
        return micro_batch, self.ranks[number]


class EncoderTimes:
    """How long encoder processes work for this training process, beside how long it trains.

    Args:
        shares: of this machine.
    """

    def __init__(self, shares: EncoderShares) -> None:
        self._shares, self._encode_s = shares, 0.0
        self._rows = list[tuple[int, float, float, float]]()
        """Optimizer steps of a row, and its seconds of training, waiting and encoding."""

    def add(self, encode_s: float) -> None:
        """A micro-batch has come that took an encoder process so long [s]."""
        self._encode_s += encode_s

    def take(self, num_steps: int, step_s: float, wait_s: float) -> float:
        """Seconds per optimizer step that encoder processes have worked since the last call. After `_COMPARED` steps
        logs once which side is slower.

        Args:
            num_steps: optimizer steps since the last call.
            step_s, wait_s: mean of a step, and of waiting for data in it on the rank that waits longest [s]: the others
                wait for that one inside of a step.
        """
        encode_s, self._encode_s = self._encode_s, 0.0
        before = sum(row[0] for row in self._rows[1:])
        if before < _COMPARED:
            self._rows.append((num_steps, (step_s - wait_s) * num_steps, wait_s * num_steps, encode_s))
            if self._rows[1:] and before + num_steps >= _COMPARED:
                self._compare()
        return encode_s / num_steps

    def _compare(self) -> None:
        """Without the first row, which has compilation and the first kernels."""
        steps, train_s, wait_s, encode_s = (sum(values) for values in zip(*self._rows[1:], strict=True))
        ranks, encoders, train_s = len(self._shares.ranks), self._shares.num_encoders, max(train_s, 1e-9)
        waiting, wanted = wait_s / (train_s + wait_s), math.ceil(ranks * encode_s / train_s)
        devices = ranks + encoders
        share = devices * encode_s / (encode_s + train_s)
        advice = f"it would not with {wanted} encoder processes, or with {share:.1f} of {devices} devices for encoding"
        if wanted <= encoders and waiting > _MUCH:
            advice = "encoding keeps up and reading does not: raise system.workers"
        log.info(
            f"distributed.encoders: a step takes {train_s / steps:.3g} s to train, and its micro-batches "
            f"{encode_s / steps:.3g} s to encode; {encoders} for {ranks} training; training waits {waiting:.0%} of the "
            f"time; {advice}"
        )


@dataclass(frozen=True)
class EncoderProcesses:
    """Those of this machine."""

    shares: EncoderShares
    code: int = 0
    """Of `address_of`, in the training process that has started them."""
    processes: Sequence["subprocess.Popen[bytes]"] = ()
    """In that process."""

    @cached_property
    def times(self) -> EncoderTimes:
        """Of this training process."""
        return EncoderTimes(self.shares)


def address_of(code: int, encoder: int) -> str:
    """Where an encoder process listens.

    Args:
        code: random number of this start of the run on this machine.
        encoder: number of the encoder process on the machine.
    """
    return f"\0sd_training-{code:016x}-{encoder}"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def send_header(connection: socket.socket, header: Mapping[str, Any]) -> None:
    """A header alone."""
    text = json.dumps(header).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive_header(connection: socket.socket) -> dict[str, Any]:
    """The inverse. Raises ConnectionError at the end of the connection."""
    length = bytearray(_LENGTH.size)
    _receive_into(connection, memoryview(length))
    text = bytearray(_LENGTH.unpack(length)[0])
    _receive_into(connection, memoryview(text))
    header: dict[str, Any] = json.loads(text)
    return header


def send_result(connections: Sequence[socket.socket], result: WorkerResult, encode_s: float) -> None:
    """A micro-batch, as it came from the loader or encoded.

    Args:
        encode_s: how long it took to encode [s].

    Raises:
        TrainerGone: nobody receives it.
    """
    error = result.error and _written_error(result.error)
    header: dict[str, Any] = {"skipped": result.skipped, "error": error, "forms": None, "encode_s": encode_s}
    block = private_memory(0)
    if result.batch is not None:
        forms = {name: each_leaf(_form_of, value) for name, value in vars(result.batch).items()}

        def keep(num_bytes: int) -> Tensor:
            nonlocal block
            block = private_memory(num_bytes)
            return block

        packed = PixelBatch.allocate(forms, keep)
        for own, given in zip(packed.tensors(), result.batch.tensors(), strict=True):
            own.copy_(given)
        header["forms"] = {name: each_leaf(_written, form) for name, form in forms.items()}
    try:
        for connection in connections:
            send_header(connection, header)
            connection.sendall(block.numpy().data)
    except OSError as lost:
        raise TrainerGone from lost


def send_failure(connections: Sequence[socket.socket], error: Exception, where: str) -> None:
    """Why no more micro-batches come; a user's mistake or an outage keeps its exit status."""
    name, text = _written_error(error)
    _send_last(connections, {"failed": [name, f"{where}: {text}"]})


def send_end(connections: Sequence[socket.socket]) -> None:
    """A training process has gone, so the run ends."""
    _send_last(connections, {"gone": True})


def _send_last(connections: Sequence[socket.socket], header: Mapping[str, Any]) -> None:
    for connection in connections:
        with suppress(OSError):
            send_header(connection, header)


def _written_error(error: Exception) -> list[str]:
    """The nearest class that the other end knows, and the text."""
    known = (base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        text = f"out of memory; set model.vae_batch, or lower system.batch_size ({text})"
    return [next(known, EncoderError.__name__), text]


def _receive_result(connection: socket.socket) -> tuple[WorkerResult, float]:
    """The micro-batch, and how long it took.

    Raises:
        OSError: the encoder process has ended.
        UserError: it cannot go on; its message.
        EOFError: it has ended because another training process has.
    """
    header = receive_header(connection)
    if "failed" in header:
        name, text = header["failed"]
        raise _ERRORS[name](text)
    if "gone" in header:
        raise EOFError("connection closed by an encoder process: another process of the run has ended")

    def filled(num_bytes: int) -> Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        _receive_into(connection, block.numpy().data)
        return block

    batch, error = None, header["error"]
    if header["forms"] is not None:
        forms = {name: each_leaf(_read, form) for name, form in header["forms"].items()}
        batch = PixelBatch.allocate(forms, filled)
    skipped = [SkippedSample(*values) for values in header["skipped"]]
    failed: Any = error and _ERRORS[error[0]](error[1])
    return WorkerResult(batch, skipped, failed), header["encode_s"]


def _form_of(tensor: Tensor) -> Form:
    is_channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    is_channels_last = is_channels_last and not tensor.is_contiguous()
    return Form(tuple(tensor.shape), tensor.dtype, is_channels_last)


def _written(form: Form) -> list[Any]:
    return [form.shape, str(form.dtype), form.is_channels_last]


def _read(values: Sequence[Any]) -> Form:
    return Form(tuple(values[0]), _DTYPES[values[1]], values[2])


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        count = connection.recv_into(memory, len(memory), socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("connection closed by an encoder process")
        memory = memory[count:]


@dataclass(eq=False)
class EncodedBatches:
    """The micro-batches of a training process, from the encoder processes of its machine."""

    shares: EncoderShares
    global_rank: int
    code: int
    """Of `address_of`."""
    processes: Sequence["subprocess.Popen[bytes]"]
    """As of `EncoderProcesses`."""
    times: EncoderTimes
    """Is told how long each micro-batch took to encode."""

    def results(self, first: int, end: int) -> Iterator[WorkerResult]:
        """Micro-batches `first` to `end`; a thread receives `AHEAD` of them.

        Raises:
            UserError: an encoder process cannot go on, or was killed.
            ConnectionError: another process of the run has ended.
        """
        rank = self.global_rank // self.shares.sharing
        connections = [self._connect(number, first) for number in range(self.shares.num_encoders)]
        received = queue.Queue[Any](AHEAD - 1)

        def receive() -> None:
            """In a thread; an error is the last that it delivers."""
            encoder = 0
            try:
                for number in range(first, end):
                    encoder = self.shares.encoder_of(number, rank)
                    received.put(_receive_result(connections[encoder]))
            except OSError as error:
                received.put(self._lost(encoder, error))
            except Exception as error:
                received.put(error)

        threading.Thread(target=receive, daemon=True, name="encoded batches").start()
        try:
            for _ in range(first, end):
                item = received.get()
                if isinstance(item, EOFError):
                    raise ConnectionError(str(item))
                if isinstance(item, Exception):
                    raise item
                result, encode_s = item
                self.times.add(encode_s)
                yield result
        finally:
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
                connection.close()
            with suppress(queue.Empty):
                while True:
                    received.get_nowait()

    def _connect(self, encoder: int, first: int) -> socket.socket:
        connection, end_s = socket.socket(socket.AF_UNIX), time.monotonic() + _CONNECT_S
        while True:
            try:
                connection.connect(address_of(self.code, encoder))
                break
            except OSError as error:
                if bool(self.processes) and self.processes[encoder].poll() is not None:
                    raise self._lost(encoder, error) from None
                if time.monotonic() > end_s:
                    late = f"encoder process {encoder} of this machine does not listen after {_CONNECT_S:g} s"
                    raise EncoderError(f"distributed.encoders: {late}") from None
                time.sleep(0.05)
        if not is_same_user(connection):
            raise EncoderError("distributed.encoders: another user listens where an encoder process should")
        cores = sorted(os.sched_getaffinity(0))
        send_header(connection, {"rank": self.global_rank, "first": first, "cores": cores})
        return connection

    def _lost(self, encoder: int, error: OSError) -> EncoderError | ConnectionError:
        """An encoder process that has said nothing before its end. The process that has started it knows why; in others
        it is a lost connection, which may as well be due to another training process."""
        if not self.processes:
            return ConnectionError(f"connection closed by encoder process {encoder}")
        how, end_s = f"has ended ({error})", time.monotonic() + _EXIT_STATUS_S
        while self.processes and time.monotonic() < end_s:
            if (status := self.processes[encoder].poll()) is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                how += "; SIGKILL often means that the machine ran out of memory" if status == -signal.SIGKILL else ""
                break
            time.sleep(0.05)
        reason = f"distributed.encoders: encoder process {encoder} of this machine {how}"
        log.error(reason)  # the training thread may wait for other ranks, which fail first
        return EncoderError(reason)
