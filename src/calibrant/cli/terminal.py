"""What all commands share: the program, one-line errors and warnings, progress bars and checks."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from calibrant.arguments import label
from calibrant.atomic import why_unwritable
from calibrant.cli.program import EXPECTED, Program, complain, described, foreseen, say
from calibrant.extras import require
from calibrant.printable import printable
from calibrant.processes import Workers

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(
    name="calibrant",
    cls=Program,
    no_args_is_help=True,
    rich_markup_mode=None,  # Rich would take the brackets of `adafocal[bins=20]` for markup, and drop them
    pretty_exceptions_enable=False,
)


def _as_report(value: Path | None) -> Path | None:
    if value is not None:  # checked here, and not after minutes of computing
        require("report", "jinja2", "matplotlib", purpose="--report")
    return value


def _as_label(value: int) -> int:
    try:
        return label("it", value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Report = Annotated[
    Path | None,
    typer.Option(metavar="PAGE.html", help="Write a page with tables and diagrams.", callback=_as_report),
]
Json = Annotated[
    Path | None, typer.Option(metavar="OUT.json", help="Write all figures, a list of evaluations.")
]
Bins = Annotated[int, typer.Option(min=1, max=10_000, help="Number of confidence bins.")]
IgnoreIndex = Annotated[int, typer.Option(help="Label of elements to leave out.", callback=_as_label)]
Binary = Annotated[
    bool,
    typer.Option(
        "--binary",
        help="Each score is a yes-or-no decision of its own: one in each row, or one for each of several "
        "labels. Labels are 0 and 1, or false and true, in the shape of the scores. Calibration is that of "
        "the probability of yes.",
    ),
]
Resamples = Annotated[
    int, typer.Option(min=0, max=1_000_000, help="Bootstrap resamples for the intervals; 0 for none.")
]
On = Annotated[
    Workers, typer.Option(help="Work in processes of this machine, or by the workers of a Ray cluster.")
]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print all columns of the tables, however wide the terminal is.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from calibrant import __version__

        say(f"calibrant {__version__}")
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
    complain(problem)
    raise typer.Exit(EXPECTED)


@contextmanager
def one_line_errors(*errors: type[Exception], shown: bool = True) -> Iterator[None]:
    """End the command with one line on these errors; print each different warning in one line, if ``shown``.

    Errors that are not `foreseen` pass.
    """
    told = set()

    def show(message: Warning | str, *_: Any) -> None:
        if shown and str(message) not in told:
            complain(f"warning: {message}")
            told.add(str(message))

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            yield
    except errors as problem:
        if not foreseen(problem):
            raise
        if shown:
            fail(described(problem) if isinstance(problem, OSError) else str(problem))
        raise typer.Exit(EXPECTED) from None


def progress_bars() -> Progress:
    """Progress bars on the terminal; none if the error output is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Description(TextColumn):
        def render(self, task: Task) -> Text:
            return Text(printable(task.description))

    columns = Description(""), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def waiting(what: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show on the terminal what is being done, until the block ends or calls the function that it gets.

    ``shown`` is false in all processes but the first.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    with console.status(Text(what)) as status:
        yield status.stop


def check_suffix(output: Path | None, suffixes: Collection[str], option: str = "--output") -> None:
    """End the command if the file of an option has another suffix."""
    if output is not None and output.suffix.lower() not in suffixes:
        fail(f"{option} {output}: expected a name that ends in {' or '.join(suffixes)}")


def check_names(report: Path | None = None, json: Path | None = None) -> None:
    """End the command if the file of --report or --json has another suffix; streams may have any."""
    expected = {"--report": (report, [".html", ".htm"]), "--json": (json, [".json"])}
    for option, (path, suffixes) in expected.items():
        if path is None or str(path).startswith(("/dev/", "/proc/self/fd/")):
            continue
        if path.is_file() or not path.exists():
            check_suffix(path, suffixes, option)


def check_outputs(inputs: Iterable[Path], options: Mapping[str, Path | None]) -> None:
    """End the command if an output cannot be written, is an input, or is another output.

    The outputs are given by the option that names them. Two paths are the same file if they lead to it by
    whatever symbolic or hard links.
    """
    outputs = {option: path for option, path in options.items() if path is not None}
    files = list(inputs)
    for option, path in outputs.items():
        problem = _unwritable(path)
        if problem is not None:
            fail(f"{option} {path}: {problem}")
        check_not_read(option, path, files)
    for first, second in combinations(outputs, 2):
        if _same_file(outputs[first], outputs[second]):
            fail(f"{first} and {second} are the same file {outputs[second]}")


def check_not_read(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """End the command if a file that an option leads to writing is one of the inputs; see `check_outputs`."""
    for file in inputs:
        if _same_file(path, file):
            which = "" if str(path) == str(file) else f", {file}"
            fail(f"{option} {path}: is one of the files to read{which}; expected another file")


def _unwritable(path: Path) -> str | None:
    """Why a file cannot be written, or None."""
    target = Path(os.path.realpath(path))
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:
        return str(error.strerror)
    if stat.S_ISDIR(kind):
        return "is a folder; expected the name of a file"
    if not stat.S_ISREG(kind):  # a device or a pipe is written to in place
        return None if os.access(path, os.W_OK) else "cannot be written to"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent if path.is_symlink() else path.parent}"
    problem = why_unwritable(target.parent)
    return f"cannot be written to: {problem}" if problem else None


def _same_file(first: Path, second: Path) -> bool:
    if first.exists() and not first.is_file():
        return False  # a device or a pipe is written to, not replaced
    try:
        return first.samefile(second)
    except OSError:  # one of them does not exist
        return os.path.realpath(first) == os.path.realpath(second)
