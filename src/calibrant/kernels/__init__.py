"""Passes over logits in cache-sized blocks, and kernels for GPUs; users never see them."""

from calibrant.kernels.block import Block
from calibrant.kernels.dirichlet import dirichlet_bandwidth, dirichlet_errors
from calibrant.kernels.fused import Again, Fused, again, backward_is_compiled, can_fuse, fused_loss
from calibrant.kernels.measuring import can_measure, gap_sums, margin_sums, outcomes, top_classes
from calibrant.kernels.normalising import normalised
from calibrant.kernels.reduction import Term, nan_if_invalid, reduce_classes, sum_by_class, visit
from calibrant.kernels.terms import (
    Correctness,
    Discrimination,
    Entropy,
    Exclusion,
    Formula,
    LogLikelihood,
    LowerProbability,
    MarginPenalty,
    MeanLogLikelihood,
    PenaltyFunction,
    Slope,
    SquaredError,
    SumAndSlope,
    TopProbability,
    WeightedSum,
    sum_over_classes,
)

__all__ = [
    "Again",
    "Block",
    "Correctness",
    "Discrimination",
    "Entropy",
    "Exclusion",
    "Formula",
    "Fused",
    "LogLikelihood",
    "LowerProbability",
    "MarginPenalty",
    "MeanLogLikelihood",
    "PenaltyFunction",
    "Slope",
    "SquaredError",
    "SumAndSlope",
    "Term",
    "TopProbability",
    "WeightedSum",
    "again",
    "backward_is_compiled",
    "can_fuse",
    "can_measure",
    "dirichlet_bandwidth",
    "dirichlet_errors",
    "fused_loss",
    "gap_sums",
    "margin_sums",
    "nan_if_invalid",
    "normalised",
    "outcomes",
    "reduce_classes",
    "sum_by_class",
    "sum_over_classes",
    "top_classes",
    "visit",
]
