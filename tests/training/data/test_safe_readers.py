"""Pickles of every writer are read, and none can make the reader run anything."""

import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from calibrant.training.data.safe_readers import (
    MissingDataError,
    converted,
    present,
    read_image,
    read_mat,
    read_pickle,
)


def python2_pickle(rows: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 wrote for ``{'data': rows, 'labels': labels}`` with protocol 2."""

    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value

    def integer(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    kind = b"cnumpy\ndtype\n" + text(b"u1") + integer(0) + integer(1) + b"\x87R"
    kind_state = b"(" + integer(3) + text(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb"
    shape = b"".join(integer(side) for side in rows.shape) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n"
        + (b"cnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"\x87R")
        + (b"(" + integer(1) + shape + kind + kind_state + b"\x89" + text(rows.tobytes()) + b"tb")
    )
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


ROWS = np.arange(24, dtype=np.uint8).reshape(2, 12) * 10


def test_what_python_2_wrote_is_read(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(python2_pickle(ROWS, [3, 1]))
    content = read_pickle(path)
    assert content["labels"] == [3, 1]
    assert content["data"].dtype == np.uint8
    assert (content["data"] == ROWS).all()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("key", ["data", b"data"])
def test_what_python_3_wrote_is_read_with_every_protocol(tmp_path, protocol, key):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({key: ROWS, "names": [b"cat", "dog"]}, protocol=protocol))
    content = read_pickle(path)
    assert (content["data"] == ROWS).all()
    assert content["names"] == ["cat", "dog"]


@pytest.mark.parametrize("name", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_arrays_of_either_numpy_are_read(tmp_path, name):
    written = pickle.dumps({"data": ROWS}, protocol=2)
    for other in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        written = written.replace(b"c" + other + b"\n", b"c" + name.encode() + b"\n")
    assert name.encode() in written
    (tmp_path / "batch").write_bytes(written)
    assert (read_pickle(tmp_path / "batch")["data"] == ROWS).all()


@pytest.mark.parametrize(
    "array", [np.asfortranarray(ROWS), np.arange(3, dtype=">i4"), np.array([0.5]), np.array([True])]
)
def test_order_and_type_of_arrays_are_kept(tmp_path, array):
    for protocol in (2, 5):
        (tmp_path / "batch").write_bytes(pickle.dumps({"data": array}, protocol=protocol))
        assert read_pickle(tmp_path / "batch")["data"].tolist() == array.tolist()


class Command:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("function", [eval, getattr, np.load, Path.touch, np.frombuffer])
def test_a_pickle_that_names_a_function_is_refused_and_nothing_runs(tmp_path, protocol, function):
    trace = tmp_path / "trace"
    argument = f"open({str(trace)!r}, 'w')" if function is eval else trace
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": Command(function, argument)}, protocol=protocol))
    with pytest.raises(
        ValueError, match=r"batch cannot be read .* it asks for .*, expected nothing but NumPy"
    ):
        read_pickle(tmp_path / "batch")
    assert not trace.exists()


def test_arrays_of_objects_are_refused(tmp_path):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": np.array([{}, []], dtype=object)}))
    with pytest.raises(ValueError, match="array of type 'O8', expected numbers"):
        read_pickle(tmp_path / "batch")


def test_other_encodings_are_refused(tmp_path):
    written = pickle.dumps({"data": b"\xe9"}, protocol=2).replace(b"latin1", b"rot_13")
    assert b"_codecs" in written
    (tmp_path / "batch").write_bytes(written)
    with pytest.raises(ValueError, match="encoded as 'rot_13', expected latin-1"):
        read_pickle(tmp_path / "batch")


def test_the_generated_python_2_file_is_a_well_formed_pickle():
    names = {
        argument
        for operation, argument, _ in pickletools.genops(python2_pickle(ROWS, [0, 1]))
        if operation.name == "GLOBAL"
    }
    assert names == {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}


@pytest.mark.parametrize(
    "content", [b"", b"not a pickle", pickle.dumps({"data": ROWS})[:-9], b"\x80\x02cnumpy\nndarray\n)R."]
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(ValueError, match="batch"):
        read_pickle(tmp_path / "batch")


def test_a_list_is_not_a_dictionary(tmp_path):
    (tmp_path / "batch").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="batch holds a list, expected a dictionary"):
        read_pickle(tmp_path / "batch")


def test_arrays_of_a_mat_file(tmp_path):
    scipy.io.savemat(tmp_path / "a.mat", {"X": ROWS, "y": [[1], [2]], "more": 3})
    images, labels = read_mat(tmp_path / "a.mat", ("X", "y"))
    assert (images == ROWS).all()
    assert labels.ravel().tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"a\.mat has no array 'z', expected X, z"):
        read_mat(tmp_path / "a.mat", ("X", "z"))


@pytest.mark.parametrize(
    "content", [b"", b"x" * 200, b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM" + b"\0" * 99]
)
def test_what_is_no_mat_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "a.mat").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.mat cannot be read as a MATLAB file of version 5"):
        read_mat(tmp_path / "a.mat", ("X",))


def test_a_missing_file_says_what_to_download_and_where_to_put_it(tmp_path):
    assert present(tmp_path, "this", tmp_path) == tmp_path
    with pytest.raises(MissingDataError) as caught:
        present(tmp_path / "a.mat", "a.mat from https://example.org", tmp_path, "put")
    assert str(caught.value) == (
        f"{tmp_path}/a.mat is missing: download a.mat from https://example.org and put it in {tmp_path}"
    )
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_grey_of_16_bits_is_scaled_to_8(tmp_path, suffix):
    grey = np.array([[0, 128, 257, 30_000], [60_000, 65_278, 65_407, 65_535]], np.uint16)
    Image.fromarray(grey).save(tmp_path / f"a.{suffix}")
    expected = [[0, 0, 1, 117], [233, 254, 255, 255]]
    assert np.asarray(read_image(tmp_path / f"a.{suffix}", "L")).tolist() == expected
    colours = np.asarray(read_image(tmp_path / f"a.{suffix}", "RGB"))
    assert colours.shape == (2, 4, 3)
    assert (colours == np.array(expected)[:, :, None]).all()
    big_endian = Image.frombytes("I;16B", (4, 2), grey.astype(">u2").tobytes())
    assert np.asarray(converted(big_endian, "L")).tolist() == expected


@pytest.mark.parametrize(("kind", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_pixels_of_32_bits_are_refused(tmp_path, kind, mode):
    Image.fromarray(np.ones((2, 3), kind)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match=rf"a\.tiff cannot be .*: its pixels are of 32 bits \(mode {mode}\)"):
        read_image(tmp_path / "a.tiff", "RGB")
