"""Chooses the calibrator of a run and fits it to the validation data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from calibrant.calibrators import Calibrator, Identity, Temperature, create_calibrator, rank
from calibrant.calibrators.base import UnchangedLabelsWarning
from calibrant.calibrators.streaming import Scaling
from calibrant.options import Choice, RecipeError
from calibrant.training.runs import Run, about_training, make_calibrator
from calibrant.warning import warn

_MANY = 1 << 22
"""The most validation logits to choose a calibrator by. Some calibrators are fitted to no more, either."""

_NONE_WANTED = "none was asked for"
NONE_BETTER = "no calibrator is better"
"""Why a run is not calibrated."""


def check_method(text: str) -> str:
    """Check a text that says how to calibrate: ``auto``, ``none``, or a calibrator with options."""
    if text not in ("auto", "none"):
        make_calibrator(Choice.parse(text))
    return text


def fitted_calibrator(run: Run, method: str) -> tuple[Calibrator, str]:
    """A calibrator fitted to the validation data of a run, and the reason if it is the identity.

    If the reason is that no temperature can be fitted, it is exactly that of `fitted_temperature`.

    ``method`` is as for `calibrant.training.bundle.write_bundle`. ``auto`` skips calibrators whose fit gives
    a warning, such as a temperature at its bound after few elements that are all predicted correctly. If the
    predictions are too large to be stored, it takes temperature scaling without a comparison.
    """
    if method not in ("auto", "none"):
        try:
            named = run.calibrator(method)
        except ValueError as error:
            raise RecipeError(
                f"calibrator {method} cannot be fitted to the validation data: {error}"
            ) from error
        assert named is not None
        return named, _NONE_WANTED if isinstance(named, Identity) else ""
    identity = _identity(run)
    if method == "none":
        return identity, _NONE_WANTED
    passed_over = ""
    try:
        for key, fit in _ranked(run):
            if key == Identity.key:
                unfit = "" if run.recipe.binary else fitted_temperature(run)[1]
                return identity, passed_over or unfit or NONE_BETTER
            with warnings.catch_warnings(record=True, action="always") as caught, about_training():
                found = fit()
            message = _first_serious(caught)
            if not message:
                for each in caught:
                    warn(str(each.message), each.category)
                return found, ""
            if key != Temperature.key:
                message = f"every better calibrator gives a warning ({key}: {message})"
            passed_over = passed_over or message
    except ValueError as error:
        warn(f"no calibrator was fitted to the validation data: {error}")
        return identity, f"no calibrator could be fitted ({error})"
    return identity, passed_over or "there are too few labelled validation data to compare calibrators"


def fitted_temperature(run: Run) -> tuple[Calibrator, str]:
    """Temperature scaling fitted to the validation data of a run, and if it means nothing, the reason."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = run.fitted(Temperature())
    return found, _first_serious(caught)


def _first_serious(caught: Iterable[warnings.WarningMessage]) -> str:
    """The first warning of a fit that spoils it, in one line; empty if there is none."""
    texts = (str(each.message) for each in caught if not issubclass(each.category, UnchangedLabelsWarning))
    return " ".join(next(texts, "").split())


def _identity(run: Run) -> Calibrator:
    outputs = run.recipe.outputs(run.data)
    identity = Identity()
    if run.recipe.binary:
        both = torch.arange(2, device="cpu").unsqueeze(1).expand(2, outputs)
        return identity.fit(torch.zeros(2, outputs, device="cpu"), both, binary=True)
    identity.fitted_to(torch.ones(outputs, device="cpu"))
    return identity


def _ranked(run: Run) -> Iterator[tuple[str, Callable[[], Calibrator]]]:
    """Calibrators and functions that fit them, from the best by cross-validated likelihood on.

    Of large data a part is compared. A calibrator that can learn batch by batch is then fitted to all of the
    data, another one to that part. Several labels share the method, and each has its own parameters.
    """
    batches, binary = run.predictions("validation"), run.recipe.binary
    if not isinstance(batches, list):
        yield Temperature.key, lambda: run.fitted(Temperature())
        return
    ((all_logits, all_labels),) = batches
    logits, labels = _part(all_logits, all_labels)
    parts = int((labels != -100).unsqueeze(1).flatten(1).any(1).sum())
    if parts < 2:  # nothing to compare by
        return
    rows = max(1, _MANY // all_logits[0].numel())
    chunks = list(zip(all_logits.split(rows), all_labels.split(rows), strict=True))
    for each in rank(logits, labels, folds=min(5, parts), binary=binary).candidates:
        if not each.acceptable:
            continue
        calibrator = create_calibrator(each.key)
        calibrator.class_names = run.class_names  # for warnings
        if logits is not all_logits and isinstance(calibrator, Scaling) and not binary:
            yield each.key, partial(calibrator.fit_batches, chunks)
        else:
            yield each.key, partial(calibrator.fit, logits, labels, binary=binary)


def _part(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """At most about `_MANY` logits and their labels: some pixels of each image, or some of the elements."""
    if logits.numel() <= _MANY:
        return logits, labels
    step = -(-logits.shape[0] * logits.shape[1] // _MANY)  # 1 for all but a huge number of images
    logits, labels = logits[::step], labels[::step]
    if logits.ndim == 2:
        return logits, labels
    logits, labels = logits.flatten(2), labels.flatten(1)
    count = min(labels.shape[1], max(1, _MANY // (logits.shape[0] * logits.shape[1])))
    # At random, because every n-th pixel may be of the same column. Pixels with a label come first.
    order = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    chosen = order.masked_fill(labels == -100, -1).topk(count, 1).indices
    each_class = chosen.unsqueeze(1).expand(-1, logits.shape[1], -1)
    return logits.gather(2, each_class), labels.gather(1, chosen)
