"""All formats give the same predictions, in batches; errors say what is wrong with a file."""

import csv
import json
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from calibrant.calibrators import create_calibrator, save_calibrator
from calibrant.conformal import create_conformal, save_conformal
from calibrant.predictions import FORMATS, BadFileError, open_predictions, read_class_counts

ROWS, CLASSES = 50, 4
NAMES = ("cat", "dog", "a.b", "horse, grey")


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(ROWS, CLASSES)) * 3


@pytest.fixture
def labels():
    labels = np.random.default_rng(1).integers(0, CLASSES, ROWS)
    labels[[3, 17]] = -100
    return labels


def softmax(logits):
    exponential = np.exp(logits - logits.max(1, keepdims=True))
    return exponential / exponential.sum(1, keepdims=True)


def write_npz(path, kind, scores, labels):
    np.savez(path, **{kind: scores}, labels=labels, class_names=np.array(NAMES), other=np.zeros(3))


def write_npz_compressed(path, kind, scores, labels):
    np.savez_compressed(path, **{kind: scores}, labels=labels, class_names=np.array(NAMES))


def write_npy(path, kind, scores, labels):
    stem = path.name.split(".")[0]
    np.save(path.with_name(f"{stem}.{kind}.npy"), scores)
    np.save(path.with_name(f"{stem}.labels.npy"), labels)
    path.with_name(f"{stem}.class_names.txt").write_text("\n".join(NAMES) + "\n")


def write_pt(path, kind, scores, labels):
    content = {kind: torch.from_numpy(scores), "labels": torch.from_numpy(labels), "class_names": list(NAMES)}
    torch.save({**content, "epoch": 3}, path)


def write_old_pt(path, kind, scores, labels):
    content = {kind: torch.from_numpy(scores), "labels": torch.from_numpy(labels), "class_names": list(NAMES)}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def write_safetensors(path, kind, scores, labels):
    tensors = {kind: torch.from_numpy(scores), "labels": torch.from_numpy(labels)}
    save_file(tensors, path, metadata={"class_names": json.dumps(NAMES)})


PREFIX = {"logits": "logit_", "probabilities": "probability_"}


def write_csv(path, kind, scores, labels):
    header = ",".join(["image", *(f'"{PREFIX[kind]}{name}"' for name in NAMES), "label"])
    rows = [
        ",".join([f'"text, {row}"', *map(repr, map(float, scores[row])), str(labels[row])])
        for row in range(len(labels))
    ]
    path.write_text("\n".join([header, *rows]) + "\n")


def write_parquet(path, kind, scores, labels):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {f"{PREFIX[kind]}{name}": scores[:, index] for index, name in enumerate(NAMES)}
    table = pyarrow.table({"image": [str(row) for row in range(len(labels))], **columns, "label": labels})
    parquet.write_table(table, path, row_group_size=20)


def write_jsonl(path, kind, scores, labels):
    rows = [
        {f"{PREFIX[kind]}{name}": float(score) for name, score in zip(NAMES, scores[row], strict=True)}
        for row in range(len(labels))
    ]
    lines = [json.dumps({"image": "é", "label": int(labels[row]), **rows[row]}) for row in range(len(labels))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


WRITERS = {
    "model.npz": write_npz,
    "model.NPZ": write_npz_compressed,
    "model.logits.npy": write_npy,
    "model.pt": write_pt,
    "model.old.pt": write_old_pt,
    "model.safetensors": write_safetensors,
    "model.csv": write_csv,
    "model.parquet": write_parquet,
    "model.jsonl": write_jsonl,
}

TABLES = ("model.csv", "model.parquet", "model.jsonl")


def everything(path, **options):
    batches = list(open_predictions(path, **options).batches())
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def written(folder, name, kind, scores, labels):
    path = folder / name.replace("logits", kind)
    # NumPy adds a suffix to a file name, but not to an open file.
    if name == "model.NPZ":
        with path.open("wb") as stream:
            WRITERS[name](stream, kind, scores, labels)
    else:
        WRITERS[name](path, kind, scores, labels)
    return path


def test_every_format_is_tested():
    assert {Path(name).suffix.lower() for name in WRITERS} == set(FORMATS)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_round_trips(tmp_path, logits, labels, name):
    file = open_predictions(written(tmp_path, name, "logits", logits, labels))
    assert file.name == ("model.old" if "old" in name else "model")
    assert (file.kind, file.rows, file.num_classes, file.spatial) == ("logits", ROWS, CLASSES, ())
    assert file.class_names == NAMES
    assert file.size == logits.nbytes
    for batch in (file.load(), everything(file.path)):
        assert batch[0].dtype == torch.float64
        assert torch.equal(batch[0], torch.from_numpy(logits))
        assert torch.equal(batch[1], torch.from_numpy(labels))


@pytest.mark.parametrize("name", WRITERS)
def test_probabilities_arrive_as_logarithms(tmp_path, logits, labels, name):
    probabilities = softmax(logits)
    probabilities[0] = [0, 1, 0, 0]
    file = open_predictions(written(tmp_path, name, "probabilities", probabilities, labels))
    assert file.kind == "probabilities"
    read, _ = file.load()
    torch.testing.assert_close(read[1:].softmax(1), torch.from_numpy(probabilities[1:]))
    assert read[0, 1] == 0
    assert torch.equal(
        read[0, [0, 2, 3]].exp(),
        torch.full((3,), torch.finfo(torch.float32).tiny, dtype=torch.float64).log().exp(),
    )


@pytest.mark.parametrize("name", WRITERS)
def test_a_long_file_comes_in_short_batches(tmp_path, logits, labels, name):
    file = open_predictions(written(tmp_path, name, "logits", logits, labels))
    batches = list(file.batches(chunk=7 * CLASSES + 1))
    assert max(len(batch) for batch, _ in batches) == 7
    assert sum(len(batch) for batch, _ in batches) == ROWS
    assert torch.equal(torch.cat([batch for batch, _ in batches]), torch.from_numpy(logits))
    if name not in (
        "model.pt",
        "model.old.pt",
        "model.safetensors",
    ):  # mapped into memory as a whole, or read
        assert all(batch.untyped_storage().nbytes() < logits.nbytes for batch, _ in batches)
    assert len(list(file.batches(chunk=1))) == ROWS


@pytest.mark.parametrize("name", ["model.npz", "model.NPZ"])
def test_archives_are_decompressed_no_further_than_asked_for(tmp_path, name):
    logits, labels = np.zeros((20_000, CLASSES)), np.zeros(20_000, int)
    path = written(tmp_path, name, "logits", logits, labels)
    asked = []
    read = zipfile.ZipExtFile.read

    def watched(stream, amount=-1):
        asked.append(amount)
        return read(stream, amount)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile.ZipExtFile, "read", watched)
        assert sum(len(batch) for batch, _ in open_predictions(path).batches(chunk=4000)) == 20_000
    assert 0 < max(asked) <= 4000 * 8
    assert min(asked) >= 0


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in TABLES])
def test_images(tmp_path, name):
    logits = np.random.default_rng(0).normal(size=(6, CLASSES, 5, 3)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, CLASSES, (6, 5, 3)).astype(np.uint8)
    labels[:, 0] = 255
    file = open_predictions(written(tmp_path, name, "logits", logits, labels), ignore_index=255)
    assert file.spatial == (5, 3)
    assert [len(batch) for batch, _ in file.batches(chunk=2 * CLASSES * 15)] == [2, 2, 2]
    read, read_labels = file.load()
    assert torch.equal(read, torch.from_numpy(logits))
    assert torch.equal(read_labels, torch.from_numpy(labels).long())


def test_every_way_numbers_are_stored(tmp_path, logits, labels):
    half = torch.from_numpy(logits).bfloat16()
    torch.save({"logits": half, "labels": torch.from_numpy(labels).short()}, tmp_path / "a.pt")
    save_file({"logits": half, "labels": torch.from_numpy(labels).short()}, tmp_path / "a.safetensors")
    half = half.float().numpy()
    for index, array in enumerate((half.astype(">f4"), np.asfortranarray(half), half.astype(np.float64))):
        np.savez(tmp_path / f"{index}.npz", logits=array, labels=labels.astype(">i2"))
        np.savez_compressed(tmp_path / f"{index}c.npz", logits=array, labels=labels.astype(np.int8))
        np.save(tmp_path / f"{index}.logits.npy", array)
        np.save(tmp_path / f"{index}.labels.npy", labels)
    files = [*tmp_path.glob("*.npz"), *tmp_path.glob("*.logits.npy"), *tmp_path.glob("a.*")]
    assert len(files) == 11
    for path in files:
        read, read_labels = everything(path)
        assert torch.equal(read.float(), torch.from_numpy(half)), path
        assert torch.equal(read_labels, torch.from_numpy(labels)), path


def test_half_precision_is_computed_with_in_single(tmp_path, logits, labels):
    np.savez(tmp_path / "m.npz", probabilities=softmax(logits).astype(np.float16), labels=labels)
    file = open_predictions(tmp_path / "m.npz")
    assert file.dtype == torch.float32
    assert file.load()[0].dtype == torch.float32
    assert file.class_names is None


def test_any_file_of_a_pair_will_do(tmp_path, logits, labels):
    write_npy(tmp_path / "m.npy", "logits", logits, labels)
    by_scores, by_labels = (open_predictions(tmp_path / f"m.{role}.npy") for role in ("logits", "labels"))
    assert by_scores == by_labels
    assert by_labels.path == tmp_path / "m.logits.npy"
    assert by_labels.name == "m"
    np.save(tmp_path / "m.probabilities.npy", softmax(logits))
    assert open_predictions(tmp_path / "m.probabilities.npy").kind == "probabilities"
    with pytest.raises(BadFileError, match="both logits and probabilities"):
        open_predictions(tmp_path / "m.labels.npy")


def test_csv_with_quotes_blank_lines_and_line_breaks(tmp_path):
    path = tmp_path / "m.csv"
    text = '\ufefftext,label,logit_no,logit_yes\r\n"a\r\nb, c",0,1,-1.5\r\n\r\n'
    text += 'd,1.0,"2",3e-2\r\n   \r\ne,1,0,0\r\n\r\n'
    path.write_bytes(text.encode())
    logits, labels = open_predictions(path).load()
    assert logits.tolist() == [[1, -1.5], [2, 0.03], [0, 0]]
    assert labels.tolist() == [0, 1, 1]
    assert [len(batch) for batch, _ in open_predictions(path).batches(chunk=4)] == [2, 1]


@pytest.mark.parametrize(
    "text",
    [
        "label;logit_no;logit_yes\n0;1;-1.5\n1;2;3e-2\n",
        "label;logit_no;logit_yes\nno;1;-1.5\nyes;2;0.03\n",
        '\ufefftext;label;logit_no;logit_yes\r\n"a; b, c";0;1;-1.5\r\nd;1;2;0.03\r\n',
        "label;logits\n0;[1, -1.5]\n1;[2 0.03]\n",
    ],
)
def test_semicolons_as_in_the_tables_of_train(tmp_path, text):
    (tmp_path / "m.csv").write_bytes(text.encode())
    file = open_predictions(tmp_path / "m.csv")
    logits, labels = file.load()
    assert logits.tolist() == [[1, -1.5], [2, 0.03]]
    assert labels.tolist() == [0, 1]
    assert [len(batch) for batch, _ in file.batches(chunk=2)] == [1, 1]


def write_labels(path, scores, labels):
    """A file of logits with labels of any type, in the format of the suffix."""
    if path.suffix == ".npz":
        np.savez(path, logits=scores, labels=labels)
    elif path.suffix == ".npy":
        np.save(path.with_name("m.logits.npy"), scores)
        np.save(path.with_name("m.labels.npy"), labels)
    elif path.suffix in (".pt", ".safetensors"):
        save = torch.save if path.suffix == ".pt" else save_file
        save({"logits": torch.from_numpy(scores), "labels": torch.from_numpy(labels)}, path)
    else:
        columns = {f"logit_{name}": column.tolist() for name, column in zip("abc", scores.T, strict=False)}
        columns = {"label": labels.tolist(), **columns}
        if path.suffix == ".csv":
            rows = [columns, *zip(*columns.values(), strict=True)]
            path.write_text("\n".join(",".join(map(str, row)) for row in rows))
        elif path.suffix == ".jsonl":
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(columns), path)


LABELLED = ["m.npz", "m.logits.npy", "m.pt", "m.safetensors", "m.csv", "m.jsonl", "m.parquet"]


@pytest.mark.parametrize("name", LABELLED)
def test_whole_labels_of_floating_point(tmp_path, name):
    labels = np.array([2.0, 0.0, -100.0, 1.0])
    write_labels(tmp_path / name, np.zeros((4, 3)), labels)
    assert open_predictions(tmp_path / name).load()[1].tolist() == [2, 0, -100, 1]
    write_labels(tmp_path / name, np.zeros((4, 3)), np.array([2.0, 0.0, 2.5, 1.0]))
    refused(tmp_path / name, "label 2.5 at row 3 (counted from 1", "); expected integer class numbers")


def test_labels_that_their_type_rounds(tmp_path):
    """2049 becomes 2048 in half precision."""
    for dtype, large in ((torch.float16, 2049), (torch.bfloat16, 257)):
        for label in (large, large - 2):
            tensors = {"logits": torch.zeros(2, 3000), "labels": torch.tensor([1, label], dtype=dtype)}
            torch.save(tensors, tmp_path / "m.pt")
            if label == large:
                words = f"label {large - 1}.0 at row 2 (counted from 1), so large that {dtype}".replace(
                    "torch.", ""
                )
                refused(tmp_path / "m.pt", words)
            else:
                assert open_predictions(tmp_path / "m.pt").load()[1].tolist() == [1, label]


@pytest.mark.parametrize("name", LABELLED)
def test_labels_of_decisions_may_be_true_and_false(tmp_path, name):
    labels = np.array([True, False, False])
    write_labels(tmp_path / name, np.zeros((3, 1)), labels)
    assert open_predictions(tmp_path / name, binary=True).load()[1].tolist() == [[1], [0], [0]]
    write_labels(tmp_path / name, np.zeros((3, 2)), labels)  # of two classes they may mean anything
    refused(tmp_path / name, "expected")


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_several_labels_may_be_true_and_false(tmp_path, suffix):
    labels = np.array([[True, False], [True, True], [False, False]])
    write_labels(tmp_path / f"m{suffix}", np.zeros((3, 2)), labels)
    found = open_predictions(tmp_path / f"m{suffix}", binary=True).load()[1]
    assert found.tolist() == labels.astype(int).tolist()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_true_and_false_in_any_case(tmp_path, suffix):
    path, words = tmp_path / f"m{suffix}", ["TRUE", "false", "False", "true"]
    write_labels(path, np.zeros((4, 1)), np.array(words))
    assert open_predictions(path, binary=True).load()[1].flatten().tolist() == [1, 0, 0, 1]
    write_labels(path, np.zeros((4, 1)), np.array([*words[:3], "Yes"]))
    refused(path, "'Yes'", "at row 4", "expected", "false or true", binary=True)


def test_lists_of_one_score_with_true_and_false(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"label": true, "logits": [1.5]}\n{"label": "FALSE", "logits": [0.5]}\n')
    assert open_predictions(path, binary=True).load()[1].flatten().tolist() == [1, 0]
    path.write_text('{"label": true, "logits": [1.5, 2.5]}\n')
    refused(path, "label True at row 1 (counted from 1); expected a class number")
    (tmp_path / "m.csv").write_text("label,logits\nTrue,[1.5]\nFALSE,[0.5]\n")
    assert open_predictions(tmp_path / "m.csv", binary=True).load()[1].flatten().tolist() == [1, 0]
    path.write_text('{"label": true, "logits": [1.5]}\n{"label": "perhaps", "logits": [0.5]}\n')
    (tmp_path / "m.csv").write_text("label,logits\nTrue,[1.5]\nperhaps,[0.5]\n")
    for table in (path, tmp_path / "m.csv"):
        refused(table, "'perhaps'", "at row 2", "expected 0 or 1, or false or true", binary=True)


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        ("probability_no", "of yes, in a column called probability (if it is that of no, write 1 - p)"),
        ("probability_False", "expected the probability of yes"),
        ("probability_neg", "expected the probability of yes"),
        (
            "logit_0",
            "expected the logit of yes, in a column called logit (if it is that of no, write -logit)",
        ),
    ],
)
def test_a_single_column_that_is_called_no(tmp_path, column, advice):
    (tmp_path / "m.csv").write_text(f"label,{column}\n1,0.25\n")
    refused(tmp_path / "m.csv", f"has only the column {column}; expected", advice, binary=True)


def test_a_single_score_of_arrays_that_is_called_no(tmp_path):
    arrays = {"probabilities": np.full((3, 1), 0.5), "labels": np.zeros((3, 1), int)}
    np.savez(tmp_path / "m.npz", **arrays, class_names=np.array(["no"]))
    words = "has only the class name 'no'; expected the probability of yes (if it is that of no, write 1 - p)"
    refused(tmp_path / "m.npz", words, binary=True)


def test_a_single_column_that_is_called_1(tmp_path):
    """It was refused with the advice to call it 0, which is refused as well."""
    (tmp_path / "m.csv").write_text("label,probability_1\n0,0.25\n1,0.75\n")
    file = open_predictions(tmp_path / "m.csv", binary=True)
    assert file.load()[1].tolist() == [[0], [1]]
    assert file.class_names is None
    refused(tmp_path / "m.csv", "a single score in each row; expected one for each class; if each score is a")


def test_loading_reports_its_progress(tmp_path, logits, labels):
    write_npz(tmp_path / "m.npz", "logits", logits, labels)
    seen = []
    open_predictions(tmp_path / "m.npz").load(seen.append)
    assert sum(seen) == ROWS


# ---------------------------------------------------------------------------------------------- bad files


def refused(path, *words, **options):
    """Assert that reading fails with one line that contains the file name and the words."""
    with pytest.raises(BadFileError) as caught:
        open_predictions(path, **options).load()
    message = str(caught.value)
    assert message.startswith(str(path.with_name(path.name.split(".")[0]))), message
    assert "\n" not in message
    for word in words:
        assert word in message


LOGITS, LABELS = np.zeros((3, 2), np.float32), np.zeros(3, int)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"labels": LABELS}, ["neither logits nor probabilities", "found labels"]),
        ({"logits": LOGITS, "targets": LABELS}, ["no labels", "found logits, targets"]),
        ({"logits": LOGITS, "probabilities": LOGITS, "labels": LABELS}, ["both", "exactly one"]),
        ({}, ["neither", "found nothing"]),
        ({"logits": LOGITS[:0], "labels": LABELS[:0]}, ["no predictions", "(0, 2)"]),
        ({"logits": LOGITS[:, :1], "labels": LABELS}, ["1 class", "at least 2"]),
        ({"logits": LOGITS[:, 0], "labels": LABELS}, ["shape (3,)", "(N, K)"]),
        ({"logits": LOGITS, "labels": LABELS[:2]}, ["shape (2,)", "expected (3,)"]),
        ({"logits": LOGITS, "labels": LOGITS.astype(int)}, ["shape (3, 2)", "expected (3,)"]),
        ({"logits": np.zeros((3, 5, 2)), "labels": np.zeros((3, 5), int)}, ["class axis comes second"]),
        ({"logits": np.zeros((5, 3, 2)), "labels": LABELS}, ["shape (3,)", "--ensemble"]),
        ({"logits": LOGITS.astype(int), "labels": LABELS}, ["int64", "floating point"]),
        (
            {"logits": LOGITS, "labels": LABELS + 0.5},
            ["label 0.5 at row 1 (", "; expected integer class numbers"],
        ),
        ({"logits": LOGITS, "labels": np.array([0, np.nan, 0])}, ["label nan at row 2", "integer"]),
        ({"logits": LOGITS, "labels": np.array([0, 0, np.inf])}, ["label inf at row 3", "integer"]),
        ({"logits": LOGITS, "labels": LABELS.astype(bool)}, ["bool", "integer"]),
        ({"logits": LOGITS, "labels": np.eye(2, dtype=int)[[0, 1, 1]]}, ["one-hot: store their argmax over"]),
        ({"logits": LOGITS, "labels": np.eye(2, dtype=bool)[[0, 1, 1]]}, ["one-hot: store their argmax"]),
        ({"logits": LOGITS, "labels": np.eye(2)[[0, 1, 1]]}, ["one-hot: store their argmax"]),
        ({"logits": LOGITS, "labels": np.full((3, 2), 0.5)}, ["label 0.5 at row 1 (", "; expected integer"]),
        ({"logits": LOGITS, "labels": np.array([1, 2, 1])}, ["if the labels count from 1, subtract 1"]),
        (
            {"logits": LOGITS},
            ["no labels", "expected an integer array named labels, found logits"],
        ),
        ({"logits": LOGITS, "labels": np.array([0, 0, 2])}, ["label 2 at row 3", "expected 0 to 1"]),
        ({"logits": LOGITS, "labels": np.array([0, -1, 0])}, ["label -1 at row 2", "ignore_index=-100"]),
        ({"logits": LOGITS, "labels": LABELS - 100}, ["every label is -100"]),
        ({"logits": np.array([[0, 0], [np.nan, 0], [0, 0]]), "labels": LABELS}, ["NaN", "row 2"]),
        ({"logits": np.array([[0, 0], [0, 0], [0, np.inf]]), "labels": LABELS}, ["infinite", "row 3"]),
        ({"probabilities": LOGITS, "labels": LABELS}, ["sum to 0", "row 1", "expected 1"]),
        ({"probabilities": LOGITS + 50, "labels": LABELS}, ["50", "expected 0 to 1"]),
        ({"probabilities": np.array([[-0.1, 1.1]] * 3), "labels": LABELS}, ["-0.1 to 1.1", "row 1"]),
        (
            {"logits": LOGITS, "labels": LABELS, "class_names": np.array(["a"])},
            ["1 class_names", "2 classes"],
        ),
        ({"logits": LOGITS, "labels": LABELS, "class_names": np.array(["a", "a"])}, ["'a' twice"]),
        ({"logits": LOGITS, "labels": LABELS, "class_names": np.array("a")}, ["list of strings"]),
        ({"logits": LOGITS, "labels": np.array([0, 1, None])}, ["labels", "pickled"]),
        (
            {"logits": LOGITS, "labels": LABELS, "class_names": np.array(["a", None])},
            ["class_names", "pickled"],
        ),
    ],
)
def test_arrays_that_will_not_do(tmp_path, arrays, words):
    np.savez(tmp_path / "m.npz", **arrays)
    refused(tmp_path / "m.npz", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty; expected predictions"]),
        ("\n", ["no scores", "logit_<class>"]),
        ("label,logit_a,logit_b\n", ["no predictions"]),
        ("label,a,b\n0,1,2\n", ["no scores", "found label, a, b"]),
        ("target,logit_a,logit_b\n0,1,2\n", ["no labels", "named label"]),
        ("label,logit_a\n0,1\n", ["a single score in each row; expected one for each class"]),
        ("label,logit_a,probability_b\n0,1,2\n", ["both"]),
        ("label,logit_a,logit_b,logits_c\n0,1,2,3\n", ["'logits_c'", "logit_<class>"]),
        ("label,logit_a,logit_a\n0,1,2\n", ["'logit_a' twice"]),
        (
            "label,logit_1,logit_2\n1,1,2\n",
            ["the column logit_1 where logit_0 is expected", "logit_0 to logit_1"],
        ),
        ("label,logit_0,logit_2,logit_1\n1,1,2,3\n", ["count columns from 0"]),
        (
            "label,logit_a,logit_b\n0,1,2\n\n0,1,x\n",
            ["has 'x' in column 'logit_b' at row 2 (line 4 of the file); expected a number"],
        ),
        ("label,logit_a,logit_b\n0,1,2\n0,1,\n", ["empty cell in column 'logit_b' at row 2 (line 3 "]),
        ("label,logit_a,logit_b\n0,1,2\n,1,1\n", ["empty cell in column 'label' at row 2 (line 3 "]),
        ("label,logit_a,logit_b\n0,1,2\n0,1\n", ["row 2 (line 3 of the file) has 2 cells; expected 3"]),
        ("id,label,logit_a,logit_b\n0,0,1,2\n0,1\n", ["row 2 (line 3 of the file) has 2 cells; expected 4"]),
        ("label,logit_a,logit_b\n0,1,1_0\n", ["has '1_0' in column 'logit_b' at row 1"]),
        (
            "label;logit_a;logit_b\n0;1,5;2\n",
            ["has '1,5' in column 'logit_a' at row 1 (line 2 of the file)", "a number with a decimal point"],
        ),
        ("logit_a\tlogit_b\tlabel\n1\t2\t0\n", ["separated by tabs; expected commas or semicolons"]),
        ("label,logit_a,logit_b\n0,1,2,3\n", ["4 cells", "expected 3"]),
        ("label,logit_a,logit_b\n0.5,1,2\n", ["label 0.5 at row 1", "integer"]),
        (
            "label,logit_a,logit_b\nnan,1,2\n",
            ["'nan' in column 'label' at row 1", "expected", "one of the class names a, b"],
        ),
        (
            "label,logit_a,logit_b\n0,1,nan\n",
            ["column 'logit_b' is NaN", "row 1 (line 2 of the file)"],
        ),
        ("label,logit_a,logit_b\n0,1,2\n\n1,inf,2\n", ["'logit_a' is NaN or infinite at row 2 (line 4 "]),
        ("id,label,logit_a,logit_b\n\na,0,1,2\n\nb,0,1,nan\n", ["'logit_b' is NaN", "row 2 (line 5 of"]),
        ('label,logits\n0,"[1, 2]"\n\n0,"[1, nan]"\n', ["logits are NaN", "row 2 (line 4 of the file)"]),
        (
            "label,logit_a,logit_b\ncat,1,2\n",
            [
                "'cat' in column 'label' at row 1 (line 2 of the file)",
                "a class number, or one of",
                "names a, b",
            ],
        ),
        ("label,logit_0,logit_1\ncat,1,2\n", ["'cat' in column 'label'", "expected a class number"]),
        ("label,logit_0,logit_cat\ncat,1,2\n", ["'cat' in column 'label'", "expected a class number"]),
        ("label,logit_1,logit_2,logit_nan\n1,9,0,0\n", ["logit_1 where logit_0 is expected"]),
        ("label,logit_cat,logit_2\n0,9,0\n", ["logit_2 where logit_1 is expected"]),
        ("label,probability_a,probability_b\n0,1,0.5\n", ["sum to 1.5", "at row 1 (line 2 of the file)"]),
        (
            "label,probability_a,probability_b\n\n0,0.4,0.3\n",
            ["line 3", "the 2 classes a, b: is one missing?"],
        ),
        (
            "label,logit_a,logit_b\n0,1,2\n2,1,2\n",
            ["label 2", "line 3", "the 2 classes a, b: is one missing?"],
        ),
        ("label,logit_a,logit_b\n1,1,2\n2,1,2\n", ["label 2", "line 3", "labels count from 1"]),
    ],
)
def test_tables_that_will_not_do(tmp_path, text, words):
    (tmp_path / "m.csv").write_text(text)
    refused(tmp_path / "m.csv", *words)


ANIMALS = ["bee", "cat", "dog"]
NAMED = [("dog", 0.5, 0.25, 0.25), ("bee", 0.75, 0.25, 0.0), ("cat", 0.0, 0.5, 0.5)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_labels_may_be_the_names_of_the_columns(tmp_path, suffix):
    columns, path = ["label", *(f"probability_{name}" for name in ANIMALS)], tmp_path / f"m{suffix}"

    def write(rows):
        if suffix == ".csv":
            with path.open("w", newline="") as stream:
                csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC).writerows([columns, *rows])
        elif suffix == ".jsonl":
            path.write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(dict(zip(columns, zip(*rows, strict=True), strict=True))), path)

    write(NAMED)
    logits, labels = open_predictions(path).load()
    assert labels.tolist() == [2, 0, 1]
    assert logits.softmax(1)[0].tolist() == pytest.approx([0.5, 0.25, 0.25])
    write([*NAMED, ("cow", 0.5, 0.5, 0.0)])
    refused(path, "'cow'", "row 4", "class names bee, cat, dog")


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_names_of_any_text_type_in_parquet(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    label = pyarrow.array(["dog", "cat"], pyarrow.large_string())
    label = label.dictionary_encode() if kind == "dictionary" else label
    table = pyarrow.table({"label": label, "logit_cat": [0.0, 1.0], "logit_dog": [1.0, 0.0]})
    parquet.write_table(table, tmp_path / "m.parquet")
    assert open_predictions(tmp_path / "m.parquet").load()[1].tolist() == [1, 0]


@pytest.mark.parametrize("label", ["0_1", "\u0661"])
def test_numbers_that_only_python_knows_are_no_labels(tmp_path, label):
    (tmp_path / "m.csv").write_text(f"label,logit_a,logit_b\n{label},1,2\n", encoding="utf-8")
    refused(tmp_path / "m.csv", "in column 'label' at row 1", "expected a class number")


def test_named_labels_beside_other_columns_and_ignored_elements(tmp_path):
    text = "image,logit_cat,logit_dog,label\na.png,1,2, dog \nb.png,1,2,-100\nc.png,2,1,cat\n"
    (tmp_path / "m.csv").write_text(text)
    assert open_predictions(tmp_path / "m.csv").load()[1].tolist() == [1, -100, 0]


def write_single_scores(path, column, labels):
    scores = np.linspace(0.1, 0.9, len(labels)).tolist()
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"label": labels, column: scores}), path)
    elif path.suffix == ".csv":
        path.write_text("\n".join([f"label,{column}", *map("{},{}".format, labels, scores)]))
    else:
        rows = zip(labels, scores, strict=True)
        path.write_text("\n".join(json.dumps({"label": label, column: score}) for label, score in rows))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_single_column_may_be_named_after_one_of_two_words(tmp_path, suffix):
    path = tmp_path / f"m{suffix}"
    write = partial(write_single_scores, path)
    for column, labels in {"spam": ["ham", "spam", "Spam"], "neg": ["pos", "neg", "neg"]}.items():
        write(f"probability_{column}", labels)
        file = open_predictions(path, binary=True)
        for _ in range(2):
            logits, found = file.load()
            assert found.flatten().tolist() == [0, 1, 1]
            assert logits.flatten().sigmoid().tolist() == pytest.approx([0.1, 0.5, 0.9])
        assert file.class_names == (f"not {column}", column)
    write("probability_spam", ["ham", "spam", "eggs"])
    refused(path, "'eggs'", "at row 3", "two different words, and eggs is a third beside ham", binary=True)
    write("probability_spam", ["spam", "", "ham"])
    refused(path, "at row 2", binary=True)
    write("probability_spam", ["true", "false", "ham"])
    refused(path, "'ham'", "at row 3", "expected 0 or 1, or false or true", binary=True)
    write("probability", ["spam", "ham", "ham"])
    refused(path, "'spam'", "two words, if the column of scores ends in the word for yes", binary=True)
    write("probability_positive", ["pos", "pos", "pos"])  # may be yes, and would count as no
    refused(path, "has no label 'positive', the word in the name of its scores", binary=True)
    write("probability_spma", ["ham", "spam", "ham"])
    if suffix == ".parquet":
        refused(path, "no label 'spma', the word in the name of its scores, which may be", binary=True)
    else:
        words = "expected ham, or spma, the word in the name of the scores; if spma is misspelt, name"
        refused(path, "'spam'", "at row 2", words, binary=True)
    if suffix != ".jsonl":  # where numbers are no texts
        write("probability_no", ["-100", "yes", "no"])  # the first label was taken for one of numbers
        assert open_predictions(path, binary=True).load()[1].flatten().tolist() == [-100, 0, 1]
        write("probability_spam", ["0", "1", "ham"])
        refused(path, "'ham'", "at row 3", "expected 0 or 1", binary=True)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_0_and_1_beside_words_are_refused_in_any_order(tmp_path, suffix):
    (tmp_path / "folder").mkdir()
    path, other = (tmp_path / "folder" / f"{name}{suffix}" for name in "ab")

    def write(file, labels):
        if suffix == ".jsonl":
            labels = [int(label) if label[-1].isdigit() else label for label in labels]
        write_single_scores(file, "probability_yes", labels)

    expected = "expected no, or yes, the word in the name of the scores"
    write(path, ["no", "yes", "1", "0"])
    refused(path, "at row 3", expected, binary=True)
    write(path, ["-100", "no", "0", "yes"])
    refused(path, "at row 3", expected, binary=True)
    # With 0 as the ignored label, every "no" would be left out too.
    for labels, ignored, row in ((["-100", "1", "no", "yes"], -100, 3), (["0", "no", "yes"], 0, 2)):
        write(path, labels)
        words = f"at row {row}", "expected 0 or 1, or false or true, as in the rows before"
        refused(path, "'no'", *words, binary=True, ignore_index=ignored)
    write(path, ["no", "no", "1"])
    write(other, ["yes", "no", "no"])
    with pytest.raises(BadFileError, match=f"at row 3.*{expected}"):
        open_predictions(path.parent, binary=True).load()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("labels", [["TRUE", "FALSE"], ["True", "False"], [True, False]])
def test_names_in_another_case(tmp_path, suffix, labels):
    path = tmp_path / f"m{suffix}"
    columns = {"label": labels, "logit_true": [0.5, 1.5], "logit_false": [1.5, 0.5]}
    if suffix == ".csv":
        rows = zip(*columns.values(), strict=True)
        path.write_text("\n".join(",".join(map(str, row)) for row in (columns, *rows)))
    elif suffix == ".jsonl":
        rows = zip(*columns.values(), strict=True)
        path.write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), path)
    assert open_predictions(path).load()[1].tolist() == [0, 1]


def test_names_that_differ_only_by_case(tmp_path):
    (tmp_path / "m.csv").write_text("label,logit_us,logit_US\nUS,1,2\nus,1,2\n")
    assert open_predictions(tmp_path / "m.csv").load()[1].tolist() == [1, 0]
    (tmp_path / "m.csv").write_text("label,logit_us,logit_US\nUs,1,2\n")
    refused(tmp_path / "m.csv", "has 'Us' in column 'label'", "class names us, US")


@pytest.mark.parametrize("name", ["m.npz", "m.logits.npy"])
def test_arrays_of_labels_that_are_names(tmp_path, name):
    names, labels = np.array(["cat", "dog"]), np.array(["dog", "cat", "Dog"])
    arrays = {"logits": LOGITS, "labels": labels}

    def write(**arrays):
        if name == "m.npz":
            np.savez(tmp_path / name, **arrays)
            return
        for key in ("logits", "labels"):
            np.save(tmp_path / f"m.{key}.npy", arrays[key])
        if "class_names" in arrays:
            (tmp_path / "m.class_names.txt").write_text("\n".join(arrays["class_names"]))

    write(**arrays)
    refused(tmp_path / name, "labels are <U3; expected integer class numbers, or strings beside class_names")
    write(**arrays, class_names=names)
    assert open_predictions(tmp_path / name).load()[1].tolist() == [1, 0, 1]
    write(logits=LOGITS[:, 0], labels=labels, class_names=names)
    assert open_predictions(tmp_path / name, binary=True).load()[1].tolist() == [[1], [0], [1]]
    write(**{**arrays, "labels": np.array(["dog", "cat", "cow"])}, class_names=names)
    refused(tmp_path / name, "has label 'cow' at row 3 (counted from 1)", "class names cat, dog")


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_strings_may_also_be_numbers(tmp_path, suffix):
    """Elements could not be ignored where labels are strings."""
    path, labels = tmp_path / f"m{suffix}", ["dog", "-100", "0"]
    if suffix == ".npz":
        np.savez(path, logits=LOGITS, labels=np.array(labels), class_names=np.array(["cat", "dog"]))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        scores = {"logit_cat": LOGITS[:, 0], "logit_dog": LOGITS[:, 1]}
        parquet.write_table(pyarrow.table({"label": labels, **scores}), path)
    assert open_predictions(path).load()[1].tolist() == [1, -100, 0]


def test_answers_may_be_numbers_as_strings(tmp_path):
    """The error for '0' was that 0 or 1 was expected."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"label": ["0", "1", "-100"], "probability": [0.1, 0.9, 0.5]})
    parquet.write_table(table, tmp_path / "m.parquet")
    assert open_predictions(tmp_path / "m.parquet", binary=True).load()[1].tolist() == [[0], [1], [-100]]


def test_a_table_of_answers_without_rows(tmp_path):
    """The error was that a row had no scores."""
    (tmp_path / "m.csv").write_text("label,probability_yes\n")
    refused(tmp_path / "m.csv", "holds no predictions", binary=True)


def test_names_that_are_numbers_are_the_only_labels(tmp_path):
    names = np.array(["1", "2"])
    for labels, expected in ((["2", "1", "2"], [1, 0, 1]), (["2", "1", "0"], None)):
        np.savez(tmp_path / "m.npz", logits=LOGITS, labels=np.array(labels), class_names=names)
        if expected:
            assert open_predictions(tmp_path / "m.npz").load()[1].tolist() == expected
    refused(tmp_path / "m.npz", "has label '0' at row 3", "expected one of the class names 1, 2")


def test_strings_that_numpy_pickles_get_a_way_out(tmp_path):
    labels = np.array(["dog", "cat", "dog"], dtype=object)
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=labels, class_names=np.array(["cat", "dog"]))
    refused(tmp_path / "m.npz", "labels holds pickled objects", ".astype(str)")


def test_a_table_of_two_classes_is_not_binary(tmp_path):
    """The error was about shapes."""
    (tmp_path / "m.csv").write_text("label,probability_no,probability_yes\n0,0.25,0.75\n")
    words = "has 2 probabilities and one label in a row; --binary, and calibrators fitted with it, need"
    refused(tmp_path / "m.csv", words, binary=True)
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=LABELS)
    refused(tmp_path / "m.npz", "leave out --binary if these are those of 2 classes", binary=True)
    np.savez(tmp_path / "m.npz", logits=np.float32(1), labels=LABELS)
    refused(tmp_path / "m.npz", "labels have shape (3,); expected ()", binary=True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0.3, 0.3, 0.3], [0.5, 0.3, 0.2]], "rounding to 1 decimal changes the sum too much: write more"),
        (
            [[0.3, 0.9, 0.9], [0.5, 0.3, 0.2]],
            "if each is the probability of a label of its own, pass --binary",
        ),
        ([[0.01] * 90, [0.01] * 89 + [0.11]], "rounding to 2 decimals changes the sum too much"),
        ([[0.3333, 0.3333, 0.2]], "pass --binary"),
    ],
)
def test_the_hint_for_sums_that_are_not_1(tmp_path, rows, words):
    np.savez(tmp_path / "m.npz", probabilities=np.array(rows), labels=np.zeros(len(rows), int))
    refused(tmp_path / "m.npz", "probabilities sum to", words)


def test_rows_are_counted_from_the_first_of_the_file(tmp_path):
    rows = ["label,logit_a,logit_b", *["0,1,2"] * 10]
    for row, words in {
        "0,1,x": "at row 11",
        "0,1": r"row 11 \(line 12 .* has 2 cells",
        "7,1,2": "at row 11",
    }.items():
        (tmp_path / "m.csv").write_text("\n".join([*rows, row]))
        with pytest.raises(BadFileError, match=words):
            list(open_predictions(tmp_path / "m.csv").batches(chunk=8))
    np.savez(tmp_path / "m.npz", logits=np.zeros((9, 2)), labels=np.array([0] * 8 + [5]))
    with pytest.raises(BadFileError, match="label 5 at row 9"):
        list(open_predictions(tmp_path / "m.npz").batches(chunk=8))


def test_parquet_that_will_not_do(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"label": [0, 1], "logit_a": [0.0, 1.0], "logit_b": [0.0, 1.0]}
    for change, words in (
        ({"label": [0.0, 2.5]}, ["label 2.5 at row 2 (", "; expected integer class numbers"]),
        ({"label": [False, True]}, ["label 'False' at row 1", "class names a, b"]),
        ({"label": [0, None]}, ["'label' is empty at row 2"]),
        ({"logit_a": ["x", "y"]}, ["'logit_a' is string"]),
        ({"logit_a": [0.0, None]}, ["'logit_a' is empty at row 2"]),
        ({"logit_a": [0.0, float("nan")]}, ["NaN", "row 2"]),
        ({"label": [0, 2]}, ["label 2 at row 2"]),
    ):
        parquet.write_table(pyarrow.table({**columns, **change}), tmp_path / "m.parquet")
        refused(tmp_path / "m.parquet", *words)


def test_without_pyarrow_the_way_to_install_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "m.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(tmp_path / "m.parquet", "reading it needs pyarrow, ", 'pip install "calibrant[parquet]"')


def test_files_that_are_not_there(tmp_path):
    refused(tmp_path / "m.npz", "does not exist")
    refused(tmp_path / "m.txt", "unknown suffix", ".npz, .npy, .pt, .safetensors, .csv, .parquet")
    (tmp_path / "d.npz").mkdir()
    refused(tmp_path / "d.npz", "is a folder")
    np.save(tmp_path / "m.npy", LOGITS)
    refused(tmp_path / "m.npy", "one array", "NAME.labels.npy")
    np.save(tmp_path / "m.logits.npy", LOGITS)
    refused(tmp_path / "m.logits.npy", "expected m.labels.npy beside it")
    np.save(tmp_path / "o.labels.npy", LABELS)
    refused(tmp_path / "o.labels.npy", "expected o.logits.npy or o.probabilities.npy beside it")


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "model.csv"])
@pytest.mark.parametrize("damage", ["empty", "text", "half"])
def test_damaged_files(tmp_path, logits, labels, name, damage):
    path = written(tmp_path, name, "logits", np.repeat(logits, 20, 0), np.repeat(labels, 20, 0))
    data = path.read_bytes()
    text = b"label,logit_a,logit_b\n0,1,2\n"
    path.write_bytes({"empty": b"", "text": text, "half": data[: len(data) // 2]}[damage])
    refused(path, *(["is empty; expected predictions"] if damage == "empty" else []))


@pytest.mark.parametrize("name", ["model.npz", "model.NPZ"])
def test_archives_whose_numbers_changed(tmp_path, logits, labels, name):
    path = written(tmp_path, name, "logits", np.repeat(logits, 20, 0), np.repeat(labels, 20, 0))
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    refused(path, "cannot be read as")


def test_a_row_of_a_csv_with_more_cells_than_columns_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    for text, row in (("1,0,0,2.5,-1\n1,1,0.5,2\n", 0), ("1,1,0.5,2\n1,0,0,2.5,-1\n", 1)):
        path.write_text(f"weight,label,logit_a,logit_b\n{text}")  # a decimal comma shifts what follows
        refused(path, f"row {row + 1} (line {row + 2} of the file) has 5 cells; expected 4")


def test_classes_named_by_other_numbers_than_their_place_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("label,logit_1.0,logit_2.0\n1,0.5,2\n")
    refused(
        tmp_path / "a.csv", "the column logit_1.0 where logit_0 is expected", "must be logit_0 to logit_1"
    )


def test_a_damaged_csv(tmp_path):
    (tmp_path / "m.csv").write_bytes(bytes(range(128, 256)) * 10)
    refused(tmp_path / "m.csv", "bytes that are not UTF-8")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"\x1f\x8b\x08\x00", "is compressed by gzip: unpack it by gunzip; expected a text file"),
        (b"PK\x03\x04\x14\x00", "is a zip file or a spreadsheet: unpack it, or save it as CSV UTF-8"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_packed_files_with_the_name_of_a_text(tmp_path, suffix, start, words):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(start + bytes(range(128, 256)))
    refused(path, words)


@pytest.mark.parametrize("names", [("a", "nan"), ("inf", "nan"), ("Infinity", "b")])
def test_classes_called_nan_or_inf_are_words(tmp_path, names):
    first, second = names
    path = tmp_path / "m.csv"
    path.write_text(f"label,logit_{first},logit_{second}\n{second},1,2\n{first},0,3\n{first},1,2\n")
    file = open_predictions(path)
    assert file.class_names == names
    assert everything(path)[1].tolist() == [1, 0, 0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(("yes", "no"), [("nan", "other"), ("yes", "nan"), ("inf", "nan")])
def test_answers_called_nan_or_inf_are_words(tmp_path, suffix, yes, no):
    path, labels, logits = tmp_path / f"m{suffix}", [yes, no, no], [1.0, 0.0, -1.0]
    if suffix == ".csv":
        rows = [f"{label},{logit}\n" for label, logit in zip(labels, logits, strict=True)]
        path.write_text("".join([f"label,logit_{yes}\n", *rows]))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"label": labels, f"logit_{yes}": logits}), path)
    file = open_predictions(path, binary=True)
    assert file.load()[1].flatten().tolist() == [1, 0, 0]
    assert file.words


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("latin-1", "it may be Latin-1 or Windows-1252; expected UTF-8 (save it as CSV UTF-8"),
        (
            "utf-16",
            "it is UTF-16; expected UTF-8 (save it as CSV UTF-8 in a spreadsheet, or convert it by iconv",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_texts_that_are_not_utf8(tmp_path, suffix, encoding, words):
    """The message was that of Python's decoder."""
    text = (
        "label,logit_é,logit_b\n0,1,2\n" if suffix == ".csv" else '{"label": 0, "logit_é": 1, "logit_b": 2}'
    )
    path = tmp_path / f"m{suffix}"
    path.write_text(text, encoding=encoding)
    refused(path, words)
    path.write_text(text, encoding="utf-8-sig")
    assert open_predictions(path).class_names == ("é", "b")


class Surprise:
    def __reduce__(self):
        return print, ("code ran",)


def test_pickled_code_does_not_run(tmp_path, capsys):
    torch.save({"logits": torch.zeros(3, 2), "labels": Surprise()}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "pickled objects")
    assert capsys.readouterr().out == ""


def test_texts_and_bytes_that_are_no_torch_file(tmp_path):
    for first in range(256):
        (tmp_path / "m.pt").write_bytes(bytes([first]) + b"poch,loss\n1,2\n")
        refused(tmp_path / "m.pt", "or is damaged; expected a dict of tensors saved by torch.save")


@pytest.mark.parametrize("kind", ["calibrator", "conformal predictor"])
def test_files_of_calibrators_are_named(tmp_path, kind):
    logits, labels = 2 * torch.eye(3)[[0, 1, 2, 0] * 9], torch.tensor([0, 1, 2, 1] * 9)
    path = tmp_path / "c.safetensors"
    if kind == "calibrator":
        save_calibrator(create_calibrator("temperature").fit(logits, labels), path)
    else:
        save_conformal(create_conformal("lac").fit(logits, labels), path)
    refused(path, f"is a {kind} file; expected predictions")


def test_entries_of_torch_files_may_be_none(tmp_path):
    content = {"logits": torch.zeros(3, 2), "labels": torch.zeros(3).long(), "probabilities": None}
    torch.save(content, tmp_path / "m.pt")
    assert open_predictions(tmp_path / "m.pt").rows == 3


def test_torch_files_that_hold_something_else(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "holds a Tensor", "dict of tensors")
    sparse, labels = torch.zeros(3, 2).to_sparse(), torch.zeros(3)
    torch.save({"logits": sparse, "labels": labels}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "logits: expected a dense tensor, got torch.sparse_coo")
    torch.save({"logits": [torch.zeros(2)] * 3, "labels": labels}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "logits: expected a dense tensor, got list")
    torch.save({"logits": np.zeros((3, 2)), "labels": labels}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "NumPy arrays by torch.from_numpy")
    torch.save(
        {"logits": torch.zeros(3, 2), "labels": torch.zeros(3).long(), "class_names": "ab"}, tmp_path / "m.pt"
    )
    refused(tmp_path / "m.pt", "class_names")


def test_safetensors_with_class_names_that_are_not_json(tmp_path):
    tensors = {"logits": torch.zeros(3, 2), "labels": torch.zeros(3).long()}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"class_names": "cat, dog"})
    refused(tmp_path / "m.safetensors", "class_names", "JSON")


# ------------------------------------------------------------------------------------------- class counts


@pytest.mark.parametrize("text", ["[30, 20, 0]", "30\n20\n0\n", "\ufeff30 20 0"])
def test_class_counts(tmp_path, text):
    (tmp_path / "counts").write_text(text, encoding="utf-8")
    assert read_class_counts(tmp_path / "counts") == [30, 20, 0]


@pytest.mark.parametrize("text", ["", "[]", "[1.5]", "[true]", "a b", "-3", "[1,", '{"a": 1}'])
def test_class_counts_that_will_not_do(tmp_path, text):
    (tmp_path / "counts").write_text(text)
    with pytest.raises(BadFileError, match="class counts"):
        read_class_counts(tmp_path / "counts")


def test_rounded_probabilities_are_taken(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for classes, digits in ((3, 2), (10, 2), (100, 3)):
        exact = (3 * torch.randn(200, classes, generator=generator, dtype=torch.float64)).softmax(1)
        rounded = (exact * 10**digits).round() / 10**digits
        assert ((rounded.sum(1) - 1).abs() > 0.0099).any()  # more than is allowed otherwise
        np.savez(tmp_path / "a.npz", probabilities=rounded, labels=exact.argmax(1))
        ((logits, _),) = open_predictions(tmp_path / "a.npz").batches()
        torch.testing.assert_close(logits.softmax(1), exact, atol=0.06, rtol=0)
        np.savez(tmp_path / "a.npz", probabilities=0.98 * exact, labels=exact.argmax(1))
        refused(tmp_path / "a.npz", "sum to 0.98", "expected 1 within 0.01 (if each is", "--binary")
    for row in ([0.34, 0.67], [0.25, 0.25, 0.25, 0.27], [0.24, 0.24, 0.24, 0.26]):  # the furthest off
        np.savez(tmp_path / "b.npz", probabilities=[row, row], labels=[0, 1])
        ((logits, _),) = open_predictions(tmp_path / "b.npz").batches()
        torch.testing.assert_close(logits[0].exp(), torch.tensor(row, dtype=torch.float64))
    np.savez(tmp_path / "a.npz", probabilities=100 * exact, labels=exact.argmax(1))
    refused(tmp_path / "a.npz", "they are percentages: divide them by 100")


@pytest.mark.parametrize("size", [(), (4, 5)])
def test_ignored_elements_do_not_hide_rounding_and_percentages(tmp_path: Path, size: tuple[int, ...]) -> None:
    exact = torch.randn(200, 7, *size, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    rounded = (exact * 100).round() / 100
    assert ((rounded.sum(1) - 1).abs() > 0.015).any()
    labels = exact.argmax(1)
    labels[::3] = -100
    rounded[::3] = exact[::3] = torch.nan
    np.savez(tmp_path / "a.npz", probabilities=rounded, labels=labels)
    ((logits, _),) = open_predictions(tmp_path / "a.npz").batches()
    torch.testing.assert_close(logits[1::3].exp(), rounded[1::3].clamp_min(1e-30))
    tenths = (exact * 10).round() / 10
    np.savez(tmp_path / "a.npz", probabilities=tenths, labels=labels)
    refused(tmp_path / "a.npz", "rounding to 1 decimal changes the sum too much")
    np.savez(tmp_path / "a.npz", probabilities=100 * exact, labels=labels)
    refused(tmp_path / "a.npz", "at row 2 ", "they are percentages: divide them by 100")


def test_names_of_several_labels_are_not_those_of_answers(tmp_path: Path) -> None:
    answers = np.array([["cat", "dog"], ["dog", "cat"]])
    np.savez(tmp_path / "a.npz", logits=np.zeros((2, 2)), labels=answers, class_names=["cat", "dog"])
    with pytest.raises(BadFileError, match="labels are <U3; expected 0 and 1"):
        open_predictions(tmp_path / "a.npz", binary=True)
