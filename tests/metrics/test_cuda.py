"""Figures of logits on a GPU equal those on the CPU."""

import math
import warnings

import pytest
import torch

from calibrant import Evaluator, evaluate
from calibrant.histogram import ConfidenceHistogram
from calibrant.layout import arrange
from calibrant.metrics import METRICS, Predictions
from calibrant.metrics.classwise import ClassGaps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 6, 20, 20, generator=generator, dtype=torch.float64)
    target = torch.randint(6, (3, 20, 20), generator=generator)
    target[0, :5] = -100
    return logits, target


def assert_same(ours, theirs):
    for name in METRICS:
        first, second = getattr(ours, name), getattr(theirs, name)
        if first is None:
            assert second is None
        else:
            assert math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9), name
    assert ours.reliability.count == theirs.reliability.count
    assert ours.p_value == theirs.p_value
    assert ours.fingerprint == theirs.fingerprint
    assert ours.intervals.keys() == theirs.intervals.keys()
    for name, ends in ours.intervals.items():
        assert ends == pytest.approx(theirs.intervals[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("per_image", [False, True])
def test_exact(batch, per_image):
    logits, target = batch
    options = {
        "resamples": 50,
        "background": 0,
        "class_counts": [500, 200, 50, 30, 10, 2],
        "per_image": per_image,
    }
    on_gpu = evaluate(logits.cuda(), target.cuda(), **options)
    assert_same(evaluate(logits, target, **options), on_gpu)


def test_streamed(batch):
    logits, target = batch
    here, there = Evaluator(resamples=50), Evaluator(resamples=50)
    for image, labels in zip(logits.split(1), target.split(1), strict=True):
        here.update(image, labels)
        there.update(image.cuda(), labels.cuda())
    assert_same(here.compute(), there.compute())


def test_a_stream_may_change_its_device(batch):
    logits, target = batch
    mixed = Evaluator(resamples=0).update(logits, target).update(logits.cuda(), target.cuda())
    assert mixed.compute().samples == 2 * int((target != -100).sum())


def test_half_precision(batch):
    logits, target = batch
    half = logits.half()
    assert_same(evaluate(half, target, resamples=0), evaluate(half.cuda(), target.cuda(), resamples=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(200_000, 10), (2_000, 1_000), (100, 20_000), (4, 19, 200, 201)])
def test_the_kernels_find_what_torch_finds(shape, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(shape, generator=generator, device="cuda")).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator, device="cuda")
    target.view(-1)[::5] = -100
    ours, theirs = Predictions.of(logits, target), Predictions.of(logits.double(), target)
    assert torch.equal(ours.prediction, theirs.prediction)
    torch.testing.assert_close(ours.confidence.double(), theirs.confidence, rtol=1e-5, atol=0)
    for name in ("confidence", "log_likelihood", "squared_error"):
        found, wanted = getattr(ours, name).double().sum(), getattr(theirs, name).sum()
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    histogram = ConfidenceHistogram.of(ours.elements)
    assert histogram.samples == ours.samples
    assert histogram.correct.sum() == theirs.correct.sum()
    gaps, again = ClassGaps.of(ours.elements), ClassGaps.of(ours.elements)
    wanted = ClassGaps.of(theirs.elements)
    assert torch.equal(gaps.gap, again.gap)
    assert gaps.samples == wanted.samples
    # Summed over bins: what lies on an edge between two may change sides.
    torch.testing.assert_close(gaps.gap.sum(1), wanted.gap.sum(1), rtol=1e-5, atol=1e-3)
    assert (gaps.gap - wanted.gap).norm() <= 1e-2 * wanted.gap.norm()


def test_a_histogram_does_not_wait_for_the_device(batch):
    logits, target = (values.cuda() for values in batch)
    elements = arrange(logits.float(), target)
    ConfidenceHistogram.of(elements)  # warm up
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns of being a prototype
            torch.cuda.set_sync_debug_mode("error")
        ConfidenceHistogram.of(elements)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic_algorithms_suffice(batch):
    logits, target = (values.cuda() for values in batch)
    torch.use_deterministic_algorithms(True)
    try:
        found = evaluate(logits, target, resamples=20), evaluate(logits, target, resamples=20)
        streamed = Evaluator(resamples=20).update(logits, target).compute()
        ConfidenceHistogram.of(arrange(logits.float(), target))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(*found)
    assert streamed.samples == found[0].samples


def test_torchmetrics(batch):
    torchmetrics = pytest.importorskip("calibrant.integrations.torchmetrics")
    logits, target = batch
    for metric in (torchmetrics.CalibrationError(), torchmetrics.ClasswiseCalibrationError(6)):
        metric.update(logits, target)
        expected = float(metric.compute())
        metric = metric.to("cuda")
        metric.reset()
        metric.update(logits.cuda(), target.cuda())
        assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)
