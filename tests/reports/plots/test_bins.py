import io

import numpy as np
import pytest

from calibrant.reports.plots.bins import Row, panels

VALUES = np.random.default_rng(0).uniform(size=(20, 15))
NAN = float("nan")


def test_every_bin_has_a_panel_for_every_row():
    figure = panels([Row("Gap", {"Gap": [("ce", VALUES), ("ls", -VALUES)]}), Row("Edges", {"E": []})], [0, 7])
    assert len(figure.axes) == 4
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["Bin 1", "", "Bin 8", ""]
    lines = figure.axes[2].lines
    assert [each.get_ydata().tolist() for each in lines] == [VALUES[:, 7].tolist(), (-VALUES[:, 7]).tolist()]
    assert lines[0].get_color() != lines[1].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ce", "ls"]


def test_several_lines_of_a_run_share_its_colour():
    curves = {"Training": [("ce", VALUES)], "Validation": [("ce", VALUES / 2)], "Accuracy": [("ce", VALUES)]}
    figure = panels([Row("Confidence", curves)], [3])
    lines = figure.axes[0].lines
    assert len({each.get_color() for each in lines}) == 1
    assert len({each.get_linestyle() for each in lines}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ce", *curves]


@pytest.mark.parametrize("lines", [["Gap"], ["Training", "Validation"]], ids=len)
def test_twelve_runs_have_different_colours(lines):
    curves = {line: [(f"loss {n}", VALUES) for n in range(12)] for line in lines}
    figure = panels([Row("Gap", curves)], [0])
    assert len({each.get_color() for each in figure.axes[0].lines}) == 12
    entries = figure.legends[0].get_lines()
    assert len({(each.get_color(), each.get_linestyle()) for each in entries[:12]}) == 12


def test_a_single_epoch_and_empty_bins_are_drawn():
    figure = panels([Row("Gap", {"Gap": [("ce", np.array([[0.5, NAN]]))]}, zero=True)], [0, 1])
    assert figure.axes[0].lines[-1].get_marker() == "."
    figure.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize("bins", [[0], [0, 7, 14], [*range(10), 14]], ids=len)  # three rows
def test_nothing_is_cut_and_panels_keep_their_height(bins):
    curves = {"Training": [(f"cals-alm[margin={n},penalty=p2,rate=0.5]", VALUES) for n in range(8)]}
    close = {"Edges": [("ce", 0.9901 + VALUES / 10**4)]}  # whose ticks have many digits
    figure = panels([Row("Confidence", curves), Row("Edges,\ntraining", close, height=0.6)], bins)
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.get_figwidth()
    assert box.y1 <= figure.get_figheight()
    heights = [ax.get_position().height * figure.get_figheight() for ax in figure.axes]
    widths = [ax.get_position().width * figure.get_figwidth() for ax in figure.axes]
    assert min(heights) > 0.35
    assert min(widths) > 1.2
