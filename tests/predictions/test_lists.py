"""Tables with a column of lists, as Hugging Face's datasets, pandas and other programs write them."""

import csv
import json

import numpy as np
import pytest
import torch

from calibrant.predictions import BadFileError, open_predictions

ROWS, CLASSES = 50, 4


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(ROWS, CLASSES)).astype(np.float32) * 3


@pytest.fixture
def labels():
    labels = np.random.default_rng(1).integers(0, CLASSES, ROWS)
    labels[3] = -100
    return labels


def write_parquet(path, columns, metadata=None, **options):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table(columns)
    parquet.write_table(table.replace_schema_metadata(metadata), path, **options)


def write_csv(path, columns):
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_jsonl(path, columns):
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def list_types():
    pyarrow = pytest.importorskip("pyarrow")
    single = pyarrow.float32()
    return pyarrow.list_(single), pyarrow.large_list(single), pyarrow.list_(single, CLASSES)


def test_parquet(tmp_path, logits, labels):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "m.parquet"
    for kind in list_types():
        column = pyarrow.array(logits.tolist(), kind)
        write_parquet(path, {"idx": range(ROWS), "logits": column, "label": labels}, row_group_size=20)
        file = open_predictions(path)
        assert (file.kind, file.shape, file.dtype, file.class_names) == (
            *("logits", (ROWS, CLASSES), torch.float32),
            None,
        )
        read, read_labels = file.load()
        assert torch.equal(read, torch.from_numpy(logits))
        assert torch.equal(read_labels, torch.from_numpy(labels))
        batches = list(file.batches(chunk=7 * CLASSES))
        assert max(len(batch) for batch, _ in batches) == 7
        assert torch.equal(torch.cat([batch for batch, _ in batches]), read)


def test_class_names_of_datasets(tmp_path, logits, labels):
    names = ["a", "b", "c", "d"]
    features = {"labels": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    columns = {"logits": logits.tolist(), "labels": labels}
    write_parquet(tmp_path / "m.parquet", columns, metadata)
    assert open_predictions(tmp_path / "m.parquet").class_names == tuple(names)
    for damaged in ("[", "{}", json.dumps({"info": {"features": {"labels": {"names": 3}}}})):
        write_parquet(tmp_path / "m.parquet", columns, {"huggingface": damaged})
        assert open_predictions(tmp_path / "m.parquet").class_names is None


def test_a_file_of_datasets(tmp_path, logits, labels):
    datasets = pytest.importorskip("datasets")
    features = {
        "logits": datasets.Sequence(datasets.Value("float32")),
        "label": datasets.ClassLabel(names=["a", "b", "c", "d"]),
    }
    content = {"logits": logits.tolist(), "label": labels.clip(0).tolist()}
    data = datasets.Dataset.from_dict(content, features=datasets.Features(features))
    data.to_parquet(tmp_path / "m.parquet")
    data.to_json(tmp_path / "m.jsonl")
    data.to_csv(tmp_path / "m.csv")
    for name in ("m.parquet", "m.jsonl", "m.csv"):
        read, read_labels = open_predictions(tmp_path / name).load()
        torch.testing.assert_close(read.float(), torch.from_numpy(logits), rtol=1e-6, atol=1e-6)
        assert read_labels.tolist() == content["label"]
    assert open_predictions(tmp_path / "m.parquet").class_names == ("a", "b", "c", "d")


@pytest.mark.parametrize("printed", [str, lambda row: str(np.array(row)), lambda row: f" {row}\n"])
def test_csv(tmp_path, logits, labels, printed):
    wide = np.round(np.repeat(logits, 20, 1), 3)  # NumPy prints such rows in several lines
    columns = {
        "label": labels.tolist(),
        "text": ["x"] * ROWS,
        "logits": [printed(row) for row in wide.tolist()],
    }
    write_csv(tmp_path / "m.csv", columns)
    file = open_predictions(tmp_path / "m.csv")
    assert file.num_classes == 20 * CLASSES
    read, read_labels = file.load()
    torch.testing.assert_close(read.float(), torch.from_numpy(wide), rtol=0, atol=1e-6)
    assert torch.equal(read_labels, torch.from_numpy(labels))


def test_json_lines(tmp_path, logits, labels):
    probabilities = torch.from_numpy(logits).double().softmax(1)
    columns = {"probabilities": probabilities.tolist(), "labels": labels.tolist()}
    write_jsonl(tmp_path / "m.jsonl", columns)
    file = open_predictions(tmp_path / "m.jsonl")
    assert (file.kind, file.shape) == ("probabilities", (ROWS, CLASSES))
    read, read_labels = file.load()
    torch.testing.assert_close(read.exp(), probabilities)
    assert torch.equal(read_labels, torch.from_numpy(labels))


def refused(path, *words):
    with pytest.raises(BadFileError) as caught:
        open_predictions(path).load()
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": [[0.0, 1.0], [0.0]]}, ["row 2 (counted from 1) has 1 logits", "expected 2"]),
        ({"logits": [[0.0, 1.0], None]}, ["'logits' is empty at row 2"]),
        ({"logits": [[0.0, 1.0], [0.0, None]]}, ["logits are empty at row 2"]),
        ({"logits": [[0.0, 1.0], [0.0, float("nan")]]}, ["NaN", "row 2"]),
        ({"logits": [[1, 2], [3, 4]]}, ["list<", "int64", "list of floating-point numbers"]),
        ({"logits": [[[1.0]], [[2.0]]]}, ["list<", "list of floating-point numbers"]),
        ({"logits": [1.0, 2.0]}, ["'logits' is double", "list of floating-point numbers"]),
        ({"logits": [[], []]}, ["list<", "null", "list of floating-point numbers"]),
        ({"logits": [[0.5], [0.5]]}, ["a single score in each row; expected one for each class"]),
        ({"probabilities": [[0.5, 0.5]] * 2}, ["both logits and probabilities"]),
        ({"logit_a": [1.0, 2.0]}, ["'logits'"]),
        ({"probs": [1.0, 2.0]}, ["'probs'", "no scores beside logits"]),
        ({"labels": [0, 1]}, ["label and labels", "exactly one"]),
    ],
)
def test_parquet_that_will_not_do(tmp_path, change, words):
    write_parquet(tmp_path / "m.parquet", {"label": [0, 1], "logits": [[0.0, 1.0]] * 2, **change})
    refused(tmp_path / "m.parquet", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'label,logits\n0,"[1, 2]"\n1,"[1, 2, 3]"\n',
            ["row 2 (counted from 1 after the heading) has 3 logits", "expected 2"],
        ),
        ('label,logits\n0,"[1, 2]"\n1,"[1 ... 3]"\n', ["[1 ... 3]", "row 2", "list of numbers"]),
        ("label,logits\n0,1.5\n", ["'1.5' at row 1", "list of numbers"]),
        ('label,logits\n0.5,"[1, 2]"\n', ["label 0.5 at row 1"]),
        ('label,logits\ncat,"[1, 2]"\n', ["'cat' in column 'label' at row 1"]),
        ('logits,label\n"[1, 2]"\n', ["row 1 (line 2 of the file) has 1 cells"]),
        ("label,logits\n", ["no predictions"]),
    ],
)
def test_csv_that_will_not_do(tmp_path, text, words):
    (tmp_path / "m.csv").write_text(text)
    refused(tmp_path / "m.csv", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty; expected predictions"]),
        ("\n", ["no scores"]),
        (
            '{"label": 0, "logits": [1, 2]}\n{"label": 0, "logits": [1, 2, 3]}',
            ["row 2 (counted from 1) has 3 logits"],
        ),
        ('{"label": 0, "logits": [1, 2]}\n{"label": 0}', ["no 'logits' at row 2"]),
        ('{"label": 0, "logits": [1, "2"]}', ["row 1", "list of numbers"]),
        ('{"label": 0, "logits": [[1], [2]]}', ["row 1", "list of numbers"]),
        ('{"label": 0, "logits": 1}', ["row 1", "list of numbers"]),
        ('{"label": "0", "logits": [1, 2]}', ["label '0' at row 1"]),
        ('{"label": true, "logits": [1, 2]}', ["label True at row 1"]),
        ('{"label": 0.5, "logits": [1, 2]}', ["label 0.5 at row 1"]),
        ('{"label": 0, "logits": [1, NaN]}', ["NaN", "row 1"]),
        ('[{"label": 0, "logits": [1, 2]}]', ["list at row 1", "expected an object"]),
        ("[" * 100_000, ["not JSON at row 1"]),
        ('{"label": 0, "logits": [1, 2]}\n{"label":', ["not JSON at row 2"]),
        ('{"label": 10000000000000000000000, "logits": [1, 2]}', ["too large"]),
    ],
)
def test_json_lines_that_will_not_do(tmp_path, text, words):
    (tmp_path / "m.jsonl").write_text(text)
    refused(tmp_path / "m.jsonl", *words)
