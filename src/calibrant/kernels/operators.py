"""Operators through which `torch.compile` calls the GPU kernel.

A compiler needs operators of plain arguments. A composition becomes the names of its device forms, the names
of its numbers, and the numbers; NaN stands where the number is the next of the tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from calibrant.kernels.composition import DEVICE_FORMS, Composition, Part, Value
from calibrant.kernels.launch import Options, launch

_ARGUMENTS = (
    "str[] forms, str[] names, float[] numbers, Tensor[] tensors, str reduction, int ignore_index, "
    "Tensor? class_weight"
)


def flattened(composition: Composition, options: Options) -> tuple[Any, ...]:
    """The arguments of the operators after logits and target, in the order of `_ARGUMENTS`."""
    forms, names, numbers, tensors = [], [], [], []

    def add(name: str, value: Value) -> None:
        names.append(name)
        if isinstance(value, Tensor):
            numbers.append(math.nan)
            tensors.append(value)
        else:
            numbers.append(float(value))

    add("view.scale", composition.scale)
    add("view.divided", composition.divided)
    if composition.offset is not None:
        add("view.offset", composition.offset)
    for role, part in (("first", composition.first), ("penalty", composition.penalty)):
        forms.append("" if part is None or part.device is None else part.device.name)
        if part is not None:
            add(f"{role}.factor", part.factor)
            for name, value in part.numbers.items():
                add(f"{role}.{name}", value)
    return forms, names, numbers, tensors, *options[:3]


def _composed(forms: list[str], names: list[str], numbers: list[float], tensors: list[Tensor]) -> Composition:
    rest = iter(tensors)
    values: dict[str, dict[str, Any]] = {"view": {}, "first": {}, "penalty": {}}
    for name, number in zip(names, numbers, strict=True):
        role, _, own = name.partition(".")
        values[role][own] = next(rest) if math.isnan(number) else number

    def part(form: str, given: dict[str, Any]) -> Part | None:
        if not form:
            return None
        factor = given.pop("factor")
        return Part(_no_term, DEVICE_FORMS[form], given, factor)

    return Composition(part(forms[0], values["first"]), part(forms[1], values["penalty"]), **values["view"])


def _no_term(logits: Tensor) -> Any:
    raise AssertionError("the operators for torch.compile run on a GPU only")


@torch.library.custom_op(
    "calibrant::loss",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def compiled_loss(logits: Tensor, target: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    """The loss, and a factor for the gradient in the backward pass."""
    launched = launch(_composed(*flat[:4]), logits, target, Options(*flat[4:]), gradient=False)
    correction = launched.correction
    return launched.value, launched.value.new_ones(()) if correction is None else correction[0].clone()


@torch.library.custom_op(
    "calibrant::loss_backward",
    mutates_args=(),
    schema=f"(Tensor upstream, Tensor logits, Tensor target, {_ARGUMENTS}) -> Tensor",
)
def _loss_backward(upstream: Tensor, logits: Tensor, target: Tensor, *flat: Any) -> Tensor:
    """The gradient, from a second look at the logits: a compiler could not have it changed in place."""
    options = Options(*flat[4:])
    upstream = upstream.contiguous()
    gradient = launch(
        _composed(*flat[:4]), logits, target, options, gradient=True, upstream=upstream
    ).gradient
    assert gradient is not None
    return gradient


@compiled_loss.register_fake
def _(logits: Tensor, target: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:1] + logits.shape[2:] if Options(*flat[4:]).reduction == "none" else ()
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty((), dtype=torch.float32)


@_loss_backward.register_fake
def _(upstream: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, forms, names, numbers, tensors, reduction, ignore_index, class_weight = inputs
    ctx.plain = forms, names, numbers, reduction, ignore_index
    ctx.count = len(tensors)
    saved = [logits, target, output[1], *tensors]
    ctx.save_for_backward(*saved, *(() if class_weight is None else (class_weight,)))


def _backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Any, ...]:
    logits, target, correction, *rest = ctx.saved_tensors
    forms, names, numbers, *options = ctx.plain
    tensors, class_weight = rest[: ctx.count], next(iter(rest[ctx.count :]), None)
    gradient = _loss_backward(
        upstream * correction, logits, target, forms, names, numbers, tensors, *options, class_weight
    )
    return gradient, None, None, None, None, [None] * ctx.count, None, None, None


compiled_loss.register_autograd(_backward, setup_context=_keep)
