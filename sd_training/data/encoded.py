"""Micro-batches that encoder processes have encoded (`build/encoders.py`), on their way to a training process.

Each training process connects to all encoder processes of its machine. Which of them makes a micro-batch follows from
its number, so the order and every draw are those of a run without them. Addresses are in Linux's abstract namespace,
which leaves no file behind, and hold a random number; both ends check that the other one belongs to the same user. A
micro-batch is a `Delivery`, which travels as objects do between loader processes, and one block of bytes, which is
received into page-locked memory for CUDA.
"""

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
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sd_training.data.samples.sample import WorkerResult
from sd_training.errors import EncoderError, UserError
from sd_training.log import get_logger
from sd_training.types import PixelBatch

log = get_logger(__name__)

AHEAD = 2
"""Micro-batches that a training process holds beside the one it trains on: one waits, one is being received."""
_CONNECT_S = 600.0
"""An encoder process listens once it has imported its libraries; it loads its networks after that."""
EXIT_STATUS_S = 2.0
"""The exit status of a process is known a moment after its connections have closed."""
_COMPARED = 100
"""Optimizer steps over which encoding and training are compared, after the first row of the metrics."""
_MUCH = 0.05
"""Share of the time that training may wait without a reason to change anything."""


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
        devices = ranks * self._shares.sharing + encoders
        share = devices * encode_s / (encode_s + train_s * self._shares.sharing)
        advice = f"it would not with {wanted} encoder processes, or with {share:.1f} of {devices} devices for encoding"
        if wanted <= encoders and waiting > _MUCH:
            advice = "encoding keeps up and reading does not: raise system.workers"
        log.info(
            f"distributed.encoders: a step takes {train_s / steps:.3g} s to train, and its micro-batches "
            f"{encode_s / steps:.3g} s to encode; {encoders} for {ranks} training; training waits {waiting:.0%} of the "
            f"time; {advice}"
        )


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


class Link:
    """One end of a connection between two processes of a run and of one user.

    Args:
        own: blocking; the link closes it.
    """

    def __init__(self, own: socket.socket) -> None:
        self._socket, self._objects = own, Connection(os.dup(own.fileno()))

    def send(self, value: object, block: Tensor | None = None) -> None:
        """An object, and [N] uint8 after it. Raises OSError at the end of the connection."""
        self._objects.send(value)
        if block is not None:
            self._socket.sendall(block.numpy().data)

    def receive(self) -> Any:
        """The next object. Raises EOFError or OSError at the end of the connection."""
        return self._objects.recv()

    def fill(self, block: Tensor) -> None:
        """Receives [N] uint8; raises as `receive`."""
        memory = block.numpy().data
        while memory:
            if not (count := self._socket.recv_into(memory, len(memory), socket.MSG_WAITALL)):
                raise EOFError
            memory = memory[count:]

    def close(self) -> None:
        """Wakes whoever waits at either end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Delivery(NamedTuple):
    """What goes before the tensors of a micro-batch; a connection ends with an exception in its place."""

    result: WorkerResult
    """Without its batch."""
    forms: Mapping[str, Any] | None
    """Of `PixelBatch.allocate`; None where there is no batch."""
    encode_s: float
    """How long it took to encode [s]."""


def send_result(links: Sequence[Link], result: WorkerResult, encode_s: float) -> None:
    """A micro-batch, as it came from the loader or encoded, to the training processes that get it.

    Args:
        encode_s: how long it took to encode [s].

    Raises:
        TrainerGone: nobody receives it.
    """
    forms, block = (None, None) if result.batch is None else result.batch.packed()
    try:
        for link in links:
            link.send(Delivery(WorkerResult(None, result.skipped, result.error), forms, encode_s), block)
    except OSError as lost:
        raise TrainerGone from lost


def send_end(links: Sequence[Link], cause: Exception, where: str) -> None:
    """Why no more micro-batches come; a user's mistake or an outage keeps its exit status."""
    end: Exception
    match cause:
        case TrainerGone():
            end = ConnectionError("connection closed by an encoder process: another process of the run has ended")
        case UserError():
            end = type(cause)(f"{where}: {cause}")
        case torch.OutOfMemoryError():
            end = EncoderError(f"{where}: out of memory; set model.vae_batch, or lower system.batch_size ({cause})")
        case _:
            end = EncoderError(f"{where}: {type(cause).__name__}: {cause}")
    for link in links:
        with suppress(OSError):
            link.send(end)


def _receive(link: Link) -> Delivery | Exception:
    """The other end of `send_result` and `send_end`; `result` has its batch.

    Raises:
        OSError, EOFError: the encoder process has ended.
    """
    delivery: Delivery | Exception = link.receive()
    if isinstance(delivery, Exception) or delivery.forms is None:
        return delivery

    def filled(num_bytes: int) -> Tensor:
        block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        link.fill(block)
        return block

    delivery.result.batch = PixelBatch.allocate(delivery.forms, filled)
    return delivery


@dataclass(frozen=True, eq=False)
class EncoderProcesses:
    """Those of this machine, as one training process sees them."""

    shares: EncoderShares
    times: EncoderTimes
    """Is told how long each micro-batch took to encode."""
    global_rank: int
    """Of this training process."""
    code: int = 0
    """Of `address_of`: before training starts only the training process that has started them knows it."""
    processes: Sequence["subprocess.Popen[bytes]"] = ()
    """In that process."""

    def results(self, first: int, end: int) -> Iterator[WorkerResult]:
        """Micro-batches `first` to `end` of this training process; a thread receives `AHEAD` of them.

        Raises:
            UserError: an encoder process cannot go on, or was killed.
            ConnectionError: another process of the run has ended.
        """
        rank = self.global_rank // self.shares.sharing
        links = [self._connect(number, first) for number in range(self.shares.num_encoders)]
        received, is_over = queue.Queue[Any](AHEAD - 1), threading.Event()

        def receive() -> None:
            """In a thread; an exception is the last that it delivers."""
            encoder = 0
            try:
                for number in range(first, end):
                    encoder = self.shares.encoder_of(number, rank)
                    received.put(delivery := _receive(links[encoder]))
                    if isinstance(delivery, Exception):
                        return
            except (OSError, EOFError):
                if not is_over.is_set():
                    received.put(self._lost(encoder))
            except Exception as error:
                received.put(error)

        threading.Thread(target=receive, daemon=True, name="encoded batches").start()
        try:
            for _ in range(first, end):
                delivery = received.get()
                if isinstance(delivery, Exception):
                    raise delivery
                self.times.add(delivery.encode_s)
                yield delivery.result
        finally:
            is_over.set()
            for link in links:
                link.close()
            with suppress(queue.Empty):
                while True:
                    received.get_nowait()

    def _connect(self, encoder: int, first: int) -> Link:
        connection, end_s = socket.socket(socket.AF_UNIX), time.monotonic() + _CONNECT_S
        while True:
            try:
                connection.connect(address_of(self.code, encoder))
                break
            except OSError:
                if self.processes and self.processes[encoder].poll() is not None:
                    raise self._lost(encoder) from None
                if time.monotonic() > end_s:
                    late = f"encoder process {encoder} of this machine does not listen after {_CONNECT_S:g} s"
                    raise EncoderError(f"distributed.encoders: {late}") from None
                time.sleep(0.05)
        if not is_same_user(connection):
            raise EncoderError("distributed.encoders: another user listens where an encoder process should")
        link = Link(connection)
        link.send((self.global_rank, first, os.sched_getaffinity(0)))
        return link

    def _lost(self, encoder: int) -> EncoderError | ConnectionError:
        """An encoder process that has said nothing before its end. The process that has started it knows why; in others
        it is a lost connection, which may as well be due to another training process."""
        if not self.processes:
            return ConnectionError(f"connection closed by encoder process {encoder}")
        how = "has closed its connection"
        with suppress(subprocess.TimeoutExpired):
            status = self.processes[encoder].wait(EXIT_STATUS_S)
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            how += "; SIGKILL often means that the machine ran out of memory" if status == -signal.SIGKILL else ""
        reason = f"distributed.encoders: encoder process {encoder} of this machine {how}"
        log.error(reason)  # the training thread may wait for other ranks, which fail first
        return EncoderError(reason)
