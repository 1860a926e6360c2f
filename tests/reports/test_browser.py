"""The report in a browser: nothing overflows, tables sort, bars explain themselves, dark is dark."""

import csv
import io
from dataclasses import replace
from functools import cache

import pytest
import torch

from calibrant.evaluation import evaluate
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.reports import charts
from calibrant.reports.page import Summary, write_report
from calibrant.reports.table_builders import comparison_note, comparison_table
from tests.reports import test_page as pages
from tests.reports.chromium import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

NAMES = ("ce", "adafocal[evidence=2]", "cals-alm[penalty_weight_max=none,margin=6,penalty=p2,rate=0.5]")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@cache
def unnamed(seed, scale):
    target = torch.randint(4, (400,), generator=torch.Generator().manual_seed(7))
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(seed))
    logits = scale * (noise + 1.5 * torch.nn.functional.one_hot(target, 4))
    return evaluate(logits, target, resamples=50, class_counts=[200, 50, 50, 5])


def evaluation_of(name, seed, scale):
    return replace(unnamed(seed, scale), name=name)


@pytest.fixture(scope="module")
def comparison_page(tmp_path_factory):
    """The page of a comparison of losses with long names, without pictures."""
    methods = tuple(
        Method(
            name,
            tuple(evaluation_of(name, seed, scale) for seed in (0, 1)),
            tuple(evaluation_of(f"{name} + temperature", seed, 1.0) for seed in (0, 1)),
            (scale, scale),
        )
        for name, scale in zip(NAMES, (5.0, 1.0, 2.0), strict=True)
    )
    comparison = Comparison("A comparison", (0, 1), methods)
    summary = Summary(
        "Comparison",
        comparison_note(comparison),
        comparison_table(comparison),
        comparison,
        scatter=charts.accuracy_against_error(comparison),
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    evaluations = [method.evaluations(state)[0] for state in ("", "temperature") for method in methods]
    write_report(evaluations, path, summary=summary)
    return path


@pytest.fixture(scope="module")
def models_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    streamed = pages.evaluation("Streamed", exact=False, over=0.09, accuracy=0.7)
    write_report([*pages.models(), streamed], path)
    return path


@pytest.fixture(scope="module")
def page_of_one_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([evaluation_of(NAMES[2], 0, 5.0)], path)
    return path


BEYOND = """
((width) => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  const beyond = [...document.body.querySelectorAll("*")].filter((each) =>
    !each.closest(".scroll, .hidden, #tip") && each.getBoundingClientRect().right > width + 1);
  return [document.documentElement.scrollWidth, ...beyond.map((each) => each.outerHTML.slice(0, 80))];
})
"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["comparison_page", "models_page", "page_of_one_model"])
def test_only_tables_scroll_sideways(browser, request, name, width):
    browser.open(request.getfixturevalue(name), width=width)
    assert browser.run(f"{BEYOND}({width})") == [width]
    assert browser.problems == []


def test_long_names_break_at_brackets_and_need_no_scrollbar(browser, comparison_page):
    browser.open(comparison_page, width=1400)
    tables = ".comparison, .key-figures, .across"
    beyond = f"""[...document.querySelectorAll("{tables}")].map((table) => table.closest(".scroll"))
        .map((box) => box.scrollWidth - box.clientWidth)"""
    assert browser.run(beyond) == [0, 0, 0]
    lines = """[...document.querySelectorAll(".piece")].map((each) => each.getClientRects().length)"""
    assert set(browser.run(lines)) <= {0, 1}  # 0 in a fold


def test_a_bar_shows_its_numbers(browser, models_page):
    browser.open(models_page)
    assert browser.run("document.getElementById('tip').hidden")
    browser.point_at("svg.reliability .bin", 11)
    text = browser.run("tip.hidden ? '' : tip.textContent")
    assert len(text.splitlines()) >= 3
    assert "\\n" not in text
    for part in (
        "Confidence 0.87 to 0.93: ",
        " elements",
        "mean confidence 90.",
        "accuracy ",
        "if calibrated [",
    ):
        assert part in text
    browser.point_at("h1")
    assert browser.run("tip.hidden")
    browser.run("document.querySelector('.dots .dot').focus()")
    assert "cross-entropy: 6.40 % [" in browser.run("tip.textContent")


PRESS = """
["ece", "ece", "accuracy", "kde_ece", "kde_ece", "model", "p_value"].map((key) => {
  const header = document.querySelector(`table.models th[data-key="${key}"]`);
  header.querySelector("button").click();
  const orders = [...document.querySelectorAll("table[data-linked]")].map(
    (table) => [...table.tBodies[0].rows].map((row) => row.dataset.model).join(""));
  const sorted = document.querySelectorAll("[aria-sort]").length;
  return [key, header.getAttribute("aria-sort"), sorted, ...new Set(orders)].join(" ");
})
"""


def test_tables_of_models_are_sorted_together(browser, models_page):
    browser.open(models_page)
    assert browser.run(PRESS) == [
        "ece ascending 1 2103",
        "ece descending 1 3012",
        "accuracy descending 1 1023",
        "kde_ece ascending 1 2103",
        "kde_ece descending 1 0123",  # missing figures stay last
        "model ascending 1 2013",
        "p_value descending 1 2103",
    ]
    assert browser.run("document.getElementById('sorted').textContent").startswith("Sorted by p-value")
    assert browser.problems == []


SORT_ALL = """
[...document.querySelectorAll("table")].map((table) => {
  const header = table.tHead.rows[0].cells[1];
  for (const wanted of ["descending", "ascending"]) {
    while (header.getAttribute("aria-sort") !== wanted) header.querySelector("button").click();
    for (const body of table.tBodies) {
      const values = [...body.rows].filter((row) => row.cells.length > 1)
        .map((row) => row.cells[1].dataset.value).filter((value) => value !== "").map(Number);
      const sorted = [...values].sort((a, b) => (wanted === "ascending" ? a - b : b - a));
      if (values.join() !== sorted.join()) return table.className;
    }
  }
  return "sorted";
})
"""


@pytest.mark.parametrize("name", ["comparison_page", "models_page", "page_of_one_model"])
def test_every_table_sorts(browser, request, name):
    browser.open(request.getfixturevalue(name))
    assert set(browser.run(SORT_ALL)) == {"sorted"}


EXPORT = """
    (async () => {
      let blob;
      URL.createObjectURL = (given) => { blob = given; return "about:blank#"; };
      HTMLAnchorElement.prototype.click = function () { this.remove(); };
      document.querySelector("button.export").click();
      return blob.text();
    })()
"""


def exported(browser, path):
    """The rows of the first table of a page, as its button saves them."""
    browser.open(path)
    return list(csv.reader(io.StringIO(browser.run(EXPORT))))


def test_a_table_is_exported_with_its_intervals(browser, comparison_page):
    heading, *rows = exported(browser, comparison_page)
    assert heading[:4] == ["Loss", "Accuracy", "Accuracy: interval", "NLL"]
    assert [row[0] for row in rows] == list(NAMES)
    assert {len(row) for row in rows} == {len(heading)}
    low, high = (float(number) for number in rows[0][2].strip("[]").split(","))
    assert low < 100 * float(rows[0][1]) < high


def test_an_exported_name_is_no_formula(browser, tmp_path):
    path = tmp_path / "report.html"
    write_report([pages.evaluation("=1+1"), pages.evaluation("net")], path)
    assert sorted(row[0] for row in exported(browser, path)[1:]) == ["'=1+1", "net"]


def test_navigation_leads_to_sections(browser, models_page):
    browser.open(models_page)
    current = "document.querySelector('nav a[aria-current]').textContent"
    assert browser.run(current) == "Verdict"
    browser.run("document.querySelector('nav a[href=\"#reliability\"]').click()")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    below_navigation = browser.run("""
        document.querySelector('#reliability').getBoundingClientRect().top
          - document.querySelector('nav').getBoundingClientRect().bottom
    """)
    assert 0 <= below_navigation < 100
    assert browser.run("document.querySelector('nav').getBoundingClientRect().top") == 0
    assert browser.run(current) == "Reliability"


COLOURS = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((c) => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const card = light(style(".card").backgroundColor);
  const contrast = (text) => (Math.max(light(text), card) + 0.05) / (Math.min(light(text), card) + 0.05);
  const drawn = {
    text: style("p").color, quiet: style(".quiet").color, axis: style(".axis text").fill,
    bar: style("svg.reliability .accuracy").fill, gap: style("svg.reliability .over").fill,
    interval: style("svg.reliability .interval-bar").stroke, diagonal: style(".diagonal").stroke,
    dot: style(".dot").fill,
  };
  return {
    card,
    low: Object.keys(drawn).filter((key) => contrast(drawn[key]) < (/text|quiet|axis/.test(key) ? 4.5 : 3)),
    filtered: [...document.querySelectorAll("img, svg")]
      .filter((each) => getComputedStyle(each).filter !== "none").length,
  };
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_charts_have_the_colours_of_the_page_with_contrast(browser, models_page, dark):
    browser.open(models_page, dark=dark)
    found = browser.run(COLOURS)
    assert found["card"] < 0.1 if dark else found["card"] > 0.9
    assert (found["low"], found["filtered"]) == ([], 0)


def test_reliability_of_a_class_on_demand(browser, comparison_page):
    browser.open(comparison_page)
    assert browser.run("document.querySelectorAll('#class-charts svg').length") == 0
    browser.run("""
        document.getElementById("class-choice").selectedIndex = 1;
        document.getElementById("class-choice").dispatchEvent(new Event("change"));
    """)
    assert browser.run("document.querySelectorAll('#class-charts svg.reliability').length") == 6
    browser.point_at("#class-charts .bin")
    assert " predicted as " in browser.run("tip.textContent")
    assert browser.problems == []


def test_it_prints_in_light_colours_without_controls(browser, models_page):
    browser.open(models_page, dark=True, media="print")
    assert browser.run("getComputedStyle(document.querySelector('button.export')).display") == "none"
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert (
        browser.run("getComputedStyle(document.querySelector('.card')).backgroundColor")
        == "rgb(255, 255, 255)"
    )


def test_a_comparison_fits_a_printed_sheet(browser, comparison_page):
    browser.open(comparison_page, width=718, media="print")  # A4 with margins of 1 cm
    assert browser.run("document.documentElement.scrollWidth") == 718


def test_hostile_names_do_nothing(browser, tmp_path):
    path = tmp_path / "report.html"
    evaluations = [pages.evaluation(pages.HOSTILE), pages.evaluation("net")]
    write_report(evaluations, path, title=pages.HOSTILE)
    browser.open(path)
    assert browser.problems == []
    assert browser.run("document.querySelector('h1').textContent") == pages.HOSTILE
