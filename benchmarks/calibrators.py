"""Time to fit and held-out quality of every calibrator, beside scikit-learn and netcal in the same run.

    python benchmarks/calibrators.py [--samples 50000] [--classes 10 100 1000] [--limit 60] [--threads 2]
                                     [--busy]

Prints a table for each number of classes. Every method is fitted to half of the data and evaluated on the
other half by NLL and by ECE with 15 bins; probabilities below 1e-12 count as 1e-12. The columns:

- wall, CPU: seconds for one fit, the median of three, or of one if it takes more than 2 seconds. A fit that
  exceeds the limit is stopped and marked.
- CE wall, CE CPU: these seconds divided by those of one forward and backward pass of `F.cross_entropy` over
  the same logits, measured just before. Compare these between runs and machines.
- peer: the wall seconds of another library divided by those of calibrant.

netcal is measured if it is installed; it takes probabilities. With `--busy` every table is printed twice:
alone, and beside two processes that keep two cores busy.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression
from torch import Tensor
from torch.nn import functional as F

from calibrant.calibrators import CALIBRATORS, create_calibrator
from calibrant.layout import as_logits
from calibrant.metrics import ece, nll

Predict = Callable[[Tensor], Tensor]
Fit = Callable[[Tensor, Tensor], Predict]
FLOOR = 1e-12


def data(samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Twice the samples: logits of an overconfident network with a bias for some classes, and labels."""
    generator = torch.Generator().manual_seed(0)
    shape = (2 * samples, classes)
    truth = torch.randn(shape, generator=generator)
    # One class of each sample has a higher logit, by an amount that varies.
    likely = torch.randint(classes, (len(truth), 1), generator=generator)
    height = np.log(classes) + 3 * torch.randn(len(truth), 1, generator=generator).abs()
    truth.scatter_add_(1, likely, height)
    target = torch.multinomial(truth.softmax(1), 1, generator=generator).squeeze(1)
    favour = 0.5 * torch.randn(classes, generator=generator)
    return 2 * truth + favour, target


# ------------------------------------------------------------------------------------------------ methods


def ours(key: str) -> Fit:
    def fit(logits: Tensor, target: Tensor) -> Predict:
        return create_calibrator(key).fit(logits, target)

    return fit


def sklearn_temperature(logits: Tensor, target: Tensor) -> Predict:
    try:
        from sklearn.calibration import _TemperatureScaling
    except ImportError:
        raise RuntimeError("needs scikit-learn 1.8") from None
    fitted = _TemperatureScaling().fit(logits.numpy(), target.numpy())
    return lambda logits: logits * float(fitted.beta_)


def one_by_one(make: Callable[[], Any], scores: Predict) -> Fit:
    """A map for each class against the rest, as in `CalibratedClassifierCV`."""

    def fit(logits: Tensor, target: Tensor) -> Predict:
        given, labels = scores(logits).numpy(), target.numpy()
        maps = [make().fit(given[:, k], labels == k) for k in range(given.shape[1])]

        def predict(logits: Tensor) -> Tensor:
            given = scores(logits).numpy()
            return log_probabilities(np.stack([each.predict(given[:, k]) for k, each in enumerate(maps)], 1))

        return predict

    return fit


def log_probabilities(probabilities: np.ndarray) -> Tensor:
    """Logarithms of probabilities after scaling to a sum of 1; a row of zeros becomes uniform."""
    shares = torch.from_numpy(np.asarray(probabilities, dtype=np.float64)).clamp_min(FLOOR)
    return as_logits(shares / shares.sum(1, keepdim=True))


def log_odds(logits: Tensor) -> Tensor:
    logarithm = logits.double().log_softmax(1)
    return (logarithm - torch.log1p(-logarithm.exp().clamp_max(1 - 1e-15))).float()


def netcal(kind: str, **options: Any) -> Fit:
    def fit(logits: Tensor, target: Tensor) -> Predict:
        import netcal.binning
        import netcal.scaling

        calibrator = getattr(netcal.binning, kind, None) or getattr(netcal.scaling, kind)
        calibrator = calibrator(**options)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            calibrator.fit(logits.double().softmax(1).numpy(), target.numpy())
        return lambda logits: log_probabilities(calibrator.transform(logits.double().softmax(1).numpy()))

    return fit


OTHERS: dict[str, dict[str, Fit]] = {
    "temperature": {"scikit-learn": sklearn_temperature, "netcal": netcal("TemperatureScaling")},
    "isotonic": {
        "scikit-learn": one_by_one(
            lambda: IsotonicRegression(out_of_bounds="clip"), lambda logits: logits.double().softmax(1)
        ),
        "netcal": netcal("IsotonicRegression"),
    },
    "platt": {"scikit-learn": one_by_one(_SigmoidCalibration, log_odds)},
    "beta": {"netcal": netcal("BetaCalibration")},
    "histogram-binning": {"netcal": netcal("HistogramBinning", bins=15)},
    "bayesian-binning": {"netcal": netcal("BBQ")},
}
"""Methods of other libraries by our key. netcal's BBQ bins by width; its beta calibration is a joint fit."""


# ------------------------------------------------------------------------------------------------- running


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


Seconds = tuple[float, float]
"""Wall and CPU seconds."""


def clock() -> Seconds:
    return time.perf_counter(), time.process_time()


def timed(function: Callable[[], Any], limit: int) -> tuple[Seconds, Any]:
    """The median wall and CPU seconds of a call, and what it returns."""
    times: list[Seconds] = []
    while len(times) < 3 and (not times or times[0][0] < 2):
        with limited(limit):
            start = clock()
            result = function()
            end = clock()
        times.append((end[0] - start[0], end[1] - start[1]))
    return (statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)), result


def cross_entropy(logits: Tensor, target: Tensor) -> Callable[[], None]:
    leaf = logits.clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        F.cross_entropy(leaf, target).backward()

    step()
    return step


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep cores busy with other processes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def row(
    method: str,
    library: str,
    fit: Fit,
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    limit: int,
    ours: float | None,
) -> float | None:
    """Print one row of the table and return the wall seconds, None if the fit did not end."""
    logits, target, held_out, truth = parts
    start = f"{method:24}{library:14}"
    try:
        (wall, cpu), _ = timed(cross_entropy(logits, target), limit)
        seconds, predict = timed(lambda: fit(logits, target), limit)
        with torch.no_grad(), limited(limit):
            calibrated = predict(held_out).double().log_softmax(1).clamp_min(np.log(FLOOR))
        if bool(calibrated.isnan().any()):
            raise ValueError("returns NaN")
        quality = f"{nll(calibrated, truth):10.4f}{ece(calibrated, truth):10.4f}"
    except TimeoutError:
        print(f"{start}{f'over {limit}':>10}")
        return None
    except ModuleNotFoundError as error:
        print(f"{start}{'':>10}  {error.name} is not installed")
        return None
    except Exception as error:  # a failure of another library must not end the run
        if library == "calibrant":
            raise
        print(f"{start}{'':>10}  failed: {type(error).__name__} {str(error).splitlines()[0][:60]}")
        return None
    ratio = f"{seconds[0] / ours:7.1f}x" if ours else f"{'':8}"
    relative = f"{seconds[0] / wall:9.1f}{seconds[1] / cpu:9.1f}"
    print(f"{start}{seconds[0]:10.3f}{seconds[1]:10.3f}{relative}{ratio}{quality}", flush=True)
    return seconds[0]


def table(samples: int, classes: int, methods: list[str], limit: int) -> None:
    print(f"\n{classes:,} classes, fitted to {samples:,} samples, evaluated on {samples:,} others")
    print(f"{'':38}{'wall':>10}{'CPU':>10}{'CE wall':>9}{'CE CPU':>9}{'peer':>8}{'NLL':>10}{'ECE':>10}")
    logits, target = data(samples, classes)
    parts = (logits[:samples], target[:samples], logits[samples:], target[samples:])
    warm = data(250, 5)
    for method in methods:
        ours(method)(*warm)  # imports, and what torch does at a first call
        seconds = row(method, "calibrant", ours(method), parts, limit, None)
        for library, fit in OTHERS.get(method, {}).items():
            with contextlib.suppress(Exception):
                fit(*warm)
            row(method, library, fit, parts, limit, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=50_000, help="samples to fit to (default: 50,000)")
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--methods", nargs="+", choices=list(CALIBRATORS), default=list(CALIBRATORS))
    parser.add_argument("--limit", type=int, default=60, help="seconds for one fit (default: 60)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--busy", action="store_true", help="measure again beside two busy processes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, scikit-learn {sklearn.__version__}, {arguments.threads} threads")
    for processes in (0, 2) if arguments.busy else (0,):
        with busy(processes):
            print(f"\nbeside {processes} busy processes" if processes else "\nalone")
            for classes in arguments.classes:
                table(arguments.samples, classes, arguments.methods, arguments.limit)


if __name__ == "__main__":
    main()
