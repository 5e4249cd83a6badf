"""The short form of the fault campaign, part by part: every promise is kept."""

from pathlib import Path

import pytest

from scripts import fault_campaign
from scripts.campaign.row import Row
from sd_training.errors import UserError


@pytest.mark.slow
@pytest.mark.parametrize("part", fault_campaign.PARTS)
def test_promises_are_kept(part: str, tmp_path: Path) -> None:
    rows = fault_campaign.run_part(part, tmp_path, is_quick=True)
    print(fault_campaign.table(rows))
    assert rows and all(row.is_kept for row in rows), fault_campaign.table(rows)


def test_a_part_that_fails_has_kept_nothing(tmp_path: Path) -> None:
    (row,) = fault_campaign.run_part("no_such_part", tmp_path, is_quick=True)
    assert not row.is_kept and "no_such_part" in row.figure


def test_words() -> None:
    assert fault_campaign.parse([])[0] and not fault_campaign.parse(["--full"])[0]
    assert fault_campaign.parse(["only=kills", "out=x"])[1:] == (Path("x").resolve(), ["kills"])
    for words in (["only=nothing"], ["fast"], ["--slow"], ["--quick", "--full"]):
        with pytest.raises(UserError):
            fault_campaign.parse(words)


def test_the_report_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(fault_campaign.REPORT.read_text(encoding="utf-8"), encoding="utf-8")
    for text in ("first", "second"):
        fault_campaign.write_report(text, page)
    assert "second" in page.read_text(encoding="utf-8") and "first\n" not in page.read_text(encoding="utf-8")
    page.write_text("nothing here", encoding="utf-8")
    with pytest.raises(UserError, match="are missing"):
        fault_campaign.write_report("third", page)


def test_the_table_shows_what_was_not_kept() -> None:
    assert "**no**" in fault_campaign.table([Row("a | b", "nothing breaks", 1200, "it broke", False)])
    assert "| 1,200 |" in fault_campaign.table([Row("a | b", "nothing breaks", 1200, "it held", True)])
