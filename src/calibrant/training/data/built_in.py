"""Data sets that need no files: handwritten digits, and a synthetic problem with a known posterior."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from calibrant.arguments import in_range, whole_number
from calibrant.extras import require
from calibrant.training.data.augmentation import Standardisation
from calibrant.training.data.raw_arrays import ArrayPreparation
from calibrant.training.data.split import DataSets, TensorSplit


def digits(
    root: Path | None = None,
    *,
    imbalance: float = 1.0,
    head: int = 80,
    validation_per_class: int = 40,
    test_per_class: int = 54,
    flat: bool = True,
    split_seed: int = 0,
) -> DataSets:
    """Handwritten digits of 8 × 8 pixels, included in scikit-learn.

    Digit k has ``head · imbalance^(−k / 9)`` training images, rounded. The rarest digit has 174 images.

    >>> digits(imbalance=80).class_counts
    (80, 49, 30, 19, 11, 7, 4, 3, 2, 1)

    Args:
        root: not used.
        imbalance: the ratio of the training images of digit 0 to those of digit 9.
        head: the number of training images of digit 0.
        validation_per_class: the number of validation images of each digit.
        test_per_class: the number of test images of each digit.
        flat: whether inputs are 64 features, or else images of shape ``(1, 8, 8)``.
        split_seed: the seed of the draw of the parts.
    """
    require("train", "sklearn", purpose="the data set digits")
    in_range("imbalance", imbalance, 1)
    whole_number("head", head)
    package = find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    # Its file, not `sklearn.datasets.load_digits`: importing scikit-learn takes longer than short runs train.
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    content = torch.from_numpy(np.loadtxt(file, delimiter=","))
    images, labels = content[:, :-1].float() / 16, content[:, -1].long()
    generator = torch.Generator().manual_seed(split_seed)
    drawn = []
    held_out = test_per_class + validation_per_class
    for digit in range(10):
        indices = (labels == digit).nonzero().flatten()
        indices = indices[torch.randperm(len(indices), generator=generator, device="cpu")]
        size = max(1, round(head * imbalance ** (-digit / 9)))
        if min(test_per_class, validation_per_class) < 0 or held_out + size > len(indices):
            raise ValueError(
                f"digit {digit} has {len(indices)} images, too few for {size} to train, "
                f"{validation_per_class} to validate and {test_per_class} to test with"
            )
        drawn.append(torch.split(indices[: held_out + size], [test_per_class, validation_per_class, size]))
    images = images if flat else images.view(-1, 1, 8, 8)
    whole = TensorSplit(images, labels)
    about = {"features": 64} if flat else {"channels": 1, "image_size": 8}
    test, validation, train = (whole.subset(torch.cat(part)) for part in zip(*drawn, strict=True))
    shape = tuple(images.shape[1:])
    # Raw digits are those of scikit-learn, from 0 to 16.
    preparation = ArrayPreparation(shape, Standardisation((0.0,) * shape[0], (16.0,) * shape[0]))
    return DataSets(train, validation, test, tuple(map(str, range(10))), about, preparation=preparation)


def synthetic(
    root: Path | None = None,
    *,
    classes: int = 10,
    features: int = 16,
    train_size: int = 2000,
    validation_size: int = 1000,
    test_size: int = 5000,
    separation: float = 3.0,
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> DataSets:
    """A mixture of Gaussians, one for each class, whose exact posterior is known.

    Class k has unit covariance, a random mean of length ``separation``, and a prior proportional to
    ``imbalance^(−k / (K − 1))``. All three parts have the same distribution. `synthetic_posterior` computes
    the posterior.

    >>> data = synthetic(classes=3, test_size=10)
    >>> len(data.test), data.num_classes, data.about
    (10, 3, {'features': 16})

    Args:
        root: not used.
        classes: K.
        features: the number of dimensions.
        train_size: the number of training elements.
        validation_size: the number of validation elements.
        test_size: the number of test elements.
        separation: the distance of the means from the origin, in standard deviations.
        imbalance: the ratio of the first class's prior to the last one's.
        split_seed: the seed of the means and of all elements.
    """
    means, log_prior = _mixture(classes, features, separation, imbalance, split_seed)
    parts = []
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    for number, (name, size) in enumerate(sizes.items(), start=1):
        # Each part has a seed of its own: the size of one part does not change the others.
        generator = torch.Generator().manual_seed(4 * split_seed + number)
        labels = torch.multinomial(log_prior.exp(), whole_number(name, size), True, generator=generator)
        noise = torch.randn(size, features, generator=generator, dtype=torch.float64, device="cpu")
        parts.append(TensorSplit((means[labels] + noise).float(), labels))
    names = tuple(f"class {label}" for label in range(classes))
    train, validation, test = parts
    preparation = ArrayPreparation((features,))
    return DataSets(train, validation, test, names, {"features": features}, preparation=preparation)


def synthetic_posterior(
    inputs: Tensor,
    *,
    classes: int = 10,
    features: int = 16,
    separation: float = 3.0,
    imbalance: float = 1.0,
    split_seed: int = 0,
) -> Tensor:
    """The exact posterior of inputs ``(N, features)`` of `synthetic`, as a perfect model would predict it.

    The options must be the same as for `synthetic`. It is returned as log-probabilities ``(N, K)``, float64.

    >>> inputs, _ = synthetic().test.batch(torch.arange(4))
    >>> torch.allclose(synthetic_posterior(inputs).exp().sum(1), torch.ones(4, dtype=torch.float64))
    True
    """
    means, log_prior = _mixture(classes, features, separation, imbalance, split_seed)
    means, log_prior = means.to(inputs.device), log_prior.to(inputs.device)
    # Terms that are equal for all classes cancel.
    joint = inputs.double() @ means.T - means.square().sum(1) / 2 + log_prior
    return joint.log_softmax(1)


def _mixture(
    classes: int, features: int, separation: float, imbalance: float, seed: int
) -> tuple[Tensor, Tensor]:
    """The means ``(K, features)`` and the log-prior ``(K,)``."""
    whole_number("classes", classes)
    whole_number("features", features)
    in_range("separation", separation)
    in_range("imbalance", imbalance, 1)
    generator = torch.Generator().manual_seed(4 * seed)
    directions = torch.randn(classes, features, generator=generator, dtype=torch.float64, device="cpu")
    position = torch.arange(classes, dtype=torch.float64, device="cpu") / max(1, classes - 1)
    weights = -position * np.log(imbalance)
    return separation * torch.nn.functional.normalize(directions), weights.log_softmax(0)
