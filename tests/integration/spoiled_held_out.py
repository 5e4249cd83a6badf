"""`python train.py` whose held-out shards are emptied before its fourth optimizer step.

The folder of the shards is the first word, the options of the run follow.
"""

import sys
from pathlib import Path
from typing import Any

import train
from sd_training.build import run as building
from sd_training.cli import run_cli
from tests.integration.training import AtStep


def empty(folder: Path) -> None:
    """All shards of a folder."""
    for shard in folder.glob("*.tar"):
        shard.write_bytes(b"")


def main() -> None:
    """Trains."""
    folder = Path(sys.argv.pop(1))
    build_run = building.build_run

    def build_spoiled(*arguments: Any) -> building.Run:
        run = build_run(*arguments)
        run.trainer.callbacks.append(AtStep(3, lambda: empty(folder)))  # type: ignore[attr-defined]
        return run

    building.build_run = build_spoiled  # type: ignore[assignment]
    train.main()


if __name__ == "__main__":
    run_cli(main)
