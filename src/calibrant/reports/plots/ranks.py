"""A plot of mean ranks over data sets, with their critical difference."""

from __future__ import annotations

from matplotlib.axes import Axes

from calibrant.evaluation.ranks import Ranks
from calibrant.reports.plots import drawing
from calibrant.reports.plots.drawing import BLUE


def mean_ranks(ranks: Ranks, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Plot the mean rank of every method with its 95 % interval, the best at the top.

    A bar at the right connects methods that do not differ significantly (Nemenyi's test at 5 %).

    Args:
        ranks: the ranks.
        ax: the axes to draw on; None for a new figure.
        title: the title.

    >>> from matplotlib.figure import Figure
    >>> from calibrant.evaluation.ranks import rank_methods
    >>> values = {name: {"ce": [0.2], "ls": [0.1]} for name in ("digits", "cifar10")}
    >>> ax = mean_ranks(rank_methods(values, higher_is_better=False), Figure().subplots())
    >>> [label.get_text() for label in ax.get_yticklabels()]
    ['ls', 'ce']
    """
    names = list(ranks.mean)
    ax = drawing.given_or_new(ax, 1.3 + drawing.rows_height(names))
    for row, name in enumerate(names):
        ax.plot(ranks.intervals[name], [row, row], color=BLUE, linewidth=1.0)
        ax.plot(ranks.mean[name], row, "o", color=BLUE, markersize=4.5)
    for number, group in enumerate(ranks.groups()):
        if len(group) > 1:
            place = len(names) + 0.6 + 0.35 * number
            rows = [names.index(group[0]) - 0.25, names.index(group[-1]) + 0.25]
            ax.plot([place, place], rows, color="#555555", linewidth=2.5, solid_capstyle="butt")
    drawing.name_rows(ax, names)
    ax.set_xlim(left=0.5)
    ax.set_xticks([1, *(tick for tick in ax.get_xticks() if 1 < tick <= len(names) and tick == int(tick))])
    ax.grid(axis="x", linewidth=0.3, color="#CCCCCC")
    ax.set_axisbelow(True)
    data = f"{len(ranks.data)} data sets" if len(ranks.data) > 1 else ranks.data[0]
    return drawing.finish(ax, f"Mean rank over {data} (1 is best)", "", title)
