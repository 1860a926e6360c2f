"""Notes on evaluations: what to know about their intervals, and labels that do not fit their logits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from calibrant.evaluation import Evaluation, Evaluator, evaluate
from calibrant.evaluation.notes import data_notes, intervals_note, predicts_the_other_class
from calibrant.layout import as_logits
from tests.evaluation.test_evaluator import batch, images


@pytest.mark.parametrize(("resamples", "rough"), [(0, False), (5, True), (39, True), (40, False)])
def test_intervals_of_few_resamples_are_called_rough(resamples: int, rough: bool) -> None:
    logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    text = str(evaluate(logits, logits.argmax(1), resamples=resamples))
    assert ("Intervals of so few resamples are rough and too narrow: take at least 40." in text) is rough


def test_intervals_are_called_rough_for_their_own_level_only() -> None:
    logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    low = evaluate(logits, logits.argmax(1), resamples=30, level=0.9)
    high = evaluate(logits, logits.argmax(1), resamples=50)
    assert "rough" not in intervals_note([low]) + intervals_note([high]) + intervals_note([low, high])
    few = replace(low, level=0.95)
    assert "take at least 40" in intervals_note([few, high])


def test_evaluations_of_images_say_that_pixels_are_not_independent():
    logits = torch.randn(6, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    target = logits.argmax(1)
    note = (
        "take pixels or tokens as independent, but those of one image or text are not: "
        "intervals are too narrow"
    )
    whole = evaluate(logits, target, resamples=20)
    assert whole.dense
    assert note in str(whole)
    assert Evaluation.from_json(whole.to_json()).dense
    per_image = str(evaluate(logits, target, resamples=20, per_image=True))
    assert note not in per_image
    assert "The p-value takes pixels or tokens as independent" in per_image
    rows = evaluate(logits.movedim(1, -1).flatten(0, 2), target.flatten(), resamples=20)
    assert not rows.dense
    assert "independent" not in str(rows)
    evaluator = Evaluator().update(logits, target)
    assert evaluator.compute().dense
    assert (Evaluator() + evaluator).compute().dense
    evaluator.reset()
    assert not evaluator.update(logits.flatten(2)[..., 0], target.flatten(1)[:, 0]).compute().dense
    assert evaluate(logits.flatten(2), target.flatten(1), resamples=0).dense  # the words of texts
    single = evaluate(logits[:, :1], target[:, None] > 0, resamples=0, binary=True)
    assert single.dense


@pytest.mark.parametrize("binary", [False, True])
def test_true_classes_with_a_probability_of_0_are_counted(binary: bool) -> None:
    probabilities = torch.tensor([0.0, 0.2, 1.0, 0.7, 0.0])  # of class 1
    target = torch.tensor([1, 1, 0, 0, 0])  # the first and third are ruled out
    logits = as_logits(torch.stack([1 - probabilities, probabilities], 1))
    if binary:
        logits = logits[:, 1] - logits[:, 0]
    note = "2 of 5 true classes have a probability of 0, which counts as 1.2e-38 and costs 87.3 in NLL"
    exact = evaluate(logits, target, resamples=0, binary=binary)
    first, second = (Evaluator(binary=binary, resamples=0) for _ in range(2))
    streamed = (first.update(logits[:2], target[:2]) + second.update(logits[2:], target[2:])).compute()
    for found in (exact, streamed, Evaluation.from_json(exact.to_json())):
        assert found.ruled_out == 2
        assert note in str(found)
    ignored = evaluate(logits, torch.tensor([-100, 1, -100, 0, 0]), resamples=0, binary=binary)
    assert ignored.ruled_out == 0
    assert "probability of 0" not in str(ignored)


def test_the_note_about_intervals_is_not_about_means_over_images() -> None:
    logits, target = images(6, seed=0)
    note = "the true error is probably lower"
    assert note in str(evaluate(logits, target, resamples=20))
    assert note not in str(evaluate(logits, target, resamples=20, per_image=True))


def test_few_probabilities_of_0_are_not_said_to_decide_the_nll() -> None:
    found = replace(evaluate(*batch(30), resamples=0), samples=1_000_000, ruled_out=1)
    assert "together 8.7e-05 of the mean." in str(found)
    assert "together 0.087 of the mean. They would dominate the fit" in str(replace(found, ruled_out=1000))


def test_what_probabilities_of_0_add_is_not_said_of_means_over_images() -> None:
    """An image with one pixel counts as much as one with a hundred."""
    target = torch.full((2, 10, 10), -100)
    target[0, 0, 0], target[1] = 0, 1
    logits = as_logits(torch.tensor([0.0, 0.5, 0.5])).view(1, 3, 1, 1).expand(2, 3, 10, 10)
    found = evaluate(logits, target, resamples=0, per_image=True)
    assert found.nll > 40
    said = "1 of 101 true classes have a probability of 0, which counts as 1.2e-38 and costs 87.3 in NLL."
    assert said in str(found)


def test_labels_that_the_logits_do_not_predict_are_told() -> None:
    logits = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    target = logits.argmax(1)
    target[:100] = 0
    moved = (target + 1) % 4  # as labels that count from 1
    note = "the logits predict these labels not significantly better than equal probabilities for all classes"
    assert note in str(evaluate(logits, moved, resamples=0))
    assert note not in str(evaluate(logits, target, resamples=0))
    assert note not in str(evaluate(logits[:50], moved[:50], resamples=0))  # too few to tell
    both = [evaluate(factor * logits, moved, name=f"{factor}", resamples=0) for factor in (1, 2)]
    (said,) = data_notes(both)
    assert said.startswith("1, 2: even with the best temperature")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("binary", [False, True])
def test_two_classes_that_are_swapped_are_told(binary: bool, streamed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(2, (400,), generator=generator)
    yes = 2 * (2 * target - 1) + torch.randn(400, generator=generator)

    def said(yes: Tensor, target: Tensor, **options: Any) -> str:
        logits = yes if binary else torch.stack([0 * yes, yes], 1)
        if streamed:
            return str(Evaluator(binary=binary, resamples=0, **options).update(logits, target).compute())
        return str(evaluate(logits, target, binary=binary, resamples=0, **options))

    note = "scores or labels may be swapped."
    assert note in said(-yes, target)
    told = said(yes, 1 - target, class_names=["ham", "spam"])
    assert re.search(
        r"The prediction is 'spam' for 9\d\.\d+ % of the elements labelled 'ham', and for \d\.\d+ %", told
    )
    assert note not in said(yes, target)
    assert note not in said(yes - 9, target)  # an offset makes one prediction of all
    assert note not in said(-yes[:90], target[:90])  # too few to tell
    assert note not in said(torch.randn(400, generator=generator), target)
    assert note not in said(-yes, torch.zeros_like(target))


def test_rare_classes_and_objects_elsewhere_are_not_taken_for_swapped() -> None:
    """Predictions that do not depend on the label miss a rare class altogether now and then."""
    generator = torch.Generator().manual_seed(0)
    target = (torch.arange(2000) < 50).long()
    for _ in range(100):
        yes = torch.where(torch.rand(2000, generator=generator) < 0.08, 1.0, -1.0)
        assert not predicts_the_other_class(evaluate(yes, target, binary=True, resamples=0))
    mask, found = torch.zeros(1, 64, 64, dtype=torch.long), torch.full((1, 64, 64), -3.0)
    mask[0, 5:20, 5:20], found[0, 30:45, 30:45] = 1, 3
    assert not predicts_the_other_class(evaluate(torch.stack([-found, found], 1), mask, resamples=0))


def test_a_missing_offset_of_single_logits_is_no_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2000, generator=generator)
    target = (scores > 2).long()
    assert "equal probabilities" not in str(evaluate(5 * scores, target, binary=True, resamples=0))
