"""Losses on a GPU: one kernel reads the logits once and writes loss and gradient together.

On a GPU the time of a loss is the time of moving its logits. Operations of torch move them a dozen times;
here they are read once, and the gradient, the only tensor of their size, is written once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrant.kernels import device
from calibrant.kernels.composition import Composition, Part
from calibrant.kernels.launch import Launcher, Options, launch
from calibrant.kernels.operators import compiled_loss, flattened
from calibrant.layout import is_batched, is_transformed

Eager = Callable[[Tensor, Tensor], Tensor]
"""From logits and target to a loss, by operations of torch."""


def can_fuse(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernel can compute losses of these.

    It needs a GPU with Triton, logits in 32 or 16 bits, a target without gradient, and no function transform.
    """
    return (
        isinstance(logits, Tensor)
        and isinstance(target, Tensor)
        and logits.is_cuda
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.numel() > 0
        and not target.requires_grad
        and not is_transformed()
        and (
            torch.compiler.is_compiling()
            or (in_memory(logits) and in_memory(target) and _triton_works(logits.device))
        )
    )


def in_memory(tensor: Tensor) -> bool:
    """False for lazily negated and zero tensors."""
    return not tensor.is_neg() and not tensor._is_zerotensor()


@cache
def _triton_works(where: torch.device) -> bool:
    """Try the smallest kernel: Triton may lack the compiler it needs, or not know the GPU."""
    if find_spec("triton") is None:
        return False
    try:
        if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
            raise RuntimeError(f"needs Triton 3.3 or newer, found {version('triton')}")
        one = torch.ones(1, device=where)
        Launcher(device.scale_in_place, 1, where)((one, one, one), 1, 4096)
    except Exception as error:  # whatever goes wrong, plain operations of torch remain
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"losses run without their GPU kernel: Triton fails with {reason!r}. Values are the same, but "
            "calls take longer; Triton needs a C compiler and the headers of Python",
            stacklevel=2,
        )
        return False
    return True


def fused_loss(
    composition: Composition,
    logits: Tensor,
    target: Tensor,
    eager: Eager,
    options: Options,
) -> Tensor:
    """The loss, computed together with its gradient.

    Args:
        composition: what to compute; it must have a device form.
        logits: ``(B, K, *S)``.
        target: labels ``(B, *S)`` or probabilities ``(B, K, *S)``.
        eager: the same loss by operations of torch, for gradients of gradients.
        options: reduction, ignored label and class weights (with labels only).

    Returns:
        A float32 scalar, or one number per element ``(B, *S)`` for ``reduction="none"``.

    Raises:
        TypeError, ValueError: as `calibrant.layout.arrange`.
    """
    if torch.compiler.is_compiling():
        elements = options.arrange(logits, target)
        compiled: Tensor = compiled_loss(elements.logits, elements.given, *flattened(composition, options))[0]
        return compiled.view(elements.shape) if compiled.ndim else compiled
    job = _Job(composition, options, eager)
    value: Tensor = _FusedLoss.apply(logits, target, job)  # type: ignore[no-untyped-call]
    return value


class _Job(NamedTuple):
    """Arguments of `fused_loss`."""

    composition: Composition
    options: Options
    eager: Eager


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, job: _Job) -> Tensor:
        composition, options = job.composition, job.options
        if not ctx.needs_input_grad[0]:
            return launch(composition, logits, target, options, gradient=False).value
        # The upstream gradient of a scalar is nearly always 1, so the gradient is computed at once. In
        # float16 it could vanish before a gradient scaler's factor arrives: there it waits for that.
        early = options.reduction != "none" and logits.dtype != torch.float16
        # Not the value: a context that holds its own output is freed late, by the garbage collector.
        value, ctx.gradient, ctx.correction, ctx.plan = launch(
            composition, logits, target, options, gradient=early
        )
        ctx.job, ctx.versions = job, _versions(composition, options)
        # A graph must not see what the next adaptation does to the numbers.
        ctx.kept = None if early else _copied(composition, options)
        ctx.save_for_backward(logits, target)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        upstream = upstream if in_memory(upstream) else upstream.clone()
        if torch.is_grad_enabled():
            gradient = _differentiable_gradient(ctx, upstream)
        elif is_batched(upstream):  # several gradients at once: multiples of the same one
            gradient = _gradient_again(ctx, torch.ones(upstream.shape, device=upstream.device))
            by_element = upstream.unsqueeze(1) if upstream.ndim else upstream
            gradient = (gradient * by_element).to(gradient.dtype)
        elif gradient is None:
            gradient = _gradient_again(ctx, upstream)
        elif ctx.correction is None:
            gradient.mul_(upstream)
        else:
            ctx.plan.scale(gradient, upstream, ctx.correction)
        return gradient, None, None


def _differentiable_gradient(ctx: Any, upstream: Tensor) -> Tensor:
    """The gradient with a path for gradients of its own."""
    logits, target = ctx.saved_tensors
    _check_unchanged(ctx)
    gradient: Tensor
    (gradient,) = torch.autograd.grad(ctx.job.eager(logits, target), logits, upstream, create_graph=True)
    return gradient


def _gradient_again(ctx: Any, upstream: Tensor) -> Tensor:
    """The gradient where it was not kept, as in a second pass over a graph."""
    logits, target = ctx.saved_tensors
    if ctx.kept is None:
        _check_unchanged(ctx)
    composition, options = ctx.kept or ctx.job[:2]
    upstream = upstream.contiguous() if ctx.correction is None else upstream * ctx.correction[0]
    gradient = launch(
        composition, logits.detach(), target, options, gradient=True, upstream=upstream
    ).gradient
    assert gradient is not None
    return gradient


def _check_unchanged(ctx: Any) -> None:
    if _versions(ctx.job.composition, ctx.job.options) != ctx.versions:
        raise RuntimeError(
            "the loss has adapted, or its class weights were changed, between two backward passes over the "
            "same graph: call the loss again"
        )


def _versions(composition: Composition, options: Options) -> list[int]:
    """Counts of the changes to the loss's tensors; those of inference mode have none."""
    values = [options.class_weight, composition.scale, composition.offset]
    for part in (composition.first, composition.penalty):
        if part is not None:
            values += part.numbers.values()
    return [-1 if each.is_inference() else each._version for each in values if isinstance(each, Tensor)]


def _copied(composition: Composition, options: Options) -> tuple[Composition, Options]:
    """The same with copies of the tensors."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def copied(part: Part | None) -> Part | None:
        return part and replace(part, numbers={name: copy(each) for name, each in part.numbers.items()})

    return replace(
        composition,
        first=copied(composition.first),
        penalty=copied(composition.penalty),
        scale=copy(composition.scale),
        offset=copy(composition.offset),
    ), options._replace(class_weight=copy(options.class_weight))
