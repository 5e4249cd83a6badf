"""The short form of the fault campaign, part by part: every promise is kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from sd_training.checkpoint.save import write_state, write_tensors
from sd_training.errors import UserError
from tests.checkpoints import write_sealed
from tests.faults import __main__ as fault_campaign
from tests.faults import damage, kills
from tests.faults.row import Row
from tests.faults.signals import is_inside_save
from tests.faults.slurm import gaps_of_record
from tests.faults.tiny_run import TinyRun, digest_of

DAILY = [part for part in fault_campaign.PARTS if part != "memory"]
"""A checking allocator finds nothing in the few saves that there is time for here."""


@pytest.mark.slow
@pytest.mark.parametrize("part", DAILY)
def test_promises_are_kept(part: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("c")  # short: runs listen on sockets in it
    rows = fault_campaign.run_part(part, folder, is_quick=True)
    print(fault_campaign.table(rows))
    assert rows and all(row.is_kept for row in rows), fault_campaign.table(rows)


def test_a_signal_inside_a_save_is_told_from_others() -> None:
    marks = [{"do": do, "at_s": at_s} for at_s, do in enumerate(("step", "save", "saved", "save done", "step"))]
    inside = [at_s for at_s in (-1, 0.5, 1.5, 2.5, 3.5, 9) if is_inside_save(marks, at_s)]
    assert inside == [1.5, 2.5]
    assert is_inside_save(marks[:2], 9)


def test_a_part_that_fails_has_kept_nothing(tmp_path: Path) -> None:
    (row,) = fault_campaign.run_part("no_such_part", tmp_path, is_quick=True)
    assert not row.is_kept and "no_such_part" in row.figure


def test_words() -> None:
    assert fault_campaign.parse([])[0] and not fault_campaign.parse(["--full"])[0]
    assert fault_campaign.parse(["only=kills", "out=x"])[1:] == (Path("x").resolve(), ["kills"])
    for words in (["only=nothing"], ["fast"], ["--slow"], ["--quick", "--full"]):
        with pytest.raises(UserError):
            fault_campaign.parse(words)


@pytest.mark.parametrize("part", fault_campaign.PARTS)
def test_the_report_goes_between_the_markers_of_its_part(part: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    before = fault_campaign.REPORT.read_text(encoding="utf-8")
    page.write_text(before, encoding="utf-8")
    for text in ("a first text", "a second text"):
        fault_campaign.write_report(part, text, page)
    after = page.read_text(encoding="utf-8")
    assert "a second text" in after and "a first text" not in after
    assert all(f"<!-- {other}: begin -->" in after for other in fault_campaign.PARTS)
    page.write_text("nothing here", encoding="utf-8")
    with pytest.raises(UserError, match="are missing"):
        fault_campaign.write_report(part, "third", page)


def test_the_table_shows_what_was_not_kept() -> None:
    assert "**no**" in fault_campaign.table([Row("a | b", "nothing breaks", 1200, "it broke", False)])
    assert "| 1,200 |" in fault_campaign.table([Row("a | b", "nothing breaks", 1200, "it held", True)])


class TestKills:
    """What is found after a kill, shown a run in which it is wrong."""

    @pytest.fixture
    def tiny(self, tmp_path: Path) -> TinyRun:
        """Steps 2 and 4 are saved, and step 4 was the last that happened."""
        tiny = TinyRun(tmp_path, tmp_path / "home", kills.STEPS, 2, tmp_path / "tmp")
        for step in (2, 4):
            save(tiny, step, float(step))
        marks = [json.dumps({"do": do, "step": step}) for step in (2, 4) for do in ("save", "saved", "save done")]
        (tiny.home / "marks_0.jsonl").write_text("\n".join(marks) + "\n")
        return tiny

    @pytest.fixture
    def tally(self) -> kills.Tally:
        return kills.Tally()

    @pytest.fixture
    def reference(self, tiny: TinyRun) -> kills.Reference:
        return kills.Reference(tiny, {step: tiny.digest(step) for step in (2, 4)}, [], set())

    def test_nothing(self, tiny: TinyRun, reference: kills.Reference, tally: kills.Tally) -> None:
        kills.check_after_kill(tiny, reference, tally)
        assert (tally.problems, tally.most_lost) == ([], 0)
        assert not (tiny.home / "copy").exists()

    def test_a_checkpoint_that_was_saved_is_gone(
        self, tiny: TinyRun, reference: kills.Reference, tally: kills.Tally
    ) -> None:
        shutil.rmtree(tiny.checkpoints / "step=4")
        kills.check_after_kill(tiny, reference, tally)
        assert "step 4 was saved, now the newest is 2" in tally.problems[0]

    def test_none_can_be_used(self, tiny: TinyRun, reference: kills.Reference, tally: kills.Tally) -> None:
        for path in tiny.checkpoints.glob("*/weights.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
        kills.check_after_kill(tiny, reference, tally)
        assert "none of them can be used" in tally.problems[0]

    def test_other_bits(self, tiny: TinyRun, reference: kills.Reference, tally: kills.Tally) -> None:
        shutil.rmtree(tiny.checkpoints / "step=4")
        save(tiny, 4, 4.5)
        kills.check_after_kill(tiny, reference, tally)
        assert "other bits" in tally.problems[0]

    def test_steps_lost(self, tiny: TinyRun, reference: kills.Reference, tally: kills.Tally) -> None:
        with (tiny.home / "marks_0.jsonl").open("a") as stream:
            stream.write(json.dumps({"do": "step", "step": 7}) + "\n")
        kills.check_after_kill(tiny, reference, tally)
        assert (tally.problems, tally.most_lost) == ([], 3)

    def test_what_is_left_behind_is_found(self, tiny: TinyRun) -> None:
        before = tiny.files()
        tiny.temporary.mkdir()
        for path in (tiny.checkpoints / "step=6.partial", tiny.temporary / "tmpabc"):
            path.write_bytes(b"left")
        assert tiny.files() - before == {"checkpoints/step=6.partial", "TMPDIR/tmpabc"}


def test_damage_that_is_not_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyRun(tmp_path, tmp_path / "home", damage.STEPS, damage.SAVE_EVERY, tmp_path / "tmp")
    for step in (2, 4):
        save(tiny, step, float(step))
    sound = damage.Sound(tiny, tiny)
    assert len(sound.cases()) == 3 * len(damage.DAMAGES) and not list(damage.not_found(sound, tmp_path / "one"))
    monkeypatch.setattr(damage, "DAMAGES", {"nothing": lambda path: None})
    assert len(list(damage.not_found(sound, tmp_path / "one"))) == 3


def test_steps_missing_from_the_record_or_twice_in_it_are_counted() -> None:
    assert gaps_of_record(["1: 0.5", "2: 0.5", "3: 0.5"], 3) == (0, 0)
    assert gaps_of_record(["1: 0.5", "3: 0.5", "3: 0.25", "3: 0.5"], 4) == (2, 1)


def save(tiny: TinyRun, step: int, value: float) -> None:
    """A checkpoint of one number."""

    def write(folder: Path) -> None:
        write_tensors(folder, "weights", {"w": torch.tensor([value])}, 0, 1)
        write_state(folder, {})

    write_sealed(tiny.checkpoints, step, write, {})


def test_a_digest_depends_on_everything(tmp_path: Path) -> None:
    tensors = [
        {"w": torch.zeros(2)},
        {"w": torch.tensor([0.0, -0.0])},
        {"v": torch.zeros(2)},
        {"w": torch.zeros(1, 2)},
        {"w": torch.zeros(2, dtype=torch.int32)},
    ]
    digests = set()
    for number, each in enumerate(tensors):

        def write(folder: Path, tensors: dict[str, torch.Tensor] = each) -> None:
            write_tensors(folder, "weights", tensors, 0, 1)
            write_state(folder, {})

        digests.add(digest_of(write_sealed(tmp_path, number, write, {})))
    assert len(digests) == len(tensors)
