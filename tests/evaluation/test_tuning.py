"""What a tuning says about its trials."""

import json

from calibrant.evaluation.chosen import Trial, Tuning
from calibrant.evaluation.comparison import Comparison
from calibrant.evaluation.criterion import Criterion
from tests.reports.test_comparison_page import method

SPACE = (("margin", 1.0, 30.0, True), ("weight", 0.0, 1.0, False))


def tuning(by="nll", margin=4.0):
    """Five trials: one not tuned, three others with an end of their own, and a better one."""
    criterion = Criterion.parse(by)
    finished = [(0, 10.0, 3.0), (1, 20.0, 1.2), (4, margin, 1.5)]
    names = {
        number: Trial(number, {"margin": value, "weight": 0.5}, "", "finished").name
        for number, value, _ in finished
    }
    methods = tuple(method(names[number], scale, 1, resamples=0) for number, _, scale in finished)
    validation = Comparison("v", (0,), methods)
    figures = {name: figure.mean for name, figure in criterion.figures(validation).items()}
    trials = [
        Trial(
            number,
            {"margin": value, "weight": 0.5},
            "mbls" if number == 0 else f"mbls[margin={value:g}]",
            "finished",
            figures[names[number]],
            (1.5, figures[names[number]]),
        )
        for number, value, _ in finished
    ]
    trials.insert(2, Trial(2, {"margin": 1.5, "weight": 0.9}, "mbls[margin=1.5]", "stopped", None, (2.0,)))
    trials.insert(
        3, Trial(3, {"margin": 2.5, "weight": 0.9}, "mbls[margin=2.5]", "failed", reason="it burst")
    )
    test = Comparison("t", (0,), (method("mbls[margin=4]", 7.0, 1, resamples=10),))
    chosen = criterion.choose(validation)
    return Tuning("toy: mbls tuned over margin", SPACE, criterion, tuple(trials), validation, chosen, test)


def test_remarks_say_how_the_choice_was_made_and_what_became_of_the_trials():
    found = tuning()
    best = min(trial.value for trial in found.trials if trial.value is not None)
    assert found.chosen_trial.value == best
    remarks = found.remarks()
    assert remarks[0].startswith(f"Chosen on the validation data: {found.chosen}, with the lowest NLL (")
    assert remarks[1] == (
        "Trials: 5 (3 finished, 1 stopped early, 1 failed). Trial 0 is the loss without tuning."
    )
    assert remarks[2] == "trial 3: margin=2.5, weight=0.9 failed: it burst."
    assert remarks[3] == "Searched: margin from 1 to 30 (logarithmic), weight from 0 to 1."
    assert remarks[4:] == [f'The chosen loss: --loss "{found.chosen_trial.loss}".']


def test_a_choice_at_the_edge_of_a_range_is_pointed_out():
    lowest = tuning(margin=1.02)
    assert lowest.chosen_trial.number == 4
    assert "The best value of margin, 1.02, is at the edge of the range 1 to 30; try smaller values" in str(
        lowest.remarks()
    )
    assert "edge" not in str(tuning(margin=1.2).remarks())  # 5 % of the logarithmic range
    assert "try larger values" in str(tuning(margin=29.0).remarks())


def test_the_best_value_so_far_follows_the_direction_of_the_criterion():
    for by, better in (("nll", min), ("accuracy", max)):
        found = tuning(by)
        values = {trial.number: trial.value for trial in found.trials if trial.value is not None}
        expected = {
            number: better(value for other, value in values.items() if other <= number) for number in values
        }
        assert found.best_so_far() == expected


def test_json_has_every_trial():
    found = tuning()
    plain = json.loads(found.to_json())
    assert [trial["outcome"] for trial in plain["trials"]] == [
        "finished",
        "finished",
        "stopped",
        "failed",
        "finished",
    ]
    assert plain["trials"][2] == {
        "number": 2,
        "values": {"margin": 1.5, "weight": 0.9},
        "loss": "mbls[margin=1.5]",
        "outcome": "stopped",
        "value": None,
        "epochs": [2.0],
        "reason": "",
    }
    assert plain["space"]["margin"] == {"low": 1.0, "high": 30.0, "log": True}
    assert plain["chosen"] == found.chosen
    assert plain["loss"] == found.chosen_trial.loss
    assert list(plain["test"]["runs"]) == ["mbls[margin=4]"]
