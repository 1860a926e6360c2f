"""Optimizers and learning rates as the published recipes have them."""

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
        model: whose parameters to move.
        lr: learning rate, before the schedule.
        momentum: of the gradient.
        weight_decay: added to the gradient, times the weights.
        nesterov: whether the momentum looks ahead.
        decay_vectors: whether parameters with one axis, such as biases and scales, decay too.
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
    """Adam; arguments as `sgd`."""
    return Adam(_groups(model, weight_decay, decay_vectors), lr=lr, betas=betas)


def adamw(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.05,
    decay_vectors: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay; arguments as `sgd`."""
    return AdamW(_groups(model, weight_decay, decay_vectors), lr=lr, betas=betas)


def _groups(model: nn.Module, weight_decay: float, decay_vectors: bool) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if decay_vectors or parameter.ndim > 1]
    others = [parameter for parameter in parameters if not (decay_vectors or parameter.ndim > 1)]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adam": adam, "adamw": adamw}
"""Optimizers by name: functions of a model and options."""


def make_recordable(optimizer: Optimizer, device: torch.device) -> None:
    """Let an optimizer's steps be recorded as a CUDA graph: all that changes with them is on the device."""
    for group in optimizer.param_groups:
        group.update(lr=torch.tensor(group["lr"], dtype=torch.float32, device=device), fused=True)
        if "capturable" in group:
            group["capturable"] = True


def set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    """Give each group of parameters its learning rate, without waiting for a device."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load_moments(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Load the ``state`` of an optimizer's `state_dict`, of whatever device, into one of the same parameters.

    Its groups are left alone: the recipe has made them, for the device that is there now.
    """
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            # Fused steps want the memory layout of the parameter, which another device may have another of.
            if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape and moment.ndim:
                moments[name] = torch.empty_like(parameter, dtype=moment.dtype).copy_(moment)


class RunningAverage:
    """An exponential average of a network's weights and buffers; whole numbers are those of the network.

    >>> network = nn.Linear(1, 1, bias=False)
    >>> average = RunningAverage(network, decay=0.75)
    >>> for value in (1.0, 5.0):
    ...     _ = nn.init.constant_(network.weight, value)
    ...     average.update()
    >>> average.module.weight.item()
    2.0

    Args:
        network: whose average to keep.
        decay: what remains of the average at each update; the first one takes the network as it is.
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
        """Take in the network as it is now."""
        for average, current in self._copied if self._begun else self._averaged + self._copied:
            average.copy_(current)
        if self._begun and self._averaged:
            averages, weights = zip(*self._averaged, strict=True)
            torch._foreach_lerp_(averages, weights, 1 - self._decay)
        self._begun = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state_dict` of a ``module``."""
        self.module.load_state_dict(state)
        self._begun = True


def constant(epoch: float, epochs: int, *, warmup: float = 0.0) -> float:
    """The same learning rate throughout.

    Args:
        epoch: how many epochs have been trained, a fraction within one.
        epochs: how many there are.
        warmup: epochs over which the learning rate rises from 0.

    Returns:
        What to multiply the learning rate by.
    """
    return _risen(epoch, warmup)


def multistep(
    epoch: float, epochs: int, *, milestones: tuple[int, ...] = (), factor: float = 0.1, warmup: float = 0.0
) -> float:
    """Multiplied by a factor at each milestone; others as `constant`.

    >>> [multistep(epoch, 350, milestones=(150, 250)) for epoch in (149.9, 150, 250)]
    [1.0, 0.1, 0.010000000000000002]
    """
    return _risen(epoch, warmup) * factor ** sum(epoch >= milestone for milestone in milestones)


def cosine(epoch: float, epochs: int, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """Half a cosine after the warm-up, down to ``final``; others as `constant`.

    >>> [round(cosine(epoch, 10, warmup=2), 3) for epoch in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if epoch < warmup:
        return _risen(epoch, warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * _passed(epoch, epochs, warmup)))


def linear(epoch: float, epochs: int, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """A straight line after the warm-up, down to ``final``; others as `constant`."""
    if epoch < warmup:
        return _risen(epoch, warmup)
    return final + (1 - final) * (1 - _passed(epoch, epochs, warmup))


def _risen(epoch: float, warmup: float) -> float:
    return min(1.0, epoch / warmup) if warmup > 0 else 1.0


def _passed(epoch: float, epochs: int, warmup: float) -> float:
    """Which fraction of the epochs after the warm-up is over."""
    return min(1.0, (epoch - warmup) / max(epochs - warmup, 1e-9))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "multistep": multistep,
    "cosine": cosine,
    "linear": linear,
}
"""Learning rates by name: pure functions of the epoch, so that resuming needs none of their state."""
