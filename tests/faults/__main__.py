"""Breaks runs in every way that is promised to do no harm, and prints what came of it (docs/reliability.md).

    python -m tests.faults [--quick|--full] [out=build/campaign] [only=kills,signals]

--quick takes minutes and is a part of the tests; --full takes hours and writes its tables into docs/reliability.md,
each part as soon as it has ended.
The exit status is 1 when a promise was not kept.
"""

import datetime
import importlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

from sd_training.cli import run_cli
from sd_training.errors import UserError
from tests.faults.row import Row

PARTS = (
    "kills",
    "signals",
    "damage",
    "disk",
    "zombie",
    "numerics",
    "watch",
    "elastic",
    "memory",
    "fuzz",
    "secrets",
    "slurm",
)
"""Modules of tests/faults/ with `run(folder, is_quick) -> list[Row]`, in the order of the table."""
REPORT = ROOT / "docs" / "reliability.md"


def run_part(name: str, folder: Path, is_quick: bool) -> list[Row]:
    """Rows of one part; what an earlier one left in its folder is removed. A part that cannot even run has not shown
    what it should."""
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    start_s = time.monotonic()
    try:
        part = importlib.import_module(f"tests.faults.{name}")
        rows: list[Row] = part.run(folder / name, is_quick)
    except Exception as error:  # the other parts are still worth running
        sys.excepthook(type(error), error, error.__traceback__)
        rows = [Row(name, "can be tried", 0, f"the part itself failed: {error!r:.200}".replace("\n", " "), False)]
    print(f"{name}: {time.monotonic() - start_s:.0f} s\n{table(rows)}", file=sys.stderr, flush=True)
    return rows


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = ["| fault | promise | trials | figure | kept |", "|---|---|---|---|---|"]
    for row in rows:
        kept = "**no**" if not row.is_kept else "yes" if row.trials else "not tried"
        cells = (row.fault, row.promise, f"{row.trials:,}", row.figure, kept)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def circumstances(part: str, is_quick: bool, seconds: float) -> str:
    """When, of what, with what, on what, how."""
    import diffusers
    import pytorch_lightning
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = (
        f"torch {torch.__version__}, Lightning {pytorch_lightning.__version__}, diffusers {diffusers.__version__}"
    )
    return (
        f"{datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}, Python {platform.python_version()}, "
        f"{versions}, Linux {platform.release().partition('-')[0]}, {os.cpu_count()} cores, {memory_gib:.0f} GiB; "
        f"`python -m tests.faults --{'quick' if is_quick else 'full'} only={part}` took "
        f"{seconds / 60:.1f} minutes."
    )


def write_report(part: str, text: str, path: Path = REPORT) -> None:
    """Between the part's markers on the page.

    Raises:
        UserError: they are missing.
    """
    first, last = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, begin, rest = path.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UserError(f"{path}: the lines {first} and {last} are missing; the table goes between them")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def parse(words: list[str]) -> tuple[bool, Path, list[str]]:
    """Whether it is quick, the folder, the parts.

    Raises:
        UserError: a word that means nothing.
    """
    given = dict(word.partition("=")[::2] for word in words if not word.startswith("-"))
    unknown = [word for word in words if word.startswith("-") and word not in ("--quick", "--full")]
    unknown += sorted(given.keys() - {"out", "only"})
    if unknown:
        raise UserError(f"{unknown[0]}: is no option; options are --quick, --full, out=FOLDER and only=PART,PART")
    if "--quick" in words and "--full" in words:
        raise UserError("--quick and --full: give one of them")
    names = given.get("only", ",".join(PARTS)).split(",")
    if wrong := [name for name in names if name not in PARTS]:
        raise UserError(f"only={wrong[0]}: is no part; parts are {', '.join(PARTS)}")
    folder = Path(given.get("out", ROOT / "build" / "campaign")).resolve()
    return "--full" not in words, folder, [name for name in PARTS if name in names]


def main() -> None:
    """Run the parts, print the table, write the report."""
    words = sys.argv[1:]
    if "-h" in words or "--help" in words:
        print(__doc__.strip())
        return
    is_quick, folder, names = parse(words)
    is_kept = True
    for name in names:
        start_s = time.monotonic()
        rows = run_part(name, folder, is_quick)
        report = f"{table(rows)}\n\n{circumstances(name, is_quick, time.monotonic() - start_s)}"
        print(f"{report}\n", flush=True)
        is_kept = is_kept and all(row.is_kept for row in rows)
        if not is_quick:
            write_report(name, report)
    raise SystemExit(0 if is_kept else 1)


if __name__ == "__main__":
    run_cli(main)
