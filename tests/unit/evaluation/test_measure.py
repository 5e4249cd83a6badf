"""Rows, reasons, and features that are kept."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from sd_training.build.data import ANY_GRID
from sd_training.config.data_schema import DatasetConfig
from sd_training.config.plan import BatchPlan
from sd_training.config.schema import ValidationConfig
from sd_training.data.datamodule import HeldOutData, TrainingData
from sd_training.data.samples.sample import DrawSettings
from sd_training.errors import ConfigError, DataError
from sd_training.evaluation import distances
from sd_training.evaluation.measure import COLUMNS, RealPictures, Row, measure, read_rows, write_rows
from sd_training.evaluation.networks import FeatureNetwork, _resized
from tests.makers import caption_samples, picture, write_shard

CPU = torch.device("cpu")


class CountingNetwork(FeatureNetwork):
    """Random features of 8 x 8 pixels."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = nn.Sequential(nn.Flatten(), nn.Linear(192, 6))
        self.seen = 0
        super().__init__(module, _resized(8, (0.5, 0.5, 0.5), (0.3, 0.3, 0.3)), self.count)

    def count(self, pixels: torch.Tensor) -> torch.Tensor:
        self.seen += len(pixels)
        features: torch.Tensor = self.module(pixels)
        return features


@pytest.fixture
def real(tmp_path: Path) -> RealPictures:
    """Twenty pictures."""
    write_shard(tmp_path / "real" / "0.tar", caption_samples(20))
    params = {"path": str(tmp_path / "real"), "resolution": 16}
    data = TrainingData(
        dataset=DatasetConfig(type="WebDataset", params=params),  # type: ignore[arg-type]
        plan=BatchPlan(8, 1, 1, 8),
        workers=0,
        tokenizers={},
        draws=DrawSettings(0, ANY_GRID, has_noise=False),
        run_dir=None,
    )
    return RealPictures(HeldOutData(data, ValidationConfig(path=params["path"], num_samples=100)))


@pytest.fixture
def drawn(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{i}.png" for i in range(12)]
    for i, path in enumerate(files):
        picture(100 + i, 16, 16).save(path)
    return files


def test_every_metric_is_a_row(real: RealPictures, drawn: list[Path], tmp_path: Path) -> None:
    network = CountingNetwork()
    rows = list(measure({"inception": lambda: network}, drawn, [""] * 12, lambda: real, tmp_path, CPU))
    assert [row["metric"] for row in rows] == ["fid", "fid_infinity", "kid", "precision", "recall"]
    assert network.seen == 12 + 20 and {row["images"] for row in rows} == {"12"}
    features = [network([Image.open(path) for path in drawn]), network(list(real.images()))]
    expected = distances.fid(*features)
    found = [float(rows[0][key]) for key in ("value", "low", "high")]
    assert found == pytest.approx([expected.value, expected.low, expected.high], rel=1e-6)
    assert float(rows[1]["low"]) < float(rows[1]["value"]) < float(rows[1]["high"]) and "reason" not in rows[1]


def test_features_of_real_pictures_are_kept(real: RealPictures, drawn: list[Path], tmp_path: Path) -> None:
    """Until the network or the pictures are others; a file that was cut short is written again."""
    first, again, other = CountingNetwork(), CountingNetwork(), CountingNetwork(seed=1)

    def rows(network: CountingNetwork) -> list[Row]:
        return list(measure({"dinov2": lambda: network}, drawn, [""] * 12, lambda: real, tmp_path, CPU))

    assert rows(first) == rows(again) != rows(other)
    assert (first.seen, again.seen, other.seen) == (32, 12, 32)
    for path in tmp_path.glob("real-*"):
        path.write_bytes(path.read_bytes()[:-8])
    assert rows(again) == rows(first) and again.seen == 12 + 32
    known = real.fingerprint()
    del real.held_out.requests
    real.held_out.config = ValidationConfig(path="-", num_samples=10)
    assert real.fingerprint() != known and len(real) == 10


def test_a_metric_that_fails_is_a_row(real: RealPictures, drawn: list[Path], tmp_path: Path) -> None:
    def missing() -> FeatureNetwork:
        raise ConfigError("evaluation.inception: x.pth\ncannot be loaded")

    networks = {"inception": missing, "dinov2": CountingNetwork}
    rows = {r["metric"]: r for r in measure(networks, drawn, [""] * 12, lambda: real, tmp_path, CPU)}
    assert rows["fid"] == {"metric": "fid", "images": "12", "reason": "evaluation.inception: x.pth cannot be loaded"}
    assert "value" in rows["fd_dinov2"]
    few = {r["metric"]: r for r in measure({"inception": CountingNetwork}, drawn[:3], [], lambda: real, tmp_path, CPU)}
    assert "value" in few["precision"] and few["recall"]["reason"].startswith("3 pictures have no third neighbour")

    def no_real() -> RealPictures:
        raise ConfigError("evaluation.path: nothing there")

    rows = {r["metric"]: r for r in measure({"dinov2": CountingNetwork}, drawn, [], no_real, tmp_path, CPU)}
    assert {row["reason"] for row in rows.values()} == {"evaluation.path: nothing there"}


def test_captions_are_spread_over_the_pictures(real: RealPictures) -> None:
    captions = real.captions(5)
    assert captions == [real.captions(20)[i] for i in (0, 4, 8, 12, 16)] and len(real.captions(99)) == 20


def test_rows_replace_those_of_the_same_metric(tmp_path: Path) -> None:
    path, base = tmp_path / "evaluation.csv", {"step": "4", "weights": "average", "metric": "fid"}
    write_rows(path, [base | {"reason": 'no, "really"'}, base | {"step": "2", "value": "3.5"}])
    write_rows(path, [base | {"value": "1"}, base | {"weights": "trained", "value": "7"}])
    rows = [[row[key] for key in COLUMNS[:4]] for row in read_rows(path)]
    assert rows == [["4", "average", "fid", "1"], ["2", "average", "fid", "3.5"], ["4", "trained", "fid", "7"]]
    assert path.read_text().splitlines()[0] == "step,weights,metric,value,low,high,images,reason"


def test_evaluations_at_once_lose_no_row(tmp_path: Path) -> None:
    def write(step: int) -> None:
        write_rows(tmp_path / "evaluation.csv", [{"step": str(step), "weights": "average", "metric": "fid"}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(40)))
    assert sorted(int(row["step"]) for row in read_rows(tmp_path / "evaluation.csv")) == list(range(40))


def test_rows_of_later_steps_are_dropped_on_request(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.csv"
    write_rows(path, [{"step": str(step), "weights": "average", "metric": "fid", "value": "1"} for step in (2, 4, 6)])
    write_rows(path, [], last_step=4)
    assert [row["step"] for row in read_rows(path)] == ["2", "4"]


def test_bounds_that_are_no_numbers_are_left_out(real: RealPictures, drawn: list[Path], tmp_path: Path) -> None:
    """Of two pictures a resample may be one of them twice, which has no pairs."""
    rows = {r["metric"]: r for r in measure({"inception": CountingNetwork}, drawn[:2], [], lambda: real, tmp_path, CPU)}
    assert "value" in rows["kid"] and "low" not in rows["kid"]
    assert not any("nan" in value for row in rows.values() for value in row.values())


@pytest.mark.parametrize("content", [b"step;weights;metric;value\n2;average;fid;1\n", b"\xff\xfe\x00"])
def test_another_kind_of_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "evaluation.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"evaluation\.csv: .*move the file away"):
        read_rows(tmp_path / "evaluation.csv")


def test_a_row_that_is_cut_short_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "evaluation.csv").write_text(f"{','.join(COLUMNS)}\n2,average,fid,1,0,2,4,\n4,average,fi")
    assert [row["step"] for row in read_rows(tmp_path / "evaluation.csv")] == ["2"]
