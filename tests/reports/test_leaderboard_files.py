"""The page and the tables of a leaderboard."""

import json

import pytest
from matplotlib.figure import Figure

from calibrant.evaluation.comparison import Comparison, Method
from calibrant.evaluation.criterion import Criterion
from calibrant.evaluation.ranks import Standing, rank_methods, rankings
from calibrant.reports import leaderboard_files
from calibrant.reports.leaderboard_files import Ranking, write_leaderboard
from calibrant.reports.plots import drawing
from tests.programs import draw_blank
from tests.reports.chromium import CHROMIUM, Browser
from tests.reports.test_browser import BEYOND, NAMES, evaluation_of

BEST, MISSING = NAMES[1], ("ls", 0)


def ranking(found, standings=()):
    return Ranking("Ranks", "ranks", standings, found)


@pytest.fixture(scope="module")
def standings():
    def comparison(title):
        methods = tuple(
            Method(
                name,
                tuple(evaluation_of(name, seed, scale) for seed in (0, 1)),
                tuple(evaluation_of(name, seed, 1.0) for seed in (0, 1)),
                (scale, scale),
            )
            for name, scale in zip(NAMES, (5.0, 1.0, 2.0), strict=True)
        )
        return Comparison(title, (0, 1), methods)

    easy = Standing("easy", "easy", comparison("easy"), {MISSING: "not done"})
    return [easy, Standing("hard", "hard", comparison("hard"), {}), Standing("none", "none", None, {})]


@pytest.fixture(scope="module")
def folder(standings, tmp_path_factory):
    found = tmp_path_factory.mktemp("leaderboard")
    run = found / "easy" / "runs" / "ce-seed0"
    run.mkdir(parents=True)
    (run / "recipe.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_saved", drawing._saved)  # as it was, afterwards
        draw_blank()
        patch.setattr("calibrant.reports.comparison_page._diagrams", lambda _: Figure())
        write_leaderboard("A leaderboard", standings, found)
    return found


def test_files(folder):
    for name in leaderboard_files.FILES:
        assert BEST.partition("[")[0] in (folder / name).read_text()
    plain = json.loads((folder / "leaderboard.json").read_text())
    assert plain["ranks"]["nll"]["mean"] == {BEST: 1.0, NAMES[2]: 2.0, "ce": 3.0}
    assert plain["experiments"]["easy"]["missing"] == [["ls", 0, "not done"]]
    assert plain["experiments"]["none"]["results"] is None
    text = (folder / "leaderboard.md").read_text()
    assert f"| {BEST} | " in text.replace("\\", "")
    assert "No run is done yet." in text
    assert len(list((folder / "plots").glob("ranks-*.png"))) == 5
    assert (folder / "easy" / "report.html").is_file()


def test_statements_say_what_is_significant(standings):
    found = rankings(standings)
    said = dict(zip(found, ranking(found).statements, strict=True))
    assert said[Criterion("nll")].startswith(f"By NLL: {BEST} has the best mean rank, 1.0 of 3.")
    assert "do not differ significantly" in said[Criterion("nll")]  # two data sets agree by chance
    assert "do not differ significantly" in said[Criterion("accuracy")]
    alone = rankings(standings[:1])
    assert ranking(alone).statements[0].endswith("One data set is too few to test ranks.")


def test_an_experiment_that_has_just_begun_does_not_take_the_ranks_away(standings):
    easy, hard, none = standings
    begun = Comparison("new", (0, 1), hard.comparison.methods[:1])
    more = [easy, hard, Standing("new", "new", begun, {}), none]
    found = rankings(more)
    assert found[Criterion("nll")].data == ("easy", "hard")
    assert "Too few results yet: new; none." in ranking(found, more).note


@pytest.mark.usefixtures("blank_pictures", "blank_diagrams")
def test_losses_that_some_experiments_lack_have_ranks_over_the_others(standings, tmp_path):
    easy, hard, none = standings
    other = Comparison("other", (0, 1), hard.comparison.methods[:2])
    lacking = [easy, hard, Standing("other", "other", other, {}), none]
    shared, more = leaderboard_files.all_rankings(lacking)
    assert shared.found[Criterion("nll")].data == ("easy", "hard", "other")
    assert list(shared.found[Criterion("nll")].mean) == [BEST, "ce"]
    assert more.found[Criterion("nll")].data == ("easy", "hard")
    assert more.found[Criterion("nll")].mean == rankings([easy, hard])[Criterion("nll")].mean
    said = []
    write_leaderboard("A leaderboard", lacking, tmp_path, report=said.append)
    assert said[-1] == "other: writing tables and plots of 2 losses"
    plain = json.loads((tmp_path / "leaderboard.json").read_text())
    assert len(plain["ranks"]["nll"]["mean"]) == 2
    assert len(plain["ranks-of-more"]["nll"]["mean"]) == 3
    assert f"## {more.heading}" in (tmp_path / "leaderboard.md").read_text()
    assert f">{more.heading}</h2>" in (tmp_path / "leaderboard.html").read_text()
    assert len(list((tmp_path / "plots").glob("ranks-of-more-*.png"))) == 5


def test_equal_ranks_are_named_together(standings):
    found = rankings(standings)
    same = rank_methods({name: {"a": [1.0], "b": [1.0]} for name in "xy"}, higher_is_better=False)
    assert (
        ranking({**found, Criterion("nll"): same})
        .statements[1]
        .startswith("By NLL: a and b have the best mean rank, 1.5 of 2.")
    )


def test_experiments_may_stay_out_of_the_ranks(standings):
    easy, hard, none = standings
    unranked = [easy, Standing(hard.name, hard.folder, hard.comparison, {}, ranked=False), none]
    assert rankings(unranked)[Criterion("nll")].data == ("easy",)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_page_in_a_browser(folder, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        for width in (390, 1280):
            browser.open(folder / "leaderboard.html", width=width)
            assert browser.run(f"{BEYOND}({width})") == [width]
            assert browser.problems == []
        names = browser.run("""
            (() => {
              document.querySelectorAll("#ranks th button")[0].click();
              return [...document.querySelectorAll("#ranks tbody th")].map((cell) => cell.textContent);
            })()
        """)
        assert names == sorted(NAMES)
        links = browser.run(
            "[...document.querySelectorAll('main a')].map((link) => link.getAttribute('href'))"
        )
        assert "easy/report.html" in links
        assert "easy/runs/ce-seed0/recipe.toml" in links
    finally:
        browser.close()
