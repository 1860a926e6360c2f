import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import dirichlet
from sklearn.metrics import log_loss

from calibrant.metrics import Predictions, brier, brier_split, kde_ece, nll, nll_split, root_brier, scores
from calibrant.metrics.scores import tempered_brier, tempered_nll

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())


def batch(seed, size, classes=4, rounded=False, dtype=torch.float64):
    """Labels drawn from the softmax of the logits, so that the best temperature is near 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * 2
    if rounded:
        logits = (logits * 2).round() / 2
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return logits.to(dtype), target


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def nll_by_numpy(logits, target):
    return -log_softmax(logits)[np.arange(len(target)), np.asarray(target)].mean()


def brier_by_numpy(logits, target):
    residual = np.exp(log_softmax(logits)) - np.eye(np.shape(logits)[1])[np.asarray(target)]
    return (residual**2).sum(1).mean()


def best(score, logits, target):
    """The best temperature by a grid, then by scipy within the best grid cell."""
    logits = logits.double().numpy()
    grid = np.linspace(math.log(1e-3), math.log(1e3), 100)
    values = [score(logits / math.exp(x), target) for x in grid]
    k = int(np.clip(np.argmin(values), 1, len(grid) - 2))
    found = minimize_scalar(
        lambda x: score(logits / math.exp(x), target),
        bounds=(grid[k - 1], grid[k + 1]),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(found.x), float(found.fun)


SPLITS = [(nll_split, nll, nll_by_numpy), (brier_split, brier, brier_by_numpy)]


@pytest.mark.parametrize(("metric", "name"), [(nll, "nll"), (brier, "brier")])
def test_golden(metric, name):
    logits, target = torch.tensor(GOLDEN["logits"], dtype=torch.float64), torch.tensor(GOLDEN["target"])
    expected = pytest.approx(GOLDEN[name], rel=0, abs=1e-9)
    assert metric(logits, target) == expected
    assert metric(Predictions.of(logits, target)) == expected
    # A mean over a stream is the sum of what its pieces hold.
    pieces = zip(logits.tensor_split(7), target.tensor_split(7), strict=True)
    assert sum(metric(*piece) * len(piece[0]) for piece in pieces) / 500 == expected


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("classes", [2, 30])
def test_equal_the_definitions(classes, rounded):
    logits, target = batch(classes, 300, classes, rounded)
    assert nll(logits, target) == pytest.approx(nll_by_numpy(logits, target), abs=1e-13)
    assert brier(logits, target) == pytest.approx(brier_by_numpy(logits, target), abs=1e-13)
    assert root_brier(logits, target) == pytest.approx(
        math.sqrt(brier_by_numpy(logits, target)), abs=1e-7 if classes == 1 else 1e-13
    )


def test_nll_equals_scikit_learn():
    logits, target = batch(0, 300)
    theirs = log_loss(target, logits.softmax(1), labels=range(4))
    assert nll(logits, target) == pytest.approx(theirs, abs=1e-12)


def test_certainty():
    logits = torch.tensor([[1e4, 0.0, 0.0]]).expand(4, 3)
    target = torch.tensor([0, 0, 0, 1])
    assert nll(logits, target) == 2_500
    assert brier(logits, target) == 0.5
    assert nll(logits, torch.zeros(4).long()) == 0
    assert root_brier(logits, torch.full((4,), 2)) == pytest.approx(math.sqrt(2))


def test_float32_is_summed_in_float64():
    logits, target = batch(1, 500_000, 2, dtype=torch.float32)
    assert nll(logits, target) == pytest.approx(nll(logits.double(), target), abs=2e-8)
    assert brier(logits, target) == pytest.approx(brier(logits.double(), target), abs=2e-8)


# ---------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(("split", "score", "by_numpy"), SPLITS)
@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 1.5, 5.0, 20.0])
@pytest.mark.parametrize("classes", [2, 6])
def test_split_equals_scipy(split, score, by_numpy, factor, classes):
    logits, target = batch(classes, 300, classes)
    logits = logits * factor
    ours = split(logits, target)
    temperature, refinement = best(by_numpy, logits, target)
    assert ours.refinement == pytest.approx(refinement, abs=1e-10)
    assert ours.temperature == pytest.approx(temperature, rel=2e-5)
    assert ours.refinement + ours.calibration == pytest.approx(score(logits, target), abs=1e-12)
    assert ours.calibration >= 0
    assert all(isinstance(value, float) for value in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.02, 0.3, 1.0, 7.0, 50.0])
@pytest.mark.parametrize("split", [nll_split, brier_split])
def test_multiplied_logits_multiply_the_temperature(split, factor, dtype):
    logits, target = batch(3, 2_000)
    before, after = split(logits, target), split((logits * factor).to(dtype), target)
    # A slope in float32 is good to about 1e-7 of a logit; a score is flat around its best temperature.
    tolerance = 1e-5 if dtype == torch.float64 else 1e-3
    assert after.temperature == pytest.approx(before.temperature * factor, rel=tolerance)
    assert after.refinement == pytest.approx(before.refinement, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(2, 6), st.floats(0.01, 30), st.booleans())
def test_split_adds_up(seed, size, classes, factor, random_labels):
    logits, target = batch(seed, size, classes)
    if random_labels:
        target = target.roll(1)
    logits = logits * factor
    for split, score, by_numpy in SPLITS:
        ours = split(logits, target)
        total = score(logits, target)
        assert ours.calibration >= 0
        assert ours.calibration + ours.refinement == pytest.approx(total, rel=1e-10, abs=1e-12)
        assert 1e-3 * (1 - 1e-9) <= ours.temperature <= 1e3 * (1 + 1e-9)
        at_temperature = by_numpy(logits.numpy() / ours.temperature, target)
        assert ours.refinement == pytest.approx(at_temperature, rel=1e-9, abs=1e-9)
        if split is nll_split:  # one valley only
            assert ours.refinement <= best(by_numpy, logits, target)[1] + 1e-9


def test_split_of_a_calibrated_model():
    logits, target = batch(4, 50_000)
    split = nll_split(logits, target)
    assert split.temperature == pytest.approx(1, abs=0.03)
    assert split.calibration < 1e-4
    assert brier_split(logits, target).calibration < 1e-4


def test_temperatures_at_the_ends():
    logits, _ = batch(5, 50)
    right, wrong = logits.argmax(1), logits.argmin(1)
    for split in (nll_split, brier_split):
        assert split(logits, right).temperature == pytest.approx(1e-3)
        assert split(logits, wrong).temperature == pytest.approx(1e3)
        assert split(torch.zeros(10, 3), torch.arange(10) % 3).temperature == 1
        assert split(torch.zeros(10, 3), torch.arange(10) % 3).calibration == 0


def test_blocks_make_no_difference(monkeypatch):
    logits, target = batch(6, 100)
    before = nll_split(logits, target), brier_split(logits, target)
    monkeypatch.setattr(scores, "_BLOCK", 37)
    after = nll_split(logits, target), brier_split(logits, target)
    np.testing.assert_allclose(before, after, rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_tempered_scores(temperature):
    logits, target = batch(7, 60)
    predictions = Predictions.of(logits, target)
    colder = logits.numpy() / temperature
    log_probability = log_softmax(colder)
    np.testing.assert_allclose(
        tempered_nll(predictions, temperature)[0], -log_probability[np.arange(60), target], atol=1e-12
    )
    residual = np.exp(log_probability) - np.eye(4)[target]
    np.testing.assert_allclose(
        tempered_brier(predictions, temperature)[0], (residual**2).sum(1), rtol=1e-10, atol=1e-13
    )


# ------------------------------------------------------------------------------------------------- KDE


def kde_by_loops(logits, target, bandwidth):
    probability = np.exp(log_softmax(logits))
    errors = []
    for j, s_j in enumerate(probability):
        above, below = np.zeros(probability.shape[1]), 0.0
        for i, s_i in enumerate(probability):
            if i != j:
                kernel = math.exp(dirichlet.logpdf(s_j / s_j.sum(), s_i / bandwidth + 1))
                above[target[i]] += kernel
                below += kernel
        errors.append(np.abs(above / below - s_j).sum())
    return errors


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("bandwidth", [0.01, 0.1, 1.0])
def test_kde_equals_loops(bandwidth, rounded):
    logits, target = batch(8, 30, 3, rounded)
    expected = kde_by_loops(logits, target, bandwidth)
    assert kde_ece(logits, target, bandwidth=bandwidth) == pytest.approx(np.mean(expected), abs=1e-10)


def test_kde_of_a_large_calibrated_and_a_sharpened_model():
    logits, target = batch(9, 2_000, 2)
    calibrated, sharpened = kde_ece(logits, target), kde_ece(logits * 3, target)
    assert calibrated < 0.1
    # Twice the mean gap of the two classes' probabilities.
    gap = 2 * ((logits * 3).softmax(1) - logits.softmax(1))[:, 0].abs().mean().item()
    assert sharpened == pytest.approx(gap, abs=0.05)


def test_kde_bandwidth_is_chosen_from_a_thousand(monkeypatch):
    seen = []

    def choose(rows):
        seen.append(len(rows))
        return 0.1

    monkeypatch.setattr(scores, "dirichlet_bandwidth", choose)
    for size in (2, 1_000, 1_001, 2_500):
        logits, target = batch(10, size, 2)
        assert kde_ece(logits, target) == kde_ece(logits, target, bandwidth=0.1)
    assert seen == [2, 1_000, 501, 834]


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan])
def test_kde_bandwidth_must_be_positive(bandwidth):
    with pytest.raises(ValueError, match="bandwidth"):
        kde_ece(*batch(0, 5), bandwidth=bandwidth)


def test_kde_needs_two():
    with pytest.raises(ValueError, match="two elements"):
        kde_ece(*batch(0, 1))
