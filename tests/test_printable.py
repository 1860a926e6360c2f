"""Text from files reaches terminals, tables and pages without control characters, wherever it came from."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from calibrant import cli
from calibrant.evaluation import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.printable import one_line, printable, wrapped
from calibrant.reports.comparison_page import latex, markdown
from calibrant.reports.page import render_report
from calibrant.reports.table_builders import comparison_table
from calibrant.reports.tables import print_table

EVIL = "a\x1b]0;t\x07\x1b[2J\x9b31m\r\n\u202eb\udcff|<b>[x](y)*_`$^{"
UNSAFE = set("\x1b\x07\x9b\r\u202e\udcff\x00")


def assert_safe(text):
    assert not set(text) & UNSAFE
    text.encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü 漢字 👍🏽 ‌می‌خواهم", "plain ü 漢字 👍🏽 ‌می‌خواهم"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc\x7f\x85", "a\\nb\\tc\\x7f\\x85"),
        ("\u2028\u202e\udcff\x00", "\\u2028\\u202e\\udcff\\x00"),
        ("a\\x1b", "a\\x1b"),
    ],
)
def test_only_control_characters_are_replaced(text, expected):
    assert printable(text) == expected
    assert printable(expected) == expected


def test_numbers_stay_whole_where_names_are_broken():
    assert wrapped("a+lr=1e+05,x", 4, longest_word=28) == "a+\nlr=1e+05,\nx"


def test_a_line_is_one_line_and_not_endless():
    assert one_line("a\n\n b\x1b\r\nc") == "a b\\x1b c"
    assert len(one_line("a" * 10**6)) < 3000


@pytest.fixture(scope="module")
def evaluation():
    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    names = [f"{EVIL}{number}" for number in range(3)]
    return evaluate(logits, torch.arange(60) % 3, name=EVIL, class_names=names, resamples=20)


def test_pages_and_tables(evaluation, capsys):
    comparison = Comparison(
        f"{EVIL}\n# heading", (0,), (Method(EVIL, (evaluation,)), Method("ce", (evaluation,)))
    )
    for text in (
        render_report([evaluation], title=EVIL),
        markdown(comparison),
        latex(comparison),
        str(evaluation),
    ):
        assert_safe(text)
        assert "\\x1b]0;t" in text.replace("\\\\", "\\").replace(r"\textbackslash{}", "\\").replace(
            "\\]", "]"
        )
    text = markdown(comparison)
    assert text.startswith("# a")
    assert text.count("\n# ") == 0
    assert "<b>" not in text
    assert "[x](y)" not in text
    print_table(comparison_table(comparison), EVIL)
    print_table(comparison_table(comparison), EVIL, models_across=True)
    assert_safe(capsys.readouterr().out)


def test_names_of_files_and_of_classes(tmp_path):
    """As far as a file name can hold them."""
    arrays = {"logits": np.random.default_rng(0).normal(size=(30, 3)), "labels": np.arange(30) % 3}
    names = [f"{EVIL[:-20]}{number}" for number in range(3)]
    first, second = (tmp_path / f"{name}\x1b[2J\x9b.npz" for name in ("first", "second"))
    for path in (first, second):
        np.savez(path, **arrays, class_names=names)
    runner = CliRunner()
    page = tmp_path / "page\x1b[2J.html"
    for arguments in (
        ["evaluate", first, "--report", page],
        ["evaluate", first, second],
        ["evaluate", tmp_path / "none\x1b[2J.npz"],
        ["calibrate", first, "--output", tmp_path / "c\x1b[2J.safetensors"],
        ["apply", tmp_path / "c\x1b[2J.safetensors", first, "--output", tmp_path / "o\x1b[2J.npz"],
        ["recipes", tmp_path / "none\x1b[2J.toml"],
        ["predict", tmp_path / "none\x1b[2J", "--output", tmp_path / "o\x1b[2J.npz"],
    ):
        result = runner.invoke(
            cli.app,
            [*map(str, arguments), *(["--resamples", "0"] * (arguments[0] in ("evaluate", "calibrate")))],
        )
        assert result.output
        assert_safe(result.output)
    assert_safe(page.read_text())
