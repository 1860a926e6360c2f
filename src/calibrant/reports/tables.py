"""Tables of figures: one model of a table, rendered for the terminal, Markdown, LaTeX and HTML.

`calibrant.reports.table_builders` makes the tables; ``report.html.jinja`` holds the HTML.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from calibrant.extras import require
from calibrant.printable import printable, wrapped

if TYPE_CHECKING:
    from rich.text import Text

# The result of a significance test: "equal" for no significant difference, "" for no test.
Verdict = Literal["", "better", "worse", "equal"]

# The marks of best values and verdicts, by kind of table. Best values are bold in any case. Verdicts are
# words, because an arrow down beside an error reads as a smaller error.
VERDICTS = {"better": "better", "worse": "worse"}
WORDS = {"best": "*", **VERDICTS}
HTML = {"best": "★", **VERDICTS, "equal": "≈"}


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
    importance: int = 0  # a narrow terminal hides the least important columns, the last one among equals
    prose: bool = False  # texts instead of figures: aligned to the left, and on several lines if necessary

    @property
    def empty(self) -> bool:
        """Whether every value is missing."""
        return not any(cell.text if self.prose else cell.value is not None for cell in self.cells)


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

    def transposed(self) -> Table:
        """The table with models as columns, without intervals, which would double its height."""
        cells = zip(*(column.cells for column in self.columns), strict=True)
        models = (
            Column(name, name, tuple(replace(cell, interval="") for cell in each))
            for name, each in zip(self.rows, cells, strict=True)
        )
        return Table(tuple(column.label for column in self.columns), tuple(models))

    @property
    def intervals_note(self) -> str:
        """What the brackets in a table of means are; "" if it has none."""
        return "95 % intervals of the means are in brackets." if self.intervals().columns else ""


BEST_IN_BOLD = "Best mean in bold."
"""A sentence for notes on tables of means."""


def without_bold(note: str) -> str:
    """A note on a table in which nothing is bold."""
    return note.replace(f"{BEST_IN_BOLD} ", "").removesuffix(BEST_IN_BOLD).rstrip()


def listing(rows: Sequence[Sequence[str]], headings: Mapping[str, int]) -> Table:
    """A table of texts: the name of each row with its texts, and each column's importance by its heading."""
    names, *texts = zip(*rows, strict=True)
    columns = (
        Column(heading, heading, tuple(Cell(None, text) for text in column), "", None, importance, prose=True)
        for (heading, importance), column in zip(headings.items(), texts, strict=True)
    )
    return Table(names, tuple(columns))


def number_text(
    value: float | None, percent: bool = True, *, decimals: int = 4, unit: str = "", signed: bool = False
) -> str:
    """A figure as printed: in percent with two decimals, otherwise with `decimals`.

    >>> number_text(0.0412, unit=" %"), number_text(1.25, percent=False), number_text(None)
    ('4.12 %', '1.2500', '–')
    >>> number_text(0.0412, signed=True), number_text(-0.0412)
    ('+4.12', '−4.12')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{100 * value:z.2f}{unit}" if percent else f"{value:z.{decimals}f}"
    return ("+" if signed and value > 0 else "") + text.replace("-", "−")


in_percent = partial(number_text, unit=" %")
"""A figure as printed, in percent and with the unit."""


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
    | second | **5.00** better |
    """

    def printed(cell: Cell) -> str:
        text = plain_markdown(cell.text)
        return " ".join([f"**{text}**" if cell.best else text, *cell.marks(VERDICTS)])

    first, *others = (f"| {' | '.join(line)} |" for line in _lines(table, heading, plain_markdown, printed))
    return "\n".join([first, "| --- |" + " ---: |" * len(table.columns), *others])


def _lines(
    table: Table, heading: str, escaped: Callable[[str], str], printed: Callable[[Cell], str]
) -> Iterator[list[str]]:
    """The headings, and each row: its name and its figures."""
    yield [heading, *(escaped(column.label) for column in table.columns)]
    for row, name in enumerate(table.rows):
        yield [escaped(name), *(printed(column.cells[row]) for column in table.columns)]


def means_in_markdown(table: Table, note: str, heading: str) -> list[str]:
    """The lines of a table of means with a note and, if there are any, a table of their intervals."""
    lines = [to_markdown(table, heading), "", plain_markdown(note), ""]
    intervals = table.intervals()
    if intervals.columns:
        lines += ["95 % intervals of the means:", "", to_markdown(intervals, heading), ""]
    return lines


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
    second & \textbf{5.00}\textsuperscript{better} \\
    \bottomrule
    \end{tabular}
    """

    def printed(cell: Cell) -> str:
        text = tex(cell.text)
        raised = [rf"\textsuperscript{{{mark}}}" for mark in cell.marks(VERDICTS)]
        return "".join([rf"\textbf{{{text}}}" if cell.best else text, *raised])

    first, *others = (" & ".join(line) + r" \\" for line in _lines(table, heading, tex, printed))
    start = rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    return "\n".join([start, r"\toprule", first, r"\midrule", *others, r"\bottomrule", r"\end{tabular}"])


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
    **{character: rf"\{character}" for character in "&%$#_{}"},
}


def tex(text: str) -> str:
    """Plain text in one line, with everything escaped that LaTeX would interpret."""
    return "".join(_TEX.get(character, character) for character in printable(text))


_LINE = 28  # characters in a line of a text, below which less important columns are hidden
_SHORTEST_LINE = 10  # where all other columns are hidden already
_LONGEST_WORD = 28  # characters; longer words of names and headings are cut into several lines


def print_table(
    table: Table,
    note: str = "",
    *,
    heading: str = "",
    models_across: bool = False,
    wide: bool = False,
) -> None:
    """Print a table to the standard output, fitted to the width of the terminal.

    If the columns do not fit side by side, names and headings take several lines. If that is not enough, the
    least important columns are hidden, and a line names them. In a file or a pipe nothing limits the width.
    Columns without any value are left out.

    Args:
        table: the table to print.
        note: a text to print below it.
        heading: the heading of the names.
        models_across: whether models are columns instead of rows. Best values get a mark, and there are no
            intervals. Models that do not fit continue below, because none is less important.
        wide: whether to print all columns side by side, however wide the terminal is.
    """
    require("cli", "rich", purpose="a printed table")
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    shown = replace(
        table,
        rows=tuple(printable(name) for name in table.rows),
        columns=tuple(replace(each, label=printable(each.label)) for each in table.columns if not each.empty),
    )
    if models_across:
        shown = shown.transposed()

    def printed(cell: Cell) -> Text:
        text = " ".join([printable(cell.text), *cell.marks(WORDS if models_across else VERDICTS)])
        if cell.interval:
            text += f"\n{cell.interval}"
        return Text(text, style="bold" if cell.best else "")

    def folded(column: Column) -> Column:
        """The column with its heading in lines no wider than the cells below, as far as its words allow."""
        lines = [line for cell in column.cells for line in printed(cell).plain.split("\n")]
        below = max(map(len, lines), default=0)
        heading = column.label.replace(" + ", " +\u00a0")  # a plus sign stays with the next word
        return replace(column, label=wrapped(heading, below, _LONGEST_WORD))

    def grid_of(columns: Sequence[Column], line: int | None = None) -> Grid:
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        grid.add_column(Text(heading), no_wrap=True)
        for column in columns:
            grid.add_column(
                Text(column.label),
                justify="left" if column.prose else "right",
                no_wrap=not column.prose,
                max_width=line if column.prose else None,
            )
        for row, name in enumerate(names):
            grid.add_row(Text(name), *(printed(column.cells[row]) for column in columns))
        return grid

    def width_of(columns: Sequence[Column], line: int | None = _LINE) -> int:
        grid = grid_of(columns, line)
        return console.measure(grid, options=console.options.update(max_width=10_000)).maximum

    console = Console(highlight=False)
    width, limited = console.width, sys.stdout.isatty() and not wide
    names, kept = list(shown.rows), list(shown.columns)
    parts, hidden = [kept], list[str]()
    if limited and width_of(kept, None) > width:
        names = [wrapped(name, max(width // 3, 12), _LONGEST_WORD) for name in names]
        kept = [folded(column) for column in kept]
        if models_across:
            parts = [[]]
            for column in kept:
                if parts[-1] and width_of([*parts[-1], column]) > width:
                    parts.append([])
                parts[-1].append(column)
        else:
            while len(kept) > 1 and width_of(kept) > width:
                least = min(reversed(kept), key=lambda column: column.importance)
                kept = [column for column in kept if column is not least]
            keys = {column.key for column in kept}
            hidden = [column.label for column in shown.columns if column.key not in keys]
            parts = [kept]
    for number, part in enumerate(parts):
        if number:
            console.print()
        # Lines too long for the terminal are better than figures with digits cut off.
        console.width = max(width, width_of(part, _SHORTEST_LINE if limited else None))
        console.print(grid_of(part))
    console.width = width
    if not console.is_terminal:
        note = without_bold(note)
    notes = [note] if note else []
    if hidden:
        notes.insert(0, f"Hidden, to fit {width} columns: {', '.join(hidden)}. --wide shows all.")
    if len(parts) > 1:
        notes.insert(0, f"Too wide for this terminal: the columns are printed in {len(parts)} parts.")
    for line in notes:
        console.print(printable(line), markup=False, soft_wrap=not limited)
