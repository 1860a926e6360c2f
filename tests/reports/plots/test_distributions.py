"""Histograms and ROC curves count every element once."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from calibrant.reports import plots
from tests.reports.plots.drawn import INFINITY, LOGITS, NAN, legend, line


@pytest.mark.parametrize("decimals", [0, 1, 9])  # with few, most scores are tied
def test_roc_curve_agrees_with_scikit_learn(decimals, ax):
    random = np.random.default_rng(decimals)
    inside, outside = random.normal(0, 1, 200).round(decimals), random.normal(1, 1, 150).round(decimals)
    plots.roc_curve({"score": (inside, torch.from_numpy(outside))}, ax)
    truth, scores = np.repeat([0, 1], [200, 150]), np.concatenate([inside, outside])
    false, true, _ = metrics.roc_curve(truth, scores, drop_intermediate=False)
    area = 100 * metrics.roc_auc_score(truth, scores)
    np.testing.assert_allclose(line(ax, f"score: {area:.2f}"), [100 * false, 100 * true])
    assert ax.get_legend().get_title().get_text() == "AUROC (%)"


@pytest.mark.parametrize(
    ("scores", "area"),
    [
        (([0.0], [1.0]), "100.00"),
        (([1.0], [0.0]), "0.00"),
        (([1.0], [1.0]), "50.00"),
        (([-INFINITY], [0.0]), "100.00"),
    ],
)
def test_roc_curve_of_two_scores(scores, area, ax):
    assert legend(plots.roc_curve({"score": scores}, ax)) == [f"score: {area}"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "got none"),
        (
            {"entropy": ([0.0], [])},
            r"out_scores of 'entropy' must have shape \(N,\), with nothing",
        ),
        (
            {"entropy": ([[0.0]], [0.0])},
            r"in_scores of 'entropy' must have shape \(N,\), got \(1, 1\)",
        ),
        ({"entropy": ([NAN], [0.0])}, "in_scores of 'entropy' must not be NaN"),
        ({"entropy": ([0.0],)}, r"must be \(in_scores, out_scores\), got 1 items"),
    ],
)
def test_roc_curve_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        plots.roc_curve(data)


def shares(ax):
    return [patch.get_data().values for patch in ax.patches if not patch.get_fill()]


def test_maximum_logits_share_their_bins(ax):
    data = {
        "a": torch.tensor([[0.0, -1.0], [0.0, -9.0], [1.0, 0.0], [4.0, 3.0]]),
        "b": torch.tensor([[-5.0, 3.5]]),
    }
    plots.maximum_logits(data, ax, bins=4)
    a, b = shares(ax)
    assert a.tolist() == [50, 25, 0, 25]
    assert b.tolist() == [0, 0, 0, 100]
    assert ax.patches[0].get_data().edges.tolist() == [0, 1, 2, 3, 4]
    assert legend(ax) == ["a", "b"]


def test_confidences_are_largest_probabilities(ax):
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.95, 0.05, 0.0], [1.0, 1.0, 1.0], [0.9, 0.05, 0.05]]).log()
    plots.confidences({"ce": logits.requires_grad_().clamp_min(-99).to(torch.bfloat16)}, ax, bins=4)
    assert shares(ax)[0].tolist() == [0, 25, 25, 50]
    assert ax.get_xlim() == (0, 1)


def test_pixels_count_as_elements(ax):
    logits = torch.randn(2, 5, 4, 3)
    plots.confidences({"pixels": logits, "rows": logits.movedim(1, -1).reshape(-1, 5)}, ax)
    pixels, rows = shares(ax)
    assert pixels.tolist() == rows.tolist()
    assert pixels.sum() == pytest.approx(100)


@pytest.mark.parametrize("picture", [plots.maximum_logits, plots.confidences])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data must be a mapping from name to logits, got none"),
        ({"ce": torch.zeros(3)}, r"data\['ce'\] must be a tensor of logits \(N, K, \*S\), got \(3,\)"),
        ({"ce": torch.zeros(0, 3)}, r"got \(0, 3\)"),
        ({"ce": [[1.0]]}, "got list"),
        ({"ce": torch.tensor([[NAN, 0.0]])}, r"data\['ce'\] must be finite"),
    ],
)
def test_histograms_refuse(picture, data, message):
    with pytest.raises(ValueError, match=message):
        picture(data)


@pytest.mark.parametrize("picture", [plots.maximum_logits, plots.confidences])
def test_histograms_need_a_bin(picture):
    with pytest.raises(ValueError, match="bins must be a whole number of at least 1, got 0"):
        picture(LOGITS, bins=0)


def test_a_mean_roc_curve_begins_at_the_origin(ax):
    plots.mean_roc_curve({"ce": ([0.3, 0.8, 1.0], 0.725)}, ax)
    np.testing.assert_allclose(line(ax, "ce: 72.50"), [[0, 0, 50, 100], [0, 30, 80, 100]])


def test_boxes_show_the_largest_probability_below_the_true_class(ax):
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.4, 0.35, 0.25], [0.6, 0.3, 0.1]])
    labels = torch.tensor([0, 1, 1, -100])  # 0.3, 0.1 and 0.25; the last one is ignored
    plots.lower_probabilities({"ce": (probabilities.log(), labels)}, ax)
    median = ax.lines[2].get_xdata()
    np.testing.assert_allclose(median, 0.25, atol=1e-6)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ce"]


def test_boxes_of_pixels_and_of_wrong_numbers_of_labels(ax):
    logits = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    plots.lower_probabilities({"ce": (logits, torch.zeros(4, 2, 2, dtype=torch.long))}, ax)
    for pair, error, message in (
        ((logits, torch.zeros(4, dtype=torch.long)), ValueError, r"data\['ce'\]: target must have shape"),
        ((logits, torch.full((4, 2, 2), 3)), ValueError, r"data\['ce'\]: target holds labels from 3 to 3"),
        ((logits, torch.full((4, 2, 2), -100)), ValueError, r"data\['ce'\] must have an element"),
        ((logits, torch.zeros(4, 2, 2)), TypeError, r"data\['ce'\]: target must hold"),
        (logits, TypeError, r"data\['ce'\] must be logits and labels, got Tensor"),
    ):
        with pytest.raises(error, match=message):
            plots.lower_probabilities({"ce": pair}, ax)


def test_boxes_of_many_classes_with_labels_in_8_bits(ax):
    logits = torch.randn(20, 200, generator=torch.Generator().manual_seed(0))
    labels = torch.full((20,), 156)
    plots.lower_probabilities({"int64": (logits, labels), "uint8": (logits, labels.to(torch.uint8))}, ax)
    first, second = (ax.lines[number].get_xdata() for number in (2, 5))
    np.testing.assert_array_equal(first, second)
