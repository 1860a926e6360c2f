"""The log of a run, written after every epoch: CSV, JSON lines and TensorBoard."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from calibrant.atomic import naming, replace_file
from calibrant.extras import require

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Logs:
    """The log files of a run. Rows that a killed run wrote after its last checkpoint are replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._board_folder = folder, folder / "tensorboard"
        self._board: SummaryWriter | None = None

    def close(self) -> None:
        """Close TensorBoard's writer, which writes what it has buffered."""
        if self._board is not None:
            with naming(self._board_folder, others=True):
                self._board.close()

    def write(self, history: Sequence[dict[str, float]], learned: Mapping[str, Tensor]) -> None:
        """Write all rows to the files; the last one, and histograms of the learned state, to TensorBoard."""
        lines = "".join(json.dumps(row) + "\n" for row in history)
        replace_file(self.folder / "log.jsonl", lines.encode())
        columns = list(dict.fromkeys(name for row in history for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(history)
        replace_file(self.folder / "log.csv", text.getvalue().encode())
        with naming(self._board_folder, others=True):
            self._write_to_board(history[-1], learned)

    def _write_to_board(self, row: dict[str, float], learned: Mapping[str, Tensor]) -> None:
        epoch = int(row["epoch"])
        if self._board is None:
            require("train", "tensorboard", purpose="the log for TensorBoard")
            from torch.utils.tensorboard import SummaryWriter

            # Hides what an earlier process wrote after its last checkpoint.
            self._board = SummaryWriter(str(self._board_folder), purge_step=epoch)
        for name, value in row.items():
            if name != "epoch":
                self._board.add_scalar(name, value, epoch)
        for name, tensor in learned.items():
            if tensor.ndim > 0:
                self._board.add_histogram(f"loss/{name}", tensor, epoch)
        self._board.flush()
