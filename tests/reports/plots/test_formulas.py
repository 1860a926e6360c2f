import numpy as np
from matplotlib.figure import Figure

from calibrant.reports import plots
from tests.reports.plots.drawn import legend, line


def at(ax, label, place):
    x, y = line(ax, label)
    return y[np.abs(x - place).argmin()]


def test_losses_are_those_of_the_papers(ax):
    plots.focal_losses(ax)
    p = 0.4
    p = line(ax, "CE")[0][np.abs(line(ax, "CE")[0] - p).argmin()]
    assert np.isclose(at(ax, "CE", p), -np.log(p))
    assert np.isclose(at(ax, "FL-3", p), -((1 - p) ** 3) * np.log(p))
    assert np.isclose(at(ax, "InvFL-2", p), -((1 + p) ** 2) * np.log(p))
    for rate in (1, 10, 100):
        gamma = np.exp(rate * (p - 0.8))
        assert np.isclose(at(ax, f"CF-{rate}", p), -((1 - p) ** gamma) * np.log(p))


def test_exponents_are_those_of_the_papers(ax):
    plots.exponents(ax)
    assert [at(ax, "FLSD-53", p) for p in (0.1, 0.3, 0.9)] == [5, 3, 3]
    x, y = line(ax, "CF-10")
    np.testing.assert_allclose(y, np.exp(10 * (x - 0.8)))


def test_phi_is_that_of_the_paper(ax):
    """φ(v) = (1 - v + q)^γ - γ (1 - v + q)^(γ-1) v log v for a fixed q."""
    plots.dual_focal_phi(ax, gamma=2, lower=0.25)
    for label, q in (("Focal", 0.0), ("Dual focal, q = 0.25", 0.25)):
        v, phi = line(ax, label)
        np.testing.assert_allclose(phi, (1 - v + q) ** 2 - 2 * (1 - v + q) * v * np.log(v), atol=1e-9)


def test_penalties_for_several_weights(ax):
    plots.penalty_weights([(1.0, 4.0)], ax)
    z, value = line(ax, "λ = 1, ρ = 4")
    expected = np.where(1 + 4 * z >= 0, z + 2 * z**2, -1 / 8)  # PHR
    np.testing.assert_allclose(value, expected, atol=1e-12)


def test_lines_that_are_not_curves_are_explained(ax):
    assert legend(plots.focal_losses(Figure().subplots(), accuracy=0.7))[-1] == "Accuracy 0.7"
    assert legend(plots.exponents(Figure().subplots()))[-1] == "Accuracy 0.8"
    assert legend(plots.dual_focal_phi(ax))[-1] == "Maximum of φ: over-confident to its left"
