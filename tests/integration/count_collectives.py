"""Communication of a run with accumulation, per optimizer step; started by torchrun in tests.

python -m tests.integration.count_collectives OPTION=VALUE …
"""

import json
import sys
from collections import Counter

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from tests.integration.training import train


def main() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run = train(sys.argv[1:])
    counts = Counter(event.name for event in profiler.events() if event.name.startswith("gloo:"))
    if distributed.get_rank() == 0:
        print(json.dumps({"steps": run.trainer.global_step, "counts": counts}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
