"""What a file only claims: refused in one line, before memory is allocated for it."""

import io
import json
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from calibrant import sizes
from calibrant.predictions import BadFileError, open_predictions, read_class_counts
from tests.permissions import unreadable

LOGITS, LABELS = np.zeros((3, 2), np.float32), np.zeros(3, int)


def refused(path, *words, **options):
    """Assert that reading ends in one printable line and in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(BadFileError) as caught:
            open_predictions(path, **options).load()
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable(), message
    for word in words:
        assert word in message


def npy(shape, dtype="<f4", content=b"", fortran=False):
    """A .npy file with any header."""
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + content


def archive(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


SHAPES = [
    (-3, -2),
    (-1, 2, -1, 3),
    (True, 2),
    (10**30, 2),
    (0, 10**30),
    (2**62, 4),
    (3, 2, *[1] * 40),
    (3, 10**12),
    (),
    (6,),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_odd_shapes(tmp_path, shape, suffix):
    logits, labels = npy(shape, content=bytes(24)), npy((3,), "<i8", bytes(24))
    if suffix == ".npz":
        refused(archive(tmp_path / "m.npz", {"logits": logits, "labels": labels}), "m.npz")
        return
    (tmp_path / "m.logits.npy").write_bytes(logits)
    (tmp_path / "m.labels.npy").write_bytes(labels)
    refused(tmp_path / "m.logits.npy", "m.logits.npy")


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_of_labels(tmp_path, shape):
    members = {"logits": npy((3, 2), content=bytes(24)), "labels": npy(shape, "<i8", bytes(24))}
    refused(archive(tmp_path / "m.npz", members), "m.npz")


@pytest.mark.parametrize("dtype", ["<U0", "<U100000000", "S0", "V0", "<m8[s]", "<c8", "|b1"])
def test_odd_class_names(tmp_path, dtype):
    members = {
        "logits": npy((3, 2), content=bytes(24)),
        "labels": npy((3,), "<i8", bytes(24)),
        "class_names": npy((10**12,), dtype),
    }
    refused(archive(tmp_path / "m.npz", members), "class_names")


def test_long_class_names_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.predictions.arrays.MAX_TEXT", 1 << 20)
    names = npy((2,), "<U1000000", bytes(8_000_000))
    members = {"logits": npy((3, 2), content=bytes(24)), "labels": npy((3,), "<i8", bytes(24))}
    refused(archive(tmp_path / "m.npz", {**members, "class_names": names}), "class_names")
    np.save(tmp_path / "p.logits.npy", LOGITS)
    np.save(tmp_path / "p.labels.npy", LABELS)
    (tmp_path / "p.class_names.txt").write_bytes(b"a" * (1 << 20) + b"\nb")
    refused(tmp_path / "p.logits.npy", "p.class_names.txt", "1 MiB")


def test_archives_whose_members_declare_more_than_they_have(tmp_path):
    rows = 10**9
    logits = npy((rows, 2), content=bytes(24))
    path = archive(
        tmp_path / "m.npz", {"logits": logits, "labels": npy((rows,), "<i8", bytes(24))}, zipfile.ZIP_STORED
    )
    data = bytearray(path.read_bytes())
    # The sizes in the directory at the end, which come in its fixed order.
    for name, size in (("logits", 8 * rows), ("labels", 8 * rows)):
        entry = data.rindex(f"{name}.npy".encode()) - 46
        (real,) = struct.unpack_from("<I", data, entry + 24)
        struct.pack_into("<I", data, entry + 24, (real - 24 + size) & 0xFFFFFFFF)
    path.write_bytes(data)
    refused(path, "damaged")


def test_other_compressions_are_refused(tmp_path):
    members = {"logits": npy((3, 2), content=bytes(24)), "labels": npy((3,), "<i8", bytes(24))}
    refused(archive(tmp_path / "m.npz", members, zipfile.ZIP_BZIP2), "method 12")


def test_what_does_not_fit_in_memory_is_refused_and_can_be_streamed(tmp_path, monkeypatch):
    np.savez(tmp_path / "m.npz", logits=np.zeros((1000, 2)), labels=np.zeros(1000, int))
    np.savez(tmp_path / "f.npz", logits=np.asfortranarray(np.zeros((1000, 2))), labels=np.zeros(1000, int))
    monkeypatch.setattr(sizes, "memory", lambda: 10_000.0)
    refused(tmp_path / "m.npz", "loading all predictions at once", "this machine has")
    assert sum(len(labels) for _, labels in open_predictions(tmp_path / "m.npz").batches(chunk=10)) == 1000
    with pytest.raises(BadFileError, match="Fortran order"):
        list(open_predictions(tmp_path / "f.npz").batches())
    monkeypatch.setattr(sizes, "memory", lambda: 10.0)
    with pytest.raises(BadFileError, match="one row"):
        list(open_predictions(tmp_path / "m.npz").batches())


def test_tables_with_few_cells_for_their_lines_and_columns(tmp_path, monkeypatch):
    header = ",".join(["label", *(f"logit_{number}" for number in range(5000))])
    (tmp_path / "m.csv").write_text(header + "\n0" * 5000)
    with pytest.raises(BadFileError, match="row 1"):
        list(open_predictions(tmp_path / "m.csv").batches())
    monkeypatch.setattr(sizes, "memory", lambda: float(1 << 25))
    refused(tmp_path / "m.csv", "this machine has")


def test_a_first_row_with_more_cells_than_columns_takes_no_memory(tmp_path):
    (tmp_path / "m.csv").write_text("label,logit_0,logit_1\n" + "0," * 5000 + "0" + "\n0,1,2" * 20_000)
    tracemalloc.start()
    try:
        with pytest.raises(BadFileError, match=r"row 1 \(line 2 of the file\) has 5001 cells; expected 3"):
            list(open_predictions(tmp_path / "m.csv").batches())
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_cell_longer_than_csv_allows(tmp_path):
    (tmp_path / "m.csv").write_text("label,logit_0,logit_1\n0," + "1" * 200_000 + ",1\n")
    refused(tmp_path / "m.csv", "field larger than field limit")
    (tmp_path / "m.csv").write_text("l" * 200_000 + "\n0\n")
    refused(tmp_path / "m.csv", "field larger than field limit")


@pytest.mark.parametrize("label", [2**64 - 100, 2**63, 2**64 - 1])
def test_labels_that_would_wrap_around(tmp_path, label):
    """The first would become -100, the label of elements to leave out."""
    labels = np.array([0, label, 0], np.uint64)
    expected = [f"label {label} at row 2"]
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=labels)
    np.save(tmp_path / "m.logits.npy", LOGITS)
    np.save(tmp_path / "m.labels.npy", labels.astype(">u8"))
    tensors = {"logits": torch.from_numpy(LOGITS), "labels": torch.from_numpy(labels)}
    torch.save(tensors, tmp_path / "m.pt")
    save_file(tensors, tmp_path / "m.safetensors")
    for name in ("m.npz", "m.logits.npy", "m.pt", "m.safetensors"):
        refused(tmp_path / name, *expected)
    (tmp_path / "m.csv").write_text(f"label,logit_a,logit_b\n0,0,0\n{label},0,0\n")
    refused(tmp_path / "m.csv", "at row 2")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"label": labels, "logit_a": LOGITS[:, 0], "logit_b": LOGITS[:, 0]})
    parquet.write_table(table, tmp_path / "m.parquet")
    refused(tmp_path / "m.parquet", *expected)


def test_small_unsigned_labels_are_fine(tmp_path):
    for dtype in (np.uint8, np.uint32, np.uint64):
        np.savez(tmp_path / "m.npz", logits=LOGITS, labels=LABELS.astype(dtype))
        assert open_predictions(tmp_path / "m.npz").load()[1].tolist() == [0, 0, 0]


def test_torch_files_without_numbers(tmp_path):
    meta = {"logits": torch.zeros(3, 2, device="meta"), "labels": torch.zeros(3).long()}
    torch.save(meta, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "logits are meta tensors, which hold no values; expected stored values")
    repeated = {"logits": torch.zeros(1, 2).expand(10**9, 2), "labels": torch.zeros(1).long().expand(10**9)}
    torch.save(repeated, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "repeat their numbers")


def test_more_classes_than_anybody_has(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.predictions.reading.MAX_CLASSES", 1)
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=LABELS)
    refused(tmp_path / "m.npz", "2 classes; expected at most 1")


@pytest.mark.parametrize("index", [2**70, -(2**70), 1.5, True])
def test_an_index_to_ignore_that_no_label_can_have(tmp_path, index):
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=LABELS)
    with pytest.raises(ValueError, match="ignore_index must be a whole number"):
        open_predictions(tmp_path / "m.npz", ignore_index=index)


# ------------------------------------------------------------------------------------------- names and paths


def test_control_characters_do_not_reach_a_message(tmp_path):
    (tmp_path / "a\x1b]0;title\x07.csv").write_text("label,\x1b[31mx,logit_\x9bb\n0,1,2\n")
    refused(tmp_path / "a\x1b]0;title\x07.csv", "\\x1b]0;title\\x07.csv", "a single score in each row")
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=LABELS, class_names=["a\x1b[2J", "a\x1b[2J"])
    refused(tmp_path / "m.npz", "twice")
    np.savez(tmp_path / "m.npz", **{"logits\x1b[2J": LOGITS, "labels": LABELS})
    refused(tmp_path / "m.npz", "found")


def test_loops_of_links_and_files_that_may_not_be_read(tmp_path):
    (tmp_path / "a.npz").symlink_to("b.npz")
    (tmp_path / "b.npz").symlink_to("a.npz")
    refused(tmp_path / "a.npz", "symbolic links")
    with pytest.raises(BadFileError, match="symbolic links"):
        read_class_counts(tmp_path / "a.npz")
    np.save(tmp_path / "p.logits.npy", LOGITS)
    (tmp_path / "p.labels.npy").symlink_to("p.labels.npy")
    refused(tmp_path / "p.logits.npy", "expected p.labels.npy")
    np.savez(tmp_path / "m.npz", logits=LOGITS, labels=LABELS)
    (tmp_path / "inside").mkdir()
    np.savez(tmp_path / "inside" / "m.npz", logits=LOGITS, labels=LABELS)
    with unreadable(tmp_path / "m.npz"):
        refused(tmp_path / "m.npz", "Permission denied")
    with unreadable(tmp_path / "inside"):
        refused(tmp_path / "inside" / "m.npz", "Permission denied")
    os.mkfifo(tmp_path / "pipe.csv")
    refused(tmp_path / "pipe.csv", "expected a file")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "[1e400]", f"[{10**30}]", "\x00"], ids=range(5))
def test_odd_class_counts(tmp_path, text):
    (tmp_path / "counts").write_text(text)
    with pytest.raises(BadFileError, match="class counts"):
        read_class_counts(tmp_path / "counts")


def test_class_names_in_metadata_that_nest_deeply(tmp_path):
    tensors = {"logits": torch.zeros(3, 2), "labels": torch.zeros(3).long()}
    for text in ("[" * 100_000, json.dumps(["a"] * 3), json.dumps({"a": 1}), "9" * 5000):
        save_file(tensors, tmp_path / "m.safetensors", metadata={"class_names": text})
        refused(tmp_path / "m.safetensors")


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("name", ["logits", "labels"])
def test_a_long_header_is_not_read(tmp_path, suffix, name):
    arrays = {"logits": npy((3, 2), content=bytes(24)), "labels": npy((3,), "<i8", bytes(24))}
    arrays[name] = b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30) + bytes(20_000)
    words = f"{name} has a header of 1073741824 bytes; expected at most 10000"
    if suffix == ".npz":
        refused(archive(tmp_path / "m.npz", arrays), words)
        return
    for each, content in arrays.items():
        (tmp_path / f"m.{each}.npy").write_bytes(content)
    refused(tmp_path / "m.logits.npy", words)


def test_a_header_of_version_2_is_read(tmp_path):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, LOGITS, (2, 0))
    path = archive(tmp_path / "m.npz", {"logits": stream.getvalue(), "labels": npy((3,), "<i8", bytes(24))})
    assert open_predictions(path).load()[0].shape == (3, 2)


def repacked(path, compression, declared=None):
    """Write the members of a zip archive anew; ``declared`` is the size that each declares."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
        for member in file.infolist():
            member.file_size = declared or member.file_size
            member.compress_size = declared or member.compress_size


def test_an_archive_of_torch_declares_no_more_than_it_has(tmp_path):
    path = tmp_path / "m.pt"
    torch.save({"logits": torch.zeros(3, 2), "labels": torch.zeros(3).long()}, path)
    repacked(path, zipfile.ZIP_STORED)
    open_predictions(path)
    repacked(path, zipfile.ZIP_DEFLATED)
    refused(path, "data.pkl is compressed; expected a file as torch.save writes it")
    repacked(path, zipfile.ZIP_STORED, 1 << 30)
    refused(path, "it declares ", "it is damaged")
