"""Folders of shards: one set of predictions, in order; errors name the shard."""

import numpy as np
import pytest
import torch

from calibrant.predictions import BadFileError, batches_of, open_predictions
from calibrant.training.run_folder import RECIPE

ROWS, CLASSES = 60, 3
LOGITS = np.random.default_rng(0).normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, CLASSES, ROWS)


def write_shards(folder, number=12, name="part-{}", **changes):
    folder.mkdir(exist_ok=True)
    parts = zip(np.array_split(LOGITS, number), np.array_split(LABELS, number), strict=True)
    for index, (logits, labels) in enumerate(parts):
        np.savez(folder / f"{name.format(index)}.npz", **{"logits": logits, "labels": labels, **changes})
    return folder


def refused(path, *words):
    with pytest.raises(BadFileError) as caught:
        open_predictions(path).load()
    for word in words:
        assert word in str(caught.value)


def test_a_folder_is_one_set_in_the_order_of_its_numbers(tmp_path):
    folder = write_shards(tmp_path / "test")
    (folder / "README.md").write_text("other files do not count")
    (folder / "_metadata.npz").write_text("nor these")
    (folder / ".part-3.npz").write_text("nor these")
    file = open_predictions(folder)
    assert (file.name, file.shape, len(file.parts), len(file.files)) == ("test", (ROWS, CLASSES), 12, 12)
    logits, labels = file.load()
    assert torch.equal(logits, torch.from_numpy(LOGITS))
    assert torch.equal(labels, torch.from_numpy(LABELS))
    assert max(len(batch) for batch, _ in file.batches(chunk=2 * CLASSES)) == 2


def test_pairs_of_npy_files(tmp_path):
    for index, rows in enumerate((slice(0, 20), slice(20, None))):
        np.save(tmp_path / f"{index}.logits.npy", LOGITS[rows])
        np.save(tmp_path / f"{index}.labels.npy", LABELS[rows])
    file = open_predictions(tmp_path)
    assert len(file.parts) == 2
    assert len(file.files) == 4
    assert torch.equal(file.load()[0], torch.from_numpy(LOGITS))


def test_shards_without_rows_and_with_ignored_rows_only(tmp_path):
    folder = write_shards(tmp_path / "test", 2)
    np.savez(folder / "part-2.npz", logits=LOGITS[:0], labels=LABELS[:0])
    np.savez(folder / "part-3.npz", logits=LOGITS[:5], labels=np.full(5, -100))
    file = open_predictions(folder)
    assert (file.rows, len(file.parts)) == (ROWS + 5, 3)
    assert len(file.load()[0]) == ROWS + 5
    for index in range(2):
        (folder / f"part-{index}.npz").unlink()
    refused(folder, "every label is -100")
    (folder / "part-3.npz").unlink()
    refused(folder, "no predictions", "without rows")


def test_types_may_differ(tmp_path):
    folder = write_shards(tmp_path / "test", 2)
    np.savez(folder / "part-2.npz", logits=LOGITS.astype(np.float64), labels=LABELS)
    file = open_predictions(folder)
    assert file.load()[0].dtype == torch.float64
    assert {logits.dtype for logits, _ in file.batches()} == {torch.float64}


def test_errors_name_the_shard_and_its_row(tmp_path):
    folder = write_shards(tmp_path / "test")
    np.savez(folder / "part-7.npz", logits=LOGITS[:5], labels=np.array([0, 1, 2, 7, 0]))
    refused(folder, "part-7.npz: has label 7 at row 4")


def test_shards_that_do_not_belong_together(tmp_path):
    names = np.array(["a", "b", "c"])
    folder = write_shards(tmp_path / "test", 2, class_names=names)
    for change, words in (
        ({"logits": LOGITS[:, :2]}, ["part-2.npz: its axes ('N', 2) differ from ('N', 3) in part-0.npz"]),
        ({"class_names": names[::-1]}, ["part-2.npz: its class names ('c', 'b', 'a') differ"]),
    ):
        content = {"logits": LOGITS, "labels": LABELS % 2, "class_names": names, **change}
        if change.get("logits") is not None:
            content["class_names"] = names[:2]
        np.savez(folder / "part-2.npz", **content)
        refused(folder, *words)
    probabilities = np.full((ROWS, CLASSES), 1 / 3)
    np.savez(folder / "part-2.npz", probabilities=probabilities, labels=LABELS, class_names=names)
    refused(folder, "part-2.npz: its scores probabilities differ from logits")
    (folder / "part-2.npz").rename(folder / "part-2.pt")
    refused(folder, ".npz and .pt", "one kind of files")
    (folder / RECIPE).touch()
    refused(folder, f"is the folder of a run; expected a file of its predictions, such as {folder}/test.npz")


def test_a_missing_or_foreign_shard_is_noticed(tmp_path):
    folder = write_shards(tmp_path / "test", 10, "test-{:05}-of-00010")
    assert open_predictions(folder).rows == ROWS
    (folder / "test-00004-of-00010.npz").unlink()
    refused(folder, "9 of 10 files", "test-00004-of-00010 is missing")
    write_shards(folder, 10, "test-{:05}-of-00010")
    np.savez(folder / "train-00000-of-00001.npz", logits=LOGITS, labels=LABELS)
    refused(folder, "several sets: test, train")


def test_a_folder_without_predictions(tmp_path):
    refused(tmp_path, "is a folder without predictions", ".npz", ".jsonl")


def test_a_shard_may_lack_the_word_for_yes(tmp_path):
    def write(**files):
        for name, labels in files.items():
            rows = "".join(f"{label},0.5\n" for label in labels)
            (tmp_path / f"{name}.csv").write_text(f"label,probability_yes\n{rows}")

    write(a=["-100", "no", "no"], b=["yes", "no"])
    expected = [-100, 0, 0, 1, 0]
    assert open_predictions(tmp_path, binary=True).load()[1].flatten().tolist() == expected
    parts = [batches_of(tmp_path / f"{name}.csv", binary=True) for name in "ab"]
    found = [label for part in parts for _, labels in part for label in labels.flatten().tolist()]
    assert found == expected
    with pytest.raises(BadFileError, match=r"a\.csv: has no label 'yes', the word in the name of its scores"):
        open_predictions(tmp_path / "a.csv", binary=True)
    write(b=["yes", "nope"])
    with pytest.raises(BadFileError, match="has the labels no, nope, yes; expected yes and one other in all"):
        open_predictions(tmp_path, binary=True)
    write(b=["no"])
    with pytest.raises(BadFileError, match="has no label 'yes'"):
        open_predictions(tmp_path, binary=True)
