"""Probabilities in the place of logits: a warning wherever logits are taken outside of training steps."""

import warnings

import numpy as np
import pytest
import torch

import calibrant
from calibrant.calibrators import CALIBRATORS, create_calibrator, rank
from calibrant.ensembles import Diversity, mutual_information, pool
from calibrant.losses import AdaptiveLoss
from calibrant.metrics import METRICS, SCORES, Predictions, accuracy, classwise_ece, ece, nll, smooth_ece
from calibrant.probabilities import look_like_probabilities, warn_of_probabilities
from tests.cli.commands import succeed

K = 4
LOGITS = 3 * torch.randn(200, K, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(K, (200,), generator=torch.Generator().manual_seed(1))
PROBABILITIES = LOGITS.softmax(1)
ADAPTIVE = [key for key, loss in calibrant.LOSSES.items() if issubclass(loss, AdaptiveLoss)]

warned = pytest.warns(UserWarning, match=r"look like probabilities: .* add up to 1; pass their \.log\(\)")


@pytest.mark.parametrize("metric", [ece, smooth_ece, nll, accuracy, classwise_ece, Predictions.of])
def test_metrics(metric):
    with warned as caught:
        metric(PROBABILITIES, TARGET)
    assert len(caught) == 1
    assert str(caught[0].message).endswith("pass their .log()")  # no advice for files
    assert caught[0].filename == __file__  # the caller's line
    metric(PROBABILITIES.log(), TARGET)


@pytest.mark.parametrize("score", SCORES.values(), ids=list(SCORES))
def test_scores(score):
    with warned:
        score(PROBABILITIES)
    score(LOGITS)


def test_evaluate_warns_once():
    assert METRICS
    with warned as caught:
        calibrant.evaluate(PROBABILITIES, TARGET, resamples=0)
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("name", ["CalibrationError", "ClasswiseCalibrationError"])
def test_torchmetrics_once_for_each_object(name):
    pytest.importorskip("torchmetrics")
    from calibrant.integrations import torchmetrics

    metric = torchmetrics.CalibrationError() if name == "CalibrationError" else getattr(torchmetrics, name)(K)
    with warned as caught:
        for _ in range(3):
            metric.update(PROBABILITIES, TARGET)
    assert len(caught) == 1


@pytest.mark.parametrize("key", CALIBRATORS)
def test_calibrators(key):
    calibrator = create_calibrator(key)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(PROBABILITIES, TARGET)
    found = [each for each in caught if "look like probabilities" in str(each.message)]
    assert [each.filename for each in found] == [__file__]


def test_ranks_of_calibrators():
    with warned:
        rank(PROBABILITIES, TARGET, candidates=["temperature"], folds=2)


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--resamples", "0"],
        ["evaluate", "--stream", "--resamples", "0"],
        ["evaluate", "--binary", "--resamples", "0"],
        ["calibrate", "--resamples", "0"],
        ["calibrate", "--method", "identity", "--resamples", "0"],
        ["conformal"],
    ],
)
def test_commands_once_with_advice_for_the_file(tmp_path, command):
    path = tmp_path / "a.npz"
    binary = "--binary" in command
    np.savez(
        path, logits=PROBABILITIES[:, 0] if binary else PROBABILITIES, labels=TARGET % 2 if binary else TARGET
    )
    # Those of `calibrate` have nothing to do with the labels, which it tells too.
    lines = succeed(*command, path).stderr.splitlines()
    (line,) = [line for line in lines if "check the order of both" not in line]
    assert line.startswith(f"calibrant: warning: {path}: these ")
    assert "look like probabilities: they lie in [0, 1]" in line
    assert line.endswith(
        "; in a file, name the array probabilities, or the columns of a table probability_<class>"
    )


def test_parts_of_a_folder_with_the_same_advice(tmp_path):
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, logits=PROBABILITIES, labels=TARGET)
    (line,) = succeed("evaluate", "--jobs", "2", "--resamples", "0", tmp_path).stderr.splitlines()
    assert line.startswith(f"calibrant: warning: {tmp_path}: these logits look like probabilities")
    assert line.endswith("or the columns of a table probability_<class>")


@pytest.mark.parametrize("key", ADAPTIVE)
def test_observe_once_for_each_object(key):
    loss = calibrant.create_loss(key, K)
    with warned as caught:
        for _ in range(3):
            loss.observe(PROBABILITIES, TARGET)
    assert [each.filename for each in caught] == [__file__]
    calibrant.create_loss(key, K).observe(LOGITS, TARGET)


def test_training_steps_are_not_slowed_down():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in ("ce", "adafocal"):
            calibrant.create_loss(key, K)(PROBABILITIES, TARGET)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_looks_like_probabilities(dtype):
    images = torch.randn(2, 30, 5, 4, generator=torch.Generator().manual_seed(2)).softmax(1)
    assert look_like_probabilities(PROBABILITIES.to(dtype))
    assert look_like_probabilities(images.to(dtype))
    assert not look_like_probabilities(LOGITS.to(dtype))
    assert not look_like_probabilities(PROBABILITIES.log().to(dtype))
    assert not look_like_probabilities(LOGITS.sigmoid().to(dtype))
    assert not look_like_probabilities(torch.zeros(0, 3, dtype=dtype))


def test_probabilities_that_add_up_to_1_within_the_tolerance_of_files():
    ten = torch.randn(50, 10, generator=torch.Generator().manual_seed(3)).softmax(1)
    assert look_like_probabilities(1.001 * PROBABILITIES)
    assert look_like_probabilities((1000 * ten).round() / 1000)
    assert look_like_probabilities(ten.bfloat16().float())
    assert not look_like_probabilities(1.02 * PROBABILITIES)
    assert not look_like_probabilities(1.005 * PROBABILITIES[:1])  # a single element may be so by chance


def test_sigmoids_and_percentages_in_place_of_logits_are_noticed():
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="lie in .0, 1., as those of sigmoids do"):
        warn_of_probabilities(logits.sigmoid())
    with pytest.warns(UserWarning, match="add up to 100, as percentages do"):
        warn_of_probabilities(100 * logits.softmax(1))
    with pytest.warns(UserWarning, match="add up to 1; pass their .log"):
        warn_of_probabilities(logits.softmax(1))
    # by chance, or without a message
    for harmless in (
        logits,
        logits.sigmoid()[:19],
        torch.zeros(50, 4),
        2 * logits.sigmoid(),
        torch.ones(50, 4),
        (logits > 0).float(),  # votes
        0.1 + 0.3 * logits.sigmoid(),  # cosines of CLIP
        0.3 + 0.6 * logits.sigmoid(),  # cosines of features that are not negative
        torch.tensor([0.05, 0.3, 0.6, 0.9]) + 0.01 * logits,  # of a network that has hardly been trained
        torch.tensor([0.05, 0.5]) + 0.01 * logits[:, :2],
    ):
        warn_of_probabilities(harmless)


@pytest.mark.parametrize("function", [pool, mutual_information, lambda logits: Diversity.of(logits, TARGET)])
def test_ensembles(function):
    with warned as caught:
        function(torch.stack([PROBABILITIES, PROBABILITIES.flip(0)]))
    assert [each.filename for each in caught] == [__file__]
    function(torch.stack([LOGITS, LOGITS.flip(0)]))
