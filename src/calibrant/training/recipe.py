"""Recipe: all that decides the outcome of a training run, as a value that TOML files hold."""

from __future__ import annotations

import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from calibrant.arguments import nearest
from calibrant.losses import LOSSES, AdaptiveLoss, Loss, create_loss
from calibrant.options import (
    Choice,
    RecipeError,
    check_option,
    check_options,
    check_type,
    options_of,
    parse_value,
    to_toml_key,
    to_toml_value,
)
from calibrant.training.data import DATA_SETS
from calibrant.training.models import MODELS, create_model
from calibrant.training.optimization import OPTIMIZERS, SCHEDULES

Criterion = Literal["last", "accuracy", "nll", "ece", "nll-after-temperature"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, on what, and how; two runs of equal recipes on one CPU give equal weights.

    Attributes:
        name: of the recipe.
        description: one line about it.
        data: a data set, see `calibrant.training.data.DATA_SETS`.
        model: a network, see `calibrant.training.models.create_model`.
        loss: a key of `calibrant.losses.LOSSES`, with hyper-parameters in brackets; ``adapt`` among them
            stands for the field below.
        losses: hyper-parameters by key of a loss, for what the recipe has its own values of.
        optimizer: see `calibrant.training.optimization`.
        schedule: of the learning rate, see there.
        seed: of the initial weights, the order of the data and their augmentation.
        epochs: passes over the training data.
        batch_size: elements per step, over all processes.
        evaluation_batch_size: elements per batch of validation and test; 0 for ``batch_size``.
        drop_last: whether the last, smaller batch of an epoch is left out.
        accumulate: into how many parts a batch is cut to fit into memory.
        gradient_clip: largest norm of the gradient; 0 for any.
        adapt: when an adaptive loss learns from the validation data: ``epoch``, a number of batches, or
            intervals by the epoch they start with, as in ``0:epoch/10:100/20:1``.
        select: which weights are kept: the last ones, or the best on the validation data.
        average: decay of the running average of weights that is evaluated and kept; 0 for none.
        precision: of the arithmetic, as Lightning Fabric names it; ``auto`` for ``bf16-mixed`` on a GPU made
            for it, and ``32-true`` elsewhere.
        compile: whether the model goes through `torch.compile`.
        record: whether steps on a single GPU are recorded as a CUDA graph; not for a model whose ``forward``
            does something else in Python from step to step.
        workers: processes that prepare batches.
        checkpoint_batches: batches between checkpoints within an epoch; 0 for one after each epoch only.

    >>> recipe = Recipe(data=Choice("digits"), model=Choice("mlp"), loss="cals-alm[margin=6]", epochs=2)
    >>> recipe.create_loss(10)
    AugmentedLagrangian(10, margin=6.0)
    """

    name: str = "recipe"
    description: str = ""
    loss: str = "ce"
    seed: int = 0
    epochs: int = 1
    batch_size: int = 128
    evaluation_batch_size: int = 0
    drop_last: bool = True
    accumulate: int = 1
    gradient_clip: float = 0.0
    adapt: str = "epoch"
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
        for name in _CHOICES:
            choice = getattr(self, name)
            object.__setattr__(self, name, Choice(choice.name, _as_toml_has_it(choice.options)))
        object.__setattr__(self, "losses", _as_toml_has_it(self.losses))
        hints = typing.get_type_hints(type(self))
        for name in _plain_fields():
            object.__setattr__(self, name, check_type(name, getattr(self, name), hints[name]))
        for name, low in _AT_LEAST.items():
            if not low <= getattr(self, name) < math.inf:
                raise RecipeError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.average < 1:
            raise RecipeError(f"average must lie in [0, 1), got {self.average}")
        if self.batch_size % self.accumulate:
            raise RecipeError(
                f"batch_size {self.batch_size} cannot be cut into accumulate = {self.accumulate} equal parts"
            )
        for name, known in _CHOICES.items():
            choice = getattr(self, name)
            external = name == "model" and ":" in choice.name
            if not external:
                if choice.name not in known:
                    raise RecipeError(
                        f"unknown {name} {choice.name!r}{nearest(choice.name, known)}; known: "
                        f"{', '.join(known)}"
                    )
                checked = check_options(
                    f"{name} {choice.name!r}",
                    choice.options,
                    known[choice.name],
                    *([create_model] if name == "model" else []),
                    complete=name != "model",  # the data tell the rest
                )
                object.__setattr__(self, name, Choice(choice.name, checked))
        if self.schedule.options.get("warmup", 0) < 0:
            raise RecipeError(f"schedule: warmup must be at least 0, got {self.schedule.options['warmup']}")
        for key, hyperparameters in self.losses.items():
            _check_loss(Choice(key, hyperparameters))
        choice = Choice.parse(self.loss)
        _check_loss(choice)
        object.__setattr__(self, "loss", str(choice))
        self.adaptation  # noqa: B018 - raises where it cannot be read

    # ------------------------------------------------------------------------------------------------ loss

    @property
    def loss_choice(self) -> Choice:
        """The loss with the recipe's own hyper-parameters under those in brackets."""
        written = Choice.parse(self.loss)
        return Choice(written.name, self.losses.get(written.name, {})).with_options(written.options)

    def create_loss(self, num_classes: int, *, ignore_index: int = -100) -> Loss:
        """The loss for so many classes."""
        choice = self.loss_choice
        options = {name: value for name, value in choice.options.items() if name != "adapt"}
        return create_loss(choice.name, num_classes, ignore_index=ignore_index, **options)

    @property
    def adaptation(self) -> tuple[tuple[int, int], ...]:
        """Pairs: from which epoch on, after how many batches a loss adapts; 0 for at each epoch's end."""
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
        """The recipe of a TOML file, or a shipped one by its name.

        Raises:
            RecipeError: there is none, or it cannot be followed.

        >>> Recipe.load("digits-lt").data.name
        'digits'
        """
        path = Path(source)
        if path.suffix == ".toml" or path.is_file():
            if not path.is_file():
                raise RecipeError(f"there is no recipe file {path}")
            return cls.from_toml(path.read_text(encoding="utf-8"), name=path.stem, where=str(path))
        shipped = shipped_recipes()
        if str(source) not in shipped:
            raise RecipeError(
                f"unknown recipe {str(source)!r}{nearest(source, shipped)}; expected a .toml file or one of: "
                f"{', '.join(shipped)}"
            )
        return cls.from_toml(shipped[str(source)], name=str(source), where=f"recipe {source}")

    @classmethod
    def from_toml(cls, text: str, *, name: str | None = None, where: str = "recipe") -> Self:
        """The recipe that a TOML document describes; ``name`` where it has none."""
        try:
            table = tomllib.loads(text)
            known = {entry.name: entry for entry in fields(cls)}
            for key in table:
                if key not in known:
                    raise RecipeError(f"unknown key {key!r}{nearest(key, known)}; known: {', '.join(known)}")
            if name is not None:
                table.setdefault("name", name)
            for key, entry in known.items():
                if key in _CHOICES and key in table:
                    table[key] = _choice(key, table[key])
                elif key not in table and entry.default is MISSING and entry.default_factory is MISSING:
                    raise RecipeError(f"needs the table [{key}]")
            return cls(**table)
        except (tomllib.TOMLDecodeError, RecipeError) as error:
            raise RecipeError(f"{where}: {error}") from None

    def to_toml(self) -> str:
        """The recipe as a TOML document, which `from_toml` reads back."""
        lines = [f"{name} = {to_toml_value(getattr(self, name))}" for name in _plain_fields()]
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
            RecipeError: an unknown key, a value of another type, or one that cannot be followed.

        >>> Recipe.load("digits-lt").override(["optimizer.lr=0.01", "epochs=4"]).epochs
        4
        """
        changed: dict[str, Any] = {}
        for change in changes:
            key, equals, text = change.partition("=")
            path = [part.strip() for part in key.split(".")]
            if not equals:
                raise RecipeError(f"cannot read {change!r}; expected key=value, as in optimizer.lr=0.05")
            if path[0] not in _KEYS:
                raise RecipeError(
                    f"unknown key {path[0]!r}{nearest(path[0], _KEYS)}; known: {', '.join(_KEYS)}"
                )
            if path[0] in _CHOICES and len(path) == 1:
                changed[path[0]] = Choice.parse(text)
            elif path[0] in _CHOICES and len(path) == 2:
                current = changed.get(path[0], getattr(self, path[0]))
                changed[path[0]] = self._with_option(path[0], current, path[1], text)
            elif path[0] == "losses" and len(path) == 3:
                current = dict(changed.get("losses", self.losses))
                current[path[1]] = {**current.get(path[1], {}), path[2]: parse_value(text)}
                changed["losses"] = current
            elif path[0] in _plain_fields() and len(path) == 1:
                hint = typing.get_type_hints(type(self))[path[0]]
                changed[path[0]] = _typed(path[0], text, hint)
            else:
                raise RecipeError(f"cannot set {key!r}; expected {_form_of(path[0])}")
        return replace(self, **changed)

    @staticmethod
    def _with_option(table: str, choice: Choice, key: str, text: str) -> Choice:
        if key == "name":
            return Choice(text.strip().strip("\"'"), choice.options)
        if choice.name in _CHOICES[table]:
            hints = options_of(_CHOICES[table][choice.name])
            if table == "model":
                hints |= options_of(create_model)
            check_option(f"{table} {choice.name!r}", key, hints)
            return choice.with_options({key: _typed(f"{table}.{key}", text, hints[key])})
        return choice.with_options({key: parse_value(text)})


_AT_LEAST = {
    "epochs": 1,
    "batch_size": 1,
    "evaluation_batch_size": 0,
    "accumulate": 1,
    "gradient_clip": 0,
    "workers": 0,
    "checkpoint_batches": 0,
    "seed": 0,
}

_CHOICES: dict[str, Mapping[str, Any]] = {
    "data": DATA_SETS,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
"""The tables of a recipe that choose something by name, and from what."""

_KEYS = tuple(entry.name for entry in fields(Recipe))


def _as_toml_has_it(value: Any) -> Any:
    """A value as it comes back from a TOML document: without None, and with lists for tuples."""
    if isinstance(value, Mapping):
        return {key: _as_toml_has_it(item) for key, item in value.items() if item is not None}
    return [_as_toml_has_it(item) for item in value] if isinstance(value, list | tuple) else value


def _plain_fields() -> tuple[str, ...]:
    return tuple(name for name in _KEYS if name not in _CHOICES and name != "losses")


def _form_of(key: str) -> str:
    if key in _CHOICES:
        return f"{key}.option=value or {key}=name"
    return "losses.KEY.option=value" if key == "losses" else f"{key}=value"


def _typed(where: str, text: str, hint: Any) -> Any:
    """A text as a value of a type: as TOML has it, or as it stands."""
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


def _check_loss(choice: Choice) -> None:
    """Build the loss once, for its own errors."""
    if choice.name not in LOSSES:
        raise RecipeError(
            f"unknown loss {choice.name!r}{nearest(choice.name, LOSSES)}; known: {', '.join(LOSSES)}"
        )
    for name in ("reduction", "ignore_index"):
        if name in choice.options:
            raise RecipeError(
                f"loss {choice}: {name} is not for a recipe to choose; training and data decide it"
            )
    if "adapt" in choice.options and not issubclass(LOSSES[choice.name], AdaptiveLoss):
        raise RecipeError(f"loss {choice}: {choice.name} does not adapt; adapt is for losses that do")
    options = {name: value for name, value in choice.options.items() if name != "adapt"}
    weights = options.get("class_weight")
    try:
        create_loss(choice.name, len(weights) if isinstance(weights, list | tuple) else 2, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"loss {choice}: {error}") from None


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with the package: TOML documents by name."""
    folder = resources.files("calibrant") / "recipes"
    found = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(found.items()))
