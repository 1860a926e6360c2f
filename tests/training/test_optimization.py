from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from calibrant.training.optimization import (
    OPTIMIZERS,
    SCHEDULES,
    adam,
    adamw,
    constant,
    cosine,
    linear,
    multistep,
    sgd,
)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(("make", "vectors"), [(sgd, True), (adam, True), (adamw, False)])
def test_which_parameters_decay(make: object, vectors: bool) -> None:
    model = network()
    for decay_vectors in (None, True, False):
        options = {} if decay_vectors is None else {"decay_vectors": decay_vectors}
        optimizer = make(model, weight_decay=0.3, **options)  # type: ignore[operator]
        decays = {
            id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]
        }
        assert len(decays) == len(list(model.parameters()))
        for parameter in model.parameters():
            all_decay = vectors if decay_vectors is None else decay_vectors
            assert decays[id(parameter)] == (0.3 if all_decay or parameter.ndim > 1 else 0.0)


def test_frozen_parameters_are_left_out() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_options_reach_the_optimizer() -> None:
    model = network()
    assert (
        sgd(model, lr=0.3, momentum=0.8, nesterov=True).defaults.items()
        >= {
            "lr": 0.3,
            "momentum": 0.8,
            "nesterov": True,
        }.items()
    )
    assert adam(model, betas=(0.5, 0.6)).defaults["betas"] == (0.5, 0.6)
    assert adamw(model, lr=0.2).defaults["lr"] == 0.2
    assert set(OPTIMIZERS) == {"sgd", "adam", "adamw"}


def test_decay_of_adamw_is_decoupled() -> None:
    weight = nn.Linear(2, 1, bias=False)
    before = weight.weight.detach().clone()
    optimizer = adamw(weight, lr=0.1, weight_decay=0.5)
    weight.weight.grad = torch.zeros_like(before)
    optimizer.step()
    torch.testing.assert_close(weight.weight.detach(), before * (1 - 0.1 * 0.5))


# ---- Schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_rises_from_0_to_1(name: str) -> None:
    schedule = SCHEDULES[name]
    found = [schedule(epoch, 20, warmup=4.0) for epoch in (0, 1, 2, 3, 4)]
    assert found == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert schedule(0.0, 20) == 1


def test_constant_stays() -> None:
    assert [constant(epoch, 5) for epoch in (0, 2.5, 5)] == [1, 1, 1]


def test_multistep_falls_at_each_milestone() -> None:
    epochs = (0, 79.99, 80, 119.5, 120, 200)
    found = [multistep(epoch, 200, milestones=(80, 120), factor=0.2) for epoch in epochs]
    assert found == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04])


def test_cosine_against_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.1)
    for epoch in range(11):
        assert cosine(epoch, 10, final=0.1) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


def test_cosine_after_a_warm_up() -> None:
    assert cosine(2 + 2, 10, warmup=2) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine(10, 10, warmup=2, final=0.05) == pytest.approx(0.05)


def test_linear_falls_evenly() -> None:
    assert [linear(epoch, 10, warmup=2, final=0.2) for epoch in (2, 6, 10)] == pytest.approx([1, 0.6, 0.2])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_warm_up_as_long_as_the_training_is_no_division_by_zero(name: str) -> None:
    assert SCHEDULES[name](4.9, 5, warmup=5.0) == pytest.approx(0.98)
    assert SCHEDULES[name](5.0, 5, warmup=5.0) == 1
