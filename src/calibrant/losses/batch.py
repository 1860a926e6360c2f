"""What losses share that measure the calibration of a whole batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from calibrant.kernels import Composition, SumTerm, Term, reduce_each
from calibrant.kernels.workers import map_tasks
from calibrant.layout import Elements, computing_dtype, is_batched, is_transformed
from calibrant.losses.base import Loss
from calibrant.losses.cross_entropy import cross_entropy
from calibrant.statistics import sum_dtype


class BatchLoss(Loss):
    """A loss with a term over the batch that is a function of a few numbers of elements or classes.

    A subclass defines `numbers` and `over_numbers`, and `composition`, of logits without scale and offset, if
    the rest is not cross-entropy. All numbers and the composition are computed in one pass over the logits,
    and their gradients in another.
    """

    def composition(self) -> Composition:
        return Composition(cross_entropy())

    @abstractmethod
    def numbers(self, elements: Elements) -> tuple[Term | SumTerm, ...]:
        """The numbers that `over_numbers` takes."""

    @abstractmethod
    def over_numbers(self, elements: Elements, *numbers: Tensor) -> Tensor:
        """The term over the batch, a scalar.

        Args:
            elements: the batch.
            *numbers: what `numbers` asks for, ``(A[, S])`` or ``(K,)`` each; of an ignored element, they may
                be anything.
        """

    def over_batch(self, elements: Elements) -> Tensor:
        return self.over_numbers(elements, *reduce_each(elements, *self.numbers(elements)))

    def _terms(self, elements: Elements) -> tuple[Tensor, Tensor]:
        terms = self.composition().term(elements.logits), *self.numbers(elements)
        values, *numbers = reduce_each(elements, *terms)
        return values, self.over_numbers(elements, *numbers)


def flattened(elements: Elements, *numbers: Tensor) -> list[Tensor]:
    """Whether each element counts, as 0 or 1, and its numbers, ``(N,)`` each; 0 where it does not count.

    >>> from calibrant.layout import arrange
    >>> elements = arrange(torch.zeros(2, 2), torch.tensor([0, -100]))
    >>> [each.tolist() for each in flattened(elements, torch.tensor([0.5, torch.nan]))]
    [[1.0, 0.0], [0.5, 0.0]]
    """
    if not elements.all_valid:  # ignored logits may not be numbers
        numbers = tuple(torch.where(elements.valid, each, 0) for each in numbers)
    return [each.flatten() for each in (elements.valid.to(computing_dtype(elements.logits)), *numbers)]


def in_type_of_sums(*numbers: Tensor) -> list[Tensor]:
    """The same numbers in the type in which many of them can be added up."""
    return [each.to(sum_dtype(each.device)) for each in numbers]


def root(square: Tensor) -> Tensor:
    """The square root with a slope of 0 at 0, where the root has none.

    >>> square = torch.zeros((), requires_grad=True)
    >>> root(square).backward()
    >>> square.grad
    tensor(0.)
    """
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


_SMALLEST_PART, _MOST_PARTS = 2048, 16


def sum_of_parts(function: Callable[..., Tensor], *numbers: Tensor, together: bool = False) -> Tensor:
    """A function of all elements, computed by adding up its results for parts of them.

    On a CPU each part is computed by one thread, forward and backward. With other work on the cores,
    operations that torch splits among its threads take several times as long.

    Args:
        function: takes numbers of some elements, ``(n,)`` each, and returns a tensor. It must be a sum over
            elements, unless ``together``.
        *numbers: of all elements, ``(N,)`` each.
        together: whether the function needs all elements at once.

    >>> sum_of_parts(lambda x, y: (x * y).sum(), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor(11.)
    """
    if torch.compiler.is_compiling() or is_transformed():
        return function(*numbers)
    count = len(numbers[0])
    together = together or numbers[0].device.type != "cpu"
    size = count if together else max(_SMALLEST_PART, -(-count // _MOST_PARTS))
    return _SumOfParts.apply(function, max(1, size), *numbers)  # type: ignore[no-any-return, no-untyped-call]


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], size: int, *numbers: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*numbers)
        needed = ctx.needs_input_grad[2:]

        def evaluate(start: int) -> tuple[list[Tensor], Tensor]:
            given = [each.detach()[start : start + size] for each in numbers]
            given = [each.requires_grad_(grad) for each, grad in zip(given, needed, strict=True)]
            with torch.set_grad_enabled(any(needed)):
                return given, function(*given)

        ctx.parts = map_tasks(evaluate, range(0, max(1, len(numbers[0])), size), numbers[0].device)
        return torch.stack([result.detach() for _, result in ctx.parts]).sum(0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        def differentiate(part: tuple[list[Tensor], Tensor]) -> tuple[Tensor, ...]:
            given, result = part
            wanted = [each for each in given if each.requires_grad]
            return torch.autograd.grad(result, wanted, upstream, create_graph=create_graph)

        needed, create_graph = ctx.needs_input_grad[2:], torch.is_grad_enabled()
        parts, ctx.parts = ctx.parts, None  # which hold the memory of a graph
        if parts is None or create_graph or is_batched(upstream):  # once more, and all elements at once
            with torch.enable_grad(), torch.autocast(upstream.device.type, enabled=False):
                # Views, because one number may depend on another.
                given = [
                    each.view_as(each) if create_graph else each.detach().requires_grad_(grad)
                    for each, grad in zip(ctx.saved_tensors, needed, strict=True)
                ]
                gradients = iter(differentiate((given, ctx.function(*given))))
        else:
            found = map_tasks(differentiate, parts, upstream.device)
            gradients = map(torch.cat, zip(*found, strict=True))
        return None, None, *(next(gradients) if grad else None for grad in needed)
