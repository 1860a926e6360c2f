import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrant import layout
from calibrant.histogram import ConfidenceHistogram
from calibrant.layout import arrange
from calibrant.metrics import Predictions
from calibrant.metrics.predictions import as_predictions
from tests.metrics.test_calibration import shared


def batch(seed, size, classes=5, spread=2.0, rounded=False):
    """Random logits; rounded ones, as float16 gives them, tie within and between elements."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * spread
    target = torch.randint(classes, (size,), generator=generator)
    return (logits * 2).round() / 2 if rounded else logits, target


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    exponential = np.exp(logits - logits.max(1, keepdims=True))
    return exponential / exponential.sum(1, keepdims=True)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("classes", [2, 5, 100])
def test_equals_the_definitions(classes, rounded):
    logits, target = batch(1, 300, classes, rounded=rounded)
    predictions = Predictions.of(logits, target)
    probability, label = softmax(logits), np.asarray(target)
    np.testing.assert_array_equal(predictions.prediction, logits.numpy().argmax(1))
    np.testing.assert_array_equal(predictions.label, label)
    np.testing.assert_array_equal(predictions.correct, logits.numpy().argmax(1) == label)
    np.testing.assert_allclose(predictions.confidence, probability.max(1), rtol=1e-13)
    likelihood = probability[np.arange(300), label]
    np.testing.assert_allclose(predictions.log_likelihood, np.log(likelihood), rtol=1e-11, atol=1e-13)
    error = ((probability - np.eye(classes)[label]) ** 2).sum(1)
    np.testing.assert_allclose(predictions.squared_error, error, rtol=1e-11, atol=1e-15)
    assert (predictions.samples, predictions.num_classes) == (300, classes)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("ignored", [False, True])
def test_images_give_their_pixels_in_order(memory_format, ignored):
    rows, label = batch(2, 3 * 5 * 7, rounded=True)
    images = rows.view(3, 5, 7, 5).permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    if ignored:
        label[::3] = 255
    kept = label != 255
    of_images = Predictions.of(images, label.view(3, 5, 7), ignore_index=255)
    of_rows = Predictions.of(rows[kept], label[kept])
    torch.testing.assert_close(of_images.rows, of_rows.rows, rtol=0, atol=0)
    for name in ("label", "prediction", "correct"):
        assert torch.equal(getattr(of_images, name), getattr(of_rows, name))
    for name in ("confidence", "log_likelihood", "squared_error"):
        torch.testing.assert_close(getattr(of_images, name), getattr(of_rows, name), rtol=1e-13, atol=1e-15)


def test_blocks_make_no_difference(monkeypatch):
    rows, label = batch(3, 4 * 6 * 7)
    images = rows.view(4, 6, 7, 5).permute(0, 3, 1, 2).contiguous()
    whole = Predictions.of(images, label.view(4, 6, 7))
    monkeypatch.setattr(layout, "_CPU_BLOCK", 64)
    cut = Predictions.of(images, label.view(4, 6, 7))
    for name in ("label", "prediction", "confidence", "log_likelihood", "squared_error"):
        torch.testing.assert_close(getattr(whole, name), getattr(cut, name), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("given", "computed"), [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")]
)
def test_computing_type(given, computed):
    logits, target = batch(4, 50)
    predictions = Predictions.of(logits.to(getattr(torch, given)), target)
    assert predictions.rows.dtype == predictions.confidence.dtype == getattr(torch, computed)


def test_order_is_stable():
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 1.0], [2.0, 0.0]])
    assert Predictions.of(logits, torch.zeros(5).long()).order.tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("bins", [1, 2, 7, 15, 300])
@pytest.mark.parametrize("size", [1, 14, 15, 16, 1_000])
def test_equal_mass_bins(bins, size):
    predictions = Predictions.of(*batch(size, size, rounded=True))
    pooled = predictions.equal_mass(bins)
    order = np.argsort(predictions.confidence.numpy(), kind="stable")
    groups = np.array_split(order, bins)
    confidence = predictions.confidence.numpy()
    correct = shared(confidence, predictions.correct.numpy())
    assert pooled.count.tolist() == [len(group) for group in groups]
    np.testing.assert_allclose(pooled.confidence, [confidence[g].sum() for g in groups], atol=1e-12)
    np.testing.assert_allclose(pooled.correct, [correct[g].sum() for g in groups], atol=1e-12)
    assert (pooled.edges.diff() >= 0).all()
    assert pooled.edges[0] == confidence.min()
    assert pooled.edges[-1] == confidence.max()


@pytest.mark.parametrize("bins", [1, 7, 15, 64])
def test_equal_width_bins(bins):
    logits, target = batch(5, 500, 3)
    logits[:20] = 0  # a confidence of 1/3 lies on an edge of 15 bins, up to rounding
    logits[20:40] = torch.tensor([1e4, 0, 0])  # and one of 1 on the last
    predictions = Predictions.of(logits, target)
    pooled = predictions.equal_width(bins)
    confidence, correct = predictions.confidence.numpy(), predictions.correct.numpy()
    assert pooled.count.sum() == 500
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        assert pooled.count[b] == inside.sum()
        assert pooled.correct[b] == correct[inside].sum()
        assert pooled.confidence[b] == pytest.approx(confidence[inside].sum(), abs=1e-11)


@pytest.mark.parametrize("bins", [0, -1])
def test_no_bins(bins):
    predictions = Predictions.of(*batch(6, 10))
    with pytest.raises(ValueError, match="at least 1"):
        predictions.equal_width(bins)
    with pytest.raises(ValueError, match="at least 1"):
        predictions.equal_mass(bins)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 100), st.sampled_from([1, 2, 16, 1024]))
def test_residual_keeps_sum_and_first_moment(seed, size, cells):
    predictions = Predictions.of(*batch(seed, size, rounded=bool(seed % 2)))
    residual = predictions.residual(cells)
    gap = predictions.correct.double() - predictions.confidence
    assert residual.shape == (cells,)
    assert residual.sum().item() == pytest.approx(gap.mean().item(), abs=1e-12)
    # Linear sharing keeps the centre of mass where a position has a cell on either side.
    inner = (predictions.confidence >= 0.5 / cells) & (predictions.confidence <= 1 - 0.5 / cells)
    if bool(inner.all()):
        centres = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        moment = (gap * predictions.confidence).mean().item()
        assert (residual * centres).sum().item() == pytest.approx(moment, abs=1e-12)


def test_histogram_is_that_of_a_stream():
    logits, target = batch(7, 500)
    ours, streamed = Predictions.of(logits, target).histogram, ConfidenceHistogram.of(arrange(logits, target))
    for left, right in zip(ours.tensors(), streamed.tensors(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


def test_elements_may_be_empty_but_a_data_set_may_not():
    empty = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    assert Predictions.of_elements(arrange(*empty)).samples == 0
    with pytest.raises(ValueError, match=r"nothing to evaluate.*\(0, 3\)"):
        Predictions.of(*empty)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        Predictions.of(torch.randn(4, 3), torch.full((4,), -100))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(value):
    logits, target = batch(8, 10)
    logits[3, 2] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        Predictions.of(logits, target)
    target[3] = -100
    assert Predictions.of(logits, target).samples == 9


def test_as_predictions():
    logits, target = batch(9, 10)
    predictions = Predictions.of(logits, target)
    assert as_predictions(predictions, None, -100) is predictions
    assert torch.equal(as_predictions(logits, target, -100).confidence, predictions.confidence)
    with pytest.raises(TypeError, match="target"):
        as_predictions(logits, None, -100)
    with pytest.raises(TypeError, match="already"):
        as_predictions(predictions, target, -100)


def test_no_gradient_is_kept():
    logits, target = batch(10, 10)
    assert not Predictions.of(logits.requires_grad_(), target).confidence.requires_grad
