"""Every calibrator fitted to random data: what all of them promise, and the definitions of some."""

import math
import tempfile
import warnings
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators import CALIBRATORS, Calibrator, create_calibrator, load_calibrator, save_calibrator
from calibrant.calibrators.streaming import Scaling
from tests.calibrators.test_histogram_binning import by_hand
from tests.calibrators.test_isotonic import reference as isotonic_by_sklearn

from .batches import Batch, batches

STRENGTHS = st.sampled_from([0.0, 1e-7, 1e-2, 1.0, 100.0])
VARIANTS = st.sampled_from(["one-vs-rest", "top-label"])
OPTIONS: dict[str, dict[str, st.SearchStrategy]] = {
    "identity": {},
    "temperature": {"objective": st.sampled_from(["nll", "ece", "adaptive-ece"])},
    "local-temperature": {"strength": STRENGTHS},
    "ensemble-temperature": {},
    "vector": {"ridge": st.sampled_from([1e-7, 1e-2])},
    "structured-vector": {"strength": st.sampled_from([1e-2, 1.0, 100.0])},
    "matrix": {
        "off_diagonal_penalty": st.sampled_from([1e-4, 1e-2, 1.0]),
        "bias_penalty": st.sampled_from([1e-4, 1e-2, 1.0]),
    },
    "structured-matrix": {"strength": st.sampled_from([1e-2, 1.0, 100.0])},
    "dirichlet": {"off_diagonal_penalty": st.sampled_from([1e-4, 1e-2, 1.0])},
    "spline": {"knots": st.integers(2, 8)},
    "isotonic": {"variant": VARIANTS},
    "histogram-binning": {
        "bins": st.integers(1, 20),
        "variant": VARIANTS,
        "binning": st.sampled_from(["equal-width", "equal-mass"]),
    },
    "bayesian-binning": {
        "bins": st.none() | st.lists(st.integers(1, 12), min_size=1, max_size=4),
        "prior_samples": st.sampled_from([1e-3, 2.0, 50.0]),
    },
    "beta": {},
    "platt": {"smooth_targets": st.booleans()},
}
PER_LOGIT = ("vector", "structured-vector", "matrix", "structured-matrix")
every_calibrator = pytest.mark.parametrize("key", CALIBRATORS)


def test_every_calibrator_is_drawn() -> None:
    assert set(OPTIONS) == set(CALIBRATORS)
    for key, options in OPTIONS.items():
        assert set(options) <= set(signature(CALIBRATORS[key]).parameters)


def fitted(key: str, batch: Batch, **options: object) -> Calibrator:
    """A calibrator fitted to a batch. Warnings of bounds, absent classes and few elements are expected."""
    assume(batch.valid.any())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(the |of |all labels |[A-Za-z]+ has about ).*", UserWarning)
        return create_calibrator(key, **options).fit(
            batch.logits, batch.target, ignore_index=batch.ignore_index
        )


def nll(logits: Tensor, batch: Batch) -> float:
    rows = logits.movedim(1, -1).reshape(-1, logits.shape[1]).double()
    return F.cross_entropy(rows[batch.valid], batch.labels[batch.valid]).item()


@every_calibrator
@given(data=st.data())
def test_a_fitted_calibrator(key: str, data: st.DataObject) -> None:
    batch: Batch = data.draw(batches(most=60, most_classes=6, dtypes=(torch.float32, torch.float64)), "batch")
    options = {name: data.draw(strategy, name) for name, strategy in OPTIONS[key].items()}
    calibrator = fitted(key, batch, **options)
    for logits in (batch.logits, 0.1 * batch.logits, batch.logits.flip(0)):
        calibrated = calibrator(logits)
        assert calibrated.shape == logits.shape
        assert calibrated.dtype == logits.dtype
        assert calibrated.isfinite().all()
        total = calibrated.double().softmax(1).sum(1)
        assert (total - 1).abs().max() < 1e-6
        if calibrator.preserves_order:
            chosen = logits.argmax(1, keepdim=True)
            # Equal to the maximum: of classes that tie, or that rounding makes tie, either may come first.
            assert torch.equal(calibrated.gather(1, chosen).squeeze(1), calibrated.amax(1))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibrator.safetensors")
        save_calibrator(calibrator, path)
        loaded = load_calibrator(path)
    assert loaded.options() == calibrator.options() or key == "bayesian-binning"  # a range becomes a list
    assert torch.equal(loaded(batch.logits), calibrator(batch.logits))

    if isinstance(calibrator, Scaling) and options.get("objective", "nll") == "nll":
        before, after = nll(batch.logits, batch), nll(calibrator(batch.logits), batch)
        rounding = 1e-4 if batch.logits.dtype == torch.float32 else 1e-9
        if key in PER_LOGIT:  # factors for each logit multiply a common offset too, and its rounding
            rounding += 20 * batch.epsilon * batch.logits.abs().max().item()
        assert after <= before + rounding * (1 + before), f"NLL rose from {before} to {after}"


@given(key=st.sampled_from(list(CALIBRATORS)), data=st.data())
def test_the_order_of_the_data_does_not_matter(key: str, data: st.DataObject) -> None:
    batch: Batch = data.draw(batches(most=40, most_classes=6, dtypes=(torch.float64,)), "batch")
    # A spline goes through the elements one by one, also through those of equal confidence.
    assume(key != "spline" or len(batch.rows.softmax(1).amax(1).unique()) == len(batch.rows))
    options = {name: data.draw(strategy, name) for name, strategy in OPTIONS[key].items()}
    one = fitted(key, batch, **options)(batch.logits)
    other = fitted(key, Batch(batch.logits.flip(0), batch.target.flip(0), batch.ignore_index), **options)
    torch.testing.assert_close(other(batch.logits).softmax(1), one.softmax(1), rtol=0, atol=1e-3)


# ---------------------------------------------------------------------------------------- by definition


@given(batch=batches(most=60, most_classes=8, dtypes=(torch.float32, torch.float64)))
def test_temperature_is_the_likeliest(batch: Batch) -> None:
    calibrator = fitted("temperature", batch)
    rows, label = batch.rows[batch.valid].numpy(), batch.labels[batch.valid].numpy()
    rows = rows - rows.max(1, keepdims=True)

    def objective(logarithm: float) -> float:
        scaled = rows * math.exp(-logarithm)
        return float((np.log(np.exp(scaled).sum(1)) - scaled[np.arange(len(label)), label]).mean())

    # Bounds are relative to the logits: to the mean distance from the top to the mean, by its logarithm.
    spread = -rows.mean(1)[rows.min(1) < 0]
    scale = math.exp(np.log(spread).mean()) if len(spread) else 1.0
    grid = np.linspace(math.log(1e-3 * scale), math.log(1e4 * scale), 200)
    start = int(np.clip(np.argmin([objective(x) for x in grid]), 1, len(grid) - 2))
    bounds = grid[start - 1], grid[start + 1]
    best = minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 1e-12}).fun
    best = min(best, *(objective(x) for x in (grid[0], grid[-1], 0.0)))
    found = objective(math.log(calibrator.temperature.item()))
    note(f"temperature {calibrator.temperature.item()}: {found}, best {best}")
    assert found <= best + 1e-9 * (1 + best)


def one_vs_rest(maps: list[Tensor], batch: Batch, rows: Tensor) -> Tensor:
    """Calibrated probabilities ``(N, K)``: those of each class, scaled to sum to 1."""
    calibrated = torch.stack(maps, 1)
    total = calibrated.sum(1, keepdim=True)
    return torch.where(total > 0, calibrated / total.clamp_min(1e-300), rows.softmax(1))


@st.composite
def complete(draw: st.DrawFn, classes: int = 6) -> Batch:
    """Batches in which every class occurs, so that no limit for absent classes applies."""
    kinds = ("plain", "ties", "equal rows")
    batch = draw(batches(most=60, most_classes=classes, dtypes=(torch.float64,), kinds=kinds))
    assume(len(batch.labels[batch.valid].unique()) == batch.logits.shape[1])
    return batch


def assert_probabilities(calibrator: Calibrator, batch: Batch, wanted: Tensor, tolerance: float) -> None:
    found = calibrator(batch.rows).softmax(1)
    note(f"found {found.tolist()}, by definition {wanted.tolist()}")
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@given(batch=complete())
def test_isotonic_equals_scikit_learn(batch: Batch) -> None:
    rows, label = batch.rows[batch.valid], batch.labels[batch.valid]
    before, at = rows.softmax(1), batch.rows.softmax(1)
    # scikit-learn joins numbers that differ in the last digits alone.
    assume(all((gap > 1e-9) | (gap == 0) for gap in before.sort(0).values.diff(dim=0).flatten()))
    maps = [isotonic_by_sklearn(before[:, k], label == k, at[:, k]) for k in range(before.shape[1])]
    assert_probabilities(fitted("isotonic", batch), batch, one_vs_rest(maps, batch, batch.rows), 1e-9)


@given(batch=complete(), bins=st.integers(1, 20))
def test_histogram_binning_equals_counting(batch: Batch, bins: int) -> None:
    rows, label = batch.rows[batch.valid], batch.labels[batch.valid]
    before, at = rows.softmax(1), batch.rows.softmax(1)
    edges = [b / bins for b in range(bins + 1)]
    distance = (at[:, :, None] - torch.tensor(edges[1:-1], dtype=torch.float64)).abs()
    assume(not ((distance > 0) & (distance < 1e-12)).any())
    edges[0], edges[-1] = -1.0, 2.0  # probabilities of 0 and of rounded 1 belong to the first and last bin
    maps = [by_hand(before[:, k], label == k, edges, at[:, k]) for k in range(before.shape[1])]
    center = [0.5 / bins, 1 - 0.5 / bins] if bins > 1 else [0.5, 0.5]
    for k, values in enumerate(maps):  # the centres of the outer bins, where these are empty
        for place, middle in ((at[:, k] <= edges[1], center[0]), (at[:, k] > edges[-2], center[1])):
            inside = (before[:, k] <= edges[1]) if middle == center[0] else (before[:, k] > edges[-2])
            if bins == 1 or inside.any():
                continue
            values[place] = middle
    calibrator = fitted("histogram-binning", batch, bins=bins)
    assert_probabilities(calibrator, batch, one_vs_rest(maps, batch, batch.rows), 1e-9)


def log_odds(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``log s`` and ``log(1 - s)`` of each class, the latter as the sum of the others where s is large.

    Where s is small, that sum would round ``-s`` to 0.
    """
    logarithm = rows.log_softmax(1)
    classes = rows.shape[1]
    others = [logarithm[:, [j for j in range(classes) if j != k]].logsumexp(1) for k in range(classes)]
    small = logarithm < math.log(0.5)
    return logarithm, torch.where(small, torch.log1p(-logarithm.exp()), torch.stack(others, 1))


def assert_likeliest(features: Tensor, outcome: Tensor, found: Tensor, least: float = -math.inf) -> None:
    """No slopes from ``least`` on are likelier than those found, intercept last.

    Separable classes have no maximum. A small penalty on the weights of standardised features keeps them
    finite, so the likelihood need only be as good as the best one with that penalty.
    """
    center, spread = features.mean(0).numpy(), features.std(0, correction=0).numpy()
    spread = np.where(spread > 1e-12 * np.abs(center), spread, np.inf)
    design = np.column_stack([(features.numpy() - center) / spread, np.ones(len(features))])
    targets = outcome.double().numpy()

    def likelihood(weights: np.ndarray) -> float:
        z = design @ weights
        return np.logaddexp(0, z).sum() - targets @ z

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
        z = design @ weights
        value = likelihood(weights) + 5e-7 * weights @ weights
        return value, design.T @ (np.exp(-np.logaddexp(0, -z)) - targets) + 1e-6 * weights

    slopes, intercept = found[:-1].numpy(), found[-1].item()
    used = np.where(np.isfinite(spread), spread, 0)
    ours = likelihood(np.array([*(slopes * used), intercept + slopes @ center]))
    bounds = [(None if least == -math.inf else least, None)] * len(slopes) + [(None, None)]
    start = np.zeros(design.shape[1])
    best = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds).fun
    note(f"weights {found.tolist()}: {ours}, best {best}")
    assert ours <= best + 1e-6 * (1 + best)


@given(batch=complete(), smooth=st.booleans())
def test_platt_is_the_likeliest_sigmoid(batch: Batch, smooth: bool) -> None:
    calibrator = fitted("platt", batch, smooth_targets=smooth)
    present, absent = log_odds(batch.rows[batch.valid])
    label = batch.labels[batch.valid]
    for k in range(present.shape[1]):
        hit = (label == k).double()
        n = hit.sum()
        if smooth:
            hit = torch.where(hit > 0, (n + 1) / (n + 2), 1 / (len(hit) - n + 2))
        odds = (present - absent)[:, k : k + 1]
        assert_likeliest(odds, hit, torch.stack([calibrator.slopes[k], calibrator.intercepts[k]]))


@given(batch=complete())
def test_beta_is_the_likeliest_map_that_never_falls(batch: Batch) -> None:
    calibrator = fitted("beta", batch)
    present, absent = log_odds(batch.rows[batch.valid])
    assert (calibrator.slopes >= 0).all()
    for k in range(present.shape[1]):
        features = torch.stack([present[:, k], -absent[:, k]], 1)
        found = torch.cat([calibrator.slopes[k], calibrator.intercepts[k : k + 1]])
        assert_likeliest(features, batch.labels[batch.valid] == k, found, least=0.0)
