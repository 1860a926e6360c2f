"""Platt scaling against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn import functional as F

from calibrant.calibrators import Platt, logistic
from tests.calibrators.probabilities import overconfident, second


@pytest.mark.parametrize("samples", [20, 3000])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_binary_equals_scikit_learn(samples, scale):
    calibration = pytest.importorskip("sklearn.calibration")
    logits, target = overconfident(samples, 2)
    logits = logits * scale
    score = (logits[:, 1] - logits[:, 0]).numpy()
    sigmoid = calibration._SigmoidCalibration().fit(score, target.numpy())
    calibrator = Platt().fit(logits, target)
    expected = torch.from_numpy(sigmoid.predict(score))
    torch.testing.assert_close(second(calibrator(logits)), expected, rtol=0, atol=1e-4)
    assert calibrator.slopes[1].item() == pytest.approx(-sigmoid.a_, rel=1e-3)


def test_equals_a_calibrated_classifier_of_scikit_learn():
    calibration = pytest.importorskip("sklearn.calibration")
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.frozen import FrozenEstimator

    class Scores(ClassifierMixin, BaseEstimator):
        def fit(self, features, target):
            self.classes_ = np.unique(target)
            return self

        def decision_function(self, features):
            return features[:, 1] - features[:, 0]

        def predict(self, features):
            return self.classes_[(self.decision_function(features) > 0).astype(int)]

    logits, target = overconfident(1000, 2)
    scores = Scores().fit(logits.numpy(), target.numpy())
    peer = calibration.CalibratedClassifierCV(FrozenEstimator(scores), method="sigmoid", ensemble=False)
    peer.fit(logits.numpy(), target.numpy())
    expected = torch.from_numpy(peer.predict_proba(logits.numpy()))
    torch.testing.assert_close(Platt().fit(logits, target)(logits).exp(), expected, rtol=0, atol=1e-4)


def test_recovers_known_parameters():
    generator = torch.Generator().manual_seed(0)
    score = 3 * torch.randn(50_000, generator=generator, dtype=torch.float64)
    target = (torch.rand(50_000, generator=generator) < (0.5 * score - 1).sigmoid()).long()
    calibrator = Platt().fit(torch.stack([torch.zeros_like(score), score], 1), target)
    assert calibrator.slopes[1].item() == pytest.approx(0.5, abs=0.02)
    assert calibrator.intercepts[1].item() == pytest.approx(-1, abs=0.05)


def test_hard_targets_are_the_maximum_likelihood():
    logits, target = overconfident(500, 2)
    hard = Platt(smooth_targets=False).fit(logits, target)
    score = logits[:, 1] - logits[:, 0]
    residual = second(hard(logits)) - target
    assert abs(residual.sum()) < 1e-5
    assert abs((residual * score).sum()) < 1e-4
    assert hard.slopes[1] > Platt().fit(logits, target).slopes[1]


def test_logits_in_the_hundreds_reach_the_maximum_likelihood():
    score = torch.tensor([-1, 1, -1, 27, 96, -565], dtype=torch.float64)
    target = torch.tensor([1, 0, 0, 1, 1, 0])
    logits = torch.stack([torch.zeros_like(score), score], 1)
    calibrated = Platt(smooth_targets=False).fit(logits, target)(logits)
    assert F.nll_loss(calibrated, target, reduction="sum").item() == pytest.approx(2.0487, abs=1e-3)


def test_separable_data_stay_finite():
    score = torch.cat([torch.linspace(-2, -1, 20), torch.linspace(1, 2, 20)]).double()
    logits = torch.stack([torch.zeros_like(score), score], 1)
    target = (score > 0).long()
    smooth, hard = Platt().fit(logits, target), Platt(smooth_targets=False).fit(logits, target)
    assert 0 < smooth.slopes[1] < hard.slopes[1] < 100
    assert (second(hard(logits))[target == 1] > 1 - 1e-4).all()


@pytest.mark.parametrize(("features", "scale"), [(1, 1), (2, 0.001), (2, 1), (2, 1000)])
def test_every_regression_reaches_its_least_value(features, scale):
    generator = torch.Generator().manual_seed(0)
    score, stretch = torch.randn(2, 40, 17, generator=generator, dtype=torch.float64)
    score = scale * score * (2 * stretch).exp()  # a few far larger than the others
    target = (torch.rand(score.shape, generator=generator) < (score / scale).sigmoid()).double()
    parts = [score] if features == 1 else [F.logsigmoid(score), -F.logsigmoid(-score)]
    found = logistic.fit_logistic(torch.stack(parts, 1), target)[1]
    for row, outcome, value in zip(
        torch.stack(parts, 1).numpy(), target.numpy(), found.tolist(), strict=True
    ):
        standard = (row - row.mean(1, keepdims=True)) / row.std(1, keepdims=True)
        design = np.vstack([standard, np.ones(17)])

        def objective(weights, design=design, outcome=outcome):
            z = weights @ design
            fitted = np.exp(-np.logaddexp(0, -z))
            value = np.logaddexp(0, z).sum() - outcome @ z + 5e-7 * weights @ weights
            return value, design @ (fitted - outcome) + 1e-6 * weights

        best = minimize(objective, np.zeros(len(design)), jac=True, method="BFGS").fun
        assert value <= best + 1e-6


def test_a_fit_that_stops_early_warns(monkeypatch):
    monkeypatch.setattr(logistic, "_STEPS", 2)
    with pytest.warns(UserWarning, match="2 of 2 logistic regressions did not converge in 2 steps"):
        Platt().fit(*overconfident(500, 2))
