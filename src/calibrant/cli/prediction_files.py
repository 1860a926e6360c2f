"""Read, evaluate and calibrate files of predictions, with progress bars; write and print evaluations."""

from __future__ import annotations

import filecmp
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial, reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

import calibrant.evaluation
from calibrant.atomic import replace_file
from calibrant.calibrators import Calibrator
from calibrant.calibrators.storage import other_classes
from calibrant.cli.program import foreseen, say
from calibrant.cli.terminal import progress_bars
from calibrant.ensembles import Diversity
from calibrant.evaluation import Evaluation
from calibrant.evaluation.notes import data_notes, pixels_note, predicts_the_other_class
from calibrant.predictions import CHUNK, BadFileError, PredictionFile, batches_of, open_ensemble
from calibrant.printable import first_few
from calibrant.processes import Workers
from calibrant.warning import ProbabilitiesWarning, warn

Batch = tuple[Tensor, Tensor]

EXACT_LIMIT = 1 << 30
"""The most bytes of logits that are loaded into memory by default."""

_FEW = 4  # the most weights in a line of text
_MOST_REPEATED, _FEWEST_SHARED = 0.1, 10


def load(file: PredictionFile, stream: bool | None = None) -> Batch | None:
    """All predictions; None if they are to be streamed, by default if they are too large."""
    if file.size > EXACT_LIMIT if stream is None else stream:
        return None
    with progress_bars() as progress, errors_of(file):
        reading = progress.add_task(f"{file.name}: reading", total=file.rows)
        return file.load(lambda rows: progress.advance(reading, rows))


class Passes:
    """The batches of a file, read anew in each of several passes, with a progress bar for each.

    The logits are calibrated if there is a calibrator. ``elements`` is the number of elements that were not
    ignored in the latest pass.
    """

    def __init__(
        self, file: PredictionFile, progress: Progress, purpose: str, calibrator: Calibrator | None = None
    ) -> None:
        self.file, self.progress, self.purpose = file, progress, purpose
        self.calibrator, self.elements = calibrator, 0
        self.task, self.passes = progress.add_task(f"{file.name}: {purpose}", total=file.rows), 0

    def __iter__(self) -> Iterator[Batch]:
        self.passes, self.elements = self.passes + 1, 0
        description = f"{self.file.name}: {self.purpose}, pass {self.passes}"
        self.progress.reset(self.task, total=self.file.rows, description=description)
        with closing(self.file.batches()) as batches:
            for logits, labels in batches:
                self.elements += int((labels != self.file.ignore_index).sum())
                yield calibrate_batch(self.calibrator, self.file, logits, labels), labels
                self.progress.advance(self.task, len(labels))


@contextmanager
def errors_of(file: PredictionFile) -> Iterator[None]:
    """Let errors and warnings about the data name their file."""
    show = warnings.showwarning

    def show_with_file(message: Warning | str, *about: Any) -> None:
        advice = ""
        if isinstance(message, ProbabilitiesWarning):
            advice = (
                "; in a file, name the array probabilities, or the columns of a table probability_<class>"
            )
        show(f"{file.path}: {message}{advice}", *about)

    try:
        with warnings.catch_warnings():
            for kind in () if sys.warnoptions else (UserWarning, RuntimeWarning):
                warnings.simplefilter("always", kind)
            warnings.showwarning = show_with_file  # type: ignore[assignment]
            yield
    except BadFileError:
        raise
    except ValueError as problem:
        if not foreseen(problem):
            raise
        raise BadFileError(file.path, str(problem)) from problem


def evaluate_file(
    file: PredictionFile,
    name: str,
    loaded: Batch | None,
    options: dict[str, Any],
    calibrator: Calibrator | None = None,
) -> Evaluation:
    """Evaluate loaded predictions, or stream the file, after applying a calibrator if there is one."""
    options = {**options, "name": name, "class_names": file.class_names}
    checked = calibrator is None and file.num_classes == (1 if file.binary else 2)
    with progress_bars() as progress, errors_of(file):
        if loaded is not None:
            resampling = progress.add_task(f"{name}: resampling", total=options["resamples"])
            evaluation = calibrant.evaluation.evaluate(
                calibrate_batch(calibrator, file, *loaded),
                loaded[1],
                **options,
                progress=lambda done, total: progress.update(resampling, completed=done, total=total),
            )
            if checked:
                _warn_if_swapped(file, _sums_by_label(file, *loaded), evaluation)
            return evaluation
        reading = progress.add_task(f"{name}: reading", total=file.rows)
        sums = torch.zeros(2, 3, dtype=torch.float64, device="cpu")

        def batches(part: PredictionFile) -> Iterator[Batch]:
            with closing(part.batches(all_ignored=True)) as found:
                for logits, labels in found:
                    if checked:
                        sums.add_(_sums_by_label(file, logits, labels))
                    yield calibrate_batch(calibrator, file, logits, labels), labels
                    progress.advance(reading, len(labels))

        evaluation = calibrant.evaluation.evaluate_parts(
            file.parts, batches, num_classes=file.num_classes, **options
        )
        if checked:
            _warn_if_swapped(file, sums, evaluation)
        return evaluation


def _sums_by_label(file: PredictionFile, logits: Tensor, labels: Tensor) -> Tensor:
    """For labels 0 and 1: the number of elements, and sums of the probability of 1 and of its square."""
    if file.binary:
        logits, labels = logits[:, 0], labels[:, 0]
    else:
        logits = logits[:, 1] - logits[:, 0]
    yes = logits.double().sigmoid()
    parts = [yes[labels == label] for label in (0, 1)]
    sums = [[len(part), part.sum(), part.square().sum()] for part in parts]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def _warn_if_swapped(file: PredictionFile, sums: Tensor, evaluation: Evaluation) -> None:
    """Warn if the probability of the second class, or of yes, is clearly higher where it is not true.

    If the predictions show it as well, the notes on the evaluation say so.
    """
    count, total, squares = sums.unbind(1)
    if file.ignore_index in (0, 1) or count.min() < 2 or predicts_the_other_class(evaluation):
        return
    mean = total / count
    noise = ((squares / count - mean.square()).clamp_min(0) / (count - 1)).sum().sqrt()
    if mean[0] - mean[1] > 5 * noise + 1e-6:
        no, yes = file.class_names or (("no", "yes") if file.binary else ("class 0", "class 1"))
        warn(
            f"elements labelled {no!r} have a higher mean probability of {yes!r} than those labelled "
            f"{yes!r}: scores or labels may be swapped"
        )


def evaluate_in_workers(
    file: PredictionFile,
    name: str,
    options: dict[str, Any],
    *,
    jobs: int | None,
    on: Workers,
) -> Evaluation:
    """Stream the parts of a set in several processes."""
    parts = file.parts
    with progress_bars() as progress, errors_of(file):
        reading = progress.add_task(f"{name}: reading", total=file.rows)
        return calibrant.evaluation.evaluate_parts(
            [str(part.path.resolve()) for part in parts],  # a worker of Ray may have another working folder
            partial(batches_of, ignore_index=file.ignore_index, binary=file.binary),
            jobs=jobs,
            on=on,
            progress=lambda done, total: progress.advance(reading, parts[done - 1].rows),
            num_classes=file.num_classes,
            name=name,
            class_names=file.class_names,
            **options,
        )


def evaluate_ensemble(
    members: Sequence[PredictionFile], options: dict[str, Any], stream: bool | None = None
) -> tuple[Evaluation, str]:
    """Evaluate the mean probabilities of several files; also a sentence on how much the files differ."""
    reading: dict[str, Any] = {"ignore_index": members[0].ignore_index, "binary": members[0].binary}
    found: list[Diversity] = []  # of each batch

    def watch(logits: Tensor, labels: Tensor) -> None:
        found.append(Diversity.of(logits, labels, **reading))

    pooled = open_ensemble([member.path for member in members], watch=watch, **reading)
    evaluation = evaluate_file(pooled, f"ensemble of {len(members)}", load(pooled, stream), options)
    means = reduce(add, found).means()
    return evaluation, (
        f"Members of the ensemble disagree in {100 * means['disagreement']:.2f} % of all pairs; mutual "
        f"information {means['mutual_information']:.4f} nats of an entropy of {means['entropy']:.4f}."
    )


def calibrate_batch(
    calibrator: Calibrator | None, file: PredictionFile, logits: Tensor, labels: Tensor
) -> Tensor:
    """The logits, calibrated if there is a calibrator; an error if they then have no softmax."""
    if calibrator is None:
        return logits
    # In parts, because some methods need several times the memory of the logits.
    rows = max(1, CHUNK // prod(logits.shape[1:]))
    with torch.no_grad():
        calibrated = torch.cat([calibrator(part) for part in torch.split(logits, rows)])
    # NaN, plus infinity, and rows of nothing but minus infinity have no softmax.
    # Minus infinity alone is a single logit of probability 0.
    total = calibrated.clamp_min(-1e30) if file.binary else calibrated.logsumexp(1)
    if not total[labels != file.ignore_index].isfinite().all():
        raise BadFileError(
            file.path,
            f"has infinite or too large logits: {calibrator.key} cannot turn them into probabilities",
        )
    return calibrated


def check_class_names(file: PredictionFile, names: Sequence[str] | None, source: str) -> None:
    """Raise an error if a file has other classes than a calibrator's, which are called ``names``."""
    problem = other_classes(file.class_names, names)
    if problem is not None:
        raise BadFileError(file.path, f"has other classes than {source}: {problem}")


def check_calibrator(file: PredictionFile, calibrator: Calibrator, source: Path) -> None:
    """Raise an error if a file has other classes or labels than those that a calibrator was fitted to."""
    what, fitted = "classes", calibrator.num_classes
    if calibrator.binary:
        what, fitted = "labels", len(calibrator.labels)
    if file.num_classes != fitted:
        found, expected = (
            f"{number} {what}" + (f" ({first_few(names)})" if names else "")
            for number, names in ((file.num_classes, file.class_names), (fitted, calibrator.class_names))
        )
        raise BadFileError(file.path, f"has {found}, but {source.name} was fitted to {expected}")
    check_class_names(file, calibrator.class_names, source.name)


def same_content(one: PredictionFile, other: PredictionFile) -> bool:
    """Whether two names stand for the same data: the same files, or copies of them."""
    return len(one.files) == len(other.files) and all(
        path.samefile(copy) or filecmp.cmp(path, copy, shallow=False)
        for path, copy in zip(one.files, other.files, strict=True)
    )


def shared_rows(one: Batch, other: Batch) -> int:
    """How many rows of logits are also in other predictions, if chance does not explain it; else 0."""
    rows, known = _hashes(one[0]), _hashes(other[0])
    repeated = len(rows) - len(torch.unique(rows))
    if repeated > _MOST_REPEATED * len(rows):  # those of trees are often equal
        return 0
    by_chance = 2 * repeated * len(known) / len(rows)  # as often as within the rows themselves
    shared = int(torch.isin(rows, known).sum())
    return shared if shared >= min(_FEWEST_SHARED, len(rows)) and shared > 4 * by_chance else 0


def _hashes(logits: Tensor) -> Tensor:
    """A whole number for each row, equal for equal rows, ``(N,)``."""
    rows = logits.reshape(len(logits), -1)
    generator = torch.Generator().manual_seed(0)
    odd = 2 * torch.randint(2**62, rows.shape[1:], generator=generator, device="cpu") + 1
    step = max(1, 2**22 // len(odd))
    return torch.cat([(part.double().view(torch.int64) * odd).sum(1) for part in torch.split(rows, step)])


def check_same_classes(first: PredictionFile, other: PredictionFile) -> None:
    """Raise an error if two files cannot be compared, because their classes differ."""
    if other.num_classes != first.num_classes:
        what = "labels" if first.binary else "classes"
        raise BadFileError(
            other.path, f"has {other.num_classes} {what}, but {first.path.name} has {first.num_classes}"
        )
    names, expected = other.class_names, first.class_names
    # Different names may be translations. The same names in another order are other classes.
    if names and expected and names != expected and set(names) == set(expected):
        raise BadFileError(other.path, f"has the classes of {first.path.name} in another order")


def write_evaluations(
    evaluations: Sequence[Evaluation], report: Path | None, json: Path | None, fitted: str = ""
) -> None:
    """Write the report and the JSON file, if asked for; ``fitted`` as in `write_report`."""
    if json is not None:
        listed = ",\n".join(evaluation.to_json() for evaluation in evaluations)
        replace_file(json, f"[{listed}]\n".encode())
    if report is not None:
        from calibrant.reports.page import write_report

        write_report(evaluations, report, fitted=fitted)


def print_evaluations(evaluations: Sequence[Evaluation], *, wide: bool = False) -> None:
    """Print one evaluation, or a comparison of several; ``wide`` as for `print_table`."""
    from rich.console import Console

    from calibrant.reports.table_builders import evaluation_note, evaluation_table, with_groups
    from calibrant.reports.tables import print_table

    if len(evaluations) > 1:
        names = [evaluation.name for evaluation in evaluations]
        table = with_groups(evaluation_table(evaluations, names, against="first"), evaluations)
        print_table(table, evaluation_note(evaluations), models_across=True, wide=wide)
        notes = [pixels_note(evaluations)] if any(each.dense for each in evaluations) else []
        for note in filter(None, [*notes, *data_notes(evaluations)]):
            say(f"Note: {note}")
    else:
        # In a file or a pipe nothing limits the width, and folded columns would be hard to read.
        width = None if sys.stdout.isatty() and not wide else 10_000
        Console(width=width, highlight=False).print(evaluations[0])


def in_words(calibrator: Calibrator) -> str:
    """The key of a calibrator, with what it learned if that is one number or a few weights."""
    if calibrator.binary:
        labels = list(calibrator.labels)
        return f"{calibrator.key} of each label" if len(labels) > 1 else in_words(labels[0])  # type: ignore[arg-type]
    learned = []
    temperature, weights = (getattr(calibrator, name, None) for name in ("temperature", "weights"))
    if isinstance(temperature, Tensor) and temperature.numel() == 1:
        learned.append(f"T = {float(temperature):.4g}")
    if isinstance(weights, Tensor) and weights.ndim == 1 and len(weights) <= _FEW:
        learned.append("weights " + ", ".join(f"{weight:.2g}" for weight in weights.tolist()))
    return calibrator.key + (f" ({'; '.join(learned)})" if learned else "")
