"""Bins of confidence after each epoch: validation data, with the training data beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrant.distributed import all_reduce
from calibrant.histogram import Bins, ConfidenceHistogram, bin_with_width, cell_edges, last_of_cells
from calibrant.layout import as_decisions
from calibrant.metrics.catalogue import Options
from calibrant.statistics import sum_dtype

BINS = Options().bins
"""The number of bins of equal mass."""

_STEPS = 16  # the parts into which a cell can be divided


class TrainingConfidences:
    """Histograms of the confidences in the training steps of an epoch.

    The confidences come from the logits of the steps themselves, so they cost no pass of their own. There are
    two for each element: the probability of the predicted class, and that of the true class. Both have a
    histogram with the cells of `ConfidenceHistogram`. Sums are changed in place only, as a recorded step
    requires, and the host never waits.
    """

    def __init__(self, device: torch.device, ignore_index: int, *, binary: bool = False) -> None:
        last = last_of_cells(torch.float32, device)
        self.ignore_index, self.binary = ignore_index, binary
        # (2, 2, cells): for the predicted and the true class, counts and summed confidences.
        self.sums = torch.zeros(2, 2, len(last) - 1, device=device, dtype=sum_dtype(device))
        self._inner = last[1:-1]
        self._rows = torch.arange(4, device=device).view(2, 2, 1) * (len(last) - 1)

    @torch.no_grad()
    def add(self, logits: Tensor, target: Tensor) -> None:
        """Add the elements of a step that are not ignored: logits ``(B, K, *S)`` and labels ``(B, *S)``.

        If binary, logits are single ones.
        """
        if self.binary:
            logits, target = as_decisions(logits, target)
        probabilities = logits.softmax(1, dtype=torch.float32)
        valid = target != self.ignore_index
        label = (target * valid).unsqueeze(1)
        confidence = torch.stack([probabilities.amax(1, keepdim=True), probabilities.gather(1, label)])
        confidence, weight = confidence.view(2, 1, -1), valid.reshape(-1).to(self.sums.dtype)
        values = torch.cat([weight.expand(2, 1, -1), confidence * weight], dim=1)
        place = self._rows + torch.bucketize(confidence, self._inner)
        # One call on a flat tensor: along the second axis it would take a hundred times longer on a CPU.
        self.sums.view(-1).index_add_(0, place.view(-1), values.view(-1))

    def pooled(self) -> Tensor:
        """The sums over all processes, on the CPU."""
        return all_reduce(self.sums).cpu()


def epoch_bins(training: Tensor, validation: Bins, test: Bins | None) -> dict[str, Tensor]:
    """What a run keeps of an epoch: one tensor ``(BINS,)``, or ``(BINS + 1,)`` for edges, by name.

    ``validation_*`` and ``test_*`` have edges, counts, mean confidences and accuracies in bins of equal mass.
    ``train_top_*`` and ``train_true_*`` are the training elements in the bins of the validation data, by the
    probability of the predicted and of the true class. ``train_own_*`` are the latter in bins of their own.
    Means are 0 in empty bins. The training elements come from the sums of `TrainingConfidences`: a cell that
    an edge cuts is divided in proportion to the widths of its two sides.
    """
    found = _of("validation", validation)
    place = _shares(found["validation_edges"])
    for name, (count, confidence) in zip(("train_top", "train_true"), training, strict=True):
        counts, total = (place @ values.to(place.dtype) for values in (count, confidence))
        found |= {f"{name}_count": counts, f"{name}_confidence": total / counts.clamp_min(1)}
    count, confidence = training[1]
    own = _of("train_own", ConfidenceHistogram(count.sum(), count, confidence, confidence).equal_mass(BINS))
    del own["train_own_accuracy"]
    return found | own | ({} if test is None else _of("test", test))


def _of(name: str, bins: Bins) -> dict[str, Tensor]:
    filled = bins.count.clamp_min(1)
    means = {"confidence": bins.confidence / filled, "accuracy": bins.correct / filled}
    tensors = {"edges": bins.edges, "count": bins.count, **means}
    return {f"{name}_{key}": value.cpu() for key, value in tensors.items()}


def _shares(edges: Tensor) -> Tensor:
    """The share of each cell of the histogram that lies in each bin, ``(BINS, cells)``."""
    cells = cell_edges(torch.device("cpu")).to(edges.dtype)
    steps = (torch.arange(_STEPS, dtype=edges.dtype, device=cells.device) + 0.5) / _STEPS
    points = cells[:-1, None] + steps * cells.diff()[:, None]
    number = len(cells) - 1
    place = bin_with_width(points, edges) * number + torch.arange(number, device=cells.device)[:, None]
    return place.view(-1).bincount(minlength=BINS * number).view(BINS, number).to(edges.dtype) / _STEPS
