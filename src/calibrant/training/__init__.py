"""Training by recipe: what to train on what, the loop that can be killed and resumed, and comparisons."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrant.options import Choice, RecipeError
    from calibrant.training.comparing import compare
    from calibrant.training.engine import train
    from calibrant.training.recipe import Recipe
    from calibrant.training.runs import Run

__all__ = ["Choice", "Recipe", "RecipeError", "Run", "TrainingError", "compare", "train"]

_HOMES = {
    "Choice": "calibrant.options",
    "Recipe": "calibrant.training.recipe",
    "RecipeError": "calibrant.options",
    "Run": "calibrant.training.runs",
    "compare": "calibrant.training.comparing",
    "train": "calibrant.training.engine",
}


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why."""


def __getattr__(name: str) -> Any:
    # On demand: Lightning takes seconds to import, and a list of recipes does not need it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
