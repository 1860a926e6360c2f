"""The files of a sweep hold the validation figures of every setting, and test figures of the chosen one."""

import json

import pytest

from calibrant.evaluation.chosen import Sweep
from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.criterion import Criterion
from calibrant.reports.chosen import SWEEP_FILES, curves, latex, markdown, write_sweep
from calibrant.reports.plots import drawing
from tests.programs import draw_blank
from tests.reports.test_comparison_page import method, rows


def sweep(by="nll", seeds=2, **options):
    options = options or {"margin": (4, 6), "penalty": ("phr", "p2")}
    names = ["4|phr", "4|p2", "6|phr", "6|p2"] if len(options) > 1 else ["4", "6"]
    methods = tuple(method(name, 1.2 + number, seeds, resamples=0) for number, name in enumerate(names))
    validation = Comparison("v", tuple(range(seeds)), methods)
    criterion = Criterion.parse(by)
    chosen = criterion.choose(validation)
    test = Comparison("t", tuple(range(seeds)), (method("mbls[margin=4]", 7.0, seeds, resamples=10),))
    return Sweep("toy: mbls over margin", options, criterion, validation, chosen, test)


def test_markdown_has_both_tables_and_says_how_the_choice_was_made():
    text = markdown(sweep())
    first, second = text.split("## Test data")
    assert len(rows(first, "setting")) == 1
    assert [row[0] for row in rows(first, r"4\|phr")] == [r"4\|phr"]
    assert rows(first, r"4\|phr")[0][2].startswith("**")
    assert "- Chosen on the validation data: 4\\|phr, with the lowest NLL" in first
    assert "- The best value of margin, 4, is at the edge of the range; try smaller values." in first
    assert "Only the chosen setting was evaluated on the test data." in second
    assert len(rows(second, "mbls[margin=4]")) == 2  # figures and intervals
    assert "4\\|phr" not in second
    assert "**" not in second


def test_latex_has_both_tables():
    text = latex(sweep())
    assert text.count(r"\toprule") == 2
    assert text.startswith("% Validation data of 300 elements, mean $\\pm$ standard deviation over 2 seeds")
    assert "Chosen on the validation data: 4|phr" in text


def test_curves_are_drawn_for_four_figures_and_the_criterion():
    figure = curves(sweep())
    drawn = [ax for ax in figure.axes if ax.axison]
    assert [ax.get_ylabel() for ax in drawn] == ["Accuracy (%)", "NLL", "ECE (%)", "Adaptive ECE (%)"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["penalty=phr", "penalty=p2"]
    assert {ax.get_xlabel() for ax in drawn} == {"margin"}
    others = [ax for ax in curves(sweep("brier-after-temperature", margin=(4, 6))).axes if ax.axison]
    assert others[-1].get_ylabel() == "Brier, after temperature scaling"
    assert len(others) == 5


def test_files_are_written_and_replaced(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_saved", drawing._saved)  # as it was, afterwards
        draw_blank()
        write_sweep(sweep(seeds=1), tmp_path / "out")
    found = sweep()
    write_sweep(found, tmp_path / "out")
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert files == set(SWEEP_FILES)
    assert json.loads((tmp_path / "out/sweep.json").read_text()) == json.loads(found.to_json())
    assert (tmp_path / "out/sweep.md").read_text() == markdown(found)
    assert (tmp_path / "out/plots/sensitivity.svg").read_text().startswith("<?xml")


def test_nothing_is_written_if_a_picture_cannot_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.reports.plots.drawing.png", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_sweep(sweep(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
