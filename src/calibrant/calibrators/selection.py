"""Which calibrator to take, by what each does for data it was not fitted to."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators.base import Calibrator, valid_rows
from calibrant.calibrators.registry import create_calibrator

if TYPE_CHECKING:
    from rich.table import Table

# Beyond so many classes, methods with a parameter for every pair of them are not tried unasked.
_FEW_CLASSES = 20


@dataclass(frozen=True)
class Ranked:
    """One candidate.

    Attributes:
        key: of `CALIBRATORS`.
        nll: mean negative log-likelihood on data that it was not fitted to.
        standard_error: of the difference to doing nothing; pixels of one image are not taken to be
            independent.
        seconds: to fit it, on all folds together.
    """

    key: str
    nll: float
    standard_error: float
    seconds: float


@dataclass(frozen=True)
class Ranking:
    """Candidates from the best to the worst; ``identity``, doing nothing, is always among them."""

    candidates: tuple[Ranked, ...]

    @property
    def best(self) -> Ranked:
        """The candidate with the smallest held-out NLL."""
        return self.candidates[0]

    def __rich__(self) -> Table:
        from rich.table import Table

        nothing = next(each.nll for each in self.candidates if each.key == "identity")
        table = Table("calibrator", title="Held-out NLL", title_justify="left")
        for heading in ("NLL", "against doing nothing", "seconds"):
            table.add_column(heading, justify="right")
        for each in self.candidates:
            change = (
                "" if each.key == "identity" else f"{each.nll - nothing:+.4f} ± {each.standard_error:.4f}"
            )
            table.add_row(each.key, f"{each.nll:.4f}", change, f"{each.seconds:.2f}")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        stream = io.StringIO()
        Console(file=stream, width=100, color_system=None).print(self)
        return stream.getvalue().rstrip()


def rank(
    logits: Tensor,
    target: Tensor,
    *,
    candidates: Sequence[str] | None = None,
    folds: int = 5,
    ignore_index: int = -100,
    seed: int = 0,
) -> Ranking:
    """Compare calibrators by cross-validated NLL.

    Args:
        logits: ``(B, K, *S)``.
        target: labels ``(B, *S)``.
        candidates: keys of `CALIBRATORS`; None for those that suit the number of classes, and images.
        folds: parts that the elements, or whole images, are cut into at random; each candidate is fitted to
            all but one of them and judged on that one.
        ignore_index: label of elements to leave out.
        seed: of the cut.

    Raises:
        TypeError: candidates that are one string.
        ValueError: an unknown key, fewer than two folds or more than there are elements or images, or data
            that cannot be fitted.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(1000, 3, generator=generator)
    >>> target = (logits - (-torch.rand(1000, 3, generator=generator).log()).log()).argmax(1)
    >>> [each.key for each in rank(5 * logits, target, candidates=["temperature"]).candidates]
    ['temperature', 'identity']
    """
    if isinstance(candidates, str):
        raise TypeError(f"candidates must be a list of keys, got the string {candidates!r}")
    rows, labels = valid_rows(logits, target, ignore_index)
    if not len(labels):
        raise ValueError("nothing to fit: the data hold no element that is not ignored")
    # Elements of one image are alike: an image must not be in the fitting and in the judging part.
    images = logits.ndim > 2
    if images:
        labelled = (target != ignore_index).flatten(1).any(1)
        rows, labels = logits.detach().double()[labelled], target.long()[labelled]
    if not 2 <= folds <= len(labels):
        what = "images" if images else "elements"
        raise ValueError(f"folds must be from 2 to the number of {what}, {len(labels)}, got {folds}")
    keys = _suited(logits) if candidates is None else candidates
    chosen = {key: create_calibrator(key) for key in ["identity", *keys]}
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    valid = labels != ignore_index
    losses = {}
    seconds = {}
    for key, calibrator in chosen.items():
        start = time.perf_counter()
        loss = torch.empty(labels.shape, dtype=rows.dtype, device=rows.device)
        for part in order.tensor_split(folds):
            others = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
            others[part] = False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a bound reached on a fold decides nothing
                calibrator.fit(rows[others], labels[others], ignore_index=ignore_index)
            calibrated = calibrator(rows[part])
            loss[part] = F.cross_entropy(
                calibrated, labels[part], reduction="none", ignore_index=ignore_index
            )
        losses[key], seconds[key] = torch.where(valid, loss, 0), time.perf_counter() - start
    ranked = [
        Ranked(
            key,
            float(loss.sum() / valid.sum()),
            _standard_error(loss - losses["identity"], valid),
            seconds[key],
        )
        for key, loss in losses.items()
    ]
    return Ranking(tuple(sorted(ranked, key=lambda each: each.nll)))


def choose(
    logits: Tensor,
    target: Tensor,
    *,
    candidates: Sequence[str] | None = None,
    folds: int = 5,
    ignore_index: int = -100,
    seed: int = 0,
    show: Callable[[Ranking], object] | None = None,
) -> Calibrator:
    """The calibrator with the smallest cross-validated NLL, fitted to all of the data.

    Doing nothing is a candidate: where nothing helps, an `Identity` comes back.

    Args:
        logits: as for `rank`.
        target: as for `rank`.
        candidates: as for `rank`.
        folds: as for `rank`.
        ignore_index: as for `rank`.
        seed: as for `rank`.
        show: called with the ranking; ``print`` prints it as a table.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(1000, 3, generator=generator)
    >>> target = (logits - (-torch.rand(1000, 3, generator=generator).log()).log()).argmax(1)
    >>> choose(5 * logits, target, candidates=["temperature"]).key
    'temperature'
    """
    ranking = rank(logits, target, candidates=candidates, folds=folds, ignore_index=ignore_index, seed=seed)
    if show is not None:
        show(ranking)
    return create_calibrator(ranking.best.key).fit(logits, target, ignore_index=ignore_index)


def _standard_error(differences: Tensor, valid: Tensor) -> float:
    """Of the mean of differences that are 0 where not valid, each row of axis 0 being one observation."""
    sums, counts = differences.view(len(valid), -1).sum(1), valid.view(len(valid), -1).sum(1)
    mean = sums.sum() / counts.sum()
    return float((sums - mean * counts).square().sum().sqrt() / counts.sum())


def _suited(logits: Tensor) -> list[str]:
    always = ["temperature", "ensemble-temperature", "structured-vector", "spline"]
    few = ["structured-matrix", "dirichlet", "isotonic", "beta"]
    # The temperature of an image depends on all of its pixels, also on those that are ignored.
    images = ["local-temperature"] if logits.ndim > 2 and bool(logits.isfinite().all()) else []
    return always + images + (few if logits.shape[1] <= _FEW_CLASSES else [])
