"""Notes on evaluations in words: on their intervals, and on labels that do not fit their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibrant.layout import LOGIT_OF_ZERO
from calibrant.metrics.catalogue import METRICS
from calibrant.metrics.uncertainty import least_resamples

if TYPE_CHECKING:
    from calibrant.evaluation.figures import Evaluation

LITTLE = 0.02
"""The part of an NLL that is not worth a calibrator."""

_FEW = 100  # with fewer elements, a model is not told from chance
_CLEAR = 5  # standard errors
_LIKELIHOOD_RATIO = 3.84  # the 95 % quantile of chi-squared with one degree of freedom


def pixels_note(evaluations: Sequence[Evaluation]) -> str:
    """A warning for evaluations of images and of tokens: what takes all elements as independent, or ""."""
    if any(each.intervals and not each.per_image for each in evaluations):
        what = "Intervals and p-values take", "intervals are too narrow, p-values too small"
        if len(evaluations) > 1:
            what = what[0], f"{what[1]}, and differences are called significant too easily"
    elif any(each.p_value is not None for each in evaluations):
        # The intervals of means over images come from the spread between images.
        what = "The p-value takes", "it is too small"
    else:
        return ""
    return f"{what[0]} pixels or tokens as independent, but those of one image or text are not: {what[1]}."


def intervals_note(evaluations: Sequence[Evaluation]) -> str:
    """What to know about intervals of resamples; "" for means over images, which are not resampled."""
    resampled = [each for each in evaluations if each.intervals and not each.per_image]
    if not resampled:
        return ""
    note = "Measured calibration errors are biased upwards, so the true error is probably lower."
    if least := max(map(_more_resamples, resampled)):
        note = f"Intervals of so few resamples are rough and too narrow: take at least {least}. {note}"
    if any(each.samples == 1 for each in resampled):
        note = f"A single element has no spread: only proportions have an interval. {note}"
    return note


def _more_resamples(evaluation: Evaluation) -> int:
    """The least number of resamples at the level of an evaluation; 0 if it has as many."""
    least = least_resamples(evaluation.level)
    return least if any(0 < len(drawn) < least for drawn in evaluation.replicates.values()) else 0


def data_notes(evaluations: Sequence[Evaluation], names: Sequence[str] | None = None) -> list[str]:
    """Notes on evaluations whose labels do not fit their logits: by their order, their sign, or by zeros.

    ``names`` replace those of the evaluations.
    """
    named = zip(names or [each.name for each in evaluations], evaluations, strict=True)
    notes: dict[str, list[str]] = {_BY_CHANCE: []}  # the names that each is about; it comes first
    for name, each in named:
        about = _BY_CHANCE if predicts_by_chance(each) else "", _swapped_note(each), _zeros_note(each)
        for note in filter(None, about):
            notes.setdefault(note, []).append(name)
    told = {note: about for note, about in notes.items() if about}
    if len(evaluations) == 1:
        return [f"{note[0].upper()}{note[1:]}." for note in told]
    return [f"{', '.join(about)}: {note}." for note, about in told.items()]


_BY_CHANCE = (
    "even with the best temperature, the logits predict these labels not significantly better than equal "
    "probabilities for all classes. Check that both are in the same order, and that labels count the classes "
    "from 0"
)


def predicts_by_chance(evaluation: Evaluation) -> bool:
    """Whether the logits, at the best temperature, are not significantly better than no logits at all.

    False for two classes: a good model may need an offset there, which no temperature replaces.
    """
    left, classes = evaluation.metrics["nll_refinement"], evaluation.num_classes
    if left is None or evaluation.binary or classes == 2:
        return False
    if evaluation.per_image or evaluation.samples < _FEW:
        return False
    return 2 * evaluation.samples * (math.log(classes) - left) < _LIKELIHOOD_RATIO


def predicts_the_other_class(evaluation: Evaluation) -> bool:
    """Whether each of two classes is clearly predicted more often for the elements of the other one.

    No missing offset explains that: it would favour one class, whatever the element. Pixels are left out,
    because they are not independent: an object that is found in the wrong place is no swap.
    """
    if evaluation.labels or len(evaluation.classes) != 2 or evaluation.dense or evaluation.samples < _FEW:
        return False
    first, second = evaluation.classes
    if first.accuracy is None or second.accuracy is None:
        return False
    # By chance, the second class is predicted equally often for the elements of both.
    predicted = (1 - first.accuracy) * first.count + second.accuracy * second.count
    often = predicted / (first.count + second.count)
    noise = math.sqrt(often * (1 - often) * (1 / first.count + 1 / second.count))
    return first.accuracy + second.accuracy - 1 < -_CLEAR * noise


def _swapped_note(evaluation: Evaluation) -> str:
    """How often a class is predicted where it is not true, if that is more often than where it is."""
    if not predicts_the_other_class(evaluation):
        return ""
    first, second = evaluation.classes
    wrong, right = (
        METRICS["accuracy"].text(each) for each in (1 - (first.accuracy or 0), second.accuracy or 0)
    )
    return (
        f"the prediction is {second.name!r} for {wrong} of the elements labelled {first.name!r}, and for "
        f"{right} of those labelled {second.name!r}: scores or labels may be swapped"
    )


def _zeros_note(evaluation: Evaluation) -> str:
    """How many true classes have a probability of 0, and what they add to the NLL."""
    if not evaluation.ruled_out:
        return ""
    note = (
        f"{evaluation.ruled_out:,} of {evaluation.samples:,} true classes have a probability of 0, which "
        f"counts as 1.2e-38 and costs {-LOGIT_OF_ZERO:.1f} in NLL"
    )
    if evaluation.per_image:  # what they add to a mean over images depends on the sizes of theirs
        return note
    note += f": together {_added_by_zeros(evaluation):.2g} of the mean"
    if zeros_matter(evaluation):
        note += ". They would dominate the fit of a temperature; ensemble-temperature leaves them out"
    return note


def zeros_matter(evaluation: Evaluation) -> bool:
    """Whether true classes of probability 0 may be a part of the NLL that is not `LITTLE`."""
    if evaluation.per_image:
        return evaluation.ruled_out > 0
    return _added_by_zeros(evaluation) > LITTLE * (evaluation.nll or 0.0)


def _added_by_zeros(evaluation: Evaluation) -> float:
    return -LOGIT_OF_ZERO * evaluation.ruled_out / evaluation.samples
