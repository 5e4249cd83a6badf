"""8-bit AdamW: refused without CUDA; its state is small and its steps are near those of fp32."""

import copy

import pytest
import torch
from torch import nn

from sd_training.errors import ConfigError
from tests.unit.optim.toy import build, toy, train, values


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: adamw_8bit needs a CUDA device"):
        build("adamw_8bit", toy())


def large() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [("denoiser.linear.weight", nn.Parameter(torch.randn(64, 128)))]


@pytest.mark.usefixtures("any_device")
def test_steps_are_near_those_of_fp32_and_state_is_a_quarter() -> None:
    eight, full, start = large(), large(), large()
    optimizer = build("adamw_8bit", eight)
    train(optimizer, eight, 0, 5)
    train(build("adamw", full), full, 0, 5)
    moved = (full[0][1] - start[0][1]).detach()
    error = (eight[0][1] - full[0][1]).detach()
    assert error.norm() < 0.1 * moved.norm()
    state = optimizer.state[eight[0][1]]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8


@pytest.mark.usefixtures("any_device")
def test_a_restored_8_bit_state_continues_exactly() -> None:
    straight, resumed = large(), large()
    optimizer = build("adamw_8bit", straight)
    train(optimizer, straight, 0, 3)
    resumed[0][1].data.copy_(straight[0][1].data)
    second = build("adamw_8bit", resumed)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, straight, 3, 6)
    train(second, resumed, 3, 6)
    assert torch.equal(values(straight)[0], values(resumed)[0])
