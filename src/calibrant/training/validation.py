"""Validates a network: figures on validation and test data, and predictions for any part of the data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators import Temperature
from calibrant.calibrators.temperature import ChanceBoundWarning, ChanceWarning
from calibrant.distributed import all_reduce, gather
from calibrant.histogram import Bins, ConfidenceHistogram, Outcomes
from calibrant.layout import arrange, as_decisions
from calibrant.metrics.catalogue import METRICS, Options
from calibrant.options import RecipeError
from calibrant.predictions import write_predictions
from calibrant.statistics import sum_dtype
from calibrant.training import TrainingError, run_folder
from calibrant.training.batches import evaluation_batches
from calibrant.training.bins import BINS
from calibrant.training.data import Split
from calibrant.training.fabric import MixedPrecision, Precision
from calibrant.training.setup import Parts


@dataclass(frozen=True, eq=False)
class ValidationSums:
    """The summed negative log-likelihood and the outcomes of validation or test data."""

    nll: Tensor  # the sum over the elements that are not ignored
    outcomes: Outcomes  # confidence and correctness of these elements
    # If binary, the probability of yes and whether it is yes: the ECEs are computed from these.
    yes: ConfidenceHistogram | None = None

    @classmethod
    def of(cls, logits: Tensor, target: Tensor, ignore_index: int, *, binary: bool = False) -> Self:
        """The sums over a batch; if binary, each logit is a decision of its own."""
        if binary:
            logits, target = as_decisions(logits, target)
        elements = arrange(logits, target, num_classes=logits.shape[1], ignore_index=ignore_index, soft=False)
        nll = F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
        yes = ConfidenceHistogram.of_outcomes(elements.positive, elements.labels == 1) if binary else None
        return cls(nll.sum(dtype=sum_dtype(logits.device)), Outcomes.of(elements), yes)

    def __add__(self, other: Self) -> Self:
        yes = self.yes + other.yes if self.yes is not None and other.yes is not None else None
        return type(self)(self.nll + other.nll, self.outcomes + other.outcomes, yes)

    def all_reduce(self) -> Self:
        """The sums of all processes."""
        yes = None if self.yes is None else self.yes.all_reduce()
        return type(self)(all_reduce(self.nll), self.outcomes.all_reduce(), yes)

    @property
    def mean_nll(self) -> float:
        """The mean negative log-likelihood."""
        return float(self.nll) / float(self.outcomes.samples)

    def figures(self, part: str) -> dict[str, float]:
        """Accuracy, NLL, ECE and adaptive ECE; ``part`` names the data in an error message."""
        if self.outcomes.samples == 0:
            raise TrainingError(f"the {part} data have no element that is not ignored")
        forecasts = self.outcomes if self.yes is None else self.yes
        ece, adaptive_ece = (
            float(METRICS[name].function(forecasts, Options())) for name in ("ece", "adaptive_ece")
        )
        pooled = self.outcomes.equal_width(1)
        accuracy = float(pooled.correct.sum() / pooled.count.sum())
        return {"accuracy": accuracy, "nll": self.mean_nll, "ece": ece, "adaptive_ece": adaptive_ece}


@torch.no_grad()
def validate(parts: Parts, *, observe: bool, select: str = "last") -> tuple[dict[str, float], Bins]:
    """Compute accuracy, NLL and ECEs on the validation data of all processes, and their bins of equal mass.

    With ``observe``, the loss observes these data, so that it can adapt afterwards. The criterion
    ``nll-after-temperature`` adds a figure of that name, unless the NLL is not finite.
    """
    parts.loss.forget()
    data = parts.data
    kept: list[tuple[Tensor, Tensor]] = []

    def visit(logits: Tensor, target: Tensor) -> None:
        if observe:
            parts.loss.observe(logits, target)
        if select == "nll-after-temperature":
            if not kept and logits[0].numel() * 4 * len(data.validation) > run_folder.STORED:
                raise RecipeError(
                    "select = 'nll-after-temperature' keeps the validation logits, which take more than "
                    f"{run_folder.STORED >> 30} GiB here; choose 'nll'"
                )
            kept.append((logits.cpu(), target.cpu()))

    sums = _sums(parts, data.validation, visit)
    figures = sums.figures("validation")
    if select == "nll-after-temperature" and math.isfinite(figures["nll"]):
        batches = [batch for process in gather(kept) for batch in process]
        figures[select] = _nll_after_temperature(batches, data.ignore_index, binary=parts.recipe.binary)
    return figures, sums.outcomes.equal_mass(BINS)


@torch.no_grad()
def measure_test(parts: Parts) -> tuple[dict[str, float], Bins]:
    """Compute the same for the test data. These figures are for the log only."""
    sums = _sums(parts, parts.data.test)
    return sums.figures("test"), sums.outcomes.equal_mass(BINS)


@torch.no_grad()
def observe_part(parts: Parts, part: Split) -> None:
    """Let the loss observe a part of the data, so that it can adapt afterwards."""
    parts.loss.forget()
    _broadcast_buffers(parts)
    for logits, target in predictions(parts, part):
        parts.loss.observe(logits, target)


def _sums(
    parts: Parts, split: Split, visit: Callable[[Tensor, Tensor], None] = lambda logits, target: None
) -> ValidationSums:
    """The sums over a split in all processes; each batch of this process is passed to ``visit``."""
    _broadcast_buffers(parts)
    ignore_index, binary = parts.data.ignore_index, parts.recipe.binary
    # An empty batch first: a process without data takes part in the sum all the same.
    empty = torch.zeros(0, parts.recipe.outputs(parts.data), device=parts.fabric.device)
    none = empty.long() if binary else empty.sum(1).long()
    sums = ValidationSums.of(empty, none, ignore_index, binary=binary)
    for logits, target in predictions(parts, split):
        visit(logits, target)
        sums = sums + ValidationSums.of(logits, target, ignore_index, binary=binary)
    return sums.all_reduce()


def _nll_after_temperature(batches: list[tuple[Tensor, Tensor]], ignore_index: int, *, binary: bool) -> float:
    with warnings.catch_warnings():  # in its first epochs, a network knows nothing of the labels
        warnings.simplefilter("ignore", ChanceWarning)
        warnings.simplefilter("ignore", ChanceBoundWarning)
        if binary:  # one temperature for each label, which takes all of them at once
            logits, targets = zip(*batches, strict=True)
            batches = [(torch.cat(logits), torch.cat(targets))]
            calibrator = Temperature().fit(*batches[0], ignore_index=ignore_index, binary=True)
        else:
            calibrator = Temperature().fit_batches(batches, ignore_index=ignore_index)
    sums = (
        ValidationSums.of(calibrator(logits), target, ignore_index, binary=binary)
        for logits, target in batches
    )
    return reduce(add, sums).mean_nll


@torch.no_grad()
def predictions(parts: Parts, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and targets of this process's elements of a split, batch by batch, on the device."""
    network = parts.evaluated.eval()
    fabric, recipe = parts.fabric, parts.recipe
    precision = fabric.strategy.precision
    if isinstance(precision, MixedPrecision):  # for training steps only: it would round confidences
        precision = Precision()
    for batch in evaluation_batches(
        split,
        batch_size=max(1, (recipe.evaluation_batch_size or parts.batch_size) // fabric.world_size),
        rank=fabric.global_rank,
        processes=fabric.world_size,
        workers=recipe.workers,
        pinned=fabric.device.type == "cuda",
    ):
        inputs, target = parts.to_device(batch)
        # Not the wrapped model: its calls wait for the other processes, which may have fewer batches.
        with precision.forward_context():
            logits = network(precision.convert_input(inputs))
        yield logits.float(), target


def store_predictions(parts: Parts, split: Split, path: Path) -> bool:
    """Write the predictions for a split, unless they take too much space; return whether it was done."""
    batches: list[tuple[Tensor, Tensor]] = []
    for logits, target in predictions(parts, split):
        if not batches and logits[0].numel() * 4 * len(split) > run_folder.STORED:
            return False  # in every process alike; `calibrant.training.runs` predicts when asked
        batches.append((logits.cpu(), run_folder.as_written(target.cpu(), parts.data.ignore_index)))
    processes = gather(batches)
    if parts.fabric.is_global_zero:
        logits, labels = run_folder.in_order(processes, len(split))
        write_predictions(path, [(logits, labels)], len(split), parts.data.class_names)
    return True


def _broadcast_buffers(parts: Parts) -> None:
    """Give all processes the buffers of the first one, such as running means of batch normalisation."""
    if parts.fabric.world_size > 1:
        for buffer in parts.evaluated.buffers():
            dist.broadcast(buffer, 0)
