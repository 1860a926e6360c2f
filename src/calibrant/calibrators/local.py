"""Temperature scaling with one temperature per image, predicted from the image's mean entropy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from calibrant.arguments import in_range
from calibrant.calibrators.base import below_maximum
from calibrant.calibrators.streaming import HeldOut, Scaling, Sums
from calibrant.calibrators.temperature import likeliest, sharpness_terms
from calibrant.layout import computing_dtype
from calibrant.statistics import sum_dtype

_AT_ONCE = 1 << 23  # numbers in the images whose entropies are computed together

_LIMIT = 10.0
"""The largest a, and the largest change of log T by the slope: without penalty, both can grow for ever."""


class LocalTemperature(Scaling):
    """Temperature scaling with one temperature per image (key ``local-temperature``): ``l / T_i``.

    ``log T_i = log T + a + b·(h_i - m) / s``. T is the temperature of all the data together, ``h_i`` the mean
    entropy of ``softmax(l/T)`` over the pixels of the image, m and s the mean and the standard deviation of
    ``h`` over the images. ``h_i`` counts ignored pixels, because at test time nobody knows which they are; it
    is clipped to the range of the fitting data. a and b minimise the mean negative log-likelihood plus
    ``strength / images · (a² + b²)``, from ``a = b = 0`` on. The likelihood of the fitting data is therefore
    never below that of temperature scaling, and few images give a result close to it. Both ``a`` and
    ``b·(h_i - m) / s`` are limited to ±10. The order of the classes is kept. Multiplying all logits by a
    constant changes nothing.

    Logits without pixels, ``(B, K)``, count as images of one pixel.

    A simpler form of Ding et al., *Local Temperature Scaling for Probability Calibration*, ICCV 2021, which
    trains a network to predict the temperature of each pixel.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)``.

    Args:
        strength: the strength of the penalty on a and b, at least 0.

    Attributes:
        temperature: ``T·exp(a)``, the temperature of an image with mean entropy m, a scalar buffer.
        reference: T, the temperature at which entropies are computed.
        slope: ``b/s``, the change of log T per unit of entropy.
        entropies: the lowest, mean and highest ``h`` of the fitting data, ``(3,)``.

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

    def _fit(self, logits: Tensor, target: Tensor, ignore_index: int) -> Self:
        return self._fit_to([(logits, target)], ignore_index, in_memory=True)

    def fit_passes(self, data: HeldOut) -> None:
        reference = likeliest(data).temperature
        entropy = torch.cat([_entropies(logits.detach(), reference).cpu() for logits, _ in data.batches])
        if not bool(entropy.isfinite().all()):
            raise ValueError(
                "logits of ignored pixels are NaN or infinite, and the entropy of an image counts all its "
                "pixels: replace them by finite numbers"
            )
        mean, spread = entropy.mean(), entropy.std(correction=0)
        # A single image, or images whose entropies differ by rounding alone, have no slope.
        spread = torch.where(spread > 1e-9 * mean, spread, torch.inf)
        offset, slope = self._line(data, reference, mean.item(), spread.item(), len(entropy))
        self.learn("temperature", reference * offset.exp())
        self.learn("reference", reference)
        self.learn("slope", slope / spread)
        self.learn("entropies", torch.stack([entropy.min(), mean, entropy.max()]))

    def _line(self, data: HeldOut, reference: float, mean: float, spread: float, images: int) -> Tensor:
        """The offset a and the slope b, ``(2,)``."""
        from scipy.optimize import minimize  # type: ignore[import-untyped]  # here: it takes half a second

        penalty = self.strength / images
        entropies = partial(_entropies, reference=reference)

        def evaluate(at: Any) -> tuple[float, list[float]]:
            """The objective and its gradient."""
            offset, slope = at.tolist()

            def terms(rows: Tensor, labels: Tensor, entropy: Tensor) -> Sums:
                place = (entropy - mean) / spread
                exponent = slope * place
                inverse = (-offset - exponent.clamp(-_LIMIT, _LIMIT)).exp() / reference
                value, first, _ = sharpness_terms(rows.double(), labels, inverse[:, None])
                place = torch.where(exponent.abs() < _LIMIT, place, 0)  # beyond it the slope has no effect
                return value, first, first * place

            sums = data.totals(terms, entropies) / data.samples
            gradient = 2 * penalty * torch.from_numpy(at) - sums[1:]  # the sums are derivatives in -log T
            return float(sums[0]) + penalty * float(at @ at), gradient.tolist()

        bounds, options = [(-_LIMIT, _LIMIT), (None, None)], {"ftol": 1e-16, "gtol": 1e-10}
        found = minimize(evaluate, [0.0, 0.0], jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return torch.from_numpy(found.x)

    def _calibrate(self, logits: Tensor) -> Tensor:
        classes = self.check(logits)
        computing = below_maximum(logits.to(computing_dtype(logits)), 1)
        pixels = computing.movedim(1, logits.ndim - 1)
        pixels = pixels.reshape(logits.shape[0], math.prod(logits.shape[2:]), classes)
        # As precise as in the fit: where entropies hardly differ, the slope is large.
        precise = pixels.to(sum_dtype(pixels.device))
        entropy = _entropy(precise / self.learned("reference", precise)).mean(1)
        lowest, mean, highest = self.learned("entropies", entropy).unbind()
        place = torch.minimum(torch.maximum(entropy, lowest), highest) - mean
        exponent = (self.learned("slope", entropy) * place).clamp(-_LIMIT, _LIMIT)
        temperatures = (exponent.exp() * self.learned("temperature", entropy)).to(computing.dtype)
        return computing / temperatures.view(-1, *(1,) * (logits.ndim - 1))

    def transform(self, rows: Tensor) -> Tensor:
        return self._calibrate(rows)  # as images of one pixel


def _entropy(scaled: Tensor) -> Tensor:
    """The entropy of the softmax over the last axis."""
    logarithm = scaled.log_softmax(-1)
    # A class that is ruled out has the logarithm -inf and the entropy 0·log 0 = 0.
    return -(logarithm.exp() * logarithm.clamp_min(-1e30)).sum(-1)


def _entropies(logits: Tensor, reference: float) -> Tensor:
    """The mean entropy of each image at a temperature, ``(B,)``, in float64."""
    at_once = max(1, _AT_ONCE // max(1, logits[:1].numel()))
    pixels, classes = math.prod(logits.shape[2:]), logits.shape[1]
    return torch.cat(
        [
            _entropy(part.movedim(1, -1).reshape(len(part), pixels, classes).double() / reference).mean(1)
            for part in torch.split(logits, at_once)
        ]
    )
