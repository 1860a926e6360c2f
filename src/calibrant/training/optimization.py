"""Optimizers, learning rate schedules and running averages of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer


def sgd(
    model: nn.Module,
    *,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    nesterov: bool = False,
    decay_vectors: bool = True,
) -> Optimizer:
    """Stochastic gradient descent.

    >>> [len(group["params"]) for group in sgd(nn.Linear(3, 2), decay_vectors=False).param_groups]
    [1, 1]

    Args:
        model: the model to train.
        lr: the learning rate before the schedule.
        momentum: the momentum factor.
        weight_decay: the factor of the L2 penalty on the weights.
        nesterov: use Nesterov momentum.
        decay_vectors: let weight decay apply to parameters with one axis too, such as biases and scales.
    """
    groups = _groups(model, weight_decay, decay_vectors)
    return SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)


def adam(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    decay_vectors: bool = True,
) -> Optimizer:
    """Adam; see `sgd` for the arguments."""
    return Adam(_groups(model, weight_decay, decay_vectors), lr=lr, betas=betas)


def adamw(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.05,
    decay_vectors: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay; see `sgd` for the arguments."""
    return AdamW(_groups(model, weight_decay, decay_vectors), lr=lr, betas=betas)


def _groups(model: nn.Module, weight_decay: float, decay_vectors: bool) -> list[dict[str, Any]]:
    groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[weight_decay if decay_vectors or parameter.ndim > 1 else 0.0].append(parameter)
    return [{"params": members, "weight_decay": decay} for decay, members in groups.items() if members]


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adam": adam, "adamw": adamw}
"""Optimizers by name: functions of a model and options."""


def can_be_fused(optimizer: Optimizer) -> bool:
    """Whether torch has a fused form of the optimizer for GPUs, which leaves a skipped step to the GPU."""
    return type(optimizer) in (SGD, Adam, AdamW)


def recordable(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """An optimizer like this one whose steps can be recorded as a CUDA graph.

    Everything that changes is kept on the GPU: learning rates and, if `can_be_fused`, whether a gradient
    scaler skips a step.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:
            group["capturable"] = True
    if not can_be_fused(optimizer):
        return optimizer
    groups = [{**group, "fused": True} for group in optimizer.param_groups]
    fused = type(optimizer)(groups, fused=True)  # type: ignore[call-arg]  # the three of `can_be_fused` take it
    _begin_momenta(fused)
    return fused


def _begin_momenta(optimizer: Optimizer) -> None:
    """Set missing momenta of fused steps to 0; torch leaves them uninitialised if it skips the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") and group.get("momentum") else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    """Set the learning rate of each parameter group, without waiting for a GPU."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load_moments(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Load the ``state`` of an optimizer's `state_dict`, saved on any device.

    The parameter groups stay as they are: they belong to the recipe and the current device.
    """
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if not isinstance(moment, torch.Tensor) or not moment.ndim:
                continue
            if moment.shape == parameter.shape:
                # Fused steps need the layout of the parameter; another device may have had another one.
                moments[name] = torch.empty_like(parameter, dtype=moment.dtype).copy_(moment)
            elif isinstance(optimizer, SGD | Adam | AdamW):
                raise ValueError(
                    f"{name} has shape {tuple(moment.shape)}; its parameter has {tuple(parameter.shape)}"
                )
    _begin_momenta(optimizer)


class RunningAverage:
    """An exponential average of the weights and buffers of a network; integer buffers are copied.

    ``decay`` is the weight of the old average at each update. The first update copies the network.

    >>> network = nn.Linear(1, 1, bias=False)
    >>> average = RunningAverage(network, decay=0.75)
    >>> for value in (1.0, 5.0):
    ...     _ = nn.init.constant_(network.weight, value)
    ...     average.update()
    >>> average.module.weight.item()
    2.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.module = deepcopy(network)
        self._decay, self._begun = decay, False
        tensors = [chain(each.parameters(), each.buffers()) for each in (self.module, network)]
        pairs = [(average.detach(), current.detach()) for average, current in zip(*tensors, strict=True)]
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        for average, current in self._copied if self._begun else self._averaged + self._copied:
            average.copy_(current)
        if self._begun and self._averaged:
            averages, weights = zip(*self._averaged, strict=True)
            torch._foreach_lerp_(averages, weights, 1 - self._decay)
        self._begun = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the `state_dict` of a saved ``module``."""
        self.module.load_state_dict(state)
        self._begun = True


def constant(epoch: float, epochs: int, *, warmup: float = 0.0) -> float:
    """A constant learning rate.

    Args:
        epoch: the epochs trained so far, with a fraction within an epoch.
        epochs: the number of epochs of the run.
        warmup: the epochs in which the learning rate rises linearly from 0.

    Returns:
        The factor of the learning rate.
    """
    return _warm_up(epoch, warmup)


def multistep(
    epoch: float, epochs: int, *, milestones: tuple[int, ...] = (), factor: float = 0.1, warmup: float = 0.0
) -> float:
    """A learning rate multiplied by ``factor`` at each milestone; see `constant` for the other arguments.

    >>> [multistep(epoch, 350, milestones=(150, 250)) for epoch in (149.9, 150, 250)]
    [1.0, 0.1, 0.010000000000000002]
    """
    return _warm_up(epoch, warmup) * factor ** sum(epoch >= milestone for milestone in milestones)


def cosine(epoch: float, epochs: int, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """Half a cosine after the warm-up, down to the factor ``final``; see `constant`.

    >>> [round(cosine(epoch, 10, warmup=2), 3) for epoch in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    return _falling(epoch, epochs, warmup, final, lambda passed: 0.5 * (1 + math.cos(math.pi * passed)))


def linear(epoch: float, epochs: int, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """A straight line after the warm-up, down to the factor ``final``; see `constant`."""
    return _falling(epoch, epochs, warmup, final, lambda passed: 1 - passed)


def _warm_up(epoch: float, warmup: float) -> float:
    return min(1.0, epoch / warmup) if warmup > 0 else 1.0


def _falling(
    epoch: float, epochs: int, warmup: float, final: float, shape: Callable[[float], float]
) -> float:
    """The warm-up, then a shape that falls from 1 to 0 over the remaining epochs, scaled to end at final."""
    if epoch < warmup:
        return _warm_up(epoch, warmup)
    passed = min(1.0, (epoch - warmup) / max(epochs - warmup, 1e-9))
    return final + (1 - final) * shape(passed)


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "multistep": multistep,
    "cosine": cosine,
    "linear": linear,
}
"""Learning rate schedules by name: pure functions of the epoch, with no state to resume."""
