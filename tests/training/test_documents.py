"""The lists in docs/training.md and docs/recipes.md match the code."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from calibrant.options import parse_value
from calibrant.training.compilation import CACHED_COMPILE_SECONDS, COMPILE_SECONDS, TIME_SAVED
from calibrant.training.data import DATA_SETS
from calibrant.training.models import MODELS, PREFIXES, create_model
from calibrant.training.optimization import OPTIMIZERS, SCHEDULES
from calibrant.training.recipe import Criterion, Recipe, shipped_recipes
from tests.training.models.shapes import weights_without_numbers

DOCS = Path(__file__).parents[2] / "docs"
RECIPES = (DOCS / "recipes.md").read_text(encoding="utf-8")
TRAINING = (DOCS / "training.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows that begin with code."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize(
    ("table", "registry"), [("data", DATA_SETS), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)]
)
def test_every_name_of_a_table_is_listed(table: str, registry: dict[str, Any]) -> None:
    (names,) = [
        cells[1] for cells in rows(section(RECIPES, "Writing a recipe")) if cells[0] == f"`[{table}]`"
    ]
    assert codes(names) == list(registry)


def test_every_prefix_is_listed() -> None:
    assert re.findall(r"`(\w+):NAME`", section(RECIPES, "Writing a recipe")) == list(PREFIXES)
    assert set(PREFIXES) <= set(re.findall(r"(?:model=|`)(\w+):\w+`", TRAINING))


def test_every_network_is_listed_with_its_defaults() -> None:
    networks = {codes(cells[0])[0]: cells[2] for cells in rows(section(RECIPES, "Networks"))}
    assert networks.keys() == MODELS.keys()
    for name, options in networks.items():
        stated = dict(each.partition("=")[::2] for each in codes(options) if re.fullmatch(r"\w+(=.*)?", each))
        parameters = inspect.signature(MODELS[name]).parameters
        assert stated.keys() == parameters.keys() - {"num_classes"}, name
        for option, value in stated.items():
            default = parameters[option].default
            if value:
                assert json.loads(value) == (list(default) if isinstance(default, tuple) else default)
            else:
                assert default is None


def test_parameters_are_counted_as_stated() -> None:
    for name, what, *_ in rows(section(RECIPES, "Networks")):
        stated = re.search(r"([\d.]+) million", what)
        if stated is not None:
            with weights_without_numbers():
                model = create_model(codes(name)[0], 10)
            found = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            digits = len(stated[1].partition(".")[2])
            assert round(found, digits) == float(stated[1]), name


def test_every_shipped_recipe_is_listed_once() -> None:
    listed = [name for cells in rows(section(RECIPES, "Shipped recipes")) for name in codes(cells[0])]
    assert sorted(listed) == list(shipped_recipes())


def flattened(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of nested tables, by keys with dots."""
    found = {}
    for key, value in table.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def sources() -> dict[str, list[tuple[str, list[Any]]]]:
    """For each recipe in the table of sources, the stated settings with the values that they may have."""
    found: dict[str, list[tuple[str, list[Any]]]] = {}
    for names, *columns in rows(section(RECIPES, "Where each setting comes from")):
        stated = [each.partition("=")[::2] for column in columns for each in codes(column)]
        settings = [(key, [parse_value(value) for value in values.split(" or ")]) for key, values in stated]
        for name in codes(names):
            assert name not in found, f"{name} is there twice"
            found[name] = settings
    return found


@pytest.mark.parametrize("name", sorted(shipped_recipes().keys() - {"digits", "digits-lt", "synthetic"}))
def test_every_setting_has_a_source(name: str) -> None:
    settings = flattened(tomllib.loads(shipped_recipes()[name]))
    del settings["description"]
    stated = sources()[name]
    assert sorted(key for key, _ in stated) == sorted(settings)
    for key, values in stated:
        assert settings[key] in values, key


def test_the_table_of_sources_has_no_other_recipes_and_no_values_of_none() -> None:
    found = sources()
    assert found.keys() <= shipped_recipes().keys()
    files = {name: flattened(tomllib.loads(shipped_recipes()[name])) for name in found}
    for name, settings in found.items():
        group = [other for other in found if found[other] is settings]
        for key, values in settings:
            used = [files[other][key] for other in group]
            assert all(value in used for value in values), (name, key)


def test_fields_and_criteria_exist() -> None:
    listed = {codes(cells[0])[0] for cells in rows(section(TRAINING, "In Python"))}
    assert listed <= {entry.name for entry in fields(Recipe)}
    (kept,) = [cells[1] for cells in rows(section(TRAINING, "The folder of a run")) if "model" in cells[0]]
    assert {"nll", *codes(kept)[1:]} == set(get_args(Criterion)) - {"last"}


def test_the_rule_for_compiling_is_stated() -> None:
    (rule,) = [cells[1] for cells in rows(section(TRAINING, "On a GPU")) if cells[0] == "`auto` (default)"]
    assert f"takes {COMPILE_SECONDS:g} seconds, or {CACHED_COMPILE_SECONDS:g} if" in rule
    assert TIME_SAVED == 0.25
    assert "makes the rest of the run a quarter shorter" in rule
