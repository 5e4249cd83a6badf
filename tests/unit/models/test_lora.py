"""Adapters: what they add, what they compute merged, in diffusers, and with narrow frozen weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sd_training.config.schema import ConditioningConfig, LoraConfig, ModelConfig, ObjectiveConfig
from sd_training.errors import ConfigError
from sd_training.export.pipeline import LoraExport, differences, export_pipeline
from sd_training.models.execution import compile_blocks, recompute_activations
from sd_training.models.families import load_family
from sd_training.models.family import Family, blank_batch
from sd_training.models.lora import (
    Int8Linear,
    adapt,
    attach_adapters,
    file_tensors,
    frozen_linear,
    merge,
    narrow_base,
    round_base,
    scale_of,
)
from tests.family_makers import PIPELINES

Adapted = tuple[Path, Family, LoraConfig]
CPU = torch.device("cpu")
LORA = LoraConfig(rank=3, alpha=6.0, text_encoder=False)
CASES: list[tuple[str, LoraConfig]] = [
    ("stable_diffusion", LORA.replace(text_encoder=True)),
    # Kernels of 1 × 1 and 3 × 3, and the layers after attention.
    ("stable_diffusion", LORA.replace(targets=["to_k", "proj_in", "conv1", "ff.net.0.proj", "ff.net.2"])),
    ("sdxl", LORA.replace(text_encoder=True, init="gaussian")),
    ("sd3", LORA),
    ("sd3", LORA.replace(targets=["ff.net.2", "to_v", "proj_out"])),
    ("pixart", LORA),
    ("flux", LORA),
    ("mmdit_rope", LORA),
    ("sana", LORA),
    ("qwen_image", LORA),
    ("flux2", LORA),
    ("z_image", LORA),
]


def save(name: str, folder: Path) -> Path:
    """The pipeline without a weight that is 0, so that all of them take part in the result."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline: Any = PIPELINES[name]()
        denoiser = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
        for parameter in denoiser.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    pipeline.save_pretrained(folder)
    return folder


def load(folder: Path) -> Family:
    model = ModelConfig(pretrained=str(folder))
    family = load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0)
    for network in family.networks().values():
        network.eval()
    return family


def results(family: Family, *, has_gradients: bool = False) -> dict[str, Tensor]:
    """What the denoiser and the text encoders give."""
    generator, found = torch.Generator().manual_seed(1), {}
    noised, conditioning = blank_batch(family, 24, 16, 2, CPU)
    for tensor in (noised.noised_latents, *conditioning.states, conditioning.pooled):
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    noised.timesteps.fill_(7.0)
    with torch.set_grad_enabled(has_gradients):
        found["denoiser"] = family.predict(family.denoiser, noised, conditioning)
        for name, encoder in family.text_encoders().items():
            found[name] = encoder(torch.arange(16)[None])[0]
    return found


def gradients(family: Family) -> dict[str, Tensor]:
    """Of the denoiser's adapters in training, under autocast, and what they follow from."""
    family.denoiser.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        prediction = results(family, has_gradients=True)["denoiser"].float()
    prediction.square().mean().backward()
    own = {name: p.grad for name, p in family.denoiser.named_parameters() if p.grad is not None}
    return {"denoiser": prediction.detach(), **own}


def trained(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].targets or 'attention'}")
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The folder of a pipeline, and what was loaded from it with adapters that are not 0 any more."""
    name, config = request.param
    folder = save(name, tmp_path_factory.mktemp(name) / "pipeline")
    family = load(folder)
    before = results(family)
    attach_adapters(family, config, seed=0)
    assert all(torch.equal(value, before[key]) for key, value in results(family).items())
    generator = torch.Generator().manual_seed(2)
    for network in family.trained_networks(config.text_encoder).values():
        for parameter in (p for n, p in network.named_parameters() if "lora_B" in n):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return folder, family, config


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-6 * max(1.0, float(value.abs().max())), key


def test_an_adapted_layer_gets_r_times_in_plus_out(adapted: Adapted) -> None:
    folder, family, config = adapted
    for part, network in family.trained_networks(config.text_encoder).items():
        base: dict[str, Any] = dict(load(folder).parts[part].named_modules())
        layers = {name.partition(".lora_A")[0] for name in trained(network) if "lora_A" in name}
        wanted = 0
        for layer in (base[name] for name in layers):
            of_kernel = layer.weight[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
            wanted += config.rank * (layer.weight.shape[1] * of_kernel + layer.weight.shape[0])
        assert layers and sum(p.numel() for p in trained(network).values()) == wanted
        if part == family.denoiser_part and config.targets:
            assert {t for t in config.targets for name in layers if f".{name}".endswith(f".{t}")} == {*config.targets}


def test_merged_weights_compute_what_the_adapters_compute(adapted: Adapted) -> None:
    folder, family, config = adapted
    merged = load(folder)
    unmerged = results(merged)
    for part, network in family.trained_networks(config.text_encoder).items():
        merge(merged.parts[part], trained(network), scale_of(config))
    expected = results(family)
    assert (expected["denoiser"] - unmerged["denoiser"]).abs().max() > 1e-2
    assert_close(results(merged), expected)


def test_diffusers_loads_the_file(adapted: Adapted, tmp_path: Path) -> None:
    folder, family, config = adapted
    parts = family.trained_networks(config.text_encoder).items()
    tensors = {n: t for part, net in parts for n, t in file_tensors(part, trained(net), scale_of(config)).items()}
    export = LoraExport(tensors, {"modelspec.title": "a title"}, None)
    export_pipeline(export, tmp_path / "lora")
    assert [path.name for path in (tmp_path / "lora").iterdir()] == [LORA_WEIGHT_NAME_SAFE]
    assert load_file(tmp_path / "lora" / LORA_WEIGHT_NAME_SAFE).keys() == tensors.keys()
    with safe_open(tmp_path / "lora" / LORA_WEIGHT_NAME_SAFE, "pt") as file:
        assert file.metadata() == {"format": "pt", "modelspec.title": "a title"}
    if family.denoiser_part == "unet":  # the names that ComfyUI asks for (comfy/lora.py)
        layers = {(part, n.partition(".lora_A")[0]) for part, net in parts for n in trained(net) if "lora_A" in n}
        begins = {
            "unet": "lora_unet_",
            "text_encoder": "lora_te1_text_model_",
            "text_encoder_2": "lora_te2_text_model_",
        }
        wanted = {f"{begins[part]}{layer.removeprefix('text_model.').replace('.', '_')}" for part, layer in layers}
        ends = ("alpha", "lora_down.weight", "lora_up.weight")
        assert tensors.keys() == {f"{layer}.{end}" for layer in wanted for end in ends}
    name = next(iter(tensors))
    other = LoraExport({**tensors, name: tensors[name] + 1}, {}, None)
    assert differences(other, tmp_path / "lora") == [f"{name} differs"]
    if family.name == "pixart":  # has no such loader
        return
    theirs = load(folder)
    theirs.pipeline().load_lora_weights(tmp_path / "lora", local_files_only=True)
    assert_close(results(theirs), results(family))


def test_narrow_frozen_weights_give_the_same_bits_under_autocast(adapted: Adapted) -> None:
    _, family, config = adapted
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(family)
        for network in family.trained_networks(config.text_encoder).values():
            narrow_base(network, torch.bfloat16)
        found = results(family)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    kinds = {p.dtype for p in trained(family.denoiser).values()}
    assert kinds == {torch.float32} and family.denoiser.dtype == torch.float32
    assert any(p.dtype == torch.bfloat16 for p in family.denoiser.parameters())


def test_weights_of_8_bits_compute_what_their_rounded_values_compute(adapted: Adapted) -> None:
    _, family, _ = adapted
    family.freeze_unread()
    places = frozen_linear(family.blocks())
    round_base(family.blocks())
    found = gradients(family)
    assert places and not frozen_linear(family.blocks())
    for parent, name, layer in places:
        rounded = getattr(parent, name)
        assert isinstance(rounded, Int8Linear)
        value, step = rounded.weight * rounded.scale, layer.weight.abs().amax(1, keepdim=True).float() / 127
        # Half a step; and a quotient of up to 127, its factor and the product are rounded to float32.
        assert ((value - layer.weight).abs() <= step * (0.5 + 127 * 2**-22)).all()
        layer.weight = nn.Parameter(value, requires_grad=False)
        setattr(parent, name, layer)
    expected = gradients(family)
    assert found.keys() == expected.keys() and len(found) == 1 + len(trained(family.denoiser))
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_weights_of_8_bits_are_not_kept_multiplied_out() -> None:
    """Nor are rows of zeros divided by zero."""
    layer, kept = nn.Linear(8, 6).requires_grad_(False), list[Tensor]()
    layer.weight[2] = 0
    network = Int8Linear(layer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        network(torch.ones(3, 8, requires_grad=True))
    assert {t.dtype: t.numel() for t in kept} == {torch.int8: 48, torch.float32: 6}
    assert (network.weight[2] == 0).all() and network(torch.ones(8)).isfinite().all()


def test_a_compiled_block_gives_adapters_the_same_gradients() -> None:
    """Beside weights of 8 bits, and recomputed. C++ is not generated, which takes minutes."""
    network = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 6))
    adapt(network, "unet", ["0", "2"], LoraConfig(rank=2, init="gaussian"), seed=0)
    for parameter in (p for name, p in network.named_parameters() if "lora_B" in name):
        nn.init.constant_(parameter, 0.3)
    round_base([network])
    recompute_activations([network])
    inputs, found = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), []
    for is_compiled in (False, True):
        if is_compiled:
            torch._dynamo.reset()
            compile_blocks([network], num_sizes=1, backend="aot_eager")
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = network(inputs).float()
        (output - 1).square().mean().backward()
        found.append([output, *(p.grad for p in network.parameters() if p.requires_grad)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for value, other in zip(*found, strict=True):
        torch.testing.assert_close(other, value, rtol=0, atol=2**-8 * float(value.abs().max()))


def test_a_target_that_is_not_there_is_named() -> None:
    network = nn.ModuleDict({"to_q": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    for target, said in (("to_qq", "did you mean 'to_q'"), ("norm", "unet has no linear layer or convolution")):
        with pytest.raises(ConfigError, match=rf"model\.lora\.targets: .*{said}"):
            adapt(network, "unet", [target], LoraConfig(rank=1), seed=0)


def test_full_rank_reaches_the_loss_of_all_weights() -> None:
    """Least squares of a linear layer, whose smallest loss is known; rank 1 stays above it."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = torch.randn(64, 6, generator=generator), torch.randn(64, 4, generator=generator)
    best = torch.linalg.lstsq(inputs, outputs).solution
    smallest = (inputs @ best - outputs).square().mean()
    ratios = []
    for rank in (4, 1):
        network = nn.Sequential(nn.Linear(6, 4, bias=False))
        adapt(network, "unet", ["0"], LoraConfig(rank=rank), seed=0)
        optimizer = torch.optim.LBFGS([p for p in network.parameters() if p.requires_grad], max_iter=500)

        def loss(network: nn.Module = network, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            error = (network(inputs) - outputs).square().mean()
            error.backward()
            return error

        optimizer.step(loss)  # type: ignore[arg-type]
        ratios.append(float(loss().detach() / smallest))
    assert ratios[0] == pytest.approx(1, abs=1e-4) and ratios[1] > 1.01, ratios


def test_the_first_adapters_follow_from_the_seed(tmp_path: Path) -> None:
    folder, found = save("stable_diffusion", tmp_path / "pipeline"), []
    for seed in (0, 0, 1):
        family = load(folder)
        attach_adapters(family, LORA, seed=seed)
        found.append(trained(family.denoiser))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not any(torch.equal(found[0][name], found[2][name]) for name in found[0] if "lora_A" in name)
