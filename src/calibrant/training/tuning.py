"""Tunes the hyper-parameters of a loss: trials on the validation data, chosen by Optuna."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from calibrant.arguments import whole_number
from calibrant.distributed import agree, gather, readable_errors, together
from calibrant.evaluation.chosen import Trial, Tuning
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.criterion import Criterion
from calibrant.losses import LOSSES
from calibrant.losses.base import Range
from calibrant.metrics import METRICS
from calibrant.options import Choice, RecipeError
from calibrant.training import DivergedError, TrainingError
from calibrant.training.data import DataSets
from calibrant.training.fabric import Fabric
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import check_for_several, is_finished
from calibrant.training.setup import launched
from calibrant.training.study import Study, quiet_optuna
from calibrant.training.sweeps import Setting, check_setting, load_settings

_SECONDS_BETWEEN_ATTEMPTS = 0.2
"""The pause before this process asks again whether the trials of other processes have ended."""

_LOGGED = ("nll", "ece", "adaptive-ece", "accuracy")
"""The criteria that every training logs after each epoch."""


def tune(
    recipe: Recipe,
    output: str | Path,
    *,
    trials: int = 20,
    by: str = "nll",
    prune: bool = True,
    data_root: str | Path | None = None,
    resamples: int = 1000,
    fabric: Fabric | None = None,
    progress: bool = False,
    report: Callable[[str], None] | None = None,
) -> Tuning | None:
    """Tune the hyper-parameters of a loss on the validation data.

    The ``search_space`` of the loss says which hyper-parameters are tuned, and in which ranges. Options in
    the name of the loss stay fixed. The first trial has the values of the recipe, or else the defaults of the
    loss. Only the chosen loss is evaluated on the test data.

    The call can be killed at any time. The same call then goes on, with the trials that were being trained.
    Several processes can work on one study: each makes the same call with the same output folder.

    Args:
        recipe: the recipe to follow, with the loss.
        output: the folder of the study and of all runs. Runs that are there are used, as `compare` and
            `sweep` do.
        trials: the number of trials of the whole study, of all processes and calls together.
        by: what to choose by; see `calibrant.training.sweep`.
        prune: stop trials early that are worse than half of the finished ones after as many epochs. Needs a
            criterion that training logs after each epoch: ``nll``, ``ece``, ``adaptive-ece``, ``accuracy``.
        data_root: the folder with the files of the data sets.
        resamples: bootstrap resamples for the intervals of the test figures.
        fabric: a launched Fabric.
        progress: show the progress on the terminal.
        report: called with a line before and after each trial.

    Returns:
        The result in the first process, None in the others.

    Raises:
        RecipeError: the loss has nothing to tune, the folder holds another study, or the recipe cannot be
            followed. It is raised before anything is trained.
        ValueError: the criterion or the number of trials cannot be used, or the processes have different
            recipes or data.
        TrainingError: no trial finished; see also `train`. A trial that diverges does not end the study.
        OSError: see `train`.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits-lt").override(["epochs=1", "loss=mbls[weight=0.2]"])
    >>> with TemporaryDirectory() as folder:
    ...     result = tune(recipe, folder, trials=2, resamples=10)
    >>> [trial.number for trial in result.trials], result.trials[0].values
    ([0, 1], {'margin': 8.0})
    """
    criterion = Criterion.parse(by)
    whole_number("trials", trials)
    place = Path(output)
    space, defaults = space_of(recipe)
    untuned = Setting("the default values", "", recipe, place)
    fabric = fabric or launched(recipe)
    say = report or (lambda _: None)
    with readable_errors(), quiet_optuna():
        agree({"recipe": recipe.to_toml(), "criterion": by, "number of trials": trials})
        (data,) = load_settings([untuned], data_root).values()
        _check_ends(recipe, space, data)
        together(lambda: check_for_several(place), "checking the output folder")
        check_setting(untuned, [recipe.seed], data, fabric)
        about = (place, recipe, criterion, space, defaults, data.fingerprint)
        study = together(lambda: Study(*about) if fabric.is_global_zero else None, "opening the study")
        tuner = _Tuner(recipe, place, criterion, defaults, data, fabric, progress, say, study)
        if prune and str(criterion) not in (*_LOGGED, recipe.select):
            say(f"{criterion} is not logged after each epoch: no trial is stopped early")
        try:
            while (claimed := tuner.claim(trials)) is not None:
                tuner.work_on(*claimed, trials, prune=prune)
        finally:
            if study is not None:
                study.give_up()
        return tuner.result(space, resamples)


def space_of(recipe: Recipe) -> tuple[tuple[Range, ...], dict[str, float]]:
    """The ranges that the loss of a recipe leaves to be searched, and the values without tuning.

    A range is widened if the recipe has a value outside.
    """
    if recipe.log_test:
        raise RecipeError(
            "tuning does not log test figures: only the chosen loss is evaluated on the test data"
        )
    loss = Choice.parse(recipe.loss)
    kind = LOSSES[loss.name]
    if not kind.search_space:
        tunable = ", ".join(key for key, each in LOSSES.items() if each.search_space)
        raise RecipeError(f"loss {loss.name} has no hyper-parameters to tune; losses that have: {tunable}")
    space = tuple(each for each in kind.search_space if each.name not in loss.options)
    if not space:
        raise RecipeError(f"loss {loss} leaves nothing to tune: every hyper-parameter with a range is given")
    parameters, own = kind.hyperparameters(), recipe.losses.get(loss.name, {})
    values = {each.name: float(own.get(each.name, parameters[each.name].default)) for each in space}
    widened = []
    for name, low, high, log in space:
        low, high = min(low, values[name]), max(high, values[name])
        widened.append(Range(name, low, high, log and low > 0))
    return tuple(widened), values


def _with(recipe: Recipe, values: Mapping[str, float]) -> Recipe:
    return replace(recipe, loss=str(Choice.parse(recipe.loss).with_options(values)))


def _check_ends(recipe: Recipe, space: Sequence[Range], data: DataSets) -> None:
    """Refuse fixed options that do not go together with the ends of the ranges."""
    for ends in product(*((each.low, each.high) for each in space)):
        values = {each.name: end for each, end in zip(space, ends, strict=True)}
        try:
            _with(recipe, values).loss_for(data)
        except RecipeError as error:
            written = ", ".join(f"{name}={value:g}" for name, value in values.items())
            raise RecipeError(f"loss {recipe.loss} cannot be tuned: with {written}, {error}") from None


@dataclass
class _Tuner:
    """Works on the trials of a study. The first process has the study, the others follow it."""

    recipe: Recipe
    output: Path
    criterion: Criterion
    defaults: Mapping[str, float]
    data: DataSets
    fabric: Fabric
    progress: bool
    say: Callable[[str], None]
    study: Study | None
    waited: bool = False
    methods: dict[int, Method] = field(default_factory=dict)

    def setting(self, number: int, values: Mapping[str, float]) -> Setting:
        """What a trial trains. The default values are not written, so that their run is that of the loss."""
        recipe = self.recipe if values == self.defaults else _with(self.recipe, values)
        return Setting(Trial(number, values, recipe.loss, "finished").name, "", recipe, self.output)

    def claim(self, trials: int) -> tuple[int, dict[str, float]] | None:
        """The next trial, of all processes together; None if every trial has ended.

        It waits for trials that other processes work on, and takes over those of processes that end.
        """

        def attempt() -> tuple[tuple[int, dict[str, float]] | None, list[int]]:
            if self.study is None:
                return None, []
            found = self.study.claim(trials)
            return found, self.study.unfinished(trials) if found is None else []

        while True:
            found: tuple[int, dict[str, float]] | None
            found, others = gather(together(attempt, "asking for the next trial"))[0]
            if found is not None or not others:
                return found
            if not self.waited:
                self.waited = True
                numbers = ", ".join(map(str, others))
                self.say(f"waiting for trial {numbers}, which another process works on")
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)

    def work_on(self, number: int, values: dict[str, float], trials: int, *, prune: bool) -> None:
        """Train a trial and write down its result."""
        setting = self.setting(number, values)
        self.say(f"{setting.name} ({number + 1} of {trials})")
        reason = ""
        try:
            self._train(setting, stop_early=self._stop_early if prune else None)
        except DivergedError as error:
            reason = str(error)
        together(lambda: self._record(number, setting, reason), "writing down a trial")

    def _train(self, setting: Setting, **options: Any) -> None:
        shared: dict[str, Any] = {"fabric": self.fabric, "progress": self.progress}
        setting.train(self.recipe.seed, self.data, **shared, **options)

    def _logged(self, history: Sequence[Mapping[str, float]]) -> list[float]:
        """The criterion after each epoch; none if training does not log it."""
        column = f"validation_{str(self.criterion).replace('-', '_')}"
        return [row[column] for row in history if column in row]

    def _stop_early(self, history: Sequence[Mapping[str, float]]) -> bool:
        assert self.study is not None
        return self.study.report(self._logged(history))

    def _record(self, number: int, setting: Setting, reason: str) -> None:
        if self.study is None:
            return
        if reason:
            self.study.record("failed", reason=reason)
            self.say(f"trial {number} failed: {reason}")
        elif not is_finished(setting.folder(self.recipe.seed)):
            self.study.record("stopped")
            self.say(f"trial {number} was stopped early: it is worse than half of the finished trials")
        else:
            self.study.report(self._logged(setting.run(self.recipe.seed, self.data).history))
            value = self._value(self.method(number, setting))
            self.study.record("finished", value)
            text = METRICS[self.criterion.metric].text(value)
            self.say(f"trial {number}: {self.criterion.label} {text} on the validation data")

    def method(self, number: int, setting: Setting) -> Method:
        """The validation figures of a finished trial."""
        if number not in self.methods:
            self.methods[number] = setting.validated([self.recipe.seed], self.data)
        return self.methods[number]

    def _value(self, method: Method) -> float:
        alone = self._comparison("validation", [method])
        return self.criterion.figures(alone)[self.criterion.choose(alone)].mean

    def _comparison(self, part: str, methods: Sequence[Method]) -> Comparison:
        title = f"{self.recipe.name}, {part} data"
        return Comparison(title, (self.recipe.seed,), tuple(methods), self.data.dense)

    def result(self, space: Sequence[Range], resamples: int) -> Tuning | None:
        """Choose among the finished trials, and evaluate the chosen one on the test data."""
        records = gather(None if self.study is None else self.study.records())[0]
        settings = {each.number: self.setting(each.number, each.values) for each in records}
        finished = [each.number for each in records if each.outcome == "finished"]
        if not finished:
            raise TrainingError(f"no trial finished; trial {records[0].number} failed: {records[0].reason}")
        for number in finished:  # trains nothing, unless a run was deleted
            self._train(settings[number])
        if self.study is None:
            return None
        methods = {number: self.method(number, settings[number]) for number in finished}
        validation = self._comparison("validation", list(methods.values()))
        chosen = self.criterion.choose(validation)
        (best,) = [settings[number] for number in finished if settings[number].name == chosen]
        self.say(f"evaluating {chosen} on the test data")
        test = self._comparison("test", [best.tested([self.recipe.seed], self.data, resamples)])
        values = {number: self._value(method) for number, method in methods.items()}
        found = [
            replace(each, loss=settings[each.number].recipe.loss, value=values.get(each.number))
            for each in records
        ]
        title = f"{self.recipe.name}: {self.recipe.loss} tuned over {', '.join(each.name for each in space)}"
        return Tuning(title, space, self.criterion, tuple(found), validation, chosen, test)
