"""Tables in README and the guide have the figures of the stored results."""

import json
import re
import runpy
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from calibrant import LOSSES
from calibrant.evaluation.comparison import Comparison, Method, mean_figure
from calibrant.evaluation.ranks import Standing
from calibrant.reports.verdict import p_words
from calibrant.training.leaderboard import Experiment, Leaderboard
from calibrant.training.recipe import Recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

BOARD = json.loads((RESULTS / "leaderboard" / "leaderboard.json").read_text())

# How a row of a table begins, and the experiment of the leaderboard with its figures.
EXPERIMENTS = {
    "CIFAR-100 with a long tail": "Long-tailed CIFAR-100, ResNet-32, 100 epochs",
    "digits with a long tail": "Long-tailed digits",
    **{name.removesuffix(", 50 epochs"): name for name in BOARD["experiments"]},
}
# What stands in each column after the first: a loss, or "best" for the published one with the lowest NLL.
TABLES = {
    "README.md": ["ce before", "ce after", "ada-scale before", "best before", "best after"],
    "docs/choosing.md": [
        "ce after", "ce before", "ada-scale before", "ada-scale after", "best before", "best after",
    ],
}  # fmt: skip


def nll(row):
    """The NLL of every loss before and after temperature scaling."""
    name = next(name for name in EXPERIMENTS if row.startswith(name))
    results = BOARD["experiments"][EXPERIMENTS[name]]["results"]
    return {
        state: {loss: round(each["nll"]["mean"], 3) for loss, each in results[state].items()}
        for state in ("before", "after")
    }


def rows(document):
    text = (ROOT / document).read_text()
    table = max(
        re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE), key=lambda part: part.count("best published")
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("document", TABLES)
def test_nll_is_that_of_the_results(document):
    table = rows(document)
    assert len(table) == len(BOARD["experiments"])
    for name, *cells in table:
        found = nll(name)
        for cell, column in zip(cells, TABLES[document], strict=True):
            loss, state = column.split()
            figures = found[state]
            if loss == "best":
                published = {key: value for key, value in figures.items() if key not in ("ce", "ada-scale")}
                best = min(published.values())
                figures = {"best": best}
                named = set(re.findall("`(.*?)`", cell))
                assert named == {key for key, value in published.items() if value == best}, (name, column)
            number = re.search(r"\d\.\d+", cell)
            if number is None:
                assert cell.startswith("not "), (name, column)
                assert loss not in figures, (name, column)
            else:
                assert float(number[0]) == figures[loss], (name, column)


def test_the_grid_of_the_leaderboard_has_every_loss():
    board = Leaderboard.load(ROOT / "benchmarks" / "leaderboard.toml")
    assert set(LOSSES) - set(board.experiments[0].losses) == {"nacl"}  # which needs labels of pixels


@pytest.mark.parametrize(("number", "key"), [(1, "ranks"), (2, "ranks-of-more")])
def test_the_ranks_of_the_leaderboard_are_those_of_the_results(number, key):
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    table = text.split("| loss | NLL + T |")[number].partition("\n\n")[0].splitlines()[2:]
    ranks = BOARD[key]
    columns = ["nll-after-temperature", "nll", "ece-after-temperature", "ece", "accuracy"]
    assert len(table) == len(ranks["nll"]["mean"])
    for row in table:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for column, cell in zip(columns, cells, strict=True):
            mean, (low, high) = (ranks[column][key][name.strip("`")] for key in ("mean", "intervals"))
            assert cell.replace("*", "") == f"{mean:.1f} [{low:.1f}, {high:.1f}]", (name, column)
    if key != "ranks":
        assert f"must be {ranks['nll']['critical_difference']:.1f} apart" in text
        assert all(ranks[column]["p_value"] < 0.05 for column in columns)
        assert "The ranks differ significantly by every criterion." in text
        table = text.partition("| significantly better than |")[2].partition("\n\n")[0].splitlines()[2:]
        cells = [[re.findall(r"`(.*?)`", cell) or cell.strip() for cell in row.split("|")] for row in table]
        said = {(by, better, worse) for _, by, first, last, _ in cells for better in first for worse in last}
        names = {"nll": "NLL", "accuracy": "accuracy"}
        assert said == {(names[column], *pair) for column in columns for pair in ranks[column]["significant"]}
        return
    for column in columns[:2]:
        assert p_words(ranks[column]["p_value"]) in text
    assert f"critical difference is {ranks['nll']['critical_difference']:.1f}" in text


@pytest.mark.parametrize(
    ("heading", "accuracy", "experiment"),
    [
        ("VOC 2012 at 256 pixels, one seed:", "mean_iou", "VOC 2012 at 256 pixels, DeepLabV3, 30 epochs"),
        ("CIFAR-100 with 350 epochs, one seed.", "accuracy", "CIFAR-100, ResNet-50, 350 epochs"),
    ],
)
def test_the_tables_of_one_seed_are_those_of_the_results(heading, accuracy, experiment):
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    table = text.partition(heading)[2].partition("| loss |")[2].partition("\n\n")[0].splitlines()[2:]
    results = BOARD["experiments"][experiment]["results"]
    assert len(table) == len(results["runs"])
    for row in table:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        before, after = (results[state][name.strip("`")] for state in ("before", "after"))
        (temperature,) = results["runs"][name.strip("`")]["temperature"]
        assert cells == [
            f"{100 * before[accuracy]['mean']:.1f}",
            *(f"{each['nll']['mean']:.3f}" for each in (before, after)),
            *(f"{100 * each['ece']['mean']:.1f}" for each in (before, after)),
            f"{temperature:.2f}",
        ]


def test_the_detection_that_the_leaderboard_names_is_that_of_the_results():
    text = " ".join((ROOT / "docs" / "leaderboard.md").read_text().split())
    runs = BOARD["experiments"]["CIFAR-100, ResNet-50, 30 epochs"]["results"]["runs"]
    before, after = (
        {loss: 100 * statistics.mean(*each[state].values()) for loss, each in runs.items()}
        for state in ("detection", "detection_after")
    )
    first, second = sorted(before, key=before.get, reverse=True)[:2]
    assert (
        f"`{first}` (AUROC {before[first]:.1f}) and `{second}` ({before[second]:.1f}) are best "
        f"before a temperature (cross-entropy {before['ce']:.1f})"
    ) in text
    best = max(after, key=after.get)
    assert f"`{best}` after it ({after[best]:.1f}; cross-entropy {after['ce']:.1f})" in text


def test_the_table_of_ada_scale_is_that_of_the_results():
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    table = text.partition("| data | accuracy: `ce` |")[2].partition("\n\n")[0].splitlines()[2:]
    compared = [name for name, each in BOARD["experiments"].items() if "ada-scale" in each["results"]["runs"]]
    assert len(table) == len(compared)
    for row, name in zip(table, compared, strict=True):
        first, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        assert first.startswith(name)
        results = BOARD["experiments"][name]["results"]
        before, after = results["before"], results["after"]
        accuracy = "mean_iou" if "mean IoU" in first else "accuracy"
        nlls = [[run["nll"] for run in results["runs"][loss][state]] for loss, state in
                (("ada-scale", "before"), ("ce", "after"))]  # fmt: skip
        p_value = ttest_rel(*nlls).pvalue if len(nlls[0]) > 1 else None
        digits = 3 if p_value is not None and p_value < 0.01 else 2
        assert cells == [
            *(f"{100 * before[loss][accuracy]['mean']:.1f}" for loss in ("ce", "ada-scale")),
            f"{after['ce']['nll']['mean']:.3f}",
            f"{before['ada-scale']['nll']['mean']:.3f}",
            "–" if p_value is None else f"{p_value:.{digits}f}",
            f"{100 * after['ce']['ece']['mean']:.1f}",
            f"{100 * before['ada-scale']['ece']['mean']:.1f}",
        ]


def test_the_table_of_cifar_100_is_that_of_the_results():
    text = (ROOT / "docs" / "leaderboard.md").read_text()
    table = text.partition("| loss | accuracy | NLL | NLL + T |")[2].partition("\n\n")[0].splitlines()[2:]
    results = BOARD["experiments"]["CIFAR-100, ResNet-50, 30 epochs"]["results"]
    after = results["after"]
    best = sorted(after, key=lambda loss: after[loss]["nll"]["mean"])[: len(table)]
    columns = [
        ("before", "accuracy"),
        ("before", "nll"),
        ("after", "nll"),
        ("before", "ece"),
        ("after", "ece"),
    ]
    assert len(table) == 6
    for row, loss in zip(table, best, strict=True):
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        figures = [(metric, results[state][loss][metric]) for state, metric in columns]
        assert (name.strip("`"), cells) == (
            loss,
            [
                f"{each['mean']:.3f} ± {each['std']:.3f}" if metric == "nll"
                else f"{100 * each['mean']:.1f} ± {100 * each['std']:.1f}"
                for metric, each in figures
            ],
        )  # fmt: skip


def scaled(runs, metric):
    return [run[metric] * (1 if metric.endswith("nll") else 100) for run in runs.values()]


def mean(runs, metric, digits):
    return f"{statistics.fmean(scaled(runs, metric)):.{digits}f}"


def deviation(runs, metric, digits):
    return f"{statistics.stdev(scaled(runs, metric)):.{digits}f}"


def test_the_table_of_margins_is_that_of_the_results():
    text = (ROOT / "docs" / "losses.md").read_text()
    table = text.partition("| data | validation NLL |")[2].partition("\n\n")[0].splitlines()[2:]
    results = json.loads((RESULTS / "ada-scale-margin.json").read_text())
    assert len(table) == len(results)
    for row, (name, losses) in zip(table, results.items(), strict=True):
        first, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        accuracy = "mean_iou" if name.startswith("VOC") else "accuracy"
        found = [
            mean(losses[loss], metric, digits)
            for metric, digits in (("validation_nll", 3), (accuracy, 1), ("nll", 3), ("ece", 1))
            for loss in ("ada-scale", "ada-scale[margin=50]")
        ]
        assert (first, [cell.strip("*") for cell in cells]) == (name, found)
        lowest = min(found[:2], key=float)
        assert [cell.startswith("**") for cell in cells[:2]] == [cell == lowest for cell in found[:2]]


def test_the_table_of_long_tailed_cifar_100_is_that_of_the_results():
    results = json.loads((RESULTS / "cifar100-lt-100-epochs" / "calibrators.json").read_text())
    text = (RESULTS / "README.md").read_text()
    table = text.partition("| calibrator of `ce` |")[2].partition("\n\n")[0].splitlines()[2:]
    columns = [("accuracy", 1), ("nll", 3), ("ece", 1), ("classwise_ece", 2)]
    expected = {
        name: [f"{mean(runs, *each)} ± {deviation(runs, *each)}" for each in columns]
        for name, runs in results.items()
    }
    found = [[cell.strip() for cell in row.strip(" |").split("|")] for row in table]
    assert {name: cells for name, *cells in found} == expected
    guide = (ROOT / "docs" / "choosing.md").read_text()
    rows = guide.partition("| Long-tailed CIFAR-100 |")[2].partition("\n\n")[0].splitlines()
    found = [[cell.strip(" `*") for cell in row.strip("|").split("|")][-4:] for row in rows]
    assert {name: cells for name, *cells in found[:-1]} == {
        name: [mean(runs, *each) for each in columns[:3]] for name, runs in results.items()
    }
    ours = BOARD["experiments"]["Long-tailed CIFAR-100, ResNet-32, 100 epochs"]["results"]["before"][
        "ada-scale"
    ]
    accuracy, nll, ece = (ours[metric]["mean"] for metric in ("accuracy", "nll", "ece"))
    assert found[-1] == ["none", f"{100 * accuracy:.1f}", f"{nll:.3f}", f"{100 * ece:.1f}"]


@pytest.fixture(scope="module")
def program():
    """The names in the program that merges runs into the published leaderboard."""
    return runpy.run_path(str(ROOT / "benchmarks" / "leaderboard_tables.py"))


def test_the_tables_of_the_leaderboard_are_those_of_its_figures(program, monkeypatch, tmp_path, capsys):
    published = shutil.copytree(RESULTS / "leaderboard", tmp_path / "published")
    (published / "leaderboard.md").unlink()
    monkeypatch.setitem(program["main"].__globals__, "PUBLISHED", published)
    monkeypatch.setattr(sys, "argv", ["leaderboard_tables.py", str(tmp_path / "no-runs")])
    program["main"]()
    for name in ("leaderboard.md", "leaderboard.json"):
        assert (published / name).read_text() == (RESULTS / "leaderboard" / name).read_text()
    assert "digits: 78 runs, 0 missing" in capsys.readouterr().out


SEEDS = (0, 1, 2)
INTERVAL = (0.5, 1.5)


def experiment(losses=("ce", "ls"), seeds=SEEDS):
    return Experiment("data", Recipe.load("digits"), losses, seeds)


def published(missing=()):
    """Two losses; the NLL of seed s is s, plus 10 for the second loss."""

    def run(loss):
        values = [
            seed + 10.0 * (loss == "ls")
            for seed in SEEDS
            if (loss, seed) not in [each[:2] for each in missing]
        ]
        metrics = [{"nll": value} for value in values]
        return {
            "before": metrics, "after": metrics, "temperature": values, "detection": {"x": values},
            "detection_after": {"x": values},
        }  # fmt: skip

    figure = vars(mean_figure([1.0])) | {"interval": INTERVAL, "p_value": 0.5}
    summary = {loss: {"nll": dict(figure)} for loss in ("ce", "ls")}
    for figure in summary.values():
        del figure["nll"]["better"]
    return {
        "results": {
            "seeds": list(SEEDS), "first": "ce", "samples": 7, "dense": False, "columns": ["nll"],
            "before": summary, "after": summary, "runs": {loss: run(loss) for loss in ("ce", "ls")},
        },
        "missing": [list(each) for each in missing],
    }  # fmt: skip


def here(program, runs, missing, seeds=SEEDS):
    """The runs in a folder: their NLL by loss and seed."""
    methods = tuple(
        Method(loss, tuple(program["evaluation"]({"nll": value}, 7) for value in values), (), (), {}, {})
        for loss, values in runs.items()
    )
    methods = tuple(
        replace(each, after=each.before, temperatures=(9.0,) * len(each.before), detection={"x": (9.0,) * 3},
                detection_after={"x": (9.0,) * 3})
        for each in methods
    )  # fmt: skip
    comparison = Comparison("data", seeds, methods) if methods else None
    return Standing("data", "data", comparison, missing)


def nlls(standing):
    return {each.name: [run.nll for run in each.before] for each in standing.comparison.methods}


def absent(*losses, seeds=SEEDS):
    return {(loss, seed): "not done" for loss in losses for seed in seeds}


def test_without_new_runs_the_published_intervals_and_tests_stay(program):
    merged = program["merged"](experiment(), here(program, {}, absent("ce", "ls")), published())
    assert nlls(merged) == {"ce": [0, 1, 2], "ls": [10, 11, 12]}
    assert merged.comparison.figures("nll")["ls"].p_value == 0.5
    assert merged.missing == {}


def test_new_runs_replace_published_ones_seed_by_seed(program):
    runs = here(program, {"ls": [99.0]}, absent("ce") | {("ls", 0): "not done", ("ls", 2): "not done"})
    merged = program["merged"](experiment(), runs, published())
    assert nlls(merged) == {"ce": [0, 1, 2], "ls": [10, 99, 12]}
    assert merged.comparison.methods[1].temperatures == (10.0, 9.0, 12.0)
    assert merged.comparison.methods[1].detection == {"x": (10.0, 9.0, 12.0)}
    assert merged.comparison.figures("nll")["ls"].p_value is None
    assert merged.comparison.methods[0].before[0].samples == 7


def test_a_new_loss_leaves_the_intervals_and_tests_of_the_others(program):
    more = experiment(("ce", "ls", "ecp"))
    runs = here(program, {"ecp": [5.0]}, absent("ce", "ls") | absent("ecp", seeds=(1, 2)))
    merged = program["merged"](more, runs, published())
    figures = merged.comparison.figures("nll")
    assert nlls(merged) == {"ce": [0, 1, 2], "ls": [10, 11, 12], "ecp": [5]}
    assert (figures["ls"].p_value, figures["ls"].interval) == (0.5, INTERVAL)
    assert (figures["ecp"].p_value, figures["ecp"].mean) == (None, 5)
    assert [figures[name].better for name in ("ce", "ls", "ecp")] == [False, False, False]
    assert merged.comparison.figures("nll", after=True)["ls"].p_value == 0.5


def test_no_loss_is_tested_against_a_first_loss_with_new_and_published_runs(program):
    runs = here(program, {"ce": [4.0]}, absent("ls") | absent("ce", seeds=(1, 2)))
    figures = program["merged"](experiment(), runs, published()).comparison.figures("nll")
    assert (figures["ce"].interval, figures["ce"].mean) == (None, pytest.approx(7 / 3))
    assert (figures["ls"].interval, figures["ls"].p_value) == (INTERVAL, None)


def test_published_tests_are_against_the_published_first_loss(program):
    runs = here(program, {}, absent("ls", "ce"))
    figures = program["merged"](experiment(("ls", "ce")), runs, published()).comparison.figures("nll")
    assert list(figures) == ["ls", "ce"]
    assert [each.p_value for each in figures.values()] == [None, None]
    assert figures["ce"].interval == INTERVAL


def test_runs_that_neither_has_are_missing_with_the_reason(program):
    reasons = [("ls", 1, "diverged in epoch 3")]
    merged = program["merged"](experiment(), here(program, {}, absent("ce", "ls")), published(reasons))
    assert nlls(merged) == {"ce": [0, 1, 2], "ls": [10, 12]}
    assert merged.missing == {("ls", 1): "diverged in epoch 3"}


def test_a_run_that_failed_now_is_not_replaced_by_an_earlier_one(program):
    failed = absent("ce", "ls") | {("ls", 2): "weights became infinite"}
    merged = program["merged"](experiment(), here(program, {}, failed), published())
    assert nlls(merged)["ls"] == [10, 11]
    assert merged.missing == {("ls", 2): "weights became infinite"}


def test_the_grid_may_have_changed(program):
    fewer = experiment(("ce",), (1, 2))
    merged = program["merged"](fewer, here(program, {}, absent("ce", seeds=(1, 2))), published())
    assert nlls(merged) == {"ce": [1, 2]}
    more = experiment(("ce", "ls", "ecp"), (0, 1, 2, 3))
    merged = program["merged"](
        more, here(program, {}, absent("ce", "ls", "ecp", seeds=range(4))), published()
    )
    assert nlls(merged) == {"ce": [0, 1, 2], "ls": [10, 11, 12]}
    assert set(merged.missing) == {("ce", 3), ("ls", 3), *(("ecp", seed) for seed in range(4))}
    new = here(program, {"ce": [5.0]}, {})
    assert program["merged"](experiment(("ce",), (0,)), new, None) is new


def test_published_runs_of_another_recipe_are_refused(program, tmp_path):
    grid = Leaderboard("x", (experiment(),))
    folder = tmp_path / "data"
    folder.mkdir()
    recipe = replace(Recipe.load("digits"), loss="ls", seed=5)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    program["check_recipes"](grid, tmp_path)
    (folder / "recipe.toml").write_text(replace(recipe, epochs=3).to_toml())
    with pytest.raises(SystemExit, match="is not the recipe of 'data' in leaderboard"):
        program["check_recipes"](grid, tmp_path)


def test_logs_of_new_runs_are_copied(program, tmp_path):
    grid = Leaderboard("x", (experiment(("ce", "ls"), (1, 2)),))
    for entry in grid.entries(tmp_path / "runs")[:3]:
        entry.folder.mkdir(parents=True)
        for name in ("log.csv", "recipe.toml"):
            (entry.folder / name).write_text(entry.recipe.to_toml())
        if entry.recipe.loss == "ce":
            (entry.folder / "leaderboard.json").write_text('{"detected": {}}')
    program["copy_logs"](grid, tmp_path / "runs", tmp_path / "logs")
    found = sorted(path.name for path in (tmp_path / "logs" / "data").iterdir())
    assert found == ["ce-seed1.csv", "ce-seed2.csv", "recipe.toml"]
    assert Recipe.load(tmp_path / "logs" / "data" / "recipe.toml").seed == 1


def test_the_table_of_all_losses_in_the_guide_is_that_of_the_results():
    text = (ROOT / "docs" / "choosing.md").read_text()
    header = "| loss | accuracy | NLL | NLL + T | ECE | ECE + T | digits: NLL |"
    table = text.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    tail, balanced = (BOARD["experiments"][name]["results"] for name in ("Long-tailed digits", "digits"))
    columns = [
        *((tail, state, metric) for state, metric in (
            ("before", "accuracy"), ("before", "nll"), ("after", "nll"), ("before", "ece"), ("after", "ece"),
        )),
        *((balanced, *each) for each in (("before", "nll"), ("after", "nll"), ("after", "ece"))),
    ]  # fmt: skip
    losses = []
    for row in table:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        losses.append(name.strip("`"))
        figures = [(metric, results[state][losses[-1]][metric]) for results, state, metric in columns]
        assert cells == [
            f"{each['mean']:.3f} ± {each['std']:.3f}"
            if metric == "nll"
            else f"{100 * each['mean']:.1f} ± {100 * each['std']:.1f}"
            for metric, each in figures
        ], name
    assert sorted(losses) == sorted(tail["runs"])
    assert f"--losses {','.join(losses)} --seeds 0,1,2 --output digits-lt" in text
