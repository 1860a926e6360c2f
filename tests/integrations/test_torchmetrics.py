"""Metrics in torchmetrics' hands give what calibrant's own functions give for the whole data at once."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.classification import (
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassCalibrationError,
)
from torchmetrics.wrappers import BootStrapper, MinMaxMetric, Running

from calibrant.histogram import ConfidenceHistogram
from calibrant.integrations.torchmetrics import (
    CalibrationError,
    ClasswiseCalibrationError,
    NegativeLogLikelihood,
    SelectiveRisk,
)
from calibrant.layout import arrange
from calibrant.metrics import calibration, selective
from calibrant.metrics.classwise import classwise_ece
from tests.distributed.processes import in_processes

CLASSES = 4
WITH_BINS = ["ece", "mce", "ece_l2", "adaptive_ece", "debiased_ece"]
KINDS = [*WITH_BINS, "sweep_ece", "smooth_ece"]
VARIANTS = {
    "debiased_ece_l1": ("debiased_ece", {"norm": 1}),
    "sweep_ece_l1": ("sweep_ece", {"norm": 1}),
    "sweep_ece_width": ("sweep_ece", {"binning": "equal-width"}),
    "sweep_ece_width_l1": ("sweep_ece", {"norm": 1, "binning": "equal-width"}),
}
ALL = [
    CalibrationError,
    lambda **options: ClasswiseCalibrationError(CLASSES, **options),
    NegativeLogLikelihood,
]


def batch(samples=600, *spatial, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, CLASSES, *spatial, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(CLASSES, (samples, *spatial), generator=generator)
    likely = torch.rand(target.shape, generator=generator) < 0.6
    return logits.to(dtype), torch.where(likely, logits.argmax(1), target)


def pieces(logits, target, number=5):
    return zip(logits.tensor_split(number), target.tensor_split(number), strict=True)


def fed(metric, logits, target, number=5):
    for part in pieces(logits, target, number):
        metric.update(*part)
    return metric


def expected(kind, logits, target, bins=15):
    name, variant = VARIANTS.get(kind, (kind, {}))
    options = {"bins": bins} if name in WITH_BINS else {}
    return getattr(calibration, name)(ConfidenceHistogram.of(arrange(logits, target)), **variant, **options)


def states(metric):
    return {name: value.clone() for name, value in metric.metric_state.items()}


def assert_same_states(first, second):
    assert list(first) == list(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("bins", [10, 15])
@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_equals_the_function_on_all_data(kind, bins):
    logits, target = batch()
    value = fed(CalibrationError(kind, bins=bins), logits, target).compute()
    assert value.shape == ()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected(kind, logits, target, bins), rel=1e-10)


def test_selective_risks_are_no_calibration_errors():
    assert not isinstance(SelectiveRisk(), CalibrationError)


def test_kinds_and_bins_matter():
    logits, target = batch()
    values = {fed(CalibrationError(kind), logits, target).compute().item() for kind in KINDS}
    assert len(values) == len(KINDS)
    few, many = (fed(CalibrationError(bins=bins), logits, target).compute() for bins in (5, 50))
    assert few < many


def test_expected_calibration_error_by_its_definition():
    logits, target = batch()
    probabilities = logits.softmax(1).numpy()
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == target.numpy()
    place = np.ceil(confidence * 15).astype(int)
    gaps = [abs((confidence - correct)[place == b].sum()) for b in range(16)]
    value = fed(CalibrationError("ece"), logits, target).compute()
    assert value.item() == pytest.approx(sum(gaps) / len(logits), rel=1e-10)


@pytest.mark.parametrize("bins", [10, 15])
def test_classwise_equals_its_definition(bins):
    logits, target = batch()
    probabilities = logits.softmax(1).numpy()
    gap = probabilities - np.eye(CLASSES)[target.numpy()]
    place = np.ceil(probabilities * bins).astype(int)
    total = sum(abs(gap[place[:, k] == b, k].sum()) for k in range(CLASSES) for b in range(bins + 1))
    metric = fed(ClasswiseCalibrationError(CLASSES, bins=bins), logits, target)
    assert metric.compute().item() == pytest.approx(total / len(logits) / CLASSES, rel=1e-10)
    assert metric.compute().item() == pytest.approx(classwise_ece(logits, target, bins=bins), rel=1e-10)


def test_negative_log_likelihood_is_the_mean_over_elements():
    logits, target = batch()
    target[::4] = -100
    value = fed(NegativeLogLikelihood(), logits, target, 7).compute()  # batches of unequal size
    torch.testing.assert_close(value, nn.functional.cross_entropy(logits, target), rtol=1e-12, atol=0)
    logits, yes = logits[:, 0], (target == 0).long()
    value = fed(NegativeLogLikelihood(binary=True), logits, yes, 7).compute()
    expected = nn.functional.binary_cross_entropy_with_logits(logits, yes.double())
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("create", ALL)
def test_dense_equals_flattened(create):
    logits, target = batch(6, 5, 7)
    rows = logits.movedim(1, -1).reshape(-1, CLASSES)
    dense, flat = fed(create(), logits, target, 3), fed(create(), rows, target.flatten())
    assert_same_states(states(dense), states(flat))


@pytest.mark.parametrize("create", ALL)
def test_ignoring_equals_deleting(create):
    logits, target = batch()
    ignored = target.clone()
    ignored[::3] = 255
    kept = ignored != 255
    whole = fed(create(ignore_index=255), logits, ignored).compute()
    torch.testing.assert_close(whole, fed(create(), logits[kept], target[kept]).compute())
    assert whole != fed(create(), logits, target).compute()


@pytest.mark.parametrize("create", ALL)
def test_logits_inside_the_unit_interval_are_still_logits(create):
    probabilities = batch()[0].softmax(1)
    target = batch()[1]
    with pytest.warns(UserWarning, match="look like probabilities"):
        as_logits = fed(create(), probabilities, target).compute()
    as_probabilities = fed(create(), probabilities.log(), target).compute()
    torch.testing.assert_close(as_probabilities, fed(create(), *batch()).compute())
    torch.testing.assert_close(as_logits, fed(create(), probabilities + 5, target).compute())
    assert abs(as_logits - as_probabilities) > 1e-3


@pytest.mark.parametrize("create", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits(create, dtype):
    logits, target = batch(dtype=dtype)
    metric = fed(create(), logits, target)
    precise = fed(create(), logits.double(), target)
    torch.testing.assert_close(metric.compute().double(), precise.compute(), atol=1e-3, rtol=0)
    assert metric.sums.samples.dtype == torch.float64


# ---------------------------------------------------------------------------------------- life of a metric


@pytest.mark.parametrize("create", ALL)
def test_forward_returns_the_batch_and_accumulates(create):
    metric, logits, target = create(), *batch()
    for part in pieces(logits, target):
        torch.testing.assert_close(metric(*part), fed(create(), *part, 1).compute())
    torch.testing.assert_close(metric.compute(), fed(create(), logits, target).compute())
    assert metric.update_count == 5


@pytest.mark.parametrize("create", ALL)
def test_reset_forgets(create):
    metric = fed(create(), *batch())
    metric.reset()
    assert metric.sums.samples == 0
    torch.testing.assert_close(fed(metric, *batch(seed=1)).compute(), fed(create(), *batch(seed=1)).compute())


@pytest.mark.parametrize("create", ALL)
def test_pickling_and_cloning_in_mid_stream(create):
    metric = fed(create(), *batch())
    for copy in (pickle.loads(pickle.dumps(metric)), metric.clone()):
        assert_same_states(states(copy), states(metric))
        fed(copy, *batch(seed=1))
        assert copy.sums.samples == 1200
        assert metric.sums.samples == 600
    assert copy.compute() != metric.compute()


@pytest.mark.parametrize("create", ALL)
def test_merging_two_equals_one(create):
    logits, target = batch()
    first, second = fed(create(), logits[:400], target[:400]), fed(create(), logits[400:], target[400:])
    by_state = first.clone()
    first.merge_state(second)
    by_state.merge_state(second.metric_state)
    whole = fed(create(), logits, target)
    assert_same_states(states(first), states(whole))
    assert_same_states(states(by_state), states(whole))


@pytest.mark.parametrize("create", ALL)
def test_states_travel_in_a_state_dict_on_request(create):
    metric = fed(create(), *batch())
    assert metric.state_dict() == {}
    metric.persistent(True)
    restored = create()
    restored.load_state_dict(metric.state_dict())
    assert_same_states(states(restored), states(metric))


@pytest.mark.parametrize("create", ALL)
def test_updates_in_inference_mode_can_be_continued_outside(create):
    metric, logits, target = create(), *batch()
    with torch.inference_mode():
        metric.update(logits[:300], target[:300])
    metric.update(logits[300:].requires_grad_(), target[300:])
    assert_same_states(states(metric), states(fed(create(), logits.detach(), target)))
    assert not metric.compute().requires_grad


@pytest.mark.parametrize("create", ALL)
def test_lightning_finds_what_it_looks_for(create):
    assert create().is_differentiable is False
    assert create().higher_is_better is False
    assert create().full_state_update is False
    tracker = MetricTracker(create())
    for seed in range(3):
        tracker.increment()
        fed(tracker, *batch(seed=seed))
    best, step = tracker.best_metric(return_step=True)
    values = tracker.compute_all()
    assert best == values.min()
    assert step == int(values.argmin())


CONVERSIONS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "to half": lambda module: module.to(torch.float16),
    "to device and type": lambda module: module.to("cpu", torch.bfloat16),
    "type": lambda module: module.type(torch.float16),
}


@pytest.mark.parametrize("create", ALL)
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("inside", [True, False])
def test_sums_stay_in_double_precision(create, convert, inside):
    metric = fed(create(), *batch(3_000))
    before = states(metric)
    convert(nn.ModuleList([metric, nn.Linear(2, 2)]) if inside else metric)
    assert_same_states(states(metric), before)
    assert metric.metric_state["samples"].dtype == torch.float64
    metric.reset()
    fed(metric, *batch(3_000))
    assert_same_states(states(metric), before)


@pytest.mark.parametrize("create", ALL)
def test_set_dtype_does_not_touch_the_sums(create):
    metric = fed(create(ignore_index=100_001), *batch(3_000))
    before = states(metric)
    assert_same_states(states(metric.set_dtype(torch.float16)), before)


def test_a_move_to_another_device_moves_everything():
    metric = CalibrationError().to("meta")
    assert {value.device.type for value in metric.metric_state.values()} == {"meta"}
    assert metric.device.type == "meta"
    assert metric.sums.samples.dtype == torch.float64


@pytest.mark.parametrize("create", ALL)
def test_fifty_million_elements_in_one_bin(create):
    # torchmetrics' own sums in single precision stop counting at 16,777,216.
    logits = torch.tensor([[2.0, 0, 0, 0], [2.0, 0, 0, 0], [2.0, 0, 0, 0]], dtype=torch.float64)
    metric = fed(create(), logits, torch.tensor([0, 0, 1]), 1)
    small = metric.clone().compute()
    for _ in range(24):
        metric.merge_state(metric.clone())
    assert metric.sums.samples == 3 * 2**24
    torch.testing.assert_close(metric.compute(), small, rtol=1e-12, atol=0)


def test_memory_is_constant():
    metric = fed(CalibrationError(), *batch(10))
    size = sum(value.numel() * value.element_size() for value in metric.metric_state.values())
    assert size < 80 * 1024
    fed(metric, *batch(100_000))
    assert size == sum(value.numel() * value.element_size() for value in metric.metric_state.values())


@pytest.mark.parametrize("create", ALL)
def test_nothing_to_measure_is_nan_and_no_error(create):
    with pytest.warns(UserWarning, match="was called before the ``update`` method"):
        assert math.isnan(create().compute())
    metric, logits, target = create(), *batch()
    assert math.isnan(metric(logits, torch.full_like(target, -100)))
    assert math.isnan(metric(logits[:0], target[:0]))
    metric.update(logits, target)
    torch.testing.assert_close(metric.compute(), fed(create(), logits, target).compute())


def test_clear_errors():
    with pytest.raises(ValueError, match=r"kind must be one of 'ece', 'mce', .*'smooth_ece', got 'eec'"):
        CalibrationError("eec")
    with pytest.raises(ValueError, match="divisor of 300"):
        CalibrationError("ece", bins=7)
    with pytest.raises(ValueError, match="at least 1"):
        CalibrationError("adaptive_ece", bins=0)
    with pytest.raises(ValueError, match="at least 1"):
        ClasswiseCalibrationError(3, bins=0)
    with pytest.raises(ValueError, match="num_classes must be a whole number of at least 1, got 0"):
        ClasswiseCalibrationError(0)
    with pytest.raises(ValueError, match="have 4 classes on axis 1, expected num_classes=3"):
        ClasswiseCalibrationError(3).update(*batch())
    with pytest.raises(TypeError, match="logits must be floating point"):
        CalibrationError().update(torch.zeros(2, 3).long(), torch.zeros(2).long())
    with pytest.raises(ValueError, match="Unexpected keyword arguments: `surprise`"):
        CalibrationError(surprise=1)


# --------------------------------------------------------------------------------------- in a collection


def collection(**options):
    metrics = {kind: CalibrationError(kind) for kind in KINDS}
    metrics["classwise_ece"] = ClasswiseCalibrationError(CLASSES)
    metrics["accuracy"] = MulticlassAccuracy(CLASSES, average="micro")
    return MetricCollection(metrics, **options)


def test_metrics_of_all_kinds_share_their_updates(monkeypatch):
    looks = []
    of = ConfidenceHistogram.of.__func__

    def counted(cls, elements):
        looks.append(elements)
        return of(cls, elements)

    metrics = collection()
    monkeypatch.setattr(ConfidenceHistogram, "of", classmethod(counted))
    fed(metrics, *batch())
    assert len(looks) == len(KINDS) + 4  # each in the first update, from which the groups are formed
    groups = {frozenset(group) for group in metrics.compute_groups.values()}
    assert groups == {frozenset(KINDS), frozenset({"classwise_ece"}), frozenset({"accuracy"})}


@pytest.mark.parametrize("compute_groups", [True, False])
def test_a_collection_equals_its_members(compute_groups):
    metrics = collection(compute_groups=compute_groups)
    for seed in (1, 2):  # two epochs
        logits, target = batch(seed=seed)
        for first, part in enumerate(pieces(logits, target)):
            metrics.update(*part)
            metrics.compute()  # between updates, as a progress bar does
            if first == 2:
                metrics = pickle.loads(pickle.dumps(metrics))
        values = metrics.compute()
        for kind in KINDS:
            assert values[kind].item() == pytest.approx(expected(kind, logits, target), rel=1e-10)
        assert values["classwise_ece"].item() == pytest.approx(classwise_ece(logits, target), rel=1e-10)
        metrics.reset()


def test_forward_after_the_groups_are_formed():
    metrics, (logits, target) = collection(), batch()
    metrics.update(logits[:100], target[:100])
    for part in pieces(logits[100:], target[100:]):
        values = metrics(*part)
        assert values["ece"].item() == pytest.approx(expected("ece", *part), rel=1e-10)
    values = metrics.compute()
    for kind in KINDS:
        assert values[kind].item() == pytest.approx(expected(kind, logits, target), rel=1e-10)


@pytest.mark.parametrize("create", ALL)
def test_metrics_that_ignore_different_labels_are_never_grouped(create):
    metrics = MetricCollection({"all": create(), "but_one": create(ignore_index=1)})
    logits, target = batch()
    first = target != 1
    metrics.update(logits[first], target[first])  # nothing ignored: the sums are equal by chance
    metrics.update(logits, target)
    torch.testing.assert_close(
        metrics.compute()["but_one"], fed(create(), logits[first], target[first]).compute()
    )
    assert metrics["all"].sums.samples == first.sum() + len(target)
    assert metrics["but_one"].sums.samples == 2 * first.sum()


# --------------------------------------------------------------------- habits of torchmetrics' users

NORMS = {"ece": "l1", "ece_l2": "l2", "mce": "max"}
IGNORED = [None, -1, 0]


def with_ignored(target, label):
    """Every seventh label replaced by one to ignore, and the options that ignore it, for both libraries."""
    if label is None:
        return target, {}, {}
    target = target.clone()
    target.view(-1)[::7] = label
    return target, {"ignore_index": label}, {"ignore_index": label}


def in_pairs(*choices):
    """Nine cases in which every two of four times three choices meet.

    That is enough: shapes and ignored labels matter until elements are counted, kinds and bins only after.
    """
    places = [(a, b, (a + b) % 3, (a + 2 * b) % 3) for a in range(3) for b in range(3)]
    return [tuple(each[n] for each, n in zip(choices, place, strict=True)) for place in places]


@pytest.mark.parametrize(
    ("kind", "bins", "spatial", "ignored"), in_pairs([*NORMS], [10, 15, 20], [(), (3, 4), (5,)], IGNORED)
)
def test_several_classes_agree_with_torchmetrics(spatial, bins, kind, ignored):
    # Theirs computes in single precision.
    logits, target = batch(120, *spatial, seed=4)
    target, ours, theirs = with_ignored(target, ignored)
    metric = CalibrationError(kind, bins=bins, **ours)
    reference = MulticlassCalibrationError(CLASSES, n_bins=bins, norm=NORMS[kind], **theirs)
    for part, labels in pieces(logits, target):
        value = metric(preds=part, target=labels)
        assert value.item() == pytest.approx(reference(preds=part, target=labels).item(), abs=1e-6)
    assert metric.compute().item() == pytest.approx(reference.compute().item(), abs=1e-6)
    # Theirs takes probabilities for what they are, ours takes their logarithms.
    probabilities = logits.softmax(1)
    metric.reset()
    reference.reset()
    fed(metric, probabilities.log(), target)
    fed(reference, probabilities, target)
    assert metric.compute().item() == pytest.approx(reference.compute().item(), abs=1e-6)


def decisions(*shape, seed=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits.to(dtype), (torch.rand(shape, generator=generator) < (logits / 2).sigmoid()).long()


@pytest.mark.parametrize(
    ("kind", "bins", "shape", "ignored"),
    in_pairs([*NORMS], [10, 15, 20], [(300,), (60, 5), (20, 3, 4)], IGNORED),
)
def test_single_logits_agree_with_torchmetrics(shape, bins, kind, ignored):
    logits, target = decisions(*shape)
    target, ours, theirs = with_ignored(target, ignored)
    metric = CalibrationError(kind, bins=bins, binary=True, **ours)
    reference = BinaryCalibrationError(bins, NORMS[kind], **theirs)
    for part, labels in pieces(logits, target):
        value = metric(preds=part, target=labels)
        assert value.item() == pytest.approx(reference(preds=part, target=labels).item(), abs=1e-12)
    assert metric.compute().item() == pytest.approx(reference.compute().item(), abs=1e-12)


def test_single_logits_in_a_column_of_their_own():
    logits, target = decisions(300)
    expected = fed(CalibrationError("mce", binary=True), logits, target).compute()
    torch.testing.assert_close(
        fed(CalibrationError("mce", binary=True), logits[:, None], target).compute(), expected
    )
    torch.testing.assert_close(
        fed(CalibrationError("mce", binary=True), logits, target.bool()).compute(), expected
    )


def test_the_positive_class_is_not_the_confidence():
    # The confidence is 0.9 and always right. The probability of 1 is 0.1 where all are 0: both are calibrated
    # equally badly, but only bins of the positive class tell 0.1 from 0.9.
    odds = torch.full((10,), 9.0, dtype=torch.float64).log()
    logits, target = torch.cat([odds, -odds]), torch.tensor([1] * 7 + [0] * 3 + [0] * 10)
    one = fed(CalibrationError("mce", binary=True), logits, target).compute()
    two = fed(CalibrationError("mce"), torch.stack([torch.zeros_like(logits), logits], 1), target).compute()
    assert one.item() == pytest.approx(0.2)
    assert two.item() == pytest.approx(0.05)


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_single_logits_have_every_kind(kind):
    logits, target = decisions(500)
    histogram = ConfidenceHistogram.of_outcomes(logits.sigmoid(), target == 1)
    name, variant = VARIANTS.get(kind, (kind, {}))
    value = fed(CalibrationError(kind, binary=True), logits, target).compute()
    assert value.item() == pytest.approx(getattr(calibration, name)(histogram, **variant), rel=1e-10)


def test_decisions_of_single_logits_are_refused_by_their_confidence():
    logits, target = decisions(500)
    pairs = torch.stack([torch.zeros_like(logits), logits], 1)
    expected = fed(SelectiveRisk("aurc"), pairs, target).compute()
    torch.testing.assert_close(fed(SelectiveRisk("aurc", binary=True), logits, target).compute(), expected)


def test_metrics_of_yes_and_of_decisions_are_never_grouped():
    logits, target = decisions(500)
    order = (logits < 0).long().argsort(stable=True)  # the first batch is all yes: both see the same numbers
    logits, target = logits[order], target[order]
    assert logits[:50].min() > 0
    metrics = MetricCollection({"ece": CalibrationError(binary=True), "aurc": SelectiveRisk(binary=True)})
    found = fed(metrics, logits, target, 10).compute()
    torch.testing.assert_close(found["ece"], fed(CalibrationError(binary=True), logits, target).compute())
    torch.testing.assert_close(found["aurc"], fed(SelectiveRisk(binary=True), logits, target).compute())


@pytest.mark.parametrize("create", [CalibrationError, SelectiveRisk, NegativeLogLikelihood])
def test_binary_is_true_or_false(create):
    with pytest.raises(ValueError, match="binary must be True or False, got 1"):
        create(binary=1)


def test_wrong_single_logits_are_one_clear_line():
    logits, target = decisions(20, 3)
    metric = CalibrationError(binary=True)
    with pytest.raises(ValueError, match=r"target must have the logits' shape \(20, 3\), got \(20,\)"):
        metric.update(logits, target[:, 0])
    with pytest.raises(ValueError, match="expected 0 to 1"):
        metric.update(logits, target + 1)
    with pytest.raises(ValueError, match="pass binary=True"):
        CalibrationError().update(logits[:, :1], target[:, 0])
    assert metric.sums.samples == 0
    logits[3] = math.nan
    metric.update(logits, target)
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("create", ALL)
def test_the_result_has_the_precision_of_the_logits(create, dtype):
    logits, target = batch(dtype=dtype)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    metrics = MetricCollection({"one": create(), "other": create()})  # they share their updates
    fed(metrics, logits, target)
    assert {value.dtype for value in metrics.compute().values()} == {single}
    metric = create()
    assert metric(logits, target).dtype == single
    assert metric.compute().dtype == single
    metric.update(*batch())  # one batch in double precision is enough
    assert metric.compute().dtype == torch.float64


WRAPPERS = {
    "bootstrapper": lambda metric: BootStrapper(
        metric, num_bootstraps=3, quantile=torch.tensor([0.1, 0.9]), raw=True
    ),
    "min and max": MinMaxMetric,
    "running": lambda metric: Running(metric, window=2),
    "sum": lambda metric: metric + 1,
}


@pytest.mark.parametrize("create", ALL)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_of_torchmetrics_take_it(create, wrap):
    logits, target = batch(dtype=torch.float32)
    wrapped = wrap(create())
    for part, labels in pieces(logits, target):
        wrapped(preds=part, target=labels)
    value = wrapped.compute()
    values = value.values() if isinstance(value, dict) else [value]
    assert all(each.isfinite().all() and each.dtype == torch.float32 for each in values)


@pytest.mark.parametrize("create", ALL)
def test_plots_like_other_metrics(create):
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib.figure import Figure

    metric, (logits, target) = create(), batch()
    values = [metric(*part) for part in pieces(logits, target)]
    axes = Figure().subplots()
    assert metric.plot(ax=axes)[1] is axes
    (drawn,) = axes.lines
    assert drawn.get_ydata()[0] == pytest.approx(metric.compute().item())
    axes = Figure().subplots()
    metric.plot(values, ax=axes)  # over steps
    assert len(axes.lines[0].get_ydata()) == len(values)
    MetricCollection({"error": metric, "accuracy": MulticlassAccuracy(CLASSES)}).plot(
        {"error": values[0], "accuracy": torch.tensor(0.5)}
    )


# ----------------------------------------------------------------------------------------- two processes

SHARES = {"unequal": [slice(0, 430), slice(430, 600)], "nothing": [slice(0, 600), slice(600, 600)]}


def measure_apart(rank):
    results = {}
    logits, target = batch()
    for name, shares in SHARES.items():
        metrics, alone = collection(), CalibrationError("ece")
        share = logits[shares[rank]], target[shares[rank]]
        if len(share[0]):
            fed(alone, *share, 3)
        # The accuracy of torchmetrics cannot be of nothing, so here it stays out.
        metrics = MetricCollection({key: metrics[key] for key in [*KINDS, "classwise_ece"]})
        fed(metrics, *share, 3)
        before = states(metrics["ece"])
        results[name] = {key: value.item() for key, value in metrics.compute().items()}
        results[name]["alone"] = alone.compute().item()
        results[name]["restored"] = all(
            torch.equal(value, before[key]) for key, value in states(metrics["ece"]).items()
        )
        alone.sync()
        results[name]["synced samples"] = alone.sums.samples.item()
        alone.unsync()
        results[name]["own samples"] = alone.sums.samples.item()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return in_processes(measure_apart, 2, tmp_path_factory.mktemp("torchmetrics"))


@pytest.mark.parametrize("share", SHARES)
def test_two_processes_equal_one(ranks, share):
    logits, target = batch()
    for rank, results in enumerate(ranks):
        for kind in KINDS:
            assert results[share][kind] == pytest.approx(expected(kind, logits, target), rel=1e-10)
        assert results[share]["classwise_ece"] == pytest.approx(classwise_ece(logits, target), rel=1e-10)
        assert results[share]["alone"] == pytest.approx(expected("ece", logits, target), rel=1e-10)
        assert results[share]["restored"]
        assert results[share]["synced samples"] == 600
        own = SHARES[share][rank]
        assert results[share]["own samples"] == own.stop - own.start


@pytest.mark.parametrize("kind", ["aurc", "augrc", "risk_at_coverage", "coverage_at_risk"])
def test_selective_risks_are_those_of_the_histogram(kind):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 5, generator=generator)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    metric = SelectiveRisk(kind)
    for part in zip(logits.split(300), target.split(300), strict=True):
        metric.update(*part)
    exact = getattr(selective, kind)(logits, target)
    assert metric.compute().item() == pytest.approx(exact, rel=0.02)
    assert metric.higher_is_better == (kind == "coverage_at_risk")
    with pytest.raises(ValueError, match="kind must be one of 'aurc', 'augrc'"):
        SelectiveRisk("ece")


@pytest.mark.parametrize("options", [{"num_classes": 4}, {"task": "binary"}, {"n_bins": 10}], ids=list)
def test_arguments_of_torchmetrics_are_explained(options):
    with pytest.raises(TypeError, match="not an argument of this metric"):
        CalibrationError("ece", **options)
