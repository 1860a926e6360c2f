"""Every shipped recipe, as it stands but for its sizes, on small files in the formats of the real ones."""

import importlib
import json
import math
import pickle
import re
import shlex
import shutil
import socket
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from calibrant.losses import AdaptationWarning
from calibrant.training import setup
from calibrant.training.data import load_data
from calibrant.training.loop import train
from calibrant.training.models import create_model
from calibrant.training.recipe import Recipe, shipped_recipes
from calibrant.training.run_folder import is_finished
from tests.training.models.shapes import weights_without_numbers

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")

RECIPES = sorted(shipped_recipes())

SMALLER = {
    "cifar10": ["data.validation=2"],
    "cifar100": ["data.validation=2"],
    "digits": ["data.validation_per_class=2", "data.test_per_class=1", "data.head=20"],
    "imagenet": ["data.image_size=64", "data.validation=0.5"],
    "imagenet-lt": ["data.image_size=64"],
    "newsgroups": [],
    "svhn": ["data.validation=2"],
    "synthetic": ["data.train_size=40", "data.validation_size=20", "data.test_size=10"],
    "tiny-imagenet": ["data.validation_per_class=1"],
    "voc2012": ["data.crop=64"],
}
"""What is changed of a recipe with these data, so that it fits the generated files and a small machine."""

NARROWER = {"timm:swinv2_tiny_window8_256": ["model.embed_dim=32", "model.num_heads=[1,2,4,8]"]}
"""Options of networks that `slim` cannot make narrower."""

PACKAGES = {
    "timm": "timm",
    "smp": "segmentation_models_pytorch",
    "hf": "transformers",
}

GROUPS = ("alt.atheism", "rec.autos", "sci.space", "talk.politics.misc")
WORDS = ("the", "orbit", "engine", "belief", "good", "bad", "is", "a", "vote", "far")


def write_cifar(root, per_class):
    """The pickles for Python; where ``per_class`` is 0, six training images in all."""
    generator = np.random.default_rng(0)

    def write(path, labels, field):
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        path.write_bytes(pickle.dumps({b"data": pixels, field: labels}, protocol=2))

    ten, hundred = root / "cifar-10-batches-py", root / "cifar-100-python"
    parts = [list(range(10)) * per_class] * 5 if per_class else [[0], [3], [3], [7], [7, 9]]
    for number, labels in enumerate(parts, start=1):
        write(ten / f"data_batch_{number}", labels, b"labels")
    write(ten / "test_batch", [1, 8], b"labels")
    names = [f"thing {label}".encode() for label in range(100)]
    (ten / "batches.meta").write_bytes(pickle.dumps({b"label_names": names[:10]}, protocol=2))
    labels = list(range(100)) * per_class if per_class else [0, 15, 50, 50, 98, 99]
    write(hundred / "train", labels, b"fine_labels")
    write(hundred / "test", [10, 80], b"fine_labels")
    (hundred / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}, protocol=2))


def write_svhn(root):
    generator = np.random.default_rng(0)
    for name, labels in (("train", [10, 1, 1, 5, 5, 9]), ("test", [3, 4])):
        pixels = generator.integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
        content = {"X": pixels, "y": np.array(labels, np.uint8)[:, None]}
        scipy.io.savemat(root / f"{name}_32x32.mat", content)


def write_image(path, seed, width=64, height=64):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_tiny_imagenet(root):
    folder, wnids = root / "tiny-imagenet-200", ("n01443537", "n01629819")
    for (label, wnid), number in product(enumerate(wnids), range(3)):
        write_image(folder / f"train/{wnid}/images/{wnid}_{number}.JPEG", 3 * label + number)
    for number in range(2):
        write_image(folder / f"val/images/val_{number}.JPEG", number)
    lines = [f"val_{number}.JPEG\t{wnid}\t0\t0\t62\t62\n" for number, wnid in enumerate(wnids)]
    (folder / "val/val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")


def write_imagenet(root):
    """Two classes, and the lists of the long-tailed version: four, two and two images."""
    folder, wnids = root / "imagenet", ("n01440764", "n01443537")
    for label, wnid in enumerate(wnids):
        for number in range(4):
            write_image(folder / f"train/{wnid}/{wnid}_{number}.JPEG", number + 4 * label, 90, 70)
        for number in range(2):
            write_image(folder / f"val/{wnid}/ILSVRC2012_val_{label}{number}.JPEG", number, 70, 90)
    lists = {
        "train": [("train", 0, f"_{number}") for number in range(3)] + [("train", 1, "_0")],
        "val": [("train", 0, "_3"), ("train", 1, "_3")],
        "test": [("val", 0, ""), ("val", 1, "")],
    }
    for part, entries in lists.items():
        lines = [
            f"{top}/{wnids[label]}/{wnids[label] + end if end else f'ILSVRC2012_val_{label}0'}.JPEG {label}\n"
            for top, label, end in entries
        ]
        (folder / f"ImageNet_LT_{part}.txt").write_text("".join(lines))


def write_voc(root):
    folder = root / "VOCdevkit" / "VOC2012"
    for part, count in (("train", 5), ("val", 2)):
        names = [f"2007_{part}{number}" for number in range(count)]
        for number, name in enumerate(names):
            write_image(folder / f"JPEGImages/{name}.jpg", number, 50, 40)
            labels = np.random.default_rng(number).integers(0, 21, (40, 50), dtype=np.uint8)
            labels[:2] = 255
            path = folder / f"SegmentationClass/{name}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(labels).save(path)
        path = folder / f"ImageSets/Segmentation/{part}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(names) + "\n")


def write_newsgroups(root):
    """Messages by date, and vectors of some of their words."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 2)):
        for group, number in product(GROUPS, range(count)):
            path = root / f"20news-bydate-{part}" / group / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"From: someone\nSubject: {group}\n\n{' '.join(generator.choice(WORDS, 30))}.\n")
    (root / "glove.6B").mkdir()
    lines = [f"{word} {' '.join(f'{value:.4f}' for value in generator.normal(size=100))}\n" for word in WORDS]
    (root / "glove.6B" / "glove.6B.100d.txt").write_text("".join(lines))


def write_tiny_bert(folder):
    """A BERT of one thin layer with random weights, and a tokenizer of a dozen words."""
    transformers = importlib.import_module("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    vocabulary = {word: index for index, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Folders with data: one with few images of CIFAR, and one with enough for a long tail."""
    few, many = tmp_path_factory.mktemp("few"), tmp_path_factory.mktemp("many")
    write_cifar(few, 0)
    write_cifar(many, 2)
    write_svhn(few)
    write_tiny_imagenet(few)
    write_imagenet(few)
    write_voc(few)
    write_newsgroups(few)
    return few, many


@pytest.fixture
def folder(tmp_path):
    """For a run, whose checkpoints are too large to be kept."""
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)


def reduced(name, roots):
    """The recipe with two steps in its only epoch, and the folder with its data."""
    recipe = Recipe.load(name)
    assert recipe.data.name in SMALLER, f"{name}: no data are generated for {recipe.data.name!r}"
    few, many = roots
    root = many if recipe.data.options.get("imbalance", 1) > 1 else few
    changes = [
        *SMALLER[recipe.data.name],
        "loss=cals-alm",
        "epochs=1",
        "evaluation_batch_size=4",
        "workers=0",
    ]
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # emulated, it takes minutes for a few images
        changes.append("precision=32-true")
    prefix, colon, _ = recipe.model.name.partition(":")
    if colon:
        pytest.importorskip(PACKAGES[prefix])
    if prefix == "hf":
        if not (few / name).exists():
            write_tiny_bert(few / name)
        changes += [f"model.name=hf:{few / name}", f"data.tokenizer={name}"]
    elif colon:
        changes += ["model.pretrained=false"]  # the weights would have to be downloaded
        changes += NARROWER.get(recipe.model.name, [])
    recipe = recipe.override(changes)
    size = len(load_data(recipe.data, root).train)
    batch_size = size // 2 if recipe.drop_last else -(-size // 2)
    return recipe.override([f"batch_size={batch_size}"]), root


def thinned(module, inputs):
    """Every fourth pixel in each direction, where images enter one of our convolutional networks.

    Convolutions of whole images take most of the time. `test_networks.py` sees to images of any size.
    """
    if isinstance(module, nn.Conv2d) and module.in_channels in (1, 3):
        return tuple(images[..., ::4, ::4] for images in inputs)
    return None


def stand_in(name, num_classes, about, **options):
    """A small network instead of one that another recipe trains. Wrong options are still refused."""
    with weights_without_numbers():
        create_model(name, num_classes, about, **options)
    features = (nn.Conv2d(about["channels"], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(8, num_classes))


def slim(name, num_classes, about, **options):
    """The network, with an eighth of its channels if it is large: the same layers, far fewer weights.

    `test_networks.py` sees to the numbers of channels.
    """
    if name in NARROWER:
        return create_model(name, num_classes, about, **options)
    with weights_without_numbers():
        network = create_model(name, num_classes, about, **options)
    if sum(weight.numel() for weight in network.parameters()) < 5e6:
        return create_model(name, num_classes, about, **options)

    def fewer(channels):
        return channels if channels in (about["channels"], num_classes) else channels // 8

    layers = [each for each in network.modules() if isinstance(each, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    for layer in layers:
        for key, value in layer.named_parameters():
            sizes = [*map(fewer, value.shape[:2]), *value.shape[2:]]
            setattr(layer, key, nn.Parameter(value.new_empty(sizes)))
        for key, value in layer.named_buffers():
            setattr(layer, key, value.new_empty([*map(fewer, value.shape)]))
    network.to_empty(device="cpu")
    for layer in layers:
        layer.reset_parameters()
    return network


@cache
def model_of(name):
    return Recipe.load(name).model


def trains_its_model(name):
    """Whether no earlier recipe has the same model with the same options."""
    same = [other for other in RECIPES if model_of(other) == model_of(name)]
    return name == same[0]


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_and_an_adaptation(name, roots, folder, offline, monkeypatch):
    recipe, root = reduced(name, roots)
    data = load_data(recipe.data, root)
    if "channels" in data.about:
        monkeypatch.setattr(setup, "create_model", slim if trains_its_model(name) else stand_in)
    steps = []
    handles = [register_optimizer_step_post_hook(lambda *_: steps.append(1))]
    if ":" not in recipe.model.name:  # networks of other packages may expect images of a given size
        handles.append(register_module_forward_pre_hook(thinned))
    try:
        with pytest.warns(AdaptationWarning, match="only after the last training step"):  # there is one epoch
            train(recipe, folder, data_root=root)
    finally:
        for handle in handles:
            handle.remove()

    assert is_finished(folder)
    assert len(steps) == 2
    loss = load_file(folder / "loss.safetensors")
    assert loss["passes"] == 1
    assert (loss["previous_violation"] != 0).all()
    (epoch,) = json.loads((folder / "result.json").read_text())["history"]
    assert math.isfinite(epoch["train_loss"])
    for part in ("validation", "test"):
        split = getattr(data, part)
        _, labels = split.batch(torch.arange(len(split)))
        with np.load(folder / f"{part}.npz") as stored:
            assert stored["logits"].shape == (len(split), data.num_classes, *labels.shape[1:])
            assert np.isfinite(stored["logits"]).all()
            assert np.array_equal(stored["labels"], labels.masked_fill(labels == data.ignore_index, -100))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_described_and_survives_being_written(name):
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert 20 < len(recipe.description) <= 100
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_the_page_lists_every_recipe_once():
    (rows,) = re.findall(r"^\| recipe \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    cells = [line.split("|")[1] for line in rows.splitlines()[2:] if line]
    assert sorted(re.findall(r"`([^`]+)`", " ".join(cells))) == RECIPES


def test_the_published_numbers_are_beside_recipes():
    names = re.findall(r"^\| `([^`]+)`[^|]*\| \d+\.\d\d [|(]", PAGE, re.MULTILINE)
    assert len(names) == 8
    assert set(names) <= set(RECIPES)


def commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if "calibrant train" in line]


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_page_names_what_there_is(command):
    words = shlex.split(command.partition("calibrant train ")[2])
    options = list(zip(words[1::2], words[2::2], strict=True))
    changes = [value for option, value in options if option == "--set"]
    (loss,) = (value for option, value in options if option == "--loss")
    Recipe.load(words[0]).override([*changes, f"loss={loss}"])
    assert {option for option, _ in options} <= {"--loss", "--seed", "--output", "--data-root", "--set"}
