"""Ranks of methods over several data sets: means, intervals, and which differences are significant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.criterion import Criterion
from calibrant.metrics.uncertainty import Interval

CRITERIA = (
    Criterion("nll", after=True),
    Criterion("nll"),
    Criterion("ece", after=True),
    Criterion("ece"),
    Criterion("accuracy"),
)
"""What methods are ranked by."""

_PERMUTATIONS = 9999

Values = Mapping[str, Mapping[str, Sequence[float]]]
"""By data set and method, the values of one metric, one for each seed."""


@dataclass(frozen=True)
class Standing:
    """The results of one experiment, such as many losses on one data set, of which some may be missing."""

    name: str  # the heading in tables
    folder: str  # of its runs, relative to that of the leaderboard
    comparison: Comparison | None  # the methods that have at least one seed; None if there are none
    missing: Mapping[tuple[str, int], str]  # why results are missing, by the method and the seed of the run
    ranked: bool = True  # whether it counts in the ranks

    def missing_lines(self) -> list[str]:
        """What is missing, with all methods in one line that lack the same seeds for the same reason.

        >>> Standing("a", "a", None, {("ce", 0): "x", ("ls", 0): "x", ("ce", 1): "x"}).missing_lines()
        ['ce (seeds 0, 1): x', 'ls (seed 0): x']
        """
        seeds: dict[tuple[str, str], list[str]] = {}
        for (method, seed), reason in self.missing.items():
            seeds.setdefault((method, reason), []).append(str(seed))
        methods: dict[tuple[str, str], list[str]] = {}
        for (method, reason), numbers in seeds.items():
            label = f"seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            methods.setdefault((label, reason), []).append(method)
        return [f"{', '.join(names)} ({label}): {reason}" for (label, reason), names in methods.items()]


@dataclass(frozen=True)
class Ranks:
    """The ranks of methods by one metric. 1 is the best, and equal values share the mean of their ranks.

    >>> values = {name: {"a": [0.1], "b": [0.2], "c": [0.3]} for name in ("one", "two", "three")}
    >>> ranks = rank_methods(values, higher_is_better=False)
    >>> ranks.mean
    {'a': 1.0, 'b': 2.0, 'c': 3.0}
    >>> round(ranks.critical_difference, 2), ranks.groups()
    (1.91, [('a', 'b'), ('b', 'c')])
    """

    data: tuple[str, ...]  # the data sets; methods without values on all of them are left out
    by_data: Mapping[str, tuple[float, ...]]  # the rank of every method on each, by the mean over seeds
    mean: Mapping[str, float]  # the mean rank of every method, the best first
    intervals: Mapping[str, Interval]  # 95 % intervals of the mean ranks, from resampled data sets and seeds
    p_value: float  # of Friedman's test that all methods are equal; NaN with one data set
    # Mean ranks that are further apart differ significantly at 5 %, by Nemenyi's test (Demšar, 2006).
    critical_difference: float  # infinite with one data set

    def groups(self) -> list[tuple[str, ...]]:
        """Groups of methods, as large as possible, in which no two differ significantly."""
        names = list(self.mean)
        found: list[tuple[str, ...]] = []
        for first in names:
            near = tuple(
                name
                for name in names[names.index(first) :]
                if self.mean[name] - self.mean[first] <= self.critical_difference
            )
            if not found or not set(near) <= set(found[-1]):
                found.append(near)
        return found

    def significant(self) -> list[tuple[str, str]]:
        """Pairs of a method and a significantly worse one."""
        pairs = combinations(self.mean, 2)
        return [pair for pair in pairs if self.mean[pair[1]] - self.mean[pair[0]] > self.critical_difference]


def rank_methods(values: Values, *, higher_is_better: bool, resamples: int = 1000, seed: int = 0) -> Ranks:
    """Rank the methods that have values on all data sets, with intervals from bootstrap resamples."""
    data = tuple(values)
    known = [set(methods) for methods in values.values()]
    names = [name for name in next(iter(values.values()), {}) if all(name in each for each in known)]
    if not names:
        raise ValueError("expected at least one method that has values on every data set")
    sign = -1.0 if higher_is_better else 1.0
    tables = [
        [sign * torch.tensor(values[each][name], dtype=torch.float64, device="cpu") for name in names]
        for each in data
    ]
    ranks = torch.stack([_ranks(torch.stack([seeds.mean() for seeds in table])) for table in tables])
    mean = ranks.mean(0)
    order = mean.argsort(stable=True).tolist()
    drawn = _resampled(tables, resamples, seed)
    low, high = torch.quantile(drawn, drawn.new_tensor([0.025, 0.975]), dim=0)
    return Ranks(
        data,
        {names[k]: tuple(ranks[:, k].tolist()) for k in order},
        {names[k]: float(mean[k]) for k in order},
        {names[k]: (float(low[k]), float(high[k])) for k in order},
        _friedman(ranks),
        _critical_difference(len(names), len(data)),
    )


def rankings(standings: Sequence[Standing]) -> dict[Criterion, Ranks]:
    """The ranks by each of the `CRITERIA`, of the methods that have results in every ranked experiment.

    Experiments with fewer than two methods are left out. In segmentation, the mean IoU takes the place of the
    accuracy, which is mostly that of the background.
    """
    found = {}
    ranked = {each.name: comparison for each, comparison in _ranked(standings)}
    for criterion in CRITERIA:
        values = {name: _values(comparison, criterion) for name, comparison in ranked.items()}
        shared = set.intersection(*map(set, values.values())) if values else set()
        if len(shared) > 1:
            found[criterion] = rank_methods(values, higher_is_better=criterion.higher_is_better)
    return found


def widest(standings: Sequence[Standing]) -> list[Standing]:
    """The experiments over which the most methods can be ranked, if that takes fewer than all of them.

    At least two of them. Empty if there are none, or if all experiments have the same methods.
    """
    ranked = [
        (each, {method.name for method in comparison.methods}) for each, comparison in _ranked(standings)
    ]
    groups = [(own, [each for each, names in ranked if names >= own]) for _, own in ranked]
    fewer = [group for group in groups if 1 < len(group[1]) < len(ranked)]
    _, found = max(fewer, key=lambda group: (len(group[0]), len(group[1])), default=(set(), []))
    return found


def _ranked(standings: Sequence[Standing]) -> list[tuple[Standing, Comparison]]:
    """The experiments that count in the ranks: those with at least two methods."""
    return [
        (each, each.comparison)
        for each in standings
        if each.ranked and each.comparison and len(each.comparison.methods) > 1
    ]


def _values(comparison: Comparison, criterion: Criterion) -> dict[str, list[float]]:
    """The values of every method that has one for each seed."""
    metric = "mean_iou" if comparison.dense and criterion.metric == "accuracy" else criterion.metric
    found = {}
    for method in comparison.methods:
        evaluations = method.evaluations("temperature" if criterion.after else "")
        numbers = [value for each in evaluations if (value := each.figures[metric].value) is not None]
        if numbers and len(numbers) == len(evaluations):
            found[method.name] = numbers
    return found


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1 on along the last axis; equal values, but for rounding, share the mean of theirs.

    >>> _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([3.5000, 1.0000, 3.5000, 2.0000], dtype=torch.float64)
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # here: it takes half a second

    # Means of the same numbers in another order may differ in the last digit.
    return torch.from_numpy(rankdata(values.double().round(decimals=12).numpy(), axis=-1)).double()


def _resampled(tables: Sequence[Sequence[Tensor]], resamples: int, seed: int) -> Tensor:
    """Mean ranks ``(resamples, methods)`` of resampled data sets, each with resampled seeds.

    All methods get the same seeds, where they have equally many.
    """
    generator = torch.Generator().manual_seed(seed)
    sets, most = len(tables), max(len(seeds) for table in tables for seeds in table)
    drawn = torch.randint(sets, (resamples, sets), generator=generator, device="cpu")
    numbers = torch.rand(resamples, sets, most, generator=generator, dtype=torch.float64, device="cpu")
    ranks = []
    for table in tables:
        chosen = [seeds[(numbers[..., : len(seeds)] * len(seeds)).long()].mean(-1) for seeds in table]
        ranks.append(_ranks(torch.stack(chosen, dim=-1)))  # as if this data set had been drawn every time
    every = torch.stack(ranks)  # (data sets, resamples, positions, methods)
    rows, positions = torch.arange(resamples, device="cpu")[:, None], torch.arange(sets, device="cpu")[None]
    return every[drawn, rows, positions].mean(1)


def _friedman(ranks: Tensor) -> float:
    """The p-value of Friedman's test, from 9,999 random permutations of the methods on every data set.

    The usual approximations by χ² or F are wrong for few data sets: two that agree on two methods give F = ∞,
    although they agree by chance in half of all cases.

    >>> 0.4 < _friedman(torch.tensor([[1.0, 2.0], [1.0, 2.0]])) < 0.6
    True
    """
    sets, methods = ranks.shape
    if sets < 2 or methods < 2:
        return math.nan
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(_PERMUTATIONS, sets, methods, generator=generator, device="cpu").argsort(-1)
    permuted = ranks.expand(_PERMUTATIONS, -1, -1).gather(-1, order).mean(1)
    spread = ranks.mean(0).var()
    larger = (permuted.var(-1) >= spread - 1e-9).sum()
    return (1 + int(larger)) / (1 + _PERMUTATIONS)


def _critical_difference(methods: int, sets: int) -> float:
    """The critical difference of Nemenyi's test.

    >>> round(_critical_difference(4, 14), 2)  # in the example of Demšar, 2.569 sqrt(4 · 5 / (6 · 14)) = 1.25
    1.25
    """
    if sets < 2 or methods < 2:
        return math.inf
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(0.95, methods, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * sets))
