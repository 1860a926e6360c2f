"""Texts as numbers for a model: by a vocabulary of words with or without GloVe vectors, or by a tokenizer."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from sys import intern
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import one_of, whole_number
from calibrant.extras import optional_package
from calibrant.sizes import check_memory
from calibrant.training.data.preparation import Preparation
from calibrant.training.data.safe_readers import MissingDataError, present
from calibrant.training.data.split import DataSets, Inputs, TensorSplit
from calibrant.training.data.text.documents import Documents

PADDING, UNKNOWN = 0, 1
"""The numbers for padding and for words outside the vocabulary."""

Preprocessing = Literal["glove", "keras"]
"""How texts become numbers of words; see `encode`."""

# A tokenizer keeps even the truncated tokens of a call in memory, so it gets this many texts at once.
BATCH = 1000

_REPEATS = re.compile(r"([^\w\s]|_)\1+")
_TOKEN = re.compile(
    r"[^\W\d_]+(?=n't\b)"  # the do of don't
    r"|n't\b"
    r"|'(?:s|re|ve|ll|d|m)\b"
    r"|[^\W\d_]+"
    r"|\d+(?:[.,]\d+)*"
    r"|[^\w\s]|_"
)
_KERAS_BLANKS = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n', " "))


def encode(
    root: Path,
    documents: Sequence[Documents],
    class_names: tuple[str, ...],
    length: int,
    test_length: int | None = None,
    vocabulary: int = 20000,
    embedding: str = "",
    tokenizer: str = "",
    preprocessing: Preprocessing = "glove",
    column: str = "text",
    target: tuple[str, ...] = (),
) -> DataSets:
    """Encode documents by a vocabulary of words, or by a tokenizer.

    There are two ways to make words and to cut texts:

    ================== ============================================ =======================================
    preprocessing      ``"glove"``                                  ``"keras"``
    ================== ============================================ =======================================
    words              those of `tokens`, as in the GloVe vectors   what blanks and punctuation separate
    vocabulary         counted in the training texts as cut         counted in all texts, of all parts
    unknown words      have a number of their own                   are left out
    long texts         keep their first words                       keep their last words
    short texts        are padded at the end                        are padded at the start
    ================== ============================================ =======================================

    ``"keras"`` is what the releases of the calibration papers do with the tools of Keras. Its vocabulary
    knows the words of the test texts, but not their labels.

    Args:
        root: the data folder.
        documents: the training, validation and test documents.
        class_names: K names.
        length: how many words or tokens of a training text to keep; shorter texts are padded.
        test_length: the same for validation and test; None for ``length``.
        vocabulary: the size of the vocabulary, made of the most frequent words. It includes the numbers for
            padding and for unknown words.
        embedding: a file of GloVe vectors in ``root`` or in its folder ``glove.6B``; ``""`` for none. Words
            that the file does not have get zeros.
        tokenizer: the name or folder of a tokenizer of ``transformers``, used in place of vocabulary and
            embedding; inputs are then ``input_ids`` and ``attention_mask``. ``""`` for none.
        preprocessing: ``"glove"`` or ``"keras"``; not used with a tokenizer.
        column: the column of the text in tables of new texts.
        target: the columns of the labels, which such tables may have.

    Returns:
        The data, with ``vocabulary_size``, ``length`` and, from a file of vectors, ``embedding``.

    >>> parts = [Documents(["a cat", "a dog sat"], torch.tensor([0, 1]))] * 3
    >>> data = encode(Path(), parts, ("cat", "dog"), length=4)
    >>> data.train.batch(torch.arange(2))[0], data.about["vocabulary_size"]
    (tensor([[2, 3, 0, 0],
            [2, 4, 5, 0]]), 6)
    """
    lengths = [whole_number("length", length), *[whole_number("test_length", test_length or length)] * 2]
    texts = [part.texts for part in documents]
    if not texts[0]:
        raise ValueError("there are no training documents")
    about: dict[str, Any] = {"length": length}
    preparation: Preparation | None
    inputs: list[Inputs]
    if tokenizer:
        loaded = _tokenizer(root, tokenizer)
        about["vocabulary_size"] = len(loaded)
        inputs = [tokenize(loaded, part, each) for part, each in zip(texts, lengths, strict=True)]
        preparation = TokenPreparation.of(loaded, lengths[-1], column, target)
    else:
        inputs, words = number_words(texts, lengths, vocabulary, preprocessing)
        preparation = WordPreparation(tuple(words), lengths[-1], preprocessing, column, target)
        special = _FIRST_WORD[preprocessing]
        about["vocabulary_size"] = len(words) + special
        if embedding:
            inside = root / "glove.6B" / embedding
            vectors = glove(inside if inside.is_file() else root / embedding, words)
            about["embedding"] = torch.cat([vectors.new_zeros(special, vectors.shape[1]), vectors])
    train, validation, test = (
        TensorSplit(tensors, part.targets) for tensors, part in zip(inputs, documents, strict=True)
    )
    several = train.targets.ndim > 1
    return DataSets(
        train, validation, test, class_names, about, preparation=preparation, several_labels=several
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


def separated_words(text: str) -> list[str]:
    """Split a text at blanks and punctuation, which is dropped; apostrophes belong to words.

    >>> separated_words("It's 3.5 miles -- we don't walk!!!")
    ["it's", '3', '5', 'miles', 'we', "don't", 'walk']
    """
    return text.lower().translate(_KERAS_BLANKS).split()


_FIRST_WORD: dict[Preprocessing, int] = {"glove": 2, "keras": 1}
"""The number of the most frequent word. Lower numbers are for padding and, in ``"glove"``, unknown words."""


def number_words(
    texts: Sequence[list[str]],
    lengths: Sequence[int],
    vocabulary: int,
    preprocessing: Preprocessing = "glove",
) -> tuple[list[Inputs], list[str]]:
    """The words of each part as numbers ``(N, length)``, and the words by falling frequency; see `encode`."""
    keras = one_of("preprocessing", preprocessing, ("glove", "keras")) == "keras"
    first = _FIRST_WORD[preprocessing]
    if whole_number("vocabulary", vocabulary) <= first:
        raise ValueError(
            f"vocabulary must be at least {first + 1}, padding{'' if keras else ' and unknown words'} "
            f"included, got {vocabulary!r}"
        )
    parts = [
        # Equal words are one object, which keeps the memory small.
        [list(map(intern, _words(text, length, keras))) for text in part]
        for part, length in zip(texts, lengths, strict=True)
    ]
    counts = Counter(chain.from_iterable(chain(*(parts if keras else parts[:1]))))
    words = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - first]
    numbers = {word: number for number, word in enumerate(words, first)}
    inputs: list[Inputs] = [
        _in_rows(part, numbers, length, keras) for part, length in zip(parts, lengths, strict=True)
    ]
    return inputs, words


def _words(text: str, length: int, keras: bool) -> list[str]:
    return separated_words(text) if keras else tokens(text)[:length]


def _in_rows(documents: Sequence[list[str]], numbers: Mapping[str, int], length: int, keras: bool) -> Tensor:
    """The numbers of each document's words in rows ``(N, length)``, cut and padded; see `encode`."""
    indices = torch.full((len(documents), length), PADDING, device="cpu")
    for row, words in zip(indices.numpy(), documents, strict=True):
        if keras:
            known = [numbers[word] for word in words if word in numbers][-length:]
            row[length - len(known) :] = known
        else:
            row[: len(words)] = [numbers.get(word, UNKNOWN) for word in words]
    return indices


def glove(file: Path, words: Sequence[str]) -> Tensor:
    """The vectors of these words ``(V, d)``, float32, from a text file with lines ``word number number …``.

    Lines of another length than most are skipped: GloVe's larger files have words with spaces, and word2vec's
    files have a header. If a word occurs twice, its first vector counts. Words that are not in the file get
    zeros.
    """
    present(file, "glove.6B.zip from https://nlp.stanford.edu/data/glove.6B.zip", file.parent)
    with file.open("rb") as lines:
        lengths = Counter(len(line.split()) - 1 for line in islice(lines, 100))
        dimension = lengths.most_common(1)[0][0] if lengths else 0
        if dimension < 1:
            raise ValueError(f"{file} has no vectors: expected lines of a word and its numbers")
        rows = {word.encode(): row for row, word in enumerate(words)}
        check_memory(4 * len(words) * dimension, f"{file} has vectors of {dimension} numbers: their table")
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


def _tokenizer(root: Path, name: str) -> Any:
    """A tokenizer of transformers with a padding token, by its name or its folder in ``root``."""
    library = optional_package("transformers", "transformers", purpose=f"the tokenizer {name!r}")
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
    return tokenizer


def tokenize(tokenizer: Any, texts: Sequence[str], length: int) -> dict[str, Tensor]:
    """The ``input_ids`` and ``attention_mask`` of texts, ``(N, length)`` each."""
    options = {"truncation": True, "padding": "max_length", "return_attention_mask": True}
    keys = ("input_ids", "attention_mask")
    tensors = {key: torch.empty(len(texts), length, dtype=torch.long, device="cpu") for key in keys}
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], max_length=length, **options)
        for key, tensor in tensors.items():
            tensor[start : start + BATCH] = torch.tensor(batch[key], device="cpu")
    return tensors


class _TextPreparation(Preparation):
    """Texts; a raw input is a list of texts, or a table with the texts in a column."""

    column: str
    target: tuple[str, ...]

    def texts(self, raw: Any) -> list[str]:
        """Raw texts, checked."""
        if isinstance(raw, str) or not isinstance(raw, Iterable):
            what = "one text" if isinstance(raw, str) else f"a {type(raw).__name__}"
            raise ValueError(f"got {what}, expected a list of texts, such as ['a text']")
        texts = list(raw)
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"got a list with a {type(text).__name__}, expected a list of texts")
        return texts

    def read(self, path: Path) -> tuple[list[str], list[str]]:
        # Here, because that module imports this one.
        from calibrant.training.data.text.tables import read_texts

        texts = read_texts(path, self.column)
        return texts, [str(row + 1) for row in range(len(texts))]

    def beside(self, path: Path, raw: Any) -> dict[str, list[Any]]:
        from calibrant.training.data.text.tables import read_others

        return read_others(path, (self.column, *self.target))


@dataclass(frozen=True)
class WordPreparation(_TextPreparation):
    """Texts as numbers of words ``(N, length)``, by a vocabulary; see `encode`.

    >>> WordPreparation(("a", "cat"), 4)(["a black cat"])
    tensor([[2, 1, 3, 0]])

    ``words`` are in the order of their numbers.
    """

    kind: ClassVar[str] = "words"
    graph_inputs = "the numbers of words that calibrant.load(RUN).preparation(texts) returns"
    words: tuple[str, ...]
    length: int
    preprocessing: Preprocessing = "glove"
    column: str = "text"
    target: tuple[str, ...] = ()

    def __call__(self, raw: Any) -> Tensor:
        keras = self.preprocessing == "keras"
        documents = [_words(text, self.length, keras) for text in self.texts(raw)]
        return _in_rows(documents, self._numbers, self.length, keras)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, _FIRST_WORD[self.preprocessing])}

    def state(self) -> dict[str, Any]:
        columns = {"column": self.column, "target": list(self.target)}
        settings = {"length": self.length, "preprocessing": self.preprocessing}
        return {**settings, **columns, "words": list(self.words)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        preprocessing = one_of("preprocessing", state["preprocessing"], ("glove", "keras"))
        length = whole_number("length", state["length"])
        target = tuple(map(str, state.get("target", ())))  # bundles of earlier versions have none
        return cls(tuple(map(str, state["words"])), length, preprocessing, str(state["column"]), target)


@dataclass(frozen=True)
class TokenPreparation(_TextPreparation):
    """Texts as ``input_ids`` and ``attention_mask`` ``(N, length)``, by a tokenizer of ``transformers``.

    ``files`` are the texts of the tokenizer's own JSON files, by name.
    """

    kind: ClassVar[str] = "tokens"
    graph_inputs = "the numbers of tokens that calibrant.load(RUN).preparation(texts) returns"
    files: Mapping[str, str]
    length: int
    column: str = "text"
    target: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, length: int, column: str, target: tuple[str, ...] = ()) -> Self | None:
        """The preparation by a tokenizer; None for one in Python, which is not stored as JSON."""
        if not tokenizer.is_fast:
            return None
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.json")}
        return cls(files, length, column, target)

    def __call__(self, raw: Any) -> dict[str, Tensor]:
        return tokenize(self._tokenizer, self.texts(raw), self.length)

    @cached_property
    def _tokenizer(self) -> Any:
        library = optional_package("transformers", "transformers", purpose="this tokenizer")
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.files.items():
                Path(folder, name).write_text(text, encoding="utf-8")
            # A file must not name code to download and run.
            return library.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def state(self) -> dict[str, Any]:
        columns = {"column": self.column, "target": list(self.target)}
        return {"length": self.length, **columns, "files": dict(self.files)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        files = {str(name): str(text) for name, text in state["files"].items()}
        for name in files:
            if not re.fullmatch(r"\w+\.json", name):
                raise ValueError(f"it has a file {name!r}, expected the JSON files of a tokenizer")
        target = tuple(map(str, state.get("target", ())))
        return cls(files, whole_number("length", state["length"]), str(state["column"]), target)
