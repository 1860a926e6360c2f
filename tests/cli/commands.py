"""Commands as a user types them, in this process."""

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from calibrant import cli


def invoke(*arguments: object) -> Result:
    """Run a command."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> Result:
    """Run a command that must not fail."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def printed(*arguments: object) -> str:
    """What a command prints that must not fail."""
    return succeed(*arguments).output


def fail(*arguments: object) -> str:
    """Run a command that fails, and return its one-line error."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("calibrant: ")]
    assert result.stderr.rstrip().endswith(line)
    return line


def fail_at_once(*arguments: object) -> str:
    """Run a command that fails before anything is printed or written, and return its one-line error."""
    before = sorted(Path().rglob("*"))
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("calibrant: ")
    assert sorted(Path().rglob("*")) == before
    return line
