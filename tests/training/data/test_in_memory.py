"""CIFAR, its corrupted versions and SVHN from small files in their canonical formats."""

import pickle
from typing import get_args

import numpy as np
import pytest
import scipy.io
import torch

from calibrant.options import Choice, RecipeError
from calibrant.training.data import load_data
from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.in_memory import (
    CIFAR10_CLASSES,
    Corruption,
    ImageSplit,
    cifar10,
    cifar10_c,
    cifar100,
    cifar100_c,
    svhn,
)
from calibrant.training.data.safe_readers import MissingDataError
from calibrant.training.data.sampling import random_numbers

from .test_safe_readers import python2_pickle


def rows(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def write_cifar10(root, per_class=4, python=3):
    """Five training files and a test file, each with as many images of every class."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    labels = list(range(10)) * per_class
    for seed, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        content = rows(len(labels), seed)
        (folder / name).write_bytes(
            python2_pickle(content, labels)
            if python == 2
            else pickle.dumps({b"data": content, b"labels": labels, b"filenames": [b"a.png"]}, protocol=2)
        )
    names = [name.encode() for name in CIFAR10_CLASSES]
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))


def write_cifar100(root, per_class=3):
    folder = root / "cifar-100-python"
    folder.mkdir()
    labels = list(range(100)) * per_class
    for seed, name in enumerate(["train", "test"]):
        content = {"data": rows(len(labels), seed), "fine_labels": labels, "coarse_labels": [0] * len(labels)}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"fine_label_names": [f"thing {label}" for label in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(names))


def write_cifar10_c(root, size=20):
    folder = root / "CIFAR-10-C"
    folder.mkdir()
    images = np.repeat(np.arange(1, 6, dtype=np.uint8), size)[:, None, None, None] * 10
    np.save(folder / "gaussian_noise.npy", np.broadcast_to(images, (5 * size, 32, 32, 3)))
    np.save(folder / "labels.npy", np.tile(np.arange(size) % 10, 5))


def write_svhn(root, *names):
    generator = np.random.default_rng(0)
    for name in names:
        images = generator.integers(0, 256, (32, 32, 3, 40), dtype=np.uint8)
        labels = np.arange(40, dtype=np.uint8)[:, None] % 10 + 1
        scipy.io.savemat(root / f"{name}_32x32.mat", {"X": images, "y": labels})


@pytest.mark.parametrize("python", [2, 3])
def test_cifar10_is_read_and_divided(tmp_path, python):
    write_cifar10(tmp_path, python=python)
    data = cifar10(tmp_path, validation=50)
    assert [len(data.train), len(data.validation), len(data.test)] == [150, 50, 40]
    assert data.class_names == CIFAR10_CLASSES
    assert data.class_counts == (15,) * 10
    assert torch.bincount(data.validation.targets).tolist() == [5] * 10
    assert data.about == {"channels": 3, "image_size": 32}
    inputs, targets = data.test.batch(torch.tensor([3]))
    expected = NORMALISATIONS["cifar10"](torch.from_numpy(rows(40, 5)[3].reshape(1, 3, 32, 32)))
    assert torch.equal(inputs, expected)
    assert targets.tolist() == [3]


def test_training_and_validation_images_are_different_ones(tmp_path):
    write_cifar10(tmp_path)
    data = cifar10(tmp_path, validation=50)
    together = torch.cat([data.train.inputs, data.validation.inputs]).flatten(1)
    assert len({image.numpy().tobytes() for image in together}) == 200
    again, other = cifar10(tmp_path, validation=50), cifar10(tmp_path, validation=50, split_seed=1)
    assert torch.equal(data.validation.inputs, again.validation.inputs)
    assert not torch.equal(data.validation.inputs, other.validation.inputs)
    assert torch.equal(data.test.inputs, other.test.inputs)


def test_one_normalisation_serves_all_parts(tmp_path):
    write_cifar10(tmp_path)
    data = cifar10(tmp_path, validation=50)
    assert data.train.normalisation is data.validation.normalisation is data.test.normalisation


def test_only_the_training_part_becomes_long_tailed(tmp_path):
    write_cifar10(tmp_path)
    data = cifar10(tmp_path, validation=50, imbalance=15)
    assert data.class_counts[0] == 15
    assert data.class_counts[-1] == 1
    assert torch.bincount(data.validation.targets).tolist() == [5] * 10
    assert len(data.test) == 40


def test_only_the_training_part_is_augmented_and_only_when_asked(tmp_path):
    write_cifar10(tmp_path)
    data, plain = cifar10(tmp_path, validation=50), cifar10(tmp_path, validation=50, augmentation="none")
    indices = torch.arange(20)
    draws = random_numbers(0, 0, indices)
    assert not torch.equal(data.train.batch(indices, draws)[0], data.train.batch(indices)[0])
    for part in (data.validation, data.test, plain.train):
        assert torch.equal(part.batch(indices, draws)[0], part.batch(indices)[0])
    assert torch.equal(data.train.batch(indices)[0], plain.train.batch(indices)[0])


def test_a_batch_is_its_elements(tmp_path):
    write_cifar10(tmp_path)
    part = cifar10(tmp_path, validation=50).train
    indices = torch.tensor([5, 0, 149, 5])
    draws = random_numbers(0, 3, indices)
    inputs, targets = part.batch(indices, draws)
    for row, index in enumerate(indices):
        single, target = part.batch(index.view(1), draws[row : row + 1])
        assert torch.equal(single[0], inputs[row])
        assert target == targets[row]
    small = part.subset(indices)
    assert torch.equal(small.batch(torch.arange(4), draws)[0], inputs)


def test_cifar100_has_the_fine_labels(tmp_path):
    write_cifar100(tmp_path)
    data = cifar100(tmp_path, validation=100)
    assert [len(data.train), len(data.validation), len(data.test)] == [200, 100, 300]
    assert data.class_counts == (2,) * 100
    assert data.class_names[99] == "thing 99"
    assert data.train.normalisation == NORMALISATIONS["cifar100"]


@pytest.mark.parametrize(
    ("function", "write", "file", "download"),
    [
        (cifar10, write_cifar10, "cifar-10-batches-py/data_batch_3", "cifar-10-python.tar.gz"),
        (cifar100, write_cifar100, "cifar-100-python/test", "cifar-100-python.tar.gz"),
        (cifar10_c, write_cifar10_c, "CIFAR-10-C/labels.npy", "CIFAR-10-C.tar"),
    ],
)
def test_a_missing_file_is_named_with_its_archive(tmp_path, function, write, file, download):
    write(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(MissingDataError, match=f"{file} is missing: .*{download}.* unpack it in {tmp_path}$"):
        function(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"labels": [0]}, "has no array under 'data', expected uint8"),
        ({"data": np.zeros((2, 3000), np.uint8), "labels": [0, 1]}, r"has uint8 of shape \(2, 3000\)"),
        ({"data": np.zeros((2, 3072)), "labels": [0, 1]}, "has float64 of shape"),
        ({"data": rows(2, 0), "labels": [0]}, "has no 2 labels under 'labels'"),
        ({"data": rows(2, 0), "labels": [0, 10]}, "has labels from 0 to 10, expected 0 to 9"),
    ],
)
def test_malformed_files_are_refused(tmp_path, content, message):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_2").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=f"data_batch_2 {message}"):
        cifar10(tmp_path, validation=50)


def test_names_are_needed(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"batches\.meta has no list 'label_names'"):
        cifar10(tmp_path)


def test_more_validation_images_than_there_are_is_an_error(tmp_path):
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match="5000 elements from 200"):
        cifar10(tmp_path)
    with pytest.raises(ValueError, match="augmentation must be one of 'crop-flip', 'none', got 'flip'"):
        cifar10(tmp_path, validation=50, augmentation="flip")


@pytest.mark.parametrize("severity", [1, 5])
def test_corrupted_images_of_one_severity(tmp_path, severity):
    write_cifar10_c(tmp_path)
    data = cifar10_c(tmp_path, severity=severity)
    assert [len(data.train), len(data.validation), len(data.test)] == [0, 0, 20]
    assert data.test.inputs.unique().tolist() == [10 * severity]
    assert data.test.targets.tolist() == [*range(10), *range(10)]
    assert data.test.normalisation == NORMALISATIONS["cifar10"]
    assert data.class_names == CIFAR10_CLASSES
    assert data.class_counts == (0,) * 10


def test_corrupted_images_come_with_clean_training_images_where_there_are_any(tmp_path):
    write_cifar10_c(tmp_path)
    write_cifar10(tmp_path)
    data, clean = cifar10_c(tmp_path, validation=50), cifar10(tmp_path, validation=50)
    assert torch.equal(data.train.inputs, clean.train.inputs)
    assert torch.equal(data.validation.inputs, clean.validation.inputs)
    assert len(data.test) == 20
    assert data.test.normalisation == NORMALISATIONS["cifar10"]


def test_all_nineteen_corruptions_are_read(tmp_path):
    write_cifar10_c(tmp_path, size=1)
    folder = tmp_path / "CIFAR-10-C"
    corruptions = get_args(Corruption)
    assert len(set(corruptions)) == 19
    for number, corruption in enumerate(corruptions):
        np.save(folder / f"{corruption}.npy", np.full((5, 32, 32, 3), number, np.uint8))
        choice = Choice.parse(f"cifar10-c[corruption={corruption},severity=2]")
        assert load_data(choice, tmp_path).test.inputs.unique().tolist() == [number]
    with pytest.raises(RecipeError, match=r"corruption must be one of 'gaussian_noise', .*, got 'fogg'"):
        load_data(Choice("cifar10-c", {"corruption": "fogg"}), tmp_path)


def test_corrupted_images_of_a_hundred_classes(tmp_path):
    folder = tmp_path / "CIFAR-100-C"
    folder.mkdir()
    np.save(
        folder / "fog.npy", np.repeat(np.arange(5, dtype=np.uint8), 3 * 32 * 32 * 3).reshape(15, 32, 32, 3)
    )
    np.save(folder / "labels.npy", np.tile([0, 99, 50], 5))
    data = cifar100_c(tmp_path, corruption="fog", severity=4)
    assert data.test.inputs.unique().tolist() == [3]
    assert data.test.targets.tolist() == [0, 99, 50]
    assert data.test.normalisation == NORMALISATIONS["cifar100"]
    assert data.class_names[:2] == ("0", "1")
    assert len(data.train) == 0
    write_cifar100(tmp_path)
    data, clean = cifar100_c(tmp_path, corruption="fog", validation=100), cifar100(tmp_path, validation=100)
    assert torch.equal(data.train.inputs, clean.train.inputs)
    assert data.class_names == clean.class_names
    assert data.test.targets.tolist() == [0, 99, 50]
    assert data.test.normalisation == NORMALISATIONS["cifar100"]
    with pytest.raises(MissingDataError, match=r"CIFAR-100-C/snow\.npy is missing: .*3555552"):
        cifar100_c(tmp_path, corruption="snow")


def test_malformed_corrupted_images_are_refused(tmp_path):
    write_cifar10_c(tmp_path)
    with pytest.raises(ValueError, match="severity must be one of 1, 2, 3, 4, 5, got 0"):
        cifar10_c(tmp_path, severity=0)
    np.save(tmp_path / "CIFAR-10-C/fog.npy", np.zeros((7, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"fog\.npy has uint8 of shape \(7, 32, 32, 3\), expected"):
        cifar10_c(tmp_path, corruption="fog")
    (tmp_path / "CIFAR-10-C/snow.npy").write_bytes(b"snow")
    with pytest.raises(ValueError, match=r"snow\.npy cannot be read as a NumPy array"):
        cifar10_c(tmp_path, corruption="snow")
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"labels\.npy has shape \(3,\), expected \(100,\)"):
        cifar10_c(tmp_path)


def test_house_numbers(tmp_path):
    write_svhn(tmp_path, "train", "test")
    data = svhn(tmp_path, validation=10)
    assert [len(data.train), len(data.validation), len(data.test)] == [30, 10, 40]
    assert data.class_counts == (3,) * 10
    # Label 10 of the file is digit 0.
    assert data.test.targets[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    stored = scipy.io.loadmat(tmp_path / "test_32x32.mat")["X"]
    assert data.test.inputs[7, 2, 5, 6] == stored[5, 6, 2, 7]
    assert data.train.normalisation == NORMALISATIONS["svhn"]


def test_house_numbers_to_test_a_model_of_other_images(tmp_path):
    write_svhn(tmp_path, "test")
    data = svhn(tmp_path, normalisation="cifar10")
    assert [len(data.train), len(data.validation), len(data.test)] == [0, 0, 40]
    assert data.test.normalisation == NORMALISATIONS["cifar10"]
    with pytest.raises(ValueError, match="normalisation must be one of"):
        svhn(tmp_path, normalisation="mnist")


def test_house_numbers_that_are_missing_or_malformed(tmp_path):
    with pytest.raises(MissingDataError, match=r"test_32x32\.mat is missing: .*housenumbers and put it in"):
        svhn(tmp_path)
    scipy.io.savemat(tmp_path / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2]]})
    with pytest.raises(ValueError, match=r"test_32x32\.mat has float64 of shape .* expected uint8"):
        svhn(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_images_on_a_gpu_give_the_same_batches():
    images = torch.from_numpy(rows(8, 0).reshape(-1, 3, 32, 32))
    constants, labels, indices = NORMALISATIONS["cifar10"], torch.arange(8), torch.tensor([3, 1])
    here = ImageSplit(images, labels, constants, "crop-flip")
    there = ImageSplit(images.cuda(), labels.cuda(), constants, "crop-flip")
    draws = random_numbers(0, 0, indices)
    for chosen, numbers in ((indices, draws), (indices.cuda(), draws.cuda())):
        inputs, targets = there.batch(chosen, numbers)
        assert inputs.is_cuda
        torch.testing.assert_close(inputs.cpu(), here.batch(indices, draws)[0])
        assert targets.tolist() == [3, 1]
