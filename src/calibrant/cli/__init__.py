"""The command line: each command is one file, and its name stands in the import below."""

# ruff: noqa: E402, F401, I001
import os

from calibrant.extras import require

require("cli", "typer", "rich", purpose="the command line")

# `calibrant --help` lists the commands in this order.
from calibrant.cli import (
    evaluate,
    calibrate,
    apply,
    conformal,
    train,
    compare,
    sweep,
    tune,
    leaderboard,
    predict,
    export,
    figures,
    losses,
    recipes,
)
from calibrant.cli.program import prepare_streams
from calibrant.cli.terminal import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    # Commands open no window, and Jupyter's own choice may not be installed here.
    os.environ["MPLBACKEND"] = "agg"
    prepare_streams()
    app()
