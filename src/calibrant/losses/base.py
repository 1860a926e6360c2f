"""The contract of losses; `calibrant.losses.adaptive` adds what losses need that learn."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from operator import index
from typing import Any, ClassVar, Literal, NamedTuple, Self, SupportsIndex, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrant.arguments import label, one_of, parameters_of, true_or_false, whole_number
from calibrant.distributed import agree, several_processes
from calibrant.kernels import Composition, Options, can_fuse, fused_loss
from calibrant.layout import Elements, along_classes, as_decisions, computing_dtype, is_transformed
from calibrant.statistics import Statistics, device_only, sum_dtype

Reduction = Literal["mean", "sum", "none"]


class LossOptions(TypedDict, total=False):
    """The arguments that every loss takes."""

    reduction: Reduction
    ignore_index: int
    class_weight: Tensor | Sequence[float] | None
    binary: bool


class Range(NamedTuple):
    """The range in which `calibrant tune` searches the value of a hyper-parameter.

    Attributes:
        name: the hyper-parameter.
        low: the smallest value.
        high: the largest value.
        log: whether the search is uniform in the logarithm of the value.
    """

    name: str
    low: float
    high: float
    log: bool = False


class Loss(nn.Module, ABC):
    """A drop-in for `torch.nn.CrossEntropyLoss`: logits and targets in, a scalar out.

    Subclasses write `composition` (a first term and a penalty, which then also run in the GPU kernel), or
    `per_sample` with plain torch operations. Terms that do not split over samples go into `over_batch`.

    >>> class Doubled(Loss):
    ...     def per_sample(self, elements):
    ...         return -2 * elements.logits.log_softmax(1).gather(1, elements.target.unsqueeze(1)).squeeze(1)
    >>> round(Doubled(2)(torch.zeros(3, 2), torch.tensor([0, 1, -100])).item(), 4)
    1.3863

    Args:
        num_classes: K, the size of the logits' axis 1.
        reduction: ``"mean"`` over elements that are not ignored, ``"sum"``, or ``"none"`` for the
            target's shape with 0 where ignored.
        ignore_index: label of elements that do not count: no loss, no gradient, no statistics.
            (Their logits must still be numbers: as in torch, a NaN there may get a gradient of NaN.)
        class_weight: ``(K,)``, the weight of an element of each class, as the ``weight`` of
            `torch.nn.CrossEntropyLoss`: the mean divides by the sum of the weights of the elements
            (for probability targets, by their number).
        binary: each logit is a yes-or-no decision of its own, as in `torch.nn.BCEWithLogitsLoss`: one for
            each element, or one for each of L labels. ``num_classes`` is 2, no and yes. All labels share the
            options, the class weights and what an adaptive loss learns.

    Shape:
        logits ``(B, K, *S)`` in any floating type (16-bit types are computed in float32); integer
        target ``(B, *S)``, or probabilities ``(B, K, *S)`` where `accepts_probabilities`. The result
        is float64 for float64 logits, else float32. With ``binary=True``, logits and target ``(B,)`` or
        ``(B, L, *S)``; the target holds 0 and 1, or probabilities of 1.
    """

    accepts_probabilities: ClassVar[bool] = False
    accepts_binary: ClassVar[bool] = True
    """False if the loss cannot take each logit as a decision of its own."""

    linear_in_target: ClassVar[bool] = True
    """True if class weights apply to the classes of a probability target, as in cross-entropy; false if they
    apply to the element as a whole, by the mean weight of its target."""

    search_space: ClassVar[tuple[Range, ...]] = ()
    """The hyper-parameters to tune; their defaults lie in the ranges."""

    reduction: Reduction
    ignore_index: int
    class_weight: Tensor | None
    binary: bool = False

    def __init__(
        self,
        num_classes: int,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        class_weight: Tensor | Sequence[float] | None = None,
        binary: bool = False,
    ) -> None:
        super().__init__()
        if type(self).per_sample is Loss.per_sample and type(self).composition is Loss.composition:
            raise TypeError(f"{type(self).__name__} must define `composition` or `per_sample`")
        if isinstance(num_classes, bool) or not isinstance(num_classes, SupportsIndex):
            raise ValueError(f"num_classes must be an integer of at least 2, got {num_classes!r}")
        if index(num_classes) == 1:
            raise ValueError(
                "num_classes must be at least 2, got 1; for single logits pass 2 and binary=True"
            )
        self.num_classes = whole_number("num_classes", index(num_classes), 2)
        self.binary = true_or_false("binary", binary)
        if self.binary and not self.accepts_binary:
            raise ValueError(
                f"{type(self).__name__} takes no binary=True: pass logits (0, l) of no and yes, "
                "torch.stack([0 * l, l], 1)"
            )
        if self.binary and self.num_classes != 2:
            raise ValueError(
                f"num_classes must be 2 with binary=True, whatever the number of labels, got {num_classes}"
            )
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.register_buffer("class_weight", None)
        self.class_weight = class_weight  # type: ignore[assignment]  # converted by `__setattr__`

    def __setattr__(self, name: str, value: Any) -> None:
        """Check the shared options also when they are changed later."""
        if name == "reduction":
            value = one_of(name, value, get_args(Reduction))
        elif name == "ignore_index":
            value = label(name, value)
        elif name == "class_weight" and value is not None:
            value = self._checked_weights(value)
        elif name == "num_classes" and value != vars(self).get(name, value):
            raise AttributeError(
                f"num_classes cannot be changed from {self.num_classes} to {value!r}: create a new loss"
            )
        super().__setattr__(name, value)

    def _checked_weights(self, weights: Tensor | Sequence[float]) -> Tensor:
        """A copy of the weights in the precision of sums, or an error."""
        classes = self.num_classes
        try:
            tensor = weights if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64)
            found = tensor.detach().to(sum_dtype(tensor.device), copy=True)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"class_weight must hold num_classes={classes} numbers, got {weights!r}"
            ) from None
        # Tensors on the device "meta" have no values yet.
        valid = found.is_meta or bool(((found >= 0) & found.isfinite()).all())
        if found.shape != (classes,) or not valid:
            values = "" if found.is_meta else f": {found.tolist()}"
            raise ValueError(
                f"class_weight must hold num_classes={classes} finite numbers of at least 0, "
                f"got shape {tuple(found.shape)}{values}"
            )
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Load nothing if the class weights are not valid; torch itself checks their shape."""
        weights = state_dict.get(f"{prefix}class_weight")
        if self.class_weight is not None and isinstance(weights, Tensor):
            try:
                if weights.shape == self.class_weight.shape:
                    self._checked_weights(weights)
            except ValueError as problem:
                *_, errors = lists
                errors.append(f"{prefix}{problem}")
                return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def composition(self) -> Composition | None:
        """What the loss is made of, under its current state; None for a loss that writes `per_sample`."""
        return None

    def per_sample(self, elements: Elements) -> Tensor:
        """The loss of each element, unweighted.

        Returns:
            ``(A[, S])``. Values at ignored elements are not used.
        """
        composition = self.composition()
        assert composition is not None
        return composition.per_sample(elements)

    def over_batch(self, elements: Elements) -> Tensor | None:
        """A scalar that depends on the batch as a whole; it is added to every element's loss."""
        return None

    def _terms(self, elements: Elements) -> tuple[Tensor, Tensor | None]:
        """The results of `per_sample` and `over_batch`."""
        return self.per_sample(elements), self.over_batch(elements)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The reduced loss; see the class for shapes."""
        logits, target = self._classes(logits, target)
        if can_fuse(logits, target):
            composition, options = self.composition(), self._kernel_options()
            weighted_classes = target.is_floating_point() and options.class_weight is not None
            own = type(self).per_sample is not Loss.per_sample or type(self).over_batch is not Loss.over_batch
            if composition is not None and composition.has_device_form and not (weighted_classes or own):
                self._check_state(logits)
                eager = partial(self._unless_changed, composition, options)
                return fused_loss(composition, logits, target, eager, options)
        return self._reduced(self.elements(logits, target))

    def _kernel_options(self) -> Options:
        return Options(
            self.reduction,
            self.ignore_index,
            self._buffers["class_weight"],
            self.num_classes,
            self.accepts_probabilities,
        )

    def _unless_changed(
        self, composition: Composition, options: Options, logits: Tensor, target: Tensor
    ) -> Tensor:
        """The same loss again by operations of torch, if it still is the same."""
        now, current = self.composition(), self._kernel_options()
        same_weight = current.class_weight is options.class_weight
        same_options = same_weight and current._replace(class_weight=None) == options._replace(
            class_weight=None
        )
        if now is None or not now.same_as(composition) or not same_options:
            raise RuntimeError(
                "the loss was changed between its call and a backward pass with `create_graph=True`: "
                "call the loss again"
            )
        return self._reduced(self.elements(logits, target))

    def _reduced(self, elements: Elements) -> Tensor:
        """The loss by operations of torch."""
        valid = elements.valid
        if self.reduction == "mean" and elements.all_valid and self.class_weight is None:
            elements = elements.with_changes(expected=1 / max(1, valid.numel()))
        values, weights = self._weighted_finitely(elements)
        if not elements.checked:
            values = values.masked_fill(elements.stray, torch.nan)
        if not elements.all_valid:
            values = torch.where(valid, values, 0)
        if self.reduction == "none":
            return values.reshape(elements.shape)
        if self.reduction == "sum":
            return values.sum()
        if weights is None and elements.all_valid:
            return values.sum() * elements.expected
        if weights is None or elements.soft:
            count = valid.sum().to(values.dtype)
        else:
            count = torch.where(valid, weights, 0).sum()
        # Nothing that counts: 0, whose gradient is 0, where 0 / 0 would be NaN.
        mean = values.sum() / torch.where(count > 0, count, 1)
        return torch.where(count > 0, mean, 0)

    def _weighted_finitely(self, elements: Elements) -> tuple[Tensor, Tensor | None]:
        """As `_weighted`, with a gradient of 0 for ignored elements whatever their logits are.

        0 times an infinite slope is NaN. Logits of 0 prevent that, but cost a pass over the logits. A CPU
        makes this pass only if it has to: where a slope is not finite, the value is not finite either.
        """
        if elements.all_valid:
            return self._weighted(elements)
        if elements.logits.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
            return self._weighted(elements.blanked())
        found = self._weighted(elements)
        return found if bool(found[0].detach().sum().isfinite()) else self._weighted(elements.blanked())

    def _weighted(self, elements: Elements) -> tuple[Tensor, Tensor | None]:
        """The elements' losses times their class weights, and those weights."""
        weights = None
        if self.class_weight is not None:
            target = elements.target
            if elements.soft:
                target = target * along_classes(self.class_weight, target)
                weights = target.sum(1)
                if self.linear_in_target:
                    # w·t = (Σ w·t) · (a distribution again): cross-entropy comes out as torch's.
                    target = target / torch.where(weights > 0, weights, 1).unsqueeze(1)
                    elements = elements.with_target(target)
            else:
                weights = self.class_weight.to(computing_dtype(elements.logits))[target]
        values, batch_term = self._terms(elements)
        expected = elements.logits.shape[:1] + elements.logits.shape[2:]
        if not isinstance(values, Tensor) or values.shape != expected:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"{type(self).__name__}.per_sample must return the loss of each element, of shape "
                f"{tuple(expected)}, got {got}"
            )
        if isinstance(batch_term, Tensor) and batch_term.ndim:
            raise ValueError(
                f"{type(self).__name__}.over_batch must return a scalar, got shape {tuple(batch_term.shape)}"
            )
        if batch_term is not None:
            values = values + batch_term
        return (values if weights is None else values * weights), weights

    @property
    def takes_several_labels(self) -> bool:
        """Whether an element may have several labels, with ``binary=True``.

        False for a loss that compares the elements of a batch: that has no meaning across labels.
        """
        return self.accepts_binary and type(self).over_batch is Loss.over_batch

    def _classes(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The batch as logits of classes ``(B, K, *S)`` and their target."""
        if not self.binary:
            return logits, target
        pairs, target = as_decisions(logits, target, soft=self.accepts_probabilities)
        if logits.ndim > 1 and logits.shape[1] > 1 and not self.takes_several_labels:
            raise ValueError(
                f"{type(self).__name__} compares the elements of a batch, which has no meaning across "
                f"labels: logits of shape {tuple(logits.shape)} have {logits.shape[1]} labels; add up the "
                "losses of single labels, or take a loss without a term over the batch"
            )
        return pairs, target

    def elements(self, logits: Tensor, target: Tensor) -> Elements:
        """The batch, checked against this loss; see `calibrant.layout.arrange` for the errors."""
        self._check_state(logits)
        return self._kernel_options().arrange(logits, target)

    def _check_state(self, logits: Tensor) -> None:
        """Raise if the buffers are not as they must be for these logits."""
        for state in self._buffers.values():
            if state is None:
                continue
            if isinstance(logits, Tensor) and state.device != logits.device:
                raise ValueError(
                    f"logits are on {logits.device}, but the state of this loss is on {state.device}: "
                    f"call loss.to({str(logits.device)!r})"
                )
            return  # the others are on the same device

    def observe(self, logits: Tensor, target: Tensor) -> None:
        """Take a validation batch into account; nothing to do for a loss that does not adapt."""

    def adapt(
        self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None
    ) -> Statistics | None:
        """Learn from what was observed; nothing to do for a loss that does not adapt.

        In a distributed run every rank must call it: the ranks compare their losses.

        Raises:
            ValueError: the loss of another process adapts.
        """
        self._compare(group, timeout)
        return None

    def _compare(self, group: dist.ProcessGroup | None, timeout: float | None) -> None:
        """Raise an error in all processes if they could not pool what their losses observed."""
        if several_processes():
            agree({"loss": self._kind()}, group=group, timeout=timeout)

    def _kind(self) -> str:
        """A text that is equal in all processes that can pool what their losses observed."""
        return "a loss that does not adapt"

    def forget(self) -> None:
        """Drop what was observed; nothing to do for a loss that does not adapt."""

    def learned(self) -> dict[str, Tensor]:
        """Copies of the learned quantities, such as multipliers, by name; empty if nothing adapts."""
        return {}

    def advice(self) -> str | None:
        """What to change if this loss has no effect or its learned state is at its bounds; otherwise None.

        One or two sentences about the learned state of an adaptive loss after several passes.
        `calibrant.training.train`, the integrations and `adapt_on` warn with them.
        """
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def hyperparameters(cls) -> dict[str, Parameter]:
        """The keyword arguments of this loss, its own first; each is also an attribute."""
        found: dict[str, Parameter] = {}
        for ancestor in cls.__mro__:
            if "__init__" in vars(ancestor) and issubclass(ancestor, Loss):
                parameters = parameters_of(ancestor.__init__)
                for name, parameter in parameters.items():
                    if parameter.kind is parameter.KEYWORD_ONLY:
                        found.setdefault(name, parameter)
                if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                    break
        return found

    def options(self) -> dict[str, Any]:
        """The values of the hyper-parameters, by name."""
        # A loss from outside the package may keep an option under another name.
        return {name: getattr(self, name) for name in self.hyperparameters() if hasattr(self, name)}

    def extra_repr(self) -> str:
        """The class count and the hyper-parameters that differ from their defaults."""
        defaults = self.hyperparameters()
        changed = [
            f"{name}={value!r}"
            for name, value in self.options().items()
            if name != "class_weight" and value != defaults[name].default
        ]
        if self.class_weight is not None:
            changed.append(f"class_weight={self.class_weight.tolist()}")
        return ", ".join([str(self.num_classes), *changed])
