"""Linear maps of logits, from one factor per class to a matrix: convex fits that start at a temperature."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range
from calibrant.calibrators.base import warn
from calibrant.calibrators.streaming import HeldOut, Scaling
from calibrant.calibrators.temperature import likeliest

Solve = Callable[[Tensor], Tensor]
"""From a gradient to the step that would bring it to 0."""

_STEPS, _HISTORY = 1000, 30
_GAIN = 1e-14  # of the value: rounding
_LEAST = 1e-12  # added to curvatures, which may be 0

# With more parameters than this, as a matrix for more than 316 classes has, a fit is done in single precision
# (the sums in double) and ends when five steps together gain less than noise would: a tenth of the time.
_MANY = 100_000
_NOISE = 1e-6
_GRADIENT = 1e-9  # of the mean negative log-likelihood: below it, a fit is done
_TOLERATED = 1e-4  # above it, a fit that stopped is worth a word


class Linear(Scaling):
    """What the linear maps share: their fit.

    With the fitted temperature T, features x (the logits, unless said otherwise), their mean m over the
    data and a unit u (T, unless T is at a bound), a map is written

        ``x/T + D·(x - m)/u + c``

    and the mean negative log-likelihood plus a penalty on D and c is minimised by L-BFGS, in float64 unless
    there are over 100,000 parameters, from D = 0 and c = 0. There the penalty is 0: the likelihood of the
    fitting data never falls below temperature scaling's, nor below that of the logits as they are. The units
    of the logits do not matter.

    Attributes:
        weight: the factors of x, ``(K,)`` or ``(K, K)``, once fitted.
        bias: ``(K,)``, once fitted.
    """

    per_class = True
    diagonal: ClassVar[bool]
    """Whether D holds one number per class."""
    weight: Tensor
    bias: Tensor

    @abstractmethod
    def penalties(self, classes: int, samples: int) -> tuple[float, float, float]:
        """Factors of the summed squares of D's diagonal, of the rest of D, and of c."""

    def features(self, rows: Tensor) -> Tensor:
        """What is mapped."""
        return rows

    def fit_passes(self, data: HeldOut) -> None:
        tempered = likeliest(data)
        classes, samples = data.num_classes, data.samples
        device = next(rows.device for rows, _ in data)
        mean = torch.zeros(classes, dtype=torch.float64, device=device)
        for rows, _ in data:
            mean += self.features(rows.double()).sum(0)
        mean /= samples
        size = classes if self.diagonal else classes * classes
        strength = self._strengths(classes, samples, device)
        many = size > _MANY

        def objective(parameters: Tensor) -> tuple[Tensor, Tensor, Solve | None]:
            deviation, bias = parameters[:size], parameters[size:]
            matrix = deviation if self.diagonal else deviation.view(classes, classes)
            value = torch.zeros((), dtype=torch.float64, device=device)
            deviation_slope, bias_slope = torch.zeros_like(matrix), torch.zeros_like(bias)
            bends = torch.zeros(3, classes, dtype=torch.float64, device=device)
            for rows, labels in data:
                features = self.features(rows if many else rows.double())
                centred = (features - mean.to(features.dtype)) / tempered.unit
                output = (features / tempered.temperature).add_(bias)
                if self.diagonal:
                    output.addcmul_(centred, matrix)
                else:
                    output.addmm_(centred, matrix.T.to(centred.dtype))
                output -= output.amax(1, keepdim=True)
                truth = output.gather(1, labels[:, None])
                residual = output.exp_()
                total = residual.sum(1, keepdim=True)
                value += (total.log() - truth).sum(dtype=torch.float64)
                residual /= total
                if self.diagonal:
                    weighted = residual * centred
                    bends += torch.stack([(weighted * centred).sum(0), weighted.sum(0), residual.sum(0)])
                residual.scatter_add_(1, labels[:, None], torch.full_like(truth, -1))
                bias_slope += residual.sum(0)
                deviation_slope += (residual * centred).sum(0) if self.diagonal else residual.T @ centred
            slope = torch.cat([deviation_slope.flatten(), bias_slope])
            penalty = strength * parameters
            solve = _by_class(bends / samples, strength) if self.diagonal else None
            return value / samples + penalty @ parameters, slope / samples + 2 * penalty, solve

        start = torch.zeros(size + classes, dtype=torch.float64, device=device)
        parameters = minimise(objective, start, type(self).__name__, enough=_NOISE if many else 0.0)
        deviation, bias = parameters[:size] / tempered.unit, parameters[size:]
        if self.diagonal:
            self.learn("weight", deviation + 1 / tempered.temperature)
            self.learn("bias", bias - deviation * mean)
        else:
            deviation = deviation.view(classes, classes)
            identity = torch.eye(classes, dtype=torch.float64, device=device)
            self.learn("weight", deviation + identity / tempered.temperature)
            self.learn("bias", bias - deviation @ mean)

    def _strengths(self, classes: int, samples: int, device: torch.device) -> Tensor:
        diagonal, rest, bias = self.penalties(classes, samples)
        deviation = torch.full((classes,), diagonal, dtype=torch.float64)
        if not self.diagonal:
            matrix = torch.full((classes, classes), rest, dtype=torch.float64)
            deviation = matrix.fill_diagonal_(diagonal).flatten()
        return torch.cat([deviation, torch.full((classes,), bias, dtype=torch.float64)]).to(device)

    def transform(self, rows: Tensor) -> Tensor:
        weight, bias = self.learned("weight", rows), self.learned("bias", rows)
        # A class that is ruled out counts for the others as the least likely that is not.
        features = self.features(rows)
        ruled_out = features == -torch.inf
        least = features.masked_fill(ruled_out, torch.inf).amin(1, keepdim=True)
        features = torch.where(ruled_out, least, features)
        return features * weight + bias if self.diagonal else F.linear(features, weight, bias)


class VectorScaling(Linear):
    """Vector scaling (key ``vector``): ``w ⊙ l + b``, a factor and an offset per class.

    A class that the data lack, or one whose labels are told apart perfectly, would take its parameters to
    infinity. A slight pull on ``D`` and ``c`` (see `Linear`) keeps them finite: the penalty is
    ``ridge · (Σ D_k² + Σ c_k²)``, small enough that it changes nothing else.

    Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        ridge: the strength of the pull, at least 0.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = VectorScaling().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator.weight.shape, calibrator.bias.shape
    (torch.Size([3]), torch.Size([3]))
    """

    key: ClassVar[str] = "vector"
    diagonal = True

    def __init__(self, *, ridge: float = 1e-7) -> None:
        super().__init__()
        self.ridge = in_range("ridge", ridge)

    def penalties(self, classes: int, samples: int) -> tuple[float, float, float]:
        return self.ridge, 0.0, self.ridge


class MatrixScaling(Linear):
    """Matrix scaling with off-diagonal and intercept regularisation, MS-ODIR (key ``matrix``): ``W l + b``.

    The penalty, on ``D`` and ``c`` of `Linear`, is

        ``off_diagonal_penalty / (K(K-1)) · Σ_{i≠j} D_ij² + bias_penalty / K · Σ c_k² + ridge · Σ D_kk²``

    where the last term only keeps the diagonal finite, as in `VectorScaling`.

    Kull et al., *Beyond temperature scaling: Obtaining well-calibrated multi-class probabilities with
    Dirichlet calibration*, NeurIPS 2019.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        off_diagonal_penalty: λ of the paper, at least 0.
        bias_penalty: μ of the paper, at least 0.
        ridge: pull on the diagonal, at least 0.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = MatrixScaling().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator.weight.shape, calibrator.bias.shape
    (torch.Size([3, 3]), torch.Size([3]))
    """

    key: ClassVar[str] = "matrix"
    diagonal = False

    def __init__(
        self, *, off_diagonal_penalty: float = 1e-2, bias_penalty: float = 1e-2, ridge: float = 1e-7
    ) -> None:
        super().__init__()
        self.off_diagonal_penalty = in_range("off_diagonal_penalty", off_diagonal_penalty)
        self.bias_penalty = in_range("bias_penalty", bias_penalty)
        self.ridge = in_range("ridge", ridge)

    def penalties(self, classes: int, samples: int) -> tuple[float, float, float]:
        off_diagonal = max(1, classes * (classes - 1))
        return self.ridge, self.off_diagonal_penalty / off_diagonal, self.bias_penalty / classes


class Dirichlet(MatrixScaling):
    """Dirichlet calibration with the same regularisation, Dir-ODIR (key ``dirichlet``).

    ``W log softmax(l) + b``: what is mapped are log-probabilities. The penalty is `MatrixScaling`'s.

    Kull et al., *Beyond temperature scaling: Obtaining well-calibrated multi-class probabilities with
    Dirichlet calibration*, NeurIPS 2019.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        off_diagonal_penalty: λ of the paper, at least 0.
        bias_penalty: μ of the paper, at least 0.
        ridge: pull on the diagonal, at least 0.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = Dirichlet().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> bool(torch.allclose(calibrator(logits), calibrator(logits + 1), atol=1e-4))
    True
    """

    key: ClassVar[str] = "dirichlet"

    def features(self, rows: Tensor) -> Tensor:
        return rows.log_softmax(1)


class StructuredVectorScaling(Linear):
    """Structured vector scaling, SVS (key ``structured-vector``): `VectorScaling` drawn to a temperature.

    The penalty, on ``D`` and ``c`` of `Linear`, added to the mean negative log-likelihood of N elements, is

        ``strength / N · (K · Σ D_k² + K · Σ c_k²)``

    A Gaussian prior around the fitted temperature, whose variance is shared out among a group's parameters:
    the more there are of them the closer they are held, and the more data, the less it matters. For little
    data this is temperature scaling.

    After Berta, Holzmüller, Jordan and Bach, *Structured Matrix Scaling for Multi-Class Calibration*, 2025;
    the penalty is ours.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        strength: of the prior, at least 0.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = StructuredVectorScaling().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator.weight.shape
    torch.Size([3])
    """

    key: ClassVar[str] = "structured-vector"
    diagonal = True

    def __init__(self, *, strength: float = 1.0) -> None:
        super().__init__()
        self.strength = in_range("strength", strength)

    def penalties(self, classes: int, samples: int) -> tuple[float, float, float]:
        each = self.strength / samples
        return each * classes, each * classes * (classes - 1), each * classes


class StructuredMatrixScaling(StructuredVectorScaling):
    """Structured matrix scaling, SMS (key ``structured-matrix``): a matrix drawn to a temperature.

    The penalty, on ``D`` and ``c`` of `Linear`, added to the mean negative log-likelihood of N elements, is

        ``strength / N · (K · Σ D_kk² + K(K-1) · Σ_{i≠j} D_ij² + K · Σ c_k²)``

    for the reasons given at `StructuredVectorScaling`. The choice where classes are few.

    After Berta, Holzmüller, Jordan and Bach, *Structured Matrix Scaling for Multi-Class Calibration*, 2025;
    the penalty is ours.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        strength: of the prior, at least 0.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = StructuredMatrixScaling().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator.weight.shape
    torch.Size([3, 3])
    """

    key: ClassVar[str] = "structured-matrix"
    diagonal = False


def _by_class(bends: Tensor, strength: Tensor) -> Solve:
    """Solve with a curvature that leaves out how classes depend on one another, and is no less for it.

    Args:
        bends: ``(3, K)``: means over elements of ``p x²``, ``p x`` and ``p`` of each class.
        strength: of the penalty, ``(2K,)``.
    """
    factor, offset = (2 * strength + _LEAST).view(2, -1)
    factor, cross, offset = factor + bends[0], bends[1], offset + bends[2]
    determinant = factor * offset - cross * cross

    def solve(slope: Tensor) -> Tensor:
        first, second = slope.view(2, -1)
        solution = torch.stack([offset * first - cross * second, factor * second - cross * first])
        return solution.div_(determinant).flatten()

    return solve


def minimise(
    objective: Callable[[Tensor], tuple[Tensor, Tensor, Solve | None]],
    start: Tensor,
    what: str,
    *,
    enough: float = 0.0,
) -> Tensor:
    """The minimum of a convex function by L-BFGS; never a point worse than the start.

    Args:
        objective: gives the value, the gradient, and, if it is known, how to solve with about the curvature.
        start: where to begin.
        what: is fitted, for a warning.
        enough: stop when five steps together gain no more than this.
    """
    at = start
    value, slope, solve = objective(at)
    values = [float(value)]
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(_STEPS):
        if slope.abs().max() <= _GRADIENT:
            break
        step = -_direction(slope, solve, history)
        descent = float(slope @ step)
        if not descent < 0:
            history.clear()
            step = -_direction(slope, solve, history)
            descent = float(slope @ step)
        share = 1.0 if history or solve is not None else min(1.0, 1 / float(slope.abs().sum()))
        while share > 1e-12:
            trial = at + share * step
            result = objective(trial)
            if result[0] <= value + 1e-4 * share * descent:
                break
            # The minimum of the parabola through what is known.
            curve = float(result[0] - value) - share * descent
            share *= min(max(-share * descent / (2 * curve), 0.1), 0.5) if curve > 0 else 0.1
        else:
            break
        moved, turned = trial - at, result[1] - slope
        gain = float(value - result[0])
        if float(moved @ turned) > 0:
            history = [*history[1 - _HISTORY :], (moved, turned, 1 / (moved @ turned))]
        at, (value, slope, solve) = trial, result
        values.append(float(value))
        if values[-6:][0] - values[-1] < enough and len(values) > 5:
            break
        if gain <= _GAIN * abs(float(value)) and float((share * step).abs().max()) < 1e-9:
            break
    steepness = slope.abs().max().item()
    if steepness > _TOLERATED:
        warn(
            f"the fit of {what} stopped at a gradient of {steepness:.1e}: "
            "it is better than where it started, but not the best"
        )
    return at


def _direction(slope: Tensor, solve: Solve | None, history: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The inverse of the curvature, as far as it has shown, times the gradient."""
    rest, shares = slope.clone(), []
    for moved, turned, inverse in reversed(history):
        share = inverse * (moved @ rest)
        rest -= share * turned
        shares.append(share)
    if solve is not None:
        rest = solve(rest)
    if history:
        moved, turned, _ = history[-1]
        rest *= (moved @ turned) / (turned @ (turned if solve is None else solve(turned)))
    for (moved, turned, inverse), share in zip(history, reversed(shares), strict=True):
        rest += (share - inverse * (turned @ rest)) * moved
    return rest
