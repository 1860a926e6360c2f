"""A temperature for each image: some images are harder than others, and their mean entropy tells which."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.calibrators.streaming import HeldOut, Scaling, totals
from calibrant.calibrators.temperature import likeliest, sharpness_terms
from calibrant.layout import arrange, blocks, computing_dtype

_AT_ONCE = 1 << 23  # numbers of whole images whose entropies are computed together


class LocalTemperature(Scaling):
    """Temperature scaling with one temperature per image (key ``local-temperature``): ``l / T_i``.

    ``log T_i = log T + a + b·(h_i - m) / s``, where T is the temperature of all the data together, ``h_i``
    the mean entropy of ``softmax(l/T)`` over all pixels of the image, ignored ones included (at test time
    nobody knows them), and m and s are mean and standard deviation of ``h`` over the images; ``h_i`` beyond
    those fitted to is taken to be at their edge. The two parameters minimise the mean negative
    log-likelihood plus ``strength / images · (a² + b²)`` by damped Newton steps from ``a = b = 0``: the
    likelihood of the fitting data never falls below temperature scaling's, and few images leave it at
    that. The order of the classes stays, and multiplying all logits by a constant changes nothing.

    Logits without pixels, ``(B, K)``, are images of one pixel.

    A small relative of Ding et al., *Local Temperature Scaling for Probability Calibration*, ICCV 2021,
    who train a network for the temperatures of pixels.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        strength: of the pull to one temperature, at least 0.

    Attributes:
        temperature: ``T·exp(a)``, of an image of mean entropy m, a scalar buffer once fitted.
        reference: T, at which entropies are taken.
        slope: ``b/s``, by which log T rises with the entropy.
        entropies: lowest, mean and highest ``h`` fitted to, ``(3,)``.

    >>> logits = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> calibrator = LocalTemperature().fit(logits, logits.argmax(1) * (logits[:, 0] < 1))
    >>> calibrator(logits).shape
    torch.Size([20, 3, 8, 8])
    """

    key: ClassVar[str] = "local-temperature"
    preserves_order = True
    temperature: Tensor
    reference: Tensor
    slope: Tensor
    entropies: Tensor

    def __init__(self, *, strength: float = 1.0) -> None:
        super().__init__()
        self.strength = in_range("strength", strength)

    def fit(self, logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Self:
        return self.fit_batches([(logits, target)], ignore_index=ignore_index)

    def fit_passes(self, data: HeldOut) -> None:
        reference = likeliest(data).temperature
        entropy = torch.cat([_entropies(logits.detach(), reference).cpu() for logits, _ in data.batches])
        if not bool(entropy.isfinite().all()):
            raise ValueError("ignored pixels hold NaN or infinite logits, which the image's entropy counts")
        mean, spread = entropy.mean(), entropy.std(correction=0)
        # A single image, or images that differ by rounding alone, have no slope.
        spread = torch.where(spread > 1e-9 * mean, spread, torch.inf)
        offset, slope = self._likeliest_line(data, reference, mean.item(), spread.item(), len(entropy))
        self.learn("temperature", torch.tensor(reference * math.exp(offset), dtype=torch.float64))
        self.learn("reference", torch.tensor(reference, dtype=torch.float64))
        self.learn("slope", slope / spread)
        self.learn("entropies", torch.stack([entropy.min(), mean, entropy.max()]))

    def _likeliest_line(
        self, data: HeldOut, reference: float, mean: float, spread: float, images: int
    ) -> tuple[float, float]:
        """The offset a and the slope b."""
        pull = self.strength / images

        def evaluate(offset: float, slope: float) -> tuple[float, Tensor, Tensor, Tensor]:
            """The objective, its gradient, its Hessian, and the part of the Hessian that is positive."""

            def terms() -> Iterator[tuple[Tensor, ...]]:
                for rows, labels, entropy in _images(data, reference):
                    place = (entropy - mean) / spread
                    inverse = (-offset - slope * place).exp() / reference
                    value, first, second = sharpness_terms(rows.double(), labels, inverse[:, None])
                    # The derivatives are those in -log T: the gradient changes sign.
                    powers = (torch.ones_like(place), place, place * place)
                    yield (
                        value,
                        -first,
                        -first * place,
                        *(second * power for power in powers),
                        *(first * power for power in powers),
                    )

            sums = torch.tensor(totals(terms()), dtype=torch.float64) / data.samples
            at = torch.tensor([offset, slope], dtype=torch.float64)
            identity = torch.eye(2, dtype=torch.float64)
            positive = sums[[3, 4, 4, 5]].view(2, 2) + 2 * pull * identity
            rest = sums[[6, 7, 7, 8]].view(2, 2)
            return (
                sums[0].item() + pull * float(at @ at),
                sums[1:3] + 2 * pull * at,
                positive + rest,
                positive,
            )

        at = torch.zeros(2, dtype=torch.float64)
        value, gradient, hessian, positive = evaluate(0.0, 0.0)
        for _ in range(50):
            convex = bool(torch.linalg.eigvalsh(hessian)[0] > 1e-3 * torch.linalg.eigvalsh(positive)[0])
            # Saturated predictions and no pull leave nothing to divide by, and nothing to gain.
            step = -torch.linalg.pinv(hessian if convex else positive, hermitian=True) @ gradient
            step = step.clamp(-2, 2)
            share = 1.0
            while share > 1e-6:
                trial = at + share * step
                result = evaluate(*trial.tolist())
                if result[0] < value:
                    break
                share /= 4
            else:
                break
            at, (value, gradient, hessian, positive) = trial, result
            if float((share * step).abs().max()) < 1e-8:
                break
        return at[0].item(), at[1].item()

    def forward(self, logits: Tensor) -> Tensor:
        classes = self.check(logits)
        computing = logits.to(computing_dtype(logits))
        pixels = computing.movedim(1, -1).reshape(logits.shape[0], math.prod(logits.shape[2:]), classes)
        entropy = _entropy(pixels / self.learned("reference", computing)).mean(1)
        temperature = self._temperatures(entropy).view(-1, *(1,) * (logits.ndim - 1))
        return computing / temperature

    def transform(self, rows: Tensor) -> Tensor:
        entropy = _entropy(rows / self.learned("reference", rows))
        return rows / self._temperatures(entropy)[:, None]

    def _temperatures(self, entropy: Tensor) -> Tensor:
        lowest, mean, highest = self.learned("entropies", entropy).unbind()
        place = torch.minimum(torch.maximum(entropy, lowest), highest) - mean
        factor = (self.learned("slope", entropy) * place).exp()
        return factor * self.learned("temperature", entropy)


def _entropy(scaled: Tensor) -> Tensor:
    """The entropy of the softmax over the last axis."""
    logarithm = scaled.log_softmax(-1)
    # Of a class that is ruled out the logarithm is -inf, and 0·log 0 counts as 0.
    return -(logarithm.exp() * logarithm.clamp_min(-1e30)).sum(-1)


def _entropies(logits: Tensor, reference: float) -> Tensor:
    """The mean entropy of each image at a temperature, ``(B,)``, in float64."""
    at_once = max(1, _AT_ONCE // max(1, logits[:1].numel()))
    parts = [
        _entropy(part.movedim(1, -1).flatten(1, -2).double() / reference).mean(1)
        if part.ndim > 2
        else _entropy(part.double() / reference)
        for part in torch.split(logits, at_once)
    ]
    return torch.cat(parts)


def _images(data: HeldOut, reference: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of logits and labels that are not ignored, and of the entropies of their images."""
    for logits, target in data.batches:
        logits = logits.detach()
        entropy = _entropies(logits, reference)
        # As a target would be: each element is given its image's.
        spread = entropy.view(-1, *(1,) * (target.ndim - 1)).expand(target.shape)
        valid = target.flatten() != data.ignore_index
        elements = arrange(logits, target, ignore_index=data.ignore_index)
        rows, labels, place = elements.rows, elements.labels, spread.flatten()[valid]
        for chunk, _ in blocks(rows.shape, rows.device):
            if len(labels[chunk]):
                yield rows[chunk], labels[chunk], place[chunk]
