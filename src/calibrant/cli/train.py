"""`calibrant train`: train a model by a recipe."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrant.arguments import LARGEST_INT
from calibrant.cli import training_options as options
from calibrant.cli.program import say
from calibrant.cli.run_files import check_written
from calibrant.cli.terminal import app
from calibrant.printable import counted

if TYPE_CHECKING:
    from calibrant.calibrators import Calibrator
    from calibrant.training.runs import Run


@app.command()
def train(
    recipe: options.RecipeArgument = None,
    own_data: options.OwnData = None,
    target: options.Target = None,
    loss: options.Loss = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=LARGEST_INT,
            help="Seed of weights, order and augmentation.",
            show_default="the recipe's",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run.", show_default="runs/RECIPE/runs/LOSS-seedN"),
    ] = None,
    data_root: options.DataRoot = None,
    changes: options.Changes = None,
    accelerator: options.Accelerator = "auto",
    devices: options.Devices = "auto",
    nodes: options.Nodes = 1,
    calibrate: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="Calibrator of the bundle, fitted to the validation data: auto, which takes the best by "
            "cross-validation; none; or a name as for calibrant calibrate.",
        ),
    ] = "auto",
) -> None:
    """Train a model by a recipe or on your own data. After an interruption, the same command continues."""
    with options.training_errors():
        followed = options.load_recipe(recipe, changes, loss=loss, seed=seed, data=own_data, target=target)
        from calibrant.cli.prediction_files import in_words
        from calibrant.training import train
        from calibrant.training.bundle import calibrator_of, example_of_use
        from calibrant.training.calibration import check_method
        from calibrant.training.data import load_data
        from calibrant.training.run_folder import BUNDLE, FILES, check_folder, is_finished
        from calibrant.training.runs import Run, folder_of, plain_name

        folder = output or folder_of(Path("runs", plain_name(followed.name)), followed.loss, followed.seed)
        check_method(calibrate)
        check_written(folder, FILES, recipe, followed, data_root)
        fabric = options.launch(followed, accelerator, devices, nodes)
        data = None
        finished = is_finished(folder)
        if finished:
            check_folder(folder, followed)
            # A finished run does not need its data, nor the library that reads them.
            with suppress(FileNotFoundError, ConnectionError, ImportError):
                data = load_data(followed.data, data_root)
        train(
            followed,
            folder,
            data_root=data_root,
            data=data,
            fabric=fabric,
            progress=True,
            calibrate=calibrate,
        )
        if not fabric.is_global_zero:
            return
        run = Run(folder, data_root)
        found, example = calibrator_of(folder, calibrate), example_of_use(folder)
        kept = run.history[run.epoch - 1]
        tested, tested_bundle, failure = _test_figures(run, None if found is None else found[0])
    if finished:
        say(f"The run in {folder} was finished before; nothing was trained.")
    epochs = counted(len(run.history), "epoch")
    if followed.select != "last":
        epochs += f", epoch {run.epoch} kept"
    say(
        f"{folder}: {followed.name}, {followed.loss}, seed {followed.seed}, {epochs}; "
        f"validation accuracy {100 * kept['validation_accuracy']:.2f} %, "
        f"ECE {100 * kept['validation_ece']:.2f} %, NLL {kept['validation_nll']:.4f}"
    )
    if tested:
        say(f"{folder}: {tested}")
    calibrated = found is not None and found[0].key != "identity"
    if found is not None:
        reason = ", for the same reason" if found[1] == failure else f": {found[1]}"
        state = f"calibrated by {in_words(found[0])}" if calibrated else f"not calibrated{reason}"
        say(f"{folder / BUNDLE}: {state}{tested_bundle}")
    say("Next:")
    for command in _next_commands(folder, example, ["--binary"] if followed.binary else [], calibrated):
        say(f"  calibrant {shlex.join(command)}")


def _next_commands(
    folder: Path, example: tuple[str, str] | None, reading: Sequence[str], calibrated: bool
) -> Iterator[list[str]]:
    """The commands that a user may want after training.

    ``example`` has names of new inputs and of their predictions; it is None if the model cannot be used on
    new inputs. ``reading`` are the options that say how to read the predictions of the run. ``calibrated``
    tells whether the bundle has a calibrator: the test predictions are then evaluated with and without it.
    """
    from calibrant.training.run_folder import BUNDLE, CALIBRATOR

    test = folder / "test.npz"
    if not test.is_file():  # predictions that are too large are not stored
        test = Path("test.npz")
        yield ["predict", str(folder), "--output", str(test)]
    files = [str(test)]
    if calibrated:
        files.append("calibrated.npz")
        yield ["apply", str(folder / BUNDLE / CALIBRATOR), str(test), "--output", files[1]]
    yield ["evaluate", *files, *reading, "--report", "report.html"]
    if example is not None:
        yield ["predict", str(folder), "--input", example[0], "--output", example[1]]


def _test_figures(run: Run, stored: Calibrator | None) -> tuple[str, str, str]:
    """Test accuracy, ECE and NLL, before and after temperature scaling, and with the stored calibrator.

    The third text says why no temperature could be fitted; it is empty otherwise. All are empty without
    stored predictions, the second one also if the first has its figures.
    """
    from calibrant.training.calibration import fitted_temperature
    from calibrant.training.runs import temperature_of
    from calibrant.training.validation import ValidationSums

    if not all((run.folder / f"{part}.npz").is_file() for part in ("validation", "test")):
        return "", "", ""
    ((logits, labels),) = run.predictions("test")

    def tested(calibrator: Calibrator | None) -> tuple[str, str]:
        calibrated = logits if calibrator is None else calibrator(logits)
        found = ValidationSums.of(calibrated, labels, -100, binary=run.recipe.binary).figures("test")
        errors = f"ECE {100 * found['ece']:.2f} %, NLL {found['nll']:.4f}"
        return f"test accuracy {100 * found['accuracy']:.2f} %, {errors}", errors

    scaled, failure = fitted_temperature(run)
    text = f"{tested(None)[0]}; "
    if failure:  # as after a short run, or where all validation elements are right
        text += f"no temperature could be fitted to the validation data ({failure})"
    elif (temperature := temperature_of(scaled)) is None:
        text += "not calibrated, because the validation data have only one answer"
    else:
        parts = list(scaled.labels) if scaled.binary else []
        mean = "mean " if len(parts) > 1 else ""
        left = len(scaled.unchanged)
        without = f", not counting {counted(left, 'label')} with one answer in all data" if left else ""
        _, errors = tested(scaled)  # a temperature leaves the accuracy as it is
        text += f"after temperature scaling ({mean}T = {temperature:.3f}{without}) {errors}"
    if stored is None or stored.key == "identity":
        return text, "", failure
    figures, errors = tested(stored)
    return text, "" if errors in text else f"; {figures}", failure
