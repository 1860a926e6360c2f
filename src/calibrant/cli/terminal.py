"""What all commands share: the program they belong to, and errors and warnings in one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="calibrant",
    help="Train classifiers whose confidence means what it says, and judge any others.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    """Train classifiers whose confidence means what it says, and judge any others."""


def fail(problem: str) -> NoReturn:
    """End the command with one line about what is wrong."""
    typer.echo(f"calibrant: {problem}", err=True)
    raise typer.Exit(2)


@contextmanager
def warning_in_one_line(*, shown: bool = True) -> Iterator[None]:
    """Warnings without the line of code that they come from."""

    def show(message: Warning | str, *_: Any) -> None:
        if shown:
            typer.echo(f"calibrant: warning: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextmanager
def failing_in_one_line(*errors: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into the end of the command; warnings take one line too."""
    try:
        with warning_in_one_line():
            yield
    except errors as problem:
        fail(" ".join(str(problem).split()))
