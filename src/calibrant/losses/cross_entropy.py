"""Cross-entropy: the first term of most other losses."""

from __future__ import annotations

from calibrant.kernels import Composition, FirstTerm, LogLikelihood, Part, device_function
from calibrant.losses.base import Loss


@device_function
def _log_likelihood(element, numbers):
    return element.log_p, 1.0, 0.0


LOG_LIKELIHOOD = FirstTerm(_log_likelihood)


def cross_entropy(weight: float = 1.0) -> Part:
    """``-weight · log p`` as the first term of a loss."""
    return Part(lambda logits: LogLikelihood(), LOG_LIKELIHOOD, factor=-weight)


class CrossEntropy(Loss):
    """Cross-entropy ``-log p`` (key ``ce``), as `torch.nn.CrossEntropyLoss` without label smoothing.

    Shape: logits ``(B, K, *S)``; labels ``(B, *S)`` or probabilities ``(B, K, *S)``.

    >>> import torch
    >>> round(CrossEntropy(4)(torch.zeros(1, 4), torch.tensor([2])).item(), 4)  # log 4
    1.3863
    """

    accepts_probabilities = True

    def composition(self) -> Composition:
        return Composition(cross_entropy())
