"""The GPU kernels sum up what operations of torch do.

Without a GPU Triton interprets them, which is slow and exact: every branch runs, on few elements.
"""

from collections.abc import Callable
from itertools import starmap

import pytest
import torch
from torch import Tensor

import calibrant
from calibrant import histogram
from calibrant.histogram import ConfidenceHistogram, equal_width_edges, rounded_down
from calibrant.kernels import gap_sums, margin_sums, measuring, outcomes, sum_by_class, top_classes
from calibrant.layout import Elements, arrange
from calibrant.losses import heuristic, lagrangian
from calibrant.metrics import classwise, predictions
from calibrant.metrics.classwise import ClassGaps
from calibrant.metrics.predictions import Predictions

pytest.importorskip("triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at elements that are masked


def batch(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every third element is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(shape, generator=generator)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    target.view(-1)[::3] = -100
    return logits.to(HERE), target.to(HERE)


def images(logits: Tensor) -> Tensor:
    return logits.to(memory_format=torch.channels_last)


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "two classes": lambda: batch(5, 2),
    "few classes": lambda: batch(9, 11),
    "rows": lambda: batch(20, 21),
    "images": lambda: batch(2, 7, 3, 5),
    "channels last": lambda: (images(batch(2, 21, 3, 4)[0]), batch(2, 21, 3, 4)[1]),
    "transposed": lambda: (batch(9, 21)[0].T.contiguous().T, batch(9, 21)[1]),
    "strided": lambda: (batch(9, 84)[0][:, 1::4], batch(9, 21)[1]),
    "strided target": lambda: (batch(9, 21)[0], batch(18, 21)[1][::2]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

LOSSES = {
    "hinge": lambda classes: calibrant.create_loss("cals-hr", classes, margin=3),
    "phr": lambda classes: calibrant.create_loss("cals-alm", classes, margin=3),
    "p2": lambda classes: calibrant.create_loss("cals-alm", classes, margin=3, penalty="p2"),
    "p3": lambda classes: calibrant.create_loss("cals-alm", classes, margin=3, penalty="p3"),
}


def double(logits: Tensor, target: Tensor) -> Elements:
    """What the kernels do not know and leave to torch."""
    return arrange(logits.double(), target, soft=True)


def assert_outcomes(logits: Tensor, target: Tensor) -> None:
    wanted = Predictions.of_elements(double(logits, target))
    elements = arrange(logits, target)
    for found in (outcomes(elements)[:2], top_classes(elements)[:2]):
        total, prediction = (values[elements.valid] for values in found)
        torch.testing.assert_close(1 / total.double(), wanted.confidence, rtol=1e-6, atol=0)
        assert torch.equal(prediction, wanted.prediction)
    total, _, at_target, others = (values[elements.valid].double() for values in outcomes(elements))
    log_likelihood = at_target - total.log()
    squared_error = others / total**2 + log_likelihood.expm1() ** 2
    torch.testing.assert_close(log_likelihood, wanted.log_likelihood, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(squared_error, wanted.squared_error, rtol=1e-5, atol=1e-8)
    assert top_classes(elements)[2] == 0


def assert_margins(logits: Tensor, target: Tensor, *names: str) -> None:
    for name in names or ("hinge", "phr"):
        loss = LOSSES[name](logits.shape[1])
        generator = torch.Generator().manual_seed(1)
        loss.multiplier += torch.rand(loss.multiplier.shape, generator=generator)
        loss = loss.to(HERE)
        found = margin_sums(arrange(logits, target, soft=True), loss.fused())
        wanted = loss.measure(logits.double(), target).tensors()
        assert all(sums.dtype == torch.float64 for sums in found)
        assert found[0] == wanted[0]
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def assert_gaps(logits: Tensor, target: Tensor, bins: int = 15) -> None:
    edges = rounded_down(equal_width_edges(bins, torch.device(HERE)), torch.float32)
    samples, gap = gap_sums(arrange(logits, target), edges)
    wanted = ClassGaps.of(double(logits, target), bins)
    assert samples == wanted.samples
    torch.testing.assert_close(gap, wanted.gap, rtol=1e-6, atol=1e-5)


@every_layout
def test_outcomes(layout: str) -> None:
    assert_outcomes(*LAYOUTS[layout]())


@every_layout
def test_sums_at_the_margin(layout: str) -> None:
    assert_margins(*LAYOUTS[layout]())


@pytest.mark.parametrize("layout", ["rows", "images"])
def test_other_penalties(layout: str) -> None:
    assert_margins(*LAYOUTS[layout](), "p2", "p3")


@every_layout
def test_gaps(layout: str) -> None:
    assert_gaps(*LAYOUTS[layout]())


@pytest.mark.parametrize("bins", [1, 2])
def test_gaps_in_few_bins(bins: int) -> None:
    assert_gaps(*batch(9, 5), bins)


@pytest.mark.parametrize("shape", [(7, 11), (2, 11, 5)])
def test_more_classes_than_a_tile_holds(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_MOST_CLASSES": 4, "_FEW_CLASSES": 2, "_PART": 4}.items():
        monkeypatch.setattr(measuring, name, value)
    for check in (assert_outcomes, assert_margins, assert_gaps):
        check(*batch(*shape))


@pytest.mark.parametrize("shape", [(100, 21), (12, 5, 4)])
def test_a_program_may_have_several_tiles(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_PROCESSORS", 1)  # has one program for rows, eight for images
    monkeypatch.setattr(measuring, "_CACHE", 1)
    assert_margins(*batch(*shape))
    assert_gaps(*batch(*shape))


def test_probabilities_have_no_labels() -> None:
    logits, _ = batch(6, 5)
    assert_margins(logits, batch(6, 5, seed=3)[0].softmax(1))


@pytest.mark.parametrize("dtype", [torch.float16] if HERE == "cpu" else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 21), (2, 5, 6)])
def test_half_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, target = batch(*shape)
    for check in (assert_outcomes, assert_margins, assert_gaps):
        check(logits.to(dtype), target)


def test_ties_and_edges() -> None:
    """The first of several maxima is the prediction; a probability on an edge belongs below it."""
    logits = torch.tensor([[0.0, 2, 2, -9], [0, 0, 0, 0], [1, 1, -300, -300]], device=HERE)
    target = torch.tensor([1, 3, 0], device=HERE)
    assert_outcomes(logits, target)
    for bins in (2, 4, 8):
        assert_gaps(logits, target, bins)
    logits = torch.zeros(4, 10, device=HERE)
    single = ClassGaps.of(arrange(logits.cpu(), torch.arange(4)), 10).gap
    edges = rounded_down(equal_width_edges(10, torch.device(HERE)), torch.float32)
    found = gap_sums(arrange(logits, torch.arange(4, device=HERE)), edges)[1]
    assert torch.equal(found.cpu() != 0, single != 0)


@pytest.mark.parametrize("parts", [False, True])
def test_classes_that_are_ruled_out(parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if parts:
        for name in ("_MOST_CLASSES", "_FEW_CLASSES", "_PART"):
            monkeypatch.setattr(measuring, name, 2)
    logits, target = batch(6, 5)
    logits[:, :2] = -torch.inf
    target = torch.where(target < 0, target, 3)
    total, prediction, flaws = top_classes(arrange(logits, target))
    wanted = Predictions.of_elements(double(logits, target))
    valid = target >= 0
    assert flaws.isnan()  # no reason for a metric to refuse them, but nothing to learn from
    torch.testing.assert_close(1 / total[valid].double(), wanted.confidence, rtol=1e-6, atol=0)
    assert torch.equal(prediction[valid], wanted.prediction)
    assert_gaps(logits, target)
    logits[1] = -torch.inf
    assert top_classes(arrange(logits, target))[0][1].isnan()


@pytest.mark.parametrize("shape", [(3, 21), (1, 5, 3)])
@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, -torch.inf, 255, -1])
def test_flaws(flaw: float, shape: tuple[int, ...]) -> None:
    """Of elements that count they turn the number of samples into NaN, of others nothing."""
    for at, matters in ((0, False), (2, True)):
        logits, target = batch(*shape)
        if flaw in (255, -1):
            target.view(-1)[at] = flaw if matters else -100
        else:
            logits.movedim(1, -1).reshape(-1, shape[1])[at] = 0
            place = (at, 1) if len(shape) == 2 else (0, 1, at)
            logits[place] = flaw
        elements = unchecked(logits, target)
        assert top_classes(elements)[2].isnan() == matters
        for name in ("hinge", "phr"):
            recipe = LOSSES[name](shape[1]).to(HERE).fused()
            assert margin_sums(elements, recipe)[0].isnan() == matters


def unchecked(logits: Tensor, target: Tensor) -> Elements:
    """As on a GPU, where nobody has looked at the labels."""
    valid = target != -100
    return Elements(logits, target.masked_fill(~valid, 0), valid)


@pytest.mark.parametrize("shape", [(9, 5), (1, 5, 9)])
@pytest.mark.parametrize("name", ["hinge", "phr"])  # the squares in others are infinite
def test_huge_but_finite_logits_do_not_overflow(name: str, shape: tuple[int, ...]) -> None:
    logits, target = batch(*shape)
    logits[:, 2:] = torch.finfo(torch.float32).min
    loss = LOSSES[name](5).to(HERE)
    found = margin_sums(arrange(logits, target), loss.fused())
    wanted = loss.measure(logits.double(), target).tensors()
    assert all(starmap(torch.allclose, zip(found, wanted, strict=True)))


@pytest.fixture
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has a kernel uses it, also without a GPU; but not in float64."""
    for module in (heuristic, lagrangian, histogram, predictions, classwise):
        monkeypatch.setattr(
            module, "can_measure", lambda logits: logits.dtype == torch.float32 and logits.numel() > 0
        )


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("key", ["cals-alm", "cals-hr", "adafocal"])
@pytest.mark.parametrize("shape", [(20, 5), (1, 5, 4, 4)])
def test_losses_learn_the_same(key: str, shape: tuple[int, ...]) -> None:
    ours, theirs = (calibrant.create_loss(key, 5).to(HERE) for _ in range(2))
    for seed in range(2):
        logits, target = batch(*shape, seed=seed)
        ours.observe(logits, target)
        theirs.observe(logits.double(), target)
        assert ours.adapt().samples == theirs.adapt().samples
    for name, state in ours.state_dict().items():
        torch.testing.assert_close(state, theirs.state_dict()[name], rtol=1e-5, atol=1e-5)
    logits[0, 0] = -torch.inf
    ours.observe(logits, target.clamp_min(0))
    with pytest.raises(ValueError, match="NaN or infinite"):
        ours.adapt()


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("shape", [(40, 5), (2, 5, 4, 4)])
def test_metrics_are_the_same(shape: tuple[int, ...]) -> None:
    logits, target = batch(*shape)
    ours, theirs = Predictions.of(logits, target), Predictions.of(logits.double(), target)
    for name in ("label", "prediction", "confidence", "log_likelihood", "squared_error"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    assert ours.prediction.dtype == torch.int64
    histograms = (ConfidenceHistogram.of(of.elements).equal_width(15) for of in (ours, theirs))
    for found, wanted in zip(*(vars(bins).values() for bins in histograms), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    found, wanted = (ClassGaps.of(of.elements) for of in (ours, theirs))
    torch.testing.assert_close(found.gap, wanted.gap, rtol=1e-5, atol=1e-5)
    logits[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        Predictions.of(logits, target.clamp_min(0))


def test_what_the_kernels_do_not_know_is_left_to_torch() -> None:
    logits, target = batch(3, 4)
    assert measuring.can_measure(logits) == (HERE == "cuda")
    assert not measuring.can_measure(logits.double())
    assert not measuring.can_measure(logits[:0])
    samples, _ = sum_by_class(arrange(logits[:0], target[:0]), lambda shifted: (shifted,))
    assert samples == 0


def test_what_is_summed_has_a_number_of_its_own() -> None:
    from calibrant.kernels import device, measuring_device
    from calibrant.kernels.fused import EXTRAS

    assert measuring_device.GAPS.value == len(EXTRAS) == measuring._GAPS
    assert device.HINGE.value == EXTRAS.index("hinge")
