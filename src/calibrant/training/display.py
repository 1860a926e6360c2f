"""The progress of a run: a bar on a terminal, lines at intervals in a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from calibrant.losses.adaptive import SYMBOLS
from calibrant.printable import printable
from calibrant.training.recipe import Recipe

_SECONDS_BETWEEN_FIGURES = 0.5
_SECONDS_BETWEEN_LINES = 10.0


def learned_in_words(learned: Mapping[str, Tensor]) -> str:
    """The learned state of a loss in a few characters: scalars, or minimum and maximum.

    >>> learned_in_words({"scale": torch.tensor(0.5), "gamma": torch.tensor([1.0, 3.0])})
    'scale 0.5 γ 1…3'
    """

    def shown(value: Tensor) -> str:
        if value.ndim == 0:
            return f"{float(value):.2g}"
        return f"{float(value.min()):.2g}…{float(value.max()):.2g}"

    return " ".join(f"{SYMBOLS.get(name, name)} {shown(value)}" for name, value in learned.items())


class _DelayedMean:
    """Reads a running sum without waiting for the GPU: it returns the value of the previous reading."""

    def __init__(self) -> None:
        self._copy, self._count = torch.zeros((), device="cpu"), 0
        self._arrived: torch.cuda.Event | None = None

    def mean(self, total: Tensor, count: int) -> float | None:
        """The sum over its count, now or at the previous reading; None if it is not known yet."""
        if not total.is_cuda:
            return float(total) / count
        mean = None
        if self._arrived is not None:
            if not self._arrived.query():  # type: ignore[no-untyped-call]
                return None
            mean = float(self._copy) / self._count
        self._copy, self._count = torch.empty_like(total, device="cpu", pin_memory=True), count
        self._copy.copy_(total, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()
        return mean


class Display:
    """Shows epochs, batches, loss, accuracy, ECE and the learned state of the loss, if ``shown`` is true."""

    def __init__(self, recipe: Recipe, *, shown: bool) -> None:
        self.recipe, self.shown = recipe, shown
        self.console = Console(stderr=True)
        self.name = printable(f"{recipe.loss}, seed {recipe.seed}")
        self._progress: Progress | None = None
        self._figures, self._line_at, self._figures_at = "", 0.0, 0.0
        self._loss = _DelayedMean()

    def __enter__(self) -> Self:
        if self.shown and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self.console,
            )
            self._task = self._progress.add_task(self.name, total=None, figures="")
            self._progress.start()
        return self

    def __exit__(self, *problem: Any) -> None:
        if self._progress is not None:
            self._progress.stop()

    def resumed(self, epoch: int, step: int) -> None:
        """Say where a resumed run goes on."""
        within = f" and {step} batches" if step else ""
        self.note(f"going on after {epoch} of {self.recipe.epochs} epochs{within}")

    def message(self, text: str) -> None:
        """Show a text beside the bar until the next figures replace it; without a bar, in a line."""
        if self._progress is not None:
            self._progress.update(self._task, figures=text)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """Show a text in a line that stays, above the bar."""
        if self.shown:
            self.console.print(
                f"{self.name}: {printable(text)}", markup=False, highlight=False, soft_wrap=True
            )

    def start_epoch(self, epoch: int, steps: int, done: int) -> None:
        """Start an epoch, of which ``done`` steps are done already."""
        self._epoch = epoch
        if self._progress is not None:
            total = self.recipe.epochs * steps
            self._steps = steps
            self._progress.update(self._task, total=total, completed=epoch * steps + done)

    def step(self, total_loss: Tensor, steps: int) -> None:
        """Show the progress after a step."""
        if self._progress is None:
            return
        now = time.monotonic()
        if now - self._figures_at > _SECONDS_BETWEEN_FIGURES:
            self._figures_at = now
            mean = self._loss.mean(total_loss, steps)
            if mean is not None:
                self._progress.update(self._task, figures=f"loss {mean:.3f} {self._figures}")
            self._progress.update(self._task, completed=self._epoch * self._steps + steps)

    def end_epoch(self, row: Mapping[str, float], learned: Mapping[str, Tensor]) -> None:
        """Show the figures in the log row of an epoch, and the learned state of the loss."""
        figures = f"accuracy {100 * row['validation_accuracy']:.1f} % ECE {100 * row['validation_ece']:.1f} %"
        self._figures = f"{figures} {learned_in_words(learned)}".rstrip()
        text = f"loss {row['train_loss']:.3f} {self._figures}"
        if self._progress is not None:
            self._progress.update(self._task, figures=text, completed=int(row["epoch"]) * self._steps)
        elif row["epoch"] == self.recipe.epochs or time.monotonic() - self._line_at > _SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            self.note(f"epoch {row['epoch']:g}/{self.recipe.epochs} {text}")
