"""Communication of a run with accumulation, per optimizer step, and workers of gloo's groups; started in tests.

python -m tests.integration.count_collectives OPTION=VALUE …
"""

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from tests.integration.training import train


def main() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run = train(sys.argv[1:])
    # Not `profiler.events()`, which spends half a minute on building a tree of them.
    names = (event.name() for event in profiler.profiler.kineto_results.events())
    counts = Counter(name for name in names if name.startswith("gloo:"))
    workers = [options._threads for options in map(_options, distributed.distributed_c10d._world.pg_map)]
    if distributed.get_rank() == 0:
        print(json.dumps({"steps": run.trainer.global_step, "counts": counts, "workers": workers}))


def _options(group: distributed.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu")).options


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
