"""Post-hoc calibrators: layers from logits to logits, fitted on held-out data."""

from __future__ import annotations

from calibrant.calibrators.base import Batches, Calibrator
from calibrant.calibrators.bayesian_binning import BayesianBinning
from calibrant.calibrators.ensemble import EnsembleTemperature
from calibrant.calibrators.histogram_binning import HistogramBinning
from calibrant.calibrators.identity import Identity
from calibrant.calibrators.isotonic import Isotonic
from calibrant.calibrators.linear import (
    Dirichlet,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from calibrant.calibrators.local import LocalTemperature
from calibrant.calibrators.logistic import Beta, Platt
from calibrant.calibrators.registry import CALIBRATORS, create_calibrator
from calibrant.calibrators.selection import Ranked, Ranking, choose, rank
from calibrant.calibrators.spline import Spline
from calibrant.calibrators.storage import load_calibrator, save_calibrator
from calibrant.calibrators.temperature import Temperature

__all__ = [
    "CALIBRATORS",
    "Batches",
    "BayesianBinning",
    "Beta",
    "Calibrator",
    "Dirichlet",
    "EnsembleTemperature",
    "HistogramBinning",
    "Identity",
    "Isotonic",
    "LocalTemperature",
    "MatrixScaling",
    "Platt",
    "Ranked",
    "Ranking",
    "Spline",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "Temperature",
    "VectorScaling",
    "choose",
    "create_calibrator",
    "load_calibrator",
    "rank",
    "save_calibrator",
]
