"""Every command of the guides runs as it stands and in its order, in a folder of its own where models and data of a
tiny size have the names of the real ones. Nothing is left out; what needs the hub or a cluster has a stand-in.

GUIDES says how a page is made small: words that are replaced in commands and YAML files, options that are added.
"""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from sd_training.config.check import warnings
from sd_training.config.load import load_config
from tests import makers
from tests.family_makers import save_pipeline
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import RUN_HERE, as_torchrun
from tests.integration.shipped_models import write_shards
from tests.tiny_parts import tiny_tokenizer
from tests.unit.evaluation.test_networks import GOLDEN, inception_weights
from tests.unit.test_coming_from import problems

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
BATCH, STEPS = 2, 2
"""Pictures of a process per optimizer step; optimizer steps of a start, as a resume does as many again."""


@dataclass(frozen=True)
class Guide:
    """How a page is made small.

    Attributes:
        make: writes what a reader has or the hub would give, in the reader's folder.
        processes: that torchrun starts, whatever the page says.
        replaced: what stands in commands and YAML files → what is used instead; each of them has to occur.
        added: part of a command → options; all that fit are added.
        written: files that are there in the end.
        runs: names of run folders.
    """

    make: Callable[[Path], None]
    processes: int
    replaced: Mapping[str, str]
    added: Mapping[str, str]
    written: tuple[str, ...]
    runs: tuple[str, ...]


def hub_text_encoder(folder: Path, network: Any) -> None:
    """As `hf download` leaves it."""
    network.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def clip(folder: Path) -> None:
    """Text and images."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "projection_dim": 16}
    text = {**sizes, **SPECIAL, "vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 77}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    hub_text_encoder(folder, transformers.CLIPModel(config))


def for_imagenet(home: Path) -> None:
    """The pipeline, and the published file of Inception with random weights."""
    save_pipeline("stable_diffusion", home / "stable-diffusion-v1-5/stable-diffusion-v1-5")
    weights = inception_weights(json.loads(GOLDEN.read_text(encoding="utf-8"))["layers"])
    torch.save(weights, home / "pt_inception-2015-12-05-6726825d.pth")


def for_sdxl(home: Path) -> None:
    """Photographs of three shapes, the pipeline, CLIP."""
    (home / "photos").mkdir()
    for number in range(36):
        shape = ((40, 32), (32, 40), (36, 36))[number % 3]
        (home / "photos" / f"{number}.jpg").write_bytes(makers.encode(makers.picture(number, *shape)))
        (home / "photos" / f"{number}.txt").write_text(f"picture {number}")
    save_pipeline("sdxl", home / "stabilityai/stable-diffusion-xl-base-1.0")
    clip(home / "openai/clip-vit-large-patch14")


def for_stages(home: Path) -> None:
    """A table of pictures, the autoencoder, three text encoders."""
    rows = [
        {"image": makers.encode(makers.picture(number, 40, 32)), "caption": f"picture {number}"} for number in range(36)
    ]
    pq.write_table(pa.Table.from_pylist(rows), home / "table.parquet")
    save_pipeline("flux", home / "black-forest-labs/FLUX.1-schnell")
    sizes: dict[str, Any] = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77, **SPECIAL}
    gemma = transformers.Gemma2Config(**sizes, num_key_value_heads=1, head_dim=8)
    hub_text_encoder(home / "google/gemma-2-2b", transformers.Gemma2Model(gemma))
    bert = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes))
    hub_text_encoder(home / "answerdotai/ModernBERT-large", bert)
    clip(home / "openai/clip-vit-large-patch14")


RUN = (
    f"system.batch_size={BATCH} system.gradient_accumulation=1 system.workers=0 trainer.accelerator=cpu "
    "model.mixed_precision=no experiment.save_every=2 validation.every=2 validation.num_samples=4 "
    "validation.num_levels=2 sampling.num_inference_steps=1 lr_scheduler.params.warmup_length=1 ema.update_every=1 "
    "logging.progress_bar=false logging.every=1 dataset.params.resolution=16"
)
BUCKETS = "dataset.params.buckets.step=4 dataset.params.buckets.min_side=8 dataset.params.buckets.max_side=40"
UNET = (
    "model.unet.params={sample_size: 8, in_channels: 4, out_channels: 4, block_out_channels: [8, 16], "
    "layers_per_block: 1, down_block_types: [CrossAttnDownBlock2D, DownBlock2D], "
    "up_block_types: [UpBlock2D, CrossAttnUpBlock2D], cross_attention_dim: 16, attention_head_dim: 4, "
    "norm_num_groups: 4}"
)
MMDIT = (
    "model.transformer.params={in_channels: 8, num_layers: 1, num_attention_heads: 2, attention_head_dim: 8, "
    "text_dims: [16, 16], pooled_dim: 16, rope_base_size: 4}"
)
EVALUATE = (
    "evaluation.num_images=4 evaluation.num_real=4 sampling.num_inference_steps=1 sampling.guidance_scale=1 "
    "--device cpu"
)
GUIDES = {
    "guide_from_scratch": Guide(
        make=for_imagenet,
        processes=1,
        replaced={
            "trainer.devices=8": "trainer.devices=1",
            "{0000..1023}": "{0000..0001}",
            "{0000..0063}": "0000",
            "step=150000": "step=2",
            "step=200000": "step=4",
            "--images-per-prompt 8": "--images-per-prompt 1",
        },
        added={
            "config=": f"{RUN} '{UNET}' checkpoint.milestone_every=2",
            "evaluate.py": EVALUATE,
            "generate_examples.py": "--steps 2",
        },
        written=(
            "data/cache/cache.json",
            "runs/imagenet256/validation.csv",
            "runs/imagenet256/evaluation.csv",
            "runs/imagenet256/samples/step_4/previews_grid.png",
        ),
        runs=("imagenet256",),
    ),
    "guide_sdxl": Guide(
        make=for_sdxl,
        processes=2,
        replaced={
            "trainer.devices=8": "trainer.devices=2",
            "{00000..00018}": "{00000..00002}",
            "00019.tar": "00003.tar",
            "step=1500": "step=2",
            "step=2000": "step=4",
            "--width 1216 --height 832": "--width 24 --height 16",
        },
        added={
            "make_webdataset.py": "--samples-per-shard 9",
            "config=": f"{RUN} {BUCKETS} sampling.every=2",
            "evaluate.py": EVALUATE,
            "generate_examples.py": "--steps 2",
        },
        written=(
            "data/sdxl_cache/cache.json",
            "runs/sdxl_mine/validation.csv",
            "runs/sdxl_mine/evaluation.csv",
            "runs/sdxl_mine/samples/step_4/previews_grid.png",
            "sdxl_mine.safetensors",
        ),
        runs=("sdxl_mine",),
    ),
    "guide_stages": Guide(
        make=for_stages,
        processes=1,
        replaced={
            "trainer.devices=5": "trainer.devices=1",
            "distributed.encoders=3": "distributed.encoders=1",
            "distributed.encoders=2": "distributed.encoders=1",
            "{00000..09989}": "{00000..00002}",
            "{09990..09999}": "00003",
            "--samples-per-shard 10000": "--samples-per-shard 9",
            "--height 1024 --width 1024": "--height 16 --width 16",
        },
        added={
            "config=": f"{RUN} {BUCKETS}",
            "mmdit_rope.yaml": f"'{MMDIT}'",
            "check_resume.py": "steps=1",
            "stage2.yaml": "dataset.params.resolution=24 distributed.encoders=0",
            "stage3.yaml": "dataset.params.resolution=32 distributed.encoders=0",
            "evaluate.py": EVALUATE,
            "generate_examples.py": "--steps 2",
        },
        written=("stages.html", "stage1.sbatch", "pictures/000000.gif", "runs/mmdit_rope_stage3/evaluation.csv"),
        runs=("mmdit_rope", "mmdit_rope_stage2", "mmdit_rope_stage3"),
    ),
}
"""Encoder processes are no forks and take seconds to start: of the stages only the first one has one here."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Every line of a code block without a language, joined where it goes on, without its comment."""
    blocks = [block for block in text.split("```")[1::2] if block.startswith("\n")]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.partition("  #")[0].split()) for line in lines if line.strip()]


def yaml_files(text: str) -> dict[str, str]:
    """File → its text, of every YAML block; the first line names it."""
    blocks = [block.removeprefix("yaml\n") for block in text.split("```")[1::2] if block.startswith("yaml\n")]
    return {block.removeprefix("# ").partition(",")[0]: block for block in blocks}


def small(guide: Guide, text: str) -> str:
    for stands, used in guide.replaced.items():
        text = text.replace(stands, used)
    return text


def open_page(name: str, home: Path) -> None:
    """The project and the page's own files."""
    for link in ("train.py", "scripts", "configs", "sd_training"):
        (home / link).symlink_to(ROOT / link)
    for file, content in yaml_files(page(name)).items():
        (home / file).write_text(small(GUIDES[name], content), encoding="utf-8")


def processes(words: list[str], home: Path, count: int) -> str:
    """What a Python program prints in so many processes; forked, which saves five seconds of imports each."""
    shared = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
    with tempfile.TemporaryDirectory() as folder:
        errors, logs = Path(folder) / "errors", [Path(folder) / f"out{rank}" for rank in range(count)]
        given = [str(home), str(errors), *words]
        ranks = zip(logs, as_torchrun(count), strict=True)
        started = [shared_server().start(RUN_HERE, given, log, {**shared, **own}) for log, own in ranks]
        statuses = [process.wait(300) for process in started]
        said = errors.read_text()
        assert statuses == [0] * count, f"{shlex.join(words)}\n{said}"
        return "".join(log.read_text() for log in logs) + said


def of_the_hub(words: list[str], home: Path) -> str:
    """In place of `hf auth login`, and of `hf download`, which writes shards of the published names."""
    assert importlib.metadata.entry_points(group="console_scripts")["hf"]
    if words != ["auth", "login"]:
        assert words[:5] == ["download", "timm/imagenet-1k-wds", "--repo-type", "dataset", "--local-dir"]
        for part in ("train-0000", "train-0001", "validation-0000"):
            made = write_shards(home / words[5]) / "000.tar"
            made.rename(made.with_name(f"imagenet1k-{part}.tar"))
    return ""


def run(command: str, guide: Guide, home: Path, number: int) -> str:
    """A command or its stand-in, `number` times met before; what it prints."""
    text, _, file = small(guide, command).partition(" > ")
    program, *words = shlex.split(" ".join([text, *(more for part, more in guide.added.items() if part in text)]))
    if program == "hf":
        return of_the_hub(words, home)
    if program == "sbatch":
        return subprocess.run(["bash", "-n", *words], cwd=home, check=True, text=True, capture_output=True).stdout
    assert program in ("python", "torchrun"), command
    if program == "torchrun":
        assert re.match(r"torchrun --nproc_per_node \d (-m train|scripts/\w+\.py) ", command), command
        words = ["train.py", *words[4:]] if words[2] == "-m" else words[2:]
    if words[0] == "train.py":
        words.append(f"experiment.num_examples_to_see={BATCH * guide.processes * STEPS * (1 + number)}")
    said = processes(words, home, guide.processes if program == "torchrun" else 1)
    if file:
        (home / file).write_text(said, encoding="utf-8")
    return said


@pytest.mark.parametrize("name", GUIDES)
def test_every_command_runs_in_order(name: str, tmp_path: Path) -> None:
    guide, met, said = GUIDES[name], Counter[str](), ""
    open_page(name, tmp_path)
    guide.make(tmp_path)
    for command in commands(page(name)):
        said += run(command, guide, tmp_path, met[command])
        met[command] += 1
    assert f"resuming after optimizer step {STEPS} of {2 * STEPS}" in said
    reports = [f"runs/{run}/{file}" for run in guide.runs for file in ("report.html", "current_pipeline")]
    written = [*guide.written, *reports, "pictures/grid.png", "card/README.md"]
    assert [file for file in written if not (tmp_path / file).exists()] == []


@pytest.mark.parametrize("name", GUIDES)
def test_pages_name_what_exists(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own values, which are not those of the test above: no option is unknown or without effect."""
    text = page(name)
    assert problems(text) == []
    assert len(text.splitlines()) <= 120
    everything = "\n".join([*commands(text), *yaml_files(text).values()])
    assert [stands for stands in GUIDES[name].replaced if stands not in everything] == []
    open_page(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    for file, content in yaml_files(text).items():
        Path(file).write_text(content, encoding="utf-8")
    starts = [re.match(r"(?:python train\.py|torchrun .* -m train) (.*)", command) for command in commands(text)]
    configs = [
        load_config([word for word in shlex.split(start[1]) if word != "--dry-run"]) for start in starts if start
    ]
    assert configs and [warnings(config) for config in configs] == [[]] * len(configs)


def test_every_guide_is_run_and_in_the_readme() -> None:
    found = {path.stem for path in (ROOT / "docs").glob("guide_*.md")}
    assert found == {*GUIDES}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in GUIDES if f"](docs/{name}.md)" not in readme] == []


@pytest.mark.parametrize(
    "command",
    [
        "python scripts/no_such.py",
        "python train.py config=configs/no_such.yaml",
        "python scripts/report.py --no-such runs",
        "python scripts/index_dataset.py config=configs/templates/imagenet.yaml dataset.params.no_such=1",
        "rm -r runs",
    ],
)
def test_a_command_that_is_wrong_fails(command: str, tmp_path: Path) -> None:
    open_page("guide_from_scratch", tmp_path)
    with pytest.raises(AssertionError):
        run(command, GUIDES["guide_from_scratch"], tmp_path, 0)
