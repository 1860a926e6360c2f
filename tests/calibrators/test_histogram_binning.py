"""Histogram binning against counting by hand."""

import itertools

import torch

from calibrant.calibrators.histogram_binning import HistogramBinning
from calibrant.metrics import ece
from tests.calibrators.probabilities import overconfident


def by_hand(probability, outcome, edges, at):
    """Frequencies in bins ``(lo, hi]``, one bin and one number at a time."""
    answers = []
    for number in at.tolist():
        for lo, hi in itertools.pairwise(edges):
            if lo < number <= hi:
                inside = (probability > lo) & (probability <= hi)
                answers.append(outcome[inside].double().mean().item() if inside.any() else (lo + hi) / 2)
    return torch.tensor(answers, dtype=torch.float64)


def test_equal_width_equals_counting():
    logits, target = overconfident(400, 3)
    other = overconfident(100, 3, seed=1)[0]
    before, at = logits.softmax(1), other.softmax(1)
    edges = [i / 15 for i in range(16)]
    expected = torch.stack([by_hand(before[:, k], target == k, edges, at[:, k]) for k in range(3)], 1)
    total = expected.sum(1, keepdim=True)
    expected = torch.where(total > 0, expected / total, at)
    torch.testing.assert_close(
        HistogramBinning().fit(logits, target)(other).exp(), expected, rtol=0, atol=1e-9
    )


def test_equal_mass_bins_hold_the_same_number():
    logits, target = overconfident(400, 3)
    calibrator = HistogramBinning(bins=7, binning="equal-mass").fit(logits, target)
    for k in range(3):
        counts = torch.bucketize(logits.softmax(1)[:, k].contiguous(), calibrator.edges[k]).bincount(
            minlength=7
        )
        assert counts.max() - counts.min() <= 1


def test_top_label_is_calibrated_on_its_own_data():
    logits, target = overconfident(2000, 5)
    for binning in ("equal-width", "equal-mass"):
        calibrated = HistogramBinning(variant="top-label", binning=binning).fit(logits, target)(logits)
        assert ece(calibrated, target) < 1e-3
        assert (calibrated.argmax(1) == logits.argmax(1)).all()


def test_empty_bins_take_their_centre():
    logits = torch.tensor([[0.05, 0.95], [0.05, 0.95]]).log()
    calibrator = HistogramBinning(bins=4).fit(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(
        calibrator.frequencies,
        torch.tensor([[0.5, 0.375, 0.625, 0.875], [0.125, 0.375, 0.625, 0.5]], dtype=torch.float64),
    )


def test_a_single_bin_gives_the_class_frequencies():
    logits, target = overconfident(300, 4)
    calibrated = HistogramBinning(bins=1).fit(logits, target)(logits).exp()
    expected = (target.bincount(minlength=4) / 300).double().expand_as(calibrated)
    torch.testing.assert_close(calibrated, expected)
