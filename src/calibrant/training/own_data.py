"""The choice of a recipe for data of one's own, by what a file or folder holds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from calibrant.arguments import nearest
from calibrant.options import Choice, RecipeError
from calibrant.printable import first_few
from calibrant.training.data import DataSets, columns, load_data
from calibrant.training.data.columns import (
    Columns,
    as_texts,
    counts_rows,
    is_missing,
    is_numeric,
    looks_like,
    read_columns,
    repeats,
    too_many_categories,
)
from calibrant.training.data.on_disk import ImageFileSplit
from calibrant.training.data.safe_readers import image_size
from calibrant.training.data.sampling import part_sizes
from calibrant.training.data.text.encoding import tokens
from calibrant.training.data.text.tables import read_others
from calibrant.training.recipe import Recipe
from calibrant.warning import warn

LOSS = "ce"
"""The loss of the recipes that are chosen here."""

TARGETS = ("label", "target", "class")
"""Names of columns, in lower case, that are taken for the target if none is named."""

_PARTS = {"validation": 0.2, "test": 0.2}
"""Fractions of the data. Validation data also serve adaptive losses and calibrators, which need many."""

_FEWEST_PER_CLASS = 2
"""Elements that validation and test must have for each class, on average."""

_LENGTHS = ((1_000, 32, 50), (10_000, 64, 40), (50_000, 128, 30), (inf, 256, 20))
"""Batch size and epochs for up to so many training elements."""

_TEXT_LENGTHS = (32, 64, 128, 256)
"""Lengths of texts in words to choose from: the first one that cuts off only few texts."""

_MANY_IMAGES = 10_000
"""Up to so many images get a network that trains on a CPU, more of them a larger one."""

_TABLES = (*columns.SUFFIXES, ".jsonl")

SUFFIXES = (*_TABLES, ".npz")
"""Of the files that `choose_recipe` takes."""


def choose_recipe(path: Path, target: str | None = None, changes: Sequence[str] = ()) -> Recipe:
    """A recipe for the data in a file or folder; its description says what was found and chosen.

    | found | data set | network |
    | --- | --- | --- |
    | folders of images | `image-folder` | `cnn`; `cifar-resnet-32` for more than 10,000 images |
    | a table of numbers and categories | `table` | `mlp` |
    | a table with one column of texts besides the target | `text-table` | `text-bag` |
    | an ``.npz`` with images or features | `npz` | the same for images, `mlp` for features |

    A folder with ``train.csv``, and perhaps ``validation.csv`` and ``test.csv``, is a table in parts. The
    recipe holds the absolute path of the data, so that it can be followed in any folder.

    Args:
        path: a folder of images, a ``.csv``, ``.tsv``, ``.parquet``, ``.jsonl`` or ``.npz`` file, or a folder
            of tables.
        target: the column of the class in a table; by default the only one named as in `TARGETS`. Several
            columns of 0 and 1, separated by commas, are labels of their own: the recipe is then ``binary``.
        changes: changes of the recipe, as for `Recipe.override`.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    files = {"file": path} if path.is_file() else _parts(path)
    suffix = files["file"].suffix.lower() if files else ""
    if suffix in _TABLES:
        return _table(files, target, changes)
    if target is not None:
        raise RecipeError(
            f"--target names a column of a table, but {path} is not a table of a known kind: expected "
            f"{', '.join(_TABLES)}"
        )
    if suffix == ".npz":
        return _arrays(path, changes)
    entries = sorted(path.iterdir()) if path.is_dir() else []
    tables = [entry for entry in entries if entry.suffix.lower() in _TABLES]
    hint = f"; for a single table pass the file, such as {tables[0]}" if tables else ""
    if any(entry.is_dir() for entry in entries):
        try:
            return _images(path, changes)
        except ValueError as error:
            if hint:
                raise RecipeError(f"{error}{hint}") from error
            raise
    raise RecipeError(
        f"{path} is of no known kind: expected a folder with a folder of images for each class, a "
        f"{', '.join(_TABLES)} table, or an .npz file{hint}"
    )


def _parts(folder: Path) -> dict[str, Path]:
    """The tables in a folder, by the options of data sets; none if there is no table to train with."""
    options = {"file": ("train",), "validation_file": ("validation", "val"), "test_file": ("test",)}
    found = {}
    for option, names in options.items():
        tables = (folder / f"{name}{suffix}" for name in names for suffix in _TABLES)
        if file := next(filter(Path.is_file, tables), None):
            found[option] = file
    return found if "file" in found else {}


def _recipe(
    path: Path,
    found: Callable[[Mapping[str, Any]], str],
    size: int,
    data: Choice,
    model: Choice,
    changes: Sequence[str],
    **settings: Any,
) -> Recipe:
    """The recipe for so many elements, with the changes; its description is for the changed recipe.

    ``found`` tells what the data are, by the options of the data set. ``settings`` replace those that all
    kinds of data share.
    """
    batch_size, epochs = next((batch, epochs) for most, batch, epochs in _LENGTHS if size <= most)
    shared = {
        "batch_size": batch_size,
        "epochs": epochs,
        "optimizer": Choice("adamw", {"lr": 1e-3}),
        "schedule": Choice("cosine"),
    }
    in_parts = any(option.endswith("_file") for option in data.options)  # the name of a part tells little
    folder = path.absolute().parent if in_parts else path.absolute()
    recipe = Recipe(
        name=path.stem if path.is_file() and not in_parts else folder.name,
        loss=LOSS,
        data=Choice(data.name, {**data.options, **_PARTS}),
        model=model,
        drop_last=False,
        select="nll",
        **{**shared, **settings},
    ).override(changes)
    chosen = f"data set {recipe.data.name}, network {recipe.model.name}"
    if recipe.data.name == data.name:
        chosen = f"{found(recipe.data.options)}: {chosen}"
    return replace(recipe, description=recipe.description or chosen)


# --------------------------------------------------------------------------------------------------- tables


def _table(files: Mapping[str, Path], target: str | None, changes: Sequence[str]) -> Recipe:
    path = files["file"]
    named = {option: str(file.absolute()) for option, file in files.items()}
    table = _json_columns(path) if path.suffix.lower() == ".jsonl" else read_columns(path)
    targets = _targets(path, table, target)
    listed = _quoted(targets)
    if len(table) == len(targets):
        raise RecipeError(f"{path}: the table has no column besides the target {listed}")
    counted = [name for name, values in table.items() if name not in targets and counts_rows(values)]
    others = {name: values for name, values in table.items() if name not in (*targets, *counted)}
    numeric = [name for name, values in others.items() if is_numeric(values)]
    given_parts = [option.removesuffix("_file") for option in files]
    labels = [table[name] for name in targets]
    size, several = len(labels[0]), len(targets) > 1 or any(isinstance(each, list) for each in labels[0][:1])
    about = f"{size:,} rows, target {listed}{'' if target else ' (by its name)'}"
    about += ", several labels for each (binary)" if several else ""
    option: dict[str, Any] = {"target": targets if len(targets) > 1 else targets[0]}
    json_lines = path.suffix.lower() == ".jsonl"  # of texts only, however short
    if len(others) == 1 and not numeric and (json_lines or _is_prose(next(iter(others.values())))):
        if path.suffix.lower() == ".parquet":
            raise RecipeError(f"{path} is a table of texts: expected it as .csv, .tsv or .jsonl")
        _check_rows(path, [] if several else labels[0], size, given_parts)
        named = {**named, "label": option["target"]}
        return _texts(path, named, about, changes, others, binary=several)
    if json_lines:
        raise RecipeError(
            f"{path} has the columns {_quoted(others)} besides {listed}, expected one of texts; save a "
            "table of numbers and categories as .csv or .parquet"
        )
    unusable = [name for name in others if name not in numeric and too_many_categories(others[name])]
    for name in unusable:
        if meant := looks_like(as_texts(others[name])):
            warn(f"{path}: column {name!r} is left out, because it has too many different texts; {meant}")
    drop = [name for name in table if name in (*counted, *unusable)]
    if len(drop) == len(table) - len(targets):
        raise RecipeError(
            f"{path} has no column of numbers or categories besides {listed}, expected some: "
            f"{_quoted(drop)} have too many different texts, or count rows"
        )
    _check_rows(path, [] if several else labels[0], size, given_parts)

    def found(options: Mapping[str, Any]) -> str:
        dropped = options.get("drop", ())
        used = [name for name in table if name not in (*targets, *dropped)]
        categorical = [
            name
            for name in used
            if name not in (*counted, *numeric) or name in options.get("categorical", ())
        ]
        return (
            f"a table of {about}, {len(used) - len(categorical)} numeric and {len(categorical)} categorical "
            f"columns{f', without {_quoted(dropped)}' if dropped else ''}"
        )

    options = {**named, **option, **({"drop": drop} if drop else {})}
    return _recipe(path, found, size, Choice("table", options), Choice("mlp"), changes, binary=several)


def _check_rows(path: Path, labels: Sequence[Any], size: int, given: Sequence[str]) -> None:
    """Raise an error if there are too few rows to draw the parts from that have no file.

    ``labels`` are empty if each row has several, each of them a yes or no.
    """
    classes = len(set(as_texts(labels))) if len(labels) else 2
    # Labels that are missing or do not repeat have errors of their own.
    if not any(map(is_missing, labels)) and repeats(classes, size):
        sizes = part_sizes(size, given, **_PARTS)
        _check_sizes(path, "rows", classes, *sizes.values())


def _json_columns(path: Path) -> Columns:
    found = read_others(path, known=())
    if not found:
        raise ValueError(f"{path} has no rows: expected an object in each line")
    return found


def _targets(path: Path, table: Columns, target: str | None) -> list[str]:
    """The targets that are named, or the one that has one of the usual names."""
    if target is None:
        found = [name for name in table if name.strip().lower() in TARGETS]
        if len(found) != 1:
            listed = _quoted(found or table)
            raise RecipeError(
                f"{path} has the columns {listed}: name the one with the classes by --target COLUMN"
            )
        return found
    named = [target] if target in table else [name.strip() for name in target.split(",")]
    for name in named:
        if name not in table:
            raise RecipeError(
                f"{path} has no column {name!r}{nearest(name, table)}; its columns are {_quoted(table)}"
            )
        if named.count(name) > 1:
            raise RecipeError(f"--target {target} has the column {name!r} twice; expected each once")
    return named


def _is_prose(values: Sequence[Any]) -> bool:
    """Whether texts are sentences, or nearly all different."""
    some = [len(str(value).split()) for value in values[:1000]]
    return sum(some) >= 3 * len(some) or too_many_categories(values)


def _texts(
    path: Path, named: Mapping[str, Any], about: str, changes: Sequence[str], column: Columns, *, binary: bool
) -> Recipe:
    ((name, values),) = column.items()
    words = sorted(len(tokens(str(value))) for value in values[:1000])
    most = words[int(0.95 * (len(words) - 1))]
    length = next((each for each in _TEXT_LENGTHS if most <= each), _TEXT_LENGTHS[-1])
    return _recipe(
        path,
        lambda _: f"texts in column {name!r}, {about}",
        len(values),
        Choice("text-table", {**named, "text": name, "length": length}),
        Choice("text-bag", {"dropout": 0.3}),
        changes,
        optimizer=Choice("adamw", {"lr": 1e-2}),
        binary=binary,
    )


# --------------------------------------------------------------------------------------- images and features


def _images(path: Path, changes: Sequence[str]) -> Recipe:
    data = Choice("image-folder", {"folder": str(path.absolute()), "augmentation": "crop-flip", **_PARTS})
    loaded = _loaded(data)
    if loaded.num_classes < 2:
        raise RecipeError(f"{path} has images of 1 class, expected a folder for each of 2 or more")
    _check_sizes(path, "images", loaded.num_classes, len(loaded.validation), len(loaded.test))
    total = sum(map(len, loaded.parts))
    # All of them: an image that cannot be read would end the run, perhaps after hours.
    sides = []
    for part in loaded.parts:
        assert isinstance(part, ImageFileSplit)
        sides += [min(image_size(part.folder / os.fsdecode(name))) for name in part.paths]
    size = 32 if median(sides) <= 40 else 64

    def found(options: Mapping[str, Any]) -> str:
        side = options.get("image_size", size)
        return f"{total:,} images of {loaded.num_classes} classes, scaled to {side} × {side} pixels"

    data = data.with_options({"image_size": size})
    workers = 4 if total > _MANY_IMAGES else 0
    return _recipe(path, found, total, data, changes=changes, workers=workers, **_image_network(total))


def _arrays(path: Path, changes: Sequence[str]) -> Recipe:
    data = Choice("npz", {"file": str(path.absolute()), **_PARTS})
    loaded = _loaded(data)
    several = loaded.several_labels
    classes = 2 if several else loaded.num_classes
    _check_sizes(path, "elements", classes, len(loaded.validation), len(loaded.test))
    total = sum(map(len, loaded.parts))
    inputs, _ = loaded.train.batch(torch.zeros(1, dtype=torch.long, device="cpu"))
    assert isinstance(inputs, Tensor)
    shape = " × ".join(map(str, inputs.shape[1:]))
    what = "labels for each (binary)" if several else "classes"
    found = f"{total:,} arrays of {shape} numbers, {loaded.num_classes} {what}"
    features = {} if "features" in loaded.about else {"features": inputs[0].numel()}
    network = _image_network(total) if "channels" in loaded.about else {"model": Choice("mlp", features)}
    return _recipe(path, lambda _: found, total, data, changes=changes, binary=several, **network)


def _loaded(data: Choice) -> DataSets:
    """The data, without their warnings: they come when the recipe is followed."""
    with warnings.catch_warnings(action="ignore"):
        return load_data(data)


def _check_sizes(path: Path, what: str, classes: int, *sizes: int) -> None:
    """Raise an error if a part for validation or test is too small.

    With fewer elements, the choice of an epoch or of a calibrator is chance, and so are the test figures.
    """
    fewest = _FEWEST_PER_CLASS * classes
    if min(sizes, default=fewest) < fewest:
        raise RecipeError(
            f"{path} has too few {what} for {classes} classes: {min(sizes)} for validation or test, expected "
            f"{fewest} or more each. To draw both, {round(fewest / min(_PARTS.values()))} {what} are needed"
        )


def _image_network(size: int) -> dict[str, Any]:
    """The network for so many images, and its optimizer if it is not that of the other networks."""
    if size <= _MANY_IMAGES:
        return {"model": Choice("cnn")}
    optimizer = Choice("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4})
    return {"model": Choice("cifar-resnet-32"), "optimizer": optimizer}


def _quoted(names: Iterable[str]) -> str:
    """The first names, in quotes."""
    return first_few(map(repr, names), 20)
