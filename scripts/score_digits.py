"""Draws digits with a trained pipeline and lets a classifier that has only seen real digits read them.

    python scripts/score_digits.py --pipeline build/quickstart/runs/digits/current_pipeline --out build/quickstart

Every picture that is drawn is scored. Beside the share that is read correctly, with and without guidance, the variety
of each digit is measured: the mean distance between two drawn ones, divided by that between two real ones. A model
that draws the same seven every time has variety 0. The FID is the Fréchet distance to the real digits in the features
that the classifier reads, not in those of Inception; as many real digits against as many others show how low it
can be.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.distance import pdist

from scripts.make_digits import DIGIT_WORDS, PICTURE_SIZE, WORDINGS, digit_picture, real_digits
from sd_training.cli import check_counts, run_cli
from sd_training.config.value_types import path_argument
from sd_training.log import quiet_libraries

CLASSES = len(DIGIT_WORDS)
Pictures = NDArray[np.float32]
"""[N, 16, 16] grey values in 0..1."""
Labels = NDArray[np.int64]
"""[N] in 0..9."""


@dataclass(frozen=True)
class Score:
    """What the classifier and the ruler say about one set of drawn pictures."""

    guidance_scale: float
    drawn: int
    """Pictures, equally many of each digit."""
    recognised: int
    """Pictures that are read as the digit that was asked for."""
    recognised_per_digit: list[int]
    variety_per_digit: list[float]
    """1 is the variety of the real digits."""
    fid: tuple[float, float, float]
    """Value, and the ends of its 95 % interval."""
    drawing_s: float

    @property
    def variety(self) -> float:
        """Mean over the digits."""
        return float(np.mean(self.variety_per_digit))


def grey(images: Sequence[Image.Image]) -> Pictures:
    """Pictures of any mode as one array."""
    return np.stack([np.asarray(image.convert("L"), dtype=np.float32) / 255 for image in images])


def real_pictures() -> tuple[Pictures, Labels]:
    """The training pictures, as they lie in the shards."""
    digits = real_digits()
    return grey([digit_picture(ink) for ink in digits.ink]), digits.labels


def features(pictures: Pictures) -> NDArray[np.float32]:
    """[N, 64]: mean ink of each 2 x 2 square, in the data's own unit 0..16."""
    small: Pictures = pictures.reshape(len(pictures), PICTURE_SIZE // 2, 2, PICTURE_SIZE // 2, 2).mean(axis=(2, 4))
    return small.reshape(len(pictures), -1) * 16


def train_classifier(pictures: Pictures, labels: Labels) -> tuple[Any, float]:
    """A support vector machine on three quarters of the real digits, and its accuracy on the rest."""
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    known, held_out, known_labels, held_out_labels = train_test_split(
        features(pictures), labels, test_size=0.25, stratify=labels, random_state=0
    )
    classifier = SVC(gamma=0.001, C=10).fit(known, known_labels)
    return classifier, float(classifier.score(held_out, held_out_labels))


def mean_distance(pictures: Pictures) -> float:
    """Mean Euclidean distance between two different pictures of the set; 0 for a set of one."""
    distances = pdist(pictures.reshape(len(pictures), -1).astype(np.float64))
    return float(distances.sum() / max(len(distances), 1))


def variety(drawn: Pictures, asked: Labels, real: Pictures, real_labels: Labels) -> list[float]:
    """Per digit, `mean_distance` of the drawn pictures over that of the real ones."""
    return [mean_distance(drawn[asked == d]) / mean_distance(real[real_labels == d]) for d in range(CLASSES)]


def digits_fid(drawn: Pictures, real: Pictures) -> tuple[float, float, float]:
    """Value, and the ends of its 95 % interval."""
    import torch

    from sd_training.evaluation.distances import fid

    found = fid(*(torch.from_numpy(features(pictures)) for pictures in (drawn, real)))
    return round(found.value, 2), round(found.low, 2), round(found.high, 2)


def real_digits_fid(pictures: Pictures, labels: Labels, count: int) -> tuple[float, float, float]:
    """That of `count` real digits, at most half of them, against as many others."""
    from sklearn.model_selection import train_test_split

    count = min(count, len(labels) // 2)
    sizes = {"train_size": count, "test_size": count}
    some, others = train_test_split(pictures, **sizes, stratify=labels, random_state=0)
    return digits_fid(some, others)


def load_on_device(folder: Path) -> Any:
    """The pipeline from its folder alone, on a GPU where there is one."""
    import torch

    from sd_training.export.pipeline import load_pipeline

    pipeline = load_pipeline(folder)
    return pipeline.to("cuda") if torch.cuda.is_available() else pipeline


def draw(pipeline: Any, guidance_scale: float, options: argparse.Namespace) -> tuple[list[Image.Image], Labels]:
    """`options.per_digit` pictures of each digit in turn; picture i is drawn from seed i."""
    from sd_training.export.draw import draw_images

    asked = np.arange(options.per_digit * CLASSES, dtype=np.int64) % CLASSES
    images = draw_images(
        pipeline,
        [options.prompt.replace("{word}", DIGIT_WORDS[d]).replace("{number}", str(d)) for d in asked.tolist()],
        list(range(len(asked))),
        height=PICTURE_SIZE,
        width=PICTURE_SIZE,
        num_inference_steps=options.steps,
        guidance_scale=guidance_scale,
        batch_size=options.batch_size,
    )
    return list(images), asked


def write_picture(images: Sequence[Image.Image], asked: Labels, path: Path, columns: int = 10, zoom: int = 4) -> None:
    """The first `columns` pictures of each digit, one digit per row, `zoom` times as large."""
    from sd_training.export.draw import picture_grid

    columns = min(columns, len(images) // CLASSES)
    rows = [np.flatnonzero(asked == digit)[:columns] for digit in range(CLASSES)]
    grid = picture_grid([images[int(i)] for row in rows for i in row], columns)
    grid.resize((grid.width * zoom, grid.height * zoom), Image.Resampling.NEAREST).save(path)


def score(pipeline: Any, guidance_scale: float, classifier: Any, options: argparse.Namespace, picture: Path) -> Score:
    """Draw, write the picture, read, measure."""
    started = time.monotonic()
    images, asked = draw(pipeline, guidance_scale, options)
    elapsed = time.monotonic() - started
    write_picture(images, asked, picture)
    drawn, real = grey(images), real_pictures()
    is_right = classifier.predict(features(drawn)) == asked
    return Score(
        guidance_scale=guidance_scale,
        drawn=len(images),
        recognised=int(is_right.sum()),
        recognised_per_digit=[int(is_right[asked == digit].sum()) for digit in range(CLASSES)],
        variety_per_digit=[round(v, 3) for v in variety(drawn, asked, *real)],
        fid=digits_fid(drawn, real[0]),
        drawing_s=round(elapsed, 1),
    )


def shortfalls(guided: Score, unguided: Score, options: argparse.Namespace) -> list[str]:
    """One sentence per bound that is missed."""
    found = []
    for name, score, least in (
        ("digits recognised", guided, options.min_guided),
        ("without guidance", unguided, options.min_unguided),
    ):
        if score.recognised < least:
            found.append(f"{name}: {score.recognised} of {score.drawn} is less than the {least} it should be")
    if guided.variety < options.min_variety:
        found.append(f"variety: {guided.variety:.2f} is less than the {options.min_variety:.2f} it should be")
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline folder that draws digits")
    parser.add_argument("--out", type=path_argument, required=True, help="folder of the pictures and of score.json")
    parser.add_argument("--prompt", default=WORDINGS[0].format("{word}"), help="with {word} or {number} of the digit")
    parser.add_argument("--per-digit", type=int, default=50, help="pictures of each digit, all of them scored")
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="of the guided pictures (default 2)")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps (default 25)")
    parser.add_argument("--batch-size", type=int, default=100, help="pictures drawn at once (default 100)")
    parser.add_argument("--min-guided", type=int, default=0, help="exit 1 when fewer are recognised")
    parser.add_argument("--min-unguided", type=int, default=0, help="exit 1 when fewer are recognised, no guidance")
    parser.add_argument("--min-variety", type=float, default=0.0, help="exit 1 below this mean variety, with guidance")
    options = parser.parse_args(argv)
    check_counts(options, "per_digit", "steps", "batch_size")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; status 1 when a bound is missed."""
    options = parse_arguments(argv)
    quiet_libraries()
    options.out.mkdir(parents=True, exist_ok=True)
    classifier, accuracy = train_classifier(*real_pictures())
    print(f"the classifier reads {accuracy:.1%} of the real digits that it was not trained on")
    pipeline = load_on_device(options.pipeline)
    guided = score(pipeline, options.guidance_scale, classifier, options, options.out / "digits.png")
    unguided = score(pipeline, 1.0, classifier, options, options.out / "digits_without_guidance.png")
    for name, found in (("digits recognised", guided), ("without guidance", unguided)):
        print(f"{name}: {found.recognised}/{found.drawn}, variety {found.variety:.2f} (that of the real ones is 1)")
        print("    FID {:.1f}, 95 % interval {:.1f} to {:.1f}".format(*found.fid))
    real_fid = real_digits_fid(*real_pictures(), count=guided.drawn)
    print("FID of as many real digits against as many others: {:.1f}, {:.1f} to {:.1f}".format(*real_fid))
    report = {"classifier_accuracy": round(accuracy, 4), "guided": asdict(guided), "unguided": asdict(unguided)}
    report["real_fid"] = real_fid
    (options.out / "score.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = shortfalls(guided, unguided, options)
    for sentence in missed:
        print(f"error: {sentence}", file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(main)
