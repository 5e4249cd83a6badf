"""What `--help` prints, from the schema: the usual options, or every option of a group."""

import json
import textwrap
from collections.abc import Iterable

from sd_training.config.fields import Option, groups, options
from sd_training.config.suggest import elsewhere, suggest
from sd_training.errors import ConfigError

_USUAL = (
    "experiment.log_dir",
    "experiment.name",
    "experiment.num_examples_to_see",
    "experiment.save_every",
    "dataset.type",
    "dataset.params.path",
    "dataset.params.resolution",
    "system.batch_size",
    "system.gradient_accumulation",
    "system.workers",
    "model.pretrained",
    "model.train",
    "model.mixed_precision",
    "model.gradient_checkpointing",
    "model.use_ema",
    "distributed.strategy",
    "objective.preset",
    "optimizer.name",
    "optimizer.params.learning_rate",
    "lr_scheduler.scheduler",
    "validation.path",
    "sampling.every",
    "logging.every",
    "trainer.accelerator",
    "trainer.devices",
)
"""The options of the README's table, and what every run needs."""
_WIDTH = 118


def help_text(usage: str, topics: Iterable[str]) -> str:
    """The page that `--help` prints.

    Args:
        usage: first lines of the page without a topic.
        topics: names of groups or options; none for the overview.

    Raises:
        ConfigError: a topic is neither a group nor an option; names the nearest one.
    """
    pages = [_topic(topic.partition("=")[0]) for topic in topics]
    return "\n\n".join(pages) if pages else _overview(usage)


def _overview(usage: str) -> str:
    usual = (_entry(options()[key], is_short=True) for key in _USUAL)
    held = (f"  {key:32} {_first_sentence(field.description or '')}" for key, field in groups().items())
    return "\n".join(
        [
            usage,
            "\nOptions that most runs set (option=default; * has to be given):",
            *usual,
            "\nGroups; `--help GROUP` lists all options of one, `--help OPTION` describes one:",
            *held,
            "\nAll options on one page: docs/config.md. How to start: README.md.",
        ]
    )


def _topic(name: str) -> str:
    if name in options():
        return _entry(options()[name], is_short=False)
    below = [option for key, option in options().items() if key.startswith(f"{name}.")]
    if name not in groups() or not below:
        near = elsewhere(name) or suggest(name, [*groups(), *options()])
        hint = f"; did you mean {near}?" if near else f"; groups are {', '.join(g for g in groups() if '.' not in g)}"
        raise ConfigError(f"--help {name}: is neither a group of options nor an option{hint}")
    return "\n".join([f"{name}: {groups()[name].description}", *(_entry(option, is_short=False) for option in below)])


def _entry(option: Option, *, is_short: bool) -> str:
    """An option with its default, and below it what it means: in one line, or in full with the allowed values."""
    default = "" if option.required else json.dumps(option.default, ensure_ascii=False)
    head = f"  {'*' if option.required else ''}{option.key}={default}"
    if is_short:
        return f"{head:44} {textwrap.shorten(_first_sentence(option.doc), _WIDTH - 45, placeholder=' …')}"
    meaning = f"({option.allowed}) {' '.join(option.doc.split())}"
    return f"{head}\n{textwrap.fill(meaning, _WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 6)}"


def _first_sentence(text: str) -> str:
    """Up to the first full stop that a space follows."""
    text = " ".join(text.split())
    return text.partition(". ")[0].rstrip(".")
