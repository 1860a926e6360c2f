"""The files of a comparison hold every method's figures, and pictures of whatever a loss learns."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from calibrant.evaluation import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.reports.comparison_page import latex, markdown, write_comparison
from tests.reports.test_page import Page


@cache
def evaluation(seed, scale, name, resamples=100):
    target = torch.randint(3, (300,), generator=torch.Generator().manual_seed(7))
    noise = torch.randn(300, 3, generator=torch.Generator().manual_seed(seed))
    logits = scale * (noise + 1.5 * torch.nn.functional.one_hot(target, 3))
    return evaluate(logits, target, name=name, resamples=resamples)


def method(name, scale, seeds, **options):
    return Method(
        name,
        tuple(evaluation(seed, scale, f"{name}, seed {seed}", **options) for seed in range(seeds)),
        tuple(evaluation(seed, 1.2, f"{name} + T, seed {seed}", **options) for seed in range(seeds)),
        tuple(1.5 + seed for seed in range(seeds)),
        {"svhn": tuple(0.9 + seed / 100 for seed in range(seeds))},
    )


def comparison(seeds=3, **options):
    methods = (method("ce", 1.2, seeds, **options), method("sharp_|x", 12.0, seeds, **options))
    return Comparison("toy", tuple(range(seeds)), methods)


def rows(text, name):
    """Cells of the rows of a Markdown table with this name."""
    found = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]


def test_markdown_marks_the_best_and_the_significant():
    text = markdown(comparison())
    first, intervals = rows(text, "ce")
    second, _ = rows(text, r"sharp\_\|x")
    heading = rows(text, "loss")[0]
    nll = heading.index("NLL")
    assert first[nll].startswith("**")
    assert not second[nll].startswith("**")
    assert second[nll].endswith("↓")
    assert first[nll + 1].startswith("**") == second[nll + 1].startswith("**")  # equal after scaling
    assert (first[heading.index("T")], heading[-1]) == ("2.500 ± 1.000", "AUROC, svhn")
    assert intervals[1].startswith("[")
    assert "against ce" in text
    assert "↓ worse" in text


def test_names_are_not_interpreted_as_markdown():
    title = "a\n## <img src=x> [b](http://c) *d*"
    text = markdown(replace(comparison(), title=title))
    assert text.splitlines()[0] == r"# a\\n## \<img src=x\> [b\](http://c) \*d\*"
    method = replace(comparison().methods[0], name="<b>\n|x")
    assert "\n| \\<b\\>\\\\n\\|x | " in markdown(replace(comparison(), methods=(method,)))


def test_one_seed_has_no_deviation_and_says_so():
    text = markdown(comparison(seeds=1))
    assert "±" not in text
    assert "One seed is too few to test significance" in text


def test_without_resamples_there_is_no_table_of_intervals():
    text = markdown(comparison(resamples=0))
    assert len(rows(text, "ce")) == 1
    assert "[" not in text


def test_latex_escapes_names():
    text = latex(comparison())
    assert r"sharp\_|x & " in text
    assert r"$^{\downarrow}$" in text
    assert r"$\pm$" in text
    comment, begin, *_ = text.splitlines()
    assert comment.startswith("% Test set of 300 elements")
    assert begin == r"\begin{tabular}{l" + "r" * 11 + "}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("comparison") / "new"
    figures = ("validation_accuracy", "validation_nll", "validation_ece")
    history = [[dict.fromkeys(figures, epoch / 10) for epoch in range(3)] for _ in range(3)]
    learned = {
        "multiplier": torch.rand(3, 4),
        "gamma": torch.rand(3, 15),
        "logit_scale": torch.linspace(1, 2, 3),
        "offset": torch.rand(3, 2, 5),
        "broken": torch.full((3,), float("nan")),
    }
    write_comparison(comparison(), target, {"ce": history}, {"sharp_|x": learned})
    return target


def test_every_file_is_written(folder):
    assert {path.name for path in folder.iterdir()} == {
        "plots",
        "report.html",
        "results.json",
        "results.md",
        "results.tex",
    }
    assert json.loads((folder / "results.json").read_text())["title"] == "toy"
    assert (folder / "results.md").read_text() == markdown(comparison())
    assert (folder / "results.tex").read_text() == latex(comparison())


def test_a_learned_quantity_is_drawn_whatever_its_name(folder):
    learned = ("multiplier", "gamma", "logit_scale", "offset")  # and not what has no finite numbers
    assert {path.name for path in (folder / "plots").iterdir()} == {
        "accuracy-against-ece.png",
        "ece.png",
        "reliability.png",
        *(f"training-{metric}.png" for metric in ("accuracy", "ece", "nll")),
        *(f"{name}-sharp--x.png" for name in learned),
    }
    captions = [text for text, _ in Page((folder / "report.html").read_text()).find("figcaption")]
    assert "Logit scale after each epoch, learned by sharp_|x with the first seed" in captions


def test_the_page_has_the_table_of_the_comparison(folder):
    page = Page((folder / "report.html").read_text())
    [(text, _)] = page.find("table", class_="comparison")
    assert "sharp_|x" in text
    first, second = page.find("td", data_figure="NLL")
    assert first[1]["class"] == "best"
    assert second[1]["class"] == "worse"
    assert second[1]["title"].startswith("significantly worse than ce (p = ")
    assert "▽" in second[0]
    assert len(page.find("table", class_="models")) == 3
