"""Selective prediction: the errors that are left when a model answers only where it is confident.

Elements are accepted by falling confidence. The coverage is the fraction of accepted elements, the risk the
fraction of errors among them. Elements of equal confidence are accepted in random order, and the figures are
expectations over these orders: they do not depend on the order of the data. From a `ConfidenceHistogram`, the
elements of a cell count as equally confident.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range, whole_number
from calibrant.histogram import RankedSums
from calibrant.metrics.calibration import Confidences, Source, as_confidences
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.uncertainty import Interval, binomial_interval


def _rounding(elements: Tensor) -> Tensor:
    """The fraction of an element below which differences are rounding, in sums over so many elements."""
    return 1e-9 + 1e-12 * elements


@dataclass(frozen=True)
class RiskCoverage:
    """The risk at several coverages: the numbers of a risk-coverage curve.

    Attributes:
        coverage: the coverages, rising.
        risk: the risk at each of them.
        interval: the Clopper-Pearson interval of each risk.
    """

    coverage: tuple[float, ...]
    risk: tuple[float, ...]
    interval: tuple[Interval, ...]

    def risk_interval(self, coverage: float) -> Interval:
        """The interval of the risk at a coverage.

        >>> logits, right = torch.tensor([[3.0, 0.0]]).expand(100, 2), torch.zeros(100, dtype=torch.long)
        >>> low, high = risk_coverage(logits, right).risk_interval(0.8)
        >>> low, round(high, 4)  # no error among 80 elements
        (0.0, 0.0451)
        """
        return next(
            ends for at, ends in zip(self.coverage, self.interval, strict=True) if at >= coverage - 1e-9
        )

    def coverage_interval(self, risk: float) -> Interval:
        """The interval of the largest coverage with this risk.

        It starts at the last coverage whose interval lies below the risk, and ends at the last one whose
        interval reaches down to it.

        >>> logits, right = torch.tensor([[3.0, 0.0]]).expand(100, 2), torch.zeros(100, dtype=torch.long)
        >>> risk_coverage(logits, right).coverage_interval(0.03)  # 100 elements do not show a risk below 3 %
        (0.0, 1.0)
        """
        ends = list(zip(self.coverage, self.interval, strict=True))
        first = max((at for at, (_, high) in ends if high <= risk), default=0.0)
        last = max((at for at, (low, _) in ends if low <= risk), default=0.0)
        return first, last


def aurc(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """Area under the risk-coverage curve: the mean of the risks at coverage 1/N, 2/N, …, 1.

    Exact from predictions. From a histogram, cells are not divided: typically within 0.1 % of the exact
    value.

    Geifman, Uziel and El-Yaniv, *Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers*, ICLR 2019.

    Args:
        source: logits ``(B, K, *S)``, `Predictions` or a `ConfidenceHistogram`.
        target: labels ``(B, *S)``; only with logits.
        ignore_index: the label of elements to leave out.

    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    >>> round(aurc(logits, torch.tensor([0, 0, 1])), 4)  # the mean of 0, 0 and 1/3
    0.1111
    """
    return float(aurc_of(as_confidences(source, target, ignore_index)))


def augrc(source: Source, target: Tensor | None = None, *, ignore_index: int = -100) -> float:
    """Area under the generalised risk-coverage curve: the mean rate of undetected errors.

    The generalised risk is the number of accepted errors divided by N, not by the number of accepted
    elements. Confident errors weigh less than in `aurc`. The area is that of the curve from (0, 0), straight
    between neighbouring coverages. It equals ``(1 - AUROC) · accuracy · error + error² / 2``, where AUROC
    measures how well the confidence separates right from wrong predictions.

    Exact from predictions, and close from a histogram, as `aurc`.

    Traub et al., *Overcoming Common Flaws in the Evaluation of Selective Classification Systems*,
    NeurIPS 2024. Arguments as for `aurc`.

    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    >>> round(augrc(logits, torch.tensor([0, 0, 1])), 4)  # a triangle of width and height 1/3
    0.0556
    """
    return float(augrc_of(as_confidences(source, target, ignore_index)))


def risk_at_coverage(
    source: Source, target: Tensor | None = None, *, coverage: float = 0.8, ignore_index: int = -100
) -> float:
    """The fraction of errors among the most confident elements.

    ``coverage`` is the fraction of elements to accept, above 0; their number is rounded up. Other arguments
    as for `aurc`.

    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    >>> round(risk_at_coverage(logits, torch.tensor([0, 0, 1, 1]), coverage=0.75), 4)
    0.3333
    """
    coverage = in_range("coverage", coverage, 0, 1, open_low=True)
    return float(risk_at_coverage_of(as_confidences(source, target, ignore_index), coverage))


def coverage_at_risk(
    source: Source, target: Tensor | None = None, *, risk: float = 0.05, ignore_index: int = -100
) -> float:
    """The largest fraction of elements, by falling confidence, with at most this fraction of errors.

    0 if even the most confident elements exceed the risk. ``risk`` is the fraction of errors among the
    accepted elements, from 0 to 1. Other arguments as for `aurc`.

    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    >>> coverage_at_risk(logits, torch.tensor([0, 0, 1, 1]), risk=0.4)
    0.75
    """
    risk = in_range("risk", risk, 0, 1)
    return float(coverage_at_risk_of(as_confidences(source, target, ignore_index), risk))


def risk_coverage(
    source: Source | RankedSums,
    target: Tensor | None = None,
    *,
    points: int = 100,
    level: float = 0.95,
    ignore_index: int = -100,
) -> RiskCoverage:
    """The risk-coverage curve at evenly spaced coverages, with intervals.

    The intervals are those of a fraction of errors among a given number of elements. They hold for one
    coverage at a time, not for the whole curve.

    ``points`` is the number of coverages, from ``1 / points`` to 1. The number of accepted elements is
    rounded up, and coverages that accept the same number are listed once. ``level`` is the level of the
    intervals. Other arguments as for `aurc`.

    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    >>> curve = risk_coverage(logits, torch.tensor([0, 0, 1, 1]))
    >>> curve.coverage, [round(risk, 4) for risk in curve.risk]
    ((0.25, 0.5, 0.75, 1.0), [0.0, 0.0, 0.3333, 0.5])
    """
    points = whole_number("points", points)
    level = in_range("level", level, 0, 1, open_low=True)
    known = source if isinstance(source, RankedSums) else as_confidences(source, target, ignore_index)
    ranking = _ranking(known)
    wanted = torch.arange(1, points + 1, dtype=torch.float64, device=ranking.count.device) / points
    accepted: Tensor = torch.unique(_rounded_up(wanted * ranking.samples))
    errors = ranking.errors_among(accepted)
    ends = zip(*(end.tolist() for end in binomial_interval(errors, accepted, level)), strict=True)
    return RiskCoverage(
        tuple((accepted / ranking.samples).tolist()), tuple((errors / accepted).tolist()), tuple(ends)
    )


def aurc_of(confidences: Confidences | RankedSums) -> Tensor:
    """`aurc` as a tensor."""
    ranking = _ranking(confidences)
    rate = ranking.rate
    # In a group of equal confidences the risk at i elements is rate + (errors_before - rate · before) / i.
    # The sum of 1/i over the group is a difference of harmonic numbers, digamma functions up to a constant.
    harmonic = torch.digamma(F.pad(ranking.accepted, (1, 0)) + 1)
    area = rate * ranking.count + (ranking.errors_before - rate * ranking.before) * harmonic.diff(dim=-1)
    return (area.sum(-1) / ranking.samples).clamp_min(0)


def augrc_of(confidences: Confidences | RankedSums) -> Tensor:
    """`augrc` as a tensor."""
    ranking = _ranking(confidences)
    area = ranking.count * (ranking.errors_before + ranking.errors / 2)
    return area.sum(-1) / ranking.samples.square()


def risk_at_coverage_of(confidences: Confidences | RankedSums, coverage: float) -> Tensor:
    """`risk_at_coverage` as a tensor."""
    ranking = _ranking(confidences)
    accepted = _rounded_up(coverage * ranking.samples).unsqueeze(-1)
    return (ranking.errors_among(accepted) / accepted).squeeze(-1)


def coverage_at_risk_of(confidences: Confidences | RankedSums, risk: float) -> Tensor:
    """`coverage_at_risk` as a tensor."""
    ranking = _ranking(confidences)
    # Errors minus those allowed, at i elements inside a group: start + (i - before) · (rate - risk).
    start, step = ranking.errors_before - risk * ranking.before, ranking.rate - risk
    rounding = _rounding(ranking.accepted)
    whole = start + ranking.count * step <= rounding
    # A group whose end exceeds the risk can be accepted in part if the errors only exceed it inside.
    inside = torch.where(step > 0, -start / step.where(step > 0, torch.ones_like(step)), 0)
    part = torch.where(start <= rounding, (inside + rounding).floor().clamp_min(0), 0)
    found = torch.where(whole, ranking.accepted, torch.where(part > 0, ranking.before + part, 0))
    return torch.where(ranking.count > 0, found, 0).amax(-1) / ranking.samples


def _ranking(confidences: Confidences | RankedSums) -> _Ranking:
    """The ranking of these confidences, made once."""
    ranked = confidences if isinstance(confidences, RankedSums) else confidences.ranked
    folded = isinstance(confidences, Predictions) and confidences.binary
    name = "ranking of the predicted class" if folded else "ranking"
    if name not in ranked.derived:
        ranked.derived[name] = _Ranking(ranked.folded() if folded else ranked)
    ranking: _Ranking = ranked.derived[name]
    return ranking


class _Ranking:
    """Groups of equal confidence by falling confidence; sums may have a leading axis, for resamples."""

    def __init__(self, ranked: RankedSums) -> None:
        groups: Tensor = ranked.running[::2].diff(dim=-1).flip(-1)  # of count and correctness
        self.count: Tensor = groups[0]  # elements of each group
        # Differences of running sums: rounding must not turn no errors into less than none.
        self.errors = (self.count - groups[1]).clamp_min(0)
        self.rate = self.errors / self.count.clamp_min(1)  # of errors in each group
        self.accepted = self.count.cumsum(-1)  # elements up to the end of each group
        self.before = self.accepted - self.count
        self.errors_before = self.errors.cumsum(-1) - self.errors
        self.samples = self.accepted[..., -1]

    def errors_among(self, accepted: Tensor) -> Tensor:
        """The expected number of errors among so many of the most confident elements."""
        group = torch.searchsorted(self.accepted, accepted).clamp_max(self.count.shape[-1] - 1)
        count, errors, before, errors_before = (
            values.gather(-1, group) for values in (self.count, self.errors, self.before, self.errors_before)
        )
        return errors_before + errors * (accepted - before) / count.clamp_min(1)


def _rounded_up(elements: Tensor) -> Tensor:
    """A number of elements, rounded up; at least 1. A product such as 0.07 · 100 must not become 8."""
    return (elements - _rounding(elements)).ceil().clamp_min(1)
