"""Encode pictures and captions once, before training, instead of at every visit.

    python scripts/cache_latents.py config=a.yaml out=DIR [a.b.c=value …] [--dry-run]
    torchrun --nproc_per_node 8 scripts/cache_latents.py config=a.yaml out=DIR …

    crops=center|K            the centre of every picture, or K random cuts, as dataset.params.crop has it
    dtype=fp16|bf16|fp32      type of what is stored (default fp16)
    text=none|pooled|states   pooled: text encoders of which only a pooled vector is read; states: all (default states)
    processes=N               training processes (default: as many as encode); the size of a training step decides
                              which small buckets are joined

The config is that of the training, which then gets `dataset.cache.path=DIR`. The same command again makes what is
missing, after a kill too. Each process makes its share of the chunks.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import prepare_cpu, run_cli
from sd_training.config.load import load_config
from sd_training.config.plan import counted
from sd_training.config.schema import Config
from sd_training.config.value_types import output_path, output_problem
from sd_training.errors import ConfigError
from sd_training.log import get_logger, global_rank, is_main_process, quiet_libraries

quiet_libraries()

from tqdm import tqdm

from sd_training.build.cache import CacheBuilder
from sd_training.build.data import make_data
from sd_training.build.models import frozen_family
from sd_training.build.plan import Plan, make_plan
from sd_training.build.prior import missing_class_images
from sd_training.data.samples.cache import DTYPES
from sd_training.models.family import latent_grid
from sd_training.parallel.launch import use_own_device

log = get_logger("sd_training.cache_latents")

_OPTIONS = {"out": "", "crops": "", "dtype": "fp16", "text": "states", "processes": ""}
_NAMED = 100
"""Pictures without a row that are named."""
_RESERVE = 1.02
"""Room for headers, and for what else is written meanwhile."""


def parse(argv: Sequence[str]) -> tuple[dict[str, str], list[str], bool]:
    """Own options, words of the config, and whether this is a dry run.

    Raises:
        ConfigError: a value cannot be used.
    """
    own = [word for word in argv if word.partition("=")[0] in _OPTIONS]
    given = _OPTIONS | dict(word.partition("=")[::2] for word in own)
    words = [word for word in argv if word not in own and word != "--dry-run"]
    problems = [f"{word}: unknown option; use --dry-run or a.b.c=value" for word in words if word.startswith("-")]
    if problem := output_problem(given["out"]) if given["out"] else "is required: the folder of the cache":
        problems.append(f"out: {problem}")
    for name, allowed in (("dtype", list(DTYPES)), ("text", ["none", "pooled", "states"])):
        if given[name] not in allowed:
            problems.append(f"{name}: is {given[name]!r}; use {', '.join(allowed)}")
    if given["crops"] not in ("", "center") and not _is_count(given["crops"]):
        problems.append(f"crops: is {given['crops']!r}; use center, or how many random cuts a picture has")
    if given["processes"] and not _is_count(given["processes"]):
        problems.append(f"processes: is {given['processes']!r}; give 1 or more")
    if problems:
        raise ConfigError(problems)
    return given, words, "--dry-run" in argv


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 2**15


def crops_of(config: Config, crops: str) -> int | None:
    """Random cuts per picture; None: the centre.

    Raises:
        ConfigError: the training cuts otherwise.
    """
    is_random = config.dataset.params.crop == "random"
    if is_random and crops in ("", "center"):
        raise ConfigError(
            "crops: dataset.params.crop is random; give crops=K cuts per picture, or dataset.params.crop=center"
        )
    if not is_random and crops not in ("", "center"):
        raise ConfigError(f"crops: {crops}, but dataset.params.crop is center; set dataset.params.crop=random")
    return int(crops) if is_random else None


def make_builder(given: dict[str, str], plan: Plan) -> CacheBuilder:
    """The builder of these options."""
    crops, device, family = crops_of(plan.config, given["crops"]), use_own_device(plan.launch), frozen_family(plan)
    data, folder = make_data(plan, family, latent_grid(family.vae)), output_path(given["out"])
    return CacheBuilder(plan, family, data, folder, device, dtype=given["dtype"], num_crops=crops, text=given["text"])


def check_space(folder: Path, needed: int) -> str:
    """What is needed and free, as a sentence.

    Raises:
        ConfigError: it does not fit.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free"
    if needed * _RESERVE > free:
        raise ConfigError(f"out: {text} in {existing}; give another folder, fewer crops, dtype=fp16 or text=none")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, compute the size, encode."""
    given, words, is_dry = parse(sys.argv[1:] if argv is None else argv)
    config = load_config(words)
    if config.model.train != "denoiser":
        raise ConfigError("model.train: vae trains on pixels; a cache is for training a denoiser")
    if images := missing_class_images(config):
        raise ConfigError(
            f"dataset.prior.path: {counted(len(images), 'class image')} of dataset.prior.num_images are missing, which "
            "a training draws: start it without a cache once, until its first step, and make the cache then"
        )
    plan = make_plan(config, is_described=True)
    is_launched = plan.launch.launcher != "own"
    if given["processes"]:
        plan = replace(plan, batch=replace(plan.batch, processes=int(given["processes"]), sharing=1))
    world, rank = (plan.launch.processes, global_rank()) if is_launched else (1, 0)
    if plan.launch.accelerator == "cpu":
        prepare_cpu(plan.launch.devices if is_launched else 1)
    builder = make_builder(given, plan)
    stored = sum(len(dataset.selected) for dataset in builder.data.datasets)
    missing = builder.missing(rank, world)
    space = check_space(builder.folder, sum(job.num_bytes for job in missing))
    if is_main_process():
        captions = counted(len(builder.captions), "caption")
        rows = f"{counted(stored, 'picture')} × {builder.storage.num_variants}, {captions}"
        chunks = f"{counted(len(builder.jobs), 'chunk')}, {len(builder.jobs) - len(missing):,} of them done"
        log.info(f"{rows} in {given['dtype']}, {chunks}: {space}")
        log.info(f"for a training with {plan.batch.global_batch:,} pictures per optimizer step")
    if is_dry:
        return
    if is_main_process():
        builder.write_plan()
    builder.folder.mkdir(parents=True, exist_ok=True)
    own = sorted(set(missing).intersection(builder.jobs[rank::world]))
    total, seen = sum(job.rows for job in own), sys.stderr.isatty() and is_main_process()
    with tqdm(total=total, unit="row", desc="encoding", mininterval=1, dynamic_ncols=True, disable=not seen) as bar:
        bad = builder.make(own, bar.update)
    for (shard, key), reason in list(bad.items())[:_NAMED]:
        log.warning(f"a picture cannot be used and has no row: {shard} {key}: {reason}")
    if len(bad) > _NAMED:
        log.warning(f"{len(bad):,} pictures cannot be used, of which {_NAMED} are named")
    log.info(f"done: {counted(len(own), 'chunk')} written; train with dataset.cache.path={builder.folder}")


if __name__ == "__main__":
    run_cli(main)
