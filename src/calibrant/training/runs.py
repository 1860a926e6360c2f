"""Finished runs: their models, predictions, and test results before and after calibration."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from calibrant.atomic import replace_file
from calibrant.calibrators import CALIBRATORS, Calibrator, Temperature, create_calibrator
from calibrant.calibrators.streaming import Scaling
from calibrant.calibrators.temperature import ALL_RIGHT, CHECK_ORDER, ChanceWarning
from calibrant.evaluation import Evaluation, Evaluator, evaluate
from calibrant.inference import predictions_on
from calibrant.layout import as_decisions
from calibrant.metrics import METRICS
from calibrant.metrics.catalogue import DEFINITIONS
from calibrant.metrics.ood import detection as detect
from calibrant.metrics.ood import entropy, roc
from calibrant.options import Choice, RecipeError, check_options
from calibrant.predictions import open_predictions, write_predictions
from calibrant.training import run_folder
from calibrant.training.batches import evaluation_batches
from calibrant.training.data import DataSets, Split, load_data
from calibrant.training.lock import FolderLock
from calibrant.training.models import PREFIXES, create_model
from calibrant.training.other_data import load_other
from calibrant.training.recipe import Recipe
from calibrant.warning import warn

Part = Literal["train", "validation", "test"]
Predictions = tuple[Tensor, Tensor]

DIVERGED = (
    "the training diverged, or learned nothing yet: try another learning rate, a smaller one if the loss rose"
)
"""What to do where the logits of a run tell nothing about the labels."""

ALL_VALIDATED = "every validation label is predicted correctly, so nothing says how confident to be"
"""Why nothing can be learned from the validation data of a run about its confidences."""

_STARTING_WEIGHTS = ("weights", "replace_head", "pretrained", "encoder_weights")
"""Options of models that say which weights training started from."""

BEFORE = ""
"""The key of results without a calibrator, beside those by the name of a calibrator."""


@dataclass(frozen=True)
class Result:
    """The test results of a run, before calibration or after it."""

    evaluation: Evaluation  # the figures
    temperature: float | None = None  # that of the calibrator `Temperature`; of several labels, their mean


@dataclass(frozen=True)
class Detected:
    """The detection of out-of-distribution data by the entropy."""

    auroc: float  # the area under the ROC curve
    curve: tuple[float, ...]  # true positive rates at evenly spaced false positive rates from 0 to 1


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        folder: the folder that `calibrant.training.train` wrote.
        data_root: the folder with the files of the data sets.
        loaded: the data, if they are loaded already.

    >>> from tempfile import TemporaryDirectory
    >>> from calibrant.training import train
    >>> with TemporaryDirectory() as folder:
    ...     run = Run(train(Recipe.load("digits-lt").override(["epochs=1"]), folder))
    ...     ((logits, labels),) = run.predictions("test")
    >>> logits.shape, labels.shape
    (torch.Size([540, 10]), torch.Size([540]))
    """

    folder: Path
    data_root: Path | None = None
    loaded: DataSets | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not (self.folder / run_folder.RECIPE).is_file():
            raise RecipeError(f"{self.folder} is not the folder of a run: it has no {run_folder.RECIPE}")
        if not run_folder.is_finished(self.folder):
            holder = FolderLock(self.folder).holder()
            advice = f"{holder} works on it" if holder else "give the command that trains it again"
            raise RecipeError(f"the run in {self.folder} is not finished; {advice}")
        fingerprint = None if self.loaded is None else self.loaded.fingerprint
        run_folder.check_finished(self.folder, self.recipe, fingerprint)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return Recipe.load(self.folder / run_folder.RECIPE)

    @cached_property
    def data(self) -> DataSets:
        """The training, validation and test data."""
        if self.loaded is not None:
            return self.loaded
        try:
            data = load_data(self.recipe.data, self.data_root)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the run in {self.folder} needs its data: {error}") from error
        run_folder.check_data(self.folder, self._result["data"], data.fingerprint)
        return data

    @cached_property
    def model(self) -> nn.Module:
        """The network with the weights that were kept, in evaluation mode, on the best device."""
        weights = self._file(run_folder.WEIGHTS)
        if weights is None:
            raise RecipeError(f"the run in {self.folder} has no {run_folder.WEIGHTS}; train it again")
        choice = without_starting_weights(self.recipe.model)
        data = self.data
        where, stored = f"the run in {self.folder}", load_tensors(weights.read_bytes())
        model = trained_model(choice, self.recipe.outputs(data), data.about, stored, where)
        return model.to("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def history(self) -> list[dict[str, float]]:
        """The log row of each epoch."""
        return list(self._result["history"])

    @property
    def epoch(self) -> int:
        """The epoch whose weights were kept, from 1 on."""
        return int(self._result["epoch"])

    @cached_property
    def _result(self) -> dict[str, Any]:
        return run_folder.result_of(self.folder)

    def _file(self, name: str) -> Path | None:
        """The path of a file, if the run wrote it and it is still there; a changed one is refused."""
        path, expected = self.folder / name, self._result["files"].get(name)
        return run_folder.check_file(path, expected) if expected and path.is_file() else None

    @cached_property
    def learned(self) -> dict[str, Tensor]:
        """The learned state of an adaptive loss after each epoch, ``(epochs, …)``, by name."""
        path = self._file(run_folder.LEARNED)
        return {} if path is None else load_tensors(path.read_bytes())

    @cached_property
    def bins(self) -> dict[str, Tensor]:
        """Bins of confidence after each epoch, ``(epochs, …)``; see `calibrant.training.bins.epoch_bins`."""
        path = self._file(run_folder.BINS)
        return {} if path is None else load_tensors(path.read_bytes())

    def predictions(self, part: Part) -> Iterable[Predictions]:
        """Batches of logits and labels of a part, which can be iterated more than once; -100 is ignored."""
        stored = self._file(f"{part}.npz")
        if stored is not None:
            return [open_predictions(stored, binary=self.recipe.binary).load()]
        return self._predicted(getattr(self.data, part))

    @cached_property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes or labels, from stored predictions if there are any."""
        stored = self._file("validation.npz")
        if stored is None:
            return self.data.class_names
        return open_predictions(stored, binary=self.recipe.binary).class_names

    def as_classes(self, logits: Tensor, labels: Tensor) -> Predictions:
        """Logits and labels of classes; the decisions of a binary run have two classes each."""
        return as_decisions(logits, labels) if self.recipe.binary else (logits, labels)

    def validation(self) -> dict[str, Result]:
        """The validation results before and after temperature scaling, as `results`; no intervals."""
        return self._results_on(self.predictions("validation"), (BEFORE, "temperature"), 0)

    def _predicted(self, split: Split) -> Predicted:
        batch_size = self.recipe.evaluation_batch_size or self.recipe.batch_size
        return Predicted(self.model, split, batch_size, self.data.ignore_index)

    def predict(self, part: Part, output: Path, *, on: Choice | None = None) -> int:
        """Write logits and labels to a file for `calibrant evaluate`.

        Args:
            part: the part of the data.
            output: the file to write.
            on: another data set with the same classes; by default the data of the run.

        Returns:
            The number of rows.
        """
        if on is None:
            split, batches = self._present(part), self.predictions(part)
        else:
            split = load_other(on, self.recipe, self.data, self.data_root, part=part, same_classes=True)
            batches = self._predicted(split)
        write_predictions(output, batches, len(split), self.data.class_names)
        return len(split)

    def _present(self, part: Part) -> Split:
        split: Split = getattr(self.data, part)
        if len(split) == 0:
            raise RecipeError(f"data {self.recipe.data.name!r} have no {part} part")
        return split

    def results(
        self, calibrators: Sequence[str], *, resamples: int = 1000, kde: bool = False
    ) -> dict[str, Result]:
        """The test results before and after each calibrator, by its name; `BEFORE` is the first key.

        Calibrators are fitted to the validation data. Results are stored in the folder of the run. Later
        calls read them and compute only what is missing.

        Args:
            calibrators: keys of `CALIBRATORS`, with options in brackets.
            resamples: bootstrap resamples for the intervals.
            kde: also compute `kde_ece`, if the predictions fit into memory.
        """
        path = self.folder / "evaluation.json"
        origin = {
            "run": run_folder.hash_of(self.folder / run_folder.RESULT),
            "resamples": resamples,
            "definitions": DEFINITIONS,
        }
        found: dict[str, Result] = {}
        # Results that are damaged, were changed, are of another run or follow other definitions are computed
        # anew; so are those that lack new metrics, if there is something left to compute them from.
        with suppress(FileNotFoundError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            plain = json.loads(path.read_text(encoding="utf-8"))
            complete = plain["metrics"] == list(METRICS) or not self._can_predict
            if plain.pop("sha256") == content_hash(plain) and plain.items() >= origin.items() and complete:
                found = {
                    key: Result(Evaluation.from_dict(each["evaluation"]), each["temperature"])
                    for key, each in plain["results"].items()
                    if each.get("definition", 1) == _definition(key)
                }
        wanted = (BEFORE, *calibrators)
        missing = [key for key in wanted if key not in found or (kde and _lacks_kde(found[key].evaluation))]
        if missing:
            if path.is_file() and not self._can_predict:
                raise RecipeError(
                    f"{path} lacks {missing[0] or 'figures'} with {resamples} resamples, and without "
                    "predictions and weights they cannot be computed; ask for as many resamples as before, "
                    "use the version of calibrant that wrote it, or train the run again"
                )
            self._present("test")
            found |= self._results_on(self.predictions("test"), missing, resamples, kde=kde)
            results = {
                key: {
                    "evaluation": each.evaluation.to_dict(),
                    "temperature": each.temperature,
                    "definition": _definition(key),
                }
                for key, each in found.items()
            }
            plain = {**origin, "metrics": list(METRICS), "results": results}
            replace_file(path, json.dumps({**plain, "sha256": content_hash(plain)}, allow_nan=False).encode())
        return {key: found[key] for key in wanted}

    @property
    def _can_predict(self) -> bool:
        return any((self.folder / name).is_file() for name in ("test.npz", run_folder.WEIGHTS))

    def calibrator(self, key: str) -> Calibrator | None:
        """A calibrator fitted to the validation data, by its name and options; None for `BEFORE`."""
        if key not in self._calibrators:
            self._calibrators[key] = self.fitted(make_calibrator(Choice.parse(key))) if key else None
        return self._calibrators[key]

    @cached_property
    def _calibrators(self) -> dict[str, Calibrator | None]:
        return {}

    def fitted(self, calibrator: Calibrator) -> Calibrator:
        """The calibrator, fitted to the validation data."""
        batches = self.predictions("validation")
        calibrator.class_names = self.class_names  # for warnings
        # The labels of a run are in order, however little it has learned.
        with about_training(), warnings.catch_warnings(action="ignore", category=ChanceWarning):
            if isinstance(calibrator, Scaling) and not self.recipe.binary:
                return calibrator.fit_batches(batches)
            return calibrator.fit(*_joined(batches), binary=self.recipe.binary)

    def _results_on(
        self, batches: Iterable[Predictions], keys: Iterable[str], resamples: int, *, kde: bool = False
    ) -> dict[str, Result]:
        """The results on these predictions before and after calibrators, by their names."""
        counts, loss = self.data.class_counts, self.recipe.loss
        options: dict[str, Any] = {
            "binary": self.recipe.binary,
            "class_names": self.data.class_names,
            "class_counts": counts if counts and max(counts) > 2 * max(1, min(counts)) else None,
            "resamples": 0 if self.data.dense else resamples,  # the pixels of an image are not independent
        }
        found = {}
        for key in keys:
            calibrator = self.calibrator(key)
            options["name"] = f"{loss} + {key}" if key else loss
            if isinstance(batches, list):
                ((logits, labels),) = batches
                evaluation = evaluate(_calibrated(logits, calibrator), labels, kde=kde, **options)
            else:
                evaluator = Evaluator(self.recipe.outputs(self.data), **options)
                for logits, labels in batches:
                    evaluator.update(_calibrated(logits, calibrator), labels)
                evaluation = evaluator.compute(pooled=False)  # the other processes may have ended
            found[key] = Result(evaluation, temperature_of(calibrator))
        return found

    def metrics_on(self, split: Split, calibrators: Sequence[str]) -> dict[str, dict[str, float | None]]:
        """The metrics of other data before and after each calibrator, by its name, without intervals.

        The calibrators are fitted to the validation data of the run.
        """
        batches: Iterable[Predictions] = self._predicted(split)
        if not self.data.dense:
            batches = [_joined(batches)]
        found = self._results_on(batches, (BEFORE, *calibrators), 0)
        return {key: result.evaluation.metrics for key, result in found.items()}

    @torch.no_grad()
    def detected(self, outside: Split, calibrators: Sequence[str]) -> dict[str, Detected]:
        """The detection of another data set by the entropy, before and after each calibrator, by its name.

        The calibrators are fitted to the validation data of the run.
        """
        keys = (BEFORE, *calibrators)

        def scores(batches: Iterable[Predictions]) -> list[Tensor]:
            def of(logits: Tensor, labels: Tensor, key: str) -> Tensor:
                classes, labels = self.as_classes(_calibrated(logits, self.calibrator(key)), labels)
                return entropy(classes)[labels != -100].cpu()

            parts = [[of(logits, labels, key) for key in keys] for logits, labels in batches]
            return [torch.cat(each) for each in zip(*parts, strict=True)]

        pairs = zip(scores(self.predictions("test")), scores(self._predicted(outside)), strict=True)
        found = [Detected(detect(*pair).auroc, roc(*pair)) for pair in pairs]
        return dict(zip(keys, found, strict=True))


@dataclass(frozen=True)
class Predicted:
    """The logits and labels of a split; -100 is ignored. Every iteration computes them anew."""

    model: nn.Module
    split: Split
    batch_size: int
    ignore_index: int = -100

    def __iter__(self) -> Iterator[Predictions]:
        batches = evaluation_batches(self.split, batch_size=self.batch_size)
        for logits, labels in predictions_on(self.model, batches):
            yield logits.float(), run_folder.as_written(labels, self.ignore_index)


def without_starting_weights(choice: Choice) -> Choice:
    """A model without the options that say which weights training started from; they may be gone."""
    own = ":" in choice.name and choice.name.partition(":")[0] not in PREFIXES
    left_out = _STARTING_WEIGHTS[:2] if own else _STARTING_WEIGHTS
    return Choice(choice.name, {key: value for key, value in choice.options.items() if key not in left_out})


def trained_model(
    choice: Choice, num_classes: int, about: Mapping[str, Any], weights: dict[str, Tensor], where: str
) -> nn.Module:
    """A network with its trained weights, in evaluation mode.

    ``choice`` has no starting weights. ``about`` has facts about the data that the model may need. ``where``
    says where the weights come from, for errors.
    """
    model = create_model(choice.name, num_classes, about, **choice.options)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RecipeError(
            f"model {choice} does not take the weights of {where}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()


@contextmanager
def about_training() -> Iterator[None]:
    """Let warnings of a fit to validation data speak of the run: the labels are in order, and held out."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    for each in caught:
        text = str(each.message).replace(CHECK_ORDER, DIVERGED).replace(ALL_RIGHT, ALL_VALIDATED)
        warn(text, each.category)


def make_calibrator(choice: Choice) -> Calibrator:
    """A calibrator that is not fitted yet."""
    try:
        options = choice.options
        if choice.name in CALIBRATORS:
            kind = CALIBRATORS[choice.name]
            options = check_options(f"calibrator {choice.name!r}", options, kind.__init__)
        return create_calibrator(choice.name, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(str(error)) from error


def _calibrated(logits: Tensor, calibrator: Calibrator | None) -> Tensor:
    if calibrator is None:
        return logits
    result: Tensor = calibrator.to(logits.device)(logits)
    return result


def temperature_of(calibrator: Calibrator | None) -> float | None:
    """The temperature of a `Temperature`; None for others.

    Of several labels it is the mean of those that have one. Those in `unchanged` have none; None if all are.
    """
    if not isinstance(calibrator, Temperature):
        return None
    if calibrator.binary:
        fitted = [each for label, each in enumerate(calibrator.labels) if label not in calibrator.unchanged]
        return fmean(float(each.get_buffer("temperature")) for each in fitted) if fitted else None
    return float(calibrator.temperature)


def _joined(batches: Iterable[Predictions]) -> Predictions:
    """All logits and labels, on the CPU."""
    parts = [(logits.cpu(), labels.cpu()) for logits, labels in batches]
    return torch.cat([logits for logits, _ in parts]), torch.cat([labels for _, labels in parts])


def _lacks_kde(evaluation: Evaluation) -> bool:
    return evaluation.exact and evaluation.metrics["kde_ece"] is None


def _definition(key: str) -> int:
    """The number of a calibrator's definition, by its name and options; 1 for `BEFORE`."""
    return CALIBRATORS[Choice.parse(key).name].definition if key else 1


def content_hash(plain: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def folder_of(output: Path, loss: str, seed: int) -> Path:
    """The default folder for the run of a loss and a seed.

    >>> folder_of(Path("out"), "cals-alm[margin=6,penalty=p2]", 1).as_posix()
    'out/runs/cals-alm-margin=6-penalty=p2-seed1'
    """
    return output / "runs" / f"{plain_name(loss)}-seed{seed}"


def plain_name(text: str) -> str:
    """A text as the name of one folder: special characters become hyphens.

    >>> plain_name("../../my recipe"), plain_name("..")
    ('my-recipe', 'recipe')
    """
    name = "".join(character if character.isalnum() or character in "-_.=" else "-" for character in text)
    return name.strip("-").lstrip(".-") or "recipe"
