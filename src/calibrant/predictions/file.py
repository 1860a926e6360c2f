"""An opened file of predictions, checked and read in batches."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite, prod
from pathlib import Path

import torch
from torch import Tensor

from calibrant.layout import SUM_TOLERANCE, as_logits
from calibrant.printable import first_few, one_line, row_of
from calibrant.probabilities import are_percentages, decimals, tolerance_of_rounded
from calibrant.sizes import check_memory

Batch = tuple[Tensor, Tensor]
Batches = Generator[Batch, None, None]

CHUNK = 1 << 22
"""The numbers in one batch, unless a single row has more: 16 MiB of float32."""

_TEXTS = (".csv", ".jsonl", ".json", ".txt")


class BadFileError(ValueError):
    """A file of predictions cannot be used; the one-line message says why and what was expected."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(path, problem)  # as its arguments, so that worker processes can send it by pickle

    def __str__(self) -> str:
        path, problem = self.args
        return one_line(f"{path}: {problem}")


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a parser into `BadFileError`."""
    try:
        yield
    except (BadFileError, MemoryError):
        raise
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise BadFileError(path, "does not exist" if missing else error.strerror or str(error)) from error
    except Exception as error:  # zlib.error, struct.error, SyntaxError, ...: every format has its own
        if isinstance(error, UnicodeDecodeError) and path.suffix.lower() in _TEXTS:
            raise BadFileError(path, not_utf8(path)) from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise BadFileError(path, f"cannot be read as {path.suffix.lower()}: {reason[0]}") from error


_PACKED = {
    b"\x1f\x8b": "compressed by gzip: unpack it by gunzip",
    b"PK\x03\x04": "a zip file or a spreadsheet: unpack it, or save it as CSV UTF-8",
}
"""Kinds of files that are given the name of a text file by mistake, by their first bytes."""


def not_utf8(path: Path) -> str:
    """What to say about a text file with bytes that are not UTF-8."""
    with path.open("rb") as stream:
        start = stream.read(4)
    for signature, kind in _PACKED.items():
        if start.startswith(signature):
            return f"is {kind}; expected a text file"
    utf16 = start.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    found, name = ("is UTF-16", "UTF-16") if utf16 else ("may be Latin-1 or Windows-1252", "WINDOWS-1252")
    return (
        f"has bytes that are not UTF-8: it {found}; expected UTF-8 (save it as CSV UTF-8 in a spreadsheet, "
        f"or convert it by iconv -f {name} -t UTF-8)"
    )


@dataclass(frozen=True)
class PredictionFile:
    """An opened file of predictions, or a folder of them. Only its description has been read so far.

    Attributes:
        path: the file or folder; in a pair of ``.npy`` files, the one with the scores.
        kind: "logits" or "probabilities".
        shape: the shape of the scores: ``(N, K, *S)``, or ``(N, L, *S)`` for L labels if binary. For a CSV
            file, N is the number of lines, which is more than the number of rows if cells contain line
            breaks.
        dtype: the type of the logits in a batch.
        class_names: one name for each class, or None.
        ignore_index: the label of elements to leave out.
        others: the other files that belong to it: labels and class names, in a pair of ``.npy`` files.
        shards: the files of a folder, in order; empty for a file.
        stored_labels: the shape of the labels in the file; None if they fit by construction.
        binary: whether each score is a yes-or-no decision of its own. Labels then have the shape of the
            scores and hold 0 and 1.
        beside: the columns of a table that are not read.
        words: the labels of a single decision in a table, if they are words other than false and true.
        columns: the columns of the scores in a table, if each has its own.
        no_labels: for messages, that the file has no labels, and where they are expected; "" if it has them.
            A batch then has labels that stand for any class.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    class_names: tuple[str, ...] | None
    _chunks: Callable[[int], Batches] = field(repr=False, compare=False)  # by the number of rows in a chunk
    ignore_index: int = -100
    others: tuple[Path, ...] = ()
    shards: tuple[PredictionFile, ...] = ()
    stored_labels: tuple[int, ...] | None = None
    binary: bool = False
    beside: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    no_labels: str = ""
    _line: Callable[[int], int] | None = field(default=None, repr=False, compare=False)  # of a CSV row

    @property
    def parts(self) -> tuple[PredictionFile, ...]:
        """The files of a folder in order; for a file, the file itself."""
        return self.shards or (self,)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that are read."""
        if self.shards:
            return tuple(path for shard in self.shards for path in shard.files)
        return (self.path, *self.others)

    @property
    def name(self) -> str:
        """The file's name without its suffixes; the name of a folder."""
        if self.shards:
            return self.path.resolve().name
        stem = self.path.stem
        return stem.rpartition(".")[0] if self.path.suffix.lower() == ".npy" else stem

    @property
    def rows(self) -> int:
        """The number of rows N."""
        return self.shape[0]

    @property
    def num_classes(self) -> int:
        """The number of classes K; of labels, if binary."""
        return self.shape[1]

    @property
    def values(self) -> int:
        """The number of different labels that an element may have."""
        return 2 if self.binary else self.num_classes

    @property
    def spatial(self) -> tuple[int, ...]:
        """The shape S of the elements in a row, ``()`` for a single element."""
        return self.shape[2:]

    @property
    def size(self) -> int:
        """The bytes that all logits take in memory."""
        return prod(self.shape) * self.dtype.itemsize

    def batches(self, *, chunk: int = CHUNK, all_ignored: bool = False) -> Batches:
        """Yield the predictions in order, as batches ``(logits, labels)``.

        The shapes are ``(n, K, *S)`` and ``(n, *S)``; if binary, both ``(n, L, *S)``. Probabilities are
        converted to logits.

        Args:
            chunk: the most numbers in a batch of logits; a batch has at least one row.
            all_ignored: allow that all elements are ignored, as in one of several parts of a set.

        Raises:
            BadFileError: the data are damaged, or are not what the file declares.
        """
        valid = all_ignored
        for part in self.parts:
            with closing(part._checked(chunk)) as checked:
                for logits, labels in checked:
                    valid = valid or bool((labels != self.ignore_index).any())
                    yield logits.to(self.dtype), labels
        if not valid:
            raise BadFileError(self.path, f"has no element to evaluate: every label is {self.ignore_index}")

    def _checked(self, chunk: int) -> Batches:
        """The batches of a single file, checked."""
        row = prod(self.shape[1:])
        with file_errors(self.path):
            check_memory(row * self.dtype.itemsize, "one row")
        start = 0
        with closing(self._chunks(max(1, chunk // row))) as chunks:
            while True:
                with file_errors(self.path):
                    pair = next(chunks, None)
                if pair is None:
                    break
                scores, labels = pair
                if self.no_labels:  # none is to be ignored, so that all scores are checked
                    place = scores.shape if self.binary else (len(scores), *self.spatial)
                    labels = torch.full(place, int(self.ignore_index == 0), device="cpu")
                if self.binary:
                    scores, labels = (each.reshape(-1, *self.shape[1:]) for each in (scores, labels))
                if start + len(labels) > self.rows:
                    raise BadFileError(self.path, f"has more than the {self.rows} rows that it declares")
                self._check_labels(labels, start)
                yield self._logits(scores, labels, start), labels
                start += len(labels)

    def load(self, advance: Callable[[int], object] | None = None) -> Batch:
        """All predictions at once. ``advance`` is called with the number of rows of each batch."""
        with file_errors(self.path):
            place = self.shape[1:] if self.binary else self.spatial
            check_memory(self.size + 8 * self.rows * prod(place), "loading all predictions at once")
        logits = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        labels = torch.empty(self.rows, *place, dtype=torch.long, device="cpu")
        start = 0
        with closing(self.batches()) as batches:
            for batch_logits, batch_labels in batches:
                end = start + len(batch_labels)
                logits[start:end], labels[start:end] = batch_logits, batch_labels
                if advance is not None:
                    advance(end - start)
                start = end
        return logits[:start], labels[:start]

    def _row(self, index: int) -> str:
        """A row for messages, with its line in the file if that is known."""
        if self._line is None:
            return row_of(self.path, index)
        return f"row {index + 1} (line {self._line(index)} of the file)"

    @property
    def _classes_hint(self) -> str:
        """What to look at if a table may lack the column of a class."""
        if not self.columns or self.binary or not self.class_names:
            return ""
        names = first_few(self.class_names)
        return f"; the table has columns of the {len(self.class_names)} classes {names}: is one missing?"

    def _check_labels(self, labels: Tensor, start: int) -> None:
        """Raise an error for the first label out of range."""
        wrong = (labels != self.ignore_index) & ((labels < 0) | (labels >= self.values))
        if wrong.any():
            row = self._row(start + first_row(wrong))
            low, high = torch.aminmax(labels[labels != self.ignore_index])
            from_one = (int(low), int(high)) == (1, self.values)
            hint = self._classes_hint if high >= self.values else ""
            raise BadFileError(
                self.path,
                f"has label {int(labels[wrong][0])} at {row}; expected 0 to "
                f"{self.values - 1}, or ignore_index={self.ignore_index} for elements to leave out "
                "(--ignore-index)" + ("; if the labels count from 1, subtract 1" if from_one else hint),
            )

    def _logits(self, scores: Tensor, labels: Tensor, start: int) -> Tensor:
        """Check the scores of a batch whose first row is ``start``, and return them as logits."""
        counted = labels != self.ignore_index
        checked = scores
        if not counted.all():  # scores of ignored elements may be anything
            checked = torch.where(counted if self.binary else counted.unsqueeze(1), scores, 1 / self.values)
        low, high = (float(bound) for bound in torch.aminmax(checked))  # NaN if there is any NaN
        logits = self.kind == "logits"
        if not isfinite(high) or not (isfinite(low) or (logits and low == -inf)):
            wrong = ~checked.isfinite()
            if logits:  # a logit of minus infinity rules a class out
                wrong &= checked != -inf
            first, what = first_row(wrong), f"{self.kind} are"
            if self.columns:
                what = f"column {self.columns[int(wrong[first].int().argmax())]!r} is"
            found = f"{what} NaN or infinite at {self._row(start + first)}"
            raise BadFileError(self.path, f"{found}; expected finite numbers")
        if logits:
            return scores
        if low < 0 or high > 1 + SUM_TOLERANCE:
            outside = (checked < 0) | (checked > 1 + SUM_TOLERANCE)
            hint = "if these are logits, name them logits"
            if are_percentages(checked if self.binary else _rows(scores, counted)):
                hint = "they are percentages: divide them by 100"
            row = self._row(start + first_row(outside))
            raise BadFileError(
                self.path,
                f"probabilities range from {low:.4g} to {high:.4g} at {row}; expected 0 to 1 ({hint})",
            )
        if self.binary:
            return as_logits(scores) - as_logits(1 - scores)
        total = checked.sum(1)
        wrong = (total - 1).abs() > SUM_TOLERANCE
        if wrong.any():
            rows = _rows(scores, counted)
            tolerance = tolerance_of_rounded(rows)
            wrong = (total - 1).abs() > tolerance + 1e-6  # 1.01 - 1 is more than 0.01
        if wrong.any():
            row = self._row(start + first_row(wrong))
            found = f"probabilities sum to {float(total[wrong][0]):.4g} over the classes at {row}"
            hint = "each is the probability of a label of its own, pass --binary to evaluate or calibrate"
            hint = f"if {hint}, in Python binary=True"
            digits, furthest = decimals(rows), float((total - 1).abs().max())
            if digits and furthest <= min(0.5, self.num_classes / 2 / 10**digits) + 1e-6:
                places = f"{digits} decimal{'s' * (digits > 1)}"
                hint = f"rounding to {places} changes the sum too much: write more"
            missing = self._classes_hint if total[wrong][0] < 1 else ""
            raise BadFileError(self.path, f"{found}; expected 1 within {tolerance:g} ({hint}){missing}")
        return as_logits(scores)


def _rows(scores: Tensor, counted: Tensor) -> Tensor:
    """The scores of the elements that are ``counted``, ``(n, K)``."""
    return scores.movedim(1, -1)[counted]


def first_row(mask: Tensor) -> int:
    """The first row in which any element is true."""
    return int(mask.flatten(1).any(1).int().argmax() if mask.ndim > 1 else mask.int().argmax())
