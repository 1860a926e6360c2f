"""Additive sums: the one idea behind every adaptive loss and every metric."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from calibrant.processes import all_reduce, several_processes


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type of sums on a device: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over elements; adding two gives the statistics of both data sets together.

    Subclasses add fields, each a tensor of sums whose shape does not depend on the data.

    Attributes:
        samples: number of elements summed over, a scalar. NaN says that some logits were not
            finite; it survives ``+`` and `all_reduce`, so every rank learns of it.
    """

    samples: Tensor

    def tensors(self) -> list[Tensor]:
        """The fields in order."""
        return [getattr(self, field.name) for field in fields(self)]

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self.tensors(), other.tensors(), strict=True)))

    def to(self, device: torch.device) -> Self:
        """The same sums on another device."""
        return type(self)(*(tensor.to(device) for tensor in self.tensors()))

    def all_reduce(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> Self:
        """The sums of all processes, in one collective call; ``self`` where there is one process.

        Args:
            group: the processes to pool over; all of them by default.
            timeout: seconds to wait for the others; by default as long as the process group does.
        """
        if not several_processes():
            return self
        tensors = self.tensors()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        pooled = all_reduce(flat, group=group, timeout=timeout)
        parts = torch.split_with_sizes(pooled, [tensor.numel() for tensor in tensors])
        return type(self)(*(part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)))
