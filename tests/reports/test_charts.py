"""The numbers of the charts in a page are those of the evaluations."""

import pytest
import torch

from calibrant.evaluation import ClassFigures, evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.figures import ClassBin
from calibrant.metrics import RiskCoverage
from calibrant.reports import charts
from tests.evaluations import changed as replace
from tests.reports.test_page import evaluation, models
from tests.reports.test_verdict import comparison


def test_bins_have_the_numbers_of_the_evaluation():
    found = evaluation()
    bins = charts.reliability_bins(found.reliability)
    assert len(bins) == 13
    last = bins[-1]
    assert (last["left"], last["share"]) == (pytest.approx(14 / 15), 1.0)
    assert (last["confidence"], last["accuracy"]) == (
        found.reliability.confidence[-1],
        found.reliability.accuracy[-1],
    )
    assert last["tip"].splitlines()[0] == f"Confidence 0.93 to 1.00: {found.reliability.count[-1]:,} elements"
    low, high = found.reliability.accuracy_interval[-1]
    assert f"accuracy {100 * last['accuracy']:.2f} % [{100 * low:.2f}, {100 * high:.2f}]" in last["tip"]
    assert bins[0]["certainty"] < last["certainty"]
    assert last["lower"] == last["accuracy"] < last["confidence"]


def test_dots_lie_on_their_axis():
    chart = charts.error_of_models(models(), ["a", "b", "c"])
    (start, zero), *_, (end, last) = chart["ticks"]
    assert (start, zero, end) == (0, "0", 1)
    (name, (dot,)), *_ = chart["rows"]
    assert name == "a"
    assert dot["place"] == pytest.approx(6.4 / float(last))
    assert dot["low"] == pytest.approx(0.93 * 6.4 / float(last))
    assert dot["high"] == pytest.approx(1.06 * 6.4 / float(last))
    assert dot["tip"] == "a: 6.40 % [5.95, 6.78]"


def test_gaps_have_signs_and_a_zero():
    classes = (ClassFigures("x", 1, 1.0, 1.0, -0.1, 0.1), ClassFigures("x", 1, 1.0, 1.0, 0.05, 0.2))
    chart = charts.gaps_of_classes([replace(evaluation(), classes=classes)], ["net"], [1, 0])
    assert [name for name, _ in chart["rows"]] == ["x", "x"]
    assert chart["rows"][0][1][0]["place"] > chart["zero"] > chart["rows"][1][1][0]["place"]
    assert chart["rows"][0][1][0]["tip"] == "x: +5.00 %"


def test_the_chart_of_methods_has_every_state():
    found = comparison({"sharp": 8.0, "flat": 1.0})
    chart = charts.error_of_methods(found)
    assert chart["series"] == ["before calibration", "after temperature scaling"]
    assert [len(row) for _, row in chart["rows"]] == [2, 2]
    before, after = chart["rows"][0][1]
    assert before["place"] > after["place"]
    scatter = charts.accuracy_against_error(found)
    assert scatter["names"] == ["sharp", "flat"]
    first, second = scatter["points"][0]
    assert first["x"] > second["x"]
    assert 0 <= second["y"] <= 1
    assert f"ECE {100 * found.figures('ece')['sharp'].mean:.2f} % [" in first["tip"]


def test_accuracies_that_differ_by_chance_are_drawn_close():
    logits = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    target = (logits[:, 1] > 0).long()
    other = logits.clone()
    other[0] = other[0].flip(0)
    runs = [(evaluate(each, target, resamples=20),) for each in (logits, other)]
    methods = tuple(Method(str(number), each) for number, each in enumerate(runs))
    scatter = charts.accuracy_against_error(Comparison("", (0,), methods))
    (first,), (second,) = scatter["points"]
    assert 0 < abs(first["y"] - second["y"]) < 0.1
    assert all(len(label) <= 5 for _, label in scatter["y_ticks"])


def test_diagrams_of_classes_start_with_the_worst():
    bins = (ClassBin(14, 8, 0.95, 4),)
    classes = (
        ClassFigures("fine", 8, 0.9, 0.9, 0.0, 0.01, bins),
        ClassFigures("never", 8, 0.0, 0.0, 0.0, 0.3),
        ClassFigures("bad", 8, 0.5, 0.5, 0.1, 0.1, bins),
    )
    data = charts.class_diagrams([replace(evaluation(), classes=classes)], ["net"])
    assert [name for name, _ in data["classes"]] == ["bad", "fine", "never"]
    assert data["classes"][0][1] == [[(14, 8, 950, 500, 157, 843)]]  # Clopper and Pearson
    assert data["classes"][2][1] == [[]]
    assert charts.class_diagrams([evaluation()], ["net"]) == {}


def test_risks_have_the_numbers_of_the_curves():
    ends = (0.0, 0.9), (0.0, 0.4), (0.1, 0.3), (0.2, 0.4)
    curve = RiskCoverage((0.25, 0.5, 0.75, 1.0), (0.0, 0.1, 0.2, 0.3), ends)
    found = replace(evaluation(), risk_coverage=curve)
    chart = charts.risks([found, found], ["a", "b"])
    assert chart["names"] == ["a", "b"]
    top = float(chart["y_ticks"][-1][1])
    assert 40 <= top <= 60  # the interval at full coverage fits, the first one does not
    (line, *_), points = chart["curves"][0]["line"].split(), chart["curves"][0]["points"]
    assert line == "0.25,0"
    assert points[-1] == (1.0, pytest.approx(30 / top), points[-1][2])
    assert points[-1][2].splitlines() == [
        "a: the 100.00 % most confident elements",
        "error rate 30.00 % [20.00, 40.00]",
    ]
    assert chart["curves"][0]["band"].split()[0] == "0.25,1"  # cut at the top
    assert charts.risks([found, replace(found, risk_coverage=None)], ["a", "b"]) is None
