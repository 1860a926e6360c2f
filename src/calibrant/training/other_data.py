"""Other data for the models of a recipe: out-of-distribution data, and shifted test data."""

from __future__ import annotations

from pathlib import Path

import torch

from calibrant.options import Choice, RecipeError, options_of
from calibrant.printable import first_few
from calibrant.training.data import DATA_SETS, DataSets, Inputs, Split, load_data
from calibrant.training.recipe import Recipe

SEVERITIES = (1, 2, 3, 4, 5)
"""The severities of corruption in CIFAR-10-C and its relatives."""


def load_other(
    choice: Choice,
    recipe: Recipe,
    data: DataSets,
    data_root: str | Path | None,
    *,
    part: str = "test",
    same_classes: bool = False,
) -> Split:
    """A part of another data set, normalised or tokenised like the data of the models.

    ``recipe`` and ``data`` are those of the models. ``same_classes`` refuses data with other class names.
    """
    given = "normalisation" in choice.options
    ours = data.test.normalisation
    if choice.name == "npz" and choice.options.get("normalisation", "own") == "own":
        if ours is None or given:
            raise RecipeError(
                f"data {choice} would be normalised by their own mean, and not as {recipe.data.name}: set "
                "normalisation, to none or to the name of the constants"
            )
        choice = Choice(choice.name, {"normalisation": "none", **choice.options})
    tokenizer = choice.options.get("tokenizer")
    if _takes(choice, "tokenizer") and (not tokenizer or tokenizer != recipe.data.options.get("tokenizer")):
        raise RecipeError(
            f"data {choice} would be encoded by a vocabulary of their own: for other texts, both data sets "
            "need the same tokenizer"
        )
    if choice.name == "table":
        raise RecipeError(
            f"data {choice} would be standardised by their own mean, and not as {recipe.data.name}: name "
            "them as test_file of the recipe's table"
        )
    loaded = load_data(choice, data_root)
    if same_classes and loaded.class_names != data.class_names:
        raise RecipeError(
            f"data {choice} have the classes {_listed(loaded.class_names)}; the models know "
            f"{_listed(data.class_names)}"
        )
    if loaded.several_labels != data.several_labels:
        found = "several labels" if loaded.several_labels else "one class"
        raise RecipeError(f"data {choice} have {found} for each element, unlike {recipe.data.name}")
    other: Split = getattr(loaded, part)
    if len(other) == 0:
        raise RecipeError(f"data {choice} have no {part} part")
    first = torch.zeros(1, dtype=torch.long, device="cpu")
    theirs, wanted = (_shapes(split.batch(first)[0]) for split in (other, data.test))
    if theirs != wanted:
        raise RecipeError(f"data {choice} have inputs of shape {theirs}; the models take {wanted}")
    if given or ours is None or (other.normalisation is None and choice.name != "npz"):
        return other
    try:
        return other.normalised_by(ours)
    except TypeError as error:
        raise RecipeError(f"data {choice} cannot be given to the models: {error}") from error


def by_severity(choice: Choice) -> dict[str, Choice]:
    """The data sets at each severity, by its number; a data set without severities is "shifted".

    >>> [str(each) for each in by_severity(Choice("cifar10-c", {"corruption": "fog"})).values()][::4]
    ['cifar10-c[corruption=fog,severity=1]', 'cifar10-c[corruption=fog,severity=5]']
    >>> list(by_severity(Choice("svhn"))), list(by_severity(Choice("cifar10-c", {"severity": 3})))
    (['shifted'], ['3'])
    """
    if "severity" in choice.options:
        return {str(choice.options["severity"]): choice}
    if _takes(choice, "severity"):
        return {str(severity): choice.with_options({"severity": severity}) for severity in SEVERITIES}
    return {"shifted": choice}


def _takes(choice: Choice, option: str) -> bool:
    return choice.name in DATA_SETS and option in options_of(DATA_SETS[choice.name])


def _listed(names: tuple[str, ...]) -> str:
    """The first names, and how many there are."""
    return f"{first_few(names)} ({len(names)})"


def _shapes(inputs: Inputs) -> object:
    """The shape of an input, or of each of its tensors."""
    if isinstance(inputs, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    return tuple(inputs.shape[1:])
