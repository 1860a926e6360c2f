"""`calibrant recipes`: list the shipped recipes, or print one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli.program import say
from calibrant.cli.terminal import app, print_listing
from calibrant.cli.training_options import training_errors


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this recipe as TOML.", show_default=False)
    ] = None,
) -> None:
    """List the shipped recipes, or print one."""
    with training_errors():
        from calibrant.options import read_toml
        from calibrant.training.recipe import Recipe, shipped_recipes

        if name is not None:
            Recipe.load(name)
            text = shipped_recipes().get(name) or read_toml(Path(name))
            for line in text.splitlines():
                say(line)
            return
        loaded = {each: Recipe.load(each) for each in shipped_recipes()}
    rows = [(each, it.data.name, it.model.name, it.description) for each, it in loaded.items()]
    print_listing(("name", "data", "model", "what it is"), rows, folded=("what it is",), whole=True)
