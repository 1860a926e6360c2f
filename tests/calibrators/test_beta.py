"""Beta calibration against known parameters and a general optimiser."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from calibrant.calibrators import Beta
from calibrant.calibrators.one_vs_rest import log_probabilities
from tests.calibrators.probabilities import binary_logits, overconfident, second


def drawn(a, b, c, samples=50_000):
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(samples, generator=generator, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    true = (a * probability.log() - b * torch.log1p(-probability) + c).sigmoid()
    target = (torch.rand(samples, generator=generator, dtype=torch.float64) < true).long()
    return binary_logits(probability), target, true


@pytest.mark.parametrize("parameters", [(1.0, 1.0, 0.0), (0.5, 2.0, 0.7), (2.0, 0.3, -1.0)])
def test_recovers_known_parameters(parameters):
    a, b, c = parameters
    logits, target, true = drawn(a, b, c)
    calibrator = Beta().fit(logits, target)
    found = [*calibrator.slopes[1].tolist(), calibrator.intercepts[1].item()]
    assert found == pytest.approx(parameters, abs=0.1)
    assert (second(calibrator(logits)) - true).abs().max() < 0.02
    # The first class's map is the second's mirror image.
    assert calibrator.slopes[0].flip(0).tolist() == pytest.approx(found[:2], abs=1e-6)
    assert calibrator.intercepts[0].item() == pytest.approx(-found[2], abs=1e-6)


@pytest.mark.parametrize(
    "parameters", [(-0.5, 1.0, 0.0), (1.0, -0.5, 0.0), (-0.4, -0.4, 0.0), (-2.0, 0.5, 1)]
)
def test_slopes_are_never_negative_and_the_best_of_those(parameters):
    logits, target, _ = drawn(*parameters, samples=2000)
    calibrator = Beta().fit(logits, target)
    assert (calibrator.slopes >= 0).all()
    present, absent = log_probabilities(logits)
    design = torch.stack([present[:, 1], -absent[:, 1], torch.ones(2000)], 1).numpy()
    outcome = target.numpy()

    def objective(weights):
        z = design @ weights
        return np.logaddexp(0, z).sum() - outcome @ z, design.T @ (1 / (1 + np.exp(-z)) - outcome)

    best = minimize(
        objective, [1, 1, 0], jac=True, method="L-BFGS-B", bounds=[(0, None), (0, None), (None, None)]
    )
    found = torch.cat([calibrator.slopes[1], calibrator.intercepts[1:]]).numpy()
    assert objective(found)[0] <= best.fun + 1e-4
    assert found == pytest.approx(best.x, abs=0.01)


def test_calibrated_probabilities_stay():
    logits, target = overconfident(50_000, 3, sharpness=1.0)
    calibrated = Beta().fit(logits, target)(logits).exp()
    assert (calibrated - logits.softmax(1)).abs().mean() < 0.005


def test_predictions_near_certainty_are_told_apart():
    # Both probabilities round to 1; their complements do not.
    present, absent = log_probabilities(torch.tensor([[0.0, 40.0], [0.0, 50.0]]))
    torch.testing.assert_close(absent[:, 1], torch.tensor([-40.0, -50.0], dtype=torch.float64))
    torch.testing.assert_close(present[:, 0], torch.tensor([-40.0, -50.0], dtype=torch.float64))
