"""What DeepSpeed's engine keeps besides weights and optimizer state."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from sd_training.parallel.deepspeed import ZeroStage12Sharding


def sharding_of(scaler: object) -> ZeroStage12Sharding:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    return ZeroStage12Sharding(
        SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer, bit16_groups=[], loss_scaler=scaler))
    )


def scaler_after(overflows: list[bool], scaler: DynamicLossScaler | None = None) -> DynamicLossScaler:
    scaler = scaler or DynamicLossScaler(2.0**16, 2.0, 4, 1.0, 2, False, dtype=torch.half)
    for overflow in overflows:
        scaler.update_scale(overflow)
    return scaler


def test_the_loss_scale_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # only rank 0 prints
    before, after = [False, True, True, False, False], [False, False, True, False, False, False, False, True]
    stored = sharding_of(scaler_after(before)).loss_scale()
    resumed = scaler_after([])
    sharding_of(resumed).load_loss_scale(stored)
    assert resumed.cur_scale < 2.0**16
    uninterrupted = scaler_after([*before, *after])
    assert vars(scaler_after(after, resumed)) == vars(uninterrupted)


def test_only_fp16_has_a_dynamic_scale() -> None:
    fixed = LossScaler(1.0)
    assert sharding_of(fixed).loss_scale() == {}
    sharding_of(fixed).load_loss_scale({"cur_scale": 2.0})
    assert fixed.cur_scale == 1.0
