"""Sums over classes with a hand-written gradient that works in cache-sized blocks.

A per-sample loss is a formula of a few numbers per element: the log-likelihood, an entropy, a
penalty. `reduce_classes` computes such a number and its gradient in one visit to each block of the
logits, so that the only tensor of the logits' size is the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from calibrant.kernels.block import Block, Scratch
from calibrant.layout import Elements, Index, blocks, computing_dtype
from calibrant.statistics import sum_dtype

Factor = float | Tensor
"""A number, or one per element ``(A, 1[, S])``."""


class Gradient(NamedTuple):
    """A gradient with respect to the logits, ``a·s + at_target·1_y + dense``.

    ``s`` is the softmax and ``1_y`` the true class. Most terms move along these two, and one pass over
    the block serves all of them.

    Attributes:
        along_softmax: ``a``.
        at_target: what the true class gets on top; None for nothing.
        dense: what is left, broadcastable to ``(A, K[, S])``, as a function to call once and last: it
            may write over the block's `shifted`.
    """

    along_softmax: Factor = 0.0
    at_target: Factor | None = None
    dense: Callable[[], Tensor] | None = None


class Linearization(NamedTuple):
    """A term on one block.

    Attributes:
        value: the numbers, ``(A, 1[, S])``.
        gradient: a multiple of their gradient; to be called once.
    """

    value: Tensor
    gradient: Callable[[Factor], Gradient]


class Term(Protocol):
    """A number per element, and how it moves with the logits."""

    def value(self, block: Block) -> Tensor:
        """The numbers ``(A, 1[, S])``, by operations that autograd can differentiate."""

    def linearize(self, block: Block) -> Linearization:
        """The same numbers with their gradient, as fast as can be."""


def reduce_classes(elements: Elements, term: Term) -> Tensor:
    """Evaluate a term for every element.

    Args:
        elements: the batch.
        term: what to compute.

    Returns:
        ``(A[, S])``, float32 or float64; differentiable with respect to the logits.
    """
    target = elements.target if elements.soft else elements.target.unsqueeze(1)
    # torch.func's transforms cannot see through a Function that writes into its own memory.
    transformed = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or transformed or target.requires_grad:
        value = term.value(Block(elements.logits, target))
    else:
        arguments = (elements.logits, target, term, elements.expected)
        value = _BlockwiseReduction.apply(*arguments)  # type: ignore[no-untyped-call]
    return value.squeeze(1)


class _BlockwiseReduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, term: Term, expected: float) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.term, ctx.expected = term, expected
        if not ctx.needs_input_grad[0]:
            return _evaluate(logits, target, term)
        values, ctx.gradient = _evaluate_with_gradient(logits, target, term, expected)
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody asked for a gradient of the gradient
            values = ctx.term.value(Block(logits, target))
            (gradient,) = torch.autograd.grad(values, logits, upstream, create_graph=True)
            return gradient, None, None, None
        # The first backward pass scales the gradient where it lies and gives it away; one more
        # pass over a retained graph has to compute it again.
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            _, gradient = _evaluate_with_gradient(logits, target, ctx.term, ctx.expected)
        # A look at the upstream gradient is free on a CPU, and mostly saves a pass over the logits.
        if upstream.device.type != "cpu" or not bool((upstream == ctx.expected).all()):
            gradient.mul_(upstream / ctx.expected)
        return gradient.to(logits.dtype), None, None, None


def _evaluate(logits: Tensor, target: Tensor, term: Term) -> Tensor:
    values = _one_per_element(logits)
    scratch = Scratch()
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for index in blocks(logits.shape, logits.device):
            values[index] = term.value(Block(logits[index], target[index], scratch))
    return values


def _evaluate_with_gradient(
    logits: Tensor, target: Tensor, term: Term, factor: float
) -> tuple[Tensor, Tensor]:
    values = _one_per_element(logits)
    # In the computing type, also for 16-bit logits: a gradient scaler's factor comes only later.
    gradient = torch.empty_like(logits, dtype=values.dtype)
    scratch = Scratch()
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for index in blocks(logits.shape, logits.device):
            block = Block(logits[index], target[index], scratch)
            value, gradient_of = term.linearize(block)
            values[index] = value
            _write(gradient_of(factor), block, gradient[index])
    return values, gradient


def _write(gradient: Gradient, block: Block, out: Tensor) -> None:
    along = gradient.along_softmax / block.total
    if gradient.dense is None:
        torch.mul(block.exponential, along, out=out)
    else:
        torch.addcmul(gradient.dense(), block.exponential, along, out=out)
    amount = gradient.at_target
    if amount is not None:
        if not isinstance(amount, Tensor):
            amount = torch.full_like(block.total, amount)
        out.scatter_add_(1, block.target, amount)


@torch.no_grad()
def visit(elements: Elements) -> Iterator[tuple[Index, Block]]:
    """The batch block by block: where each belongs, and its softmax, which the next one overwrites."""
    target = elements.target.unsqueeze(1)
    scratch = Scratch()
    with torch.autocast(elements.logits.device.type, enabled=False):
        for index in blocks(elements.logits.shape, elements.logits.device):
            yield index, Block(elements.logits[index], target[index], scratch)


def _one_per_element(logits: Tensor) -> Tensor:
    shape = (logits.shape[0], 1, *logits.shape[2:])
    return torch.empty(shape, dtype=computing_dtype(logits), device=logits.device)


def sum_by_class(elements: Elements, function: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """Sum functions of the logits over the valid elements, class by class.

    Args:
        elements: the batch.
        function: from logits minus their maximum, ``(A, K[, S])``, to tensors of that shape.

    Returns:
        The number of valid elements, NaN where there is a `flaw`, then one ``(K,)`` sum per tensor, in
        `sum_dtype`.
    """
    device = elements.logits.device
    dtype = sum_dtype(device)
    valid = elements.valid.unsqueeze(1)

    def sums(index: Index) -> list[Tensor]:
        logits = elements.logits[index].to(computing_dtype(elements.logits))
        counted = valid[index]
        axes = [axis for axis in range(logits.ndim) if axis != 1]
        values = function(logits - logits.amax(1, keepdim=True))
        return [
            counted.sum(dtype=dtype),
            *(torch.where(counted, value, 0).sum(axes, dtype=dtype) for value in values),
        ]

    parts = [sums(index) for index in blocks(elements.logits.shape, device)]
    count, *totals = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
    return [count + flaw(elements), *totals]


@torch.no_grad()
def flaw(elements: Elements) -> Tensor:
    """NaN where a valid element has a logit that is not finite, or a label that is no class; else 0.

    >>> from calibrant.layout import arrange
    >>> logits = torch.tensor([[0.0, torch.inf], [0.0, 1.0]])
    >>> flaw(arrange(logits, torch.tensor([0, 1]))), flaw(arrange(logits, torch.tensor([-100, 1])))
    (tensor(nan), tensor(0.))
    """
    # 0·x is NaN just where x is not finite: one number carries the news through every sum.
    extremes = elements.logits.amax(1) * 0 + elements.logits.amin(1) * 0
    if not elements.soft:  # on a GPU nobody has looked at the labels yet
        outside = (elements.target < 0) | (elements.target >= elements.logits.shape[1])
        extremes = extremes.masked_fill(outside, torch.nan)
    return torch.where(elements.valid, extremes, 0).sum()
