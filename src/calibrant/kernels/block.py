"""The pieces of a softmax that every term shares, computed once for a run of elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from calibrant.layout import along_classes, computing_dtype


class Scratch:
    """Memory that every block of a pass works in.

    Tensors allocated and freed block by block would come from, and go back to, the operating system
    each time, at several times the cost of the arithmetic.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def restart(self) -> None:
        """Begin a block: every buffer is free again."""
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor of that shape, to be written to; its contents are arbitrary."""
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty_like(like, memory_format=torch.contiguous_format))
        buffer = self._buffers[self._used]
        if buffer.shape != like.shape:  # the last block of a row is smaller, the next one is not
            if buffer.numel() < like.numel():
                buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
                self._buffers[self._used] = buffer
            buffer = buffer.view(-1)[: like.numel()].view(like.shape)
        self._used += 1
        return buffer


class Block:
    """Logits of some elements, in the computing type, with their softmax in parts.

    The softmax is never formed here: `exponential` over `total` is what terms fold into the factor
    they multiply with anyway, which saves a pass. Everything is relative to the maximum, so a
    constant added to the logits cancels before it can cost digits.

    Args:
        logits: ``(A, K[, S])``.
        target: labels ``(A, 1[, S])`` or probabilities ``(A, K[, S])``.
        scratch: memory to work in; without it everything is allocated, and autograd can follow.

    Attributes:
        shifted: logits minus their maximum, ``(A, K[, S])``.
        exponential: ``exp(shifted)``.
        total: sum of `exponential` over classes, ``(A, 1[, S])``; its log is the log-normaliser, its
            reciprocal the top probability.
    """

    def __init__(self, logits: Tensor, target: Tensor, scratch: Scratch | None = None) -> None:
        logits = logits.to(computing_dtype(logits))
        self._like = logits
        self._scratch = scratch
        self._top: Tensor | None = None
        if scratch is not None:
            scratch.restart()
        self.target = target
        self.shifted = torch.sub(logits, logits.amax(1, keepdim=True), out=self.new())
        self.exponential = torch.exp(self.shifted, out=self.new())
        self.total = self.exponential.sum(1, keepdim=True)

    def new(self) -> Tensor | None:
        """Where to write a result of the block's shape: scratch memory, or None to allocate it."""
        return None if self._scratch is None else self._scratch.take(self._like)

    @property
    def soft(self) -> bool:
        """Whether the targets are probabilities."""
        return self.target.is_floating_point()

    @property
    def shifted_at_target(self) -> Tensor:
        """The true class's entry of `shifted`, ``(A, 1[, S])``."""
        return self.shifted.gather(1, self.target)

    @property
    def prediction(self) -> Tensor:
        """The first class that attains the maximum, ``(A, 1[, S])``, in the computing type.

        `torch.argmax` finds the same, twenty times slower along an axis that is not the last.
        """
        classes = self.shifted.shape[1]
        countdown = torch.arange(classes, 0, -1, device=self.shifted.device)
        top = self.indicator(torch.eq, self.shifted, 0)
        return classes - top.mul_(along_classes(countdown, top)).amax(1, keepdim=True)

    @property
    def correct(self) -> Tensor:
        """Whether the true class is the first that attains the maximum, ``(A, 1[, S])``."""
        # A device must not be waited for, and nobody has looked whether the labels there are in range.
        if self.shifted.device.type != "cpu" or torch.compiler.is_compiling():
            return self.prediction == self.target
        attains = self.shifted_at_target == 0
        # As many zeros as elements means that no two classes share a maximum: mostly so, and quickly seen.
        zero = self.indicator(torch.eq, self.shifted, 0)
        if int(zero.sum()) != attains.numel():  # a block is small enough to be counted in float32
            tied = (attains & (zero.sum(1, keepdim=True) > 1)).squeeze(1).nonzero(as_tuple=True)
            rows = self.shifted.movedim(1, -1)[tied]
            attains.squeeze(1)[tied] = rows.argmax(1) == self.target.squeeze(1)[tied]
        return attains

    @property
    def top(self) -> Tensor:
        """1 for every class that attains the maximum, 0 elsewhere; takes the place of `shifted`."""
        if self._top is None:
            self._top = torch.eq(self.shifted, 0, out=self.shifted)
        return self._top

    def indicator(self, comparison: Callable[..., Tensor], left: Tensor, right: Tensor | float) -> Tensor:
        """A comparison as numbers 0 and 1, in ``left``'s type and shape, without a gradient."""
        left = left.detach()
        right = right.detach() if isinstance(right, Tensor) else right
        out = self.new() if left.shape == self._like.shape else None
        if out is None:
            return comparison(left, right).to(left.dtype)
        return comparison(left, right, out=out)  # no boolean in between: four times faster
