"""Pictures show the numbers they were given, fit a paper's column, and refuse what cannot be drawn."""

import io
from dataclasses import replace

import matplotlib

matplotlib.use("Agg")  # tests open no windows

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from sklearn import metrics

from calibrant.comparison import MeanFigure
from calibrant.evaluation import ClassFigures, Reliability
from calibrant.losses import LOSSES, PENALTIES
from calibrant.reports import plots

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def ax():
    return Figure(figsize=(3.4, 3)).subplots()


def reliability(bins=4):
    """Over-confident by 0.1 everywhere; the first bin is empty."""
    edges = np.linspace(0, 1, bins + 1)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()

    def but_first(values):
        return (None, *values[1:])

    return Reliability(
        edges=tuple(edges.tolist()),
        count=(0, *(10 * b for b in range(1, bins))),
        confidence=but_first(middle),
        accuracy=but_first([max(0.0, value - 0.1) for value in middle]),
        accuracy_interval=but_first([(value - 0.15, value - 0.08) for value in middle]),
        consistency=but_first([(value - 0.04, value + 0.05) for value in middle]),
    )


def classes(number):
    """Gaps 2 ‰ apart, half of them below 0, shuffled; each class is called after its gap in ‰."""
    gaps = (torch.randperm(number, generator=torch.Generator().manual_seed(0)) - number / 2 + 0.5) / 500
    return [
        ClassFigures(name=f"class {gap * 1000:g}", count=1, accuracy=1.0, iou=1.0, gap=gap, ece=0.1)
        for gap in gaps.tolist()
    ]


METHODS = {name: [(0.7 + n / 100, 0.02 + n / 500), (0.72, 0.03)] for n, name in enumerate(LOSSES)}
PASSES = np.random.default_rng(0).normal(size=(20, 15))
LOGITS = {"ce": torch.randn(50, 10, generator=torch.Generator().manual_seed(0)) * 9, "ls": torch.eye(10)}

FIGURES = {
    "before": {"ce": MeanFigure(0.08, 0.01, (0.06, 0.1)), "$ls$": MeanFigure(0.04, None, None)},
    "after": {"ce": MeanFigure(0.03, 0.01, (0.01, 0.05))},
}

PICTURES = {
    "reliability_diagram, 15 bins": lambda **o: plots.reliability_diagram(reliability(15), **o),
    "reliability_diagram, 25 bins": lambda **o: plots.reliability_diagram(reliability(25), **o),
    "reliability_diagram alone": lambda **o: plots.reliability_diagram(reliability(), histogram=False, **o),
    "class_gaps, 10": lambda **o: plots.class_gaps(classes(10), **o),
    "class_gaps, 100": lambda **o: plots.class_gaps(classes(100), **o),
    "class_gaps, 1000": lambda **o: plots.class_gaps(classes(1000), **o),
    "accuracy_against_ece": lambda **o: plots.accuracy_against_ece(METHODS, **o),
    "methods_side_by_side": lambda **o: plots.methods_side_by_side(FIGURES, **o),
    "training_curves": lambda **o: plots.training_curves({name: [0.1, 0.2] for name in LOSSES}, **o),
    "multipliers": lambda **o: plots.multipliers(PASSES, **o),
    "multipliers, 100 classes": lambda **o: plots.multipliers(np.ones((3, 100)), **o),
    "learned_quantity, scalar": lambda **o: plots.learned_quantity(PASSES[:, 0], name="scale", **o),
    "learned_quantity, vector": lambda **o: plots.learned_quantity(PASSES, name="offset", **o),
    "learned_quantity, bins": lambda **o: plots.learned_quantity(PASSES, name="gamma", **o),
    "gammas": lambda **o: plots.gammas(PASSES, **o),
    "gaps": lambda **o: plots.gaps(PASSES, **o),
    "edges": lambda **o: plots.edges(PASSES, **o),
    "bin_confidences": lambda **o: plots.bin_confidences({"training": PASSES, "validation": PASSES}, **o),
    "penalties": lambda **o: plots.penalties(**o),
    "roc_curve": lambda **o: plots.roc_curve({"entropy": ([0.0, 1.0], [0.5, 2.0])}, **o),
    "roc_curve, many": lambda **o: plots.roc_curve({name: ([0.0], [1.0]) for name in LOSSES}, **o),
    "maximum_logits": lambda **o: plots.maximum_logits(LOGITS, **o),
    "confidences": lambda **o: plots.confidences(LOGITS, **o),
}


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def bars(ax, label):
    """Left, bottom, width and height of the bars of that label."""
    (container,) = [container for container in ax.containers if container.get_label() == label]
    return np.array([(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in container])


def line(ax, label):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


# ------------------------------------------------------------------------------------------ all of them


def test_every_public_function_is_drawn_here():
    assert set(plots.__all__) == {name.partition(",")[0].partition(" ")[0] for name in PICTURES}


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_given_axes_are_used_and_given_back(picture, ax):
    assert picture(ax=ax, title="Title") is ax
    assert ax.get_title() == "Title"
    assert pyplot.get_fignums() == []
    assert ax.figure.get_size_inches().tolist() == [3.4, 3.0]


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_a_new_figure_has_the_width_of_a_column_and_nothing_is_cut(picture):
    settings = dict(matplotlib.rcParams)
    ax = picture(title="Title")
    assert dict(matplotlib.rcParams) == settings
    assert pyplot.get_fignums() == [ax.figure.number]
    assert ax.figure.get_figwidth() == 3.4
    ax.figure.draw_without_rendering()
    box = ax.figure.get_tightbbox()  # in inches
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= ax.figure.get_figwidth()
    assert box.y1 <= ax.figure.get_figheight()
    # neither has what lies outside pressed the diagram itself together
    assert ax.get_position().height * ax.figure.get_figheight() > 1.2


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_letters_are_legible_in_print(picture):
    ax = picture(title="Title")
    found = [text for each in ax.figure.axes for text in each.findobj(matplotlib.text.Text)]
    sizes = {text.get_fontsize() for text in found if text.get_text().strip()}
    assert sizes <= {7, 8, 9}


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_pictures_can_be_saved(picture):
    figure = picture().figure
    for form, start in {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}.items():
        file = io.BytesIO()
        figure.savefig(file, format=form)
        assert file.getvalue().startswith(start)


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


# ------------------------------------------------------------------------------------------ calibration


def test_reliability_diagram_draws_its_bins(ax):
    plots.reliability_diagram(reliability(), ax)
    left, width = [0.25, 0.5, 0.75], [0.25] * 3
    zero = [0.0] * 3
    expected = {
        "Accuracy": (left, zero, width, [0.275, 0.525, 0.775]),
        "Gap": (left, [0.275, 0.525, 0.775], width, [0.1] * 3),
        "If calibrated": (left, [0.335, 0.585, 0.835], width, [0.09] * 3),
    }
    for label, columns in expected.items():
        np.testing.assert_allclose(bars(ax, label), np.array(columns).T)
    (error_bars,) = [c for c in ax.containers if isinstance(c, matplotlib.container.ErrorbarContainer)]
    ends = [segment.tolist() for segment in error_bars[2][0].get_segments()]
    x = [0.375, 0.625, 0.875]
    np.testing.assert_allclose(ends, [[[c, c - 0.15], [c, c - 0.08]] for c in x])
    assert [[0, 0], [1, 1]] in [line.get_xydata().tolist() for line in ax.lines]
    drawn = ["Accuracy", "Gap", "If calibrated"]
    assert legend(ax.figure.axes[-1]) == [*drawn, "Mean accuracy", "Mean confidence"]


def test_reliability_diagram_has_the_histogram_below_in_the_place_of_the_axes(ax):
    figure = ax.figure
    before = ax.get_position()
    plots.reliability_diagram(reliability(), ax)
    upper, below = figure.axes
    assert upper is ax
    heights = [bar.get_height() for bar in below.containers[0]]
    np.testing.assert_allclose(heights, [100 / 6, 200 / 6, 300 / 6])
    confidence = (0.375 + 2 * 0.625 + 3 * 0.875) / 6
    np.testing.assert_allclose(line(below, "Mean confidence")[0], confidence)
    np.testing.assert_allclose(line(below, "Mean accuracy")[0], confidence - 0.1)
    assert below.get_position().y1 < ax.get_position().y0
    np.testing.assert_allclose(below.get_position().y0, before.y0)
    np.testing.assert_allclose(ax.get_position().y1, before.y1)
    assert below.get_xlim() == ax.get_xlim() == (0, 1)
    assert (ax.get_xlabel(), below.get_xlabel()) == ("", "Confidence")


def test_reliability_diagram_divides_axes_placed_by_hand_too():
    figure = Figure()
    ax = figure.add_axes((0.2, 0.2, 0.6, 0.6))
    plots.reliability_diagram(reliability(), ax)
    below = figure.axes[1].get_position()
    np.testing.assert_allclose([below.x0, below.y0, below.x1], [0.2, 0.2, 0.8])
    assert below.y1 < ax.get_position().y0
    np.testing.assert_allclose(ax.get_position().y1, 0.8)


def test_reliability_diagram_alone_has_one_axes(ax):
    plots.reliability_diagram(reliability(), ax, histogram=False)
    assert ax.figure.axes == [ax]
    assert ax.get_xlabel() == "Confidence"


@pytest.mark.parametrize(
    ("ece", "text"), [(None, "ECE 10.00 %"), (0.0, "ECE 0.00 %"), (0.0349, "ECE 3.49 %")]
)
def test_reliability_diagram_prints_the_error(ece, text, ax):
    assert texts(plots.reliability_diagram(reliability(), ax, ece=ece)) == [text]


def test_reliability_diagram_weighs_bins_by_their_elements(ax):
    data = replace(
        reliability(), accuracy=(None, 0.375, 0.625, 0.575)
    )  # right in all but the last: 3/6 · 0.3
    assert texts(plots.reliability_diagram(data, ax)) == ["ECE 15.00 %"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": (0.0, 1.0)}, "2 edges make 1 bins, but count has 4"),
        ({"accuracy": (None, 0.5)}, "4 bins, but accuracy has 2"),
        ({"edges": (0.0, 0.5, 0.25, 0.75, 1.0)}, "edges must not fall"),
        ({"edges": (0.0, NAN, 0.25, 0.75, 1.0)}, "edges must not be NaN, but 1 of 5"),
        ({"count": (0, 0, 0, 0)}, "count must be at least 0, and not everywhere 0"),
        ({"count": (1, 1, 1, -1)}, "count must be at least 0"),
        ({"count": (1, 1, 1, 1)}, "confidence of bin 0, which is not empty, must lie in .*got None"),
        ({"accuracy": (None, 0.5, NAN, 0.5)}, "accuracy of bin 2, .*got nan"),
        ({"confidence": (None, 0.5, 0.5, 1.5)}, "confidence of bin 3, .*got 1.5"),
    ],
)
def test_reliability_diagram_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        plots.reliability_diagram(replace(reliability(), **changes))
    assert pyplot.get_fignums() == []


def test_reliability_diagram_refuses_an_impossible_error():
    with pytest.raises(ValueError, match=r"ece must lie in \[0, 1\], got 7.5"):
        plots.reliability_diagram(reliability(), ece=7.5)


@pytest.mark.parametrize("number", [1, 10, 30])
def test_few_classes_are_all_named_in_order(number):
    ax = plots.class_gaps(classes(number))
    expected = 2 * np.arange(number) - number + 1
    below, above = (np.array([bar.get_width() for bar in bars]) for bars in ax.containers)
    np.testing.assert_allclose(below + above, expected / 10, atol=1e-6)
    assert (below <= 0).all()
    assert (above >= 0).all()
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"class {gap:g}" for gap in expected]
    assert texts(ax) == []


@pytest.mark.parametrize("number", [100, 1000])
def test_of_many_classes_the_worst_are_named(number):
    ax = plots.class_gaps(classes(number), named=2)
    assert list(ax.get_yticks()) == []
    below, above = (patch.get_data().values for patch in ax.patches)
    np.testing.assert_allclose(below + above, (2 * np.arange(number) - number + 1) / 10, atol=1e-5)
    often, rarely = texts(ax)
    most = number - 1
    digits = 1 if number == 100 else 0
    first, second = f"{most / 10:.{digits}f}", f"{(most - 2) / 10:.{digits}f}"
    assert often.splitlines() == [
        "Given too often:",
        f"class {most:g} +{first}",
        f"class {most - 2:g} +{second}",
    ]
    assert rarely.splitlines() == [
        "Given too rarely:",
        f"class -{most:g} −{first}",
        f"class -{most - 2:g} −{second}",
    ]


@pytest.mark.parametrize("number", [100, 1000])
def test_the_names_of_the_worst_lie_beside_the_bars(number):
    ax = plots.class_gaps(classes(number))
    ax.figure.draw_without_rendering()
    below, above = (patch.get_data().values for patch in ax.patches)
    for text in ax.texts:
        box = text.get_window_extent().transformed(ax.transData.inverted())
        beside = slice(max(0, int(box.y0)), int(box.y1) + 1)
        assert box.x0 > above[beside].max() or box.x1 < below[beside].min()


def test_names_that_fit_larger_axes_are_shown():
    ax = plots.class_gaps(classes(100), Figure(figsize=(3.4, 16)).subplots())
    assert len(ax.get_yticklabels()) == 100


def test_the_sign_of_a_gap_has_its_colour(ax):
    plots.class_gaps(classes(2), ax)
    shown = [bar for bar in ax.patches if bar.get_width()]
    assert [to_hex(bar.get_facecolor()) for bar in shown] == ["#0072b2", "#d55e00"]


def test_long_names_are_shortened_and_equal_classes_drawn(ax):
    figures = replace(classes(1)[0], name="great white shark, white shark, man-eater", gap=0.0)
    plots.class_gaps([figures], ax)
    assert ax.get_yticklabels()[0].get_text() == "great white shark…"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data must be a sequence of ClassFigures, got none"),
        ([replace(classes(1)[0], name="cat", gap=NAN)], "gap of class 'cat' must be finite, got nan"),
    ],
)
def test_class_gaps_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        plots.class_gaps(data)


def test_accuracy_against_ece_draws_mean_and_deviation(ax):
    plots.accuracy_against_ece({"ce": [(0.8, 0.05), (0.9, 0.07)], "ls": [(0.7, 0.01)]}, ax)
    first, second = ax.containers
    np.testing.assert_allclose(first[0].get_xydata(), [[6, 85]])
    horizontal, vertical = (bar.get_segments()[0] for bar in first[2])
    np.testing.assert_allclose(horizontal, [[6 - 2**0.5, 85], [6 + 2**0.5, 85]])
    np.testing.assert_allclose(vertical, [[6, 85 - 50**0.5], [6, 85 + 50**0.5]])
    np.testing.assert_allclose(second[0].get_xydata(), [[1, 70]])
    assert second[2] == ()
    assert legend(ax) == ["ce", "ls"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("ECE (%)", "Accuracy (%)")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data must be a mapping from method .*got none"),
        ({"ce": []}, r"data\['ce'\] must have shape \(seeds, 2\), got \(0,\)"),
        ({"ce": [(0.9, 0.1, 0.2)]}, r"data\['ce'\] must hold \(accuracy, ece\) .* rows of 3 numbers"),
        ({"ce": [(0.9, NAN)]}, r"data\['ce'\] must not be NaN, but 1 of 2"),
        ({"ce": [(0.9, 0.1), (0.9,)]}, r"data\['ce'\] must have shape \(seeds, 2\), and hold numbers"),
    ],
)
def test_accuracy_against_ece_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        plots.accuracy_against_ece(data)


# --------------------------------------------------------------------------------------------- training


def test_training_curves_draw_the_mean_and_a_band(ax):
    plots.training_curves({"ce": torch.tensor([0.3, 0.2, 0.1]), "ls": [[0.1, 0.2], [0.3, 0.2]]}, ax)
    np.testing.assert_allclose(line(ax, "ce"), [[1, 2, 3], [30, 20, 10]], rtol=1e-6)
    np.testing.assert_allclose(line(ax, "ls"), [[1, 2], [20, 20]])
    (band,) = ax.collections
    low, high = band.get_paths()[0].get_extents().intervaly
    np.testing.assert_allclose([low, high], [20 - 200**0.5, 20 + 200**0.5])
    assert ax.get_ylabel() == "ECE (%)"


@pytest.mark.parametrize(
    ("metric", "label", "value"), [("accuracy", "Accuracy (%)", 50), ("nll", "NLL", 0.5)]
)
def test_training_curves_have_the_unit_of_the_metric(metric, label, value, ax):
    plots.training_curves({"ce": [0.5]}, ax, metric=metric)
    assert ax.get_ylabel() == label
    assert line(ax, "ce")[1].tolist() == [value]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"ce": [0.1]}, {"metric": "ece2"}, "unknown metric 'ece2'; known: accuracy, "),
        ({}, {}, "got none"),
        (
            {"ce": []},
            {},
            r"data\['ce'\] must have shape \(epochs,\) or \(seeds, epochs\), with nothing empty",
        ),
        ({"ce": [[[0.1]]]}, {}, r"\(epochs,\) or \(seeds, epochs\), got \(1, 1, 1\)"),
        ({"ce": [0.1, INFINITY]}, {}, "must be finite, but 1 of 2 numbers are infinite"),
        ({"ce": ["many"]}, {}, "hold numbers"),
    ],
)
def test_training_curves_refuse(data, options, message):
    with pytest.raises(ValueError, match=message):
        plots.training_curves(data, **options)


def test_multipliers_draw_every_class_and_their_range(ax):
    history = [torch.tensor([1.0, 5.0, 3.0]), torch.tensor([2.0, 10.0, 0.0], requires_grad=True)]
    plots.multipliers(history, ax)
    for label, values in {"Max": [5, 10], "Mean": [3, 4], "Min": [1, 0]}.items():
        np.testing.assert_allclose(line(ax, label), [[1, 2], values])
    segments = [segment.tolist() for segment in ax.collections[0].get_segments()]
    assert segments == [[[1, 1], [2, 2]], [[1, 5], [2, 10]], [[1, 3], [2, 0]]]
    assert legend(ax) == ["Max", "Mean", "Min", "Per class"]
    assert ax.get_ylabel() == "Multiplier λ"


def test_a_crowd_of_classes_does_not_blow_up_the_file(ax):
    file = io.BytesIO()
    plots.multipliers(np.random.default_rng(0).normal(size=(50, 1000)), ax).figure.savefig(file, format="svg")
    assert len(file.getvalue()) < 500_000


def test_a_learned_scalar_is_one_line(ax):
    plots.learned_quantity([torch.tensor(1.0), torch.tensor(2.0, requires_grad=True)], ax, name="logit_scale")
    (curve,) = ax.lines
    assert curve.get_xydata().tolist() == [[1, 1], [2, 2]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Epoch", "Logit scale")
    assert ax.get_legend() is None


def test_a_learned_vector_has_a_line_per_entry_and_a_short_legend(ax):
    plots.learned_quantity(torch.arange(300.0).reshape(2, 150), ax, name="offset")
    assert len(ax.collections[0].get_segments()) == 150
    assert legend(ax) == ["Max", "Mean", "Min", "Each value"]
    assert line(ax, "Max")[1].tolist() == [149, 299]
    with pytest.raises(
        ValueError, match=r"data must have shape \(epochs,\) or \(epochs, n\), got \(1, 2, 3\)"
    ):
        plots.learned_quantity(np.zeros((1, 2, 3)), name="offset")


@pytest.mark.parametrize(
    ("picture", "scale", "first"), [(plots.gammas, 1, 1), (plots.gaps, 100, 1), (plots.edges, 1, 0)]
)
def test_bins_have_a_line_each_and_are_numbered(picture, scale, first, ax):
    picture(PASSES, ax)
    drawn = [line for line in ax.lines if len(line.get_xdata()) == 20]
    np.testing.assert_allclose([line.get_ydata() for line in drawn], scale * PASSES.T)
    assert list(drawn[0].get_xdata()) == list(range(1, 21))
    bar = ax.figure.axes[1]
    assert bar.get_yticks().tolist() == list(range(first, 15 + first))
    shades = [sum(line.get_color()[:3]) for line in drawn]  # brighter and brighter
    assert shades == sorted(shades)


def test_empty_bins_interrupt_the_line_of_gaps_only(ax):
    holes = PASSES.copy()
    holes[3, 2] = NAN
    drawn = [line for line in plots.gaps(holes, ax).lines if len(line.get_xdata()) == 20]
    assert np.isnan(drawn[2].get_ydata()).tolist() == [n == 3 for n in range(20)]
    with pytest.raises(ValueError, match="data must not be NaN, but 1 of 300"):
        plots.gammas(holes)
    with pytest.raises(ValueError, match="data must not be NaN, but 300 of 300"):
        plots.gaps(holes * NAN)


@pytest.mark.parametrize("picture", [plots.multipliers, plots.gammas, plots.gaps, plots.edges])
@pytest.mark.parametrize("data", [[1.0, 2.0], np.zeros((0, 3)), np.zeros((2, 0)), torch.zeros(1, 1, 1), []])
def test_pictures_of_passes_refuse_other_shapes(picture, data):
    with pytest.raises(ValueError, match=r"data must have shape \(passes, "):
        picture(data)


def test_lists_of_unequal_tensors_are_refused():
    with pytest.raises(ValueError, match=r"data must have shape \(passes, K\), and hold numbers"):
        plots.multipliers([torch.zeros(2), torch.zeros(3)])


def test_bin_confidences_set_data_sets_side_by_side(ax):
    training, validation = PASSES, PASSES - 1
    plots.bin_confidences({"training": training, "validation": validation}, ax, bins=[0, 14])
    for name, values in {"training": training, "validation": validation}.items():
        for b in (0, 14):
            np.testing.assert_allclose(line(ax, f"{name}, bin {b + 1}")[1], values[:, b])
    assert legend(ax) == ["training", "validation", "Bin 1", "Bin 15"]
    same_bin = [line for line in ax.lines if line.get_label().endswith("bin 1")]
    assert same_bin[0].get_color() == same_bin[1].get_color()
    assert same_bin[0].get_linestyle() != same_bin[1].get_linestyle()


@pytest.mark.parametrize(("number", "chosen"), [(15, [1, 6, 10, 15]), (3, [1, 2, 3]), (1, [1])])
def test_bin_confidences_choose_few_bins(number, chosen, ax):
    plots.bin_confidences({"training": PASSES[:, :number]}, ax)
    assert legend(ax) == ["training", *(f"Bin {b}" for b in chosen)]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({}, {}, "got none"),
        (
            {"a": PASSES, "b": PASSES[1:]},
            {},
            r"same passes and bins, got \{'a': \(20, 15\), 'b': \(19, 15\)\}",
        ),
        ({"a": PASSES}, {"bins": [15]}, r"bins must be some of 0 to 14, got \[15\]"),
        ({"a": PASSES}, {"bins": []}, "bins must be some of 0 to 14"),
        (dict.fromkeys("abcde", PASSES), {}, "at most 4 data sets"),
    ],
)
def test_bin_confidences_refuse(data, options, message):
    with pytest.raises(ValueError, match=message):
        plots.bin_confidences(data, **options)


@pytest.mark.parametrize("key", PENALTIES)
def test_penalties_are_those_of_the_losses(key, ax):
    plots.penalties(ax=ax, multiplier=2, penalty_weight=0.5, violations=(-1, 3))
    x, y = line(ax, key.upper())
    assert (x[0], x[-1]) == (-1, 3)
    expected = PENALTIES[key].value(torch.from_numpy(x), torch.tensor(0.5), torch.tensor(2.0))
    np.testing.assert_allclose(y, expected)
    assert ax.get_ylabel() == "Penalty, λ = 2, ρ = 0.5"


def test_penalties_at_a_point_known_from_the_formula(ax):
    plots.penalties({"phr": PENALTIES["phr"]}, ax, multiplier=3, penalty_weight=2, violations=(0, 1))
    assert line(ax, "PHR")[1][-1] == 4  # λz + ρz²/2
    assert legend(ax) == ["PHR"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {}}, "got none"),
        ({"multiplier": -1}, "multiplier must be positive and finite, got -1"),
        ({"penalty_weight": 0}, "penalty_weight must be positive and finite, got 0"),
        ({"penalty_weight": NAN}, "penalty_weight must be positive and finite, got nan"),
        ({"violations": (1, 1)}, r"violations must be a range \(low, high\) of finite numbers"),
    ],
)
def test_penalties_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        plots.penalties(**options)


# ---------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("decimals", [0, 1, 9])  # with few, most scores are tied
def test_roc_curve_agrees_with_scikit_learn(decimals, ax):
    random = np.random.default_rng(decimals)
    inside, outside = random.normal(0, 1, 200).round(decimals), random.normal(1, 1, 150).round(decimals)
    plots.roc_curve({"score": (inside, torch.from_numpy(outside))}, ax)
    truth, scores = np.repeat([0, 1], [200, 150]), np.concatenate([inside, outside])
    false, true, _ = metrics.roc_curve(truth, scores, drop_intermediate=False)
    area = 100 * metrics.roc_auc_score(truth, scores)
    np.testing.assert_allclose(line(ax, f"score: {area:.2f}"), [100 * false, 100 * true])
    assert ax.get_legend().get_title().get_text() == "AUROC (%)"


@pytest.mark.parametrize(
    ("scores", "area"),
    [
        (([0.0], [1.0]), "100.00"),
        (([1.0], [0.0]), "0.00"),
        (([1.0], [1.0]), "50.00"),
        (([-INFINITY], [0.0]), "100.00"),
    ],
)
def test_roc_curve_of_two_scores(scores, area, ax):
    assert legend(plots.roc_curve({"score": scores}, ax)) == [f"score: {area}"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "got none"),
        (
            {"entropy": ([0.0], [])},
            r"out_scores of 'entropy' must have shape \(N,\), with nothing",
        ),
        (
            {"entropy": ([[0.0]], [0.0])},
            r"in_scores of 'entropy' must have shape \(N,\), got \(1, 1\)",
        ),
        ({"entropy": ([NAN], [0.0])}, "in_scores of 'entropy' must not be NaN"),
        ({"entropy": ([0.0],)}, r"must be \(in_scores, out_scores\), got 1 items"),
    ],
)
def test_roc_curve_refuses(data, message):
    with pytest.raises(ValueError, match=message):
        plots.roc_curve(data)


def shares(ax):
    return [patch.get_data().values for patch in ax.patches if not patch.get_fill()]


def test_maximum_logits_share_their_bins(ax):
    data = {
        "a": torch.tensor([[0.0, -1.0], [0.0, -9.0], [1.0, 0.0], [4.0, 3.0]]),
        "b": torch.tensor([[-5.0, 3.5]]),
    }
    plots.maximum_logits(data, ax, bins=4)
    a, b = shares(ax)
    assert a.tolist() == [50, 25, 0, 25]
    assert b.tolist() == [0, 0, 0, 100]
    assert ax.patches[0].get_data().edges.tolist() == [0, 1, 2, 3, 4]
    assert legend(ax) == ["a", "b"]


def test_confidences_are_largest_probabilities(ax):
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.95, 0.05, 0.0], [1.0, 1.0, 1.0], [0.9, 0.05, 0.05]]).log()
    plots.confidences({"ce": logits.requires_grad_().clamp_min(-99).to(torch.bfloat16)}, ax, bins=4)
    assert shares(ax)[0].tolist() == [0, 25, 25, 50]
    assert ax.get_xlim() == (0, 1)


def test_pixels_count_as_elements(ax):
    logits = torch.randn(2, 5, 4, 3)
    plots.confidences({"pixels": logits, "rows": logits.movedim(1, -1).reshape(-1, 5)}, ax)
    pixels, rows = shares(ax)
    assert pixels.tolist() == rows.tolist()
    assert pixels.sum() == pytest.approx(100)


@pytest.mark.parametrize("picture", [plots.maximum_logits, plots.confidences])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data must be a mapping from name to logits, got none"),
        ({"ce": torch.zeros(3)}, r"data\['ce'\] must be a tensor of logits \(N, K, \*S\), got \(3,\)"),
        ({"ce": torch.zeros(0, 3)}, r"got \(0, 3\)"),
        ({"ce": [[1.0]]}, "got list"),
        ({"ce": torch.tensor([[NAN, 0.0]])}, r"data\['ce'\] must be finite"),
    ],
)
def test_histograms_refuse(picture, data, message):
    with pytest.raises(ValueError, match=message):
        picture(data)


@pytest.mark.parametrize("picture", [plots.maximum_logits, plots.confidences])
def test_histograms_need_a_bin(picture):
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        picture(LOGITS, bins=0)


def test_methods_side_by_side_draws_means_and_intervals(ax):
    plots.methods_side_by_side(FIGURES, ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ce", "$ls$"]
    points = {line.get_label(): line.get_xdata() for line in ax.lines if line.get_label() in FIGURES}
    assert points["before"] == pytest.approx([8, 4])
    assert points["after"] == pytest.approx([3])
    assert [6, 10] in [pytest.approx(line.get_xdata()) for line in ax.lines]
    with pytest.raises(ValueError, match="unknown metric 'speed'"):
        plots.methods_side_by_side(FIGURES, ax, metric="speed")
