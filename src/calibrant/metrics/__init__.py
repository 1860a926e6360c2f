"""Metrics: functions of logits and target, of `Predictions`, or of sums over a stream."""

from calibrant.metrics.accuracy import ClassCounts, accuracy, balanced_accuracy, mean_iou, top_k_accuracy
from calibrant.metrics.calibration import adaptive_ece, debiased_ece, ece, ece_l2, mce, smooth_ece, sweep_ece
from calibrant.metrics.catalogue import METRICS, Description, Metric
from calibrant.metrics.classwise import ClassGaps, classwise_ece, classwise_mce
from calibrant.metrics.ood import (
    SCORES,
    Detection,
    detection,
    energy,
    entropy,
    generalised_entropy,
    maximum_logit,
    maximum_probability,
    ood_detection,
)
from calibrant.metrics.predictions import Predictions
from calibrant.metrics.scores import Split, brier, brier_split, kde_ece, nll, nll_split, root_brier
from calibrant.metrics.selective import (
    RiskCoverage,
    augrc,
    aurc,
    coverage_at_risk,
    risk_at_coverage,
    risk_coverage,
)
from calibrant.metrics.uncertainty import (
    CalibrationTest,
    binomial_interval,
    calibration_test,
    consistency_band,
)

__all__ = [
    "METRICS",
    "SCORES",
    "CalibrationTest",
    "ClassCounts",
    "ClassGaps",
    "Description",
    "Detection",
    "Metric",
    "Predictions",
    "RiskCoverage",
    "Split",
    "accuracy",
    "adaptive_ece",
    "augrc",
    "aurc",
    "balanced_accuracy",
    "binomial_interval",
    "brier",
    "brier_split",
    "calibration_test",
    "classwise_ece",
    "classwise_mce",
    "consistency_band",
    "coverage_at_risk",
    "debiased_ece",
    "detection",
    "ece",
    "ece_l2",
    "energy",
    "entropy",
    "generalised_entropy",
    "kde_ece",
    "maximum_logit",
    "maximum_probability",
    "mce",
    "mean_iou",
    "nll",
    "nll_split",
    "ood_detection",
    "risk_at_coverage",
    "risk_coverage",
    "root_brier",
    "smooth_ece",
    "sweep_ece",
    "top_k_accuracy",
]
