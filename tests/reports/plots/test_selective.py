import numpy as np
import pytest

from calibrant.metrics import RiskCoverage
from calibrant.reports import plots
from tests.reports.plots.drawn import curve, legend


def test_lines_and_bands_are_the_numbers_in_percent(ax):
    data = {"ce": curve(), "half": RiskCoverage((0.5, 1.0), (0.0, 0.2), ((0.0, 0.3), (0.1, 0.4)))}
    plots.risk_coverage(data, ax)
    assert legend(ax) == list(data)
    for line, band, each in zip(ax.lines, ax.collections, data.values(), strict=True):
        np.testing.assert_allclose(line.get_xdata(), 100 * np.array(each.coverage))
        np.testing.assert_allclose(line.get_ydata(), 100 * np.array(each.risk))
        corners = {tuple(point) for point in np.round(band.get_paths()[0].vertices, 6)}
        for coverage, ends in zip(each.coverage, each.interval, strict=True):
            assert {(round(100 * coverage, 6), round(100 * end, 6)) for end in ends} <= corners


def test_wide_intervals_of_few_elements_do_not_flatten_the_curves(ax):
    plots.risk_coverage({"ce": curve()}, ax)
    assert ax.get_ylim()[1] < 60  # the first interval reaches higher
    assert 100 * curve().interval[0][1] > ax.get_ylim()[1] / 2


def test_curves_that_do_not_fit_are_refused(ax):
    with pytest.raises(ValueError, match="RiskCoverage"):
        plots.risk_coverage({}, ax)
    with pytest.raises(ValueError, match="has 2 coverages, 1 risks and 2 intervals"):
        plots.risk_coverage({"ce": RiskCoverage((0.5, 1.0), (0.0,), ((0.0, 0.3), (0.1, 0.4)))}, ax)
