"""How much a piece of work costs, for tests that compare two of them: a bound in seconds fails on a slow machine."""

import time
from collections.abc import Callable


def least_cpu_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Of this process, all threads; other work on the machine only adds to a repeat, so the least is the work's own."""
    took = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return min(took)
