"""Rules between options of signals, time limits and the hang watch."""

from collections.abc import Iterator

from sd_training.config.schema import Config
from sd_training.config.watch_schema import SECTIONS


def watch_problems(config: Config) -> Iterator[str]:
    """One sentence each; each starts with the option's dotted name."""
    system = config.system
    for name in sorted(set(system.stop_signals) & set(system.save_signals)):
        yield f"system.save_signals: {name} is one of system.stop_signals as well; take it out of one of them"
    watch = config.watch
    for section in SECTIONS:
        limit_s = getattr(watch, f"{section}_s")
        if limit_s is not None and limit_s >= watch.collective_timeout_s:
            yield (
                f"watch.collective_timeout_s: {watch.collective_timeout_s:g} is not above "
                f"watch.{section}_s={limit_s:g}; the processes "
                "would end with an error of the network before the watch says what hangs"
            )
