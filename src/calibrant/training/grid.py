"""Trains every loss from every seed, and compares the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calibrant.distributed import agree, readable_errors, together
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.options import Choice, RecipeError, options_of
from calibrant.training.data import DATA_SETS, DataSets, Inputs, Split, load_data
from calibrant.training.loop import train
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import check_begun
from calibrant.training.runs import Run, folder_of
from calibrant.training.setup import make_fabric


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
    """Train every loss from every seed and compare the test results. Finished runs are reused.

    Args:
        recipe: the recipe to follow; its own loss and seed are ignored.
        losses: the losses, written as `Recipe.loss`. The others are tested against the first.
        seeds: the seeds of the runs.
        output: the folder of all runs.
        data_root: the folder with the files of the data sets.
        outside: out-of-distribution data sets, to be told from the test data. They are normalised like the
            test data where possible.
        resamples: bootstrap resamples for the intervals.
        fabric: a launched Fabric.
        progress: show the progress on the terminal.
        evaluating: called with the loss and the seed before each run is evaluated.

    Returns:
        The comparison in the first process, None in the others.

    Raises:
        RecipeError: the losses, seeds or data cannot be compared. It is raised before anything is trained.
        ValueError: the processes have different recipes, losses, seeds or data.
        TrainingError: see `train`.
        OSError: see `train`.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits-lt").override(["epochs=1"])
    >>> with TemporaryDirectory() as folder:
    ...     comparison = compare(recipe, ["ce", "ls"], [0], folder, resamples=10)
    >>> [method.name for method in comparison.methods]
    ['ce', 'ls']
    """
    if not losses or not seeds:
        raise RecipeError("compare needs at least one loss and one seed")
    # An unknown loss or option is refused here, before the data are read.
    rows = [[replace(recipe, loss=loss, seed=seed) for seed in seeds] for loss in losses]
    _check_unique("loss", [row[0].loss for row in rows])
    _check_unique("seed", [str(seed) for seed in seeds])
    if fabric is None:
        fabric = make_fabric(recipe)
        fabric.launch()
    with readable_errors():
        lists = {"losses": losses, "seeds": seeds, "out-of-distribution data": outside}
        settings = {name: ", ".join(map(str, values)) for name, values in lists.items()}
        agree({**settings, "recipe": rows[0][0].to_toml()})
        data = together(lambda: load_data(recipe.data, data_root), "reading the data")
        agree({"data": data.fingerprint})
    if len(data.test) == 0:
        raise RecipeError(f"data {recipe.data.name!r} have no test part to compare on")
    for row in rows:  # a loss may need more classes than the data have
        row[0].create_loss(data.num_classes)
    others = {
        str(other): together(partial(_outside, other, recipe, data, data_root), f"reading the data {other}")
        for other in outside
    }

    def folder(each: Recipe) -> Path:
        return folder_of(Path(output), each.loss, each.seed)

    for each in chain(*rows):  # all folders before the first run is trained
        together(partial(check_begun, folder(each), each, data), "checking the output folder")
    for each in chain(*rows):
        train(each, folder(each), data=data, fabric=fabric, progress=progress)
    if not fabric.is_global_zero:
        return None
    methods = []
    for row in rows:
        results, detection = [], {name: list[float]() for name in others}
        for each in row:
            if evaluating is not None:
                evaluating(each.loss, each.seed)
            run = Run(folder(each), loaded=data)
            results.append(run.evaluations(resamples=resamples))
            for name, other in others.items():
                detection[name].append(run.auroc(other))
        before, after, temperatures = zip(*results, strict=True)
        found = {name: tuple(values) for name, values in detection.items()}
        methods.append(Method(row[0].loss, before, after, temperatures, found))
    return Comparison(recipe.name, tuple(seeds), tuple(methods), data.dense)


def _check_unique(what: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise RecipeError(f"{what} {value} is there twice; expected each once")


def _outside(choice: Choice, recipe: Recipe, data: DataSets, data_root: str | Path | None) -> Split:
    """The test part of another data set, normalised or tokenised like the data of the models."""
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
    """The shape of an input, or of each of its tensors."""
    if isinstance(inputs, dict):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    return tuple(inputs.shape[1:])
