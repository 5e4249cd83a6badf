"""Pictures from a pipeline, each one a function of its prompt and seed alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image


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
    the batch size, the device's own generator or the process; the global generators are left as they are. Between
    batches the pipeline is as the caller left it (training mode, progress bar).

    Args:
        pipeline: any text-to-image pipeline of diffusers, already on its device. (Typed as Any: the names that
            diffusers exports are placeholders to a type checker.)
        prompts: one per picture.
        seeds: one per picture.
        height: [pixels]; None is the pipeline's own size.
        width: [pixels]; None is the pipeline's own size.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance, 1 is off.
        batch_size: pictures per call of the pipeline.

    Raises:
        ValueError: prompts and seeds differ in number, or the batch size is below 1.
    """
    if len(prompts) != len(seeds) or batch_size < 1:
        raise ValueError(f"{len(prompts)} prompts, {len(seeds)} seeds, batch size {batch_size}")
    for start in range(0, len(prompts), batch_size):
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start : start + batch_size]]
        with _quiet_evaluation(pipeline):
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
    """Classifier-free guidance, and the sizes that were asked for, in the words of the pipeline."""
    match type(pipeline).__name__:
        case "FluxPipeline" if not pipeline.transformer.config.guidance_embeds:
            return {"true_cfg_scale": scale, "negative_prompt": "" if scale > 1 else None}
        case "PixArtSigmaPipeline":
            return {"guidance_scale": scale, "use_resolution_binning": False, "clean_caption": False}
        case _:  # of a guidance-distilled FLUX this is the guidance that the transformer is told
            return {"guidance_scale": scale}


@contextmanager
def _quiet_evaluation(pipeline: Any) -> Iterator[None]:
    """Evaluation mode (dropout would draw from the global generator) and no progress bar; both put back after."""
    modules = [m for part in pipeline.components.values() if isinstance(part, torch.nn.Module) for m in part.modules()]
    modes = [(module, module.training) for module in modules]
    bar: dict[str, Any] | None = getattr(pipeline, "_progress_bar_config", None)
    try:
        for module in modules:
            module.training = False
        pipeline.set_progress_bar_config(**{**(bar or {}), "disable": True})
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        pipeline.set_progress_bar_config(**(bar or {}))
