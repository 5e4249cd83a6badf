"""Writes docs/config.md from the schema: `python scripts/config_docs.py`, or `--check` to see whether it is fresh."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # A script's own folder is on the path, the project's is not.

from sd_training.config.fields import Option, either, groups, options
from sd_training.config.schema import PartConfig

DESTINATION = ROOT / "docs" / "config.md"

_HEAD = """\
# Configuration

Written by `python scripts/config_docs.py` from the schemas in `sd_training/config`; a test keeps it fresh.

    python train.py config=a.yaml,b.yaml 'dataset.params.path=data/{000..099}.tar' system.batch_size=16 --dry-run

Files are merged from left to right, then `option=value` is applied in order: options of a group are merged, lists are
replaced. A value is read as YAML; what YAML cannot read (`dataset.params.filters.original_width=>=512`) is text.
`${another.option}` stands for the value of that option; nothing else is filled in. `$NAME`, a variable of the
environment, is expanded in `experiment.log_dir`, `dataset.params.index_dir` and `dataset.params.remote.cache_dir` only.
`???` means "to be filled": an error for a **required** option, the default for any other. Unknown options are errors.
Options of another choice are errors too, such as `optimizer.params.momentum` without `optimizer.name=muon`; options of
a feature that is off, such as `ema.decay` without `model.use_ema`, give a warning.
"""

RECIPES = (
    ("fine-tune a pipeline (a folder or a hub id)", "model.pretrained=models/sd2"),
    ("train so many images", "experiment.num_examples_to_see=1_000_000"),
    ("take a larger batch than fits", "system.batch_size=8 system.gradient_accumulation=16"),
    ("end in time for a limit, and go on with the same command", "experiment.max_hours=11.5"),
    ("save more often", "experiment.save_every=500 checkpoint.save_every_minutes=30"),
    ("keep every exported pipeline", "experiment.save_only_most_recent=false"),
    ("keep some checkpoints for good", "checkpoint.milestone_every=10000"),
    (
        "keep the best checkpoints",
        "checkpoint.keep_best=2 checkpoint.best_by=validation_loss validation.path=held_out validation.every=1000",
    ),
    ("go on training while a save is written", "checkpoint.asynchronous=true"),
    ("copy checkpoints to object storage", "checkpoint.mirror=s3://bucket/runs"),
    ("choose the precision", "model.mixed_precision=bf16"),
    ("use less memory for activations", "model.gradient_checkpointing=true"),
    ("use less memory for the frozen autoencoder", "model.vae_slicing=true model.vae_tiling=true"),
    ("use less memory for the optimizer", "optimizer.name=adamw_8bit"),
    ("keep the weights in bf16", "model.bf16_weights=true optimizer.stochastic_rounding=true"),
    ("compile the denoiser", "trainer.compile=blocks"),
    ("share weights and optimizer over GPUs", "distributed.strategy=fsdp"),
    ("keep the optimizer in CPU memory", "distributed.strategy=deepspeed_2 distributed.offload_optimizer=true"),
    ("cut each layer over two GPUs", "distributed.mesh.tensor=2 distributed.mesh.data=-1"),
    (
        "set the learning rate and its warm-up",
        "optimizer.params.learning_rate=1e-5 lr_scheduler.params.warmup_length=1000",
    ),
    ("let the learning rate fall", "lr_scheduler.scheduler=cosine lr_scheduler.params.end_factor=0.1"),
    ("clip gradients", "optimizer.max_grad_norm=1.0"),
    ("average the weights", "model.use_ema=true ema.decay=0.9999"),
    ("choose the width of the average afterwards", "model.use_ema=true 'ema.sigma_rels=[0.05, 0.10]'"),
    ("train the text encoder as well", "model.train_text_encoder=true 'optimizer.rates_by_part={text_encoder: 1e-6}'"),
    ("train the autoencoder", "model.train=vae objective.kl_weight=1e-6"),
    ("predict v, with zero SNR at the last step", "objective.preset=sd_v"),
    ("weigh noise levels by min-SNR", "objective.snr_gamma=5"),
    ("learn very dark and very bright pictures", "objective.offset_noise=0.05"),
    ("drop captions, so that guidance works", "conditioning.dropout_prob=0.15"),
    ("read tar shards", "'dataset.params.path=data/{000..099}.tar'"),
    ("read a folder of images with .txt files", "dataset.type=ImageFolder dataset.params.path=photos"),
    ("read a CSV", "dataset.type=Table dataset.params.path=train.csv dataset.params.caption_column=text"),
    ("read a saved Hugging Face data set", "dataset.type=HuggingFace dataset.params.path=saved"),
    (
        "train on class labels",
        "dataset.type=ClassificationWebDataset 'dataset.params.idx_to_prompt={0: a cat, 1: [a dog, one dog]}'",
    ),
    (
        "read from object storage",
        "'dataset.params.path=s3://bucket/{000..099}.tar' dataset.params.remote.cache_gib=200",
    ),
    ("leave small images out", "'dataset.params.filters.original_width=>=512'"),
    ("train at several aspect ratios", "dataset.params.buckets.mode=ladder dataset.params.buckets.max_aspect=2"),
    ("crop and mirror at random", "dataset.params.crop=random dataset.params.flip_prob=0.5"),
    ("draw among several captions", "'dataset.params.captions.fields={caption: 1, long_caption: 2}'"),
    ("put text around every caption", "'dataset.params.captions.template=a photo of {caption}, studio light'"),
    ("mix data sets", "'dataset.mix=[{params: {path: more}, weight: 0.5}]'"),
    ("train on fewer images than a batch", "dataset.params.resampled=true"),
    ("draw previews", "sampling.every=500 'sampling.prompts=[a red fox, a teapot]'"),
    (
        "draw the captions of a file at each save",
        "experiment.eval_caption_file=captions.csv experiment.num_eval_images=64",
    ),
    ("measure the loss on held-out data", "validation.path=held_out validation.every=1000"),
    ("log to Weights & Biases without a network", "wandb.mode=offline"),
    ("log every step", "logging.every=1"),
    ("go back when the loss jumps", "numerics.on_spike=rollback"),
    ("notice a hanging step sooner", "watch.step_s=120"),
)
"""What users want to do, and the options that do it, as a shell takes them. Written by hand; tests load every line."""


def render() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_recipes(), *_contents(), *(line for group in groups() for line in _section(group))])


def _recipes() -> Iterator[str]:
    yield "## How do I …\n\n| to | give |\n|---|---|"
    for task, words in RECIPES:
        yield f"| {task} | {' '.join(f'`{word}`' for word in shlex.split(words, posix=False))} |"
    yield "\n## Groups\n"


def _contents() -> Iterator[str]:
    yield "| group | what it holds |\n|---|---|"
    for key, field in groups().items():
        yield f"| [`{key}`](#{key.replace('.', '')}) | {_cell(' '.join((field.description or '').split()))} |"
    yield ""


def _section(group: str) -> Iterator[str]:
    """Heading and table of one group; a repeated kind of group is described where it first stands."""
    field = groups()[group]
    own = [option for key, option in options().items() if key.rpartition(".")[0] == group]
    same = [key for key, other in groups().items() if other.annotation is field.annotation]
    yield f"## {group}\n\n{field.description}\n"
    if field.annotation is PartConfig and same[0] != group:
        yield f"The same keys as [`{same[0]}`](#{same[0].replace('.', '')}): {', '.join(f'`{o.key}`' for o in own)}.\n"
    elif own:
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        yield from (_row(option) for option in own)
        yield ""


def _row(option: Option) -> str:
    default = "**required**" if option.required else f"`{json.dumps(option.default, ensure_ascii=False)}`"
    readers = [
        f"`{key}={either(list(filter(None, rule.values)))}`" for key, rule in option.readers.items() if rule.values
    ]
    meaning = " ".join([*option.doc.split(), *([f"Only with {' and '.join(readers)}."] if readers else [])])
    return "| " + " | ".join(_cell(cell) for cell in (f"`{option.key}`", option.allowed, default, meaning)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when docs/config.md is not fresh; write nothing")
    check = parser.parse_args().check
    if not check:
        DESTINATION.write_text(render(), encoding="utf-8")
    elif not DESTINATION.is_file() or DESTINATION.read_text(encoding="utf-8") != render():
        sys.exit("docs/config.md is not fresh: run python scripts/config_docs.py")


if __name__ == "__main__":
    main()
