"""Augmentation is a pure function of images and numbers, the same one by one as in batches."""

import numpy as np
import pytest
import torch
from PIL import Image

from calibrant.training.data.augmentation import (
    NORMALISATIONS,
    Normalisation,
    _rectangle,
    centre_crop,
    colour_jitter,
    crop_flip,
    pixels,
    random_erasing,
    random_resized_crop,
)
from calibrant.training.data.on_disk import ResizedCrop, shifted_and_mirrored
from calibrant.training.data.raw_images import CentreCropPreparation, ImagePreparation
from calibrant.training.data.sampling import random_numbers


def images(count=8, channels=3, height=12, width=10):
    generator = torch.Generator().manual_seed(0)
    shape = (count, channels, height, width)
    return torch.randint(1, 256, shape, generator=generator, dtype=torch.uint8)


def picture(width=60, height=40):
    pixel = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixel)


def test_crop_flip_is_what_cutting_a_padded_image_gives():
    batch, draws = images(), random_numbers(0, 1, torch.arange(8))
    found = crop_flip(batch, draws)
    assert found.dtype == torch.uint8
    for image, numbers, result in zip(batch, draws, found, strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)))
        row, column = int(numbers[0] * 9), int(numbers[1] * 9)
        expected = padded[:, row : row + 12, column : column + 10]
        if numbers[2] < 0.5:
            expected = expected[:, :, ::-1]
        assert (result.numpy() == expected).all()


def test_one_by_one_equals_the_batch():
    batch, draws = images(), random_numbers(3, 2, torch.arange(8))
    single = torch.cat([crop_flip(batch[i : i + 1], draws[i : i + 1]) for i in range(8)])
    assert torch.equal(crop_flip(batch, draws), single)


def test_every_shift_and_both_sides_occur():
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 4] = 1
    found = crop_flip(image.expand(3000, -1, -1, -1), random_numbers(0, 0, torch.arange(3000)))
    places = torch.bincount(found.flatten(1).long().argmax(1), minlength=81)
    assert len(places) == 81
    assert places.min() > 0
    largest = torch.tensor([[1 - 2**-24] * 3])
    assert crop_flip(image, largest)[0, 0, 0, 0] == 1


def test_no_padding_only_mirrors():
    batch = images(2)
    draws = torch.tensor([[0.9, 0.9, 0.1], [0.9, 0.9, 0.6]])
    assert torch.equal(crop_flip(batch, draws, padding=0), torch.stack([batch[0].flip(2), batch[1]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same():
    batch, draws = images(), random_numbers(0, 1, torch.arange(8))
    assert torch.equal(crop_flip(batch.cuda(), draws).cpu(), crop_flip(batch, draws))
    constants = NORMALISATIONS["cifar10"]
    torch.testing.assert_close(constants(batch.cuda()).cpu(), constants(batch))


def test_own_normalisation_gives_zero_mean_and_unit_deviation():
    batch = images(50)
    normal = Normalisation.of(batch)(batch).double()
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
    deviation = normal.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviation, torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_constant_channel_keeps_its_scale():
    assert Normalisation.of(torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)) == Normalisation((1.0,), (1.0,))


def test_normalisation_refuses_another_number_of_channels():
    with pytest.raises(ValueError, match="images have 1 channels, expected 3"):
        NORMALISATIONS["cifar10"](images(channels=1))


def test_nothing_stays_nothing():
    assert crop_flip(images(0), torch.empty(0, 16)).shape == (0, 3, 12, 10)
    assert NORMALISATIONS["cifar10"](images(0)).shape == (0, 3, 12, 10)


def test_grey_pixels_have_one_channel():
    assert pixels(Image.new("L", (4, 3))).shape == (1, 3, 4)


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (5, 300), (28, 28)])
def test_the_centre_is_a_square_of_the_size_asked_for(size):
    assert centre_crop(picture(*size), 28).size == (28, 28)


def test_the_centre_is_in_the_middle():
    image = Image.new("L", (64, 32))
    image.paste(255, (24, 8, 40, 24))
    middle = np.array(centre_crop(image, 28))
    assert (middle == middle[:, ::-1]).all()
    assert (middle == middle[::-1]).all()


@pytest.mark.parametrize("size", [(60, 40), (10, 400), (400, 10), (1, 1)])
def test_resized_crops_stay_inside_and_have_the_size(size):
    # Black moving in from outside would show in a white image.
    image = Image.new("RGB", size, "white")
    for draws in [*random_numbers(0, 0, torch.arange(50), 4).tolist(), [0.0] * 4, [1 - 2**-24] * 4]:
        crop = random_resized_crop(image, draws, 16)
        assert crop.size == (16, 16)
        assert crop.getextrema() == ((255, 255),) * 3


def test_areas_of_crops_are_uniform():
    areas = []
    for first, second in random_numbers(0, 0, torch.arange(2000), 2).tolist():
        draws = (first, second, 0.5, 0.5)
        left, top, right, bottom = _rectangle(500, 375, draws, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
        across, down = right - left, bottom - top
        assert across <= 500
        assert down <= 375
        areas.append(across * down / (500 * 375))
    assert np.mean(areas) == pytest.approx(0.54, abs=0.02)
    assert min(areas) == pytest.approx(0.08, abs=0.01)


def test_jitter_of_strength_zero_changes_nothing():
    image = picture()
    assert colour_jitter(image, [0.1, 0.9, 0.9, 0.9], 0) is image


def test_jitter_in_the_middle_of_its_range_changes_nothing():
    image = picture()
    for order in range(6):
        assert colour_jitter(image, [0.5, 0.5, 0.5, order / 6], 0.4) == image


def test_jitter_depends_on_each_number():
    image = picture()
    middle = [0.5, 0.5, 0.5, 0.0]
    for index in range(3):
        draws = [*middle]
        draws[index] = 0.9
        assert colour_jitter(image, draws, 0.4) != image


def test_erasing_happens_with_its_probability_within_its_areas():
    image = torch.full((3, 32, 32), 7.0)
    shares, noise = [], []
    for draws in random_numbers(0, 0, torch.arange(1000), 7).tolist():
        erased = random_erasing(image, draws, 0.25)
        changed = erased != 7
        assert (changed == changed[0]).all()  # the same rectangle in all channels
        shares.append(float(changed.float().mean()))
        noise.append(erased[changed])
    assert np.mean(np.array(shares) > 0) == pytest.approx(0.25, abs=0.05)
    assert max(shares) < 0.37
    assert image.min() == 7
    numbers = torch.cat(noise)
    assert abs(numbers.mean()) < 0.01
    assert numbers.std() == pytest.approx(1, abs=0.01)


def test_erasing_fills_every_pixel_with_noise_of_its_own():
    image = torch.full((3, 32, 32), 7.0)
    first, again, *others = (
        random_erasing(image, [0.0, 0.5, 0.5, 0.5, 0.5, *pair], 0.25)
        for pair in ([0.5, 0.5], [0.5, 0.5], [0.25, 0.5], [0.5, 0.5 + 2**-16])
    )
    noise = first[first != 7]
    assert len(noise.unique()) == len(noise) > 100
    assert torch.equal(first, again)
    assert all(not torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("augmentation", "kind"),
    [
        (shifted_and_mirrored, ImagePreparation),
        (ResizedCrop(jitter=0.4, erasing=0.25), CentreCropPreparation),
    ],
)
def test_augmentations_are_functions_of_the_image_and_the_numbers(augmentation, kind):
    preparation = kind(NORMALISATIONS["imagenet"], 24, 24)
    draws = random_numbers(0, 0, torch.arange(6))
    found, again = ([augmentation(picture(), row, preparation) for row in draws] for _ in range(2))
    assert all(image.shape == (3, 24, 24) and image.dtype == torch.float32 for image in found)
    assert all(map(torch.equal, found, again))
    assert not torch.equal(found[0], found[1])
    (plain,) = preparation([picture()])
    assert all(not torch.equal(plain, image) for image in found)
