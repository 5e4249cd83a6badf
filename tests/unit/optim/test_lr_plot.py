"""The picture of the learning rate shows the curve where it belongs."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_training.optim.lr_plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, plot_lr, ticks

LINE = np.array([31, 90, 170])


def curve(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Columns and mean rows of pixels in the line's colour, as shares of the axes."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    rows, columns = np.nonzero(np.abs(pixels - LINE).sum(-1) < 60)
    found = np.unique(columns)
    heights = np.array([rows[columns == column].mean() for column in found])
    return (found - LEFT) / (WIDTH - LEFT - RIGHT), (HEIGHT - BOTTOM - heights) / (HEIGHT - TOP - BOTTOM)


def test_the_line_follows_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "lr.png"
    plot_lr(lambda step: 1 - step / 1000, 3e-4, 1000, path)
    assert Image.open(path).format == "PNG"
    x, y = curve(path)
    assert x.min() == pytest.approx(0, abs=0.01)
    assert x.max() == pytest.approx(1, abs=0.01)
    assert np.abs(y - (1 - x) / 1.05).max() < 0.02


def test_the_axes_carry_numbers(tmp_path: Path) -> None:
    """Other peaks and lengths write other numbers beside and below the axes, and draw the same curve."""
    pictures = []
    for peak, num_steps in [(1e-4, 1000), (2e-4, 1000), (1e-4, 2000)]:
        plot_lr(lambda step: 0.5, peak, num_steps, tmp_path / "lr.png")
        pictures.append(np.asarray(Image.open(tmp_path / "lr.png").convert("L")).astype(int))
    left, below = np.s_[TOP:-BOTTOM, : LEFT - 2], np.s_[HEIGHT - BOTTOM + 3 : HEIGHT - 28, :]
    for margin in (left, below):
        assert (pictures[0][margin] < 100).any()
    assert (pictures[0][left] != pictures[1][left]).any()
    assert (pictures[0][below] == pictures[1][below]).all()
    assert (pictures[0][below] != pictures[2][below]).any()
    assert (pictures[0][left] == pictures[2][left]).all()


@pytest.mark.parametrize(("peak", "num_steps"), [(0.0, 10), (1e-4, 1), (1.0, 3), (1e-4, 10_000_000)])
def test_corners_are_drawn(peak: float, num_steps: int, tmp_path: Path) -> None:
    plot_lr(lambda step: 1.0, peak, num_steps, tmp_path / "lr.png")
    assert Image.open(tmp_path / "lr.png").size == (WIDTH, HEIGHT)


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(6, [0, 1, 2, 3, 4, 5, 6]), (1.05e-4, [0, 2e-5, 4e-5, 6e-5, 8e-5, 1e-4]), (123_457, [0, 50_000, 100_000])],
)
def test_ticks_are_round_numbers(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == pytest.approx(expected)
