"""How far training has come: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from calibrant.training.recipe import Recipe

_SECONDS_BETWEEN_FIGURES = 0.5
_SECONDS_BETWEEN_LINES = 10.0


class _Glance:
    """Looks at a sum and never waits for it: on a GPU, it sees what it was the last time it looked."""

    def __init__(self) -> None:
        self._copy, self._count = torch.zeros(()), 0
        self._arrived: torch.cuda.Event | None = None

    def mean(self, total: Tensor, count: int) -> float | None:
        """The sum over its count, now or a moment ago; None where it is not known yet."""
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
    """Shows epochs, batches, loss, accuracy, ECE and multipliers of a run.

    Args:
        recipe: that is followed.
        shown: whether to show anything.
    """

    def __init__(self, recipe: Recipe, *, shown: bool) -> None:
        self.recipe, self.shown = recipe, shown
        self.console = Console(stderr=True)
        self.name = f"{recipe.loss}, seed {recipe.seed}"
        self._progress: Progress | None = None
        self._figures, self._line_at, self._figures_at = "", 0.0, 0.0
        self._loss = _Glance()

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
        """Say from where a run goes on."""
        within = f" and {step} batches" if step else ""
        self.note(f"going on after {epoch} of {self.recipe.epochs} epochs{within}")

    def message(self, text: str) -> None:
        """Say something beside the bar, where the next figures take its place."""
        if self._progress is not None:
            self._progress.update(self._task, figures=text)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """Say something in a line that stays, above the bar."""
        if self.shown:
            self.console.print(f"{self.name}: {text}", markup=False, highlight=False, soft_wrap=True)

    def start_epoch(self, epoch: int, steps: int, done: int) -> None:
        """An epoch begins, or goes on."""
        self._epoch = epoch
        if self._progress is not None:
            total = self.recipe.epochs * steps
            self._steps = steps
            self._progress.update(self._task, total=total, completed=epoch * steps + done)

    def step(self, total_loss: Tensor, steps: int) -> None:
        """A batch is done."""
        if self._progress is None:
            return
        now = time.monotonic()
        if now - self._figures_at > _SECONDS_BETWEEN_FIGURES:
            self._figures_at = now
            mean = self._loss.mean(total_loss, steps)
            if mean is not None:
                self._progress.update(self._task, figures=f"loss {mean:.3f} {self._figures}")
            self._progress.update(self._task, completed=self._epoch * self._steps + steps)

    def end_epoch(self, row: Mapping[str, float]) -> None:
        """An epoch is over."""
        figures = f"accuracy {100 * row['validation_accuracy']:.1f} % ECE {100 * row['validation_ece']:.1f} %"
        for name, symbol in (("multiplier", "λ"), ("gamma", "γ")):
            if f"{name}_mean" in row:
                figures += f" {symbol} {row[f'{name}_min']:.2g}…{row[f'{name}_max']:.2g}"
        self._figures = figures
        last = row["epoch"] == self.recipe.epochs
        if self._progress is not None:
            shown = f"loss {row['train_loss']:.3f} {figures}"
            self._progress.update(self._task, figures=shown, completed=int(row["epoch"]) * self._steps)
        elif self.shown and (last or time.monotonic() - self._line_at > _SECONDS_BETWEEN_LINES):
            self._line_at = time.monotonic()
            text = f"epoch {row['epoch']:g}/{self.recipe.epochs} loss {row['train_loss']:.3f} {figures}"
            self.message(text)
