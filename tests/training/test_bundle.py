"""Bundles: what a run predicts, `calibrant.load` predicts for new raw inputs, and its exported graphs too."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import calibrant
from calibrant.atomic import replace_file
from calibrant.calibrators import CALIBRATORS, create_calibrator, load_calibrator
from calibrant.predictions import write_probabilities
from calibrant.training import Recipe, RecipeError, Run, bundle, calibration, run_folder, train
from calibrant.training.bundle import Bundle, write_bundle
from calibrant.training.data.text.tables import read_texts
from calibrant.training.export import Probabilities, export
from calibrant.training.lock import FolderLock
from calibrant.training.run_lock import lock_of
from tests.cli.commands import fail, invoke, printed
from tests.onnx_exporter import operators_listed_once
from tests.training.data.test_segmentation import write_voc
from tests.training.data.text.writing import write_csv

RECIPE = """
epochs = 2
batch_size = 16
optimizer = {{ name = "adam", lr = 0.01 }}
data = {{ name = "{name}", {options} }}
model = {model}
"""


def write_images(root):
    """Images of two colours in class folders, with a test folder."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 6)):
        for label, colour in (("blue", (40, 60, 180)), ("red", (180, 60, 40))):
            folder = root / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                noise = generator.integers(-40, 41, (12, 15, 3))
                pixels = (np.array(colour) + noise).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    raw = sorted((root / "test").rglob("*.png"))
    return raw, root / "test", [path.relative_to(root / "test").as_posix() for path in raw]


def write_arrays(root):
    generator = np.random.default_rng(0)
    labels = np.arange(90) % 3
    features = generator.normal(5, 2, (90, 4)) + labels[:, None]
    new = features[60:]
    np.savez(
        root / "data.npz",
        features=features[:60],
        labels=labels[:60],
        test_features=new,
        test_labels=labels[60:],
        class_names=["low", "middle", "high"],
    )
    np.savez(root / "new.npz", features=new)
    return new, root / "new.npz", [str(number) for number in range(30)]


def write_texts(root):
    words = {"good": ("fine", "great", "well"), "bad": ("poor", "awful", "ill")}
    rows = [
        (f"This film, no. {number}, is {words[label][number % 3]}!", label)
        for number in range(30)
        for label in words
    ]
    write_csv(root / "train.csv", rows[:40])
    write_csv(root / "test.csv", rows[40:])
    write_csv(root / "new.csv", [(text, "?") for text, _ in rows[40:]], header=("text", "other"))
    return [text for text, _ in rows[40:]], root / "new.csv", [str(row) for row in range(1, 21)]


def write_rows(root):
    generator = np.random.default_rng(0)
    rows = [
        {
            "size": "" if number % 9 == 4 else f"{generator.normal(number % 2):.4f}",
            "colour": "rgb"[number % 3],
        }
        for number in range(90)
    ]
    labels = ["no" if number % 2 else "yes" for number in range(90)]

    def write(name, some, **more):
        with (root / name).open("w", newline="") as stream:
            table = csv.DictWriter(stream, ["size", "colour", *more])
            table.writeheader()
            table.writerows(row | {key: each[n] for key, each in more.items()} for n, row in enumerate(some))

    write("train.csv", rows[:60], bought=labels[:60])
    write("test.csv", rows[60:], bought=labels[60:])
    write("new.csv", rows[60:])
    new = [
        {"size": float(row["size"]) if row["size"] else None, "colour": row["colour"]} for row in rows[60:]
    ]
    return new, root / "new.csv", [str(row) for row in range(1, 31)]


KINDS = {
    "rows": (
        write_rows,
        "table",
        'file = "train.csv", test_file = "test.csv", target = "bought"',
        '{ name = "mlp", hidden = [8] }',
    ),
    "images": (write_images, "image-folder", "image_size = 8", '{ name = "cnn", width = 8 }'),
    "arrays": (write_arrays, "npz", 'file = "data.npz"', '{ name = "mlp", hidden = [8] }'),
    "texts": (
        write_texts,
        "text-table",
        'file = "train.csv", test_file = "test.csv", length = 24',
        '{ name = "text-cnn", dimension = 4 }',
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """A run, the raw elements of its test part, and the same in a file or folder with a name for each."""
    root = tmp_path_factory.mktemp(request.param)
    write, name, options, model = KINDS[request.param]
    raw, path, names = write(root)
    (root / "recipe.toml").write_text(RECIPE.format(name=name, options=options, model=model))
    command = ["train", root / "recipe.toml", "--data-root", root, "--output", root / "run"]
    if request.param == "rows":  # the best one of all takes longer to find and to export
        command += ["--calibrate", "temperature"]
    output = printed(*command, "--accelerator", "cpu")
    place = root / "run" / "bundle"
    assert f"{place}: calibrated by" in output or f"{place}: not calibrated" in output
    return root / "run", raw, path, names


def small_run(root):
    """A run on features, for what does not depend on the kind of data."""
    write_arrays(root)
    _, name, options, model = KINDS["arrays"]
    recipe = Recipe.from_toml(RECIPE.format(name=name, options=options, model=model))
    return Run(train(recipe, root / "run", data_root=root), root)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("small"))


def expected(run):
    """Logits and probabilities of the run's own test part, through the calibrator of its bundle."""
    with np.load(run / "test.npz") as content:
        logits = torch.from_numpy(content["logits"])
    calibrator = load_calibrator(run / "bundle" / "calibrator.safetensors")
    return logits.numpy(), calibrator(logits).softmax(1).numpy()


def test_new_raw_inputs_get_the_predictions_of_the_run(trained, tmp_path):
    run, raw, _, _ = trained
    logits, probabilities = expected(run)
    moved = shutil.copytree(run / "bundle", tmp_path / "elsewhere")  # nothing else of the run is needed
    for place in (run, run / "bundle", str(moved)):
        loaded = calibrant.load(place)
        found = loaded.predict_proba(raw, batch_size=7)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, probabilities, atol=1e-5)
    np.testing.assert_allclose(loaded.logits(raw), logits, atol=1e-4, rtol=1e-5)
    assert loaded.predict(raw).tolist() == [loaded.classes[label] for label in probabilities.argmax(1)]
    assert loaded.predict_proba(raw[:0]).shape == (0, len(loaded.classes))


def test_predict_writes_a_row_for_each_new_input(trained, tmp_path):
    run, _, path, names = trained
    _, probabilities = expected(run)
    classes = calibrant.load(run).classes
    output = printed("predict", run, "--input", path, "--output", tmp_path / "out.csv")
    assert output == f"{tmp_path / 'out.csv'}: {len(names)} inputs of {path}\n"
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == names
    assert [row["prediction"] for row in rows] == [classes[label] for label in probabilities.argmax(1)]
    columns = [[float(row[f"probability_{name}"]) for name in classes] for row in rows]
    np.testing.assert_allclose(columns, probabilities, atol=1e-5)
    printed("predict", run / "bundle", "--input", path, "--output", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as content:
        np.testing.assert_allclose(content["probabilities"], probabilities, atol=1e-5)
        assert content["names"].tolist() == names
        assert content["class_names"].tolist() == list(classes)
        assert content["predictions"].tolist() == [row["prediction"] for row in rows]


def before_the_graph(loaded, raw):
    """The arguments of an exported graph: what the preparation makes, without its normalisation."""
    if loaded.preparation.kind == "arrays":
        return torch.from_numpy(loaded.preparation.numbers(raw))
    if loaded.preparation.kind in ("words", "rows"):
        return loaded.preparation(raw)
    return loaded.preparation.bytes_of(raw)


@pytest.mark.filterwarnings("ignore")
@operators_listed_once()
def test_onnx_and_torch_graphs_predict_the_same(trained, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    run, raw, _, _ = trained
    _, probabilities = expected(run)
    loaded = calibrant.load(run, device="cpu")
    inputs = before_the_graph(loaded, raw)
    said = printed("export", run, "--output", tmp_path / "a.onnx")
    assert "to probabilities of" in said
    assert "inputs: " in said
    assert f"a.onnx: the inputs are {loaded.preparation.graph_inputs}".replace("RUN", repr(str(run))) in said
    session = runtime.InferenceSession(tmp_path / "a.onnx")
    assert [each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())] == ["batch"] * 2
    for count in (1, len(inputs)):
        (found,) = session.run(["probabilities"], {"inputs": inputs[:count].numpy()})
        np.testing.assert_allclose(found, probabilities[:count], atol=1e-5)
    if loaded.preparation.kind in ("arrays", "rows"):  # numbers, as pixels are; ONNX is made from this graph
        return
    printed("export", run, "--format", "torch", "--output", tmp_path / "a.pt2")
    graph = torch.export.load(tmp_path / "a.pt2").module()
    for count in (1, len(inputs)):
        found = graph(inputs[:count]).detach().numpy()
        np.testing.assert_allclose(found, probabilities[:count], atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ["isotonic", "local-temperature"])
@operators_listed_once()
def test_calibrators_of_other_kinds_are_exported_to_onnx(key, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    network = nn.Conv2d(3, 4, 1)
    images, target = torch.randn(20, 3, 5, 5), torch.randint(0, 4, (20, 5, 5))
    calibrator = create_calibrator(key).fit(3 * network(images).detach(), target)
    loaded = Bundle(tmp_path, tuple("abcd"), None, network.eval(), calibrator.eval(), images[:2])
    export(loaded, "onnx", tmp_path / "a.onnx")
    session = runtime.InferenceSession(tmp_path / "a.onnx")
    (found,) = session.run(None, {"inputs": images[:7].numpy()})
    np.testing.assert_allclose(found, Probabilities(loaded)(images[:7]).detach().numpy(), atol=1e-5)


def test_what_cannot_be_exported_is_one_line(tmp_path):
    class Odd(nn.Module):
        def forward(self, inputs):
            return inputs if inputs.sum() > 0 else -inputs

    calibrator = create_calibrator("identity").fit(2 * torch.eye(2), torch.tensor([0, 1]))
    loaded = Bundle(tmp_path, ("a", "b"), None, Odd(), calibrator, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"^identity behind this network cannot be exported to torch: .+$"):
        export(loaded, "torch", tmp_path / "a.pt2")
    assert not (tmp_path / "a.pt2").exists()


def test_wrong_inputs_are_one_line(trained, tmp_path):
    run, _, path, _ = trained
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other.npz"
    np.savez(other, features=np.zeros((3, 9, 2)))
    for wrong in (tmp_path / "empty", other, tmp_path / "missing.csv"):
        line = fail("predict", run, "--input", wrong, "--output", tmp_path / "out.csv")
        assert str(wrong) in line
    assert "expected a name that ends in .csv or .npz or .parquet" in fail(
        "predict", run, "--input", path, "--output", tmp_path / "out.txt"
    )
    assert "--input and --split" in fail(
        "predict", run, "--input", path, "--split", "test", "--output", tmp_path / "out.csv"
    )
    if path.is_file():
        assert "is one of the files to read" in fail("predict", run, "--input", path, "--output", path)
    with pytest.raises(ValueError, match=r"got .*, expected"):
        calibrant.load(run).predict_proba(7)
    assert not (tmp_path / "out.csv").exists()
    assert "expected a name that ends in .onnx" in fail("export", run, "--output", tmp_path / "a.pt2")
    assert "expected onnx or torch" in fail("export", run, "--format", "tf", "--output", "a.onnx")
    assert "is a bundle, which has no data" in fail("predict", run / "bundle", "--output", "a.npz")


# --------------------------------------------------------------------------------------------- calibrators


@pytest.mark.parametrize("method", ["auto", "none", "histogram-binning[bins=4]", "temperature"])
def test_the_calibrator_is_the_one_that_was_asked_for(small, method):
    calibrator = write_bundle(small, method)
    stored = calibrant.load(small.folder).calibrator
    assert stored.key == calibrator.key
    assert stored.class_names == ("low", "middle", "high")
    keys = {"none": ["identity"], "auto": ["identity", "temperature"]}
    assert calibrator.key in keys.get(method, [method.partition("[")[0]])
    manifest = json.loads((small.folder / "bundle" / "bundle.json").read_text())
    assert manifest["calibrate"] == method


def test_unknown_calibrators_are_refused_before_training(small, tmp_path):
    arguments = (
        "train",
        small.folder / "recipe.toml",
        "--data-root",
        small.data_root,
        "--output",
        tmp_path / "a",
    )
    assert "unknown calibrator 'temprature' (did you mean 'temperature'?)" in fail(
        *arguments, "--calibrate", "temprature"
    )
    assert not (tmp_path / "a").exists()
    with pytest.raises(RecipeError, match="has no option 'bans'"):
        train(small.recipe, tmp_path / "a", calibrate="histogram-binning[bans=3]")


def test_the_reason_for_no_calibrator_is_kept_in_the_bundle_and_said(small, copied, monkeypatch):
    command = ("train", copied / "recipe.toml", "--output", copied, "--data-root", small.data_root)
    place = copied / "bundle"
    for _ in range(2):  # written, and read
        assert f"{place}: not calibrated: none was asked for" in printed(*command, "--calibrate", "none")
    with monkeypatch.context() as patched:
        patched.setattr(calibration, "_ranked", lambda batches: iter([("identity", None)]))
        assert f"{place}: not calibrated: no calibrator is better" in printed(*command)
    shutil.rmtree(place)
    monkeypatch.setattr(calibration, "_ranked", lambda batches: iter([]))
    assert "not calibrated: there are too few labelled validation data" in printed(*command)


# ----------------------------------------------------------------------------------------------- the folder


@pytest.fixture
def copied(small, tmp_path):
    """A copy of a run with a bundle."""
    write_bundle(small, "temperature")
    return shutil.copytree(small.folder, tmp_path / "copy")


@pytest.mark.parametrize(
    "name", ["bundle.json", "model.safetensors", "calibrator.safetensors", "preparation.json"]
)
def test_a_changed_or_missing_file_is_refused(copied, name):
    file = copied / "bundle" / name
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^the bundle in \S+ is damaged or was changed: .*{name}.*$"):
        calibrant.load(copied)
    file.unlink()
    with pytest.raises(
        ValueError, match="is missing" if name != "bundle.json" else "has no bundle; write it"
    ):
        calibrant.load(copied)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 2}, "has the format 2; this version reads 1"),
        ({"class_names": "abc"}, "bundle.json lacks something"),
        ({"before": {"files": {}}}, "bundle.json lacks something"),
        ({"inputs": {"": ["float33", 4]}}, "AttributeError"),
        ({"model": {"name": "mlp", "options": {"hiden": [3]}}}, "has no option 'hiden' (did you mean"),
        (
            {"model": {"name": "nowhere:net", "options": {}}},
            "model 'nowhere:net': there is no module 'nowhere'",
        ),
        (
            {"model": {"name": "mlp", "options": {"hidden": [9]}}},
            "does not take the weights of the bundle in",
        ),
        ({"class_names": ["a", "b", "c"]}, "was fitted to other classes"),
    ],
)
def test_other_contents_are_refused_in_one_line(copied, change, expected):
    file = copied / "bundle" / "bundle.json"
    plain = {**json.loads(file.read_text()), **change}
    del plain["sha256"]
    file.write_text(json.dumps({**plain, "sha256": bundle.content_hash(plain)}))
    with pytest.raises(ValueError, match=r".+") as caught:
        calibrant.load(copied)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_bundle_says_what_to_do(small, copied, tmp_path):
    shutil.rmtree(copied / "bundle")
    with pytest.raises(
        ValueError, match=r"has no bundle; write it with: calibrant train \S+ --output \S+copy$"
    ):
        calibrant.load(copied)
    assert "has no bundle" in fail("export", copied, "--output", tmp_path / "a.onnx")
    with pytest.raises(
        ValueError, match=r"nowhere is not the folder of a bundle or of a run: it does not exist"
    ):
        calibrant.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not the folder of a bundle or of a finished run"):
        calibrant.load(tmp_path)
    printed("train", copied / "recipe.toml", "--output", copied, "--data-root", small.data_root)
    assert calibrant.load(copied).calibrator.key in ("temperature", "identity")


def test_a_bundle_that_is_there_is_kept_and_another_calibrator_replaces_it(small, copied):
    command = ("train", copied / "recipe.toml", "--output", copied, "--data-root", small.data_root)
    before = (copied / "bundle" / "bundle.json").stat().st_mtime_ns
    assert "calibrated by temperature" in printed(*command, "--calibrate", "temperature")
    assert (copied / "bundle" / "bundle.json").stat().st_mtime_ns == before
    assert "calibrated by vector" in printed(*command, "--calibrate", "vector")
    assert calibrant.load(copied).calibrator.key == "vector"
    (copied / "bundle" / "model.safetensors").write_bytes(b"damaged")
    printed(*command, "--calibrate", "vector")
    assert calibrant.load(copied).calibrator.key == "vector"


def full_after(number):
    """A `replace_file` for a disk that is full after so many files."""
    written = []

    def replace(path, content):
        if len(written) == number:
            raise OSError(28, f"cannot write {path}: No space left on device")
        replace_file(path, content)
        written.append(path)

    return replace


@pytest.mark.parametrize(("files", "key"), [(0, "temperature"), (1, "temperature"), (2, "vector")])
def test_there_is_a_bundle_at_every_moment_while_another_calibrator_replaces_it(
    small, copied, monkeypatch, files, key
):
    command = ("train", copied / "recipe.toml", "--output", copied, "--data-root", small.data_root)
    with monkeypatch.context() as patched:
        patched.setattr(bundle, "replace_file", full_after(files))
        assert "No space left on device" in fail(*command, "--calibrate", "vector")
    found = calibrant.load(copied)
    assert found.calibrator.key == key
    assert load_calibrator(copied / "bundle" / "calibrator.safetensors").key == key
    assert f"calibrated by {key}" in printed(*command, "--calibrate", key)
    for method in ("temperature", "vector"):
        assert f"calibrated by {method}" in printed(*command, "--calibrate", method)
        assert calibrant.load(copied).calibrator.key == method
    assert "before" not in json.loads((copied / "bundle" / "bundle.json").read_text())


def test_a_reader_gets_no_mixture_while_another_calibrator_replaces_the_old_one(small, copied, monkeypatch):
    plain, run = bundle._manifest, Run(copied, small.data_root)

    def replaced_after_reading(folder):
        found = plain(folder)
        monkeypatch.setattr(bundle, "_manifest", plain)
        write_bundle(run, "vector")
        return found

    monkeypatch.setattr(bundle, "_manifest", replaced_after_reading)
    assert calibrant.load(copied).calibrator.key == "vector"


def test_a_bundle_of_another_run_is_none_until_it_is_replaced(small, copied, monkeypatch):
    folder = copied / "bundle"
    described = json.loads((folder / "bundle.json").read_text())
    del described["sha256"]
    for name in ("model.safetensors", "preparation.json"):
        (folder / name).write_bytes(b"other")
        described["files"][name] = run_folder.hash_of(folder / name)
    bundle._write_manifest(folder, described)
    run = Run(copied, small.data_root)
    with monkeypatch.context() as patched:
        patched.setattr(bundle, "replace_file", full_after(1))
        with pytest.raises(OSError, match="No space left"):
            write_bundle(run, "vector")
    with pytest.raises(ValueError, match="has no bundle; write it with"):
        calibrant.load(copied)
    write_bundle(run, "vector")
    assert calibrant.load(copied).calibrator.key == "vector"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_run_in_a_folder_whose_name_is_not_utf8_can_be_read(copied, tmp_path):
    folder = copied.rename(tmp_path / os.fsdecode(b"x\xfc"))
    found = calibrant.load(folder)
    assert found.calibrator.key == "temperature"
    assert load_calibrator(folder / "bundle" / "calibrator.safetensors").key == "temperature"
    assert Run(folder, tmp_path).bins


@pytest.mark.filterwarnings("default")
def test_a_finished_run_whose_data_are_gone_gets_no_bundle(copied, tmp_path):
    shutil.rmtree(copied / "bundle")
    result = invoke("train", copied / "recipe.toml", "--output", copied, "--data-root", tmp_path / "gone")
    assert result.exit_code == 0
    assert "warning: no bundle is written, because the data are not there" in result.stderr
    assert not (copied / "bundle").exists()


@pytest.mark.filterwarnings("default")
def test_a_bundle_whose_data_are_gone_stays_and_is_not_said_to_be_what_was_asked_for(copied, tmp_path):
    before = (copied / "bundle" / "bundle.json").read_bytes()
    command = ("train", copied / "recipe.toml", "--output", copied, "--data-root", tmp_path / "gone")
    result = invoke(*command, "--calibrate", "none")
    assert result.exit_code == 0
    expected = "warning: the bundle stays as it was, with the calibrator temperature, because the data"
    assert expected in result.stderr
    assert "no bundle is written" not in result.output
    assert "calibrated" not in result.stdout
    assert (copied / "bundle" / "bundle.json").read_bytes() == before
    assert "calibrated by temperature" in invoke(*command, "--calibrate", "temperature").stdout


@pytest.mark.parametrize("several", [False, True])
def test_parquet_has_the_columns_of_csv(tmp_path, several):
    parquet = pytest.importorskip("pyarrow.parquet")
    parts = [torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])]
    beside = {
        "id": [7, 2**60, 9],
        "mixed": [1, "a", None],
        "name": ["A", "B", "C"],
        "input_name": [2**70, 1, 2],
    }
    for suffix in (".csv", ".parquet"):
        left_out = write_probabilities(
            tmp_path / f"out{suffix}", parts, list("123"), ["x", "y"], several_labels=several, beside=beside
        )
        assert left_out == []
    table = parquet.read_table(tmp_path / "out.parquet")
    with (tmp_path / "out.csv").open() as stream:
        heading, *rows = csv.reader(stream)
    assert table.column_names == heading
    assert heading[:5] == ["name", "id", "mixed", "input_input_name", "input_name"]
    columns = table.to_pydict()
    if not several:
        assert columns["prediction"] == ["y", "x", "x"]
    assert columns["id"] == beside["id"]
    assert columns["mixed"] == ["1", "a", None]
    assert columns["input_input_name"] == ["A", "B", "C"]
    assert columns["probability_y"] == [0.75, 0.5, 0.0]
    assert [row[heading.index("probability_y")] for row in rows] == ["0.75", "0.5", "0"]


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_names_that_are_not_utf8_do_not_lose_the_predictions(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    write_probabilities(path, [torch.tensor([[0.25, 0.75]])], ["a\udcff.png"], ["x", "é"])
    if suffix == ".csv":
        assert path.read_text(encoding="utf-8").splitlines()[1] == "a\\udcff.png,é,0.25,0.75"
    else:
        with np.load(path) as content:
            assert content["names"].tolist() == ["a\\udcff.png"]
            assert content["class_names"].tolist() == ["x", "é"]


# ------------------------------------------------------------------------------------------- other networks


def one_convolution(num_classes: int) -> nn.Module:
    return nn.Conv2d(3, num_classes, 1)


def test_segmentation_has_probabilities_of_every_pixel(tmp_path):
    write_voc(tmp_path, train=6, val=3)
    recipe = Recipe.from_toml(
        'epochs = 1\nbatch_size = 2\ndata = { name = "voc2012", crop = 16 }\n'
        'model = "tests.training.test_bundle:one_convolution"'
    )
    run = Run(train(recipe, tmp_path / "run", data_root=tmp_path, calibrate="temperature"), tmp_path)
    loaded = calibrant.load(run.folder)
    images = [image for image, _ in run.data.test.files]
    _, probabilities = expected(run.folder)
    found = loaded.predict_proba(images)
    assert found.shape == (3, 21, 16, 16)
    np.testing.assert_allclose(found, probabilities, atol=1e-5)
    assert loaded.predict(images).shape == (3, 16, 16)
    folder = images[0].parent
    assert "cannot hold probabilities of every pixel" in fail(
        "predict", run.folder, "--input", folder, "--output", tmp_path / "a.csv"
    )
    printed("predict", run.folder, "--input", folder, "--output", tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as content:
        assert content["probabilities"].shape == (9, 21, 16, 16)
        assert "predictions" not in content


def test_vectors_of_words_need_no_file(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "vectors.txt").write_text("film 1 2\nfine 3 4\nill 5 6\n")
    options = 'file = "train.csv", test_file = "test.csv", length = 24, embedding = "vectors.txt"'
    model = '"text-cnn"'
    recipe = Recipe.from_toml(RECIPE.format(name="text-table", options=options, model=model))
    run = Run(train(recipe, tmp_path / "run", data_root=tmp_path, calibrate="none"), tmp_path)
    texts = read_texts(tmp_path / "test.csv", "text")
    (tmp_path / "vectors.txt").unlink()
    np.testing.assert_allclose(
        calibrant.load(run.folder).predict_proba(texts), expected(run.folder)[1], atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")
def test_a_transformer_needs_no_folder_of_its_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "film", "fine", "ill", "poor"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained(tmp_path / "tiny")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertConfig(**sizes, max_position_embeddings=16).save_pretrained(tmp_path / "config")
    write_texts(tmp_path)
    options = 'file = "train.csv", test_file = "test.csv", length = 12, tokenizer = "tiny"'
    model = f'"hf:{tmp_path / "config"}"'
    recipe = Recipe.from_toml(RECIPE.format(name="text-table", options=options, model=model))
    run = Run(train(recipe, tmp_path / "run", data_root=tmp_path, calibrate="temperature"), tmp_path)
    shutil.rmtree(tmp_path / "tiny")
    shutil.rmtree(tmp_path / "config")
    texts = read_texts(tmp_path / "test.csv", "text")
    loaded = calibrant.load(run.folder)
    np.testing.assert_allclose(loaded.predict_proba(texts), expected(run.folder)[1], atol=1e-5)
    export(calibrant.load(run.folder, device="cpu"), "torch", tmp_path / "a.pt2")
    graph = torch.export.load(tmp_path / "a.pt2").module()
    found = graph(*loaded.preparation(texts[:5]).values()).detach().numpy()
    np.testing.assert_allclose(found, expected(run.folder)[1][:5], atol=1e-5)


def test_every_calibrator_can_be_in_a_bundle():
    assert all(bundle.check_method(key) == key for key in CALIBRATORS)


def test_names_of_files_are_those_that_are_written(small):
    write_bundle(small, "none")
    written = {f"bundle/{path.name}" for path in Path(small.folder, "bundle").iterdir()}
    assert written == {name for name in run_folder.FILES if name.startswith("bundle/")}


def test_a_bundle_is_written_under_the_lock_of_its_recipe(small, monkeypatch):
    """A second start of the recipe then waits, as it does during training."""
    held = []
    monkeypatch.setattr(bundle, "write_bundle", lambda *_: held.append(FolderLock(small.folder).holder()))
    bundle.ensure_bundle(small, "vector", lambda line: None)
    assert f"({lock_of(small.folder, small.recipe).purpose.partition(':')[0]}:" in held[0]
