"""Fused forward and backward passes; the losses choose them, users never see them."""

from calibrant.kernels.reduction import Term, reduce_classes, sum_by_class
from calibrant.kernels.terms import (
    Correctness,
    Discrimination,
    Entropy,
    Evaluator,
    Exclusion,
    Formula,
    LogLikelihood,
    LowerProbability,
    MarginPenalty,
    MeanLogLikelihood,
    Slope,
    SquaredError,
    SumAndSlope,
    TopProbability,
    WeightedSum,
    sum_over_classes,
)

__all__ = [
    "Correctness",
    "Discrimination",
    "Entropy",
    "Evaluator",
    "Exclusion",
    "Formula",
    "LogLikelihood",
    "LowerProbability",
    "MarginPenalty",
    "MeanLogLikelihood",
    "Slope",
    "SquaredError",
    "SumAndSlope",
    "Term",
    "TopProbability",
    "WeightedSum",
    "reduce_classes",
    "sum_by_class",
    "sum_over_classes",
]
