"""What each figure is called, means, and wants to be: for tables, reports and command lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """A figure in words.

    Attributes:
        label: a heading.
        sentence: what it says about a model, in one sentence.
        higher_is_better: which way is good.
        percent: whether it is a fraction, best read in percent.
    """

    label: str
    sentence: str
    higher_is_better: bool = False
    percent: bool = True

    def text(self, value: float) -> str:
        """The figure in print.

        >>> METRICS["ece"].text(0.0412), METRICS["nll"].text(1.25)
        ('4.12 %', '1.2500')
        """
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4f}"


METRICS: dict[str, Description] = {
    "accuracy": Description(
        "Accuracy", "The fraction of elements whose most probable class is the true one.", True
    ),
    "balanced_accuracy": Description(
        "Balanced accuracy", "The accuracy of each class, averaged over the classes that occur.", True
    ),
    "mean_iou": Description(
        "Mean IoU", "The overlap of predicted and true elements of a class over their union, averaged.", True
    ),
    "mean_iou_foreground": Description(
        "Mean IoU, foreground", "Mean IoU without the background class.", True
    ),
    "nll": Description(
        "NLL", "The mean negative logarithm of the probability given to the true class.", percent=False
    ),
    "nll_calibration": Description(
        "NLL, calibration part", "How much NLL one temperature for all logits would save.", percent=False
    ),
    "nll_refinement": Description(
        "NLL, refinement part", "The NLL that is left with the best temperature.", percent=False
    ),
    "brier": Description(
        "Brier",
        "The mean squared distance between probabilities and truth, summed over classes.",
        percent=False,
    ),
    "root_brier": Description(
        "Root Brier",
        "The square root of the Brier score, an upper bound of calibration errors.",
        percent=False,
    ),
    "brier_calibration": Description(
        "Brier, calibration part",
        "How much Brier score one temperature for all logits would save.",
        percent=False,
    ),
    "brier_refinement": Description(
        "Brier, refinement part", "The Brier score that is left with the best temperature.", percent=False
    ),
    "ece": Description(
        "ECE", "The mean gap between confidence and accuracy over equally wide bins of confidence."
    ),
    "mce": Description("MCE", "The largest gap between confidence and accuracy in any bin."),
    "ece_l2": Description(
        "ECE, L2", "The root mean square gap over equally wide bins: large gaps weigh more."
    ),
    "adaptive_ece": Description("Adaptive ECE", "ECE over bins that hold equally many elements."),
    "classwise_ece": Description(
        "Class-wise ECE", "ECE of each class's probability against its frequency, averaged over classes."
    ),
    "debiased_ece": Description(
        "Debiased ECE", "ECE with squared gaps, less what chance alone would contribute."
    ),
    "sweep_ece": Description(
        "Sweep ECE", "ECE over as many equally full bins as keep the accuracy rising with confidence."
    ),
    "smooth_ece": Description(
        "Smooth ECE", "The gap smoothed by a kernel instead of bins, whose width the data choose."
    ),
    "kde_ece": Description(
        "KDE-ECE",
        "The distance between all class probabilities and the frequencies seen at similar predictions.",
        percent=False,
    ),
}
"""Every figure of an `Evaluation`, in the order of its table."""
