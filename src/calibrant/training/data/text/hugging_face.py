"""Data sets saved by the package datasets of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from calibrant.training.data.safe_readers import present
from calibrant.training.data.split import DataSets
from calibrant.training.data.text.documents import (
    Documents,
    Encoding,
    class_positions,
    draw_missing,
    sorted_classes,
)
from calibrant.training.data.text.tokenizer import optional_package


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
    """Texts and labels of a Hugging Face data set on disk; needs the package ``datasets``.

    Nothing is downloaded. To save a data set from the hub, run
    ``datasets.load_dataset("ag_news").save_to_disk("DATA_ROOT/ag_news")``.

    Args:
        root: the data folder.
        path: the folder of the data set, relative to ``root``: written by ``save_to_disk``, or in a form that
            ``load_dataset`` understands.
        name: the configuration, if the data set has several.
        text: the column of the text.
        label: the column of the label: a class label, a string or an integer.
        train_split: the name of the training part.
        validation_split: the name of the validation part; ``""`` to draw it from the training part.
        test_split: the name of the test part; ``""`` to draw it from the training part.
        split_seed: the seed of the draws, which are stratified by class.
        validation: the fraction of the training part to draw for validation.
        test: the fraction of the training part to draw for the test.
        length: how many words of a text to keep; see `Encoding`, also for the options below.
        test_length: the same for validation and test.
        vocabulary: the size of the vocabulary.
        embedding: a file of GloVe vectors, or ``""`` for none.
        tokenizer: a tokenizer of ``transformers``, or ``""`` for none.

    Raises:
        ImportError: ``datasets`` is not installed.
        MissingDataError: the folder is missing.
        ValueError: a part, a column or a label is missing or of another type.
    """
    library = optional_package("datasets")
    folder = root / path
    present(
        folder, f"it with datasets.load_dataset({path!r}) from the Hugging Face hub", folder, "save_to_disk"
    )
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    tables = library.load_from_disk(str(folder)) if saved else library.load_dataset(str(folder), name)
    if not hasattr(tables, "keys"):
        tables = {train_split: tables}
    names: list[str] | None = None
    classes: list[str | int] = []
    parts: list[Documents | None] = []
    for part in (train_split, validation_split, test_split):
        if not part:
            parts.append(None)
            continue
        if part not in tables:
            raise ValueError(
                f"{folder} has no part {part!r}: expected one of {', '.join(map(repr, tables.keys()))}, or "
                "for validation and test '' to draw them from the training part"
            )
        table = tables[part]
        for column in (text, label):
            if column not in table.column_names:
                raise ValueError(
                    f"{folder}, part {part!r}, has no column {column!r}: expected one of "
                    f"{', '.join(map(repr, table.column_names))}"
                )
        texts, labels = list(table[text]), list(table[label])
        where = f"{folder}, part {part!r}, row"
        for number, content in enumerate(texts):
            if not isinstance(content, str):
                raise ValueError(f"{where} {number}: column {text!r} has {content!r}, expected a string")
        if not classes:
            names = getattr(table.features[label], "names", None)
            classes = list(range(len(names))) if names else sorted_classes(labels, folder)
        targets = class_positions(labels, classes, where, range(len(labels)), f"part {train_split!r}")
        parts.append(Documents(texts, targets))
    documents = draw_missing(parts, validation, test, split_seed)
    encoding = Encoding(length, test_length, vocabulary, embedding, tokenizer)
    return encoding.data_sets(root, documents, tuple(map(str, names or classes)))
