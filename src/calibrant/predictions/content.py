"""What a format's reader returns, and the error for files that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Batches = Generator[Batch, None, None]


class BadFileError(ValueError):
    """A file of predictions cannot be used; the one-line message says why and what was expected."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {' '.join(problem.split())}")


@dataclass(frozen=True)
class Content:
    """The description of a file, and a function that reads its data.

    Attributes:
        kind: "logits" or "probabilities".
        shape: the shape ``(N, K, *S)`` of the scores.
        dtype: the type of the scores in a batch.
        class_names: one name for each class, or None.
        chunks: yields ``(scores, labels)`` in chunks of the given number of rows.
        path: the file with the scores, if it is another than the one that was opened.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    class_names: tuple[str, ...] | None
    chunks: Callable[[int], Batches]
    path: Path | None = None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of a parser into `BadFileError`."""
    try:
        yield
    except (BadFileError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise BadFileError(path, "does not exist") from error
    except Exception as error:  # zlib.error, struct.error, SyntaxError, ...: every format has its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise BadFileError(path, f"cannot be read as {path.suffix.lower()}: {reason[0]}") from error
