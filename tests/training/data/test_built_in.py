"""Digits, and the synthetic problem with a known posterior."""

import pytest
import torch
from sklearn.datasets import load_digits

from calibrant.metrics import Predictions, accuracy, ece
from calibrant.training.data.built_in import digits, synthetic, synthetic_posterior


def sizes(data):
    return [len(data.train), len(data.validation), len(data.test)]


def everything(part):
    return part.batch(torch.arange(len(part)))


def test_digits_are_balanced_unless_asked_otherwise(tmp_path):
    data = digits(tmp_path)
    assert sizes(data) == [800, 400, 540]
    assert data.class_counts == (80,) * 10
    assert data.about == {"features": 64}
    inputs, _ = everything(data.train)
    assert inputs.shape == (800, 64)
    assert [inputs.min(), inputs.max()] == [0, 1]


def test_digits_are_those_of_scikit_learn():
    content = load_digits()
    data = digits(head=1, validation_per_class=0, test_per_class=173)
    images = {tuple(image): label for image, label in zip(content.data, content.target, strict=True)}
    inputs, labels = data.test.batch(torch.arange(len(data.test)))
    assert [images[tuple(image)] for image in (16 * inputs).double().numpy()] == labels.tolist()


def test_long_tailed_digits():
    data = digits(imbalance=80)
    assert data.class_counts == tuple(round(80 * 80 ** (-digit / 9)) for digit in range(10))
    assert torch.bincount(data.validation.targets).tolist() == [40] * 10
    assert torch.bincount(data.test.targets).tolist() == [54] * 10
    images = torch.cat([everything(part)[0] for part in (data.train, data.validation, data.test)])
    # Some digits of the data set are the same image; no image of it is drawn twice.
    assert len(images.unique(dim=0)) == len(images)


def test_digits_as_images():
    data = digits(flat=False)
    inputs, targets = data.test.batch(torch.tensor([4, 5]))
    assert inputs.shape == (2, 1, 8, 8)
    assert data.about == {"channels": 1, "image_size": 8}
    flat, same = digits().test.batch(torch.tensor([4, 5]))
    assert torch.equal(inputs.flatten(1), flat)
    assert torch.equal(targets, same)


def test_digits_depend_on_the_seed_alone():
    first, again, other = digits(), digits(), digits(split_seed=1)
    assert torch.equal(everything(first.test)[0], everything(again.test)[0])
    assert not torch.equal(everything(first.test)[0], everything(other.test)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 81}, "digit 8 has 174 images, too few for 81 to train, 40 to validate and 54 to test with"),
        ({"test_per_class": -1}, "too few"),
        ({"head": 0}, "head must be"),
        ({"imbalance": 0.5}, "imbalance must lie in"),
    ],
)
def test_digits_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        digits(**options)


def test_the_known_posterior_is_calibrated():
    options = {"classes": 5, "features": 4, "separation": 1.5, "imbalance": 10.0, "split_seed": 3}
    data = synthetic(test_size=40_000, **options)
    inputs, targets = everything(data.test)
    posterior = synthetic_posterior(inputs, **options)
    torch.testing.assert_close(posterior.exp().sum(1), torch.ones(40_000, dtype=torch.float64))
    predictions = Predictions.of(posterior, targets)
    assert ece(predictions) < 0.01
    assert 0.3 < accuracy(predictions) < 0.95
    # No temperature makes the best model better.
    nll = torch.nn.functional.nll_loss(posterior, targets)
    for temperature in (0.8, 1.25):
        assert nll < torch.nn.functional.cross_entropy(posterior / temperature, targets)


def test_the_posterior_is_that_of_bayes_rule():
    inputs, _ = everything(synthetic(classes=3, features=2, imbalance=4, test_size=6).test)
    posterior = synthetic_posterior(inputs, classes=3, features=2, imbalance=4).exp()
    means = torch.stack([everything_of_class(label) for label in range(3)])
    density = torch.exp(-(inputs.double()[:, None] - means).square().sum(2) / 2)
    joint = density * torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(posterior, joint / joint.sum(1, keepdim=True), atol=0.03, rtol=0)


def everything_of_class(label):
    """The mean of a class, from so many elements that it is nearly exact."""
    inputs, targets = everything(synthetic(classes=3, features=2, imbalance=4, train_size=300_000).train)
    return inputs[targets == label].double().mean(0)


def test_the_synthetic_problem_has_the_sizes_and_the_prior_asked_for():
    data = synthetic(classes=4, features=7, train_size=8000, validation_size=20, test_size=30, imbalance=8)
    assert sizes(data) == [8000, 20, 30]
    assert data.class_names == ("class 0", "class 1", "class 2", "class 3")
    assert data.about == {"features": 7}
    shares = torch.tensor(data.class_counts) / 8000
    expected = torch.tensor([8.0, 4.0, 2.0, 1.0]) / 15
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)


def test_a_larger_training_part_leaves_the_test_part_as_it_was():
    small, large = synthetic(train_size=10), synthetic(train_size=20)
    assert torch.equal(everything(small.test)[0], everything(large.test)[0])
    assert not torch.equal(everything(small.test)[0], everything(synthetic(split_seed=1).test)[0])


@pytest.mark.parametrize("option", ["classes", "features", "train_size", "separation", "imbalance"])
def test_a_synthetic_problem_that_cannot_be_is_refused(option):
    with pytest.raises(ValueError, match=f"{option} must"):
        synthetic(**{option: -1})
