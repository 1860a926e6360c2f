"""What all commands share: the program, one-line errors and warnings, progress bars, checks and listings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(
    name="calibrant",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Report = Annotated[
    Path | None, typer.Option(metavar="PAGE.html", help="Write a page with tables and diagrams.")
]
Json = Annotated[
    Path | None, typer.Option(metavar="OUT.json", help="Write all figures, a list of evaluations.")
]
Bins = Annotated[int, typer.Option(min=1, help="Number of confidence bins.")]
IgnoreIndex = Annotated[int, typer.Option(help="Label of elements to leave out.")]
Resamples = Annotated[int, typer.Option(min=0, help="Bootstrap resamples for the intervals; 0 for none.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from calibrant import __version__

        typer.echo(f"calibrant {__version__}")
        raise typer.Exit


@app.callback()
def calibrant(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train calibrated classifiers, and evaluate and calibrate the predictions of any classifier."""


def fail(problem: str) -> NoReturn:
    """End the command with a one-line error and exit code 2."""
    typer.echo(f"calibrant: {' '.join(problem.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def one_line_errors(*errors: type[Exception], shown: bool = True) -> Iterator[None]:
    """End the command with one line on these errors; print warnings in one line each, if ``shown``."""

    def show(message: Warning | str, *_: Any) -> None:
        if shown:
            typer.echo(f"calibrant: warning: {' '.join(str(message).split())}", err=True)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            yield
    except errors as problem:
        if shown:
            fail(str(problem))
        raise typer.Exit(2) from None


def progress_bars() -> Progress:
    """Progress bars on the terminal; none if the error output is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def check_outputs(inputs: Sequence[Path], options: Mapping[str, Path | None]) -> None:
    """End the command if the output file of an option cannot be written, or would replace an input file."""
    outputs = {option: path for option, path in options.items() if path is not None}
    for option, path in outputs.items():
        if path.is_dir():
            fail(f"{option} {path}: is a folder; expected the name of a file")
        if not path.parent.is_dir():
            fail(f"{option} {path}: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            fail(f"{option} {path}: the folder {path.parent} cannot be written to")
        if path.resolve() in {file.resolve() for file in inputs}:
            fail(f"{option} {path}: is one of the files to read; expected another file")
    for first, second in combinations(outputs, 2):
        if outputs[first].resolve() == outputs[second].resolve():
            fail(f"{first} and {second} are the same file {outputs[second]}")


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
    width = 10_000 if whole and not sys.stdout.isatty() else None
    Console(width=width, highlight=False).print(table)
