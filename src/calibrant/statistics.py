"""Additive sums: the one idea behind every adaptive loss and every metric."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from threading import RLock
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from calibrant.distributed import all_reduce, several_processes

adding = RLock()
"""Held while a batch is added to running sums, so that threads can share the object that keeps them.

One lock serves all objects. It is held for microseconds (in torchmetrics' ``forward``, for a whole batch). An
object with its own lock could not be pickled.
"""

if hasattr(os, "register_at_fork"):  # a forked process must not inherit a lock that another thread holds
    os.register_at_fork(before=adding.acquire, after_in_parent=adding.release, after_in_child=adding.release)


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type of sums on a device: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def device_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of `nn.Module._apply` for sums and learned state, which follow the device only.

    ``.half()`` and ``.to(dtype)`` are for weights of networks. A multiplier of 1e-6 or a class weight of 1e5
    does not survive them, and half precision cannot count beyond 2,048.
    """

    def move(tensor: Tensor) -> Tensor:
        try:
            moved = fn(tensor)
        except TypeError:  # a device without float64
            moved = fn(tensor.float())
        dtype = sum_dtype(moved.device) if tensor.is_floating_point() else tensor.dtype
        return moved if moved.dtype == dtype else tensor.to(moved.device, dtype)

    return move


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over elements; adding two gives the statistics of both data sets together.

    Subclasses add fields. Each is a tensor of sums whose shape does not depend on the data, another
    `Statistics`, or a tuple of these. A subclass whose tensors or tuples depend on the data in size adds and
    pools them itself, and cannot be a field of another one.

    Attributes:
        samples: number of elements summed over, a scalar. NaN means that some logits were not
            finite; it survives ``+`` and `all_reduce`, so every rank sees it.

    >>> @dataclass(frozen=True, eq=False)
    ... class Mean(Statistics):
    ...     total: Tensor
    >>> @dataclass(frozen=True, eq=False)
    ... class TwoMeans(Statistics):
    ...     first: Mean
    ...     second: Mean
    >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
    >>> both = TwoMeans(one, Mean(one, one), Mean(one, two))
    >>> (both + both).second.total
    tensor(4.)
    >>> both
    TwoMeans(samples=1, first=Mean(samples=1, total=1), second=Mean(samples=1, total=2))
    """

    samples: Tensor

    def __post_init__(self) -> None:
        """Refuse fields that would be added tensor by tensor, although they have an addition of their own."""
        for part in self._parts():
            for each in part if isinstance(part, tuple) else (part,):
                if isinstance(each, Statistics) and type(each).__add__ is not Statistics.__add__:
                    name = type(each).__name__
                    raise TypeError(f"{name} has an addition of its own: it cannot be a field of statistics")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        type.__setattr__(cls, "__repr__", cls.__repr__)  # the inherited one; dataclass would write a long one

    def __repr__(self) -> str:
        """Short: the values of scalars, and the shapes of other tensors."""
        pairs = zip(fields(self), self._parts(), strict=True)
        parts = ", ".join(f"{field.name}={_in_short(part)}" for field, part in pairs)
        return f"{type(self).__name__}({parts})"

    def _parts(self) -> list[Part]:
        return [getattr(self, field.name) for field in fields(self)]

    def tensors(self) -> list[Tensor]:
        """All sums in the order of the fields, with those of nested statistics in their place."""
        return [tensor for part in self._parts() for tensor in _tensors(part)]

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """Statistics of the same structure that hold these tensors, in the order of `tensors`."""
        return type(self)(*(_with_tensors(part, tensors) for part in self._parts()))

    def __add__(self, other: Self) -> Self:
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return self.with_tensors(iter([mine + theirs for mine, theirs in pairs]))

    def to(self, device: torch.device) -> Self:
        """The same sums on another device."""
        return self.with_tensors(iter([tensor.to(device) for tensor in self.tensors()]))

    def all_reduce(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> Self:
        """The sums of all processes, in one collective call; ``self`` where there is one process.

        Arguments as for `calibrant.distributed.all_reduce`.
        """
        if not several_processes():
            return self
        tensors = self.tensors()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        pooled = all_reduce(flat, group=group, timeout=timeout)
        parts = torch.split_with_sizes(pooled, [tensor.numel() for tensor in tensors])
        pairs = zip(parts, tensors, strict=True)
        return self.with_tensors(iter([part.view_as(tensor) for part, tensor in pairs]))


Part = Tensor | Statistics | tuple[Tensor | Statistics, ...]
"""A field of statistics."""


def _in_short(part: Part) -> str:
    if isinstance(part, Tensor):
        return f"<shape {tuple(part.shape)}>" if part.ndim or part.is_meta else f"{part.item():.9g}"
    return repr(part) if isinstance(part, Statistics) else f"<{len(_tensors(part))} tensors>"


def _tensors(part: Part) -> list[Tensor]:
    if isinstance(part, Statistics):
        return part.tensors()
    return [tensor for each in part for tensor in _tensors(each)] if isinstance(part, tuple) else [part]


def _with_tensors(part: Part, tensors: Iterator[Tensor]) -> Any:
    if isinstance(part, Statistics):
        return part.with_tensors(tensors)
    return tuple(_with_tensors(each, tensors) for each in part) if isinstance(part, tuple) else next(tensors)
