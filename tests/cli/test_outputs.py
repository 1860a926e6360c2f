"""No output of a command is one of its inputs or another output, by whatever path or link."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from calibrant import cli
from calibrant.cli.terminal import check_outputs
from calibrant.training import run_folder
from tests.permissions import read_only

LOGITS, LABELS = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
WAYS = ("", "soft-", "hard-", "sub/", "sub/../{folder}/sub/sub/")


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def refused(folder, *arguments, words="is one of the files to read"):
    """Assert that the command ends in one line, and that no file has changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("calibrant: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def folder(tmp_path):
    """Predictions as one file and as a pair, and counts; each also under other names."""
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS)
    np.save(tmp_path / "p.logits.npy", LOGITS)
    np.save(tmp_path / "p.labels.npy", LABELS)
    (tmp_path / "p.class_names.txt").write_text("x\ny\nz\n")
    (tmp_path / "counts").write_text("20 20 20")
    for path in list(tmp_path.iterdir()):
        path.with_name(f"soft-{path.name}").symlink_to(path.name)
        os.link(path, path.with_name(f"hard-{path.name}"))
    (tmp_path / "sub").symlink_to(".")
    return tmp_path


@pytest.mark.parametrize(
    ("inputs", "overwritten"),
    [
        (["a.npz"], "a.npz"),
        (["p.logits.npy"], "p.logits.npy"),
        (["p.logits.npy"], "p.labels.npy"),
        (["p.labels.npy"], "p.logits.npy"),
        (["p.logits.npy"], "p.class_names.txt"),
        (["a.npz", "--class-counts", "counts"], "counts"),
    ],
)
def test_evaluate(folder, monkeypatch, inputs, overwritten):
    monkeypatch.chdir(folder)
    for way in WAYS:
        target = way.format(folder=folder.name) + overwritten
        refused(folder, "evaluate", *inputs, "--json", target)
    refused(folder, "evaluate", *inputs, "--report", overwritten)


def test_calibrate_and_apply(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "p.class_names.txt").unlink()
    assert run("calibrate", "a.npz", "--resamples", 0, "--output", "c.safetensors").exit_code == 0
    (folder / "soft-c.safetensors").symlink_to("c.safetensors")
    os.link(folder / "c.safetensors", folder / "hard-c.safetensors")
    for way in WAYS[:3]:
        refused(folder, "calibrate", "a.npz", "--json", f"{way}a.npz")
        refused(folder, "calibrate", "a.npz", "--test", "p.logits.npy", "--report", f"{way}p.labels.npy")
        refused(folder, "apply", "c.safetensors", "a.npz", "--output", f"{way}c.safetensors")
        refused(folder, "apply", "c.safetensors", "a.npz", "--output", f"{way}a.npz")


@pytest.mark.parametrize("make", [os.link, os.symlink])
def test_two_outputs_are_different_files(folder, make):
    (folder / "one").write_text("")
    make(folder / "one", folder / "two")
    refused(folder, "evaluate", folder / "a.npz", "--json", folder / "one", "--report", folder / "two",
            words="are the same file")  # fmt: skip


def test_two_outputs_may_be_the_same_pipe_or_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        check_outputs([], {"--json": path, "--report": path})  # this writes nothing


def test_a_loop_of_links_is_refused_before_the_work(folder):
    (folder / "x").symlink_to("y.npz")
    (folder / "y.npz").symlink_to("x")
    refused(folder, "evaluate", folder / "a.npz", "--json", folder / "x", words="symbolic links")
    refused(folder, "evaluate", folder / "y.npz", words="y.npz: ")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_place_where_nothing_can_be_created_is_refused_before_the_work(folder):
    refused(folder, "evaluate", folder / "a.npz", "--json", "/proc/x.json", words="written to: /proc")
    with TemporaryDirectory() as closed, read_only(Path(closed)), pytest.raises(typer.Exit):
        check_outputs([], {"--json": Path(closed, "x.json")})


def test_a_link_to_nowhere_is_written_to_its_target(folder):
    (folder / "link.json").symlink_to("new.json")
    assert run("evaluate", folder / "a.npz", "--resamples", 0, "--json", folder / "link.json").exit_code == 0
    assert (folder / "new.json").read_text().startswith("[{")
    (folder / "far.json").symlink_to("none/new.json")
    refused(folder, "evaluate", folder / "a.npz", "--json", folder / "far.json", words="there is no folder")


# ------------------------------------------------------------------------------------------------ training

RECIPE = """name = "tiny"
epochs = 1
batch_size = 16
data = { name = "npz", file = "test.npz" }
model = { name = "mlp", hidden = [4] }
loss = "ce"
"""


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "test.npz", features=LOGITS.astype(np.float32), labels=LABELS)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def test_a_run_does_not_write_over_its_data_or_its_recipe(data, tmp_path):
    refused(data, "train", data / "recipe.toml", "--data-root", data, "--output", data)
    (data / "recipe.toml").rename(data / "other.toml")
    refused(data, "train", data / "other.toml", "--data-root", data, "--output", data, words="test.npz")
    (data / "run").mkdir()
    (data / "run" / "test.npz").symlink_to("../test.npz")
    refused(data, "train", data / "other.toml", "--data-root", data, "--output", data / "run")


@pytest.mark.parametrize("name", ["test.npz", "checkpoints/last.pt"])
def test_a_comparison_does_not_write_over_the_data_in_a_run_folder(data, name):
    (data / "cmp" / "runs" / "ls-seed1" / "checkpoints").mkdir(parents=True)
    file = f"cmp/runs/ls-seed1/{name}"
    (data / "test.npz").rename(data / file)
    refused(data, "compare", data / "recipe.toml", "--losses", "ce,ls", "--seeds", "0,1", "--data-root", data,
            "--set", f"data.file={file}", "--output", data / "cmp")  # fmt: skip


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoints/last.pt"])
def test_a_run_does_not_write_over_the_weights_that_it_starts_from(data, name):
    (data / "ft" / "checkpoints").mkdir(parents=True)
    (data / "ft" / name).write_bytes(b"weights")
    (data / "link").symlink_to(data / "ft" / name)
    for path in (data / "ft" / name, data / "link"):
        refused(data, "train", data / "recipe.toml", "--data-root", data, "--set", f"model.weights={path}",
                "--output", data / "ft")  # fmt: skip


def test_a_run_does_not_write_over_the_folder_of_its_transformer(data):
    (data / "bert").mkdir()
    (data / "bert" / "model.safetensors").write_bytes(b"weights")
    (data / "recipe.toml").write_text(RECIPE.replace('{ name = "mlp", hidden = [4] }', f'"hf:{data}/bert"'))
    refused(data, "train", data / "recipe.toml", "--data-root", data, "--output", data / "bert")


def test_a_run_may_be_continued_by_its_own_recipe(data):
    arguments = ["--data-root", data, "--output", data / "run", "--accelerator", "cpu"]
    assert run("train", data / "recipe.toml", *arguments).exit_code == 0
    written = {path.relative_to(data / "run").as_posix() for path in (data / "run").rglob("*")}
    others = {".lock", "tensorboard", "checkpoints", "bundle"}
    assert {each for each in written - others if "/events." not in each} <= set(run_folder.FILES)
    assert run("train", data / "run" / "recipe.toml", *arguments).exit_code == 0


def test_predict(data):
    arguments = ["--data-root", data, "--accelerator", "cpu"]
    assert run("train", data / "recipe.toml", *arguments, "--output", data / "run").exit_code == 0
    os.link(data / "test.npz", data / "hard.npz")
    for output in ("run/test.npz", "run/model.safetensors", "test.npz", "hard.npz"):
        refused(data, "predict", data / "run", "--data-root", data, "--output", data / output)
