"""A callback for Hugging Face's Trainer: a calibrant loss, its adaptation, and calibration metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from calibrant.extras import require

require("transformers", "transformers", "accelerate", purpose=__name__)

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from calibrant.arguments import one_of
from calibrant.evaluation import Evaluator
from calibrant.integrations.accelerate import own_rows
from calibrant.integrations.adaptive import MOVES, Watch, calibrant_loss, learned_figures, warn
from calibrant.losses import AdaptiveLoss, Loss
from calibrant.metrics import METRICS

__all__ = ["Calibration"]

IGNORED = -100
"""The label that Trainer pads with and ignores, in addition to the ``ignore_index`` of the loss."""

_KEY = "calibrant_loss"

_STREAMED = [name for name, metric in METRICS.items() if metric.streamed and metric.requires is None]

# Logits of pixels are enlarged in blocks of this many numbers, 64 MiB, to compute the metrics.
_BLOCK = 1 << 24

_SHAPES = (
    "(B, K) and labels (B,) or probabilities (B, K); for tokens (B, T, K) and labels (B, T); for pixels "
    "(B, K, h, w) and labels (B, H, W)"
)
_BINARY_SHAPES = (
    "for a loss with binary=True logits and labels (B,) or (B, L); for tokens (B, T, L); for pixels logits "
    "(B, L, h, w) and labels (B, L, H, W); the axis of the labels may be missing if L is 1"
)

_DEFAULT_METRICS = ("accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "mce")


class Calibration(TrainerCallback):
    """A calibrant loss for `transformers.Trainer`: the loss, its adaptation and calibration metrics.

    Pass it to the trainer in three places; the metrics are optional::

        calibration = Calibration(create_loss("cals-alm", num_classes))
        trainer = Trainer(
            ...,
            compute_loss_func=calibration.compute_loss,
            compute_metrics=calibration.compute_metrics,
            callbacks=[calibration],
        )

    The loss adapts at the end of every evaluation that training itself runs (``eval_strategy``). It learns
    from nothing else: not from ``eval_on_start``, and not from ``trainer.evaluate`` or ``trainer.predict``,
    whether before or after training, after an interruption, or in another callback. The checkpoints contain
    the learned state, in ``trainer_state.json``; ``trainer.train(resume_from_checkpoint=...)`` restores it.

    ======== ================== =========================================================
    task     logits             labels
    ======== ================== =========================================================
    inputs   ``(B, K)``         ``(B,)``, or probabilities ``(B, K)`` if the loss takes them
    tokens   ``(B, T, K)``      ``(B, T)``
    pixels   ``(B, K, h, w)``   ``(B, H, W)``; the logits are enlarged to this size
    ======== ================== =========================================================

    For a loss with ``binary=True`` each logit is a decision of its own. K is then the number of labels, and
    the labels are 0 and 1 in the shape of the logits; the axis K may be missing if K is 1. They may be
    floats, as transformers expects them for ``problem_type="multi_label_classification"``.

    The label -100 is always ignored, in addition to the ``ignore_index`` of the loss.

    Args:
        loss: any calibrant loss with ``reduction="mean"``, compiled or not. It is moved to the device of the
            logits.
        learn_from: the name of the evaluation set to learn from, if ``eval_dataset`` is a dictionary.
        timeout: seconds to wait for the other processes when the loss adapts; by default the process group's
            own time-out.
        metrics: the names of the figures to report: those that a `calibrant.evaluation.Evaluator` computes.

    >>> from calibrant import create_loss
    >>> calibration = Calibration(create_loss("ce", 3))
    >>> tokens, labels = torch.zeros(2, 4, 3), torch.tensor([[0, 1, 2, -100], [0, -100, -100, -100]])
    >>> round(calibration.compute_loss({"logits": tokens}, labels).item(), 4)
    1.0986
    """

    def __init__(
        self,
        loss: nn.Module,
        *,
        learn_from: str | None = None,
        timeout: float | None = None,
        metrics: Sequence[str] = _DEFAULT_METRICS,
    ) -> None:
        self.loss = calibrant_loss(loss, "Calibration(loss)")
        if self.loss.reduction != "mean":
            raise ValueError(
                f"the loss must have reduction='mean', got {self.loss.reduction!r}: accumulating "
                "gradients takes weighted means of batches"
            )
        self._forward = loss
        self.learn_from = learn_from
        self.timeout = timeout
        self.metrics = tuple(one_of("metrics", name, _STREAMED) for name in metrics)
        self._initial = _plain(self.loss)
        binary = self.loss.binary  # the first batch then tells how many labels there are
        self._evaluator = Evaluator(
            None if binary else self.loss.num_classes,
            binary=binary,
            ignore_index=self.loss.ignore_index,
            resamples=0,
        )
        self._loader: object = None
        self._loop: FrameType | None = None
        self._loss_used = False
        self._left_out: set[str] = set()
        self._began = False
        self._watch = Watch()

    def compute_loss(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The loss of a batch, for ``Trainer(compute_loss_func=...)``.

        Args:
            outputs: the model's outputs: a mapping with ``logits``, or a tuple that begins with them.
            labels: the labels; see the class for shapes.
            num_items_in_batch: the number of labels other than -100 in all batches of an optimizer step, on
                all processes. The loss of this batch is then weighted by its fraction of them, so that the
                accumulated gradient is that of one large batch. (With class weights, or if ``ignore_index``
                is not -100, it is the mean of the batches' losses with these weights.)

        Raises:
            ValueError: labels or logits are missing, or their shapes do not fit.
        """
        logits = _logits(outputs)
        if labels is None:
            raise ValueError("the batch has no labels: its dictionary needs the key 'labels'")
        labels = labels.to(logits.device)
        state = next(self.loss.buffers(), None)
        if state is not None and state.device != logits.device:
            self.loss.to(logits.device)
        if logits.requires_grad and not self._began and isinstance(self.loss, AdaptiveLoss):
            self._began = True  # warn only once
            warn(
                "the loss will never adapt, because Calibration is not among the Trainer's callbacks: pass "
                "callbacks=[calibration]"
            )
        self._loss_used = True
        arranged = self._arranged(logits, labels)
        value: Tensor = self._forward(*arranged)
        evaluating = isinstance(self.loss, AdaptiveLoss) and not torch.is_grad_enabled()
        if evaluating and self._training_runs(sys._getframe()):
            rows = own_rows(len(labels))
            if 0 < rows < len(labels):
                arranged = self._arranged(logits[:rows], labels[:rows])
            if rows:
                self.loss.observe(*arranged)
        if num_items_in_batch is None:
            return value
        total = torch.as_tensor(num_items_in_batch, device=value.device).clamp_min(1)
        return value * ((labels != IGNORED).sum() / total)

    def _arranged(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and labels in the layout of the loss, with the class axis second."""
        classes = 2 if logits.ndim == 3 else 1  # the axis
        shape = [*logits.shape]
        if logits.ndim == 4:
            shape[2:] = labels.shape[-2:]
        of_elements = shape[:classes] + shape[classes + 1 :]
        if self.loss.binary:
            single = shape[classes : classes + 1] == [1]
            fits = [*labels.shape] == shape or (single and [*labels.shape] == of_elements)
        elif labels.is_floating_point():
            fits = logits.ndim == 2 and [*labels.shape] == shape
        else:
            fits = logits.ndim > 1 and [*labels.shape] == of_elements
        if not fits or logits.ndim > 4:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and {labels.dtype} labels of shape "
                f"{tuple(labels.shape)} do not fit together: expected "
                f"{_BINARY_SHAPES if self.loss.binary else _SHAPES}"
            )
        if self.loss.binary:
            labels = _without_fractions(labels)
        if logits.ndim == 3:
            logits, labels = logits.flatten(0, 1), labels.flatten(0, 1)
        elif logits.ndim == 4 and logits.shape[2:] != labels.shape[-2:]:
            # As the heads of transformers do to compute their own loss.
            logits = interpolate(logits, labels.shape[-2:], mode="bilinear", align_corners=False)
        if self.loss.ignore_index != IGNORED and not labels.is_floating_point():
            labels = labels.masked_fill(labels == IGNORED, self.loss.ignore_index)
        return logits, labels

    def _training_runs(self, frame: FrameType | None) -> bool:
        """Whether the training loop itself runs this evaluation, and not a callback.

        Test data must never tune the loss. `TrainerControl.should_evaluate` cannot tell: it is still set
        after an interrupted evaluation and while another callback runs its own evaluation, and it is cleared
        after the first of several evaluation sets. The call stack can tell: the function that ended a step
        or an epoch must be on it, with no callback in between.
        """
        if self._loop is None:
            return False
        while frame is not None and frame is not self._loop:
            if _calls_callbacks(frame):
                return False
            frame = frame.f_back
        return frame is not None

    def _stop_learning(self) -> None:
        self._loop = None
        self.loss.forget()
        self._evaluator.reset()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Learn from evaluations between here and the next step; an error if the loss was not used."""
        if not self._loss_used:
            raise RuntimeError(
                "the training step did not use the loss: pass compute_loss_func=calibration.compute_loss to "
                "the Trainer, with the same Calibration as in callbacks"
            )
        self._loop = _origin_of_the_event()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Learn from evaluations between here and the next step."""
        self._loop = _origin_of_the_event()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Learn from no evaluation until the step has ended."""
        self._stop_learning()
        self._check_name()
        self._watch.step()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **rest: Any,
    ) -> None:
        """Adapt, if training ran this evaluation and it is the one to learn from."""
        self._loader = None
        if not isinstance(self.loss, AdaptiveLoss):
            return
        # Trainer always reports the run time, even of data without labels, on which adapt then fails.
        names = [name.removesuffix("_runtime") for name in metrics or {} if name.endswith("_runtime")]
        if not self._training_runs(_origin_of_the_event()):
            return
        if ("eval" if self.learn_from is None else f"eval_{self.learn_from}") in names:
            self._loop = None
            self._left_out.clear()
            self.loss.adapt(timeout=self.timeout)
            self._watch.waits = False
            self._keep(state)
            return
        self.loss.forget()
        self._left_out.update(names)
        others = [name.removeprefix("eval_") for name in names if name.startswith("eval_")]
        if self.learn_from is None and others:
            raise ValueError(
                f"eval_dataset has several sets, among them {others[0]!r}: choose the one that the loss "
                "learns from, Calibration(loss, learn_from=...)"
            )

    def _check_name(self) -> None:
        """Raise an error if training has evaluated, but not the set to learn from."""
        if self._left_out and self.learn_from is not None:
            names = ", ".join(sorted(self._left_out))
            raise ValueError(
                f"learn_from={self.learn_from!r} names none of the evaluation sets: training has evaluated "
                f"{names}. Name a key of the dictionary eval_dataset, without eval_; with a single set leave "
                "learn_from out"
            )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **rest: Any,
    ) -> None:
        """Check that arguments and model fit the loss, and restore its state from the checkpoint."""
        self._stop_learning()
        self._loss_used = False
        self._left_out.clear()
        self._began, self._watch = True, Watch()
        if args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} has no effect on a custom loss: set "
                "it to 0, or use a loss with smoothing, create_loss('ls', num_classes)"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"one process with {args.n_gpu} GPUs scales the loss wrongly: start one process per GPU with "
                "torchrun --nproc_per_node, or show the program one GPU with CUDA_VISIBLE_DEVICES"
            )
        _check_task(model, self.loss.binary)
        self._check_best_metric(args)
        if not isinstance(self.loss, AdaptiveLoss):
            return
        if args.metric_for_best_model in ("loss", "eval_loss"):
            warn(
                f"metric_for_best_model is eval_loss, but {MOVES}. Set metric_for_best_model='nll' and "
                "greater_is_better=False"
            )
        if args.eval_strategy == "no":
            warn(
                "the loss adapts to evaluations during training, but with eval_strategy='no' there are none: "
                "it will not adapt"
            )
        kept: Any = state.stateful_callbacks
        if _KEY in kept:
            self._load(kept[_KEY])
        elif state.global_step > 0:
            warn(
                "the checkpoint was saved without Calibration: training resumes, but the loss keeps the "
                "state that it has in this program"
            )
        elif state.is_hyper_param_search:  # every trial has a new model, but the same loss
            self._load(self._initial)
        if args.eval_strategy != "no" and state.is_world_process_zero:
            self._watch = Watch.begin(self.loss)
        self._keep(state)

    def _check_best_metric(self, args: TrainingArguments) -> None:
        """Refuse a direction of the best metric by which the worst model would count as the best."""
        name = (args.metric_for_best_model or "").removeprefix("eval_").removeprefix(f"{self.learn_from}_")
        if name in self.metrics and args.greater_is_better != METRICS[name].higher_is_better:
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r} needs greater_is_better="
                f"{METRICS[name].higher_is_better}: with {args.greater_is_better}, the worst model would "
                "count as the best (transformers sets True unless the name ends in 'loss')"
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Learn from no evaluation after training, and warn if the loss did not do its work."""
        self._stop_learning()
        self._check_name()
        self._watch.end(self.loss, "eval_strategy, eval_steps and eval_delay")

    def _keep(self, state: TrainerState) -> None:
        # The key is not the name of a callback, which Trainer would try to construct.
        kept: Any = state.stateful_callbacks
        kept[_KEY] = _plain(self.loss)

    def _load(self, plain: Mapping[str, Any]) -> None:
        # float64 holds them all exactly; loading converts them to their own types.
        state = {
            name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in plain.items()
        }
        try:
            self.loss.load_state_dict(state)
        except RuntimeError as problem:
            raise ValueError(f"the checkpoint is of another loss than {self.loss}: {problem}") from problem

    def compute_metrics(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """Accuracy, scores and calibration errors, for ``Trainer(compute_metrics=...)``.

        For an adaptive loss, ``passes`` and the mean, minimum and maximum of the learned state are added,
        such as ``multiplier_mean``. They are the values that the model was trained with: the loss adapts
        after the metrics are computed.

        Args:
            prediction: the logits and labels of the evaluation set or, with ``batch_eval_metrics=True``, of
                one batch.
            compute_result: False to add a batch to the sums, in constant memory; True to return the figures
                of all batches.
        """
        for logits, labels in _blocks(prediction.predictions, prediction.label_ids):
            self._evaluator.update(*self._arranged(logits, labels))
        if not compute_result:
            return {}
        try:
            # Not pooled: Trainer has gathered the predictions of all processes.
            evaluation = self._evaluator.compute(pooled=False)
        finally:
            self._evaluator.reset()
        figures = {name: value for name in self.metrics if (value := evaluation.metrics[name]) is not None}
        return figures | {name: value.item() for name, value in learned_figures(self.loss).items()}

    def on_prediction_step(self, *_: Any, eval_dataloader: object = None, **__: Any) -> None:
        """Discard the sums of an interrupted evaluation."""
        if eval_dataloader is not self._loader:
            self._loader = eval_dataloader
            self._evaluator.reset()

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Release the data."""
        self._loader = None


def _origin_of_the_event() -> FrameType | None:
    """The frame of the function that triggered the event whose callbacks are running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _calls_callbacks(frame):
        frame = frame.f_back
    while frame is not None and _calls_callbacks(frame):
        frame = frame.f_back
    return frame


def _calls_callbacks(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == TrainerCallback.__module__


def _check_task(model: Any, binary: bool) -> None:
    """Raise an error for models whose labels are not classes of single elements, or decisions if binary."""
    configuration = getattr(model, "config", None)
    task = getattr(configuration, "problem_type", None)
    if task == "regression" or (task == "multi_label_classification" and not binary):
        hint = "" if task == "regression" else "; for several labels pass create_loss(..., 2, binary=True)"
        raise ValueError(
            f"calibrant's losses are for one class out of several; the model is for {task}{hint}"
        )
    shifts = getattr(model, "loss_type", None) == "ForCausalLM"
    if shifts and not getattr(configuration, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} predicts the next token; models whose labels belong to other positions "
            "than their logits are not supported"
        )


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping):
        if "logits" not in outputs:
            raise ValueError(f"the model returned no 'logits', only: {', '.join(map(str, outputs))}")
        logits = outputs["logits"]
    else:
        logits = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if not isinstance(logits, Tensor):
        raise ValueError(f"the logits of the model must be a tensor, got {type(logits).__name__}")
    return logits


def _without_fractions(labels: Tensor) -> Tensor:
    """Floats that are all whole numbers as integers; anything else as it is."""
    whole = labels.long()
    return whole if labels.is_floating_point() and bool((whole == labels).all()) else labels


def _plain(loss: Loss) -> dict[str, Any]:
    """The state as lists, for JSON. Python writes float64 numbers so that they are read back exactly."""
    return {name: value.tolist() for name, value in loss.state_dict().items()}


def _blocks(predictions: Any, labels: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels as tensors, in blocks whose enlarged logits take limited memory."""
    if isinstance(predictions, list):  # a list of batches: eval_do_concat_batches=False
        for batch in zip(predictions, labels, strict=True):
            yield from _blocks(*batch)
        return
    if isinstance(predictions, tuple):  # some models return more than logits
        predictions = predictions[0]
    pair = predictions, labels
    logits, target = (
        each if isinstance(each, Tensor) else torch.as_tensor(each, device="cpu") for each in pair
    )
    enlarged = target[:1].numel() * logits.shape[1] if logits.ndim == 4 else logits[:1].numel()
    rows = max(1, _BLOCK // max(1, enlarged))
    yield from zip(torch.split(logits, rows), torch.split(target, rows), strict=True)
