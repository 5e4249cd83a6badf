"""Writes a long and a short caption of every picture of a data set by a vision-language model.

    python scripts/recaption.py data/shards --model llava-hf/llava-v1.6-mistral-7b-hf --out data/recaptioned
    torchrun --nproc_per_node 8 scripts/recaption.py data/parquet --model models/blip --out data/recaptioned

The input is read as scripts/make_webdataset.py reads it; captions may be missing. The output are Parquet files with the
pictures, which are trained on as they are, in a ratio that the training chooses:

    python train.py … dataset.type=Parquet dataset.params.path=data/recaptioned \\
        'dataset.params.captions.fields={caption: 1, recaption: 2, recaption_short: 1}'

Any model will do that transformers calls image-text-to-text, from a folder or the hub, with weights in safetensors and
without code of its own. A model with a chat template gets the two prompts, a plain captioner none.

The same command again makes what is missing, after a kill too: a file appears when it is whole. What cannot be used is
left out, counted and named in `OUT/skipped.jsonl`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import check_counts, prepare_cpu, run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import BadSample, ConfigError, DataError
from sd_training.log import get_logger, quiet_libraries

quiet_libraries()

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from scripts.generate_examples import DTYPES, choose_device, launched_group
from scripts.make_webdataset import MAX_PIXELS, open_input
from sd_training.checkpoint.folder import replace_text, whole_file
from sd_training.data.index.store import load_index
from sd_training.data.samples.image import decode
from sd_training.data.sources.base import NUMBER, TEXT, DatasetIndex, IndexedReader
from sd_training.hub import hub_problem

log = get_logger("sd_training.recaption")

_RECORD, _SKIPPED = "recaption.json", b"skipped"
_LONG = "Describe this picture in detail, in a few sentences. Begin with what it shows, not with the word picture."
_SHORT = "Describe this picture in one sentence of at most 20 words. Begin with what it shows."
_OWN = ("key", "shard", "image", "caption", "recaption", "recaption_short")
"""Columns of a file; the others are metadata of the input."""


class Captioner:
    """A vision-language model.

    Raises:
        ConfigError: it is no such model, or cannot be loaded.
    """

    def __init__(self, name: str, device: str, dtype: torch.dtype) -> None:
        if problem := hub_problem(name, None, "--model"):
            raise ConfigError(problem)
        try:
            self.processor: Any = AutoProcessor.from_pretrained(name)
            model = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, use_safetensors=True)
        except (OSError, ValueError, ImportError, KeyError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(f"--model: {name!r} cannot be loaded as an image-text-to-text model ({first})") from error
        self.model, self.dtype = model.to(device).eval(), dtype
        tokenizer = self.processor.tokenizer
        tokenizer.padding_side = "left"  # new tokens follow the prompt
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    def captions(self, images: Sequence[Image.Image], prompt: str, max_tokens: int) -> list[str]:
        """One per picture, by the most probable token at each place."""
        given: dict[str, Any] = {}
        if self.processor.chat_template:
            content = [{"type": "image"}, {"type": "text", "text": prompt}]
            chat = [{"role": "user", "content": content}]
            given = {"text": [self.processor.apply_chat_template(chat, add_generation_prompt=True)] * len(images)}
        inputs = self.processor(images=list(images), padding=True, return_tensors="pt", **given)
        inputs = inputs.to(self.model.device, self.dtype)
        with torch.inference_mode():
            tokens = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        asked = inputs.get("input_ids")
        if asked is not None and torch.equal(tokens[:, : asked.shape[1]], asked):
            tokens = tokens[:, asked.shape[1] :]
        texts: list[str] = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]


def part_table(
    index: DatasetIndex,
    reader: IndexedReader,
    samples: Sequence[int],
    captions_of: Callable[[Sequence[Image.Image]], list[tuple[str, str]]],
    batch_size: int,
) -> pa.Table:
    """Rows of these samples; in the metadata of the table, those that cannot be used."""
    rows, skipped = list[dict[str, Any]](), list[dict[str, str]]()
    fields = sorted(index.fields - set(_OWN))
    texts = {field for field in fields if TEXT + field in index}  # numbers of other samples as text
    numbers = set(fields) - texts

    def skip(sample: int, reason: str) -> None:
        skipped.append({"sample": "/".join(index.name(sample)), "reason": reason})

    for start in range(0, len(samples), batch_size):
        images, read = list[Image.Image](), list[tuple[int, dict[str, Any]]]()
        for sample in samples[start : start + batch_size]:
            try:
                data = reader.image(sample)
                images.append(Image.fromarray(decode(data, MAX_PIXELS).pixels))
                own = reader.caption(sample) if index.numbers("caption_length")[sample] >= 0 else None
            except BadSample as error:
                del images[len(read) :]
                skip(sample, str(error))
                continue
            shard, key = index.name(sample)
            row = {"key": key, "shard": shard, "image": data, "caption": own}
            row |= {field: index.metadata_text(field, sample) for field in texts}
            row |= {field: index.columns[NUMBER + field][sample].as_py() for field in numbers}
            read.append((sample, row))
        for (sample, row), (long, short) in zip(read, captions_of(images) if images else (), strict=True):
            if long and short:
                rows.append(row | {"recaption": long, "recaption_short": short})
            else:
                skip(sample, "the model wrote no caption")
    kinds = {name: pa.large_string() if name in (*_OWN, *texts) else pa.float64() for name in (*_OWN, *fields)}
    schema = pa.schema(kinds | {"image": pa.large_binary()}, metadata={_SKIPPED: json.dumps(skipped).encode()})
    return pa.Table.from_pylist(rows, schema=schema)


def check_record(args: argparse.Namespace, index: DatasetIndex, *, is_written: bool) -> None:
    """Raises ConfigError where the folder holds captions that were made in another way."""
    names = ("model", "prompt", "short_prompt", "max_tokens", "short_max_tokens", "dtype", "samples_per_file")
    record = {"input": index.fingerprint, **{name: getattr(args, name) for name in names}}
    path = args.out / _RECORD
    with suppress(FileNotFoundError):
        before = json.loads(path.read_text(encoding="utf-8"))
        if changed := [name for name, value in record.items() if before.get(name) != value]:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise ConfigError(f"--out: {args.out} holds captions made with another {options}; choose another folder")
    if is_written:
        replace_text(path, json.dumps(record, indent=1) + "\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises ConfigError for a number out of range."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("input", type=Path, help="folder of images, table, .parquet or .tar, or folder of such files")
    add("--model", required=True, help="folder or hub id")
    add("--out", type=path_argument, required=True, help="folder of the Parquet files")
    add("--prompt", default=_LONG, help="for the long caption")
    add("--short-prompt", default=_SHORT, help="for the short caption")
    add("--max-tokens", type=int, default=200, help="of the long caption (default 200)")
    add("--short-max-tokens", type=int, default=40, help="of the short caption (default 40)")
    add("--batch-size", type=int, default=8, help="pictures at once (default 8)")
    add("--samples-per-file", type=int, default=1000, help="what a kill costs at most (default 1000)")
    add("--image-column", help="as in scripts/make_webdataset.py")
    add("--caption-column", help="as in scripts/make_webdataset.py")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the weights (default bfloat16)")
    add("--device", default="auto", help="auto, cpu or cuda; with torchrun each process takes its own GPU")
    args = parser.parse_args(argv)
    check_counts(args, "max_tokens", "short_max_tokens", "batch_size", "samples_per_file")
    return args


def write_captions(args: argparse.Namespace, rank: int, world: int, scratch: Path) -> None:
    """This process's share of the files."""
    _, source = open_input(args.input, args.image_column, args.caption_column, scratch)
    index = load_index(source, None, load_index(source, None).fields)
    check_record(args, index, is_written=rank == 0)
    samples, size = range(len(index)), args.samples_per_file
    files = {args.out / f"{start // size:05d}.parquet": samples[start : start + size] for start in samples[::size]}
    missing = [path for number, path in enumerate(files) if number % world == rank and not path.exists()]
    if not missing:
        return
    captioner = Captioner(args.model, choose_device(args.device), DTYPES[args.dtype])
    reader, total = IndexedReader(index, source), sum(len(files[path]) for path in missing)
    with tqdm(total=total, unit="pictures", desc="captions", disable=rank > 0) as bar:

        def captions_of(images: Sequence[Image.Image]) -> list[tuple[str, str]]:
            long = captioner.captions(images, args.prompt, args.max_tokens)
            return list(zip(long, captioner.captions(images, args.short_prompt, args.short_max_tokens), strict=True))

        for path in missing:
            table = part_table(index, reader, files[path], captions_of, args.batch_size)
            bar.update(len(files[path]))
            with whole_file(path) as beside:
                pq.write_table(table, beside, compression="none", row_group_size=100)


def report(out: Path) -> str:
    """Names what was left out in `skipped.jsonl`; a sentence about all files.

    Raises:
        DataError: there is no caption at all.
    """
    samples, skipped = 0, list[dict[str, str]]()
    for path in sorted(out.glob("*.parquet")):
        metadata = pq.read_metadata(path)
        samples += metadata.num_rows
        skipped += json.loads(metadata.metadata[_SKIPPED])
    replace_text(out / "skipped.jsonl", "".join(json.dumps(entry) + "\n" for entry in skipped))
    if not samples:
        raise DataError(f"{out}: no picture has captions; {len(skipped):,} are named in skipped.jsonl")
    return f"{samples:,} pictures with captions in {out}; {len(skipped):,} left out (skipped.jsonl)"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as scratch, launched_group() as (rank, world):
            prepare_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            write_captions(args, rank, world, Path(scratch))
        if rank == 0:
            print(report(args.out))
    except OSError as error:
        raise ConfigError(f"--out: {args.out} cannot be written ({error})") from error


if __name__ == "__main__":
    run_cli(main)
