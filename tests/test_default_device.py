"""Data and results stay where they are, whatever ``torch.set_default_device`` says.

Here the default device is "meta", whose tensors have no values, and all data are on the CPU. A helper tensor
that does not name its device then fails; with a GPU as the default, it would be on the wrong one.
"""

import ast
import inspect
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from sklearn.naive_bayes import GaussianNB
from torch import nn
from torch.utils._device import _device_constructors

import calibrant
from calibrant import LOSSES, Evaluator, adapt_on, create_loss, evaluate, evaluate_on, histogram, metrics
from calibrant.calibrators import (
    CALIBRATORS,
    choose,
    create_calibrator,
    load_calibrator,
    rank,
    save_calibrator,
)
from calibrant.conformal import CONFORMAL, create_conformal, evaluate_sets, load_conformal, save_conformal
from calibrant.ensembles import Diversity, disagreement, mutual_information, pool
from calibrant.evaluation.ranks import rank_methods
from calibrant.integrations import torchmetrics
from calibrant.integrations.sklearn import CalibratedClassifier, calibration_scorer
from calibrant.layout import arrange
from calibrant.losses import AdaptiveLoss
from calibrant.predictions import open_predictions
from calibrant.predictions.writing import write_predictions
from calibrant.reports.page import render_report
from calibrant.reports.plots import formulas
from calibrant.training.data import augmentation, built_in, sampling

CACHES = histogram.cell_edges, histogram.last_of_cells, augmentation.shift_and_scale
"""Functions that keep tensors: kept by a test, they would hide that they are made on the wrong device."""

AS_MODULES = {
    "register_learned": "the state of a loss",
    "AdaptiveLoss.__init__": "the state of a loss",
    "_checked_weights": "the state of a loss",
    "_elements": "the state of a metric of torchmetrics",
    "_ErrorOfSums.__init__": "the state of a metric of torchmetrics",
    "_ErrorOfHistogram.__init__": "the state of a metric of torchmetrics",
}
"""Functions that make the state of a module on the default device, where torch's own modules have theirs."""


def data(classes=4, size=400, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(size, classes, generator=generator, dtype=dtype)
    target = torch.multinomial((logits / 2).softmax(1), 1, generator=generator).squeeze(1)
    return logits, target


LOGITS, TARGET = data()
SINGLE, ANSWERS = LOGITS[:, 1] - LOGITS[:, 0], (TARGET == 1).long()
IMAGES, MASKS = LOGITS.view(4, 10, 10, 4).movedim(3, 1).contiguous(), TARGET.view(4, 10, 10)


def forget():
    for function in CACHES:
        function.cache_clear()


def assert_same(found, expected):
    """Compare results, of which no tensor may be elsewhere than on the CPU."""
    if isinstance(expected, torch.Tensor):
        assert found.device == expected.device == torch.device("cpu")
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    elif is_dataclass(expected):
        for field in fields(expected):
            if field.name != "seconds":
                assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected or (found != found and expected != expected)


def check(function):
    """Call a function with and without a default device and compare the results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = function()
        forget()
        try:
            with torch.device("meta"):
                found = function()
        finally:
            forget()
    assert_same(found, expected)


@pytest.mark.parametrize("key", CALIBRATORS)
def test_calibrators(key, tmp_path):
    def calibrated():
        found = []
        for logits, target, binary in (
            (LOGITS, TARGET, False),
            (IMAGES, MASKS, False),
            (SINGLE, ANSWERS, True),
        ):
            calibrator = create_calibrator(key).fit(logits, target, binary=binary)
            save_calibrator(calibrator, tmp_path / "calibrator.safetensors")
            loaded = load_calibrator(tmp_path / "calibrator.safetensors")
            again = create_calibrator(key)
            again.load_state_dict(calibrator.state_dict())
            state = dict(calibrator.named_buffers())
            found += [repr(calibrator), state, *(each(logits) for each in (calibrator, loaded, again))]
        return found

    check(calibrated)


def test_the_choice_of_a_calibrator():
    few = LOGITS[:120], TARGET[:120]
    check(lambda: rank(*few, folds=2))
    check(lambda: rank(SINGLE, ANSWERS, folds=2, binary=True, candidates=["temperature"]))
    check(lambda: choose(*few, folds=2)(LOGITS))


@pytest.mark.parametrize("key", CONFORMAL)
def test_conformal_sets(key, tmp_path):
    def figures():
        found = []
        for class_conditional in (False, True):
            conformal = create_conformal(key, class_conditional=class_conditional).fit(LOGITS, TARGET)
            save_conformal(conformal, tmp_path / "sets.safetensors")
            sets = load_conformal(tmp_path / "sets.safetensors")(LOGITS)
            found += [conformal(LOGITS), sets, evaluate_sets(sets, TARGET)]
        return found

    check(figures)


def takes_target(function):
    return inspect.isfunction(function) and {"source", "target"} <= set(
        inspect.signature(function).parameters
    )


@pytest.mark.parametrize("name", [name for name in metrics.__all__ if takes_target(getattr(metrics, name))])
def test_metrics(name):
    check(lambda: getattr(metrics, name)(LOGITS, TARGET))


def test_detection():
    outside = data(seed=1)[0] / 2
    check(lambda: metrics.ood_detection(LOGITS, outside))
    check(lambda: metrics.ood.roc(metrics.entropy(LOGITS), metrics.entropy(outside)))


def test_uncertainty_of_bins():
    bins = histogram.Outcomes.of(arrange(LOGITS, TARGET)).equal_width(15)
    check(lambda: metrics.consistency_band(bins))
    check(lambda: metrics.binomial_interval(bins.correct, bins.count))
    check(lambda: metrics.calibration_test(metrics.Predictions.of(LOGITS, TARGET)))


def test_evaluations():
    """All of METRICS, and differences between models."""
    counts = [300, 150, 50, 5]

    def compared():
        first = evaluate(LOGITS, TARGET, kde=True, resamples=60, class_counts=counts, background=0)
        second = evaluate(LOGITS / 2, TARGET, resamples=60, class_counts=torch.tensor(counts, device="cpu"))
        return first, second, first.compare(second), render_report([first, second])

    check(compared)
    check(lambda: evaluate(IMAGES, MASKS, per_image=True))
    check(lambda: evaluate(SINGLE, ANSWERS, binary=True, resamples=60))
    check(lambda: evaluate(LOGITS, nn.functional.one_hot(TARGET, 4), binary=True, resamples=60))


def test_evaluations_of_batches():
    batches = list(zip(LOGITS.split(150), TARGET.split(150), strict=True))
    check(lambda: evaluate_on(nn.Identity(), batches))
    check(lambda: (Evaluator().update(*batches[0]) + Evaluator().update(*batches[1])).compute())


def test_ranks_over_data_sets():
    values = {str(d): {str(k): [d * k, d + k] for k in range(3)} for d in range(4)}
    check(lambda: rank_methods(values, higher_is_better=True, resamples=50))


def test_classifiers_of_scikit_learn():
    def fitted():
        features, labels = LOGITS.numpy(), TARGET.numpy()
        classifier = CalibratedClassifier(GaussianNB(), method="vector", random_state=0).fit(features, labels)
        return torch.from_numpy(classifier.predict_proba(features)), calibration_scorer()(
            classifier, features, labels
        )

    check(fitted)


def test_metrics_of_torchmetrics():
    """A metric that was created on the CPU stays there."""

    def computed():
        with torch.device("cpu"):
            metric = torchmetrics.CalibrationError()
        metric.update(LOGITS, TARGET)
        return metric.compute()

    check(computed)


def test_plots_of_formulas():
    def drawn():
        plots = formulas.focal_losses(), formulas.exponents(), formulas.penalty_weights()
        return [[torch.from_numpy(line.get_xydata()) for line in axes.lines] for axes in plots]

    check(drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ensembles(dtype):
    members = torch.stack([data(seed=seed, dtype=dtype)[0] for seed in range(3)])
    for function in (pool, mutual_information, disagreement):
        check(lambda function=function: function(members))
        check(lambda function=function: function(members[..., 0], binary=True))
    check(lambda: Diversity.of(members, TARGET).means())


@pytest.mark.parametrize("key", LOSSES)
def test_losses(key):
    """A loss that was created on the CPU stays there."""
    batches = list(zip(LOGITS.split(150), TARGET.split(150), strict=True))

    def trained():
        with torch.device("cpu"):
            loss = create_loss(key, 4, class_weight=[1, 2, 0.5, 1])
        found = []
        if isinstance(loss, AdaptiveLoss):
            loss.observe(LOGITS, TARGET)
            found += [loss.adapt(), adapt_on(loss, nn.Identity(), batches), loss.learned()]
        logits = LOGITS.clone().requires_grad_()
        value = loss(logits, TARGET)
        return [*found, value.detach(), *torch.autograd.grad(value, logits), loss.state_dict()]

    check(trained)


@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
def test_files(suffix, tmp_path):
    path = tmp_path / f"predictions.{suffix}"
    if suffix == "pt":
        torch.save({"logits": LOGITS, "labels": TARGET}, path)
    else:
        write_predictions(path, [(LOGITS, TARGET)], len(LOGITS), None)
    check(lambda: [*open_predictions(path).load(), *open_predictions(path).batches()])


def test_training_data():
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
    check(lambda: augmentation.Normalisation.of(images)(images))
    check(lambda: augmentation.Standardisation.of(LOGITS)(LOGITS))
    check(lambda: sampling.random_numbers(0, 1, TARGET))
    check(lambda: sampling.stratified(TARGET, (200, 100), 0))
    check(lambda: sampling.long_tail(TARGET, 10, 0))

    def synthetic():
        part = built_in.synthetic(classes=3, features=4, train_size=50, imbalance=5).train
        inputs, targets = part.batch(sampling.shuffled(len(part), 0))
        return inputs, targets, built_in.synthetic_posterior(inputs, classes=3, features=4)

    check(synthetic)


def test_every_helper_tensor_names_its_device():
    """Also where the tests above do not come."""
    makers = {function.__name__ for function in _device_constructors()} | {"Tensor"}
    without = []

    def visit(node, where):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = (*where, node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            torch_itself = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            named = any(keyword.arg == "device" for keyword in node.keywords)
            names = {where[-1:], where[-2:]}
            state = any(".".join(name) in AS_MODULES for name in names)
            if torch_itself and node.func.attr in makers and not named and not state:
                without.append(f"{path.relative_to(package)}:{node.lineno}")
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    package = Path(calibrant.__file__).parent
    for path in sorted(package.rglob("*.py")):
        visit(ast.parse(path.read_text(encoding="utf-8")), ())
    assert not without, 'name the device, that of the data or "cpu", or else it is torch\'s default'
