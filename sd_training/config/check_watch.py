"""Rules between options of signals and time limits."""

from collections.abc import Iterator

from sd_training.config.schema import Config


def watch_problems(config: Config) -> Iterator[str]:
    """One sentence each; each starts with the option's dotted name."""
    system = config.system
    for name in sorted(set(system.stop_signals) & set(system.save_signals)):
        yield f"system.save_signals: {name} is one of system.stop_signals as well; take it out of one of them"
