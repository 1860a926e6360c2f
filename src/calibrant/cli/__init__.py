"""The command line: parse, call, print."""

from calibrant.cli import evaluating, training
from calibrant.cli.terminal import app

__all__ = ["app", "evaluating", "main", "training"]


def main() -> None:
    """Run the command line."""
    app()
