from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from calibrant.metrics import (
    METRICS,
    ClassCounts,
    Predictions,
    accuracy,
    adaptive_ece,
    augrc,
    aurc,
    balanced_accuracy,
    brier,
    coverage_at_risk,
    debiased_ece,
    ece,
    ece_l2,
    mce,
    mean_iou,
    nll,
    resampling,
    risk_at_coverage,
    root_brier,
    smooth_ece,
    sweep_ece,
    top_k_accuracy,
)
from calibrant.metrics.catalogue import Options, element_values
from calibrant.metrics.classwise import classwise_ece, classwise_mce
from calibrant.metrics.resampling import Resamples, bootstrap, bootstrap_histogram, draws

FIGURES = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "mean_iou": mean_iou,
    "nll": nll,
    "brier": brier,
    "root_brier": root_brier,
    "sweep_ece": sweep_ece,
    "sweep_ece_l1": partial(sweep_ece, norm=1),
    "sweep_ece_width": partial(sweep_ece, binning="equal-width"),
    "sweep_ece_width_l1": partial(sweep_ece, norm=1, binning="equal-width"),
    "smooth_ece": smooth_ece,
    "top_k_accuracy": top_k_accuracy,
    "aurc": aurc,
    "augrc": augrc,
    "risk_at_coverage": risk_at_coverage,
    "coverage_at_risk": coverage_at_risk,
}
BINNED = {
    "ece": ece,
    "mce": mce,
    "ece_l2": ece_l2,
    "adaptive_ece": adaptive_ece,
    "debiased_ece": debiased_ece,
    "debiased_ece_l1": partial(debiased_ece, norm=1),
    "classwise_ece": classwise_ece,
    "classwise_mce": classwise_mce,
}


def batch(seed, size, classes=4, rounded=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64) * 2
    if rounded:
        logits = (logits * 2).round() / 2
    return logits, torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator).squeeze(1)


def weights(seed, resamples, size):
    """Whole numbers, many of them 0, that need not sum to the number of elements."""
    return torch.randint(-1, 4, (resamples, size), generator=torch.Generator().manual_seed(seed)).clamp_min(0)


def element_means(predictions, options):
    """The values behind NLL and Brier score."""
    return element_values(predictions, options, streamed=True)


def drawn(predictions, **options):
    return bootstrap(predictions, Options(), element_means(predictions, Options()), **options)


# ------------------------------------------------------------------------------------------- resamples


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("size", [1, 7, 101])
@pytest.mark.parametrize("bins", [1, 4, 15, 40])
def test_resamples_equal_repeated_data(rounded, size, bins):
    logits, target = batch(size, size, rounded=rounded)
    weight = weights(size, 6, size)
    weight[:, 0] += 1
    resamples = Resamples.of(Predictions.of(logits, target), weight.double())
    width, mass, residual = resamples.equal_width(bins), resamples.equal_mass(bins), resamples.residual(bins)
    for row in range(6):
        repeated = Predictions.of(
            logits.repeat_interleave(weight[row], 0), target.repeat_interleave(weight[row])
        )
        for ours, theirs in ((width, repeated.equal_width(bins)), (mass, repeated.equal_mass(bins))):
            for name in ("count", "confidence", "correct"):
                torch.testing.assert_close(
                    getattr(ours, name)[row], getattr(theirs, name), rtol=0, atol=1e-10
                )
        confidence, gap = repeated.confidence.numpy(), repeated.correct.double() - repeated.confidence
        expected = [
            gap[(confidence > b / bins) & (confidence <= (b + 1) / bins)].sum().item() / repeated.samples
            for b in range(bins)
        ]
        np.testing.assert_allclose(residual[row], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("rounded", "bins", "size"), [(False, 6, 50), (True, 15, 50), (False, 15, 203), (True, 6, 203)]
)
def test_bootstrap_equals_the_figures_of_repeated_data(rounded, bins, size, monkeypatch):
    logits, target = batch(3, size, rounded=rounded)
    target[target == 1] = 0  # a class that does not occur, and one that a resample can lose
    target[0] = 1
    extra = torch.arange(size, dtype=torch.float64)
    predictions, options = Predictions.of(logits, target), Options(bins, background=0)
    values = element_means(predictions, options)
    values["extra"] = extra
    monkeypatch.setitem(METRICS, "extra", replace(METRICS["nll"], label="extra"))
    replicates = bootstrap(predictions, options, values, resamples=12, seed=5)
    assert set(replicates) == {*FIGURES, *BINNED, "mean_iou_foreground", "extra"}
    weight = torch.cat(list(draws(size, 12, 5))).long()
    for row in range(12):
        repeated = Predictions.of(
            logits.repeat_interleave(weight[row], 0), target.repeat_interleave(weight[row])
        )
        expected = {name: figure(repeated) for name, figure in FIGURES.items()}
        expected |= {name: figure(repeated, bins=bins) for name, figure in BINNED.items()}
        expected["mean_iou_foreground"] = mean_iou(repeated, background=0)
        expected["extra"] = (weight[row] * extra).sum().item() / size
        # The smooth error of resamples is integrated over 512 cells: a confidence is off by 1/1024 at most.
        tolerance = {"smooth_ece": 2e-3, "debiased_ece": 1e-7}
        for name, value in expected.items():
            assert replicates[name][row].item() == pytest.approx(
                value, rel=0, abs=tolerance.get(name, 1e-10)
            ), name


def test_bootstrap_of_float32_and_of_images():
    logits, target = batch(4, 120)
    target[::9] = -100
    rows = drawn(Predictions.of(logits, target), resamples=5, seed=0)
    images = logits.view(2, 6, 10, 4).permute(0, 3, 1, 2).float()
    pixels = drawn(Predictions.of(images, target.view(2, 6, 10)), resamples=5, seed=0)
    assert "mean_iou_foreground" not in rows
    for name in rows:
        torch.testing.assert_close(pixels[name].double(), rows[name], rtol=1e-4, atol=1e-5)


def test_bootstrap_reports_progress(monkeypatch):
    predictions = Predictions.of(*batch(5, 50))
    options = {"resamples": 25, "seed": 1}
    whole = drawn(predictions, **options)
    monkeypatch.setattr(resampling, "_DRAWS", 10 * max(50, 15 * predictions.num_classes))
    seen = []
    parts = drawn(predictions, **options, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(10, 25), (20, 25), (25, 25)]
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=1e-12)


def test_no_resamples():
    predictions = Predictions.of(*batch(5, 50))
    assert drawn(predictions, resamples=0, seed=0) == {}


# ----------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("size", [1, 10, 1_001])
def test_draws(size):
    weight = torch.cat(list(draws(size, 40, 3)))
    assert weight.shape == (40, size)
    assert weight.dtype == torch.float64
    assert (weight.sum(1) == size).all()
    assert torch.equal(weight, weight.round())
    assert torch.equal(weight, torch.cat(list(draws(size, 40, 3))))
    assert size == 1 or not torch.equal(weight, torch.cat(list(draws(size, 40, 4))))
    # More resamples begin with the same ones.
    assert torch.equal(weight, torch.cat(list(draws(size, 50, 3)))[:40])


@pytest.mark.parametrize("numbers", [1, 1_000, 7_777, 1 << 30])
def test_draws_do_not_depend_on_how_many_are_held(monkeypatch, numbers):
    expected = torch.cat(list(draws(333, 40, 3)))
    monkeypatch.setattr(resampling, "_DRAWS", numbers)
    parts = list(draws(333, 40, 3))
    assert all(len(part) * 333 <= max(numbers, 333) for part in parts)
    assert torch.equal(torch.cat(parts), expected)


def test_draws_are_binomial():
    weight = torch.cat(list(draws(100, 2_000, 0)))
    assert weight.mean().item() == 1
    assert weight.var().item() == pytest.approx(1 - 1 / 100, abs=0.02)
    assert (weight == 0).double().mean().item() == pytest.approx(0.99**100, abs=0.005)
    assert (weight.mean(0) - 1).abs().max() < 5 / 2_000**0.5


# ------------------------------------------------------------------------------------------- histogram


def test_bootstrap_of_a_histogram_spreads_as_that_of_the_data():
    logits, target = batch(6, 5_000)
    predictions = Predictions.of(logits, target)
    options = {"resamples": 300, "seed": 0}
    exact = drawn(predictions, **options)
    sums = bootstrap_histogram(predictions.histogram, ClassCounts.of(predictions), Options(), **options)
    by_class = {"classwise_ece", "classwise_mce", "mean_iou"}
    assert set(exact) - set(sums) == {"nll", "brier", "root_brier", "top_k_accuracy", *by_class}
    for name, values in sums.items():
        assert values.shape == (300,)
        # 300 resamples leave a standard deviation of its own of four percent; the sweep jumps.
        ratio = (values.std() / exact[name].std()).item()
        assert ratio == pytest.approx(1, abs=0.5 if name.startswith("sweep_ece") else 0.25), name
        distance = (values.mean() - exact[name].mean()).abs().item()
        assert distance < 0.5 * exact[name].std().item(), name


def test_bootstrap_of_a_histogram_is_reproducible_and_bounded_in_memory(monkeypatch):
    predictions = Predictions.of(*batch(7, 500))
    counts = ClassCounts.of(predictions)
    options = {"options": Options(), "resamples": 20}
    first = bootstrap_histogram(predictions.histogram, counts, seed=1, **options)
    again = bootstrap_histogram(predictions.histogram, counts, seed=1, **options)
    other = bootstrap_histogram(predictions.histogram, counts, seed=2, **options)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["ece"], other["ece"])
    monkeypatch.setattr(resampling, "_DRAWS", 1_000)
    assert all(
        len(v) == 20 for v in bootstrap_histogram(predictions.histogram, counts, seed=1, **options).values()
    )
