"""Calibration losses, by key."""

from __future__ import annotations

from typing import Any

from calibrant import arguments
from calibrant.losses.accuracy_uncertainty import AccuracyUncertainty
from calibrant.losses.adaptation import adapt_on
from calibrant.losses.adaptive import AdaptationWarning, AdaptiveLoss
from calibrant.losses.adaptive_focal import AdaDualFocal, AdaFocal, CalFocal
from calibrant.losses.base import Loss
from calibrant.losses.brier import Brier
from calibrant.losses.brier_weighting import BrierWeighting
from calibrant.losses.class_frequency import ClassFrequencyPenalty
from calibrant.losses.conditional_smoothing import ConditionalSmoothing
from calibrant.losses.confidence_penalty import ConfidencePenalty
from calibrant.losses.cross_entropy import CrossEntropy
from calibrant.losses.dirichlet_kernel import DirichletKernelCalibration
from calibrant.losses.dual_focal import DualFocal
from calibrant.losses.focal import Focal, InverseFocal, SampleDependentFocal
from calibrant.losses.heuristic import HeuristicMultipliers
from calibrant.losses.kernel_calibration import KernelCalibration, WeightedKernelCalibration
from calibrant.losses.label_relaxation import LabelRelaxation
from calibrant.losses.label_smoothing import LabelSmoothing
from calibrant.losses.lagrangian import AugmentedLagrangian
from calibrant.losses.learned_scale import LearnedScale
from calibrant.losses.margin_smoothing import MarginSmoothing
from calibrant.losses.max_suppression import MaxSuppression
from calibrant.losses.neighbour_aware import NeighbourAware
from calibrant.losses.pairwise_constraints import PairwiseConstraints
from calibrant.losses.penalties import PENALTIES, Penalty
from calibrant.losses.soft_binning import SoftBinning

__all__ = [
    "LOSSES",
    "PENALTIES",
    "AccuracyUncertainty",
    "AdaDualFocal",
    "AdaFocal",
    "AdaptationWarning",
    "AdaptiveLoss",
    "AugmentedLagrangian",
    "Brier",
    "BrierWeighting",
    "CalFocal",
    "ClassFrequencyPenalty",
    "ConditionalSmoothing",
    "ConfidencePenalty",
    "CrossEntropy",
    "DirichletKernelCalibration",
    "DualFocal",
    "Focal",
    "HeuristicMultipliers",
    "InverseFocal",
    "KernelCalibration",
    "LabelRelaxation",
    "LabelSmoothing",
    "LearnedScale",
    "Loss",
    "MarginSmoothing",
    "MaxSuppression",
    "NeighbourAware",
    "PairwiseConstraints",
    "Penalty",
    "SampleDependentFocal",
    "SoftBinning",
    "WeightedKernelCalibration",
    "adapt_on",
    "create_loss",
]


def _check(key: str, part: type[Loss], _: object) -> None:
    """Refuse what is no loss, and options that `Loss.hyperparameters` would not find."""
    if not (isinstance(part, type) and issubclass(part, Loss)):
        raise TypeError(f"{key!r}: expected a subclass of calibrant's Loss, got {part!r}")
    for each in list(arguments.parameters_of(part.__init__).values())[2:]:  # after self and num_classes
        if each.kind is each.POSITIONAL_OR_KEYWORD:
            raise TypeError(
                f"{key!r}: the option {each.name!r} of {part.__name__} must be keyword-only: "
                f"def __init__(self, num_classes, *, {each.name}, ...)"
            )


LOSSES: arguments.Registry[type[Loss]] = arguments.Registry(
    {
        "ce": CrossEntropy,
        "ls": LabelSmoothing,
        "ecp": ConfidencePenalty,
        "brier": Brier,
        "focal": Focal,
        "flsd": SampleDependentFocal,
        "inverse-focal": InverseFocal,
        "dual-focal": DualFocal,
        "mbls": MarginSmoothing,
        "cpc": PairwiseConstraints,
        "mmce": KernelCalibration,
        "mmce-weighted": WeightedKernelCalibration,
        "kde-xe": DirichletKernelCalibration,
        "mdca": ClassFrequencyPenalty,
        "maxsup": MaxSuppression,
        "label-relaxation": LabelRelaxation,
        "acls": ConditionalSmoothing,
        "sb-ece": SoftBinning,
        "bsce-gra": BrierWeighting,
        "avuc": AccuracyUncertainty,
        "nacl": NeighbourAware,
        "cals-alm": AugmentedLagrangian,
        "cals-hr": HeuristicMultipliers,
        "adafocal": AdaFocal,
        "ada-dual-focal": AdaDualFocal,
        "calfocal": CalFocal,
        "ada-scale": LearnedScale,
    },
    _check,
)
"""Every loss by its key."""


def create_loss(key: str, num_classes: int, **hyperparameters: Any) -> Loss:
    """Create a calibration loss by its key, such as ``"cals-alm"``.

    Args:
        key: the key of the loss in `LOSSES`.
        num_classes: the number of classes, K; 2 for ``binary=True``.
        **hyperparameters: keyword arguments of the class of the loss.

    Raises:
        ValueError: the key is unknown, or a hyper-parameter has no value that the loss can take.
        TypeError: the loss has no such hyper-parameter.

    >>> create_loss("cals-alm", 10, margin=6, penalty="p2")
    AugmentedLagrangian(10, margin=6.0, penalty='p2')
    """
    if key not in LOSSES:
        raise ValueError(arguments.unknown("loss", key, LOSSES))
    valid = LOSSES[key].hyperparameters()
    arguments.check_known(f"loss {key!r}", hyperparameters, valid, "hyper-parameter")
    for name, value in hyperparameters.items():  # a loss from outside the package may not check
        if isinstance(value, str) and _is_number(valid[name].annotation):
            raise ValueError(f"{name} must be a number, got {value!r}")
    return LOSSES[key](num_classes, **hyperparameters)


def _is_number(annotation: Any) -> bool:
    """Whether an annotation, or its text, says that an option is a number, or a number or None."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    types = {part.strip() for part in text.split("|")}
    return types != {"None"} and types <= {"int", "float", "None"}
