"""Post-hoc calibrators: layers from logits to logits, fitted on held-out data."""

from __future__ import annotations

from difflib import get_close_matches
from inspect import signature
from typing import Any

from calibrant.calibrators.base import Batches, Calibrator
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
            f"unknown calibrator {key!r}{_nearest(key, CALIBRATORS)}; known: {', '.join(CALIBRATORS)}"
        )
    known = list(signature(CALIBRATORS[key]).parameters)
    for name in options:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise TypeError(
                f"calibrator {key!r} has no option {name!r}{_nearest(name, known)}; it takes: {takes}"
            )
    return CALIBRATORS[key](**options)


def _nearest(word: object, known: Any) -> str:
    near = get_close_matches(str(word).lower(), known, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


# Below, because they create calibrators by their keys.
from calibrant.calibrators.choice import Ranked, Ranking, choose, rank  # noqa: E402
from calibrant.calibrators.storage import load_calibrator, save_calibrator  # noqa: E402
