"""AdamW against its equations, and the on-device skip of a non-finite step."""

import torch

from sd_training.config.schema import OptimizerConfig, OptimizerParams
from sd_training.optim.optimizers import make_optimizer


def test_adamw_first_step_agrees_with_the_paper() -> None:
    params = OptimizerParams(learning_rate=0.1, beta1=0.9, beta2=0.98, weight_decay=0.01, epsilon=1e-8)
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    weight.grad = torch.tensor([0.5, -3.0], dtype=torch.float64)
    before = weight.detach().clone()
    make_optimizer(OptimizerConfig(params=params), [weight], learning_rate=0.1, fused=True).step()
    # After one step both bias-corrected averages are g and g², so the update is g / (|g| + ε).
    expected = before - 0.1 * 0.01 * before - 0.1 * weight.grad / (weight.grad.abs() + 1e-8)
    torch.testing.assert_close(weight.detach(), expected)


def test_found_inf_skips_weights_state_and_step_count() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(OptimizerConfig(), [weight], learning_rate=0.1, fused=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    after_one = weight.detach().clone()
    state = {name: value.clone() for name, value in optimizer.state[weight].items()}
    weight.grad = torch.full((3,), float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(weight.detach(), after_one)
    assert all(torch.equal(optimizer.state[weight][name], value) for name, value in state.items())
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    assert not torch.equal(weight.detach(), after_one)
