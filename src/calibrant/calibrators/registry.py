"""Every calibrator by its key."""

from __future__ import annotations

from inspect import signature
from typing import Any

from calibrant.arguments import Registry, check_known, unknown
from calibrant.calibrators.base import Calibrator
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
from calibrant.calibrators.spline import Spline
from calibrant.calibrators.temperature import Temperature

_KINDS: tuple[type[Calibrator], ...] = (
    Identity,
    Temperature,
    LocalTemperature,
    EnsembleTemperature,
    VectorScaling,
    StructuredVectorScaling,
    MatrixScaling,
    StructuredMatrixScaling,
    Dirichlet,
    Spline,
    Isotonic,
    HistogramBinning,
    BayesianBinning,
    Beta,
    Platt,
)


def _check(key: str, part: type[Calibrator], _: object) -> None:
    """Refuse what is no calibrator, keys other than its own, which files hold, and words of the commands."""
    if not (isinstance(part, type) and issubclass(part, Calibrator)):
        raise TypeError(f"{key!r}: expected a subclass of calibrant's Calibrator, got {part!r}")
    if key in ("auto", "none"):
        raise ValueError(f"{key!r}: a key must not be auto or none, which mean something else in commands")
    if getattr(part, "key", None) != key:
        raise ValueError(
            f"{key!r}: expected {part.__name__}.key = {key!r}, got {getattr(part, 'key', None)!r}"
        )


CALIBRATORS: Registry[type[Calibrator]] = Registry({kind.key: kind for kind in _KINDS}, _check)
"""Every calibrator by its key."""


class UnknownCalibratorError(ValueError):
    """There is no calibrator with this key."""


def create_calibrator(key: str, **options: Any) -> Calibrator:
    """Create a calibrator by its key. It is not fitted yet.

    Args:
        key: a key of `CALIBRATORS`.
        **options: keyword arguments of the calibrator's class.

    Raises:
        ValueError: the key is unknown.
        TypeError: the calibrator has no such option.

    >>> create_calibrator("spline", knots=8).knots
    8
    """
    if key not in CALIBRATORS:
        raise UnknownCalibratorError(unknown("calibrator", key, CALIBRATORS))
    check_known(f"calibrator {key!r}", options, signature(CALIBRATORS[key]).parameters)
    return CALIBRATORS[key](**options)
