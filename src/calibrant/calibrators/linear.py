"""Linear maps of logits, from one factor per class to a matrix: convex fits that start at a temperature."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range
from calibrant.calibrators.passes import HeldOut, Scaling
from calibrant.calibrators.temperature import likeliest

_STEPS = 1000
_GRADIENT = 1e-9  # of the mean negative log-likelihood: below it, a fit is done
_TOLERATED = 1e-4  # above it, a fit that stopped is worth a word


class Linear(Scaling):
    """What the linear maps share: their fit.

    With the fitted temperature T, features x (the logits, unless said otherwise), their mean m over the
    data and a unit u (T, unless T is at a bound), a map is written

        ``x/T + D·(x - m)/u + c``

    and the mean negative log-likelihood plus a penalty on D and c is minimised by L-BFGS, in float64, from
    D = 0 and c = 0. There the penalty is 0: the likelihood of the fitting data never falls below temperature
    scaling's, nor below that of the logits as they are. The units of the logits do not matter.

    Attributes:
        weight: the factors of x, ``(K,)`` or ``(K, K)``, once fitted.
        bias: ``(K,)``, once fitted.
    """

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

        def objective(parameters: Tensor) -> tuple[Tensor, Tensor]:
            deviation, bias = parameters[:size], parameters[size:]
            matrix = deviation if self.diagonal else deviation.view(classes, classes)
            value = torch.zeros((), dtype=torch.float64, device=device)
            deviation_slope, bias_slope = torch.zeros_like(matrix), torch.zeros_like(bias)
            for rows, labels in data:
                features = self.features(rows.double())
                centred = (features - mean) / tempered.unit
                output = (features / tempered.temperature).add_(bias)
                if self.diagonal:
                    output.addcmul_(centred, matrix)
                else:
                    output.addmm_(centred, matrix.T)
                output -= output.amax(1, keepdim=True)
                truth = output.gather(1, labels[:, None])
                residual = output.exp_()
                total = residual.sum(1, keepdim=True)
                value += (total.log() - truth).sum()
                residual /= total
                residual.scatter_add_(1, labels[:, None], torch.full_like(truth, -1))
                bias_slope += residual.sum(0)
                deviation_slope += (residual * centred).sum(0) if self.diagonal else residual.T @ centred
            slope = torch.cat([deviation_slope.flatten(), bias_slope])
            penalty = strength * parameters
            return value / samples + penalty @ parameters, slope / samples + 2 * penalty

        start = torch.zeros(size + classes, dtype=torch.float64, device=device)
        parameters = minimise(objective, start, type(self).__name__)
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
        features = self.features(rows)
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


def minimise(objective: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, what: str) -> Tensor:
    """The minimum of a convex function, given with its gradient; never a point worse than the start."""
    parameters = start.clone().requires_grad_()
    lowest, best, steepness = float("inf"), start, 0.0

    def closure() -> float:
        nonlocal lowest, best, steepness
        value, slope = objective(parameters.detach())
        parameters.grad = slope
        if value.item() < lowest:
            lowest, best = value.item(), parameters.detach().clone()
            steepness = slope.abs().max().item()
        return value.item()

    optimiser: Any = torch.optim.LBFGS(
        [parameters],
        max_iter=_STEPS,
        max_eval=2 * _STEPS,
        tolerance_grad=_GRADIENT,
        tolerance_change=1e-13,
        history_size=30,
        line_search_fn="strong_wolfe",
    )
    optimiser.step(closure)
    if steepness > _TOLERATED:
        warnings.warn(
            f"the fit of {what} stopped at a gradient of {steepness:.1e}: "
            "it is better than where it started, but not the best",
            UserWarning,
            stacklevel=5,
        )
    return best
