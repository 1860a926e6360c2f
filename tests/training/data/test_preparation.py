"""Preparations: raw inputs become exactly what the test split has, and other inputs are refused."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from calibrant.training.data import DATA_SETS, PREPARATIONS
from calibrant.training.data.augmentation import NORMALISATIONS, Normalisation
from calibrant.training.data.raw_arrays import ArrayPreparation
from calibrant.training.data.raw_images import ImagePreparation
from calibrant.training.data.safe_readers import read_image
from calibrant.training.data.text.encoding import TokenPreparation, WordPreparation

from .test_in_memory import write_cifar10, write_cifar10_c, write_cifar100, write_svhn
from .test_on_disk import write_folders, write_imagenet, write_lists, write_tiny_imagenet
from .test_segmentation import write_camvid, write_voc
from .text.test_hugging_face import FakeTable
from .text.writing import ROWS, write_csv, write_messages


def channels_last(data, root):
    return data.test.inputs.permute(0, 2, 3, 1).numpy()


def files(data, root):
    return [data.test.folder / path.decode() for path in data.test.paths]


def digits(root):
    data = DATA_SETS["digits"](root)
    return data, (data.test.inputs * 16).numpy()


def digit_images(root):
    data = DATA_SETS["digits"](root, flat=False)
    return data, (data.test.inputs[:, 0] * 16).tolist()  # as the images of scikit-learn


def synthetic(root):
    data = DATA_SETS["synthetic"](root, test_size=5)
    return data, data.test.inputs.double().numpy()


def npz(root, name, array, **options):
    labels = np.arange(len(array)) % 2
    np.savez(
        root / "data.npz", **{name: array + 1, "labels": labels, f"test_{name}": array, "test_labels": labels}
    )
    return DATA_SETS["npz"](root, **options), array


def npz_features(root):
    return npz(root, "features", np.random.default_rng(0).normal(3, 2, (20, 4)))


def npz_signals(root):
    return npz(root, "inputs", np.random.default_rng(0).integers(-9, 9, (20, 2, 7)), normalisation="none")


def npz_grey(root):
    return npz(root, "images", np.random.default_rng(0).integers(0, 256, (20, 6, 5), dtype=np.uint8))


def npz_colours(root):
    return npz(root, "images", np.random.default_rng(0).integers(0, 256, (20, 3, 6, 5), dtype=np.uint8))


def cifar10(root):
    write_cifar10(root)
    data = DATA_SETS["cifar10"](root, validation=10)
    return data, channels_last(data, root)


def cifar100(root):
    write_cifar100(root)
    data = DATA_SETS["cifar100"](root, validation=100)
    return data, [Image.fromarray(each) for each in channels_last(data, root)]


def cifar10_c(root):
    write_cifar10_c(root)
    data = DATA_SETS["cifar10-c"](root)
    return data, list(channels_last(data, root))


def cifar100_c(root):
    write_cifar10_c(root)
    (root / "CIFAR-10-C").rename(root / "CIFAR-100-C")
    data = DATA_SETS["cifar100-c"](root)
    return data, data.test.inputs


def svhn(root):
    write_svhn(root, "test")
    data = DATA_SETS["svhn"](root)
    return data, channels_last(data, root)


def tiny_imagenet(root):
    write_tiny_imagenet(root)
    data = DATA_SETS["tiny-imagenet"](root, validation_per_class=2)
    return data, files(data, root)


def imagenet(root):
    write_imagenet(root)
    data = DATA_SETS["imagenet"](root, image_size=16)
    return data, [Image.open(file) for file in files(data, root)]


def imagenet_lt(root):
    write_lists(root)
    data = DATA_SETS["imagenet-lt"](root, image_size=16)
    return data, [str(file) for file in files(data, root)]


def image_folder(root):
    write_folders(root)
    data = DATA_SETS["image-folder"](root, image_size=16)
    return data, files(data, root)


def small_images(root):
    write_folders(root)
    data = DATA_SETS["image-folder"](root, image_size=16, augmentation="crop-flip")
    return data, [np.array(read_image(file)) for file in files(data, root)]


def voc2012(root):
    data = DATA_SETS["voc2012"](write_voc(root), crop=24)
    return data, [image for image, _ in data.test.files]


def camvid(root):
    data = DATA_SETS["camvid"](write_camvid(root), crop=40)
    return data, [image for image, _ in data.test.files]


def messages(root, **options):
    write_messages(root)
    data = DATA_SETS["newsgroups"](root, embedding="", length=5, test_length=4, **options)
    assert len(data.test) > 9
    texts = [
        f"The {topic} é {number}\n\nMore." for topic in ("belief", "engine", "orbit") for number in range(10)
    ]
    inputs = data.preparation(texts).tolist()
    # The parts are drawn at random: find the text of each element of the test part.
    return data, [texts[inputs.index(row)] for row in data.test.inputs.tolist()]


def newsgroups(root):
    return messages(root)


def newsgroups_keras(root):
    return messages(root, preprocessing="keras")


def text_table(root):
    write_csv(root / "a.csv", ROWS, header=("words", "label"))
    write_csv(root / "b.csv", rows := [("Good, NEW text", "good"), ("", "bad")], header=("words", "label"))
    data = DATA_SETS["text-table"](root, file="a.csv", test_file="b.csv", text="words", length=3)
    return data, [text for text, _ in rows]


def huggingface(root):
    (root / "news").mkdir()
    (root / "news" / "state.json").write_text("{}")
    texts = [f"word {number}" for number in range(20)]
    tables = {"train": FakeTable(texts, [0, 1] * 10), "test": FakeTable(texts[:2], [0, 1])}
    sys.modules["datasets"].load_from_disk = lambda path: tables
    return DATA_SETS["huggingface"](root, path="news"), texts[:2]


CASES = {
    "digits": [digits, digit_images],
    "synthetic": [synthetic],
    "npz": [npz_features, npz_signals, npz_grey, npz_colours],
    "cifar10": [cifar10],
    "cifar100": [cifar100],
    "cifar10-c": [cifar10_c],
    "cifar100-c": [cifar100_c],
    "svhn": [svhn],
    "tiny-imagenet": [tiny_imagenet],
    "imagenet": [imagenet],
    "imagenet-lt": [imagenet_lt],
    "image-folder": [image_folder, small_images],
    "voc2012": [voc2012],
    "camvid": [camvid],
    "newsgroups": [newsgroups, newsgroups_keras],
    "text-table": [text_table],
    "huggingface": [huggingface],
}
"""Functions that write a data set and return it with the raw elements of its test part, by its name."""


def test_every_data_set_has_a_case():
    assert set(DATA_SETS) - {"table"} == set(CASES)  # a table has tests of its own


@pytest.mark.parametrize(
    "case", [case for each in CASES.values() for case in each], ids=lambda case: case.__name__
)
def test_raw_elements_become_those_of_the_test_split(case, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())
    data, raw = case(tmp_path)
    expected, _ = data.test.batch(torch.arange(len(data.test)))
    kind = PREPARATIONS[data.preparation.kind]
    stored = kind.from_state(json.loads(json.dumps(data.preparation.state())))
    assert stored == data.preparation
    prepared = stored(raw)
    assert torch.equal(prepared, expected)
    size = len(expected) // 2 + 1
    for found, part in zip(stored.batches(raw, size), expected.split(size), strict=True):
        assert torch.equal(found, part)


def test_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "a", "text", "of", "good"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": "[UNK]", "eos_token": "[PAD]"}  # the padding token is set by `encode`
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained(tmp_path / "tiny")
    write_csv(tmp_path / "a.csv", ROWS)
    write_csv(tmp_path / "b.csv", rows := [("a good text of texts", "good"), ("", "bad")])
    options = {"file": "a.csv", "test_file": "b.csv", "tokenizer": "tiny", "length": 9, "test_length": 4}
    data = DATA_SETS["text-table"](tmp_path, **options)
    expected, _ = data.test.batch(torch.arange(2))
    state = json.loads(json.dumps(data.preparation.state()))
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(state["files"])
    prepared = TokenPreparation.from_state(state)([text for text, _ in rows])
    assert prepared.keys() == expected.keys()
    assert all(torch.equal(prepared[name], expected[name]) for name in expected)
    state["files"]["../evil.json"] = "{}"
    with pytest.raises(ValueError, match=r"'\.\./evil\.json', expected the JSON files of a tokenizer"):
        TokenPreparation.from_state(state)


COLOURS = ImagePreparation(NORMALISATIONS["cifar10"], 6, 5)
GREY = ImagePreparation(Normalisation((0.5,), (0.25,)), 6, 5)
FEATURES = ArrayPreparation((4,))
WORDS = WordPreparation(("a",), 3)


@pytest.mark.parametrize(
    ("preparation", "raw", "expected"),
    [
        (COLOURS, np.zeros((2, 6, 5, 3)), "type float64, expected paths of images, Pillow images, or bytes"),
        (COLOURS, np.zeros((2, 6, 5), np.uint8), r"shape \(2, 6, 5\), expected paths"),
        (COLOURS, np.zeros((2, 6, 5, 4), np.uint8), r"shape \(2, 6, 5, 4\), expected paths"),
        (COLOURS, [np.zeros((6, 5, 2), np.uint8)], r"an image of shape \(6, 5, 2\), expected paths"),
        (COLOURS, [1, 2], "a list with a int, expected paths"),
        (COLOURS, 7, "got a int, expected paths"),
        (FEATURES, np.zeros((3, 5)), r"shape \(3, 5\), expected an array of numbers of shape \(N, 4\)"),
        (FEATURES, [[1, 2], [3]], "lists of different lengths, expected an array"),
        (FEATURES, "a text", "got a str, expected an array of numbers"),
        (FEATURES, ["a"] * 4, "values of type <U1, expected an array of numbers"),
        (FEATURES, [1, 2, 3, np.nan], "got NaN"),
        (FEATURES, 1.0, r"numbers of shape \(\), expected an array"),
        (WORDS, "a text", r"got one text, expected a list of texts, such as \['a text'\]"),
        (WORDS, ["a", 1], "a list with a int, expected a list of texts"),
        (WORDS, 1, "got a int, expected a list of texts"),
    ],
)
def test_other_inputs_are_refused(preparation, raw, expected):
    with pytest.raises(ValueError, match=expected):
        preparation(raw)


def test_one_element_is_a_batch_of_one():
    assert COLOURS(np.zeros((6, 5, 3), np.uint8)).shape == (1, 3, 6, 5)
    assert COLOURS(np.zeros((3, 6, 5), np.uint8)).shape == (1, 3, 6, 5)
    assert COLOURS(Image.new("L", (90, 60))).shape == (1, 3, 6, 5)
    assert GREY(np.zeros((9, 9), np.uint8)).shape == (1, 1, 6, 5)
    assert GREY(np.zeros((9, 9, 3), np.uint8)).shape == (1, 1, 6, 5)
    assert GREY(np.zeros((7, 6, 5), np.uint8)).shape == (7, 1, 6, 5)
    assert FEATURES([1, 2, 3, 4]).shape == (1, 4)
    assert COLOURS([]).shape == (0, 3, 6, 5)
    assert WORDS([]).shape == (0, 3)


def test_images_are_read_from_folders_and_archives(tmp_path):
    write_folders(tmp_path, per_class=2, classes=("ant", "bee"))
    (tmp_path / "train" / "notes.txt").write_text("no image")
    raw, names = COLOURS.read(tmp_path / "train")
    assert names == ["ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png"]
    assert COLOURS.read(tmp_path / "train" / "ant")[1] == ["0.png", "1.png"]
    assert COLOURS.read(raw[0]) == ([raw[0]], ["0.png"])
    prepared = COLOURS(raw)
    assert prepared.shape == (4, 3, 6, 5)
    images = np.stack([np.array(read_image(file, "RGB")) for file in raw])
    np.savez(tmp_path / "all.npz", images=images, labels=np.arange(4))
    np.save(tmp_path / "all.npy", images)
    for file in ("all.npz", "all.npy"):
        again, numbers = COLOURS.read(tmp_path / file)
        assert numbers == ["0", "1", "2", "3"]
        assert torch.equal(COLOURS(again), prepared)


def test_numbers_and_texts_are_read_from_files(tmp_path):
    np.savez(tmp_path / "one.npz", anything=np.eye(4))
    raw, names = FEATURES.read(tmp_path / "one.npz")
    assert torch.equal(FEATURES(raw), torch.eye(4))
    assert names == ["0", "1", "2", "3"]
    write_csv(tmp_path / "a.csv", [("a line\nbreak", 1), ("", 2)], header=("text", "other"))
    assert WORDS.read(tmp_path / "a.csv") == (["a line\nbreak", ""], ["1", "2"])
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert WORDS.read(tmp_path / "a.jsonl") == (["a"], ["1"])


@pytest.mark.parametrize(
    ("preparation", "name", "expected"),
    [
        (COLOURS, "empty", "empty has no images, expected files like"),
        (COLOURS, "a.csv", r"a\.csv is neither a folder of images nor an image, \.npz or \.npy file"),
        (COLOURS, "two.npz", r"two\.npz has one, two, expected one of images, inputs, features"),
        (COLOURS, "numbers.npy", r"numbers\.npy: got an array of type float64, expected paths"),
        (FEATURES, "a.csv", r"a\.csv ends in '\.csv': expected one of '\.npz', '\.npy'"),
        (FEATURES, "numbers.npy", r"numbers\.npy: got numbers of shape \(3, 5\), expected an array"),
        (FEATURES, "damaged.npz", r"damaged\.npz cannot be read as a NumPy archive"),
        (WORDS, "a.csv", r"a\.csv, line 2: no column 'text', expected one of that name; the columns are 'x'"),
        (WORDS, "two.npz", r"two\.npz ends in '\.npz': expected one of '\.csv'"),
    ],
)
def test_other_files_are_refused(preparation, name, expected, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x\n1\n")
    np.savez(tmp_path / "two.npz", one=np.eye(2), two=np.eye(2))
    np.save(tmp_path / "numbers.npy", np.zeros((3, 5)))
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=expected):
        preparation.read(tmp_path / name)
