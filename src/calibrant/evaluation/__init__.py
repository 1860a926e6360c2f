"""Evaluations: every metric of one model on one data set, with intervals, JSON and tables.

`calibrant.evaluation.comparison` compares several methods over several seeds.
"""

from calibrant.evaluation.evaluator import Evaluator, evaluate, evaluate_on
from calibrant.evaluation.figures import (
    ClassFigures,
    Difference,
    Evaluation,
    Figure,
    GroupFigures,
    Reliability,
)
from calibrant.evaluation.parts import evaluate_parts
from calibrant.probabilities import look_like_probabilities
from calibrant.processes import WorkerError

__all__ = [
    "ClassFigures",
    "Difference",
    "Evaluation",
    "Evaluator",
    "Figure",
    "GroupFigures",
    "Reliability",
    "WorkerError",
    "evaluate",
    "evaluate_on",
    "evaluate_parts",
    "look_like_probabilities",
]
