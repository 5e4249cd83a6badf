"""Writes the tables of docs/config.md from the schema, below what is written by hand:
`python -m tests.config_docs`; `--check` says whether they are fresh."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from sd_training.config.fields import Option, either, groups, options
from sd_training.config.schema import PartConfig

ROOT = Path(__file__).resolve().parents[1]
DESTINATION = ROOT / "docs" / "config.md"

_MARK = "\n## Groups\n"
"""Above it the page is written by hand."""
_NOTE = """\
From here on written by `python -m tests.config_docs` from the schemas in `sd_training/config`; a test keeps it fresh.

| group | what it holds |
|---|---|"""


def render() -> str:
    """The whole page."""
    head = DESTINATION.read_text(encoding="utf-8").partition(_MARK)[0]
    contents = [
        f"| [`{key}`](#{key.replace('.', '')}) | {_cell(' '.join((field.description or '').split()))} |"
        for key, field in groups().items()
    ]
    tables = [line for group in groups() for line in _section(group)]
    return "\n".join([f"{head}{_MARK}{_NOTE}", *contents, "", *tables])


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
    readers = [
        f"`{key}={either(list(filter(None, rule.values)))}`" for key, rule in option.readers.items() if rule.values
    ]
    meaning = " ".join([*option.doc.split(), *([f"Only with {' and '.join(readers)}."] if readers else [])])
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
    elif DESTINATION.read_text(encoding="utf-8") != render():
        sys.exit("docs/config.md is not fresh: run python -m tests.config_docs")


if __name__ == "__main__":
    main()
