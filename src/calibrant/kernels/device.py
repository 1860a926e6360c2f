"""The one GPU kernel behind the per-sample losses: it reads the logits once and writes their gradient once.

A tile holds ``R`` elements and ``BK`` classes. ``shifted`` are the logits minus their maximum, ``e`` is the
exponential of that. What differs between losses are the small functions above the kernel, chosen when it is
compiled.
"""

# mypy: ignore-errors
# Triton's language is Python to read, but not to run: it has no types that a checker could follow.

import triton
import triton.language as tl

# What is added to -c log p …
NOTHING = tl.constexpr(0)
UNIFORM = tl.constexpr(1)  # minus the mean of log s, times `amount`
ENTROPY = tl.constexpr(2)  # minus the entropy, times `amount`
SQUARED = tl.constexpr(3)  # the squared error, in place of log p
HINGE = tl.constexpr(4)  # penalties of the distance below the maximum, times `amount`
PHR = tl.constexpr(5)
P2 = tl.constexpr(6)
P3 = tl.constexpr(7)

# … or the base of the power of which -log p is a multiple …
PLAIN = tl.constexpr(0)
DOUBT = tl.constexpr(1)  # 1 - p
BELIEF = tl.constexpr(2)  # 1 + p
DUAL = tl.constexpr(3)  # 1 - p + q

# … and where its exponent is from.
FIXED = tl.constexpr(0)
THRESHOLD = tl.constexpr(1)  # two exponents, by p
BINNED = tl.constexpr(2)  # one per bin of p; a negative one turns 1 - p into 1 + p
RATED = tl.constexpr(3)  # exp(rate (p - accuracy of the bin))


@triton.jit
def _exp(x):
    """exp(x), or 0 where that is below the smallest normal number; `tl.exp` takes twice as long."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _two_sum(one, other):
    """The sum, and what rounding has left out of it."""
    total = one + other
    back = total - one
    return total, (one - (total - back)) + (other - back)


@triton.jit
def _limit(top, margin, margin_rest):
    """The lowest number that is not further below the maximum than the margin, to the last digit.

    By a difference that was rounded, a class right there could be on the wrong side.
    """
    limit, rest = _two_sum(top, -margin)
    limit, rest = _two_sum(limit, rest - margin_rest)
    bits = limit.to(tl.int32, bitcast=True)
    above = tl.where(limit > 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    return tl.where(rest > 0, above, limit)


@triton.jit
def _penalty(shifted, weight, multiplier, margin, per_unit, EXTRA: tl.constexpr, too_far=None):
    """The penalty of each class, and its slope by the violation; ``HINGE`` is told where there is one."""
    if EXTRA == HINGE:
        violation = -shifted * per_unit - margin * per_unit
        value = multiplier * tl.maximum(violation, 0.0)
        slope = tl.where(too_far, multiplier, 0.0)
    elif EXTRA == PHR:
        by_unit = weight * per_unit
        slope = tl.maximum((multiplier - margin * by_unit) - shifted * by_unit, 0.0)
        value = (slope * slope - multiplier * multiplier) * (0.5 / weight)
    else:
        by_unit = weight * per_unit
        scaled = -margin * by_unit - shifted * by_unit  # the violation, times the weight
        above = tl.maximum(scaled, 0.0)
        root = tl.rsqrt(1 - tl.minimum(scaled, 0.0))
        below = root * root  # by two instructions, where a division takes a dozen
        inverse = 1 / weight
        ratio = multiplier * inverse
        slope = multiplier * (2 * above + below * below)
        if EXTRA == P2:
            slope += 0.5 * above * above
            value = above * (ratio + above * (ratio + above * (inverse * 0.16666667))) + ratio * (below - 1)
        else:
            value = ratio * (above * above + above + (below - 1))
    return value, slope


@triton.jit
def _less_than_one(shifted, e):
    """1 - e, to the last digit where e is almost 1."""
    near = tl.maximum(shifted, -0.125)
    series = -near * (1 + near * (0.5 + near * (0.16666667 + near * (0.041666668 + near * 0.008333334))))
    return tl.where(shifted > -0.125, series, 1 - e)


@triton.jit
def _sums(
    x,
    shifted,
    limit,
    e,
    inside,
    is_target,
    target,
    weight,
    multiplier,
    margin,
    per_unit,
    EXTRA: tl.constexpr,
    SOFT: tl.constexpr,
    ALONE: tl.constexpr,
):
    """What `_outcome` needs the sums of: two numbers for each class, and whether it attains the maximum."""
    first = tl.zeros_like(e)
    second = first
    ties = first
    if EXTRA == UNIFORM:
        first = tl.where(inside, shifted, 0.0)
    elif EXTRA == ENTROPY:
        first = e * tl.maximum(shifted, -1e30)  # not 0 times infinity
    elif EXTRA == SQUARED:
        if SOFT:
            first = e * target
            second = e * e
            ties = target * target
        else:
            first = tl.where(is_target, 0.0, e * e)
            if ALONE:
                second = tl.where(is_target, 0.0, e * _less_than_one(shifted, e))
    elif EXTRA >= HINGE:
        # Beyond the last class there is no violation, and then no penalty.
        inner = tl.where(inside, shifted, 0.0)
        too_far = inside & (x < limit[:, None])
        first, second = _penalty(inner, weight, multiplier, margin, per_unit, EXTRA, too_far)
        ties = tl.where(shifted == 0, 1.0, 0.0)
    return first, second, ties


@triton.jit
def _exponent(
    p,
    gamma,
    other_gamma,
    threshold,
    gammas,
    edges,
    accuracies,
    passes,
    BINS: tl.constexpr,
    GAMMA: tl.constexpr,
):
    """The exponent of each element, by the probability of its true class."""
    exponent = tl.zeros_like(p) + gamma
    if GAMMA == THRESHOLD:
        exponent = tl.where(p < threshold, gamma, other_gamma)
    elif GAMMA >= BINNED:
        lowest = tl.load(edges)
        position = tl.minimum(p.to(tl.float64), tl.load(edges + BINS))
        index = tl.zeros_like(p).to(tl.int32)
        for number in tl.static_range(1, BINS):
            edge = tl.zeros_like(position) + tl.load(edges + number)
            # On or below the lowest edge counts as just above it; no bin without width is ever met.
            index += ((edge < position) | (edge == lowest)).to(tl.int32)
        exponent = tl.load(gammas + index).to(tl.float32)
        if GAMMA == RATED:
            rated = _exp(gamma * (p - tl.load(accuracies + index).to(tl.float32)))
            exponent = tl.where(tl.load(passes) > 0, rated, exponent)
    return exponent


@triton.jit
def _log1p(x):
    """log(1 + x) for x ≥ 0, without cancellation near 0."""
    z = x / (2 + x)
    square = z * z
    series = (
        2 * z * (1 + square * (0.33333334 + square * (0.2 + square * (0.14285715 + square * 0.11111111))))
    )
    return tl.where(x < 0.5, series, tl.log(1 + x))


@triton.jit
def _power(base, exponent):
    """Base ** exponent for a base that is not negative; its floor keeps slopes finite where base is 0."""
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def _outcome(
    shifted_at_target,
    at_target,
    others,
    mass,
    first,
    second,
    ties,
    best,
    hits,
    K,
    likelihood,
    amount,
    per_unit,
    gamma,
    other_gamma,
    threshold,
    gammas,
    edges,
    accuracies,
    passes,
    BINS: tl.constexpr,
    EXTRA: tl.constexpr,
    BASE: tl.constexpr,
    GAMMA: tl.constexpr,
    SOFT: tl.constexpr,
    ALONE: tl.constexpr,
):
    """The loss of each element, and its gradient as three numbers.

    The gradient is ``along · s``, but ``slope`` at the true class, and `_rest`, which gets ``aside``.
    ``at_target`` is the exponential of the true class, ``others`` is the sum of all others: of a confident
    prediction that keeps what is left of 1. ``best`` is the highest shifted logit below the true class's.
    """
    total = others + at_target
    doubt = others / total
    p = at_target / total
    if SOFT:
        log_total = tl.log(total)
        log_p = shifted_at_target - mass * log_total
    else:
        log_p = shifted_at_target - tl.log(total)
        if ALONE:
            log_p = tl.where(shifted_at_target > -1, -_log1p(others / at_target), log_p)
        log_total = shifted_at_target - log_p
    aside = tl.zeros_like(total)
    if EXTRA == SQUARED:
        if SOFT:
            value = second / (total * total) - 2 * first / total + ties
            along = -2 * (second / total - first) / total  # Σ s (s - t)
            slope = aside
            aside = 2 / total
        else:
            spread = p * doubt
            squares = first / (total * total)
            value = squares + doubt * doubt
            along = -2 * (squares - spread)
            slope = -2 * (p * squares + spread * doubt)
            aside = 2 / (total * total)
            if ALONE:
                # The same, without a difference of numbers near 1 where a wrong class is all but certain.
                along = 2 * (second / (total * total) + spread)
                aside /= total
    elif BASE != PLAIN:
        exponent = _exponent(p, gamma, other_gamma, threshold, gammas, edges, accuracies, passes, BINS, GAMMA)
        sign = tl.where(exponent < 0, -1.0, 1.0)
        lower = tl.zeros_like(total)
        if BASE == DUAL:
            lower = _exp(best) / total
        if BASE == BELIEF:
            sign = -1.0 + aside
        if GAMMA == BINNED:
            exponent = tl.abs(exponent)
        base = (1 - sign) + sign * (lower + doubt)
        base = tl.maximum(base, 1.1754943508222875e-38)
        power = -_power(base, exponent)
        value = power * log_p
        by_base = sign * exponent * value / base
        along = by_base * p - power
        slope = -along * doubt
        if BASE == DUAL:
            along -= by_base * lower
            slope -= by_base * lower * p
            aside = by_base * lower / tl.maximum(hits, 1.0)
    else:
        value = -likelihood * log_p
        along = aside
        if EXTRA == UNIFORM:
            value -= amount * (first / K - log_total)
            along += amount
        elif EXTRA == ENTROPY:
            mean_shifted = first / total
            value -= amount * (log_total - mean_shifted)
            along -= amount * mean_shifted
            aside = amount / total
        elif EXTRA >= HINGE:
            value += amount * first
            aside = amount * per_unit * second / ties
        slope = along * p - likelihood * doubt
        along += likelihood * mass
    return value, along / total, slope, aside


@triton.jit
def _rest(
    x,
    shifted,
    limit,
    e,
    inside,
    is_target,
    target,
    at_target,
    others,
    best,
    aside,
    K,
    likelihood,
    amount,
    weight,
    multiplier,
    margin,
    per_unit,
    EXTRA: tl.constexpr,
    BASE: tl.constexpr,
    SOFT: tl.constexpr,
    ALONE: tl.constexpr,
):
    """What a class gets beside the multiple of its probability and the amount at the true class.

    ``x`` are the logits as they were, of which ``best`` is one: shifted ones may be equal that were not.
    """
    rest = 0.0
    if EXTRA == UNIFORM:
        rest = -amount / K
    elif EXTRA == ENTROPY:
        rest = aside[:, None] * e * tl.maximum(shifted, -1e30)
    elif EXTRA == SQUARED:
        if SOFT:
            rest = aside[:, None] * e * (e * aside[:, None] / 2 - target)
        elif ALONE:
            far = _less_than_one(shifted, e)
            rest = aside[:, None] * e * (e * at_target[:, None] - far * others[:, None])
            rest = tl.where(is_target, 0.0, rest)
        else:
            rest = tl.where(is_target, 0.0, aside[:, None] * e * e)
    elif EXTRA >= HINGE:
        # As in `_sums`, so that the compiler sees that it has it already.
        inner = tl.where(inside, shifted, 0.0)
        too_far = inside & (x < limit[:, None])
        _, slope = _penalty(inner, weight, multiplier, margin, per_unit, EXTRA, too_far)
        rest = tl.where(shifted == 0, aside[:, None], 0.0) - slope * (amount * per_unit)
    if BASE == DUAL:
        rest = tl.where(x == best[:, None], aside[:, None], 0.0)
    if SOFT and EXTRA != SQUARED:
        rest -= likelihood * target
    return rest


@triton.jit
def _inside(columns, K: tl.constexpr, BK: tl.constexpr):
    """Which classes there are, ``(1, BK)``; the compiler knows if it is all of them."""
    return tl.full((1, BK), True, tl.int1) if K % BK == 0 else (columns < K)[None, :]


@triton.jit
def _tile(rows, columns, stride, present, K: tl.constexpr, BK: tl.constexpr, other: tl.constexpr):
    """Some classes of some elements, in float32; ``other`` beyond the last class and element."""
    here = present[:, None] & _inside(columns, K, BK)
    places = rows[:, None] + columns.to(tl.int64)[None, :] * stride
    return tl.load(places, mask=here, other=other).to(tl.float32)


@triton.jit
def _per_class(values, columns, other: tl.constexpr, K: tl.constexpr, GIVEN: tl.constexpr):
    """One number for each class of a tile, ``(1, BK)``; 1 where none are given."""
    if GIVEN:
        numbers = tl.load(values + columns, mask=columns < K, other=other).to(tl.float32)[None, :]
    else:
        numbers = tl.full((1, columns.shape[0]), 1.0, tl.float32)
    return numbers


@triton.jit
def _below(x, at, best, hits):
    """The highest logit below that of the true class so far, and how many classes have it."""
    below = tl.where(x < at[:, None], x, float("-inf"))
    leader = tl.max(below, 1)
    number = tl.sum(tl.where(below == leader[:, None], 1.0, 0.0), 1)
    hits = tl.where(leader > best, number, tl.where(leader == best, hits + number, hits))
    return tl.maximum(best, leader), hits


@triton.jit
def _correction(counted, scale, elements):
    """What makes a mean over all elements one over those that count; exactly 1 where all do."""
    share = counted * scale
    return tl.where((counted == elements) | (share <= 0), 1.0, 1 / share)


_PER_CLASS = ["class_weight", "penalty_weight", "multiplier", "gammas", "edges", "accuracies", "passes"]


@triton.jit(do_not_specialize_on_alignment=[*_PER_CLASS, "upstream"])
def loss_and_gradient(
    logits,
    target,
    class_weight,
    penalty_weight,
    multiplier,
    gammas,
    edges,
    accuracies,
    passes,
    found,
    values,
    gradient,
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
    scale,
    elements,
    upstream,
    likelihood,
    amount,
    margin,
    margin_rest,
    per_unit,
    gamma,
    other_gamma,
    threshold,
    K: tl.constexpr,
    BINS: tl.constexpr,
    EXTRA: tl.constexpr,
    BASE: tl.constexpr,
    GAMMA: tl.constexpr,
    SOFT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
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
    ``ALIGNED`` divides ``logits_s`` and ``gradient_s``. Each element enters by ``scale``. For P programs
    `found` has a place for the gradient's correction, P sums of losses, and P sums of what the mean ought to
    divide by, of which `finish` makes it. A program that is ``ALONE`` needs no correction.
    """
    blocks = tl.cdiv(S, R * TILES)
    place, programs = tl.program_id(0), tl.num_programs(0)
    b = (place // blocks).to(tl.int64)
    k = tl.arange(0, BK)
    counted = 0.0  # so far, which stands in `found` after each tile
    losses = 0.0
    for tile in range(TILES):
        s = (place % blocks * TILES + tile) * R + tl.arange(0, R)
        present = s < S
        # Known to be aligned, the numbers of a row travel in groups.
        row = logits + b * logits_b + tl.multiple_of(s.to(tl.int64) * logits_s, ALIGNED)
        out = gradient + b * gradient_b + tl.multiple_of(s.to(tl.int64) * gradient_s, ALIGNED)
        factor = tl.full((R,), 1.0, tl.float32) * scale
        known = present
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
                weighed = factor / scale
            if ALONE:
                factor *= _correction(tl.sum(weighed), scale, elements)
            else:
                counted += tl.sum(weighed)
                tl.store(found + 1 + programs + place, counted)
        at = tl.zeros((R,), tl.float32)
        if not SOFT:
            at = tl.load(row + label.to(tl.int64) * logits_k, mask=known, other=float("nan")).to(tl.float32)

        # The maximum and the sum of exponentials: in one go, or while the row passes by.
        best = tl.full((R,), float("-inf"), tl.float32)
        hits = tl.zeros((R,), tl.float32)
        if SINGLE:
            x = _tile(row, k, logits_k, present, K, BK, float("-inf"))
            if BASE == DUAL:
                best, hits = _below(x, at, best, hits)
            top = tl.max(x, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            shifted = x - top[:, None]
            e = _exp(shifted)
            if ALONE and not SOFT:
                total = tl.sum(tl.where(k[None, :] == label[:, None], 0.0, e), 1)
            else:
                total = tl.sum(e, 1)
            weights = _per_class(penalty_weight, k, 1.0, K, EXTRA > HINGE)
            multipliers = _per_class(multiplier, k, 0.0, K, MULTIPLIED)
        else:
            top = tl.full((R,), float("-inf"), tl.float32)
            total = tl.zeros((R,), tl.float32)
            for start in tl.range(0, K, BK, loop_unroll_factor=UNROLL):
                x = _tile(row, start + k, logits_k, present, K, BK, float("-inf"))
                higher = tl.maximum(top, tl.max(x, 1))
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * _exp(top - safe) + tl.sum(_exp(x - safe[:, None]), 1)
                top = higher
                if BASE == DUAL:
                    best, hits = _below(x, at, best, hits)
            top = tl.where(top == float("-inf"), 0.0, top)

        shifted_at_target = tl.zeros((R,), tl.float32)
        at_target = tl.zeros((R,), tl.float32)
        if not SOFT:
            shifted_at_target = tl.where(valid, at - top, 0.0)
            at_target = _exp(shifted_at_target)
        # A confident prediction leaves few digits for what is not the true class. In a large batch that does
        # not show; in a small one, where time does not count, it was left out of the sum.
        others = total if ALONE and SINGLE else tl.maximum(total - at_target, 0.0)
        mass = tl.full((R,), 1.0, tl.float32)
        limit = _limit(top, margin, margin_rest)

        # What this loss needs beside them, over all classes. Sums are taken when the loop is over: within it,
        # a pass of the compiler that tries to do just that has been seen to lose classes.
        first = tl.zeros((R,), tl.float32)
        second = tl.zeros((R,), tl.float32)
        ties = tl.zeros((R,), tl.float32)
        if SOFT or EXTRA != NOTHING:
            firsts = tl.zeros((R, BK), tl.float32)
            seconds = tl.zeros((R, BK), tl.float32)
            thirds = tl.zeros((R, BK), tl.float32)
            masses = tl.zeros((R, BK), tl.float32)
            products = tl.zeros((R, BK), tl.float32)
            for start in tl.range(0, 1 if SINGLE else K, BK, loop_unroll_factor=UNROLL):
                columns = start + k
                if not SINGLE:
                    x = _tile(row, columns, logits_k, present, K, BK, float("-inf"))
                    shifted = x - top[:, None]
                    e = _exp(shifted)
                    weights = _per_class(penalty_weight, columns, 1.0, K, EXTRA > HINGE)
                    multipliers = _per_class(multiplier, columns, 0.0, K, MULTIPLIED)
                inside = _inside(columns, K, BK)
                is_target = columns[None, :] == label[:, None]
                t = e
                if SOFT:
                    t = _tile(soft_row, columns, target_k, present, K, BK, 0.0)
                    masses += t
                    products += tl.where(t == 0, 0.0, t * shifted)
                more = _sums(
                    x,
                    shifted,
                    limit,
                    e,
                    inside,
                    is_target,
                    t,
                    weights,
                    multipliers,
                    margin,
                    per_unit,
                    EXTRA,
                    SOFT,
                    ALONE,
                )
                firsts += more[0]
                seconds += more[1]
                thirds += more[2]
            if SOFT:
                mass = tl.sum(masses, 1)
                shifted_at_target = tl.sum(products, 1)
            if EXTRA != NOTHING:
                first = tl.sum(firsts, 1)
            if EXTRA >= HINGE or (EXTRA == SQUARED and (SOFT or ALONE)):
                second = tl.sum(seconds, 1)
                ties = tl.sum(thirds, 1)

        value, along, slope_at_target, aside = _outcome(
            shifted_at_target,
            at_target,
            others,
            mass,
            first,
            second,
            ties,
            best - top,
            hits,
            K,
            likelihood,
            amount,
            per_unit,
            gamma,
            other_gamma,
            threshold,
            gammas,
            edges,
            accuracies,
            passes,
            BINS,
            EXTRA,
            BASE,
            GAMMA,
            SOFT,
            ALONE,
        )
        value = tl.where(valid, value * factor, 0.0)
        if UPSTREAM == 0:
            if EACH:
                tl.store(values + b * S + s, value, mask=present)
            elif ALONE:
                tl.store(values, tl.sum(value))
            else:
                losses += tl.sum(value)
                tl.store(found + 1 + place, losses)
        elif UPSTREAM == 1:
            factor *= tl.load(upstream).to(tl.float32)
        else:
            factor *= tl.load(upstream + b * S + s, mask=present, other=0.0).to(tl.float32)
        if GRADIENT:
            along *= factor
            slope_at_target *= factor
            for start in tl.range(0, 1 if SINGLE else K, BK, loop_unroll_factor=UNROLL):
                columns = start + k
                if not SINGLE:
                    x = _tile(row, columns, logits_k, present, K, BK, float("-inf"))
                    shifted = x - top[:, None]
                    e = _exp(shifted)
                    weights = _per_class(penalty_weight, columns, 1.0, K, EXTRA > HINGE)
                    multipliers = _per_class(multiplier, columns, 0.0, K, MULTIPLIED)
                inside = _inside(columns, K, BK)
                is_target = columns[None, :] == label[:, None]
                slope = along[:, None] * e
                if not SOFT:
                    slope = tl.where(is_target, slope_at_target[:, None], slope)
                if SOFT or EXTRA != NOTHING or BASE == DUAL:
                    t = e
                    if SOFT:
                        t = _tile(soft_row, columns, target_k, present, K, BK, 0.0)
                    slope += factor[:, None] * _rest(
                        x,
                        shifted,
                        limit,
                        e,
                        inside,
                        is_target,
                        t,
                        at_target,
                        others,
                        best,
                        aside,
                        K,
                        likelihood,
                        amount,
                        weights,
                        multipliers,
                        margin,
                        per_unit,
                        EXTRA,
                        BASE,
                        SOFT,
                        ALONE,
                    )
                # An ignored element has a gradient of exactly 0 whatever its logits are.
                slope = tl.where(valid[:, None], slope, 0.0)
                tl.store(
                    out[:, None] + columns.to(tl.int64)[None, :] * gradient_k,
                    slope,
                    mask=present[:, None] & inside,
                )


@triton.jit
def finish(found, result, programs, scale, elements, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Add up what all programs found, in a fixed order, and correct the mean by what really counted."""
    index = tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, programs, BLOCK):
        inside = start + index < programs
        value += tl.load(found + 1 + start + index, mask=inside, other=0.0)
        if COUNT:
            count += tl.load(found + 1 + programs + start + index, mask=inside, other=0.0)
    by = 1.0
    if COUNT:
        by = _correction(tl.sum(count), scale, elements)
    tl.store(result, tl.sum(value) * by)
    tl.store(found, by)


@triton.jit(do_not_specialize_on_alignment=["factor"])
def scale_in_place(tensor, factor, correction, size, BLOCK: tl.constexpr):
    """Multiply by two numbers on the device; by 1, which it mostly is, without a look at the tensor."""
    by = tl.load(factor).to(tl.float32) * tl.load(correction)
    if by != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < size
            tl.store(tensor + index, tl.load(tensor + index, mask=inside).to(tl.float32) * by, mask=inside)
