"""The per-element numbers that losses are built from, each with a hand-written gradient.

``l`` are the logits, ``s`` their softmax, ``y`` the label, ``1_y`` its one-hot vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.kernels.block import Block
from calibrant.kernels.reduction import Factor, Gradient, Linearization, Term, sum_of_gradients

# Pairs of classes that `Exclusion` holds at once: bounds its memory, whatever K is.
_PAIRS = 1 << 22


def add_at_maximum(block: Block, amount: Tensor, direction: Tensor) -> Tensor:
    """Add an amount at the top class in place, divided evenly at a tie; overwrites `shifted`."""
    return direction.addcmul_(block.top, amount / block.top.sum(1, keepdim=True))


def _at_maximum(block: Block, amount: Tensor) -> Tensor:
    """An amount at the top class, divided evenly at a tie, and 0 elsewhere; overwrites `shifted`."""
    return torch.mul(block.top, amount / block.top.sum(1, keepdim=True), out=block.new())


class WeightedSum:
    """``Σ_i c_i · term_i`` with fixed factors ``c``.

    Args:
        *parts: pairs ``(factor, term)``.
    """

    def __init__(self, *parts: tuple[float, Term]) -> None:
        self.parts = parts

    def value(self, block: Block) -> Tensor:
        value = torch.zeros_like(block.total)
        for factor, term in self.parts:
            value = value + factor * term.value(block)
        return value

    def linearize(self, block: Block) -> Linearization:
        value = torch.zeros_like(block.total)
        parts = []
        for weight, term in self.parts:
            part = term.linearize(block)
            value.add_(part.value, alpha=weight)
            parts.append((weight, part.gradient))
        return Linearization(
            value, lambda factor: sum_of_gradients([gradient(weight * factor) for weight, gradient in parts])
        )


class Formula:
    """``function(term_1, term_2, …)``.

    Args:
        function: takes one tensor ``(A, 1[, S])`` per term and returns, elementwise, the value and its
            partial derivatives.
        *terms: the arguments of the function.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], *terms: Term) -> None:
        self.function = function
        self.terms = terms

    def value(self, block: Block) -> Tensor:
        return self.function(*(term.value(block) for term in self.terms))[0]

    def linearize(self, block: Block) -> Linearization:
        parts = [term.linearize(block) for term in self.terms]
        value, *slopes = self.function(*(part.value for part in parts))
        return Linearization(
            value,
            lambda factor: sum_of_gradients(
                [part.gradient(s * factor) for part, s in zip(parts, slopes, strict=True)]
            ),
        )


class LogLikelihood:
    """``log s_y``, or ``Σ t_k log s_k`` for probability targets; gradient ``1_y - s``."""

    def value(self, block: Block) -> Tensor:
        return self.linearize(block).value

    def linearize(self, block: Block) -> Linearization:
        if not block.soft:
            value = block.shifted_at_target - block.total.log()
            return Linearization(value, lambda factor: Gradient(-factor, factor))
        mass = block.target.sum(1, keepdim=True)
        return Linearization(
            (block.target * block.shifted).sum(1, keepdim=True) - mass * block.total.log(),
            lambda factor: Gradient(
                -factor * mass, dense=lambda: torch.mul(block.target, factor, out=block.new())
            ),
        )


class MeanLogLikelihood:
    """``mean_k w_k log s_k``; gradient ``(w_k - s_k Σ_j w_j) / K``.

    Args:
        weight: one factor per class, shaped like a class axis; None for ones.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight = weight

    def value(self, block: Block) -> Tensor:
        if self.weight is None:
            return block.shifted.mean(1, keepdim=True) - block.total.log()
        weighted = (self.weight * block.shifted).mean(1, keepdim=True)
        return weighted - self.weight.mean() * block.total.log()

    def linearize(self, block: Block) -> Linearization:
        classes = block.shifted.shape[1]
        weight = torch.ones_like(block.total[:1]) if self.weight is None else self.weight
        mean = 1.0 if self.weight is None else self.weight.mean()
        return Linearization(
            self.value(block),
            lambda factor: Gradient(-factor * mean, dense=lambda: weight * (factor / classes)),
        )


class TopProbability:
    """``r = max_k s_k``, the confidence; gradient ``r (1_top - s)``, divided evenly at a tie."""

    def value(self, block: Block) -> Tensor:
        return block.total.reciprocal()

    def linearize(self, block: Block) -> Linearization:
        value = self.value(block)

        def gradient(factor: Factor) -> Gradient:
            amount = value * factor
            return Gradient(-amount, dense=lambda: _at_maximum(block, amount))

        return Linearization(value, gradient)


class TopDoubt:
    """``1 - max_k s_k``, to full precision; the gradient is minus that of `TopProbability`."""

    def value(self, block: Block) -> Tensor:
        return block.others / block.total

    def linearize(self, block: Block) -> Linearization:
        return Linearization(self.value(block), partial(self.gradient, block))

    def gradient(self, block: Block, factor: Factor) -> Gradient:
        return TopProbability().linearize(block).gradient(-factor)


class Correctness:
    """1 where the first of the top classes is the true one, else 0; without a gradient."""

    constant = True

    def value(self, block: Block) -> Tensor:
        return block.correct.to(block.total.dtype)

    def linearize(self, block: Block) -> Linearization:
        return Linearization(self.value(block), lambda factor: Gradient())


class Entropy:
    """``H = -Σ s_k log s_k``; gradient ``-s_k (log s_k + H)``.

    Args:
        precise: whether the entropy keeps all its digits where it is nearly 0, in two more passes.
    """

    def __init__(self, precise: bool = False) -> None:
        self.precise = precise

    def value(self, block: Block) -> Tensor:
        return self._log_total(block) - self._product_and_mean(block)[1]

    def _log_total(self, block: Block) -> Tensor:
        return block.others.log1p() if self.precise else block.total.log()

    def linearize(self, block: Block) -> Linearization:
        product, mean = self._product_and_mean(block)
        value = self._log_total(block) - mean
        return Linearization(value, lambda factor: self._gradient(block, factor, product, mean))

    def gradient(self, block: Block, factor: Factor) -> Gradient:
        return self._gradient(block, factor, *self._product_and_mean(block))

    @staticmethod
    def _product_and_mean(block: Block) -> tuple[Tensor, Tensor]:
        """`shifted` times `exponential`, and the mean of `shifted` under the softmax."""
        product = torch.mul(block.exponential, block.shifted, out=block.new())
        return product, product.sum(1, keepdim=True) / block.total

    @staticmethod
    def _gradient(block: Block, factor: Factor, product: Tensor, mean: Tensor) -> Gradient:
        return Gradient(factor * mean, dense=lambda: product.mul_(-factor / block.total))


class SquaredError:
    """``Σ (s_k - t_k)²``; gradient ``2 s_k (r_k - Σ_j s_j r_j)`` with ``r = s - t``.

    For labels it is the sum of ``s_k²`` over the other classes and ``(1 - p)²``. All parts are positive, so
    rounding costs at most a few units in the last place of ``1 - p``.
    """

    def value(self, block: Block) -> Tensor:
        if block.soft:
            residual = block.exponential / block.total - block.target
            return residual.square().sum(1, keepdim=True)
        others = self._others(block).sum(1, keepdim=True)
        return others / block.total.square() + self._doubt(block).square()

    def linearize(self, block: Block) -> Linearization:
        if block.soft:
            probability = torch.div(block.exponential, block.total, out=block.new())
            residual = torch.sub(probability, block.target, out=block.new())
            product = probability.mul_(residual)
            mean = product.sum(1, keepdim=True)
            return Linearization(
                residual.square_().sum(1, keepdim=True),
                lambda factor: Gradient(-2 * factor * mean, dense=lambda: product.mul_(2 * factor)),
            )
        others, doubt = self._others(block), self._doubt(block)
        scale = block.total.square().reciprocal()
        sum_of_others = others.sum(1, keepdim=True) * scale
        spread = (1 - doubt) * doubt
        return Linearization(
            sum_of_others + doubt.square(),
            lambda factor: Gradient(
                -2 * factor * (sum_of_others - spread),
                -2 * factor * spread,
                lambda: others.mul_(2 * factor * scale),
            ),
        )

    @staticmethod
    def _doubt(block: Block) -> Tensor:
        """``1 - p``."""
        return -(block.shifted_at_target - block.total.log()).expm1()

    @staticmethod
    def _others(block: Block) -> Tensor:
        """``exponential²``, 0 at the true class."""
        out = block.new()
        squared = torch.mul(block.exponential, block.exponential, out=out)
        zero = torch.zeros_like(block.total)
        # Not in place for autograd: under vmap the target may have an axis that the logits do not have.
        return (
            squared.scatter(1, block.target, zero) if out is None else squared.scatter_(1, block.target, zero)
        )


class LowerProbability:
    """The probability of classes ranked strictly below the true one, for dual focal losses.

    A weighted sum ``q = Σ a_k s_k`` with constant ``a``; gradient ``s_k (a_k - q)``. At a tie the
    weight is divided evenly. Ranks that do not exist count as probability 0.

    Args:
        ranks: the ranks to average over, where 1 is the most probable class below the true one; empty
            to average over all classes below.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def value(self, block: Block) -> Tensor:
        chosen = self._chosen(block, self._below(block))
        return (chosen * block.exponential).sum(1, keepdim=True) / block.total

    def linearize(self, block: Block) -> Linearization:
        below = self._below(block)
        if self.ranks == (1,):
            # Where no class is below, `best` is 0, and so is the factor of the classes that equal it.
            best = below.amax(1, keepdim=True)
            value = best / block.total
            product = torch.eq(below, best, out=below)
            amount = value / product.sum(1, keepdim=True)
        else:
            product = self._chosen(block, below).mul_(block.exponential)
            value = product.sum(1, keepdim=True) / block.total
            amount = block.total.reciprocal()
        return Linearization(
            value,
            lambda factor: Gradient(-factor * value, dense=lambda: product.mul_(amount * factor)),
        )

    @staticmethod
    def _below(block: Block) -> Tensor:
        """`exponential` where the class is below the true one, 0 elsewhere."""
        below = block.indicator(torch.lt, block.shifted, block.shifted_at_target)
        return below.mul_(block.exponential.detach())

    def _chosen(self, block: Block, below: Tensor) -> Tensor:
        """The weights ``a``, ``(A, K[, S])``."""
        if not self.ranks:
            present = block.indicator(torch.lt, block.shifted, block.shifted_at_target)
            return present.div_(present.sum(1, keepdim=True).clamp_min(1))
        ranked = below.topk(max(self.ranks), dim=1).values
        weights = torch.zeros_like(below)
        for rank in self.ranks:
            best = ranked.narrow(1, rank - 1, 1)
            hits = block.indicator(torch.eq, below, best)
            # Where the rank does not exist, `best` is 0 and equals every class that is not below.
            exists = (best > 0).to(best.dtype)
            share = exists / (len(self.ranks) * hits.sum(1, keepdim=True))
            weights = torch.addcmul(weights, hits, share)
        return weights


SumAndSlope = tuple[Tensor, Callable[[Factor], Tensor]]
"""A penalty summed over classes, ``(A, 1[, S])``, and a function that returns its slopes ``(A, K[, S])``
times a factor: a number, or one per class. Call it once, after the sum: it may overwrite the tensors that the
sum was computed from."""

PenaltyFunction = Callable[[Tensor, Callable[[], Tensor | None]], SumAndSlope]
"""A penalty with fixed parameters. It takes logits minus their maximum, ``(A, K[, S])``, and a function that
returns memory of that shape to write to, or None."""


def sum_over_classes(values: Tensor, weight: Factor) -> Tensor:
    """``Σ_k w_k x_k``, ``(A, 1[, S])``, for one weight per class ``(1, K[, 1])`` or for all."""
    if not isinstance(weight, Tensor) or weight.ndim == 0:
        return values.sum(1, keepdim=True) * weight
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or values.device.type != "cpu"
    if plain or torch.get_float32_matmul_precision() != "highest":
        return (values * weight).sum(1, keepdim=True)
    # A matrix product saves a pass. It is not rounded further: autocast is off, and the precision highest.
    return values @ weight.T if values.ndim == 2 else weight.transpose(1, 2) @ values


class MarginPenalty:
    """``Σ_k P_k(z_k)``, ``z_k = (max_j l_j - l_k - margin_k) / unit_k``.

    The gradient is ``-P'_k / unit_k``, and ``Σ P'_k / unit_k`` at the maximum, divided evenly at a tie.

    Args:
        penalty: computes ``P`` and ``P'`` from the logits.
        margin: distances between logits up to this size are no violation. A number, a tensor ``()``, or one
            number per class, ``(1, K[, 1])``.
        unit: the distance between logits that counts as a violation of 1; likewise.
    """

    def __init__(self, penalty: PenaltyFunction, *, margin: Factor, unit: Factor) -> None:
        self.penalty = penalty
        self.margin = margin
        self.unit = unit

    def value(self, block: Block) -> Tensor:
        return self.penalty(block.shifted, block.new)[0]

    def linearize(self, block: Block) -> Linearization:
        value, slope_of = self.penalty(block.shifted, block.new)

        def dense(factor: Factor) -> Tensor:
            if isinstance(factor, Tensor):  # one per element, which cannot be combined with one per class
                slope = slope_of(-1 / self.unit).mul_(factor)
            else:
                slope = slope_of(-factor / self.unit)
            return add_at_maximum(block, -slope.sum(1, keepdim=True), slope)

        return Linearization(value, lambda factor: Gradient(dense=lambda: dense(factor)))

    def slope_and_violation(self, shifted: Tensor) -> tuple[Tensor, Tensor]:
        """``P'`` and ``z``, both ``(A, K[, S])``."""
        offset, scale = -self.margin / self.unit, 1 / self.unit
        if isinstance(scale, Tensor):
            violation = offset - shifted * scale
        else:
            violation = torch.rsub(shifted, offset, alpha=scale)
        return self.penalty(shifted, lambda: None)[1](1.0), violation


class Discrimination:
    """``-Σ_{j≠y} log σ(l_y - l_j)``; gradient ``σ(l_j - l_y)``, and minus their sum at ``y``."""

    def value(self, block: Block) -> Tensor:
        # The true class against itself would add log 2: remove it before summing, which is more precise.
        others = F.logsigmoid(block.shifted_at_target - block.shifted)
        return -others.scatter(1, block.target, torch.zeros_like(block.total)).sum(1, keepdim=True)

    def linearize(self, block: Block) -> Linearization:
        slope = torch.sub(block.shifted, block.shifted_at_target, out=block.new()).sigmoid_()
        slope.scatter_(1, block.target, torch.zeros_like(block.total))
        slope.scatter_(1, block.target, -slope.sum(1, keepdim=True))
        return Linearization(self.value(block), lambda factor: Gradient(dense=lambda: slope.mul_(factor)))


class Exclusion:
    """``-½ Σ_{i≠y} Σ_{j≠y,j≠i} log σ(l_i - l_j)``; gradient ``½ Σ_{j≠y} tanh((l_i - l_j) / 2)``.

    All pairs are visited, a bounded number at a time.
    """

    def value(self, block: Block) -> Tensor:
        # log σ(inf) = 0 removes every pair with the true class from the sum.
        left = block.shifted.scatter(1, block.target, torch.inf)
        right = block.shifted.scatter(1, block.target, -torch.inf)
        total = torch.zeros_like(block.total)
        for start, length in self._parts(left):
            pairs = F.logsigmoid(left.narrow(1, start, length).unsqueeze(2) - right.unsqueeze(1))
            total = total - pairs.sum((1, 2)).unsqueeze(1)
        # A class against itself adds log 2, once for each of the K - 1 others.
        return 0.5 * (total - (left.shape[1] - 1) * math.log(2))

    def linearize(self, block: Block) -> Linearization:
        half = block.shifted * 0.5
        slope = -(half - half.gather(1, block.target)).tanh()
        for start, length in self._parts(half):
            pairs = half.narrow(1, start, length).unsqueeze(2) - half.unsqueeze(1)
            slope.narrow(1, start, length).add_(pairs.tanh_().sum(2))
        slope.scatter_(1, block.target, torch.zeros_like(block.total))
        return Linearization(
            self.value(block), lambda factor: Gradient(dense=lambda: slope.mul_(0.5 * factor))
        )

    @staticmethod
    def _parts(shifted: Tensor) -> list[tuple[int, int]]:
        classes = shifted.shape[1]
        step = max(1, min(classes, _PAIRS // max(1, shifted.numel())))
        return [(start, min(step, classes - start)) for start in range(0, classes, step)]
