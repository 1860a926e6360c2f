"""The files of a sweep: tables for papers, and the curves of its sensitivity."""

from __future__ import annotations

import os
from itertools import zip_longest

from calibrant.extras import require

require("report", "matplotlib", purpose=__name__)

from matplotlib.figure import Figure

from calibrant.atomic import replace_files
from calibrant.evaluation.comparison import MeanFigure
from calibrant.evaluation.criterion import Criterion
from calibrant.evaluation.sweep import Sweep, Value
from calibrant.reports import plots
from calibrant.reports.chosen import chosen_note, markdown, validation_note
from calibrant.reports.plots.drawing import LARGE, default_style, legend_of_figure, png, svg
from calibrant.reports.table_builders import comparison_table
from calibrant.reports.tables import tex, to_latex

FILES = ("sweep.json", "sweep.md", "sweep.tex", "plots/sensitivity.png", "plots/sensitivity.svg")
"""The files that `write_sweep` writes."""

_DRAWN = (Criterion("accuracy"), Criterion("nll"), Criterion("ece"), Criterion("adaptive_ece"))


def latex(sweep: Sweep) -> str:
    """The tables of a sweep in LaTeX, for the package booktabs."""
    validation, test = comparison_table(sweep.validation), comparison_table(sweep.test)
    return (
        f"% {tex(' '.join([validation_note(sweep), *sweep.remarks()]))}\n"
        f"{to_latex(validation, 'Setting')}\n\n"
        f"% {tex(chosen_note(sweep))}\n{to_latex(test, 'Loss')}\n"
    )


def curves(sweep: Sweep) -> Figure:
    """Validation figures against the first option, with a line for each combination of the others.

    Accuracy, NLL, ECE and adaptive ECE are drawn, and the criterion if it is none of these. A circle marks
    the chosen setting.
    """
    drawn = [*_DRAWN, *([] if sweep.criterion in _DRAWN else [sweep.criterion])]
    option, *others = sweep.options
    settings = sweep.settings
    lines = {
        name: ", ".join(f"{other}={values[other]}" for other in others) for name, values in settings.items()
    }
    rows = -(-len(drawn) // 2)
    legend = 0.2 + 0.08 * len(set(lines.values())) if others else 0.0  # inches, two entries in a row
    figure = Figure(figsize=(6.8, 2.2 * rows + legend), layout="constrained")
    figure.suptitle(f"{sweep.title} (validation data)", fontsize=LARGE, parse_math=False)
    panels = figure.subplots(rows, 2, squeeze=False).flatten().tolist()
    for criterion, ax in zip_longest(drawn, panels):
        by_line: dict[str, dict[Value, MeanFigure]] = {}
        for name, found in criterion.figures(sweep.validation).items() if criterion else ():
            by_line.setdefault(lines[name], {})[settings[name][option]] = found
        if not by_line:
            ax.set_axis_off()
            continue
        plots.sensitivity(
            by_line,
            ax,
            option=option,
            metric=criterion.metric,
            after=criterion.after,
            chosen=(lines[sweep.chosen], settings[sweep.chosen][option]),
            legend=False,
        )
    if others:
        legend_of_figure(figure, panels[0])
    return figure


def write_sweep(sweep: Sweep, folder: str | os.PathLike[str]) -> None:
    """Write ``sweep.json``, ``sweep.md``, ``sweep.tex``, and ``plots/sensitivity`` as PNG and SVG.

    The folder is created if necessary, and existing files are replaced.
    """
    with default_style():
        picture = curves(sweep)
        contents = (f"{sweep.to_json()}\n", markdown(sweep), latex(sweep), png(picture), svg(picture))
    replace_files(folder, dict(zip(FILES, contents, strict=True)))
