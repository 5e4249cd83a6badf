"""A run of which the second process alone gets SIGTERM during the rehearsal; started by torchrun in tests.

python -m tests.integration.stopped_rehearsal RUN_DIR OPTION=VALUE …
"""

import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import torch

from tests.integration.training import prepare


def stop_when_it_rehearses(run_dir: Path) -> None:
    while not (run_dir / "rehearsal" / "log.txt").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    run = prepare(sys.argv[2:])
    if os.environ["RANK"] == "1":
        Thread(target=stop_when_it_rehearses, args=[Path(sys.argv[1])], daemon=True).start()
    run.trainer.fit(run.module, datamodule=run.data)
    assert run.preemption.status, "nobody has stopped"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
