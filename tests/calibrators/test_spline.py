"""Spline calibration against known maps and SciPy's splines."""

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline

from calibrant.calibrators import spline
from calibrant.calibrators.spline import Spline, spline_slope
from tests.calibrators.probabilities import binary_logits, overconfident, second


@pytest.mark.parametrize("knots", [2, 3, 6, 10])
def test_slope_equals_scipy(knots):
    generator = np.random.default_rng(0)
    at = np.linspace(0, 1, 200)
    values = np.sin(5 * at) + generator.normal(size=200) / 10
    places = np.linspace(0, 1, knots)
    units = [CubicSpline(places, unit, bc_type="natural") for unit in np.eye(knots)]
    heights = np.linalg.lstsq(np.stack([unit(at) for unit in units], 1), values, rcond=None)[0]
    where = np.linspace(0, 1, 57)
    expected = sum(height * unit(where, 1) for height, unit in zip(heights, units, strict=True))
    actual = spline_slope(torch.from_numpy(at), torch.from_numpy(values), knots, torch.from_numpy(where))
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "true",
    [lambda s: s, lambda s: 0.75 * s + 0.1, lambda s: 0.5 + 2 * (s - 0.5) ** 2, lambda s: 1.45 - s],
    ids=["calibrated", "too confident", "curved", "falling"],
)
def test_recovers_a_known_map(true):
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.45 * torch.rand(100_000, generator=generator, dtype=torch.float64)
    target = (torch.rand(100_000, generator=generator) < true(confidence)).long()
    calibrator = Spline().fit(binary_logits(confidence), target)
    at = torch.linspace(0.51, 0.94, 50, dtype=torch.float64)
    expected = true(at).clamp_min(1 / 1.99)
    error = (second(calibrator(binary_logits(at))) - expected).abs()
    # A natural spline levels off at its ends, which costs most where the gap is steep.
    assert error.max() < 0.05
    assert error.mean() < 0.015


def test_interpolation_takes_the_nearer_neighbour_for_more():
    # Without noise: the map is known at two confidences, and a quarter of the way it is a quarter along.
    calibrator = Spline().fit(*overconfident(100, 2))
    calibrator.learn("points", torch.tensor([0.6, 0.8]))
    calibrator.learn("values", torch.tensor([0.5, 0.9]))
    at = torch.tensor([0.55, 0.6, 0.65, 0.75, 0.8, 0.99], dtype=torch.float64)
    expected = torch.tensor([1 / 1.99, 1 / 1.99, 0.6, 0.8, 0.9, 0.9], dtype=torch.float64)
    torch.testing.assert_close(second(calibrator(binary_logits(at))), expected, rtol=0, atol=1e-6)


def test_mean_confidence_becomes_the_accuracy():
    logits, target = overconfident(5000, 10)
    calibrated = Spline().fit(logits, target)(logits)
    accuracy = (logits.argmax(1) == target).double().mean()
    assert abs(calibrated.exp().amax(1).mean() - accuracy) < 0.01


def test_many_samples_are_thinned_without_a_trace(monkeypatch):
    logits, target = overconfident(60_000, 3)
    calibrator = Spline().fit(logits, target)
    assert len(calibrator.points) == 1 << 14
    some = overconfident(1000, 3, seed=1)[0]
    thinned = calibrator(some).exp()
    monkeypatch.setattr(spline, "_POINTS", 1 << 20)
    full = Spline().fit(logits, target)
    assert len(full.points) == 60_000
    assert (full(some).exp() - thinned).abs().max() < 2e-3
