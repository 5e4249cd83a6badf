"""Class images of DreamBooth, drawn by the model that the run begins with (Ruiz et al. 2022, arXiv:2208.12242, §3.2).

Every picture depends on its number alone, and has its name only once it is whole: a start that was interrupted goes on
where it was, on any number of processes.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from sd_training.build.models import Trained
from sd_training.build.plan import Plan, Start
from sd_training.checkpoint.folder import replace_text
from sd_training.config.changes import Change
from sd_training.config.fields import value_of
from sd_training.config.schema import Config
from sd_training.config.value_types import output_path
from sd_training.data.sources.files import IMAGE_SUFFIXES
from sd_training.errors import ConfigError, OutageError
from sd_training.export.draw import draw_images, drawing_options, is_picture
from sd_training.log import get_logger, global_rank, is_main_process
from sd_training.models.family import autocast
from sd_training.parallel.launch import use_own_device
from sd_training.watchdog import HangWatch

log = get_logger(__name__)

_RECORD = "drawn_from.json"
_DECIDING = (
    *("model.pretrained", "model.revision", "model.unet.pretrained", "model.transformer.pretrained"),
    *("model.noise_scheduler_inference.target", "dataset.prior.prompt", "dataset.params.resolution"),
    *("sampling.num_inference_steps", "sampling.guidance_scale", "sampling.seed"),
)
"""Options that decide the pictures, and are recorded."""
_NAME = re.compile(r"class_\d{6}\.png")
_POLL_S = 1.0


def missing_class_images(config: Config, changed: Sequence[Change] = ()) -> list[str]:
    """Names of the files of `dataset.prior` that are still to be drawn, because they are not there or damaged, such as
    empty after a copy to a full disk; none without a prior.

    Args:
        changed: options that differ from the last start of a resumed run.

    Raises:
        ConfigError: those that are there were drawn in another way, the folder cannot be read, or the order of samples
            that the run began with would end.
    """
    prior = config.dataset.prior
    if prior.path is None:
        return []
    folder = output_path(prior.path)
    try:
        there = {path.name for path in folder.iterdir()} if folder.exists() else set()
        drawn_from = json.loads((folder / _RECORD).read_text(encoding="utf-8")) if _RECORD in there else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset.prior.path: {folder} cannot be read: {error}") from error
    asked = _drawn_from(config)
    if others := [key for key, value in drawn_from.items() if asked.get(key, value) != value]:
        now = "; ".join(f"{key} was {drawn_from[key]!r}, now {asked[key]!r}" for key in others)
        raise ConfigError(f"dataset.prior.path: the images in {folder} were drawn in another way: {now}; give another")
    foreign = sum(n.lower().endswith(IMAGE_SUFFIXES) and n[0] != "." and not _NAME.fullmatch(n) for n in there)
    names = (f"class_{i:06d}.png" for i in range(prior.num_images - foreign))
    missing = [name for name in names if not is_picture(folder / name)]
    if missing and config.model.from_scratch:
        raise ConfigError(
            f"model.from_scratch: random weights would draw the {len(missing)} class images that are missing in "
            f"{folder}; put pictures there, or set it to false"
        )
    if missing and (raised := [str(change) for change in changed if change.key == "dataset.prior.num_images"]):
        raise ConfigError(
            f"{raised[0]}: more class images are another order of samples than the run began with; restore it, or "
            "begin another run with experiment.start_from and experiment.reset=[data]"
        )
    return missing


def _drawn_from(config: Config) -> dict[str, object]:
    return {key: value_of(config, key) for key in _DECIDING}


def draw_class_images(plan: Plan, start: Start, trained: Trained, watch: HangWatch) -> None:
    """Draws what is missing, each process its share, and waits for the others: of all processes that a launcher has
    started. To be called before anything is trained or sharded.

    Raises:
        ConfigError: as `missing_class_images`, or the folder cannot be written.
        OutageError: other processes have stopped drawing.
    """
    missing, family = missing_class_images(plan.config, start.changed), trained.family
    if not missing or family is None:
        return
    folder = output_path(str(plan.config.dataset.prior.path))
    # Those that Lightning starts do not exist yet.
    rank, world = (0, 1) if plan.launch.launcher == "own" else (global_rank(), plan.launch.processes)
    log.info(f"dataset.prior: {len(missing)} class images are drawn into {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            replace_text(folder / _RECORD, json.dumps(_drawn_from(plan.config), indent=1) + "\n")
        _draw(plan, trained, folder, [name for name in missing if int(name[6:12]) % world == rank], watch)
    except OSError as error:
        raise ConfigError(f"dataset.prior.path: {folder} cannot be written: {error.strerror or error}") from error
    progress_s, left = time.monotonic(), missing
    while now_left := [name for name in left if not is_picture(folder / name)]:
        if len(now_left) < len(left):
            progress_s, left = time.monotonic(), now_left
            watch.enter("start", 0)
        if time.monotonic() > progress_s + plan.config.watch.collective_timeout_s:
            raise OutageError(f"dataset.prior: {len(left)} class images of other processes do not come into {folder}")
        time.sleep(_POLL_S)


def _draw(plan: Plan, trained: Trained, folder: Path, names: Sequence[str], watch: HangWatch) -> None:
    config, device, module = plan.config, use_own_device(plan.launch), trained.module
    assert trained.family is not None
    pipeline, was_training = trained.family.pipeline(), module.network.training
    prompts, numbers = config.dataset.prior.prompts, [int(name[6:12]) for name in names]
    captions = [prompts[number % len(prompts)] for number in numbers]
    seeds = [config.sampling.seed + number for number in numbers]
    pipeline.to(device)
    module.network.eval()  # dropout would draw from the global generator
    with torch.no_grad(), autocast(device, plan.precision), torch.compiler.set_stance("force_eager"):
        images = draw_images(pipeline, captions, seeds, **drawing_options(config))
        drawn = zip(names, captions, images, strict=True)
        for name, caption, image in tqdm(drawn, "class images", len(names), disable=not is_main_process()):
            if len(prompts) > 1:
                (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
            image.save(folder / f".{name}.partial", format="PNG")
            os.replace(folder / f".{name}.partial", folder / name)
            watch.enter("start", 0)  # each picture has the time of a start
    pipeline.to("cpu")
    module.network.train(was_training)
