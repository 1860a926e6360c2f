"""Per-element numbers with hand-written gradients, computed in cache-sized blocks.

A per-sample loss is a formula of a few numbers per element: the log-likelihood, an entropy, a
penalty. `reduce_classes` computes such a number and its gradient in one pass over the logits, block by
block. The gradient is the only tensor of the logits' size that it allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from calibrant.kernels.block import Block, Scratch
from calibrant.kernels.workers import map_blocks, sum_blocks
from calibrant.layout import Elements, Index, along_classes, computing_dtype, is_batched, is_transformed
from calibrant.statistics import sum_dtype

Result = TypeVar("Result")

Factor = float | Tensor
"""A number, or one per element ``(A, 1[, S])``."""


class Gradient(NamedTuple):
    """A gradient with respect to the logits, ``a·s + at_target·1_y + dense``.

    ``s`` is the softmax and ``1_y`` the one-hot true class. Most terms need only these two parts, which
    take one pass over the block together, however many terms are summed.

    Attributes:
        along_softmax: the factor ``a``.
        at_target: the amount added at the true class; None for nothing.
        dense: the remaining part, broadcastable to ``(A, K[, S])``, as a function. Call it once and last:
            it may overwrite the block's `shifted`.
    """

    along_softmax: Factor = 0.0
    at_target: Factor | None = None
    dense: Callable[[], Tensor] | None = None


def sum_of_gradients(parts: Sequence[Gradient]) -> Gradient:
    """The sum of gradients on the same block."""
    at_target = [part.at_target for part in parts if part.at_target is not None]
    dense = [part.dense for part in parts if part.dense is not None]
    return Gradient(
        sum(part.along_softmax for part in parts),
        reduce(add, at_target) if at_target else None,
        (lambda: reduce(_add_to, (each() for each in dense))) if dense else None,
    )


def _add_to(total: Tensor, other: Tensor) -> Tensor:
    """The sum, in the memory of the first tensor if both have one shape."""
    return total.add_(other) if total.shape == other.shape else total + other


class Linearization(NamedTuple):
    """The values of a term on one block, with their gradient."""

    value: Tensor  # the numbers, ``(A, 1[, S])``
    gradient: Callable[[Factor], Gradient]  # returns the gradient times a factor; to be called once


class Term(Protocol):
    """A number per element and its gradient with respect to the logits.

    For `reduce_each` a term may also have ``gradient(block, factor)``, if that takes less time than
    `linearize`, and ``constant = True``, if its gradient is 0.
    """

    def value(self, block: Block) -> Tensor:
        """The numbers ``(A, 1[, S])``, by operations that autograd can differentiate."""

    def linearize(self, block: Block) -> Linearization:
        """The same numbers with their gradient, in as few passes as possible; without autograd."""


class _Scaled(NamedTuple):
    """A term of ``scale · logits + offset``, divided by the scale or not; None leaves a part out."""

    term: Term
    scale: Factor | None
    offset: Tensor | None
    divided: bool

    def block(
        self, logits: Tensor, target: Tensor, scratch: Scratch | None = None, index: Index | None = None
    ) -> Block:
        return Block(logits, target, scratch, scale=self.scale, offset=self.offset, index=index)

    def value(self, block: Block) -> Tensor:
        value = self.term.value(block)
        return value if self.scale is None or not self.divided else value / self.scale

    def linearize(self, block: Block) -> Linearization:
        value, gradient = self.term.linearize(block)
        scale = self.scale
        if scale is None:
            return Linearization(value, gradient)
        if self.divided:
            return Linearization(value / scale, gradient)
        return Linearization(value, lambda factor: gradient(factor * scale))


def reduce_classes(
    elements: Elements,
    term: Term,
    *,
    scale: Tensor | float | None = None,
    offset: Tensor | None = None,
    divided: bool = False,
) -> Tensor:
    """Evaluate a term of ``scale · logits + offset`` for every element.

    ``scale`` and ``offset`` are constants: they get no gradient. Both are copied, so changing the tensors
    afterwards, as an adaptation does, does not affect a backward pass that is still to come.

    Args:
        elements: the batch.
        term: the number to compute for each element.
        scale: one number, which may be a tensor ``()``; None for 1.
        offset: one number per class, ``(K,)``; None for 0.
        divided: divide the result by the scale.

    Returns:
        ``(A[, S])``, float32 or float64; differentiable with respect to the logits.
    """
    logits = elements.logits
    target = elements.target if elements.soft else elements.target.unsqueeze(1)
    traced = torch.compiler.is_compiling() or is_transformed()
    if isinstance(scale, Tensor):
        scale = scale.detach().to(computing_dtype(logits), copy=True)
        if scale.device.type == "cpu" and not traced:
            scale = float(scale)
    if offset is not None:
        offset = along_classes(offset.detach(), logits)
    scaled = _Scaled(term, scale, offset, divided)
    # Neither can see through a Function that writes into its own memory.
    if traced or target.requires_grad:
        value = scaled.value(scaled.block(logits, target))
    else:
        arguments = (logits, target, scaled, elements.expected)
        value = _BlockwiseReduction.apply(*arguments)  # type: ignore[no-untyped-call]
    return value.squeeze(1)


class SumTerm(Protocol):
    """One number per class, summed over elements, and its gradient with respect to the logits."""

    def value(self, block: Block) -> Tensor:
        """The sums over a block ``(K,)``, by operations that autograd can differentiate."""

    def gradient(self, block: Block, factor: Tensor) -> Gradient:
        """The gradient of ``Σ_k factor_k · sum_k``; without autograd."""


def reduce_each(elements: Elements, *terms: Term | SumTerm) -> list[Tensor]:
    """Evaluate several terms in one pass.

    For losses whose gradient is known only once all elements have been seen. The gradient takes a second
    pass, in which the terms again share the softmax.

    Args:
        elements: the batch.
        *terms: what to compute for each element, or for all elements together.

    Returns:
        One tensor ``(A[, S])`` or ``(K,)`` per term, differentiable with respect to the logits.
    """
    logits = elements.logits
    target = elements.target if elements.soft else elements.target.unsqueeze(1)
    if torch.compiler.is_compiling() or is_transformed() or target.requires_grad:
        block = Block(logits, target)
        values = [term.value(block) for term in terms]
    else:
        values = _SeveralReductions.apply(logits, target, *terms)  # type: ignore[no-untyped-call]
    return [value if value.ndim == 1 else value.squeeze(1) for value in values]


class _SeveralReductions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, *terms: Term | SumTerm) -> tuple[Tensor, ...]:
        ctx.save_for_backward(logits, target)
        ctx.terms = terms
        ctx.set_materialize_grads(False)
        found = {term: _one_per_element(logits) for term in terms if hasattr(term, "linearize")}

        def evaluate(index: Index, scratch: Scratch) -> list[Tensor]:
            block = Block(logits[index], target[index], scratch, index=index)
            sums = []
            for term in terms:
                value = term.value(block)
                if term in found:
                    found[term][index] = value
                else:
                    sums.append(value)
            return sums

        ctx.mark_non_differentiable(*(found[term] for term in terms if getattr(term, "constant", False)))
        sums = iter(sum_blocks(evaluate, logits))
        return tuple(found[term] if term in found else next(sums) for term in terms)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target = ctx.saved_tensors
        used = [(term, by) for term, by in zip(ctx.terms, upstream, strict=True) if by is not None]
        create_graph = torch.is_grad_enabled()
        if create_graph or any(is_batched(by) for _, by in used):
            with torch.enable_grad():
                given = logits if create_graph else logits.detach().requires_grad_()
                block = Block(given, target)
                values = [(term.value(block), by) for term, by in used]
            values = [(value, by) for value, by in values if value.requires_grad]
            outputs, factors = zip(*values, strict=True)
            (gradient,) = torch.autograd.grad(outputs, given, factors, create_graph=create_graph)
            return (gradient, None, *(None for _ in ctx.terms))
        gradient = torch.empty_like(logits, dtype=computing_dtype(logits))

        def write(index: Index, scratch: Scratch) -> None:
            block = Block(logits[index], target[index], scratch, index=index)
            parts = []
            for term, by in used:
                factor = by if by.ndim == 1 else by[index]
                # A few terms have a gradient that takes less time without the value.
                separate = hasattr(term, "gradient")
                parts.append(
                    term.gradient(block, factor) if separate else term.linearize(block).gradient(factor)
                )
            _write(sum_of_gradients(parts), block, gradient[index])

        map_blocks(write, logits)
        return (gradient.to(logits.dtype), None, *(None for _ in ctx.terms))


class _BlockwiseReduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, scaled: _Scaled, expected: float) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.scaled, ctx.expected = scaled, expected
        if not ctx.needs_input_grad[0]:
            return _evaluate(logits, target, scaled)
        values, ctx.gradient = _evaluate_with_gradient(logits, target, scaled, expected)
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient itself must be differentiable
            values = ctx.scaled.value(ctx.scaled.block(logits, target))
            (gradient,) = torch.autograd.grad(values, logits, upstream, create_graph=True)
            return gradient, None, None, None
        # The first backward pass scales the stored gradient in place and hands it out. A second pass over
        # a retained graph has to compute it again.
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            _, gradient = _evaluate_with_gradient(logits, target, ctx.scaled, ctx.expected)
        if is_batched(upstream):  # several gradients at once
            gradient = gradient * (upstream / ctx.expected)
        # Comparing costs nothing on a CPU, and mostly saves a pass over the logits.
        elif upstream.device.type != "cpu" or not bool((upstream == ctx.expected).all()):
            gradient.mul_(upstream / ctx.expected)
        return gradient.to(logits.dtype), None, None, None


def _evaluate(logits: Tensor, target: Tensor, scaled: _Scaled) -> Tensor:
    values = _one_per_element(logits)

    def evaluate(index: Index, scratch: Scratch) -> None:
        values[index] = scaled.value(scaled.block(logits[index], target[index], scratch, index))

    map_blocks(evaluate, logits)
    return values


def _evaluate_with_gradient(
    logits: Tensor, target: Tensor, scaled: _Scaled, factor: float
) -> tuple[Tensor, Tensor]:
    values = _one_per_element(logits)
    # In the computing type, also for 16-bit logits: the factor of a gradient scaler is applied only later.
    gradient = torch.empty_like(logits, dtype=values.dtype)

    def evaluate(index: Index, scratch: Scratch) -> None:
        block = scaled.block(logits[index], target[index], scratch, index)
        values[index], gradient_of = scaled.linearize(block)
        _write(gradient_of(factor), block, gradient[index])

    map_blocks(evaluate, logits)
    return values, gradient


def _write(gradient: Gradient, block: Block, out: Tensor) -> None:
    along = gradient.along_softmax / block.total
    if gradient.dense is None:
        torch.mul(block.exponential, along, out=out)
    else:
        torch.addcmul(gradient.dense(), block.exponential, along, out=out)
    amount = gradient.at_target
    if isinstance(amount, Tensor):
        out.scatter_add_(1, block.target, amount.expand_as(block.total))
    elif amount is not None:
        out.scatter_add_(1, block.target, torch.full_like(block.total, amount))


def _one_per_element(logits: Tensor) -> Tensor:
    shape = (logits.shape[0], 1, *logits.shape[2:])
    return torch.empty(shape, dtype=computing_dtype(logits), device=logits.device)


def visit(elements: Elements, function: Callable[[Index, Block], Sequence[Tensor]]) -> list[Tensor]:
    """Add up what a function computes from each block of a batch, without gradients.

    Args:
        elements: the batch.
        function: takes the index of a block and its softmax, whose memory the next block overwrites. Returns
            tensors to add up, or none.

    Returns:
        The sums over all blocks.
    """
    logits = elements.logits
    target = elements.target if elements.soft else elements.target.unsqueeze(1)

    def evaluate(index: Index, scratch: Scratch) -> Sequence[Tensor]:
        return function(index, Block(logits[index], target[index], scratch, index=index))

    return sum_blocks(evaluate, logits)


def sum_by_class(elements: Elements, function: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """Sum functions of the logits over the valid elements, class by class.

    Args:
        elements: the batch.
        function: takes logits minus their maximum, ``(A, K[, S])``, and returns tensors of that shape.

    Returns:
        The number of valid elements, then one ``(K,)`` sum per tensor, in `sum_dtype`.
    """
    logits, valid = elements.logits, elements.valid.unsqueeze(1)
    dtype = sum_dtype(logits.device)
    axes = [axis for axis in range(logits.ndim) if axis != 1]

    def sums(index: Index, scratch: Scratch) -> list[Tensor]:
        part, counted = logits[index].to(computing_dtype(logits)), valid[index]
        values = function(part - part.amax(1, keepdim=True))
        if not elements.all_valid:
            values = tuple(torch.where(counted, value, 0) for value in values)
        return [counted.sum(dtype=dtype), *(value.sum(axes, dtype=dtype) for value in values)]

    return sum_blocks(sums, logits)


def nan_if_invalid(elements: Elements) -> Tensor:
    """NaN if a valid element has a logit that is not finite, or a label out of range; else 0.

    >>> from calibrant.layout import arrange
    >>> logits = torch.tensor([[0.0, torch.inf], [0.0, 1.0]])
    >>> nan_if_invalid(arrange(logits, torch.tensor([0, 1])))
    tensor(nan)
    >>> nan_if_invalid(arrange(logits, torch.tensor([-100, 1])))
    tensor(0.)
    """

    def check(index: Index, scratch: Scratch) -> Tensor:
        logits, place = elements.logits[index], index[:1] + index[2:]
        # The sum of finite numbers is finite unless it overflows. On other devices asking would wait.
        ask = elements.checked and logits.device.type == "cpu" and not is_batched(logits)
        if ask and logits.sum().isfinite():
            return logits.new_zeros(())
        # 0·x is NaN exactly where x is not finite, and a NaN survives every sum.
        extremes = logits.amax(1) * 0 + logits.amin(1) * 0
        if not elements.checked:
            extremes = extremes.masked_fill(elements.stray[place], torch.nan)
        return (extremes if elements.all_valid else torch.where(elements.valid[place], extremes, 0)).sum()

    return torch.stack(map_blocks(check, elements.logits)).sum()
