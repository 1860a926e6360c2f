"""Training by recipe, resumable at any time, comparisons of losses, and the choice of their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrant.extras import require
from calibrant.lazy import on_demand

if TYPE_CHECKING:
    from calibrant.options import Choice, RecipeError
    from calibrant.training.grid import compare
    from calibrant.training.loop import train
    from calibrant.training.recipe import Recipe
    from calibrant.training.runs import Run
    from calibrant.training.sweeps import sweep
    from calibrant.training.tuning import tune

require("train", "lightning_fabric", "PIL", "rich", purpose=__name__)

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


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why."""


class DivergedError(TrainingError):
    """The loss or the weights became infinite or NaN."""


# On demand: Lightning takes seconds to import, and listing the recipes does not need it.
if not TYPE_CHECKING:
    __getattr__, __dir__ = on_demand(
        __name__,
        __path__,
        {
            "Choice": "calibrant.options",
            "Recipe": "calibrant.training.recipe",
            "RecipeError": "calibrant.options",
            "Run": "calibrant.training.runs",
            "compare": "calibrant.training.grid",
            "sweep": "calibrant.training.sweeps",
            "train": "calibrant.training.loop",
            "tune": "calibrant.training.tuning",
        },
    )
