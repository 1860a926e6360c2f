"""Probabilities that trees, neighbours and rounding give: the last digits must not decide any metric."""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

import calibrant
from calibrant.layout import as_logits
from calibrant.metrics import METRICS, ece, mce


@cache
def votes(trees, size=600, classes=4):
    """How many trees vote for each class, ``(size, classes)``, and labels that are drawn accordingly."""
    generator = np.random.default_rng(trees)
    shares = generator.dirichlet(np.full(classes, 0.4), size)
    counts = np.array([generator.multinomial(trees, share) for share in shares])
    return counts, torch.tensor([generator.choice(classes, p=share) for share in shares])


def shifted(probabilities):
    """Logits of these probabilities, each element with a constant of its own, as networks have."""
    constants = torch.randn(len(probabilities), 1, generator=torch.Generator().manual_seed(0))
    return as_logits(probabilities) + 5 * constants.to(probabilities.dtype)


@pytest.mark.parametrize("trees", [5, 10, 15, 60])
@pytest.mark.parametrize("bins", [10, 15])
def test_binned_errors_are_those_of_fractions(trees, bins):
    counts, target = votes(trees)
    gaps, numbers = [0] * bins, [0] * bins  # the gaps in votes
    for row, label in zip(counts.tolist(), target.tolist(), strict=True):
        most = max(row)
        place = -(-most * bins // trees) - 1
        gaps[place] += most - trees * (row.index(most) == label)
        numbers[place] += 1
    wanted = float(Fraction(sum(map(abs, gaps)), trees * len(target)))
    fractions = [
        Fraction(abs(gap), trees * max(1, number)) for gap, number in zip(gaps, numbers, strict=True)
    ]
    for dtype in (torch.float32, torch.float64):
        logits = shifted(torch.tensor(counts / trees, dtype=dtype))
        evaluator = calibrant.Evaluator(4, bins=bins, resamples=0)
        evaluator.update(logits, target)
        assert ece(logits, target, bins=bins) == pytest.approx(wanted, abs=1e-6), dtype
        assert mce(logits, target, bins=bins) == pytest.approx(float(max(fractions)), abs=1e-6), dtype
        assert evaluator.compute().figures["ece"].value == pytest.approx(wanted, abs=1e-6), dtype


@pytest.mark.parametrize("trees", [5, 10, 15, 60])
def test_no_metric_depends_on_rounding(trees):
    counts, target = votes(trees)
    probabilities = torch.tensor(counts / trees)
    once, again = (
        calibrant.evaluate(logits, target, resamples=20, seed=1)
        for logits in (as_logits(probabilities), shifted(probabilities))
    )
    for name in METRICS:
        figures = [evaluation.figures[name] for evaluation in (once, again)]
        values, intervals = [each.value for each in figures], [each.interval for each in figures]
        assert values[0] == pytest.approx(values[1], abs=1e-7), name
        assert intervals[0] == pytest.approx(intervals[1], abs=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_wise_errors_do_not_depend_on_rounding_in_any_type(dtype):
    counts, target = votes(15)
    probabilities = torch.tensor(counts / 15, dtype=dtype)
    exact = calibrant.evaluate(as_logits(torch.tensor(counts / 15)), target, resamples=0)
    found = calibrant.evaluate(shifted(probabilities), target, resamples=0)
    for name in ("ece", "mce", "ece_l2", "classwise_ece", "classwise_mce"):
        assert found.figures[name].value == pytest.approx(exact.figures[name].value, abs=1e-6), name
