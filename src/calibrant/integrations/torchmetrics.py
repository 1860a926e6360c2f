"""Calibration errors and the NLL as torchmetrics metrics, in constant memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

from calibrant.extras import require

require("torchmetrics", "torchmetrics", purpose=__name__)

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from calibrant.arguments import label, one_of, true_or_false, whole_number
from calibrant.histogram import ConfidenceHistogram
from calibrant.kernels import LogLikelihood, nan_if_invalid, reduce_classes
from calibrant.layout import Elements, arrange, as_decisions
from calibrant.metrics.catalogue import METRICS, Options, calibration_errors
from calibrant.metrics.classwise import ClassGaps, classwise_ece
from calibrant.probabilities import warn_of_probabilities
from calibrant.statistics import Statistics, adding, device_only, sum_dtype

__all__ = ["CalibrationError", "ClasswiseCalibrationError", "NegativeLogLikelihood", "SelectiveRisk"]

Sums = TypeVar("Sums", bound=Statistics)


def _elements(number: int, num_classes: int) -> Elements:
    return arrange(torch.zeros(number, num_classes), torch.zeros(number, dtype=torch.long))


class _ErrorOfSums(Metric, Generic[Sums]):
    """A metric whose states are the fields of `Statistics`: every reduction is a sum."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound: float | None = 1.0
    binary = False
    in_double: Tensor

    def __init__(self, nothing: Sums, num_classes: int | None, ignore_index: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_classes = num_classes
        self.ignore_index = label("ignore_index", ignore_index)
        self._form = type(nothing)
        self._looked_at = False
        for field in fields(nothing):
            self.add_state(field.name, getattr(nothing, field.name), dist_reduce_fx="sum")
        # Metrics in a collection share their updates if their states are equal after the first batch. This
        # state keeps metrics with different ignored labels apart.
        self.add_state("ignored_label", torch.tensor(ignore_index), dist_reduce_fx="max")
        # Whether any logits were float64. A state, because metrics that share updates share only states.
        self.add_state("in_double", torch.tensor(0), dist_reduce_fx="max")

    @abstractmethod
    def _measure(self, elements: Elements) -> Sums:
        """The sums of a batch."""

    @abstractmethod
    def _error(self, sums: Sums) -> float:
        """The error, from the sums of at least one element."""

    @property
    def sums(self) -> Sums:
        """The sums since the last reset, as calibrant's own metrics take them."""
        return self._form(*(getattr(self, field.name) for field in fields(self._form)))

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch. The names of the arguments are those of torchmetrics.

        Args:
            preds: floating-point logits ``(B, K, *S)``. For probabilities pass ``probabilities.log()``. With
                ``binary``, single logits ``(B,)`` or ``(B, L, *S)``; for probabilities pass
                ``probabilities.logit()``.
            target: labels ``(B, *S)``. With ``binary``, 0 and 1 in the shape of ``preds``.
        """
        in_double = int(isinstance(preds, Tensor) and preds.dtype == torch.float64)
        if self.binary:
            preds, target = as_decisions(preds, target)
        elements = arrange(preds, target, num_classes=self.num_classes, ignore_index=self.ignore_index)
        if not self._looked_at:  # once, because it waits for a GPU
            warn_of_probabilities(preds)
            self._looked_at = True
        measured = self._measure(elements)
        # A batch that cannot be measured makes the result NaN, on a GPU without waiting for it.
        measured = replace(measured, samples=measured.samples + nan_if_invalid(elements))
        with adding:
            sums = self.sums + measured
            # Not in place: in a collection several metrics hold the same tensors.
            for field in fields(sums):
                setattr(self, field.name, getattr(sums, field.name))
            self.in_double = self.in_double.clamp_min(in_double)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Add a batch, and return the error of this batch; arguments as in `update`."""
        # torchmetrics puts the sums aside meanwhile, so no other thread may add to them.
        with adding:
            return super().forward(*args, **options)

    def compute(self) -> Tensor:
        """The error, a scalar; NaN without valid elements, or if some logits or labels were not valid.

        It is float64 if any logits were, else float32, as wrappers of torchmetrics expect.
        """
        sums = self.sums
        # Not an exception: a batch without valid elements must not stop a training run that logs every step.
        value = self._error(sums) if sums.samples > 0 else torch.nan
        dtype = torch.float64 if self.in_double else torch.float32
        return torch.tensor(value, dtype=dtype, device=sums.samples.device)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Draw a result of `compute` or `forward`, or a list of them as a curve; by default `compute()`.

        It draws on the axes of matplotlib ``ax``, by default those of a new figure, and returns the figure
        (None if axes were given) and the axes.
        """
        return self._plot(val, ax)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Move to another device, but keep the type."""
        return super()._apply(device_only(fn), exclude_state)


class _ErrorOfHistogram(_ErrorOfSums[ConfidenceHistogram]):
    """A metric of a histogram of confidences, by its name in `calibrant.metrics.METRICS`."""

    def __init__(
        self,
        kind: str,
        kinds: Sequence[str],
        *,
        bins: int = 15,
        binary: bool,
        of_yes: bool,
        ignore_index: int,
        **options: Any,
    ) -> None:
        one_of("kind", kind, kinds)
        if given := sorted({"task", "num_classes", "n_bins"} & options.keys()):
            raise TypeError(
                f"{', '.join(given)}: not an argument of this metric. Use bins for n_bins, and binary=True "
                "for task='binary'; the number of classes is read from the logits"
            )
        super().__init__(ConfidenceHistogram.of(_elements(0, 2)), None, ignore_index, **options)
        self.kind = kind
        self.bins = bins
        self.binary = true_or_false("binary", binary)
        # Whether the sums are of the probability of yes instead of the top class. A state, because it keeps
        # these metrics apart from those of decisions; see `ignored_label`.
        self.add_state("of_yes", torch.tensor(int(of_yes)), dist_reduce_fx="max")
        self._of_yes = of_yes
        # An unusable number of bins fails here, not at the end of the first epoch.
        self._error(ConfidenceHistogram.of(_elements(1, 2)))

    def _measure(self, elements: Elements) -> ConfidenceHistogram:
        if self._of_yes:
            return ConfidenceHistogram.of_outcomes(elements.positive, elements.labels == 1)
        return ConfidenceHistogram.of(elements)

    def _error(self, sums: ConfidenceHistogram) -> float:
        return float(METRICS[self.kind].function(sums, Options(self.bins)))


class CalibrationError(_ErrorOfHistogram):
    """A calibration error of the top class's confidence, with a state of about 73 KiB.

    With ``binary=True`` each logit is a yes-or-no decision of its own, and the error is that of the
    probability of "yes" against its frequency, as in `torchmetrics.classification.BinaryCalibrationError`.

    It always takes logits. Errors over equal-width bins (``ece``, ``mce``, ``ece_l2``) are exact. The other
    errors are approximated from a histogram of about three thousand cells; the functions in
    `calibrant.metrics` state how close they are. In a `torchmetrics.MetricCollection`, metrics of all kinds
    with the same ``ignore_index`` share one update.

    Args:
        kind: the name of the error in `calibrant.metrics.METRICS`: ``ece``, ``mce``, ``ece_l2``,
            ``adaptive_ece``, ``debiased_ece``, ``debiased_ece_l1``, ``sweep_ece``, ``sweep_ece_l1``,
            ``sweep_ece_width``, ``sweep_ece_width_l1`` or ``smooth_ece``.
        bins: number of bins; a divisor of 300 for equal-width bins. The sweeps and ``smooth_ece`` ignore it.
        binary: whether logits are single ones.
        ignore_index: the label of elements to leave out.
        options: the options of `torchmetrics.Metric`.

    Shapes: logits ``(B, K, *S)``, target ``(B, *S)``; if binary, both ``(B,)`` or ``(B, L, *S)``.

    >>> metric = CalibrationError("ece")
    >>> metric.update(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.4999
    """

    def __init__(
        self,
        kind: str = "ece",
        *,
        bins: int = 15,
        binary: bool = False,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        options |= {"bins": bins, "binary": binary, "ignore_index": ignore_index}
        super().__init__(kind, calibration_errors("confidences"), of_yes=binary, **options)


class SelectiveRisk(_ErrorOfHistogram):
    """A metric of selective prediction, with a state of about 73 KiB.

    It always takes logits. Elements in one of about three thousand cells count as equally confident; the
    functions in `calibrant.metrics` are exact.

    ``kind`` is the name of the metric in `calibrant.metrics.METRICS`: ``aurc``, ``augrc``,
    ``risk_at_coverage`` (80 %) or ``coverage_at_risk`` (5 %). Other arguments and shapes as for
    `CalibrationError`.

    >>> metric = SelectiveRisk("risk_at_coverage")
    >>> metric.update(torch.tensor([[9.0, 0.0], [5.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 1]))
    >>> round(metric.compute().item(), 4)
    0.3333
    """

    def __init__(
        self, kind: str = "aurc", *, binary: bool = False, ignore_index: int = -100, **options: Any
    ) -> None:
        kinds = [name for name, metric in METRICS.items() if metric.group == "selective"]
        # Also with single logits, a decision is refused by its confidence.
        super().__init__(kind, kinds, binary=binary, of_yes=False, ignore_index=ignore_index, **options)

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """Whether larger values are better, for `torchmetrics.MetricTracker`."""
        return METRICS[self.kind].higher_is_better


class ClasswiseCalibrationError(_ErrorOfSums[ClassGaps]):
    """ECE of each class's probability against its frequency, averaged over classes; exact.

    The state has ``num_classes × bins`` sums, for any number of equal-width bins. It always takes logits.
    Other arguments and shapes as for `CalibrationError`, without single logits.

    >>> metric = ClasswiseCalibrationError(2)
    >>> metric.update(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]))
    >>> round(metric.compute().item(), 4)
    0.4999
    """

    def __init__(self, num_classes: int, *, bins: int = 15, ignore_index: int = -100, **options: Any) -> None:
        num_classes = whole_number("num_classes", num_classes)
        super().__init__(ClassGaps.of(_elements(0, num_classes), bins), num_classes, ignore_index, **options)
        self.bins = bins

    def _measure(self, elements: Elements) -> ClassGaps:
        return ClassGaps.of(elements, self.bins)

    def _error(self, sums: ClassGaps) -> float:
        return classwise_ece(sums)


@dataclass(frozen=True, eq=False)
class _LogLikelihoods(Statistics):
    """The summed log-probabilities of the true classes."""

    log_likelihood: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, elements: Elements) -> Self:
        dtype = sum_dtype(elements.logits.device)
        values = torch.where(elements.valid, reduce_classes(elements, LogLikelihood()), 0)
        return cls(elements.valid.sum(dtype=dtype), values.sum(dtype=dtype))


class NegativeLogLikelihood(_ErrorOfSums[_LogLikelihoods]):
    """Mean negative log-likelihood of the true class (cross-entropy); exact.

    The mean is over all elements of all batches and processes, each with the same weight. It always takes
    logits. Class weights and label smoothing of a loss do not change it. Arguments and shapes as for
    `CalibrationError`.

    >>> metric = NegativeLogLikelihood()
    >>> metric.update(torch.zeros(3, 2), torch.tensor([0, 0, 1]))
    >>> round(metric.compute().item(), 4)
    0.6931
    """

    plot_upper_bound: float | None = None

    def __init__(self, *, binary: bool = False, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(_LogLikelihoods.of(_elements(0, 2)), None, ignore_index, **options)
        self.binary = true_or_false("binary", binary)

    def _measure(self, elements: Elements) -> _LogLikelihoods:
        return _LogLikelihoods.of(elements)

    def _error(self, sums: _LogLikelihoods) -> float:
        return -float(sums.log_likelihood / sums.samples)
