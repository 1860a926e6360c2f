"""Validation data with skewed classes or noisy inputs."""

import numpy as np
import pytest
import torch
from PIL import Image

from calibrant.options import Choice, RecipeError
from calibrant.training.data import load_data
from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.in_memory import ImageSplit
from calibrant.training.data.skew import NoisySplit, skewed
from calibrant.training.data.split import DataSets, TensorSplit
from calibrant.training.recipe import Recipe


def load(name="digits", root=None, **options):
    return load_data(Choice(name, options), root)


def everything(part):
    return part.batch(torch.arange(len(part)))


def counts(part):
    return torch.bincount(part.targets).tolist()


def images(count=30, size=16):
    """Grey pictures of three classes, normalised by the constants of CIFAR-10."""
    pixels = torch.full((count, 3, size, size), 125, dtype=torch.uint8)
    part = ImageSplit(pixels, torch.arange(count) % 3, NORMALISATIONS["cifar10"])
    return DataSets(part, part, part, ("a", "b", "c"))


class TestImbalance:
    def test_counts_fall_exponentially(self):
        plain, data = load(), load(validation_imbalance=10)
        assert counts(plain.validation) == [40] * 10
        assert counts(data.validation) == [int(40 * 10 ** (-k / 9) + 1e-9) for k in range(10)]
        assert counts(data.train) == counts(plain.train)
        assert counts(data.test) == counts(plain.test)
        assert data.class_counts == plain.class_counts

    def test_the_elements_that_are_left_are_those_of_the_plain_part(self):
        plain, _ = everything(load().validation)
        found, _ = everything(load(validation_imbalance=4).validation)
        rows = {tuple(row) for row in plain.tolist()}
        assert {tuple(row) for row in found.tolist()} <= rows

    def test_every_class_keeps_an_element(self):
        assert counts(load(validation_imbalance=1e6).validation)[-1] == 1

    def test_the_seed_is_that_of_the_split(self):
        first, again, other = (
            load("synthetic", validation_imbalance=5, split_seed=seed, train_size=50) for seed in (0, 0, 1)
        )
        assert first.fingerprint == again.fingerprint != other.fingerprint
        assert first.fingerprint != load("synthetic", train_size=50).fingerprint

    def test_a_class_without_elements_is_refused(self):
        part = TensorSplit(torch.zeros(4, 2), torch.tensor([0, 0, 2, 2]))
        data = DataSets(part, part, part, ("a", "b", "c"))
        message = r"the validation part cannot be skewed: validation_imbalance needs .* counts \[2, 0, 2\]"
        with pytest.raises(ValueError, match=message):
            skewed(data, validation_imbalance=2)

    def test_labels_of_pixels_are_refused(self):
        part = TensorSplit(torch.zeros(4, 1, 2, 2), torch.zeros(4, 2, 2))
        with pytest.raises(ValueError, match="one label for each element, in memory"):
            skewed(DataSets(part, part, part, ("a", "b")), validation_imbalance=2)

    def test_files_on_disk(self, tmp_path):
        for name, number in ((name, number) for name in "ab" for number in range(20)):
            path = tmp_path / "train" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4, 3), number, dtype=np.uint8)).save(path)
        data = load("image-folder", tmp_path, image_size=4, validation=0.5, validation_imbalance=5)
        assert counts(data.validation) == [10, 2]
        noisy = load("image-folder", tmp_path, image_size=4, validation=0.5, validation_noise=1.0)
        plain = load("image-folder", tmp_path, image_size=4, validation=0.5)
        assert not torch.equal(everything(noisy.validation)[0], everything(plain.validation)[0])


class TestNoise:
    def test_normalised_inputs_get_noise_of_that_size(self):
        data = images()
        found, targets = everything(skewed(data, validation_noise=0.5).validation)
        plain, expected = everything(data.validation)
        noise = (found - plain) / 0.5
        assert torch.equal(targets, expected)
        assert found.dtype == torch.float32
        assert abs(noise.mean()) < 0.02
        assert noise.std() == pytest.approx(1, abs=0.02)
        assert (noise.abs() > 1.96).float().mean() == pytest.approx(0.05, abs=0.005)
        assert len(noise.unique()) > 0.98 * noise.numel()

    def test_other_inputs_get_noise_in_units_of_their_deviation(self):
        plain, noisy = load(), load(validation_noise=2.0)
        inputs, _ = everything(plain.validation)
        noise = everything(noisy.validation)[0] - inputs
        assert noise.std() == pytest.approx(2 * float(inputs.std()), rel=0.02)

    def test_an_element_has_the_same_noise_in_every_batch(self):
        part = skewed(images(), validation_noise=1.0).validation
        whole, _ = everything(part)
        assert torch.equal(part.batch(torch.tensor([7, 3]))[0], whole[[7, 3]])
        assert torch.equal(everything(part.subset(torch.tensor([5, 7])))[0], whole[[5, 7]])
        assert torch.equal(everything(part.to(torch.device("cpu")))[0], whole)
        assert part.batch(torch.tensor([], dtype=torch.long))[0].shape == (0, 3, 16, 16)

    def test_many_numbers_are_made_in_parts(self, monkeypatch):
        part = skewed(images(), validation_noise=1.0).validation
        whole, _ = everything(part)
        monkeypatch.setattr("calibrant.training.data.skew._AT_ONCE", 1000)
        assert torch.equal(everything(part)[0], whole)

    def test_the_smallest_and_the_largest_number_give_finite_noise(self, monkeypatch):
        ends = torch.tensor([0.0, 1 - 2**-24])
        monkeypatch.setattr("calibrant.training.data.skew.random_numbers", lambda *_: ends)
        noise = NoisySplit(images().validation, 1.0, 0)._noise(torch.arange(2), 1)
        assert noise.isfinite().all()
        assert noise[0] == pytest.approx(-float(noise[1]))

    def test_another_normalisation(self):
        noisy = skewed(images(), validation_noise=1.0).validation
        other = noisy.normalised_by(NORMALISATIONS["svhn"])
        noise = everything(noisy)[0] - everything(images().validation)[0]
        expected = everything(images().validation.normalised_by(NORMALISATIONS["svhn"]))[0] + noise
        torch.testing.assert_close(everything(other)[0], expected)

    def test_fingerprints(self):
        options = ({}, {"validation_noise": 0.5}, {"validation_noise": 0.6}, {"validation_noise": 0.0})
        plain, *noisy, none = (load(**each).fingerprint for each in options)
        assert len({plain, *noisy}) == 3
        assert none == plain
        assert load(validation_noise=0.5).fingerprint == noisy[0]

    def test_texts_are_refused(self):
        words = TensorSplit(torch.zeros(4, 5, dtype=torch.long), torch.arange(4) % 2)
        tokens = TensorSplit({"input_ids": torch.zeros(4, 5)}, torch.arange(4) % 2)
        for part in (words, tokens):
            with pytest.raises(ValueError, match="for images and features, not for texts"):
                skewed(DataSets(part, part, part, ("a", "b")), validation_noise=1.0)

    def test_no_validation_data_are_refused(self):
        part, empty = images().train, images().train.subset(torch.tensor([], dtype=torch.long))
        with pytest.raises(ValueError, match="validation_noise needs validation data, got none"):
            skewed(DataSets(part, empty, part, ("a", "b", "c")), validation_noise=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_imbalance": 0.5}, r"validation_imbalance must lie in \[1, inf\), got 0.5"),
        ({"validation_noise": -1.0}, r"validation_noise must lie in \[0, inf\), got -1.0"),
    ],
)
def test_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_recipes_take_the_options_for_all_data():
    recipe = Recipe.load("digits").override(["data.validation_imbalance=10", "data.validation_noise=1"])
    assert recipe.data.options["validation_noise"] == 1.0
    assert Recipe.from_toml(recipe.to_toml()).data == recipe.data
    with pytest.raises(
        RecipeError, match=r"no option 'validation_noises' [(]did you mean 'validation_noise'"
    ):
        recipe.override(["data.validation_noises=1"])
    with pytest.raises(RecipeError, match="validation_imbalance must be a number, got 'much'"):
        Recipe.load("cifar10-lt").override(["data.validation_imbalance=much"])


def test_plain_data_are_not_touched():
    data = images()
    assert skewed(data) is data
