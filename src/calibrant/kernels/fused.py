"""Losses on a GPU: one kernel reads the logits once, and writes loss and gradient together.

On a GPU the time of a loss is the time of moving its logits, which operations of torch do a dozen times. Here
they are read once, and the gradient, the only tensor of their size, is written once.
"""

from __future__ import annotations

import ctypes
import math
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrant.kernels import native


class Fused(NamedTuple):
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
        penalty_weight: ``(K,)``, ρ.
        multiplier: ``(K,)``, λ.
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
    penalty_weight: Tensor | None = None
    multiplier: Tensor | None = None
    gammas: Tensor | None = None
    edges: Tensor | None = None
    accuracies: Tensor | None = None
    passes: Tensor | None = None

    def kept(self) -> Fused:
        """The same with copies of the tensors: a graph must not see what the next adaptation does to them."""
        copies: dict[str, Any] = {
            name: value.clone() for name, value in self._asdict().items() if isinstance(value, Tensor)
        }
        return self._replace(**copies)


EXTRAS = ("nothing", "uniform", "entropy", "squared", "hinge", "phr", "p2", "p3")
BASES = ("plain", "doubt", "belief", "dual")
EXPONENTS = ("fixed", "threshold", "binned", "rated")


def runs_triton(logits: Tensor) -> bool:
    """Whether kernels can run on these logits: on a GPU, in a type they know, and not under a transform."""
    return (
        logits.is_cuda
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.numel() > 0
        and not torch._C._are_functorch_transforms_active()
        and (torch.compiler.is_compiling() or (in_memory(logits) and _triton_works(logits.device)))
    )


@cache
def _triton_works(device: torch.device) -> bool:
    """Try the smallest kernel: Triton may be there without a compiler that it needs, or not know the GPU."""
    if find_spec("triton") is None:
        return False
    try:
        from calibrant.kernels.device import scale_in_place

        one = torch.ones(1, device=device)
        Starter(scale_in_place, 1, device)(one, one, one, 1, 4096)
    except Exception as error:  # whatever goes wrong, there is another way
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"losses, metrics and normalisation do without their kernels: Triton fails with {reason!r}",
            stacklevel=2,
        )
        return False
    return True


def can_fuse(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernel can compute a loss of these."""
    return (
        runs_triton(logits)
        and not target.requires_grad
        and (torch.compiler.is_compiling() or in_memory(target))
    )


def in_memory(tensor: Tensor) -> bool:
    """Whether memory holds the numbers, and not their opposites or, where all are 0, nothing."""
    return not tensor.is_neg() and not tensor._is_zerotensor()


def fused_loss(
    recipe: Fused,
    logits: Tensor,
    target: Tensor,
    eager: Callable[[Tensor, Tensor], Tensor],
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
    if torch.compiler.is_compiling():
        compiled: Tensor = _loss(logits, target, *_flat(recipe, options))[0]
        return compiled
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
        ctx.kept = None if early or not ctx.needs_input_grad[0] else (recipe.kept(), _kept(options))
        value, ctx.gradient, ctx.found, ctx.plan = launch(recipe, logits, target, options, early)
        ctx.recipe, ctx.options, ctx.eager = recipe, options, eager
        ctx.versions = _versions(recipe, options)
        ctx.save_for_backward(logits, target)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        upstream = upstream if in_memory(upstream) else upstream.clone()
        if gradient is None or torch.is_grad_enabled():
            rest = (*ctx.saved_tensors, upstream, ctx.found, ctx.versions, ctx.kept)
            gradient = _computed_anew(ctx.recipe, ctx.options, ctx.eager, *rest)
        elif ctx.found is None:
            gradient.mul_(upstream)
        else:
            ctx.plan.scale(gradient, upstream, ctx.found, *ctx.plan.scaling)
        return gradient, None, None, None, None


def _kept(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with a copy of the class weights."""
    return (*options[:2], None if options[2] is None else options[2].clone())


def _versions(recipe: Fused, options: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers that change when the loss's tensors do; those of inference mode do not count."""
    tensors = [tensor for tensor in (options[2], *recipe[10:]) if tensor is not None]
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _computed_anew(
    recipe: Fused,
    options: tuple[Any, ...],
    eager: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    target: Tensor,
    upstream: Tensor,
    found: Tensor | None,
    versions: tuple[int, ...],
    kept: tuple[Fused, tuple[Any, ...]] | None = None,
) -> Tensor:
    """The gradient where it is not there, as in a second pass over a graph, or its own gradient is wanted."""
    if (kept is None or torch.is_grad_enabled()) and _versions(recipe, options) != versions:
        raise RuntimeError(
            "the loss has adapted between two backward passes over the same graph, or its class weights were "
            "changed: its gradient is gone; call the loss again"
        )
    gradient: Tensor | None
    if torch.is_grad_enabled():
        (gradient,) = torch.autograd.grad(eager(logits, target), logits, upstream, create_graph=True)
    else:
        upstream = upstream.contiguous() if found is None else upstream * found[0]
        recipe, options = kept or (recipe, options)
        gradient = launch(recipe, logits, target, options, True, upstream).gradient
    assert gradient is not None
    return gradient


# What `torch.compile` calls: it needs functions of plain arguments, whose results it can foretell.

_PLAIN = (
    "str extra, str base, str exponent, float[] numbers, Tensor? penalty_weight, Tensor? multiplier, "
    "Tensor? gammas, Tensor? edges, Tensor? accuracies, Tensor? passes, str reduction, int ignore_index, "
    "Tensor? class_weight"
)


def _flat(recipe: Fused, options: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*recipe[:3], list(recipe[3:10]), *recipe[10:], *options)


def _unflat(flat: tuple[Any, ...]) -> tuple[Fused, tuple[Any, ...]]:
    return Fused._make((*flat[:3], *flat[3], *flat[4:10])), flat[10:]


@torch.library.custom_op(
    "calibrant::loss", mutates_args=(), schema=f"(Tensor logits, Tensor target, {_PLAIN}) -> (Tensor, Tensor)"
)
def _loss(logits: Tensor, target: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    """The loss, and what the gradient has to be multiplied by in the backward pass."""
    recipe, options = _unflat(flat)
    value, _, found, _ = launch(recipe, logits, target, options, False)
    return value, value.new_ones(()) if found is None else found[0].clone()


@torch.library.custom_op(
    "calibrant::loss_backward",
    mutates_args=(),
    schema=f"(Tensor upstream, Tensor logits, Tensor target, {_PLAIN}) -> Tensor",
)
def _loss_backward(upstream: Tensor, logits: Tensor, target: Tensor, *flat: Any) -> Tensor:
    """The gradient, from a second look at the logits: the compiler could not have it changed in place."""
    recipe, options = _unflat(flat)
    gradient = launch(recipe, logits, target, options, True, upstream.contiguous()).gradient
    assert gradient is not None
    return gradient


@_loss.register_fake
def _(logits: Tensor, target: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    each = flat[-3] == "none"
    shape = logits.shape[:1] + logits.shape[2:] if each else ()
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty((), dtype=torch.float32)


@_loss_backward.register_fake
def _(upstream: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return (
        torch.empty_like(logits.flatten(2)).view(logits.shape)
        if logits.ndim > 2
        else torch.empty_like(logits)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    places = [number for number, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.places, ctx.plain = places, [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(output[1], *(inputs[number] for number in places))


def _backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    correction, *tensors = ctx.saved_tensors
    inputs = list(ctx.plain)
    for number, tensor in zip(ctx.places, tensors, strict=True):
        inputs[number] = tensor
    gradient = _loss_backward(upstream * correction, *inputs)
    return gradient, *(None for _ in inputs[1:])


_loss.register_autograd(_backward, setup_context=_keep)


_LAUNCHES_COMPILED = (3, 3)
"""The first Triton whose compiled kernels can be launched with the arguments of the first launch."""


@cache
def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split(".")[:2])


class Starter:
    """Launches a kernel again and again, all but the first time without Triton's look at every argument.

    What the compiled kernel depends on must then be the same each time: types of tensors, whether they begin
    at a multiple of 16 bytes, and numbers but for those in floating point.

    Args:
        kernel: of Triton.
        programs: how many there are.
        device: where the tensors are.
        **settings: of the launch.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device, **settings: Any) -> None:
        self.kernel, self._grid, self._settings = kernel, (programs, 1, 1), settings
        self._device = device.index
        self.compiled: Any = None
        self._start: Callable[..., None] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Launch with these arguments, all of the kernel's, in order."""
        # Triton launches on the current device, wherever the data are.
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                self(*arguments)
        elif self._start is not None:
            self._start(*arguments)
        else:
            compiled = self.kernel[self._grid](*arguments, **self._settings)
            # None if it was interpreted. Triton 3.2 wants another list of arguments the second time.
            if compiled is not None and _triton_version() >= _LAUNCHES_COMPILED:
                self.compiled, self._start = compiled, compiled[self._grid]

    def described(self, *arguments: Any) -> native.Kernel | None:
        """As C++ takes it, with a `native.Number` for each tensor; None before it has been compiled."""
        if self.compiled is None:
            return None
        return native.described(self.compiled, self._grid[0], self.kernel.arg_names, arguments)


_STARTERS: dict[tuple[Any, ...], Starter] = {}
_MOST_KEPT = 4096  # launches that are remembered, where shapes never end


def run(kernel: Any, programs: int, key: tuple[Any, ...], *arguments: Any, **settings: Any) -> None:
    """Launch a kernel.

    Args:
        kernel: of Triton.
        programs: how many there are.
        key: the numbers among the arguments but for those in floating point, which are compiled in.
        *arguments: all of the kernel's, in order.
        **settings: of the launch.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    places = ((tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors)
    key = (kernel, programs, *key, *places, tensors[0].device)
    starter = _STARTERS.get(key)
    if starter is None:
        if len(_STARTERS) >= _MOST_KEPT:
            _STARTERS.clear()
        starter = _STARTERS[key] = Starter(kernel, programs, tensors[0].device, **settings)
    starter(*arguments)


_FEW = 1 << 14
"""So many logits are left to a single program: then a second kernel need not add up what several found."""


class Tiling(NamedTuple):
    """How a batch is cut up.

    Attributes:
        rows: elements of a tile.
        classes: of a tile.
        warps: that work on it.
        unroll: passes of a loop over classes that are under way at once.
        registers: that a thread may have at most, so that more of them are at work; None for any number.
        tiles: that a program works on, one after another.
    """

    rows: int
    classes: int
    warps: int
    unroll: int = 1
    registers: int | None = None
    tiles: int = 1


def tiling(classes: int, elements: int, adjacent: bool, bytes_each: int, numbers_per_class: int) -> Tiling:
    """What was measured best on an H200.

    Args:
        classes: K.
        elements: that lie in a row.
        adjacent: whether memory holds the classes of an element side by side.
        bytes_each: of a logit.
        numbers_per_class: that the loss has learned.
    """
    most = max(2, 1 << max(0, classes - 1).bit_length())
    together = max(1, 1 << max(0, elements - 1).bit_length())
    if most * together <= _FEW:
        return Tiling(together, most, max(4, most * together // 1024))
    if not adjacent:  # every thread has elements of its own, and passes through their classes
        if bytes_each > 2 and numbers_per_class < 2:
            return Tiling(512, 4, 4, unroll=4)
        return Tiling(512, 1, 4, unroll=7, registers=64)
    if most > 16384:  # more than fit at once
        return Tiling(1, 8192, 8, unroll=4)
    # Few warps, which need not wait for one another, with as many logits as their registers hold. A single
    # one has all of an element's, and goes on to more if there are more than a GPU works on at once.
    if most <= 1024 and numbers_per_class == 0:
        rows = 1024 // most
        tiles = min(8, 1 << max(0, (elements // (2048 * rows)).bit_length() - 1))
        return Tiling(rows, most, 1, registers=128, tiles=tiles)
    rows = max(1, 2048 // most)
    return Tiling(rows, most, max(1, rows * most // 1024), registers=128)


def _float32(number: float) -> float:
    """The nearest of the numbers that a kernel can be given."""
    return ctypes.c_float(number).value


class _Launch:
    """A call of the kernel, ready but for the tensors: all that depends on shapes and hyper-parameters.

    Attributes:
        programs: how many there are; 0 if one does it all.
        start: computes losses and gradient.
        finish: makes one loss of what the programs found.
        finishing: what `finish` takes beside its tensors.
        findings: how many numbers they found.
        scale: multiplies the gradient by two numbers, the upstream gradient and the correction.
        scaling: what `scale` takes beside its tensors.
        native: the same for C++, once it has been handed over, by what batches look like in full.
    """

    def __init__(
        self,
        recipe: Fused,
        logits: Tensor,
        slopes: Tensor,
        target: Tensor,
        options: tuple[Any, ...],
        gradient: bool,
        upstream: Tensor | None,
    ) -> None:
        from calibrant.kernels import device

        reduction, ignore_index, class_weight = options
        classes, soft = logits.shape[1], target.is_floating_point()
        strides: tuple[int, ...]
        slope_strides: tuple[int, ...]
        target_strides: tuple[int, ...]
        if logits.ndim == 2:
            outer, inner = 1, logits.shape[0]
            strides, slope_strides = ((0, part.stride(1), part.stride(0)) for part in (logits, slopes))
            target_strides = (0, target.stride(1) if soft else 0, target.stride(0))
        else:
            outer, inner = logits.shape[0], logits.shape[2]
            strides, slope_strides = logits.stride(), slopes.stride()
            target_strides = target.stride() if soft else (target.stride(0), 0, target.stride(1))
        numbers = sum(numbers is not None for numbers in (recipe.penalty_weight, recipe.multiplier))
        tile = tiling(classes, inner, strides[1] == 1, logits.element_size(), numbers)
        programs = -(-inner // (tile.rows * tile.tiles)) * outer
        each = reduction == "none"
        alone = programs == 1 and tile.tiles == 1 and not each
        count = reduction == "mean" and not soft
        self.programs = 0 if alone else programs
        limits = {} if tile.registers is None else {"maxnreg": tile.registers}
        self.start = Starter(
            device.loss_and_gradient, programs, logits.device, num_warps=tile.warps, **limits
        )
        self.finish = Starter(device.finish, 1, logits.device, num_warps=4)
        size, block = logits.numel(), 4096
        self.scale = Starter(
            device.scale_in_place, max(1, min(-(-size // block), 528)), logits.device, num_warps=8
        )
        self.scaling = (size, block)
        self.native: dict[tuple[Any, ...], object | None] = {}
        factor = 1 / max(1, outer * inner) if reduction == "mean" else 1.0
        elements = float(outer * inner)
        ints = (inner, *strides, *target_strides, *slope_strides, ignore_index)
        self.places = (*ints, factor, elements)
        self.choices = (
            recipe.likelihood,
            recipe.amount,
            recipe.margin,
            recipe.margin - _float32(recipe.margin),
            1 / recipe.unit,
            recipe.gamma,
            recipe.other_gamma,
            recipe.threshold,
            classes,
            1 if recipe.gammas is None else len(recipe.gammas),
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
            tile.classes >= classes,
            alone,
            math.gcd(strides[2], slope_strides[2], 16),
            tile.unroll if tile.classes < classes else 1,
            tile.tiles,
            tile.rows,
            tile.classes,
        )
        self.finishing = (programs, factor, elements, count, 1024)
        self.findings = 2 * programs + 1


_LAUNCHES: dict[tuple[Any, ...], _Launch] = {}


class Launched(NamedTuple):
    """What a launch gives.

    Attributes:
        value: the loss; means nothing where there was an upstream gradient.
        gradient: if asked for.
        found: on the way; begins with what the gradient has to be multiplied by. None if by nothing.
        plan: of the launch.
    """

    value: Tensor
    gradient: Tensor | None
    found: Tensor | None
    plan: _Launch


def _in_rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both with one axis for all pixels: copies only of pixels that do not lie in a row."""
    if logits.ndim == 2:
        return logits, target
    return logits.flatten(2), target.flatten(2 if target.is_floating_point() else 1)


def _key(
    recipe: Fused,
    view: Tensor,
    labels: Tensor,
    options: tuple[Any, ...],
    gradient: bool,
    upstream: Tensor | None = None,
) -> tuple[Any, ...]:
    """All that a launch depends on but for what the tensors hold."""
    reduction, ignore_index, class_weight = options
    return (
        recipe[:10],  # all but the tensors
        *(None if tensor is None else (tensor.dtype, tensor.shape) for tensor in recipe[10:]),
        reduction,
        ignore_index,
        None if class_weight is None else class_weight.dtype,
        view.shape,
        view.stride(),
        view.dtype,
        view.data_ptr() % 16,
        labels.stride(),
        labels.dtype,
        labels.data_ptr() % 16,
        gradient,
        None if upstream is None else upstream.dtype,
        view.device,
    )


def launch(
    recipe: Fused,
    logits: Tensor,
    target: Tensor,
    options: tuple[Any, ...],
    gradient: bool,
    upstream: Tensor | None = None,
) -> Launched:
    """Run the kernel.

    With an upstream gradient, which must have been multiplied by what was found, the loss is left out.
    """
    reduction, _, class_weight = options
    shape, place = logits.shape, logits.device
    view, labels = _in_rows(logits, target)
    slopes = torch.empty_like(view) if gradient else view
    key = _key(recipe, view, labels, options, gradient, upstream)
    plan = _LAUNCHES.get(key)
    if plan is None:
        if len(_LAUNCHES) >= _MOST_KEPT:
            _LAUNCHES.clear()
        plan = _Launch(recipe, view, slopes, labels, options, gradient, upstream)
        _LAUNCHES[key] = plan
    each = reduction == "none"
    found = None
    if plan.programs and not each:
        found = torch.empty(plan.findings, dtype=torch.float32, device=place)
    # Not a part of a larger tensor: autograd forbids to change those in place, as `loss /= steps` does.
    value = torch.empty(shape[:1] + shape[2:] if each else (), dtype=torch.float32, device=place)
    plan.start(
        view,
        labels,
        *(view if tensor is None else tensor for tensor in (class_weight, *recipe[10:])),
        value if found is None else found,
        value,
        slopes,
        *plan.places,
        value if upstream is None else upstream,
        *plan.choices,
    )
    if upstream is None and found is not None:
        plan.finish(found, value, *plan.finishing)
    return Launched(value, slopes.view(shape) if gradient else None, found, plan)


Again = Callable[[Tensor, Tensor], Tensor | None]


def again(
    recipe: Fused,
    logits: Tensor,
    target: Tensor,
    eager: Callable[[Tensor, Tensor], Tensor],
    buffers: dict[str, Tensor | None],
    reduction: str = "mean",
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
) -> Again | None:
    """What computes the same loss, of a batch that is laid out alike, without a way through Python.

    It gives None where something is different: the batch's layout, one of the buffers, or what is wanted,
    such as no gradient. As long as it is not there, because C++ is being compiled or cannot be, this is None.

    Args:
        recipe: as for `fused_loss`, which must have been called with all of these.
        logits: likewise.
        target: likewise.
        eager: likewise.
        buffers: of the loss.
        reduction: likewise.
        ignore_index: likewise.
        class_weight: likewise.
    """
    own = (class_weight, *recipe[10:])
    kept = [id(buffer) for buffer in buffers.values()]
    first = 2 if target.is_floating_point() else 1
    if (
        reduction == "none"
        or logits.dtype == torch.float16
        or torch.version.hip is not None
        or _triton_version() < _LAUNCHES_COMPILED
        or not _in_a_row(logits.shape[2:], logits.stride()[2:])
        or not _in_a_row(target.shape[first:], target.stride()[first:])
        or torch.empty_like(logits, device="meta").stride() != logits.stride()
        # Made anew for each call, or without a count of its changes.
        or any(tensor is not None and (id(tensor) not in kept or tensor.is_inference()) for tensor in own)
    ):
        return None
    module = native.module()
    if module is None:
        return None
    options = (reduction, ignore_index, class_weight)
    plan = _LAUNCHES.get(_key(recipe, *_in_rows(logits, target), options, True))
    if plan is None:
        return None
    try:
        laid_out = (logits.shape, logits.stride(), target.shape, target.stride())
        if plan.native.get(laid_out) is None:
            plan.native[laid_out] = _handed_over(module, plan, own, logits, target)
        if plan.native[laid_out] is None:
            return None
        rarely = partial(_computed_anew, recipe, options, eager)
        found: Again = module.again(plan.native[laid_out], buffers, own, rarely)
    except Exception as error:  # such as of a Triton to come: there is another way
        native.BUILDER.give_up(error)
        return None
    return found


def backward_is_compiled() -> bool:
    """Whether autograd hands backward passes to a compiler, which cannot see into C++."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "compiled_autograd_enabled", False)


def _in_a_row(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these axes can be seen as one.

    >>> _in_a_row((2, 3), (3, 1)), _in_a_row((2, 3), (1, 2)), _in_a_row((), ())
    (True, False, True)
    """
    return all(strides[axis] == strides[axis + 1] * sizes[axis + 1] for axis in range(len(sizes) - 1))


def _handed_over(
    module: Any, plan: _Launch, own: tuple[Tensor | None, ...], logits: Tensor, target: Tensor
) -> object | None:
    """The plan for C++, if all of its kernels have been compiled."""
    absent = native.LOGITS  # they stand for what a loss does not have
    given = (
        absent if tensor is None else native.Number(native.OWN + number) for number, tensor in enumerate(own)
    )
    found = native.FOUND if plan.programs else native.VALUE
    compute = plan.start.described(
        native.LOGITS,
        native.TARGET,
        *given,
        found,
        native.VALUE,
        native.GRADIENT,
        *plan.places,
        native.VALUE,
        *plan.choices,
    )
    kernels = [compute]
    if plan.programs:
        kernels.append(plan.finish.described(native.FOUND, native.VALUE, *plan.finishing))
        kernels.append(plan.scale.described(native.GRADIENT, native.UPSTREAM, native.FOUND, *plan.scaling))
    if None in kernels:
        return None
    finish, scale = kernels[1:] or (None, None)
    plan_of: Callable[..., object] = module.plan
    findings = plan.findings if plan.programs else 0
    return plan_of(native.driver(), compute, finish, scale, logits, target, findings)
