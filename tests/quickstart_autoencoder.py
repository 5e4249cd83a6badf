"""Does a perceptual network with a discriminator give better reconstructions than L1 and KL alone, at equal steps? On
the digits of the quickstart and on crops of photographs, with perceptual networks that are trained here:

    python -m tests.quickstart_autoencoder                  # one thread
    python -m tests.quickstart_autoencoder --precision bf16 --steps 2000

Both runs train `configs/quickstart_vae.yaml`. Held-out pictures are compared by the network in the loss, and by a
judge: another one, of another kind and with other initial weights.
"""

import json
import math
import os
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sd_training.log import quiet_libraries

quiet_libraries()

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from transformers import ConvNextConfig, ConvNextModel, ResNetConfig, ResNetModel

from scripts.make_digits import digit_picture, real_digits
from scripts.quickstart import Machine, child_environment, run_step
from sd_training.models.reconstruction import load_perceptual
from sd_training.training import scaled_pixels
from tests import makers

FOLDER = Path("build/quickstart_autoencoder")
BATCH, HELD_OUT, NUM_CROPS, GRID = 64, 256, 4096, 4
RUNS: Mapping[str, Callable[[int], list[str]]] = {
    "l1_kl": lambda steps: ["objective.reconstruction.perceptual_weight=0"],
    "perceptual_adversarial": lambda steps: [
        "objective.adversarial.weight=0.5",
        f"objective.adversarial.start={steps // 3}",
        "objective.adversarial.channels=16",
        "objective.adversarial.layers=2",
    ],
}
"""Name → options, for so many optimizer steps."""
Labelled = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""[N, H, W, 3], and what they show."""


def digits() -> Labelled:
    """16 × 16."""
    real = real_digits()
    pictures = [np.asarray(digit_picture(ink).convert("RGB")) for ink in real.ink]
    order = np.random.default_rng(0).permutation(len(pictures))
    return np.stack(pictures)[order], np.asarray(real.labels, dtype=np.int64)[order]


def crops() -> Labelled:
    """32 × 32, of squares of 64 pixels; labelled by photograph and place on a grid."""
    chance, photos, pictures, labels = np.random.default_rng(0), load_sample_images().images, [], []
    for number in range(NUM_CROPS):
        photo = photos[number % 2]
        top, left = (int(chance.integers(0, side - 64)) for side in photo.shape[:2])
        square = Image.fromarray(photo[top : top + 64, left : left + 64])
        pictures.append(np.asarray(square.resize((32, 32), Image.Resampling.BICUBIC)))
        row, column = (GRID * place // (side - 64) for place, side in zip((top, left), photo.shape, strict=False))
        labels.append((number % 2 * GRID + row) * GRID + column)
    return np.stack(pictures), np.asarray(labels, dtype=np.int64)


def as_pixels(pictures: NDArray[np.uint8]) -> Tensor:
    """[N, 3, H, W] in [-1, 1]."""
    return scaled_pixels(torch.from_numpy(pictures).permute(0, 3, 1, 2))


def train_classifier(backbone: Any, data: Labelled, folder: Path) -> None:
    """Learns what pictures show, so that its features tell what matters in them; saves the backbone alone."""
    pixels, labels = as_pixels(data[0]), torch.from_numpy(data[1])
    width = int(backbone.config.hidden_sizes[-1])
    head = nn.Linear(width, int(labels.max()) + 1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(400):
        chosen = torch.randint(0, len(pixels), (BATCH,))
        features = backbone(pixel_values=pixels[chosen]).last_hidden_state.mean((2, 3))
        loss = nn.functional.cross_entropy(head(features), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{folder}: cross entropy {loss.item():.3f} of {math.log(head.out_features):.3f}", flush=True)
    backbone.save_pretrained(folder)


def convnext() -> ConvNextModel:
    """In the loss."""
    return ConvNextModel(ConvNextConfig(num_stages=2, patch_size=2, hidden_sizes=[24, 48], depths=[2, 2]))


def resnet() -> ResNetModel:
    """The judge."""
    shape = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    return ResNetModel(ResNetConfig(**shape))


def distances(run: Path, held_out: NDArray[np.uint8], networks: Mapping[str, Path]) -> dict[str, float]:
    """Means over held-out pictures of the exported autoencoder's reconstructions, from the means of its posteriors."""
    vae = AutoencoderKL.from_pretrained(run / "current_pipeline", local_files_only=True).eval()
    pixels = as_pixels(held_out)
    with torch.no_grad():
        shown = vae.decode(vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1)
        found = {name: float(load_perceptual(path)(shown, pixels).mean()) for name, path in networks.items()}
    return {"l1": float((shown - pixels).abs().mean()), **found}


def compare(name: str, make: Callable[[], Labelled], precision: str, steps: int) -> None:
    """Both runs on one kind of pictures."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    pictures, labels = make()
    known, held_out = (pictures[:-HELD_OUT], labels[:-HELD_OUT]), pictures[-HELD_OUT:]
    samples = ({"__key__": f"{i:06d}", "png": Image.fromarray(picture)} for i, picture in enumerate(known[0]))
    makers.write_shard(folder / "data" / "0.tar", samples)
    networks = {"perceptual": convnext, "judge": resnet}
    for seed, (kind, make_network) in enumerate(networks.items(), start=1):
        torch.manual_seed(seed)
        train_classifier(make_network(), known, folder / kind)
    for run, own in RUNS.items():
        words = [
            "config=configs/quickstart_vae.yaml",
            f"experiment.log_dir={folder}",
            f"experiment.name={run}",
            f"experiment.num_examples_to_see={BATCH * steps}",
            f"experiment.save_every={steps}",
            f"model.mixed_precision={precision}",
            f"system.batch_size={BATCH}",
            f"dataset.params.path={folder / 'data'}",
            f"dataset.params.index_dir={folder / 'index'}",
            f"dataset.params.resolution={pictures.shape[1]}",
            f"objective.reconstruction.perceptual_path={folder / 'perceptual'}",
            "logging.every=1",
            "trainer.accelerator=cpu",
            *own(steps),
        ]
        environment = child_environment(os.environ, Machine("cpu", 1))
        run_step(f"{name}, {run}", [sys.executable, "train.py", *words], environment)
        rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        finite = sum(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
        judges = {kind: folder / kind for kind in networks}
        found = [f"{key} {value:.4f}" for key, value in distances(folder / run, held_out, judges).items()]
        print(f"{name} {run}: {', '.join(found)}; finite steps {finite}/{steps}", flush=True)


def main() -> None:
    """Command line."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--steps", type=int, default=450, help="optimizer steps (default 450)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in {"digits": digits, "crops": crops}.items():
        compare(name, make, options.precision, options.steps)


if __name__ == "__main__":
    main()
