from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from calibrant.training.optimization import (
    OPTIMIZERS,
    SCHEDULES,
    RunningAverage,
    adam,
    adamw,
    can_be_fused,
    constant,
    cosine,
    linear,
    load_moments,
    multistep,
    recordable,
    set_rates,
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


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    generator = torch.Generator().manual_seed(1)
    for rate in rates:
        set_rates(optimizer, [rate] * len(optimizer.param_groups))
        optimizer.zero_grad()
        model(torch.randn(8, 1, 3, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def same_networks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    model = network()
    model[0].bias.requires_grad_(False)  # normalised away, its gradient is rounding, which Adam blows up
    return [copy.deepcopy(model) for _ in range(count)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_recordable_steps_are_the_same_steps(make: Any) -> None:
    one, other = same_networks(2)
    plain, fused = make(one), recordable(make(other), torch.device("cpu"))
    descend(one, plain, [0.1, 0.05, 0.2])
    descend(other, fused, [0.1, 0.05, 0.2])
    assert all(group["lr"].item() == pytest.approx(0.2) for group in fused.param_groups)
    assert plain.param_groups[0]["lr"] == 0.2
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("recorded", [False, True], ids=["to-recorded", "from-recorded"])
def test_moments_go_over_to_the_other_kind_of_device(make: Any, recorded: bool) -> None:
    whole, begun, resumed = same_networks(3)
    descend(whole, make(whole), [0.1] * 4)
    cpu = torch.device("cpu")
    first = recordable(make(begun), cpu) if recorded else make(begun)
    second = make(resumed) if recorded else recordable(make(resumed), cpu)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 1, 3, 3, generator=generator) for _ in range(4)]
    for model, optimizer, part in ((begun, first, batches[:2]), (resumed, second, batches[2:])):
        if model is resumed:
            resumed.load_state_dict(begun.state_dict())
            resumed.to(memory_format=torch.channels_last)
            load_moments(second, first.state_dict()["state"])
        for inputs in part:
            set_rates(optimizer, [0.1] * len(optimizer.param_groups))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    assert isinstance(second.param_groups[0]["lr"], torch.Tensor) is not recorded
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)


@pytest.mark.parametrize(
    "kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adamax]
)
def test_optimizers_that_torch_cannot_fuse_stay_what_they_are(kind: type[torch.optim.Optimizer]) -> None:
    (model,) = same_networks(1)
    optimizer = kind(model.parameters(), lr=0.1)
    assert not can_be_fused(optimizer)
    assert recordable(optimizer, torch.device("cpu")) is optimizer
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_momenta_of_fused_steps_begin_at_zero_after_a_resume_as_well() -> None:
    """A run whose steps were all skipped by a gradient scaler saves no momenta."""
    one, other = same_networks(2)
    fused = recordable(sgd(other), torch.device("cpu"))
    load_moments(fused, sgd(one).state_dict()["state"])
    for group in fused.param_groups:
        for parameter in group["params"]:
            assert torch.equal(fused.state[parameter]["momentum_buffer"], torch.zeros_like(parameter))


def test_the_running_average_is_that_of_torch() -> None:
    (model,) = same_networks(1)
    average = RunningAverage(model, 0.75)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=True)
    optimizer = sgd(model)
    for step in range(5):
        descend(model, optimizer, [0.1])
        if step == 3:  # as a resumed run does
            former, average = average, RunningAverage(model, 0.75)
            average.load_state_dict(former.module.state_dict())
        average.update()
        theirs.update_parameters(model)
    expected = theirs.module.state_dict()
    for name, value in average.module.state_dict().items():
        assert torch.equal(value, model.state_dict()[name] if "tracked" in name else expected[name])
    assert not torch.equal(average.module[0].weight, model[0].weight)


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
