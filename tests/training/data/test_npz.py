"""Archives of arrays."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.npz import npz
from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.sampling import random_numbers


def sizes(data):
    return [len(data.train), len(data.validation), len(data.test)]


def everything(part):
    return part.batch(torch.arange(len(part)))


def pixels(count=40, shape=(6, 5, 3), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


LABELS = np.arange(40) % 4


def test_images_of_an_archive_are_divided_and_normalised(tmp_path):
    np.savez(tmp_path / "data.npz", images=pixels(), labels=LABELS, class_names=["a", "b", "c", "d", "e"])
    data = npz(tmp_path, validation=0.1, test=0.2)
    assert sizes(data) == [28, 4, 8]
    assert data.class_counts == (7, 7, 7, 7, 0)
    assert torch.bincount(data.test.targets).tolist() == [2, 2, 2, 2]
    assert data.class_names == ("a", "b", "c", "d", "e")
    inputs, _ = everything(data.train)
    assert inputs.shape == (28, 3, 6, 5)
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    assert data.test.normalisation == data.train.normalisation


@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 5, 1), (3, 6, 5), (1, 6, 5), (6, 5)])
def test_orders_of_axes_are_recognised(tmp_path, shape):
    stored = pixels(shape=shape)
    np.savez(tmp_path / "data.npz", images=stored, labels=LABELS)
    data = npz(tmp_path, normalisation="none", validation=0, test=1)
    inputs, _ = everything(data.test)
    channels = 3 if 3 in shape else 1
    assert inputs.shape == (40, channels, 6, 5)
    assert data.about == {"channels": channels, "image_size": 5}
    expected = stored.transpose(0, 3, 1, 2) if shape[-1] in (1, 3) else stored.reshape(40, channels, 6, 5)
    np.testing.assert_allclose(inputs.numpy(), expected / 255, rtol=1e-6)


def test_an_archive_that_is_only_for_testing(tmp_path):
    np.savez(tmp_path / "other.npz", images=pixels(), labels=LABELS)
    data = npz(tmp_path, file="other.npz", validation=0, test=1, normalisation="cifar10")
    assert sizes(data) == [0, 0, 40]
    expected = NORMALISATIONS["cifar10"](torch.from_numpy(pixels().transpose(0, 3, 1, 2)))
    found, targets = everything(data.test)
    torch.testing.assert_close(found, expected)
    assert targets.tolist() == LABELS.tolist()
    assert sizes(npz(tmp_path, file="other.npz", validation=0, test=1)) == [0, 0, 40]


@pytest.mark.parametrize("prefix", ["validation_", "val_"])
def test_parts_of_an_archive_are_used_whole(tmp_path, prefix):
    parts = {f"{prefix}images": pixels(6, seed=1), f"{prefix}labels": LABELS[:6]}
    np.savez(tmp_path / "data.npz", images=pixels(), labels=LABELS[:, None], **parts)
    assert sizes(npz(tmp_path, test=0.5)) == [20, 6, 20]
    parts |= {"test_images": pixels(7, seed=2), "test_labels": LABELS[:7]}
    np.savez(tmp_path / "data.npz", train_images=pixels(), train_labels=LABELS, **parts)
    data = npz(tmp_path, imbalance=5)
    assert sizes(data) == [10 + 5 + 3 + 2, 6, 7]


def test_only_training_images_are_augmented_and_only_when_asked(tmp_path):
    np.savez(tmp_path / "data.npz", images=pixels(), labels=LABELS)
    indices = torch.arange(4)
    draws = random_numbers(0, 0, indices)
    for augmentation, changed in (("crop-flip", True), ("none", False)):
        data = npz(tmp_path, augmentation=augmentation)
        assert torch.equal(data.train.batch(indices, draws)[0], data.train.batch(indices)[0]) is not changed
        assert torch.equal(data.test.batch(indices, draws)[0], data.test.batch(indices)[0])


@pytest.mark.parametrize("name", ["features", "inputs"])
def test_features_of_an_archive(tmp_path, name):
    features = np.random.default_rng(0).normal(5, 3, (40, 3))
    features[:, 2] = 7
    np.savez(tmp_path / "data.npz", **{name: features, "labels": LABELS})
    data = npz(tmp_path)
    assert data.about == {"features": 3}
    inputs, _ = everything(data.train)
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))
    raw, _ = everything(npz(tmp_path, normalisation="none", validation=0, test=1).test)
    np.testing.assert_allclose(raw.numpy(), features, rtol=1e-6)
    with pytest.raises(ValueError, match="expected images"):
        npz(tmp_path, augmentation="crop-flip")
    with pytest.raises(ValueError, match="expected images"):
        npz(tmp_path, normalisation="imagenet")


def test_whole_numbers_may_be_stored_as_floating_point(tmp_path):
    several = np.stack([LABELS == 0, LABELS > 1], 1)
    for labels in (LABELS, several):
        found = []
        for kind in (np.int64, np.float32):
            np.savez(tmp_path / "data.npz", images=pixels(), labels=labels.astype(kind))
            found.append(npz(tmp_path).train.targets)
        assert torch.equal(*found)
        assert found[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": pixels()}, "expected labels and exactly one of images, inputs, features"),
        ({"images": pixels(), "inputs": pixels(), "labels": LABELS}, "exactly one of"),
        ({"pictures": pixels()}, "has pictures, expected labels and exactly one of images, inputs, features"),
        ({"images": pixels(), "labels": LABELS[:9]}, r"expected \(9, \.\.\.\) numbers"),
        ({"images": pixels(), "labels": LABELS / 2}, "has labels of type float64"),
        ({"images": pixels(), "labels": LABELS - 1}, "has labels from -1 to 2, expected 0 to 999999"),
        ({"images": pixels(), "labels": LABELS - 1.0}, "has labels from -1 to 2, expected 0 to 999999"),
        ({"images": pixels(), "labels": LABELS * np.nan}, "has labels of type float64"),
        ({"images": pixels(), "labels": LABELS, "class_names": ["a"]}, "expected 4 or more names"),
        (
            {"images": pixels(), "labels": np.eye(4, dtype=int)[LABELS]},
            r"exactly one 1 in every row.*argmax\(1\)",
        ),
        ({"images": pixels(), "labels": np.zeros((40, 0), dtype=int)}, r"labels of shape \(40, 0\)"),
        (
            {"inputs": np.full((len(LABELS), 2), np.nan), "labels": LABELS},
            "NaN or infinite numbers in inputs",
        ),
        ({"inputs": np.full((len(LABELS), 2), 1e300), "labels": LABELS}, "too large for float32"),
        ({"images": pixels().astype(float), "labels": LABELS}, r"channels last; expected pixels as bytes"),
        ({"images": pixels().astype(np.int64), "labels": LABELS}, r"channels last; expected pixels as bytes"),
        (
            {"images": pixels(shape=(6, 5, 4)), "labels": LABELS},
            r"expected 1 or 3 channels: leave out the transparency, images\[\.\.\., :3\]",
        ),
        (
            {
                "images": pixels(),
                "labels": LABELS,
                "test_images": pixels(4, (2, 2, 3)),
                "test_labels": [0] * 4,
            },
            "parts of different shapes",
        ),
    ],
)
def test_archives_that_cannot_be_used(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=r"data\.npz .*" + message):
        npz(tmp_path)


def test_a_file_that_is_not_below_the_data_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", images=pixels(), labels=LABELS)
    with pytest.raises(FileNotFoundError, match=r"data\.npz exists: file is relative to the data root"):
        npz(Path("elsewhere"))


def test_constants_are_kept(tmp_path):
    features = np.random.default_rng(0).normal(3, 2, (len(LABELS), 4))
    np.savez(tmp_path / "data.npz", features=features, labels=LABELS)
    data = npz(tmp_path)
    raw = npz(tmp_path, normalisation="none")
    assert raw.test.normalisation is None
    for part in (data.test, data.train.subset(torch.arange(3)), data.test.to(torch.device("cpu"))):
        assert part.normalisation is not None
        assert len(part.normalisation.mean) == len(part.normalisation.std) == 4
    inputs, _ = everything(raw.test)
    torch.testing.assert_close(data.test.normalisation(inputs), everything(data.test)[0])


def test_labels_with_gaps_are_told(tmp_path):
    np.savez(tmp_path / "data.npz", images=pixels(), labels=LABELS + 1)
    with pytest.warns(UserWarning, match=r"no training element of 1 of 5 classes \(labels 0\).* from 0"):
        assert npz(tmp_path).num_classes == 5


def test_files_that_are_no_archives(tmp_path):
    with pytest.raises(MissingDataError, match=r"data\.npz is missing"):
        npz(tmp_path)
    for content in (b"", b"text", b"PK\3\4 broken"):
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.npz cannot be read as a NumPy archive"):
            npz(tmp_path)
    np.save(tmp_path / "one.npy", pixels())
    with pytest.raises(ValueError, match=r"one\.npy cannot be read .* one array"):
        npz(tmp_path, file="one.npy")
    np.savez(tmp_path / "data.npz", images=np.array([{}], dtype=object), labels=[0])
    with pytest.raises(ValueError, match="cannot be read as a NumPy archive of numbers"):
        npz(tmp_path)


def test_grey_images_have_no_constants_of_colour_images(tmp_path):
    np.savez(tmp_path / "data.npz", images=pixels(shape=(6, 5)), labels=LABELS)
    with pytest.raises(ValueError, match="images of 1 channel, expected 3 for 'cifar10'"):
        npz(tmp_path, normalisation="cifar10")
    with pytest.raises(ValueError, match="normalisation must be one of"):
        npz(tmp_path, normalisation="mnist")
