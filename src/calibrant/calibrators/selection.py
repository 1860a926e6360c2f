"""Selection of a calibrator by cross-validation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import whole_number
from calibrant.calibrators.base import BoundWarning, Calibrator, valid_rows
from calibrant.calibrators.identity import Identity
from calibrant.calibrators.registry import create_calibrator
from calibrant.layout import arrange, as_decisions, as_pairs, not_ignored
from calibrant.printable import counted, text_table
from calibrant.warning import warn

if TYPE_CHECKING:
    from rich.text import Text

_FEW_CLASSES = 20
"""The most classes for which methods with a parameter per pair of classes are candidates by default."""

_FEW_ELEMENTS, _VERY_FEW = 500, 100
"""With fewer elements, only methods with few parameters are candidates by default, or only a temperature."""

_FEW_IMAGES = 10
"""With fewer images, only a temperature is a candidate by default: their pixels are alike."""

_SIMPLEST = (Identity.key, "temperature")
"""Methods that are chosen unless another one is clearly better."""


@dataclass(frozen=True)
class Ranked:
    """One candidate and its cross-validated result.

    Attributes:
        key: the calibrator's key in `CALIBRATORS`.
        nll: the mean negative log-likelihood on held-out folds.
        standard_error: the standard error of the difference to ``identity``. An image counts as one
            observation, because its pixels are not independent.
        seconds: the time to fit it on all folds together.
        acceptable: false if its many parameters bring too little. ``identity`` and ``temperature`` are
            acceptable. Another candidate is if its NLL is lower than theirs by more than the standard error
            of the difference: with few elements, the smallest NLL is often chance.
    """

    key: str
    nll: float
    standard_error: float
    seconds: float
    acceptable: bool = True


@dataclass(frozen=True)
class Ranking:
    """Candidates from the best to the worst. ``identity`` is always among them."""

    candidates: tuple[Ranked, ...]

    @property
    def best(self) -> Ranked:
        """The acceptable candidate with the smallest held-out NLL."""
        return next(each for each in self.candidates if each.acceptable)

    @property
    def texts(self) -> list[tuple[str, str, str, str]]:
        """Key, NLL, change of the NLL against doing nothing, and seconds of each candidate, as printed."""
        nothing = next(each.nll for each in self.candidates if each.key == Identity.key)
        return [
            (
                each.key,
                f"{each.nll:.4f}",
                "" if each.key == Identity.key else f"{each.nll - nothing:+.4f} ± {each.standard_error:.4f}",
                f"{each.seconds:.2f}",
            )
            for each in self.candidates
        ]

    @property
    def note(self) -> str:
        """Why the best candidate is not the one with the smallest NLL; empty if it is."""
        better = [each.key for each in takewhile(lambda each: each is not self.best, self.candidates)]
        if not better:
            return ""
        simple = next(each.key for each in self.candidates if each.key in _SIMPLEST)
        verb = "has" if len(better) == 1 else "have"
        return f"{' and '.join(better)} {verb} a lower NLL than {simple}, but by less than a standard error"

    def __str__(self) -> str:
        headings = ("calibrator", "NLL", "against doing nothing", "seconds")
        table = text_table("Held-out NLL", headings, self.texts)
        return f"{table}\n{self.best.key} is chosen: {self.note}." if self.note else table

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))


def rank(
    logits: Tensor,
    target: Tensor,
    *,
    candidates: Sequence[str] | None = None,
    folds: int = 5,
    ignore_index: int = -100,
    binary: bool = False,
    seed: int = 0,
) -> Ranking:
    """Compare calibrators by cross-validated NLL.

    Args:
        logits: logits ``(B, K, *S)``.
        target: labels ``(B, *S)``.
        candidates: keys of `CALIBRATORS`. None takes those that suit the number of classes and of elements.
        folds: the number of random parts. Elements are split, for images whole images. Each candidate is
            fitted to all parts but one and evaluated on that one. If the temperature of a fit stops at its
            bound, the part counts as not calibrated.
        ignore_index: the label of elements to leave out.
        binary: each logit is a yes-or-no decision, as for `Calibrator.fit`. Several labels are compared by
            the NLL of all decisions; each candidate is fitted to each label on its own.
        seed: the seed of the split.

    Raises:
        TypeError: candidates is a string.
        ValueError: a key is unknown, there are fewer than two folds or more than elements or images, or the
            data cannot be fitted.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(1000, 3, generator=generator)
    >>> target = (logits - (-torch.rand(1000, 3, generator=generator).log()).log()).argmax(1)
    >>> [each.key for each in rank(5 * logits, target, candidates=["temperature"]).candidates]
    ['temperature', 'identity']
    """
    if isinstance(candidates, str):
        raise TypeError(f"candidates must be a list of keys, got the string {candidates!r}")
    classes = logits
    if binary:
        classes, target = as_decisions(logits, target)
        if classes.ndim == 2 or classes.shape[2] == 1:  # fitted as two classes
            logits, binary = (classes if classes.ndim == 2 else classes.squeeze(2)), False
            classes, target = logits, target.view(len(target), *logits.shape[2:])
    rows, labels = valid_rows(classes, target, ignore_index)
    # The pixels of an image are alike: they must not be split between fitting and evaluation. Nor must the
    # labels of an element.
    images = logits.ndim > 2
    if images or binary:
        labelled = not_ignored(target, ignore_index).flatten(1).any(1)
        rows, labels = logits.detach().double()[labelled], target.long()[labelled]
    folds = whole_number("folds", folds, 2)
    if folds > len(labels):
        found = counted(len(labels), "image" if images else "element")
        raise ValueError(f"{found} cannot be divided into {folds} folds: expected at least {folds} of them")
    valid = labels != ignore_index
    columns = labels.unbind(1) if binary else (labels,)
    if all(column[column != ignore_index].bincount().count_nonzero() < 2 for column in columns):
        found = (
            "each label has the same answer in all of these data" if binary else "all labels are of one class"
        )
        warn(f"{found}, so this ranking means nothing for others: use data with all classes")
    if candidates is None:
        elements = int(valid.sum()) // (labels.shape[1] if binary else 1)
        few_images = images and len(labels) < _FEW_IMAGES
        candidates = _suited(classes[:, :, 0] if binary else logits, 0 if few_images else elements)
        ruled_out = arrange(classes, target, ignore_index=ignore_index).ruled_out.any()
        if ruled_out and "ensemble-temperature" not in candidates:  # it copes with what spoils a temperature
            candidates.append("ensemble-temperature")
    chosen = {key: create_calibrator(key) for key in [Identity.key, *candidates]}
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed), device="cpu")
    order = order.to(labels.device)
    losses: dict[str, Tensor] = {}
    seconds = {}
    for key, calibrator in chosen.items():
        start = time.perf_counter()
        loss = torch.empty(labels.shape, dtype=rows.dtype, device=rows.device)
        for part in order.tensor_split(folds):
            others = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
            others[part] = False
            with warnings.catch_warnings(record=True, action="always") as caught:
                calibrator.fit(rows[others], labels[others], ignore_index=ignore_index, binary=binary)
            calibrated = calibrator(rows[part])
            loss[part] = F.cross_entropy(
                as_pairs(calibrated) if binary else calibrated,
                labels[part],
                reduction="none",
                ignore_index=ignore_index,
            )
            for problem in (each.message for each in caught):
                if isinstance(problem, BoundWarning):
                    concerned = None if problem.labels is None else labels.new_tensor(problem.labels)
                    at = (part,) if concerned is None else (part[:, None], concerned)
                    loss[at] = losses[Identity.key][at]
        losses[key], seconds[key] = torch.where(valid, loss, 0), time.perf_counter() - start
    simplest = min((losses[key] for key in _SIMPLEST if key in losses), key=lambda loss: float(loss.sum()))

    def clearly_better(loss: Tensor) -> bool:
        difference = loss - simplest
        return float(difference.sum() / valid.sum()) < -_standard_error(difference, valid)

    ranked = [
        Ranked(
            key,
            float(loss.sum() / valid.sum()),
            _standard_error(loss - losses[Identity.key], valid),
            seconds[key],
            key in _SIMPLEST or clearly_better(loss),
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
    binary: bool = False,
    seed: int = 0,
    show: Callable[[Ranking], object] | None = None,
) -> Calibrator:
    """Fit the calibrator with the best cross-validated NLL to all of the data.

    `Identity` is a candidate and is returned if no other calibrator helps. A calibrator with more parameters
    than a temperature must be better by more than a standard error (`Ranked.acceptable`).

    ``show`` is a function to call with the ranking; ``print`` prints it as a table. Other arguments as for
    `rank`.

    >>> generator = torch.Generator().manual_seed(0)
    >>> logits = torch.randn(1000, 3, generator=generator)
    >>> target = (logits - (-torch.rand(1000, 3, generator=generator).log()).log()).argmax(1)
    >>> choose(5 * logits, target, candidates=["temperature"]).key
    'temperature'
    """
    shared: dict[str, Any] = {"ignore_index": ignore_index, "binary": binary}
    with warnings.catch_warnings(action="ignore"):  # the fit below warns of the same
        ranking = rank(logits, target, candidates=candidates, folds=folds, seed=seed, **shared)
    if show is not None:
        show(ranking)
    return create_calibrator(ranking.best.key).fit(logits, target, **shared)


def _standard_error(differences: Tensor, valid: Tensor) -> float:
    """The standard error of the mean difference. Each index of axis 0 is one observation."""
    sums, counts = differences.view(len(valid), -1).sum(1), valid.view(len(valid), -1).sum(1)
    mean = sums.sum() / counts.sum()
    return float((sums - mean * counts).square().sum().sqrt() / counts.sum())


def _suited(logits: Tensor, elements: int) -> list[str]:
    """The default candidates for these data, which have so many labelled elements."""
    if elements < _VERY_FEW:
        return ["temperature"]
    if elements < _FEW_ELEMENTS:
        return ["temperature", "structured-vector", "vector"]
    always = ["temperature", "ensemble-temperature", "structured-vector", "vector", "spline"]
    few = ["structured-matrix", "dirichlet", "isotonic", "beta"]
    # The temperature of an image depends on all of its pixels, ignored ones included: all must be finite.
    images = ["local-temperature"] if logits.ndim > 2 and bool(logits.isfinite().all()) else []
    return always + images + (few if logits.shape[1] <= _FEW_CLASSES else [])
