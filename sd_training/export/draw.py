"""Pictures from a pipeline, each a function of its prompt and seed alone; caption tables, and grids of pictures."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from sd_training.errors import DataError

_SAFE_IN_NAMES = " !#$&'()+,;=@[]^{}"
_MAX_NAME_BYTES = 200


def draw_images(
    pipeline: Any,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    height: int | None,
    width: int | None,
    num_inference_steps: int,
    guidance_scale: float,
    batch_size: int,
) -> Iterator[Image.Image]:
    """Draws one picture per prompt, in order, `batch_size` at a time.

    All noise comes from one CPU generator per picture, so a picture depends on its seed and not on its neighbours,
    the batch size, the device's own generator or the process; the global generators are left as they are. The
    pipeline's progress bar is disabled.

    Args:
        pipeline: any text-to-image pipeline of diffusers, on its device and in evaluation mode: dropout would draw from
            the global generator. (Typed as Any: the names that diffusers exports are placeholders to a type checker.)
        prompts: one per picture.
        seeds: one per picture.
        height: [pixels]; None is the pipeline's own size.
        width: [pixels]; None is the pipeline's own size.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance, 1 is off.
        batch_size: pictures per call of the pipeline.
    """
    import torch  # here: captions are checked without it (build/preflight.py)

    pipeline.set_progress_bar_config(disable=True)
    for start in range(0, len(prompts), batch_size):
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start : start + batch_size]]
        result = pipeline(
            prompt=list(prompts[start : start + batch_size]),
            generator=generators,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            **_guidance(pipeline, guidance_scale),
        )
        yield from result.images


def _guidance(pipeline: Any, scale: float) -> dict[str, Any]:
    """Arguments of the pipeline for classifier-free guidance and for the requested sizes."""
    match type(pipeline).__name__:
        case "FluxPipeline" if not pipeline.transformer.config.guidance_embeds:
            return {"true_cfg_scale": scale, "negative_prompt": "" if scale > 1 else None}
        case "PixArtSigmaPipeline":
            return {"guidance_scale": scale, "use_resolution_binning": False, "clean_caption": False}
        case _:  # a guidance-distilled FLUX takes it as an input of the transformer
            return {"guidance_scale": scale}


def picture_grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Pastes pictures row by row into one RGB picture.

    Args:
        images: at least one; a cell is as large as the largest of them, smaller ones sit in its top left corner.
        columns: cells per row; the last row may stay partly black.
    """
    columns = min(columns, len(images))
    width, height = max(i.width for i in images), max(i.height for i in images)
    grid = Image.new("RGB", (columns * width, -(-len(images) // columns) * height))
    for cell, image in enumerate(images):
        grid.paste(image.convert("RGB"), (cell % columns * width, cell // columns * height))
    return grid


def read_captions(
    path: Path, *, caption_columns: Sequence[str] = ("caption",), needs_uid: bool = True
) -> list[tuple[str, str]]:
    """Reads a CSV file with a header into (file stem, caption) pairs, in the order of the file.

    Args:
        path: UTF-8, comma-separated; column names in any case, further columns are ignored. The column `uid` names the
            files: "a/b" becomes "a%2Fb", and different uids stay different.
        caption_columns: names of the caption column, the first one present is used.
        needs_uid: False numbers the rows 000000, 000001, ... where there is no column `uid`.

    Raises:
        DataError: unreadable file, a missing column, a row of another length, a uid twice or unusable as a name.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            rows = [(f"{path}, line {reader.line_num}", cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a CSV file in UTF-8 ({error})") from error
    caption = next((name for name in caption_columns if name in header), None)
    if caption is None or (needs_uid and "uid" not in header):
        wanted = " and ".join((["uid"] if needs_uid else []) + [" or ".join(caption_columns)])
        raise DataError(f"{path}: the first line must name the columns {wanted}; it has {', '.join(header) or 'none'}")
    pairs: dict[str, str] = {}
    for where, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{where}: {len(cells)} cells where the header has {len(header)}; put text with commas in double quotes"
            )
        row = dict(zip(header, cells, strict=True))
        uid = row.get("uid", f"{len(pairs):06d}")
        stem = re.sub(r"^\.", "%2E", quote(uid, safe=_SAFE_IN_NAMES))
        if not stem.strip() or len(stem) > _MAX_NAME_BYTES:
            raise DataError(
                f"{where}: uid {uid[:60]!r} cannot be a file name: use 1 to {_MAX_NAME_BYTES} letters or digits"
            )
        if stem in pairs:
            raise DataError(f"{where}: uid {uid!r} appears twice; uids name files")
        pairs[stem] = row[caption]
    return list(pairs.items())
