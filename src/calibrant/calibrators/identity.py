"""The identity: the baseline that every calibrator must beat."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from calibrant.calibrators.base import Calibrator


class Identity(Calibrator):
    """Unchanged logits (key ``identity``), the baseline and fallback of `choose`.

    >>> import torch
    >>> logits = torch.randn(4, 3)
    >>> torch.equal(Identity().fit(logits, torch.tensor([0, 1, 2, 0]))(logits), logits)
    True
    """

    key: ClassVar[str] = "identity"
    preserves_order: ClassVar[bool] = True

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        pass

    def transform(self, rows: Tensor) -> Tensor:
        return rows.clone()
