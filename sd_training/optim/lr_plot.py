"""A picture of the learning rate over the run."""

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sd_training.optim.lr_schedules import LRSchedule

WIDTH, HEIGHT = 900, 450
LEFT, RIGHT, TOP, BOTTOM = 90, 30, 40, 60  # margins around the axes [pixels]
_LINE, _AXIS, _GRID = (31, 90, 170), (0, 0, 0), (225, 225, 225)
_HEADROOM = 1.05  # the peak stays below the upper edge


def plot_lr(schedule: LRSchedule, peak: float, num_steps: int, path: str | Path) -> None:
    """Write a PNG with the learning rate of every optimizer step.

    Args:
        schedule: optimizer step → factor of the peak.
        peak: peak learning rate.
        num_steps: length of the run [optimizer steps].
        path: file to write.
    """
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    highest = _HEADROOM * peak or 1.0
    _x_axis(draw, num_steps)
    _y_axis(draw, highest)
    draw.line([(LEFT, TOP), (LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], fill=_AXIS)
    draw.text((LEFT, TOP - 8), "learning rate", fill=_AXIS, font=_font(), anchor="ls")
    draw.text((WIDTH - RIGHT, HEIGHT - 12), "optimizer steps", fill=_AXIS, font=_font(), anchor="rs")
    points = [(_x(step, num_steps), _y(peak * schedule(step), highest)) for step in _shown_steps(num_steps)]
    draw.line(points if len(points) > 1 else points * 2, fill=_LINE, width=2, joint="curve")
    image.save(path, format="PNG")


def ticks(highest: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to `highest`: steps of 1, 2 or 5 times a power of ten."""
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(int(highest / step * (1 + 1e-9)) + 1)]


def _shown_steps(num_steps: int) -> list[int]:
    """Two per pixel: every step of a short run."""
    most = 2 * (WIDTH - LEFT - RIGHT)
    return sorted({round(index * (num_steps - 1) / max(1, most - 1)) for index in range(most)})


def _x_axis(draw: ImageDraw.ImageDraw, num_steps: int) -> None:
    for tick in ticks(num_steps):
        x = _x(tick, num_steps)
        draw.line([(x, TOP), (x, HEIGHT - BOTTOM)], fill=_GRID)
        draw.text((x, HEIGHT - BOTTOM + 6), f"{tick:,.10g}", fill=_AXIS, font=_font(), anchor="ma")


def _y_axis(draw: ImageDraw.ImageDraw, highest: float) -> None:
    for tick in ticks(highest):
        y = _y(tick, highest)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill=_GRID)
        draw.text((LEFT - 6, y), f"{tick:.3g}", fill=_AXIS, font=_font(), anchor="rm")


def _x(step: float, num_steps: int) -> float:
    return LEFT + step / num_steps * (WIDTH - LEFT - RIGHT)


def _y(rate: float, highest: float) -> float:
    return HEIGHT - BOTTOM - rate / highest * (HEIGHT - TOP - BOTTOM)


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=14)
