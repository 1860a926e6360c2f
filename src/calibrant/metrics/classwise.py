"""Class-wise calibration error: the probabilities of all classes, not only the top one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from calibrant.histogram import bin_of, equal_width_edges
from calibrant.kernels import Block, visit
from calibrant.layout import Elements, Index
from calibrant.metrics.predictions import Predictions, as_predictions
from calibrant.statistics import Statistics, sum_dtype


@dataclass(frozen=True, eq=False)
class ClassGaps(Statistics):
    """Probability minus occurrence of each class, summed over bins of that probability.

    Attributes:
        gap: ``(K, bins)``, the sum of ``s_k - 1[y=k]`` over elements whose ``s_k`` lies in the bin.
        count: ``(K, bins)``, the number of these elements.

    >>> from calibrant.layout import arrange
    >>> gaps = ClassGaps.of(arrange(torch.zeros(3, 2), torch.tensor([0, 0, 1])), bins=1)
    >>> gaps.gap.tolist()
    [[-0.5], [0.5]]
    """

    gap: Tensor
    count: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, elements: Elements, bins: int = 15) -> Self:
        """The gaps of a batch, over the elements that are not ignored."""
        classes, device = elements.logits.shape[1], elements.logits.device
        dtype = sum_dtype(device)
        edges = equal_width_edges(bins, device)
        valid = elements.valid.unsqueeze(1)

        def gaps(index: Index, block: Block) -> tuple[Tensor, Tensor, Tensor]:
            gap = torch.zeros(classes * bins, dtype=dtype, device=device)
            counted, exponential, total = valid[index], block.exponential, block.total
            if not elements.all_valid:  # an ignored element gets probability 0 for every class: no gap
                exponential, total = exponential.masked_fill_(~counted, 0), total.masked_fill_(~counted, 1)
            # Fewer than `bins` classes of an element can lie above the first bin. Sorting only these into
            # bins takes a few passes in all, instead of one for each bin or class.
            large = (exponential > total * ((1 - 1e-6) / bins)).nonzero(as_tuple=True)
            rows, of_class, *columns = large
            values = (exponential[large] / total.squeeze(1)[(rows, *columns)]).to(dtype)
            place = of_class * bins + bin_of(values, edges)
            gap.index_add_(0, place, values)
            count = torch.bincount(place, minlength=classes * bins).to(dtype)
            at_target = (exponential.gather(1, block.target) / total).to(dtype)
            place = block.target * bins + bin_of(at_target, edges)
            gap.index_add_(0, place.flatten(), -counted.flatten().to(dtype))
            exponential[large] = (
                0  # what rounding leaves of a large sum could be more than all of the first bin
            )
            in_first = _sum_over_elements(exponential, total.reciprocal(), dtype)
            return gap, count, in_first

        gap, count, in_first = visit(elements, gaps)
        gap = gap.view(classes, bins)
        gap[:, 0] += in_first
        samples = elements.valid.sum().to(dtype)
        return cls(samples, gap, with_first_bin(count.view(classes, bins), samples))

    @property
    def error(self) -> Tensor:
        """Class-wise ECE."""
        return self.gap.abs().sum((-2, -1)) / (self.samples * self.gap.shape[-2])

    @property
    def largest_error(self) -> Tensor:
        """Class-wise MCE."""
        return (self.gap.abs() / self.count.clamp_min(1)).amax(-1).mean(-1)


def with_first_bin(count: Tensor, samples: Tensor) -> Tensor:
    """Counts ``(*, K, bins)`` with the first bin set to the elements that no other bin holds, in place."""
    count[..., 0] = samples - count[..., 1:].sum(-1)
    return count


def _sum_over_elements(values: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum ``(A, K[, S])`` with weights ``(A, 1[, S])``, class by class, ``(K,)``."""
    # On a GPU a block has millions of elements, too many to add up in float32.
    if values.device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
        return (values * weight).sum([axis for axis in range(values.ndim) if axis != 1], dtype=dtype)
    if values.ndim == 2:  # matrix products, which save a pass
        return (weight.T @ values).squeeze(0).to(dtype)
    return (values @ weight.transpose(1, 2)).sum((0, 2), dtype=dtype)


Source = Tensor | Predictions | ClassGaps


def classwise_ece(
    source: Source, target: Tensor | None = None, *, bins: int = 15, ignore_index: int = -100
) -> float:
    """Class-wise ECE: the ECE of each ``s_k`` against ``1[y=k]``, averaged over all K classes; exact.

    Kull et al., *Beyond temperature scaling*, NeurIPS 2019.

    Args:
        source: logits ``(B, K, *S)``, `Predictions`, or `ClassGaps`, whose own bins are used.
        target: labels ``(B, *S)``, with logits.
        bins: number of equal-width bins.
        ignore_index: the label of elements to leave out.

    >>> round(classwise_ece(torch.zeros(3, 2), torch.tensor([0, 0, 1])), 4)
    0.1667
    """
    return float(_gaps(source, target, bins, ignore_index).error)


def classwise_mce(
    source: Source, target: Tensor | None = None, *, bins: int = 15, ignore_index: int = -100
) -> float:
    """Class-wise MCE: the largest gap of a bin of ``s_k`` to ``1[y=k]``, averaged over all K classes; exact.

    Bins with few elements dominate it: it is large by chance for rare classes. Arguments as for
    `classwise_ece`.

    >>> round(classwise_mce(torch.zeros(3, 2), torch.tensor([0, 0, 1])), 4)
    0.1667
    """
    return float(_gaps(source, target, bins, ignore_index).largest_error)


def _gaps(source: Source, target: Tensor | None, bins: int, ignore_index: int) -> ClassGaps:
    if not isinstance(source, ClassGaps):
        source = ClassGaps.of(as_predictions(source, target, ignore_index).elements, bins)
    if source.samples == 0:
        raise ValueError("the calibration error of an empty data set is undefined")
    if not math.isfinite(source.gap.sum()):
        raise ValueError("the gaps were made of logits that hold NaN or infinite numbers")
    return source
