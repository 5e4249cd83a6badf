import io
import json
import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd_training.config.data_schema import CaptionConfig, RemoteConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.index.store import load_index
from sd_training.data.loader import worker_context
from sd_training.data.sources.arrow import ArrowSource
from sd_training.data.sources.base import DatasetIndex, IndexedReader
from sd_training.errors import BadSample, ConfigError, DataError
from tests import makers
from tests.unit.data.making import equal_bits, joined, stream, training_data

COUNT, GROUP = 40, 8
POOL = pa.proxy_memory_pool(pa.default_memory_pool())
"""Counts what is allocated while it is the default pool; it must outlive what was allocated from it."""


def image(number: int) -> bytes:
    return makers.encode(makers.picture(number, 40 + number % 3, 32))


def rows(count: int = COUNT) -> dict[str, Any]:
    return {
        "jpg": [image(number) for number in range(count)],
        "caption": [f"a {makers.COLOURS[number % 3]} picture" for number in range(count)],
        "score": [number / 10 if number % 4 else None for number in range(count)],
        "lang": [["en", "de"][number % 2] for number in range(count)],
        "vector": [[1.0, 2.0]] * count,
    }


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=GROUP, **options)
    return path


def access(tmp_path: Path) -> RemoteConfig:
    return RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gib=0.1, num_retries=0, timeout_s=5.0)


def opened(tmp_path: Path, *files: Path, fields: tuple[str, ...] = (), **columns: str) -> tuple[DatasetIndex, Any]:
    wanted = (columns.get("image_column"), columns.get("caption_column"))
    source = ArrowSource(list(map(str, files)), access(tmp_path), wanted)
    index = load_index(source, tmp_path / "index", fields)
    return index, IndexedReader(index, source)


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_dictionary": False}])
def test_images_captions_sizes_and_metadata(tmp_path: Path, options: dict[str, Any]) -> None:
    file = write(tmp_path / "a.parquet", rows(), **options)
    index, reader = opened(tmp_path, file, fields=("score", "lang"))
    assert len(index) == COUNT
    for sample in (39, 0, 17, 8, 7):
        assert reader.image(sample) == image(sample)
        assert reader.caption(sample) == f"a {makers.COLOURS[sample % 3]} picture"
    assert index.numbers("width").tolist() == [40 + n % 3 for n in range(COUNT)]
    assert index.numbers("block").tolist() == [n // GROUP for n in range(COUNT)]
    assert len(index.fields) == 3 and index.fields > {"score", "lang"}  # and the caption column
    assert index.columns["number:score"].to_pylist()[:3] == [None, 0.1, 0.2]
    assert index.name(9) == (str(file), "row 9")


def test_a_row_group_is_unpacked_once(tmp_path: Path) -> None:
    index, reader = opened(tmp_path, write(tmp_path / "a.parquet", rows()), write(tmp_path / "b.parquet", rows(GROUP)))
    for sample in [0, 3, 1, GROUP, COUNT + 2, 5, COUNT + 1]:
        assert reader.image(sample) == image(sample % COUNT)
    kept = list((tmp_path / "cache").glob("*.data"))
    assert len(kept) == 3
    times = [path.stat().st_ino for path in kept]
    other, second = opened(tmp_path, tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert second.image(2) == image(2) and len(other) == len(index)
    assert [path.stat().st_ino for path in kept] == times


def read_one(job: tuple[Any, int]) -> bytes:
    content: bytes = job[0].image(job[1])
    return content


@pytest.mark.parametrize("method", ["fork", "loader"])
def test_readers_travel_to_other_processes(tmp_path: Path, method: str) -> None:
    """The first group is unpacked here, the second one there."""
    _, reader = opened(tmp_path, write(tmp_path / "a.parquet", rows(2 * GROUP)))
    reader.image(0)
    context = worker_context() if method == "loader" else multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:  # a Pool ends its processes by SIGTERM, which these block
        found = list(pool.map(read_one, [(reader, 1), (reader, GROUP + 1)]))
    assert found == [image(1), image(GROUP + 1)]
    assert len(list((tmp_path / "cache").glob("*.data"))) == 2


def test_structs_paths_and_lists_of_captions(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.jpg").write_bytes(image(1))
    columns = {
        "image": pa.array([{"bytes": image(0), "path": None}, {"bytes": None, "path": "pictures/1.jpg"}]),
        "texts": [["one", "two"], ["three"]],
    }
    _, reader = opened(tmp_path, write(tmp_path / "a.parquet", columns), caption_column="texts")
    assert [reader.image(sample) for sample in (0, 1)] == [image(0), image(1)]
    assert json.loads(reader.caption(0)) == ["one", "two"]
    (tmp_path / "tables").mkdir()
    files = [str(tmp_path / "pictures" / "1.jpg"), "pictures/2.jpg", "../pictures/1.jpg"]
    index, reader = opened(tmp_path, write(tmp_path / "tables" / "b.parquet", {"file": files, "text": list("abc")}))
    assert [reader.image(i) for i in range(len(index))] == [image(1), image(1)]
    assert index.problems.total() == 1


def categories(values: list[Any]) -> pa.Array:
    return pa.array(values).dictionary_encode()


def views(values: list[Any]) -> pa.Array:
    return pa.array(values, pa.binary_view() if isinstance(values[0], bytes) else pa.string_view())


def large(values: list[Any]) -> pa.Array:
    return pa.array(values, pa.large_binary() if isinstance(values[0], bytes) else pa.large_string())


@pytest.mark.parametrize("encode", [categories, views, large])
def test_the_same_values_in_other_arrow_types(tmp_path: Path, encode: Callable[[list[Any]], pa.Array]) -> None:
    columns = {name: encode(rows(12)[name]) for name in ("jpg", "caption", "lang")}
    try:
        file = write(tmp_path / "a.parquet", columns)
    except pa.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow writes no views")
    index, reader = opened(tmp_path, file, fields=("lang",))
    assert [reader.image(sample) for sample in range(12)] == rows(12)["jpg"]
    assert [reader.caption(sample) for sample in range(12)] == rows(12)["caption"]
    assert index.columns["text:lang"].to_pylist() == rows(12)["lang"]
    (tmp_path / "1.jpg").write_bytes(image(1))
    paths = {"file": encode(["1.jpg", "missing.jpg"]), "caption": encode(["a", "b"])}
    index, reader = opened(tmp_path, write(tmp_path / "b.parquet", paths))
    assert len(index) == 1 and reader.image(0) == image(1)


def test_columns_without_values_and_decimals(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(image(1))
    cells = pa.array([{"bytes": None, "path": "1.jpg"}, None])
    assert pa.types.is_null(cells.type.field("bytes").type)
    columns = {"image": cells, "caption": pa.nulls(2), "price": [Decimal("1.5"), None]}
    index, reader = opened(tmp_path, write(tmp_path / "a.parquet", columns), fields=("price",))
    assert len(index) == 1 and reader.image(0) == image(1)
    assert index.columns["number:price"].to_pylist() == [1.5]
    assert {problem.reason for problem in index.problems.named()} == {"image is empty"}
    with pytest.raises(BadSample, match="caption missing"):
        reader.caption(0)


def test_empty_row_groups(tmp_path: Path) -> None:
    table = pa.table({name: rows(4)[name] for name in ("jpg", "caption")})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for start, count in ((0, 0), (0, 3), (3, 0), (3, 1)):
            writer.write_table(table.slice(start, count))
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 4
    index, reader = opened(tmp_path, tmp_path / "a.parquet")
    assert index.numbers("at:group").tolist() == [1, 1, 1, 3]
    assert [reader.image(sample) for sample in range(4)] == rows(4)["jpg"]


def test_a_full_disk_is_not_blamed_on_the_table(tmp_path: Path) -> None:
    columns = {"jpg": [b"x" * 2_000_000], "caption": ["a"]}
    _, reader = opened(tmp_path, write(tmp_path / "a.parquet", columns))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(DataError, match=r"shard cache .* cannot be used"):
            reader.image(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reader.image(0) == columns["jpg"][0]


def test_what_is_wrong_is_named_by_its_row(tmp_path: Path) -> None:
    columns = rows(4)
    columns["jpg"][1] = None
    columns["caption"][2] = None
    columns["jpg"][3] = b"no image"
    index, _ = opened(tmp_path, write(tmp_path / "a.parquet", columns))
    assert [index.name(sample)[1] for sample in range(len(index))] == ["row 0", "row 2", "row 3"]
    assert {(problem.key, problem.reason) for problem in index.problems.named()} == {
        ("row 1", "image is empty"),
        ("row 3", "image size cannot be determined"),
    }


def test_errors_name_the_file_and_the_option(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet' is not a readable Parquet file"):
        opened(tmp_path, tmp_path / "bad.parquet")
    whole = write(tmp_path / "cut.parquet", rows()).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"cut\.parquet' is not a readable Parquet file"):
        opened(tmp_path, tmp_path / "cut.parquet")
    with pytest.raises(ConfigError, match=r"image_column.*no column 'picture'"):
        opened(tmp_path, write(tmp_path / "a.parquet", rows(2)), image_column="picture")


def test_no_table_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    """40 MB of images in row groups of 4 MB; both the peak and what is left are counted."""
    columns = {"jpg": [bytes([n % 251]) * 50_000 for n in range(800)], "caption": ["x"] * 800}
    path = tmp_path / "big.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=80, use_dictionary=False, compression="none")
    del columns
    default = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        index, reader = opened(tmp_path, path)
        assert reader.image(700) == bytes([700 % 251]) * 50_000
    finally:
        pa.set_memory_pool(default)
    assert len(index) == 800
    assert 0 < POOL.max_memory() < 16_000_000
    assert POOL.bytes_allocated() < 8_000_000


def test_a_run_on_parquet_is_a_run_on_shards(tmp_path: Path) -> None:
    """The same samples, filters, lists of captions: the same stream."""
    samples = makers.caption_samples(32)
    for shard in range(4):
        part = samples[shard * 8 : (shard + 1) * 8]
        makers.write_shard(tmp_path / "tar" / f"{shard}.tar", part)
    metadata = [json.loads(sample["json"]) for sample in samples]
    columns = {
        "jpg": [sample["jpg"] for sample in samples],
        "caption": [sample["txt"] for sample in samples],
        "pwatermark": [entry["pwatermark"] for entry in metadata],
        "uid": [entry["uid"] for entry in metadata],
    }
    write(tmp_path / "parquet" / "a.parquet", columns)
    options: dict[str, Any] = {
        "filters": {"pwatermark": "<0.8"},
        "lanes": 2,
        "window": 3,
        "crop": "random",
        "captions": CaptionConfig(fields={"caption": 1.0, "uid": 1.0}),
    }
    plan = BatchPlan(4, 1, 1, 80)
    tar = joined(stream(training_data(tmp_path / "tar", plan, **options)))
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gib=0.01)
    table = training_data(tmp_path / "parquet", plan, kind="Parquet", workers=1, remote=remote, **options)
    assert equal_bits(joined(stream(table)), tar)
    assert io.BytesIO(columns["jpg"][0]).read(2) == b"\xff\xd8"


def test_a_caption_column_of_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"column .caption. of .*a\.parquet is int64; it must hold texts"):
        opened(tmp_path, write(tmp_path / "a.parquet", {"jpg": rows(2)["jpg"], "caption": [1, 2]}))


@pytest.mark.parametrize("kind", [pa.list_(pa.string(), 2), pa.list_(pa.dictionary(pa.int8(), pa.string()))])
def test_lists_of_texts_of_any_kind_are_captions(kind: pa.DataType, tmp_path: Path) -> None:
    texts = pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string())).cast(kind)
    pq.write_table(pa.table({"jpg": rows(2)["jpg"], "caption": texts}), tmp_path / "a.parquet")
    _, reader = opened(tmp_path, tmp_path / "a.parquet")
    assert [reader.caption(sample) for sample in range(2)] == ['["a", "b"]', '["c", "d"]']
