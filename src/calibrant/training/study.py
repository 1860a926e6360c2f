"""The study of `calibrant tune`: its trials, in a file that several processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from calibrant.extras import require

require("tune", "optuna", purpose="calibrant tune")

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from calibrant.evaluation.chosen import Outcome, Trial
from calibrant.evaluation.criterion import Criterion
from calibrant.losses.base import Range
from calibrant.options import RecipeError
from calibrant.training.lock import FolderLock
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import check_origin

FOLDER, JOURNAL = "study", "journal.log"

_RANDOM_TRIALS = 6
"""The number of trials before the sampler learns from them."""

TRIALS_BEFORE_PRUNING = 5
"""The number of finished trials that a trial must be compared with before it may be stopped early."""

_EPOCHS_BEFORE_PRUNING = 1 / 3  # of all epochs

_OUTCOMES: dict[TrialState, Outcome] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
}


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Without Optuna's lines about every study and trial."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


class Study:
    """An Optuna study in a folder. Processes that open the same folder share its trials.

    Of Optuna's storages, the journal file is the simplest that several processes can share: a kill can at
    worst cut off its last line, which is dropped at the next access. All access is under the lock of the
    folder. A process that works on a trial holds a lock of the trial, so that a trial whose process was
    killed is noticed at once, and the next process continues it.

    The values of a trial depend on the seed of the recipe, its number, and the trials that ended before it.
    In one process, a study that was killed and resumed is therefore equal to an undisturbed one.

    ``recipe`` has the loss with its fixed options, ``space`` the ranges to search, ``defaults`` the values of
    the first trial. ``fingerprint`` is that of the data. The study is in the folder ``study`` of ``output``.
    """

    def __init__(
        self,
        output: Path,
        recipe: Recipe,
        criterion: Criterion,
        space: Sequence[Range],
        defaults: Mapping[str, float],
        fingerprint: str,
    ) -> None:
        self.folder, self.recipe, self.space = output / FOLDER, recipe, space
        self.defaults = dict(defaults)
        self._trial: optuna.Trial | None = None
        self._claim: FolderLock | None = None
        about = {
            "recipe": recipe.to_toml(),
            "data": fingerprint,
            "criterion": str(criterion),
            "space": [list(each) for each in space],
        }
        with self._locked():
            self._study = self._opened(criterion)
            kept = self._study.user_attrs.get("about")
            if kept is None:
                self._study.set_user_attr("about", about)
            else:
                _check_same(output, kept, about, recipe)
            if not self._study.get_trials(deepcopy=False):
                self._study.enqueue_trial(self.defaults)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FolderLock(self.folder, "writing down a trial")
        while not lock.acquire():
            time.sleep(0.01)
        try:
            _drop_cut_off_line(self.folder / JOURNAL)
            yield
        finally:
            lock.release()

    def _opened(self, criterion: Criterion) -> optuna.Study:
        path = self.folder / JOURNAL
        epochs = self.recipe.epochs
        try:
            # A lock that does nothing between processes: all access is under a `FolderLock`, which the system
            # releases. Optuna's own locks are files that stay behind when a process is killed. Others wait 30
            # seconds and remove them, which can remove the lock of a process that is alive.
            backend = JournalFileBackend(str(path), lock_obj=Lock())  # type: ignore[arg-type]
            return optuna.create_study(
                storage=JournalStorage(backend),
                study_name="calibrant",
                direction="maximize" if criterion.higher_is_better else "minimize",
                pruner=optuna.pruners.MedianPruner(
                    TRIALS_BEFORE_PRUNING, n_warmup_steps=max(1, int(epochs * _EPOCHS_BEFORE_PRUNING))
                ),
                load_if_exists=True,
            )
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            raise RecipeError(
                f"{path} is damaged, or is not the file of a study; delete the folder {self.folder} and give "
                "the same command again, which uses the finished runs"
            ) from error

    def claim(self, trials: int) -> tuple[int, dict[str, float]] | None:
        """Take the next of so many trials to work on, until `record` or `give_up`: its number and values.

        None if there is none that no other process works on.
        """
        with self._locked():
            known = self._study.get_trials(deepcopy=False)
            begun = [trial for trial in known if trial.state is not TrialState.WAITING]
            left = [trial.number for trial in begun if trial.state is TrialState.RUNNING]
            number = next((each for each in left if each < trials and self._acquired(each)), None)
            if number is None and len(begun) >= trials:
                return None
            seed = self.recipe.seed * 1_000_003 + (len(begun) if number is None else number)
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=_RANDOM_TRIALS, seed=seed % (1 << 32)
            )
            if number is None:
                trial = self._study.ask()
                self._acquired(trial.number)
            else:
                trial = optuna.Trial(self._study, known[number]._trial_id)
            self._trial = trial
            for name, low, high, log in self.space:  # values that the trial has already stay
                trial.suggest_float(name, low, high, log=log)
            return trial.number, self._values(trial.number, trial.params)

    def _values(self, number: int, sampled: Mapping[str, float]) -> dict[str, float]:
        """The values that a trial trains with: three digits, for readable names. More decide nothing."""
        if number == 0:
            return self.defaults
        return {name: float(f"{value:.3g}") for name, value in sampled.items()}

    def _acquired(self, number: int) -> bool:
        lock = FolderLock(self.folder / f"trial-{number}", f"trial {number}")
        if not lock.acquire():
            return False
        self._claim = lock
        return True

    def unfinished(self, trials: int) -> list[int]:
        """The first ``trials`` trials of the study that have not ended."""
        with self._locked():
            known = self._study.get_trials(deepcopy=False)
        return [trial.number for trial in known[:trials] if not trial.state.is_finished()]

    def report(self, values: Sequence[float]) -> bool:
        """Write down the criterion after each epoch so far; return whether the trial is a poor one."""
        trial = self._working_on()
        with self._locked():
            frozen: FrozenTrial = self._study.get_trials(deepcopy=False)[trial.number]
            for epoch, value in enumerate(values, 1):
                if epoch not in frozen.intermediate_values:
                    trial.report(value, epoch)
            # The defaults are the reference that the choice must not fall behind.
            return trial.number > 0 and bool(values) and trial.should_prune()

    def record(self, outcome: Outcome, value: float | None = None, reason: str = "") -> None:
        """End the trial that this process works on."""
        trial = self._working_on()
        (state,) = [state for state, name in _OUTCOMES.items() if name == outcome]
        with self._locked():
            if reason:
                trial.set_user_attr("reason", reason)
            self._study.tell(trial.number, value, state, skip_if_finished=True)
        self.give_up()

    def give_up(self) -> None:
        """Leave the trial that this process works on to others, if there is one and it has not ended."""
        if self._claim is not None:
            self._claim.release()
        self._trial = self._claim = None

    def _working_on(self) -> optuna.Trial:
        assert self._trial is not None, "no trial is claimed"
        return self._trial

    def records(self) -> list[Trial]:
        """The trials that have ended, without their value, and under the name of the loss that is tuned."""
        with self._locked():
            known = self._study.get_trials(deepcopy=False)
        return [
            Trial(
                trial.number,
                self._values(trial.number, trial.params),
                self.recipe.loss,
                _OUTCOMES[trial.state],
                epochs=tuple(value for _, value in sorted(trial.intermediate_values.items())),
                reason=str(trial.user_attrs.get("reason", "")),
            )
            for trial in known
            if trial.state in _OUTCOMES
        ]


def _check_same(output: Path, kept: Any, about: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a study of another recipe, other data, another criterion or other ranges."""
    name = f"{FOLDER}/{JOURNAL}"
    check_origin(output, name, kept, recipe, about["data"])
    for key, what in (("criterion", "is chosen by"), ("space", "has the ranges")):
        if kept.get(key) != about[key]:
            raise RecipeError(
                f"the study in {output / name} {what} {kept.get(key)}, not {about[key]}; choose another "
                "output folder, or delete this one"
            )


def _drop_cut_off_line(path: Path) -> None:
    """Remove the end of a file after its last line, left by a process that was killed in a write."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
