"""Losses and their learned state by definition: float64, plain sums over all pairs, no code of the library.

Gradients are those that autograd finds. Every function takes logits ``(N, K)`` of the elements that count.
Metrics and calibrators have references beside their own tests.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace as Settings

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-300  # instead of 0, whose powers have no derivative

# -------------------------------------------------------------------------------------- parts of losses


def log_softmax(logits: Tensor) -> Tensor:
    shifted = logits - logits.amax(1, keepdim=True)
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """``-Σ t_k log s_k``."""
    logarithm = log_softmax(logits)
    return -torch.where(target > 0, target * logarithm.clamp_min(-1e300), 0).sum(1)


def entropy(logits: Tensor) -> Tensor:
    logarithm = log_softmax(logits)
    return -(logarithm.exp() * logarithm).sum(1)


def distances(logits: Tensor) -> Tensor:
    """``max_j l_j - l_k``; at a tie the derivative of the maximum is divided evenly."""
    return logits.amax(1, keepdim=True) - logits


def true_class(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``log p`` and ``1 - p``, both without the cancellation of a difference from 1."""
    is_true = target == 1
    logarithm = log_softmax(logits)
    doubt = torch.where(is_true, 0, logarithm.exp()).sum(1)
    plain = logarithm[is_true]
    return torch.where(doubt < 0.5, torch.log1p(-doubt.clamp_max(0.5)), plain), doubt


def lower_probability(logits: Tensor, target: Tensor, rank: int | str) -> Tensor:
    """The probability of a rank below the true class, or a mean of several; derivatives shared at ties."""
    probability = log_softmax(logits).exp()
    answers = []
    for row, s, label in zip(logits.detach(), probability, target.argmax(1), strict=True):
        below = [k for k in range(len(row)) if row[k] < row[label]]
        below.sort(key=lambda k, row=row: -row[k].item())
        if rank == "all":
            chosen = [s[k] / len(below) for k in below]
        else:
            ranks = [int(r) for r in str(rank).split("+")]
            tied = [[k for k in below if row[k] == row[below[r - 1]]] for r in ranks if r <= len(below)]
            chosen = [sum(s[k] for k in group) / len(group) / len(ranks) for group in tied]
        answers.append(sum(chosen, torch.zeros((), dtype=torch.float64)))
    return torch.stack(answers) if answers else probability.new_zeros(0)


def focal(logits: Tensor, target: Tensor, gamma: Tensor, lower: Tensor | float = 0.0) -> Tensor:
    """``-(1-p+q)^γ log p``, or ``-(1+p-q)^|γ| log p`` where γ < 0."""
    log_p, doubt = true_class(logits, target)
    distance = doubt + lower
    base = torch.where(gamma < 0, 2 - distance, distance).clamp_min(TINY)
    return -base.pow(gamma.abs()) * log_p


def binned(edges: Tensor, p: float) -> int:
    """The bin ``(lo, hi]`` of p among those that have a width; the first or the last one beyond them."""
    wide = [b for b in range(len(edges) - 1) if edges[b] < edges[b + 1]]
    inside = [b for b in wide if edges[b] < p <= edges[b + 1]]
    if inside:
        return inside[0]
    return wide[0] if p <= edges[wide[0]] else wide[-1]


def penalty(kind: str, z: Tensor, rho: Tensor, lam: Tensor) -> Tensor:
    """``P(z, ρ, λ)`` of CALS-ALM."""
    if kind == "phr":
        # Without the branch that is not taken, whose numbers may overflow.
        active = lam + rho * z >= 0
        return torch.where(active, lam * z + rho * z**2 / 2, -(lam**2) / (2 * rho))
    above = lam * z + lam * rho * z**2 + (rho**2 * z**3 / 6 if kind == "p2" else 0)
    return torch.where(z >= 0, above, lam * z / (1 - rho * z.clamp_max(0)))


def slope(kind: str, z: Tensor, rho: Tensor, lam: Tensor) -> Tensor:
    """``∂P/∂z``."""
    if kind == "phr":
        return (lam + rho * z).clamp_min(0)
    above = lam + 2 * lam * rho * z + (rho**2 * z**2 / 2 if kind == "p2" else 0)
    return torch.where(z >= 0, above, lam / (1 - rho * z.clamp_max(0)) ** 2)


def pairwise(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    """``w1·BDC + w2·BEC`` of CPC, one pair of classes at a time."""
    classes = logits.shape[1]
    values = []
    for row, y in zip(logits, target.argmax(1).tolist(), strict=True):
        others = [k for k in range(classes) if k != y]
        against = -F.logsigmoid(row[y] - row[others]).sum() / (classes - 1)
        gaps = row[others][:, None] - row[others][None, :]
        different = ~torch.eye(classes - 1, dtype=torch.bool)
        exclusion = -F.logsigmoid(gaps[different]).sum() / 2 / max(1, (classes - 1) * (classes - 2))
        values.append(o.discrimination * against + o.exclusion * exclusion)
    return torch.stack(values) if values else logits.new_zeros(0)


# --------------------------------------------------------------------------------- terms of whole batches


def top_confidence(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence, and whether the first of the top classes is the true one."""
    # By the largest logit: different logits may have equal probabilities.
    total = (logits - logits.amax(1, keepdim=True)).exp().sum(1)
    return 1 / total, (logits.argmax(1) == target.argmax(1)).double()


def root(squared: Tensor) -> Tensor:
    """The square root, with derivative 0 at 0."""
    return squared.sqrt() if squared > 0 else 0 * squared


def mmce(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    r, c = top_confidence(logits, target)
    kernel = (-(r[:, None] - r[None, :]).abs() / o.kernel_width).exp()
    residual = (c - r) / max(1, len(r))
    return o.weight * root((residual[:, None] * residual[None, :] * kernel).sum())


def mmce_weighted(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    r, c = top_confidence(logits, target)
    kernel = (-(r[:, None] - r[None, :]).abs() / o.kernel_width).exp()
    right, wrong = c == 1, c == 0
    n, m = int(right.sum()), int(wrong.sum())
    if not n or not m:
        return 0 * r.sum()
    both = ((1 - r)[:, None] * (1 - r)[None, :] * kernel)[right][:, right].sum() / n**2
    neither = (r[:, None] * r[None, :] * kernel)[wrong][:, wrong].sum() / m**2
    mixed = ((1 - r)[:, None] * r[None, :] * kernel)[right][:, wrong].sum() / (n * m)
    return o.weight * root(both + neither - 2 * mixed)


def kde(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    """The canonical calibration error: each softmax against the labels near it, without itself."""
    if len(logits) < 2:
        return 0 * logits.sum()
    return o.weight * kde_gaps(logits, target, o).abs().sum(1).mean()


def kde_gaps(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    """The frequency of each class near each softmax, minus that softmax, ``(N, K)``."""
    count = len(logits)
    logarithm = log_softmax(logits)
    s = logarithm.exp()
    alpha = s / o.bandwidth + 1
    # log of the Dirichlet density of s_j with the parameters of i, [j, i].
    log_kernel = (logarithm[:, None, :] * (s / o.bandwidth)[None, :, :]).sum(2)
    log_kernel = log_kernel + (torch.lgamma(alpha.sum(1)) - torch.lgamma(alpha).sum(1))[None, :]
    log_kernel = log_kernel.masked_fill(torch.eye(count, dtype=torch.bool), -torch.inf)
    return log_kernel.softmax(1) @ target - s


def soft_binned(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    r, c = top_confidence(logits, target)
    middles = torch.tensor([(b + 0.5) / o.bins for b in range(o.bins)], dtype=torch.float64)
    share = log_softmax(-((r[:, None] - middles) ** 2) / o.temperature).exp()
    squared = 0 * r.sum()
    for b in range(o.bins):
        size = share[:, b].sum()
        if size > 1e-25:
            accuracy, confidence = (share[:, b] * c).sum() / size, (share[:, b] * r).sum() / size
            squared = squared + size / len(r) * (accuracy - confidence) ** 2
    return o.weight * root(squared)


def avuc_threshold(logits: Tensor, target: Tensor, o: Settings) -> tuple[Tensor, float]:
    """The entropies, and the one up to which an element is certain."""
    u, c = entropy(logits), top_confidence(logits, target)[1]
    if o.threshold is not None:
        return u, o.threshold
    means = [u[c == kind].mean().item() for kind in (0, 1) if (c == kind).any()]
    return u, sum(means) / max(1, len(means)) * (1 + 1e-9)


def avuc(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    r, c = top_confidence(logits, target)
    u, threshold = avuc_threshold(logits, target, o)
    good, bad = [], []
    for i in range(len(r)):
        certain = bool(u[i] <= threshold)
        amount = (r[i] if c[i] else 1 - r[i]) * (1 - u[i].tanh() if certain else u[i].tanh())
        (good if certain == bool(c[i]) else bad).append(amount)
    good_sum, bad_sum = (sum(each, 1e-10 + 0 * r.sum()) for each in (good, bad))
    return o.weight * ((good_sum + bad_sum - 1e-10).log() - good_sum.log())


def mdca_gaps(logits: Tensor, target: Tensor) -> Tensor:
    """The mean probability of each class minus its frequency, ``(K,)``."""
    return (log_softmax(logits).exp() - target).sum(0) / max(1, len(logits))


# ------------------------------------------------------------------------------------------------ losses


def by_threshold(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    p = true_class(logits, target)[0].exp().detach()
    return focal(logits, target, torch.where(p < o.threshold, o.gamma_below, o.gamma_above).double())


def by_bin(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    """The exponent of each element, which only ``through_gamma`` differentiates."""
    p = true_class(logits, target)[0].exp()
    bins = [binned(o.edges, each) for each in p.detach().tolist()]
    if getattr(o, "per", "bin") == "bin" or not o.passes:
        return o.gamma[bins]
    return (o.rate * ((p if o.through_gamma else p.detach()) - o.accuracy[bins])).exp()


def label_relaxation(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    """The divergence of the prediction from the nearest target that gives the true class at least 1 - a."""
    probability, a = log_softmax(logits).exp(), o.relaxation
    log_p, doubt = true_class(logits, target)
    share = a * torch.where(target == 1, 0, probability) / doubt.clamp_min(TINY)[:, None]
    nearest = torch.where(target == 1, 1 - a, share).detach()
    logarithm = torch.where(target == 1, log_p[:, None], log_softmax(logits))
    divergence = torch.xlogy(nearest, nearest) - torch.where(nearest > 0, nearest * logarithm, 0)
    return torch.where(doubt > a, divergence.sum(1), 0)


def acls(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    high, low = logits.amax(1), logits.amin(1)
    top = ((high if o.as_released else high - low) - o.margin).clamp_min(0) ** 2
    reference = high.detach() if o.as_released else high
    others = ((reference[:, None] - logits - o.margin).clamp_min(0) ** 2).sum(1) / (logits.shape[1] - 1)
    return cross_entropy(logits, target) + o.weight_of_top * top + o.weight_of_others * others


def brier_weighting(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    log_p, doubt = true_class(logits, target)
    others = torch.where(target == 1, 0, log_softmax(logits).exp())
    error = 2 * doubt if o.norm == 1 else doubt**2 + (others**2).sum(1)
    weight = error.clamp_min(TINY).pow(o.gamma / o.norm)
    return -(weight if o.through_weight else weight.detach()) * log_p


def fixed(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def dual_focal(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    q = lower_probability(logits, target, o.rank) if o.constant is None else o.constant
    return focal(logits, target, fixed(o.gamma), q)


def cals_alm(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    z = distances(logits) / o.margin - 1
    return cross_entropy(logits, target) + penalty(o.penalty, z, o.penalty_weight, o.multiplier).mean(1)


def hinge(logits: Tensor, margin: float) -> Tensor:
    return (distances(logits) - margin).clamp_min(0)


def scaled(logits: Tensor, o: Settings) -> Tensor:
    # Without their maximum: a number common to all logits, times the scale, would cost digits.
    return o.scale * (logits - logits.amax(1, keepdim=True)) + o.offset


def ada_scale(logits: Tensor, target: Tensor, o: Settings) -> Tensor:
    logits = scaled(logits, o)
    return (cross_entropy(logits, target) + o.weight * hinge(logits, o.margin).mean(1)) / o.scale


ELEMENTS: dict[str, Callable[[Tensor, Tensor, Settings], Tensor]] = {
    "ce": lambda x, t, o: cross_entropy(x, t),
    "ls": lambda x, t, o: (1 - o.smoothing) * cross_entropy(x, t) - o.smoothing * log_softmax(x).mean(1),
    "ecp": lambda x, t, o: cross_entropy(x, t) - o.weight * entropy(x),
    "brier": lambda x, t, o: (log_softmax(x).exp() - t).square().sum(1),
    "focal": lambda x, t, o: focal(x, t, fixed(o.gamma)),
    "flsd": by_threshold,
    "inverse-focal": lambda x, t, o: focal(x, t, fixed(-o.gamma)),
    "dual-focal": dual_focal,
    "mbls": lambda x, t, o: cross_entropy(x, t) + o.weight * hinge(x, o.margin).mean(1),
    "cpc": lambda x, t, o: cross_entropy(x, t) + pairwise(x, t, o),
    "mmce": lambda x, t, o: cross_entropy(x, t),
    "mmce-weighted": lambda x, t, o: cross_entropy(x, t),
    "kde-xe": lambda x, t, o: cross_entropy(x, t),
    "mdca": lambda x, t, o: focal(x, t, fixed(o.gamma)),
    "maxsup": lambda x, t, o: cross_entropy(x, t) + o.weight * (x.amax(1) - x.mean(1)),
    "label-relaxation": label_relaxation,
    "acls": acls,
    "sb-ece": lambda x, t, o: cross_entropy(x, t),
    "bsce-gra": brier_weighting,
    "avuc": lambda x, t, o: cross_entropy(x, t),
    "nacl": lambda x, t, o: cross_entropy(x, t) + o.weight * (x - t).abs().mean(1),
    "cals-alm": cals_alm,
    "cals-hr": lambda x, t, o: cross_entropy(x, t) + (o.multiplier * hinge(x, o.margin)).mean(1),
    "adafocal": lambda x, t, o: focal(x, t, by_bin(x, t, o)),
    "ada-dual-focal": lambda x, t, o: focal(x, t, by_bin(x, t, o), lower_probability(x, t, 1)),
    "calfocal": lambda x, t, o: focal(x, t, by_bin(x, t, o)),
    "ada-scale": ada_scale,
}
"""The loss of each element, from logits, targets as probabilities ``(N, K)``, options and learned state."""

BATCHES: dict[str, Callable[[Tensor, Tensor, Settings], Tensor]] = {
    "mmce": mmce,
    "mmce-weighted": mmce_weighted,
    "kde-xe": kde,
    "sb-ece": soft_binned,
    "avuc": avuc,
    "mdca": lambda x, t, o: o.weight * mdca_gaps(x, t).abs().mean(),
}
"""The term of the whole batch, which is added to each element's loss."""


def weighted_elements(key: str, logits: Tensor, target: Tensor, o: Settings, soft: bool) -> Tensor:
    """The losses of the elements, with class weights and the term of the batch; labels are one-hot."""
    batch = BATCHES[key](logits, target, o) if key in BATCHES else 0.0
    if o.class_weight is None:
        return ELEMENTS[key](logits, target, o) + batch
    weight = (target * o.class_weight).sum(1)
    if key == "ls":  # every class of the smoothed target has its own weight
        smoothed = (1 - o.smoothing) * target + o.smoothing / logits.shape[1]
        return -(o.class_weight * smoothed * log_softmax(logits)).sum(1)
    if soft and key != "brier":  # linear in the target: each class of it has its own weight
        seen, by = (scaled(logits, o), o.scale) if key == "ada-scale" else (logits, 1)
        parts = ELEMENTS[key](logits, 0 * target, o), cross_entropy(seen, o.class_weight * target)
        return weight * parts[0] + parts[1] / by
    return weight * (ELEMENTS[key](logits, target, o) + batch)


def reduced(key: str, logits: Tensor, target: Tensor, o: Settings, *, soft: bool) -> Tensor:
    """The loss of a batch; ``(N,)`` for the reduction "none"."""
    values = weighted_elements(key, logits, target, o, soft)
    if o.reduction == "none":
        return values
    count = fixed(len(values)) if soft or o.class_weight is None else (target * o.class_weight).sum()
    total = values.sum()
    if o.reduction == "sum":
        return total
    return total / count if count > 0 else 0 * total  # nothing counts: 0, also of the smoothed part of "ls"


# ----------------------------------------------------------------------------------------- learned state


def adapt_cals_alm(o: Settings, logits: Tensor) -> None:
    """One pass over validation logits; ``o`` holds the state and the options."""
    z = distances(logits) / o.margin - 1
    over = 0 if o.per == "class" else (0, 1)
    slopes = slope(o.penalty, z, o.penalty_weight, o.multiplier)
    if o.clip == "each":
        slopes = slopes.clamp(*o.multiplier_range)
    lam, violation, number = slopes.mean(over), z.mean(over), o.passes + 1
    limit = o.required_decrease * o.previous_violation.clamp_min(0)
    if o.evidence:
        lam = o.multiplier + beyond(lam - o.multiplier, slopes - o.multiplier, o)
        limit = limit + o.evidence * standard_error(z, o)
    lam = lam.clamp(*o.multiplier_range)
    if number > 1 and number % o.every == 0:
        largest = math.inf if o.penalty_weight_max is None else o.penalty_weight_max
        grown = (o.growth * o.penalty_weight).clamp_max(largest)
        o.undecided |= bool(((violation - limit).abs() < 1e-5 * (1 + limit)).any())
        o.penalty_weight = torch.where(violation > limit, grown, o.penalty_weight)
    o.multiplier, o.previous_violation, o.passes = lam, violation, number


def standard_error(values: Tensor, o: Settings) -> Tensor:
    """Of the mean over elements, ``(K,)``, or the mean of the classes' errors for ``per="all"``."""
    if len(values) == 1:
        return fixed(math.inf)
    # Where all values are nearly equal, the variance is but rounding.
    o.undecided |= bool((values.std(0) < 1e-3 * values.abs().amax(0)).any())
    error = values.std(0) / math.sqrt(len(values))
    return error.mean() if getattr(o, "per", "class") == "all" else error


def beyond(gap: Tensor, values: Tensor, o: Settings) -> Tensor:
    return gap.sign() * (gap.abs() - o.evidence * standard_error(values, o)).clamp_min(0)


def adapt_cals_hr(o: Settings, logits: Tensor) -> None:
    excess, before = hinge(logits, o.margin), o.previous_penalty
    penalty = o.multiplier * excess.mean(0)
    threshold = o.factor if o.threshold is None else o.threshold
    reach = o.evidence * o.multiplier * standard_error(excess, o) if o.evidence else 0 * penalty
    if o.passes:
        for k in range(len(penalty)):
            raised, lowered = (penalty - reach, before, o.factor), (before, penalty + reach, 1 / o.factor)
            for more, less, step in (raised, lowered):
                ratio = float(more[k] / less[k]) if less[k] > 0 else math.inf if more[k] > 0 else 1.0
                o.undecided |= 1e-9 < abs(ratio / threshold - 1) < 1e-4
                if ratio > threshold * (1 + 1e-9):
                    moved = float(o.multiplier[k]) * step
                    o.multiplier[k] = min(max(moved, o.multiplier_range[0]), o.multiplier_range[1])
        o.multiplier = o.multiplier.clamp(*o.multiplier_range)
    o.previous_penalty, o.passes = penalty, o.passes + 1


def equal_mass(logits: Tensor, labels: Tensor, bins: int) -> list[tuple[Tensor, float, float]]:
    """Sorted confidences in groups whose sizes differ by at most one, with mean confidence and accuracy."""
    confidence, correct = top_confidence(logits, F.one_hot(labels, logits.shape[1]))
    groups = confidence.argsort().tensor_split(bins)
    return [
        (confidence[group], confidence[group].mean().item(), correct[group].mean().item()) for group in groups
    ]


def evident_gap(o: Settings, members: Tensor, confidence: float, accuracy: float) -> float:
    """Confidence minus accuracy, as far as it exceeds its standard errors under Jeffreys' prior."""
    gap, count = confidence - accuracy, len(members)
    if not o.evidence:
        return gap
    shrunk = (accuracy * count + 0.5) / (count + 1)
    error = math.sqrt(shrunk * (1 - shrunk) / (count + 2))
    return math.copysign(max(0.0, abs(gap) - o.evidence * error), gap)


def adapt_adafocal(o: Settings, logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Move γ, and return the confidences of each bin."""
    groups = equal_mass(logits, labels, o.bins)
    for b, (members, confidence, accuracy) in enumerate(groups):
        if not len(members):
            continue
        before = float(o.gamma[b])
        gap = evident_gap(o, members, confidence, accuracy)
        after = before * math.exp(math.copysign(o.rate, before) * gap)
        after = min(max(after, o.gamma_range[0]), o.gamma_range[1])
        o.undecided |= abs(abs(after) - o.switch_at) < 1e-5
        if abs(after) < o.switch_at:
            after = math.copysign(o.switch_at, -before)
        o.gamma[b] = after
    o.passes += 1
    return [members for members, _, _ in groups]


def adapt_calfocal(o: Settings, logits: Tensor, labels: Tensor) -> list[Tensor]:
    groups = equal_mass(logits, labels, o.bins)
    for b, (members, confidence, accuracy) in enumerate(groups):
        if len(members):
            gap = evident_gap(o, members, confidence, accuracy)
            o.gamma[b], o.accuracy[b] = math.exp(o.rate * gap), confidence - gap
    o.passes += 1
    return [members for members, _, _ in groups]


def adapt_ada_scale(o: Settings, logits: Tensor, labels: Tensor) -> None:
    """Move scale and offsets; ``o`` holds the state and the options."""
    p = log_softmax(logits).exp()
    mean = (p * logits).sum(1)
    gap = mean - logits.gather(1, labels[:, None])[:, 0]
    curvature = (p * (logits - mean[:, None]).square()).sum().item()

    def shrunk(value: float, error: float) -> float:
        o.undecided |= abs(abs(value) - error) < 1e-9
        return value - error**2 / value if abs(value) > error else 0.0

    step = shrunk(gap.sum().item() / curvature, o.evidence * math.sqrt(gap.square().sum()) / curvature)
    step = min(max(step, -0.5), 0.5)
    low, high = o.scale_range
    o.log_scale = min(max(float(o.log_scale) + o.rate * step, math.log(low)), math.log(high))
    o.gain = min(2 * float(o.gain), 16.0) if step * float(o.step) > 0 else 1.0
    o.step = step
    lead = min(max(o.lead * o.gain * step, -1.0), 1.0)
    o.scale = min(max(math.exp(o.log_scale + lead), low), high)
    moved = []
    for k in range(logits.shape[1]):
        observed, predicted = int((labels == k).sum()), p[:, k].sum().item()
        error = math.sqrt((p[:, k] * (1 - p[:, k])).sum()) / (observed + 10)
        excess = shrunk(math.log((predicted + 10) / (observed + 10)), o.evidence * error)
        moved.append(float(o.offset[k]) + o.rate * excess)
    o.offset = torch.tensor([value - sum(moved) / len(moved) for value in moved], dtype=torch.float64)
    o.passes += 1
