"""What a run writes down after every epoch: CSV, JSON lines and TensorBoard."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from calibrant.atomic import replace_file
from calibrant.losses import Loss

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Logs:
    """The logs of a run; what a killed run wrote beyond its last checkpoint is written over.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._board: SummaryWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: Any) -> None:
        if self._board is not None:
            self._board.close()

    def write(self, history: Sequence[dict[str, float]], loss: Loss) -> None:
        """Write all rows to the files, and the last one to TensorBoard."""
        lines = "".join(json.dumps(row) + "\n" for row in history)
        replace_file(self.folder / "log.jsonl", lines.encode())
        columns = list(dict.fromkeys(name for row in history for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(history)
        replace_file(self.folder / "log.csv", text.getvalue().encode())
        self._to_board(history[-1], loss)

    def _to_board(self, row: dict[str, float], loss: Loss) -> None:
        epoch = int(row["epoch"])
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            # Only what comes after the checkpoint is hidden of what an earlier process wrote.
            board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=epoch)
            self._board = board
        for name, value in row.items():
            if name != "epoch":
                self._board.add_scalar(name, value, epoch)
        for name, buffer in loss.learned().items():
            self._board.add_histogram(f"loss/{name}", buffer, epoch)
        self._board.flush()
