"""The command figures: what the logs of runs hold is drawn, and nothing is half-written."""

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from calibrant.cli import app
from calibrant.cli.figures import _labels, _runs
from calibrant.reports.plots import drawing
from calibrant.training import Recipe, setup, train
from calibrant.training.runs import Run
from calibrant.training.setup import make_fabric

SMALL = [
    "epochs=2",
    "batch_size=32",
    "data=synthetic[classes=4,features=5,train_size=64,validation_size=60,test_size=31]",
    "model=mlp",
    "model.hidden=[8]",
]
BINNED = {"bins", "confidences", "confidences-own-bins", "confidences-true-and-top"}
PREDICTED = {"maximum-logits", "lower-probability"}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A folder like that of a comparison: one adaptive loss from two seeds, and another loss."""
    folder = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_fabric", partial(make_fabric, accelerator="cpu"))
        for name, changes in {
            "adafocal-seed0": ["loss=adafocal", "log_test=true"],
            "adafocal-seed1": ["loss=adafocal", "seed=1", "log_test=true"],
            "ce-seed0": ["loss=ce", "log_test=true"],
        }.items():
            train(Recipe.load("digits-lt").override([*SMALL, *changes]), folder / "runs" / name)
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Figures are made but not rendered, which takes most of the time."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"png" if figure.axes else b"")
    monkeypatch.setattr(drawing, "svg", lambda figure: b"svg")


def invoke(*arguments):
    return CliRunner().invoke(app, ["figures", *map(str, arguments)])


def drawn(folder):
    files = [path.name for path in folder.iterdir()]
    names = {name.removesuffix(".png") for name in files if name.endswith(".png")}
    assert sorted(files) == sorted(f"{name}.{ending}" for name in names for ending in ("png", "svg"))
    return names


@pytest.mark.usefixtures("quick")
def test_a_comparison_is_drawn(comparison, tmp_path):
    result = invoke(comparison, "--bins", "1,15", "--output", tmp_path / "deep" / "out")
    assert result.exit_code == 0, result.output
    names = drawn(tmp_path / "deep" / "out")
    learned = {"learned-gamma-adafocal-seed0", "learned-gamma-adafocal-seed1"}
    assert names == {"curves-validation", "curves-test", *BINNED, *PREDICTED, *learned}
    assert all(name in result.output.replace("\n", " ") for name in names)


@pytest.mark.usefixtures("quick")
def test_losses_can_be_chosen(comparison, tmp_path):
    result = invoke(comparison, "--losses", "ce", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert not any("adafocal" in name for name in drawn(tmp_path / "out"))


def test_losses_have_the_order_of_the_comparison(comparison, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(comparison, folder)
    runs = [("adafocal", 0), ("adafocal", 1), ("ce", 0)]

    def found():
        return [(run.recipe.loss, run.recipe.seed) for run in _runs([str(folder)])]

    assert found() == runs
    (folder / "results.json").write_text('{"runs": {"ce": [], "adafocal": []}}')
    assert found() == [runs[2], *runs[:2]]
    for other in ('{"runs": {"ce": []}}', '{"runs": {"mbls": [], "ce": []}}'):
        (folder / "results.json").write_text(other)
        assert found() == [runs[2], *runs[:2]]
    (folder / "results.json").write_text("[1]")
    assert found() == runs


@pytest.mark.usefixtures("quick")
def test_only_what_a_run_holds_is_drawn(comparison, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(comparison / "runs" / "ce-seed0", run)
    for name in ("test.npz", "bins.safetensors"):  # too large to be stored; trained by an earlier version
        (run / name).unlink()
    result = invoke(run, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert drawn(tmp_path / "out") == {"curves-validation", "curves-test"}


@pytest.mark.usefixtures("quick")
def test_what_is_left_out_is_said(comparison, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_fabric", partial(make_fabric, accelerator="cpu"))
        changes = [*SMALL, "loss=adafocal[bins=5]"]
        train(Recipe.load("digits-lt").override(changes), tmp_path / "five")
    runs = comparison / "runs" / "ce-seed0", tmp_path / "five"
    result = invoke(*runs, "--bins", "1,15", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "bins: no γ of adafocal-bins=5-seed0, whose loss has 5 values of it for 15 bins" in result.output
    assert "curves-test: no Accuracy" in result.output


@pytest.mark.usefixtures("quick")
def test_a_binary_run_has_no_maximum_logits(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_fabric", partial(make_fabric, accelerator="cpu"))
        changes = [*SMALL, "data.classes=2", "binary=true", "loss=ce"]
        train(Recipe.load("digits-lt").override(changes), tmp_path / "run")
    result = invoke(tmp_path / "run", "--bins", "2", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert drawn(tmp_path / "out") == {"curves-validation", *BINNED, "lower-probability"}
    assert "maximum-logits: without ce-seed0; a binary run has one logit" in result.output


def test_formulas_need_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing, "svg", lambda figure: b"svg")  # the pictures are those of PNG
    result = invoke("formulas", "--output", "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "penalties.png").read_bytes().startswith(b"\x89PNG")
    assert drawn(tmp_path / "out") == {
        *("penalties", "penalty-weights", "focal-losses", "exponents", "dual-focal-phi")
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "nowhere is not the folder of a run or of a comparison: it does not exist\n"),
        (["formulae"], "it does not exist (did you mean 'formulas'?)"),
        (["."], ". is not the folder of a run or of a comparison\n"),
        (["formulas", "runs"], "formulas stands alone"),
        (["RUN", "--bins", "0"], "--bins 0: expected numbers from 1 to 15"),
        (["RUN", "--bins", "1,16"], "expected numbers from 1 to 15"),
        (["RUN", "--bins", "x"], "expected numbers from 1 to 15"),
        (["RUN", "--smooth", "1"], "--smooth"),
        (["RUN", "--losses", "ls"], "--losses ls: no run has this loss; expected some of ce"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(arguments, expected, comparison, tmp_path):
    run = str(comparison / "runs" / "ce-seed0")
    given = [run if each == "RUN" else each for each in arguments]
    result = invoke(*given, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split()) + "\n"
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_finished_is_refused(comparison, tmp_path):
    shutil.copytree(comparison / "runs" / "ce-seed0", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    result = invoke(tmp_path / "run", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "is not finished" in result.output


def test_runs_have_names_that_tell_them_apart(comparison, tmp_path):
    runs = [Run(comparison / "runs" / name) for name in ("adafocal-seed0", "adafocal-seed1", "ce-seed0")]
    assert _labels(runs) == ["adafocal", "adafocal", "ce"]
    shutil.copytree(runs[2].folder, tmp_path / "copy")
    alike = [runs[2], Run(tmp_path / "copy")]
    assert _labels(alike) == [str(run.folder) for run in alike]


def test_the_order_of_options_does_not_make_another_method():
    changes = ["optimizer.decay_vectors=true", "optimizer.weight_decay=0.001"]
    one, other = (Recipe.load("digits-lt").override(each) for each in (changes, changes[::-1]))
    runs = [SimpleNamespace(recipe=one), SimpleNamespace(recipe=replace(other, seed=1))]
    assert _labels(runs) == [one.loss] * 2


def test_predict_wants_one_run_of_a_comparison(comparison, tmp_path):
    output = str(tmp_path / "out.npz")

    def refused(folder):
        result = CliRunner().invoke(app, ["predict", str(folder), "--output", output])
        assert result.exit_code == 2
        return "".join(result.output.split())

    expected = (
        f"{comparison} is the folder of several runs; give one of them, such as {comparison}/runs/adafocal"
    )
    assert "".join(expected.split()) in refused(comparison)
    assert refused(tmp_path / "nowhere").endswith("isnotthefolderofarun:itdoesnotexist")
