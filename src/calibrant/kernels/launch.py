"""Launches of the GPU kernel: how a batch is divided, and a plan for each kind of batch, prepared once."""

from __future__ import annotations

import ctypes
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from calibrant.kernels import device
from calibrant.kernels.composition import Composition, FirstTerm, PenaltyTerm, Value
from calibrant.kernels.source import jitted
from calibrant.layout import Elements, arrange, unflatten


class Options(NamedTuple):
    """How a loss treats elements; see `calibrant.losses.Loss`."""

    reduction: str = "mean"
    ignore_index: int = -100
    class_weight: Tensor | None = None
    num_classes: int | None = None  # None for any number
    soft: bool = True  # whether targets may be probabilities

    def arrange(self, logits: Tensor, target: Tensor) -> Elements:
        """The batch, checked; see `calibrant.layout.arrange`."""
        return arrange(
            logits,
            target,
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            soft=self.soft,
        )


class Launcher:
    """Launches a kernel repeatedly, after the first time without Triton's inspection of every argument.

    Whatever the compiled kernel depends on must then be the same each time: types and alignment of tensors,
    and all numbers that are not floating point.

    Args:
        kernel: a device function whose first parameters are tensors.
        programs: how many programs to start.
        where: the device of the tensors.
        **settings: settings of the launch, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, programs: int, where: torch.device, **settings: Any) -> None:
        self.kernel, self.settings = jitted(kernel), settings
        self._grid, self._device = (programs, 1, 1), where.index
        self._start: Callable[..., None] | None = None

    def __call__(self, tensors: tuple[Tensor | None, ...], *others: Any) -> None:
        """Launch with all arguments of the kernel, in order."""
        # Triton launches on the current device, wherever the data are.
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                self(tensors, *others)
        elif self._start is not None:
            # Addresses instead of tensors: Triton would ask the driver about every tensor.
            self._start(*[None if each is None else each.data_ptr() for each in tensors], *others)
        else:
            compiled = self.kernel[self._grid](*tensors, *others, **self.settings)
            if compiled is not None:  # None if it was interpreted
                self._start = compiled[self._grid]


_SINGLE_PROGRAM = 1 << 14
"""Up to this many logits are left to one program, which needs no sums of others."""


class Tiling(NamedTuple):
    """How a batch is divided."""

    rows: int  # elements of a tile
    classes: int  # classes of a tile
    warps: int  # warps that work on it
    unroll: int = 1  # iterations of a loop over classes that are in flight at once
    registers: int | None = None  # the most a thread may use, so that more threads fit; None for no limit
    tiles: int = 1  # tiles that a program works on, one after another


def tiling(classes: int, elements: int, adjacent: bool, bytes_each: int, numbers_per_class: int) -> Tiling:
    """The division that was measured best on an H200.

    Args:
        classes: K.
        elements: how many lie in a row.
        adjacent: whether memory holds the classes of an element side by side.
        bytes_each: size of a logit.
        numbers_per_class: how many numbers the loss has for every class.
    """
    most = max(2, 1 << max(0, classes - 1).bit_length())
    together = max(1, 1 << max(0, elements - 1).bit_length())
    if most * together <= _SINGLE_PROGRAM:
        return Tiling(together, most, max(4, most * together // 1024))
    if not adjacent:  # every thread has elements of its own and goes through their classes
        if bytes_each > 2 and numbers_per_class < 2:
            return Tiling(512, 4, 4, unroll=4)
        return Tiling(512, 1, 4, unroll=7, registers=64)
    if most > 16384:  # more than fit at once
        return Tiling(1, 8192, 8, unroll=4)
    # Few warps, which need not wait for one another, with as many logits as their registers hold. A single
    # warp holds a whole element and goes on to the next if there are more than a GPU works on at once.
    if most <= 1024 and numbers_per_class == 0:
        rows = 1024 // most
        tiles = min(8, 1 << max(0, (elements // (2048 * rows)).bit_length() - 1))
        return Tiling(rows, most, 1, registers=128, tiles=tiles)
    rows = max(1, 2048 // most)
    return Tiling(rows, most, max(1, rows * most // 1024), registers=128)


class _Plan:
    """A prepared launch: everything that depends on shapes and on the kind of the loss.

    Strides come from logits, slopes and target as `arrange` returns them. Later batches of the same kind only
    pass addresses.
    """

    def __init__(
        self,
        composition: Composition,
        logits: Tensor,
        slopes: Tensor,
        target: Tensor,
        options: Options,
        gradient: bool,
        upstream: Tensor | None,
    ) -> None:
        reduction, ignore_index, class_weight, *_ = options
        classes, soft = logits.shape[1], target.is_floating_point()
        strides: tuple[int, ...]
        slope_strides: tuple[int, ...]
        target_strides: tuple[int, ...]
        if logits.ndim == 2:
            outer, inner = 1, logits.shape[0]
            strides, slope_strides = ((0, part.stride(1), part.stride(0)) for part in (logits, slopes))
            target_strides = (0, target.stride(1) if soft else 0, target.stride(0))
        else:
            outer, inner = logits.shape[0], logits.shape[2]
            strides, slope_strides = logits.stride(), slopes.stride()
            target_strides = target.stride() if soft else (target.stride(0), 0, target.stride(1))
        first = None if composition.first is None else composition.first.device
        penalty = None if composition.penalty is None else composition.penalty.device
        assert isinstance(first, FirstTerm | None)
        assert isinstance(penalty, PenaltyTerm | None)
        tile = tiling(
            classes, inner, strides[1] == 1, logits.element_size(), _per_class(composition, classes)
        )
        programs = -(-inner // (tile.rows * tile.tiles)) * outer
        each = reduction == "none"
        alone = programs == 1 and tile.tiles == 1 and not each
        # Numbers that programs leave for the last one to add up; 0 if there is one program, no reduction, or
        # an upstream gradient.
        self.findings = 0 if alone or each or upstream is not None else 2 * programs + 1
        limits = {} if tile.registers is None else {"maxnreg": tile.registers}
        self.start = Launcher(
            device.loss_and_gradient, programs, logits.device, num_warps=tile.warps, **limits
        )
        weight = 1 / max(1, outer * inner) if reduction == "mean" else 1.0
        count = reduction == "mean" and not soft
        self.others = (  # arguments of `start` after its tensors and named numbers
            inner,
            *strides,
            *target_strides,
            *slope_strides,
            ignore_index,
            weight,
            float(outer * inner),
            classes,
            None if first is None else jitted(first.value),
            first is not None and first.uses_lower,
            None if penalty is None else jitted(penalty.parameters),
            None if penalty is None else jitted(penalty.sums),
            None if penalty is None else jitted(penalty.value),
            None if penalty is None else jitted(penalty.rest),
            "" if penalty is None else penalty.variant,
            composition.transforms_logits,
            soft,
            class_weight is not None,
            count,
            gradient,
            each,
            0 if upstream is None else 2 if upstream.ndim else 1,
            tile.classes >= classes,
            alone,
            math.gcd(strides[2], slope_strides[2], 16),
            tile.unroll if tile.classes < classes else 1,
            tile.tiles,
            tile.rows,
            tile.classes,
        )
        size, block = logits.numel(), 4096
        many = max(1, min(-(-size // block), 528))
        self._scale = Launcher(device.scale_in_place, many, logits.device, num_warps=8)
        self._scaling = (size, block)

    def scale(self, gradient: Tensor, upstream: Tensor, correction: Tensor) -> None:
        """Multiply the gradient by two numbers on the device."""
        self._scale((gradient, upstream, correction), *self._scaling)


def _per_class(composition: Composition, classes: int) -> int:
    numbers: list[Value | None] = [composition.offset]
    if composition.penalty is not None:
        numbers += composition.penalty.numbers.values()
    return sum(isinstance(number, Tensor) and number.shape == (classes,) for number in numbers)


_plans: dict[Any, _Plan | Literal[False]] = {}  # by kind of batch, see `_prepared`
_MOST_PLANS = 4096  # where shapes never end


class Launched(NamedTuple):
    """The result of a launch."""

    value: Tensor  # the loss; arbitrary where there was an upstream gradient
    gradient: Tensor | None  # the gradient, if asked for
    correction: Tensor | None  # begins with a factor that the gradient still needs; None for no factor
    plan: _Plan  # the plan that was launched


def launch(
    composition: Composition,
    logits: Tensor,
    target: Tensor,
    options: Options,
    *,
    gradient: bool,
    upstream: Tensor | None = None,
) -> Launched:
    """Check a batch and run the kernel.

    On a GPU, checks and views depend on shapes and types alone. A batch of a kind that was launched before
    is therefore not checked again, unless it has to be copied.

    Args:
        composition: what to compute; it must have a device form.
        logits: ``(B, K, *S)``.
        target: labels ``(B, *S)`` or probabilities ``(B, K, *S)``.
        options: reduction, ignored label and class weights (with labels only).
        gradient: whether to compute the gradient.
        upstream: an upstream gradient, contiguous, which must include the correction of the first launch;
            the loss is then left out.

    Raises:
        TypeError, ValueError: as `calibrant.layout.arrange`.
    """
    numbers, kinds = _numbers(composition)
    weight = options.class_weight
    key = (
        *kinds,
        composition.transforms_logits,
        options.reduction,
        options.ignore_index,
        options.num_classes,
        options.soft,
        None if weight is None else (weight.dtype, weight.data_ptr() % 16),
        logits.shape,
        logits.stride(),
        logits.dtype,
        logits.data_ptr() % 16,
        logits.device,
        target.shape,
        target.stride(),
        target.dtype,
        target.device,
        target.data_ptr() % 16,
        gradient,
        None if upstream is None else (upstream.dtype, upstream.ndim, upstream.data_ptr() % 16),
    )
    shape = logits.shape[:1] + logits.shape[2:] if options.reduction == "none" else ()
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _prepared(composition, logits, target, options, gradient, upstream)
    if plan is False:
        elements = options.arrange(logits, target)
        arranged = launch(
            composition, elements.logits, elements.given, options, gradient=gradient, upstream=upstream
        )
        found = arranged.gradient
        return arranged._replace(
            value=arranged.value.view(shape),
            gradient=None if found is None else unflatten(found, logits.shape),
        )
    slopes = torch.empty_like(logits) if gradient else None
    found = finished = None
    if plan.findings:
        found = torch.empty(plan.findings, dtype=torch.float32, device=logits.device)
        finished = _finished(logits.device)
    # Not a part of a larger tensor: autograd forbids changing those in place, as `loss /= steps` does.
    value = torch.empty(shape, dtype=torch.float32, device=logits.device)
    tensors = (logits, target, weight, found, finished, value, slopes, upstream)
    plan.start(tensors, *numbers, *plan.others)
    return Launched(value, slopes, found, plan)


def _finished(where: torch.device) -> Tensor:
    """A number 0 on the device in which the programs of a launch count themselves; they leave it at 0.

    Launches on the default stream run one after another and share one number: filling a new one takes the
    host as long as a launch. Launches on other streams may overlap, and CUDA graphs are recorded there.
    """
    if where.type == "cuda" and _stream_of()(where.index) == 0:
        return _shared_by_launches(where)
    return torch.zeros((), dtype=torch.int32, device=where)


@cache
def _stream_of() -> Callable[[int], int]:
    """Triton's function that gives the handle of a GPU's current stream; 0 is the default stream.

    `torch.cuda.current_stream` takes the host as long as filling a new number.
    """
    from triton.runtime import driver

    current: Callable[[int], int] = driver.active.get_current_stream
    return current


@cache
def _shared_by_launches(where: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=where)


def _prepared(
    composition: Composition,
    logits: Tensor,
    target: Tensor,
    options: Options,
    gradient: bool,
    upstream: Tensor | None,
) -> _Plan | Literal[False]:
    """Check a batch, and plan launches for batches of its kind; False if they must be arranged each time.

    That is so where arranging copies, or where a gradient like the logits has no such view as they have.
    """
    elements = options.arrange(logits, target)
    rows, given = elements.logits, elements.given
    if rows.data_ptr() != logits.data_ptr() or given.data_ptr() != target.data_ptr():
        return False
    slopes = torch.empty_like(logits) if gradient else logits
    slope_rows = slopes if rows.shape == logits.shape else options.arrange(slopes, target).logits
    if slope_rows.data_ptr() != slopes.data_ptr() or slope_rows.shape != rows.shape:
        return False
    return _Plan(composition, rows, slope_rows, given, options, gradient, upstream)


def _numbers(composition: Composition) -> tuple[list[Any], list[Any]]:
    """The named numbers as the kernel takes them, and what the compiled kernel depends on."""
    kinds: list[Any] = []
    groups: list[Any] = []
    for part in (composition.first, composition.penalty):
        if part is None:
            groups.append(_pack({}, 0.0, kinds))
        else:
            kinds.append(part.device)
            groups.append(_pack(part.numbers, part.factor, kinds))
    if composition.transforms_logits:
        offset = 0.0 if composition.offset is None else composition.offset
        view: dict[str, Value] = {"scale": composition.scale, "offset": offset}
        groups.append(_pack(view, float(composition.divided), kinds))
    else:
        groups.append(_plain_view())
    return groups, kinds


@cache
def _plain_view() -> Any:
    return _pack({"scale": 1.0, "offset": 0.0}, 0.0, [])


def _pack(named: Mapping[str, Value], factor: float, kinds: list[Any]) -> Any:
    numbers = [_plain_number(factor)]
    for value in named.values():
        if isinstance(value, Tensor):
            size = 0 if value.numel() == 1 else value.numel()
            numbers.append(device.Number(value, 0.0, _constant(size)))
            kinds.append((size, value.dtype, value.data_ptr() % 16))
        else:
            numbers.append(_plain_number(value))
            kinds.append(None)
    return _group(*named)._make(numbers)


@lru_cache(1 << 14)
def _plain_number(value: float) -> device.Number:
    value = float(value)
    return device.Number(value, value - ctypes.c_float(value).value, _constant(-1))


@cache
def _group(*names: str) -> Any:
    return namedtuple("Numbers", ("factor", *names))


@cache
def _constant(value: int) -> Any:
    import triton.language as tl

    return tl.constexpr(value)
