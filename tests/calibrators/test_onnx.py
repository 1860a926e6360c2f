"""Every calibrator as ONNX, by both exporters of torch, run with onnxruntime."""

import io
import math
import warnings

import pytest
import torch

from calibrant.calibrators import CALIBRATORS, create_calibrator
from tests.calibrators.test_contract import sampled

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytest.importorskip("onnx", reason="needs calibrant[onnx]")
pytest.importorskip("onnxscript", reason="needs calibrant[onnx]")

TOP_LABEL = {
    f"{key}, top-label": (key, {"variant": "top-label"}) for key in ("isotonic", "histogram-binning")
}
ALL = {key: (key, {}) for key in CALIBRATORS} | TOP_LABEL
every = pytest.mark.parametrize("name", ALL)
exporters = pytest.mark.parametrize("exporter", ["dynamo", "older"])


@pytest.fixture(scope="module")
def fitted():
    """Every calibrator, fitted to 400 samples of 5 classes."""
    data = sampled(400, 5)
    return {name: create_calibrator(key, **options).fit(*data).eval() for name, (key, options) in ALL.items()}


def agrees(calibrator, exporter, *shape):
    """Export, and run with other batch sizes, far logits and classes that are ruled out."""
    stream, example = io.BytesIO(), (sampled(4, *shape, seed=1)[0],)
    names = {"input_names": ["logits"], "output_names": ["calibrated"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if exporter == "dynamo":
            axes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
            torch.onnx.export(calibrator, example, dynamo=True, verbose=False, **axes, **names).save(stream)
        else:
            axes = {"dynamic_axes": {"logits": {0: "batch"}, "calibrated": {0: "batch"}}}
            torch.onnx.export(calibrator, example, stream, dynamo=False, **axes, **names)
    # Torch warns that its older exporter is old. That a number became a constant would be our fault.
    assert not [each.message for each in caught if issubclass(each.category, torch.jit.TracerWarning)]
    session = onnxruntime.InferenceSession(stream.getvalue(), providers=["CPUExecutionProvider"])

    ruled_out = sampled(20, *shape, seed=3)[0]
    ruled_out[::2, 3] = -math.inf
    for logits in (sampled(1, *shape, seed=2)[0], sampled(200, *shape, seed=2, spread=8.0)[0], ruled_out):
        (found,) = session.run(None, {"logits": logits.numpy()})
        found, expected = torch.from_numpy(found), calibrator(logits)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.softmax(1), expected.softmax(1), rtol=0, atol=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@exporters
@every
def test_onnxruntime_agrees_with_torch(fitted, name, exporter):
    agrees(fitted[name], exporter, 5)


# The newer exporter takes seconds for each.
@pytest.mark.parametrize(
    ("name", "exporter"), [*((name, "older") for name in ALL), ("local-temperature", "dynamo")]
)
def test_onnxruntime_agrees_with_torch_on_images(fitted, name, exporter):
    agrees(fitted[name], exporter, 5, 3, 6)


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


@pytest.mark.parametrize("key", CALIBRATORS)
def test_single_logits_agree(key):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 2, generator=generator)
    target = (torch.rand(300, 2, generator=generator) < (logits / 2).sigmoid()).long()
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
