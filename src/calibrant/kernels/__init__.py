"""Passes over logits in cache-sized blocks, and one kernel for GPUs."""

from calibrant.kernels.block import Block
from calibrant.kernels.composition import Composition, FirstTerm, Part, PenaltyTerm, Value
from calibrant.kernels.dirichlet import dirichlet_bandwidth, dirichlet_errors
from calibrant.kernels.fused import can_fuse, fused_loss
from calibrant.kernels.launch import Options
from calibrant.kernels.reduction import Term, nan_if_invalid, reduce_classes, sum_by_class, visit
from calibrant.kernels.source import device_function
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
    "Block",
    "Composition",
    "Correctness",
    "Discrimination",
    "Entropy",
    "Exclusion",
    "FirstTerm",
    "Formula",
    "LogLikelihood",
    "LowerProbability",
    "MarginPenalty",
    "MeanLogLikelihood",
    "Options",
    "Part",
    "PenaltyFunction",
    "PenaltyTerm",
    "Slope",
    "SquaredError",
    "SumAndSlope",
    "Term",
    "TopProbability",
    "Value",
    "WeightedSum",
    "can_fuse",
    "device_function",
    "dirichlet_bandwidth",
    "dirichlet_errors",
    "fused_loss",
    "nan_if_invalid",
    "reduce_classes",
    "sum_by_class",
    "sum_over_classes",
    "visit",
]
