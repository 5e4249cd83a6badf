"""Pictures from a pipeline, each a function of its prompt and seed alone; caption tables, and grids of pictures."""

import csv
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from sd_training.config.schema import Config
from sd_training.data.samples.image import decode, image_size
from sd_training.errors import BadSample, DataError

_SAFE_IN_NAMES = " !#$&'()+,;=@[]^{}"
_MAX_NAME_BYTES = 200
_MAX_PIXELS = 2**28
"""Of an image to draw from."""
_SIDE = 16
"""Pixels along one side of a token: pictures are multiples of it, unless a size is given."""


@dataclass(frozen=True)
class Conditions:
    """What a picture is drawn from besides its prompt and seed. All pictures of a call have the same kinds of them."""

    negative_prompt: str | None = None
    """What guidance leads away from."""
    init_image: Path | None = None
    """A picture to begin with, of an image-to-image pipeline."""
    control_images: Sequence[Path] = ()
    """One per ControlNet of the pipeline."""

    def size(self, height: int | None, width: int | None) -> tuple[int | None, int | None]:
        """Height and width of the picture: a side that is not given is that of its first image, rounded down."""
        for path in filter(None, (self.init_image, *self.control_images)):
            with path.open("rb") as stream:
                own = [max(side // _SIDE, 1) * _SIDE for side in image_size(stream)]
            return height or own[1], width or own[0]
        return height, width


def is_picture(path: Path) -> bool:
    """Whether there is a picture. A damaged file counts as missing."""
    with suppress(OSError, SyntaxError, ValueError), Image.open(path) as image:
        image.verify()
        return True
    return False


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
    conditions: Sequence[Conditions] = (),
    on_step: Callable[[int, list[Image.Image]], None] | None = None,
    steps: Collection[int] | None = None,
    **options: Any,
) -> Iterator[Image.Image]:
    """Draws one picture per prompt, in order, at most `batch_size` at a time.

    All noise comes from one CPU generator per picture, so a picture depends on its seed and not on its neighbours,
    the batch size, the device's own generator or the process; the global generators are left as they are. The
    pipeline's progress bar is disabled.

    Args:
        pipeline: any text-to-image or image-to-image pipeline of diffusers, on its device and in evaluation mode:
            dropout would draw from the global generator. (Typed as Any: the names that diffusers exports are
            placeholders to a type checker.)
        prompts: one per picture.
        seeds: one per picture.
        height: [pixels]; None is the size of a picture's image where it has one, and else the pipeline's own.
        width: as `height`.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance, 1 is off.
        batch_size: pictures per call of the pipeline; they have one size.
        conditions: one per picture, or none.
        on_step: gets the number of the first picture of a call, and of all of them what a step takes for the finished
            picture, x̂₀.
        steps: the denoising steps, from 0, that `on_step` is called for; None: all.
        options: further arguments of the pipeline, such as `strength`.
    """
    import torch  # here: captions are checked without it (build/preflight.py)

    pipeline.set_progress_bar_config(disable=True)
    takes = inspect.signature(pipeline.__call__).parameters
    conditions = conditions or [Conditions()] * len(prompts)
    sizes = [own.size(height, width) for own in conditions]
    start = 0
    while start < len(prompts):
        size, end = sizes[start], start + 1
        while end < min(start + batch_size, len(prompts)) and sizes[end] == size:
            end += 1
        part, kinds = conditions[start:end], conditions[start]
        call = {"num_inference_steps": num_inference_steps, **_guidance(pipeline, guidance_scale, kinds), **options}
        call["prompt"] = list(prompts[start:end])
        call["generator"] = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start:end]]
        if "height" in takes:  # some image-to-image pipelines take the size of the image
            call |= {"height": size[0], "width": size[1]}
        if kinds.negative_prompt is not None:
            call["negative_prompt"] = [own.negative_prompt for own in part]
        if kinds.init_image is not None:
            call["image"] = _images([own.init_image for own in part], size)
        if kinds.control_images:
            stacks = [_images(column, size) for column in zip(*(own.control_images for own in part), strict=True)]
            call["control_image" if "control_image" in takes else "image"] = stacks if len(stacks) > 1 else stacks[0]
        if on_step is None:
            with _decoder_in_fp32(pipeline):
                images = pipeline(**call).images
            yield from images
        else:
            with _decoder_in_fp32(pipeline), _clean_latents(pipeline.scheduler) as clean:

                def show(_: Any, step: int, _time: Any, state: Any, start: int = start, size: Any = size) -> Any:
                    if steps is None or step in steps:
                        on_step(start, _decoded(pipeline, clean[-1], *size))
                    return state

                images = pipeline(**call, callback_on_step_end=show).images
            yield from images
        start = end


def drawing_options(config: Config) -> dict[str, Any]:
    """Arguments of `draw_images` that the configuration of a run chooses; the first seed is `sampling.seed`."""
    sampling, side = config.sampling, config.dataset.params.resolution
    chosen = {name: getattr(sampling, name) for name in ("num_inference_steps", "guidance_scale", "batch_size")}
    return {"height": side, "width": side, **chosen}


@contextmanager
def _decoder_in_fp32(pipeline: Any) -> Iterator[None]:
    """Under autocast to fp16 the autoencoder decodes without autocast: some decoders overflow in fp16, and autocast
    undoes the upcast to fp32 by which pipelines avoid it."""
    import torch

    vae, device = pipeline.vae, pipeline.vae.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.float16:
        yield
        return
    decode = vae.decode

    @wraps(decode)
    def decoded(latents: Any, *args: Any, **options: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return decode(latents.to(vae.dtype), *args, **options)

    vae.decode = decoded
    try:
        yield
    finally:
        del vae.decode


@contextmanager
def _clean_latents(scheduler: Any) -> Iterator[list[Any]]:
    """A list whose last entry is what the scheduler took for the finished latents in its last step, x̂₀. Pipelines keep
    to themselves what they ask the scheduler for."""
    step, clean = scheduler.step, list[Any]()

    @wraps(step)  # pipelines look at its arguments
    def kept(output: Any, timestep: Any, sample: Any, *args: Any, return_dict: bool = True, **options: Any) -> Any:
        result = step(output, timestep, sample, *args, return_dict=True, **options)
        clean[:] = [_finished(scheduler, result, output, timestep, sample)]
        return result if return_dict else (result.prev_sample,)

    scheduler.step = kept
    try:
        yield clean
    finally:
        del scheduler.step


def _finished(scheduler: Any, result: Any, output: Any, timestep: Any, sample: Any) -> Any:
    """x̂₀ of a step, which gave `result`."""
    config = scheduler.config
    for name in ("pred_original_sample", "denoised"):
        if name in result:
            return result[name]
    if type(scheduler).__name__.startswith("FlowMatch"):
        return sample - timestep / config.num_train_timesteps * output  # the timestep of a flow is its σ
    if config.get("predict_x0") or "++" in config.get("algorithm_type", ""):
        return scheduler.model_outputs[-1]
    kept = scheduler.alphas_cumprod[int(timestep)]  # ᾱ
    signal, noise = kept.sqrt(), (1 - kept).sqrt()
    is_velocity = config.prediction_type == "v_prediction"
    return signal * sample - noise * output if is_velocity else (sample - noise * output) / signal


def _images(paths: Sequence[Any], size: Any) -> Any:
    """[B, 3, height, width] in [0, 1]: all pipelines take a tensor for a batch."""
    import torch

    images = []
    for path in paths:
        try:
            image = Image.fromarray(decode(path.read_bytes(), _MAX_PIXELS).pixels)
        except (BadSample, OSError) as error:
            raise DataError(f"{path}: cannot be read as an image ({error})") from error
        images.append(np.asarray(image.resize(size[::-1], Image.Resampling.LANCZOS)))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def _decoded(pipeline: Any, latents: Any, height: int | None, width: int | None) -> list[Image.Image]:
    """What latents look like; `height` and `width` are arguments of the pipeline."""
    import torch

    vae, dtype = pipeline.vae, pipeline.vae.dtype
    if dtype == torch.float16:  # in which some decoders overflow; pipelines have ways of their own around it
        vae.float()
    if latents.ndim == 3:  # the tokens of a transformer, which FLUX keeps
        factor = pipeline.vae_scale_factor
        usual = pipeline.default_sample_size * factor
        if hasattr(vae, "bn"):  # FLUX.2
            tokens = latents * (vae.bn.running_var + vae.config.batch_norm_eps).sqrt() + vae.bn.running_mean
            latents = pipeline._unpatchify_latents(tokens.mT.unflatten(2, ((height or usual) // (2 * factor), -1)))
        else:
            latents = pipeline._unpack_latents(latents, height or usual, width or usual, factor)
    config, latents = vae.config, latents.to(vae.dtype) / vae.config.get("scaling_factor", 1.0)
    if config.get("latents_std") is None:  # else one of each per channel (Playground v2.5, Qwen-Image)
        latents = latents + (config.get("shift_factor") or 0.0)
    else:
        per_channel = [1, -1, *[1] * (latents.ndim - 2)]
        mean, std = (latents.new_tensor(config[key]).view(per_channel) for key in ("latents_mean", "latents_std"))
        latents = latents * std + mean
    pixels = vae.decode(latents, return_dict=False)[0].float()
    if pixels.ndim == 5:  # a film of one frame
        pixels = pixels[:, :, 0]
    if dtype == torch.float16:
        vae.to(dtype)
    return list(pipeline.image_processor.postprocess(pixels, output_type="pil"))


def _guidance(pipeline: Any, scale: float, kinds: Conditions) -> dict[str, Any]:
    """Arguments of the pipeline for classifier-free guidance and for the requested sizes."""
    known = inspect.signature(pipeline.__call__).parameters
    if "true_cfg_scale" in known and (
        kinds.negative_prompt is not None or not pipeline.transformer.config.guidance_embeds
    ):
        return {"true_cfg_scale": scale, "negative_prompt": "" if scale > 1 else None}
    as_trained = {"use_resolution_binning": False, "clean_caption": False}  # sizes and captions
    if type(pipeline).__name__.startswith("ZImage"):  # whose 0 is off
        scale -= 1
    # A guidance-distilled FLUX takes the scale as an input of the transformer.
    return {"guidance_scale": scale, **{key: value for key, value in as_trained.items() if key in known}}


def comparison_grid(pairs: Any, columns: int) -> Image.Image:
    """Pictures, each with its reconstruction and their absolute difference on the right.

    Args:
        pairs: [B, 3, H, 2W] uint8, pictures and reconstructions side by side, on the CPU.
    """
    import torch

    originals, reconstructions = pairs.short().chunk(2, dim=3)
    triples = torch.cat((pairs, (reconstructions - originals).abs().byte()), dim=3)
    return picture_grid([Image.fromarray(triple.permute(1, 2, 0).numpy()) for triple in triples], columns)


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


def read_captions(path: Path) -> list[tuple[str, str]]:
    """(File stem, caption) pairs of a CSV file with the columns `uid` and `caption`, as `read_rows` reads it."""
    return [(stem, row["caption"]) for stem, row in read_rows(path).items()]


def read_rows(
    path: Path, *, caption_columns: Sequence[str] = ("caption",), needs_uid: bool = True
) -> dict[str, dict[str, str]]:
    """Reads a CSV file with a header: file stem → the row's cells by column, in the order of the file.

    Args:
        path: UTF-8, comma-separated; column names in any case. The column `uid` names the files: "a/b" becomes "a%2Fb",
            and different uids stay different.
        caption_columns: names of the caption column, the first one present is used; rows call it `caption`.
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
    named: dict[str, dict[str, str]] = {}
    for where, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{where}: {len(cells)} cells where the header has {len(header)}; put text with commas in double quotes"
            )
        row = dict(zip(header, cells, strict=True))
        uid = row.get("uid", f"{len(named):06d}")
        stem = re.sub(r"^\.", "%2E", quote(uid, safe=_SAFE_IN_NAMES))
        if not stem.strip() or len(stem) > _MAX_NAME_BYTES:
            raise DataError(
                f"{where}: uid {uid[:60]!r} cannot be a file name: use 1 to {_MAX_NAME_BYTES} letters or digits"
            )
        if stem in named:
            raise DataError(f"{where}: uid {uid!r} appears twice; uids name files")
        named[stem] = {**row, "caption": row[caption]}
    return named
