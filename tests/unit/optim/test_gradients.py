"""Every optimizer: a marked step changes nothing, the closure runs first, and a restored state continues exactly."""

import copy
import json
from typing import Any

import pytest
import torch

from sd_training.checkpoint.save import join_tensors, split_tensors
from sd_training.parallel.strategies import ReplicatedSharding
from tests.unit.optim.toy import NAMES, Toy, build, config, make, named, set_gradients, toy, train, values

every_optimizer = pytest.mark.parametrize("name", NAMES)
pytestmark = pytest.mark.usefixtures("any_device")


def prodigy_moves_sooner(name: str) -> dict[str, float]:
    return {"d0": 1e-2} if name == "prodigy" else {}


def through_a_file(state: Any) -> Any:
    plain, tensors = split_tensors(list(state["state"].values()))  # a checkpoint's are by name
    values = join_tensors(json.loads(json.dumps(plain)), {k: v.clone() for k, v in tensors.items()})
    return state | {"state": dict(zip(state["state"], values, strict=True))}


def same(first: Any, second: Any) -> bool:
    (plain, tensors), (other_plain, other_tensors) = (
        split_tensors([list(state["state"].values()), state["param_groups"]]) for state in (first, second)
    )
    return plain == other_plain and all(torch.equal(tensors[k], other_tensors[k]) for k in tensors | other_tensors)


def load(optimizer: Any, saved: Any) -> None:
    """As a run resumes."""
    ReplicatedSharding([], optimizer, 1).load_optimizer([], lambda _: {}, saved.state_dict()["param_groups"])


@every_optimizer
def test_a_marked_step_changes_neither_weights_nor_state(name: str) -> None:
    parameters = toy()
    optimizer = build(name, parameters, **prodigy_moves_sooner(name))
    train(optimizer, parameters, 0, 2)
    weights, state = values(parameters), copy.deepcopy(optimizer.state_dict())
    for _, parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(parameters), weights, strict=True))
    assert same(optimizer.state_dict(), state)
    set_gradients(parameters, 2)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(values(parameters), weights, strict=True))


@every_optimizer
def test_a_marked_first_step_changes_nothing(name: str) -> None:
    parameters = toy()
    optimizer = build(name, parameters)
    weights = values(parameters)
    set_gradients(parameters, 0)
    parameters[0][1].grad.fill_(float("inf"))  # type: ignore[union-attr]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(parameters), weights, strict=True))


@every_optimizer
def test_skipping_is_as_if_the_step_had_not_been(name: str) -> None:
    skipped, plain = toy(), toy()
    first, second = build(name, skipped), build(name, plain)
    for step in range(4):
        set_gradients(skipped, step)
        first.found_inf = torch.tensor(float(step == 1))
        first.step()
        if step != 1:
            set_gradients(plain, step)
            second.step()
    assert all(torch.equal(a, b) for a, b in zip(values(skipped), values(plain), strict=True))


@every_optimizer
def test_the_closure_runs_first_once_with_gradients_and_may_mark_the_step(name: str) -> None:
    parameters = toy()
    optimizer = build(name, parameters)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = sum((parameter * parameter).sum() for _, parameter in parameters)
        loss.backward()
        optimizer.found_inf = torch.tensor(float(len(calls) == 1))
        return loss

    weights = values(parameters)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(sum((w * w).sum().item() for w in weights))
    assert all(torch.equal(a, b) for a, b in zip(values(parameters), weights, strict=True))
    optimizer.step(closure)
    assert calls == [True, True]
    assert not torch.equal(parameters[0][1], weights[0])


@every_optimizer
def test_a_restored_state_continues_exactly(name: str) -> None:
    straight = toy()
    options = prodigy_moves_sooner(name) | {"no_decay_on_norms_and_biases": True}
    optimizer = build(name, straight, **options)
    train(optimizer, straight, 0, 3)
    resumed = toy()
    for (_, parameter), value in zip(resumed, values(straight), strict=True):
        parameter.data.copy_(value)
    second = build(name, resumed, **options)
    second.load_state_dict(through_a_file(copy.deepcopy(optimizer.state_dict())))
    train(optimizer, straight, 3, 6)
    train(second, resumed, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(values(straight), values(resumed), strict=True))
    assert same(optimizer.state_dict(), second.state_dict())


@every_optimizer
def test_a_resumed_run_follows_its_own_rates_of_parts(name: str) -> None:
    rates = {} if name == "prodigy" else {"rates_by_part": {"denoiser": 0.005}}
    optimizer, second = build(name, toy()), build(name, toy(), **rates)
    wanted = [group["lr_factor"] for group in second.param_groups]
    load(second, optimizer)
    assert [group["lr_factor"] for group in second.param_groups] == wanted


@every_optimizer
def test_a_resumed_run_follows_its_own_hyper_parameters(name: str) -> None:
    optimizer, second = build(name, toy()), build(name, toy(), weight_decay=0.5, beta1=0.5, epsilon=1e-3, d_coef=3.0)
    options = ("weight_decay", "betas", "eps", "d_coef")
    wanted = [{key: group[key] for key in options if key in group} for group in second.param_groups]
    assert any(group["weight_decay"] == 0.5 for group in wanted)
    load(second, optimizer)
    assert [{key: group[key] for key in group.keys() & set(options)} for group in second.param_groups] == wanted


@every_optimizer
def test_weights_without_gradient_are_left_alone(name: str) -> None:
    parameters = toy()
    optimizer = build(name, parameters)
    weights = values(parameters)
    set_gradients(parameters, 0)
    for _, parameter in parameters[2:]:
        parameter.grad = None
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(values(parameters), weights, strict=True)]
    assert moved == [True, True, False, False, False, False, False, False]


@every_optimizer
def test_a_part_without_any_gradient_is_left_alone(name: str) -> None:
    trained, idle = toy(), named(Toy(), "text_encoder")
    optimizer = build(name, [*trained, *idle])
    weights = values(idle)
    train(optimizer, trained, 0, 2)
    assert all(torch.equal(a, b) for a, b in zip(values(idle), weights, strict=True))


def test_adamw_without_the_fused_kernel_skips_as_well() -> None:
    parameters = toy()
    optimizer: Any = make(config("adamw"), parameters, learning_rate=0.01, fused=False)
    weights = values(parameters)
    set_gradients(parameters, 0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(parameters), weights, strict=True))
