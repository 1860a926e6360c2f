"""Logistic regression for many classes at once, and the calibrators that consist of it: Platt and Beta."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators.one_vs_rest import (
    OneVsRest,
    classes_at_once,
    indicators,
    limit_absent,
    log_probabilities,
)
from calibrant.warning import warn

# The weight of a penalty on the coefficients of standardised features, relative to a sum over samples. It has
# the effect of about a millionth of a sample, and gives separable classes a solution.
_RIDGE = 1e-6

# Half a dozen are usual, 30 are rare. Separable classes need one step per unit of the exponent.
_STEPS = 100

# If the objective is estimated to be this close to its least value, one Newton step is the last: the method
# converges quadratically.
_CLOSE = 1e-6

# A share of the curvature. Features that nearly depend on each other need so little, and a dozen steps raise
# it to what a plateau needs.
_LEAST_DAMPING = 1e-12


class Sigmoid(OneVsRest):
    """``q_k = sigmoid(w_k · x_k + v_k)`` with features x of each class's probability, scaled to sum to 1.

    Attributes:
        slopes: w, ``(K, F)``, or ``(K,)`` for a single feature.
        intercepts: v, ``(K,)``.
    """

    slopes: Tensor
    intercepts: Tensor

    def __init__(self) -> None:
        super().__init__()  # of each class: the variant is no option

    @abstractmethod
    def features(self, present: Tensor, absent: Tensor) -> list[Tensor]:
        """F features, each ``(N, K)``, from `log_probabilities`."""

    @abstractmethod
    def coefficients(self, features: Tensor, outcome: Tensor) -> Tensor:
        """Slopes and intercepts ``(C, F + 1)`` from features ``(C, F, N)`` and hits ``(C, N)``."""

    def fit_maps(self, rows: Tensor, labels: Tensor) -> None:
        size = classes_at_once(rows)
        features = [torch.split(each, size, 1) for each in self.features(*log_probabilities(rows))]
        outcomes = torch.split(indicators(rows, labels, self.variant), size)
        fitted = [
            self.coefficients(torch.stack([part.T for part in parts], 1), outcome)
            for *parts, outcome in zip(*features, outcomes, strict=True)
        ]
        coefficients = torch.cat(fitted)
        self.learn("slopes", coefficients[:, :-1].squeeze(1))
        self.learn("intercepts", coefficients[:, -1])

    def transform(self, rows: Tensor) -> Tensor:
        present, absent = log_probabilities(rows)
        slopes = self.learned("slopes", present).view(rows.shape[1], -1).unbind(1)
        odds = self.learned("intercepts", present)
        for slope, feature in zip(slopes, self.features(present, absent), strict=True):
            odds = odds + slope * feature
        logarithms = F.logsigmoid(odds).log_softmax(-1)
        logarithms = limit_absent(self.learned("ceilings", present), present, logarithms)
        # float16 can hold the bound, which is far below any probability that matters.
        return logarithms.clamp_min(-1e4)


class _Place(NamedTuple):
    """Coefficients ``(C, G)``, with the objective ``(C,)``, its gradient and its Hessian ``(C, G, G)``."""

    weights: Tensor
    value: Tensor
    slope: Tensor
    curvature: Tensor

    def step(self, damping: Tensor) -> tuple[Tensor, Tensor]:
        """The step to subtract, damped unless the solution is close, and the gain estimated to be left.

        The estimate is Newton's, without damping: a damped step is also small where much is left to gain.
        """
        left = (torch.linalg.solve(self.curvature, self.slope) * self.slope).sum(-1) / 2
        damping = torch.where(left < _CLOSE, 0.0, damping)
        diagonal = self.curvature.diagonal(dim1=-2, dim2=-1)
        damped = self.curvature + torch.diag_embed(damping.unsqueeze(-1) * diagonal)
        return torch.linalg.solve(damped, self.slope), left

    def better(self, other: _Place) -> _Place:
        """The better place for each problem."""
        moved = other.value <= self.value
        both = zip(self, other, strict=True)
        return _Place(*(torch.where(moved.view(-1, *[1] * (x.ndim - 1)), y, x) for x, y in both))


def fit_logistic(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise ``Σ softplus(z) - t z`` with ``z = w · x + v``, by damped Newton steps, for C problems.

    Args:
        features: x, scores ``(C, F, N)``. Their sum should be a fair guess of z.
        targets: t, ``(C, N)``, from 0 to 1.

    Returns:
        The coefficients ``(C, F + 1)``, with the intercept v last, and the least value found ``(C,)``.
    """
    center = features.mean(-1, keepdim=True)
    scale = (features - center).square().mean(-1, keepdim=True).sqrt()
    # A constant feature is useless. Its deviation, which is rounding, must not be scaled up.
    scale = torch.where(scale > 1e-12 * center.abs(), scale, torch.inf)
    design = torch.cat([(features - center) / scale, torch.ones_like(targets).unsqueeze(1)], 1)

    ridge = _RIDGE * torch.eye(design.shape[1], dtype=design.dtype, device=design.device)

    def measure(weights: Tensor) -> _Place:
        logits = (weights.unsqueeze(1) @ design).squeeze(1)
        value = -(F.logsigmoid(-logits) + targets * logits).sum(-1) + _RIDGE / 2 * weights.square().sum(-1)
        fitted = logits.sigmoid()
        slope = (design @ (fitted - targets).unsqueeze(-1)).squeeze(-1) + _RIDGE * weights
        curvature = (design * (fitted * (1 - fitted)).unsqueeze(1)) @ design.mT + ridge
        return _Place(weights, value, slope, curvature)

    # Two starting points: the scores themselves, usually close, and the mean of the targets, always safe.
    guess = torch.cat([scale.nan_to_num(posinf=0), center.sum(1, keepdim=True)], 1).squeeze(-1)
    safe = torch.zeros_like(guess)
    safe[:, -1] = targets.mean(-1).clamp(1e-6, 1 - 1e-6).logit()
    place = measure(safe).better(measure(guess))
    damping = torch.full_like(place.value, 1e-3)
    for _ in range(_STEPS):
        step, left = place.step(damping)
        trial = measure(place.weights - step)
        predicted = ((place.slope - (place.curvature @ step.unsqueeze(-1)).squeeze(-1) / 2) * step).sum(-1)
        # Damping falls only where the quadratic model holds: a smaller one has then not just been refused.
        faithful = place.value - trial.value > predicted / 2
        place = place.better(trial)
        if bool((left < _CLOSE).all()):
            break
        damping = torch.where(faithful, damping / 10, damping * 10).clamp_min(_LEAST_DAMPING)
    else:
        unfinished = int((left >= _CLOSE).sum())
        warn(
            f"{unfinished} of {len(left)} logistic regressions did not converge in {_STEPS} steps: they are "
            "usable and no worse than their starting points, but not optimal"
        )
    slopes = place.weights[:, :-1] / scale.squeeze(-1)
    intercepts = place.weights[:, -1:] - (slopes * center.squeeze(-1)).sum(-1, keepdim=True)
    return torch.cat([slopes, intercepts], 1), place.value


class Platt(Sigmoid):
    """Platt scaling: a sigmoid of each class's log-odds (key ``platt``).

    ``q_k = sigmoid(a_k · z_k + b_k)`` with ``z_k = log(s_k / (1 - s_k))``, for two classes the difference of
    the logits. Each class is fitted against the rest by maximum likelihood, and the results are scaled to sum
    to 1. For two classes the two sigmoids are complements, and the result is the original binary method.

    Platt, *Probabilistic Outputs for Support Vector Machines*, 1999.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Args:
        smooth_targets: fit to Platt's targets ``(n₊ + 1)/(n₊ + 2)`` and ``1/(n₋ + 2)`` instead of 1 and 0,
            as scikit-learn does. They keep the slope small if the data are separable. With few samples, the
            likelihood of the fitting data may then be below that of the original logits.

    Attributes:
        slopes: a, ``(K,)``.
        intercepts: b, ``(K,)``.
        ceilings: as in `Isotonic`.

    >>> import torch
    >>> logits = torch.tensor([[0.0, -3.0], [0.0, -3.0], [0.0, 3.0], [0.0, 3.0]])
    >>> calibrator = Platt().fit(logits, torch.tensor([0, 0, 1, 1]))
    >>> [round(number, 3) for number in calibrator(logits).exp()[:, 1].tolist()]
    [0.25, 0.25, 0.75, 0.75]
    """

    key: ClassVar[str] = "platt"

    def __init__(self, *, smooth_targets: bool = True) -> None:
        super().__init__()
        self.smooth_targets = smooth_targets

    def features(self, present: Tensor, absent: Tensor) -> list[Tensor]:
        return [present - absent]

    def coefficients(self, features: Tensor, outcome: Tensor) -> Tensor:
        targets = outcome.double()
        if self.smooth_targets:
            successes = targets.sum(-1, keepdim=True)
            failures = outcome.shape[-1] - successes
            targets = torch.where(outcome, (successes + 1) / (successes + 2), 1 / (failures + 2))
        return fit_logistic(features, targets)[0]


class Beta(Sigmoid):
    """Beta calibration of each class's probability (key ``beta``).

    ``q_k = sigmoid(a_k log s_k - b_k log(1 - s_k) + c_k)`` with a and b at least 0, so that the map never
    decreases. ``a = b = 1, c = 0`` is the identity. Each class is fitted against the rest by maximum
    likelihood under the constraint, and the results are scaled to sum to 1. For two classes the two maps are
    complements, and the result is the original binary method.

    Kull, Silva Filho and Flach, *Beta calibration: a well-founded and easily implemented improvement on
    logistic calibration for binary classifiers*, AISTATS 2017.

    Shape: logits ``(B, K, *S)`` to log-probabilities ``(B, K, *S)``.

    Attributes:
        slopes: a and b, ``(K, 2)``.
        intercepts: c, ``(K,)``.
        ceilings: as in `Isotonic`.

    >>> import torch
    >>> logits = torch.tensor([[0.0, -3.0], [0.0, -2.0], [0.0, 2.0], [0.0, 3.0]]).repeat(10, 1)
    >>> target = torch.tensor([0, 0, 1, 1]).repeat(10)
    >>> target[:4] = 1 - target[:4]
    >>> calibrator = Beta().fit(logits, target)
    >>> [round(number, 3) for number in calibrator(logits[:4]).exp()[:, 1].tolist()]
    [0.068, 0.148, 0.852, 0.932]
    """

    key: ClassVar[str] = "beta"

    def features(self, present: Tensor, absent: Tensor) -> list[Tensor]:
        return [present, -absent]

    def coefficients(self, features: Tensor, outcome: Tensor) -> Tensor:
        """Coefficients ``(C, 3)`` of the best logistic regressions with slopes of at least 0."""
        targets = outcome.to(features.dtype)
        best, value = fit_logistic(features, targets)
        negative = best[:, :2] < 0
        value = value.masked_fill(negative.any(1), torch.inf)

        def attempt(tried: Tensor, free: list[int]) -> None:
            """Fit the free slopes alone; the others are 0."""
            problems = tried.nonzero().squeeze(1)
            if not len(problems):
                return
            found = torch.zeros_like(best[problems])
            found[:, [*free, -1]], found_value = fit_logistic(features[problems][:, free], targets[problems])
            better = (found[:, :2] >= 0).all(1) & (found_value < value[problems])
            value[problems] = torch.where(better, found_value, value[problems])
            best[problems] = torch.where(better.unsqueeze(1), found, best[problems])

        # The problem is convex. If one slope is negative in the free solution, it is 0 in the constrained
        # solution. If both are negative, at least one of them is 0. Both are 0 only if no solution with one
        # slope is allowed.
        attempt(negative[:, 0], [1])
        attempt(negative[:, 1], [0])
        attempt(value.isinf(), [])
        return best
