"""What `observe` and the metrics sum up, on a GPU: kernels read the logits once, and write little.

Operations of torch would move logits and temporaries of their size a dozen times.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrant.kernels.fused import EXTRAS, Fused, run, runs_triton
from calibrant.layout import Elements

_GAPS = len(EXTRAS)

_MOST_CLASSES = 4096  # that a tile holds at once
_FEW_CLASSES = 16  # up to which a thread looks at one class of an element after the other
_PART = 128  # classes of a tile where their sums are too many to be kept until the end
_PROCESSORS = 132  # of an H200; what depends on it is only how many programs share the work
_CACHE = 1 << 25  # bytes of logits that are read twice while they are near


def can_measure(logits: Tensor) -> bool:
    """Whether the kernels can sum these up; a compiler is left to make its own of the plain operations."""
    return runs_triton(logits) and not torch.compiler.is_compiling()


class Outcomes(NamedTuple):
    """What is known of each element after one look at its logits.

    Attributes:
        total: sum of the exponentials of logits minus their maximum, ``(A[, S])``.
        prediction: the first class that attains the maximum, int64.
        at_target: the true class's logit minus the maximum.
        others: sum of the squared exponentials of all classes but the true one.
    """

    total: Tensor
    prediction: Tensor
    at_target: Tensor
    others: Tensor


def outcomes(elements: Elements) -> Outcomes:
    """One look at every element; what stands at ignored ones means nothing.

    Args:
        elements: a batch with labels. One out of range has NaN ``at_target``.
    """
    total, prediction, at_target, others, _ = _outcomes(elements, scores=True)
    return Outcomes(total, prediction, at_target, others)


def top_classes(elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
    """The total and the prediction of `Outcomes`, and a scalar: NaN or 0 as in `nan_if_invalid`."""
    total, prediction, _, _, flaws = _outcomes(elements, scores=False)
    return total, prediction, flaws.sum()


def margin_sums(elements: Elements, recipe: Fused) -> list[Tensor]:
    """Sums by class of what happens at the margin, over the elements that count.

    Args:
        elements: the batch.
        recipe: of a loss with a penalty of the distance below the maximum.

    Returns:
        The number of elements, NaN as in `nan_if_invalid`. Then ``(K,)`` sums: for ``"hinge"`` of the
        distance beyond the margin, for other penalties of their slope and of the violation.
    """
    count, sums, _ = _class_sums(elements, EXTRAS.index(recipe.extra), recipe)
    # Logits that are not finite show in the sums by themselves.
    return [count + 0 * sums.sum(), *(sums[:1] if recipe.extra == "hinge" else sums)]


def gap_sums(elements: Elements, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Probability minus occurrence of each class, summed in bins of that probability.

    Args:
        elements: a batch with labels.
        edges: float32 edges of bins ``(lo, hi]`` of equal width on ``[0, 1]``, ``(bins + 1,)``.

    Returns:
        The number of elements, and ``(K, bins)`` sums.
    """
    count, (first, last), gap = _class_sums(elements, _GAPS, Fused(), edges)
    gap[:, 0] += first
    gap[:, -1] += last
    return count, gap


class _Layout(NamedTuple):
    """Elements as the kernels see them: ``outer`` times ``inner`` of them.

    Attributes:
        deep: whether it is the elements that lie side by side, and not the classes.
        aligned: what all strides are divisible by, but for the one of what lies side by side.
    """

    outer: int
    inner: int
    strides: tuple[int, int, int]
    deep: bool
    aligned: int

    @classmethod
    def of(cls, logits: Tensor) -> _Layout:
        if logits.ndim == 2:
            outer, inner = 1, logits.shape[0]
            strides = (0, logits.stride(1), logits.stride(0))
        else:
            outer, _, inner = logits.shape
            strides = (logits.stride(0), logits.stride(1), logits.stride(2))
        deep = strides[2] == 1 and strides[1] != 1
        return cls(outer, inner, strides, deep, math.gcd(strides[0], strides[1 if deep else 2], 16))


def _per_element(elements: Elements) -> tuple[Tensor, Tensor]:
    """Labels, or anything where there are none, and which elements count, in the order of the elements."""
    return elements.target.contiguous(), elements.valid.contiguous().view(torch.uint8)


def _power_of_two(number: int) -> int:
    return 1 << max(1, (number - 1).bit_length())


def _outcomes(elements: Elements, *, scores: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from calibrant.kernels import measuring_device as device

    logits, classes = elements.logits.detach(), elements.logits.shape[1]
    target, valid = _per_element(elements)
    outer, inner, strides, deep, aligned = _Layout.of(logits)
    tile = _power_of_two(classes)
    if deep:  # every thread has elements of its own, and passes through their classes
        rows, tile, warps = 512, min(4, tile) if logits.element_size() == 4 else 1, 4
    elif classes <= _FEW_CLASSES:
        rows, tile, warps = 128, 1, 4
    else:
        # One warp to a row, as far as its registers go: what threads of a warp find they add up quickly.
        tile = min(tile, _MOST_CLASSES)
        rows, warps = max(1, min(16, 2048 // tile)), max(1, tile // 1024)
    programs = outer * -(-inner // rows)
    total = torch.empty(valid.shape, dtype=torch.float32, device=logits.device)
    prediction = torch.empty(valid.shape, dtype=torch.int64, device=logits.device)
    at_target, others = (torch.empty_like(total), torch.empty_like(total)) if scores else (total, total)
    flaws = total if scores else total.new_empty(programs)
    flags = (classes, scores, deep, aligned, rows, tile)
    run(
        device.outcomes,
        programs,
        (inner, *strides, *flags),
        logits,
        target,
        valid,
        total,
        prediction,
        at_target,
        others,
        flaws,
        inner,
        *strides,
        *flags,
        num_warps=warps,
    )
    return total, prediction, at_target, others, flaws


def _class_sums(
    elements: Elements, what: int, recipe: Fused, edges: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The number of elements, ``(2, K)`` sums, and ``(K, bins)`` of what they leave out."""
    from calibrant.kernels import measuring_device as device

    logits, classes = elements.logits.detach(), elements.logits.shape[1]
    target, valid = _per_element(elements)
    outer, inner, strides, deep, aligned = _Layout.of(logits)
    tile = _power_of_two(classes)
    single = not deep and tile <= _MOST_CLASSES
    if single:
        # Each thread keeps the sums of its own classes, in registers, over many elements.
        warps = max(1, tile // 256)
        rows = max(1, warps * (256 if what == _GAPS else 512) // tile)
    elif deep:
        rows, tile, warps = 256, min(2, tile), 1
    else:
        rows, tile, warps = 32, _PART, 8
    tiles = outer * -(-inner // rows)
    if single:
        programs = min(tiles, max(_PROCESSORS, min(16 * _PROCESSORS // warps, tiles // 16)))
    else:
        near = _CACHE // (rows * classes * logits.element_size())
        programs = min(tiles, max(8 * _PROCESSORS, near))

    place: dict[str, Any] = {"device": logits.device}
    counts = torch.empty(programs, dtype=torch.float64, **place)
    # What many tiles add up to is kept in float64, what one tile has computed in float32.
    shape = (programs if single else tiles, 2, classes)
    sums = torch.empty(shape, dtype=torch.float64 if single else torch.float32, **place)
    bins = 1 if edges is None else len(edges) - 1
    between = torch.zeros((classes, bins) if what == _GAPS else (1, 1), dtype=torch.int64, **place)
    flags = (classes, what, bins, not elements.soft, single, deep, aligned, rows, tile)
    run(
        device.class_sums,
        programs,
        (inner, tiles, *strides, *flags),
        logits,
        target,
        valid,
        counts if recipe.penalty_weight is None else recipe.penalty_weight,
        counts if recipe.multiplier is None else recipe.multiplier,
        counts if edges is None else edges,
        counts,
        sums,
        between,
        inner,
        tiles,
        *strides,
        float(recipe.margin),
        1 / recipe.unit,
        *flags,
        num_warps=warps,
    )
    # The kernel has divided by the elements of a tile, lest sums overflow.
    return counts.sum(), sums.sum(0, dtype=torch.float64) * rows, between.double() / 2**31
