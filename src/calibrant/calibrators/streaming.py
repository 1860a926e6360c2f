"""Multi-pass fitting for data larger than memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from calibrant.calibrators.base import NOT_FINITE, NOTHING_TO_FIT, Batches, Calibrator, FittedLayer
from calibrant.kernels.workers import in_threads, threads_for
from calibrant.layout import Elements, arrange, blocks
from calibrant.probabilities import warn_of_probabilities
from calibrant.warning import warn

Block = tuple[Tensor, ...]
"""Logits ``(n, K)``, float32 or float64, labels ``(n,)``, and possibly another value for each element."""

Sums = tuple[Tensor, ...]
"""Sums over the elements of a block."""

OfImages = Callable[[Tensor], Tensor]
"""Takes the logits of a batch ``(B, K, *S)``; returns one value per image ``(B,)``."""


class HeldOut:
    """Batches of logits and targets, checked once and read as often as a fit needs.

    Args:
        batches: pairs of logits and target.
        ignore_index: the label of elements to leave out.
        in_memory: whether memory holds all batches, so that they need to be arranged only once.
        possible: whether to leave out elements whose true class was given a probability of 0.

    Attributes:
        num_classes: K.
        samples: the number of elements that are not ignored.
        counts: the number of these elements in each class, ``(K,)``.
        ruled_out: the number of these elements whose true class was given a probability of 0.
    """

    def __init__(
        self, batches: Batches, ignore_index: int = -100, *, in_memory: bool = False, possible: bool = False
    ) -> None:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"a fit reads the batches several times, but a {type(batches).__name__} can be read only "
                "once: pass a list, a data loader or another iterable that starts anew"
            )
        self.batches, self.ignore_index, self.in_memory = batches, ignore_index, in_memory
        self.possible = possible
        self._arranged: tuple[OfImages | None, list[list[Block]]] | None = None
        self.num_classes, self.samples, self.ruled_out = 0, 0, 0
        counts: Any = 0
        for logits, target in map(_pair, batches):
            # On a GPU a wrong label would end the process later.
            elements = self._elements(logits, target, look_at_labels=True)
            classes = elements.logits.shape[1]
            if not self.num_classes:
                warn_of_probabilities(logits)
            if self.num_classes not in (0, classes):
                raise ValueError(f"a batch has {classes} classes, those before had {self.num_classes}")
            self.num_classes = classes
            labels, rows = elements.labels, elements.rows
            self.samples += len(labels)
            # The sum of finite numbers is finite unless it overflows; only then each number is checked.
            if not rows.sum().isfinite() and not rows.isfinite().all():
                raise ValueError(NOT_FINITE)
            counts = counts + labels.bincount(minlength=classes).cpu()
            self.ruled_out += int(elements.ruled_out.sum())
        if not self.samples:
            raise ValueError(NOTHING_TO_FIT)
        self.counts: Tensor = counts

    def without_ruled_out(self) -> HeldOut:
        """The same data without the elements whose true class was given a probability of 0."""
        if not 0 < self.ruled_out < self.samples:
            return self
        return HeldOut(self.batches, self.ignore_index, in_memory=self.in_memory, possible=True)

    def _elements(self, logits: Tensor, target: Tensor, *, look_at_labels: bool = False) -> Elements:
        elements = arrange(logits, target, ignore_index=self.ignore_index, look_at_labels=look_at_labels)
        if not self.possible:
            return elements
        return elements.with_changes(_valid=elements.valid & ~elements.ruled_out, all_valid=False)

    def first_rows(self) -> Tensor:
        """The logits ``(n, K)`` of the first batch with elements, in float64."""
        found = (self._elements(*_pair(batch)).rows for batch in self.batches)
        return next(filter(len, found)).double()

    def sums(self, function: Callable[..., Sums], of_images: OfImages | None = None) -> list[Tensor]:
        """Add up what a function computes from blocks of the data, in one pass.

        On a CPU the blocks of a batch are spread over threads. Each thread runs all operations of its blocks
        by itself and waits for the others once per batch. The result is the same in every run.

        Args:
            function: takes the parts of a `Block`; returns sums over its elements.
            of_images: gives a value per image, which the function gets as third argument, ``(n,)``, one for
                each element.
        """
        totals: dict[int, list[Tensor]] = {}
        for batch in self._batches(of_images):
            threads = threads_for(len(batch), batch[0][0].device)

            def work(thread: int, batch: list[Block] = batch, threads: int = threads) -> None:
                for block in batch[thread::threads]:
                    with torch.autocast(block[0].device.type, enabled=False):
                        values = function(*block)
                    if thread not in totals:
                        totals[thread] = [value.double() for value in values]
                    else:
                        for total, value in zip(totals[thread], values, strict=True):
                            total += value

            if threads < 2:
                work(0)
            else:
                in_threads(work, threads)
        per_thread = [totals[thread] for thread in sorted(totals)]
        return [sum(parts[1:], parts[0]) for parts in zip(*per_thread, strict=True)]

    def totals(self, function: Callable[..., Sums], of_images: OfImages | None = None) -> Tensor:
        """`sums` of a function that returns tensors of one value per element ``(n,)``: a number for each."""

        def summed(*block: Tensor) -> Sums:
            return (torch.stack([value.sum(dtype=torch.float64) for value in function(*block)]),)

        return self.sums(summed, of_images)[0].cpu()

    def __iter__(self) -> Iterator[Block]:
        """One pass over the blocks, for results that are not sums."""
        for batch in self._batches():
            yield from batch

    def _batches(self, of_images: OfImages | None = None) -> Iterator[list[Block]]:
        """One pass over the batches that hold elements, each cut into blocks that fit into a CPU's cache."""
        if not self.in_memory:
            yield from self._read(of_images)
            return
        if self._arranged is None or self._arranged[0] is not of_images:
            self._arranged = None  # memory need not hold what is replaced as well
            self._arranged = of_images, list(self._read(of_images))
        yield from self._arranged[1]

    def _read(self, of_images: OfImages | None) -> Iterator[list[Block]]:
        seen = 0
        for logits, target in self.batches:
            elements = self._elements(logits, target)
            parts = [elements.rows, elements.labels]
            if of_images is not None:
                values = of_images(logits.detach()).view(-1, *(1,) * (target.ndim - 1)).expand(target.shape)
                parts.append(values.flatten()[elements.valid.flatten()])
            seen += len(parts[1])
            if len(parts[1]):
                chunks = [chunk for chunk, _ in blocks(parts[0].shape, logits.device)]
                yield [tuple(part[chunk] for part in parts) for chunk in chunks]
        if seen != self.samples:
            raise ValueError(
                f"the batches held {self.samples} elements at first and {seen} later: a fit reads them "
                "several times and needs the same elements each time"
            )


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    """The batch, if it is a pair."""
    if isinstance(batch, Tensor):
        raise TypeError(
            "batches must be pairs (logits, target), got a tensor; for a single pair call fit(logits, target)"
        )
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise TypeError(f"batches must be pairs (logits, target), got a {type(batch).__name__}{size}")
    logits, target = batch
    return logits, target


class FittedInPasses(FittedLayer):
    """A layer that is fitted in passes over the data, in memory or batch by batch.

    Subclasses write `fit_passes`.
    """

    copes_with_zeros: ClassVar[bool] = False
    """Whether true classes with a probability of 0 leave the fit to the others undisturbed."""

    @abstractmethod
    def fit_passes(self, data: HeldOut) -> None:
        """Learn from data that can be read several times."""

    def _fit(self, logits: Tensor, target: Tensor, ignore_index: int) -> Self:
        elements = arrange(logits, target, ignore_index=ignore_index)
        return self._fit_to([(elements.rows, elements.labels)], ignore_index, in_memory=True)

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        self.fit_passes(HeldOut([(rows, labels)], in_memory=True))

    def fit_batches(self, batches: Batches, *, ignore_index: int = -100) -> Self:
        """Learn from batches what `fit` learns from all of them together, with one in memory at a time.

        Args:
            batches: pairs of logits and target, with shapes as for `fit`. They are read several times and
                must hold the same elements each time, in any order, without augmentation.
            ignore_index: the label of elements to leave out.

        Raises:
            TypeError: the batches are an iterator, which can be read only once.
            ValueError: as for `fit`, or the batches do not agree in the number of classes.
        """
        return self._fit_to(batches, ignore_index)

    def _fit_to(self, batches: Batches, ignore_index: int, *, in_memory: bool = False) -> Self:
        with self._as_before_on_error(), torch.no_grad():
            data = HeldOut(batches, ignore_index, in_memory=in_memory)
            if data.ruled_out and not self.copes_with_zeros:
                warn(
                    f"{data.ruled_out} of {data.samples} true classes have a probability of 0, which counts "
                    "as 1.2e-38: the fit follows these elements above all, and may spoil the others. Take "
                    "ensemble-temperature, which copes with them (--method ensemble-temperature), or pass "
                    "probabilities with more digits or smoothed ones, (n p + 1) / (n + K) of n votes"
                )
            self.fit_passes(data)
            self.fitted_to(data.counts)
            if not self.from_calibrant:
                self.check_results(data.first_rows())
        return self


class Scaling(FittedInPasses, Calibrator):
    """A calibrator that is fitted in several passes over the data, in memory or batch by batch.

    Subclasses write `fit_passes` and `transform`.
    """
