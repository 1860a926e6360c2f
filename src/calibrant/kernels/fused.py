"""Losses on a GPU: one kernel reads the logits once, and writes loss and gradient together.

On a GPU the time of a loss is the time of moving its logits, which operations of torch do a dozen times. Here
they are read once, and the gradient, the only tensor of their size, is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fused:
    """A loss as the kernel knows it: ``-c log p`` plus something, or a power times ``-log p``.

    Attributes:
        extra: what is added: ``"nothing"``, ``"uniform"`` (minus the mean of log s), ``"entropy"`` (minus
            it), ``"squared"`` (the squared error, in place of everything), or the penalty of the distance
            below the maximum: ``"hinge"``, ``"phr"``, ``"p2"``, ``"p3"``.
        base: of the power: ``"plain"`` for none, ``"doubt"`` (1 - p), ``"belief"`` (1 + p), ``"dual"``
            (1 - p + q).
        exponent: where it is from: ``"fixed"``, ``"threshold"``, ``"binned"`` or ``"rated"``.
        likelihood: c.
        amount: the factor of what is added.
        margin: logit distance that costs nothing.
        unit: logit distance in which violations are measured.
        gamma: the exponent; below a threshold; or the rate of a rated one.
        other_gamma: the exponent above the threshold.
        threshold: of p.
        multiplier: ``(K,)``, λ.
        penalty_weight: ``(K,)``, ρ.
        gammas: ``(bins,)``.
        edges: ``(bins + 1,)``.
        accuracies: ``(bins,)``.
        passes: how often the loss has adapted.
    """

    extra: str = "nothing"
    base: str = "plain"
    exponent: str = "fixed"
    likelihood: float = 1.0
    amount: float = 0.0
    margin: float = 0.0
    unit: float = 1.0
    gamma: float = 0.0
    other_gamma: float = 0.0
    threshold: float = 0.0
    multiplier: Tensor | None = None
    penalty_weight: Tensor | None = None
    gammas: Tensor | None = None
    edges: Tensor | None = None
    accuracies: Tensor | None = None
    passes: Tensor | None = None

    def kept(self) -> Fused:
        """The same with copies of the tensors: a graph must not see what the next adaptation does to them."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.clone()
        return Fused(**values)


EXTRAS = ("nothing", "uniform", "entropy", "squared", "hinge", "phr", "p2", "p3")
BASES = ("plain", "doubt", "belief", "dual")
EXPONENTS = ("fixed", "threshold", "binned", "rated")

# Numbers of logits in a tile; the most classes that are held at once; how many are where there are more.
_TILE, _MOST_CLASSES, _PART = 4096, 16384, 8192


@cache
def _triton_is_there() -> bool:
    try:
        import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def can_fuse(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernel can run: on a GPU, with Triton, in a type it knows, and not under a transform."""
    return (
        logits.is_cuda
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.numel() > 0
        and not target.requires_grad
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and _triton_is_there()
    )


def fused_loss(
    recipe: Fused,
    logits: Tensor,
    target: Tensor,
    eager: Callable[[Tensor, Tensor], Tensor],
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
) -> Tensor:
    """The loss, and with it the gradient for the backward pass.

    Args:
        recipe: what to compute.
        logits: ``(B, K, *S)``, float32, bfloat16 or float16.
        target: labels ``(B, *S)`` or probabilities ``(B, K, *S)``.
        eager: the same by operations that autograd can follow, for gradients of gradients.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: of labels that do not count.
        class_weight: ``(K,)``; with labels only.

    Returns:
        A float32 scalar, or ``(B, *S)`` for ``reduction="none"``.
    """
    options = (reduction, ignore_index, class_weight)
    value: Tensor = _FusedLoss.apply(logits, target, recipe, options, eager)  # type: ignore[no-untyped-call]
    return value


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        recipe: Fused,
        options: tuple[Any, ...],
        eager: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        # Where the upstream gradient is one number, 1 almost always, the gradient is computed right away. In
        # float16 it could vanish before a gradient scaler's factor arrives: there it waits for it.
        early = options[0] != "none" and logits.dtype != torch.float16 and ctx.needs_input_grad[0]
        if not early and ctx.needs_input_grad[0]:
            recipe = recipe.kept()
        value, ctx.gradient, ctx.found = launch(recipe, logits, target, options, early)
        ctx.recipe, ctx.options, ctx.eager = recipe, options, eager
        ctx.save_for_backward(logits, target)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if torch.is_grad_enabled():  # somebody asked for a gradient of the gradient
            logits, target = ctx.saved_tensors
            value = ctx.eager(logits, target)
            (gradient,) = torch.autograd.grad(value, logits, upstream, create_graph=True)
        elif gradient is None:  # also in a second pass over a retained graph
            logits, target = ctx.saved_tensors
            upstream = upstream.contiguous()
            gradient = launch(ctx.recipe, logits, target, ctx.options, True, upstream, ctx.found)[1]
        else:
            scale(gradient, upstream, ctx.found)
        return gradient, None, None, None, None


_PLANS: dict[tuple[Any, ...], Any] = {}


def run(
    kernel: Any, grid: tuple[int, int, int], key: tuple[Any, ...], *arguments: Any, **settings: Any
) -> None:
    """Launch a kernel; the second time with the same key without Triton's look at every argument.

    Args:
        kernel: of Triton.
        grid: of programs.
        key: all that the compiled kernel depends on beside the tensors' types and places.
        *arguments: all of the kernel's, in order.
        **settings: of the launch.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    # Triton compiles for the types of tensors and for whether they begin at a multiple of 16 bytes.
    key = (*key, *((tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors), tensors[0].device)
    plan = _PLANS.get(key)
    # Triton launches on the current device, wherever the data are.
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        if plan is None:
            _PLANS[key] = kernel[grid](*arguments, **settings)
        else:
            plan[grid](*arguments)


def scale(tensor: Tensor, factor: Tensor, found: Tensor) -> None:
    """Multiply a dense tensor by a number and by the correction that was found, both on its device."""
    from calibrant.kernels.device import scale_in_place

    size, programs = tensor.numel(), found.numel() // 2
    grid = (max(1, min(-(-size // 4096), 528)), 1, 1)
    key = ("scale", size, programs)
    run(scale_in_place, grid, key, tensor, factor, found, programs, size, 4096, num_warps=8)


def launch(
    recipe: Fused,
    logits: Tensor,
    target: Tensor,
    options: tuple[Any, ...],
    gradient: bool,
    upstream: Tensor | None = None,
    found: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run the kernel: the loss, the gradient if asked for, and what was found on the way.

    In the backward pass it gets that again, with the upstream gradient.
    """
    from calibrant.kernels import device

    reduction, ignore_index, class_weight = options
    classes = logits.shape[1]
    soft = target.is_floating_point()
    if logits.ndim == 2:
        outer, inner = 1, logits.shape[0]
        view = logits
        slopes = torch.empty_like(view) if gradient else view
        strides: tuple[int, ...] = (0, view.stride(1), view.stride(0))
        slope_strides: tuple[int, ...] = (0, slopes.stride(1), slopes.stride(0))
        target_strides: tuple[int, ...] = (
            (0, target.stride(1), target.stride(0)) if soft else (0, 0, target.stride(0))
        )
    else:
        view = logits.flatten(2)  # a copy only of pixels that do not lie in a row
        outer, inner = logits.shape[0], view.shape[2]
        slopes = torch.empty_like(view) if gradient else view
        target = target.flatten(2) if soft else target.flatten(1)
        strides, slope_strides = view.stride(), slopes.stride()
        target_strides = target.stride() if soft else (target.stride(0), 0, target.stride(1))

    tile = max(2, 1 << max(0, classes - 1).bit_length())
    single = tile <= _MOST_CLASSES
    tile = tile if single else _PART
    # Pixels lie side by side, so many of them make wide reads; otherwise the classes do.
    rows = max(1, min(128, (_TILE if strides[1] == 1 else 2 * _TILE) // tile))
    blocks = -(-inner // rows)
    warps = 4 if rows * tile <= 2 * _TILE else 8
    each = reduction == "none"
    programs = blocks * outer
    if found is None:
        found = torch.empty(2 * programs + 1, dtype=torch.float32, device=logits.device)
        if each:
            found.fill_(1)  # nothing to correct
    # Not a part of a larger tensor: autograd forbids to change those in place, as `loss /= steps` does.
    shape = logits.shape[:1] + logits.shape[2:] if each else ()
    value = torch.empty(shape, dtype=torch.float32, device=logits.device)
    factor = 1 / max(1, outer * inner) if reduction == "mean" else 1.0
    count = reduction == "mean" and not soft
    bins = 1 if recipe.gammas is None else len(recipe.gammas)
    flags = (
        bins,
        EXTRAS.index(recipe.extra),
        BASES.index(recipe.base),
        EXPONENTS.index(recipe.exponent),
        soft,
        class_weight is not None,
        recipe.multiplier is not None,
        count,
        gradient,
        each,
        0 if upstream is None else 2 if upstream.ndim else 1,
        single,
        rows,
        tile,
    )
    key = (
        flags,
        warps,
        classes,
        inner,
        strides,
        target_strides,
        slope_strides,
        ignore_index,
    )
    run(
        device.loss_and_gradient,
        (programs, 1, 1),
        key,
        view,
        target,
        view if class_weight is None else class_weight,
        view if recipe.penalty_weight is None else recipe.penalty_weight,
        view if recipe.multiplier is None else recipe.multiplier,
        view if recipe.gammas is None else recipe.gammas,
        view if recipe.edges is None else recipe.edges,
        view if recipe.accuracies is None else recipe.accuracies,
        view if recipe.passes is None else recipe.passes,
        found,
        value,
        slopes,
        classes,
        inner,
        *strides,
        *target_strides,
        *slope_strides,
        ignore_index,
        factor,
        found if upstream is None else upstream,
        recipe.likelihood,
        recipe.amount,
        recipe.margin,
        1 / recipe.unit,
        recipe.gamma,
        recipe.other_gamma,
        recipe.threshold,
        *flags,
        num_warps=warps,
    )
    out = slopes.view(logits.shape) if gradient else None
    if upstream is None and not each:
        name = ("finish", count, programs)
        run(device.finish, (1, 1, 1), name, found, value, programs, factor, count, 1024, num_warps=4)
    return value, out, found
