"""Views and checks of (logits, target): the only file that knows where classes and pixels lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SUM_TOLERANCE = 1e-2
"""How far probabilities may be from a sum of 1: rounded and half-precision ones are."""

# Numbers in one block. On a CPU: few enough that temporaries stay in cache and that there are blocks for
# several threads, and many enough that arithmetic outweighs the overhead of calls. On other devices blocks
# only bound the memory.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 26

Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Elements:
    """A batch seen as a list of elements to classify, with the class axis always second.

    Shapes: ``logits`` is ``(A, K)`` or ``(A, K, S)``, a view of the caller's logits whenever their
    strides allow it. ``valid`` is ``(A,)`` or ``(A, S)`` and false where the label is ignored.
    ``target`` has ``valid``'s shape and holds labels (0 where ignored), or has the logits' shape and
    holds probabilities.

    Attributes:
        all_valid: whether it is known, without asking a device, that nothing is ignored.
        expected: the factor by which each element's loss will enter the total, if that is one and the
            same number for all; a gradient computed with it in place need not be scaled again.
    """

    logits: Tensor
    target: Tensor
    valid: Tensor
    all_valid: bool = False
    expected: float = 1.0

    @property
    def soft(self) -> bool:
        """Whether the targets are probabilities."""
        return self.target.is_floating_point()

    @property
    def rows(self) -> Tensor:
        """The logits of the valid elements, ``(N, K)``, in the computing type, without a gradient."""
        logits = self.logits.detach()
        rows = logits if logits.ndim == 2 else logits.movedim(1, -1).flatten(0, 1)
        rows = rows if self.all_valid else rows[self.valid.flatten()]
        return rows.to(computing_dtype(logits))

    @property
    def labels(self) -> Tensor:
        """The labels of the valid elements, ``(N,)``."""
        return self.target.flatten() if self.all_valid else self.target.flatten()[self.valid.flatten()]

    def detached(self) -> Elements:
        """The same elements without a path for gradients."""
        return replace(self, logits=self.logits.detach())


def arrange(
    logits: Tensor,
    target: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    soft: bool = False,
    look_at_labels: bool = False,
) -> Elements:
    """Check a batch and return it as `Elements`.

    Args:
        logits: floating point, ``(B, K, *S)``.
        target: labels ``(B, *S)``, or probabilities ``(B, K, *S)`` where ``soft`` allows them.
        num_classes: the K to insist on.
        ignore_index: the label of elements to leave out.
        soft: whether probability targets are allowed.
        look_at_labels: whether to check labels wherever they are, even if that means to wait for a device.

    Raises:
        TypeError: logits that are not floating point, or targets of the wrong kind.
        ValueError: shapes, class counts, devices or labels that do not fit. Labels are looked at on
            the CPU only: elsewhere that would make every step wait for the device.
    """
    check(logits, target, num_classes=num_classes, soft=soft)
    classes_last = logits.ndim > 2 and _classes_are_adjacent(logits)
    if target.is_floating_point():
        rows = _flatten(logits, classes_last)
        target = _flatten(target, classes_last)
        shape = rows.shape[:1] + rows.shape[2:]
        valid = torch.ones(shape, dtype=torch.bool, device=logits.device)
        return Elements(rows, target.to(dtype=computing_dtype(logits)), valid, all_valid=True)
    target = target.long()
    target = target.reshape(-1) if classes_last else target.flatten(1) if target.ndim > 1 else target
    valid = target != ignore_index
    all_valid = False
    looked_at = target.device.type == "cpu" or look_at_labels
    if looked_at and not torch.compiler.is_compiling() and target.numel():
        low, high = _range(target)
        all_valid = not low <= ignore_index <= high
        if not all_valid:
            target = target.masked_fill(~valid, 0)
            low, high = _range(target)
        if low < 0 or high >= logits.shape[1]:
            raise ValueError(
                f"target holds labels from {low} to {high}, but logits of shape {tuple(logits.shape)} "
                f"have {logits.shape[1]} classes: expected 0 to {logits.shape[1] - 1}, "
                f"or ignore_index={ignore_index} (pass the label of elements to leave out as ignore_index)"
            )
    else:
        target = target.masked_fill(~valid, 0)
    return Elements(_flatten(logits, classes_last), target, valid, all_valid)


def check(logits: Tensor, target: Tensor, *, num_classes: int | None, soft: bool) -> None:
    """The checks of `arrange` that need no look at the values, and so do not wait for a device."""
    _check_logits(logits, num_classes)
    _check_target(logits, target, soft)


def _range(target: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(target)
    return int(low), int(high)


def _check_logits(logits: Tensor, num_classes: int | None) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor, got {type(logits).__name__}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim < 2:
        raise ValueError(f"logits must have shape (B, K, *S), got {tuple(logits.shape)}")
    if num_classes is not None and logits.shape[1] != num_classes:
        hint = ""
        if logits.ndim > 2 and logits.shape[-1] == num_classes:
            hint = "; the class axis comes second: pass logits.movedim(-1, 1)"
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} have {logits.shape[1]} classes on axis 1, "
            f"expected num_classes={num_classes}, the number given to the loss or metric{hint}"
        )


def _check_target(logits: Tensor, target: Tensor, soft: bool) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device}, but logits are on {logits.device}")
    labels = logits.shape[:1] + logits.shape[2:]
    if target.is_floating_point():
        if not soft:
            advice = "target.argmax(1)" if target.shape == logits.shape else "target.long()"
            raise TypeError(
                f"target must hold integer labels, got {target.dtype} of shape {tuple(target.shape)}: pass "
                f"{advice}; probability targets have no meaning here"
            )
        if target.shape != logits.shape:
            raise ValueError(
                f"a floating-point target holds probabilities and must have the logits' shape "
                f"{tuple(logits.shape)}, got {tuple(target.shape)}; for labels pass target.long()"
            )
    elif target.dtype == torch.bool or target.is_complex():
        raise TypeError(f"target must hold integer labels, got {target.dtype}")
    elif target.shape != labels:
        raise ValueError(
            f"target must have shape {tuple(labels)} for logits of shape {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}"
        )


def _classes_are_adjacent(logits: Tensor) -> bool:
    """Whether memory holds the classes of an element side by side, as in channels-last images."""
    return logits.movedim(1, -1).is_contiguous() and logits.shape[1] > 1


def _flatten(tensor: Tensor, classes_last: bool) -> Tensor:
    if tensor.ndim == 2:
        return tensor
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1]) if classes_last else tensor.flatten(2)


def computing_dtype(logits: Tensor) -> torch.dtype:
    """The type a loss computes in: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def as_logits(probabilities: Tensor) -> Tensor:
    """The logarithms of probabilities, where 0 counts as the smallest normal float32, 1.2e-38.

    Trees and rounding give probabilities of 0. A true class that got one costs 87.3 in NLL, and not
    infinitely much, whatever the type of the probabilities.
    """
    floor = torch.finfo(torch.float32).tiny
    return probabilities.to(computing_dtype(probabilities)).clamp_min(floor).log()


def along_classes(values: Tensor, logits: Tensor) -> Tensor:
    """One value per class ``(K,)``, shaped and typed to meet ``(A, K)`` or ``(A, K, S)`` logits."""
    # A copy: a graph that is kept must not see what the next adaptation does to the values.
    return values.to(computing_dtype(logits), copy=True).view(1, -1, *(1,) * (logits.ndim - 2))


def blocks(shape: Sequence[int], device: torch.device) -> Iterator[Index]:
    """Index expressions that cut ``(A, K)`` or ``(A, K, S)`` into blocks; an empty batch is one block.

    They depend on nothing but the shape and the type of device, so sums over blocks are reproducible.
    """
    outer, classes, *inner = shape
    limit = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    spatial = inner[0] if inner else 1
    rows = max(1, limit // max(1, classes * spatial))
    columns = spatial if rows > 1 else max(1, limit // classes)
    everything = slice(None)
    if not outer:
        yield (everything,) * len(shape)
        return
    for start in range(0, outer, rows):
        chunk = slice(start, start + rows)
        if not inner:
            yield (chunk, everything)
            continue
        for left in range(0, max(1, spatial), max(1, columns)):
            yield (chunk, everything, slice(left, left + columns))
