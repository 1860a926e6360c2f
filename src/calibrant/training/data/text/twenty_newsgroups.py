"""The data set 20 Newsgroups."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from calibrant.arguments import one_of, whole_number
from calibrant.training.data.safe_readers import present
from calibrant.training.data.sampling import stratified
from calibrant.training.data.split import DataSets
from calibrant.training.data.text.documents import Documents
from calibrant.training.data.text.encoding import Preprocessing, encode


def newsgroups(
    root: Path,
    *,
    split_seed: int = 0,
    collection: Literal["bydate", "original"] = "bydate",
    train: int = 15098,
    validation: int = 900,
    test: int | None = 3999,
    headers: bool = False,
    length: int = 1000,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "glove.6B.100d.txt",
    tokenizer: str = "",
    preprocessing: Preprocessing = "glove",
) -> DataSets:
    """20 Newsgroups: messages to twenty discussion groups, to be classified by group.

    The parts are drawn from the whole collection, stratified by group. The default sizes are those of the
    papers and add up to the 19,997 messages of the original collection. The by-date collection has no
    duplicates, and 18,846 messages. If the sizes add up to more than there are messages, all are scaled down
    by the same factor (by-date: 14,229 / 848 / 3,769).

    Args:
        root: the data folder, with ``20news-bydate-train/GROUP/…`` and ``20news-bydate-test/GROUP/…``, or
            for the original collection ``20_newsgroups/GROUP/…``.
        split_seed: the seed of the parts.
        collection: ``"bydate"``, both of its folders together, or ``"original"``.
        train: the number of training messages.
        validation: the number of validation messages.
        test: the number of test messages; None for all that are left.
        headers: whether to keep the lines above the first empty one, which give the group away.
        length: how many words of a message to keep; see `encode`, also for the options below.
        test_length: the same for validation and test.
        vocabulary: the size of the vocabulary.
        embedding: a file of GloVe vectors, or ``""`` for none.
        tokenizer: a tokenizer of ``transformers``, or ``""`` for none.
        preprocessing: ``"keras"`` for that of the papers' releases.
    """
    one_of("collection", collection, ("bydate", "original"))
    if collection == "bydate":
        folders = [root / "20news-bydate-train", root / "20news-bydate-test"]
        archive = "20news-bydate.tar.gz"
    else:
        found = [folder for folder in sorted(root.glob("20_newsgroup*")) if folder.is_dir()]
        folders, archive = found[:1] or [root / "20_newsgroups"], "20news-19997.tar.gz"
    for folder in folders:
        present(folder, f"{archive} from http://qwone.com/~jason/20Newsgroups/{archive}", root)
    files = [
        (message, group.name)
        for folder in folders
        for group in sorted(folder.iterdir())
        if group.is_dir()
        for message in sorted(group.iterdir())
        if message.is_file() and not message.name.startswith(".")
    ]
    groups = sorted({group for _, group in files})
    if len(groups) < 2:
        raise ValueError(
            f"{folders[0]} has messages of {len(groups)} groups: expected a folder of messages for each group"
        )
    texts = [_message(file.read_bytes(), headers) for file, _ in files]
    labels = torch.tensor([groups.index(group) for _, group in files], device="cpu")
    whole = Documents(texts, labels)
    sizes = _scaled(train, validation, test, len(files))
    documents = [whole.subset(part) for part in stratified(whole.targets, sizes, split_seed)]
    names = tuple(groups)
    return encode(
        root, documents, names, length, test_length, vocabulary, embedding, tokenizer, preprocessing
    )


def _message(content: bytes, headers: bool) -> str:
    text = content.decode("latin-1").replace("\r\n", "\n")
    return text if headers else f"\n{text}".partition("\n\n")[2]


def _scaled(train: int, validation: int, test: int | None, available: int) -> tuple[int, int, int]:
    """The sizes, scaled down if they add up to more than there is; none becomes 0."""
    whole_number("train", train)
    whole_number("validation", validation)
    if test is None:
        test = available - train - validation
        if test < 1:
            raise ValueError(
                f"train and validation take {train + validation} of {available} messages: expected fewer, so "
                "that some are left to test with, or a size for test, by which all are scaled down"
            )
    whole_number("test", test)
    factor = available / (train + validation + test)
    if factor >= 1:
        return train, validation, test
    validation, test = max(1, round(validation * factor)), max(1, round(test * factor))
    return available - validation - test, validation, test
