"""Replicas of the weights must stay equal to the bit: they start alike and are updated with the same gradients.

Memory errors, a broken device or a lost message make them differ without anybody noticing: each replica then trains
something else, and a checkpoint, which is dealt out over the processes, mixes them.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import pytorch_lightning as pl

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.gathered import gathered
from sd_training.callbacks.incidents import Incidents
from sd_training.config.batch_plan import counted
from sd_training.data.problems import printable
from sd_training.distributed.digest import bit_digest
from sd_training.distributed.peers import Peers
from sd_training.errors import IntegrityError
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)


class ReplicaDigest(OptimizerStepCallback):
    """Compares digests of the trained weights every `every` optimizer steps, and before every save.

    Args:
        every: optimizer steps between comparisons; 0 never compares.
        incidents: gets a file when replicas differ.
    """

    def __init__(self, every: int, incidents: Incidents) -> None:
        self.every, self.incidents = every, incidents
        self._compared_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """They start from the same weights."""
        super().on_train_start(trainer, pl_module)
        self._compared_at = trainer.global_step
        if self.every and trainer.world_size > 1 and _num_replicas(trainer) == 1:
            log.info("numerics.digest_every: no process has a copy of another's weights, so none are compared")

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        if self.every and step % self.every == 0:
            self._compare(trainer, module, step)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collective: no checkpoint is made of replicas that differ."""
        step = trainer.global_step
        if self.every and step != self._compared_at:
            assert isinstance(pl_module, TrainedModule)
            self._compare(trainer, pl_module, step)

    def _compare(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective.

        Raises:
            IntegrityError: replicas differ; on every process.
        """
        replicas = _num_replicas(trainer)
        if replicas == 1:
            return
        digests = gathered(trainer, bit_digest(p for _, p in module.named_trained() if p.requires_grad)).tolist()
        # Processes that hold the same block of the weights are as far apart as a replica has processes.
        ranks, has_majority = odd_ranks(digests, trainer.world_size // replicas)
        if ranks:
            self._stop(trainer, digests, ranks, has_majority, step)
        self._compared_at = step

    def _stop(
        self, trainer: pl.Trainer, digests: Sequence[int], ranks: list[int], has_majority: bool, step: int
    ) -> NoReturn:
        # Processes of their own: those of the saves may be at work in the background.
        timeout = getattr(trainer.strategy, "collective_timeout", None)
        hosts = Peers(trainer.global_rank, trainer.world_size, timeout).tell(socket.gethostname())
        path = self.incidents.path(step, "replicas")
        if trainer.is_global_zero:
            each = [
                {"rank": rank, "host": hosts[rank], "digest": f"{digest % 2**64:016x}"}
                for rank, digest in enumerate(digests)
            ]
            facts = {"differing_ranks": ranks, "has_majority": has_majority, "equal_at": self._compared_at}
            self.incidents.write(step, "replicas", facts | {"ranks": each})
        who = ", ".join(f"rank {rank} on {printable(hosts[rank])}" for rank in ranks)
        verdict = "unlike the majority" if has_majority else "without a majority that says which is wrong"
        raise IntegrityError(
            f"the weights of replicas differ after {counted(step, 'optimizer step')}: {who}, {verdict}. They were "
            f"equal after {counted(self._compared_at, 'step')}, and nothing was saved since; see {path}. The same "
            "command goes on from the newest checkpoint; leave a machine out that does this twice. Unlike devices may "
            "round differently: then set numerics.digest_every=0"
        )


def odd_ranks(digests: Sequence[int], distance: int) -> tuple[list[int], bool]:
    """The ranks that do not agree with the majority of their copies, or all copies where there is no majority, and
    whether there was one.

    Args:
        digests: of each rank.
        distance: ranks r, r + distance, r + 2 × distance … are copies of each other.
    """
    odd, has_majority = list[int](), True
    for first in range(distance):
        group = range(first, len(digests), distance)
        ((common, count),) = Counter(digests[rank] for rank in group).most_common(1)
        is_clear = 2 * count > len(group)
        has_majority &= is_clear
        odd += [rank for rank in group if not is_clear or digests[rank] != common]
    return sorted(odd), has_majority


def _num_replicas(trainer: pl.Trainer) -> int:
    count: int = getattr(trainer.strategy, "num_replicas", 1)
    return count
