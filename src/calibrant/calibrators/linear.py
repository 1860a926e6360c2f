"""Linear maps of logits: vector, matrix, Dirichlet and structured scaling, fitted by L-BFGS."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from threading import local
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.arguments import in_range
from calibrant.calibrators.base import below_maximum
from calibrant.calibrators.minimisation import Objective, Solve, minimise
from calibrant.calibrators.one_vs_rest import in_double
from calibrant.calibrators.streaming import HeldOut, Scaling, Sums
from calibrant.calibrators.temperature import likeliest
from calibrant.kernels.block import Scratch
from calibrant.warning import warn

Inputs = Callable[..., Tensor]
"""Maps logits ``(n, K)`` to centred features in the type to compute in."""

Penalties = tuple[float, float, float]
"""The factors of the summed squares of D's diagonal, of the rest of D, and of c; see `Linear`."""

_LEAST = 1e-12  # added to curvatures, which may be 0
_FLAT = 1e-9  # the least variance of a direction, relative to the largest

# With more parameters than this, or a hundred times as many logits, a fit computes in single precision (with
# sums in double) and ends when a step gains less than `_NOISE`. Full precision would take far longer.
_MANY = 100_000
_NOISE = 1e-7
# A matrix with fewer elements for each free parameter warns: with 5, its negative log-likelihood on other
# data was 0.1 to 0.3 above that of temperature scaling (docs/calibrators.md).
_ENOUGH_EACH = 5
_FEW = 20  # up to so many classes, the curvature of a factor and an offset per class is computed exactly


class Linear(Scaling):
    """The fit that all linear maps share.

    With the fitted temperature T, features x (the logits or their log-softmax), their mean m over the data
    and a unit u (T, unless T is at a bound), a map is written

        ``x/T + D·(x - m)/u + c``

    L-BFGS minimises the mean negative log-likelihood plus a penalty on D and c. It starts from D = 0 and
    c = 0, which is temperature scaling and has no penalty. The likelihood of the fitting data is therefore
    never below that of temperature scaling, nor below that of the original logits. The units of the logits do
    not matter.

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
    def penalties(self, classes: int, samples: int) -> Penalties:
        """The penalties on D and c."""

    def features(self, rows: Tensor) -> Tensor:
        """The input of the linear map."""
        return rows

    def fit_passes(self, data: HeldOut) -> None:
        tempered = likeliest(data)
        samples, classes = data.samples, data.num_classes
        size = classes if self.diagonal else classes * classes
        # Where torch may round the factors of matrix products (TF32), single precision would lose digits.
        single = size > _MANY or samples * classes > 100 * _MANY
        single = single and torch.get_float32_matmul_precision() == "highest"

        def features(rows: Tensor) -> Tensor:
            return self.features(rows if single else rows.double())

        mean = data.sums(lambda rows, _: (features(rows).sum(0),))[0] / samples

        def inputs(rows: Tensor, allocate: Callable[[Tensor], Tensor] = torch.empty_like) -> Tensor:
            rows = features(rows)
            return torch.sub(rows, mean.to(rows.dtype), out=allocate(rows)).div_(tempered.unit)

        problem = (_PerClass if self.diagonal else _Matrix)(
            data, inputs, self.penalties(classes, samples), mean
        )
        identity = torch.ones_like(mean)
        if not self.diagonal:
            identity = torch.eye(classes, dtype=mean.dtype, device=mean.device)

        def objective(parameters: Tensor) -> tuple[float, Tensor, Solve]:
            deviation, offset = parameters[:size].view_as(identity), parameters[size:]
            weight = deviation + identity * (tempered.unit / tempered.temperature)
            value, *sums = data.sums(problem.pass_over(weight, offset + mean / tempered.temperature))
            slope, solve = problem.derivatives(sums)
            penalty = problem.strengths * parameters
            return float(value / samples + penalty @ parameters), slope + 2 * penalty, solve

        start, what = mean.new_zeros(size + classes), type(self).__name__
        enough = _NOISE if single else 0.0
        if self.diagonal:
            parameters = minimise(objective, start, what, enough=enough)
        else:
            parameters = _minimise_matrix(
                objective, start, what, enough=enough, penalties=problem.strengths, samples=samples
            )
        deviation, offset = parameters[:size].view_as(identity) / tempered.unit, parameters[size:]
        self.learn("weight", deviation + identity / tempered.temperature)
        self.learn("bias", offset - (deviation * mean if self.diagonal else deviation @ mean))

    def transform(self, rows: Tensor) -> Tensor:
        # In double precision: an offset of all logits may be far larger than their differences.
        rows = in_double(rows)
        weight, bias = self.learned("weight", rows), self.learned("bias", rows)
        # A class that is ruled out counts for the others as the least likely class that is not.
        features = self.features(rows)
        ruled_out = features == -torch.inf
        least = features.masked_fill(ruled_out, torch.inf).amin(1, keepdim=True)
        features = torch.where(ruled_out, least, features)
        mapped = features * weight + bias if self.diagonal else F.linear(features, weight, bias)
        return below_maximum(mapped)


class VectorScaling(Linear):
    """Vector scaling (key ``vector``): ``w ⊙ l + b``, a factor and an offset per class.

    The parameters of a class that is absent from the data or perfectly separated would become infinite. A
    small penalty on ``D`` and ``c`` (see `Linear`) keeps them finite: ``ridge · (Σ D_k² + Σ c_k²)``.
    Its effect on other parameters is negligible.

    Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        ridge: the strength of the penalty, at least 0.

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

    def penalties(self, classes: int, samples: int) -> Penalties:
        return self.ridge, 0.0, self.ridge


class MatrixScaling(Linear):
    """Matrix scaling with off-diagonal and intercept regularisation, MS-ODIR (key ``matrix``): ``W l + b``.

    The penalty, on ``D`` and ``c`` of `Linear`, is

        ``off_diagonal_penalty / (K(K-1)) · Σ_{i≠j} D_ij² + bias_penalty / K · Σ c_k² + ridge · Σ D_kk²``

    The last term only keeps the diagonal finite, as in `VectorScaling`.

    Kull et al., *Beyond temperature scaling: Obtaining well-calibrated multi-class probabilities with
    Dirichlet calibration*, NeurIPS 2019.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        off_diagonal_penalty: λ of the paper, at least 0.
        bias_penalty: μ of the paper, at least 0.
        ridge: the strength of the penalty on the diagonal, at least 0.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = MatrixScaling().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator.weight.shape, calibrator.bias.shape
    (torch.Size([3, 3]), torch.Size([3]))
    """

    key: ClassVar[str] = "matrix"
    definition: ClassVar[int] = 2
    diagonal = False

    def __init__(
        self, *, off_diagonal_penalty: float = 1e-2, bias_penalty: float = 1e-2, ridge: float = 1e-7
    ) -> None:
        super().__init__()
        self.off_diagonal_penalty = in_range("off_diagonal_penalty", off_diagonal_penalty)
        self.bias_penalty = in_range("bias_penalty", bias_penalty)
        self.ridge = in_range("ridge", ridge)

    def penalties(self, classes: int, samples: int) -> Penalties:
        off_diagonal = max(1, classes * (classes - 1))
        return self.ridge, self.off_diagonal_penalty / off_diagonal, self.bias_penalty / classes


class Dirichlet(MatrixScaling):
    """Dirichlet calibration with the same regularisation, Dir-ODIR (key ``dirichlet``).

    ``W log softmax(l) + b``: `MatrixScaling` of log-probabilities, with the same penalty. Arguments, shapes
    and reference as for `MatrixScaling`.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = Dirichlet().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> bool(torch.allclose(calibrator(logits), calibrator(logits + 1), atol=1e-4))
    True
    """

    key: ClassVar[str] = "dirichlet"

    def features(self, rows: Tensor) -> Tensor:
        return rows.log_softmax(1)


class StructuredVectorScaling(Linear):
    """Structured vector scaling, SVS (key ``structured-vector``): regularised `VectorScaling`.

    The penalty, on ``D`` and ``c`` of `Linear`, added to the mean negative log-likelihood of N elements, is

        ``strength / N · (K · Σ D_k² + K · Σ c_k²)``

    It is a Gaussian prior around temperature scaling. Its variance is divided among a group of parameters,
    so more parameters are held more closely. With more data the prior matters less; with little data the
    result is close to temperature scaling.

    After Berta, Holzmüller, Jordan and Bach, *Structured Matrix Scaling for Multi-Class Calibration*, 2025;
    with our own penalty.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        strength: the strength of the prior, at least 0.

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

    def penalties(self, classes: int, samples: int) -> Penalties:
        each = self.strength / samples
        return each * classes, each * classes * (classes - 1), each * classes


class StructuredMatrixScaling(StructuredVectorScaling):
    """Structured matrix scaling, SMS (key ``structured-matrix``): regularised `MatrixScaling`.

    The penalty, on ``D`` and ``c`` of `Linear`, added to the mean negative log-likelihood of N elements, is

        ``strength / N · (K · Σ D_kk² + K(K-1) · Σ_{i≠j} D_ij² + K · Σ c_k²)``

    `StructuredVectorScaling` explains this prior; argument, shapes and reference as there. Recommended for
    few classes.

    >>> logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> calibrator = StructuredMatrixScaling().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator.weight.shape
    torch.Size([3, 3])
    """

    key: ClassVar[str] = "structured-matrix"
    diagonal = False


class _PerClass:
    """The likelihood of a factor and an offset per class, its gradient and its curvature.

    ``like`` is a float64 tensor ``(K,)`` on the device of the data.
    """

    def __init__(self, data: HeldOut, inputs: Inputs, penalties: Penalties, like: Tensor) -> None:
        self.inputs, self.samples = inputs, data.samples
        self.strengths = torch.cat([torch.full_like(like, penalties[0]), torch.full_like(like, penalties[2])])

        def observed(rows: Tensor, labels: Tensor) -> Sums:
            own = inputs(rows).gather(1, labels[:, None]).squeeze(1).double()
            return (torch.zeros_like(like).index_add_(0, labels, own),)

        # The labels' part of the gradient is the same in every pass.
        self.observed = torch.stack([*data.sums(observed), data.counts.to(like)])

    def pass_over(self, weight: Tensor, bias: Tensor) -> Callable[[Tensor, Tensor], Sums]:
        """The function of a block that returns its negative log-likelihood and what `derivatives` needs."""
        memory = local()  # one per thread: fresh memory for every block makes a pass slower

        def function(rows: Tensor, labels: Tensor) -> Sums:
            scratch: Scratch = memory.__dict__.setdefault("scratch", Scratch())
            scratch.restart()
            features = self.inputs(rows, scratch.take)
            output = scratch.take(features)
            torch.addcmul(bias.to(features), features, weight.to(features), out=output)
            value, exponentials, total = _exponentials(output, labels)
            inverse = total.reciprocal().T
            # Products of a row with a matrix: the fastest way to sum probabilities over elements.
            sums = [inverse @ exponentials]
            products = []
            if len(bias) <= _FEW:
                probability = exponentials * inverse.T
                both = torch.cat([probability * features, probability], 1)
                products.append(both.T @ both)
            for _ in range(2):
                sums.append(inverse @ exponentials.mul_(features))
            return value, torch.cat(sums), *products

        return function

    def derivatives(self, sums: list[Tensor]) -> tuple[Tensor, Solve]:
        """The gradient and a solver for the curvature.

        With many classes, the solver leaves out how they depend on one another. Its curvature is then not
        below the true one.
        """
        probability, first, second = sums[0] / self.samples
        slope = torch.stack([first, probability]) - self.observed / self.samples
        factor, offset = (2 * self.strengths + _LEAST).view(2, -1)
        factor, cross, offset = factor + second, first, offset + probability
        if len(sums) > 1:
            blocks = [torch.cat([factor.diag(), cross.diag()]), torch.cat([cross.diag(), offset.diag()])]
            triangle, failed = torch.linalg.cholesky_ex(torch.cat(blocks, 1) - sums[1] / self.samples)
            if not failed:  # rounding can make it fail
                return slope.flatten(), lambda each: torch.cholesky_solve(each[:, None], triangle)[:, 0]
        determinant = factor * offset - cross * cross

        def solve(slope: Tensor) -> Tensor:
            one, other = slope.view(2, -1)
            solution = torch.stack([offset * one - cross * other, factor * other - cross * one])
            return solution.div_(determinant).flatten()

        return slope.flatten(), solve


class _Matrix:
    """The likelihood of a matrix and an offset per class, its gradient and its approximate curvature.

    The curvature in row k of the matrix is approximated by ``E[p_k (1 - p_k)] · E[x xᵀ]``, with the exact
    number on the diagonal of the matrix. One eigendecomposition serves all rows and all steps. ``like`` is as
    for `_PerClass`.
    """

    def __init__(self, data: HeldOut, inputs: Inputs, penalties: Penalties, like: Tensor) -> None:
        self.inputs, self.samples, self.penalties = inputs, data.samples, penalties
        on_diagonal, elsewhere, offset = penalties
        matrix = like.new_full((len(like), len(like)), elsewhere).fill_diagonal_(on_diagonal)
        self.strengths = torch.cat([matrix.flatten(), torch.full_like(like, offset)])

        def second_moment(rows: Tensor, _: Tensor) -> Sums:
            features = inputs(rows)
            return (features.T @ features,)

        moment = data.sums(second_moment)[0] / data.samples
        self.variance = moment.diag()
        eigenvalues, self.basis = torch.linalg.eigh(moment)
        # Directions without data have no curvature but the penalty's. The bound keeps steps there finite.
        self.eigenvalues = eigenvalues.clamp_min(float(_FLAT * eigenvalues[-1]))

    def pass_over(self, weight: Tensor, bias: Tensor) -> Callable[[Tensor, Tensor], Sums]:
        """The function of a block that returns its negative log-likelihood and what `derivatives` needs."""

        def function(rows: Tensor, labels: Tensor) -> Sums:
            features = self.inputs(rows)
            output = torch.addmm(bias.to(features), features, weight.to(features).T)
            value, exponentials, total = _exponentials(output, labels)
            residual = exponentials.div_(total)
            spread = residual - residual * residual
            ones = torch.ones_like(total).T
            sums = [ones @ spread, ones @ spread.mul_(features).mul_(features)]
            residual.scatter_add_(1, labels[:, None], torch.full_like(total, -1))
            return value, residual.T @ features, torch.cat([ones @ residual, *sums])

        return function

    def derivatives(self, sums: list[Tensor]) -> tuple[Tensor, Solve]:
        """The gradient and a solver for the curvature."""
        offset_slope, spread, diagonal = sums[1] / self.samples
        slope = torch.cat([(sums[0] / self.samples).flatten(), offset_slope])
        on_diagonal, elsewhere, offset = (2 * penalty for penalty in self.penalties)
        spread = spread + _LEAST
        inverse = 1 / (spread[:, None] * self.eigenvalues + elsewhere)
        # Row k of `columns` is column k of row k's inverse. The correction is Sherman and Morrison's.
        columns = (self.basis * inverse) @ self.basis.T
        extra = on_diagonal - elsewhere + (diagonal - spread * self.variance).clamp_min(0)
        correction = (extra / (1 + extra * columns.diag()))[:, None] * columns

        def solve(slope: Tensor) -> Tensor:
            matrix, rest = slope[: columns.numel()].view_as(columns), slope[columns.numel() :]
            solution = ((matrix @ self.basis) * inverse) @ self.basis.T
            solution = solution - correction * solution.diag()[:, None]
            return torch.cat([solution.flatten(), rest / (spread + offset)])

        return slope, solve


def _exponentials(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summed negative log-likelihood, and exponentials ``(n, K)`` and their sums ``(n, 1)``, in place."""
    output -= output.amax(1, keepdim=True)
    truth = output.gather(1, labels[:, None])
    total = output.exp_().sum(1, keepdim=True)
    return (total.log() - truth).sum(dtype=torch.float64), output, total


def _minimise_matrix(
    objective: Objective, start: Tensor, what: str, *, enough: float, penalties: Tensor, samples: int
) -> Tensor:
    """`minimise`, with a warning if there are few elements for the free parameters.

    By Akaike's criterion each free parameter costs 1/samples on other data. A fit in single precision takes
    minutes: if even a perfect one would not make up for this cost, the result is the start.
    """
    before, _, solve = objective(start)
    free = _free_parameters(solve, penalties)
    if samples >= _ENOUGH_EACH * free:
        return minimise(objective, start, what, enough=enough)
    told = "On other data it is probably worse than temperature scaling"
    if enough > 0 and free / samples > before:  # only fits in single precision end early
        found, told = start, "It stays temperature scaling: a fit would take long and probably do harm"
    else:
        found = minimise(objective, start, what, enough=enough)
    warn(
        f"{what} has about {free:,.0f} free parameters for {samples:,} elements, and needs {_ENOUGH_EACH} "
        f"elements for each. {told}. Take more data, a stronger penalty, or a calibrator with fewer "
        "parameters"
    )
    return found


def _free_parameters(solve: Solve, penalties: Tensor) -> float:
    """How many parameters the penalties leave free: the trace of ``H (H + 2·penalties)⁻¹``.

    H is the curvature of the likelihood, each class by itself; ``solve`` inverts the sum. A vector of random
    signs estimates the trace. The same number added to all logits changes nothing, so that the parameters of
    one of the K classes are not free.
    """
    generator = torch.Generator().manual_seed(0)
    signs = 2 * torch.randint(2, penalties.shape, generator=generator, device="cpu").to(penalties) - 1
    classes = math.isqrt(len(signs))  # K² factors and K offsets
    return (len(signs) - float(signs @ solve(2 * penalties * signs))) * (classes - 1) / classes
