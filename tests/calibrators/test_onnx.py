"""Every calibrator as ONNX, by both exporters of torch, run with onnxruntime."""

import io
import math
import warnings

import pytest
import torch
from torch import nn

from calibrant.calibrators import CALIBRATORS, create_calibrator
from tests.calibrators.test_contract import FLATTENING, sampled
from tests.onnx_exporter import operators_listed_once

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytest.importorskip("onnx", reason="needs calibrant[onnx]")
pytest.importorskip("onnxscript", reason="needs calibrant[onnx]")

TOP_LABEL = {
    f"{key}, top-label": (key, {"variant": "top-label"}) for key in ("isotonic", "histogram-binning")
}
ALL = {key: (key, {}) for key in CALIBRATORS} | TOP_LABEL
every = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module")
def fitted():
    """Every calibrator, fitted to 400 samples of 5 classes."""
    data = sampled(400, 5)
    return {name: create_calibrator(key, **options).fit(*data).eval() for name, (key, options) in ALL.items()}


class SideBySide(nn.Module):
    """Several calibrators of the same logits: the newer exporter takes seconds for a model of any size."""

    def __init__(self, calibrators):
        super().__init__()
        self.calibrators = nn.ModuleList(calibrators)

    def forward(self, logits):
        return tuple(calibrator(logits) for calibrator in self.calibrators)


def agree(calibrators, exporter, *shape):
    """Export, and run with other batch sizes, far logits and classes that are ruled out.

    The newer exporter starts from the graph of `torch.export`, which is run, too.
    """
    stream, example = io.BytesIO(), (sampled(4, *shape, seed=1)[0],)
    model = SideBySide(calibrators.values()).eval()
    outputs = [f"calibrated {number}" for number in range(len(calibrators))]
    names = {"input_names": ["logits"], "output_names": outputs}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if exporter == "dynamo":
            axes = ({0: torch.export.Dim("batch")},)
            graph = torch.export.export(model, example, dynamic_shapes=axes)
            with operators_listed_once():
                torch.onnx.export(graph, example, dynamo=True, verbose=False, **names).save(stream)
            other = sampled(3, *shape, seed=2)[0]
            torch.testing.assert_close(graph.module()(other), model(other))
        else:
            axes = {"dynamic_axes": {name: {0: "batch"} for name in ("logits", *outputs)}}
            torch.onnx.export(model, example, stream, dynamo=False, **axes, **names)
    # Torch warns that its older exporter is old. That a number became a constant would be our fault.
    assert not [each.message for each in caught if issubclass(each.category, torch.jit.TracerWarning)]
    session = onnxruntime.InferenceSession(stream.getvalue(), providers=["CPUExecutionProvider"])

    ruled_out = sampled(20, *shape, seed=3)[0]
    ruled_out[::2, 3] = -math.inf
    for logits in (sampled(1, *shape, seed=2)[0], sampled(200, *shape, seed=2, spread=8.0)[0], ruled_out):
        results = session.run(None, {"logits": logits.numpy()})
        for (name, calibrator), found in zip(calibrators.items(), results, strict=True):
            found, expected = torch.from_numpy(found), calibrator(logits)
            assert found.dtype == expected.dtype, name
            for ours, theirs, rtol in ((found.softmax(1), expected.softmax(1), 0), (found, expected, 1e-5)):
                torch.testing.assert_close(
                    ours, theirs, rtol=rtol, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )


@every
def test_onnxruntime_agrees_with_torch(fitted, name):
    agree({name: fitted[name]}, "older", 5)


@pytest.mark.parametrize("name", sorted({*FLATTENING, "isotonic", "isotonic, top-label"}))
def test_onnxruntime_agrees_with_torch_on_images(fitted, name):
    # The others become the same rows, as `test_a_trace_agrees_for_other_batch_sizes` tells.
    agree({name: fitted[name]}, "older", 5, 3, 6)


def test_the_newer_exporter(fitted):
    # Their graphs consist of parts of others: of vector, of matrix, and of the curves of isotonic, top-label
    # and the steps of histogram-binning, each with the other's way to a whole row.
    others = ("structured-vector", "structured-matrix", "isotonic", "histogram-binning, top-label")
    agree({name: each for name, each in fitted.items() if name not in others}, "dynamo", 5)


def test_the_newer_exporter_on_images(fitted):
    agree({"local-temperature": fitted["local-temperature"]}, "dynamo", 5, 3, 6)


@every
def test_a_trace_agrees_for_other_batch_sizes(fitted, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", "`torch.jit.trace.* is deprecated")
        rows = torch.jit.trace(fitted[name], sampled(4, 5, seed=1)[0])
        images = torch.jit.trace(fitted[name], sampled(2, 5, 3, 6, seed=1)[0])
    for batch in (1, 30):
        for graph, shape in ((rows, (batch, 5)), (images, (batch, 5, 3, 6))):
            inputs = sampled(*shape, seed=2)[0]
            torch.testing.assert_close(graph(inputs), fitted[name](inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.* is deprecated:DeprecationWarning")
def test_tracing_with_another_number_of_classes_is_refused(fitted):
    for name in ("temperature", "local-temperature"):
        with pytest.raises(ValueError, match=r"logits must have shape \(B, 5, \*S\)"):
            torch.jit.trace(fitted[name], torch.zeros(2, 10))


@pytest.mark.parametrize(
    ("key", "shape"), [*((key, (300,)) for key in CALIBRATORS), *((key, (150, 2)) for key in FLATTENING)]
)
def test_single_logits_agree(key, shape):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    target = (torch.rand(shape, generator=generator) < (logits / 2).sigmoid()).long()
    calibrator = create_calibrator(key).fit(logits, target, binary=True).eval()
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        options = {"input_names": ["logits"], "dynamic_axes": {"logits": {0: "batch"}}}
        torch.onnx.export(calibrator, (logits[:4],), stream, dynamo=False, **options)
    session = onnxruntime.InferenceSession(stream.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"logits": logits.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found).sigmoid(), calibrator(logits).sigmoid(), rtol=0, atol=1e-6
    )
