"""The choice of a sweep: its criterion, its direction, ties, and remarks about it."""

import json

import pytest
import torch

from calibrant.evaluation import evaluate
from calibrant.evaluation.chosen import Sweep
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.criterion import Criterion
from tests.evaluations import changed

EVALUATION = evaluate(5 * torch.eye(3), torch.arange(3), resamples=0)


def comparison(**means):
    """A method for each name, whose NLL and ECE have this value, and 1 minus it after temperature scaling."""
    methods = [
        Method(
            name,
            tuple(changed(EVALUATION, nll=value, ece=value, accuracy=value) for value in values),
            tuple(changed(EVALUATION, nll=1 - value, ece=1 - value) for value in values),
        )
        for name, values in means.items()
    ]
    return Comparison("toy", tuple(range(len(methods[0].before))), tuple(methods))


def sweep(options, chosen, names=None):
    values = next(iter(options.values()))
    means = dict.fromkeys(names or [str(value) for value in values], (0.5, 0.5)) | {chosen: (0.5, 0.25)}
    found = comparison(**means)
    return Sweep("toy", options, Criterion("nll"), found, chosen, comparison(best=(0.5, 0.25)))


@pytest.mark.parametrize(
    ("text", "expected", "written"),
    [
        ("nll", Criterion("nll"), "nll"),
        (" adaptive_ece", Criterion("adaptive_ece"), "adaptive-ece"),
        ("adaptive-ece-after-temperature", Criterion("adaptive_ece", True), "adaptive-ece-after-temperature"),
    ],
)
def test_criteria_are_read_and_written(text, expected, written):
    assert Criterion.parse(text) == expected
    assert str(expected) == written
    assert Criterion.parse(written) == expected


@pytest.mark.parametrize("text", ["nl", "last", "", "kde_ece", "mean_iou_foreground"])
def test_unknown_criteria_are_refused(text):
    with pytest.raises(ValueError, match=f"unknown criterion '{text}'.*expected one of accuracy, .*nll"):
        Criterion.parse(text)


def test_the_best_mean_is_chosen_and_of_equal_ones_the_first():
    found = comparison(a=(0.5, 0.5), b=(0.0, 0.6), c=(0.6, 0.0), d=(0.2, 0.9))
    assert Criterion("nll").choose(found) == "b"
    assert Criterion("accuracy").choose(found) == "d"
    assert Criterion("nll", after=True).choose(found) == "d"
    assert Criterion("nll").choose(comparison(a=(float("nan"),), b=(0.9,))) == "b"


def test_a_missing_figure_is_no_choice():
    found = Comparison("toy", (0,), (Method("a", (changed(EVALUATION, smooth_ece=None),)),))
    with pytest.raises(ValueError, match="smooth-ece is not known for these validation data"):
        Criterion("smooth_ece").choose(found)


@pytest.mark.parametrize(
    ("values", "chosen", "remark"),
    [
        ((4, 6, 8), "4", "The best value of margin, 4, is at the edge of the range; try smaller values."),
        ((4, 6, 8), "8", "The best value of margin, 8, is at the edge of the range; try larger values."),
        ((4, 6, 8), "6", None),
        ((6, 8, 4), "4", "The best value of margin, 4, is at the edge of the range; try smaller values."),
        ((4, 8, 6), "6", None),
        ((4,), "4", None),
        (("phr", "p2"), "p2", None),
        (("epoch", 10, 100), "100", None),
    ],
)
def test_the_edge_of_a_range_is_remarked(values, chosen, remark):
    found = sweep({"margin": values}, chosen).remarks()
    assert found[0] == (
        f"Chosen on the validation data: {chosen}, with the lowest NLL (0.3750, mean over 2 seeds)."
    )
    assert found[1:] == ([remark] if remark else [])


def test_equal_settings_are_remarked():
    means = {"4": (0.5, 0.25), "6": (0.25, 0.5), "8": (0.5, 0.5)}
    options, test = {"margin": (4, 6, 8)}, comparison(best=(0.5,))
    first, second = Sweep("toy", options, Criterion("nll"), comparison(**means), "4", test).remarks()
    assert "4, the first of 2 settings with the lowest NLL" in first
    assert "try smaller values" in second
    means["8"] = (0.25, 0.5)  # an option without any effect has no edge
    (only,) = Sweep("toy", options, Criterion("nll"), comparison(**means), "4", test).remarks()
    assert "4, the first of 3 settings with the lowest NLL" in only


def test_settings_are_combinations():
    found = sweep({"margin": (4, 6), "data.imbalance": (1.0, "x")}, "b", "abcd")
    assert found.settings["b"] == {"margin": 4, "data.imbalance": "x"}
    assert found.settings["c"] == {"margin": 6, "data.imbalance": 1.0}
    assert "different validation data" in found.remarks()[-1]
    plain = json.loads(found.to_json())
    assert plain["options"] == {"margin": [4, 6], "data.imbalance": [1.0, "x"]}
    assert plain["chosen"] == "b"
    assert list(plain["validation"]["runs"]) == list("abcd")
    assert list(plain["test"]["runs"]) == ["best"]
    assert plain["criterion"] == "nll"
