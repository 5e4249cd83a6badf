"""Features against those of the networks' own libraries: same weights, same pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model

from sd_training.config.schema import EvaluationConfig
from sd_training.errors import ConfigError
from sd_training.evaluation.networks import InceptionFeatures, load_clip, load_dinov2, load_inception, load_networks
from sd_training.training import scaled_pixels
from tests.makers import photograph
from tests.tiny_parts import tiny_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "inception.json"
INPUT = (np.add.outer(np.add.outer(3 * np.arange(70), 5 * np.arange(90)), 40 * np.arange(3)) % 256).astype(np.uint8)
"""[70, 90, 3]"""


def inception_weights(layers: dict[str, list[int]]) -> dict[str, Tensor]:
    """Random ones that keep features of about one size, and norms that do something."""
    generator, tensors = np.random.default_rng(0), dict[str, NDArray[Any]]()
    for name, (out, *rest) in layers.items():
        tensors[f"{name}.conv.weight"] = generator.standard_normal((out, *rest)) * np.sqrt(1.6 / np.prod(rest))
        for key, low, high in (("weight", 0.8, 1.2), ("bias", -0.1, 0.3), ("running_mean", -0.1, 0.1)):
            tensors[f"{name}.bn.{key}"] = generator.uniform(low, high, out)
        tensors[f"{name}.bn.running_var"] = generator.uniform(0.8, 1.2, out)
    return {name: torch.from_numpy(array).float() for name, array in tensors.items()}


def test_inception_gives_the_features_of_torch_fidelity(tmp_path: Path) -> None:
    """Recorded from torch-fidelity 0.4.0, with the same random weights; rounding is that of 94 convolutions in fp32."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    weights = inception_weights(golden["layers"])
    save_file({**weights, "fc.weight": torch.zeros(2, 2)}, tmp_path / "inception.safetensors")
    network = load_inception(str(tmp_path / "inception.safetensors"))
    features = network([Image.fromarray(INPUT)])
    assert features.shape == (1, 2048)
    found = {number: float(features[0, int(number)]) for number in golden["features"]}
    scale = max(map(abs, golden["features"].values()))
    assert found == pytest.approx(golden["features"], abs=2e-6 * scale)
    pixels = scaled_pixels(torch.from_numpy(INPUT).permute(2, 0, 1)[None])
    with torch.no_grad():
        torch.testing.assert_close(InceptionFeatures(network.module)(pixels), features, rtol=0, atol=1e-5 * scale)


def test_inception_needs_all_layers_and_opens_no_pickle(tmp_path: Path) -> None:
    layers = json.loads(GOLDEN.read_text(encoding="utf-8"))["layers"]
    few = inception_weights(dict(list(layers.items())[:3]))
    save_file(few, tmp_path / "few.safetensors")
    torch.save(few, tmp_path / "published.pth")
    for name in ("few.safetensors", "published.pth", "none.safetensors"):
        with pytest.raises(ConfigError, match=rf"evaluation.inception: .*{name} cannot be loaded .*convert_checkpoint"):
            load_inception(str(tmp_path / name))


def test_clip_gives_the_embeddings_of_transformers(tmp_path: Path) -> None:
    """Of a square picture: transformers' processor cuts others."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny_tokenizer()
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "projection_dim": 8}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = {**shape, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**shape, "image_size": 32, "patch_size": 8}))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    network, pictures = load_clip(str(tmp_path)), [photograph(100, 100, number) for number in range(2)]
    texts = ["a cat", "a much longer caption with words, which is cut at the length of the model"]
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        expected = model.eval()(**processor(pictures, return_tensors="pt"), **tokens)
    assert network.encode_texts is not None
    for found, wanted in (
        (network(pictures), expected.image_embeds),
        (network.encode_texts(texts), expected.text_embeds),
    ):
        torch.testing.assert_close(torch.nn.functional.normalize(found), wanted)


def test_dinov2_gives_the_class_token(tmp_path: Path) -> None:
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14)
    model = Dinov2Model(config).eval()
    model.save_pretrained(tmp_path)
    picture = photograph(300, 200)
    small = np.asarray(picture.resize((224, 224), Image.Resampling.BICUBIC)).astype(np.float64) / 255
    pixels = (small - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    with torch.no_grad():
        hidden = model(torch.from_numpy(pixels).float().permute(2, 0, 1)[None]).last_hidden_state
    network = load_dinov2(str(tmp_path))
    torch.testing.assert_close(network([picture]), hidden[:, 0])
    assert network.fingerprint() == load_dinov2(str(tmp_path)).fingerprint()
    with torch.no_grad():
        model.layernorm.weight[0] += 1e-3
    model.save_pretrained(tmp_path)
    assert network.fingerprint() != load_dinov2(str(tmp_path)).fingerprint()


def test_a_network_that_is_missing_is_named(tmp_path: Path) -> None:
    config = EvaluationConfig(clip=str(tmp_path), dinov2=str(tmp_path))
    loaders = load_networks(config)
    assert list(loaders) == ["dinov2", "clip"]
    for name, load in loaders.items():
        with pytest.raises(ConfigError, match=f"evaluation.{name}: "):
            load()
