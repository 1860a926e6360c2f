"""Batch normalisation on a GPU with what follows it, a sum and a ReLU, where channels lie side by side.

A network of convolutions spends as much time here as in the convolutions, and all of it on moving images.
Here they are read twice in either direction; a normalisation, a sum and a ReLU of torch read them four times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from calibrant.kernels.fused import run, runs_triton


def normalised(norm: nn.BatchNorm2d, images: Tensor, added: Tensor | None = None, *, relu: bool) -> Tensor:
    """``norm(images)``, plus what is added, without what is negative if ``relu``.

    On a GPU, in training and with channels that lie side by side, by kernels that keep all of it in float32
    until the result; otherwise by operations of torch.

    Args:
        norm: the layer; its running averages move as ever.
        images: ``(B, C, H, W)``.
        added: of the same shape.
        relu: whether negative numbers become 0.

    >>> normalised(nn.BatchNorm2d(2).eval(), -torch.ones(1, 2, 1, 1), relu=True).flatten().tolist()
    [0.0, 0.0]
    """
    if not (_is_plain(norm) and _by_kernels(norm, images, added)):
        result = norm(images)
        if added is not None:
            result = result + added
        return F.relu(result) if relu else result
    value: Tensor = _Normalised.apply(  # type: ignore[no-untyped-call]
        images,
        norm.weight,
        norm.bias,
        added,
        (norm.running_mean, norm.running_var, norm.num_batches_tracked),
        norm.momentum,
        norm.eps,
        relu,
    )
    return value


def _is_plain(norm: nn.BatchNorm2d) -> bool:
    """Whether a layer trains as it was made. One for several processes takes statistics of all of them."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return (
        type(norm) is nn.BatchNorm2d
        and "forward" not in vars(norm)
        and not any(hooks)
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.running_mean is not None
        and norm.num_batches_tracked is not None
        and norm.momentum is not None
    )


def _by_kernels(norm: nn.BatchNorm2d, images: Tensor, added: Tensor | None) -> bool:
    """Whether the kernels can compute this."""
    return (
        isinstance(images, Tensor)  # which what traces a network is not
        and images.ndim == 4
        and images.shape[1] == norm.num_features
        and images.shape[1] < images.numel() < images.shape[1] << 31  # for one pixel torch has an error
        and norm.weight.dtype in (torch.float32, images.dtype)
        and runs_triton(images)
        and not torch.compiler.is_compiling()  # which makes its own of the operations
        and forward_ad._current_level < 0
        and _side_by_side(images)
        and (
            added is None
            or (added.shape == images.shape and added.dtype == images.dtype and _side_by_side(added))
        )
    )


def _side_by_side(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


class _Tiles(NamedTuple):
    """How a kernel is shared out; as measured best on an H200.

    Attributes:
        rows: of a tile.
        programs: about how many there are.
        warps: of each.
    """

    rows: int
    programs: int
    warps: int


_MOMENTS = _Tiles(32, 528, 4)
_NORMALISE = _Tiles(32, 8448, 4)
_GRADIENT_SUMS = _Tiles(64, 264, 8)
_GRADIENTS = _Tiles(64, 2112, 4)
_TOGETHER, _CHANNELS, _WARPS = 256, 16, 8  # parts and channels of a tile, where parts are put together


class _Shares(NamedTuple):
    """What that comes to for some images.

    Attributes:
        channels: of a tile.
        span: rows of a program.
        parts: programs that a channel has.
        programs: in all.
    """

    channels: int
    span: int
    parts: int
    programs: int

    @classmethod
    def of(cls, rows: int, channels: int, tiles: _Tiles) -> _Shares:
        together = min(64, 1 << max(0, channels - 1).bit_length())
        blocks = -(-channels // together)
        wanted = max(1, tiles.programs // blocks)
        # A place of a tile sums up 32 pixels at most: more cost digits if the first is far from the others.
        span = min(-(-rows // (wanted * tiles.rows)), 32) * tiles.rows
        parts = -(-rows // span)
        return cls(together, span, parts, blocks * parts)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        added: Tensor | None,
        running: tuple[Tensor, Tensor, Tensor],
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        from calibrant.kernels import normalising_device as device

        channels = images.shape[1]
        rows = images.numel() // channels
        share = _Shares.of(rows, channels, _MOMENTS)
        sums = torch.empty((2 * share.parts, channels), dtype=torch.float32, device=images.device)
        kept = torch.empty((4, channels), dtype=torch.float32, device=images.device)
        numbers: tuple[int, ...] = (rows, channels, share.span, share.parts, _MOMENTS.rows, share.channels)
        run(device.moments, share.programs, numbers, images, sums, *numbers, num_warps=_MOMENTS.warps)
        run(
            device.statistics,
            -(-channels // _CHANNELS),
            (rows, channels, share.span, share.parts),
            sums,
            weight,
            bias,
            *running,
            kept,
            rows,
            channels,
            share.span,
            share.parts,
            float(momentum),
            float(eps),
            _TOGETHER,
            _CHANNELS,
            num_warps=_WARPS,
        )
        share = _Shares.of(rows, channels, _NORMALISE)
        numbers = (rows, channels, share.span, relu, added is not None, _NORMALISE.rows, share.channels)
        result = torch.empty_like(images)
        tensors = (images, images if added is None else added, kept, result)
        run(device.normalise, share.programs, numbers, *tensors, *numbers, num_warps=_NORMALISE.warps)
        ctx.adds, ctx.relu, ctx.eps = added is not None, relu, eps
        # Of the result only what was negative is asked for, and only where the images do not tell.
        ctx.save_for_backward(images, weight, kept, result if ctx.adds and relu else None)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, kept, result = ctx.saved_tensors
        nothing = (None,) * 4
        if torch.is_grad_enabled():  # somebody asked for a gradient of the gradient
            return *_differentiable(images, weight, kept[3], result, upstream, ctx), *nothing
        from calibrant.kernels import normalising_device as device

        upstream = upstream.contiguous(memory_format=torch.channels_last)
        channels = images.shape[1]
        rows = images.numel() // channels
        share = _Shares.of(rows, channels, _GRADIENT_SUMS)
        sums = torch.empty((2 * share.parts, channels), dtype=torch.float32, device=images.device)
        of_weight, of_bias = torch.empty_like(kept[0]), torch.empty_like(kept[0])
        given = (images, images if result is None else result, upstream, kept)
        tile = (_GRADIENT_SUMS.rows, share.channels)
        numbers: tuple[int, ...] = (rows, channels, share.span, share.parts, ctx.relu, ctx.adds, *tile)
        run(
            device.gradient_sums,
            share.programs,
            numbers,
            *given,
            sums,
            *numbers,
            num_warps=_GRADIENT_SUMS.warps,
        )
        numbers = (channels, share.parts, _TOGETHER, _CHANNELS)
        programs = -(-channels // _CHANNELS)
        run(device.gradient_totals, programs, numbers, sums, of_weight, of_bias, *numbers, num_warps=_WARPS)
        share = _Shares.of(rows, channels, _GRADIENTS)
        numbers = (rows, channels, share.span, ctx.relu, ctx.adds, _GRADIENTS.rows, share.channels)
        of_images = torch.empty_like(images)
        of_added = torch.empty_like(images) if ctx.adds else None
        found = (of_weight, of_bias, of_images, of_images if of_added is None else of_added)
        run(device.gradients, share.programs, numbers, *given, *found, *numbers, num_warps=_GRADIENTS.warps)
        return of_images, of_weight, of_bias, of_added, *nothing


def _differentiable(
    images: Tensor, weight: Tensor, bias: Tensor, result: Tensor | None, upstream: Tensor, ctx: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients by operations that autograd can follow."""
    # Of themselves, for they may be the same tensor, or be used elsewhere.
    images, weight = images.view_as(images).requires_grad_(), weight.view_as(weight).requires_grad_()
    bias = bias.to(weight.dtype).requires_grad_()
    plain = F.batch_norm(images, None, None, weight, bias, True, 0.0, ctx.eps)
    if ctx.relu:
        upstream = upstream * ((plain if result is None else result) > 0)
    first, second, third = torch.autograd.grad(plain, (images, weight, bias), upstream, create_graph=True)
    return first, second, third, upstream if ctx.adds else None
