"""Tables of figures: one model of a table, rendered for the terminal, Markdown, LaTeX and HTML.

`calibrant.reports.table_builders` makes the tables; ``report.html.jinja`` holds the HTML.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from calibrant.extras import require
from calibrant.printable import printable

if TYPE_CHECKING:
    from rich.text import Text

# The result of a significance test: "equal" for no significant difference, "" for no test.
Verdict = Literal["", "better", "worse", "equal"]

# The marks of best values and verdicts, by kind of table. Best values are bold in any case.
ARROWS = {"better": "↑", "worse": "↓"}
WORDS = {"best": "*", "better": "better", "worse": "worse"}
HTML = {"best": "★", "better": "△", "worse": "▽", "equal": "≈"}


@dataclass(frozen=True)
class Cell:
    """One figure of one model."""

    value: float | None  # None if it is missing
    text: str  # as printed; a dash if it is missing
    interval: str = ""  # the confidence interval as printed
    best: bool = False  # in its column; values that print alike are equally good
    verdict: Verdict = ""  # of a significance test
    note: str = ""  # the verdict, or the reason why the figure is missing, in words

    def marks(self, symbols: Mapping[str, str]) -> list[str]:
        """The symbols to print after the text."""
        found = [symbols.get("best", "") if self.best else "", symbols.get(self.verdict, "")]
        return [symbol for symbol in found if symbol]

    @property
    def words(self) -> str:
        """Marks and notes in words, for screen readers and tooltips."""
        return "; ".join(part for part in ("best" if self.best else "", self.note) if part)

    @property
    def sort_key(self) -> str:
        """The value as JavaScript reads it, or "" if it is missing."""
        return "" if self.value is None else repr(self.value).replace("inf", "Infinity")


@dataclass(frozen=True)
class Column:
    """One figure of every model."""

    key: str  # unique, such as a key of `calibrant.metrics.METRICS`
    label: str  # the heading
    cells: tuple[Cell, ...]  # one per model
    sentence: str = ""  # what the figure says
    higher_is_better: bool | None = None  # None if no value is better than another

    @property
    def empty(self) -> bool:
        """Whether every value is missing."""
        return all(cell.value is None for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """Figures of several models."""

    rows: tuple[str, ...]  # the models' names
    columns: tuple[Column, ...]
    tested: bool = False  # whether any difference was tested
    untested: tuple[str, ...] = ()  # the models whose differences could not be tested

    def select(self, keys: Iterable[str]) -> Table:
        """The table with only these columns, in this order."""
        by_key = {column.key: column for column in self.columns}
        return replace(self, columns=tuple(by_key[key] for key in keys))

    def intervals(self) -> Table:
        """The table of the intervals, without the columns that have none."""
        columns = (
            replace(column, cells=tuple(Cell(each.value, each.interval or "–") for each in column.cells))
            for column in self.columns
            if any(each.interval for each in column.cells)
        )
        return replace(self, columns=tuple(columns))


def number_text(
    value: float | None, percent: bool = True, *, decimals: int = 4, unit: str = "", signed: bool = False
) -> str:
    """A figure as printed: in percent with two decimals, otherwise with `decimals`.

    >>> number_text(0.0412, unit="%"), number_text(1.25, percent=False), number_text(None)
    ('4.12%', '1.2500', '–')
    >>> number_text(0.0412, signed=True), number_text(-0.0412)
    ('+4.12', '−4.12')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{100 * value:z.2f}{unit}" if percent else f"{value:z.{decimals}f}"
    return ("+" if signed and value > 0 else "") + text.replace("-", "−")


def interval_text(interval: Sequence[float] | None, percent: bool = True, *, decimals: int = 4) -> str:
    """An interval in brackets, without the unit; "" for None.

    >>> interval_text((0.01, 0.02))
    '[1.00, 2.00]'
    """
    if interval is None:
        return ""
    return "[" + ", ".join(number_text(end, percent, decimals=decimals) for end in interval) + "]"


def to_markdown(table: Table, heading: str = "model") -> str:
    """The table in Markdown, with the best values in bold.

    >>> column = Column("ece", "ECE", (Cell(0.1, "10.00"), Cell(0.05, "5.00", best=True, verdict="better")))
    >>> print(to_markdown(Table(("first", "second"), (column,))))
    | model | ECE |
    | --- | ---: |
    | first | 10.00 |
    | second | **5.00** ↑ |
    """

    def line(parts: Iterable[str]) -> str:
        return "| " + " | ".join(parts) + " |"

    def printed(cell: Cell) -> str:
        text = plain_markdown(cell.text)
        return " ".join([f"**{text}**" if cell.best else text, *cell.marks(ARROWS)])

    lines = [line([heading, *(plain_markdown(column.label) for column in table.columns)])]
    lines.append("| --- |" + " ---: |" * len(table.columns))
    for row, name in enumerate(table.rows):
        lines.append(line([plain_markdown(name), *(printed(column.cells[row]) for column in table.columns)]))
    return "\n".join(lines)


# Brackets matter only where they can make a link, and underscores only at the end of a word.
_MARKDOWN = re.compile(r"[\\`*<>|&~]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")


def plain_markdown(text: str) -> str:
    r"""Plain text in one line, with everything escaped that Markdown would interpret.

    >>> print(plain_markdown("cals-alm[margin=6] | <b> [x](y)"))
    cals-alm[margin=6] \| \<b\> [x\](y)
    """
    return _MARKDOWN.sub(r"\\\g<0>", printable(text))


def to_latex(table: Table, heading: str = "Model") -> str:
    r"""The table in LaTeX, for the package booktabs, with the best values in bold.

    >>> column = Column("ece", "ECE", (Cell(0.1, "10.00"), Cell(0.05, "5.00", best=True, verdict="better")))
    >>> print(to_latex(Table(("first", "second"), (column,))))
    \begin{tabular}{lr}
    \toprule
    Model & ECE \\
    \midrule
    first & 10.00 \\
    second & \textbf{5.00}$^{\uparrow}$ \\
    \bottomrule
    \end{tabular}
    """

    def line(parts: Iterable[str]) -> str:
        return " & ".join(parts) + r" \\"

    def printed(cell: Cell) -> str:
        text = tex(cell.text)
        raised = {"": "", "↑": r"$^{\uparrow}$", "↓": r"$^{\downarrow}$"}
        return (rf"\textbf{{{text}}}" if cell.best else text) + raised["".join(cell.marks(ARROWS))]

    body = [
        line([tex(name), *(printed(column.cells[row]) for column in table.columns)])
        for row, name in enumerate(table.rows)
    ]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
            r"\toprule",
            line([heading, *(tex(column.label) for column in table.columns)]),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    **{character: rf"\{character}" for character in "&%$#_{}"},
}


def tex(text: str) -> str:
    """Plain text in one line, with everything escaped that LaTeX would interpret."""
    return "".join(_TEX.get(character, character) for character in printable(text))


def print_table(
    table: Table, note: str = "", *, models_across: bool = False, marks: Mapping[str, str] = ARROWS
) -> None:
    """Print a table to the standard output, fitted to the width of the terminal.

    If the columns do not fit side by side, they continue below in further parts, and a line says so. In a
    file or a pipe nothing limits the width. Columns without any value are left out. With ``models_across``,
    models are columns instead of rows, and come without intervals, which would double the height.
    """
    require("cli", "rich", purpose="a printed table")
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    def printed(cell: Cell) -> Text:
        text = " ".join([cell.text, *cell.marks(marks)])
        if cell.interval and not models_across:
            text += f"\n{cell.interval}"
        return Text(text, style="bold" if cell.best else "")

    figures = [column for column in table.columns if not column.empty]
    labels: Sequence[str] = [printable(name) for name in table.rows]
    columns = [(printable(column.label), [printed(cell) for cell in column.cells]) for column in figures]
    if models_across:
        models = [(name, [cells[row] for _, cells in columns]) for row, name in enumerate(labels)]
        labels, columns = [label for label, _ in columns], models

    def part_of(columns: Sequence[tuple[str, Sequence[Text]]]) -> Grid:
        grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        grid.add_column("", no_wrap=True)
        for heading, _ in columns:
            grid.add_column(Text(heading), justify="right", no_wrap=True)
        for row, label in enumerate(labels):
            grid.add_row(Text(label), *(cells[row] for _, cells in columns))
        return grid

    def width_of(grid: Grid) -> int:
        return console.measure(grid, options=console.options.update(max_width=10_000)).maximum

    console = Console(highlight=False)
    width, limited = console.width, sys.stdout.isatty()
    parts = [columns]
    if limited and width_of(part_of(columns)) > width:
        parts = [[]]
        for heading, cells in columns:
            column = _folded(heading, cells), cells
            if parts[-1] and width_of(part_of([*parts[-1], column])) > width:
                parts.append([])
            parts[-1].append(column)
    for part in parts:
        grid = part_of(part)
        # Lines too long for the terminal are better than figures with digits cut off.
        console.width = max(width, width_of(grid))
        console.print(grid)
    console.width = width
    if len(parts) > 1:
        note = f"Too wide for this terminal: the columns are printed in {len(parts)} parts. {note}".rstrip()
    if note:
        console.print(printable(note), markup=False, soft_wrap=not limited)


def _folded(heading: str, cells: Sequence[Text]) -> str:
    """The heading in lines no wider than the cells below, as far as its words allow."""
    heading = heading.replace(" + ", " +\u00a0")  # a plus sign stays with the next word
    width = max(len(line) for cell in cells for line in cell.plain.split("\n"))
    width = max(width, *(len(word) for word in heading.split(" ")), 1)
    return "\n".join(wrap(heading, width, break_long_words=False, break_on_hyphens=False))
