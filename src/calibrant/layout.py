"""Views and checks of (logits, target): the only file that knows where classes and pixels lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from calibrant.arguments import label

SUM_TOLERANCE = 1e-2
"""How far probabilities may be from a sum of 1: rounded and half-precision ones are."""

# Numbers in one block. On a CPU: few enough that temporaries stay in cache and that there are blocks for
# several threads, and many enough that arithmetic outweighs the overhead of calls. On other devices blocks
# only bound the memory.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 19, 1 << 26

LANES = 64
"""A multiple of the columns that torch's sum takes at a time on any CPU: four vectors of up to 16 numbers."""

_SINGLE_LOGITS = (
    "if each logit l is a yes-or-no decision of its own, pass binary=True; to a metric pass Predictions.of("
    "logits, target, binary=True), and to what has no such argument torch.stack([0 * l, l], 1)"
)
_LEAST_PROBABILITY = torch.finfo(torch.float32).tiny

LOGIT_OF_ZERO = math.log(_LEAST_PROBABILITY)
"""The logit that `as_logits` gives to a probability of 0."""

_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # for which torch has few operations
_ONE_OF_SEVERAL = "if each element has one of several classes, leave out binary=True"

Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Elements:
    """A batch seen as a list of elements to classify, with the class axis always second.

    Attributes:
        logits: ``(A, K)`` or ``(A, K, S)``, a view of the caller's logits whenever their strides allow it.
        given: the target as given, ``(A[, S])`` labels or ``(A, K[, S])`` probabilities.
        ignore_index: label of the elements that do not count.
        all_valid: true if it is known, without waiting for a device, that nothing is ignored.
        checked: true if it is known that every label is in range or ignored.
        expected: the factor by which each element's loss will enter the total, if all have the same; a
            gradient that includes it need not be scaled again.
        batch_shape: the shape of the caller's logits, ``(B, K, *S)``.
    """

    logits: Tensor
    given: Tensor
    ignore_index: int = -100
    all_valid: bool = False
    checked: bool = False
    expected: float = 1.0
    batch_shape: tuple[int, ...] = ()
    _target: Tensor | None = None
    _valid: Tensor | None = None

    @property
    def soft(self) -> bool:
        """Whether the targets are probabilities."""
        return self.given.is_floating_point()

    @property
    def valid(self) -> Tensor:
        """False where the label is ignored, ``(A[, S])``."""
        if self._valid is None:
            object.__setattr__(self, "_valid", self._make_valid())
        assert self._valid is not None
        return self._valid

    @property
    def target(self) -> Tensor:
        """Labels as int64, 0 where ignored or stray, ``(A[, S])``; or probabilities in the computing type."""
        if self._target is None:
            object.__setattr__(self, "_target", self._make_target())
        assert self._target is not None
        return self._target

    def _make_valid(self) -> Tensor:
        if self.soft:
            shape = self.logits.shape[:1] + self.logits.shape[2:]
            return torch.ones(shape, dtype=torch.bool, device=self.logits.device)
        return not_ignored(self.given, self.ignore_index)

    def _make_target(self) -> Tensor:
        if self.soft:
            return self.given.to(computing_dtype(self.logits))
        target = self.given.long()
        if not self.checked:  # an index out of range would end a GPU's process
            target = target.masked_fill(self._out_of_range(), 0)
        return target if self.all_valid else target.masked_fill(target == self.ignore_index, 0)

    @property
    def stray(self) -> Tensor:
        """True where a label is out of range and not ignored, ``(A[, S])``."""
        return self._out_of_range() & self.valid

    def _out_of_range(self) -> Tensor:
        target = self.given.long()  # 8 bits cannot hold a large number of classes
        return (target < 0) | (target >= self.logits.shape[1])

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

    @property
    def ruled_out(self) -> Tensor:
        """True where the true class had a probability of 0 before `as_logits`, ``(A[, S])``."""
        logits = self.logits.detach()
        # In 16 bits, other numbers are as near.
        true = logits.gather(1, self.target.unsqueeze(1)).to(computing_dtype(logits))
        near = (true - LOGIT_OF_ZERO).abs() < 1e-4
        if logits.shape[1] == 2:  # a single logit is the difference of two
            near |= (true - logits.amax(1, keepdim=True) - LOGIT_OF_ZERO).abs() < 1e-4
        return near.squeeze(1) & self.valid

    @property
    def positive(self) -> Tensor:
        """The probability of class 1 of two, for the valid elements, ``(N,)``."""
        rows = self.rows
        return (rows[:, 1] - rows[:, 0]).sigmoid()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the caller's labels, ``(B, *S)``."""
        return (*self.batch_shape[:1], *self.batch_shape[2:])

    def blanked(self) -> Elements:
        """The same elements with 0 for the logits of those that are ignored."""
        return self.with_changes(logits=torch.where(self.valid.unsqueeze(1), self.logits, 0))

    def with_target(self, target: Tensor) -> Elements:
        """The same elements with other targets; those that are ignored stay ignored."""
        return self.with_changes(given=target, _target=target, _valid=self.valid)

    def with_changes(self, **changes: Any) -> Elements:
        """As `dataclasses.replace`, which takes longer, above all under `torch.compile`."""
        # Not by vars(self), which older versions of torch.compile cannot unpack.
        return Elements(**{**{name: getattr(self, name) for name in _FIELDS}, **changes})


_FIELDS = tuple(field.name for field in fields(Elements))


def not_ignored(target: Tensor, ignore_index: int) -> Tensor:
    """Whether each label counts, for labels of any integer type.

    >>> not_ignored(torch.tensor([3, 156], dtype=torch.uint8), -100)
    tensor([True, True])
    """
    return target.long() != ignore_index  # among uint8 labels, torch would take 156 for -100


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
        num_classes: the K that the logits must have.
        ignore_index: the label of elements to leave out.
        soft: whether probability targets are allowed.
        look_at_labels: check the labels on every device. By default only labels on the CPU are checked:
            elsewhere every step would wait for the device. Labels cannot be checked while compiling, nor
            under `torch.func.vmap`; see `Elements.stray`.

    Raises:
        TypeError: logits that are not floating point, or targets of the wrong kind.
        ValueError: shapes, class counts, devices or labels that do not fit.
    """
    check_logits(logits, num_classes)
    _check_target(logits, target, soft)
    if type(ignore_index) is not int:
        ignore_index = label("ignore_index", ignore_index)
    # Whether memory holds the classes of an element side by side, as in channels-last images.
    classes_last = logits.ndim > 2 and logits.shape[1] > 1 and logits.movedim(1, -1).is_contiguous()
    rows = _flatten(logits, classes_last)
    if target.is_floating_point():
        target = _flatten(target, classes_last)
        elements = Elements(rows, target, all_valid=True, checked=True, batch_shape=logits.shape)
    else:
        if target.dtype in _WIDE_UNSIGNED:
            target = target.long()
        if target.ndim > 1:
            target = target.reshape(-1) if classes_last else target.flatten(1)
        elements = Elements(rows, target, ignore_index, batch_shape=logits.shape)
    if torch.compiler.is_compiling():  # a compiler cannot trace what is stored on first use
        return elements.with_changes(_target=elements._make_target(), _valid=elements._make_valid())
    looked_at = (target.device.type == "cpu" or look_at_labels) and not is_batched(target)
    if elements.soft or not looked_at or not target.numel():
        return elements
    elements = elements.with_changes(checked=True)
    low, high = _range(target)
    if not low <= ignore_index <= high:
        elements = elements.with_changes(all_valid=True)
    else:
        low, high = _range(elements.target)
    if low < 0 or high >= logits.shape[1]:
        from_one = (low, high) == (1, logits.shape[1])
        hint = "; if the labels count from 1, pass target - 1" if from_one else ""
        raise ValueError(
            f"target holds labels from {low} to {high}, but logits of shape {tuple(logits.shape)} "
            f"have {logits.shape[1]} classes: expected 0 to {logits.shape[1] - 1}, "
            f"or ignore_index={ignore_index} (pass the label of elements to leave out as "
            f"ignore_index){hint}"
        )
    return elements


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is under way.

    Both follow plain operations of torch only: no tensors written to in place of a result, no numbers read.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several under `torch.func.vmap`, so that its numbers cannot be read."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return _functorch.is_legacy_batchedtensor(tensor)  # of `torch.autograd.grad(..., is_grads_batched=True)`


def _range(target: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(target)
    return int(low), int(high)


def check_floating(values: Tensor, name: str, advice: str = "") -> None:
    """Raise unless this is a tensor of floating-point numbers."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(values).__name__}{advice}")
    if not values.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {values.dtype}")


def check_logits(logits: Tensor, num_classes: int | None) -> None:
    """Raise unless these are logits ``(B, K, *S)``, of that many classes if a number is given."""
    check_floating(logits, "logits", ": pass torch.as_tensor of both")
    if logits.ndim < 2 or logits.shape[1] == 1:
        raise ValueError(
            f"logits must have shape (B, K, *S) with at least 2 classes on axis 1, got "
            f"{tuple(logits.shape)}; {_SINGLE_LOGITS}"
        )
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
            advice = "target.long()"
            if target.shape == logits.shape:
                advice = "target.argmax(1), or binary=True if each column is a label of its own"
            raise TypeError(
                f"target must hold integer labels, got {target.dtype} of shape {tuple(target.shape)}: pass "
                f"{advice}; probability targets have no meaning here"
            )
        if target.shape != logits.shape:
            raise ValueError(
                f"a floating-point target holds probabilities and must have the logits' shape "
                f"{tuple(logits.shape)}, got {tuple(target.shape)}; for labels pass target.long()"
            )
        _check_probabilities(target)
        return
    one_hot = ""
    if target.shape == logits.shape and look_one_hot(target):
        one_hot = "; the target looks one-hot: pass target.long().argmax(1)"
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(f"target must hold integer labels, got {target.dtype}{one_hot}")
    if target.shape != labels:
        hint = f"{one_hot}; {_SINGLE_LOGITS}" if target.shape == logits.shape else ""
        if logits.ndim > 2 and target.shape == logits.shape[:-1]:
            hint = "; the class axis comes second: pass logits.movedim(-1, 1)"
        if logits.ndim > 2 and target.shape == logits.shape[1:2] + logits.shape[3:]:
            hint = "; logits (M, B, K, *S) of an ensemble are pooled first: calibrant.ensembles.pool(logits)"
        raise ValueError(
            f"target must have shape {tuple(labels)} for logits of shape {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}{hint}"
        )


def look_one_hot(target: Tensor) -> bool:
    """Whether a target ``(B, K, *S)`` has a single 1 among the classes of each element, and otherwise 0.

    False if its numbers cannot be read.

    >>> look_one_hot(torch.eye(3).long()), look_one_hot(torch.ones(3, 3).long())
    (True, False)
    """
    if torch.compiler.is_compiling() or target.is_meta or is_batched(target):
        return False
    if target.ndim < 2 or target.shape[1] < 2 or not target.numel():
        return False
    return bool(((target == 0) | (target == 1)).all() & ((target == 1).sum(1) == 1).all())


def _check_probabilities(target: Tensor) -> None:
    """Raise unless a target holds probabilities of the classes; on a CPU only, as labels are checked."""
    if target.device.type != "cpu" or torch.compiler.is_compiling() or is_batched(target):
        return
    target = target.detach()
    total = target.sum(1, dtype=torch.float32)
    if not total.numel():
        return
    if not bool(((total - 1).abs() <= SUM_TOLERANCE).all()):
        low, high = torch.aminmax(total)
        raise ValueError(
            f"a floating-point target holds probabilities and must add up to 1 over the classes, got sums "
            f"from {float(low):.4g} to {float(high):.4g}; {_SINGLE_LOGITS}"
        )
    low, high = torch.aminmax(target)
    if low < -SUM_TOLERANCE or high > 1 + SUM_TOLERANCE:
        raise ValueError(
            f"a floating-point target holds probabilities and must lie in [0, 1], got values from "
            f"{float(low):.4g} to {float(high):.4g}; to leave out elements, pass integer labels with "
            "ignore_index"
        )


def as_pairs(logits: Tensor) -> Tensor:
    """Single logits ``(B, *S)`` as logits ``(B, 2, *S)`` of the classes no and yes.

    The logit of "no" is 0, so the softmax of a pair is the sigmoid of the single logit.

    >>> as_pairs(torch.tensor([2.0, -1.0]))
    tensor([[ 0.,  2.],
            [ 0., -1.]])
    """
    check_floating(logits, "logits")
    if not logits.ndim:
        raise ValueError("logits must have shape (B,) or (B, L, *S) with binary=True, got a single number")
    return torch.stack([torch.zeros_like(logits), logits], 1)


def as_decisions(logits: Tensor, target: Tensor, *, soft: bool = False) -> tuple[Tensor, Tensor]:
    """A batch of yes-or-no decisions, one for each logit, as a batch of two classes.

    Args:
        logits: floating point, ``(B,)``, or ``(B, L, *S)`` for L labels.
        target: 0, 1 or the label to ignore, as integers or booleans in the logits' shape; axis 1 may be
            missing if L is 1. Where ``soft`` allows it, the probabilities of 1 as floating point.
        soft: whether probability targets are allowed.

    Returns:
        Logits ``(B, 2)`` or ``(B, 2, L, *S)``, and the target ``(B,)`` or ``(B, L, *S)``, as for `arrange`.

    Raises:
        TypeError: logits that are not floating point, or targets of the wrong kind.
        ValueError: shapes that do not fit.

    >>> logits, target = as_decisions(torch.zeros(5, 3), torch.ones(5, 3, dtype=torch.long))
    >>> logits.shape, target.shape
    (torch.Size([5, 2, 3]), torch.Size([5, 3]))
    """
    pairs = as_pairs(logits)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if logits.ndim == target.ndim + 1 and logits.shape[1] == 1:
        target = target.unsqueeze(1)
    if target.shape != logits.shape:
        raise ValueError(
            f"with binary=True each logit is a decision of its own: target must have the logits' shape "
            f"{tuple(logits.shape)}, got {tuple(target.shape)}; {_ONE_OF_SEVERAL}"
        )
    if target.is_floating_point():
        if not soft:
            raise TypeError(
                f"target must hold integers 0 and 1, got {target.dtype}: pass target.long(); probability "
                "targets have no meaning here"
            )
        return pairs, torch.stack([1 - target, target], 1)
    return pairs, target.long()


def answers(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """As `as_decisions`, with an error unless all labels are 0, 1 or ignored."""
    logits, target = as_decisions(logits, target)
    valid = target[target != ignore_index]
    low, high = map(int, torch.aminmax(valid)) if valid.numel() else (0, 1)
    if low < 0 or high > 1:
        raise ValueError(
            f"with binary=True the target holds 0 and 1, or ignore_index={ignore_index} for elements to "
            f"leave out; got labels from {low} to {high}"
        )
    return logits, target


def _flatten(tensor: Tensor, classes_last: bool) -> Tensor:
    if tensor.ndim == 2:
        return tensor
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1]) if classes_last else tensor.flatten(2)


def unflatten(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor shaped like the logits of `Elements` in the shape ``(B, K, *S)`` of the caller's logits."""
    if len(shape) == 2:
        return tensor
    if tensor.ndim == 2:
        return tensor.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    return tensor.view(shape)


def computing_dtype(logits: Tensor) -> torch.dtype:
    """The type a loss computes in: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def as_logits(probabilities: Tensor) -> Tensor:
    """The logarithms of probabilities, where 0 counts as the smallest normal float32, 1.2e-38.

    Trees and rounding give probabilities of 0. A true class that got one costs 87.3 in NLL, and not
    infinitely much, whatever the type of the probabilities.
    """
    return probabilities.to(computing_dtype(probabilities)).clamp_min(_LEAST_PROBABILITY).log()


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
    columns -= columns % LANES if LANES < columns < spatial else 0
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
