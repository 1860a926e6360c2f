"""Coverage and size of prediction sets, of each class and of all, from additive sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from calibrant.arguments import in_range, label, whole_number
from calibrant.conformal.sets import quantile_rank
from calibrant.layout import not_ignored
from calibrant.metrics.uncertainty import Interval, binomial_interval, normal_interval
from calibrant.statistics import Statistics, sum_dtype


@dataclass(frozen=True)
class ClassSets:
    """The sets of the elements of one class.

    Attributes:
        name: the name of the class, or its number.
        count: number of elements.
        coverage: the fraction of sets that hold the class; None without elements, as the following.
        coverage_interval: its Clopper-Pearson interval.
        size: the mean number of classes in a set.
    """

    name: str
    count: int
    coverage: float | None
    coverage_interval: Interval | None
    size: float | None


@dataclass(frozen=True)
class SetFigures:
    """The figures of prediction sets.

    Attributes:
        samples: number of elements.
        coverage: the fraction of sets that hold the true class.
        coverage_interval: its Clopper-Pearson interval.
        size: the mean number of classes in a set.
        size_interval: its interval, from the spread of the sizes; None for a single element.
        empty: the fraction of empty sets.
        single: the fraction of sets with one class.
        classes: the figures of each class.
        level: the level of the intervals.
    """

    samples: int
    coverage: float
    coverage_interval: Interval
    size: float
    size_interval: Interval | None
    empty: float
    single: float
    classes: tuple[ClassSets, ...]
    level: float = 0.95


@dataclass(frozen=True, eq=False)
class SetCounts(Statistics):
    """Sums over prediction sets: batches, files and processes add up.

    Attributes:
        occurs: ``(K,)``, number of elements of each class.
        covered: ``(K,)``, number of these whose set holds the class.
        size: ``(K,)``, summed sizes of these sets.
        sizes: ``(K + 1,)``, number of sets of each size.

    >>> sets = torch.tensor([[True, False], [True, True], [True, False]])
    >>> counts = SetCounts.of(sets, torch.tensor([0, 1, 1]))
    >>> counts.covered.tolist(), counts.sizes.tolist()
    ([1.0, 1.0], [0.0, 2.0, 1.0])
    """

    occurs: Tensor
    covered: Tensor
    size: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, sets: Tensor, target: Tensor, *, ignore_index: int = -100) -> Self:
        """The sums of a batch: boolean sets ``(B, K, *S)`` and labels ``(B, *S)``.

        Raises:
            TypeError: the sets are not boolean, or the labels are no integers.
            ValueError: the shapes do not fit, or a label is not a class.
        """
        if not isinstance(sets, Tensor) or sets.dtype != torch.bool:
            found = sets.dtype if isinstance(sets, Tensor) else type(sets).__name__
            raise TypeError(f"sets must be a boolean tensor, as conformal sets return it, got {found}")
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
            found = target.dtype if isinstance(target, Tensor) else type(target).__name__
            raise TypeError(f"target must hold integer labels, got {found}")
        if sets.ndim < 2 or target.shape != sets.shape[:1] + sets.shape[2:]:
            expected = tuple(sets.shape[:1] + sets.shape[2:])
            raise ValueError(f"target must have shape {expected} for these sets, got {tuple(target.shape)}")
        classes, dtype = sets.shape[1], sum_dtype(sets.device)
        valid = not_ignored(target, label("ignore_index", ignore_index)).flatten()
        rows = sets.movedim(1, -1).reshape(-1, classes)[valid]
        labels = target.flatten()[valid].long()
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(f"labels must be from 0 to {classes - 1}, got {labels.min()} to {labels.max()}")
        size = rows.sum(1)
        held = rows.gather(1, labels.unsqueeze(1)).squeeze(1)

        def by_class(values: Tensor) -> Tensor:
            return torch.zeros(classes, dtype=dtype, device=rows.device).index_add_(
                0, labels, values.to(dtype)
            )

        return cls(
            torch.tensor(len(labels), dtype=dtype, device=rows.device),
            by_class(torch.ones_like(size)),
            by_class(held),
            by_class(size),
            torch.bincount(size, minlength=classes + 1).to(dtype),
        )

    def figures(self, *, level: float = 0.95, class_names: tuple[str, ...] | None = None) -> SetFigures:
        """Coverage and size with intervals.

        Args:
            level: the level of the intervals.
            class_names: the names of the classes; by default their numbers.
        """
        level = in_range("level", level, 0, 1, open_low=True)
        total = float(self.samples)
        if not total:
            raise ValueError("the coverage of no sets is undefined: every element is ignored")
        size = torch.arange(len(self.sizes), dtype=self.sizes.dtype, device=self.sizes.device)
        mean = float((size * self.sizes).sum()) / total
        variance = float(((size - mean).square() * self.sizes).sum()) / total
        least, most = normal_interval(mean, math.sqrt(variance / total), level)
        low, high = binomial_interval(self.covered.sum(), self.samples, level)
        names = [str(k) for k in range(len(self.occurs))] if class_names is None else class_names
        ends = torch.stack(binomial_interval(self.covered, self.occurs, level), 1).tolist()
        columns = zip(
            names, self.occurs.tolist(), self.covered.tolist(), ends, self.size.tolist(), strict=True
        )
        return SetFigures(
            samples=int(total),
            coverage=float(self.covered.sum()) / total,
            coverage_interval=(float(low), float(high)),
            size=mean,
            size_interval=(max(0.0, least), most) if total > 1 else None,
            empty=float(self.sizes[0]) / total,
            single=float(self.sizes[1]) / total,
            classes=tuple(
                ClassSets(name, int(n), covered / n, (low, high), sizes / n)
                if n
                else ClassSets(name, 0, None, None, None)
                for name, n, covered, (low, high), sizes in columns
            ),
            level=level,
        )


def evaluate_sets(
    sets: Tensor, target: Tensor, *, level: float = 0.95, ignore_index: int = -100
) -> SetFigures:
    """Coverage and size of prediction sets, with intervals.

    Args:
        sets: boolean sets ``(B, K, *S)``.
        target: labels ``(B, *S)``.
        level: the level of the intervals.
        ignore_index: the label of elements to leave out.

    >>> sets = torch.tensor([[True, False], [True, True], [True, False], [True, False]])
    >>> figures = evaluate_sets(sets, torch.tensor([0, 1, 0, 1]))
    >>> figures.coverage, figures.size, figures.classes[1].coverage
    (0.75, 1.25, 0.5)
    """
    return SetCounts.of(sets, target, ignore_index=ignore_index).figures(level=level)


def expected_coverage(held_out: int, alpha: float, *, level: float = 0.95) -> Interval:
    """The range in which the coverage of fitted conformal sets lies, with probability ``level``.

    The coverage on unlimited new data depends on the held-out data that the sets were fitted to. With
    continuous scores it has a beta distribution, whatever the model. With equal scores it is larger.

    Elements must be independent. The pixels of an image are not: the coverage of fits to few images varies
    far more.

    Args:
        held_out: number of elements that the sets were fitted to.
        alpha: as for `ConformalSets`.
        level: the probability of the range.

    >>> low, high = expected_coverage(1000, 0.1)
    >>> round(low, 3), round(high, 3)
    (0.881, 0.918)
    """
    from scipy.special import betaincinv  # type: ignore[import-untyped]  # here: it takes half a second

    count, alpha = whole_number("held_out", held_out), in_range("alpha", alpha, 0, 1)
    tail = (1 - in_range("level", level, 0, 1)) / 2
    rank = quantile_rank(count, alpha)
    if rank > count:
        return 1.0, 1.0
    low, high = (float(betaincinv(rank, count + 1 - rank, part)) for part in (tail, 1 - tail))
    return low, high
