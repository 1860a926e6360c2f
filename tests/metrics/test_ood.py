import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from calibrant.metrics.ood import (
    SCORES,
    Detection,
    detection,
    energy,
    generalised_entropy,
    ood_detection,
    roc,
)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_scikit_learn(in_scores, out_scores):
    scores = torch.cat([in_scores.flatten(), out_scores.flatten()]).numpy()
    is_out = np.repeat([0, 1], [in_scores.numel(), out_scores.numel()])
    false_positives, true_positives, _ = roc_curve(1 - is_out, -scores, drop_intermediate=False)
    return Detection(
        auroc=roc_auc_score(is_out, scores),
        aupr=average_precision_score(is_out, scores),
        aupr_in=average_precision_score(1 - is_out, -scores),
        fpr_at_95_tpr=false_positives[np.argmax(true_positives >= 0.95)],
    )


def assert_same(ours, theirs):
    for name in ("auroc", "aupr", "aupr_in", "fpr_at_95_tpr"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=0, abs=1e-12), name


# ------------------------------------------------------------------------------------------- detection


@pytest.mark.parametrize("sizes", [(1, 1), (20, 20), (100, 7), (13, 999), (4_000, 3_000)])
def test_equals_scikit_learn(sizes):
    in_scores, out_scores = randn(sizes[0], seed=1), randn(sizes[1], seed=2) + 0.7
    assert_same(detection(in_scores, out_scores), by_scikit_learn(in_scores, out_scores))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60), st.lists(st.integers(0, 6), min_size=1, max_size=60)
)
def test_equals_scikit_learn_with_ties(inside, outside):
    in_scores, out_scores = (torch.tensor(values, dtype=torch.float64) for values in (inside, outside))
    assert_same(detection(in_scores, out_scores), by_scikit_learn(in_scores, out_scores))


def test_all_scores_equal():
    assert detection(torch.zeros(3), torch.zeros(1)) == Detection(0.5, 0.25, 0.75, 1.0)


def test_perfect_and_perverse():
    low, high = torch.arange(10.0), torch.arange(10.0) + 10
    assert detection(low, high) == Detection(1.0, 1.0, 1.0, 0.0)
    assert detection(high, low).auroc == 0
    assert detection(high, low).fpr_at_95_tpr == 1


def test_fpr_takes_in_distribution_as_positive():
    in_scores = torch.arange(1.0, 101)  # 95 of them are accepted up to the score 95
    out_scores = torch.tensor([94.5, 95.0, 95.5, 200.0])
    assert detection(in_scores, out_scores).fpr_at_95_tpr == 0.5


def test_shape_does_not_matter_and_types_mix():
    in_scores, out_scores = randn(6, 5), randn(40, seed=1)
    assert detection(in_scores, out_scores) == detection(in_scores.flatten(), out_scores.view(2, 4, 5))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rough, rougher = in_scores.to(dtype), out_scores.to(dtype)
        assert detection(rough, out_scores) == detection(rough.double(), out_scores)
        assert detection(rough, rougher) == detection(rough.double(), rougher.double())


def test_logits_that_need_a_gradient_are_welcome():
    in_logits = randn(8, 3).requires_grad_()
    assert ood_detection(in_logits, randn(5, 3, seed=1)) == ood_detection(
        in_logits.detach(), randn(5, 3, seed=1)
    )


def test_infinite_scores_are_the_extremes_they_are():
    infinite = detection(torch.tensor([0.0, -torch.inf]), torch.tensor([torch.inf, 1.0]))
    assert infinite == Detection(1.0, 1.0, 1.0, 0.0)


def test_many_scores_take_little_time():
    in_scores = randn(200_000, dtype=torch.float32)
    out_scores = randn(200_000, seed=1, dtype=torch.float32) + 1
    start = time.perf_counter()
    ours = detection(in_scores, out_scores)
    assert time.perf_counter() - start < 2  # about a fifth of one; the machine may be busy
    assert_same(ours, by_scikit_learn(in_scores.double(), out_scores.double()))


@pytest.mark.parametrize(
    ("in_scores", "out_scores", "error", "message"),
    [
        (torch.zeros(0), torch.zeros(2), ValueError, "in_scores of shape .0,. hold no elements"),
        (torch.zeros(2), torch.zeros(2, 0), ValueError, "out_scores of shape .2, 0. hold no elements"),
        (torch.tensor([torch.nan]), torch.zeros(2), ValueError, "in_scores hold NaN"),
        (torch.zeros(2), torch.tensor([0, torch.nan]), ValueError, "out_scores hold NaN"),
        (torch.zeros(2).long(), torch.zeros(2), TypeError, "in_scores must be floating point"),
        (torch.zeros(2), [0.0], TypeError, "out_scores must be a torch.Tensor, got list"),
        (torch.zeros(2), torch.zeros(2, device="meta"), ValueError, "one device, got cpu and meta"),
    ],
)
def test_clear_errors_about_scores(in_scores, out_scores, error, message):
    with pytest.raises(error, match=message):
        detection(in_scores, out_scores)


# ---------------------------------------------------------------------------------------------- scores


def defined(name, logits):
    """The definitions, in float64 and without care for precision."""
    logits = logits.double()
    probabilities = logits.softmax(1)
    if name == "entropy":
        return -torch.xlogy(probabilities, probabilities).sum(1)
    if name == "maximum_probability":
        return 1 - probabilities.amax(1)
    if name == "maximum_logit":
        return -logits.amax(1)
    if name == "generalised_entropy":
        return (probabilities * (1 - probabilities)).clamp_min(0).pow(0.1).sum(1)
    return -logits.logsumexp(1)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("shape", [(50, 7), (3, 4, 5, 6), (9, 1), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_scores_equal_their_definitions(name, shape, dtype):
    logits = (randn(*shape) * 3).to(dtype)
    scores = SCORES[name](logits)
    assert scores.shape == shape[:1] + shape[2:]
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        scores.double(), defined(name, logits), atol=1e-12 if dtype == torch.float64 else 3e-6, rtol=0
    )


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_extreme_logits_have_finite_scores(name, dtype):
    logits = torch.tensor([[1e4, -1e4, -1e4], [1e4, 1e4, 1e4], [-1e4, -1e4, -1e4]], dtype=dtype)
    scores = SCORES[name](logits)
    assert scores.isfinite().all()
    torch.testing.assert_close(scores.double(), defined(name, logits), atol=1e-6, rtol=1e-6)


def test_generalised_entropy_of_probabilities_that_float32_cannot_hold():
    logits = torch.tensor([[0.0, 116.0, -116.0], [-200.0, 100.0, 0.0]])
    expected = generalised_entropy(logits.double())
    assert (expected > 1e-6).all()
    torch.testing.assert_close(generalised_entropy(logits).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["entropy", "maximum_probability", "generalised_entropy"])
def test_confident_predictions_keep_their_order_in_single_precision(name):
    logits = torch.zeros(60, 3)
    logits[:, 1] = torch.arange(20.0, 80.0)  # 1 - max s from 4e-9 to 1e-34: all 0 if subtracted from 1
    scores = SCORES[name](logits)
    assert (scores.diff() < 0).all()
    exact = SCORES[name](logits.double())
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", SCORES)
def test_masked_classes_do_not_count(name):
    logits = randn(5, 4)
    masked = torch.cat([logits, torch.full((5, 1), -torch.inf, dtype=logits.dtype)], 1)
    torch.testing.assert_close(SCORES[name](masked), SCORES[name](logits))


@pytest.mark.parametrize("name", SCORES)
def test_dense_equals_flattened(name):
    logits = randn(2, 5, 3, 4)
    rows = logits.movedim(1, -1).reshape(-1, 5)
    torch.testing.assert_close(SCORES[name](logits).flatten(), SCORES[name](rows))


def test_energy_with_temperature():
    logits = randn(6, 4)
    torch.testing.assert_close(energy(logits, temperature=1.0), energy(logits))
    expected = -3.0 * torch.logsumexp(logits / 3.0, 1)
    torch.testing.assert_close(energy(logits, temperature=3.0), expected)
    with pytest.raises(ValueError, match=r"temperature must lie in \(0, inf\), got 0"):
        energy(logits, temperature=0)


@pytest.mark.parametrize("classes", [1, 2, 5, 12, 100])
@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_generalised_entropy_of_the_most_probable_classes(classes, gamma):
    logits = randn(40, 12) * 2
    top = logits.softmax(1).sort(1, descending=True).values[:, :classes]
    expected = (top * (1 - top)).pow(gamma).sum(1)
    torch.testing.assert_close(generalised_entropy(logits, gamma=gamma, classes=classes), expected)
    with pytest.raises(ValueError, match=r"gamma must lie in \(0, 1\]"):
        generalised_entropy(logits, gamma=0)
    with pytest.raises(ValueError, match="classes must"):
        generalised_entropy(logits, classes=0)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (torch.zeros(2, 3).long(), TypeError, "logits must be floating point, got torch.int64"),
        (torch.zeros(3), ValueError, r"shape \(B, K, \*S\) with K > 0, got \(3,\)"),
        (torch.zeros(3, 0), ValueError, r"got \(3, 0\)"),
        ([[0.0]], TypeError, "must be a torch.Tensor, got list"),
    ],
)
def test_clear_errors_about_logits(name, logits, error, message):
    with pytest.raises(error, match=message):
        SCORES[name](logits)


# --------------------------------------------------------------------------------------- from logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_ood_detection_is_detection_of_every_score(dtype):
    in_logits, out_logits = (randn(200, 6) * 4).to(dtype), randn(70, 6, 2, seed=1).to(dtype)
    figures = ood_detection(in_logits, out_logits)
    assert list(figures) == list(SCORES)
    for name, score in SCORES.items():
        assert_same(figures[name], by_scikit_learn(score(in_logits).double(), score(out_logits).double()))
        assert figures[name].auroc > 0.8  # flat logits look out of distribution, not the other way round


@pytest.mark.parametrize(
    ("in_logits", "out_logits", "error", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), ValueError, "3 classes on axis 1, but out_logits have 4"),
        (torch.zeros(0, 3), torch.zeros(2, 3), ValueError, "in_logits of shape .0, 3. hold no elements"),
        (torch.zeros(2, 3), torch.zeros(2, 3, 0), ValueError, "out_logits of shape .* hold no elements"),
        (torch.zeros(2, 3), torch.full((2, 3), torch.nan), ValueError, "out_logits hold NaN"),
        (torch.tensor([[torch.inf, 0, 0]]), torch.zeros(2, 3), ValueError, r"in_logits hold NaN or \+∞"),
        (torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), ValueError, "one device, got cpu and meta"),
        (torch.zeros(2, 3), torch.zeros(2, 3).int(), TypeError, "out_logits must be floating point"),
        (torch.zeros(3), torch.zeros(2, 3), ValueError, "in_logits must have shape"),
    ],
)
def test_ood_detection_has_clear_errors(in_logits, out_logits, error, message):
    with pytest.raises(error, match=message):
        ood_detection(in_logits, out_logits)


@pytest.mark.parametrize("decimals", [1, 9])
def test_the_roc_curve_at_even_rates_is_that_of_scikit_learn(decimals: int) -> None:
    generator = np.random.default_rng(decimals)
    inside, outside = generator.normal(0, 1, 300).round(decimals), generator.normal(1, 1, 200).round(decimals)
    found = roc(torch.from_numpy(inside), torch.from_numpy(outside), points=101)
    is_out = np.repeat([0, 1], [300, 200])
    false, true, _ = roc_curve(is_out, np.concatenate([inside, outside]), drop_intermediate=False)
    # at vertical parts, interp takes the last and highest point
    np.testing.assert_allclose(found, np.interp(np.linspace(0, 1, 101), false, true), atol=1e-12)


def test_the_roc_curve_refuses_what_detection_refuses() -> None:
    with pytest.raises(ValueError, match="out_scores hold NaN"):
        roc(torch.zeros(2), torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match="points must be a whole number of at least 2"):
        roc(torch.zeros(2), torch.zeros(2), points=1)
