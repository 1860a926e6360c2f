"""Export of a bundle as one graph from inputs to calibrated probabilities, for ONNX and `torch.export`."""

from __future__ import annotations

import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from calibrant.atomic import replace_file
from calibrant.extras import require
from calibrant.training.bundle import Bundle, probabilities_of
from calibrant.training.data import Inputs, Preparation
from calibrant.training.data.augmentation import Normalisation, Normalising, Standardisation, shift_and_scale


class Probabilities(nn.Module):
    """A bundle as one module, from inputs to calibrated probabilities.

    Its arguments are those of the graph: one tensor, or the tensors of a dictionary in their order. If the
    preparation of the bundle ends with a normalisation, that is inside, and the argument is what comes before
    it: pixels ``(N, C, H, W)`` as bytes, or numbers ``(N, ...)``.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        constants = None if bundle.preparation is None else bundle.preparation.normalisation
        self.normalise = nn.Identity() if constants is None else _Normalise(constants)
        self.model, self.calibrator = bundle.model, bundle.calibrator
        self.names = tuple(bundle.inputs) if isinstance(bundle.inputs, dict) else ()

    def forward(self, *tensors: Tensor) -> Tensor:
        inputs: Inputs = dict(zip(self.names, tensors, strict=True)) if self.names else tensors[0]
        if isinstance(inputs, Tensor):
            inputs = self.normalise(inputs)
        return probabilities_of(self.calibrator, self.model(inputs).float())


class _Normalise(nn.Module):
    """The normalisation of the inputs, with its constants as buffers."""

    def __init__(self, constants: Normalising) -> None:
        super().__init__()
        self.pixels = isinstance(constants, Normalisation)
        if isinstance(constants, Standardisation):
            pair = tuple(
                torch.tensor(each, dtype=torch.float32, device="cpu")
                for each in (constants.mean, constants.std)
            )
        else:
            pair = shift_and_scale(constants, torch.device("cpu"))
        self.register_buffer("first", pair[0])
        self.register_buffer("second", pair[1])

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.get_buffer("first"), self.get_buffer("second")
        if self.pixels:
            return torch.addcmul(first, inputs.float(), second)
        shape = (-1, *(1,) * (inputs.ndim - 2))
        return (inputs - first.view(shape)) / second.view(shape)


def _example(bundle: Bundle) -> dict[str, Tensor]:
    """Arguments of `Probabilities` with two elements, by the names of the graph's inputs."""
    if isinstance(bundle.inputs, dict):
        return bundle.inputs
    constants = None if bundle.preparation is None else bundle.preparation.normalisation
    pixels = isinstance(constants, Normalisation)
    return {"inputs": bundle.inputs.to(torch.uint8) if pixels else bundle.inputs}


def export(bundle: Bundle, form: str, output: str | os.PathLike[str]) -> None:
    """Write a bundle as a graph with any number of inputs at once. An existing file is replaced in one step.

    Args:
        bundle: the bundle, on the CPU.
        form: a key of `FORMS`.
        output: the file to write.

    Raises:
        ImportError: a package for this format is not installed.
        ValueError: the network or the calibrator cannot be exported.
    """
    with _one_line(f"{bundle.calibrator.key} behind this network cannot be exported to {form}"):
        _, write = FORMS[form]
        content = write(bundle)
    replace_file(Path(output), content)


def _program(bundle: Bundle) -> ExportedProgram:
    example = tuple(_example(bundle).values())
    dynamic = (tuple({0: Dim("batch")} for _ in example),)
    return torch.export.export(Probabilities(bundle).eval(), example, dynamic_shapes=dynamic)


def _torch(bundle: Bundle) -> bytes:
    stream = io.BytesIO()
    torch.export.save(_program(bundle), stream)
    return stream.getvalue()


def _onnx(bundle: Bundle) -> bytes:
    require("onnx", "onnx", "onnxscript", purpose="the format onnx")
    names = list(_example(bundle))
    program: Any = torch.onnx.export(
        _program(bundle), input_names=names, output_names=["probabilities"], dynamo=True, verbose=False
    )
    proto = program.model_proto
    _name_batch_axis(proto.graph)
    content: bytes = proto.SerializeToString()
    return content


def _name_batch_axis(graph: Any) -> None:
    """Call the first axis of the inputs "batch", and whatever depends on it; torch calls it "s95" or so."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", "batch", axis.dim_param)


def described_inputs(bundle: Bundle) -> tuple[str, str]:
    """The name, type and shape of each input of the graph of a bundle, and what the inputs are, in words."""
    tensors = []
    for name, each in _example(bundle).items():
        shape = ", ".join(["batch", *map(str, each.shape[1:])])
        tensors.append(f"{name}: {str(each.dtype).removeprefix('torch.')} ({shape})")
    how = Preparation if bundle.preparation is None else bundle.preparation
    return ", ".join(tensors), f"the inputs are {how.graph_inputs}"


FORMS: dict[str, tuple[str, Callable[[Bundle], bytes]]] = {
    "onnx": (".onnx", _onnx),
    "torch": (".pt2", _torch),
}
"""For each format the suffix of its file, and the function that makes the content."""


@contextmanager
def _one_line(problem: str) -> Iterator[None]:
    """Errors of torch in one line, and none of its warnings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except ImportError:
        raise
    except Exception as error:  # torch has many kinds of errors, each of many lines
        cause = error.__cause__ or error  # the outer error of ONNX only says that there was one
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise ValueError(f"{problem}: {lines[0][:200]}") from error
    finally:
        logger.setLevel(level)
