"""Open a file of predictions: check it, and read it in batches.

A file declares its content by names; nothing is guessed from values. Files of arrays have ``logits`` or
``probabilities`` of shape ``(N, K, *S)``, ``labels`` of shape ``(N, *S)`` and, optionally, ``class_names``.
Tables have a column ``label`` and columns ``logit_<class>`` or ``probability_<class>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from math import inf, isinf, isnan, prod
from pathlib import Path

import torch
from torch import Tensor

from calibrant.layout import SUM_TOLERANCE, as_logits
from calibrant.predictions.arrays import open_npy, open_npz, open_pt, open_safetensors
from calibrant.predictions.content import BadFileError, Batch, Batches, Content, reading
from calibrant.predictions.tables import open_csv, open_parquet

CHUNK = 1 << 22
"""The numbers in one batch, unless a single row has more: 16 MiB of float32."""

FORMATS: dict[str, Callable[[Path], Content]] = {
    ".npz": open_npz,
    ".npy": open_npy,
    ".pt": open_pt,
    ".safetensors": open_safetensors,
    ".csv": open_csv,
    ".parquet": open_parquet,
}
"""For each suffix the function that opens such a file."""


@dataclass(frozen=True)
class PredictionFile:
    """An opened file of predictions. Only its description has been read so far.

    Attributes:
        path: the file; in a pair of ``.npy`` files, the one with the scores.
        name: the file's name without its suffixes.
        kind: "logits" or "probabilities".
        rows: the number of rows N. For a CSV file it is the number of lines, which is larger than N if
            texts contain line breaks.
        num_classes: the number of classes K.
        spatial: the shape S of the elements in a row, ``()`` for a single element.
        dtype: the type of the logits in a batch.
        class_names: one name for each class, or None.
        ignore_index: the label of elements to leave out.
    """

    path: Path
    name: str
    kind: str
    rows: int
    num_classes: int
    spatial: tuple[int, ...]
    dtype: torch.dtype
    class_names: tuple[str, ...] | None
    ignore_index: int
    _chunks: Callable[[int], Batches] = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """The bytes that all logits take in memory."""
        return self.rows * self.num_classes * prod(self.spatial) * self.dtype.itemsize

    def batches(self, *, chunk: int = CHUNK) -> Batches:
        """Yield the predictions in order, as batches ``(logits, labels)``.

        The shapes are ``(n, K, *S)`` and ``(n, *S)``. Probabilities are converted to their logarithms.

        Args:
            chunk: the most numbers in a batch of logits; a batch has at least one row.

        Raises:
            BadFileError: the data are damaged, or are not what the file declares.
        """
        rows = max(1, chunk // (self.num_classes * prod(self.spatial)))
        start, valid = 0, 0
        with closing(self._chunks(rows)) as chunks:
            while True:
                with reading(self.path):
                    pair = next(chunks, None)
                if pair is None:
                    break
                scores, labels = pair
                valid += self._check_labels(labels, start)
                yield self._logits(scores, labels, start), labels
                start += len(labels)
        if not valid:
            raise BadFileError(self.path, f"has no element to evaluate: every label is {self.ignore_index}")

    def load(self, advance: Callable[[int], object] | None = None) -> Batch:
        """All predictions at once, as ``(logits, labels)``.

        Args:
            advance: called after each batch with its number of rows, for a progress bar.
        """
        logits = torch.empty(self.rows, self.num_classes, *self.spatial, dtype=self.dtype)
        labels = torch.empty(self.rows, *self.spatial, dtype=torch.long)
        start = 0
        with closing(self.batches()) as batches:
            for batch_logits, batch_labels in batches:
                end = start + len(batch_labels)
                logits[start:end], labels[start:end] = batch_logits, batch_labels
                if advance is not None:
                    advance(end - start)
                start = end
        return logits[:start], labels[:start]

    def _check_labels(self, labels: Tensor, start: int) -> int:
        """Raise an error for the first label out of range; return the number of elements to evaluate."""
        valid = labels != self.ignore_index
        wrong = valid & ((labels < 0) | (labels >= self.num_classes))
        if wrong.any():
            row = _first_row(wrong)
            raise BadFileError(
                self.path,
                f"has label {int(labels[wrong][0])} at row {start + row}; expected 0 to "
                f"{self.num_classes - 1}, or ignore_index={self.ignore_index} for elements to leave out "
                "(--ignore-index)",
            )
        return int(valid.sum())

    def _logits(self, scores: Tensor, labels: Tensor, start: int) -> Tensor:
        counted = (labels != self.ignore_index).unsqueeze(1)
        checked = scores
        if not counted.all():  # scores of ignored elements may be anything
            checked = torch.where(counted, scores, 1 / self.num_classes)
        low, high = (float(bound) for bound in torch.aminmax(checked))  # NaN if there is any NaN
        ruled_out = self.kind == "logits" and low == -inf  # a logit of minus infinity rules a class out
        if isnan(low) or isinf(high) or (isinf(low) and not ruled_out):
            wrong = checked.isnan() | (checked == inf) | (checked.isinf() if not ruled_out else False)
            row = start + _first_row(wrong)
            raise BadFileError(
                self.path, f"{self.kind} are NaN or infinite at row {row}; expected finite numbers"
            )
        if self.kind == "logits":
            return scores
        if low < 0 or high > 1 + SUM_TOLERANCE:
            outside = (checked < 0) | (checked > 1 + SUM_TOLERANCE)
            raise BadFileError(
                self.path,
                f"probabilities range from {low:.4g} to {high:.4g} at row {start + _first_row(outside)}; "
                "expected 0 to 1 (if these are logits, name them logits)",
            )
        total = checked.sum(1)
        wrong = (total - 1).abs() > SUM_TOLERANCE
        if wrong.any():
            raise BadFileError(
                self.path,
                f"probabilities sum to {float(total[wrong][0]):.4g} over the classes at row "
                f"{start + _first_row(wrong)}; expected 1 within {SUM_TOLERANCE}",
            )
        return as_logits(scores)


def open_predictions(path: Path | str, *, ignore_index: int = -100) -> PredictionFile:
    """Open a file of predictions: read and check its description.

    Args:
        path: the file to read; its suffix is a key of `FORMATS`. For a pair ``NAME.logits.npy`` and
            ``NAME.labels.npy``, either of the two.
        ignore_index: the label of elements to leave out.

    Raises:
        BadFileError: the file does not exist, is damaged, or lacks something.

    >>> import tempfile
    >>> import numpy as np
    >>> path = Path(tempfile.mkdtemp(), "model.npz")
    >>> np.savez(path, logits=np.zeros((5, 3), np.float32), labels=np.arange(5) % 3)
    >>> file = open_predictions(path)
    >>> file.name, file.kind, file.rows, file.num_classes
    ('model', 'logits', 5, 3)
    >>> [tuple(logits.shape) for logits, labels in file.batches(chunk=6)]
    [(2, 3), (2, 3), (1, 3)]
    """
    path = Path(path)
    open_format = FORMATS.get(path.suffix.lower())
    if open_format is None:
        raise BadFileError(path, f"has an unknown suffix; expected one of {', '.join(FORMATS)}")
    if not path.is_file():
        raise BadFileError(path, "is a folder; expected a file" if path.is_dir() else "does not exist")
    with reading(path):
        content = open_format(path)
    path = content.path or path
    rows, num_classes, *spatial = content.shape
    if num_classes < 2:
        raise BadFileError(path, f"{content.kind} have {num_classes} class on axis 1; expected at least 2")
    if not rows or not prod(spatial):
        raise BadFileError(path, f"holds no predictions: {content.kind} have shape {content.shape}")
    names = content.class_names
    if names is not None and len(names) != num_classes:
        raise BadFileError(
            path, f"has {len(names)} class_names; expected one for each of {num_classes} classes"
        )
    if names is not None and len(set(names)) != num_classes:
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadFileError(path, f"has the class name {repeated!r} twice; expected different names")
    name = path.stem
    if path.suffix.lower() == ".npy":
        name = name.rpartition(".")[0]
    return PredictionFile(
        path=path,
        name=name,
        kind=content.kind,
        rows=rows,
        num_classes=num_classes,
        spatial=tuple(spatial),
        dtype=content.dtype,
        class_names=names,
        ignore_index=ignore_index,
        _chunks=content.chunks,
    )


def read_class_counts(path: Path | str) -> list[int]:
    """Read the number of training samples of each class, in the order of the classes.

    Args:
        path: the file to read: a JSON list, or text with one number per line.

    Raises:
        BadFileError: the file holds anything else.
    """
    path = Path(path)
    with reading(path):
        text = path.read_text(encoding="utf-8-sig")
    try:
        counts = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except ValueError:
        counts = None
    if not counts or not all(type(count) is int and count >= 0 for count in counts):
        raise BadFileError(
            path, "does not hold class counts; expected a JSON list or lines of numbers from 0 up"
        )
    return list(counts)


def _first_row(mask: Tensor) -> int:
    return int(mask.flatten(1).any(1).int().argmax() if mask.ndim > 1 else mask.int().argmax())
