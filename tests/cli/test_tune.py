"""`calibrant tune`, as a user types it."""

import json
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from calibrant.cli import training_options
from calibrant.metrics import METRICS
from calibrant.reports.chosen import TUNING_FILES as FILES
from tests.cli.commands import fail_at_once, invoke, succeed

DATA = "data=synthetic[classes=3,features=4,train_size=60,validation_size=40,test_size=41]"
SMALL = ("--set", "epochs=1", "--set", DATA, "--set", "batch_size=20", "--accelerator", "cpu")
TUNE = ("tune", "digits-lt", "--loss", "mbls[margin=4]", *SMALL, "--resamples", 10, "--output", "out")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("blank_pictures")
def test_a_study_writes_tables_curves_and_a_page_and_tests_only_its_choice():
    result = succeed(*TUNE, "--trials", 3, "--by", "ece")
    assert "trial 2: weight=" in result.stderr
    output = result.stdout
    (chosen,) = re.findall(r"Chosen on the validation data: (trial \d: weight=\S+), ", output)
    assert "Trials: 3 (3 finished)." in output
    assert "Only the chosen setting was evaluated on the test data." in output
    plain = json.loads(Path("out/tune.json").read_text())
    assert plain["chosen"] == chosen
    assert plain["criterion"] == "ece"
    assert f'--loss "{plain["loss"]}"' in output
    assert {path.name for path in Path("out").iterdir()} == {
        *(name.partition("/")[0] for name in FILES),
        *("runs", "study", ".lock"),
    }
    assert all(Path("out", name).is_file() for name in FILES)
    page, intervals = Path("out/tune.html").read_text(), defaultdict(list)
    keys = {metric.label: key for key, metric in METRICS.items()}
    cells = re.findall(r'<td data-(?:key-)?figure="([^"]+)" data-value="([^"]+)"(.*?)</td>', page)
    for name, value, cell in cells:
        for ends in re.findall(r'class="interval">\[(\S+), (\S+)\]', cell):
            metric = name.removesuffix(" + T")
            intervals[keys.get(metric, metric), value].append([float(end) for end in ends])
    assert sum(len(found) > 2 for found in intervals.values()) >= 6  # in three tables of the page
    for found in intervals.values():  # NLL has three digits in one of them and four in the others
        assert found == [pytest.approx(found[0], abs=0.001)] * len(found)
    (tested,) = Path("out").rglob("evaluation.json")
    assert json.loads(tested.with_name("result.json").read_text())["recipe"].count(plain["loss"]) == 1
    again = succeed(*TUNE, "--trials", 3, "--by", "ece")
    assert again.stdout == output
    assert "epoch 1/1" not in again.stderr
    assert "is chosen by ece, not nll" in fail_at_once(*TUNE, "--trials", 3)
    other = fail_at_once(*TUNE, "--set", "seed=3", "--by", "ece")
    assert "belongs to another recipe (there: seed = 0)" in other
    assert "there: loss = " in fail_at_once(*TUNE, "--loss", "ls", "--by", "ece")


@pytest.mark.usefixtures("blank_pictures")
def test_a_criterion_that_is_not_logged_stops_no_trial_and_says_so():
    line = "brier is not logged after each epoch: no trial is stopped early"
    first = succeed(*TUNE, "--trials", 1, "--by", "brier")
    assert first.stderr.count(line) == 1
    assert line not in succeed(*TUNE, "--trials", 1, "--by", "brier", "--no-prune").stderr


@pytest.mark.usefixtures("blank_pictures")
def test_the_folder_is_named_after_recipe_and_loss_by_default():
    succeed(*TUNE[:-2], "--trials", 1)
    assert Path("runs/digits-lt/tune-mbls-margin=4/runs/mbls-margin=4-seed0/result.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--trials", 0), "--trials must be a whole number of at least 1, got 0"),
        (("--by", "ecc"), "unknown criterion 'ecc' (did you mean 'ece'?)"),
        (("--loss", "ce"), "loss ce has no hyper-parameters to tune"),
        (("--loss", "mbls[margin=4,weight=1]"), "leaves nothing to tune"),
        (("--loss", "mbls[margn=4]"), "no hyper-parameter 'margn' (did you mean 'margin'?)"),
        (("--loss", "mbsl"), "unknown loss 'mbsl' (did you mean 'mbls'?)"),
        (("--set", "log_test=true"), "tuning does not log test figures"),
    ],
)
def test_errors_are_one_clear_line_before_anything_is_trained(arguments, expected):
    assert expected in fail_at_once(*TUNE, *arguments)


def test_the_missing_package_is_named_in_one_line(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "optuna"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("calibrant.training.study", "calibrant.training.tuning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    expected = 'calibrant: calibrant tune needs optuna, which is not installed: pip install "calibrant[tune]"'
    assert fail_at_once(*TUNE) == expected


def test_a_study_does_not_write_over_its_data():
    file = Path("out", "tune.json")
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        np.savez(stream, features=np.zeros((60, 4), np.float32), labels=np.arange(60) % 3)
    data = ("--data-root", ".", "--set", f"data=npz[file={file}]")
    assert "is one of the files to read" in fail_at_once(*TUNE, *data)


def test_unknown_options_and_bad_numbers_are_refused_by_the_parser():
    for arguments in (("--trails", 3), ("--trials", "many")):
        result = invoke(*TUNE, *arguments)
        assert result.exit_code == 2
        assert str(arguments[0]) in result.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_that_work_goes_on_until_the_first_trial(monkeypatch, capsys, terminal):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    with training_options.preparing() as report:
        before, end = "", time.monotonic() + (5 if terminal else 0)
        while "loading" not in before and time.monotonic() < end:
            before += capsys.readouterr().err
            time.sleep(0.02)
        report("trial 0")
        after = capsys.readouterr().err
    assert ("loading libraries and data" in before) == terminal
    assert after.rstrip().endswith("trial 0")
    assert capsys.readouterr().err == ""
