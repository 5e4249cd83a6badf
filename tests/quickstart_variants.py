"""Variants of the quickstart that build on its model, each with its figures; after `python scripts/quickstart.py`.

    python -m tests.quickstart_variants dreambooth   # a cross from five pictures, with class images and without
    python -m tests.quickstart_variants autoencoder  # digits and photographs, with the terms of VQGAN and without

Every command of the trainer is printed before it runs; all use one process and one thread.
"""

import csv
import io
import json
import os
import sys
import tarfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_training.log import quiet_libraries

quiet_libraries()  # before they are imported, as train.py does

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from sklearn.datasets import load_sample_images
from sklearn.svm import SVC
from torch.nn import functional
from transformers import ResNetConfig, ResNetForImageClassification

from scripts.make_digits import DIGIT_WORDS, PICTURE_SIZE, write_shards
from scripts.quickstart import Machine, child_environment, run_step
from scripts.score_digits import features, grey, load_on_device, real_pictures
from sd_training.export.draw import draw_images
from sd_training.models.reconstruction import load_perceptual
from tests import makers

FOLDER = Path("build/quickstart")
SUBJECT = "a handwritten sks"
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


def train(title: str, config: str, *overrides: str) -> None:
    """One run, from scratch."""
    command = [sys.executable, "train.py", f"config={config}", "trainer.accelerator=cpu", *overrides]
    run_step(title, command, child_environment(os.environ, Machine("cpu", 1)))


def reader() -> Any:
    """A classifier of real digits and of crosses other than the five."""
    pictures, labels = real_pictures()
    crosses = grey([cross(seed) for seed in range(1000, 1180)])
    known = np.concatenate([features(pictures), features(crosses)])
    return SVC(gamma=0.001, C=10).fit(known, np.concatenate([labels, np.full(len(crosses), CROSS)]))


def read(pipeline: Path, prompts: Sequence[str], asked: Sequence[int], count: int) -> list[int]:
    """How many of `count` pictures of each prompt are read as the label that was asked for; guidance is 2."""
    size = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    drawn = draw_images(
        load_on_device(pipeline), [prompt for prompt in prompts for _ in range(count)],
        list(range(count * len(prompts))), **size, num_inference_steps=25, guidance_scale=2.0, batch_size=100,
    )  # fmt: skip
    found = reader().predict(features(grey(list(drawn)))).reshape(len(prompts), count)
    return [int((row == label).sum()) for row, label in zip(found, asked, strict=True)]


def dreambooth(count: int) -> None:
    """Full weights of the denoiser; `count` pictures of each digit and of the cross are read."""
    (FOLDER / "cross").mkdir(exist_ok=True)
    for seed in range(5):
        cross(seed).save(FOLDER / "cross" / f"{seed}.png")
    config, steps = "configs/quickstart_dreambooth.yaml", 200
    train("with class images", config, "experiment.name=with_prior")
    alone = ["dataset.prior.path=null", "system.batch_size=16", f"experiment.num_examples_to_see={16 * steps}"]
    train("without", config, "experiment.name=without_prior", *alone)
    prompts = [f"a handwritten {word}" for word in DIGIT_WORDS]
    for name in ("digits", "with_prior", "without_prior"):
        pipeline = FOLDER / "runs" / name / "current_pipeline"
        *digits, crosses = read(pipeline, [*prompts, SUBJECT], range(CROSS + 1), count)
        print(f"{name}: digits {sum(digits)}/{count * CROSS} {digits}, crosses {crosses}/{count}", flush=True)


def feature_network(folder: Path, seed: int) -> Path:
    """A small ResNet that tells the ten digits, and by how many quarters of a circle a piece of a photograph is turned
    (Gidaris et al. 2018, arXiv:1803.07728); 400 steps, which take a minute."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
    network = ResNetForImageClassification(ResNetConfig(**sizes, num_labels=CROSS + 4))
    optimizer, generator = torch.optim.AdamW(network.parameters(), 1e-3), np.random.default_rng(seed)
    (digits, labels), photos = real_pictures(), load_sample_images().images
    for _ in range(400):
        chosen, turns = generator.integers(len(digits), size=32), generator.integers(4, size=32)
        places = generator.integers([0, 0, 0], [2, 427 - PICTURE_SIZE, 640 - PICTURE_SIZE], size=(32, 3)).tolist()
        pieces = [photos[n][top : top + PICTURE_SIZE, left : left + PICTURE_SIZE] / 255 for n, top, left in places]
        turned = [np.rot90(piece, turn) for piece, turn in zip(pieces, turns, strict=True)]
        grey_ones = np.repeat(digits[chosen][..., None], 3, axis=-1)
        pixels = torch.tensor(np.concatenate([grey_ones, np.stack(turned)]).astype(np.float32)).permute(0, 3, 1, 2)
        wanted = torch.tensor(np.concatenate([labels[chosen], CROSS + turns]))
        loss = functional.cross_entropy(network((2 * pixels - 1) / 0.45).logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{folder}: loss {loss.item():.3f} at the end", flush=True)
    network.resnet.save_pretrained(folder)
    return folder


def photographs(folder: Path) -> Path:
    """2,000 pieces of two photographs as shards."""
    pieces = (makers.encode(makers.photograph(24, 24, number), "PNG") for number in range(2000))
    write_shards(folder, ({"__key__": f"{n:04d}", "png": piece, "txt": ""} for n, piece in enumerate(pieces)))
    return folder


def autoencoder(steps: int) -> None:
    """From scratch in bf16, batch 16, equal steps; measured on 256 pictures of the end of each set, also by a network
    that training has not seen."""
    networks = [feature_network(FOLDER / "features" / str(seed), seed) for seed in (0, 1)]
    data = {"digits": FOLDER / "data", "photographs": photographs(FOLDER / "photographs")}
    common = ["system.batch_size=16", f"experiment.num_examples_to_see={16 * steps}", "model.mixed_precision=bf16"]
    common += [f"experiment.save_every={steps}", f"validation.every={steps}", "validation.num_samples=256"]
    common += ["dataset.params.crop=center", "objective.kl_weight=1e-5", "logging.every=1"]
    common += [f"objective.reconstruction.perceptual_path={networks[0]}"]
    terms = {
        "plain": ["objective.reconstruction.perceptual_weight=0"],
        "whole": ["objective.reconstruction.perceptual_weight=0.3", "objective.adversarial.weight=0.1",
                  f"objective.adversarial.start={steps // 5}", "objective.adversarial.layers=1",
                  "objective.adversarial.channels=32", "optimizer.rates_by_part={discriminator: 1e-3}"],
    }  # fmt: skip
    for name, shards in data.items():
        for kind, options in terms.items():
            run = FOLDER / "runs" / f"vae_{name}_{kind}"
            own = [f"experiment.name={run.name}", f"dataset.params.path={shards}", f"validation.path={shards}"]
            train(f"{name}, {kind}", "configs/quickstart_vae.yaml", *common, *own, *options)
            with (run / "validation.csv").open(newline="") as stream:
                *_, row = csv.DictReader(stream)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            bad = sum(None in row.values() for row in rows)  # null: not finite
            values = {key: f"{float(row[key]):.4f}" for key in ("psnr", "ssim", "perceptual")}
            other = distance(run / "current_pipeline", shards, networks[1])
            print(f"{run.name}: {values}, by the other network {other:.4f}; {bad} of {len(rows)} rows not finite")


@torch.no_grad()
def distance(vae_folder: Path, shards: Path, network: Path) -> float:
    """Mean over the last 256 pictures of the first shard."""
    vae, perceptual = AutoencoderKL.from_pretrained(vae_folder), load_perceptual(network)
    with tarfile.open(sorted(shards.glob("*.tar"))[0]) as tar:
        names = [name for name in tar.getnames() if name.endswith("png")][-256:]
        whole = [Image.open(io.BytesIO(tar.extractfile(name).read())).convert("RGB") for name in names]  # type: ignore[union-attr]
    edge = (whole[0].width - PICTURE_SIZE) // 2
    box = (edge, edge, edge + PICTURE_SIZE, edge + PICTURE_SIZE)
    pixels = torch.tensor(np.stack([np.asarray(image.crop(box)) for image in whole])).permute(0, 3, 1, 2) / 127.5 - 1
    return float(perceptual(vae.decode(vae.encode(pixels).latent_dist.mode()).sample.clamp(-1, 1), pixels).mean())


def main() -> None:
    """Command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=("dreambooth", "autoencoder"))
    parser.add_argument("--pictures", type=int, default=50, help="of each prompt (dreambooth)")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (autoencoder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (FOLDER / "runs" / "digits" / "current_pipeline").is_dir():
        raise SystemExit("error: run scripts/quickstart.py first")
    dreambooth(options.pictures) if options.variant == "dreambooth" else autoencoder(options.steps)


if __name__ == "__main__":
    main()
