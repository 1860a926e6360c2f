"""Words of a text, and the numbers that a vocabulary gives them."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from calibrant.arguments import whole_number
from calibrant.training.data.split import Inputs

PADDING, UNKNOWN = 0, 1
"""The numbers for padding and for words outside the vocabulary."""

_REPEATS = re.compile(r"([^\w\s]|_)\1+")
_TOKEN = re.compile(
    r"[^\W\d_]+(?=n't\b)"  # the do of don't
    r"|n't\b"
    r"|'(?:s|re|ve|ll|d|m)\b"
    r"|[^\W\d_]+"
    r"|\d+(?:[.,]\d+)*"
    r"|[^\w\s]|_"
)


def tokens(text: str) -> list[str]:
    """Split a text into words, numbers and punctuation marks, as GloVe does.

    Letters become lower-case. Numbers keep their points and commas. ``n't`` and the endings ``'s``, ``'re``,
    ``'ve``, ``'ll``, ``'d`` and ``'m`` are words of their own. Every other character is a word, and a run of
    the same character counts once.

    >>> tokens("It's 3.5 miles -- we don't walk!!!")
    ['it', "'s", '3.5', 'miles', '-', 'we', 'do', "n't", 'walk', '!']
    """
    return _TOKEN.findall(_REPEATS.sub(r"\1", text.lower()))


def number_words(
    texts: Sequence[list[str]], lengths: Sequence[int], vocabulary: int
) -> tuple[list[Inputs], list[str]]:
    """Texts as numbers of words, by the most frequent words of the first part.

    Args:
        texts: the texts of each part; the vocabulary is that of the first.
        lengths: for each part, how many words of a text to keep.
        vocabulary: the size of the vocabulary, `PADDING` and `UNKNOWN` included.

    Returns:
        ``(N, length)`` numbers for each part, and the words with the numbers 2, 3, …, by falling frequency.
    """
    if whole_number("vocabulary", vocabulary) < 3:
        raise ValueError(
            f"vocabulary must be at least 3, padding and unknown words included, got {vocabulary!r}"
        )
    # Words get a preliminary number when they first occur, and their final one at the end. Arrays of numbers
    # take an eighth of the memory of lists of strings.
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    preliminary = [
        [
            np.frombuffer(array("i", map(numbers.__getitem__, tokens(text)[:length])), np.int32)
            for text in part
        ]
        for part, length in zip(texts, lengths, strict=True)
    ]
    counts = np.bincount(np.concatenate(preliminary[0]), minlength=len(numbers))
    words = sorted(
        (word for word, number in numbers.items() if counts[number]), key=lambda w: (-counts[numbers[w]], w)
    )[: vocabulary - 2]
    final = np.full(len(numbers), UNKNOWN, np.int64)
    final[[numbers[word] for word in words]] = np.arange(2, len(words) + 2)
    inputs: list[Inputs] = []
    for part, length in zip(preliminary, lengths, strict=True):
        indices = torch.full((len(part), length), PADDING)
        for row, document in zip(indices.numpy(), part, strict=True):
            row[: len(document)] = final[document]
        inputs.append(indices)
    return inputs, words
