"""One checkpoint on its way to disk: the files of each process, what all processes say of them, the seal."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from sd_training.checkpoint import seal
from sd_training.checkpoint.tensor_files import write_state, write_tensors
from sd_training.checkpoint.writer import Fence
from sd_training.distributed.peers import Peers


class Sealing:
    """What every strategy does between the first file and the seal. Nothing is left behind when it fails.

    Args:
        folder: the checkpoint, `step=N`.
        peers: the processes that write it.
        fence: of this start of the run; the first process asks it.
    """

    def __init__(self, folder: Path, peers: Peers, fence: Fence) -> None:
        self.root, self.step, self.peers = folder.parent, seal.step_of(folder), peers
        self.fence = fence
        self._partial = Path()
        self._failure: OSError | None = None

    def begin(self, bytes_here: int) -> bool:
        """Collective: makes the folder to write into; false when this checkpoint is there already.

        Args:
            bytes_here: what this process is about to write, for the look at the free space.

        Raises:
            OSError: it cannot be made, or too little space is free; names both figures.
            TakenOverError: another start has the run.
        """
        needed_bytes = sum(self.peers.tell(bytes_here))

        def make() -> str | None:
            partial = seal.begin(self.root, self.step, needed_bytes, self.fence)
            return None if partial is None else str(partial)

        made = self._on_first(make)
        self._partial = Path(made or "")
        return made is not None

    def write(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """This process's tensors of a part. After a failure nothing more is written; `finish` tells of it."""
        if self._failure is not None:
            return
        try:
            write_tensors(self._partial, part, tensors, self.peers.rank, self.peers.count)
        except OSError as error:
            self._failure = error

    def finish(self, state: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Collective: all files are there, flushed, hashed, read back and under their final name, or none is.

        Args:
            state: what is not a tensor of a part; the first process's is stored.
            info: JSON for the manifest, of the first process.

        Raises:
            OSError: some process could not write; names folder and free space.
            TakenOverError: another start has the run.
        """
        self._agree(self._failure)

        def seal_it() -> None:
            write_state(self._partial, state)
            seal.finish(self._partial, info, self.fence)

        self._on_first(seal_it)

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """The first process acts, and tidies up when it fails."""

        def tidied() -> Any:
            with self._tidied():
                return act()

        return self.peers.on_first(tidied)

    def _agree(self, failure: OSError | None) -> None:
        """All fail when one does; the first one tidies up."""
        with self._tidied():
            self.peers.raise_first(failure)

    @contextmanager
    def _tidied(self) -> Iterator[None]:
        """Where the first process fails, what was written is removed, and the error names folder and free space."""
        try:
            yield
        except OSError as error:
            if self.peers.rank == 0:
                raise seal.abandoned(self.root, self.step, error, self.fence) from error
            raise
        except BaseException:
            if self.peers.rank == 0:
                seal.abandon(self.root, self.step, self.fence)
            raise
