"""Tables mark the best values and the significant differences, and no rendering loses or cuts a figure."""

import dataclasses
import re

import pytest
import torch

from calibrant.evaluation import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.metrics import METRICS
from calibrant.reports.table_builders import comparison_table, evaluation_note, evaluation_table
from calibrant.reports.tables import (
    Cell,
    Column,
    Table,
    interval_text,
    listing,
    number_text,
    print_table,
    tex,
    to_latex,
    to_markdown,
)

from ..evaluations import changed

NAMES = ("ce", "cals-alm[margin=6]", "a|b_c")


def column(label, *cells):
    return Column(label.lower(), label, cells)


@pytest.fixture
def table():
    accuracy = column(
        "Accuracy",
        Cell(0.9, "90.00", "[88.00, 92.00]"),
        Cell(
            0.95, "95.00", "[94.00, 96.00]", best=True, verdict="better", note="significantly better than ce"
        ),
        Cell(0.8, "80.00", "[78.00, 82.00]", verdict="worse"),
    )
    ece = column(
        "ECE + T", Cell(0.1, "10.00", verdict="equal"), Cell(None, "–", note="why"), Cell(0.2, "20.00")
    )
    return Table(NAMES, (accuracy, ece, column("Nothing", *[Cell(None, "–")] * 3)))


def on_terminal(monkeypatch, capsys, width, *arguments, **options):
    """What a terminal of this width shows, without its colours."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table(*arguments, **options)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (0.12345, {"unit": " %"}, "12.35 %"),
        (-1e-9, {}, "0.00"),
        (-0.5, {"percent": False, "decimals": 3}, "−0.500"),
        (0.5, {"signed": True}, "+50.00"),
        (0.0, {"signed": True}, "0.00"),
        (float("inf"), {"unit": "%"}, "∞"),
        (float("-inf"), {}, "−∞"),
        (float("nan"), {}, "–"),
        (None, {"unit": "%"}, "–"),
    ],
)
def test_numbers(value, options, text):
    assert number_text(value, **options) == text


def test_intervals():
    assert interval_text((0.1, 0.2), percent=False, decimals=3) == "[0.100, 0.200]"
    assert interval_text(None) == ""


# --------------------------------------------------------------------------------------------- renderings


def test_markdown(table):
    assert to_markdown(table, "loss").splitlines() == [
        "| loss | Accuracy | ECE + T | Nothing |",
        "| --- | ---: | ---: | ---: |",
        "| ce | 90.00 | 10.00 | – |",
        "| cals-alm[margin=6] | **95.00** better | – | – |",
        r"| a\|b_c | 80.00 worse | 20.00 | – |",
    ]


def test_latex(table):
    assert to_latex(table, "Loss").splitlines() == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"Loss & Accuracy & ECE + T & Nothing \\",
        r"\midrule",
        r"ce & 90.00 & 10.00 & -- \\",
        r"cals-alm[margin=6] & \textbf{95.00}\textsuperscript{better} & -- & -- \\",
        r"a|b\_c & 80.00\textsuperscript{worse} & 20.00 & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_text_for_latex():
    assert tex(r"5 % of $x_1 ± \y^2 {~}") == (
        r"5 \% of \$x\_1 $\pm$ \textbackslash{}y\textasciicircum{}2 \{\textasciitilde{}\}"
    )


def test_a_table_of_intervals_has_the_columns_with_any(table):
    intervals = table.intervals()
    assert [each.label for each in intervals.columns] == ["Accuracy"]
    assert [cell.text for cell in intervals.columns[0].cells] == [
        "[88.00, 92.00]",
        "[94.00, 96.00]",
        "[78.00, 82.00]",
    ]
    assert "**" not in to_markdown(intervals)


def test_marks_in_words():
    assert Cell(1.0, "1", best=True, note="significantly better").words == "best; significantly better"
    assert Cell(float("inf"), "∞").sort_key == "Infinity"
    assert Cell(None, "–").sort_key == ""


def test_a_wide_terminal_shows_one_table(table, monkeypatch, capsys):
    shown = on_terminal(monkeypatch, capsys, 100, table, "A note.")
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    assert lines[0] == ["Accuracy", "ECE", "+", "T"]  # and no column without a value
    assert lines[2:] == [
        ["ce", "90.00", "10.00"],
        ["[88.00,", "92.00]"],
        ["cals-alm[margin=6]", "95.00", "better", "–"],
        ["[94.00,", "96.00]"],
        ["a|b_c", "80.00", "worse", "20.00"],
        ["[78.00,", "82.00]"],
        ["A", "note."],
    ]


def test_models_may_stand_side_by_side(table, monkeypatch, capsys):
    shown = on_terminal(monkeypatch, capsys, 100, table, models_across=True)
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    assert lines[0] == list(NAMES)
    assert lines[2] == ["Accuracy", "90.00", "95.00", "*", "better", "80.00", "worse"]
    assert "[" not in lines[2]


def numbered(count, importance):
    """A table with a column for each number."""
    columns = (
        Column(str(n), f"Figure number {n}", tuple([Cell(n, f"{n}.0000000")] * 3), importance=importance(n))
        for n in range(count)
    )
    return Table(NAMES, tuple(columns))


@pytest.mark.parametrize(
    ("importance", "kept"), [(lambda n: 0, [0, 1, 2]), (lambda n: n % 4, [2, 3, 7]), (lambda n: n, [7, 8, 9])]
)
def test_a_narrow_terminal_hides_the_least_important_columns(monkeypatch, capsys, importance, kept):
    table = numbered(10, importance)
    shown = on_terminal(monkeypatch, capsys, 60, table, "A note.")
    assert max(len(line) for line in shown.splitlines()) <= 60
    for n in range(10):
        assert shown.count(f" {n}.0000000") == (3 if n in kept else 0)
    hidden = ", ".join(f"Figure number {n}" for n in range(10) if n not in kept)
    assert f"Hidden, to fit 60 columns: {hidden}. --wide shows all. A note." in " ".join(shown.split())


def test_a_wide_table_has_all_columns_whatever_the_terminal(monkeypatch, capsys):
    shown = on_terminal(monkeypatch, capsys, 60, numbered(10, lambda n: n), "A note.", wide=True)
    assert all(f"Figure number {n}" in shown.splitlines()[0] for n in range(10))
    assert "Hidden" not in shown


def test_models_that_do_not_fit_continue_below_and_a_line_says_so(monkeypatch, capsys):
    names = tuple(f"runs/number{n}/test.npz" for n in range(10))
    table = Table(names, (column("ECE", *[Cell(n, f"{n}.0000000") for n in range(10)]),))
    shown = on_terminal(monkeypatch, capsys, 60, table, "A note.", models_across=True)
    assert max(len(line) for line in shown.splitlines()) <= 60
    for n in range(10):
        assert shown.count(f" {n}.0000000") == 1
    assert "Too wide for this terminal: the columns are printed in 2 parts. A note." in " ".join(
        shown.split()
    )


def test_texts_take_several_lines_before_a_column_is_hidden(monkeypatch, capsys):
    rows = [("ce", "digits", "A description of some eight words or more."), ("cals-alm", "cifar10", "short")]
    table = listing(rows, {"data": 0, "what it is": 1})
    assert "Hidden" not in on_terminal(monkeypatch, capsys, 50, table, heading="name")
    shown = on_terminal(monkeypatch, capsys, 40, table, heading="name")
    assert shown.split()[:4] == ["name", "what", "it", "is"]
    assert "Hidden, to fit 40 columns: data." in shown
    assert " ".join(rows[0][2].split()[:4]) in shown
    assert max(len(line) for line in shown.splitlines()) <= 40


def test_figures_wider_than_the_terminal_are_not_cut(table, monkeypatch, capsys):
    shown = on_terminal(monkeypatch, capsys, 20, table)
    for text in ("[94.00, 96.00]", "95.00 better", "80.00 worse", "cals-alm[", "margin=6]"):
        assert text in shown
    assert "…" not in shown
    assert "Hidden, to fit 20 columns: ECE + T." in " ".join(shown.split())
    assert all(name in on_terminal(monkeypatch, capsys, 20, table, wide=True) for name in NAMES)


def test_a_pipe_has_no_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table(NAMES, tuple(column(f"Figure {n}", *[Cell(n, f"{n}.00")] * 3) for n in range(30)))
    print_table(table, "A long note. " * 20)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 6
    assert lines[0].split() == [part for n in range(30) for part in ("Figure", str(n))]


def test_names_are_no_markup(monkeypatch, capsys):
    table = Table(("[bold]x[/bold]",), (column("[red]ECE", Cell(1.0, "1.0")),))
    shown = on_terminal(monkeypatch, capsys, 80, table, "[dim]note")
    assert all(text in shown for text in ("[bold]x[/bold]", "[red]ECE", "[dim]note"))


# --------------------------------------------------------------------------------------------- evaluations


@pytest.fixture(scope="module")
def evaluations():
    logits = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    return [
        evaluate(scale * logits, logits.argmax(1), name=f"times {scale}", resamples=50) for scale in (1, 1, 9)
    ]


def cells(table, key):
    (found,) = [column.cells for column in table.columns if column.key == key]
    return found


def test_every_metric_has_a_column(evaluations):
    table = evaluation_table(evaluations, NAMES)
    assert [each.key for each in table.columns] == ["samples", *METRICS, "p_value"]
    assert [each.label for each in table.select(["nll", "ece"]).columns] == ["NLL", "ECE"]
    assert [cell.text for cell in cells(table, "samples")] == ["500"] * 3


@pytest.mark.parametrize(
    ("against", "verdicts"), [("best", ["worse", "worse", ""]), ("first", ["", "", "better"])]
)
def test_verdicts_are_against_the_best_or_the_first(evaluations, against, verdicts):
    table = evaluation_table(evaluations, NAMES, against=against)
    found = cells(table, "nll")
    assert [cell.verdict for cell in found] == verdicts
    assert [cell.best for cell in found] == [False, False, True]
    assert table.tested
    assert table.untested == ()


def test_values_that_print_alike_are_equally_good(evaluations):
    first, *_ = evaluations
    near = [first, changed(first, nll=first.nll + 1e-9), changed(first, nll=first.nll + 1)]
    assert [cell.best for cell in cells(evaluation_table(near, NAMES), "nll")] == [True, True, False]


def test_equal_values_are_not_the_best(evaluations):
    equal = evaluation_table([evaluations[0]] * 3, NAMES)
    assert not any(cell.best for each in equal.columns for cell in each.cells)
    methods = tuple(Method(name, (evaluations[0],)) for name in NAMES)
    table = comparison_table(Comparison("toy", (0,), methods))
    assert not any(cell.best for each in table.columns for cell in each.cells)
    assert "**" not in to_markdown(table)


def test_a_single_value_is_not_the_best(evaluations):
    table = evaluation_table(evaluations[:1], ["alone"])
    assert not any(cell.best for each in table.columns for cell in each.cells)
    kde = [changed(evaluations[0], kde_ece=0.1), evaluations[1]]
    assert [cell.best for cell in cells(evaluation_table(kde, NAMES[:2]), "kde_ece")] == [False, False]


def test_models_without_resamples_are_not_tested(evaluations):
    untested = [*evaluations[:2], changed(evaluations[2], replicates={})]
    assert evaluation_table(untested, NAMES, against="first").untested == (NAMES[2],)
    assert evaluation_note(untested).endswith("are not tested: there are no resamples")
    images = [dataclasses.replace(each, per_image=True) for each in untested]
    assert evaluation_note(images).endswith("are not tested: means over images have no resamples")
    assert "of the paired bootstrap" in evaluation_note(evaluations)
