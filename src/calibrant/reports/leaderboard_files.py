"""The files of a leaderboard: ranks over all experiments, and the tables of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrant.extras import require

require("report", "jinja2", "matplotlib", purpose=__name__)

from calibrant.atomic import replace_files
from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.criterion import Criterion
from calibrant.evaluation.ranks import Ranks, Standing, rankings, widest
from calibrant.metrics import METRICS
from calibrant.printable import counted
from calibrant.reports import charts, plots
from calibrant.reports.comparison_page import write_comparison
from calibrant.reports.page import template
from calibrant.reports.plots.drawing import default_style, figure_of, png, rows_height, svg
from calibrant.reports.table_builders import comparison_note, comparison_table, state_label
from calibrant.reports.tables import (
    HTML,
    Cell,
    Column,
    Table,
    interval_text,
    plain_markdown,
    tex,
    to_latex,
    to_markdown,
)
from calibrant.reports.verdict import listed, p_words

FILES = ("leaderboard.json", "leaderboard.md", "leaderboard.tex", "leaderboard.html")
"""The files that `write_leaderboard` writes beside plots and the files of each experiment."""


@dataclass(frozen=True)
class Ranking:
    """Ranks over some experiments, by several criteria."""

    heading: str  # the heading of the table
    name: str  # how the names of the plots begin, and the key in the JSON
    standings: Sequence[Standing]  # the experiments
    found: Mapping[Criterion, Ranks]  # not empty

    @property
    def table(self) -> Table:
        """The mean ranks of all methods by each criterion."""
        names = tuple(next(iter(self.found.values())).mean)

        def cell(ranks: Ranks, name: str) -> Cell:
            mean = ranks.mean[name]
            best = f"{mean:.1f}" == f"{min(ranks.mean.values()):.1f}"
            return Cell(mean, f"{mean:.1f}", interval_text(ranks.intervals[name], False, decimals=1), best)

        columns = (
            Column(str(criterion), _label(criterion), tuple(cell(ranks, name) for name in names), "", False)
            for criterion, ranks in self.found.items()
        )
        return Table(names, tuple(columns))

    @property
    def note(self) -> str:
        """What the table shows, and what it leaves out."""
        ranks, standings = next(iter(self.found.values())), self.standings
        text = f"Mean ranks over {counted(len(ranks.data), 'experiment')} ({'; '.join(ranks.data)}), with "
        text += "95 % intervals over experiments and seeds; 1 is best."
        methods = {method.name for each in standings if each.comparison for method in each.comparison.methods}
        if left := len(methods - ranks.mean.keys()):
            text += f" {left} losses have no rank, because they lack results in some of these."
        if others := [each.name for each in standings if each.ranked and each.name not in ranks.data]:
            text += f" Too few results yet: {'; '.join(others)}."
        return text

    @property
    def statements(self) -> list[str]:
        """What is significant, by each criterion."""
        return [f"By {_label(criterion)}: {_statement(ranks)}" for criterion, ranks in self.found.items()]


def all_rankings(standings: Sequence[Standing]) -> list[Ranking]:
    """The ranks of the losses that all experiments share, and of more losses over fewer experiments."""
    groups = (
        ("Ranks", "ranks", standings),
        ("Ranks of more losses over fewer experiments", "ranks-of-more", widest(standings)),
    )
    return [Ranking(*group, found) for group in groups if (found := rankings(group[-1]))]


def experiment_table(comparison: Comparison) -> Table:
    """The table of a comparison, with a column for the number of seeds if some are missing."""
    table = comparison_table(comparison)
    numbers = [len(method.before) for method in comparison.methods]
    if set(numbers) == {len(comparison.seeds)}:
        return table
    column = Column("seeds", "Seeds", tuple(Cell(float(number), str(number)) for number in numbers))
    return replace(table, columns=(column, *table.columns))


def _statement(ranks: Ranks) -> str:
    lowest = min(ranks.mean.values())
    best = [name for name, mean in ranks.mean.items() if mean == lowest]
    have = "has" if len(best) == 1 else "have"
    text = f"{listed(best)} {have} the best mean rank, {lowest:.1f} of {len(ranks.mean)}. "
    if len(ranks.data) == 1:
        return f"{text}One data set is too few to test ranks."
    test = f"Friedman's test: {p_words(ranks.p_value)}"
    if ranks.p_value >= 0.05:
        return f"{text}The ranks do not differ significantly ({test})."
    worse = [other for name, other in ranks.significant() if name == best[0]]
    which = "no loss is significantly worse"
    if worse:
        which = f"significantly worse than {best[0]}: {listed(worse)}"
    text += f"The ranks differ significantly ({test}); {which}"
    return f"{text} (critical difference {ranks.critical_difference:.1f})."


def _label(criterion: Criterion) -> str:
    return METRICS[criterion.metric].label + state_label("temperature" if criterion.after else "")


def markdown(title: str, standings: Sequence[Standing], ranked: Sequence[Ranking]) -> str:
    """The leaderboard in Markdown."""
    lines = [f"# {plain_markdown(title)}", ""]
    for each in ranked:
        table, note = each.table, plain_markdown(each.note)
        lines += [f"## {each.heading}", "", to_markdown(table, "loss"), "", note, ""]
        lines += [f"- {plain_markdown(sentence)}" for sentence in each.statements]
        lines += ["", to_markdown(table.intervals(), "loss"), ""]
    for standing in standings:
        lines += [f"## {plain_markdown(standing.name)}", ""]
        if standing.comparison is None:
            lines += ["No run is done yet.", ""]
        else:
            table, note = experiment_table(standing.comparison), comparison_note(standing.comparison)
            lines += [to_markdown(table, "loss"), "", plain_markdown(note), ""]
        if standing.missing:
            lines += [f"Missing runs: {len(standing.missing)}", ""]
            lines += [*(f"- {plain_markdown(line)}" for line in standing.missing_lines()), ""]
    return "\n".join(lines)


def latex(standings: Sequence[Standing], ranked: Sequence[Ranking]) -> str:
    """The tables in LaTeX, for the package booktabs."""
    tables = [(each.note, each.table) for each in ranked]
    tables += [
        (f"{each.name}. {comparison_note(each.comparison)}", experiment_table(each.comparison))
        for each in standings
        if each.comparison is not None
    ]
    return "\n".join(f"% {tex(note)}\n{to_latex(table, 'Loss')}\n" for note, table in tables)


def to_json(title: str, standings: Sequence[Standing], ranked: Sequence[Ranking]) -> str:
    """The ranks, the results of every experiment, and the missing runs."""

    def plain(ranks: Ranks) -> dict[str, Any]:
        values = vars(ranks) | {"significant": ranks.significant()}
        return {
            key: None if value != value or value == float("inf") else value for key, value in values.items()
        }

    experiments = {
        each.name: {
            "results": None if each.comparison is None else json.loads(each.comparison.to_json()),
            "missing": [[method, seed, reason] for (method, seed), reason in each.missing.items()],
        }
        for each in standings
    }
    tables: dict[str, Any] = {"ranks": {}}  # there even if nothing is ranked
    for each in ranked:
        tables[each.name] = {str(criterion): plain(ranks) for criterion, ranks in each.found.items()}
    return json.dumps({"title": title, **tables, "experiments": experiments}, indent=1, allow_nan=False)


def write_leaderboard(
    title: str,
    standings: Sequence[Standing],
    folder: str | os.PathLike[str],
    *,
    report: Callable[[str], None] | None = None,
) -> list[Ranking]:
    """Write `FILES`, ``plots/ranks-*.png``, and in the folder of each experiment those of its comparison.

    ``report`` is called with a line about each experiment before its files are written. Those of many losses
    take minutes. Returns `all_rankings`.
    """
    target = Path(folder)
    ranked = all_rankings(standings)
    for each in standings:
        if each.comparison is not None:
            if report is not None:
                report(f"{each.name}: writing tables and plots of {len(each.comparison.methods)} losses")
            write_comparison(each.comparison, target / each.folder)
    page = template("leaderboard.html.jinja").render(
        title=title,
        facts=_facts(standings),
        rankings=[(each, _pictures(each, target / "plots")) for each in ranked],
        sections=[_section(each, target) for each in standings],
        marks=HTML,
    )
    contents = (
        to_json(title, standings, ranked) + "\n",
        markdown(title, standings, ranked),
        latex(standings, ranked),
        page,
    )
    replace_files(target, dict(zip(FILES, contents, strict=True)))
    drawn = {f"{each.name}-{criterion}.png" for each in ranked for criterion in each.found}
    for plot in (target / "plots").glob("ranks-*.png"):
        if plot.name not in drawn:  # of a ranking that is no longer there
            plot.unlink()
    return ranked


def _pictures(ranking: Ranking, folder: Path) -> list[tuple[str, bytes]]:
    """The captions and pictures of a ranking; the pictures are also written to the folder as PNG."""
    pictures = []
    with default_style():
        for criterion, ranks in ranking.found.items():
            height = 1.3 + rows_height(ranks.mean)
            figure = figure_of(plots.mean_ranks, ranks, height=height, title=_label(criterion))
            caption = (
                f"Mean ranks by {_label(criterion)}, with 95 % intervals. Losses that a bar at the right "
            )
            caption += "connects do not differ significantly"
            pictures.append((caption, svg(figure)))
            replace_files(folder, {f"{ranking.name}-{criterion}.png": png(figure)})
    return pictures


def _facts(standings: Sequence[Standing]) -> list[str]:
    done = sum(
        len(method.before) for each in standings if each.comparison for method in each.comparison.methods
    )
    missing = sum(len(each.missing) for each in standings)
    return [f"{len(standings)} experiments", f"{done} runs", *([f"{missing} missing"] if missing else [])]


def _section(standing: Standing, folder: Path) -> dict[str, Any]:
    comparison = standing.comparison
    runs = sorted(path.parent.name for path in (folder / standing.folder / "runs").glob("*/recipe.toml"))
    return {
        "name": standing.name,
        "folder": standing.folder,
        "missing": standing.missing_lines(),
        "number": len(standing.missing),
        "runs": runs,
        "table": None if comparison is None else experiment_table(comparison),
        "note": "" if comparison is None else comparison_note(comparison),
        "scatter": None if comparison is None else charts.accuracy_against_error(comparison),
    }
