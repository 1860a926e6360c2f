"""What a loss is made of, in one description that the CPU and the GPU both compute from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from calibrant.kernels.reduction import Term, reduce_classes
from calibrant.kernels.terms import WeightedSum
from calibrant.layout import Elements

Value = float | Tensor
"""A number of a loss: fixed, or learned and then a tensor of one number or one per class or bin."""


DEVICE_FORMS: dict[str, FirstTerm | PenaltyTerm] = {}
"""Every GPU form by name, for operators that can be given only names."""


@dataclass(frozen=True, eq=False)
class FirstTerm:
    """The GPU form of a first term: a function of the probability of the true class.

    Attributes:
        value: device function ``(element, numbers) → (value, by_log_p, by_lower)``: the term of each element,
            its derivative by ``log p`` (through ``p`` as well), and by ``element.lower`` (0 if unused).
        uses_lower: whether it needs ``element.lower``.
    """

    value: Callable[..., Any]
    uses_lower: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        _register(self, "lower" if self.uses_lower else "", self.value)


@dataclass(frozen=True, eq=False)
class PenaltyTerm:
    """The GPU form of a penalty: a sum over classes.

    Its gradient is ``along · s_k`` for every class except the label, where it is ``at_target``; `rest` is
    added for all classes.

    Attributes:
        sums: device function ``(tile, top, parameters, VARIANT, SOFT, ALONE) → three (R, BK) tensors``, which
            are then summed over classes.
        value: device function ``(one, two, three, element, K, SOFT, ALONE) → (value, along, at_target,
            aside)``, from those sums; ``aside`` is kept for `rest`.
        rest: device function ``(tile, top, parameters, element, aside, K, VARIANT, SOFT, ALONE) → (R, BK)``,
            or None for 0.
        parameters: device function ``(numbers, columns, K)`` that reads what `sums` and `rest` need for the
            classes of a tile, or None.
        variant: a word that `sums` and `rest` get as ``VARIANT``, for forms that share functions.

    ``SOFT`` says that targets are probabilities; ``ALONE`` that the batch is small, so that digits matter
    more than time.
    """

    sums: Callable[..., Any]
    value: Callable[..., Any]
    rest: Callable[..., Any] | None = None
    parameters: Callable[..., Any] | None = None
    variant: str = ""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        _register(self, self.variant, self.sums, self.value, self.rest, self.parameters)


def _register(form: FirstTerm | PenaltyTerm, variant: str, *functions: Callable[..., Any] | None) -> None:
    plain = [getattr(function, "fn", function) for function in functions]  # what an author jitted is inside
    names = [f"{each.__module__}.{each.__qualname__}" for each in plain if each is not None]
    name = " ".join([*names, variant])
    object.__setattr__(form, "name", name)
    DEVICE_FORMS[name] = form


# Not frozen: every call of a loss creates a few, and to create frozen ones takes four times as long.
@dataclass(eq=False, slots=True)
class Part:
    """A term of a loss with its factor.

    Attributes:
        term: from logits ``(A, K[, S])`` to the CPU form; called only where that is used.
        device: the GPU form; None where there is none.
        numbers: what the GPU form calls ``numbers``, by name.
        factor: multiplies the term.
    """

    term: Callable[[Tensor], Term]
    device: FirstTerm | PenaltyTerm | None = None
    numbers: Mapping[str, Value] = field(default_factory=dict)
    factor: float = 1.0


@dataclass(eq=False, slots=True)
class Composition:
    """A loss per element: a first term plus a penalty, of the logits or of ``scale · logits + offset``.

    Attributes:
        first: a function of the probability of the true class, such as ``-log p``; None for none.
        penalty: a sum over classes; None for none.
        scale: multiplies the logits: a number, or a tensor of one; not differentiated.
        offset: is added to them: None, or a tensor ``(K,)``; not differentiated.
        divided: divide the loss by the scale. Its gradient then has the size that it has without a scale, so
            that a large scale does not make training unstable.
    """

    first: Part | None = None
    penalty: Part | None = None
    scale: Value = 1.0
    offset: Tensor | None = None
    divided: bool = False

    @property
    def parts(self) -> list[Part]:
        """The first term and the penalty, as far as there are any."""
        return [part for part in (self.first, self.penalty) if part is not None]

    @property
    def transforms_logits(self) -> bool:
        """Whether there is a scale other than 1, or an offset."""
        return isinstance(self.scale, Tensor) or self.offset is not None or self.scale != 1.0

    @property
    def has_device_form(self) -> bool:
        """Whether the GPU kernel can compute it."""
        first, penalty = self.first, self.penalty
        return (first is None or first.device is not None) and (penalty is None or penalty.device is not None)

    def term(self, logits: Tensor) -> Term:
        """The CPU form, before scale and offset."""
        parts = [(part.factor, part.term(logits)) for part in self.parts]
        return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else WeightedSum(*parts)

    def per_sample(self, elements: Elements) -> Tensor:
        """The loss of each element, ``(A[, S])``, by operations of torch."""
        term = self.term(elements.logits)
        scale = self.scale if self.transforms_logits else None
        return reduce_classes(elements, term, scale=scale, offset=self.offset, divided=self.divided)

    def same_as(self, other: Composition) -> bool:
        """Whether both compute the same loss: equal numbers, and the very same tensors."""
        mine, theirs = self._content(), other._content()
        return len(mine) == len(theirs) and all(
            a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
            for a, b in zip(mine, theirs, strict=True)
        )

    def _content(self) -> list[Any]:
        content: list[Any] = [self.scale, self.offset, self.divided]
        for part in self.parts:
            content += [part.device, part.factor, *part.numbers, *part.numbers.values()]
        return content
