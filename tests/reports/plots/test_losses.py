"""Penalties and learned quantities are drawn as they are."""

import io

import numpy as np
import pytest
import torch

from calibrant.losses import PENALTIES
from calibrant.reports import plots
from tests.reports.plots.drawn import NAN, PASSES, legend, line


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


@pytest.mark.parametrize("value", [1.0, -2.0, 0.0, 1e-6])
@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=str)
def test_a_quantity_that_never_changes_is_called_constant(ax, value, shape):
    plots.learned_quantity(np.full(shape, value), ax, name="penalty_weight")
    assert [text.get_text() for text in ax.texts] == [f"constant: {value:g}"]
    low, high = ax.get_ylim()
    assert low <= 0 <= high
    assert low < value < high


def test_one_epoch_is_not_called_constant(ax):
    assert not plots.learned_quantity([1.0], ax).texts
