"""The tables that commands print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from calibrant.evaluation import Evaluation
    from calibrant.evaluation.comparison import Comparison


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print one evaluation, or a comparison of several."""
    from rich.console import Console

    from calibrant.reports.table_builders import evaluation_note, evaluation_table
    from calibrant.reports.tables import WORDS, print_table

    if len(evaluations) > 1:
        names = [evaluation.name for evaluation in evaluations]
        table = evaluation_table(evaluations, names, against="first", unit=" %")
        print_table(table, evaluation_note(evaluations), models_across=True, marks=WORDS)
        return
    # In a file or a pipe nothing limits the width, and folded columns would be hard to read.
    width = None if sys.stdout.isatty() else 120 + len(evaluations[0].name)
    Console(width=width, highlight=False).print(evaluations[0])


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
    from calibrant.reports.table_builders import comparison_note, comparison_table
    from calibrant.reports.tables import print_table

    note = f"{comparison_note(comparison)} 95 % intervals of the means are in brackets."
    print_table(comparison_table(comparison), note)


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
