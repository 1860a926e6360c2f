"""Validation data that are not like the test data: skewed class frequencies and noisy inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.training.data.augmentation import Normalising
from calibrant.training.data.sampling import long_tail, random_numbers
from calibrant.training.data.split import DataSets, Inputs, Split

_EPOCH = -1
"""The epoch in the hash of the noise. Augmentation counts from 0, so their random numbers are different."""

_AT_ONCE = 1 << 22
"""Random numbers to make at once: their hash takes many times their memory."""


def skewed(
    data: DataSets, seed: int = 0, *, validation_imbalance: float = 1.0, validation_noise: float = 0.0
) -> DataSets:
    """The data with another validation part; training and test part stay as they are.

    These options belong to every data set. They show what adaptive losses, model selection and calibrators do
    if the validation data are not like the test data.

    Args:
        data: the data.
        seed: the seed of the elements that are left out, and of the noise.
        validation_imbalance: the ratio of the first class's validation elements to the last one's. The counts
            fall exponentially from the count of the smallest class; every class keeps at least one element.
        validation_noise: the standard deviation of Gaussian noise on images and features, in units of the
            inputs' own standard deviation, which is 1 for normalised inputs. Each element has the same noise
            whenever it is used.

    >>> from calibrant.training.data.built_in import digits
    >>> data = skewed(digits(), validation_imbalance=10)
    >>> torch.bincount(data.validation.targets)
    tensor([40, 30, 23, 18, 14, 11,  8,  6,  5,  4])
    """
    in_range("validation_imbalance", validation_imbalance, 1)
    in_range("validation_noise", validation_noise)
    part = data.validation
    if validation_imbalance > 1:
        if part.targets is None or part.targets.ndim > 1:
            raise ValueError("validation_imbalance needs data with one label for each element, in memory")
        try:
            part = part.subset(long_tail(part.targets, validation_imbalance, seed, data.num_classes))
        except ValueError as error:
            raise ValueError(f"the validation part cannot be skewed: validation_{error}") from None
    if validation_noise > 0:
        part = NoisySplit(part, validation_noise * _deviation(part), seed)
    return data if part is data.validation else replace(data, validation=part)


def _deviation(part: Split) -> float:
    """The standard deviation of the inputs."""
    if len(part) == 0:
        raise ValueError("validation_noise needs validation data, got none")
    first, _ = part.batch(torch.zeros(1, dtype=torch.long, device="cpu"))
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise ValueError("validation_noise is for images and features, not for texts")
    if part.normalisation is not None:
        return 1.0
    inputs, _ = part.batch(torch.arange(len(part), device="cpu"))
    assert isinstance(inputs, Tensor)
    return float(inputs.double().std(correction=0))


class NoisySplit(Split):
    """A part with Gaussian noise on its inputs; each element has the same noise in every batch.

    ``deviation`` is the standard deviation of the noise. ``numbers`` are those of the elements in the part
    that the noise was made for; by default 0, 1, …
    """

    def __init__(self, part: Split, deviation: float, seed: int, numbers: Tensor | None = None) -> None:
        self.part, self.deviation, self.seed = part, deviation, seed
        self.numbers = torch.arange(len(part), device=part.device) if numbers is None else numbers
        self.targets, self.normalisation = part.targets, part.normalisation

    def __len__(self) -> int:
        return len(self.part)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> tuple[Inputs, Tensor]:
        inputs, targets = self.part.batch(indices, draws)
        assert isinstance(inputs, Tensor)
        if len(inputs) == 0:
            return inputs, targets
        size = inputs[0].numel()
        chunks = torch.split(self.numbers[indices], max(1, _AT_ONCE // size))
        noise = torch.cat([self._noise(chunk, size) for chunk in chunks]).view_as(inputs)
        return inputs + self.deviation * noise.to(inputs.dtype), targets

    def _noise(self, numbers: Tensor, size: int) -> Tensor:
        uniform = random_numbers(self.seed, _EPOCH, numbers, size).double()
        # They are multiples of 2^-24. Half a step more, and none is 0, where the noise would be infinite.
        noise: Tensor = torch.special.ndtri(uniform + 2**-25).float()
        return noise

    def subset(self, indices: Tensor) -> NoisySplit:
        return NoisySplit(self.part.subset(indices), self.deviation, self.seed, self.numbers[indices])

    def normalised_by(self, normalisation: Normalising) -> NoisySplit:
        return NoisySplit(self.part.normalised_by(normalisation), self.deviation, self.seed, self.numbers)

    def content(self) -> Iterable[Tensor]:
        deviation = torch.tensor(self.deviation, dtype=torch.float64, device="cpu")
        return [*self.part.content(), self.numbers, deviation, torch.tensor(self.seed, device="cpu")]

    @property
    def device(self) -> torch.device:
        return self.part.device

    @property
    def nbytes(self) -> int:
        return self.part.nbytes

    def to(self, device: torch.device) -> NoisySplit:
        part = self.part.to(device)
        return NoisySplit(part, self.deviation, self.seed, self.numbers.to(part.device))
