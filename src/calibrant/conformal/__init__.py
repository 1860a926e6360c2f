"""Conformal prediction sets: layers from logits to sets of classes that cover the truth at a chosen rate."""

from __future__ import annotations

from calibrant.conformal.figures import ClassSets, SetCounts, SetFigures, evaluate_sets, expected_coverage
from calibrant.conformal.sets import (
    APS,
    CONFORMAL,
    LAC,
    RAPS,
    ConformalSets,
    create_conformal,
    load_conformal,
    save_conformal,
)

__all__ = [
    "APS",
    "CONFORMAL",
    "LAC",
    "RAPS",
    "ClassSets",
    "ConformalSets",
    "SetCounts",
    "SetFigures",
    "create_conformal",
    "evaluate_sets",
    "expected_coverage",
    "load_conformal",
    "save_conformal",
]
