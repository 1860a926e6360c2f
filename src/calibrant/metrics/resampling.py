"""The bootstrap: every metric on resampled data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from calibrant.histogram import ConfidenceHistogram, RankedSums, bin_of, equal_width_edges
from calibrant.metrics.accuracy import ClassCounts
from calibrant.metrics.catalogue import Options, compute
from calibrant.metrics.classwise import ClassGaps, with_first_bin
from calibrant.metrics.predictions import Predictions

# Weights of elements held at once, (resamples, N): with 4 MB, most operations stay in the processor's cache.
_DRAWS = 1 << 19

ResampleProgress = Callable[[int, int], None]


class Resamples(RankedSums):
    """Many resamples of confidences at once; the sums of `RankedSums` have the shape ``(3, R, n)``.

    An element that was drawn several times can be divided between two bins of equal mass.
    """

    most_bins: ClassVar[int] = 64  # repeated elements end the sweep earlier than on the data
    cells: ClassVar[int] = 1 << 9  # the error of coarser cells is far below the noise

    @classmethod
    def of(cls, predictions: Predictions, weight: Tensor) -> Self:
        """Resamples in which each element occurs ``weight`` times, ``(R, N)``."""
        order = predictions.order
        confidence = predictions.forecast[order].double()
        values = (torch.ones_like(confidence), confidence, predictions.outcome[order].double())
        # index_select: indexing by brackets takes several times longer.
        return cls(confidence, weight.index_select(1, order) * torch.stack(values).unsqueeze(1))

    @property
    def ranked(self) -> Self:
        """These sums themselves."""
        return self

    def residual(self, cells: int) -> Tensor:
        """``(correct - confidence) / N`` in cells of ``[0, 1]``, ``(R, cells)``."""
        count, confidence, correct = self.running
        _, places = self._at_equal_widths(cells)
        gap = (correct - confidence).index_select(-1, places).diff(dim=-1)
        residual: Tensor = gap / count[..., -1:]
        return residual


def draws(samples: int, resamples: int, seed: int, numbers: int = 1) -> Iterator[Tensor]:
    """How often each of the samples is drawn: blocks ``(r, N)`` in float64, ``resamples`` rows in all.

    They depend on ``samples`` and ``seed`` only: two models evaluated on the same data get the same draws.
    Like N, ``numbers`` limits r: it is how many other numbers the caller holds per row.
    """
    generator = torch.Generator().manual_seed(seed)
    for count in _blocks(resamples, max(samples, numbers)):
        drawn = torch.randint(samples, (count, samples), generator=generator, device="cpu")
        drawn += samples * torch.arange(count, device="cpu").unsqueeze(1)
        yield torch.bincount(drawn.flatten(), minlength=count * samples).view(count, samples).double()


def bootstrap(
    predictions: Predictions,
    options: Options,
    values: Mapping[str, Tensor],
    *,
    resamples: int,
    seed: int,
    progress: ResampleProgress | None = None,
) -> dict[str, Tensor]:
    """The replicates ``(resamples,)`` of every metric on elements drawn with replacement, on the CPU.

    Metrics that are undefined in some resample, for example without any foreground, are left out. ``values``
    are those of the metrics that are means over elements, ``(N,)``; scalars among them are skipped.
    """
    device, samples = predictions.label.device, predictions.samples
    columns = {name: column for name, column in values.items() if column.ndim}
    matrix = torch.stack(list(columns.values()), 1)
    dense, sparse = _class_residuals(predictions, options.bins)

    def figures() -> Iterator[dict[str, Tensor]]:
        for weight in draws(samples, resamples, seed, predictions.num_classes * options.bins):
            weight = weight.to(device)
            parts = {
                "confidences": Resamples.of(predictions, weight),
                "counts": _drawn_counts(predictions, weight),
                "gaps": _drawn_gaps(weight, dense, sparse, options.bins),
                "elements": dict(zip(columns, (weight @ matrix / samples).T, strict=True)),
            }
            yield compute(parts, options)

    return _gathered(figures(), resamples, progress)


def bootstrap_histogram(
    histogram: ConfidenceHistogram,
    counts: ClassCounts,
    options: Options,
    *,
    resamples: int,
    seed: int,
    progress: ResampleProgress | None = None,
) -> dict[str, Tensor]:
    """Every metric on data resampled from sums, for streams and for very large data.

    Counts are drawn from Poisson distributions, a good approximation for so many elements. Mean IoU has no
    replicates: the sums do not tell which class was predicted in the place of another. Otherwise as
    `bootstrap`.
    """
    generator = torch.Generator().manual_seed(seed)
    filled = (histogram.count > 0).cpu()
    count, confidence, correct = (values.cpu()[filled] for values in histogram.tensors()[1:])
    position = confidence / count
    recognised, missed = counts.recognised.cpu(), (counts.occurs - counts.recognised).cpu()

    def drawn(expected: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
        right, wrong = (torch.poisson(values.expand(rows, -1), generator) for values in expected)
        # From very few elements none may be drawn. The data then take the place of the resample.
        nothing = (right + wrong).sum(1, keepdim=True) == 0
        return torch.where(nothing, expected[0], right), torch.where(nothing, expected[1], wrong)

    def figures() -> Iterator[dict[str, Tensor]]:
        for rows in _blocks(resamples, len(count)):
            right, wrong = drawn((correct, count - correct), rows)
            total = right + wrong
            hits, misses = drawn((recognised, missed), rows)
            occurs = hits + misses
            parts = {
                "confidences": Resamples(position, torch.stack([total, total * position, right])),
                "counts": ClassCounts(occurs.sum(1), occurs, hits, torch.full_like(occurs, torch.nan)),
            }
            yield compute(parts, options)

    return _gathered(figures(), resamples, progress)


def _blocks(resamples: int, numbers: int) -> Iterator[int]:
    """How many resamples to draw at once, if each holds so many numbers."""
    step = max(1, _DRAWS // numbers)
    for start in range(0, resamples, step):
        yield min(step, resamples - start)


def _gathered(
    blocks: Iterable[dict[str, Tensor]], resamples: int, progress: ResampleProgress | None
) -> dict[str, Tensor]:
    """The replicates of all blocks: one tensor for each metric that is defined in every resample."""
    rows: list[dict[str, Tensor]] = []
    done = 0
    for block in blocks:
        rows.append(block)
        done += len(next(iter(block.values())))
        if progress is not None:
            progress(done, resamples)
    found = {name: torch.cat([row[name] for row in rows]).cpu() for name in (rows[0] if rows else ())}
    return {name: values for name, values in found.items() if bool(values.isfinite().all())}


def _drawn_counts(predictions: Predictions, weight: Tensor) -> ClassCounts:
    def total(values: Tensor, index: Tensor) -> Tensor:
        return weight.new_zeros(len(weight), predictions.num_classes).index_add_(1, index, values)

    label = predictions.label
    return ClassCounts(
        weight.sum(1),
        total(weight, label),
        total(weight * predictions.correct, label),
        total(weight, predictions.prediction),
    )


Sparse = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def _class_residuals(predictions: Predictions, bins: int) -> tuple[Tensor, Sparse]:
    """``s_k - 1[y=k]`` of every element and class, split into a dense and a sparse part.

    Returns:
        The residuals of probabilities in the first bin, where nearly all are, ``(N, K)``, with 0 elsewhere.
        For the other probabilities: the element, the index among ``K * bins``, and the residual.
    """
    probability = predictions.rows.softmax(1)
    large = (probability > (1 - 1e-6) / bins).nonzero(as_tuple=True)
    values = probability[large].double()
    edges = equal_width_edges(bins, values.device)
    place = large[1] * bins + bin_of(values, edges)
    hit = (large[1] == predictions.label[large[0]]).double()
    dense = probability.scatter_add_(1, predictions.label.unsqueeze(1), -torch.ones_like(probability[:, :1]))
    dense[large] = 0
    return dense, (large[0], place, values - hit)


def _drawn_gaps(weight: Tensor, dense: Tensor, sparse: Sparse, bins: int) -> ClassGaps:
    element, place, residual = sparse
    classes = dense.shape[1]
    drawn, samples = weight.index_select(1, element), weight.sum(1)
    gap, count = (weight.new_zeros(len(weight), classes * bins) for _ in range(2))
    count = count.index_add_(1, place, drawn).view(len(weight), classes, bins)
    gap = gap.index_add_(1, place, drawn * residual).view(len(weight), classes, bins)
    gap[:, :, 0] += weight.to(dense.dtype) @ dense
    return ClassGaps(samples, gap, with_first_bin(count, samples.unsqueeze(1)))
