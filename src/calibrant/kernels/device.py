"""The GPU kernel behind the per-sample losses: it reads the logits once and writes their gradient once.

A tile holds ``R`` elements and ``BK`` classes. What differs between losses are a first term and a penalty,
functions that stand beside the losses they belong to and are compiled into the kernel; see
`calibrant.kernels.composition` for what they take and return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from calibrant.kernels.source import device_function

if TYPE_CHECKING:
    import triton.language as tl


class Number(NamedTuple):
    """A named number of a loss, as the kernel gets it."""

    value: Any  # the number itself, or a pointer where it is a tensor
    rest: Any  # what rounding to float32 takes from a plain number
    size: Any  # -1 for a plain number, 0 for a tensor of one, n for a tensor of n; a constant of the kernel


class Tile(NamedTuple):
    """Some classes of some elements, ``(R, BK)`` each."""

    logits: Any  # the logits, after scale and offset
    shifted: Any  # the same minus their maximum over all classes
    exponential: Any  # ``exp(shifted)``
    inside: Any  # false beyond the last class
    is_target: Any  # true at the label; false everywhere for probability targets
    target: Any  # probability targets; arbitrary for labels


class Element(NamedTuple):
    """What is known of each element after the sums over its classes, ``(R,)`` each."""

    p: Any  # probability of the true class
    doubt: Any  # ``1 - p``, with all its digits
    log_p: Any  # ``log p``; for probability targets ``Σ t_k log s_k``
    lower: Any  # probability of the best class strictly below the true one, if the first term asks for it
    total: Any  # sum of the exponentials
    log_total: Any  # its logarithm
    at_target: Any  # exponential of the true class
    others: Any  # sum of the exponentials of the other classes


# ------------------------------------------------------------------------------ for first terms and penalties


@device_function
def number(named):
    """One number, in float32."""
    if named.size < 0:
        value = named.value
    else:
        value = tl.load(named.value).to(tl.float32)
    return value


@device_function
def per_class(named, columns, K, other):
    """A number for each class of a tile, ``(1, BK)``, or one for all; ``other`` beyond the last class."""
    if named.size <= 0:
        value = number(named)
    else:
        value = tl.load(named.value + columns, mask=columns < K, other=other).to(tl.float32)[None, :]
    return value


@device_function
def exact_per_class(named, columns, K, other):
    """`per_class` as two float32 numbers whose sum has more digits than one."""
    if named.size < 0:
        value = named.value
        rest = named.rest
    else:
        if named.size == 0:
            wide = tl.load(named.value).to(tl.float64)
        else:
            wide = tl.load(named.value + columns, mask=columns < K, other=other).to(tl.float64)[None, :]
        value = wide.to(tl.float32)
        rest = (wide - value.to(tl.float64)).to(tl.float32)
    return value, rest


@device_function
def exp(x):
    """The exponential, or 0 where it is below the smallest normal number; `tl.exp` takes twice as long."""
    return tl.exp2(x * 1.4426950408889634)


@device_function
def two_sum(one, other):
    """The sum, and its rounding error."""
    total = one + other
    back = total - one
    return total, (one - (total - back)) + (other - back)


@device_function
def log1p(x):
    """log(1 + x) for x ≥ 0, without cancellation near 0."""
    z = x / (2 + x)
    square = z * z
    series = (
        2 * z * (1 + square * (0.33333334 + square * (0.2 + square * (0.14285715 + square * 0.11111111))))
    )
    return tl.where(x < 0.5, series, tl.log(1 + x))


# ------------------------------------------------------------------------------------------------- the kernel


@device_function
def _inside(columns, K, BK):
    """Which classes exist, ``(1, BK)``; known to the compiler if all of them do."""
    return tl.full((1, BK), True, tl.int1) if K % BK == 0 else (columns < K)[None, :]


@device_function
def _read(rows, columns, stride, present, K, BK, other):
    """Some classes of some elements, in float32; ``other`` beyond the last class and element."""
    here = present[:, None] & _inside(columns, K, BK)
    places = rows[:, None] + columns.to(tl.int64)[None, :] * stride
    return tl.load(places, mask=here, other=other).to(tl.float32)


@device_function
def _logits(row, columns, stride, present, origin, view, K, BK, SCALED):
    """Some classes of some elements, as ``scale · (x - origin) + offset`` where a loss has them."""
    x = _read(row, columns, stride, present, K, BK, float("-inf"))
    if SCALED:
        x = (x - origin[:, None]) * number(view.scale) + per_class(view.offset, columns, K, 0.0)
        x = tl.where((columns < K)[None, :], x, float("-inf"))  # whatever the sign of the scale
    return x


@device_function
def _tile(x, columns, top, label, soft_row, target_k, present, K, BK, SOFT):
    shifted = x - top[:, None]
    e = exp(shifted)
    t = e
    if SOFT:
        t = _read(soft_row, columns, target_k, present, K, BK, 0.0)
    inside = _inside(columns, K, BK)
    return Tile(x, shifted, e, inside, columns[None, :] == label[:, None], t)


@device_function
def _parameters(PARAMETERS, numbers, columns, K):
    """What the penalty reads for each class of a tile."""
    if PARAMETERS is None:
        found = 0.0
    else:
        found = PARAMETERS(numbers, columns, K)
    return found


@device_function
def _below(x, at, best, hits):
    """The highest logit below that of the true class so far, and how many classes have it."""
    below = tl.where(x < at[:, None], x, float("-inf"))
    leader = tl.max(below, 1)
    count = tl.sum(tl.where(below == leader[:, None], 1.0, 0.0), 1)
    hits = tl.where(leader > best, count, tl.where(leader == best, hits + count, hits))
    return tl.maximum(best, leader), hits


@device_function
def _correction(counted, scale, elements):
    """What turns a mean over all elements into one over those that count; exactly 1 where all do."""
    fraction = counted * scale
    return tl.where((counted == elements) | (fraction <= 0), 1.0, 1 / fraction)


@device_function
def _finish(found, finished, values, losses, counted, weight, elements, COUNT):
    """Store this program's sums.

    The last program to finish adds up the sums of all in a fixed order, stores the loss and the factor that
    corrects the gradient, and resets `finished` for the next launch.
    """
    together: tl.constexpr = 1024
    place, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(found + 1 + place, losses)
    if COUNT:
        tl.store(found + 1 + programs + place, counted)
    if tl.atomic_add(finished, 1) == programs - 1:
        value = tl.zeros((together,), tl.float32)
        count = tl.zeros((together,), tl.float32)
        for start in range(0, programs, together):
            index = start + tl.arange(0, together)
            value += tl.load(found + 1 + index, mask=index < programs, other=0.0)
            if COUNT:
                count += tl.load(found + 1 + programs + index, mask=index < programs, other=0.0)
        by = 1.0
        if COUNT:
            by = _correction(tl.sum(count), weight, elements)
        tl.store(values, tl.sum(value) * by)
        tl.store(found, by)
        tl.store(finished, 0)


@device_function
def loss_and_gradient(
    logits,
    target,
    class_weight,
    found,
    finished,
    values,
    gradient,
    upstream,
    first,
    penalty,
    view,
    S,
    logits_b,
    logits_k,
    logits_s,
    target_b,
    target_k,
    target_s,
    gradient_b,
    gradient_k,
    gradient_s,
    ignore_index,
    weight,
    elements,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    LOWER: tl.constexpr,
    PARAMETERS: tl.constexpr,
    SUMS: tl.constexpr,
    PENALTY: tl.constexpr,
    REST: tl.constexpr,
    VARIANT: tl.constexpr,
    SCALED: tl.constexpr,
    SOFT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COUNT: tl.constexpr,
    GRADIENT: tl.constexpr,
    EACH: tl.constexpr,
    UPSTREAM: tl.constexpr,
    SINGLE: tl.constexpr,
    ALONE: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNROLL: tl.constexpr,
    TILES: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """Losses of TILES times R elements, their sum, and the gradient of their logits.

    Element ``s`` of batch entry ``b`` has its class ``k`` at ``b·logits_b + k·logits_k + s·logits_s``, where
    ``ALIGNED`` divides ``logits_s`` and ``gradient_s``. Each element enters by ``weight``. For P programs
    `found` has a place for the gradient's correction, P sums of losses, and P sums of what the mean ought to
    divide by. `finished` is 0 before and after: programs count themselves there, and the last one adds up
    the sums of all. A program that is ``ALONE`` needs none of this.
    """
    blocks = tl.cdiv(S, R * TILES)
    place = tl.program_id(0)
    b = (place // blocks).to(tl.int64)
    k = tl.arange(0, BK)
    counted = 0.0
    losses = 0.0
    for step in range(TILES):
        s = (place % blocks * TILES + step) * R + tl.arange(0, R)
        present = s < S
        # Known to be aligned, the numbers of a row travel in groups.
        row = logits + b * logits_b + tl.multiple_of(s.to(tl.int64) * logits_s, ALIGNED)
        factor = tl.full((R,), 1.0, tl.float32) * weight
        if SOFT:
            label = tl.full((R,), -1, tl.int32)
            valid = present
            soft_row = target + b * target_b + s.to(tl.int64) * target_s
        else:
            label = tl.load(
                target + b * target_b + s.to(tl.int64) * target_s, mask=present, other=ignore_index
            ).to(tl.int64)
            valid = present & (label != ignore_index)
            known = valid & (label >= 0) & (label < K)
            label = tl.where(known, label, 0).to(tl.int32)
            soft_row = target
            if WEIGHTED:
                factor *= tl.load(class_weight + label, mask=known, other=0.0).to(tl.float32)
        factor = tl.where(valid, factor, 0.0)
        if COUNT:
            weighed = tl.where(valid, 1.0, 0.0)
            if WEIGHTED:
                weighed = factor / weight
            if ALONE:
                factor *= _correction(tl.sum(weighed), weight, elements)
            else:
                counted += tl.sum(weighed)
        at = tl.zeros((R,), tl.float32)
        origin = at
        if SCALED:  # the largest logit first: a number common to all of a row must not cost digits
            highest = tl.full((R, BK), float("-inf"), tl.float32)
            for start in tl.range(0, 1 if SINGLE else K, BK, loop_unroll_factor=UNROLL):
                seen = _read(row, start + k, logits_k, present, K, BK, float("-inf"))
                highest = tl.maximum(highest, seen)
            origin = tl.max(highest, 1)  # after the loop: inside it, a pass of the compiler fails
            origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)
        if not SOFT:
            at = tl.load(row + label.to(tl.int64) * logits_k, mask=known, other=float("nan")).to(tl.float32)
            if SCALED:
                at = (at - origin) * number(view.scale)
                if view.offset.size > 0:
                    at += tl.load(view.offset.value + label).to(tl.float32)
                else:
                    at += number(view.offset)

        # The maximum and the sum of exponentials: at once, or while the row passes by.
        best = tl.full((R,), float("-inf"), tl.float32)
        hits = tl.zeros((R,), tl.float32)
        if SINGLE:
            x = _logits(row, k, logits_k, present, origin, view, K, BK, SCALED)
            if LOWER:
                best, hits = _below(x, at, best, hits)
            top = tl.max(x, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            tile = _tile(x, k, top, label, soft_row, target_k, present, K, BK, SOFT)
            parameters = _parameters(PARAMETERS, penalty, k, K)
            if ALONE and not SOFT:
                total = tl.sum(tl.where(tile.is_target, 0.0, tile.exponential), 1)
            else:
                total = tl.sum(tile.exponential, 1)
        else:
            top = tl.full((R,), float("-inf"), tl.float32)
            total = tl.zeros((R,), tl.float32)
            for start in tl.range(0, K, BK, loop_unroll_factor=UNROLL):
                c = start + k
                x = _logits(row, c, logits_k, present, origin, view, K, BK, SCALED)
                higher = tl.maximum(top, tl.max(x, 1))
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * exp(top - safe) + tl.sum(exp(x - safe[:, None]), 1)
                top = higher
                if LOWER:
                    best, hits = _below(x, at, best, hits)
            top = tl.where(top == float("-inf"), 0.0, top)

        shifted_at_target = tl.zeros((R,), tl.float32)
        at_target = tl.zeros((R,), tl.float32)
        if not SOFT:
            shifted_at_target = tl.where(valid, at - top, 0.0)
            at_target = exp(shifted_at_target)
        # `total - at_target` cancels for a confident prediction. A small batch (ALONE), where time does not
        # matter, therefore sums the other classes by themselves.
        others = total if ALONE and SINGLE else tl.maximum(total - at_target, 0.0)
        mass = tl.full((R,), 1.0, tl.float32)

        # Sums over classes that the penalty asks for. They are taken after the loop: inside it, a pass of
        # the compiler that tries to do the same has been seen to lose classes.
        one = tl.zeros((R,), tl.float32)
        two = tl.zeros((R,), tl.float32)
        three = tl.zeros((R,), tl.float32)
        if SOFT or SUMS is not None:
            ones = tl.zeros((R, BK), tl.float32)
            twos = tl.zeros((R, BK), tl.float32)
            threes = tl.zeros((R, BK), tl.float32)
            masses = tl.zeros((R, BK), tl.float32)
            products = tl.zeros((R, BK), tl.float32)
            for start in tl.range(0, 1 if SINGLE else K, BK, loop_unroll_factor=UNROLL):
                if SINGLE:
                    here = tile
                    these = parameters
                else:
                    c = start + k
                    x = _logits(row, c, logits_k, present, origin, view, K, BK, SCALED)
                    here = _tile(x, c, top, label, soft_row, target_k, present, K, BK, SOFT)
                    these = _parameters(PARAMETERS, penalty, c, K)
                if SOFT:
                    masses += here.target
                    products += tl.where(here.target == 0, 0.0, here.target * here.shifted)
                if SUMS is not None:
                    more = SUMS(here, top, these, VARIANT, SOFT, ALONE)
                    ones += more[0]
                    twos += more[1]
                    threes += more[2]
            if SOFT:
                mass = tl.sum(masses, 1)
                shifted_at_target = tl.sum(products, 1)
            if SUMS is not None:
                one = tl.sum(ones, 1)
                two = tl.sum(twos, 1)
                three = tl.sum(threes, 1)

        total = others + at_target
        if SOFT:
            log_total = tl.log(total)
            log_p = shifted_at_target - mass * log_total
        else:
            log_p = shifted_at_target - tl.log(total)
            if ALONE:
                log_p = tl.where(shifted_at_target > -1, -log1p(others / at_target), log_p)
            log_total = shifted_at_target - log_p
        lower = tl.zeros((R,), tl.float32)
        if LOWER:
            lower = exp(best - top) / total
        element = Element(
            at_target / total, others / total, log_p, lower, total, log_total, at_target, others
        )

        # The gradient is `along` times the exponentials, but `slope` at the true class, and `REST`.
        value = tl.zeros((R,), tl.float32)
        along = tl.zeros((R,), tl.float32)
        slope = tl.zeros((R,), tl.float32)
        by_log_p = tl.zeros((R,), tl.float32)
        at_best = tl.zeros((R,), tl.float32)
        if FIRST is not None:
            outcome = FIRST(element, first)
            first_factor = number(first.factor)
            value += first_factor * outcome[0]
            by_log_p += first_factor * outcome[1]
            along -= by_log_p * mass
            slope += by_log_p * element.doubt
            if LOWER:
                at_best = first_factor * outcome[2] * lower
                along -= at_best
                slope -= at_best * element.p
                at_best = at_best / tl.maximum(hits, 1.0)
        aside = tl.zeros((R,), tl.float32)
        penalty_factor = number(penalty.factor)
        if PENALTY is not None:
            costs = PENALTY(one, two, three, element, K, SOFT, ALONE)
            value += penalty_factor * costs[0]
            along += penalty_factor * costs[1]
            slope += penalty_factor * costs[2]
            aside += costs[3]

        by_scale = 1.0  # of the gradient: the chain rule for scale · x
        if SCALED:
            by_scale = number(view.scale)
            if number(view.factor) > 0:  # divided by the scale
                value /= by_scale
                by_scale = 1.0
        value = tl.where(valid, value * factor, 0.0)
        if UPSTREAM == 0:
            if EACH:
                tl.store(values + b * S + s, value, mask=present)
            elif ALONE:
                tl.store(values, tl.sum(value))
            else:
                losses += tl.sum(value)
        elif UPSTREAM == 1:
            factor *= tl.load(upstream).to(tl.float32)
        else:
            factor *= tl.load(upstream + b * S + s, mask=present, other=0.0).to(tl.float32)
        if GRADIENT:
            out = gradient + b * gradient_b + tl.multiple_of(s.to(tl.int64) * gradient_s, ALIGNED)
            factor *= by_scale
            along = along * factor / total
            slope *= factor
            by_log_p *= factor
            at_best *= factor
            for start in tl.range(0, 1 if SINGLE else K, BK, loop_unroll_factor=UNROLL):
                columns = start + k
                if SINGLE:
                    here = tile
                    these = parameters
                else:
                    x = _logits(row, columns, logits_k, present, origin, view, K, BK, SCALED)
                    here = _tile(x, columns, top, label, soft_row, target_k, present, K, BK, SOFT)
                    these = _parameters(PARAMETERS, penalty, columns, K)
                by_class = along[:, None] * here.exponential
                if not SOFT:
                    by_class = tl.where(here.is_target, slope[:, None], by_class)
                elif FIRST is not None:
                    by_class += by_log_p[:, None] * here.target
                if LOWER:
                    by_class += tl.where(here.logits == best[:, None], at_best[:, None], 0.0)
                if REST is not None:
                    rest = REST(here, top, these, element, aside, K, VARIANT, SOFT, ALONE)
                    by_class += (factor * penalty_factor)[:, None] * rest
                # An ignored element has a gradient of exactly 0 whatever its logits are.
                by_class = tl.where(valid[:, None], by_class, 0.0)
                tl.store(
                    out[:, None] + columns.to(tl.int64)[None, :] * gradient_k,
                    by_class,
                    mask=present[:, None] & here.inside,
                )
    if UPSTREAM == 0 and not EACH and not ALONE:
        _finish(found, finished, values, losses, counted, weight, elements, COUNT)


@device_function
def scale_in_place(tensor, factor, correction, size, BLOCK: tl.constexpr):
    """Multiply by two numbers on the device; by 1, the usual case, without reading the tensor."""
    by = tl.load(factor).to(tl.float32) * tl.load(correction)
    if by != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < size
            tl.store(tensor + index, tl.load(tensor + index, mask=inside).to(tl.float32) * by, mask=inside)
