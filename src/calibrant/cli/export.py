"""`calibrant export`: write a trained model as one graph for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrant.cli.program import say
from calibrant.cli.terminal import app, check_outputs, check_suffix, fail
from calibrant.cli.training_options import training_errors


@app.command()
def export(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="Folder of a bundle, or of its run."),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .onnx or .pt2.")],
    form: Annotated[str, typer.Option("--format", help="onnx, or torch for torch.export.")] = "onnx",
) -> None:
    """Write a trained model as one graph with its calibrator and softmax (or sigmoid) inside.

    The graph takes any number of inputs at once. The command prints what its inputs are: scaling images,
    splitting texts and preparing the columns of a table is left to the caller.
    """
    with training_errors(resumes=False):
        from calibrant import load
        from calibrant.training.export import FORMS, described_inputs
        from calibrant.training.export import export as write

        if form not in FORMS:
            fail(f"--format {form}: expected {' or '.join(FORMS)}")
        check_suffix(output, FORMS[form][:1])
        loaded = load(bundle, device="cpu")
        check_outputs(loaded.folder.iterdir(), {"--output": output})
        write(loaded, form, output)
    inputs, how = described_inputs(loaded)
    what = f"{len(loaded.classes)} {'labels' if loaded.several_labels else 'classes'}"
    say(f"{output}: {inputs} to probabilities of {what}, with {loaded.calibrator.key}")
    say(f"{output}: {how.replace('RUN', repr(str(bundle)))}")
