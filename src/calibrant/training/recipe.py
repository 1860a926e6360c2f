"""Recipe: everything that decides the outcome of a training run, readable from and writable to TOML."""

from __future__ import annotations

import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from calibrant.arguments import nearest, unknown
from calibrant.losses import LOSSES, AdaptiveLoss, Loss, create_loss
from calibrant.options import (
    Choice,
    RecipeError,
    check_option,
    check_options,
    check_type,
    options_of,
    parse_value,
    read_toml,
    to_toml_key,
    to_toml_value,
)
from calibrant.printable import is_unicode, printable
from calibrant.training.data import DATA_SETS, DataSets, skewed
from calibrant.training.models import MODELS, create_model
from calibrant.training.optimization import OPTIMIZERS, SCHEDULES

Criterion = Literal["last", "accuracy", "nll", "ece", "nll-after-temperature"]

_CHOICES: dict[str, Mapping[str, Any]] = {
    "data": DATA_SETS,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
"""The tables of a recipe that choose something by its name, with the registry of each."""

_SHARED: dict[str, list[Any]] = {"data": [skewed], "model": [create_model]}
"""Functions whose options belong to every entry of a registry."""

_AT_LEAST_0 = ("evaluation_batch_size", "gradient_clip", "workers", "checkpoint_batches", "seed")
_AT_LEAST = dict.fromkeys(("epochs", "batch_size", "accumulate"), 1) | dict.fromkeys(_AT_LEAST_0, 0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, network, loss, optimizer and everything else that decides the outcome of a training run.

    On one CPU, two runs of equal recipes give equal weights.

    Attributes:
        name: the name of the recipe.
        description: one line about it. Recipes that differ in nothing else are equal.
        data: the data set, see `calibrant.training.data.DATA_SETS`.
        model: the network, see `calibrant.training.models.create_model`.
        loss: a key of `calibrant.losses.LOSSES`, with hyper-parameters in brackets. ``adapt`` in the brackets
            replaces the field ``adapt``.
        binary: give the network one output for each yes-or-no decision: a single logit for data with two
            classes, or one for each label of data with several labels. It is never chosen by itself.
        losses: the recipe's own hyper-parameters for some losses, by key. Here and in ``loss``, the text
            ``none`` stands for None.
        optimizer: the optimizer, see `calibrant.training.optimization.OPTIMIZERS`.
        schedule: the schedule of the learning rate, see `calibrant.training.optimization.SCHEDULES`.
        seed: the seed of the initial weights, the order of the data and the augmentation.
        epochs: passes over the training data.
        batch_size: elements per step, over all processes.
        evaluation_batch_size: elements per validation or test batch; 0 for ``batch_size``.
        drop_last: leave out the last, smaller batch of an epoch.
        accumulate: the number of equal parts into which a batch is cut to fit into memory.
        batch_loss: ``mean`` or ``sum``: the gradient of the mean loss over a batch, or of its sum. The sum
            makes a difference to SGD, and where ``gradient_clip`` limits the gradient.
        gradient_clip: the largest norm of the gradient; 0 for no limit.
        adapt: when an adaptive loss learns from the data of ``adapt_on``: ``epoch``, a number of batches, or
            intervals by first epoch, such as ``0:epoch/10:100/20:1``. Batches are counted anew in every
            epoch; an epoch with fewer batches has one adaptation, at its end.
        adapt_on: the data that an adaptive loss learns from: the validation data, or ``train`` for a fixed
            random part of the training data, without augmentation, of the size of the validation data.
        log_test: log figures on the test data after each epoch too. No choice depends on them.
        select: the weights to keep: the last ones, or the best by a figure on the validation data.
        average: the decay of a running average of the weights, which is then evaluated and kept; 0 for none.
        precision: the precision of training steps, by its Lightning Fabric name. ``auto`` is ``bf16-mixed``
            on a GPU that supports it, and ``32-true`` elsewhere.
        compile: use `torch.compile` for the network. ``auto`` compiles on a single GPU as soon as the rest of
            the run repays the time, and goes on without if compiling fails.
        record: record the steps on a single GPU as a CUDA graph. Set it to false for a network whose
            ``forward`` does different things in Python from step to step.
        workers: processes that prepare batches.
        checkpoint_batches: batches between checkpoints within an epoch; 0 for only one after each epoch.

    >>> recipe = Recipe(data=Choice("digits"), model=Choice("mlp"), loss="cals-alm[margin=6]", epochs=2)
    >>> recipe.create_loss(10)
    AugmentedLagrangian(10, margin=6.0)
    """

    name: str = "recipe"
    description: str = field(default="", compare=False)
    loss: str = "ce"
    binary: bool = False
    seed: int = 0
    epochs: int = 1
    batch_size: int = 128
    evaluation_batch_size: int = 0
    drop_last: bool = True
    accumulate: int = 1
    batch_loss: Literal["mean", "sum"] = "mean"
    gradient_clip: float = 0.0
    adapt: str = "epoch"
    adapt_on: Literal["validation", "train"] = "validation"
    log_test: bool = False
    select: Criterion = "last"
    average: float = 0.0
    precision: str = "auto"
    compile: bool | Literal["auto"] = "auto"
    record: bool = True
    workers: int = 0
    checkpoint_batches: int = 0
    data: Choice
    model: Choice
    optimizer: Choice = Choice("sgd")
    schedule: Choice = Choice("constant")
    losses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        losses = {
            key: {name: "none" if value is None else value for name, value in hyperparameters.items()}
            for key, hyperparameters in self.losses.items()
        }
        put("losses", _as_in_toml(losses))
        for name in _PLAIN_KEYS:
            put(name, check_type(name, getattr(self, name), _HINTS[name]))
        for name, low in _AT_LEAST.items():
            if not low <= getattr(self, name) < math.inf:
                raise RecipeError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.average < 1:
            raise RecipeError(f"average must lie in [0, 1), got {self.average}")
        if self.batch_size % self.accumulate:
            raise RecipeError(
                f"batch_size {self.batch_size} cannot be cut into accumulate = {self.accumulate} equal parts"
            )
        for name in _CHOICES:
            put(name, _checked(name, getattr(self, name)))
        if self.schedule.options.get("warmup", 0) < 0:
            raise RecipeError(f"schedule: warmup must be at least 0, got {self.schedule.options['warmup']}")
        for key, hyperparameters in self.losses.items():
            _check_loss(Choice(key, hyperparameters))
        choice = Choice.parse(self.loss)
        _check_loss(choice, binary=self.binary)
        put("loss", str(choice))
        self.adaptation  # noqa: B018 - raises if it cannot be read
        broken = [line for line in self.to_toml().splitlines() if not is_unicode(line)]
        if broken:
            raise RecipeError(
                f"a recipe is stored in UTF-8, which this is not: {printable('; '.join(broken))}; rename "
                "that file or folder"
            )

    # ------------------------------------------------------------------------------------------------ loss

    @property
    def loss_choice(self) -> Choice:
        """The loss with all its hyper-parameters; those in brackets replace the recipe's own."""
        written = Choice.parse(self.loss)
        return Choice(written.name, self.losses.get(written.name, {})).with_options(written.options)

    def create_loss(self, num_classes: int, *, ignore_index: int = -100) -> Loss:
        """Build the loss for a number of classes, or for yes-or-no decisions if the recipe is ``binary``.

        Raises:
            RecipeError: the loss does not fit that number, or its hyper-parameters do not fit together.
        """
        classes = 2 if self.binary else num_classes
        return _built(self.loss_choice, classes, self.binary, ignore_index=ignore_index)

    def loss_for(self, data: DataSets) -> Loss:
        """Build the loss for these data.

        Raises:
            RecipeError: ``binary`` or the loss does not fit the data.
        """
        outputs = self.outputs(data)
        loss = self.create_loss(data.num_classes, ignore_index=data.ignore_index)
        if data.several_labels and not loss.takes_several_labels:
            raise RecipeError(
                f"loss {self.loss_choice} compares the elements of a batch and takes a single label; the "
                f"data have {outputs}: choose a loss without a term over the batch, such as ce or focal"
            )
        return loss

    def outputs(self, data: DataSets) -> int:
        """The number of the network's outputs: one for each class or label, or 1 for a single logit.

        Raises:
            RecipeError: ``binary`` does not fit the data.
        """
        if data.several_labels:
            if not self.binary:
                raise RecipeError(
                    f"data {self.data.name!r} have {data.num_classes} labels for each element, which are "
                    "decisions of their own: set binary = true"
                )
            return data.num_classes
        if self.binary and data.num_classes != 2:
            raise RecipeError(
                f"binary = true is for data with two classes or with several labels for each element; data "
                f"{self.data.name!r} have {data.num_classes} classes"
            )
        return 1 if self.binary else data.num_classes

    @property
    def adaptation(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a first epoch and the batches between adaptations from then on; 0 for at epoch ends."""
        text = str(self.loss_choice.options.get("adapt", self.adapt))
        pairs = []
        for number, part in enumerate(text.split("/")):
            match = re.fullmatch(r"\s*(?:(\d+)\s*:)?\s*(epoch|[1-9]\d*)\s*", part)
            if match is None or (match[1] is None and number):
                raise RecipeError(
                    f"adapt must be 'epoch', a number of batches, or such intervals by first epoch as in "
                    f"'0:epoch/10:100/20:1', got {text!r}"
                )
            pairs.append((int(match[1] or 0), 0 if match[2] == "epoch" else int(match[2])))
        starts = [start for start, _ in pairs]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise RecipeError(f"adapt must start with epoch 0 and go on with later ones, got {text!r}")
        return tuple(pairs)

    # ---------------------------------------------------------------------------------------------- reading

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Load a recipe from a TOML file, or a shipped one by its name.

        Raises:
            RecipeError: it does not exist or cannot be followed.

        >>> Recipe.load("digits-lt").data.name
        'digits'
        """
        path = Path(source)
        if path.suffix == ".toml" or path.is_file():
            if not path.is_file():
                raise RecipeError(f"there is no recipe file {path}")
            return cls.from_toml(read_toml(path), name=path.stem, where=str(path))
        shipped = shipped_recipes()
        if str(source) not in shipped:
            raise RecipeError(
                f"unknown recipe {str(source)!r}{nearest(source, shipped)}; expected a .toml file or one of: "
                f"{', '.join(shipped)}"
            )
        return cls.from_toml(shipped[str(source)], name=str(source), where=f"recipe {source}")

    @classmethod
    def from_toml(cls, text: str, *, name: str | None = None, where: str = "recipe") -> Self:
        """Read a recipe from a TOML document.

        Args:
            text: the document.
            name: the name of the recipe if the document has none.
            where: the origin of the document, for error messages.

        Raises:
            RecipeError: the document cannot be read or followed.
        """
        try:
            table = tomllib.loads(text)
            for key in table:
                _check_known("key", key, _KEYS)
            if name is not None:
                table.setdefault("name", name)
            for entry in fields(cls):
                if entry.name in _CHOICES and entry.name in table:
                    table[entry.name] = _choice(entry.name, table[entry.name])
                elif entry.name not in table and entry.default is entry.default_factory is MISSING:
                    raise RecipeError(f"needs the table [{entry.name}]")
            return cls(**table)
        except (ValueError, RecursionError) as error:  # of the parser, or about the content
            raise RecipeError(f"{where}: {error}") from None

    def to_toml(self) -> str:
        """Write the recipe as a TOML document, which `from_toml` reads back."""
        lines = [f"{name} = {to_toml_value(getattr(self, name))}" for name in _PLAIN_KEYS]
        tables: dict[str, Mapping[str, Any]] = {
            name: {"name": getattr(self, name).name, **getattr(self, name).options} for name in _CHOICES
        }
        tables |= {f"losses.{to_toml_key(key)}": options for key, options in self.losses.items()}
        for heading, options in tables.items():
            lines += ["", f"[{heading}]"]
            lines += [
                f"{to_toml_key(key)} = {to_toml_value(value)}"
                for key, value in options.items()
                if value is not None
            ]
        return "\n".join(lines) + "\n"

    def override(self, changes: Iterable[str]) -> Self:
        """The recipe with changes such as ``optimizer.lr=0.05``.

        Raises:
            RecipeError: a key is unknown, a value has the wrong type, or the result cannot be followed.

        >>> Recipe.load("digits-lt").override(["optimizer.lr=0.01", "epochs=4"]).epochs
        4
        """
        changed: dict[str, Any] = {}
        for change in changes:
            written, equals, text = change.partition("=")
            key, *inside = [part.strip() for part in written.split(".")]
            if not equals:
                raise RecipeError(f"cannot read {change!r}; expected key=value, as in optimizer.lr=0.05")
            _check_known("key", key, _KEYS)
            current = changed.get(key, getattr(self, key))
            if key in _CHOICES and not inside:
                changed[key] = Choice.parse(text)
            elif key in _CHOICES and len(inside) == 1:
                changed[key] = _with_option(key, current, inside[0], text)
            elif key == "losses" and len(inside) == 2:
                loss, option = inside
                changed[key] = {**current, loss: {**current.get(loss, {}), option: parse_value(text)}}
            elif key in _PLAIN_KEYS and not inside:
                changed[key] = _typed(key, text, _HINTS[key])
            else:
                form = f"{key}.option=value or {key}=name" if key in _CHOICES else f"{key}=value"
                form = "losses.KEY.option=value" if key == "losses" else form
                raise RecipeError(f"cannot set {written!r}; expected {form}")
        return replace(self, **changed)


_KEYS = tuple(entry.name for entry in fields(Recipe))
_HINTS = typing.get_type_hints(Recipe)
_PLAIN_KEYS = tuple(name for name in _KEYS if name not in _CHOICES and name != "losses")


def _check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise RecipeError(unknown(what, name, known))


def _as_in_toml(value: Any) -> Any:
    """A value as TOML would return it: lists instead of tuples, and nothing that is None."""
    if isinstance(value, Mapping):
        return {key: _as_in_toml(item) for key, item in value.items() if item is not None}
    return [_as_in_toml(item) for item in value] if isinstance(value, list | tuple) else value


def _checked(table: str, choice: Choice) -> Choice:
    """A choice with options of the right types; models from elsewhere are checked when they are built."""
    options = _as_in_toml(choice.options)
    if table == "model" and ":" in choice.name:
        return Choice(choice.name, options)
    _check_known(table, choice.name, _CHOICES[table])
    functions = _CHOICES[table][choice.name], *_SHARED.get(table, [])
    complete = table != "model"  # the data supply the rest of a model's options
    options = check_options(f"{table} {choice.name!r}", options, *functions, complete=complete)
    return Choice(choice.name, options)


def _with_option(table: str, choice: Choice, key: str, text: str) -> Choice:
    if key == "name":
        return Choice(text.strip().strip("\"'"), choice.options)
    if choice.name not in _CHOICES[table]:
        return choice.with_options({key: parse_value(text)})
    hints = options_of(_CHOICES[table][choice.name])
    for function in _SHARED.get(table, []):
        hints |= options_of(function)
    check_option(f"{table} {choice.name!r}", key, hints)
    return choice.with_options({key: _typed(f"{table}.{key}", text, hints[key])})


def _typed(where: str, text: str, hint: Any) -> Any:
    """A text as a value of a type: read as TOML, or else as a plain string."""
    try:
        return check_type(where, parse_value(text), hint)
    except RecipeError as problem:
        try:
            return check_type(where, text.strip(), hint)
        except RecipeError:
            raise problem from None


def _choice(where: str, table: Any) -> Choice:
    if isinstance(table, str):
        return Choice.parse(table)
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise RecipeError(f'[{where}] needs name = "…", got {table!r}')
    return Choice(table["name"], {key: value for key, value in table.items() if key != "name"})


_ENOUGH_CLASSES = 1000
"""More classes than any loss demands; those of the data are known only when they are loaded."""


def _check_loss(choice: Choice, *, binary: bool = False) -> None:
    """Check the name and the hyper-parameters of a loss; `Recipe.create_loss` checks the classes as well."""
    _check_known("loss", choice.name, LOSSES)
    for name in ("reduction", "ignore_index", "binary"):
        if name in choice.options:
            raise RecipeError(f"loss {choice}: {name} cannot be set here; the recipe and its data decide it")
    if "adapt" in choice.options and not issubclass(LOSSES[choice.name], AdaptiveLoss):
        raise RecipeError(f"loss {choice}: {choice.name} does not adapt; adapt is for losses that do")
    # A list, such as class weights, may have an entry for each class.
    lengths = {len(value) for value in choice.options.values() if isinstance(value, list | tuple)}
    problems = []
    sizes = [2] if binary else [*sorted(lengths - {0, 1}, reverse=True), _ENOUGH_CLASSES]
    for classes in sizes:
        try:
            _built(choice, classes, binary)
            return
        except RecipeError as problem:
            problems.append(problem)
    raise problems[0]


def _built(choice: Choice, num_classes: int, binary: bool, **shared: Any) -> Loss:
    """The loss of a choice. TOML has no None: the text ``none`` stands for it if the option may be None."""
    known = LOSSES[choice.name].hyperparameters()

    def may_be_none(name: str) -> bool:
        annotation = str(known[name].annotation) if name in known else ""
        return "None" in annotation or "Optional" in annotation

    options = {
        name: None if value == "none" and may_be_none(name) else value
        for name, value in choice.options.items()
        if name != "adapt"
    }
    if binary and not LOSSES[choice.name].accepts_binary:
        raise RecipeError(
            f"loss {choice.name} takes no single logits: expected binary = false, or another loss"
        )
    try:
        return create_loss(
            choice.name, num_classes, **options, **shared, **({"binary": True} if binary else {})
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"loss {choice}: {error}") from None


@cache
def shipped_recipes() -> Mapping[str, str]:
    """The recipes that come with the package: TOML documents by name."""
    folder = resources.files("calibrant") / "recipes"
    files = {Path(entry.name).stem: entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return MappingProxyType({name: files[name].read_text(encoding="utf-8") for name in sorted(files)})
