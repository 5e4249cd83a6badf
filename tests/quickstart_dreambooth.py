"""DreamBooth on the quickstart's model: a cross from five pictures, with class images and without, and how many crosses
and digits the three models draw. After `python scripts/quickstart.py`:

    python -m tests.quickstart_dreambooth

The commands of the trainer are printed before they run; they use one process and one thread.
"""

import os
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_training.log import quiet_libraries

quiet_libraries()  # before they are imported, as train.py does

import numpy as np
import torch
from PIL import Image
from sklearn.svm import SVC

from scripts.make_digits import DIGIT_WORDS, PICTURE_SIZE, WORDINGS
from scripts.quickstart import Machine, child_environment, run_step
from scripts.score_digits import features, grey, load_on_device, real_pictures
from sd_training.export.draw import draw_images

FOLDER = Path("build/quickstart")
CONFIG = "configs/quickstart_dreambooth.yaml"
SUBJECT = "a handwritten sks"
BATCH, IMAGES = 32, 3200
"""Of the config."""
CROSS = len(DIGIT_WORDS)
"""Label of a cross, beside those of the digits."""


def cross(seed: int) -> Image.Image:
    """Two strokes as wide as those of the digits, moved and turned a little: white on black, 16 × 16."""
    generator, half = np.random.default_rng(seed), (PICTURE_SIZE - 1) / 2
    angle, (row, column), length = generator.uniform(-0.2, 0.2), generator.uniform(-1, 1, 2), generator.uniform(5, 6.5)
    rows, columns = np.mgrid[0:PICTURE_SIZE, 0:PICTURE_SIZE] - half
    down = (rows - row) * np.cos(angle) + (columns - column) * np.sin(angle)
    right = (columns - column) * np.cos(angle) - (rows - row) * np.sin(angle)
    ink = np.zeros((PICTURE_SIZE, PICTURE_SIZE))
    for along, across in ((down, right), (right, down)):
        ink = np.maximum(ink, np.clip(length + 0.5 - np.abs(along), 0, 1) * np.clip(2.2 - np.abs(across), 0, 1))
    return Image.fromarray(np.rint(255 * ink).astype(np.uint8))


def train(title: str, name: str, *overrides: str) -> None:
    """One run, from scratch: an earlier one of that name is removed, or it would be what is scored."""
    shutil.rmtree(FOLDER / "runs" / name, ignore_errors=True)
    command = [sys.executable, "train.py", f"config={CONFIG}", "trainer.accelerator=cpu", f"experiment.name={name}"]
    command += overrides
    run_step(title, command, child_environment(os.environ, Machine("cpu", 1)))


def make_reader() -> Any:
    """A classifier of real digits and of crosses other than the five."""
    pictures, labels = real_pictures()
    crosses = grey([cross(seed) for seed in range(1000, 1180)])
    known = np.concatenate([features(pictures), features(crosses)])
    return SVC(gamma=0.001, C=10).fit(known, np.concatenate([labels, np.full(len(crosses), CROSS)]))


def read(pipeline: Path, reader: Any, prompts: Sequence[str], asked: Sequence[int], count: int) -> list[int]:
    """How many of `count` pictures of each prompt are read as the label that was asked for; guidance is 2."""
    size = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    drawn = draw_images(
        load_on_device(pipeline), [prompt for prompt in prompts for _ in range(count)],
        list(range(count * len(prompts))), **size, num_inference_steps=25, guidance_scale=2.0, batch_size=100,
    )  # fmt: skip
    found = reader.predict(features(grey(list(drawn)))).reshape(len(prompts), count)
    return [int((row == label).sum()) for row, label in zip(found, asked, strict=True)]


def dreambooth(count: int) -> None:
    """Full weights of the denoiser; `count` pictures of each digit and of the cross are read."""
    (FOLDER / "cross").mkdir(exist_ok=True)
    for seed in range(5):
        cross(seed).save(FOLDER / "cross" / f"{seed}.png")
    train("with class images", "with_prior")
    alone = ["dataset.prior.path=null", "dataset.prior.prompt=null", "dataset.prior.weight=1"]
    halved = [f"system.batch_size={BATCH // 2}", f"experiment.num_examples_to_see={IMAGES // 2}"]
    train("without, and as many crosses", "without_prior", *alone, *halved)
    prompts, reader = [WORDINGS[0].format(word) for word in DIGIT_WORDS], make_reader()
    for name in ("digits", "with_prior", "without_prior"):
        pipeline = FOLDER / "runs" / name / "current_pipeline"
        *digits, crosses = read(pipeline, reader, [*prompts, SUBJECT], range(CROSS + 1), count)
        print(f"{name}: digits {sum(digits)}/{count * CROSS} {digits}, crosses {crosses}/{count}", flush=True)


def main() -> None:
    """Command line."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pictures", type=int, default=50, help="of each prompt (default 50)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (FOLDER / "runs" / "digits" / "current_pipeline").is_dir():
        raise SystemExit("error: run scripts/quickstart.py first")
    dreambooth(options.pictures)


if __name__ == "__main__":
    main()
