"""Data files with false sizes or other content: a ValueError with their name, in little memory."""

import io
import pickle
import struct
import tracemalloc
import warnings
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from calibrant import sizes
from calibrant.options import Choice
from calibrant.training.data import in_memory, load_data, npz, on_disk, safe_readers
from calibrant.training.data.text import encoding

FEATURES, LABELS = np.zeros((8, 2), np.float32), np.arange(8) % 2


@pytest.fixture(autouse=True)
def little_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26


def refused(function, *arguments, words="", **options):
    with pytest.raises(ValueError, match=words) as caught:
        function(*arguments, **options)
    assert str(caught.value).isprintable()


def header(shape, dtype="<f4"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


# --------------------------------------------------------------------------------------------------- archives


@pytest.mark.parametrize("label", [10**9, 2**62, 2**64 - 1])
def test_one_huge_label(tmp_path, label):
    labels = LABELS.astype(np.uint64 if label >= 2**63 else np.int64)
    labels[3] = label
    np.savez(tmp_path / "data.npz", features=FEATURES, labels=labels)
    refused(npz.npz, tmp_path, words=rf"data\.npz has labels from 0 to {label}, expected 0 to 999999")
    np.savez(tmp_path / "data.npz", features=FEATURES, labels=labels, class_names=["a", "b"])
    refused(npz.npz, tmp_path, words=f"labels from 0 to {label},")


@pytest.mark.parametrize("shape", [(10**12, 2), (-8, -2), (True, 16), (10**30,), (8, 2, *[1] * 40)])
def test_headers_that_declare_other_sizes(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", header(shape) + bytes(64))
        archive.writestr("labels.npy", header((8,), "<i8") + bytes(64))
    refused(npz.npz, tmp_path, words=r"data\.npz cannot be read as a NumPy archive of numbers: features")


def test_names_without_letters(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("features.npy", header((8, 2)) + bytes(64))
        archive.writestr("labels.npy", header((8,), "<i8") + bytes(64))
        archive.writestr("class_names.npy", header((10**12,), "<U0"))
    refused(npz.npz, tmp_path, words="class_names")


def test_the_name_of_an_array_with_line_breaks(tmp_path):
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_STORED):
        with zipfile.ZipFile(tmp_path / "data.npz", "w", compression) as archive:
            archive.writestr("feat\nures.npy", b"no array")
        refused(npz.npz, tmp_path, words=r"data\.npz")
    np.savez(tmp_path / "data.npz", **{"labels": LABELS, "feat\nures": FEATURES})
    refused(npz.npz, tmp_path, words=r"data\.npz has labels, feat\\nures, expected")


def test_an_archive_larger_than_memory(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "data.npz", features=np.zeros((10_000, 10)), labels=np.zeros(10_000, int))
    monkeypatch.setattr(sizes, "memory", lambda: 100_000.0)
    refused(npz.npz, tmp_path, words="this machine has")


@pytest.mark.parametrize("part", ["validation", "test"])
def test_empty_parts_have_a_fingerprint(tmp_path, part):
    empty = {f"{part}_features": FEATURES[:0], f"{part}_labels": LABELS[:0]}
    np.savez(tmp_path / "data.npz", features=FEATURES, labels=LABELS, **empty)
    assert npz.npz(tmp_path, validation=0.25).fingerprint


def test_elements_without_numbers(tmp_path):
    np.savez(tmp_path / "data.npz", features=FEATURES[:, :0], labels=LABELS)
    refused(npz.npz, tmp_path, words=r"data\.npz has features of type float32 and shape \(8, 0\)")


@pytest.mark.parametrize("damage", range(6))
def test_damaged_archives(tmp_path, damage):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, features=np.random.default_rng(0).normal(size=(8, 2)), labels=LABELS)
    data = bytearray(path.read_bytes())
    if damage == 0:
        data[90] ^= 255  # the compressed header
    elif damage == 1:
        data[8] = 99  # the method of compression
        data[data.rindex(b"PK\1\2") + 10] = 99
    elif damage == 2:
        data[data.index(b"PK\1\2") + 8] |= 1  # encrypted
    elif damage == 3:
        del data[-10:]
    elif damage == 4:
        data = bytearray(b"PK\5\6" + bytes(18))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("features.npy", b"text")
            archive.writestr("labels.npy", b"")
        data = path.read_bytes()
    path.write_bytes(data)
    refused(npz.npz, tmp_path, words=r"data\.npz")


# -------------------------------------------------------------------------------------------- pickles, arrays


def test_a_memo_of_billions_of_entries(tmp_path):
    """pickle itself would allocate 64 GB for these few bytes."""
    (tmp_path / "p").write_bytes(b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".")
    assert safe_readers.read_pickle(tmp_path / "p") == {}


def test_lists_of_lists_that_are_shared(tmp_path):
    """Written out, it would have 10^30 elements."""
    shared = ["a"]
    for _ in range(30):
        shared = [shared] * 10
    (tmp_path / "p").write_bytes(pickle.dumps({"data": shared}, protocol=2))
    content = safe_readers.read_pickle(tmp_path / "p")["data"]
    assert content[0] is content[9]


def test_a_list_that_holds_itself(tmp_path):
    endless = []
    endless.append(endless)
    (tmp_path / "p").write_bytes(pickle.dumps({"data": endless}, protocol=2))
    content = safe_readers.read_pickle(tmp_path / "p")["data"]
    assert content[0] is content[0][0]


@pytest.mark.parametrize("size", [2**31 - 1, 10**15])
def test_bytes_that_are_not_there(tmp_path, size):
    (tmp_path / "p").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", size) + b"abc.")
    refused(safe_readers.read_pickle, tmp_path / "p", words="cannot be read as a pickle")


LABEL_FIELDS = [
    ["a"] * 4,
    [[0], [1], [0], [1]],
    [0, 1, None, 0],
    [0, 1, 10**30, 0],
    np.array([0, 1, 2**64 - 1, 0], np.uint64),
    np.array([0, 1, np.nan, 0]),
    np.array([[0], [1], [0], [1]]),
    [0.5, 1, 0, 0],
    [{}] * 4,
]


@pytest.mark.parametrize("labels", LABEL_FIELDS, ids=range(len(LABEL_FIELDS)))
def test_odd_labels_of_cifar(tmp_path, labels):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    content = {"data": np.zeros((4, 3072), np.uint8), "fine_labels": labels}
    for name, value in {"meta": {"fine_label_names": ["a", "b"]}, "train": content, "test": content}.items():
        (folder / name).write_bytes(pickle.dumps(value, protocol=2))
    refused(in_memory.cifar100, tmp_path, validation=0, words="train")


@pytest.mark.parametrize("names", [["a", "b", "c"], "ab", [1, 2], [["a"]] * 2, ["a", "a"]], ids=range(5))
def test_odd_class_names_of_cifar(tmp_path, monkeypatch, names):
    monkeypatch.setattr(in_memory, "MAX_CLASSES", 2)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    content = {"data": np.zeros((4, 3072), np.uint8), "fine_labels": [0, 1, 0, 1]}
    for name, value in {"meta": {"fine_label_names": names}, "train": content, "test": content}.items():
        (folder / name).write_bytes(pickle.dumps(value, protocol=2))
    if names == ["a", "a"]:
        assert in_memory.cifar100(tmp_path, validation=0).class_names == ("a", "a")
    else:
        refused(in_memory.cifar100, tmp_path, validation=0, words="meta")


def test_odd_corrupted_images(tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    images, labels = folder / "gaussian_noise.npy", folder / "labels.npy"
    good = np.zeros((10, 2, 2, 3), np.uint8)
    np.save(labels, np.zeros(10, int))
    archive = io.BytesIO()
    np.savez(archive, good)
    for content in (
        header((10**12, 2, 2, 3), "|u1"),
        header((), "|u1") + b"a",
        header((-10, -2, 2, 3), "|u1") + bytes(120),
        archive.getvalue(),
        b"PK\3\4 broken",
        b"",
        pickle.dumps([1]),
    ):
        images.write_bytes(content)
        refused(in_memory.cifar10_c, tmp_path, words=r"gaussian_noise\.npy")
    np.save(images, good)
    for wrong in (np.full(10, np.nan), np.array(3), np.full(10, 2**63, np.uint64), np.array(["a"] * 10)):
        np.save(labels, wrong)
        refused(in_memory.cifar10_c, tmp_path, words=r"labels\.npy")


@pytest.mark.parametrize("label", [11, -1, 0.5, np.nan])
def test_labels_that_no_house_number_has(tmp_path, label):
    from scipy.io import savemat

    savemat(tmp_path / "test_32x32.mat", {"X": np.zeros((2, 2, 3, 2), np.uint8), "y": [[1], [label]]})
    refused(in_memory.svhn, tmp_path, words=r"test_32x32\.mat")


def test_cells_instead_of_labels(tmp_path):
    from scipy.io import savemat

    cells = np.array([["a"], [[1, 2]]], dtype=object)
    savemat(tmp_path / "test_32x32.mat", {"X": np.zeros((2, 2, 3, 2), np.uint8), "y": cells})
    refused(in_memory.svhn, tmp_path, words=r"test_32x32\.mat")


@pytest.mark.parametrize(("kind", "words"), [(1, "has the type cell, expected numbers"), (9, "can hold")])
def test_arrays_that_matlab_files_cannot_hold(tmp_path, kind, words):
    from scipy.io import savemat

    savemat(tmp_path / "test_32x32.mat", {"X": np.zeros((2, 3), np.uint8), "y": [[1]]})
    content = bytearray((tmp_path / "test_32x32.mat").read_bytes())
    content[144] = kind  # of the first array: 1 is a cell, 9 uint8
    content[160:168] = struct.pack("<ii", 10_000, 1_000)
    (tmp_path / "test_32x32.mat").write_bytes(content)
    refused(in_memory.svhn, tmp_path, words=words)


def test_a_part_of_a_compressed_array_that_declares_a_gigabyte(tmp_path):
    from scipy.io import savemat

    savemat(tmp_path / "plain.mat", {"X": np.zeros((2, 3), np.uint8), "y": [[1]]})
    content = (tmp_path / "plain.mat").read_bytes()
    (length,) = struct.unpack_from("<I", content, 132)
    array = bytearray(content[128 : 136 + length])
    array[52:56] = struct.pack("<I", 1 << 30)  # the size of the numbers
    packed = zlib.compress(array)
    mended = content[:128] + struct.pack("<II", 15, len(packed)) + packed + content[136 + length :]
    (tmp_path / "test_32x32.mat").write_bytes(mended)
    refused(in_memory.svhn, tmp_path, words=r"test_32x32\.mat")


# ----------------------------------------------------------------------------------------------------- images


def png(width, height):
    """The start of an image that declares a size."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    size = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_declares_too_many_pixels(tmp_path):
    image = io.BytesIO()
    Image.new("RGB", (10, 10)).save(image, "BMP")
    content = bytearray(image.getvalue())
    content[22:26] = struct.pack("<i", 16_777_226)  # its height: less than twice Pillow's limit
    (tmp_path / "a.bmp").write_bytes(content)
    refused(
        safe_readers.read_image, tmp_path / "a.bmp", "RGB", words="image: it declares 10 × 16777226 pixels"
    )


@pytest.mark.parametrize("size", [(10**5, 10**5), (2**31 - 1, 2**31 - 1), (12_000, 12_000), (0, 10)])
def test_images_that_declare_a_size(tmp_path, size):
    (tmp_path / "a.png").write_bytes(png(*size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(
            safe_readers.read_image, tmp_path / "a.png", "RGB", words=r"a\.png cannot be read as an image"
        )


@pytest.mark.parametrize("length", [2**28 + 33, 2**30, 2**31 - 1])
def test_an_image_with_a_part_that_declares_its_length(tmp_path, length):
    image = io.BytesIO()
    Image.new("RGB", (10, 10)).save(image, "PNG")
    content = bytearray(image.getvalue())
    start = content.index(b"IDAT") - 4
    content[start : start + 4] = struct.pack(">I", length)
    (tmp_path / "a.png").write_bytes(content)
    with suppress(ValueError):  # Pillow may find all pixels before it misses the rest of the part
        safe_readers.read_image(tmp_path / "a.png", "RGB")


def test_an_image_with_damaged_numbers(tmp_path):
    for suffix, kind in ((".png", "PNG"), (".jpg", "JPEG"), (".tif", "TIFF"), (".webp", "WEBP")):
        Image.new("RGB", (20, 20)).save(tmp_path / f"a{suffix}", kind)
        data = (tmp_path / f"a{suffix}").read_bytes()
        for end in range(0, len(data), 7):
            (tmp_path / f"a{suffix}").write_bytes(data[:end])
            with suppress(ValueError):
                safe_readers.read_image(tmp_path / f"a{suffix}", "RGB")


# ------------------------------------------------------------------------------------------- lists and tables


def test_lists_of_images_with_huge_labels(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"ImageNet_LT_{name}.txt").write_text("a.jpg 0\nb.jpg 1\n")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg")
    for label in ("1000000000", "9" * 5000):
        (tmp_path / "ImageNet_LT_val.txt").write_text(f"a.jpg 0\nb.jpg {label}\n")
        refused(on_disk.imagenet_lt, tmp_path, folder=".", words=r"ImageNet_LT_val\.txt, line 2")
    (tmp_path / "ImageNet_LT_val.txt").write_bytes(b"a\xff.jpg 0\n")
    refused(on_disk.imagenet_lt, tmp_path, folder=".", words=r"ImageNet_LT_val\.txt.*UTF-8")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", "[" * 100_000),
        ("t.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}"),
        ("t.csv", "text,label\na," + "9" * 5000),
        ("t.csv", "text,label\na,\ud800".encode("utf-8", "surrogatepass")),
        ("t.tsv", 'text\tlabel\n"a\tb'),
    ],
    ids=range(5),
)
def test_odd_tables(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    choice = Choice("text-table", {"file": name})
    refused(load_data, choice, tmp_path, words=r"t\.")


def test_vectors_longer_than_memory(tmp_path, monkeypatch):
    (tmp_path / "glove.txt").write_text("a " + "1 " * 10_000)
    monkeypatch.setattr(sizes, "memory", lambda: 100_000.0)
    refused(encoding.glove, tmp_path / "glove.txt", ["a", "b", "c"], words=r"glove\.txt.*this machine has")


def test_a_data_set_with_a_program_is_not_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.py").write_text("raise SystemExit")

    class Library:
        @staticmethod
        def load_dataset(*_):
            raise AssertionError("this would run the program")

    monkeypatch.setattr("calibrant.training.data.text.tables.optional_package", lambda *_, **__: Library)
    refused(load_data, Choice("huggingface", {"path": "set"}), tmp_path, words=r"set\.py")


def test_class_folders_with_odd_names(tmp_path):
    for name in ("train/a\x1b[2J", "train/b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name / "i.png")
    (tmp_path / "val" / "c\x1b[2J").mkdir(parents=True)
    with pytest.raises(ValueError, match="class"):
        load_data(Choice("image-folder", {"image_size": 4}), tmp_path)
