"""Weights on their way from the device to where they are averaged, while training goes on.

The copy runs on a stream of its own, beside the next forward pass; only the next optimizer step waits for it, on the
device. The averaging runs in threads (PyTorch's kernels release the interpreter lock), so that the thread that feeds
the device has nothing to do with it. torchrun gives a process one OpenMP thread, hence several Python threads.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

_MOST_THREADS = 4
"""Per process. Averaging is bound by memory bandwidth, which a few threads use up."""


class WeightStaging:
    """Copies of one set of weights in CPU memory, used again and again."""

    def __init__(self) -> None:
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // local_processes - 1))
        self.copies: dict[str, Tensor] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor]) -> None:
        """Start copying; on CUDA into pinned memory, without waiting. What `run` started last must be done: `wait`."""
        for name, weight in weights.items():
            if name not in self.copies:
                self.copies[name] = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
        device = next((weight.device for weight in weights.values() if weight.is_cuda), None)
        if device is None:
            for name, weight in weights.items():
                self.copies[name].copy_(weight)
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, weight in weights.items():
                self.copies[name].copy_(weight, non_blocking=True)
                weight.record_stream(self._stream)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def before_weights_change(self) -> None:
        """The device, not the host, waits until the copy has left it."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def run(self, average: Callable[[Sequence[str]], None]) -> None:
        """Start `average` on the names of the copies, dealt out to threads, once the copies have arrived."""
        self._threads = self._threads or ThreadPoolExecutor(self.num_threads, "averaging")
        names = sorted(self.copies, key=lambda name: -self.copies[name].numel())
        shares = [names[first :: self.num_threads] for first in range(self.num_threads)]
        self._running = [self._threads.submit(self._arrived, average, share) for share in shares if share]

    def _arrived(self, average: Callable[[Sequence[str]], None], names: Sequence[str]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        average(names)

    def wait(self) -> None:
        """Until what `run` started is done; its errors come up here, at every call: an average that is half updated is
        never a whole one again."""
        for future in self._running:
            future.result()
        self._running = []
