"""Writes what the quickstart trains on: real handwritten digits as WebDataset shards, and a small text side.

The 1,797 digits of scikit-learn's `load_digits` (8 x 8, ink 0..16) become 16 x 16 PNG files with a caption and JSON
metadata; the text side is a CLIP tokenizer that knows the words of the captions and a CLIP text encoder with random
weights, which stays frozen: it only has to give different captions different states.

    python scripts/make_digits.py build/quickstart
"""

import argparse
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.log import quiet_libraries

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = (
    "a handwritten {}",  # samples are drawn with
    "a handwritten digit {}",
    "the digit {} written by hand",
    "a picture of a handwritten {}",
    "handwritten number {}",
)
PICTURE_SIZE = 16
"""Height and width of a written picture [pixels]; twice that of the data."""
TOKENS = 12
"""Length of a tokenized caption [tokens], start and end included."""
TEXT_WIDTH = 32
"""Width D of the text encoder's states."""


@dataclass(frozen=True)
class Digits:
    """The real data."""

    ink: NDArray[np.float32]
    """[N, 8, 8] in 0..1."""
    labels: NDArray[np.int64]
    """[N] in 0..9."""


def real_digits(limit: int | None = None) -> Digits:
    """scikit-learn's digits; they come with the package, nothing is downloaded."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Digits((data.images[:limit] / 16).astype(np.float32), data.target[:limit].astype(np.int64))


def digit_picture(ink: NDArray[np.float32]) -> Image.Image:
    """One digit [8, 8] in 0..1 as a greyscale picture, white ink on black."""
    small = Image.fromarray(np.rint(ink * 255).astype(np.uint8))
    return small.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BILINEAR)


def digit_samples(digits: Digits) -> Iterator[dict[str, Any]]:
    """WebDataset samples; the wordings take turns within a digit, so that every digit is met in each of them."""
    seen = [0] * len(DIGIT_WORDS)
    for index, (ink, label) in enumerate(zip(digits.ink, digits.labels.tolist(), strict=True)):
        wording = WORDINGS[seen[label] % len(WORDINGS)]
        seen[label] += 1
        metadata = {"label": label, "ink": round(float(ink.mean()), 4), "original_width": 8, "original_height": 8}
        stream = io.BytesIO()
        digit_picture(ink).save(stream, format="PNG")
        yield {
            "__key__": f"digit_{index:04d}",
            "png": stream.getvalue(),
            "txt": wording.format(DIGIT_WORDS[label]),
            "json": json.dumps({**metadata, "source": "sklearn.datasets.load_digits", "index": index}).encode(),
        }


def write_shards(folder: Path, samples: Iterable[dict[str, Any]], per_shard: int = 500) -> int:
    """Writes `samples` as numbered tar shards and returns how many samples there were."""
    import webdataset

    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with webdataset.ShardWriter(f"file:{folder}/%03d.tar", maxcount=per_shard, verbose=0) as sink:
        for sample in samples:
            sink.write(sample)
            count += 1
    return count


def all_captions() -> list[str]:
    """Every caption the data can have."""
    return [wording.format(word) for word in DIGIT_WORDS for wording in WORDINGS]


def make_tokenizer(captions: Iterable[str]) -> Any:
    """A CLIPTokenizer whose merges spell the words of `captions` as one token each; other words fall into letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    spelled.pre_tokenizer = pre_tokenizers.Whitespace()
    spelled.train_from_iterator(
        captions, trainers.BpeTrainer(vocab_size=2000, end_of_word_suffix="</w>", show_progress=False)
    )
    # Pairs, as the tokenizers library takes them; the annotation in transformers says otherwise.
    merges: Any = [tuple(merge) for merge in json.loads(spelled.to_str())["model"]["merges"]]
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["".join(merge) for merge in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS)


def make_text_encoder(tokenizer: Any, seed: int = 0) -> Any:
    """A two-layer CLIPTextModel with random weights.

    CLIP starts its word and position embeddings equally small, and then half of a token's state says where it stands.
    Nothing trains this encoder, so the words get the larger part from the start.
    """
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = CLIPTextModel(config).eval()
        torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=0.5)
    return encoder


def write_text_parts(folder: Path) -> None:
    """`folder/tokenizer` and `folder/text_encoder`, as `model.tokenizer.pretrained` and its neighbour read them."""
    tokenizer = make_tokenizer(all_captions())
    tokenizer.save_pretrained(folder / "tokenizer")
    make_text_encoder(tokenizer).save_pretrained(folder / "text_encoder")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=path_argument, help="shards go to FOLDER/data, tokenizer and text encoder to FOLDER/text"
    )
    parser.add_argument("--limit", type=int, help="only the first so many digits")
    options = parser.parse_args(argv)
    quiet_libraries()
    count = write_shards(options.folder / "data", digit_samples(real_digits(options.limit)))
    write_text_parts(options.folder / "text")
    print(f"{count:,} handwritten digits in {options.folder / 'data'}, their text side in {options.folder / 'text'}")


if __name__ == "__main__":
    run_cli(main)
