"""The tables of a choice on the validation data, which a sweep or a tuning has made."""

from __future__ import annotations

from calibrant.evaluation.sweep import Sweep
from calibrant.evaluation.tuning import Tuning
from calibrant.printable import printable
from calibrant.reports.table_builders import comparison_table, figures_note
from calibrant.reports.tables import means_in_markdown, plain_markdown, print_table, to_markdown

Chosen = Sweep | Tuning


def validation_note(result: Chosen) -> str:
    """What the figures on the validation data mean."""
    fitted = "the same data, so that these figures are optimistic"
    best = " Best mean in bold." if len(result.validation.methods) > 1 else ""
    return figures_note(result.validation, "Validation data", fitted) + best


def chosen_note(result: Chosen) -> str:
    """What the test figures of the chosen setting mean."""
    note = figures_note(result.test, "Test data", "the validation data")
    return f"{note} Only the chosen setting was evaluated on the test data."


def markdown(result: Chosen) -> str:
    """The tables in Markdown."""
    validation, test = comparison_table(result.validation), comparison_table(result.test)
    lines = [f"# {plain_markdown(result.title)}", "", "## Validation data", ""]
    lines += [to_markdown(validation, "setting"), "", plain_markdown(validation_note(result)), ""]
    lines += [*(f"- {plain_markdown(remark)}" for remark in result.remarks()), ""]
    lines += ["## Test data", "", *means_in_markdown(test, chosen_note(result), "loss")]
    return "\n".join(lines)


def print_choice(result: Chosen, *, wide: bool = False) -> None:
    """Print the figures on the validation data, how the choice was made, and its test figures.

    ``wide`` prints all columns, however wide the terminal is.
    """
    leading = result.criterion.metric
    print_table(comparison_table(result.validation, leading), validation_note(result), wide=wide)
    for remark in result.remarks():
        print(printable(remark), flush=True)
    test = comparison_table(result.test, leading)
    print_table(test, f"{chosen_note(result)} {test.intervals_note}".rstrip(), wide=wide)
