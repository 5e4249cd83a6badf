"""Writes docs/config.md from the schema: `python scripts/config_docs.py`, or `--check` to see whether it is fresh."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # A script's own folder is on the path, the project's is not.

from sd_training.config.fields import Option, groups, options
from sd_training.config.schema import PartConfig

DESTINATION = ROOT / "docs" / "config.md"

_HEAD = """\
# Configuration

Written by `python scripts/config_docs.py` from `sd_training/config/schema.py`; a test keeps it fresh.

    python train.py config=a.yaml,b.yaml 'dataset.params.path=data/{000..099}.tar' system.batch_size=16 --dry-run

Files are merged from left to right, then `option=value` is applied in order: options of a group are merged, lists are
replaced. A value is read as YAML; what YAML cannot read (`dataset.params.filters.original_width=>=512`) is text.
`${another.option}` stands for the value of that option; nothing else is filled in. `$NAME`, a variable of the
environment, is expanded in `experiment.log_dir`, `dataset.params.index_dir` and `dataset.params.remote.cache_dir` only.
`???` means "to be filled": an error for a **required** option, the default for any other. Unknown options are errors.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_contents(), *(line for group in groups() for line in _section(group))])


def _contents() -> Iterator[str]:
    yield "| group | what it holds |\n|---|---|"
    yield from (f"| [`{key}`](#{key.replace('.', '')}) | {field.description} |" for key, field in groups().items())
    yield ""


def _section(group: str) -> Iterator[str]:
    """Heading and table of one group; a repeated kind of group is described where it first stands."""
    field = groups()[group]
    own = [option for key, option in options().items() if key.rpartition(".")[0] == group]
    same = [key for key, other in groups().items() if other.annotation is field.annotation]
    yield f"## {group}\n\n{field.description}\n"
    if field.annotation is PartConfig and same[0] != group:
        yield f"The same keys as [`{same[0]}`](#{same[0].replace('.', '')}): {', '.join(f'`{o.key}`' for o in own)}.\n"
    elif own:
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        yield from (_row(option) for option in own)
        yield ""


def _row(option: Option) -> str:
    default = "**required**" if option.required else f"`{json.dumps(option.default, ensure_ascii=False)}`"
    meaning = " ".join(option.doc.split())
    return "| " + " | ".join(_cell(cell) for cell in (f"`{option.key}`", option.allowed, default, meaning)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when docs/config.md is not fresh; write nothing")
    check = parser.parse_args().check
    if not check:
        DESTINATION.write_text(render(), encoding="utf-8")
    elif not DESTINATION.is_file() or DESTINATION.read_text(encoding="utf-8") != render():
        sys.exit("docs/config.md is not fresh: run python scripts/config_docs.py")


if __name__ == "__main__":
    main()
