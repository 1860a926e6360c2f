"""The program around the commands: its streams, its exit codes, and a log for unexpected errors."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from calibrant.extras import MissingPackageError
from calibrant.printable import one_line, printable

FAILED, EXPECTED, INTERRUPTED, NOBODY_READS = 1, 2, 130, 141
"""Exit codes: unexpected errors, expected ones, Ctrl-C, and a closed pipe (128 plus the signal's number)."""

_PACKAGE = Path(__file__).parents[1]


def say(text: str, *, err: bool = False) -> None:
    """Print a line, without control characters."""
    # Not typer.echo: on an ASCII terminal, it writes UTF-8.
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


def complain(text: str) -> None:
    """Print a line on the error output; nothing if that is closed or full."""
    with suppress(OSError):
        say(f"calibrant: {one_line(text)}", err=True)


class Program(TyperGroup):
    """The commands, each of which ends in success or in one line with an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for command in self.commands.values():
            # Otherwise the list of commands cuts it to one line.
            command.short_help = (command.help or "").partition("\n\n")[0].replace("\n", " ")

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Parse the command line and run a command; see the class."""
        try:
            return _run(lambda: super(Program, self).main(*arguments, **options))
        except typer.Exit as end:
            sys.exit(end.exit_code)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; see the class."""
        # Also here, because typer's main has its own words for Ctrl-C and closed pipes.
        return _run(lambda: super(Program, self).invoke(ctx))


def _run(command: Callable[[], Any]) -> Any:
    try:
        try:
            result = command()
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        complain("stopped")
        code = INTERRUPTED
    except BrokenPipeError:  # nobody reads the rest of the output, as with `| head`
        code = NOBODY_READS
    except SystemExit as end:  # rich ends the program if nobody reads the output
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = NOBODY_READS
    except Exception as problem:
        if hasattr(problem, "exit_code") or isinstance(problem, typer.Abort):
            raise  # typer ends the program by these, after a usage error for example
        expected = _expected(problem)
        complain(expected or f"unexpected {_summary(problem)}; {_logged(problem)}")
        code = EXPECTED if expected else FAILED
    _give_up_unwritable()
    raise typer.Exit(code) from None


def _expected(error: Exception) -> str:
    """What to say about an error that may come from what a command is given; "" for any other."""
    words = str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {words or 'expected smaller files, or --stream for predictions'}"
    if isinstance(error, MissingPackageError):
        return words
    if isinstance(error, OSError):
        return described(error)
    if isinstance(error, RuntimeError) and re.search(
        "allocat.* memory|memory.* allocat|out of memory", words
    ):
        return f"not enough memory: {words.strip().splitlines()[0]}"  # torch's own error
    return ""


def foreseen(error: Exception) -> bool:
    """False for a plain `ValueError` or `ImportError` from outside this package, such as a user's model."""
    if type(error) not in (ValueError, ImportError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or Path(frames[-1].filename).is_relative_to(_PACKAGE)


def described(error: OSError) -> str:
    """An error of the system, with the file if it names one, or the standard output if that is full."""
    if error.strerror is None:
        return str(error)
    if error.filename is None:
        try:
            print(flush=True)  # a line, because a stream may have dropped what it could not write
        except OSError:
            return f"the standard output: {error.strerror}"
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


def _summary(error: BaseException) -> str:
    """Type and message of an error, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{place}: {one_line(str(error), 200) or 'no message'}"


def _logged(error: BaseException) -> str:
    """Write the traceback to a file that only its owner can read, and say where it is."""
    from calibrant import __version__

    with suppress(Exception):  # an error may fail to print itself
        about = [
            f"calibrant {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"{datetime.now().astimezone().isoformat(timespec='seconds')}, process {os.getpid()}",
            f"command: {sys.argv!r}",
            "",
        ]
        text = "\n".join([*about, *traceback.format_exception(error)])
        try:
            descriptor, path = tempfile.mkstemp(".log", "calibrant-")
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
        except OSError as problem:
            return f"no log could be written: {described(problem)}"
        return f"the traceback is in {path}"
    return "no log could be written"


def _give_up_unwritable() -> None:
    """Redirect streams that cannot be written, so that Python does not complain about them at its end."""
    for stream in (sys.stdout, sys.stderr):
        if not _can_be_written(stream):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _can_be_written(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True


def prepare_streams() -> None:
    """Make the standard streams safe to print to: open, and able to encode any text."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file to be opened would take this number, and prints would go to that file.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # a stream, or its file, that somebody else put there
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
