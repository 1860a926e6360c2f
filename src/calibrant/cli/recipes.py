"""`calibrant recipes`: list the shipped recipes, or print one, or one for data of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli.program import say
from calibrant.cli.terminal import Wide, app
from calibrant.cli.training_options import (
    Changes,
    OwnData,
    Target,
    as_recipe,
    load_recipe,
    training_errors,
)


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", callback=as_recipe, help="Print this recipe as TOML.")
    ] = None,
    data: OwnData = None,
    target: Target = None,
    changes: Changes = None,
    wide: Wide = False,
) -> None:
    """List the shipped recipes, or print one: by its name, or the one that train follows for --data."""
    with training_errors():
        from calibrant.options import read_toml
        from calibrant.reports.tables import listing, print_table
        from calibrant.training.recipe import Recipe, shipped_recipes

        if (name, data, target) != (None, None, None) or changes:
            recipe = load_recipe(name, changes, data=data, target=target)
            shipped = shipped_recipes()
            text = recipe.to_toml() if name is None or changes else shipped.get(name) or read_toml(Path(name))
            for line in text.splitlines():
                say(line)
            return
        loaded = {each: Recipe.load(each) for each in shipped_recipes()}
    rows = [(each, it.data.name, it.model.name, it.description) for each, it in loaded.items()]
    print_table(listing(rows, {"data": 1, "model": 0, "what it is": 2}), heading="name", wide=wide)
