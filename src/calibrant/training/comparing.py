"""Train several losses from several seeds, and evaluate what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calibrant.distributed import together
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.options import Choice, RecipeError, options_of
from calibrant.training.data import DATA_SETS, DataSets, Inputs, Split, load_data
from calibrant.training.engine import check_begun, make_fabric, train
from calibrant.training.recipe import Recipe
from calibrant.training.runs import Run, folder_of


def compare(
    recipe: Recipe,
    losses: Sequence[str],
    seeds: Sequence[int],
    output: str | Path,
    *,
    data_root: str | Path | None = None,
    outside: Sequence[Choice] = (),
    resamples: int = 1000,
    fabric: Fabric | None = None,
    progress: bool = False,
    evaluating: Callable[[str, int], None] | None = None,
) -> Comparison | None:
    """Train what is missing, evaluate every run, and put them side by side.

    Args:
        recipe: what to train; its own loss and seed do not count.
        losses: as `Recipe.loss`; the first is what the others are tested against.
        seeds: of the runs.
        output: the folder of all runs; finished ones in it are reused.
        data_root: where the data sets' files are.
        outside: data sets that the models were not trained on, to be told from the test data; normalised
            as those, where they can be.
        resamples: of the bootstrap behind the intervals.
        fabric: of processes that were launched already.
        progress: whether to show it.
        evaluating: called before each run is evaluated, with its loss and seed.

    Returns:
        The comparison, in the first process; None in the others.

    Raises:
        RecipeError: a loss, a seed or data that cannot be compared; before anything is trained.
        TrainingError: as `train`.
        OSError: as `train`.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits-lt").override(["epochs=1"])
    >>> with TemporaryDirectory() as folder:
    ...     comparison = compare(recipe, ["ce", "ls"], [0], folder, resamples=10)
    >>> [method.name for method in comparison.methods]
    ['ce', 'ls']
    """
    if not losses or not seeds:
        raise RecipeError("compare needs at least one loss and one seed")
    recipes = [
        [replace(recipe, loss=loss, seed=seed) for seed in seeds] for loss in losses
    ]  # all first: a loss that cannot be built is refused before anything is trained
    written = [row[0].loss for row in recipes]
    for what, values in (("loss", written), ("seed", [str(seed) for seed in seeds])):
        repeated = next((value for value in values if values.count(value) > 1), None)
        if repeated is not None:
            raise RecipeError(f"{what} {repeated} is there twice; expected each once")
    if fabric is None:
        fabric = make_fabric(recipe)
        fabric.launch()
    data = load_data(recipe.data, data_root)
    if len(data.test) == 0:
        raise RecipeError(f"data {recipe.data.name!r} have no test part to compare on")
    others = {str(other): _outside(other, recipe, data, data_root) for other in outside}
    folders = [[folder_of(Path(output), each.loss, each.seed) for each in row] for row in recipes]
    runs = [
        run for row, places in zip(recipes, folders, strict=True) for run in zip(row, places, strict=True)
    ]
    for each, place in runs:  # all first: what has changed is refused before anything is trained
        together(partial(check_begun, place, each, data), "checking the output folder")
    for each, place in runs:
        train(each, place, data=data, fabric=fabric, progress=progress)
    if not fabric.is_global_zero:
        return None
    methods = []
    for loss, row, places in zip(written, recipes, folders, strict=True):
        before, after, temperatures = [], [], []
        detection: dict[str, list[float]] = {name: [] for name in others}
        for each, place in zip(row, places, strict=True):
            if evaluating is not None:
                evaluating(loss, each.seed)
            run = Run(place, loaded=data)
            plain, calibrated, temperature = run.evaluations(resamples=resamples)
            before.append(plain)
            after.append(calibrated)
            temperatures.append(temperature)
            for name, other in others.items():
                detection[name].append(run.auroc(other))
        found = {name: tuple(values) for name, values in detection.items()}
        methods.append(Method(loss, tuple(before), tuple(after), tuple(temperatures), found))
    return Comparison(recipe.name, tuple(seeds), tuple(methods), data.dense)


def _outside(choice: Choice, recipe: Recipe, data: DataSets, data_root: str | Path | None) -> Split:
    """The test part of another data set, as the models would meet it: encoded as their own data are."""
    known = DATA_SETS.get(choice.name)
    options = {} if known is None else options_of(known)
    given = "normalisation" in choice.options
    ours = data.test.normalisation
    if choice.name == "npz" and choice.options.get("normalisation", "own") == "own":
        if ours is None or given:
            raise RecipeError(
                f"data {choice} would be normalised by their own mean, and not as {recipe.data.name}: set "
                "normalisation, to none or to the name of the constants"
            )
        choice = Choice(choice.name, {"normalisation": "none", **choice.options})
    if "tokenizer" in options and not (
        choice.options.get("tokenizer")
        and choice.options.get("tokenizer") == recipe.data.options.get("tokenizer")
    ):
        raise RecipeError(
            f"data {choice} would be encoded by a vocabulary of their own: to detect other texts, both data "
            "sets need the same tokenizer"
        )
    other = load_data(choice, data_root).test
    if len(other) == 0:
        raise RecipeError(f"data {choice} have no test part to be told from the test data")
    first = torch.zeros(1, dtype=torch.long)
    theirs, wanted = (_shapes(split.batch(first)[0]) for split in (other, data.test))
    if theirs != wanted:
        raise RecipeError(f"data {choice} have inputs of shape {theirs}; the models take {wanted}")
    if given or ours is None or (other.normalisation is None and choice.name != "npz"):
        return other
    try:
        return other.normalised_by(ours)
    except TypeError as error:
        raise RecipeError(f"data {choice} cannot be given to the models: {error}") from error


def _shapes(inputs: Inputs) -> object:
    """The shape of an input, or of each of its parts."""
    if isinstance(inputs, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    return tuple(inputs.shape[1:])
