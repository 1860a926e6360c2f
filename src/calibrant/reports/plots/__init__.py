"""Plots for papers and reports. Each is a function of data and axes that returns the axes it drew on."""

from calibrant.reports.plots.calibration import class_gaps, reliability_diagram
from calibrant.reports.plots.distributions import confidences, maximum_logits, roc_curve
from calibrant.reports.plots.losses import (
    bin_confidences,
    edges,
    gammas,
    gaps,
    learned_quantity,
    multipliers,
    penalties,
)
from calibrant.reports.plots.methods import accuracy_against_ece, methods_side_by_side, training_curves
from calibrant.reports.plots.sensitivity import sensitivity

__all__ = [
    "accuracy_against_ece",
    "bin_confidences",
    "class_gaps",
    "confidences",
    "edges",
    "gammas",
    "gaps",
    "learned_quantity",
    "maximum_logits",
    "methods_side_by_side",
    "multipliers",
    "penalties",
    "reliability_diagram",
    "roc_curve",
    "sensitivity",
    "training_curves",
]
