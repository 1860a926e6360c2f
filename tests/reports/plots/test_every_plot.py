"""Every plot uses the given axes, fits a paper's column, is legible and can be saved."""

import inspect
import io
import re
from itertools import cycle, pairwise

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot

from calibrant.evaluation.ranks import rank_methods
from calibrant.losses import LOSSES
from calibrant.reports import plots
from tests.reports.plots.drawn import (
    FIGURES,
    LOGITS,
    PASSES,
    SENSITIVITY,
    classes,
    curve,
    legend,
    reliability,
)

METHODS = {name: [(0.7 + n / 100, 0.02 + n / 500), (0.72, 0.03)] for n, name in enumerate(LOSSES)}

RANKS = rank_methods(
    {data: {name: [float(k)] for k, name in enumerate(LOSSES)} for data in ("digits", "cifar10")},
    higher_is_better=False,
    resamples=5,
)
PICTURES = {
    "reliability_diagram, 15 bins": lambda **o: plots.reliability_diagram(reliability(15), **o),
    "reliability_diagram, 25 bins": lambda **o: plots.reliability_diagram(reliability(25), **o),
    "reliability_diagram alone": lambda **o: plots.reliability_diagram(reliability(), histogram=False, **o),
    "class_gaps, 10": lambda **o: plots.class_gaps(classes(10), **o),
    "class_gaps, 100": lambda **o: plots.class_gaps(classes(100), **o),
    "class_gaps, 1000": lambda **o: plots.class_gaps(classes(1000), **o),
    "accuracy_against_ece": lambda **o: plots.accuracy_against_ece(METHODS, **o),
    "severity_curves": lambda **o: plots.severity_curves(
        {name: [[0.1, 0.2], [0.2, 0.3]] for name in LOSSES}, severities=["0", "1"], **o
    ),
    "mean_roc_curve": lambda **o: plots.mean_roc_curve({"ce": ([0.0, 0.5, 1.0], 0.5)}, **o),
    "mean_roc_curve, many": lambda **o: plots.mean_roc_curve(
        {name: ([0.0, 0.5, 1.0], 0.5) for name in LOSSES}, **o
    ),
    "mean_ranks": lambda **o: plots.mean_ranks(RANKS, **o),
    "methods_side_by_side": lambda **o: plots.methods_side_by_side(FIGURES, **o),
    "training_curves": lambda **o: plots.training_curves({name: [0.1, 0.2] for name in LOSSES}, **o),
    "multipliers": lambda **o: plots.multipliers(PASSES, **o),
    "multipliers, 100 classes": lambda **o: plots.multipliers(np.ones((3, 100)), **o),
    "sensitivity": lambda **o: plots.sensitivity({"": SENSITIVITY}, chosen=("", 6), **o),
    "sensitivity, lines": lambda **o: plots.sensitivity(dict.fromkeys(LOSSES, SENSITIVITY), **o),
    "learned_quantity, scalar": lambda **o: plots.learned_quantity(PASSES[:, 0], name="scale", **o),
    "learned_quantity, vector": lambda **o: plots.learned_quantity(PASSES, name="offset", **o),
    "learned_quantity, bins": lambda **o: plots.learned_quantity(PASSES, name="gamma", **o),
    "gammas": lambda **o: plots.gammas(PASSES, **o),
    "gaps": lambda **o: plots.gaps(PASSES, **o),
    "edges": lambda **o: plots.edges(PASSES, **o),
    "bin_confidences": lambda **o: plots.bin_confidences({"training": PASSES, "validation": PASSES}, **o),
    "penalties": lambda **o: plots.penalties(**o),
    "penalty_weights": lambda **o: plots.penalty_weights(**o),
    "focal_losses": lambda **o: plots.focal_losses(**o),
    "exponents": lambda **o: plots.exponents(**o),
    "dual_focal_phi": lambda **o: plots.dual_focal_phi(**o),
    "risk_coverage": lambda **o: plots.risk_coverage({"ce": curve()}, **o),
    "risk_coverage, many": lambda **o: plots.risk_coverage(dict.fromkeys(LOSSES, curve()), **o),
    "roc_curve": lambda **o: plots.roc_curve({"entropy": ([0.0, 1.0], [0.5, 2.0])}, **o),
    "roc_curve, many": lambda **o: plots.roc_curve({name: ([0.0], [1.0]) for name in LOSSES}, **o),
    "maximum_logits": lambda **o: plots.maximum_logits(LOGITS, **o),
    "confidences": lambda **o: plots.confidences(LOGITS, **o),
    "lower_probabilities": lambda **o: plots.lower_probabilities(
        {name: (logits, torch.arange(len(logits)) % 10) for name, logits in LOGITS.items()}, **o
    ),
}


def test_every_public_function_is_drawn_here():
    assert set(plots.__all__) == {name.partition(",")[0].partition(" ")[0] for name in PICTURES}


@pytest.mark.parametrize("name", plots.__all__)
def test_arguments_are_described_by_the_package_or_the_function(name):
    function = getattr(plots, name)
    shared, own = re.findall(r"``(\w+)``", plots.__doc__), re.findall(r"(?m)^ +(\w+): ", function.__doc__)
    assert set(inspect.signature(function).parameters) <= {*shared, *own}


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_given_axes_are_used_and_given_back(picture, ax):
    assert picture(ax=ax, title="Title") is ax
    assert ax.get_title() == "Title"
    assert pyplot.get_fignums() == []
    assert ax.figure.get_size_inches().tolist() == [3.4, 3.0]


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: plots.reliability_diagram(LOGITS["ce"]), "data must be of type Reliability or Evaluation, "),
        (lambda: plots.class_gaps(reliability()), "data must be a sequence of ClassFigures, got Reliability"),
        (lambda: plots.class_gaps([curve()]), "data must be of type ClassFigures, got RiskCoverage"),
        (lambda: plots.risk_coverage(curve()), "data must be a mapping from name to RiskCoverage, got Risk"),
        (lambda: plots.risk_coverage({"ce": None}), r"data\['ce'\] must be of type RiskCoverage, got NoneTy"),
        (
            lambda: plots.roc_curve(LOGITS["ce"]),
            r"data must be a mapping .*\(in_scores, out_scores\), got Ten",
        ),
        (lambda: plots.confidences(LOGITS["ce"]), "data must be a mapping from name to logits, got Tensor"),
        (lambda: plots.training_curves([0.1]), "data must be a mapping from method to .*, got list"),
    ],
)
def test_data_of_another_type_are_refused(draw, expected):
    with pytest.raises(TypeError, match=f"^{expected}"):
        draw()
    assert pyplot.get_fignums() == []


FORMATS = {"svg": b"<?xml", "png": b"\x89PNG"}


# Each plot is saved in one format, in turn: matplotlib writes the files, and no plot asks for the format.
# The next test has PDF, which takes longest.
@pytest.mark.parametrize(("picture", "form"), [*zip(PICTURES.values(), cycle(FORMATS))], ids=PICTURES)
def test_a_new_figure_fits_a_column_is_legible_and_can_be_saved(picture, form):
    settings = dict(matplotlib.rcParams)
    ax = picture(title="Title")
    figure = ax.figure
    assert dict(matplotlib.rcParams) == settings
    assert pyplot.get_fignums() == [figure.number]
    assert figure.get_figwidth() == 3.4
    figure.get_layout_engine().execute(figure)
    box = figure.get_tightbbox()  # in inches
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.get_figwidth()
    assert box.y1 <= figure.get_figheight()
    # neither has what lies outside pressed the diagram itself together
    assert ax.get_position().height * figure.get_figheight() > 1.2

    found = [text for each in figure.axes for text in each.findobj(matplotlib.text.Text)]
    sizes = {text.get_fontsize() for text in found if text.get_text().strip()}
    assert sizes <= {7, 8, 9}

    figure.set_layout_engine(None)  # the places stay; with any engine, the file would be drawn twice
    file = io.BytesIO()
    figure.savefig(file, format=form)
    assert file.getvalue().startswith(FORMATS[form])


def test_plots_can_be_saved_as_pdf():
    file = io.BytesIO()
    plots.reliability_diagram(reliability()).figure.savefig(file, format="pdf")
    assert file.getvalue().startswith(b"%PDF")


LONG = [f"digits-lt, cals-alm[margin={n},penalty_weight_max=none]" for n in range(5)]


@pytest.mark.parametrize(
    "picture",
    [
        lambda: plots.methods_side_by_side({"before": dict.fromkeys(LONG, FIGURES["before"]["ce"])}),
        lambda: plots.lower_probabilities(dict.fromkeys(LONG, (LOGITS["ce"], torch.arange(50) % 10))),
    ],
    ids=["methods_side_by_side", "lower_probabilities"],
)
def test_long_names_are_whole_and_do_not_overlap(picture):
    ax = picture()
    labels = ax.get_yticklabels()
    assert ["".join(label.get_text().split()) for label in labels] == ["".join(name.split()) for name in LONG]
    ax.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in labels]
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))
    assert ax.get_position().width > 0.4


def test_no_two_methods_look_alike():
    ax = plots.training_curves({str(n): [0.1] for n in range(28)})
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 28
    points = plots.accuracy_against_ece({str(n): [(0.1, 0.1)] for n in range(63)}).lines
    assert len({(point.get_color(), point.get_marker()) for point in points}) == 63


def test_names_are_no_formulas():
    file = io.BytesIO()
    ax = plots.training_curves({"costs $1 or $_{": [0.1]})
    ax.figure.savefig(file, format="svg")
    assert legend(ax) == ["costs $1 or $_{"]
