"""Several files of predictions for the same elements, pooled as an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor

from calibrant.ensembles import pool
from calibrant.predictions.file import BadFileError, Batch, Batches, PredictionFile, first_row
from calibrant.predictions.reading import open_predictions
from calibrant.printable import row_of


def open_ensemble(
    paths: Sequence[Path | str],
    *,
    ignore_index: int = -100,
    binary: bool = False,
    watch: Callable[[Tensor, Tensor], object] | None = None,
) -> PredictionFile:
    """Open the files of an ensemble's members as one file of pooled logits; see `calibrant.ensembles.pool`.

    Args:
        paths: a file or folder for each member, with the same elements in the same order; at least two.
        ignore_index: the label of elements to leave out.
        binary: each score is a yes-or-no decision of its own.
        watch: called with the logits of all members ``(M, n, K, *S)``, if binary ``(M, n, L, *S)``, and the
            labels of each batch, for example to add up their `calibrant.ensembles.Diversity`.

    Raises:
        BadFileError: a file cannot be read, or the files have different rows, classes or labels. Labels are
            compared while the file is read.
        ValueError: there are fewer than two files.
    """
    members = [open_predictions(path, ignore_index=ignore_index, binary=binary) for path in paths]
    if len(members) < 2:
        raise ValueError(f"an ensemble has at least two files of predictions, got {len(members)}")
    first = members[0]
    named = next((member for member in members if member.class_names is not None), first)
    for member in members:
        # The number of rows of a CSV file is only known once it has been read.
        if member.shape[1:] != first.shape[1:]:
            raise BadFileError(
                member.path,
                f"has rows of shape {member.shape[1:]}, but {first.path} has {first.shape[1:]}; expected the "
                "same elements and classes in all files of an ensemble",
            )
        if member.class_names not in (None, named.class_names):
            raise BadFileError(
                member.path, f"has other class names than {named.path}; expected the same in all files"
            )
    dtype = torch.float64 if any(member.dtype == torch.float64 for member in members) else torch.float32

    def chunks(rows: int) -> Batches:
        row = first.size // max(1, first.rows * first.dtype.itemsize)
        for logits, labels in _side_by_side(members, max(1, rows // len(members)) * row):
            if watch is not None:
                watch(logits, labels)
            yield pool(logits, binary=binary).to(dtype), labels

    files = [path for member in members for path in member.files]
    shape = (max(member.rows for member in members), *first.shape[1:])
    return PredictionFile(
        files[0],
        "logits",
        shape,
        dtype,
        named.class_names,
        chunks,
        ignore_index,
        others=tuple(files[1:]),
        binary=binary,
    )


def _side_by_side(members: Sequence[PredictionFile], chunk: int) -> Batches:
    """The logits of all members ``(M, n, K, *S)`` and their labels, in batches."""
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(member.batches(chunk=chunk))) for member in members]
        held: list[Batch | None] = [next(stream, None) for stream in streams]
        start = 0
        while len(present := [batch for batch in held if batch is not None]) == len(members):
            count = min(len(labels) for _, labels in present)
            expected = present[0][1][:count]
            for member, (_, labels) in zip(members, present, strict=True):
                differing = labels[:count] != expected
                if differing.any():
                    row = row_of(member.path, start + first_row(differing))
                    raise BadFileError(
                        member.path,
                        f"has another label than {members[0].path} at {row}; expected the same elements in "
                        "the same order in all files of an ensemble",
                    )
            yield torch.stack([logits[:count] for logits, _ in present]), expected
            held = [
                (logits[count:], labels[count:]) if len(labels) > count else next(stream, None)
                for stream, (logits, labels) in zip(streams, present, strict=True)
            ]
            start += count
        if present:
            index = held.index(None)
            raise BadFileError(
                members[index].path,
                f"has {start} rows, but another file of the ensemble has more; expected the same elements",
            )
