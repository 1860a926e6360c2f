"""Evaluations against the metrics they are made of, streams against whole data, and what users get wrong."""

from __future__ import annotations

import io
import json
import math
import re
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from calibrant import metrics
from calibrant.evaluation import Evaluation, Evaluator, GroupFigures, Reliability, evaluate, evaluator
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.histogram import ConfidenceHistogram
from calibrant.metrics import METRICS, ClassGaps, Predictions, calibration_test, resampling

from ..evaluations import assert_same, changed, leaves

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())

EQUAL_MASS = ["adaptive_ece", "debiased_ece", "debiased_ece_l1", "sweep_ece", "sweep_ece_l1"]
SWEPT = ["sweep_ece", "sweep_ece_l1", "sweep_ece_width", "sweep_ece_width_l1"]
ERRORS = ["ece", "mce", "ece_l2", *dict.fromkeys([*EQUAL_MASS, *SWEPT]), "smooth_ece"]
NEED_ALL = ["nll_calibration", "nll_refinement", "brier_calibration", "brier_refinement", "kde_ece"]
OF_FIVE = [name for name in METRICS if name != "top_k_accuracy"]  # most data here have five classes
STREAMED = [name for name in OF_FIVE if name not in NEED_ALL]
SELECTIVE = ["aurc", "augrc", "risk_at_coverage", "coverage_at_risk"]
CLOSE = [*dict.fromkeys([*EQUAL_MASS, *SWEPT]), "smooth_ece", *SELECTIVE]
RESAMPLED_STREAM = [
    *ERRORS,
    *SELECTIVE,
    "accuracy",
    "balanced_accuracy",
    "nll",
    "brier",
    "root_brier",
]

Batch = tuple[Tensor, Tensor]


def batch(
    count: int, classes: int = 5, *, sharpness: float = 2.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Batch:
    """Logits and labels drawn from them: calibrated for a sharpness of 1, over-confident above."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return (sharpness * logits).to(dtype), target


def images(count: int = 2, seed: int = 0) -> Batch:
    """``(count, 5, 16, 16)``, a fifth of the pixels void."""
    logits, target = batch(count * 256, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    target[torch.rand(target.shape, generator=generator) < 0.2] = -100
    shape = (count, 16, 16)
    return logits.view(*shape, 5).movedim(-1, 1).contiguous(), target.view(shape)


@pytest.fixture(scope="module")
def golden_batch() -> Batch:
    return torch.tensor(GOLDEN["logits"], dtype=torch.float64), torch.tensor(GOLDEN["target"])


@pytest.fixture(scope="module")
def golden(golden_batch: Batch) -> Evaluation:
    return evaluate(*golden_batch, resamples=200, background=1)


@pytest.fixture(scope="module")
def golden_streamed(golden_batch: Batch) -> Evaluation:
    return Evaluator(resamples=200, background=1).update(*golden_batch).compute()


@pytest.mark.parametrize(("classes", "shown"), [(2, False), (5, False), (6, True)])
def test_top_5_accuracy_is_left_out_where_it_is_always_1(classes: int, shown: bool) -> None:
    logits, target = batch(20, classes)
    evaluations = [
        evaluate(logits, target, resamples=20),
        Evaluator(resamples=20).update(logits, target).compute(),
        evaluate(logits[:, :, None], target[:, None], resamples=20, per_image=True),
    ]
    for each in evaluations:
        assert (each.metrics["top_k_accuracy"] is not None) == shown
        assert ("top_k_accuracy" in each.intervals) == shown
        assert ("Top-5" in str(each)) == shown
        assert Evaluation.from_json(each.to_json()) == each
    assert ("top_k_accuracy" in evaluations[0].replicates) == shown


# ---- The figures ----------------------------------------------------------------------------------


def by_functions(logits: Tensor, target: Tensor, bins: int, background: int, ignore_index: int) -> Any:
    data = {"ignore_index": ignore_index}
    binned = {"bins": bins, **data}
    nll, brier = metrics.nll_split(logits, target, **data), metrics.brier_split(logits, target, **data)
    return {
        "accuracy": metrics.accuracy(logits, target, **data),
        "balanced_accuracy": metrics.balanced_accuracy(logits, target, **data),
        "top_k_accuracy": metrics.top_k_accuracy(logits, target, **data),
        "mean_iou": metrics.mean_iou(logits, target, **data),
        "mean_iou_foreground": metrics.mean_iou(logits, target, background=background, **data),
        "nll": metrics.nll(logits, target, **data),
        "nll_calibration": nll.calibration,
        "nll_refinement": nll.refinement,
        "brier": metrics.brier(logits, target, **data),
        "root_brier": metrics.root_brier(logits, target, **data),
        "brier_calibration": brier.calibration,
        "brier_refinement": brier.refinement,
        "ece": metrics.ece(logits, target, **binned),
        "mce": metrics.mce(logits, target, **binned),
        "ece_l2": metrics.ece_l2(logits, target, **binned),
        "adaptive_ece": metrics.adaptive_ece(logits, target, **binned),
        "classwise_ece": metrics.classwise_ece(logits, target, **binned),
        "classwise_mce": metrics.classwise_mce(logits, target, **binned),
        "debiased_ece": metrics.debiased_ece(logits, target, **binned),
        "debiased_ece_l1": metrics.debiased_ece(logits, target, norm=1, **binned),
        "sweep_ece": metrics.sweep_ece(logits, target, **data),
        "sweep_ece_l1": metrics.sweep_ece(logits, target, norm=1, **data),
        "sweep_ece_width": metrics.sweep_ece(logits, target, binning="equal-width", **data),
        "sweep_ece_width_l1": metrics.sweep_ece(logits, target, norm=1, binning="equal-width", **data),
        "smooth_ece": metrics.smooth_ece(logits, target, **data),
        "kde_ece": metrics.kde_ece(logits, target, **data),
        **{name: getattr(metrics, name)(logits, target, **data) for name in SELECTIVE},
    }


@pytest.mark.parametrize("bins", [15, 10, 7, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_equals_the_functions(bins: int, dtype: torch.dtype, tolerance: float) -> None:
    # With gaps of both signs: else all L1 errors are the mean gap.
    logits, target = batch(400, 6, sharpness=1.0, dtype=dtype)
    target[::7] = 255
    result = evaluate(logits, target, bins=bins, background=2, ignore_index=255, kde=True, resamples=0)
    expected = by_functions(logits, target, bins, background=2, ignore_index=255)
    assert list(result.metrics) == list(METRICS) == list(expected)
    assert result.metrics == pytest.approx(expected, rel=0, abs=tolerance)
    if bins > 1:
        assert len(set(expected.values())) == len(expected)  # no two figures can be taken for one another


@pytest.mark.parametrize("name", [name for name in METRICS if name in GOLDEN])
def test_golden(golden: Evaluation, golden_streamed: Evaluation, name: str) -> None:
    assert getattr(golden, name) == pytest.approx(GOLDEN[name], rel=0, abs=1e-9)
    if name not in CLOSE:
        assert getattr(golden_streamed, name) == pytest.approx(GOLDEN[name], rel=0, abs=1e-9)


def test_what_else_it_says(golden: Evaluation, golden_batch: Batch) -> None:
    predictions = Predictions.of(*golden_batch)
    assert (golden.name, golden.samples, golden.num_classes, golden.bins) == ("model", 500, 5, 15)
    assert golden.exact
    assert golden.p_value == calibration_test(predictions).p_value == 0.001
    assert golden.nll == pytest.approx(golden.nll_calibration + golden.nll_refinement, rel=1e-12)
    assert golden.brier == pytest.approx(golden.brier_calibration + golden.brier_refinement, rel=1e-12)


def test_the_risk_coverage_curve(golden: Evaluation, golden_batch: Batch) -> None:
    assert golden.risk_coverage == metrics.risk_coverage(*golden_batch)
    assert golden.risk_coverage.risk[-1] == pytest.approx(1 - golden.accuracy)
    assert golden.risk_coverage.risk[79] == pytest.approx(golden.risk_at_coverage)
    stored = golden.to_dict()
    assert Evaluation.from_dict(stored).risk_coverage == golden.risk_coverage
    del stored["risk_coverage"]  # as in evaluations of older versions
    assert Evaluation.from_dict(stored).risk_coverage is None


def test_reliability(golden: Evaluation, golden_batch: Batch) -> None:
    logits, target = golden_batch
    confidence, prediction = logits.softmax(1).max(1)
    correct = prediction == target
    diagram = golden.reliability
    assert diagram.edges == pytest.approx([b / 15 for b in range(16)], abs=1e-15)
    assert sum(diagram.count) == 500
    assert 0 in diagram.count  # five classes: no confidence below a fifth
    for b, count in enumerate(diagram.count):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        assert count == int(inside.sum())
        rows = (diagram.confidence, diagram.accuracy, diagram.accuracy_interval, diagram.consistency)
        if not count:
            assert [row[b] for row in rows] == [None] * 4
            continue
        assert diagram.confidence[b] == pytest.approx(float(confidence[inside].mean()), abs=1e-12)
        assert diagram.accuracy[b] == pytest.approx(float(correct[inside].double().mean()), abs=1e-12)
        successes, trials = (torch.tensor([float(n)]) for n in (correct[inside].sum(), count))
        expected = [float(end) for end in metrics.binomial_interval(successes, trials, 0.95)]
        assert diagram.accuracy_interval[b] == pytest.approx(expected, abs=1e-9)
        low, high = diagram.consistency[b]
        assert low - 1 / count <= diagram.confidence[b] <= high + 1 / count
    gaps = [n * abs(c - a) for n, c, a in zip(*rows_of(diagram), strict=True) if n]
    assert sum(gaps) / 500 == pytest.approx(golden.ece, abs=1e-12)


def rows_of(diagram: Reliability) -> tuple[Any, ...]:
    return diagram.count, diagram.confidence, diagram.accuracy


def test_the_level_widens_the_diagrams_intervals(golden_batch: Batch, golden: Evaluation) -> None:
    wide = evaluate(*golden_batch, resamples=0, level=0.999).reliability
    for b, count in enumerate(wide.count):
        if count:
            (low, high), (from_, to) = wide.accuracy_interval[b], golden.reliability.accuracy_interval[b]
            assert high - low > to - from_
            (low, high), (from_, to) = wide.consistency[b], golden.reliability.consistency[b]
            assert high - low >= to - from_


def test_classes(golden: Evaluation, golden_batch: Batch) -> None:
    logits, target = golden_batch
    probability, prediction = logits.softmax(1), logits.argmax(1)
    for k, figures in enumerate(golden.classes):
        is_class, is_predicted = target == k, prediction == k
        both = int((is_class & is_predicted).sum())
        gaps = ClassGaps.of(Predictions.of(logits, target).elements).gap[k] / 500
        assert (figures.name, figures.count) == (str(k), int(is_class.sum()))
        assert figures.accuracy == pytest.approx(both / int(is_class.sum()), abs=1e-12)
        assert figures.iou == pytest.approx(both / int((is_class | is_predicted).sum()), abs=1e-12)
        expected = float(probability[:, k].mean() - is_class.double().mean())
        assert figures.gap == pytest.approx(expected, abs=1e-12)
        assert figures.ece == pytest.approx(float(gaps.abs().sum()), abs=1e-12)
    mean = sum(figures.ece for figures in golden.classes) / 5
    assert mean == pytest.approx(golden.classwise_ece, abs=1e-12)


def test_classes_have_bins_of_the_elements_predicted_as_them(golden: Evaluation, golden_batch: Batch) -> None:
    logits, target = golden_batch
    confidence, prediction = logits.softmax(1).max(1)
    for k, figures in enumerate(golden.classes):
        chosen = prediction == k
        for bin_, count, mean, correct in figures.bins:
            inside = chosen & (confidence > bin_ / golden.bins) & (confidence <= (bin_ + 1) / golden.bins)
            assert (count, correct) == (int(inside.sum()), int((target[inside] == k).sum()))
            assert mean == pytest.approx(float(confidence[inside].mean()), abs=1e-12)
        assert sum(each.elements for each in figures.bins) == int(chosen.sum())
        assert all(each.elements for each in figures.bins)
    assert Evaluation.from_json(golden.to_json()).classes == golden.classes
    older = golden.to_dict()
    for figures in older["classes"]:
        del figures["bins"]
    assert Evaluation.from_dict(older).classes[0].bins == ()


def test_a_class_that_is_missing_has_no_accuracy() -> None:
    logits, target = 2 * torch.eye(3, dtype=torch.float64)[[0, 0, 1]], torch.tensor([0, 1, 1])
    figures = evaluate(logits, target, resamples=0).classes[2]
    assert (figures.count, figures.accuracy, figures.iou) == (0, None, None)
    assert figures.gap > 0


def test_probabilities_in_the_place_of_logits() -> None:
    logits, target = batch(30)
    with pytest.warns(UserWarning, match="look like probabilities"):
        evaluate(logits.softmax(1), target, resamples=0)
    with pytest.warns(UserWarning, match="look like probabilities"):
        Evaluator(resamples=0).update(logits.softmax(1), target)
    evaluate(logits.softmax(1).log(), target, resamples=0)


def test_class_names(golden_batch: Batch) -> None:
    names = ["sky", "road", "car", "tree", "void"]
    for result in (
        evaluate(*golden_batch, class_names=names, resamples=0),
        Evaluator(class_names=names, resamples=0).update(*golden_batch).compute(),
    ):
        assert [figures.name for figures in result.classes] == names


# ---- Head, middle and tail ------------------------------------------------------------------------


def test_groups_equal_a_direct_computation(golden_batch: Batch) -> None:
    logits, target = golden_batch
    counts = [101, 100, 20, 19, 0]
    exact = evaluate(logits, target, class_counts=counts, resamples=0)
    stream = Evaluator(class_counts=torch.tensor(counts), resamples=0)
    for part in zip(logits.split(130), target.split(130), strict=True):
        stream.update(*part)
    for result in (exact, stream.compute()):
        assert list(result.groups) == ["head", "mid", "tail"]
        for figures, classes in zip(result.groups.values(), ([0], [1, 2], [3, 4]), strict=True):
            chosen = torch.isin(target, torch.tensor(classes))
            confidence, prediction = logits[chosen].softmax(1).max(1)
            assert (figures.classes, figures.count) == (len(classes), int(chosen.sum()))
            right = float((prediction == target[chosen]).double().mean())
            assert figures.accuracy == pytest.approx(right, abs=1e-12)
            assert figures.confidence == pytest.approx(float(confidence.mean()), abs=1e-12)
            expected = metrics.ece(logits[chosen], target[chosen])
            assert figures.ece == pytest.approx(expected, abs=1e-12)


def test_empty_groups() -> None:
    logits, target = batch(60, 3)
    target = target.clamp_max(1)  # the last class does not occur
    groups = evaluate(logits, target, class_counts=[500, 500, 1], resamples=0).groups
    assert groups["head"].count == 60
    assert groups["mid"] == GroupFigures(0, 0, None, None, None)
    assert groups["tail"] == GroupFigures(1, 0, None, None, None)
    assert evaluate(logits, target, resamples=0).groups == {}


# ---- Streams --------------------------------------------------------------------------------------


NOT_STREAMED = ["exact", "fingerprint", "replicates", "intervals", "risk_coverage", *CLOSE, *NEED_ALL]


def uneven(logits: Tensor, target: Tensor) -> list[Batch]:
    """Pieces of several sizes, one of them empty and one that is ignored altogether."""
    sizes = [1, 0, 137, 62, len(target) - 200]
    pieces = list(zip(logits.split(sizes), target.split(sizes), strict=True))
    return [*pieces[:3], (logits[:9], torch.full((9,), -100)), *pieces[3:]]


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_a_stream_equals_one_evaluation(classes: int) -> None:
    logits, target = batch(700, classes)
    target[5:40] = -100
    options = {
        "background": 1,
        "class_counts": [200 if k % 2 else 5 for k in range(classes)],
        "class_names": [f"class {k}" for k in range(classes)],
        "name": "the model",
        "level": 0.9,
    }
    whole = evaluate(logits, target, resamples=0, **options)
    stream = Evaluator(resamples=0, **options)
    for piece in uneven(logits, target):
        assert stream.update(*piece) is stream
    streamed = stream.compute()
    assert_same(streamed, whole, without=NOT_STREAMED)
    assert streamed.samples == 665
    assert not streamed.exact
    assert streamed.fingerprint is None
    assert [getattr(streamed, name) for name in NEED_ALL] == [None] * len(NEED_ALL)
    assert streamed.smooth_ece == pytest.approx(whole.smooth_ece, rel=0.01)
    for name in dict.fromkeys([*EQUAL_MASS, *SWEPT, *SELECTIVE]):
        assert getattr(streamed, name) == pytest.approx(getattr(whole, name), rel=0.1), name
    assert streamed.risk_coverage.coverage == whole.risk_coverage.coverage
    assert streamed.risk_coverage.risk == pytest.approx(whole.risk_coverage.risk, abs=0.05)


def test_neither_pieces_nor_their_order_matter() -> None:
    pieces = uneven(*batch(600))
    options: dict[str, Any] = {"resamples": 50, "class_counts": [500, 50, 5, 5, 5]}
    forward, backward, whole = (Evaluator(**options) for _ in range(3))
    for piece in pieces:
        forward.update(*piece)
    for piece in reversed(pieces):
        backward.update(*piece)
    whole.update(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))
    assert_same(forward.compute(), whole.compute())
    assert_same(backward.compute(), whole.compute())


def test_addition() -> None:
    logits, target = batch(300)
    options: dict[str, Any] = {"resamples": 20, "name": "sum", "background": 0, "level": 0.8, "seed": 3}
    options |= {"class_counts": [500, 50, 5, 5, 5], "class_names": list("abcde"), "bins": 20}
    first, second, whole, fresh = (Evaluator(**options) for _ in range(4))
    first.update(logits[:70], target[:70])
    second.update(logits[70:], target[70:])
    expected = whole.update(logits, target).compute()
    alone = first.compute()
    total = first + second
    assert_same(total.compute(), expected)
    assert_same((second + first).compute(), expected)
    assert (first + fresh).compute() == alone == (fresh + first).compute()
    # The sum is a new evaluator, and what it is given later is its own.
    total.update(logits, target)
    assert total.compute().samples == 600
    assert first.compute() == alone


def test_addition_refuses_what_does_not_fit() -> None:
    five, four = Evaluator().update(*batch(10)), Evaluator().update(*batch(10, 4))
    with pytest.raises(ValueError, match="5 and of 4 classes"):
        five + four
    for option, value in (
        ("bins", 10),
        ("ignore_index", 255),
        ("per_image", True),
        ("class_names", ["a", "b", "c", "d", "e"]),
    ):
        with pytest.raises(ValueError, match=f"different {option}"):
            five + Evaluator(**{option: value})
    with pytest.raises(TypeError):
        five + 1


def test_addition_does_not_lose_elements_of_groups() -> None:
    counts = [500, 50, 5, 5, 5]
    first, second = Evaluator(class_counts=counts, resamples=0), Evaluator(resamples=0)
    first.update(*batch(100))
    second.update(*batch(100))
    try:
        total = first + second
    except ValueError:
        return
    assert sum(group.count for group in total.compute().groups.values()) == 200


def test_reset() -> None:
    logits, target = batch(300)
    stream = Evaluator(resamples=10)
    stream.update(logits, target)
    stream.reset()
    with pytest.raises(ValueError, match="nothing to evaluate"):
        stream.compute()
    stream.update(logits[:50], target[:50])
    assert stream.compute() == Evaluator(resamples=10).update(logits[:50], target[:50]).compute()


def test_reset_forgets_an_inferred_number_of_classes() -> None:
    stream = Evaluator(resamples=0).update(*batch(20, 4))
    stream.reset()
    assert stream.update(*batch(20, 5)).compute().num_classes == 5


def test_computing_changes_nothing() -> None:
    logits, target = batch(300)
    stream = Evaluator(resamples=10).update(logits[:100], target[:100])
    assert stream.compute() == stream.compute()
    stream.update(logits[100:], target[100:])
    assert_same(stream.compute(), Evaluator(resamples=10).update(logits, target).compute())


def state_bytes(stream: Evaluator) -> int:
    assert stream._sums is not None
    return sum(tensor.nbytes for tensor in stream._sums.tensors())


def test_the_state_does_not_grow() -> None:
    stream = Evaluator(class_counts=[50] * 19, background=0).update(*batch(1, 19))
    small = state_bytes(stream)
    for seed in range(3):
        stream.update(*batch(20_000, 19, seed=seed))
    assert stream.compute().samples == 60_001
    assert state_bytes(stream) == small <= 128 * 1024
    # Nothing else is kept: no tensor but these sums and the training counts.
    kept = [name for name, value in vars(stream).items() if isinstance(value, Tensor | list | dict | set)]
    assert kept == ["class_counts"]


def test_gradients_are_not_kept() -> None:
    logits, target = batch(100)
    stream = Evaluator(resamples=0).update(logits.requires_grad_(), target)
    assert stream._sums is not None
    assert not any(tensor.requires_grad for tensor in stream._sums.tensors())
    assert stream.compute() == Evaluator(resamples=0).update(logits.detach(), target).compute()


def test_logits_that_require_gradients() -> None:
    logits, target = batch(100)
    expected = evaluate(logits, target, resamples=5)
    assert evaluate(logits.clone().requires_grad_(), target, resamples=5) == expected


# ---- Images ---------------------------------------------------------------------------------------


def flattened(logits: Tensor, target: Tensor) -> Batch:
    """The same without the structure of images, and without void pixels."""
    rows, labels = logits.movedim(1, -1).reshape(-1, logits.shape[1]), target.flatten()
    return rows[labels != -100], labels[labels != -100]


def test_ignoring_equals_deleting() -> None:
    logits, target = images()
    assert 300 < int((target != -100).sum()) < 500
    options: dict[str, Any] = {"background": 0, "class_counts": [500, 50, 5, 5, 5], "resamples": 30}
    rows, labels = flattened(logits, target)
    expected = evaluate(rows, labels, **options)
    assert_same(evaluate(logits, target, **options), expected, without=("dense",))
    logits.movedim(1, -1)[target == -100] = 77.0  # whatever void pixels hold
    assert_same(evaluate(logits, target, **options), expected, without=("dense",))
    stream, rows_stream = Evaluator(**options), Evaluator(**options)
    assert_same(
        stream.update(logits, target).compute(),
        rows_stream.update(rows, labels).compute(),
        without=("dense",),
    )


def test_ignoring_equals_deleting_where_void_pixels_are_not_finite() -> None:
    logits, target = images()
    expected = evaluate(*flattened(logits, target), resamples=10)
    logits.movedim(1, -1)[target == -100] = math.nan
    assert_same(evaluate(logits, target, resamples=10), expected, without=("dense",))


@pytest.mark.parametrize("per_image", [False, True])
def test_channels_last(per_image: bool) -> None:
    logits, target = images()
    channels_last = logits.to(memory_format=torch.channels_last)
    assert channels_last.stride() != logits.stride()
    options: dict[str, Any] = {"resamples": 20, "per_image": per_image, "background": 1}
    assert_same(evaluate(channels_last, target, **options), evaluate(logits, target, **options))
    streams = [Evaluator(**options).update(values, target) for values in (channels_last, logits)]
    assert_same(*(stream.compute() for stream in streams))


def test_per_image_is_the_mean_over_images() -> None:
    logits, target = images(4)
    logits[1] *= 3  # images that differ
    target[2, :, :13] = -100
    target[3] = -100  # nothing in it counts: this image is left out
    options: dict[str, Any] = {"background": 0, "resamples": 10}
    result = evaluate(logits, target, per_image=True, **options)
    singles = [evaluate(logits[i : i + 1], target[i : i + 1], **options) for i in range(3)]
    pooled = evaluate(logits, target, **options)
    for name in STREAMED:
        values = torch.tensor([getattr(single, name) for single in singles], dtype=torch.float64)
        assert getattr(result, name) == pytest.approx(float(values.mean()), rel=0, abs=1e-12), name
        reach = 4.302652729911275 * float(values.std()) / math.sqrt(3)  # Student's t of two degrees
        most = 1.0 if METRICS[name].percent else math.inf
        expected = [min(max(float(values.mean()) + sign * reach, 0), most) for sign in (-1, 1)]
        assert result.intervals[name] == pytest.approx(expected, rel=0, abs=1e-9), name
        if name != "accuracy":  # and it is something else than taking all pixels together
            assert getattr(result, name) != pytest.approx(getattr(pooled, name), rel=0, abs=1e-6)
    assert [getattr(result, name) for name in NEED_ALL] == [None] * len(NEED_ALL)
    assert result.exact
    assert result.replicates == {}
    # What is not averaged is of all pixels.
    others = ["intervals", "replicates", "fingerprint", "per_image", "risk_coverage"]
    assert_same(result, pooled, without=[*METRICS, *others])
    assert result.risk_coverage.risk == pytest.approx(pooled.risk_coverage.risk, abs=0.05)
    assert result.per_image


def test_per_image_streams() -> None:
    logits, target = images(5)
    whole = evaluate(logits, target, per_image=True, background=0)
    stream, rest = (Evaluator(per_image=True, background=0) for _ in range(2))
    stream.update(logits[:1], target[:1]).update(logits[:0], target[:0]).update(logits[1:3], target[1:3])
    rest.update(logits[3:], target[3:])
    assert_same((stream + rest).compute(), replace(whole, exact=False))


def test_one_image_has_no_spread() -> None:
    result = evaluate(*images(1), per_image=True)
    assert result.intervals == {}
    assert Evaluation.from_json(result.to_json()) == result


def test_per_image_with_any_number_of_bins() -> None:
    logits, target = images()
    result = evaluate(logits, target, per_image=True, bins=7, resamples=0)
    singles = [evaluate(logits[i : i + 1], target[i : i + 1], bins=7, resamples=0).ece for i in range(2)]
    assert result.ece == pytest.approx(sum(singles) / 2, abs=1e-12)


def test_per_image_leaves_images_without_foreground_out_of_its_mean() -> None:
    logits, target = images(2)
    target[1], logits[1, 0] = 0, 99.0
    result = evaluate(logits, target, per_image=True, background=0)
    single = evaluate(logits[:1], target[:1], background=0, resamples=0)
    assert result.mean_iou_foreground == pytest.approx(single.mean_iou_foreground, abs=1e-12)


# ---- Intervals ------------------------------------------------------------------------------------


def test_which_figures_have_intervals(golden: Evaluation, golden_batch: Batch) -> None:
    assert set(golden.intervals) == set(golden.replicates) == set(OF_FIVE) - {"kde_ece"}
    assert {len(values) for values in golden.replicates.values()} == {200}
    assert set(evaluate(*golden_batch, resamples=5).intervals) == set(OF_FIVE) - {
        "mean_iou_foreground",
        "kde_ece",
    }
    streamed = Evaluator(resamples=5).update(*golden_batch).compute()
    assert set(streamed.intervals) == set(RESAMPLED_STREAM)
    foreground = Evaluator(resamples=5, background=0).update(*golden_batch).compute()
    assert set(foreground.intervals) == set(RESAMPLED_STREAM)


@pytest.mark.parametrize("background", [None, 0])
def test_no_resamples_no_intervals(golden_batch: Batch, background: int | None) -> None:
    exact = evaluate(*golden_batch, resamples=0, background=background)
    streamed = Evaluator(resamples=0, background=background).update(*golden_batch).compute()
    for result in (exact, streamed):
        assert result.intervals == {}
        assert result.replicates == {}


def test_replicates_are_the_figures_of_drawn_data(golden_batch: Batch, golden: Evaluation) -> None:
    (weight, *_) = resampling.draws(500, 3, seed=0)
    assert weight.sum(1).tolist() == [500] * 3
    coarse = [*SWEPT, "smooth_ece"]  # fewer bins and cells than the estimate itself
    at_the_datas_temperature = [name for name in NEED_ALL if name != "kde_ece"]
    names = [name for name in OF_FIVE if name not in [*coarse, *at_the_datas_temperature, "kde_ece"]]
    for r, times in enumerate(weight.long()):
        drawn = (values.repeat_interleave(times, 0) for values in golden_batch)
        expected = evaluate(*drawn, resamples=0, background=1)
        found = {name: golden.replicates[name][r] for name in names}
        assert found == pytest.approx({name: getattr(expected, name) for name in names}, rel=1e-6)
        for name in coarse:
            assert golden.replicates[name][r] == pytest.approx(getattr(expected, name), rel=0.1)
        for score in ("nll", "brier"):
            parts = [golden.replicates[f"{score}_{part}"][r] for part in ("calibration", "refinement")]
            assert sum(parts) == pytest.approx(golden.replicates[score][r], rel=1e-5)


def test_exact_and_streamed_intervals_are_as_wide_as_theory_says(golden_batch: Batch) -> None:
    exact = evaluate(*golden_batch, resamples=600)
    streamed = Evaluator(resamples=600).update(*golden_batch).compute()
    logits, target = golden_batch
    nll = F.cross_entropy(logits, target, reduction="none")
    squares = (logits.softmax(1) - F.one_hot(target, 5)).square().sum(1)
    hit = (logits.argmax(1) == target).double()
    for name, values in (("accuracy", hit), ("nll", nll), ("brier", squares)):
        for result in (exact, streamed):
            low, high = result.intervals[name]
            assert high - low == pytest.approx(2 * 1.96 * float(values.std()) / 500**0.5, rel=0.15)
            assert (high + low) / 2 == pytest.approx(float(values.mean()), rel=0.05)
    for name in RESAMPLED_STREAM:
        (low, high), (from_, to) = exact.intervals[name], streamed.intervals[name]
        assert to - from_ == pytest.approx(high - low, rel=0.35), name


@pytest.mark.parametrize("streamed", [False, True])
def test_intervals_are_reproducible_by_their_seed(golden_batch: Batch, streamed: bool) -> None:
    def result(seed: int) -> Evaluation:
        if streamed:
            return Evaluator(resamples=40, seed=seed).update(*golden_batch).compute()
        return evaluate(*golden_batch, resamples=40, seed=seed)

    first, again, other = result(1), result(1), result(2)
    assert first == again
    resampled = [name for name in first.replicates if name in first.intervals]
    assert [name for name in resampled if first.replicates[name] == other.replicates[name]] == []
    assert first.metrics == other.metrics
    assert (first.seed, other.seed) == (1, 2)


def test_global_random_numbers_are_left_alone(golden_batch: Batch) -> None:
    state = torch.get_rng_state()
    evaluate(*golden_batch, resamples=5)
    Evaluator(resamples=5).update(*golden_batch).compute()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_level_widens_intervals(golden_batch: Batch, streamed: bool) -> None:
    def result(level: float) -> Evaluation:
        if streamed:
            return Evaluator(resamples=200, level=level).update(*golden_batch).compute()
        return evaluate(*golden_batch, resamples=200, level=level)

    results = [result(level) for level in (0.5, 0.9, 0.99)]
    assert [each.level for each in results] == [0.5, 0.9, 0.99]
    for name in results[0].intervals:
        narrow, middle, wide = (high - low for low, high in (each.intervals[name] for each in results))
        assert 0 < narrow < middle < wide, name


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_of_calibrated_data_may_be_0(streamed: bool) -> None:
    def result(logits: Tensor, target: Tensor) -> Evaluation:
        if streamed:
            return Evaluator(resamples=100).update(logits, target).compute()
        return evaluate(logits, target, resamples=100)

    calibrated = result(*batch(1000, sharpness=1.0, seed=1))
    assert calibrated.p_value > 0.05
    assert calibrated.ece > 0
    assert [calibrated.intervals[name][0] for name in ERRORS] == [0.0] * len(ERRORS)
    overconfident = result(*batch(1000, sharpness=3.0))
    assert overconfident.p_value == 0.001
    # Of the largest gap in any bin chance may be all there is.
    assert all(overconfident.intervals[name][0] > 0 for name in ERRORS if name != "mce")
    for each in (calibrated, overconfident):
        assert all(0 <= low <= high for low, high in each.intervals.values())
        assert all(high <= 1 for name, (_, high) in each.intervals.items() if METRICS[name].percent)


def test_progress_reaches_the_end(golden_batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = evaluate(*golden_batch, resamples=23)
    monkeypatch.setattr(resampling, "_DRAWS", 500 * 10)
    calls: list[tuple[int, int]] = []
    result = evaluate(*golden_batch, resamples=23, progress=lambda *call: calls.append(call))
    assert calls == [(10, 23), (20, 23), (23, 23)]
    assert_same(result, expected, tolerance=1e-6)  # how many are drawn at once does not matter


def test_too_many_draws_come_from_the_sums(golden_batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = evaluate(*golden_batch, resamples=20)
    streamed = Evaluator(resamples=20).update(*golden_batch).compute()
    monkeypatch.setattr(evaluator, "_MOST_DRAWS", 500 * 20)
    assert evaluate(*golden_batch, resamples=20) == drawn  # as many as are allowed
    monkeypatch.setattr(evaluator, "_MOST_DRAWS", 500 * 20 - 1)
    result = evaluate(*golden_batch, resamples=20)
    assert result.exact
    assert result.metrics == drawn.metrics
    assert result.replicates == streamed.replicates != drawn.replicates
    assert set(result.intervals) == set(RESAMPLED_STREAM)
    assert result.intervals["ece"] == pytest.approx(streamed.intervals["ece"], abs=1e-12)
    # Also for bins that a stream cannot have.
    assert set(evaluate(*golden_batch, resamples=20, bins=7).intervals) == set(RESAMPLED_STREAM)


def test_what_was_drawn_from_sums_is_not_paired(golden_batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "_MOST_DRAWS", 1)
    logits, target = golden_batch
    first, second = (evaluate(scale * logits, target, resamples=20) for scale in (1, 1.5))
    assert not first.is_paired_with(second)


def test_progress_of_what_is_drawn_from_sums(golden_batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "_MOST_DRAWS", 1)
    calls: list[tuple[int, int]] = []
    evaluate(*golden_batch, resamples=20, progress=lambda *call: calls.append(call))
    assert calls[-1:] == [(20, 20)]


# ---- Comparisons ----------------------------------------------------------------------------------


def test_pairing_sees_small_differences(golden_batch: Batch) -> None:
    logits, target = golden_batch
    first = evaluate(logits, target, resamples=200)
    second = evaluate(0.95 * logits, target, resamples=200)  # slightly less over-confident
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    shuffled = evaluate(0.95 * logits[order], target[order], resamples=200)
    assert first.is_paired_with(second)
    assert not first.is_paired_with(shuffled)
    paired, unpaired = first.compare(second), first.compare(shuffled)
    assert list(paired) == [name for name in METRICS if name in first.intervals]
    for name in ("nll", "brier"):
        assert paired[name].value == pytest.approx(unpaired[name].value, abs=1e-9)
        assert 0 < paired[name].value < 0.1
        assert (paired[name].significant, paired[name].better) == (True, "second")
        assert (unpaired[name].significant, unpaired[name].better) == (False, None)
        low, high = paired[name].interval
        assert 0 < low <= paired[name].value <= high


def test_unpaired_intervals_are_as_wide_as_theory_says(golden_batch: Batch) -> None:
    first = evaluate(*golden_batch, resamples=600)
    second = evaluate(*batch(400), resamples=600)
    difference = first.compare(second)["accuracy"]
    variance = sum(each.accuracy * (1 - each.accuracy) / each.samples for each in (first, second))
    low, high = difference.interval
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.15)


@pytest.mark.parametrize("streamed", [False, True])
def test_identical_models_do_not_differ(golden_batch: Batch, streamed: bool) -> None:
    def result(seed: int = 0) -> Evaluation:
        if streamed:
            return Evaluator(resamples=100, seed=seed).update(*golden_batch).compute()
        return evaluate(*golden_batch, resamples=100, seed=seed)

    first = result()
    for other in (result(), result(seed=1)):
        differences = first.compare(other)
        assert {difference.value for difference in differences.values()} == {0.0}
        assert not any(difference.significant or difference.better for difference in differences.values())
    if streamed:  # unpaired, although the same numbers were drawn for both
        low, high = first.compare(result())["accuracy"].interval
        assert high - low > 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    logits, target = batch(800, dtype=dtype)
    differences = evaluate(logits, target, resamples=50).compare(evaluate(3 * logits, target, resamples=50))
    assert differences["nll"].better == "first"
    # One temperature makes both the same: what is left has no difference but rounding.
    for name in ("nll_refinement", "brier_refinement", "accuracy"):
        assert differences[name].value == pytest.approx(0, abs=1e-6)
        assert not differences[name].significant, name


def test_which_is_better(golden_batch: Batch) -> None:
    logits, target = golden_batch
    worse = evaluate(logits, target, resamples=100)
    better = evaluate(logits + F.one_hot(target, 5), target, resamples=100)
    names = ["accuracy", "balanced_accuracy", "mean_iou", "nll", "brier", "root_brier", "nll_refinement"]
    assert {METRICS[name].higher_is_better for name in names} == {True, False}
    for differences, which in ((worse.compare(better), "second"), (better.compare(worse), "first")):
        assert {differences[name].better for name in names} == {which}
        assert all(differences[name].significant for name in names)
        assert (differences["accuracy"].value > 0) == (which == "first") == (differences["nll"].value < 0)


@pytest.mark.parametrize("paired", [True, False])
def test_comparisons_are_antisymmetric(golden_batch: Batch, paired: bool) -> None:
    logits, target = golden_batch
    first = evaluate(logits, target, resamples=101)
    other = (2 * logits, target) if paired else (2 * logits.flip(0), target.flip(0))
    second = evaluate(*other, resamples=101)
    assert first.is_paired_with(second) is second.is_paired_with(first) is paired
    forth, back = first.compare(second), second.compare(first)
    assert list(forth) == list(back)
    for name, difference in forth.items():
        assert difference.value == -back[name].value == getattr(first, name) - getattr(second, name)
        low, high = difference.interval
        assert back[name].interval == pytest.approx((-high, -low), abs=1e-12)
        assert difference.significant == back[name].significant
        swapped = {None: None, "first": "second", "second": "first"}
        assert back[name].better == swapped[difference.better]


def test_intervals_of_differences_follow_from_the_replicates(golden_batch: Batch) -> None:
    logits, target = golden_batch
    first, second = (evaluate(scale * logits, target, resamples=100) for scale in (1, 1.5))
    for name, difference in first.compare(second).items():
        ours, theirs = (torch.tensor(each.replicates[name], dtype=torch.float64) for each in (first, second))
        drawn = ours - theirs
        found = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        if METRICS[name].group == "calibration":  # most of the bias cancels: the spread alone counts
            drawn = drawn - drawn.mean() + difference.value
        low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        # Near a bound, reflected intervals are too narrow: of 120 pairs of equal models, 12 differed
        # significantly in the coverage, and 6 do by quantiles.
        quantiles = METRICS[name].curve_interval is not None
        ends = (low, high) if quantiles else (2 * difference.value - high, 2 * difference.value - low)
        if METRICS[name].group == "calibration" and not METRICS[name].debiased:
            # The bias of the error of a calibrated model is 1 / (√2 - 1) times what resamples add.
            bias = float((ours - theirs).mean() - difference.value) / (math.sqrt(2) - 1)
            ends = min(ends[0], ends[0] - bias), max(ends[1], ends[1] - bias)
        if METRICS[name].maximum:
            ends = min(ends[0], found[0]), max(ends[1], found[1])
        assert difference.interval == pytest.approx(ends, abs=1e-12), name


@pytest.mark.parametrize("size", [3, 60])
def test_every_value_lies_in_its_interval(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = 3 * torch.randn(size, 8, generator=generator), torch.arange(size) % 8
    found = evaluate(logits, target, resamples=50)
    for name, (low, high) in found.intervals.items():
        assert low <= found.metrics[name] <= high, name


def test_what_makes_a_comparison_unpaired(golden_batch: Batch) -> None:
    logits, target = golden_batch
    options: dict[str, Any] = {"resamples": 40}
    result = evaluate(logits, target, **options)
    other_labels = target.clone()
    other_labels[0] = (other_labels[0] + 1) % 5
    assert result.is_paired_with(evaluate(logits.flip(1), target, **options))
    assert not result.is_paired_with(evaluate(logits, other_labels, **options))
    assert not result.is_paired_with(evaluate(logits.flip(0), target.flip(0), **options))
    assert not result.is_paired_with(evaluate(logits, target, seed=1, **options))
    streamed = Evaluator(**options).update(logits, target).compute()
    assert not result.is_paired_with(streamed)
    assert not streamed.is_paired_with(streamed)
    assert set(result.compare(streamed)) == set(streamed.replicates)


def test_pairing_survives_json_and_other_numbers_of_resamples(golden_batch: Batch) -> None:
    logits, target = golden_batch
    first, second = evaluate(logits, target, resamples=50), evaluate(2 * logits, target, resamples=80)
    reread = Evaluation.from_json(second.to_json())
    assert first.compare(reread) == first.compare(second)
    assert first.is_paired_with(reread)
    same = evaluate(logits, target, resamples=80)
    for name, values in first.replicates.items():  # the first 50 of 80 are the same draws
        assert same.replicates[name][:50] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("kind", ["equal", "one sharper"])
def test_calibrated_models_rarely_differ(kind: str) -> None:
    program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "false_differences.py"))
    draw = program["pairs"](60, torch.Generator().manual_seed(0))[kind]
    found: Counter[str] = Counter()
    for _ in range(8):
        first, second = draw()
        found.update(name for name, each in first.compare(second).items() if each.significant)
    errors = [name for name, metric in METRICS.items() if metric.group == "calibration"]
    # With a chance of 5 % each, more than 2 of 8 happen once in 150 times.
    assert {name: found[name] for name in errors if found[name] > 2} == {}


def test_the_largest_error_is_not_tested_over_seeds() -> None:
    logits, target = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3
    runs = [tuple(evaluate(by * logits, target, resamples=50) for _ in range(2)) for by in (1, 3)]
    comparison = Comparison("", (0, 1), tuple(Method(str(number), each) for number, each in enumerate(runs)))
    assert comparison.figures("ece")["1"].p_value is not None
    assert comparison.figures("mce")["1"].p_value is None


def test_nothing_to_compare(golden: Evaluation, golden_batch: Batch) -> None:
    without = evaluate(*golden_batch, resamples=0)
    for first, second in ((golden, without), (without, golden)):
        with pytest.raises(ValueError, match=r"^nothing to compare: there are no resamples$"):
            first.compare(second)


@pytest.mark.parametrize(("level", "least"), [(0.95, 40), (0.9, 20), (0.5, 4)])
def test_too_few_resamples_tell_nothing(golden_batch: Batch, level: float, least: int) -> None:
    logits, target = golden_batch

    def pair(resamples: int) -> list[Evaluation]:
        return [evaluate(by * logits, target, resamples=resamples, level=level) for by in (1, 9)]

    first, second = pair(least - 1)
    few = rf"^nothing to compare: {least - 1} resamples are too few for a level of .* %, .* at least {least}$"
    with pytest.raises(ValueError, match=few):
        first.compare(second)
    first, second = pair(least)
    assert first.compare(second)["nll"].significant


def test_labels_that_are_no_answers_are_named_without_the_shape_of_two_classes() -> None:
    logits, target = torch.randn(50), torch.arange(50) % 5
    message = r"^with binary=True the target holds 0 and 1, .*; got labels from 0 to 4$"
    with pytest.raises(ValueError, match=message):
        evaluate(logits, target, binary=True)
    with pytest.raises(ValueError, match=message):
        Evaluator(binary=True).update(logits, target)
    with pytest.raises(ValueError, match=r"got labels from -1 to 1$"):
        evaluate(logits, target % 3 - 1, binary=True)
    evaluate(logits, torch.where(target > 1, 7, target), binary=True, ignore_index=7, resamples=0)


def test_only_figures_of_one_kind_are_compared() -> None:
    logits, target = torch.randn(50), torch.randint(2, (50,))
    single = evaluate(logits, target, binary=True, resamples=10)
    with pytest.raises(ValueError, match="one evaluation has binary=True, the other binary=False"):
        single.compare(evaluate(torch.stack([0 * logits, logits], 1), target, resamples=10))
    with pytest.raises(ValueError, match=r"one evaluation has level=0.95, the other level=0.9"):
        single.compare(evaluate(logits, target, binary=True, resamples=10, level=0.9))


# ---- JSON -----------------------------------------------------------------------------------------


def varied(golden_batch: Batch) -> list[Evaluation]:
    logits, target = golden_batch
    options: dict[str, Any] = {"resamples": 10, "class_counts": [500, 500, 5, 5, 5], "background": 2}
    return [
        evaluate(logits, target, name='Zürich "7"', class_names=["ä", "b", "c", "d", "[e]"], **options),
        evaluate(logits, target, resamples=0, bins=7),
        Evaluator(**options).update(logits, target).compute(),
        evaluate(*images(3), per_image=True),
    ]


def test_json_round_trip(golden_batch: Batch) -> None:
    for result in varied(golden_batch):
        text = result.to_json()
        again = Evaluation.from_json(text)
        assert again == result
        assert again.to_json() == text
        assert Evaluation.from_dict(result.to_dict()) == result
        assert str(again) == str(result)
        assert again != changed(result, ece=result.ece + 1e-9)


def plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and plain(entry) for key, entry in value.items())
    if type(value) is list:
        return all(plain(entry) for entry in value)
    return type(value) in (str, int, float, bool, type(None))


def test_dictionaries_hold_plain_types_only(golden_batch: Batch) -> None:
    for result in varied(golden_batch):
        assert plain(result.to_dict())
        known = {"format", "intervals", "replicates", *METRICS, *(entry.name for entry in fields(Evaluation))}
        assert set(result.to_dict()) == known - {"figures"}
        assert all(value is None or type(value) is float for value in result.metrics.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("accuracy: 0.9", "not JSON"),
        ("[1, 2]", "expected a JSON object with the key 'format'"),
        ("3", "expected a JSON object"),
        ('{"ece": 0.1}', "key 'format'"),
    ],
)
def test_what_is_no_evaluation_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Evaluation.from_json(text)
    assert "not an evaluation" in str(caught.value)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format=99), "format 99; this version reads format 3"),
        (lambda content: content.update(colour="red", taste="sour"), r"\['colour', 'taste'\]"),
        (lambda content: content.pop("ece"), "'ece'"),
        (lambda content: content.pop("reliability"), "'reliability'"),
        (lambda content: content["reliability"].pop("count"), "'count'"),
        (lambda content: content["classes"][0].pop("gap"), "'gap'"),
        (lambda content: content["classes"][0].update(colour="red"), "'colour'"),
        (lambda content: content.update(reliability=3), "not an evaluation"),
        (lambda content: content.update(classes=3), "not an evaluation"),
        (lambda content: content.update(intervals=[]), "not an evaluation"),
        (lambda content: content.update(ece="0.1"), "'ece': expected finite numbers, .* got '0.1'"),
        (lambda content: content.update(ece=True), "'ece': expected finite numbers, .* got True"),
        (lambda content: content.update(nll=math.inf), "'nll': expected finite numbers, .* got inf"),
        (lambda content: content["intervals"].update(nll=[math.nan, 1.0]), "'nll': expected .* got nan"),
        (lambda content: content["intervals"].update(nll=[0.5]), "'nll': expected .* got 1 ends"),
        (lambda content: content["replicates"].update(nll=[0.5, None]), "'nll': expected .* got None"),
    ],
)
def test_changed_evaluations_are_refused(
    golden: Evaluation, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    content = golden.to_dict()
    content["ece"] = np.float64(content["ece"])
    assert Evaluation.from_dict(content) == golden
    change(content)
    for read in (Evaluation.from_dict, lambda content: Evaluation.from_json(json.dumps(content))):
        with pytest.raises(ValueError, match=message) as caught:
            read(content)
        assert "an evaluation" in str(caught.value)


def hits(logits: Tensor) -> Batch:
    return logits, logits.argmax(1)


def misses(logits: Tensor) -> Batch:
    return logits, (logits.argmax(1) + 1) % logits.shape[1]


CERTAIN = 1000 * torch.eye(4)[torch.arange(60) % 4]  # confidences of exactly 1
LOGITS, TARGET = batch(60, 4)
DEGENERATE: dict[str, Batch] = {
    "one sample": (LOGITS[:1], TARGET[:1]),
    "two samples": (LOGITS[:2], TARGET[:2]),
    "one certain sample": hits(CERTAIN[:1]),
    "a class is missing": (LOGITS[TARGET != 2], TARGET[TARGET != 2]),
    "one class only": (LOGITS, torch.ones_like(TARGET)),
    "all right": hits(LOGITS),
    "all wrong": misses(LOGITS),
    "certain and right": hits(CERTAIN),
    "certain and wrong": misses(CERTAIN),
    "certain, right or wrong": (CERTAIN, torch.arange(60) % 3),
    "undecided": (torch.zeros(60, 4), TARGET),
    "one class in all": (torch.zeros(60, 2), torch.zeros(60, dtype=torch.int64)),
}


def ways(data: Batch, **options: Any) -> dict[str, Callable[[], Evaluation]]:
    some = data[0][-4:], data[1][-4:]  # each an image of its own, which takes time
    return {
        "exact": lambda: evaluate(*data, resamples=50, **options),
        "streamed": lambda: Evaluator(resamples=50, **options).update(*data).compute(),
        "per image": lambda: evaluate(*some, per_image=True, **options),
    }


def assert_numbers(result: Evaluation) -> None:
    """All numbers are finite, in Python and in JSON."""
    strange = [p for p, v in leaves(vars_of(result)) if isinstance(v, float) and not math.isfinite(v)]
    assert strange == []
    assert Evaluation.from_json(result.to_json()) == result
    assert str(result).count("nan") == 0


def vars_of(result: Evaluation) -> dict[str, Any]:
    """As `to_dict`, which refuses NaN."""
    listed = {name: list(ends) for name, ends in result.intervals.items()}
    drawn = {name: list(values) for name, values in result.replicates.items()}
    return {**result.metrics, "p_value": result.p_value, "intervals": listed, "replicates": drawn}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name, data in DEGENERATE.items() for way in ways(data)],
)
def test_degenerate_data(name: str, way: str) -> None:
    result = ways(DEGENERATE[name])[way]()
    assert_numbers(result)
    if way != "per image":
        assert result.p_value == calibration_test(Predictions.of(*DEGENERATE[name])).p_value


def test_what_degenerate_data_give() -> None:
    right, wrong = (
        evaluate(*DEGENERATE[f"certain and {which}"], resamples=5) for which in ("right", "wrong")
    )
    for name in (*ERRORS, "nll", "brier"):
        assert getattr(right, name) == pytest.approx(0, abs=1e-12), name
    assert (right.accuracy, right.p_value) == (1, 1)
    assert (wrong.accuracy, wrong.p_value) == (0, 0.001)
    assert (wrong.nll, wrong.brier) == (1000, 2)
    assert (wrong.ece, wrong.mce, wrong.adaptive_ece) == (1, 1, 1)


SPARSE_FOREGROUND = {
    "none": hits(5 * torch.eye(2)[torch.zeros(60, dtype=torch.int64)]),
    "one element": hits(5 * torch.eye(2)[torch.tensor([0] * 59 + [1])]),
}


@pytest.mark.parametrize("way", ["exact", "streamed", "per image"])
@pytest.mark.parametrize("foreground", SPARSE_FOREGROUND)
def test_little_or_no_foreground(foreground: str, way: str) -> None:
    result = ways(SPARSE_FOREGROUND[foreground], background=0)[way]()
    assert_numbers(result)
    assert result.mean_iou_foreground == (None if foreground == "none" else 1)


# ---- What users get wrong -------------------------------------------------------------------------


BATCH = batch(30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_names": ["a", "b"]}, "class_names must have one entry for each of 5 classes, got 2"),
        ({"class_counts": [1] * 6}, "class_counts must have one entry for each of 5 classes, got 6"),
        ({"background": 5}, "background must be a class from 0 to 4, or None, got 5"),
        ({"background": -1}, "background must be a class from 0 to 4"),
    ],
)
def test_options_that_do_not_fit_the_classes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(*BATCH, **options)
    with pytest.raises(ValueError, match=message):
        Evaluator(5, **options)
    stream = Evaluator(**options)
    with pytest.raises(ValueError, match=message):
        stream.update(*BATCH)
    assert stream._sums is None
    assert stream.num_classes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 0}, "bins must be a whole number of at least 1, got 0"),
        ({"resamples": -1}, "resamples must be a whole number of at least 0, got -1"),
        ({"level": 0.0}, r"level must lie in \(0, 1\), got 0.0"),
        ({"level": 1.0}, r"level must lie in \(0, 1\), got 1.0"),
        ({"level": 95}, r"level must lie in \(0, 1\), got 95"),
        ({"level": 95}, "level must lie in .0, 1., got 95"),
        ({"level": math.nan}, "level must lie in .0, 1., got nan"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(*BATCH, **options)
    with pytest.raises(ValueError, match=message):
        Evaluator(**options)


@pytest.mark.parametrize("bins", [7, 16, 301])
def test_bins_that_a_stream_cannot_have(bins: int) -> None:
    stream = Evaluator(bins=bins)
    with pytest.raises(ValueError, match=rf"divisor of 300 .*10, 12, 15, 20.*got {bins}"):
        stream.update(*BATCH)
    assert stream._sums is None
    result = evaluate(*BATCH, bins=bins, resamples=5)
    assert len(result.reliability.count) == bins
    assert result.ece == pytest.approx(metrics.ece(*BATCH, bins=bins), abs=1e-12)


def bad_batches() -> dict[str, tuple[Batch, str]]:
    logits, target = batch(30)
    with_nan, with_inf = logits.clone(), logits.clone()
    with_nan[17, 2], with_inf[17, 2] = math.nan, math.inf
    label = target.clone()
    label[3] = 5
    return {
        "NaN": ((with_nan, target), "NaN or infinite"),
        "infinite": ((with_inf, target), "NaN or infinite"),
        "a label": ((logits, label), "labels from 0 to 5"),
        "shape": ((logits, target[:-1]), "target must have shape"),
        "axes": ((logits[:, 0], target), r"logits must have shape \(B, K"),
    }


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("kind", bad_batches())
def test_bad_batches_are_refused_and_nothing_is_added(kind: str, per_image: bool) -> None:
    bad, message = bad_batches()[kind]
    with pytest.raises(ValueError, match=message):
        evaluate(*bad, per_image=per_image)
    stream = Evaluator(resamples=5, per_image=per_image)
    with pytest.raises(ValueError, match=message):
        stream.update(*bad)
    assert stream._sums is None
    assert stream.num_classes is None
    before = stream.update(*batch(3)).compute()
    with pytest.raises(ValueError, match=message):
        stream.update(*bad)
    assert stream.compute() == before


def test_another_number_of_classes_is_refused_and_nothing_is_added() -> None:
    stream = Evaluator(resamples=5).update(*BATCH)
    before = stream.compute()
    with pytest.raises(ValueError, match="4 classes on axis 1, expected num_classes=5"):
        stream.update(*batch(10, 4))
    assert stream.compute() == before
    assert stream.update(*BATCH).compute().samples == 60
    with pytest.raises(ValueError, match="expected num_classes=5"):
        Evaluator(5).update(*batch(10, 4))


def test_nothing_to_evaluate() -> None:
    empty = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    ignored = BATCH[0], torch.full_like(BATCH[1], -100)
    for data in (empty, ignored):
        for per_image in (False, True):
            with pytest.raises(ValueError, match="nothing to evaluate"):
                evaluate(*data, per_image=per_image)
            stream = Evaluator(per_image=per_image, resamples=0).update(*data)
            with pytest.raises(ValueError, match="nothing to evaluate"):
                stream.compute()
            assert stream.update(*batch(3)).compute().samples == 3
    with pytest.raises(ValueError, match=r"update\(logits, target\) first"):
        Evaluator().compute()
    with pytest.raises(ValueError, match="nothing to evaluate"):
        Evaluator(5).compute()


def test_types() -> None:
    with pytest.raises(TypeError, match="floating point"):
        evaluate(torch.ones(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="integer labels"):
        evaluate(torch.ones(3, 2), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    logits, target = batch(200, dtype=dtype)
    expected = evaluate(logits.float(), target, resamples=5)
    assert_same(evaluate(logits, target, resamples=5), expected, 1e-6)


# ---- Printed --------------------------------------------------------------------------------------


def cells(text: str) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell; two spaces or more divide cells."""
    _, _, rows = text.partition("-----\n")
    found = [re.split(r" {2,}", line.rstrip()) for line in rows.splitlines()]
    return {row[0]: [*row[1:], ""][:2] for row in found if len(row) > 1}


def shown(value: float, percent: bool) -> str:
    return f"{100 * value:.2f} %" if percent else f"{value:.4f}"


def test_printed(golden: Evaluation) -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(golden)
    for text in (str(golden), console.file.getvalue()):
        assert "model: 500 elements, 5 classes, 15 bins, exact" in text
        assert "95 % interval" in text
        table = cells(text)
        for name in OF_FIVE:
            if name == "kde_ece":  # was not asked for
                continue
            description = METRICS[name]
            value, between = table[description.label]
            assert value == shown(getattr(golden, name), description.percent)
            ends = [shown(end, description.percent) for end in golden.intervals[name]]
            assert between == " – ".join(ends)
        assert table["p-value of calibration"] == ["0.001", ""]


def test_groups_of_metrics_are_printed_apart(golden: Evaluation) -> None:
    _, _, rows = str(golden).partition("-----\n")
    groups = [[row.split("  ")[0] for row in part.splitlines()] for part in rows.split("\n\n")]
    assert [group[0] for group in groups] == ["Accuracy", "NLL", "ECE", "AURC", "p-value of calibration"]


def test_a_metric_of_the_first_group_that_is_added_is_printed_apart(
    golden: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "own", replace(METRICS["accuracy"], label="Own"))
    own = replace(golden, figures={**golden.figures, "own": golden.figures["accuracy"]})
    assert "\n\nOwn  " in str(own)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("ignored", [0, 3])
def test_a_single_element_has_intervals_of_proportions_only(streamed: bool, ignored: int) -> None:
    """All its resamples are equal: an interval without width would pass for certainty."""
    logits = torch.randn(1 + ignored, 3, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1] + ignored * [-100])
    found = Evaluator().update(logits, target).compute() if streamed else evaluate(logits, target)
    assert found.samples == 1
    assert set(found.intervals) == {"accuracy", "risk_at_coverage", "coverage_at_risk"}
    assert all(low < high for low, high in found.intervals.values())
    assert found.replicates == {}
    assert "A single element has no spread" in str(found)
    assert Evaluation.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="nothing to compare: all resamples of a single element"):
        found.compare(found)


def test_one_is_printed_without_a_plural() -> None:
    text = str(evaluate(torch.zeros(1, 2), torch.tensor([0]), bins=1, class_counts=[200, 5], resamples=0))
    assert text.startswith("model: 1 element, 2 classes, 1 bin, exact")
    assert "1 class\n" in text
    assert text.endswith("1 element")


def test_printed_without_what_is_not_there(golden_batch: Batch) -> None:
    text = str(Evaluator(name="a stream", resamples=0, level=0.9).update(*golden_batch).compute())
    table = cells(text)
    assert text.startswith("a stream: 500 elements")
    assert "streamed" in text
    labels = {METRICS[name].label for name in STREAMED if name != "mean_iou_foreground"}
    assert set(table) == labels  # neither intervals nor tests
    assert {between for _, between in table.values()} == {""}
    assert "interval" not in text
    groups = evaluate(*golden_batch, class_counts=[500, 500, 5, 5, 5], resamples=0)
    assert "interval" not in str(groups)


def test_printed_groups(golden_batch: Batch) -> None:
    result = evaluate(*golden_batch, class_counts=[500, 500, 5, 5, 5], resamples=0)
    table = cells(str(result))
    head = result.groups["head"]
    assert table["Accuracy, head"] == [shown(head.accuracy, True), "2 classes"]
    assert table["ECE, head"] == [shown(head.ece, True), f"{head.count} elements"]
    assert "ECE, tail" in table
    assert "ECE, mid" not in table  # no class is in it


@pytest.mark.parametrize("name", ["model [v2]", "runs[/a]"])
def test_printed_names_are_not_markup(golden: Evaluation, name: str) -> None:
    assert f"{name}: 500 elements" in str(replace(golden, name=name))


def test_evaluations_are_frozen(golden: Evaluation) -> None:
    for part, name in (
        (golden, "ece"),
        (golden.reliability, "count"),
        (golden.classes[0], "gap"),
        (golden.compare(golden)["ece"], "value"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, 0)
    assert "replicates" not in repr(golden)


def test_the_histogram_is_the_one_of_the_predictions(golden_batch: Batch) -> None:
    stream = Evaluator().update(*golden_batch)
    assert stream._sums is not None
    expected = ConfidenceHistogram.of(Predictions.of(*golden_batch).elements)
    assert torch.equal(stream._sums.histogram.count, expected.count)


@pytest.mark.parametrize("given", [[[0.0, 1.0]], torch.zeros(1, 2).numpy()])
def test_arrays_and_lists_are_refused_by_name(given):
    with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got (list|ndarray): pass torch"):
        evaluate(given, given)
    with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got (list|ndarray)"):
        Evaluator().update(given, given)


def test_an_evaluation_stored_before_a_metric_was_added_lacks_it(
    golden: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = golden.to_dict()
    monkeypatch.setitem(METRICS, "added", replace(METRICS["ece"], label="Added", since=4))
    monkeypatch.setattr("calibrant.evaluation.figures._FORMAT", 4)
    read = Evaluation.from_dict(stored)
    assert read.added is None
    assert {name: value for name, value in read.metrics.items() if name != "added"} == golden.metrics
    again = read.to_dict()
    assert again["format"] == 4
    assert Evaluation.from_dict(again) == read
    del again["added"]
    with pytest.raises(ValueError, match="'added'"):
        Evaluation.from_dict(again)


@pytest.mark.parametrize(
    "name", ["num_classes", "bins", "ignore_index", "background", "resamples", "level", "seed"]
)
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    for value in (
        math.inf,
        math.nan,
        True,
        "3",
        "x",
        [1],
        torch.ones(2),
        *([1.5] if name != "level" else [0, 1]),
    ):
        with pytest.raises(ValueError, match=f"^{name} must "):
            Evaluator(**{name: value})


@pytest.mark.parametrize("counts", [3, "12", [1.5, 2], [-1, 2], ["1", 2], torch.tensor([math.nan, 1])])
def test_class_counts_are_whole_numbers(counts: object) -> None:
    with pytest.raises(ValueError, match=r"^class_counts must be "):
        Evaluator(class_counts=counts)


def test_kde_over_images_is_refused() -> None:
    logits, target = batch(30)
    with pytest.raises(ValueError, match="kde_ece is computed for all elements together"):
        evaluate(logits[:, :, None], target[:, None], per_image=True, kde=True, resamples=0)
