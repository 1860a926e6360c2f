"""Bayesian binning against a direct implementation, one bin at a time."""

import math

import numpy as np
import pytest
import torch

from calibrant.calibrators.bayesian_binning import BayesianBinning, numbers_of_bins
from tests.calibrators.probabilities import overconfident


def direct(probability, outcome, numbers, at, prior=2.0):
    """The paper's formulas in loops: the average of histograms, weighed by their marginal likelihood."""
    order = np.argsort(probability, kind="stable")
    s, y = probability[order], outcome[order]
    n = len(s)
    scores, answers = [], []
    for bins in numbers:
        cuts = []
        for i in range(1, bins):
            cut = i * n // bins
            while 0 < cut < n and s[cut] == s[cut - 1]:
                cut += 1
            if 0 < cut < n and cut not in cuts:
                cuts.append(cut)
        edges = [0.0, *((s[cut - 1] + s[cut]) / 2 for cut in cuts), 1.0]
        strength = prior / (len(edges) - 1)
        log_score, values = 0.0, []
        for lo, hi, start, end in zip(edges[:-1], edges[1:], [0, *cuts], [*cuts, n], strict=True):
            count, success = end - start, y[start:end].sum()
            alpha, beta = strength * (lo + hi) / 2, strength * (1 - (lo + hi) / 2)
            log_score += math.lgamma(strength) - math.lgamma(count + strength)
            log_score += math.lgamma(success + alpha) - math.lgamma(alpha)
            log_score += math.lgamma(count - success + beta) - math.lgamma(beta)
            values.append((success + alpha) / (count + strength))
        scores.append(log_score)
        answers.append([values[np.searchsorted(edges[1:-1], number)] for number in at])
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    weights[weights < 1e-4] = 0
    return weights @ np.array(answers) / weights.sum()


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_equals_the_direct_implementation(rounded):
    logits, target = overconfident(300, 3)
    other = overconfident(100, 3, seed=1)[0]
    if rounded:
        logits, other = (logits / 4).round() * 4, (other / 4).round() * 4
    before, at = logits.softmax(1), other.softmax(1)
    numbers = numbers_of_bins(300)
    assert (numbers[0], numbers[-1]) == (1, 60)
    maps = [direct(before[:, k].numpy(), (target == k).numpy(), numbers, at[:, k].numpy()) for k in range(3)]
    expected = torch.from_numpy(np.stack(maps, 1))
    expected = expected / expected.sum(1, keepdim=True)
    actual = BayesianBinning().fit(logits, target)(other).exp()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_the_range_of_the_paper():
    numbers = numbers_of_bins(1_000_000)
    assert (numbers[0], numbers[-1]) == (10, 1000)
    assert list(numbers_of_bins(1)) == [1]


def test_more_bins_than_samples():
    logits, target = overconfident(5, 3)
    calibrated = BayesianBinning(bins=[1, 7, 30]).fit(logits, target)(logits)
    torch.testing.assert_close(calibrated.exp().sum(1), torch.ones(5, dtype=torch.float64))


def test_recovers_a_known_map():
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(20_000, generator=generator, dtype=torch.float64)
    target = (torch.rand(20_000, generator=generator) < probability**2).long()
    logits = torch.stack([(1 - probability).log(), probability.log()], 1)
    calibrated = BayesianBinning().fit(logits, target)(logits).exp()[:, 1]
    assert (calibrated - probability**2).abs().mean() < 0.02
