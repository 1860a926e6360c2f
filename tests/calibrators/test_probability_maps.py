"""What every calibrator of one probability at a time owes: see also the tests of each of them."""

import io
import math

import pytest
import torch

from calibrant.calibrators import Beta, Platt
from calibrant.calibrators.bayesian_binning import BayesianBinning
from calibrant.calibrators.histogram_binning import HistogramBinning
from calibrant.calibrators.isotonic import Isotonic
from calibrant.calibrators.one_vs_rest import number_below
from calibrant.calibrators.spline import Spline
from calibrant.metrics import ece, nll
from tests.calibrators.probabilities import overconfident

MAKERS = {
    "isotonic": Isotonic,
    "isotonic, top label": lambda: Isotonic(variant="top-label"),
    "histogram binning": HistogramBinning,
    "histogram binning, equal mass": lambda: HistogramBinning(binning="equal-mass"),
    "histogram binning, top label": lambda: HistogramBinning(variant="top-label"),
    "histogram binning, top label, equal mass": lambda: HistogramBinning(
        variant="top-label", binning="equal-mass"
    ),
    "bayesian binning": BayesianBinning,
    "beta": Beta,
    "platt": Platt,
    "platt, hard targets": lambda: Platt(smooth_targets=False),
    "spline": Spline,
}

every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
keeping = pytest.mark.parametrize(
    "make",
    [make for make in MAKERS.values() if make().preserves_order],
    ids=[name for name, make in MAKERS.items() if make().preserves_order],
)


def assert_distributions(log_probabilities):
    assert log_probabilities.isfinite().all()
    total = log_probabilities.double().exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


def test_order_is_kept_by_what_has_one_map_of_the_confidence():
    kept = {name for name, make in MAKERS.items() if make().preserves_order}
    assert kept == {name for name in MAKERS if "top label" in name or name == "spline"}


@every
def test_calibration_improves_on_held_out_data(make):
    calibrator = make().fit(*overconfident(4000, 4))
    logits, target = overconfident(4000, 4, seed=1)
    calibrated = calibrator(logits)
    assert ece(logits, target) > 0.1
    assert ece(calibrated, target) < 0.05
    # Zero frequencies are the price of bins and isotonic maps, so only the error is promised for them.
    if isinstance(calibrator, Beta | Platt | BayesianBinning | Spline):
        assert nll(calibrated, target) < nll(logits, target)


@every
def test_calibration_improves_for_two_classes(make):
    calibrator = make().fit(*overconfident(4000, 2))
    logits, target = overconfident(4000, 2, seed=1)
    assert ece(calibrator(logits), target) < ece(logits, target) / 2


@every
@pytest.mark.parametrize("classes", [2, 3, 20])
def test_rows_are_distributions(make, classes):
    calibrator = make().fit(*overconfident(300, classes))
    assert_distributions(calibrator(overconfident(200, classes, seed=1)[0]))
    assert_distributions(calibrator(10 * torch.randn(200, classes)))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types(make, dtype):
    logits, target = overconfident(300, 3)
    logits = logits.to(dtype)
    calibrator = make().fit(logits, target)
    calibrated = calibrator(logits)
    assert calibrated.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # In double precision the very same numbers give the very same map: only the answer is rounded.
    expected = calibrator(logits.double()).to(calibrated.dtype)
    torch.testing.assert_close(calibrated, expected, rtol=0, atol=0)
    assert all(buffer.dtype == torch.float64 for buffer in calibrator.half().buffers())


@every
def test_images_with_void_pixels_equal_their_pixels(make):
    logits, target = overconfident(2 * 6 * 5, 3)
    images = logits.view(2, 6, 5, 3).movedim(-1, 1)
    labels = target.view(2, 6, 5).clone()
    labels[0, :2] = 255
    kept = labels.flatten() != 255
    dense = make().fit(images, labels, ignore_index=255)
    flat = make().fit(logits[kept], target[kept])
    torch.testing.assert_close(dense(images).movedim(1, -1).reshape(-1, 3), flat(logits))


one_vs_rest = pytest.mark.parametrize(
    "make",
    [make for make in MAKERS.values() if not make().preserves_order],
    ids=[name for name, make in MAKERS.items() if not make().preserves_order],
)


@pytest.mark.filterwarnings("ignore:of 4 classes the data lack 1")
@one_vs_rest
def test_a_class_that_never_occurs_stays_improbable(make):
    logits, target = overconfident(300, 4)
    target[target == 3] = 0
    calibrator = make().fit(logits, target)
    # Also where it alone is predicted, and what is known of the others makes them impossible.
    certain = torch.full((3, 4), -1000.0).index_fill(1, torch.tensor([3]), 0)
    sure = torch.tensor([[-9.0, -9.0, -9.0, 9.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, -50.0]])
    for rows in (logits, certain, sure):
        calibrated = calibrator(rows.double())
        assert_distributions(calibrated)
        original = rows.double().log_softmax(1)[:, 3].exp()
        expected = original.clamp(1e-12, 1 / 304)
        torch.testing.assert_close(calibrated[:, 3].exp(), expected, rtol=1e-9, atol=0)


@one_vs_rest
def test_many_classes_that_never_occur_leave_room_for_those_that_do(make):
    logits, target = overconfident(40, 100)
    with pytest.warns(UserWarning, match=r"of 100 classes the data lack 97 \(3, 4, 5, 6, 7, …\): "):
        calibrator = make().fit(logits, target % 3)
    calibrated = calibrator(logits)
    assert_distributions(calibrated)
    assert calibrated.exp()[:, :3].sum(1).min() > 1 - 97 / 140 - 1e-6


@pytest.mark.filterwarnings("ignore:of 3 classes the data lack 2")
@every
@pytest.mark.parametrize("label", [0, 2])
@pytest.mark.filterwarnings("ignore:all labels are of one class")
def test_a_single_sample(make, label):
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    calibrator = make().fit(logits, torch.tensor([label]))
    assert_distributions(calibrator(torch.cat([logits, torch.randn(5, 3)])))


@every
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_all_samples_alike(make, value):
    logits = torch.tensor([[0.0, value, 0.0]]).repeat(50, 1)
    target = torch.arange(50) % 3
    calibrator = make().fit(logits, target)
    calibrated = calibrator(logits)
    assert_distributions(calibrated)
    # The second class is right in a third of the cases.
    if value and not isinstance(calibrator, HistogramBinning):
        assert abs(calibrated.exp()[0, 1] - 1 / 3) < 0.02
    assert_distributions(calibrator(torch.randn(5, 3)))


@every
def test_extreme_logits(make):
    generator = torch.Generator().manual_seed(0)
    logits = 1e4 * torch.randint(-1, 2, (200, 3), generator=generator).double()
    target = torch.where(torch.rand(200, generator=generator) < 0.7, logits.argmax(1), 1)
    calibrator = make().fit(logits, target)
    assert_distributions(calibrator(logits))
    assert_distributions(calibrator(logits.half()).float().log_softmax(1))
    assert calibrator(logits.half()).isfinite().all()
    assert_distributions(make().fit(*overconfident(200, 3))(logits))


@every
def test_classes_ruled_out_when_calibrating(make):
    calibrator = make().fit(*overconfident(300, 3))
    rows = torch.tensor([[0.0, 1.0, -math.inf], [-math.inf, 0.0, -math.inf]])
    probabilities = calibrator(rows).softmax(1)
    assert torch.equal(probabilities == 0, rows == -math.inf)
    assert probabilities[1, 1] == 1


@every
def test_a_perfect_classifier(make):
    target = torch.arange(60) % 3
    logits = 5 * torch.nn.functional.one_hot(target).double() + torch.rand(60, 3).double()
    calibrated = make().fit(logits, target)(logits)
    assert_distributions(calibrated)
    assert (calibrated.argmax(1) == target).all()


@keeping
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_order_is_kept(make, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 6, generator=generator)
    # Labels that the prediction never hits in some ranges, so that the confidence must fall below 1/K.
    target = torch.where(logits.amax(1) > 4, logits.argmin(1), logits.argmax(1))
    logits = logits.to(dtype)
    calibrated = make().fit(logits, target)(logits)
    unique = logits.topk(2).values.diff().abs().squeeze(1) > 0
    assert (calibrated.argmax(1) == logits.argmax(1))[unique].all()
    order = logits.argsort(1)
    assert (calibrated.gather(1, order).diff(dim=1) >= 0).all()


@keeping
def test_confidence_is_what_was_fitted_and_others_share_in_proportion(make):
    logits, target = overconfident(3000, 5)
    calibrated = make().fit(logits, target)(logits).exp()
    before = logits.softmax(1)
    top = logits.argmax(1, keepdim=True)
    ratio = (calibrated / before).scatter(1, top, torch.nan)
    # In proportion wherever that leaves the prediction well on top.
    sharing = calibrated.topk(2).values
    plain = sharing[:, 1] < 0.98 * sharing[:, 0]
    assert plain.float().mean() > 0.8
    spread = ratio.nan_to_num(-1).amax(1) - ratio.nan_to_num(1e300).amin(1)
    assert (spread / ratio.nan_to_num(-1).amax(1))[plain].abs().max() < 1e-6


@every
def test_state_round_trip(make):
    logits, target = overconfident(200, 3)
    fitted = make().fit(logits, target)
    buffer = io.BytesIO()
    torch.save(fitted.state_dict(), buffer)
    buffer.seek(0)
    fresh = make()
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(logits), fitted(logits))


@every
def test_fitting_again_replaces_what_was_learned(make):
    calibrator = make().fit(*overconfident(300, 5))
    again = calibrator.fit(*overconfident(200, 3, seed=2))
    assert again is calibrator
    logits = overconfident(50, 3, seed=3)[0]
    assert torch.equal(calibrator(logits), make().fit(*overconfident(200, 3, seed=2))(logits))


@every
def test_adding_a_constant_changes_nothing(make):
    logits, target = overconfident(200, 3)
    shifted = logits + torch.randint(-3, 4, (200, 1)) * 8
    expected = make().fit(logits, target)(logits)
    # Ties and edges may turn on the last bit of the softmax: a few rows may differ.
    close = torch.isclose(make().fit(shifted, target)(shifted).exp(), expected.exp(), atol=1e-6)
    assert close.all(1).float().mean() > 0.9


@every
def test_empty_batches_and_nan(make):
    calibrator = make().fit(*overconfident(100, 3))
    assert calibrator(torch.zeros(0, 3)).shape == (0, 3)
    assert calibrator(torch.tensor([[0.0, math.nan, 1.0]])).softmax(1).isnan().all()


@every
def test_gradients_are_finite(make):
    calibrator = make().fit(*overconfident(200, 3))
    logits = (5 * torch.randn(50, 3)).requires_grad_()
    calibrator(logits).square().sum().backward()
    assert logits.grad.isfinite().all()


@every
def test_errors(make):
    calibrator = make()
    with pytest.raises(RuntimeError, match=r"call fit\(logits, target\) first"):
        calibrator(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="nothing to fit"):
        calibrator.fit(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="nothing to fit"):
        calibrator.fit(torch.zeros(2, 3), torch.tensor([-100, -100]))
    with pytest.raises(ValueError, match="NaN"):
        calibrator.fit(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="at least 2 classes"):
        calibrator.fit(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    calibrator.fit(*overconfident(50, 3))
    with pytest.raises(ValueError, match=r"\(B, 3, \*S\)"):
        calibrator(torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Isotonic(variant="both"), "variant must be one of 'one-vs-rest', 'top-label', got 'both'"),
        (lambda: HistogramBinning(variant="both"), "variant must be one of"),
        (lambda: HistogramBinning(binning="random"), "binning must be one of 'equal-width', 'equal-mass'"),
        (lambda: HistogramBinning(bins=0), "bins must be a whole number of at least 1, got 0"),
        (lambda: BayesianBinning(bins=[]), "bins must be a list of numbers of bins"),
        (lambda: BayesianBinning(bins=[3, 0]), "bins must be a whole number of at least 1, got 0"),
        (lambda: BayesianBinning(prior_samples=0), r"prior_samples must lie in \(0, inf\), got 0"),
        (lambda: Spline(knots=1), "knots must be a whole number of at least 2, got 1"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("size", range(1, 10))
def test_graphs_count_the_points_below_a_number_as_torch_does(monkeypatch, size):
    """Also below one of the points, and of points that are equal."""
    points = torch.randint(5, (3, size), generator=torch.Generator().manual_seed(size)).double().sort().values
    at = (
        torch.tensor([-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0, math.inf])
        .double()
        .repeat(3, 1)
    )
    expected = torch.searchsorted(points, at)
    monkeypatch.setattr("calibrant.calibrators.one_vs_rest.is_traced", lambda: True)
    assert torch.equal(number_below(points, at), expected)
