"""The commands for training, as a user types them."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
from matplotlib.figure import Figure

from calibrant import LOSSES, cli, evaluate
from calibrant.calibrators import create_calibrator
from calibrant.predictions import PROBABILITY_SUFFIXES, WRITERS, open_predictions
from calibrant.reports import comparison_page
from calibrant.training.data import TensorSplit
from calibrant.training.recipe import Recipe, shipped_recipes
from calibrant.training.runs import Run
from tests.cli.commands import fail, fail_at_once, invoke, printed, succeed
from tests.permissions import unreadable
from tests.training.data.test_in_memory import write_cifar10, write_cifar10_c, write_svhn

QUICK = ("--set", "epochs=2", "--accelerator", "cpu")
FAST = (*QUICK, "--calibrate", "none")
"""For `train` without the search for the best calibrator, which takes most of the time."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def blank_pages(blank_pictures, monkeypatch):
    """Pictures are not drawn, and the page of a comparison has none of the reliability of every run."""
    monkeypatch.setattr(comparison_page, "reliability_grid", lambda data, title: Figure())


def logits_and_labels(path):
    with np.load(path) as content:
        return content["logits"], content["labels"]


def test_train_then_predict_then_evaluate():
    output = printed("train", "digits-lt", "--loss", "cals-alm[margin=6]", *FAST, "--output", "runs/a")
    assert re.search(
        r"runs/a: digits-lt, cals-alm\[margin=6\], seed 0, 2 epochs; validation accuracy", output
    )
    recipe = Recipe.load("runs/a/recipe.toml")
    assert (recipe.loss, recipe.epochs, recipe.seed) == ("cals-alm[margin=6]", 2, 0)
    printed("predict", "runs/a", "--split", "validation", "--output", "v.npz")
    file = open_predictions(Path("v.npz"))
    assert (file.rows, file.num_classes, file.class_names[0]) == (400, 10, "0")
    assert "ECE" in printed("evaluate", "v.npz", "--resamples", "0")
    for found, stored in zip(
        logits_and_labels("v.npz"), logits_and_labels("runs/a/validation.npz"), strict=True
    ):
        np.testing.assert_array_equal(found, stored)


def test_train_ends_with_the_test_figures():
    output = printed("train", "digits-lt", *QUICK, "--output", "a")
    logits, labels = (torch.from_numpy(part) for part in logits_and_labels("a/test.npz"))
    on_validation = [torch.from_numpy(part) for part in logits_and_labels("a/validation.npz")]
    scaled = create_calibrator("temperature").fit(*on_validation)
    before, after = (evaluate(each, labels, resamples=0).metrics for each in (logits, scaled(logits)))
    assert (
        f"test accuracy {100 * before['accuracy']:.2f} %, ECE {100 * before['ece']:.2f} %, "
        f"NLL {before['nll']:.4f}; after temperature scaling (T = {float(scaled.temperature):.3f}) "
        f"ECE {100 * after['ece']:.2f} %, NLL {after['nll']:.4f}\n"
    ) in output
    output = printed("train", "digits-lt", *QUICK, "--output", "a", "--calibrate", "vector")
    vector = create_calibrator("vector").fit(*on_validation)
    used = evaluate(vector(logits), labels, resamples=0).metrics
    assert (
        f"a/bundle: calibrated by vector; test accuracy {100 * used['accuracy']:.2f} %, "
        f"ECE {100 * used['ece']:.2f} %, NLL {used['nll']:.4f}\n"
    ) in output
    output = printed(
        "train", "digits-lt", *QUICK, "--output", "a", "--calibrate", "temperature[objective=ece]"
    )
    other = create_calibrator("temperature", objective="ece").fit(*on_validation)
    used = evaluate(other(logits), labels, resamples=0).metrics
    assert float(other.temperature) != float(scaled.temperature)
    assert f"ECE {100 * used['ece']:.2f} %, NLL {used['nll']:.4f}\n" in output
    Path("a/test.npz").unlink()
    assert "test accuracy" not in printed("train", "digits-lt", *FAST, "--output", "a")


def commands_after(output):
    """The commands at the end of the output of train, as lists of arguments."""
    _, _, end = output.partition("\nNext:\n")
    assert all(line.startswith("  calibrant ") for line in end.splitlines())
    return [shlex.split(line)[1:] for line in end.splitlines()]


@pytest.mark.usefixtures("blank_pages")
def test_train_ends_with_the_next_commands():
    command = ("train", "digits-lt", *QUICK, "--output", "a run")
    applying, evaluating, predicting = commands_after(printed(*command))
    bundle = "a run/bundle/calibrator.safetensors"
    assert applying == ["apply", bundle, "a run/test.npz", "--output", "calibrated.npz"]
    assert evaluating == ["evaluate", "a run/test.npz", "calibrated.npz", "--report", "report.html"]
    assert predicting == ["predict", "a run", "--input", "new.npy", "--output", "predictions.csv"]
    np.save("new.npy", np.zeros((2, 64)))
    printed(*applying)
    printed(*evaluating, "--resamples", "5")
    printed(*predicting)
    assert Path("report.html").is_file()
    assert len(Path("predictions.csv").read_text().splitlines()) == 3
    Path("a run/test.npz").unlink()
    first, second, *_ = commands_after(printed(*command))
    assert first == ["predict", "a run", "--output", "test.npz"]
    assert second == ["apply", bundle, "test.npz", "--output", "calibrated.npz"]
    printed(*first)
    assert Path("test.npz").is_file()


@pytest.mark.filterwarnings("default::calibrant.losses.AdaptationWarning")
@pytest.mark.parametrize(
    ("epochs", "words", "remedy"),
    [
        (
            10,
            "after 10 passes the penalty is still negligible",
            r"Try a margin of [\d.]+ or less, or train for",
        ),
        (2, "its penalty had no effect in 2 passes", r"Train for longer: a margin of [\d.]+ would allow no"),
    ],
)
def test_train_says_that_a_loss_had_no_effect(epochs, words, remedy):
    arguments = ("--loss", "cals-alm[margin=1000]", *FAST, "--set", f"epochs={epochs}")
    result = invoke("train", "digits-lt", *arguments, "--output", "a")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("calibrant: warning: ")]
    assert len(lines) == 1
    assert f"cals-alm[margin=1000], seed 0: {words}" in lines[0]
    assert re.search(remedy, lines[0])


@pytest.mark.filterwarnings("default:--set adapt")
@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (("train", "digits-lt", "--loss", "focal[gamma=2]"), "focal[gamma=2] does not adapt"),
        (("compare", "digits-lt", "--losses", "ce,focal"), "none of these losses adapts"),
        (("compare", "digits-lt", "--losses", "ce,cals-alm"), ""),
        (("train", "digits-lt", "--loss", "ada-scale"), ""),
        (("sweep", "digits-lt", "--loss", "mbls", "--over", "margin=4"), "mbls does not adapt"),
        (("tune", "digits-lt", "--loss", "mbls"), "mbls does not adapt"),
    ],
)
def test_settings_for_adaptive_losses_are_said_to_have_no_effect_on_others(arguments, because):
    Path("file").write_text("")  # the command ends as soon as it looks at its folder
    result = invoke(*arguments, "--set", "adapt=3", "--set", "adapt_on=train", "--output", "file")
    assert result.exit_code == 2
    told = (
        f"calibrant: warning: --set adapt and adapt_on: no effect, because {because}; calibrant losses lists"
    )
    assert (told in result.stderr) == bool(because), result.stderr
    assert result.stderr.count("warning") == bool(because)


def test_a_finished_run_is_said_to_be_one_and_its_data_to_have_changed():
    features, labels = np.random.default_rng(0).normal(size=(90, 4)), np.arange(90) % 3
    np.savez("mine.npz", features=features, labels=labels)
    data = ("--data-root", ".", "--set", "data=npz[file=mine.npz]")
    command = ("train", "digits-lt", *data, *FAST, "--output", "a")
    first = printed(*command)
    assert "nothing was trained" not in first
    again = printed(*command)
    said = "The run in a was finished before; nothing was trained.\n"
    assert again.startswith(said)
    assert first.endswith(again.removeprefix(said))
    np.savez("mine.npz", features=features + 1, labels=labels)
    assert "the data have changed since the run in a began" in fail(*command)
    Path("mine.npz").write_bytes(b"damaged")
    assert "mine.npz" in fail(*command)
    Path("mine.npz").unlink()
    assert "nothing was trained" in printed(*command)


def test_a_part_that_was_not_stored_is_predicted_by_the_model():
    printed("train", "digits-lt", *FAST, "--output", "a")
    before, _ = logits_and_labels("a/test.npz")
    Path("a/test.npz").unlink()
    printed("predict", "a", "--output", "again.npz")
    np.testing.assert_allclose(logits_and_labels("again.npz")[0], before, rtol=1e-5, atol=1e-5)
    printed("predict", "a", "--split", "train", "--output", "train.safetensors")
    assert open_predictions(Path("train.safetensors")).rows == 206


def test_output_has_a_default_of_its_own_for_each_loss_and_seed():
    printed("train", "digits-lt", "--loss", "ls[smoothing=0.1]", "--seed", "3", *FAST)
    assert Path("runs/digits-lt/runs/ls-smoothing=0.1-seed3/result.json").is_file()


@pytest.mark.usefixtures("blank_pages")
def test_compare_writes_tables_pictures_and_a_page_and_trains_only_what_is_missing():
    losses = "ce,cals-alm[margin=6,adapt=3]"
    arguments = ("compare", "digits-lt", *QUICK, "--resamples", "5", "--output", "out")
    first = printed(*arguments, "--losses", "ce", "--seeds", "0")
    assert re.search(r"^ *ce +\d", first, re.MULTILINE)
    kept = Path("out/runs/ce-seed0/model.safetensors").stat().st_mtime_ns
    second = printed(*arguments, "--losses", losses, "--seeds", "0,1")
    assert re.search(r"cals-alm\[margin=6,adapt=3\] +\d", second)
    assert Path("out/runs/ce-seed0/model.safetensors").stat().st_mtime_ns == kept
    assert {path.name for path in Path("out").iterdir()} == {*comparison_page.FILES, "runs", "plots", ".lock"}
    results = json.loads(Path("out/results.json").read_text())
    assert results["seeds"] == [0, 1]
    assert set(results["before"]) == {"ce", "cals-alm[margin=6,adapt=3]"}
    assert len(results["runs"]["ce"]["temperature"]) == 2
    mean = np.mean([run["ece"] for run in results["runs"]["ce"]["before"]])
    assert results["before"]["ce"]["ece"]["mean"] == pytest.approx(mean)
    table = Path("out/results.md").read_text()
    assert f"{100 * mean:.2f} ±" in table
    assert "Best mean in bold." in table
    assert "bold" not in second  # a terminal that shows none
    assert r"\toprule" in Path("out/results.tex").read_text()
    assert "cals-alm[margin=6,adapt=3]" in Path("out/report.html").read_text()
    pictures = {path.name for path in Path("out/plots").iterdir()}
    assert {
        "ece.png",
        "reliability.png",
        "training-ece.png",
        "multiplier-cals-alm-margin=6-adapt=3.png",
    } <= pictures


@pytest.mark.usefixtures("blank_pages", "jobs_in_a_thread")
def test_compare_in_jobs():
    command = ("compare", "digits-lt", "--losses", "ce", "--seeds", "0,1", *QUICK, "--resamples", "5")
    result = succeed(*command, "--jobs", "2", "--output", "o")
    assert sorted(result.stderr.splitlines()) == ["ce, seed 0: done", "ce, seed 1: done"]
    assert Path("o/report.html").is_file()


@pytest.mark.usefixtures("blank_pages")
def test_compare_detects_other_data():
    rng = np.random.default_rng(0)
    Path("data").mkdir()
    np.savez("data/noise.npz", features=rng.random((50, 64), dtype=np.float32), labels=np.arange(50) % 10)
    ood = "npz[file=noise.npz,validation=0,test=1,normalisation=none]"
    command = ("compare", "digits-lt", "--losses", "ce", "--seeds", "0", *QUICK, "--resamples", "5")
    output = printed(*command, "--ood", ood, "--output", "o")
    assert "AUROC, npz" in output
    assert "AUROC + T, npz" in output
    name = "npz-file=noise.npz-validation=0-test=1-normalisation=none"
    pictures = {path.name for path in Path("o/plots").glob("roc-*")}
    assert pictures == {f"roc-{name}-before.png", f"roc-{name}-after.png"}
    (found,) = json.loads(Path("o/results.json").read_text())["runs"]["ce"]["detection"].values()
    assert 0 <= found[0] <= 1


@pytest.mark.filterwarnings("ignore:the temperature stopped at its bound")
@pytest.mark.parametrize("kind", ["images", "features"])
@pytest.mark.usefixtures("blank_pages")
def test_other_data_are_normalised_as_the_models_were(kind):
    rng = np.random.default_rng(0)
    Path("data").mkdir()
    content = rng.integers(100, 140, (90, 8, 8, 3), dtype=np.uint8)
    content += (np.arange(90) % 3 * 40).astype(np.uint8)[:, None, None, None]
    if kind == "features":
        content = content.reshape(90, -1)[:, :20].astype(np.float32)
    np.savez("data/own.npz", **{kind: content, "labels": np.arange(90) % 3})
    np.savez("data/other.npz", **{kind: content[:40] // 2, "labels": np.zeros(40, dtype=int)})
    recipe = ["data=npz[file=own.npz]", "model=mlp" if kind == "features" else "model=cnn", "epochs=1"]
    changes = [part for change in recipe for part in ("--set", change)]
    arguments = ("compare", "digits-lt", "--losses", "ce", "--seeds", "0", *changes, "--output", "o")
    printed(*arguments, "--resamples", "5", "--ood", "npz[file=other.npz,validation=0,test=1]")
    (found,) = json.loads(Path("o/results.json").read_text())["runs"]["ce"]["detection"].values()
    run = Run("o/runs/ce-seed0", Path("data"))
    constants = run.data.test.normalisation
    raw = torch.tensor(content[:40] // 2)
    inputs = constants(raw.permute(0, 3, 1, 2) if kind == "images" else raw)
    before = run.detected(TensorSplit(inputs, torch.zeros(40)), [])[""]
    assert found[0] == pytest.approx(before.auroc)


@pytest.mark.parametrize(
    ("ood", "expected"),
    [
        ("synthetic", "data synthetic have inputs of shape (16,); the models take (64,)"),
        ("npz[file=a.npz]", "would be normalised by their own mean"),
        ("newsgroups", "would be encoded by a vocabulary of their own"),
        ("table[file=a.csv,target=y]", "would be standardised by their own mean"),
    ],
)
def test_other_data_that_the_models_cannot_take_are_refused_before_training(ood, expected):
    arguments = ("compare", "digits-lt", "--losses", "ce", "--seeds", "0", *QUICK, "--output", "o")
    assert expected in fail(*arguments, "--ood", ood)
    assert not Path("o").exists()


@pytest.mark.usefixtures("blank_pages")
def test_compare_and_predict_on_shifted_data():
    Path("data").mkdir()
    write_cifar10(Path("data"), per_class=2)
    write_cifar10_c(Path("data"))
    changes = ("data=cifar10[validation=20]", "model=cnn", "epochs=1", "batch_size=40")
    arguments = [part for change in changes for part in ("--set", change)]
    command = ("compare", "digits-lt", "--losses", "ce", "--seeds", "0", *arguments, "--output", "o")
    shift = "cifar10-c[corruption=gaussian_noise,validation=20]"
    output = printed(*command, "--resamples", "5", "--shift", shift, "--calibrators", "ensemble-temperature")
    shown = output.splitlines()
    for label, unit in (("Accuracy", "%"), ("ECE", "%")):  # above the table
        assert "severity 5" in shown[shown.index(f"{label} on {shift} ({unit})") + 1]
    assert "severity 5" in output
    assert "ce + ensemble-temperature" in output
    found = json.loads(Path("o/results.json").read_text())["runs"]["ce"]["shifted"][shift]
    assert list(found) == ["0", "1", "2", "3", "4", "5"]
    run = ("predict", "o/runs/ce-seed0", "--output", "p.npz", "--on")
    assert "20 rows of test of cifar10-c" in printed(*run, "cifar10-c[severity=3,validation=20]")
    logits, labels = logits_and_labels("p.npz")
    assert (logits.argmax(1) == labels).mean() == pytest.approx(found["3"][""][0]["accuracy"])
    write_svhn(Path("data"), "test")
    refused = "data svhn have the classes 0, 1, 2, 3, 4, … (10); the models know airplane, automobile"
    assert refused in fail(*run, "svhn")
    assert refused in fail(*command, "--shift", "svhn")
    assert "unknown data 'cifar10c' (did you mean 'cifar10-c'?)" in fail(*command, "--shift", "cifar10c")


@pytest.mark.parametrize("command", ["predict", "apply"])
def test_the_help_lists_the_files_that_can_be_written(command):
    (option,) = [
        each for each in typer.main.get_command(cli.app).commands[command].params if each.name == "output"
    ]
    assert " or ".join(WRITERS) in option.help
    if command == "predict":
        *others, last = PROBABILITY_SUFFIXES
        assert f"with --input, {', '.join(others)} or {last}" in option.help


def test_losses_and_recipes_are_listed():
    text = printed("losses")
    for key in LOSSES:
        assert re.search(rf"^{key} ", text, re.MULTILINE)
    for option in ("penalty_weight_max=10.0", "threshold=none", "gamma_range=[-2.0,", "through_gamma=false"):
        assert option in text  # as it can be given in brackets
    listed = printed("recipes")
    for name in shipped_recipes():
        assert re.search(rf"^{name} ", listed, re.MULTILINE)
    assert printed("recipes", "digits-lt") == shipped_recipes()["digits-lt"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "digits-lt", "--loss", "cals-alx"), "unknown loss 'cals-alx' (did you mean 'cals-alm'?)"),
        (("train", "digits-lt", "--loss", "cals-alm[margni=3]"), "did you mean 'margin'?"),
        (("train", "digits-lt", "--loss", "cals-alm[margin=far]"), "margin must be a number, got 'far'"),
        (("train", "digits-lt", "--loss", "cals-alm[margin=none]"), "margin must be a number, got 'none'"),
        (("train", "digits-lt", "--loss", "dual-focal[rank=4]"), "rank must be one of"),
        (("train", "digits-lx"), "unknown recipe 'digits-lx' (did you mean 'digits-lt'?)"),
        (("train", "nowhere.toml"), "there is no recipe file nowhere.toml"),
        (("train", "digits-lt", "--set", "epoch=3"), "unknown key 'epoch' (did you mean 'epochs'?)"),
        (("train", "digits-lt", "--set", "epochs=many"), "epochs must be a whole number, got 'many'"),
        (("train", "digits-lt", "--set", "optimizer.lrr=1"), "has no option 'lrr' (did you mean 'lr'?)"),
        (("train", "digits-lt", "--set", "model=mpl"), "unknown model 'mpl' (did you mean 'mlp'?)"),
        (("train", "digits-lt", "--set", "model.hidden=[-1]"), "must be at least 1, got [64, -1]"),
        (("train", "digits-lt", "--set", "model.hidden=[0]"), "must be at least 1, got [64, 0]"),
        (("compare", "val.csv"), "val.csv is no recipe, expected a .toml file or a name; for data"),
        (("train", "m.pt"), "m.pt is no recipe, expected a .toml file or a name; to compare files of pred"),
        (("compare", "a.npz", "b.npz"), "to compare files of predictions, use calibrant evaluate"),
        (("train", "my data.npz"), "for data of your own, use --data 'my data.npz'"),
        (("train", "digits-lt", "--accelerator", "tpu"), "--accelerator tpu: "),
        (("train", "digits-lt", "--devices", "some"), "--devices some: expected a whole number"),
        (
            ("train", "digits-lt", "--devices", "3", "--accelerator", "cpu"),
            "equally among 3 processes; 30 can",
        ),
        (("train", "cifar10-resnet-50"), "cifar-10-python.tar.gz"),
        (("train", "digits-lt", "--set", "data.head=999"), "digit 0 has 178 images"),
        (("compare", "digits-lt", "--seeds", "one"), "--seeds one: expected whole numbers"),
        (("compare", "digits-lt", "--losses", "ce,ce"), "loss ce is there twice"),
        (("compare", "digits-lt", "--columns", "acc"), "unknown metric 'acc' (did you mean 'accuracy'?)"),
        (("compare", "digits-lt", "--columns", "ecce"), "unknown metric 'ecce' (did you mean 'ece'?)"),
        (
            ("compare", "digits-lt", "--columns", "adaptive-ece,nlll"),
            "unknown metric 'nlll' (did you mean 'nll'?)",
        ),
        (("compare", "digits-lt", "--calibrators", "splin"), "unknown calibrator 'splin' (did you mean"),
        (("predict", "nowhere", "--output", "p.npz"), "nowhere is not the folder of a run"),
        (("predict", "nowhere", "--output", "p.txt"), "expected a name that ends in .npz or .safetensors"),
        (("predict", "nowhere", "--output", "p.npz", "--split", "all"), "expected train, validation or test"),
        (("recipes", "p.npz"), "p.npz is no recipe, expected a .toml file or a name; for data of your own"),
        (("recipes", "digit"), "did you mean 'digits'?"),
    ],
)
def test_errors_are_one_clear_line(arguments, expected):
    assert expected in fail(*arguments)


@pytest.mark.parametrize("rank", ["2", "1+2+3"])
def test_losses_that_need_more_than_two_classes_are_trained(rank, monkeypatch):
    monkeypatch.setattr(comparison_page, "write_comparison", lambda *_: None)  # pictures take seconds
    loss, once = f"dual-focal[rank={rank}]", ("--set", "epochs=1", "--accelerator", "cpu", "--output", "a")
    arguments = ("--losses", loss, "--seeds", "0", "--resamples", "0", *once)
    printed("compare", "digits-lt", *arguments)
    run = f"a/runs/dual-focal-rank={rank.replace('+', '-')}-seed0"
    output = printed("train", "digits-lt", "--loss", loss, "--calibrate", "none", *once[:-1], run)
    assert f"{run}: digits-lt, {loss}, seed 0, 1 epoch" in output
    assert "nothing was trained" in output


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dual-focal[rank=2]", "loss dual-focal[rank=2]: rank=2 needs more than 2 classes, got 2"),
        ("ce[class_weight=[1,2,3]]", "loss ce[class_weight=[1, 2, 3]]: class_weight must hold num_classes=2"),
    ],
)
def test_losses_that_do_not_fit_the_classes_of_the_data_are_refused_before_training(loss, expected):
    np.savez("mine.npz", features=np.eye(60, 4), labels=np.arange(60) % 2)
    data = ("--data-root", ".", "--set", "data=npz[file=mine.npz]", *QUICK, "--output", "a")
    assert expected in fail("train", "digits-lt", "--loss", loss, *data)
    assert expected in fail("compare", "digits-lt", "--losses", f"ce,{loss}", "--seeds", "0", *data)
    assert not Path("a").exists()


NONE = "cals-alm[penalty_weight_max=none]"


@pytest.mark.parametrize(
    "given", [("--loss", NONE), ("--loss", "cals-alm", "--set", "losses.cals-alm.penalty_weight_max=none")]
)
def test_none_is_an_option_of_a_loss_and_survives_the_file_of_a_recipe(given):
    command = ("train", "digits-lt", *given, *FAST, "--output", "a")
    printed(*command)
    recipe = Recipe.load("a/recipe.toml")
    assert recipe.create_loss(10).penalty_weight_max is None
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert "nothing was trained" in printed(*command)
    for file in ("result.json", "model.safetensors"):  # as if it had been stopped after the last epoch
        Path("a", file).unlink()
    printed(*command)
    assert Path("a/result.json").is_file()


@pytest.mark.parametrize("name", ["../../x", "/x", "..", "a/../../x", ""])
def test_a_recipe_of_any_name_stays_in_its_folder(name, tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    recipe = Recipe.load("digits-lt").override(["epochs=1", "model.hidden=[2]"])
    Path("odd.toml").write_text(replace(recipe, name=name).to_toml())
    printed("train", "odd.toml", "--accelerator", "cpu", "--calibrate", "none")
    ((folder,),) = [list(Path("runs").glob("*/runs/ce-seed0"))]
    assert (folder / "result.json").is_file()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file() and "runs" not in path.parts} == {
        "odd.toml"
    }


def test_folders_that_are_none_are_refused_in_one_line():
    Path("loop").symlink_to("loop")
    Path("nowhere").symlink_to("gone")
    Path("file").touch()
    for command in ("train", "compare"):
        for name, expected in (
            ("loop", "loop is a link that leads nowhere"),
            ("nowhere", "nowhere is a link that leads nowhere"),
            ("nowhere/run", "nowhere is a link that leads nowhere"),
            ("file", "file is a file; expected a folder"),
            ("file/run", "file is a file; expected a folder"),
        ):
            assert expected in fail(command, "digits-lt", "--output", name)
    for name in ("loop", "nowhere", "file"):
        assert f"{name} is not the folder of a run" in fail("predict", name, "--output", "p.npz")


def test_folders_that_may_not_be_read_are_refused_in_one_line(tmp_path):
    printed("train", "digits-lt", *FAST, "--set", "model.hidden=[2]", "--output", "a")
    tmp_path.chmod(0o777)  # for the output of predict, whoever runs the tests
    with unreadable(tmp_path / "a"):
        assert "ermission" in fail("predict", "a", "--output", "p.npz")
        assert "a/result.json: Permission denied" in fail("train", "digits-lt", *QUICK, "--output", "a")
        assert "a cannot be written to: a does not allow it" in fail("compare", "digits-lt", "--output", "a")


def test_damaged_files_of_a_run_are_one_line():
    command = ("train", "digits-lt", *FAST, "--set", "model.hidden=[2]", "--output", "a")
    printed(*command)
    weights, result = Path("a/model.safetensors"), Path("a/result.json")
    content = bytearray(weights.read_bytes())
    for position in range(5):
        content[-10 * position - 1] ^= 4
    weights.write_bytes(content)
    for split in ("train", "test"):
        assert "model.safetensors is damaged" in fail("predict", "a", "--split", split, "--output", "p.npz")
    assert "model.safetensors is damaged" in fail(*command)
    assert not Path("p.npz").exists()
    for text in ("{}", result.read_text()[:300]):
        result.write_text(text)
        assert "result.json is damaged" in fail("predict", "a", "--output", "p.npz")
        assert "result.json is damaged" in fail(*command)
    result.unlink()
    printed(*command)
    printed("predict", "a", "--split", "train", "--output", "p.npz")


def test_arrays_without_elements_are_one_line():
    features, labels = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    arrays = {
        "validation": {"validation_features": features[:0], "validation_labels": labels[:0]},
        "all": {"features": features[:0], "labels": labels[:0]},
        "columns": {"features": features[:, :0]},
    }
    for name, changed in arrays.items():
        np.savez(f"{name}.npz", **{"features": features, "labels": labels, **changed})
        line = fail("train", "digits-lt", "--data-root", ".", "--set", f"data=npz[file={name}.npz]", *QUICK)
        assert "expected" in line or "must be" in line
        assert not Path("runs").exists()


def test_a_folder_of_another_recipe_is_left_alone():
    printed("train", "digits-lt", *FAST, "--output", "a")
    before = Path("a/model.safetensors").read_bytes()
    line = fail("train", "digits-lt", "--loss", "ls", *QUICK, "--output", "a")
    assert 'a holds a run of another recipe (there: loss = "ce")' in line
    assert Path("a/model.safetensors").read_bytes() == before


def test_a_network_with_another_number_of_classes_is_refused(monkeypatch):
    Path("networks.py").write_text(
        "from torch import nn\ndef seven(num_classes):\n    return nn.Linear(64, 7)\n"
    )
    monkeypatch.syspath_prepend(".")
    line = fail("train", "digits-lt", *QUICK, "--set", "model=networks:seven", "--output", "a")
    assert "7" in line
    assert "10" in line


def test_the_program_starts_from_any_folder_and_under_torchrun(programs):
    torchrun = [programs / "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    arguments = [
        "train",
        "digits-lt",
        "--loss",
        "cals-alm",
        *QUICK,
        "--set",
        "drop_last=true",
        "--calibrate",
        "temperature",
    ]
    command = [*torchrun, programs / "calibrant", *arguments, "--output", "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("two: digits-lt, cals-alm, seed 0, 2 epochs") == 1
    printed(*arguments, "--output", "one")
    one, two = (logits_and_labels(f"{name}/test.npz") for name in ("one", "two"))
    np.testing.assert_array_equal(one[1], two[1])
    np.testing.assert_allclose(one[0], two[0], rtol=1e-3, atol=1e-4)


def test_an_error_in_a_model_of_the_user_is_logged(tmp_path, monkeypatch):
    Path("own_model.py").write_text(
        "from torch import nn\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, classes)\n\n"
        "    def forward(self, x):\n"
        "        if self.training:\n"
        "            a, b = (x,)\n"
        "        return self.layer(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))
    result = invoke("train", "digits-lt", *QUICK, "--set", "model=own_model:Net")
    assert result.exit_code == 1, result.output
    assert "(own_model.py, line 10): not enough values" in result.stderr
    (log,) = (tmp_path / "logs").glob("calibrant-*.log")
    assert str(log) in result.stderr


def test_a_training_that_diverged_is_not_told_to_check_the_order_of_labels():
    result = invoke("train", "digits", *FAST, "--set", "optimizer.lr=1e9", "--output", "diverged")
    assert "check the order" not in result.output
    assert "no better than chance; the training diverged, or learned nothing yet: try" in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "digits-lt", "--losses", "ce"),
        ("sweep", "digits-lt", "--loss", "mbls", "--over", "margin=4,6"),
        ("tune", "digits-lt", "--loss", "mbls"),
        ("leaderboard", "board.toml"),
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("kept", ["result.json", "checkpoints/last.pt"])
def test_several_runs_do_not_go_into_the_folder_of_one(command, kept):
    Path("board.toml").write_text('losses = ["ce"]\nseeds = [0]\n[[experiment]]\nrecipe = "digits-lt"\n')
    Path("a", kept).parent.mkdir(parents=True)
    Path("a", kept).touch()
    assert fail_at_once(*command, "--output", "a") == (
        "calibrant: a holds a training run of its own, expected a folder for several runs; choose another "
        "one with --output"
    )


@pytest.mark.parametrize("run", ["a/runs/ce-seed0", "a/margin=4/runs/cals-alm-seed0"])
def test_a_run_does_not_go_into_the_folder_of_several(run):
    Path(run).mkdir(parents=True)
    Path(run, "recipe.toml").touch()
    assert fail_at_once("train", "digits-lt", *QUICK, "--output", "a") == (
        f"calibrant: a holds several runs, such as {run}, expected a folder for one run; choose another one "
        "with --output"
    )
    Path("a/result.json").touch()  # those of earlier versions may hold both
    assert "holds several runs" not in fail("train", "digits-lt", *QUICK, "--output", "a")


def test_validation_labels_that_are_all_right_are_told_once():
    """No temperature can be found then, and no calibrator is in the bundle, for the same reason."""
    labels = np.arange(90) % 3
    features = 5 * np.eye(3)[labels] + np.random.default_rng(0).normal(0, 0.1, (90, 3))
    np.savez("easy.npz", features=features.astype(np.float32), labels=labels)
    result = succeed("train", "--data", "easy.npz", *QUICK, "--set", "optimizer.lr=0.05", "--output", "a")
    reason = "every validation label is predicted correctly, so nothing says how confident to be"
    assert re.search(
        rf"\na: test .*; no temperature could be fitted to the validation data \(the temperature stopped at "
        rf"its bound [\d.e-]+: {reason}\)\na/bundle: not calibrated, for the same reason\n",
        result.stdout,
    )
    assert result.output.count(reason) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("compare", "--losses", "ce"),
        ("compare", "--losses", "ce", "--jobs", "2"),
        ("sweep", "--over", "seed=0,1"),
        ("tune", "--loss", "focal"),
    ],
    ids=" ".join,
)
def test_an_output_folder_whose_name_is_not_utf8_is_refused_before_training(command):
    name, *options = command
    line = fail_at_once(name, "digits-lt", *options, "--output", "x\udcfc/run")
    expected = "x\\udcfc/run: the name is not UTF-8, and TensorBoard cannot write there; rename the folder"
    assert line.startswith(f"calibrant: {expected}")
