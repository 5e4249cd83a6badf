"""The configs of models and templates that ship, and pictures that any of them can be tried on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import makers
from tests.integration.training import ROOT

_UNETS = ("sd14", "sd15", "sd2_base", "sd21_v", "sdxl_base")
_OTHERS = ("sd3_medium", "pixart_sigma", "flux", "mmdit_rope", "sana_1600m", "z_image", "qwen_image", "flux2_klein")
MODELS = (*_UNETS, *_OTHERS)
FROM_SCRATCH = {"imagenet": "sd15", "sd2_base_stage1": "sd2_base", "sd3_stage1": "sd3_medium"}
"""Template → the model that it trains from random weights."""
CONTINUED = {
    **{"mmdit_rope_stage2": "mmdit_rope", "mmdit_rope_stage3": "mmdit_rope", "sd2_base_stage2": "sd2_base"},
    **{"sd3_stage2": "sd3_medium", "sd3_stage3": "sd3_medium", "sdxl_multi_aspect": "sdxl_base"},
}
"""Template → the model that it goes on with, from a pipeline."""
FINETUNED = ("dreambooth_full", "dreambooth_lora", "lora_flux", "lora_sdxl")
"""Templates with data of their own kind; they have tests of their own."""
AUTOENCODERS = ("vae_kl_f8", "vae_decoder")
"""Templates that train an autoencoder; tried in test_autoencoder.py."""


def path_of(name: str) -> Path:
    folder = "models" if name in MODELS else "templates"
    return ROOT / "configs" / folder / f"{name}.yaml"


def read(name: str) -> Any:
    return yaml.safe_load(path_of(name).read_text(encoding="utf-8"))


def family_name(name: str) -> str:
    kinds = ("sdxl", "sd3", "pixart", "flux2", "flux", "mmdit_rope", "sana", "z_image", "qwen_image")
    return next((kind for kind in kinds if name.startswith(kind)), "stable_diffusion")


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in shipped files are relative to the project."""
    monkeypatch.chdir(ROOT)


def write_shards(folder: Path) -> Path:
    """Pictures with everything that any shipped file asks of a sample."""
    told = {"original_width": 2048, "original_height": 2048, "punsafe": 0.0, "pwatermark": 0.0}
    samples = [
        {
            "__key__": f"{i:06d}",
            "jpg": makers.encode(makers.picture(i, *((40, 32), (32, 40), (36, 36))[i % 3])),
            "txt": f"a {makers.COLOURS[i % 3]} picture",
            "cls": i % 10,
            "json": json.dumps(told).encode(),
        }
        for i in range(24)
    ]
    makers.write_shard(folder / "000.tar", samples)
    return folder
