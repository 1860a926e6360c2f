"""Training by recipe, resumable at any time, comparisons of losses, and the choice of their options."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrant.options import Choice, RecipeError
    from calibrant.training.grid import compare
    from calibrant.training.loop import train
    from calibrant.training.recipe import Recipe
    from calibrant.training.runs import Run
    from calibrant.training.sweeps import sweep
    from calibrant.training.tuning import tune

__all__ = [
    "Choice",
    "DivergedError",
    "Recipe",
    "RecipeError",
    "Run",
    "TrainingError",
    "compare",
    "sweep",
    "train",
    "tune",
]

_MODULES = {
    "Choice": "calibrant.options",
    "Recipe": "calibrant.training.recipe",
    "RecipeError": "calibrant.options",
    "Run": "calibrant.training.runs",
    "compare": "calibrant.training.grid",
    "sweep": "calibrant.training.sweeps",
    "train": "calibrant.training.loop",
    "tune": "calibrant.training.tuning",
}


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why."""


class DivergedError(TrainingError):
    """The loss or the weights became infinite or NaN."""


def __getattr__(name: str) -> Any:
    # On demand: Lightning takes seconds to import, and listing the recipes does not need it.
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
