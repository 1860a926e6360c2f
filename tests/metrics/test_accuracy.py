import json
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, jaccard_score

from calibrant import layout
from calibrant.metrics import ClassCounts, Predictions, accuracy, balanced_accuracy, mean_iou, top_k_accuracy
from calibrant.metrics.accuracy import in_top_k

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())


def batch(seed, size, classes=5):
    """Rounded logits, so that many elements have several classes at their maximum."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(size, classes, generator=generator) * 2).round()
    target = torch.randint(classes, (size,), generator=generator)
    logits[torch.arange(size), target] += torch.randint(4, (size,), generator=generator)
    return logits, target


def streamed(logits, target, pieces):
    parts = zip(logits.tensor_split(pieces), target.tensor_split(pieces), strict=True)
    return reduce(add, [ClassCounts.of(Predictions.of(*part)) for part in parts])


def test_golden():
    logits, target = torch.tensor(GOLDEN["logits"], dtype=torch.float64), torch.tensor(GOLDEN["target"])
    expected = pytest.approx(GOLDEN["accuracy"], rel=0, abs=1e-9)
    assert accuracy(logits, target) == expected
    assert accuracy(Predictions.of(logits, target)) == expected
    for pieces in (1, 7, 500):
        assert accuracy(streamed(logits, target, pieces)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_equal_scikit_learn(seed):
    logits, target = batch(seed, 200)
    prediction, label = logits.numpy().argmax(1), target.numpy()
    assert accuracy(logits, target) == pytest.approx(accuracy_score(label, prediction), abs=1e-14)
    balanced = balanced_accuracy_score(label, prediction)
    assert balanced_accuracy(logits, target) == pytest.approx(balanced, abs=1e-14)
    union = jaccard_score(label, prediction, average="macro")
    assert mean_iou(logits, target) == pytest.approx(union, abs=1e-14)
    for background in range(5):
        union = jaccard_score(
            label, prediction, average="macro", labels=[k for k in range(5) if k != background]
        )
        assert mean_iou(logits, target, background=background) == pytest.approx(union, abs=1e-14)


@pytest.mark.parametrize("pieces", [1, 3, 200])
def test_streamed(pieces):
    logits, target = batch(9, 200)
    counts = streamed(logits, target, pieces)
    assert counts.samples == 200
    for metric in (accuracy, balanced_accuracy, mean_iou):
        assert metric(counts) == pytest.approx(metric(logits, target), abs=1e-14)
    assert mean_iou(counts, background=2) == pytest.approx(mean_iou(logits, target, background=2), abs=1e-14)


def test_counts_equal_loops():
    logits, target = batch(10, 300)
    counts = ClassCounts.of(Predictions.of(logits, target))
    prediction, label = logits.numpy().argmax(1), target.numpy()
    for k in range(5):
        assert counts.occurs[k] == (label == k).sum()
        assert counts.predicted[k] == (prediction == k).sum()
        assert counts.recognised[k] == ((prediction == k) & (label == k)).sum()
        assert counts.accuracy[k] == pytest.approx((prediction == label)[label == k].mean())
        both = np.logical_and(prediction == k, label == k).sum()
        assert counts.iou[k] == pytest.approx(both / np.logical_or(prediction == k, label == k).sum())


def test_classes_that_are_missing():
    logits = 2 * torch.eye(4)[[0, 0, 1, 2]]
    target = torch.tensor([0, 0, 1, 1])  # class 2 is predicted but does not occur, class 3 is neither
    assert balanced_accuracy(logits, target) == pytest.approx((1 + 1 / 2) / 2)
    assert mean_iou(logits, target) == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert mean_iou(logits, target, background=0) == pytest.approx((1 / 2 + 0) / 2)
    assert mean_iou(logits, target, background=3) == pytest.approx((1 + 1 / 2 + 0) / 3)
    counts = ClassCounts.of(Predictions.of(logits, target))
    assert counts.accuracy.isnan().tolist() == [False, False, True, True]
    assert counts.iou.isnan().tolist() == [False, False, False, True]


def test_the_first_of_equal_maxima_is_the_prediction():
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.5, 0.5, 0.5]])
    assert accuracy(logits, torch.tensor([0, 1, 0])) == 1
    assert accuracy(logits, torch.tensor([1, 2, 2])) == 0


@pytest.mark.parametrize("background", [-1, 5])
def test_a_background_that_is_no_class(background):
    with pytest.raises(ValueError, match="from 0 to 4"):
        mean_iou(*batch(0, 10), background=background)


@pytest.mark.parametrize("metric", [accuracy, balanced_accuracy, mean_iou])
def test_nothing_counted(metric):
    nothing = ClassCounts(torch.tensor(0.0), *torch.zeros(3, 4))
    with pytest.raises(ValueError, match="empty data set"):
        metric(nothing)


@pytest.mark.parametrize("k", [1, 2, 5, 7, 9])
@pytest.mark.parametrize("rounded", [False, True])
def test_top_k_accuracy_equals_its_definition(k, rounded):
    """Classes sorted by falling logits, the first of equal ones first."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(300, 7, generator=generator)
    logits = logits.round() if rounded else logits
    target = torch.randint(7, (300,), generator=generator)
    best = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :k]
    expected = (best == target.numpy()[:, None]).any(1).mean()
    assert top_k_accuracy(logits, target, k=k) == pytest.approx(expected, abs=1e-12)
    if k == 1:
        assert top_k_accuracy(logits, target, k=1) == pytest.approx(accuracy(logits, target))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(60, 7), (3, 7, 5, 4)])
def test_ties_are_broken_the_same_way_in_every_block(shape, dtype, monkeypatch):
    monkeypatch.setattr(layout, "_CPU_BLOCK", 7 * 9)
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(shape, generator=generator)).round().to(dtype)
    target = torch.randint(7, (shape[0], *shape[2:]), generator=generator)
    target.view(-1)[::5] = -100
    predictions = Predictions.of(logits, target)
    order = predictions.elements.rows.argsort(dim=1, descending=True, stable=True)
    for k in range(1, 9):
        expected = (order[:, :k] == predictions.label.unsqueeze(1)).any(1)
        assert torch.equal(in_top_k(predictions, k), expected.double())


def test_top_k_accuracy_needs_a_whole_number():
    with pytest.raises(ValueError, match="k must be"):
        top_k_accuracy(torch.eye(3), torch.arange(3), k=0)
