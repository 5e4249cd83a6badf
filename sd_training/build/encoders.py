"""Encoder processes: the loader, the autoencoder and the text encoders of a run on devices of their own.

The first training process of a machine starts them as plain child processes with the config on stdin. They are outside
the process group, know nothing of steps, and serve the training processes of their machine in the order of the
micro-batches (`data/encoded.py`). The kernel kills them with the process that has started them.
"""

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sd_training.build.data import make_data
from sd_training.build.models import compile_networks, frozen_family, text_precision, vae_precision
from sd_training.build.plan import Plan, make_plan
from sd_training.config.schema import Config
from sd_training.data.encoded import (
    EncoderProcesses,
    EncoderShares,
    address_of,
    is_same_user,
    receive_header,
    send_header,
    send_result,
)
from sd_training.data.loader import TrainingLoader, start_worker
from sd_training.data.samples.sample import SampleRequest
from sd_training.errors import UserError
from sd_training.log import get_logger, global_rank
from sd_training.models.family import Family, autocast, latent_grid
from sd_training.parallel.launch import local_rank
from sd_training.training import scaled_pixels
from sd_training.types import PixelBatch

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = (
    "from sd_training.log import quiet_libraries; quiet_libraries(); "
    "from sd_training.build.encoders import main; main()"
)
_PR_SET_PDEATHSIG = 1


def shares_of(plan: Plan) -> EncoderShares:
    """The shares on this machine."""
    per_machine, sharing = plan.launch.devices, plan.batch.sharing
    first = global_rank() // per_machine * per_machine
    ranks = range(first // sharing, (first + per_machine - 1) // sharing + 1)
    return EncoderShares(plan.config.distributed.encoders, ranks, sharing)


def start_encoders(plan: Plan) -> EncoderProcesses | None:
    """Starts the encoder processes of this machine, in its first training process. None where there are none."""
    if not plan.config.distributed.encoders:
        return None
    if local_rank(plan.launch) > 0:
        return EncoderProcesses(shares_of(plan))
    code, processes = secrets.randbits(62), []
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path}
    for number in range(plan.config.distributed.encoders):
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, env=environment)
        start = {"config": plan.config.model_dump(mode="json"), "code": code, "number": number, "parent": os.getpid()}
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stream:  # its end is reported where its batches are missing
            stream.write(json.dumps(start).encode())
        processes.append(process)
    return EncoderProcesses(shares_of(plan), code, processes)


@dataclass
class _SharedLoader(TrainingLoader):
    """The micro-batches that one encoder process makes, of all data ranks of its machine."""

    shares: EncoderShares = field(kw_only=True)
    encoder: int = field(kw_only=True)
    first: int = field(kw_only=True)
    """Micro-batch with which the training processes begin."""

    def __len__(self) -> int:
        return len(self.shares.places_of(self.encoder, self.first, super().__len__()))

    def requests_from(self, done: int) -> Iterator[list[SampleRequest]]:
        """Without those of the first `done` micro-batches that this process makes."""
        places = self.shares.places_of(self.encoder, self.first, super().__len__())
        return (self.request(*self.shares.micro_batch_at(place)) for place in places[done:])


class EncoderServer:
    """One encoder process.

    Args:
        plan: of the run.
        number: of the process on this machine.
        listener: where the training processes connect.
    """

    def __init__(self, plan: Plan, number: int, listener: socket.socket) -> None:
        self.plan, self.number, self.listener = plan, number, listener
        self.shares = shares_of(plan)
        self.connections: dict[int, socket.socket] = {}
        """Global rank → connection."""
        self.device = _device(plan, number)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def accept(self) -> int:
        """Waits until every training process of the machine has connected; returns the first micro-batch."""
        first, per_machine = 0, self.plan.launch.devices
        while len(self.connections) < per_machine:
            connection, _ = self.listener.accept()
            if is_same_user(connection):
                hello = receive_header(connection)
                self.connections[hello["rank"]], first = connection, hello["first"]
        return first

    def serve(self, first: int) -> None:
        """Encodes to the end of the run."""
        plan, config = self.plan, self.plan.config
        family = frozen_family(plan)
        if config.trainer.compile != "off":
            compile_networks(plan, family, has_denoiser=False)
        for network in (family.vae, *family.text_encoders().values()):
            network.requires_grad_(False).eval().to(self.device)
        data = make_data(plan, family, latent_grid(family.vae))
        workers = -(-config.system.workers * plan.launch.devices // self.shares.num_encoders)
        loader = _SharedLoader(
            data.samples(), data.order, plan.batch, 0, workers, lambda: 0, data.bad_samples,
            shares=self.shares, encoder=self.number, first=first,
        )  # fmt: skip
        places = self.shares.places_of(self.number, first, plan.batch.num_steps * plan.batch.accumulation)
        began_s = time.perf_counter()
        for place, result in zip(places, loader.results(0), strict=True):
            _, rank = self.shares.micro_batch_at(place)
            if result.batch is not None:
                result = replace(result, batch=self.encoded(family, result.batch))
            sharing = self.shares.sharing
            own = [self.connections[process] for process in range(rank * sharing, (rank + 1) * sharing)]
            send_result(own, result, time.perf_counter() - began_s)
            began_s = time.perf_counter()

    @torch.no_grad()
    def encoded(self, family: Family, batch: PixelBatch) -> PixelBatch:
        """As the training step would encode it; in CPU memory. Text encoders that are trained run there."""
        model, precision = self.plan.config.model, self.plan.precision
        own = batch.to(self.device)
        moments = family.moments(scaled_pixels(own.pixels), vae_precision(model, precision), model.vae_batch)
        texts = {}
        if not model.train_text_encoder:
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
    first = torch.cuda.device_count() - plan.config.distributed.encoders
    return torch.device("cuda", given[number] if given else first + number)


def _die_with(parent: int) -> None:
    """SIGKILL by the kernel at the end of the parent, also to a stopped process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Until all is sent, or a training process has gone. A failure goes to the training processes, which report it."""
    start: dict[str, Any] = json.load(sys.stdin)
    _die_with(start["parent"])
    get_logger("sd_training").setLevel("WARNING")
    threads = torch.get_num_threads()
    start_worker(dict(os.environ), start["parent"], 0)
    torch.set_num_threads(threads)  # as in training: kernels may round in another way with others
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address_of(start["code"], start["number"]))
    listener.listen(256)
    server = EncoderServer(make_plan(Config.model_validate(start["config"])), start["number"], listener)
    with suppress(OSError):  # a training process has gone
        first = server.accept()
        try:
            server.serve(first)
        except OSError:
            raise
        except Exception as error:
            where = f"distributed.encoders: encoder process {start['number']} on {server.device}"
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            for connection in server.connections.values():
                send_header(connection, {"failed": f"{where}: {kind}{error}"})
