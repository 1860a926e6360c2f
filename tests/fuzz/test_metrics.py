"""Every metric of random batches against its definition: at once, in a stream, and with permuted classes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch import Tensor

from calibrant import evaluate
from calibrant.evaluation import Evaluation, Evaluator
from calibrant.metrics import METRICS, SCORES, brier_split, detection, ood_detection
from tests.metrics.test_calibration import (
    debiased_l1_by_definition,
    equal_mass_groups,
    equal_width_groups,
    gaps,
    smooth_by_definition,
    straddling,
    sweep_by_definition,
)
from tests.metrics.test_scores import best, brier_by_numpy, log_softmax, nll_by_numpy
from tests.metrics.test_selective import by_definition as selective

from .batches import SEEDS, Batch, batches

DIVISORS = st.sampled_from([1, 2, 5, 10, 12, 15, 20, 100])  # of 300, as a stream needs them
BINS = DIVISORS | st.integers(1, 40)
STREAMED = [
    name
    for name, metric in METRICS.items()
    if metric.streamed
    and name not in ("adaptive_ece", "smooth_ece")
    and not name.startswith(("debiased_ece", "sweep_ece"))
    and metric.group != "selective"
]
"""The metrics that are exact in a stream."""
SELECTIVE = [name for name, metric in METRICS.items() if metric.group == "selective"]


def drop_undecidable(batch: Batch, bins: int) -> None:
    """Ignore elements with a probability so near the edge of a bin that rounding decides the side."""
    probability = np.exp(log_softmax(batch.rows))
    edges = np.arange(1, bins) / bins
    distance = np.abs(probability[:, :, None] - edges)
    near = distance < 16 * batch.epsilon
    if batch.logits.dtype == torch.float64:  # which holds some edges exactly, such as 1/2
        near &= distance > 0
    batch.ignore(torch.from_numpy(near.any((1, 2))))


def cut_ties(confidence: np.ndarray, bins: int, epsilon: float) -> bool:
    """Whether an equal-mass bin ends between confidences that rounding could exchange."""
    ends = np.cumsum([len(group) for group in equal_mass_groups(confidence, bins)])
    ordered = np.sort(confidence)
    return any(0 < end < len(ordered) and ordered[end] - ordered[end - 1] < 16 * epsilon for end in ends)


def mean_iou(label: np.ndarray, prediction: np.ndarray, classes: list[int]) -> float:
    overlaps = []
    for k in classes:
        union = ((label == k) | (prediction == k)).sum()
        if union:
            overlaps.append(((label == k) & (prediction == k)).sum() / union)
    return float(np.mean(overlaps)) if overlaps else math.nan


def classwise(probability: np.ndarray, label: np.ndarray, bins: int) -> tuple[float, float]:
    """Class-wise ECE and MCE."""
    errors, largest = [], []
    for k, column in enumerate(probability.T):
        # Where a probability of 0 belongs to no bin (lo, hi], it belongs to the first.
        groups = equal_width_groups(np.maximum(column, 1e-300), bins)
        share, gap = gaps(groups, column, (label == k).astype(float))
        errors.append((share * gap).sum())
        largest.append(gap.max())
    return float(np.mean(errors)), float(np.mean(largest))


def kde(logarithm: np.ndarray, label: np.ndarray) -> list[float] | None:
    """The canonical error at the likeliest bandwidths: several, if they are equally likely.

    None if all other elements have density 0 at one of them: the definition is 0/0 then.
    """
    from scipy.special import gammaln, logsumexp

    probability, count = np.exp(logarithm), len(label)
    one_hot = np.eye(probability.shape[1])[label]
    found = []
    for bandwidth in [10 ** (exponent / 2) for exponent in range(-8, 1)]:
        alpha = probability / bandwidth + 1
        log_kernel = (logarithm[:, None, :] * (probability / bandwidth)[None, :, :]).sum(2)
        log_kernel += (gammaln(alpha.sum(1)) - gammaln(alpha).sum(1))[None, :]
        np.fill_diagonal(log_kernel, -np.inf)
        if (log_kernel.max(1) < -1e20).any():
            return None
        kernel = np.exp(log_kernel - log_kernel.max(1, keepdims=True))
        kernel /= kernel.sum(1, keepdims=True)
        likelihood = logsumexp(log_kernel, axis=1).sum() / count
        found.append((likelihood, np.abs(kernel @ one_hot - probability).sum(1).mean()))
    highest = max(likelihood for likelihood, _ in found)
    return [error for likelihood, error in found if highest - likelihood <= 1e-6 * (1 + abs(highest))]


def by_definition(batch: Batch, bins: int, background: int) -> dict[str, float | list[float] | None]:
    """Every metric; several values if more than one is right, None if rounding decides it."""
    rows, label = batch.rows[batch.valid].numpy(), batch.labels[batch.valid].numpy()
    rows = np.maximum(rows, -1e30)  # for a class that is ruled out: zero times it must be zero
    logarithm = log_softmax(rows)
    probability, prediction = np.exp(logarithm), rows.argmax(1)
    confidence, correct = probability.max(1), (prediction == label).astype(float)
    classes = list(range(rows.shape[1]))
    foreground = [k for k in classes if k != background]

    share, gap = gaps(equal_width_groups(confidence, bins), confidence, correct)
    groups = equal_mass_groups(confidence, bins)
    even_share, even_gap = gaps(groups, confidence, correct)
    accuracy = [correct[group].mean() if len(group) else 0.0 for group in groups]
    squares = [
        len(g) / len(label) * ((confidence[g].mean() - a) ** 2 - a * (1 - a) / (len(g) - 1))
        for g, a in zip(groups, accuracy, strict=True)
        if len(g) > 1
    ]
    # Where rounding makes equal confidences differ, bins do not share them: only data without such ties.
    tied = cut_ties(confidence, bins, batch.epsilon)
    any_tie = any(cut_ties(confidence, n, batch.epsilon) for n in range(2, len(label) + 1))
    smooth = None
    overall = abs(confidence.mean() - correct.mean())
    if overall > 0.01 and np.abs(correct - confidence).mean() < 0.45:
        smooth = smooth_by_definition(confidence, correct)
    errors = 1 - correct[np.argsort(-confidence)]
    class_errors = classwise(probability, label, bins)
    first_five = np.argsort(-rows, axis=1, kind="stable")[:, :5]
    nll, brier = nll_by_numpy(rows, label), brier_by_numpy(rows, label)
    shifted = rows - rows.max(1, keepdims=True)  # dividing large logits by a temperature would round them
    ends = [nll_by_numpy(shifted / end, label) for end in (1e-3, 1e3)]
    refined = min(nll, *ends, best(nll_by_numpy, torch.from_numpy(shifted), label)[1])
    return {
        "accuracy": correct.mean(),
        "balanced_accuracy": np.mean([correct[label == k].mean() for k in set(label)]),
        # None: with at most five classes it is always 1, and left out.
        "top_k_accuracy": (first_five == label[:, None]).any(1).mean() if rows.shape[1] > 5 else None,
        "mean_iou": mean_iou(label, prediction, classes),
        "mean_iou_foreground": mean_iou(label, prediction, foreground),
        "nll": nll,
        "nll_calibration": nll - refined,
        "nll_refinement": refined,
        "brier": brier,
        "root_brier": math.sqrt(brier),
        "brier_calibration": None,  # has several optima: `test_parts_of_the_brier_score`
        "brier_refinement": None,
        "ece": (share * gap).sum(),
        "mce": gap.max(),
        "ece_l2": math.sqrt((share * gap**2).sum()),
        "adaptive_ece": None if tied else (even_share * even_gap).sum(),
        "classwise_ece": class_errors[0],
        "classwise_mce": class_errors[1],
        "debiased_ece": None if tied else math.sqrt(max(0.0, sum(squares))),
        "debiased_ece_l1": None if tied else debiased_l1_by_definition(confidence, correct, bins),
        "sweep_ece": None if any_tie else sweep_by_definition(confidence, correct, 2),
        "sweep_ece_l1": None if any_tie else sweep_by_definition(confidence, correct, 1),
        # The edges of all numbers of bins are too many to leave out the elements near them.
        "sweep_ece_width": None,
        "sweep_ece_width_l1": None,
        "smooth_ece": smooth,
        "kde_ece": kde(logarithm, label) if len(label) > 1 else None,
        **dict(zip(SELECTIVE, [None] * 4 if any_tie else selective(errors), strict=True)),
    }


def assert_metric(name: str, found: float | None, wanted: float, epsilon: float) -> None:
    if found is None:
        assert math.isnan(wanted), f"{name} is None, by definition {wanted}"
        return
    if name in ("debiased_ece", "root_brier"):  # the root of a small difference has half its digits
        found, wanted = found**2, wanted**2
    tolerance = 300 * epsilon * (1 + abs(wanted))
    if name == "smooth_ece":
        tolerance = 1e-3 * wanted
    elif name.startswith("nll_"):  # a temperature is found to 1e-6, and the score is flat around it
        tolerance += 1e-9 * (1 + abs(wanted))
    assert found == pytest.approx(wanted, rel=0, abs=tolerance), name


def evaluated(batch: Batch, bins: int, background: int) -> Evaluation:
    return evaluate(
        batch.logits,
        batch.target,
        bins=bins,
        ignore_index=batch.ignore_index,
        background=background,
        kde=int(batch.valid.sum()) > 1,
        resamples=0,
    )


def test_every_metric_has_a_reference() -> None:
    batch = Batch(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    assert set(by_definition(batch, 15, 0)) == set(METRICS)


small_batches = batches(most=48, most_classes=12, ruled_out=True)


@pytest.mark.filterwarnings("ignore:these logits look like")
@given(batch=small_batches, bins=BINS, background=st.integers(0, 1))
def test_metrics_equal_their_definitions(batch: Batch, bins: int, background: int) -> None:
    drop_undecidable(batch, bins)
    assume(batch.valid.any())
    figures = evaluated(batch, bins, background).metrics
    for name, wanted in by_definition(batch, bins, background).items():
        note(f"{name}: {figures[name]}, by definition {wanted}")
        if isinstance(wanted, list):
            assert any(figures[name] == pytest.approx(each, abs=1e-6) for each in wanted), name
        elif wanted is not None:
            assert_metric(name, figures[name], float(wanted), batch.epsilon)


@given(batch=small_batches)
def test_parts_of_the_brier_score(batch: Batch) -> None:
    assume(batch.valid.any())
    split = brier_split(batch.logits, batch.target, ignore_index=batch.ignore_index)
    rows, label = np.maximum(batch.rows[batch.valid].numpy(), -1e30), batch.labels[batch.valid].numpy()

    def brier_at(temperature: float) -> float:
        return brier_by_numpy((rows - rows.max(1, keepdims=True)) / temperature, label)

    near = 300 * batch.epsilon
    assert split.calibration >= 0
    assert split.calibration + split.refinement == pytest.approx(brier_at(1.0), abs=near)
    assert split.refinement == pytest.approx(brier_at(split.temperature), abs=near)
    # No temperature near it is better.
    for factor in (0.99, 1.01):
        temperature = min(max(split.temperature * factor, 1e-3), 1e3)
        assert brier_at(temperature) >= split.refinement - near


@pytest.mark.filterwarnings("ignore:these logits look like")
@given(batch=small_batches, bins=DIVISORS, data=st.data())
def test_a_stream_equals_all_at_once(batch: Batch, bins: int, data: st.DataObject) -> None:
    assume(batch.valid.any())
    whole = evaluated(batch, bins, 1).metrics
    size = len(batch.logits)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4), "cuts"))
    parts = zip(batch.logits.tensor_split(cuts), batch.target.tensor_split(cuts), strict=True)
    evaluators = []
    for logits, target in parts:
        options = {"bins": bins, "ignore_index": batch.ignore_index, "background": 1, "resamples": 0}
        evaluators.append(Evaluator(batch.logits.shape[1], **options).update(logits, target))
    total = evaluators[0]
    for other in evaluators[1:]:
        total = total + other
    streamed = total.compute().metrics
    for name in STREAMED:
        if whole[name] is None:
            assert streamed[name] is None
        else:
            assert streamed[name] == pytest.approx(whole[name], rel=1e-6, abs=300 * batch.epsilon), name
    tied = cut_ties(np.exp(log_softmax(batch.rows[batch.valid])).max(1), bins, batch.epsilon)
    if not tied:
        bound = straddling(total._sums.histogram, bins)
        assert abs(streamed["adaptive_ece"] - whole["adaptive_ece"]) <= bound + 300 * batch.epsilon
    for name, metric in METRICS.items():
        assert streamed[name] is None or streamed[name] >= 0
        assert streamed[name] is None or not metric.percent or streamed[name] <= 1 + 1e-6


@pytest.mark.filterwarnings("ignore:these logits look like")
@given(batch=batches(most=48, most_classes=12, kinds=("plain", "certain")), seed=SEEDS)
def test_permuted_classes_change_nothing(batch: Batch, seed: int) -> None:
    top = batch.rows.topk(2, 1).values
    batch.ignore(top[:, 0] == top[:, 1])  # of equal logits the first is predicted
    drop_undecidable(batch, 15)
    assume(batch.valid.any())
    classes = batch.logits.shape[1]
    order = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))
    inverse = order.argsort()
    labels = torch.where(batch.target == batch.ignore_index, 0, batch.target)
    target = torch.where(batch.target == batch.ignore_index, batch.ignore_index, inverse[labels])
    permuted = Batch(batch.logits[:, order], target, batch.ignore_index)
    one, other = evaluated(batch, 15, 0), evaluated(permuted, 15, int(inverse[0]))
    confidence = np.exp(log_softmax(batch.rows[batch.valid])).max(1)
    for name in METRICS:
        if name.startswith("sweep_ece_width"):  # an edge of some number of bins may be near
            continue
        if name.startswith(("adaptive_ece", "debiased_ece", "sweep_ece", *SELECTIVE)) and any(
            cut_ties(confidence, n, batch.epsilon) for n in range(2, len(confidence) + 1)
        ):
            continue
        if one.metrics[name] is None:
            assert other.metrics[name] is None
        else:
            tolerance = 1e-4 if name == "kde_ece" else max(1e-8, 1e3 * batch.epsilon)
            assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=tolerance), name


def separation(inside: list[float], outside: list[float]) -> tuple[float, float, float, float]:
    """AUROC, both AUPRs and FPR95, one pair and one threshold at a time."""
    wins = [1.0 if o > i else 0.5 if o == i else 0.0 for i in inside for o in outside]

    def average_precision(positive: list[float], negative: list[float]) -> float:
        area, before = 0.0, 0
        for threshold in sorted(set(positive), reverse=True):
            found = sum(score >= threshold for score in positive)
            mistaken = sum(score >= threshold for score in negative)
            area += (found - before) / len(positive) * found / (found + mistaken)
            before = found
        return area

    accepting = [t for t in sorted(inside) if 100 * sum(i <= t for i in inside) >= 95 * len(inside)]
    false = sum(o <= accepting[0] for o in outside) / len(outside)
    negated = [-score for score in inside], [-score for score in outside]
    return float(np.mean(wins)), average_precision(outside, inside), average_precision(*negated), false


@given(
    inside=st.lists(st.integers(-5, 5), min_size=1, max_size=40),
    outside=st.lists(st.integers(-5, 5), min_size=1, max_size=40),
)
def test_detection_equals_its_definition(inside: list[int], outside: list[int]) -> None:
    found = detection(torch.tensor(inside).double(), torch.tensor(outside).double())
    wanted = separation([float(i) for i in inside], [float(o) for o in outside])
    assert (found.auroc, found.aupr, found.aupr_in, found.fpr_at_95_tpr) == pytest.approx(wanted, abs=1e-12)


@given(batch=batches(most_classes=12, ruled_out=True))
def test_scores_of_detection(batch: Batch) -> None:
    logits: Tensor = batch.logits
    rows = np.maximum(batch.rows.numpy(), -1e30)
    logarithm = log_softmax(rows)
    probability = np.exp(logarithm)
    top = rows.max(1)
    rest = np.sort(probability, 1)[:, :-1].sum(1)  # without the largest
    others = 1 - probability
    others[np.arange(len(rows)), rows.argmax(1)] = rest
    wanted = {
        "entropy": -(probability * logarithm).sum(1),
        "maximum_probability": rest,
        "energy": -(top + np.log(np.exp(rows - top[:, None]).sum(1))),
        "maximum_logit": -top,
        "generalised_entropy": ((probability * others) ** 0.1).sum(1),
    }
    assert set(wanted) == set(SCORES)
    for name, score in SCORES.items():
        found = score(logits).double().reshape(-1).numpy()
        np.testing.assert_allclose(found, wanted[name], rtol=300 * batch.epsilon, atol=300 * batch.epsilon)
    for result in ood_detection(logits, logits).values():
        assert result.auroc == 0.5


def test_pairs_of_the_definition() -> None:
    """The reference itself, where the answer is known."""
    assert separation([0.1, 0.2, 0.3, 0.6], [0.5, 0.9]) == pytest.approx((0.875, 0.8333333, 0.95, 0.5))
