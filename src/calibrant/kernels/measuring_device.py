"""The GPU kernels behind `observe` and the metrics: they read the logits once, or the second time from cache.

A tile holds ``R`` elements and ``BK`` classes. Element ``s`` of batch entry ``b`` has its class ``k`` at
``b·logits_b + k·logits_k + s·logits_s``, its label and whether it counts at ``b·S + s``. ``ALIGNED`` divides
``logits_b`` and the larger of the other two strides: logits known to be aligned travel in groups.
"""

# mypy: ignore-errors
# Triton's language is Python to read, but not to run: it has no types that a checker could follow.

import triton
import triton.language as tl

from calibrant.kernels.device import HINGE, _exp, _penalty

GAPS = tl.constexpr(8)  # what is summed by class: one of the extras of `device`, or this

FIXED_POINT = tl.constexpr(2147483648.0)  # 2^31: as many probabilities as int32 can count fit into int64


@triton.jit
def _elements(tile, target, valid, S, K: tl.constexpr, LABELS: tl.constexpr, R: tl.constexpr):
    """The elements of a tile: where they are, which of them count, their labels, and which labels exist."""
    blocks = tl.cdiv(S, R)
    b = (tile // blocks).to(tl.int64)
    s = (tile % blocks).to(tl.int64) * R + tl.arange(0, R)
    present = s < S
    element = b * S + s
    counted = present & (tl.load(valid + element, mask=present, other=0) != 0)
    label = tl.zeros((R,), tl.int64)
    if LABELS:
        label = tl.load(target + element, mask=counted, other=-1).to(tl.int64)
    known = (label >= 0) & (label < K)
    return b, s, element, present, counted, tl.where(known, label, -1).to(tl.int32), known


@triton.jit
def _rows(logits, b, s, logits_b, logits_s, DEEP: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the elements of a tile have their logits."""
    before = b * logits_b
    within = s * logits_s
    # To say that all is divisible by 1 would make the compiler forget what it knows better.
    if ALIGNED > 1:
        before = tl.multiple_of(before, ALIGNED)
        if not DEEP:
            within = tl.multiple_of(within, ALIGNED)
    return logits + before + within


@triton.jit
def _tile(row, column, logits_k, here, DEEP: tl.constexpr, ALIGNED: tl.constexpr):
    """Some classes of some elements, in float32; minus infinity where there are none."""
    within = column.to(tl.int64) * logits_k
    if DEEP and ALIGNED > 1:
        within = tl.multiple_of(within, ALIGNED)
    return tl.load(row[:, None] + within[None, :], mask=here, other=float("-inf")).to(tl.float32)


@triton.jit
def _more(top, total, x):
    """Maximum and sum of exponentials with some more classes, what shrinks older sums, the exponentials."""
    higher = tl.maximum(top, tl.max(x, 1))
    # Where all classes so far are ruled out there is no maximum to be relative to.
    origin = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = _exp(top - origin)
    e = _exp(x - origin[:, None])
    return higher, total * shrink + tl.sum(e, 1), shrink, e


@triton.jit
def outcomes(
    logits,
    target,
    valid,
    totals,
    predictions,
    at_targets,
    others,
    flaws,
    S,
    logits_b,
    logits_k,
    logits_s,
    K: tl.constexpr,
    SCORES: tl.constexpr,
    DEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """What scores are made of, element by element; or else, program by program, whether all is finite."""
    b, s, element, present, counted, label, known = _elements(tl.program_id(0), target, valid, S, K, True, R)
    row = _rows(logits, b, s, logits_b, logits_s, DEEP, ALIGNED)
    k = tl.arange(0, BK)
    top = tl.full((R,), float("-inf"), tl.float32)
    lowest = tl.full((R, BK), float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    squares = tl.zeros((R,), tl.float32)
    prediction = tl.zeros((R,), tl.int32)
    for start in range(0, K, BK):
        column = start + k
        here = present[:, None] & (column < K)[None, :]
        x = _tile(row, column, logits_k, here, DEEP, ALIGNED)
        higher, total, shrink, e = _more(top, total, x)
        first = tl.min(tl.where(x == higher[:, None], column[None, :], K), 1)
        prediction = tl.where(higher > top, first, prediction)
        if SCORES:
            wrong = tl.where(column[None, :] == label[:, None], 0.0, e)
            squares = squares * shrink * shrink + tl.sum(wrong * wrong, 1)
        else:
            lowest = tl.minimum(lowest, tl.where(here, x, float("inf")))
        top = higher
    total = tl.where(total == 0, float("nan"), total)  # every class is ruled out
    tl.store(totals + element, total, mask=present)
    tl.store(predictions + element, prediction, mask=present)
    if SCORES:
        at = tl.load(row + label.to(tl.int64) * logits_k, mask=known, other=float("nan")).to(tl.float32)
        tl.store(at_targets + element, at - top, mask=present)
        tl.store(others + element, squares, mask=present)
    else:
        # 0·x is NaN just where x is not finite; a maximum that is not leaves its trace in the total.
        flaw = tl.where(known, 0 * total + 0 * tl.min(lowest, 1), float("nan"))
        tl.store(flaws + tl.program_id(0), tl.sum(tl.where(counted, flaw, 0.0)))


@triton.jit
def _parameters(penalty_weight, multiplier, column, K: tl.constexpr, WHAT: tl.constexpr, BK: tl.constexpr):
    """What the penalty of each class depends on."""
    weights = tl.zeros((1, BK), tl.float32)
    multipliers = weights
    if WHAT != HINGE and WHAT != GAPS:
        weights += tl.load(penalty_weight + column, mask=column < K, other=1.0).to(tl.float32)[None, :]
        multipliers += tl.load(multiplier + column, mask=column < K, other=1.0).to(tl.float32)[None, :]
    return weights, multipliers


@triton.jit
def _values(
    shifted,
    total,
    here,
    column,
    label,
    weight,
    multiplier,
    edges,
    between,
    margin,
    per_unit,
    WHAT: tl.constexpr,
    BINS: tl.constexpr,
):
    """Two numbers for each element and class, to be summed by class."""
    if WHAT == GAPS:
        p = tl.math.div_rn(_exp(shifted), tl.zeros_like(shifted) + total[:, None])
        is_target = column[None, :] == label[:, None]
        gap = tl.where(is_target, p - 1, p)
        above_first = p > tl.load(edges + 1)
        in_last = above_first & (p > tl.load(edges + BINS - 1))
        first = tl.where(above_first, 0.0, gap)  # and NaN, which is above nothing
        second = tl.where(in_last, gap, 0.0)
        # The bins between hold few elements: exactly, and in any order, as integers.
        rare = here & above_first & (p <= tl.load(edges + BINS - 1))
        near = tl.where(rare, tl.ceil(p * BINS).to(tl.int32) - 1, 0)
        lower = tl.load(edges + near, mask=rare, other=0.0)
        upper = tl.load(edges + near + 1, mask=rare, other=2.0)
        near += (p > upper).to(tl.int32) - (p <= lower).to(tl.int32)  # which rounding may have missed by one
        amount = (tl.where(rare, p, 0.0) * FIXED_POINT).to(tl.int64)
        amount -= tl.where(is_target, FIXED_POINT, 0.0).to(tl.int64)
        place = between + column.to(tl.int64)[None, :] * BINS + near
        tl.atomic_add(place, amount, mask=rare, sem="relaxed")
    else:
        second = (-shifted - margin) * per_unit
        if WHAT == HINGE:
            first = tl.where(second <= 0, 0.0, second)  # unlike a maximum, keeps NaN
        else:
            _, first = _penalty(shifted, weight, multiplier, margin, per_unit, WHAT)
    return first, second


@triton.jit
def class_sums(
    logits,
    target,
    valid,
    penalty_weight,
    multiplier,
    edges,
    counts,
    sums,
    between,
    S,
    tiles,
    logits_b,
    logits_k,
    logits_s,
    margin,
    per_unit,
    K: tl.constexpr,
    WHAT: tl.constexpr,
    BINS: tl.constexpr,
    LABELS: tl.constexpr,
    SINGLE: tl.constexpr,
    DEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """Two sums by class over the elements that count, divided by R, and the number of those elements.

    Where a tile holds all classes, ``sums`` is ``(programs, 2, K)``, else ``(tiles, 2, K)``.
    """
    k = tl.arange(0, BK)
    number = tl.zeros((R,), tl.float64)
    first_sum = tl.zeros((BK,), tl.float64)
    second_sum = tl.zeros((BK,), tl.float64)
    if SINGLE:
        weights, multipliers = _parameters(penalty_weight, multiplier, k, K, WHAT, BK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        b, s, _element, present, counted, label, known = _elements(tile, target, valid, S, K, LABELS, R)
        number += tl.where(counted, tl.where(known, 1.0, float("nan")), 0.0).to(tl.float64)
        row = _rows(logits, b, s, logits_b, logits_s, DEEP, ALIGNED)
        top = tl.full((R,), float("-inf"), tl.float32)
        total = tl.zeros((R,), tl.float32)
        highest = tl.full((R, BK), float("-inf"), tl.float32)
        for start in range(0, BK if SINGLE else K, BK):
            column = start + k
            here = present[:, None] & (column < K)[None, :]
            x = _tile(row, column, logits_k, here, DEEP, ALIGNED)
            if WHAT == GAPS:
                top, total, _shrink, _e = _more(top, total, x)
            elif SINGLE:
                top = tl.max(x, 1)
            else:
                highest = tl.maximum(highest, x)
            if SINGLE:
                here &= counted[:, None]
                first, second = _values(
                    x - top[:, None],
                    total,
                    here,
                    column,
                    label,
                    weights,
                    multipliers,
                    edges,
                    between,
                    margin,
                    per_unit,
                    WHAT,
                    BINS,
                )
                # Divided by R, so that also the largest of numbers do not overflow.
                first_sum += tl.sum(tl.where(here, first * (1 / R), 0.0), 0).to(tl.float64)
                second_sum += tl.sum(tl.where(here, second * (1 / R), 0.0), 0).to(tl.float64)
        if not SINGLE:
            # After the loop: within it, a pass of the compiler that tries to do just that loses classes.
            if WHAT != GAPS:
                top = tl.max(highest, 1)
            for start in range(0, K, BK):
                column = start + k
                inside = column < K
                here = counted[:, None] & inside[None, :]
                x = _tile(row, column, logits_k, here, DEEP, ALIGNED)
                weights, multipliers = _parameters(penalty_weight, multiplier, column, K, WHAT, BK)
                first, second = _values(
                    x - top[:, None],
                    total,
                    here,
                    column,
                    label,
                    weights,
                    multipliers,
                    edges,
                    between,
                    margin,
                    per_unit,
                    WHAT,
                    BINS,
                )
                out = sums + tl.cast(tile, tl.int64) * 2 * K + column
                tl.store(out, tl.sum(tl.where(here, first * (1 / R), 0.0), 0), mask=inside)
                tl.store(out + K, tl.sum(tl.where(here, second * (1 / R), 0.0), 0), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(number))
    if SINGLE:
        out = sums + tl.program_id(0).to(tl.int64) * 2 * K + k
        tl.store(out, first_sum, mask=k < K)
        tl.store(out + K, second_sum, mask=k < K)
