"""Damaged and hostile files: every reader and command succeeds or ends in its own one-line error.

Each test takes a valid file, changes it (flipped bits, missing or repeated parts, parts of other files, other
headers, types and shapes), and hands it to the code that reads such files. Nothing in a file may be executed,
no other file may change, and memory stays bounded.
"""

import builtins
import io
import json
import os
import pickle
import resource
import tempfile
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from typer.testing import CliRunner

from calibrant import cli
from calibrant.calibrators import create_calibrator, load_calibrator, save_calibrator
from calibrant.options import Choice, RecipeError
from calibrant.predictions import BadFileError, open_predictions, read_class_counts
from calibrant.training.checkpoint import load as load_checkpoint
from calibrant.training.checkpoint import save as save_checkpoint
from calibrant.training.data import load_data
from calibrant.training.data.safe_readers import read_image, read_mat, read_npy, read_pickle
from calibrant.training.recipe import Recipe, shipped_recipes

# The fixtures hold nothing that one example could leave behind for the next.
FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck))

MEMORY = 1 << 28
"""The most bytes that reading a file of a few kilobytes may take."""

ROWS, CLASSES = 12, 3
LOGITS = np.random.default_rng(0).normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = np.where(np.arange(ROWS) % 4 > 0, LOGITS.argmax(1), np.arange(ROWS) % CLASSES)


class Surprise:
    """A pickle of it calls a function when it is read."""

    def __reduce__(self):
        return builtins.print, ("code ran",)


def to_bytes(write, *arguments, **options):
    stream = io.BytesIO()
    write(stream, *arguments, **options)
    return stream.getvalue()


def parquet():
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {f"logit_{number}": LOGITS[:, number] for number in range(CLASSES)}
    return to_bytes(lambda stream: parquet.write_table(pyarrow.table({"label": LABELS, **columns}), stream))


def csv():
    lines = [",".join(["label", *(f"logit_{number}" for number in range(CLASSES))])]
    lines += [",".join(map(str, [label, *row])) for label, row in zip(LABELS, LOGITS, strict=True)]
    return "\n".join(lines).encode()


def csv_lists():
    lines = [f'{label},"{row}"' for label, row in zip(LABELS, LOGITS.tolist(), strict=True)]
    return "\n".join(["label,logits", *lines]).encode()


def parquet_lists():
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"label": LABELS, "logits": LOGITS.tolist()})
    return to_bytes(lambda stream: parquet.write_table(table, stream))


def jsonl():
    rows = [{"label": int(label), "logits": row} for label, row in zip(LABELS, LOGITS.tolist(), strict=True)]
    return "\n".join(map(json.dumps, rows)).encode()


TENSORS = {"logits": torch.from_numpy(LOGITS), "labels": torch.from_numpy(LABELS)}
NAMES = np.array(["cat", "dog", "horse"])

PREDICTIONS = {
    ".npz": to_bytes(np.savez, logits=LOGITS, labels=LABELS, class_names=NAMES),
    ".NPZ": to_bytes(np.savez_compressed, probabilities=np.full((4, 2), 0.5), labels=np.zeros(4, np.uint64)),
    ".logits.npy": to_bytes(np.save, LOGITS),
    ".labels.npy": to_bytes(np.save, LABELS),
    ".pt": to_bytes(lambda stream: torch.save(TENSORS, stream)),
    ".old.pt": to_bytes(
        lambda stream: torch.save(
            {**TENSORS, "more": Surprise()}, stream, _use_new_zipfile_serialization=False
        )
    ),
    ".safetensors": save(TENSORS, metadata={"class_names": json.dumps(NAMES.tolist())}),
    ".csv": csv(),
    ".parquet": parquet(),
    ".lists.csv": csv_lists(),
    ".lists.parquet": parquet_lists(),
    ".jsonl": jsonl(),
}
"""A valid file for each format of predictions, by its suffix; one of them would run code."""

HEADERS = [
    to_bytes(np.lib.format.write_array_header_1_0, {"descr": dtype, "fortran_order": fortran, "shape": shape})
    for dtype in ("<f4", "<i8", "|O", "<U0", "<u8", "<f2", "<c8")
    for shape in ((ROWS, CLASSES), (ROWS,), (-3, -4, CLASSES), (10**12, 2), (0, 3), (), (2,) * 40)
    for fortran in (False, True)
]
FRAGMENTS = [
    *HEADERS,
    *(
        b"\xff" * 8,
        b"\x00" * 8,
        b"\xff\xff\xff\x7f",
        b"-1",
        b"9" * 30,
        b"[" * 2000,
        b"\x1b]0;x\x07",
        b"nan",
        b",",
    ),
    *(pickle.dumps(Surprise(), protocol) for protocol in (0, 2, 4)),
    *PREDICTIONS.values(),
]

SMALL = st.integers(0, 2**32)


@st.composite
def damaged(draw, valid):
    """A valid file with one to four changes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(SMALL) % (len(data) + 1)
        end = min(len(data), start + draw(st.integers(0, 64)))
        kind = draw(
            st.sampled_from(["flip", "flip", "cut", "drop", "repeat", "splice", "overwrite", "number"])
        )
        if kind == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[start:]
        elif kind == "drop":
            del data[start:end]
        elif kind == "repeat":
            data[end:end] = data[start:end] * draw(st.integers(1, 100))
        elif kind == "splice":
            data[start:start] = draw(st.sampled_from(FRAGMENTS))
        elif kind == "overwrite":
            fragment = draw(st.sampled_from(FRAGMENTS))
            data[start : start + len(fragment)] = fragment
        elif kind == "number":
            data[start : start + 8] = draw(
                st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            ).to_bytes(8, draw(st.sampled_from(["little", "big"])))
    return bytes(data)


@contextmanager
def watched(folder, written=()):
    """Nothing is executed, memory is bounded, and no file but those ``written`` changes."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with (
            mock.patch("builtins.print", side_effect=AssertionError("code ran")),
            mock.patch("os.system", side_effect=AssertionError("code ran")),
        ):
            yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
        # In kilobytes, and of torch's tensors too. Packages that are imported late count here.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 2 * MEMORY >> 10
    finally:
        tracemalloc.stop()
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path: after[path] for path in after if path not in written} == {
        path: before[path] for path in before if path not in written
    }


def refused_or_read(read, *errors):
    """Call a reader; an error must be of an expected type, in one line."""
    try:
        return read()
    except errors as error:
        problem = str(error)
    assert "\n" not in problem.strip()
    return None


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(folder, suffix, content):
    path = folder / f"m{suffix}"
    path.write_bytes(content)
    if suffix.endswith("logits.npy"):
        (folder / "m.labels.npy").write_bytes(PREDICTIONS[".labels.npy"])
    elif suffix.endswith("labels.npy"):
        (folder / "m.logits.npy").write_bytes(PREDICTIONS[".logits.npy"])
    return path


# ------------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("suffix", PREDICTIONS)
def test_the_files_are_valid(folder, suffix):
    path = written(folder, suffix, PREDICTIONS[suffix])
    if suffix == ".old.pt":
        with pytest.raises(BadFileError, match="pickled objects"):
            open_predictions(path)
    else:
        assert len(open_predictions(path).load()[1])


@pytest.mark.parametrize("suffix", PREDICTIONS)
@given(data=st.data())
@FUZZ
def test_predictions(folder, suffix, data):
    path = written(folder, suffix, data.draw(damaged(PREDICTIONS[suffix])))
    with watched(folder):
        loaded = refused_or_read(lambda: open_predictions(path).load(), BadFileError)
    if loaded is not None:
        logits, labels = loaded
        assert len(logits) == len(labels) > 0
        counted = labels != -100
        assert 0 <= int(labels[counted].min()) <= int(labels[counted].max()) < logits.shape[1]


@given(
    shape=st.lists(st.one_of(st.integers(-3, 20), st.sampled_from([2**31, 2**62, 10**30])), max_size=5),
    dtype=st.sampled_from(
        ["<f4", ">f8", "<f2", "<f16", "<i8", "|u1", "<u8", "|b1", "|O", "<c8", "<U2", "|V4"]
    ),
    fortran=st.booleans(),
    size=st.integers(0, 300),
    name=st.sampled_from(["logits", "labels", "class_names", "probabilities"]),
    compression=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]),
)
@FUZZ
def test_declared_shapes_and_types(folder, shape, dtype, fortran, size, name, compression):
    header = {"descr": dtype, "fortran_order": fortran, "shape": tuple(shape)}
    array = to_bytes(np.lib.format.write_array_header_1_0, header) + bytes(size)
    path = folder / "m.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for other, content in (("logits", LOGITS), ("labels", LABELS)):
            archive.writestr(f"{other}.npy", array if other == name else to_bytes(np.save, content))
        if name not in ("logits", "labels"):
            archive.writestr(f"{name}.npy", array)
    with watched(folder):
        refused_or_read(lambda: open_predictions(path).load(), BadFileError)


@given(data=st.data(), suffix=st.sampled_from([".npz", ".csv", ".safetensors", ".pt", ".logits.npy"]))
@FUZZ
def test_commands(folder, data, suffix):
    """In process, by the same way that a shell takes, and through its own handler of errors."""
    path = written(folder, suffix, data.draw(damaged(PREDICTIONS[suffix])))
    calibrator, output = folder / "c.safetensors", folder / "out.npz"
    fitted = create_calibrator("temperature").fit(TENSORS["logits"], TENSORS["labels"])
    save_calibrator(fitted, calibrator)
    arguments = data.draw(
        st.sampled_from(
            [
                ["evaluate", path, "--resamples", "0", "--json", folder / "out.json"],
                ["evaluate", path, "--stream", "--resamples", "0"],
                ["calibrate", path, "--resamples", "0", "--output", folder / "out.safetensors"],
                ["apply", calibrator, path, "--output", output],
                ["evaluate", folder / "good.csv", "--resamples", "0", "--class-counts", path],
            ]
        )
    )
    (folder / "good.csv").write_bytes(PREDICTIONS[".csv"])
    outputs = [folder / name for name in ("out.json", "out.safetensors", "out.npz")]
    for each in outputs:
        each.unlink(missing_ok=True)
    with mock.patch.object(tempfile, "tempdir", str(folder)), watched_quietly(folder, outputs):
        result = CliRunner().invoke(cli.app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code in (0, 2), result.stderr
    if result.exit_code == 2:
        problems = [
            line for line in result.stderr.splitlines() if not line.startswith("calibrant: warning: ")
        ]
        assert len(problems) == 1
        assert problems[0].startswith("calibrant: ")
        assert problems[0].isprintable()
        assert not any(each.exists() for each in outputs)


@contextmanager
def watched_quietly(folder, written):
    """As `watched`, but the command may print."""
    with watched(folder, written), mock.patch("builtins.print", PRINT):
        yield


PRINT = builtins.print


# ----------------------------------------------------------------------------------- calibrators and recipes


@given(data=st.data())
@FUZZ
def test_calibrators(folder, data):
    path = folder / "c.safetensors"
    method = data.draw(st.sampled_from(["temperature", "matrix", "isotonic", "identity", "spline"]))
    valid = CALIBRATOR_FILES.get(method)
    if valid is None:
        logits = torch.from_numpy(np.random.default_rng(1).normal(size=(60, CLASSES)))
        save_calibrator(create_calibrator(method).fit(logits, torch.arange(60) % CLASSES), path)
        valid = CALIBRATOR_FILES[method] = path.read_bytes()
    path.write_bytes(data.draw(damaged(valid)))
    with watched(folder):
        refused_or_read(lambda: load_calibrator(path), ValueError)


CALIBRATOR_FILES: dict[str, bytes] = {}


PLAIN = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(
    changes=st.dictionaries(
        st.sampled_from(["method", "num_classes", "class_names", "options", "checksum"]),
        st.one_of(
            PLAIN,
            st.sampled_from([10**7, 10**9, -1, 0, float("inf"), {"bins": 10**12}, {"x": 1}, ["a"] * CLASSES]),
        ),
        min_size=1,
    )
)
@example(changes={"num_classes": float("inf")})
@example(changes={"num_classes": 10**7})
@FUZZ
def test_descriptions_of_calibrators(folder, changes):
    """The numbers are as they were saved, and so is their checksum."""
    path = folder / "c.safetensors"
    save_calibrator(create_calibrator("identity").fit(TENSORS["logits"], TENSORS["labels"]), path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    description = json.loads(header["__metadata__"]["calibrator"]) | changes
    metadata = {**header["__metadata__"], "calibrator": json.dumps(description)}
    path.write_bytes(save({"nothing": torch.zeros(1)}, metadata=metadata))
    with watched(folder):
        refused_or_read(lambda: load_calibrator(path), ValueError)


@given(data=st.data(), name=st.sampled_from(sorted(shipped_recipes())))
@FUZZ
def test_recipes(folder, data, name):
    path = folder / "r.toml"
    path.write_bytes(data.draw(damaged(shipped_recipes()[name].encode())))
    with watched(folder):
        recipe = refused_or_read(lambda: Recipe.load(path), RecipeError)
        if recipe is not None:
            assert Recipe.from_toml(recipe.to_toml()) == recipe


@given(text=st.text(max_size=60))
@FUZZ
def test_names_with_options(text):
    choice = refused_or_read(lambda: Choice.parse(text), RecipeError)
    if choice is not None:
        str(choice)


@given(data=st.data(), text=st.sampled_from([b"30\n20\n10\n", b"[30, 20, 10]"]))
@FUZZ
def test_class_counts(folder, data, text):
    path = folder / "counts"
    path.write_bytes(data.draw(damaged(text)))
    with watched(folder):
        counts = refused_or_read(lambda: read_class_counts(path), BadFileError)
    assert counts is None or all(count >= 0 for count in counts)


# --------------------------------------------------------------------------------------- checkpoints and data


@pytest.fixture(scope="module")
def checkpoint(folder):
    state = {
        "model": {"weight": torch.randn(4, 3)},
        "epoch": 3,
        "step": 0,
        "text": "x",
        "list": [1, 2.0, None],
    }
    save_checkpoint(folder / "k", state)
    return (folder / "k").read_bytes()


@given(data=st.data())
@FUZZ
def test_checkpoints(folder, checkpoint, data):
    path = folder / "k"
    path.write_bytes(data.draw(damaged(checkpoint)))
    with watched(folder):
        refused_or_read(lambda: load_checkpoint(path), ValueError)


def image(kind):
    return to_bytes(Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save, kind)


def mat():
    from scipy.io import savemat

    images = np.zeros((2, 2, 3, 4), np.uint8)
    return to_bytes(savemat, {"X": images, "y": np.ones((4, 1), np.uint8)}, do_compression=True)


DATA = {
    "pickle": (pickle.dumps({"data": LOGITS, "labels": [1, 2], "x": b"y"}, 2), read_pickle),
    "pickle 4": (pickle.dumps({"data": LOGITS, "labels": [1, 2], "x": {"a": ["b"] * 9}}, 4), read_pickle),
    "mat": (mat(), lambda path: read_mat(path, ("X", "y"))),
    "npy": (to_bytes(np.save, LOGITS), read_npy),
    **{
        kind: (image(kind), lambda path: read_image(path, "RGB"))
        for kind in ("PNG", "JPEG", "TIFF", "BMP", "PPM")
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", DATA)
@given(data=st.data())
@FUZZ
def test_data_files(folder, kind, data):
    valid, read = DATA[kind]
    path = folder / "d"
    path.write_bytes(data.draw(damaged(valid)))
    with watched(folder):
        refused_or_read(lambda: read(path), ValueError)


TEXT = "\n".join(f"text {number},{number % 2}" for number in range(20))
DATA_SETS = {
    "d.npz": (
        Choice("npz", {"file": "d.npz"}),
        to_bytes(np.savez, features=LOGITS, labels=LABELS, class_names=NAMES),
    ),
    "t.csv": (
        Choice("table", {"file": "t.csv", "target": "y"}),
        ("x,z,y\n" + "".join(f"{n / 8},{'abc'[n % 3]},{n % 2}\n" for n in range(40))).encode(),
    ),
    "t.parquet": (Choice("table", {"file": "t.parquet", "target": "label"}), PREDICTIONS[".parquet"]),
    "d.csv": (Choice("text-table", {"file": "d.csv", "length": 4}), f"text,label\n{TEXT}".encode()),
    "d.jsonl": (
        Choice("text-table", {"file": "d.jsonl", "length": 4}),
        "\n".join(json.dumps({"text": f"t {n}", "label": n % 2}) for n in range(20)).encode(),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DATA_SETS)
@given(data=st.data())
@FUZZ
def test_data_sets(folder, name, data):
    choice, valid = DATA_SETS[name]
    (folder / name).write_bytes(data.draw(damaged(valid)))
    with watched(folder):
        sets = refused_or_read(lambda: load_data(choice, folder), ValueError)
    if sets is not None:
        for part in (sets.train, sets.validation, sets.test):
            assert part.targets is None or not len(part) or int(part.targets.max()) < sets.num_classes


def test_the_watch_sees_what_it_should(tmp_path):
    """A check that cannot fail would find nothing."""
    harmful = pickle.dumps(Surprise())
    with pytest.raises(AssertionError, match="code ran"), watched(tmp_path):
        pickle.loads(harmful)
    with pytest.raises(AssertionError), watched(tmp_path):
        bytearray(MEMORY + 1)
    (tmp_path / "a").write_text("before")
    with pytest.raises(AssertionError), watched(tmp_path):
        (tmp_path / "a").write_text("after")
    assert os.listdir(tmp_path) == ["a"]
