"""The files of a tuning show every trial, and test figures of the chosen one only."""

import json
from dataclasses import replace

import pytest

from calibrant.reports.chosen import TUNING_FILES, epochs, history, values, write_tuning
from tests.evaluation.test_tuning import tuning


def drawn(ax):
    """The points and lines by their labels."""
    return {line.get_label(): line.get_xydata().tolist() for line in ax.lines if line.get_label()[0] != "_"}


def test_the_history_has_every_trial_and_the_best_value_so_far():
    found = tuning()
    (ax,) = history(found).axes
    lines = drawn(ax)
    assert [x for x, _ in lines["best so far"]] == [0, 1, 4]
    assert [y for _, y in lines["best so far"]] == list(found.best_so_far().values())
    assert [x for x, _ in lines["finished"]] == [1, 4]
    assert [x for x, _ in lines["not tuned"]] == [0]
    assert [x for x, _ in lines["stopped early"]] == [2]
    assert [x for x, _ in lines["failed"]] == [3]
    assert lines["chosen"] == [[found.chosen_trial.number, found.chosen_trial.value]]
    assert ax.get_ylabel() == "Validation NLL"


def test_every_hyperparameter_has_a_panel():
    found = tuning("ece")
    first, second = values(found).axes
    assert (first.get_xlabel(), second.get_xlabel()) == ("margin", "weight")
    assert (first.get_xscale(), second.get_xscale()) == ("log", "linear")
    assert first.get_ylabel() == "Validation ECE (%)"
    ((place, height),) = drawn(first)["chosen"]
    assert (place, height) == (found.chosen_trial.values["margin"], 100 * found.chosen_trial.value)
    assert [x for x, _ in drawn(second)["stopped early"]] == [0.9]


def test_the_curves_over_epochs_end_where_a_trial_was_stopped():
    found = tuning()
    (ax,) = epochs(found).axes
    lines = drawn(ax)
    assert lines["stopped early"] == [[1, 2.0]]
    chosen = f"chosen (trial {found.chosen_trial.number})"
    assert [y for _, y in lines[chosen]] == list(found.chosen_trial.epochs)
    assert lines["not tuned"][0] == [1, 1.5]


@pytest.mark.parametrize("logged", [True, False])
def test_files_are_written(logged, tmp_path, request):
    found = tuning()
    if not logged:
        request.getfixturevalue("blank_pictures")  # the other case has drawn the same
        found = replace(found, trials=tuple(replace(trial, epochs=()) for trial in found.trials))
    write_tuning(found, tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert files == {name for name in TUNING_FILES if logged or "epochs" not in name}
    assert json.loads((tmp_path / "tune.json").read_text()) == json.loads(found.to_json())
    text = (tmp_path / "tune.md").read_text()
    assert f"- Chosen on the validation data: {found.chosen}" in text
    page = (tmp_path / "tune.html").read_text()
    assert page.count('<img class="diagram"') == 2 + logged
    assert f"<summary>{2 + logged} more pictures: the history of the trials</summary>" in page
    assert page.count('<svg class="chart reliability"') == 2
    assert found.chosen in page
