"""Encoder processes: the loader, the autoencoder and the text encoders of a run on devices of their own.

The first training process of a machine starts them as plain child processes with the config on stdin. They are outside
the process group, know nothing of steps, and serve the training processes of their machine in the order of the
micro-batches (`data/encoded.py`). The kernel kills them with the process that has started them.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sd_training.build.data import make_data
from sd_training.build.models import compile_networks, frozen_family, text_precision, vae_precision
from sd_training.build.plan import Plan, make_plan
from sd_training.cli import keep_freed_memory
from sd_training.config.schema import Config
from sd_training.data.encoded import (
    EncoderProcesses,
    EncoderShares,
    EncoderTimes,
    Link,
    TrainerGone,
    address_of,
    is_same_user,
    send_end,
    send_result,
)
from sd_training.data.loader import TrainingLoader, import_path, signals_blocked, start_worker
from sd_training.data.samples.sample import SampleRequest, WorkerResult
from sd_training.errors import UserError
from sd_training.log import get_logger, global_rank, hide_in_tracebacks, note_secret
from sd_training.models.family import autocast, latent_grid
from sd_training.parallel.launch import local_rank
from sd_training.signals import FOR_THE_TRAINING_PROCESS
from sd_training.training import scaled_pixels
from sd_training.types import PixelBatch

_PROGRAM = (
    f"import ctypes; ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d}); "  # PR_SET_PDEATHSIG, before what takes seconds
    "from sd_training.log import quiet_libraries; quiet_libraries(); "
    "from sd_training.build.encoders import main; main()"
)
"""SIGKILL by the kernel at the end of the parent ends a stopped process as well."""


def shares_of(plan: Plan) -> EncoderShares:
    """What the encoder processes of this machine share."""
    per_machine, sharing = plan.launch.devices, plan.batch.sharing
    first = global_rank() // per_machine * per_machine
    ranks = range(first // sharing, (first + per_machine - 1) // sharing + 1)
    return EncoderShares(plan.encoders, ranks, sharing)


def start_encoders(plan: Plan) -> EncoderProcesses | None:
    """Starts the encoder processes of this machine, in its first training process. None where there are none."""
    if not plan.encoders:
        return None
    shares = shares_of(plan)
    own = EncoderProcesses(shares, EncoderTimes(shares), global_rank())
    if local_rank(plan.launch) > 0:
        return own
    code, processes = secrets.randbits(62), []
    environment = {**os.environ, "PYTHONPATH": import_path()}
    for number in range(plan.encoders):
        with signals_blocked(FOR_THE_TRAINING_PROCESS):  # and so they are in all threads of the new process
            process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, env=environment)
        start = {"config": plan.config.model_dump(mode="json"), "code": code, "number": number, "parent": os.getpid()}
        start["processes"] = plan.launch.devices
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stream:  # its end is reported where its batches are missing
            stream.write(json.dumps(start).encode())
        processes.append(process)
    return replace(own, code=code, processes=processes)


@dataclass
class _SharedLoader(TrainingLoader):
    """The micro-batches that one encoder process makes, of all data ranks of its machine."""

    shares: EncoderShares = field(kw_only=True)
    places: range = field(kw_only=True)
    """Of `shares.places_of`."""

    def __len__(self) -> int:
        return len(self.places)

    def step_of(self, number: int) -> int:
        """As `TrainingLoader.step_of`, of what this process makes."""
        return super().step_of(self.shares.micro_batch_at(self.places[number])[0])

    def requests_from(self, done: int) -> Iterator[list[SampleRequest]]:
        """Without those of the first `done` micro-batches that this process makes."""
        return (self.request(*self.shares.micro_batch_at(place)) for place in self.places[done:])


class EncoderServer:
    """What one encoder process does, with its networks loaded.

    Args:
        plan: of the run.
        number: of the process on this machine.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number, self.shares = plan, number, shares_of(plan)
        self.device = _device(plan, number)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.family = frozen_family(plan)
        if plan.config.trainer.compile != "off":
            compile_networks(plan, self.family, has_denoiser=False)
        is_text_trained = plan.config.model.trains_text
        for network in (self.family.vae, *(() if is_text_trained else self.family.text_encoders().values())):
            network.to(self.device)

    def results(self, first: int) -> Iterator[tuple[list[int], WorkerResult, float]]:
        """From a micro-batch on to the end of the run: the global ranks that get it, what they get, and how long it
        took to encode [s]. The data is opened here, when the training processes have indexed it."""
        plan, batch, shares = self.plan, self.plan.batch, self.shares
        data = make_data(plan, self.family, latent_grid(self.family.vae))
        workers = -(-plan.config.system.workers * plan.launch.devices // shares.num_encoders)
        places = shares.places_of(self.number, first, batch.num_steps * batch.accumulation)
        loader = _SharedLoader(
            data.samples(), data.order, batch, 0, workers, lambda: 0, data.bad_samples, shares=shares, places=places
        )
        for place, result in zip(places, loader.results(0), strict=True):
            began_s, (_, rank) = time.perf_counter(), shares.micro_batch_at(place)
            if result.batch is not None:
                result = replace(result, batch=self.encoded(result.batch))
            yield [*range(rank * shares.sharing, (rank + 1) * shares.sharing)], result, time.perf_counter() - began_s

    @torch.no_grad()
    def encoded(self, batch: PixelBatch) -> PixelBatch:
        """As the training step would encode it; in CPU memory. Text encoders that are trained run there."""
        model, precision = self.plan.config.model, self.plan.precision
        own, family = batch.to(self.device), self.family
        moments = family.moments(scaled_pixels(own.pixels), vae_precision(model, precision), model.vae_batch)
        texts = {}
        if not model.trains_text:
            with autocast(self.device, text_precision(model, precision)):
                texts = {name: family.encode_text(name, own.tokens[name], own.token_masks[name]) for name in own.tokens}
        return replace(
            batch,
            pixels=batch.pixels.new_empty(len(batch.pixels), 0),
            moments=moments.cpu(),
            tokens={name: tokens for name, tokens in batch.tokens.items() if name not in texts},
            text_states={name: text.states.cpu() for name, text in texts.items()},
            text_pooled={name: text.pooled.cpu() for name, text in texts.items()},
        )


def _device(plan: Plan, number: int) -> torch.device:
    """Of an encoder process: as `distributed.encoder_devices` says, or the last GPUs of the machine."""
    if plan.launch.accelerator != "cuda":
        return torch.device(plan.launch.accelerator)
    given = plan.config.distributed.encoder_devices
    first = torch.cuda.device_count() - plan.encoders
    return torch.device("cuda", given[number] if given else first + number)


def _accept(listener: socket.socket, count: int) -> tuple[dict[int, Link], int]:
    """Waits until so many training processes have connected; by global rank, and the micro-batch they begin with. This
    process and its loader processes may run on the cores of all of them: srun binds each to its own."""
    links, first, cores = dict[int, Link](), 0, os.sched_getaffinity(0)
    while len(links) < count:
        connection, _ = listener.accept()
        if is_same_user(connection):
            link = Link(connection)
            rank, first, more_cores = link.receive()
            links[rank], cores = link, cores | more_cores
    os.sched_setaffinity(0, cores)
    return links, first


def main() -> None:
    """Until all is sent, or a training process has gone. A failure goes to the training processes, which report it."""
    start: dict[str, Any] = json.load(sys.stdin)
    if os.getppid() != start["parent"]:  # it had ended before the kernel was asked
        os._exit(1)
    hide_in_tracebacks()
    note_secret(start["config"]["wandb"]["api_key"])
    get_logger("sd_training").setLevel("WARNING")
    threads = torch.get_num_threads()
    start_worker(dict(os.environ), start["parent"], 0)
    torch.set_num_threads(threads)  # as in training: kernels may round in another way with others
    listener, number = socket.socket(socket.AF_UNIX), start["number"]
    listener.bind(address_of(start["code"], number))
    listener.listen(256)
    try:
        server: EncoderServer | Exception = EncoderServer(make_plan(Config.model_validate(start["config"])), number)
    except Exception as error:
        server = error
    links, first = _accept(listener, start["processes"])
    where = f"distributed.encoders: encoder process {number}"
    try:
        if isinstance(server, Exception):
            raise server
        where = f"{where} on {server.device}"
        if server.device.type == "cpu":
            keep_freed_memory()
        with ThreadPoolExecutor(1, "send") as sender:  # while the next micro-batch is encoded
            sent: Future[None] | None = None
            for ranks, result, encode_s in server.results(first):
                if sent is not None:
                    sent.result()
                sent = sender.submit(send_result, [links[rank] for rank in ranks], result, encode_s)
    except Exception as error:
        if not isinstance(error, (UserError, TrainerGone)):
            sys.excepthook(type(error), error, error.__traceback__)  # the training processes report one line
        send_end([*links.values()], error, where)
