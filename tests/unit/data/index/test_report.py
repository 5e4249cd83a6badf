import json
from pathlib import Path
from xml.etree import ElementTree

from sd_training.config.data_schema import BucketConfig
from sd_training.data.index.report import report_page
from tests import makers
from tests.unit.data.making import training_data


def page_of(folder: Path, **options: object) -> str:
    data = training_data(folder, **options)  # type: ignore[arg-type]
    return report_page(data.report(), data.plan)


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    samples = [*makers.caption_samples(20), *makers.caption_samples(12, first=20, width=64, height=32)]
    makers.write_shard(tmp_path / "a.tar", [*samples, {"__key__": "bare", "jpg": samples[0]["jpg"]}])
    buckets = BucketConfig(mode="ladder", step=8, min_side=8, max_side=32, max_aspect=4)
    page = page_of(tmp_path, filters={"original_width": ">=42"}, buckets=buckets)
    for text in (
        "a.tar",
        "filter original_width &gt;= 42",
        "Buckets",
        "Aspect ratio",
        "Caption length",
        "bare",
        "caption missing",
    ):
        assert text in page, text
    assert "32 images = 8 steps" in page
    body = page.removeprefix("<!doctype html>").replace("<meta charset='utf-8'>", "")
    bars = [e for e in ElementTree.fromstring(body).iter() if e.get("class") == "bar"]
    assert len(bars) > 10
    assert "<script" not in page and "http" not in page


def test_names_from_the_data_are_harmless(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    sample = {**makers.caption_samples(1)[0], "json": json.dumps({evil: 1}).encode()}
    good = [{**sample, "__key__": f"{i}"} for i in range(8)]
    makers.write_shard(tmp_path / "a.tar", [*good, {"__key__": evil, "txt": evil}])
    page = page_of(tmp_path, filters={evil: 1})
    assert evil not in page
    assert "&lt;script&gt;" in page
