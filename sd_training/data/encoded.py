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
from typing import Any

import torch
from torch import Tensor

from sd_training.data.samples.sample import WorkerResult
from sd_training.data.sources.base import SkippedSample
from sd_training.errors import BadSamplesError, DataError, EncoderError, OutageError
from sd_training.log import get_logger
from sd_training.types import Form, PixelBatch, each_leaf, private_memory

log = get_logger(__name__)

AHEAD = 2
"""Micro-batches that a training process holds beside the one it trains on."""
_LENGTH = struct.Struct("!Q")
_CONNECT_S = 600.0
"""An encoder process listens once it has imported its libraries; it loads its networks after that."""
_EXIT_STATUS_S = 2.0
"""The exit status of a process is known a moment after its connections have closed."""
_MEASURED = 100
"""Micro-batches over which encoding and training are compared, after as many for the start."""
_ERRORS = {error.__name__: error for error in (DataError, BadSamplesError, OutageError)}
_DTYPES = {str(d): d for d in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool)}


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


@dataclass(frozen=True)
class EncoderProcesses:
    """Those of this machine."""

    shares: EncoderShares
    code: int = 0
    """Of `address_of`, in the training process that has started them."""
    processes: Sequence["subprocess.Popen[bytes]"] = ()
    """In that process."""


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
        encode_s: how long it took to read and encode [s].
    """
    error = result.error and [type(result.error).__name__, str(result.error)]
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
    for connection in connections:
        send_header(connection, header)
        connection.sendall(block.numpy().data)


def _receive_result(connection: socket.socket) -> tuple[WorkerResult, float]:
    """The micro-batch, and how long it took.

    Raises:
        ConnectionError: the encoder process has ended.
        EncoderError: it cannot go on; its message.
    """
    header = receive_header(connection)
    if "failed" in header:
        raise EncoderError(header["failed"])

    def filled(num_bytes: int) -> Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        _receive_into(connection, block.numpy().data)
        return block

    batch, error = None, header["error"]
    if header["forms"] is not None:
        forms = {name: each_leaf(_read, form) for name, form in header["forms"].items()}
        batch = PixelBatch.allocate(forms, filled)
    skipped = [SkippedSample(*values) for values in header["skipped"]]
    return WorkerResult(batch, skipped, _ERRORS[error[0]](error[1]) if error else None), header["encode_s"]


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
        count = connection.recv_into(memory)
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

    def results(self, first: int, end: int) -> Iterator[WorkerResult]:
        """Micro-batches `first` to `end`; a thread receives `AHEAD` of them.

        Raises:
            EncoderError: an encoder process cannot go on, or was killed.
            ConnectionError: it has ended, because another process of the run has.
        """
        rank = self.global_rank // self.shares.sharing
        connections = [self._connect(number, first) for number in range(self.shares.num_encoders)]
        received = queue.Queue[Any](AHEAD)

        def receive() -> None:
            try:
                for number in range(first, end):
                    received.put(_receive_result(connections[self.shares.encoder_of(number, rank)]))
            except Exception as error:
                received.put(error)

        threading.Thread(target=receive, daemon=True, name="encoded batches").start()
        speed = _Speed(self.shares)
        try:
            for _ in range(first, end):
                began_s = time.perf_counter()
                item = received.get()
                if isinstance(item, OSError):
                    self._raise_lost(item)
                if isinstance(item, Exception):
                    raise item
                result, encode_s = item
                speed.count(time.perf_counter() - began_s, encode_s)
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
                if time.monotonic() > end_s or any(process.poll() is not None for process in self.processes):
                    self._raise_lost(error)
                time.sleep(0.05)
        if not is_same_user(connection):
            raise EncoderError("distributed.encoders: another user listens where an encoder process should")
        send_header(connection, {"rank": self.global_rank, "first": first})
        return connection

    def _raise_lost(self, error: OSError) -> None:
        """An encoder process has ended: its end, where this process has started it and it was not a regular one."""
        end_s = time.monotonic() + _EXIT_STATUS_S
        while self.processes and time.monotonic() < end_s:
            for number, process in enumerate(self.processes):
                if status := process.poll():
                    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
                    hint = "; SIGKILL often means that the machine ran out of memory" if status == -9 else ""
                    raise EncoderError(f"distributed.encoders: encoder process {number} {how}{hint}") from error
            time.sleep(0.05)
        raise ConnectionError("connection closed by an encoder process: another process of the run has ended")


class _Speed:
    """Logs once which side is slower: encoding or training."""

    def __init__(self, shares: EncoderShares) -> None:
        self.shares, self.count_, self.wait_s, self.encode_s, self.start_s = shares, 0, 0.0, 0.0, 0.0

    def count(self, wait_s: float, encode_s: float) -> None:
        """A micro-batch: how long training waited for it, and how long an encoder process worked on it [s]."""
        self.count_ += 1
        if self.count_ == _MEASURED:
            self.wait_s, self.encode_s, self.start_s = 0.0, 0.0, time.perf_counter()
            return
        self.wait_s, self.encode_s = self.wait_s + wait_s, self.encode_s + encode_s
        if self.count_ != 2 * _MEASURED:
            return
        total_s, num, ranks = time.perf_counter() - self.start_s, self.shares.num_encoders, len(self.shares.ranks)
        train_s, encode_s = (total_s - self.wait_s) / _MEASURED, self.encode_s / _MEASURED
        log.info(
            f"distributed.encoders: a micro-batch takes {train_s:.3g} s to train and {encode_s:.3g} s to encode; "
            f"{num} for {ranks} training; training waits {self.wait_s / total_s:.0%} of the time, and would not with "
            f"{math.ceil(ranks * encode_s / train_s)}"
        )
