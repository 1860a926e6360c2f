"""Print binary metrics of calibrant, torchmetrics, netcal and scikit-learn on the same decisions.

Run: ``python benchmarks/binary.py`` (needs torchmetrics, netcal and scikit-learn).
"""

from __future__ import annotations

import torch
from netcal.metrics import ECE, MCE
from sklearn.metrics import brier_score_loss, log_loss
from torchmetrics.functional.classification import binary_calibration_error

from calibrant import evaluate
from calibrant.printable import text_table


def main() -> None:
    """Print a row for each metric and each source, and a last line with the largest difference."""
    rows, largest = [], 0.0
    for seed, size, shift in ((0, 1_000, 0.0), (1, 20_000, -3.0)):
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(size, generator=generator, dtype=torch.float64) + shift
        target = (torch.rand(size, generator=generator, dtype=torch.float64) < (logits / 2).sigmoid()).long()
        probability = logits.sigmoid()
        given, labels = probability.numpy(), target.numpy()
        for bins in (10, 15):
            ours = evaluate(logits, target, binary=True, bins=bins, resamples=0)

            def torchmetrics(norm: str) -> float:
                return float(binary_calibration_error(probability, target, n_bins=bins, norm=norm))  # noqa: B023

            others = [
                ("ece", "torchmetrics", torchmetrics("l1")),
                ("ece", "netcal", ECE(bins).measure(given, labels)),
                ("mce", "torchmetrics", torchmetrics("max")),
                ("mce", "netcal", MCE(bins).measure(given, labels)),
                ("ece_l2", "torchmetrics", torchmetrics("l2")),
                ("brier", "scikit-learn", brier_score_loss(labels, given)),
                ("nll", "scikit-learn", log_loss(labels, given)),
            ]
            for metric, source, value in others:
                found = ours.metrics[metric]
                assert found is not None
                difference = abs(found - float(value))
                largest = max(largest, difference)
                numbers = (f"{found:.12f}", f"{float(value):.12f}", f"{difference:.1e}")
                rows.append((metric, source, f"{size:,}", str(bins), *numbers))
    headings = ("metric", "source", "decisions", "bins", "calibrant", "source's value", "difference")
    print(text_table("Single logits: calibration of the probability of yes", headings, rows))
    print(f"largest difference: {largest:.1e}")


if __name__ == "__main__":
    main()
