"""The plot of selective prediction: risk against coverage."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from calibrant.metrics import RiskCoverage
from calibrant.reports.plots import checks, drawing


def risk_coverage(
    data: Mapping[str, RiskCoverage], ax: Axes | None = None, *, title: str | None = None
) -> Axes:
    """Plot the error rate of the most confident elements against their share, with intervals as bands.

    Args:
        data: by method, the curve, such as `Evaluation.risk_coverage`.
        ax: the axes to draw on; None for a new figure.
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> curve = RiskCoverage((0.5, 1.0), (0.0, 0.2), ((0.0, 0.3), (0.1, 0.4)))
    >>> ax = risk_coverage({"ce": curve}, Figure().subplots())
    >>> ax.lines[0].get_ydata().tolist()
    [0.0, 20.0]
    """
    checks.check_filled(data, "a mapping from name to RiskCoverage")
    ax = drawing.given_or_new(ax, 2.3 + drawing.legend_height(data))
    for number, (name, curve) in enumerate(data.items()):
        coverage, risk = (
            100 * checks.array(f"{what} of {name!r}", values, "(points,)")
            for what, values in (("coverage", curve.coverage), ("risk", curve.risk))
        )
        ends = 100 * checks.array(f"interval of {name!r}", curve.interval, "(points, 2)")
        if not len(coverage) == len(risk) == len(ends):
            raise ValueError(
                f"the curve of {name!r} has {len(coverage)} coverages, {len(risk)} risks and "
                f"{len(ends)} intervals"
            )
        style = drawing.line_style(number)
        ax.plot(coverage, risk, label=name, linewidth=1.2, **style)
        ax.fill_between(coverage, *ends.T, color=style["color"], alpha=0.15, linewidth=0)
    # Intervals of the first few elements reach far up. They must not flatten the curves.
    highest = max(100 * max(curve.risk) for curve in data.values())
    ends_at_all = max(100 * curve.interval[-1][1] for curve in data.values())
    ax.set(xlim=(0, 100), ylim=(0, 1.15 * max(highest, ends_at_all, 0.1)))
    drawing.finish(ax, "Coverage (%)", "Risk: error rate (%)", title)
    return drawing.legend_below(ax) if len(data) > 1 else ax
