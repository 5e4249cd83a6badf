"""The pages for users of other trainers name nothing that is not here: options, their words, files, scripts with their
arguments. What stands in the first cell of a table row is the other trainer's, and is not looked at. Links are checked
in all guides."""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from sd_training.config.fields import OLD_NAMES, groups, options
from sd_training.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("coming_from_*.md"))
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KNOWN = frozenset({*options(), *groups()})
FILE_ENDINGS = (
    "caption",
    "ckpt",
    "csv",
    "html",
    "json",
    "jsonl",
    "log",
    "md",
    "parquet",
    "png",
    "py",
    "safetensors",
    "sbatch",
    "sh",
    "toml",
    "txt",
    "yaml",
    "yml",
)
"""Last part of a dotted name that makes it a file."""
FOLDERS = ("batch_files", "configs", "docs", "scripts", "sd_training", "tests")

_DOTTED = re.compile(r"[a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)+")
_FILE = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+|train\.py")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def first_cell(line: str) -> str:
    return line.split("|")[1] if line.startswith("|") else ""


def spans(text: str) -> Iterator[str]:
    """What stands in backquotes outside first cells, and the words of code blocks that are no comments."""
    for line in "\n".join(text.split("```")[::2]).splitlines():
        yield from re.findall(r"`([^`]+)`", line.removeprefix(f"|{first_cell(line)}"))
    for block in text.split("```")[1::2]:
        for line in block.partition("\n")[2].replace("\\\n", " ").splitlines():
            yield line.strip()


def is_known(name: str, known: Collection[str]) -> bool:
    """Whether it is an option, a group, or what a mapping may hold, such as `dataset.params.filters.width`."""
    if name in known:
        return True
    above = name
    while above := above.rpartition(".")[0]:
        if above in known and above in options():
            return "mapping" in options()[above].allowed
    return False


def problems_of_word(word: str, known: Collection[str]) -> list[str]:
    """Of one word of a command, or of a text in backquotes that is no command."""
    found = [f"{file}: no such file" for file in _FILE.findall(word) if not (ROOT / file).exists()]
    match = _DOTTED.match(word)
    if not match or match[0].rpartition(".")[2] in FILE_ENDINGS:
        return found
    name, rest = match[0], word[match.end() :]
    if rest and rest[0] not in "=: ":
        return found
    if not is_known(name, known):
        return [*found, f"{name}: no such option"]
    value, words = rest.removeprefix("="), options()[name].words if name in options() else []
    is_word = rest.startswith("=") and re.fullmatch(r"[a-z]\w*", value)
    if is_word and words and value not in {*words, "null", "true", "false"}:
        found.append(f"{word}: {name} has no such word")
    return found


def problems(text: str, known: Collection[str] = KNOWN) -> list[str]:
    """What a page says that is not so."""
    found = []
    for span in spans(text):
        if not re.match(r"(python|torchrun|sbatch|srun) ", span):
            found += problems_of_word(span.strip("'\""), known)
            continue
        words = shlex.split(span, comments=True)
        found += [problem for word in words for problem in problems_of_word(word, known)]
        for script in (word for word in words if word.startswith("scripts/") and (ROOT / word).is_file()):
            source = (ROOT / script).read_text(encoding="utf-8")
            flags = [word for word in words if word.startswith("--") and word != "--nproc_per_node"]
            found += [f"{script} has no {flag}" for flag in flags if f'"{flag}"' not in source]
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The options of each start of a training, but of those whose config is the reader's."""
    for span in spans(text):
        start = re.match(r"(?:python train\.py|torchrun .*-m train) (.*)", span)
        words = shlex.split(start[1], comments=True) if start else []
        if any(word.startswith("config=configs/") for word in words):
            yield [word.replace("config=", f"config={ROOT}/") for word in words if word != "--dry-run"]


def keys(text: str) -> list[str]:
    """The other trainer's keys that the tables explain; `.name` belongs to the key before it."""
    explained = text.partition("## Intended differences")[0]
    return [key for line in explained.splitlines() for key in re.findall(r"`([^`.][^`]*)`", first_cell(line))]


def anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, guide: Path) -> list[str]:
    """Of a text that stands in this file."""
    found = []
    for link in _LINK.findall(re.sub(r"```.*?```", "", text, flags=re.S)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (guide.parent / file) if file else guide
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(f"{link}: no such page or heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not problems(text)
    for words in commands(text):
        load_config(words)
    assert not [key for key, count in Counter(keys(text)).items() if count > 1], "explained twice"
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert not [row for row in rows if row.count("|") != 3 or not all(cell.strip() for cell in row.split("|")[1:3])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_is_in_the_readme(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_links_of_guides_resolve(guide: Path) -> None:
    assert not broken_links(guide.read_text(encoding="utf-8"), guide)


def test_a_renamed_option_is_found() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "`experiment.num_examples_to_see`" in text
        renamed = problems(text, KNOWN - {"experiment.num_examples_to_see"})
        assert "experiment.num_examples_to_see: no such option" in renamed
        for old in OLD_NAMES:
            assert f"`{old}`" not in re.sub(r"^\|[^|]*\|", "|", text, flags=re.M)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`system.batchsize`", "system.batchsize: no such option"),
        ("| `a.b` | `system.batchsize=8` |", "system.batchsize: no such option"),
        ("`optimizer.name=sgd`", "optimizer.name=sgd: optimizer.name has no such word"),
        ("`scripts/no_such.py`", "scripts/no_such.py: no such file"),
        ("```\npython train.py \\\n  system.batchsize=8\n```\n", "system.batchsize: no such option"),
        (
            "```\npython scripts/generate_examples.py --no-such 1\n```\n",
            "scripts/generate_examples.py has no --no-such",
        ),
    ],
)
def test_wrong_texts_are_found(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_right_texts_pass() -> None:
    right = "| `a.b` | `dataset.params.filters.width=>=512`, `optimizer.name=lion`, `a.csv`, `model.vae.params.x` |"
    assert not problems(f"{right}\n```\npython train.py config=mine.yaml 'system.batch_size=8'\n```\n")
