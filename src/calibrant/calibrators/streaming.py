"""Held-out data gone through again and again, so that what fits in no memory can be fitted to as well."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from calibrant.calibrators.base import Batches, Calibrator
from calibrant.layout import Elements, arrange, blocks


class HeldOut:
    """Batches of logits and targets, checked once and then passed through as often as a fit needs.

    Attributes:
        num_classes: K.
        samples: number of elements that are not ignored.
        counts: how many of them each class has, ``(K,)``.
    """

    def __init__(self, batches: Batches, ignore_index: int = -100) -> None:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"a fit goes through the batches several times, which a {type(batches).__name__} does not "
                "allow: pass a list, a data loader or another iterable that starts anew"
            )
        self.batches, self.ignore_index = batches, ignore_index
        self.num_classes, self.samples = 0, 0
        counts: Any = 0
        for elements in self.elements():
            classes = elements.logits.shape[1]
            if self.num_classes not in (0, classes):
                raise ValueError(f"a batch has {classes} classes, those before had {self.num_classes}")
            self.num_classes = classes
            labels, rows = elements.labels, elements.rows
            self.samples += len(labels)
            if not _all_finite(rows):
                raise ValueError(
                    "logits hold NaN or infinite numbers; a calibrator is fitted to finite logits"
                )
            # Elsewhere than on a CPU nobody has looked at them yet, and a wrong one would end the process.
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
                raise ValueError(f"target holds labels outside 0 to {classes - 1}")
            counts = counts + labels.bincount(minlength=classes).cpu()
        if not self.samples:
            raise ValueError("nothing to fit: the data hold no element that is not ignored")
        self.counts: Tensor = counts

    def elements(self) -> Iterator[Elements]:
        """The batches, one after the other."""
        for logits, target in self.batches:
            yield arrange(logits, target, ignore_index=self.ignore_index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass: blocks of logits ``(n, K)``, float32 or float64, and labels ``(n,)``.

        A block is small enough that what is computed from it stays in the cache of a CPU.
        """
        seen = 0
        for elements in self.elements():
            rows, labels = elements.rows, elements.labels
            seen += len(labels)
            for chunk, _ in blocks(rows.shape, rows.device):
                if len(labels[chunk]):
                    yield rows[chunk], labels[chunk]
        if seen != self.samples:
            raise ValueError(
                f"the batches held {self.samples} elements at first and {seen} later: a fit needs batches "
                "that can be gone through several times"
            )


def _all_finite(rows: Tensor) -> bool:
    # The sum is finite only if every number is; it may overflow, and then each is looked at.
    return bool(rows.sum().isfinite()) or bool(rows.isfinite().all())


class Scaling(Calibrator):
    """A calibrator that is fitted in passes over the data, all at once or batch by batch.

    Subclasses write `fit_passes` and `transform`.
    """

    @abstractmethod
    def fit_passes(self, data: HeldOut) -> None:
        """Learn from data that can be gone through several times."""

    def fit(self, logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Self:
        elements = arrange(logits, target, ignore_index=ignore_index)
        # Views and types are settled here, once, rather than in every pass.
        return self.fit_batches([(elements.rows, elements.labels)], ignore_index=ignore_index)

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        self.fit_passes(HeldOut([(rows, labels)]))

    def fit_batches(self, batches: Batches, *, ignore_index: int = -100) -> Self:
        """Learn from batches as from all of them together, holding one at a time.

        Args:
            batches: ``(logits, target)`` pairs, shaped as for `fit`, which are gone through several times
                and must be the same each time: no augmentation; their order is free.
            ignore_index: label of elements to leave out.

        Raises:
            TypeError: an iterator, which can be gone through only once.
            ValueError: as `fit`, and batches that do not agree.
        """
        with torch.no_grad():
            data = HeldOut(batches, ignore_index)
            self.fit_passes(data)
        self.fitted_to(data.counts)
        return self


def totals(terms: Iterator[tuple[Tensor, ...]]) -> list[float]:
    """The sum, in float64, of each of several values per element, over blocks of them."""
    sums: Any = 0
    for values in terms:
        sums = sums + torch.stack([value.sum(dtype=torch.float64) for value in values])
    return list(sums.tolist())
