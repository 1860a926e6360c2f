"""Calibrators on disk: what comes back, and what is said of files that are something else."""

import copy
import json
from functools import cache

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calibrant.calibrators import (
    CALIBRATORS,
    BayesianBinning,
    Identity,
    Temperature,
    load_calibrator,
    save_calibrator,
)
from tests.calibrators.test_contract import VARIANTS, create_calibrator, every, sampled


@cache
def fitted(key, options):
    """A calibrator of four classes, with options as JSON; a test that changes it needs a copy."""
    return create_calibrator(key, **json.loads(options)).fit(*sampled(120, 4))


@pytest.fixture
def saved(tmp_path):
    """A function that saves a fitted calibrator and returns it and the path."""

    def save(key="vector", options=None):
        calibrator = copy.deepcopy(fitted(key, json.dumps(options or {})))
        path = tmp_path / "calibrator.safetensors"
        save_calibrator(calibrator, path)
        return calibrator, path

    return save


def rewrite(path, change):
    """Save the file anew with its metadata and tensors changed."""
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    description = json.loads(header["calibrator"])
    replaced = change(header, description, tensors)
    header["calibrator"] = json.dumps(description) if replaced is None else replaced
    save_file(tensors, path, metadata=header)


@every
def test_comes_back_as_it_was(saved, key, options):
    calibrator, path = saved(key, options)
    loaded = load_calibrator(str(path))
    assert type(loaded) is type(calibrator)
    assert loaded.num_classes == 4
    assert loaded.preserves_order == calibrator.preserves_order
    for name, value in options.items():
        assert getattr(loaded, name) == value
    assert dict(loaded.named_buffers()).keys() == dict(calibrator.named_buffers()).keys()
    for name, buffer in calibrator.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer)
    for shape in ((30, 4), (2, 4, 3, 5)):
        logits = sampled(*shape, seed=1)[0]
        assert torch.equal(loaded(logits), calibrator(logits))
    # It can be fitted anew and saved again.
    save_calibrator(loaded.fit(*sampled(60, 3, seed=2)), path)
    assert load_calibrator(path).num_classes == 3


def test_the_header_says_what_it_is(saved):
    _, path = saved("histogram-binning", {"bins": 7})
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert header["format"] == "calibrant-calibrator-1"
    description = json.loads(header["calibrator"])
    assert len(description.pop("checksum")) == 64
    assert description == {
        "method": "histogram-binning",
        "num_classes": 4,
        "class_names": None,
        "options": {"bins": 7, "variant": "one-vs-rest", "binning": "equal-width"},
    }


@pytest.mark.parametrize("bins", [range(1, 4), (1, 2, 3), list(np.arange(1, 4))], ids=repr)
def test_options_that_json_has_no_word_for(tmp_path, bins):
    calibrator = BayesianBinning(bins=bins).fit(*sampled(50, 3))
    save_calibrator(calibrator, tmp_path / "calibrator")
    loaded = load_calibrator(tmp_path / "calibrator")
    assert loaded.bins == [1, 2, 3]


def test_class_names_are_kept_and_checked(tmp_path):
    path, names = tmp_path / "calibrator", ["cat", "dog", "horse"]
    calibrator = Temperature().fit(*sampled(50, 3))
    with pytest.raises(ValueError, match="2 class_names for 3 classes"):
        save_calibrator(calibrator, path, class_names=names[:2])
    save_calibrator(calibrator, path, class_names=names)
    for given in (None, names, tuple(names), ["0", "1", "2"]):
        assert load_calibrator(path, class_names=given).class_names == tuple(names)
    with pytest.raises(ValueError, match="class 0 is 'dog', expected 'cat': the same classes in another"):
        load_calibrator(path, class_names=["dog", "cat", "horse"])
    with pytest.raises(ValueError, match=r"class 2 is 'ox', expected 'horse'$"):
        load_calibrator(path, class_names=["cat", "dog", "ox"])
    with pytest.raises(ValueError, match="there are 2, expected 3"):
        load_calibrator(path, class_names=names[:2])
    # Saved once more, they stay; fitted to other data, they are gone.
    loaded = load_calibrator(path)
    save_calibrator(loaded, path)
    assert load_calibrator(path).class_names == tuple(names)
    assert loaded.fit(*sampled(50, 4)).class_names is None


def test_files_without_class_names_still_load(tmp_path):
    path = tmp_path / "calibrator"
    save_calibrator(Temperature().fit(*sampled(50, 3)), path)
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    description = json.loads(header["calibrator"])
    del description["class_names"]
    save_file(tensors, path, metadata=header | {"calibrator": json.dumps(description)})
    assert load_calibrator(path, class_names=["a", "b", "c"]).class_names is None


def test_what_is_not_fitted_is_not_written(tmp_path):
    for key, options in VARIANTS.values():
        with pytest.raises(RuntimeError, match="has learned nothing yet"):
            save_calibrator(create_calibrator(key, **options), tmp_path / "calibrator")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_in_one_step(saved, monkeypatch):
    calibrator, path = saved("temperature")
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match=r"cannot write .*No space left"):
        save_calibrator(calibrator.fit(*sampled(50, 3)), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_nowhere_to_write(tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot write"):
        save_calibrator(Identity().fit(*sampled(5, 3)), tmp_path / "missing" / "calibrator")


def test_no_such_file(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no calibrator"):
            load_calibrator(path)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 20, 100, -1])
def test_truncated_files(saved, kept):
    _, path = saved()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"calibrator.safetensors is no safetensors file, or damaged"):
        load_calibrator(path)


def test_truncated_anywhere(saved):
    _, path = saved("platt")
    content = path.read_bytes()
    for kept in range(0, len(content), 3):
        path.write_bytes(content[:kept])
        with pytest.raises(ValueError, match=r"calibrator.safetensors is"):
            load_calibrator(path)


def test_every_damaged_byte_of_the_header_is_refused_or_harmless(saved):
    _, path = saved("beta")
    content = path.read_bytes()
    for place in range(0, 8 + int.from_bytes(content[:8], "little")):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :])
        try:
            loaded = load_calibrator(path)
        except ValueError as error:
            assert str(error).startswith("calibrator.safetensors is")  # noqa: PT017
        else:
            assert loaded.key in VARIANTS


@pytest.mark.parametrize("content", [b"hello", b"\x80\x02}q\x00.", b"{}" * 50, b"PK\x03\x04" + bytes(100)])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes.txt is no safetensors file, or damaged"):
        load_calibrator(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "calibrant-calibrator-2"}])
def test_safetensors_of_another_format(tmp_path, metadata):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, path, metadata=metadata)
    found = repr((metadata or {}).get("format"))
    with pytest.raises(ValueError, match=f"its format is {found}, expected 'calibrant-calibrator-1'"):
        load_calibrator(path)


CHANGES = {
    "a missing tensor": lambda header, description, tensors: tensors.pop("bias").tolist() and None,
    "a tensor of another size": lambda header, description, tensors: tensors.update(bias=torch.zeros(9)),
    "a tensor of integers": lambda header, description, tensors: tensors.update(
        weight=torch.zeros(0, dtype=torch.long)
    ),
    "another number of classes": lambda header, description, tensors: description.update(num_classes=7),
    "no number of classes": lambda header, description, tensors: description.update(num_classes="many"),
    "a negative number of classes": lambda header, description, tensors: description.update(num_classes=-4),
    "null for the number of classes": lambda header, description, tensors: description.update(
        num_classes=None
    ),
    "another method": lambda header, description, tensors: description.update(method="isotonic", options={}),
    "a method that is a list": lambda header, description, tensors: description.update(method=["vector"]),
    "an unknown option": lambda header, description, tensors: description["options"].update(unheard=1),
    "a bad option": lambda header, description, tensors: description["options"].update(ridge=-1.0),
    "options that are a list": lambda header, description, tensors: description.update(options=["ridge"]),
    "no options": lambda header, description, tensors: description.pop("options") and None,
    "no JSON": lambda header, description, tensors: "{",
    "JSON that is a number": lambda header, description, tensors: "3",
    "JSON that is a list": lambda header, description, tensors: "[]",
    "a tensor in place of a method of the class": lambda header, description, tensors: tensors.update(
        forward=torch.zeros(1)
    ),
    "a tensor with a point in its name": lambda header, description, tensors: tensors.update(
        {"a.b": torch.zeros(1)}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_calibrator_that_makes_no_sense(saved, change):
    _, path = saved()
    rewrite(path, change)
    with pytest.raises(ValueError, match=r"calibrator.safetensors is a damaged calibrator: "):
        load_calibrator(path)


def test_a_calibrator_that_is_not_registered(saved):
    _, path = saved()
    rewrite(path, lambda header, description, tensors: description.update(method="astrology"))
    with pytest.raises(ValueError, match=r"calibrator.safetensors is a calibrator 'astrology', which is"):
        load_calibrator(path)


def test_a_calibrator_from_outside_names_its_module(tmp_path, monkeypatch):
    class Halved(Identity):
        key = "halved"

        def transform(self, rows):
            return rows / 2

    path, logits = tmp_path / "calibrator.safetensors", 2 * torch.eye(3)
    save_calibrator(Halved().fit(logits, torch.arange(3)), path)
    with pytest.raises(ValueError, match=rf"'halved', which is unknown here: .* \('{__name__}' when it was"):
        load_calibrator(path)
    monkeypatch.setitem(CALIBRATORS, "halved", Halved)
    assert torch.equal(load_calibrator(path)(logits), logits / 2)


@pytest.mark.parametrize("key", [key for key, options in VARIANTS.values() if not options])
def test_every_tensor_is_needed(saved, key):
    calibrator, path = saved(key)
    content = path.read_bytes()
    for lacking, _ in calibrator.named_buffers():

        def change(header, description, tensors, name=lacking):
            del tensors[name]
            tensors["nothing"] = torch.zeros(1)

        path.write_bytes(content)
        rewrite(path, change)
        with pytest.raises(ValueError, match=r"damaged calibrator: ValueError its numbers are not those"):
            load_calibrator(path)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 1), (4, 0), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("key", [key for key, options in VARIANTS.values() if not options])
def test_tensors_of_other_shapes_are_refused_or_harmless(saved, key, shape):
    calibrator, path = saved(key)
    content = path.read_bytes()
    for name, _ in calibrator.named_buffers():

        def change(header, description, tensors, name=name):
            tensors[name] = torch.full(shape, 0.5)

        path.write_bytes(content)
        rewrite(path, change)
        try:
            loaded = load_calibrator(path)
        except ValueError as error:
            assert "is a damaged calibrator" in str(error)  # noqa: PT017
        else:
            assert loaded(torch.zeros(2, 4)).shape == (2, 4)


def test_a_header_without_a_description(tmp_path):
    path = tmp_path / "calibrator.safetensors"
    save_file({"temperature": torch.ones(())}, path, metadata={"format": "calibrant-calibrator-1"})
    with pytest.raises(ValueError, match="damaged calibrator: KeyError 'calibrator'"):
        load_calibrator(path)


def test_loading_runs_no_code_and_needs_no_pickle(saved, monkeypatch):
    _, path = saved("temperature")
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("unpickled"))
    monkeypatch.setattr("torch.load", lambda *_: pytest.fail("unpickled"))
    assert isinstance(load_calibrator(path), Temperature)


def test_a_changed_number_is_noticed(saved):
    _, path = saved("temperature", {})
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80  # the sign of T
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not those that were saved"):
        load_calibrator(path)
