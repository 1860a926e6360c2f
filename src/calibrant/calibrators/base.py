"""The contracts of layers that are fitted on held-out data, and of calibrators, from logits to logits."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning, is_tracing

from calibrant.layout import answers, arrange, as_pairs, check_floating, computing_dtype
from calibrant.printable import counted, first_few
from calibrant.probabilities import warn_of_probabilities
from calibrant.statistics import device_only
from calibrant.warning import warn

_SHOWN = 4  # the most learned numbers in print

NOT_FINITE = (
    "logits hold NaN or infinite numbers; a calibrator is fitted to finite logits. For probabilities p with "
    "zeros pass as_logits(p), and with binary=True as_logits(p) - as_logits(1 - p), see "
    "calibrant.layout.as_logits"
)
NOTHING_TO_FIT = "nothing to fit: the data hold no element that is not ignored"

Batches = Iterable[tuple[Tensor, Tensor]]
"""Batches of logits and targets that can be read several times: a list, a data loader."""


class UnchangedLabelsWarning(UserWarning):
    """Some labels have the same answer in all data of a fit, so that nothing can be learned about them."""


class BoundWarning(UserWarning):
    """A parameter stopped at its bound, because the best value lies beyond it.

    Attributes:
        labels: the labels that it is about, in a fit with ``binary=True``; None otherwise.
    """

    labels: tuple[int, ...] | None = None


class FittedLayer(nn.Module, ABC):
    """A layer that takes logits and is fitted on held-out data: a `Calibrator`, or conformal sets.

    The learned state is float64 buffers. Their shapes may depend on the data, and `load_state_dict` accepts
    any. Subclasses set `key`, write `fit_rows` and `forward`, and register their learned state with `learn`.

    Attributes:
        num_classes: K, once fitted; 2 if `binary`, whatever the number of labels.
        class_names: the names of the classes in order, if known; files keep them. A fit uses those that it
            finds in its warnings, and forgets them.
        labels: the layers of the labels, only if `binary`.
        unchanged: the numbers of the labels whose logits are left as they are, because the data of the fit
            had only one answer to them; empty if not `binary`.
    """

    key: ClassVar[str]
    """The name in the registry, on the command line and in files."""

    always_shown: ClassVar[tuple[str, ...]] = ()  # options that are printed even at their defaults

    labels: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.num_classes: int | None = None
        self.class_names: tuple[str, ...] | None = None
        self.unchanged: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """What torch keeps for a module; the error tells where a learned number is."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            modules = vars(self).get("_modules", {})
            if any(hasattr(label, name) for label in modules.get("labels", ())):
                hint = f"each label has one of its own, such as .labels[0].{name}"
            elif vars(self).get("num_classes") is None and not name.startswith("_"):
                hint = "if it is learned, it is there after fit(logits, target)"
            else:
                raise
            raise AttributeError(f"{error}; {hint}", name=name, obj=self) from None

    @property
    def from_calibrant(self) -> bool:
        """Whether the class is calibrant's own, and not a user's."""
        return type(self).__module__.startswith("calibrant.")

    @abstractmethod
    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        """Learn from float64 logits ``(N, K)`` and labels ``(N,)``, N at least 1."""

    def fit(self, logits: Tensor, target: Tensor, *, ignore_index: int = -100, binary: bool = False) -> Self:
        """Learn from held-out data. An earlier fit is replaced.

        Args:
            logits: logits ``(B, K, *S)``.
            target: labels ``(B, *S)``.
            ignore_index: the label of elements to leave out.
            binary: each logit is a yes-or-no decision of its own. Logits and target are ``(B,)``, or
                ``(B, L, *S)`` for L labels; the target holds 0 and 1.

        Raises:
            TypeError: logits or target are no tensors, or of the wrong type.
            ValueError: shapes or labels do not fit, no element is left to learn from, or logits are not
                finite. An earlier fit is then kept.
        """
        return (self._fit_labels if binary else self._fit)(logits, target, ignore_index)

    def fit_batches(self, batches: Batches, *, ignore_index: int = -100) -> Self:
        """Learn from batches; methods that need all data at once raise a `TypeError`."""
        name = type(self).__name__
        raise TypeError(f"{name} cannot learn from batches: it needs all data at once, pass them to fit")

    def _fit(self, logits: Tensor, target: Tensor, ignore_index: int) -> Self:
        """Fit to logits of classes."""
        rows, labels = valid_rows(logits, target, ignore_index)
        with self._as_before_on_error(), torch.no_grad():
            self.fit_rows(rows, labels)
            self.fitted_to(labels.bincount(minlength=rows.shape[1]))
            self.check_results(rows)
        return self

    @contextmanager
    def _as_before_on_error(self) -> Iterator[None]:
        """Undo what was learned or set, if an error is raised. Tensors changed in place stay changed."""
        registered = ("_buffers", "_parameters", "_modules")
        before = vars(self) | {name: dict(vars(self)[name]) for name in registered}
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def check_results(self, rows: Tensor) -> None:
        """Raise an error if the layer, just fitted to these logits ``(N, K)``, returns anything of no use."""

    @property
    def binary(self) -> bool:
        """Whether it is fitted to yes-or-no decisions."""
        return "labels" in self._modules

    def _fit_labels(self, logits: Tensor, target: Tensor, ignore_index: int) -> Self:
        """Fit a layer of two classes to each label. Labels without both answers are left as they are."""
        pairs, target = answers(logits, target, ignore_index)
        if pairs.ndim == 2:
            pairs, target = pairs.unsqueeze(2), target.unsqueeze(1)
        constant = _constant_labels(target, ignore_index)
        # The two names of a single label are those of its answers.
        named = self.class_names if pairs.shape[2] > 1 else None

        def labels_of(numbers: Sequence[int]) -> str:
            return f"label{'s' * (len(numbers) > 1)} {some_classes(numbers, pairs.shape[2], named)}"

        fitted, concerned = [], defaultdict[tuple[str, type[Warning]], list[int]](list)
        for number in range(pairs.shape[2]):
            calibrator = type(self)(**self.options())
            fitted.append(calibrator)
            of_label = pairs[:, :, number], target[:, number], ignore_index
            with warnings.catch_warnings(record=True, action="always") as caught:
                try:
                    if number in constant:
                        valid_rows(*of_label)
                        calibrator.num_classes = 2
                    else:
                        calibrator._fit(*of_label)
                except ValueError as problem:
                    raise ValueError(f"{labels_of([number])}: {problem}") from None
            for found in dict.fromkeys((str(each.message), each.category) for each in caught):
                concerned[found].append(number)
        for (message, category), numbers in concerned.items():  # once each, however many labels it is about
            of_all = len(numbers) >= len(fitted) - len(constant)
            where = "" if of_all else f"{labels_of(numbers)}: "
            warning = category(f"{where}{message}")
            if isinstance(warning, BoundWarning):
                warning.labels = tuple(numbers)
            warn(warning)
        if constant:
            warn(
                f"{labels_of(constant)}: the same answer in all of these data, so the logits are left "
                "as they are",
                UnchangedLabelsWarning,
            )
        self._forget()
        self.labels, self.unchanged = nn.ModuleList(fitted), tuple(constant)
        self.num_classes, self.class_names = 2, None
        return self

    def _forget(self) -> None:
        """Drop the state learned for classes: binary calibrators keep theirs in `labels`."""
        for name in self._buffers:
            self._buffers[name] = None

    def fitted_to(self, counts: Tensor) -> None:
        """Finish a fit, given the number of elements of each class ``(K,)``."""
        self.num_classes, self.class_names = len(counts), None
        self.expect_labels(0)

    def check(self, logits: Tensor) -> int:
        """Check logits against the fit and return the number of classes."""
        classes = self.fitted_classes()
        check_floating(logits, "logits")
        if logits.ndim < 2 or logits.shape[1] != classes:
            raise ValueError(
                f"logits must have shape (B, {classes}, *S), as when this was fitted, "
                f"got {tuple(logits.shape)}"
            )
        return classes

    def fitted_classes(self) -> int:
        """The number of classes; an error before a fit."""
        if self.num_classes is None:
            raise RuntimeError(
                f"{type(self).__name__} has learned nothing yet: call fit(logits, target) first"
            )
        return self.num_classes

    def learn(self, name: str, value: Tensor | float) -> None:
        """Register learned state as a float64 buffer."""
        if not isinstance(value, Tensor | float | int):
            raise TypeError(
                f"{type(self).__name__}: learn({name!r}, value) takes a tensor or a number, "
                f"got {type(value).__name__}"
            )
        device = value.device if isinstance(value, Tensor) else "cpu"
        found = torch.as_tensor(value, dtype=torch.float64, device=device)
        self.register_buffer(name, found.detach().clone())

    def learned(self, name: str, like: Tensor) -> Tensor:
        """Learned state in another tensor's type and on its device."""
        if self._buffers.get(name) is None and self._parameters.get(name) is None:
            raise RuntimeError(
                f"{type(self).__name__} has learned no {name!r}: call self.learn({name!r}, value) in fit_rows"
            )
        value: Tensor = getattr(self, name)
        return value.to(like.device, like.dtype)

    def options(self) -> dict[str, Any]:
        """The keyword arguments this was created with."""
        found = {}
        for name in signature(type(self)).parameters:
            if not hasattr(self, name):
                raise TypeError(
                    f"{type(self).__name__} must keep its option {name!r}: set self.{name} in __init__"
                )
            found[name] = getattr(self, name)
        return found

    def extra_repr(self) -> str:
        """The options that differ from their defaults, the number of classes, and the learned numbers.

        >>> from calibrant.calibrators import Temperature
        >>> calibrator = Temperature()
        >>> calibrator
        Temperature(not fitted)
        >>> calibrator.fit(torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0, 1]))
        Temperature(2 classes, temperature=2.885)
        """
        parameters = signature(type(self)).parameters
        changed = [
            f"{name}={value!r}"
            for name, value in self.options().items()
            if name in self.always_shown or value != parameters[name].default
        ]
        if self.num_classes is None:
            return ", ".join([*changed, "not fitted"])
        if self.binary:
            left = [f"unchanged={first_few(self.unchanged)}"] if self.unchanged else []
            return ", ".join([*changed, "binary", *left])
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        learned = [f"{name}={_some(self._printed(buffer))}" for name, buffer in buffers.items()]
        return ", ".join([*changed, f"{self.num_classes} classes", *learned])

    def _printed(self, learned: Tensor) -> Tensor:
        """The part of a learned buffer that is printed."""
        return learned

    def get_extra_state(self) -> Tensor:
        """The method, its options and the number of classes, as the bytes of JSON text, for `state_dict`."""
        state = {"method": type(self).__name__, **described(self)}
        return torch.tensor(list(json.dumps(state, default=str).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of classes, for `load_state_dict`; refuses that of other methods or options."""
        found, own = _read(state), _read(self.get_extra_state())
        for what in ("method", "options"):
            if found[what] != own[what]:
                raise ValueError(
                    f"cannot load the state of a calibrator with {what} {found[what]!r} into one with "
                    f"{own[what]!r}"
                )
        self.num_classes = found["num_classes"]
        self.expect_labels(found.get("labels", 0), found.get("unchanged", ()))

    def expect_labels(self, number: int, unchanged: Iterable[int] = ()) -> None:
        """Make room for the state of a calibrator per label, and note which labels are left as they are.

        Args:
            number: the number of labels; 0 if not binary.
            unchanged: the labels whose logits are left as they are.
        """
        self._modules.pop("labels", None)
        self.unchanged = tuple(unchanged)
        if number:
            self._forget()
            self.labels = nn.ModuleList(type(self)(**self.options()) for _ in range(number))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        extra = state_dict.get(f"{prefix}_extra_state")
        if extra is not None:
            self.set_extra_state(extra)
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            buffer = key.startswith(prefix) and "." not in name and name != "_extra_state"
            if buffer and isinstance(value, Tensor):
                self.register_buffer(name, torch.empty_like(value))
        super()._load_from_state_dict(dict(state_dict), prefix, *rest)
        if extra is not None and self.binary and "unchanged" not in _read(extra):
            own = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
            self.unchanged = labels_without_state(own, len(self.labels))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle; those of version 0.1 do not have `unchanged`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "unchanged" not in state:
            names = [name for name, _ in self.named_buffers()]
            self.unchanged = labels_without_state(names, len(self.labels)) if self.binary else ()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class Calibrator(FittedLayer):
    """A layer from logits to calibrated logits; ``nn.Sequential(model, calibrator)`` is a calibrated model.

    Methods that compute probabilities return their logarithms. The softmax of the result sums to 1.

    Subclasses set `key`, write `fit_rows` and `transform`, and register their learned state with `learn`.

    With ``fit(..., binary=True)`` each logit is a yes-or-no decision of its own, and each of L labels gets
    its own parameters: `labels` holds a calibrator of two classes for each.

    Shape:
        logits ``(B, K, *S)``, integer target ``(B, *S)``; if binary, both ``(B,)`` or ``(B, L, *S)``. The
        result is float64 for float64 logits, else float32, because different probabilities may become equal
        in 16 bits. A logit of -inf rules a class out and stays -inf.
    """

    preserves_order: ClassVar[bool] = False
    """Whether the order of an element's classes, and therefore the prediction, never changes."""

    per_class: ClassVar[bool] = False
    """Whether each class has its own parameters, which cannot be learned from data without that class."""

    definition: ClassVar[int] = 1
    """Raise it when the same key and data lead to another fit: stored results are then computed anew."""

    @abstractmethod
    def transform(self, rows: Tensor) -> Tensor:
        """Calibrate logits ``(N, K)``, by operations that `torch.export` can follow and that ONNX has."""

    def fitted_to(self, counts: Tensor) -> None:
        """Finish a fit; warn of classes without elements, and of data with a single class."""
        names = self.class_names
        super().fitted_to(counts)
        present = counts.nonzero().flatten().tolist()
        absent = (counts == 0).nonzero().flatten().tolist()
        if len(present) == 1:
            warn(
                f"all labels are of one class ({some_classes(present, len(counts), names)}), so this fit "
                "means nothing for the others: use data with all classes"
            )
        elif self.per_class and absent:
            warn(
                f"of {len(counts)} classes the data lack {len(absent)} "
                f"({some_classes(absent, len(counts), names)}): "
                f"{type(self).__name__} cannot learn their parameters; add elements of them, or use a method "
                "with one parameter for all classes, such as temperature"
            )

    def check_results(self, rows: Tensor) -> None:
        """Refuse a user's `transform` that returns anything but logits: broadcasting would hide it."""
        if self.from_calibrant:
            return
        if len(rows) == rows.shape[1]:  # so that rows are not taken for columns
            rows = rows[1:]
        found, name = self.transform(rows), f"{type(self).__name__}.transform"
        if not isinstance(found, Tensor):
            raise ValueError(f"{name} must return logits, got {type(found).__name__}")
        if found.shape != rows.shape or not found.is_floating_point():
            raise ValueError(
                f"{name} must return floating-point logits of shape {tuple(rows.shape)}, got {found.dtype} "
                f"of shape {tuple(found.shape)}"
            )
        if found.isnan().any():
            example = [round(logit, 4) for logit in rows[found.isnan().any(1)][0].tolist()]
            raise ValueError(
                f"{name} must return logits, -inf for probability 0; got NaN for logits such as {example}"
            )

    def forward(self, logits: Tensor) -> Tensor:
        """Calibrate logits ``(B, K, *S)``; float64 for float64 logits, else float32.

        If fitted to binary decisions, logits ``(B,)`` or ``(B, L, *S)``.
        """
        with sizes_as_constants():
            return self._calibrate_labels(logits) if self.binary else self._calibrate(logits)

    def _calibrate(self, logits: Tensor) -> Tensor:
        """Calibrate logits ``(B, K, *S)`` of classes."""
        classes = self.check(logits)
        # Not -1: the older exporter to ONNX writes it as it is, and no runtime loads that.
        last = logits.ndim - 1
        rows = logits.movedim(1, last)
        flat = rows.reshape(-1, classes).to(computing_dtype(logits))
        calibrated = self.transform(flat).to(flat.dtype)
        # A class that is ruled out keeps the probability 0. Softmax gives its share to the others.
        calibrated = calibrated.masked_fill(flat == -torch.inf, -torch.inf)
        return calibrated.view(rows.shape).movedim(last, 1)

    def _calibrate_labels(self, logits: Tensor) -> Tensor:
        pairs, number = as_pairs(logits), len(self.labels)
        if (1 if logits.ndim == 1 else logits.shape[1]) != number:
            raise ValueError(
                f"logits must have shape (B, {number}, *S) for {counted(number, 'label')}, as when this was "
                f"fitted, got {tuple(logits.shape)}"
            )
        if logits.ndim == 1:
            pairs = pairs.unsqueeze(2)
        pairs = pairs.to(computing_dtype(logits))
        calibrated = [
            pairs[:, :, label] if label in self.unchanged else calibrator(pairs[:, :, label])
            for label, calibrator in enumerate(self.labels)
        ]
        return torch.stack([each[:, 1] - each[:, 0] for each in calibrated], 1).view(logits.shape)


def some_classes(classes: Sequence[int], number: int, names: Sequence[str] | None) -> str:
    """A few of ``number`` classes for a message: by name if each has one, else by number.

    >>> some_classes([1, 2], 3, ("cat", "dog", "owl")), some_classes([1, 2], 3, None)
    ('dog, owl', '1, 2')
    """
    return first_few(classes if names is None or len(names) != number else [names[k] for k in classes])


def described(layer: FittedLayer) -> dict[str, Any]:
    """What the learned tensors of a layer do not tell: its options, the number of classes, and the labels."""
    labels = {"labels": len(layer.labels), "unchanged": layer.unchanged} if layer.binary else {}
    return {"num_classes": layer.num_classes, "options": layer.options(), **labels}


def _read(state: Tensor) -> dict[str, Any]:
    """What `FittedLayer.get_extra_state` wrote."""
    found: dict[str, Any] = json.loads(bytes(state.tolist()))
    return found


def labels_without_state(names: Iterable[str], number: int) -> tuple[int, ...]:
    """The labels, of ``number``, that have no tensor in a state of these names.

    Version 0.1 stored `FittedLayer.unchanged` in this way.

    >>> labels_without_state(["labels.0.temperature", "labels.1._extra_state"], 2)
    (1,)
    """
    found = {
        name.split(".")[1]
        for name in names
        if name.startswith("labels.") and not name.endswith("_extra_state")
    }
    return tuple(label for label in range(number) if str(label) not in found)


def _constant_labels(target: Tensor, ignore_index: int) -> list[int]:
    """The labels of ``(B, L, *S)`` that are always 0 or always 1.

    >>> _constant_labels(torch.tensor([[0, 1, 0], [1, 1, -100]]), -100)
    [1, 2]
    """
    columns = [column[column != ignore_index] for column in target.unbind(1)]
    return [
        number for number, column in enumerate(columns) if len(column) and bool((column == column[0]).all())
    ]


def _some(learned: Tensor) -> str:
    """A few learned numbers with four digits each; of more numbers, or without values, the shape."""
    if learned.is_meta or learned.numel() > _SHOWN:
        return f"<{' × '.join(map(str, learned.shape))}>"
    numbers = [f"{number:.4g}" for number in learned.flatten().tolist()]
    return numbers[0] if learned.ndim == 0 else f"[{', '.join(numbers)}]"


def sizes_as_constants() -> AbstractContextManager[object]:
    """Without the warnings of `torch.jit.trace` and the older exporter to ONNX that sizes become constants.

    Those sizes are the numbers of axes, classes and learned numbers, which are constants.
    """
    if not is_traced():
        return nullcontext()
    return warnings.catch_warnings(action="ignore", category=TracerWarning)


def is_traced() -> bool:
    """Whether `torch.jit.trace` or the older exporter to ONNX is at work."""
    return bool(is_tracing())  # type: ignore[no-untyped-call]


def below_maximum(logits: Tensor, axis: int = -1) -> Tensor:
    """Logits minus the largest of each element: the same probabilities, and no digits lost by scaling.

    >>> below_maximum(torch.tensor([[1e6, 1e6 + 0.0625]])) / 3
    tensor([[-0.0208,  0.0000]])
    """
    return logits - logits.amax(axis, keepdim=True)


def valid_rows(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The elements that are not ignored: float64 logits ``(N, K)`` and labels ``(N,)``, N at least 1.

    Errors as for `Calibrator.fit`.
    """
    elements = arrange(logits, target, ignore_index=ignore_index)
    rows, labels = elements.rows.double(), elements.labels
    if not len(labels):
        raise ValueError(NOTHING_TO_FIT)
    if not bool(rows.isfinite().all()):
        raise ValueError(NOT_FINITE)
    warn_of_probabilities(logits)
    return rows, labels
