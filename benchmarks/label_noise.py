"""Is a temperature enough where some labels are random? A random forest on scikit-learn's digits.

    python benchmarks/label_noise.py

A third of the images is for training, the rest for fitting calibrators and for the test, half each. A forest
gives many classes a probability of 0: it is measured with 0.001 in its place, and as it is.
"""

import warnings
from itertools import product

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from torch.nn import functional as F

from calibrant.calibrators import choose, create_calibrator
from calibrant.layout import as_logits
from calibrant.metrics import ece

SEEDS = range(5)
METHODS = ("none", "temperature", "ensemble-temperature", "auto")


def main() -> None:
    digits = load_digits()
    print("| random labels | least p | calibrator | NLL | ECE |\n| ---: | ---: | --- | ---: | ---: |")
    for noise, least in product((0.0, 0.2), (0.001, 0.0)):
        found: dict[str, list[list[float]]] = {name: [] for name in METHODS}
        for seed in SEEDS:
            generator = np.random.default_rng(seed)
            random = generator.integers(0, 10, len(digits.target))
            labels = np.where(generator.random(len(random)) < noise, random, digits.target)
            train, rest, train_labels, rest_labels = train_test_split(
                digits.data, labels, test_size=2 / 3, random_state=seed
            )
            forest = RandomForestClassifier(random_state=seed).fit(train, train_labels)
            logits = as_logits(torch.tensor(forest.predict_proba(rest).clip(least)))
            half, target = len(logits) // 2, torch.tensor(rest_labels)
            fitting = logits[:half], target[:half]
            for name, figures in found.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of classes that are all right
                    chosen = choose(*fitting) if name == "auto" else None
                    calibrator = chosen or create_calibrator("identity" if name == "none" else name)
                    calibrated = calibrator.fit(*fitting)(logits[half:])
                nll = F.cross_entropy(calibrated, target[half:])
                figures.append([float(nll), 100 * float(ece(calibrated, target[half:]))])
        for name, figures in found.items():
            means = np.mean(figures, 0)
            print(f"| {noise:.0%} | {least:g} | {name} | {means[0]:.3f} | {means[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
