"""Time, memory and exactness of metrics against torchmetrics and plain loops, in the same run.

    python benchmarks/metrics.py [--images 10] [--samples 10000000] [--threads 2]

Prints a table for each job: the ECE of large images, the class-wise ECE of many classes, the smooth ECE of
many samples (against relplot if it is installed), a known ECE of 0.0100 from a stream of many samples, and
`evaluate` with all figures. Times are the median of three runs, after one run to warm up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError

from calibrant import Evaluator, evaluate
from calibrant.histogram import ConfidenceHistogram
from calibrant.integrations.torchmetrics import CalibrationError, ClasswiseCalibrationError
from calibrant.layout import arrange
from calibrant.metrics import Predictions, classwise_ece, ece, smooth_ece

PIXELS, CLASSES = 1024, 19


def seconds(function: Callable[[], object], runs: int = 3) -> float:
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def state_bytes(metric: torch.nn.Module) -> int:
    """Bytes in all states of a torchmetrics metric."""
    total = 0
    for value in metric.metric_state.values():
        tensors = value if isinstance(value, list) else [value]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


def images(count: int) -> None:
    print(f"\nECE of {count} images, {CLASSES} classes, {PIXELS} x {PIXELS}")
    print(f"{'':26}{'update, ms/image':>18}{'ratio':>8}{'compute, ms':>14}{'state, KiB':>13}{'ECE':>12}")
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, CLASSES, PIXELS, PIXELS, generator=generator)
    uniform = torch.rand(logits.shape, generator=generator)
    target = (0.8 * logits - (-uniform.log()).log()).argmax(1)  # drawn from the softmax at temperature 1.25

    theirs = MulticlassCalibrationError(num_classes=CLASSES, n_bins=15, norm="l1")
    ours = CalibrationError()
    reference = None
    for name, metric in (("torchmetrics", theirs), ("calibrant, torchmetrics", ours)):
        metric.update(logits, target)
        metric.reset()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            metric.update(logits, target)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        value = float(metric.compute())
        compute = time.perf_counter() - start
        update = statistics.median(times)
        reference = reference or update
        print(
            f"{name:26}{1e3 * update:18.1f}{reference / update:7.1f}x{1e3 * compute:14.1f}"
            f"{state_bytes(metric) / 1024:13,.0f}{value:12.6f}"
        )
    evaluator = Evaluator(resamples=0)
    update = seconds(lambda: evaluator.update(logits, target))
    start = time.perf_counter()
    evaluation = evaluator.compute()
    compute = time.perf_counter() - start
    state = sum(tensor.numel() * tensor.element_size() for tensor in evaluator._sums.tensors())
    print(
        f"{'calibrant, all figures':26}{1e3 * update:18.1f}{reference / update:7.1f}x{1e3 * compute:14.1f}"
        f"{state / 1024:13,.0f}{evaluation.ece:12.6f}"
    )


def classwise_by_loops(probability: Tensor, target: Tensor, bins: int = 15) -> float:
    """Class-wise ECE by loops over classes and bins, as in research code."""
    edges = torch.linspace(0, 1, bins + 1)
    total = 0.0
    for k in range(probability.shape[1]):
        confidence, occurs = probability[:, k], target == k
        for low, high in pairwise(edges):
            inside = (confidence > low) & (confidence <= high)
            share = inside.float().mean()
            if share > 0:
                gap = confidence[inside].mean() - occurs[inside].float().mean()
                total += float(gap.abs() * share)
    return total / probability.shape[1]


def many_classes() -> None:
    print("\nClass-wise ECE, 10,000 samples, 1,000 classes")
    print(f"{'':26}{'seconds':>18}{'ratio':>8}{'':27}{'value':>12}")
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(10_000, 1_000, generator=generator)
    target = torch.randint(1_000, (10_000,), generator=generator)
    start = time.perf_counter()
    value = classwise_by_loops(logits.softmax(1), target)
    reference = time.perf_counter() - start
    print(f"{'loops':26}{reference:18.3f}{1:7.1f}x{'':27}{value:12.6f}")
    took = seconds(lambda: classwise_ece(logits, target))
    value = classwise_ece(logits, target)
    print(f"{'calibrant':26}{took:18.3f}{reference / took:7.1f}x{'':27}{value:12.6f}")
    metric = ClasswiseCalibrationError(1_000)
    took = seconds(lambda: metric.update(logits, target))
    state = state_bytes(metric) / 1024
    print(
        f"{'calibrant, torchmetrics':26}{took:18.3f}{reference / took:7.1f}x{'state, KiB':>14}{state:13,.0f}"
    )


def smooth(samples: int) -> None:
    print(f"\nSmooth ECE, {samples:,} samples")
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(samples, generator=generator)
    correct = torch.rand(samples, generator=generator) < confidence**1.5
    logits = torch.stack([confidence.clamp_max(1 - 1e-7).logit(), torch.zeros(samples)], 1)
    predictions = Predictions.of(logits, (~correct).long())
    took = seconds(lambda: smooth_ece(predictions))
    print(f"{'calibrant':26}{took:8.2f} s{smooth_ece(predictions):12.6f}")
    histogram = ConfidenceHistogram.of_outcomes(predictions.confidence, correct)
    took = seconds(lambda: smooth_ece(histogram))
    print(f"{'calibrant, from a stream':26}{took:8.4f} s{smooth_ece(histogram):12.6f}")
    try:
        import relplot
    except ImportError:
        print("relplot                   not installed: pip install relplot to compare")
        return
    numpy = predictions.confidence.double().numpy(), correct.double().numpy()
    start = time.perf_counter()
    value = relplot.smECE(f=numpy[0], y=numpy[1])
    print(f"{'relplot':26}{time.perf_counter() - start:8.2f} s{value:12.6f}")


def hundredth(samples: int) -> None:
    print(f"\nA true ECE of 0.0100, {samples:,} samples in batches of 100,000")
    levels = [(0.61, 0.60), (0.71, 0.72), (0.82, 0.81), (0.91, 0.92), (0.99, 0.98)]
    per_level = 20_000
    rows, labels = [], []
    for confidence, accuracy in levels:
        logit = torch.tensor(confidence, dtype=torch.float64).logit().float()
        rows.append(torch.stack([logit, torch.zeros(())]).expand(per_level, 2))
        labels.append((torch.arange(per_level) >= round(per_level * accuracy)).long())
    logits, target = torch.cat(rows), torch.cat(labels)
    probability = logits.softmax(1)
    theirs = MulticlassCalibrationError(num_classes=2, n_bins=15, norm="l1")
    batch = ConfidenceHistogram.of(arrange(logits, target))
    histogram = batch
    for number in range(samples // 100_000):
        theirs.update(probability, target)
        histogram = histogram + batch if number else batch
    print(f"{'torchmetrics':26}{float(theirs.compute()):.6f}")
    print(f"{'calibrant':26}{ece(histogram):.6f}")


def bootstrap() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(10_000, 100, generator=generator)
    target = torch.randint(100, (10_000,), generator=generator)
    start = time.perf_counter()
    evaluate(logits, target, resamples=0)
    middle = time.perf_counter()
    evaluate(logits, target, resamples=1000)
    end = time.perf_counter()
    print("\nevaluate(), 10,000 samples, 100 classes, every figure")
    print(f"{'without intervals':26}{middle - start:8.2f} s")
    print(f"{'1,000 resamples':26}{end - middle:8.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=10, help="of 1024 x 1024 pixels (default: 10)")
    parser.add_argument(
        "--samples", type=int, default=10_000_000, help="for the last jobs (default: 10 million)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, float32")
    images(arguments.images)
    many_classes()
    smooth(arguments.samples)
    hundredth(arguments.samples)
    bootstrap()


if __name__ == "__main__":
    main()
