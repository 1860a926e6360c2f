"""The files and tables of a choice on the validation data, which a sweep or a tuning has made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from calibrant.extras import require

require("report", "matplotlib", purpose=__name__)

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from calibrant.atomic import replace_files
from calibrant.evaluation.chosen import Sweep, Trial, Tuning, Value
from calibrant.evaluation.comparison import MeanFigure
from calibrant.evaluation.criterion import Criterion
from calibrant.printable import printable
from calibrant.reports import plots
from calibrant.reports.page import Summary, write_report
from calibrant.reports.plots import checks, drawing
from calibrant.reports.table_builders import comparison_table, figures_note
from calibrant.reports.tables import (
    BEST_IN_BOLD,
    means_in_markdown,
    plain_markdown,
    print_table,
    tex,
    to_latex,
    to_markdown,
)

SWEEP_FILES = ("sweep.json", "sweep.md", "sweep.tex", "plots/sensitivity.png", "plots/sensitivity.svg")
"""The files that `write_sweep` writes."""

_CAPTIONS = {
    "history": "Trials in their order, and the best value so far; trials without a final value at the top",
    "values": "Trials against each hyper-parameter; trials without a final value at the top",
    "epochs": "Trials after each epoch; a cross is where a trial was stopped early",
}

TUNING_FILES = ("tune.json", "tune.md", "tune.html", *(f"plots/tune-{name}.png" for name in _CAPTIONS))
"""The files that `write_tuning` writes; the last one only if training logs the criterion after each epoch."""

Chosen = Sweep | Tuning


def validation_note(result: Chosen) -> str:
    """What the figures on the validation data mean."""
    note = figures_note(result.validation, "Validation data", "the same data")
    best = f" {BEST_IN_BOLD}" if len(result.validation.methods) > 1 else ""
    return f"{note} So figures after a calibrator are optimistic.{best}"


def chosen_note(result: Chosen) -> str:
    """What the test figures of the chosen setting mean."""
    note = figures_note(result.test, "Test data", "the validation data")
    return f"{note} Only the chosen setting was evaluated on the test data."


def markdown(result: Chosen) -> str:
    """The tables in Markdown."""
    validation, test = comparison_table(result.validation), comparison_table(result.test)
    lines = [f"# {plain_markdown(result.title)}", "", "## Validation data", ""]
    lines += [to_markdown(validation, "setting"), "", plain_markdown(validation_note(result)), ""]
    lines += [*(f"- {plain_markdown(remark)}" for remark in result.remarks()), ""]
    lines += ["## Test data", "", *means_in_markdown(test, chosen_note(result), "loss")]
    return "\n".join(lines)


def print_choice(result: Chosen, *, wide: bool = False) -> None:
    """Print the figures on the validation data, how the choice was made, and its test figures.

    ``wide`` prints all columns, however wide the terminal is.
    """
    leading = result.criterion.metric
    print_table(comparison_table(result.validation, leading), validation_note(result), wide=wide)
    for remark in result.remarks():
        print(printable(remark), flush=True)
    test = comparison_table(result.test, leading)
    print_table(test, f"{chosen_note(result)} {test.intervals_note}".rstrip(), wide=wide)


# ---------------------------------------------------------------------------------------------------- a sweep


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
    figure.suptitle(f"{sweep.title} (validation data)", fontsize=drawing.LARGE, parse_math=False)
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
        drawing.legend_of_figure(figure, panels[0])
    return figure


def write_sweep(sweep: Sweep, folder: str | os.PathLike[str]) -> None:
    """Write ``sweep.json``, ``sweep.md``, ``sweep.tex``, and ``plots/sensitivity`` as PNG and SVG.

    The folder is created if necessary, and existing files are replaced.
    """
    with drawing.default_style():
        picture = curves(sweep)
        images = drawing.png(picture), drawing.svg(picture)
    contents = (f"{sweep.to_json()}\n", markdown(sweep), latex(sweep), *images)
    replace_files(folder, dict(zip(SWEEP_FILES, contents, strict=True)))


# --------------------------------------------------------------------------------------------------- a tuning


_LOOKS: dict[str, dict[str, Any]] = {
    "finished": {"color": drawing.BLUE, "marker": "o", "markersize": 3.5},
    "not tuned": {"color": drawing.VERMILLION, "marker": "D", "markersize": 4.5},
    "chosen": {"color": "black", "marker": "o", "markersize": 9, "fillstyle": "none", "markeredgewidth": 0.9},
    "stopped early": {"color": drawing.GREY, "marker": "x", "markersize": 4},
    "failed": {"color": "black", "marker": "+", "markersize": 6},
}
"""The points of trials, by what the legend calls them."""

_TOP = 0.97  # of the height of the axes


def history(tuning: Tuning) -> Figure:
    """The value of every trial by its number, with the best value so far as a line."""
    label, scale = _axis(tuning)
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    ax = figure.subplots()
    best = tuning.best_so_far()
    last = tuning.trials[-1].number
    steps = {**best, last: list(best.values())[-1]}
    heights = [scale * value for value in steps.values()]
    ax.step(list(steps), heights, where="post", color=drawing.BLUE, linewidth=1.2, label="best so far")
    _points(ax, tuning, {trial.number: float(trial.number) for trial in tuning.trials}, scale)
    drawing.finish(ax, "Trial", label, None, whole=True)
    drawing.legend_below(ax)
    return figure


def values(tuning: Tuning) -> Figure:
    """The value of every trial against each hyper-parameter, in a panel of its own."""
    label, scale = _axis(tuning)
    across = len(tuning.space)
    figure = Figure(figsize=(max(4.2, 2.4 * across), 3.2), layout="constrained")
    panels = figure.subplots(1, across, squeeze=False, sharey=True)[0].tolist()
    for ax, (name, low, high, log) in zip(panels, tuning.space, strict=True):
        if log:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _points(ax, tuning, {trial.number: trial.values[name] for trial in tuning.trials}, scale)
        edge = 0.0 if log else 0.04 * (high - low)
        ax.set_xlim((low / 1.15, high * 1.15) if log else (low - edge, high + edge))
        drawing.finish(ax, name, label if ax is panels[0] else "", None)
    drawing.legend_of_figure(figure, panels[0])
    return figure


def epochs(tuning: Tuning) -> Figure:
    """The value of every trial after each epoch. Trials that were stopped early end in a cross."""
    label, scale = _axis(tuning)
    figure = Figure(figsize=(4.2, 3.4), layout="constrained")
    ax = figure.subplots()
    chosen = tuning.chosen_trial
    for trial in sorted(tuning.trials, key=lambda trial: (trial == chosen, trial.number == 0)):
        curve = [scale * value for value in trial.epochs]
        if not curve:
            continue
        style: dict[str, Any] = {"color": drawing.PALE, "linewidth": 0.8, "label": "finished"}
        if trial.outcome == "stopped":
            style |= {"linestyle": "--", "label": "stopped early"}
            ax.plot(len(curve), curve[-1], linestyle="none", **_LOOKS["stopped early"])
        if trial.number == 0:
            style |= {"color": drawing.VERMILLION, "linewidth": 1.2, "label": "not tuned"}
        if trial == chosen:
            style |= {"color": drawing.BLUE, "linewidth": 1.8, "label": f"chosen (trial {trial.number})"}
        ax.plot(range(1, len(curve) + 1), curve, **style)
    drawing.finish(ax, "Epoch", label, None, whole=True)
    handles = {str(line.get_label()): line for line in ax.lines if not str(line.get_label()).startswith("_")}
    drawing.legend_below(ax, list(handles.values()))
    return figure


def _axis(tuning: Tuning) -> tuple[str, int]:
    """The label of the criterion's axis, and the factor of its values."""
    label, scale = checks.metric_axis(tuning.criterion.metric)
    after = ", after temperature scaling" if tuning.criterion.after else ""
    return f"Validation {label}{after}", scale


def _points(ax: Axes, tuning: Tuning, places: Mapping[int, float], scale: float) -> None:
    """Draw the values of the trials at these places, and those without a value at the upper edge."""

    def draw(label: str, trials: Iterable[Trial], **options: Any) -> None:
        found = [(places[each.number], _TOP if each.value is None else scale * each.value) for each in trials]
        if found:
            ax.plot(*zip(*found, strict=True), label=label, linestyle="none", **_LOOKS[label], **options)

    trials = tuning.trials
    draw("finished", (each for each in trials if each.outcome == "finished" and each.number))
    draw("not tuned", (each for each in trials if each.number == 0 and each.value is not None))
    draw("chosen", [tuning.chosen_trial])
    upper = ax.get_xaxis_transform()  # heights from 0 to 1
    draw("stopped early", (each for each in trials if each.outcome == "stopped"), transform=upper)
    draw("failed", (each for each in trials if each.outcome == "failed"), transform=upper)
    ax.margins(y=0.15)
    drawing.add_grid(ax)


def write_tuning(tuning: Tuning, folder: str | os.PathLike[str]) -> None:
    """Write ``tune.json``, ``tune.md``, ``plots/tune-*.png`` and ``tune.html``.

    The folder is created if necessary, and existing files are replaced.
    """
    with drawing.default_style():
        drawn = {"history": history(tuning), "values": values(tuning)}
        if any(trial.epochs for trial in tuning.trials):
            drawn["epochs"] = epochs(tuning)
        images = {f"plots/tune-{name}.png": drawing.png(figure) for name, figure in drawn.items()}
        pictures = [(_CAPTIONS[name], drawing.svg(figure)) for name, figure in drawn.items()]
    replace_files(folder, {"tune.json": f"{tuning.to_json()}\n", "tune.md": markdown(tuning), **images})
    (tested,) = tuning.test.methods
    summary = Summary(
        "Trials",
        " ".join([*tuning.remarks(), validation_note(tuning), chosen_note(tuning)]),
        comparison_table(tuning.validation),
        tuning.test,
        pictures,
        [("The chosen loss on the test data", comparison_table(tuning.test))],
        pictured="the history of the trials",
    )
    write_report(
        [*tested.before, *tested.after],
        Path(folder, "tune.html"),
        title=tuning.title,
        summary=summary,
        segmentation=tuning.test.dense,
    )
