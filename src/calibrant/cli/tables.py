"""The tables that commands print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from calibrant.evaluation.comparison import Comparison
    from calibrant.evaluation import Difference, Evaluation


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print one evaluation, or a comparison of several."""
    from rich.console import Console
    from rich.measure import Measurement

    # In a file or a pipe nothing limits the width, and folded columns would be hard to read.
    width = None if sys.stdout.isatty() else 100 + sum(20 + len(each.name) for each in evaluations)
    console = Console(width=width, highlight=False)
    if len(evaluations) == 1:
        console.print(evaluations[0])
        return
    table = _comparison(evaluations)
    # Wider than the terminal rather than with digits left out.
    console.width = max(console.width, Measurement.get(console, console.options, table).maximum)
    console.print(table)
    console.print(_caption(evaluations), markup=False)


def _comparison(evaluations: Sequence[Evaluation]) -> Table:
    """One column per model: * at the best value, and what differs significantly from the first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from calibrant.metrics import METRICS

    first, *others = evaluations
    differences: list[dict[str, Difference]] = [{}]
    for other in others:
        # What was not resampled cannot be tested.
        both = first.replicates and other.replicates
        differences.append(first.compare(other) if both else {})
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for evaluation in evaluations:
        table.add_column(Text(evaluation.name), justify="right")
    table.add_row("Elements", *(f"{evaluation.samples:,}" for evaluation in evaluations))
    for name, description in METRICS.items():
        values = [evaluation.metrics[name] for evaluation in evaluations]
        known = [value for value in values if value is not None]
        if not known:
            continue
        best = description.text((max if description.higher_is_better else min)(known))
        figures = ["-" if value is None else description.text(value) for value in values]
        cells = []
        for figure, found in zip(figures, differences, strict=True):
            star = " *" if figure == best else ""
            verdict = ""
            # What prints alike is called alike, however certain a difference in later digits may be.
            if name in found and found[name].significant and figure != figures[0]:
                verdict = " worse" if found[name].better == "first" else " better"
            cells.append(Text(f"{figure}{star}{verdict}", style="bold" if star else ""))
        table.add_row(description.label, *cells)
    table.add_row("p-value of calibration", *(f"{evaluation.p_value:.3f}" for evaluation in evaluations))
    return table


def _caption(evaluations: Sequence[Evaluation]) -> str:
    first, *others = evaluations
    if not all(each.replicates for each in evaluations):
        return "* best; without resamples, as for means over images, differences are not tested"
    meaning = f"* best; better, worse: significantly so than {first.name}, at the level {first.level:g}"
    unpaired = [other.name for other in others if not first.is_paired_with(other)]
    if not unpaired:
        return f"{meaning}, by a paired bootstrap"
    return (
        f"{meaning}, by the bootstrap; not paired, as if from independent data, for {', '.join(unpaired)}: "
        "pairing needs the same labels in the same order, loaded (evaluate --exact), and at most 200 million "
        "elements times resamples"
    )


_NOT_ON_THE_TERMINAL = ("NLL + T", "Class-wise ECE", "Class-wise ECE + T")


def _wide_console(table: Table) -> Console:
    """Wider than the terminal rather than with digits left out."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, needed)
    return console


def print_comparison(comparison: Comparison) -> None:
    """Print the comparison of losses."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from calibrant.reports.comparison import columns, notes

    marks = {"better": " ↑", "worse": " ↓", "": ""}
    # The rest is in the files: more would not fit beside one another.
    shown = [each for each in columns(comparison) if each.heading not in _NOT_ON_THE_TERMINAL]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for column in shown:
        table.add_column(Text(column.heading), justify="right")
    for method in comparison.methods:
        cells = []
        for column in shown:
            between = column.between(method.name)
            text = column.text(method.name) + marks[column.verdict(method.name)]
            style = "bold" if column.best == method.name else ""
            cells.append(Text(f"{text}\n{between}" if between else text, style=style))
        table.add_row(Text(method.name), *cells)
    console = _wide_console(table)
    console.print(table)
    console.print(
        f"{notes(comparison)} In brackets: 95 % intervals of the means.",
        markup=False,
        soft_wrap=True,
    )


def print_listing(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, folded: Sequence[str], whole: bool = False
) -> None:
    """Print a table of texts, with the ``folded`` columns on several lines to fit the terminal.

    If ``whole``, nothing is folded unless the output is a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in folded)
    for row in rows:
        table.add_row(*map(Text, row))
    console = _wide_console(table) if whole and not sys.stdout.isatty() else Console(highlight=False)
    console.print(table)
