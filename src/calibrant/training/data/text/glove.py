"""Word vectors from files in the format of GloVe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from calibrant.training.data.safe_readers import present


def glove(file: Path, words: Sequence[str]) -> Tensor:
    """Read the vectors of these words from a text file with lines ``word number number …``.

    Lines of another length than most are skipped: GloVe's larger files have words with spaces, and word2vec's
    files have a header. If a word occurs twice, its first vector counts.

    Args:
        file: the file to read, in UTF-8.
        words: V words.

    Returns:
        ``(V, d)``, float32; zeros for words that are not in the file.

    Raises:
        MissingDataError: the file does not exist.
        ValueError: the file has no vectors, or none for these words.
    """
    present(file, "glove.6B.zip from https://nlp.stanford.edu/data/glove.6B.zip", file.parent)
    with file.open("rb") as lines:
        lengths = Counter(len(line.split()) - 1 for line in islice(lines, 100))
        dimension = lengths.most_common(1)[0][0] if lengths else 0
        if dimension < 1:
            raise ValueError(f"{file} has no vectors: expected lines of a word and its numbers")
        rows = {word.encode(): row for row, word in enumerate(words)}
        vectors = np.zeros((len(words), dimension), np.float32)
        lines.seek(0)
        for line in lines:
            word, _, rest = line.partition(b" ")
            if word not in rows or len(numbers := rest.split()) != dimension:
                continue
            try:
                vector = np.array(numbers, np.float32)
            except ValueError:
                continue
            if np.isfinite(vector).all():
                vectors[rows.pop(word)] = vector
    if len(rows) == len(words) > 0:
        raise ValueError(
            f"{file} has none of the {len(words)} words of the vocabulary in lines of a word and "
            f"{dimension} numbers: expected vectors of lower-case words, such as glove.6B.100d.txt"
        )
    return torch.from_numpy(vectors)
