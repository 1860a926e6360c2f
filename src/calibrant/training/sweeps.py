"""Trains a loss with every combination of some options, and chooses one on the validation data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from calibrant.arguments import nearest
from calibrant.distributed import agree, gather, readable_errors, together
from calibrant.evaluation.chosen import Sweep, Value
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.criterion import Criterion
from calibrant.losses import LOSSES, AdaptiveLoss
from calibrant.options import Choice, RecipeError, to_toml_value
from calibrant.training.data import DataSets, load_data
from calibrant.training.fabric import Fabric
from calibrant.training.grid import method_of
from calibrant.training.loop import train
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import check_begun, check_for_several, is_finished
from calibrant.training.runs import Run, folder_of, plain_name
from calibrant.training.setup import launched, set_up

_FIXED = {
    "loss": "choose it with loss, or compare losses with calibrant compare",
    "seed": "give several seeds with seeds",
    "precision": "all runs of a sweep have the same precision",
    "log_test": "only the chosen setting is evaluated on the test data",
}
"""Fields of a recipe that a sweep does not vary, and what to do instead."""


def sweep(
    recipe: Recipe,
    over: Mapping[str, Sequence[Any]],
    output: str | Path,
    *,
    seeds: Sequence[int] | None = None,
    by: str = "nll",
    data_root: str | Path | None = None,
    resamples: int = 1000,
    fabric: Fabric | None = None,
    progress: bool = False,
    report: Callable[[str], None] | None = None,
) -> Sweep | None:
    """Train a loss with every combination of some options, and choose one on the validation data.

    Only the chosen setting is evaluated on the test data. Runs in the output folder are reused, whether
    finished or not. They are where `compare` looks for them.

    Args:
        recipe: the recipe to follow, with the loss.
        over: the values of each option, by its name: a hyper-parameter of the loss, or a key of the recipe
            such as ``optimizer.lr``.
        output: the folder of all runs. If keys of the recipe are varied, it has a folder for each of their
            combinations.
        seeds: the seeds of the runs; by default the recipe's.
        by: what to choose by: a key of `calibrant.metrics.METRICS`, such as ``nll``, ``ece`` or
            ``accuracy``, possibly with ``-after-temperature``. The mean over seeds decides; of equal
            settings, the first is chosen.
        data_root: the folder with the files of the data sets.
        resamples: bootstrap resamples for the intervals of the test figures.
        fabric: a launched Fabric.
        progress: show the progress on the terminal.
        report: called with a line before each run and before the evaluations.

    Returns:
        The result in the first process, None in the others.

    Raises:
        RecipeError: an option, a value, the seeds or the data cannot be used. It is raised before anything
            is trained.
        ValueError: the criterion is unknown, or the processes have different recipes, options, seeds or data.
        TrainingError: see `train`.
        OSError: see `train`.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits").override(["epochs=2", "loss=mbls"])
    >>> with TemporaryDirectory() as folder:
    ...     result = sweep(recipe, {"margin": [0.5, 6]}, folder, resamples=10)
    >>> list(result.settings), result.chosen
    (['margin=0.5', 'margin=6'], 'margin=6')
    >>> [method.name for method in result.test.methods]
    ['mbls[margin=6]']
    """
    criterion = Criterion.parse(by)
    numbers = (recipe.seed,) if seeds is None else tuple(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise RecipeError(f"expected one or more seeds, each once, got {list(numbers)}")
    settings = settings_of(recipe, over, Path(output))
    fabric = fabric or launched(recipe)
    say = report or (lambda _: None)
    with readable_errors():
        lists: dict[str, Sequence[object]] = {"settings": [each.name for each in settings], "seeds": numbers}
        agree({name: "; ".join(map(str, values)) for name, values in lists.items()})
        agree({"recipe": recipe.to_toml(), "criterion": by})
        data = load_settings(settings, data_root)
    together(partial(check_for_several, Path(output)), "checking the output folder")
    for setting in settings:  # all settings before the first run is trained
        check_setting(setting, numbers, data[setting.name], fabric)
    total = len(settings) * len(numbers)
    for number, (setting, seed) in enumerate(product(settings, numbers), 1):
        say(f"run {number} of {total}: {setting.name}, seed {seed}")
        setting.train(seed, data[setting.name], fabric=fabric, progress=progress)
    if not fabric.is_global_zero:
        return None

    def comparison(part: str, methods: Sequence[Method]) -> Comparison:
        dense = any(each.dense for each in data.values())
        return Comparison(f"{recipe.name}, {part} data", numbers, tuple(methods), dense)

    say("evaluating on the validation data")
    validation = comparison(
        "validation", [setting.validated(numbers, data[setting.name]) for setting in settings]
    )
    name = criterion.choose(validation)
    (chosen,) = [setting for setting in settings if setting.name == name]
    say(f"evaluating {name} on the test data")
    test = comparison("test", [chosen.tested(numbers, data[name], resamples)])
    options = {option: tuple(map(_plain, values)) for option, values in over.items()}
    title = f"{recipe.name}: {recipe.loss} over {', '.join(options)}"
    return Sweep(title, options, criterion, validation, name, test)


@dataclass(frozen=True)
class Setting:
    """One combination of values."""

    name: str  # the values, such as ``margin=6, optimizer.lr=0.1``
    changes: str  # those of them that are keys of the recipe
    recipe: Recipe  # the recipe with these values
    output: Path  # the folder with the folders of the runs

    @property
    def full_name(self) -> str:
        """The loss with its options, and what else was changed."""
        return ", ".join(part for part in (self.recipe.loss, self.changes) if part)

    def with_seed(self, seed: int) -> Recipe:
        """The recipe of the run with this seed."""
        return replace(self.recipe, seed=seed)

    def folder(self, seed: int) -> Path:
        """The folder of the run with this seed."""
        return folder_of(self.output, self.recipe.loss, seed)

    def train(self, seed: int, data: DataSets, **options: Any) -> None:
        """Train the run with this seed; options as for `calibrant.training.train`."""
        train(self.with_seed(seed), self.folder(seed), data=data, **options)

    def run(self, seed: int, data: DataSets) -> Run:
        """The finished run with this seed."""
        return Run(self.folder(seed), loaded=data)

    def validated(self, seeds: Sequence[int], data: DataSets) -> Method:
        """The results on the validation data."""
        return method_of(self.name, [self.run(seed, data).validation() for seed in seeds])

    def tested(self, seeds: Sequence[int], data: DataSets, resamples: int) -> Method:
        """The results on the test data."""
        runs = [self.run(seed, data) for seed in seeds]
        return method_of(self.full_name, [run.results(["temperature"], resamples=resamples) for run in runs])


def settings_of(recipe: Recipe, over: Mapping[str, Sequence[Any]], output: Path) -> tuple[Setting, ...]:
    """Every combination of values; see `sweep`.

    >>> first, second = settings_of(Recipe.load("digits"), {"optimizer.lr": [0.1, 1]}, Path("out"))
    >>> second.name, second.folder(0).as_posix()
    ('optimizer.lr=1', 'out/optimizer.lr=1/runs/ce-seed0')
    """
    if not over:
        raise RecipeError("a sweep needs at least one option with its values, such as margin=4,6,8")
    if recipe.log_test:
        raise RecipeError(f"a sweep does not log test figures of every setting: {_FIXED['log_test']}")
    loss = Choice.parse(recipe.loss)
    of_loss = _options_of_loss(loss)
    for option, values in over.items():
        _check_option(option, loss, of_loss)
        _check_values(option, values)
    found = []
    for values in product(*over.values()):
        setting = dict(zip(over, values, strict=True))
        own = {option: value for option, value in setting.items() if option in of_loss}
        others = {option: value for option, value in setting.items() if option not in of_loss}
        changed = recipe.override(f"{option}={_text(value)}" for option, value in others.items())
        changed = replace(changed, loss=str(loss.with_options(own)))
        changes = _written(others)
        place = output / plain_name(changes) if changes else output
        found.append(Setting(_written(setting), changes, changed, place))
    folders = [setting.folder(0) for setting in found]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            first, second = found[folders.index(folder)], found[number]
            raise RecipeError(f"{first.name} and {second.name} would have the same folder {folder}")
    return tuple(found)


def _options_of_loss(loss: Choice) -> list[str]:
    kind = LOSSES[loss.name]
    own = [name for name in kind.hyperparameters() if name not in ("reduction", "ignore_index", "binary")]
    return [*own, "adapt"] if issubclass(kind, AdaptiveLoss) else own


def _check_option(option: str, loss: Choice, of_loss: Sequence[str]) -> None:
    keys = [entry.name for entry in fields(Recipe) if entry.name not in _FIXED]
    if option in _FIXED:
        raise RecipeError(f"a sweep does not vary {option}: {_FIXED[option]}")
    if option in loss.options:
        raise RecipeError(f"{option} is given twice: in the loss {loss}, and as an option of the sweep")
    if option not in of_loss and option.partition(".")[0] not in keys:
        known = [*of_loss, *keys]
        raise RecipeError(
            f"unknown option {option!r}{nearest(option, known)}; loss {loss.name} has: {', '.join(of_loss)}; "
            f"the recipe has: {', '.join(keys)}"
        )


def _check_values(option: str, values: Sequence[Any]) -> None:
    if isinstance(values, str) or not values:
        raise RecipeError(f"{option} needs a list of one or more values, got {values!r}")
    for number, value in enumerate(values):
        if value in values[:number]:
            raise RecipeError(f"value {_text(value)} of {option} is there twice; expected each once")


def _text(value: Any) -> str:
    """A value as the command line writes it."""
    return value if isinstance(value, str) else to_toml_value(value)


def _plain(value: Any) -> Value:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else _text(value)


def _written(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{option}={_text(value)}" for option, value in values.items())


def load_settings(settings: Sequence[Setting], data_root: str | Path | None) -> dict[str, DataSets]:
    """The data of each setting, by its name; equal ones are loaded once."""
    loaded: dict[str, DataSets] = {}
    for choice in {str(setting.recipe.data): setting.recipe.data for setting in settings}.values():
        found = together(partial(load_data, choice, data_root), "reading the data")
        agree({"data": found.fingerprint})
        if len(found.test) == 0:
            raise RecipeError(f"data {choice} have no test part to report the chosen setting on")
        loaded[str(choice)] = found
    return {setting.name: loaded[str(setting.recipe.data)] for setting in settings}


def check_setting(setting: Setting, seeds: Sequence[int], data: DataSets, fabric: Fabric) -> None:
    """Refuse folders of other runs, and settings that cannot be trained."""
    for seed in seeds:
        check = partial(check_begun, setting.folder(seed), setting.with_seed(seed), data)
        together(check, "checking the output folder")
    if gather(all(is_finished(setting.folder(seed)) for seed in seeds))[0]:
        return  # what it started from may be gone
    with warnings.catch_warnings(action="ignore"):  # training repeats them
        set_up(setting.with_seed(seeds[0]), data, fabric)
