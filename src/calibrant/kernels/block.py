"""The softmax of a run of elements in parts that all terms share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant.layout import LANES, Index, along_classes, computing_dtype, is_transformed


class Scratch:
    """Memory that the blocks of a pass use one after the other.

    Allocating and freeing tensors for every block would take several times as long as the arithmetic,
    because memory of this size comes from the operating system each time.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def restart(self) -> None:
        """Begin a block: every buffer is free again."""
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the same shape to write to; its contents are arbitrary."""
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty_like(like, memory_format=torch.contiguous_format))
        buffer = self._buffers[self._used]
        if buffer.shape != like.shape:  # the last block is smaller
            if buffer.numel() < like.numel():
                buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
                self._buffers[self._used] = buffer
            buffer = buffer.view(-1)[: like.numel()].view(like.shape)
        self._used += 1
        return buffer


class Block:
    """Logits of some elements in the computing type, with their softmax in parts.

    The softmax itself is not formed: terms multiply `exponential` by a factor anyway, and dividing that
    factor by `total` instead saves a pass. Everything is relative to the maximum, so a constant added to
    the logits cancels before it can cost digits.

    Args:
        logits: ``(A, K[, S])``.
        target: labels ``(A, 1[, S])`` or probabilities ``(A, K[, S])``.
        scratch: memory to work in. Without it all results are newly allocated and autograd can follow.
        scale: a number to multiply the logits by; None for 1.
        offset: one number per class to add afterwards, ``(1, K[, 1])``; None for 0.
        index: where the elements lie in the batch; None for the whole batch.

    Attributes:
        logits: the logits in the computing type, before scale and offset, ``(A, K[, S])``.
        shifted: logits minus their maximum, ``(A, K[, S])``.
        exponential: ``exp(shifted)``.
        total: the sum of `exponential` over classes, ``(A, 1[, S])``. Its logarithm is the log-normaliser,
            its reciprocal the top probability.
    """

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        scratch: Scratch | None = None,
        *,
        scale: float | Tensor | None = None,
        offset: Tensor | None = None,
        index: Index | None = None,
    ) -> None:
        logits = logits.to(computing_dtype(logits))
        self.logits = logits
        self.index = index
        self._scratch = scratch
        self._top: Tensor | None = None
        self._others: Tensor | None = None
        if scratch is not None:
            scratch.restart()
        self.target = target
        out = self.new()
        if scale is not None:
            # First the maximum: a number common to all logits must not cost digits.
            logits = torch.sub(logits, logits.amax(1, keepdim=True), out=out)
            logits = torch.mul(logits, scale, out=out)
        if offset is not None:
            logits = torch.add(logits, offset, out=out)
        self.shifted = torch.sub(logits, logits.amax(1, keepdim=True), out=out)
        self.exponential = torch.exp(self.shifted, out=self.new())
        self.total = self.exponential.sum(1, keepdim=True)

    def new(self) -> Tensor | None:
        """Scratch memory of the block's shape to write a result to, or None to allocate one."""
        return None if self._scratch is None else self._scratch.take(self.logits)

    @property
    def soft(self) -> bool:
        """Whether the targets are probabilities."""
        return self.target.is_floating_point()

    @property
    def confidence(self) -> Tensor:
        """The top probability, ``(A, 1[, S])``; equal for equal logits, wherever they lie in the block."""
        odd = self.total.shape[-1] % LANES
        if self.total.ndim == 2 or not odd or self.total.device.type != "cpu":
            return self.total.reciprocal()
        # Torch adds up the last columns, too few for four vectors, in another order than the others.
        last = F.pad(self.exponential[..., -odd:], (0, LANES - odd)).sum(1, keepdim=True)[..., :odd]
        return torch.cat([self.total[..., :-odd], last], -1).reciprocal()

    @property
    def others(self) -> Tensor:
        """The sum of `exponential` over all classes but one at the top, ``(A, 1[, S])``.

        `total` minus 1 would lose all digits where the network is sure. Use it before `top`.
        """
        if self._others is None:
            below = self.indicator(torch.lt, self.shifted, 0)
            ties = below.shape[1] - 1 - below.sum(1, keepdim=True)
            terms = torch.mul(below, self.exponential, out=None if self._scratch is None else below)
            self._others = ties + terms.sum(1, keepdim=True)
        return self._others

    @property
    def shifted_at_target(self) -> Tensor:
        """The true class's entry of `shifted`, ``(A, 1[, S])``."""
        return self.shifted.gather(1, self.target)

    @property
    def prediction(self) -> Tensor:
        """The first class that attains the maximum, ``(A, 1[, S])``, in the computing type.

        Twenty times faster than `torch.argmax` along an axis that is not the last.
        """
        classes = self.shifted.shape[1]
        countdown = torch.arange(classes, 0, -1, device=self.shifted.device)
        top = self.indicator(torch.eq, self.shifted, 0)
        return classes - top.mul_(along_classes(countdown, top)).amax(1, keepdim=True)

    @property
    def correct(self) -> Tensor:
        """Whether the true class is the first that attains the maximum, ``(A, 1[, S])``."""
        # On a GPU int() would wait for the device.
        if self.shifted.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
            return self.prediction == self.target
        attains = self.shifted_at_target == 0
        # As many zeros as elements: no two classes tie. That is the usual case, and cheap to detect.
        zero = self.indicator(torch.eq, self.shifted, 0)
        if int(zero.sum()) != attains.numel():  # a block is small enough to be counted in float32
            tied = (attains & (zero.sum(1, keepdim=True) > 1)).squeeze(1).nonzero(as_tuple=True)
            rows = self.shifted.movedim(1, -1)[tied]
            attains.squeeze(1)[tied] = rows.argmax(1) == self.target.squeeze(1)[tied]
        return attains

    @property
    def top(self) -> Tensor:
        """1 for every class that attains the maximum, 0 elsewhere; overwrites `shifted`."""
        if self._top is None:
            self._top = torch.eq(self.shifted, 0, out=self.shifted)
        return self._top

    def indicator(self, comparison: Callable[..., Tensor], left: Tensor, right: Tensor | float) -> Tensor:
        """A comparison as numbers 0 and 1, in ``left``'s type and shape, without a gradient."""
        left = left.detach()
        right = right.detach() if isinstance(right, Tensor) else right
        out = self.new() if left.shape == self.logits.shape else None
        if out is None:
            return comparison(left, right).to(left.dtype)
        return comparison(left, right, out=out)  # without a boolean in between: four times faster
