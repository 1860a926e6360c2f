"""The GPU kernels of batch normalisation: forward and backward read the images twice, and no more.

Images whose channels lie side by side are rows of ``C`` channels, one for each pixel. A tile holds ``R`` rows
and ``BC`` channels. A program sums up ``span`` rows of a tile's channels; another kernel puts together what
the ``parts`` programs of a channel found, in a fixed order.
"""

# mypy: ignore-errors
# Triton's language is Python to read, but not to run: it has no types that a checker could follow.

import triton
import triton.language as tl


@triton.jit
def _place(rows, C, span, BC: tl.constexpr):
    """The channels of a program, and where its rows begin and end."""
    blocks = tl.cdiv(C, BC)
    first = tl.program_id(0) // blocks * span
    channel = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    return channel, first, tl.minimum(first + span, rows)


@triton.jit
def _tile(row, channel, last, C):
    """Where a tile is, and what of it is there."""
    places = row.to(tl.int64)[:, None] * C + channel[None, :]
    return places, (row < last)[:, None] & (channel < C)[None, :]


@triton.jit
def _load(images, places, here):
    return tl.load(images + places, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _per_channel(values, channel, C):
    return tl.load(values + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def moments(images, sums, rows, C, span, parts, R: tl.constexpr, BC: tl.constexpr):
    """The mean of each part, and the sum of squared differences from it.

    Each place of the tile measures from the first pixel that it meets, which is about as far from the mean
    as the others are: so the squares keep their digits. ``sums`` has a row of means for each part, and then
    one of squares.
    """
    channel, first, last = _place(rows, C, span, BC)
    row = first + tl.arange(0, R)
    places, here = _tile(row, channel, last, C)
    origin = _load(images, places, here)
    total = tl.zeros((R, BC), tl.float32)
    squares = tl.zeros((R, BC), tl.float32)
    for start in tl.range(first + R, last, R, loop_unroll_factor=4):
        places, here = _tile(start + tl.arange(0, R), channel, last, C)
        x = tl.where(here, _load(images, places, here) - origin, 0.0)
        total += x
        squares += x * x
    count = (tl.maximum(last - row + R - 1, 0) // R).to(tl.float32)[:, None]
    shift = total / tl.maximum(count, 1.0)
    mean = tl.sum(count * (origin + shift), 0) / (last - first)
    apart = origin + shift - mean[None, :]
    squares += count * apart * apart - total * shift
    part = first // span
    tl.store(sums + part * C + channel, mean, mask=channel < C)
    tl.store(sums + (parts + part) * C + channel, tl.sum(squares, 0), mask=channel < C)


@triton.jit
def _together(sums, channel, C, parts, R: tl.constexpr, BC: tl.constexpr):
    """Both sums of some channels over all parts."""
    one = tl.zeros((R, BC), tl.float32)
    other = tl.zeros((R, BC), tl.float32)
    for start in range(0, parts, R):
        places, here = _tile(start + tl.arange(0, R), channel, parts, C)
        one += _load(sums, places, here)
        other += _load(sums + parts * C, places, here)
    return tl.sum(one, 0), tl.sum(other, 0)


@triton.jit
def _rows_of(part, rows, span):
    """How many rows a part has, ``(R, 1)``; none beyond the last."""
    return tl.minimum(tl.maximum(rows - part.to(tl.int64) * span, 0), span).to(tl.float32)[:, None]


@triton.jit
def statistics(
    sums,
    weight,
    bias,
    running_mean,
    running_var,
    batches,
    kept,
    rows,
    C,
    span,
    parts,
    momentum,
    eps,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """Mean and inverse deviation, with weight and bias, the running averages, and the number of batches.

    ``kept`` has four rows: mean, inverse deviation, ``slope = weight · inverse``, and bias.
    """
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    there = channel < C
    # All that is read, before anything is written: the compiler may not know that they are not the same.
    factor = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    old_mean = tl.load(running_mean + channel, mask=there, other=0.0).to(tl.float32)
    old_var = tl.load(running_var + channel, mask=there, other=0.0).to(tl.float32)
    before = tl.load(batches)
    total = tl.zeros((R, BC), tl.float32)
    for start in range(0, parts, R):
        part = start + tl.arange(0, R)
        places, here = _tile(part, channel, parts, C)
        total += _rows_of(part, rows, span) * _load(sums, places, here)
    mean = tl.sum(total, 0) / rows
    squares = tl.zeros((R, BC), tl.float32)
    for start in range(0, parts, R):
        part = start + tl.arange(0, R)
        places, here = _tile(part, channel, parts, C)
        apart = _load(sums, places, here) - mean[None, :]
        squares += _load(sums + parts * C, places, here) + _rows_of(part, rows, span) * apart * apart
    variance = tl.sum(squares, 0) / rows
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays
    inverse = 1 / tl.sqrt(variance + eps)
    unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
    tl.store(kept + channel, mean, mask=there)
    tl.store(kept + C + channel, inverse, mask=there)
    tl.store(kept + 2 * C + channel, factor * inverse, mask=there)
    tl.store(kept + 3 * C + channel, offset, mask=there)
    tl.store(running_mean + channel, old_mean + momentum * (mean - old_mean), mask=there)
    tl.store(running_var + channel, old_var + momentum * (unbiased - old_var), mask=there)
    if tl.program_id(0) == 0:
        tl.store(batches, before + 1)


@triton.jit
def _kept(kept, channel, C):
    """The four rows of `statistics`."""
    mean = _per_channel(kept, channel, C)
    inverse = _per_channel(kept + C, channel, C)
    slope = _per_channel(kept + 2 * C, channel, C)
    offset = _per_channel(kept + 3 * C, channel, C)
    return mean, inverse, slope, offset


@triton.jit
def normalise(
    images,
    added,
    kept,
    result,
    rows,
    C,
    span,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """The normalised images, plus what is added, without what is negative."""
    channel, first, last = _place(rows, C, span, BC)
    mean, _, slope, offset = _kept(kept, channel, C)
    for start in range(first, last, R):
        places, here = _tile(start + tl.arange(0, R), channel, last, C)
        value = (_load(images, places, here) - mean) * slope + offset
        if ADDED:
            value += _load(added, places, here)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # NaN stays
        tl.store(result + places, value, mask=here)


@triton.jit
def _slopes(
    images, result, upstream, places, here, mean, slope, offset, RELU: tl.constexpr, ADDED: tl.constexpr
):
    """A tile of the images minus their mean, and of the gradient before the ReLU."""
    x = _load(images, places, here) - mean
    g = _load(upstream, places, here)
    if RELU:
        value = x * slope + offset
        if ADDED:  # then it takes no more to read the result
            value = _load(result, places, here)
        g = tl.where(value <= 0, 0.0, g)
    return x, g


@triton.jit
def gradient_sums(
    images,
    result,
    upstream,
    kept,
    sums,
    rows,
    C,
    span,
    parts,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums of the gradient before the ReLU, and of it times the normalised images."""
    channel, first, last = _place(rows, C, span, BC)
    mean, inverse, slope, offset = _kept(kept, channel, C)
    total = tl.zeros((R, BC), tl.float32)
    products = tl.zeros((R, BC), tl.float32)
    for start in tl.range(first, last, R, loop_unroll_factor=2):
        places, here = _tile(start + tl.arange(0, R), channel, last, C)
        x, g = _slopes(images, result, upstream, places, here, mean, slope, offset, RELU, ADDED)
        total += g
        products += g * x
    part = first // span
    tl.store(sums + part * C + channel, tl.sum(total, 0), mask=channel < C)
    tl.store(sums + (parts + part) * C + channel, tl.sum(products * inverse, 0), mask=channel < C)


@triton.jit
def gradient_totals(sums, of_weight, of_bias, C, parts, R: tl.constexpr, BC: tl.constexpr):
    """The gradients of weight and bias."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    total, products = _together(sums, channel, C, parts, R, BC)
    tl.store(of_bias + channel, total, mask=channel < C)
    tl.store(of_weight + channel, products, mask=channel < C)


@triton.jit
def gradients(
    images,
    result,
    upstream,
    kept,
    of_weight,
    of_bias,
    of_images,
    of_added,
    rows,
    C,
    span,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradients of the images and of what was added."""
    channel, first, last = _place(rows, C, span, BC)
    mean, inverse, slope, offset = _kept(kept, channel, C)
    shift = _per_channel(of_bias, channel, C) / rows
    tilt = _per_channel(of_weight, channel, C) / rows * inverse
    for start in range(first, last, R):
        places, here = _tile(start + tl.arange(0, R), channel, last, C)
        x, g = _slopes(images, result, upstream, places, here, mean, slope, offset, RELU, ADDED)
        tl.store(of_images + places, slope * (g - shift - x * tilt), mask=here)
        if ADDED:
            tl.store(of_added + places, g, mask=here)
