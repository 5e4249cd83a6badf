import json

from sd_training.data.sources.base import EXAMPLES_KEPT, Problems, SkippedSample, printable


def test_counts_go_on_after_the_examples() -> None:
    problems = Problems()
    for i in range(EXAMPLES_KEPT + 5):
        problems.add(SkippedSample("a.tar", f"{i}", f"image cannot be decoded: detail {i}"))
    problems.add(SkippedSample("b.tar", "", "shard is truncated"), count=2)
    assert problems.counts == {"image cannot be decoded": EXAMPLES_KEPT + 5, "shard is truncated": 2}
    assert problems.total() == EXAMPLES_KEPT + 7
    assert len(list(problems.named())) == EXAMPLES_KEPT + 1
    assert problems.text() == (
        "image cannot be decoded 105 (first: a.tar 0, detail 0); shard is truncated 2 (first: b.tar)"
    )


def test_merge_and_json_round_trip() -> None:
    one, other = Problems(), Problems()
    one.add(SkippedSample("a.tar", "1", "x"))
    other.add(SkippedSample("b.tar", "2", "x"))
    other.add(SkippedSample("b.tar", "3", "y"))
    one.merge(Problems.from_json(other.to_json()))
    assert one.counts == {"x": 2, "y": 1}
    assert [problem.key for problem in one.examples["x"]] == ["1", "2"]
    assert list(other.examples) == ["x", "y"] and len(other.examples["x"]) == 1


def test_text_from_outside_cannot_move_the_cursor() -> None:
    assert printable("a\nb\x1b[2Jé\x7f") == "a\\nb\\u001b[2Jé\\u007f"
    assert len(printable("x" * 10_000)) == 300


def test_what_is_written_holds_no_secret() -> None:
    problems = Problems()
    problems.add(
        SkippedSample("pipe:curl -H 'Authorization: Bearer abcdefgh12345678' x", "1", "image cannot be decoded")
    )
    problems.add(SkippedSample("https://me:abcdefgh12345678@host/0.tar?sig=abcdefgh12345678", "2", "caption missing"))
    assert "abcdefgh12345678" not in json.dumps(problems.to_json())
    assert "abcdefgh12345678" in problems.text()  # messages are redacted where they are printed
