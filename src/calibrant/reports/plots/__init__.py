"""Plots for papers and reports. Each is a function of data and axes that returns the axes it drew on.

``ax`` are the axes of matplotlib to draw on, by default those of a new figure. ``title`` is written above
them. ``metric`` is a key of `calibrant.metrics.METRICS`.
"""

from calibrant.extras import require

require("report", "matplotlib", purpose=__name__)

from calibrant.reports.plots.calibration import class_gaps, reliability_diagram
from calibrant.reports.plots.distributions import (
    confidences,
    lower_probabilities,
    maximum_logits,
    mean_roc_curve,
    roc_curve,
)
from calibrant.reports.plots.formulas import (
    dual_focal_phi,
    exponents,
    focal_losses,
    penalties,
    penalty_weights,
)
from calibrant.reports.plots.losses import (
    bin_confidences,
    edges,
    gammas,
    gaps,
    learned_quantity,
    multipliers,
)
from calibrant.reports.plots.methods import (
    accuracy_against_ece,
    mean_ranks,
    methods_side_by_side,
    risk_coverage,
    sensitivity,
    severity_curves,
    training_curves,
)

__all__ = [
    "accuracy_against_ece",
    "bin_confidences",
    "class_gaps",
    "confidences",
    "dual_focal_phi",
    "edges",
    "exponents",
    "focal_losses",
    "gammas",
    "gaps",
    "learned_quantity",
    "lower_probabilities",
    "maximum_logits",
    "mean_ranks",
    "mean_roc_curve",
    "methods_side_by_side",
    "multipliers",
    "penalties",
    "penalty_weights",
    "reliability_diagram",
    "risk_coverage",
    "roc_curve",
    "sensitivity",
    "severity_curves",
    "training_curves",
]
