"""The average against its closed form, and the scope that lends it out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sd_training.callbacks.ema import Ema, WeightStaging, decay_at, export_weights, fits_on_device, gamma_of
from sd_training.config.schema import EmaConfig, OptimizerConfig
from sd_training.errors import CheckpointError
from sd_training.optim import Optimization
from sd_training.parallel.strategies import ReplicatedSharding, TrainingStrategy
from sd_training.training import TrainedModule


class StrategyFacts(TrainingStrategy):
    """Where the weights of one process lie."""

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.sharding = ReplicatedSharding(parameters, optimizer, 1)


class TrainerFacts:
    """The facts of a trainer that the average asks for; a whole Lightning trainer adds nothing to this test."""

    is_global_zero = True
    world_size = 1
    max_steps = 100
    should_stop = False
    global_step = 0

    def __init__(self, module: TrainedModule) -> None:
        self.optimizers = (torch.optim.AdamW(module.parameters()),)
        self.strategy = StrategyFacts(module.parameters(), self.optimizers[0])


def module_with(value: float) -> TrainedModule:
    network = nn.Linear(2, 1)
    nn.init.constant_(network.weight, value)
    module = TrainedModule(network, Optimization(OptimizerConfig(), 0.1, lambda step: 1.0))
    module._trainer = TrainerFacts(module)  # type: ignore[assignment]
    return module


def set_weight(module: TrainedModule, value: float) -> None:
    with torch.no_grad():
        module.network.weight.fill_(value)


@pytest.mark.parametrize("is_staged, device", [(False, "auto"), (False, "cpu"), (False, "cuda"), (True, "cpu")])
@pytest.mark.parametrize("every", [1, 3])
def test_average_equals_the_recurrence_in_float64(every: int, is_staged: bool, device: Literal["cpu", "cuda"]) -> None:
    config = EmaConfig(decay=0.9, update_every=every, warmup=False, device=device)
    ema, module = Ema(config, Path()), module_with(0.0)
    ema.staging = WeightStaging() if is_staged else None  # as on a device: the weights go on changing meanwhile
    ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    expected = 0.0
    for step in range(1, 13):
        set_weight(module, float(step))
        ema.on_optimizer_step(module._trainer, module, step)  # type: ignore[arg-type]
        if step % every == 0:
            expected = 0.9**every * expected + (1 - 0.9**every) * step
    ema.finish_update()
    torch.testing.assert_close(ema.shards["network.weight"], torch.full((1, 2), expected))


def test_on_the_device_an_average_has_the_layout_of_its_weight_and_full_precision() -> None:
    """Another layout would take one kernel per tensor, and more than one call covers 64 tensors."""
    layers = [nn.Conv2d(3, 4, 3) for _ in range(40)]
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last).to(torch.bfloat16)
    module = TrainedModule(network, Optimization(OptimizerConfig(), 0.1, lambda step: 1.0))
    module._trainer = TrainerFacts(module)  # type: ignore[assignment]
    ema = Ema(EmaConfig(decay=0.75, warmup=False, device="cuda"), Path())
    ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    before = {name: parameter.detach().double() for name, parameter in network.named_parameters()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    ema.on_optimizer_step(module._trainer, module, 1)  # type: ignore[arg-type]
    for name, parameter in network.named_parameters():
        average = ema.shards[f"network.{name}"]
        assert average.stride() == parameter.stride() and average.dtype == torch.float32
        expected = 0.75 * before[name] + 0.25 * parameter.detach().double()
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=0)


def test_auto_moves_the_averages_where_a_tenth_stays_free(caplog: pytest.LogCaptureFixture) -> None:
    assert fits_on_device(needed=20, free=30, total=100)
    assert not fits_on_device(needed=21, free=30, total=100)
    for free, place in ((34, "on the device"), (33, "on the CPU")):  # 3 parameters, average and track: 24 bytes
        ema, module = Ema(EmaConfig(sigma_rels=[0.1]), Path()), module_with(2.0)
        ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]
        old = ema.shards["network.weight"]
        weights = {f"network.{name}": p.detach() for name, p in module.network.named_parameters()}
        with caplog.at_level("INFO"):
            ema._choose_device(weights, free, 100)
        assert f"EMA: {place}" in caplog.text
        new = ema.shards["network.weight"]
        assert torch.equal(new, old) and (new.data_ptr() != old.data_ptr()) == (free == 34)
        caplog.clear()


class CountBytes(TorchDispatchMode):
    """Bytes that operations of this thread read and write; views touch none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            written = [] if func is torch.ops.aten.copy_.default else args[0] if func._schema.is_mutable else result
            self.count += sum(t.nbytes for t in tree_leaves((args, written)) if isinstance(t, torch.Tensor))
        return result


@pytest.mark.parametrize("is_staged, device, per_parameter", [(False, "cuda", 12), (True, "cpu", 8)])
def test_bytes_per_parameter_on_the_training_thread(
    is_staged: bool, device: Literal["cpu", "cuda"], per_parameter: int
) -> None:
    """In place: weights and average are read, the average is written. Staged: the copy alone; threads do the rest."""
    ema, module = Ema(EmaConfig(device=device), Path()), module_with(1.0)
    ema.staging = WeightStaging() if is_staged else None
    ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    for step in (1, 2):
        with CountBytes() as counter:
            ema.on_optimizer_step(module._trainer, module, step)  # type: ignore[arg-type]
        ema.finish_update()
    assert counter.count == per_parameter * sum(p.numel() for p in module.network.parameters())


def test_warmup_ramp() -> None:
    config = EmaConfig(decay=0.9999)
    assert decay_at(1, config) == pytest.approx(2 / 11)
    assert decay_at(90, config) == pytest.approx(0.91)
    assert decay_at(10**9, config) == 0.9999
    assert decay_at(90, EmaConfig(decay=0.9999, update_every=10)) == pytest.approx(0.91**10)


def test_scope_lends_the_average_and_gives_the_weights_back_to_the_bit() -> None:
    ema, module = Ema(EmaConfig(decay=0.5, warmup=False), Path()), module_with(0.0)
    ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    set_weight(module, 1 / 3)
    own = module.network.weight.detach().clone()
    ema.on_optimizer_step(module._trainer, module, 1)  # type: ignore[arg-type]
    module.network.train()
    with export_weights(module, ema):
        torch.testing.assert_close(module.network.weight.detach(), torch.full((1, 2), 1 / 6))
        assert not module.network.training
    assert torch.equal(module.network.weight, own)
    assert module.network.training


def test_without_an_average_the_own_weights_are_exported() -> None:
    module = module_with(2.0)
    with export_weights(module, None):
        assert not module.network.training
        assert float(module.network.weight[0, 0].detach()) == 2.0
    assert module.network.training


def test_state_round_trip_continues_the_average() -> None:
    first, module = Ema(EmaConfig(), Path()), module_with(1.0)
    first.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    averages = first.averages
    second = Ema(EmaConfig(), Path())
    set_weight(module, 5.0)
    second.load_averages(module._trainer, module, averages)  # type: ignore[arg-type]
    second.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    assert float(second.shards["network.weight"][0, 0]) == 1.0


def test_an_average_that_the_checkpoint_lacks_begins_with_its_weights() -> None:
    ema, module = Ema(EmaConfig(), Path()), module_with(3.0)
    ema.load_averages(module._trainer, module, {})  # type: ignore[arg-type]
    assert float(ema.shards["network.weight"][0, 0]) == 3.0


def test_average_of_another_network_is_refused(tmp_path: Path) -> None:
    ema, module = Ema(EmaConfig(), Path(), initial={"other": torch.zeros(1)}), module_with(1.0)
    with pytest.raises(CheckpointError, match="do not fit the network"):
        ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]


def test_a_track_follows_its_power_function_beside_the_average() -> None:
    ema, module = Ema(EmaConfig(sigma_rels=[0.1], update_every=2), Path()), module_with(0.0)
    ema.on_train_start(module._trainer, module)  # type: ignore[arg-type]
    exponent = gamma_of(0.1) + 1
    expected = 0.0
    for step in range(1, 13):
        set_weight(module, float(step))
        ema.on_optimizer_step(module._trainer, module, step)  # type: ignore[arg-type]
        if step % 2 == 0:
            beta = (1 - 2 / step) ** exponent
            expected = beta * expected + (1 - beta) * step
    track = ema.averages["ema-sigma_rel=0.100"]["network.weight"]
    torch.testing.assert_close(track, torch.full((1, 2), expected))
    assert not torch.equal(track, ema.shards["network.weight"])


def test_a_track_that_the_checkpoint_lacks_is_named() -> None:
    module = module_with(1.0)
    stored = {"ema": {"network.weight": torch.zeros(1, 2), "network.bias": torch.zeros(1)}}
    said = r"ema\.sigma_rels: ema-sigma_rel=0\.100, but the checkpoint has no such .* or model\.vae\.pretrained\)"
    with pytest.raises(CheckpointError, match=said):
        Ema(EmaConfig(sigma_rels=[0.1]), Path()).load_averages(module._trainer, module, stored)  # type: ignore[arg-type]
