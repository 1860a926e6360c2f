"""Documents and their labels, read from where people keep them and turned into numbers a model can take."""

from __future__ import annotations

import csv
import json
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import in_range, one_of, whole_number
from calibrant.training.data.sources import MissingDataError, present
from calibrant.training.data.split import DataSets, Inputs, TensorSplit, stratified

PADDING, UNKNOWN = 0, 1
"""The indices that stand for no word and for a word outside the vocabulary."""

_RUN = re.compile(r"([^\w\s]|_)\1+")
_TOKEN = re.compile(
    r"[^\W\d_]+(?=n't\b)"  # the do of don't
    r"|n't\b"
    r"|'(?:s|re|ve|ll|d|m)\b"
    r"|[^\W\d_]+"
    r"|\d+(?:[.,]\d+)*"
    r"|[^\w\s]|_"
)

# How many documents a tokenizer is handed at once: it keeps what it cuts off for as long as it works on them.
_AT_ONCE = 1000

_NEWSGROUPS = "http://qwone.com/~jason/20Newsgroups/"


def tokens(text: str) -> list[str]:
    """The words, numbers and punctuation marks of a text, in the manner of the words of GloVe.

    Letters are lower-cased; ``n't`` and what follows an apostrophe (``'s``, ``'re``, ``'ve``, ``'ll``,
    ``'d``, ``'m``) are words of their own; a number keeps its inner points and commas; any other character
    that is not blank is a word, and a run of the same one, such as a drawn line, counts once.

    >>> tokens("It's 3.5 miles -- we don't walk!!!")
    ['it', "'s", '3.5', 'miles', '-', 'we', 'do', "n't", 'walk', '!']
    """
    return _TOKEN.findall(_RUN.sub(r"\1", text.lower()))


def glove(file: Path, words: Sequence[str]) -> Tensor:
    """The vectors of these words in a text file of ``word number number …`` lines, as GloVe's are.

    Lines that are not one word and as many numbers as most lines have are passed over: GloVe's larger files
    have words with blanks in them, and the format of word2vec has a header. Of a word that occurs twice the
    first vector counts.

    Args:
        file: the file, in UTF-8.
        words: V words.

    Returns:
        ``(V, d)``, float32; zeros for words that the file does not have.

    Raises:
        MissingDataError: there is no such file.
        ValueError: the file has no vectors, or those of none of the words.
    """
    present(file, "glove.6B.zip from https://nlp.stanford.edu/data/glove.6B.zip", file.parent)
    with file.open("rb") as lines:
        lengths = Counter(len(line.split()) - 1 for line in islice(lines, 100))
        dimension = lengths.most_common(1)[0][0] if lengths else 0
        if dimension < 1:
            raise ValueError(f"{file} has no vectors: expected lines of a word and its numbers")
        wanted = {word.encode(): row for row, word in enumerate(words)}
        vectors = np.zeros((len(words), dimension), np.float32)
        lines.seek(0)
        for line in lines:
            word, _, rest = line.partition(b" ")
            row = wanted.get(word)
            if row is None:
                continue
            numbers = rest.split()
            if len(numbers) != dimension:
                continue
            try:
                vector = np.array(numbers, np.float32)
            except ValueError:
                continue
            if np.isfinite(vector).all():
                vectors[row] = vector
                del wanted[word]
    if len(wanted) == len(words) > 0:
        raise ValueError(
            f"{file} has none of the {len(words)} words of the vocabulary in lines of a word and "
            f"{dimension} numbers: expected vectors of lower-case words, such as glove.6B.100d.txt"
        )
    return torch.from_numpy(vectors)


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
) -> DataSets:
    """20 Newsgroups: messages to twenty discussion groups, to be told apart by their text.

    The parts are drawn from the whole collection, with the groups in equal proportion. The sizes of the
    papers, which are the defaults, add up to the 19,997 messages of the original collection; the by-date one
    is without duplicates and has 18,846. Where the sizes add up to more than there is, all are scaled down by
    the same factor (by-date: 14,229 / 848 / 3,769) and nothing is left over.

    Args:
        root: the data folder, with ``20news-bydate-train/GROUP/…`` and ``20news-bydate-test/GROUP/…``, or
            for the original collection ``20_newsgroups/GROUP/…``.
        split_seed: of the draw.
        collection: ``"bydate"``, the union of its two folders, or ``"original"``.
        train: how many messages to learn from.
        validation: how many to adapt and choose with.
        test: how many to test with; None for all that are left.
        headers: whether to keep the lines above the first blank one. They name the group, or as good as.
        length: how many words of a message count; shorter ones are padded at the end.
        test_length: the same for validation and test, which must be alike; by default ``length``.
        vocabulary: how many words to tell apart, the most frequent ones of the training part.
        embedding: a file of GloVe vectors in ``root`` or its folder ``glove.6B``, or ``""`` for none. Words
            it does not have get zeros.
        tokenizer: the name or folder of a tokenizer of ``transformers``, to be used in place of vocabulary
            and embedding; inputs are then ``input_ids`` and ``attention_mask``.

    Raises:
        MissingDataError: a folder or file is not there.
    """
    one_of("collection", collection, ("bydate", "original"))
    if collection == "bydate":
        folders = [root / "20news-bydate-train", root / "20news-bydate-test"]
        archive = "20news-bydate.tar.gz"
    else:
        found = [folder for folder in sorted(root.glob("20_newsgroup*")) if folder.is_dir()]
        folders, archive = found[:1] or [root / "20_newsgroups"], "20news-19997.tar.gz"
    for folder in folders:
        present(folder, f"{archive} from {_NEWSGROUPS}{archive}", root)
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
    positions = {group: position for position, group in enumerate(groups)}
    targets = torch.tensor([positions[group] for _, group in files])
    indices = stratified(targets, _scaled(train, validation, test, len(files)), split_seed)
    texts = [_message(file.read_bytes(), headers) for file, _ in files]
    documents = [Documents([texts[index] for index in part.tolist()], targets[part]) for part in indices]
    return encoded(
        root,
        documents,
        tuple(groups),
        length=length,
        test_length=test_length,
        vocabulary=vocabulary,
        embedding=embedding,
        tokenizer=tokenizer,
    )


def text_table(
    root: Path,
    *,
    file: str,
    validation_file: str = "",
    test_file: str = "",
    text: str = "text",
    label: str = "label",
    split_seed: int = 0,
    validation: float = 0.1,
    test: float = 0.2,
    length: int = 256,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "",
    tokenizer: str = "",
) -> DataSets:
    """Texts and labels in the columns of a CSV, TSV or JSON Lines file.

    Labels that are all integers are ordered by value, others by name; the classes are those of ``file``, and
    the other files may have no more.

    Args:
        root: the data folder.
        file: what to learn from, relative to ``root``: ``.csv`` or ``.tsv`` with column names in the first
            line, or ``.jsonl`` with an object in each line; UTF-8.
        validation_file: what to adapt and choose with; by default drawn from ``file``.
        test_file: what to test with; by default drawn from ``file``.
        text: the column of the text.
        label: the column of the label, a string or an integer.
        split_seed: of the draws, in which the classes have the proportions of the whole.
        validation: the fraction of ``file`` to draw for validation, if there is no file for it.
        test: the fraction of ``file`` to draw for the test, if there is no file for it.
        length: how many words of a text count, see `newsgroups`; also of the following.
        test_length: the same for validation and test.
        vocabulary: how many words to tell apart.
        embedding: a file of GloVe vectors, or ``""`` for none.
        tokenizer: a tokenizer of ``transformers``.

    Raises:
        MissingDataError: a file is not there.
        ValueError: a file is malformed; the message has the line and the column.
    """
    rows = [
        list(_rows(root / name, text, label)) if name else None for name in (file, validation_file, test_file)
    ]
    main = rows[0] or []
    classes = _classes([row.label for row in main], root / file)
    positions = {name: position for position, name in enumerate(classes)}

    def labelled(name: str, part: list[_Row]) -> Documents:
        if not part:
            raise ValueError(f"{root / name} has no rows: expected at least one")
        for row in part:
            if row.label not in positions:
                raise ValueError(
                    f"{root / name}, line {row.line}: column {label!r} has {row.label!r}, which {file} does "
                    "not have: expected the classes that there are to learn"
                )
        return Documents([row.text for row in part], torch.tensor([positions[row.label] for row in part]))

    given = [
        None if part is None else labelled(name, part)
        for name, part in zip((file, validation_file, test_file), rows, strict=True)
    ]
    return encoded(
        root,
        _completed(given, validation, test, split_seed),
        tuple(map(str, classes)),
        length=length,
        test_length=test_length,
        vocabulary=vocabulary,
        embedding=embedding,
        tokenizer=tokenizer,
    )


def huggingface(
    root: Path,
    *,
    path: str,
    name: str | None = None,
    text: str = "text",
    label: str = "label",
    train_split: str = "train",
    validation_split: str = "",
    test_split: str = "test",
    split_seed: int = 0,
    validation: float = 0.1,
    test: float = 0.2,
    length: int = 256,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "",
    tokenizer: str = "",
) -> DataSets:
    """Texts and labels of a Hugging Face data set that is on disk; needs the package ``datasets``.

    Nothing is downloaded. A data set from the hub is put in place by
    ``datasets.load_dataset("ag_news").save_to_disk("DATA_ROOT/ag_news")``.

    Args:
        root: the data folder.
        path: the folder of the data set in it: one that ``save_to_disk`` wrote, or one that
            ``load_dataset`` understands.
        name: of the configuration, where the data set has several.
        text: the column of the text.
        label: the column of the label: a class label, a string or an integer.
        train_split: the name of the part to learn from.
        validation_split: of the part to adapt and choose with; ``""`` to draw it from the training part.
        test_split: of the part to test with; ``""`` to draw it from the training part.
        split_seed: of the draws, in which the classes have the proportions of the whole.
        validation: the fraction of the training part to draw for validation.
        test: the fraction of the training part to draw for the test.
        length: how many words of a text count, see `newsgroups`; also of the following.
        test_length: the same for validation and test.
        vocabulary: how many words to tell apart.
        embedding: a file of GloVe vectors, or ``""`` for none.
        tokenizer: a tokenizer of ``transformers``.

    Raises:
        ImportError: ``datasets`` is not installed.
        MissingDataError: there is no such folder.
        ValueError: a part, a column or a label is not what it should be.
    """
    library = _optional("datasets")
    folder = root / path
    present(
        folder, f"it with datasets.load_dataset({path!r}) from the Hugging Face hub", folder, "save_to_disk"
    )
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    tables = library.load_from_disk(str(folder)) if saved else library.load_dataset(str(folder), name)
    if not hasattr(tables, "keys"):
        tables = {train_split: tables}
    named = (train_split, validation_split, test_split)
    for part in filter(None, named):
        if part not in tables:
            raise ValueError(
                f"{folder} has no part {part!r}: expected one of {', '.join(map(repr, tables.keys()))}, or "
                "for validation and test '' to draw them from the training part"
            )
        for column in (text, label):
            if column not in tables[part].column_names:
                raise ValueError(
                    f"{folder}, part {part!r}, has no column {column!r}: expected one of "
                    f"{', '.join(map(repr, tables[part].column_names))}"
                )
    names = getattr(tables[train_split].features[label], "names", None)
    columns = {
        part: (list(tables[part][text]), list(tables[part][label])) for part in set(filter(None, named))
    }
    classes = list(range(len(names))) if names else _classes(columns[train_split][1], folder)
    positions = {value: position for position, value in enumerate(classes)}

    def labelled(part: str) -> Documents:
        texts, labels = columns[part]
        for number, (content, value) in enumerate(zip(texts, labels, strict=True)):
            if not isinstance(content, str) or value not in positions:
                column, found = (label, value) if isinstance(content, str) else (text, content)
                expected = "one of the training part's labels" if isinstance(content, str) else "a string"
                raise ValueError(
                    f"{folder}, part {part!r}, row {number}: column {column!r} has {found!r}, "
                    f"expected {expected}"
                )
        return Documents(texts, torch.tensor([positions[value] for value in labels], dtype=torch.long))

    return encoded(
        root,
        _completed([labelled(part) if part else None for part in named], validation, test, split_seed),
        tuple(map(str, names or classes)),
        length=length,
        test_length=test_length,
        vocabulary=vocabulary,
        embedding=embedding,
        tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class Documents:
    """Texts and their labels, ``(N,)``."""

    texts: list[str]
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.targets):
            raise ValueError(f"there are {len(self.texts)} texts and {len(self.targets)} labels")

    def subset(self, indices: Tensor) -> Documents:
        """The documents of these indices."""
        return Documents([self.texts[index] for index in indices.tolist()], self.targets[indices])


def encoded(
    root: Path,
    documents: Sequence[Documents],
    class_names: tuple[str, ...],
    *,
    length: int,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "",
    tokenizer: str = "",
) -> DataSets:
    """Documents as numbers: what every data set of text ends with.

    Without a tokenizer an input is ``length`` indices of words: 0 for padding, 1 for words outside the
    vocabulary, then the words of the training part by falling frequency.

    Args:
        root: the data folder.
        documents: of training, validation and test.
        class_names: K names.
        length: how many words or tokens of a training document count.
        test_length: the same for validation and test; by default ``length``.
        vocabulary: how many indices there are at most, the two special ones included.
        embedding: a file of GloVe vectors, or ``""`` for none; not used with a tokenizer.
        tokenizer: the name or folder of a tokenizer of ``transformers``, or ``""`` for none.

    Returns:
        The data, about which ``vocabulary_size``, ``length`` and, of a file of vectors, ``embedding`` are
        known.

    >>> parts = [Documents(["a cat", "a dog sat"], torch.tensor([0, 1]))] * 3
    >>> data = encoded(Path(), parts, ("cat", "dog"), length=4)
    >>> data.train.batch(torch.arange(2))[0], data.about["vocabulary_size"]
    (tensor([[2, 3, 0, 0],
            [2, 4, 5, 0]]), 6)
    """
    whole_number("length", length)
    lengths = [length, *[whole_number("test_length", test_length or length)] * (len(documents) - 1)]
    texts = [part.texts for part in documents]
    if not texts[0]:
        raise ValueError("there are no training documents")
    about: dict[str, Any]
    if tokenizer:
        inputs, about = _by_tokenizer(root, texts, lengths, tokenizer)
    else:
        inputs, about = _by_vocabulary(root, texts, lengths, vocabulary, embedding)
    train, validation, test = (
        TensorSplit(tensors, part.targets) for tensors, part in zip(inputs, documents, strict=True)
    )
    return DataSets(train, validation, test, class_names, {**about, "length": length})


def _by_vocabulary(
    root: Path, texts: Sequence[list[str]], lengths: Sequence[int], vocabulary: int, embedding: str
) -> tuple[list[Inputs], dict[str, Any]]:
    if whole_number("vocabulary", vocabulary) < 3:
        raise ValueError(
            f"vocabulary must be at least 3, padding and unknown words included, got {vocabulary!r}"
        )
    # Words are numbered as they come up and renumbered at the end: keeping them as numbers at once takes an
    # eighth of the memory that lists of strings would.
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    provisional = [
        [
            np.frombuffer(array("i", map(numbers.__getitem__, tokens(text)[:length])), np.int32)
            for text in part
        ]
        for part, length in zip(texts, lengths, strict=True)
    ]
    counts = np.bincount(np.concatenate(provisional[0]), minlength=len(numbers))
    words = sorted(
        (word for word, number in numbers.items() if counts[number]), key=lambda w: (-counts[numbers[w]], w)
    )
    words = words[: vocabulary - 2]
    final = np.full(len(numbers), UNKNOWN, np.int64)
    final[[numbers[word] for word in words]] = np.arange(2, len(words) + 2)
    inputs: list[Inputs] = []
    for part, length in zip(provisional, lengths, strict=True):
        indices = torch.full((len(part), length), PADDING)
        for row, document in zip(indices.numpy(), part, strict=True):
            row[: len(document)] = final[document]
        inputs.append(indices)
    about: dict[str, Any] = {"vocabulary_size": len(words) + 2}
    if embedding:
        inside = root / "glove.6B" / embedding
        vectors = glove(inside if inside.is_file() else root / embedding, words)
        about["embedding"] = torch.cat([vectors.new_zeros(2, vectors.shape[1]), vectors])
    return inputs, about


def _by_tokenizer(
    root: Path, texts: Sequence[list[str]], lengths: Sequence[int], name: str
) -> tuple[list[Inputs], dict[str, Any]]:
    library = _optional("transformers")
    source = str(root / name) if (root / name).is_dir() else name
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(source)
    except OSError as error:
        download = f"the tokenizer {name!r} with transformers.AutoTokenizer.from_pretrained from its hub"
        raise MissingDataError(root / name, download, root / name, "save_pretrained") from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer {name!r} has no padding token: expected one, or an end-of-text token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    inputs: list[Inputs] = []
    for part, length in zip(texts, lengths, strict=True):
        tensors = {
            key: torch.empty(len(part), length, dtype=torch.long) for key in ("input_ids", "attention_mask")
        }
        for start in range(0, len(part), _AT_ONCE):
            batch = tokenizer(
                part[start : start + _AT_ONCE],
                truncation=True,
                max_length=length,
                padding="max_length",
                return_attention_mask=True,
            )
            for key, tensor in tensors.items():
                tensor[start : start + _AT_ONCE] = torch.tensor(batch[key])
        inputs.append(tensors)
    return inputs, {"vocabulary_size": len(tokenizer)}


def _optional(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs the package {package}: pip install {package}") from error


def _message(content: bytes, headers: bool) -> str:
    text = content.decode("latin-1").replace("\r\n", "\n")
    return text if headers else f"\n{text}".partition("\n\n")[2]


def _scaled(train: int, validation: int, test: int | None, available: int) -> tuple[int, int, int]:
    """The sizes, scaled down to what is there if they add up to more; no part is scaled down to nothing."""
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


def _completed(
    given: Sequence[Documents | None], validation: float, test: float, split_seed: int
) -> list[Documents]:
    """The three parts, those that are not given drawn from the first."""
    main, *others = given
    assert main is not None
    size = len(main.texts)
    fractions = [
        in_range("validation", validation, 0, 1, open_low=True),
        in_range("test", test, 0, 1, open_low=True),
    ]
    drawn = [
        0 if part else max(1, round(fraction * size))
        for part, fraction in zip(others, fractions, strict=True)
    ]
    if sum(drawn) >= size:
        raise ValueError(
            f"cannot draw {' and '.join(str(count) for count in drawn if count)} of {size} documents and "
            "have some to learn from: expected fractions validation and test that add up to less than 1, or "
            "more documents"
        )
    kept, *rest = stratified(main.targets, [size - sum(drawn), *drawn], split_seed)
    return [
        main.subset(kept),
        *(part or main.subset(indices) for part, indices in zip(others, rest, strict=True)),
    ]


@dataclass(frozen=True)
class _Row:
    line: int
    text: str
    label: str | int


def _rows(file: Path, text: str, label: str) -> Iterator[_Row]:
    """The rows of a table; checked as they are read."""
    readers: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = {
        ".csv": lambda file: _separated(file, ","),
        ".tsv": lambda file: _separated(file, "\t"),
        ".jsonl": _json_lines,
    }
    if file.suffix.lower() not in readers:
        raise ValueError(f"{file} ends in {file.suffix!r}: expected one of {', '.join(map(repr, readers))}")
    present(file, f"a table with the columns {text!r} and {label!r}", file.parent, "put")
    try:
        for line, row in readers[file.suffix.lower()](file):
            for option, column in (("text", text), ("label", label)):
                if column not in row:
                    raise ValueError(
                        f"{file}, line {line}: no column {column!r}, expected one of that name; there are "
                        f"{', '.join(map(repr, row))}: say {option}=NAME for another"
                    )
                if row.get(column) is None:
                    raise ValueError(
                        f"{file}, line {line}: nothing in column {column!r}, expected a value; there are "
                        f"{', '.join(repr(key) for key, value in row.items() if value is not None)}"
                    )
            content, value = row[text], row[label]
            if not isinstance(content, str):
                raise ValueError(f"{file}, line {line}: column {text!r} has {content!r}, expected a string")
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise ValueError(
                    f"{file}, line {line}: column {label!r} has {value!r}, expected a string or an integer"
                )
            yield _Row(line, content, _number(value))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} has bytes that are not UTF-8 ({error.reason}): expected UTF-8") from error


def _separated(file: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    # The default limit of 131,072 characters is less than some documents have.
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
            while True:
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise ValueError(f"{file}, line {reader.reader.line_num}: {error}") from error
                extra = row.pop(None, None)
                if extra is not None:
                    raise ValueError(
                        f"{file}, line {reader.line_num}: {len(row) + len(extra)} values, expected "
                        f"{len(row)}; a value that contains {delimiter!r} must be quoted"
                    )
                yield reader.line_num, row
    finally:
        csv.field_size_limit(limit)


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: not JSON at character {error.colno} ({error.msg}), expected "
                    "an object"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: {line.strip()[:40]!r}, expected an object")
            yield number, row


def _number(value: str | int) -> str | int:
    """A label written as an integer as one."""
    return (
        int(value) if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d*)", value, re.ASCII) else value
    )


def _classes(labels: Sequence[Any], source: Path) -> list[str | int]:
    """The different labels in order: integers by value, and before strings."""
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ValueError(f"{source} has the label {label!r}: expected strings or integers")
    classes = sorted(set(labels), key=lambda label: (isinstance(label, str), label))
    if len(classes) < 2:
        raise ValueError(f"{source} has labels of {len(classes)} classes: expected at least 2")
    return classes
