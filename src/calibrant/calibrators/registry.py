"""Every calibrator by its key."""

from __future__ import annotations

from inspect import signature
from typing import Any

from calibrant.arguments import nearest
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.bayesian_binning import BayesianBinning
from calibrant.calibrators.beta import Beta
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
from calibrant.calibrators.platt import Platt
from calibrant.calibrators.spline import Spline
from calibrant.calibrators.temperature import Temperature

CALIBRATORS: dict[str, type[Calibrator]] = {
    "identity": Identity,
    "temperature": Temperature,
    "local-temperature": LocalTemperature,
    "ensemble-temperature": EnsembleTemperature,
    "vector": VectorScaling,
    "structured-vector": StructuredVectorScaling,
    "matrix": MatrixScaling,
    "structured-matrix": StructuredMatrixScaling,
    "dirichlet": Dirichlet,
    "spline": Spline,
    "isotonic": Isotonic,
    "histogram-binning": HistogramBinning,
    "bayesian-binning": BayesianBinning,
    "beta": Beta,
    "platt": Platt,
}
"""Every calibrator by its key."""


def create_calibrator(key: str, **options: Any) -> Calibrator:
    """The calibrator of that key, not fitted yet.

    Args:
        key: one of `CALIBRATORS`.
        **options: keyword arguments of the calibrator's class.

    Raises:
        ValueError: an unknown key.
        TypeError: an unknown option.

    >>> create_calibrator("spline", knots=8).knots
    8
    """
    if key not in CALIBRATORS:
        raise ValueError(
            f"unknown calibrator {key!r}{nearest(key, CALIBRATORS)}; known: {', '.join(CALIBRATORS)}"
        )
    known = list(signature(CALIBRATORS[key]).parameters)
    for name in options:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise TypeError(
                f"calibrator {key!r} has no option {name!r}{nearest(name, known)}; it takes: {takes}"
            )
    return CALIBRATORS[key](**options)
