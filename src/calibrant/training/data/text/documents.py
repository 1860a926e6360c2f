"""Texts with labels, and their encoding as numbers for a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.training.data.sampling import stratified
from calibrant.training.data.split import DataSets, TensorSplit
from calibrant.training.data.text.glove import glove
from calibrant.training.data.text.tokenizer import tokenize
from calibrant.training.data.text.vocabulary import number_words


@dataclass(frozen=True)
class Documents:
    """Texts and their labels ``(N,)``."""

    texts: list[str]
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.targets):
            raise ValueError(f"there are {len(self.texts)} texts and {len(self.targets)} labels")

    def subset(self, indices: Tensor) -> Documents:
        """The documents with these indices."""
        return Documents([self.texts[index] for index in indices.tolist()], self.targets[indices])


def sorted_classes(labels: Iterable[Any], source: Path) -> list[str | int]:
    """The distinct labels: integers by value, then strings by name.

    Raises:
        ValueError: a label is neither a string nor an integer, or there are fewer than two.
    """
    distinct = dict.fromkeys(labels)
    for label in distinct:
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ValueError(f"{source} has the label {label!r}: expected strings or integers")
    if len(distinct) < 2:
        raise ValueError(f"{source} has labels of {len(distinct)} classes: expected at least 2")
    return sorted(distinct, key=lambda label: (isinstance(label, str), label))


def class_positions(
    labels: Sequence[Hashable], classes: Sequence[Hashable], where: str, rows: Sequence[int], training: str
) -> Tensor:
    """The positions ``(N,)`` of labels in ``classes``; the other arguments are for the error message.

    Raises:
        ValueError: a label is not among the classes.
    """
    positions = {value: position for position, value in enumerate(classes)}
    for label, row in zip(labels, rows, strict=True):
        if label not in positions:
            raise ValueError(f"{where} {row}: label {label!r}, expected one of the labels of {training}")
    return torch.tensor([positions[label] for label in labels], dtype=torch.long)


def draw_missing(
    given: Sequence[Documents | None], validation: float, test: float, split_seed: int
) -> list[Documents]:
    """Draw the validation and the test part from the first, if they are None.

    Raises:
        ValueError: a fraction is not in (0, 1], or nothing is left to train with.
    """
    main, *others = given
    assert main is not None
    size = len(main.texts)
    fractions = {"validation": validation, "test": test}
    for name, fraction in fractions.items():
        in_range(name, fraction, 0, 1, open_low=True)
    drawn = [
        0 if part else max(1, round(fraction * size))
        for part, fraction in zip(others, fractions.values(), strict=True)
    ]
    if sum(drawn) >= size:
        raise ValueError(
            f"cannot draw {' and '.join(str(count) for count in drawn if count)} of {size} documents and "
            "have some to learn from: expected fractions validation and test that add up to less than 1, or "
            "more documents"
        )
    kept, *rest = stratified(main.targets, [size - sum(drawn), *drawn], split_seed)
    missing = (part or main.subset(indices) for part, indices in zip(others, rest, strict=True))
    return [main.subset(kept), *missing]


@dataclass(frozen=True)
class Encoding:
    """How texts become numbers: by a vocabulary of words, or by a tokenizer.

    Args:
        length: how many words or tokens of a training text to keep; shorter texts are padded at the end.
        test_length: the same for validation and test; None for ``length``.
        vocabulary: the size of the vocabulary, made of the most frequent words of the training part. It
            includes one number for padding and one for unknown words.
        embedding: a file of GloVe vectors in ``root`` or in its folder ``glove.6B``; ``""`` for none. Words
            that the file does not have get zeros.
        tokenizer: the name or folder of a tokenizer of ``transformers``, used in place of vocabulary and
            embedding; inputs are then ``input_ids`` and ``attention_mask``. ``""`` for none.
    """

    length: int
    test_length: int | None = None
    vocabulary: int = 20000
    embedding: str = ""
    tokenizer: str = ""

    def data_sets(self, root: Path, documents: Sequence[Documents], class_names: tuple[str, ...]) -> DataSets:
        """Encode documents.

        Args:
            root: the data folder.
            documents: the training, validation and test documents.
            class_names: K names.

        Returns:
            The data, with ``vocabulary_size``, ``length`` and, from a file of vectors, ``embedding``.

        >>> parts = [Documents(["a cat", "a dog sat"], torch.tensor([0, 1]))] * 3
        >>> data = Encoding(length=4).data_sets(Path(), parts, ("cat", "dog"))
        >>> data.train.batch(torch.arange(2))[0], data.about["vocabulary_size"]
        (tensor([[2, 3, 0, 0],
                [2, 4, 5, 0]]), 6)
        """
        length = whole_number("length", self.length)
        lengths = [length, *[whole_number("test_length", self.test_length or length)] * 2]
        texts = [part.texts for part in documents]
        if not texts[0]:
            raise ValueError("there are no training documents")
        about: dict[str, Any] = {"length": length}
        if self.tokenizer:
            inputs, about["vocabulary_size"] = tokenize(root, texts, lengths, self.tokenizer)
        else:
            inputs, words = number_words(texts, lengths, self.vocabulary)
            about["vocabulary_size"] = len(words) + 2
            if self.embedding:
                inside = root / "glove.6B" / self.embedding
                vectors = glove(inside if inside.is_file() else root / self.embedding, words)
                about["embedding"] = torch.cat([vectors.new_zeros(2, vectors.shape[1]), vectors])
        train, validation, test = (
            TensorSplit(tensors, part.targets) for tensors, part in zip(inputs, documents, strict=True)
        )
        return DataSets(train, validation, test, class_names, about)
