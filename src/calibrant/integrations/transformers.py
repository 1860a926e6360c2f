"""Adaptive losses in Hugging Face's Trainer, which has a place for a loss but none for what a loss learns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import (
    EvalPrediction,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from calibrant.arguments import one_of
from calibrant.evaluation import Evaluator
from calibrant.integrations.accelerate import own_rows
from calibrant.losses import AdaptiveLoss, Loss
from calibrant.metrics import METRICS

__all__ = ["Calibration"]

IGNORED = -100
"""The label that Trainer pads with and does not count, whatever label a loss ignores."""

_KEY = "calibrant_loss"

_STREAMED = [name for name, metric in METRICS.items() if metric.streamed and metric.requires is None]

# Numbers in one block of logits that are enlarged for the metrics: 64 MiB of them at a time.
_BLOCK = 1 << 24


class Calibration(TrainerCallback):
    """A calibrant loss for `transformers.Trainer`: the loss, its adaptation and calibration metrics.

    Pass it to the trainer in three places, of which the metrics are optional::

        calibration = Calibration(create_loss("cals-alm", num_classes))
        trainer = Trainer(
            ...,
            compute_loss_func=calibration.compute_loss,
            compute_metrics=calibration.compute_metrics,
            callbacks=[calibration],
        )

    The loss adapts at the end of every evaluation that training itself runs (``eval_strategy``), and learns
    from nothing else: not from ``eval_on_start``, nor from ``trainer.evaluate`` and ``trainer.predict``,
    before training, after it, after an interruption, or in another callback. What it has learned is in the
    checkpoints, in ``trainer_state.json``; ``trainer.train(resume_from_checkpoint=...)`` takes it up.

    Shapes: logits ``(B, K)`` with labels ``(B,)`` or, where the loss takes them, probabilities ``(B, K)``; of
    tokens ``(B, T, K)`` with ``(B, T)``; of pixels ``(B, K, h, w)`` with ``(B, H, W)``, to whose size the
    logits are enlarged. The label -100 is always ignored, beside the loss's own ``ignore_index``.

    Args:
        loss: any calibrant loss with ``reduction="mean"``, compiled or not; it is moved to the device of the
            logits.
        learn_from: the name of the evaluation set to learn from, where ``eval_dataset`` is a dictionary.
        timeout: seconds to wait for the other processes when adapting; by default as long as the process
            group does.
        metrics: the figures to report, of those that a `calibrant.evaluation.Evaluator` has.

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
        metrics: Sequence[str] = (
            "accuracy",
            "nll",
            "brier",
            "ece",
            "adaptive_ece",
            "classwise_ece",
            "mce",
        ),
    ) -> None:
        itself = getattr(loss, "_orig_mod", loss)  # of torch.compile, which hides the class
        if not isinstance(itself, Loss):
            raise TypeError(f"Calibration(loss) takes a calibrant loss, got {type(itself).__name__}")
        if itself.reduction != "mean":
            raise ValueError(
                f"the loss must have reduction='mean', got {itself.reduction!r}: gradients accumulate by "
                "weighting the means of batches"
            )
        self.loss = itself
        self._forward = loss
        self.learn_from = learn_from
        self.timeout = timeout
        self.metrics = tuple(one_of("metrics", name, _STREAMED) for name in metrics)
        self._initial = _plain(itself)
        self._evaluator = Evaluator(itself.num_classes, ignore_index=itself.ignore_index, resamples=0)
        self._loader: object = None
        self._loop: FrameType | None = None
        self._loss_used = False
        self._left_out: set[str] = set()
        self._began = False

    # ---- The loss ---------------------------------------------------------------------------------

    def compute_loss(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The loss of a batch, for ``Trainer(compute_loss_func=...)``.

        Args:
            outputs: of the model: with ``logits``, or a tuple that begins with them.
            labels: see the class for shapes.
            num_items_in_batch: how many labels other than -100 all batches of an optimizer step have, on all
                processes. The mean over this batch then enters by its share of them, so that the
                accumulated gradient is that of one large batch (with class weights, or another
                ``ignore_index`` than -100, the mean of the batches' means, weighted by those shares).

        Raises:
            ValueError: no labels or logits, or shapes that do not fit.
        """
        logits = _logits(outputs)
        if labels is None:
            raise ValueError("the batch has no labels: its dictionary needs the key 'labels'")
        labels = labels.to(logits.device)
        state = next(self.loss.buffers(), None)
        if state is not None and state.device != logits.device:
            self.loss.to(logits.device)
        if logits.requires_grad and not self._began and isinstance(self.loss, AdaptiveLoss):
            self._began = True  # once is enough
            warnings.warn(
                "calibrant: the loss will never adapt, because Calibration is not among the Trainer's "
                "callbacks: pass callbacks=[calibration]",
                stacklevel=2,
            )
        self._loss_used = True
        arranged = self._arranged(logits, labels)
        value: Tensor = self._forward(*arranged)
        if (
            isinstance(self.loss, AdaptiveLoss)
            and not torch.is_grad_enabled()
            and self._training_runs(sys._getframe())
        ):
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
        """Logits and labels with the class axis second, as the loss wants them."""
        if labels.is_floating_point():
            fits = logits.ndim == 2 and labels.shape == logits.shape
        elif logits.ndim == 3:
            fits = labels.shape == logits.shape[:2]
        elif logits.ndim == 4:
            fits = labels.ndim == 3 and len(labels) == len(logits)
        else:
            fits = logits.ndim == 2 and labels.shape == logits.shape[:1]
        if not fits:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} and {labels.dtype} labels of shape "
                f"{tuple(labels.shape)} do not fit together: expected (B, K) and labels (B,) or "
                "probabilities (B, K), (B, T, K) and labels (B, T) of tokens, or (B, K, h, w) and labels "
                "(B, H, W) of pixels"
            )
        if logits.ndim == 3:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        elif logits.ndim == 4 and logits.shape[2:] != labels.shape[1:]:
            # As the heads of transformers do when they compute a loss themselves.
            logits = interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)
        if self.loss.ignore_index != IGNORED and not labels.is_floating_point():
            labels = labels.masked_fill(labels == IGNORED, self.loss.ignore_index)
        return logits, labels

    # ---- Which evaluations count ------------------------------------------------------------------

    def _training_runs(self, frame: FrameType | None) -> bool:
        """Whether the training loop itself, and no callback, runs this evaluation.

        Test data must never tune the loss, and `TrainerControl.should_evaluate` cannot tell: it is still set
        after an evaluation that was interrupted, set while another callback runs an evaluation of its own,
        and cleared after the first of several evaluation sets. The stack can: the function that ended a step
        or an epoch must be on it, with no callback in between.
        """
        if self._loop is None:
            return False
        while frame is not None and frame is not self._loop:
            if _hands_out_events(frame):
                return False
            frame = frame.f_back
        return frame is not None

    def _expect_none(self) -> None:
        self._loop = None
        self.loss.forget()
        self._evaluator.reset()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Take what is evaluated from here, until the next step, as asked for by training.

        Raises:
            RuntimeError: the trainer does not use the loss.
        """
        if not self._loss_used:
            raise RuntimeError(
                "the training step did without the loss: pass compute_loss_func=calibration.compute_loss, of "
                "the same Calibration as among the callbacks, to the Trainer"
            )
        self._loop = _origin_of_the_event()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Take what is evaluated from here, until the next step, as asked for by training."""
        self._loop = _origin_of_the_event()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Expect no evaluation until the step has ended.

        Raises:
            ValueError: training has just evaluated, and not what ``learn_from`` names.
        """
        self._expect_none()
        self._check_name()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **rest: Any,
    ) -> None:
        """Adapt, if the training loop ran this evaluation and it is the one to learn from.

        Raises:
            ValueError: there are several evaluation sets, and ``learn_from`` does not name one.
        """
        self._loader = None
        if not isinstance(self.loss, AdaptiveLoss):
            return
        # By the one figure that Trainer always reports, also of data without labels: those then fail loudly.
        names = [name.removesuffix("_runtime") for name in metrics or {} if name.endswith("_runtime")]
        if not self._training_runs(_origin_of_the_event()):
            return
        if ("eval" if self.learn_from is None else f"eval_{self.learn_from}") in names:
            self._loop = None
            self._left_out.clear()
            self.loss.adapt(timeout=self.timeout)
            self._keep(state)
            return
        self.loss.forget()
        self._left_out.update(names)
        others = [name.removeprefix("eval_") for name in names if name.startswith("eval_")]
        if self.learn_from is None and others:
            raise ValueError(
                f"eval_dataset has several sets, among them {others[0]!r}: say from which one the loss "
                "learns, Calibration(loss, learn_from=...)"
            )

    def _check_name(self) -> None:
        """Raise if the evaluation sets of training do not have the one to learn from among them."""
        if self._left_out and self.learn_from is not None:
            names = ", ".join(sorted(self._left_out))
            raise ValueError(
                f"learn_from={self.learn_from!r} names none of the evaluation sets: training has evaluated "
                f"{names}. Name a key of the dictionary eval_dataset, without eval_; with a single set leave "
                "learn_from out"
            )

    # ---- What is learned, in checkpoints ----------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **rest: Any,
    ) -> None:
        """Check the arguments, and take up what the loss had learned by the checkpoint.

        Raises:
            ValueError: training arguments or a model that do not go with the loss, or a checkpoint of
                another loss.
        """
        self._expect_none()
        self._loss_used = False
        self._left_out.clear()
        self._began = True
        if args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} has no effect beside a loss of one's "
                "own: set it to 0, or smooth by a loss, create_loss('ls', num_classes)"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"one process with {args.n_gpu} GPUs scales the loss wrongly: start one process per GPU, by "
                "torchrun --nproc_per_node, or let the program see one of them, by CUDA_VISIBLE_DEVICES"
            )
        _check_task(model)
        if not isinstance(self.loss, AdaptiveLoss):
            return
        if args.eval_strategy == "no":
            warnings.warn(
                "calibrant: the loss adapts to evaluations in training, but eval_strategy='no' asks for none:"
                " it will stay as it is",
                stacklevel=2,
            )
        kept: Any = state.stateful_callbacks
        if _KEY in kept:
            self._load(kept[_KEY])
        elif state.global_step > 0:
            warnings.warn(
                "calibrant: the checkpoint was saved without Calibration: training resumes, but the loss "
                "begins with what it has learned in this program, if anything",
                stacklevel=2,
            )
        elif state.is_hyper_param_search:  # every trial has a new model, but the loss is the same
            self._load(self._initial)
        self._keep(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Leave the loss alone from now on."""
        self._expect_none()
        self._check_name()

    def _keep(self, state: TrainerState) -> None:
        # The key is not a callback's name, so that Trainer does not try to construct one from it.
        kept: Any = state.stateful_callbacks
        kept[_KEY] = _plain(self.loss)

    def _load(self, plain: Mapping[str, Any]) -> None:
        own = self.loss.state_dict()
        try:
            tensors = {
                name: torch.tensor(value, dtype=own[name].dtype if name in own else None)
                for name, value in plain.items()
            }
            self.loss.load_state_dict(tensors)
        except RuntimeError as problem:
            raise ValueError(f"the checkpoint is of another loss than {self.loss}: {problem}") from problem

    # ---- Metrics ----------------------------------------------------------------------------------

    def compute_metrics(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """Accuracy, scores and calibration errors, for ``Trainer(compute_metrics=...)``.

        Beside them stand the means of what an adaptive loss has learned, as ``multiplier_mean``: those that
        the model was trained with, since the loss adapts after the metrics are computed.

        Args:
            prediction: logits and labels, of the whole evaluation set or, with
                ``batch_eval_metrics=True``, of a batch.
            compute_result: False to add up only, in constant memory; True for the figures of all that was
                added.
        """
        for logits, labels in _blocks(prediction.predictions, prediction.label_ids):
            self._evaluator.update(*self._arranged(logits, labels))
        if not compute_result:
            return {}
        try:
            # Trainer has gathered the predictions of all processes.
            evaluation = self._evaluator.compute(pooled=False)
        finally:
            self._evaluator.reset()
        figures = {name: evaluation.metrics[name] for name in self.metrics}
        means = {f"{name}_mean": values.mean().item() for name, values in self.loss.learned().items()}
        return {name: value for name, value in figures.items() if value is not None} | means

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: object = None,
        **rest: Any,
    ) -> None:
        """Drop what is left of an evaluation that was interrupted."""
        if eval_dataloader is not self._loader:
            self._loader = eval_dataloader
            self._evaluator.reset()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **rest: Any
    ) -> None:
        """Let go of the data."""
        self._loader = None


def _origin_of_the_event() -> FrameType | None:
    """The running function that set off the event whose callbacks are being called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _hands_out_events(frame):
        frame = frame.f_back
    while frame is not None and _hands_out_events(frame):
        frame = frame.f_back
    return frame


def _hands_out_events(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == TrainerCallback.__module__


def _check_task(model: Any) -> None:
    """Refuse heads whose labels look like classes and are not."""
    configuration = getattr(model, "config", None)
    task = getattr(configuration, "problem_type", None)
    if task in ("multi_label_classification", "regression"):
        raise ValueError(f"calibrant's losses are for one class out of several, the model is for {task}")
    shifts = getattr(model, "loss_type", None) == "ForCausalLM"
    if shifts and not getattr(configuration, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} predicts the next token: its labels belong to other positions than its "
            "logits, which is not supported"
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


def _plain(loss: Loss) -> dict[str, Any]:
    """The state as JSON can hold it; Python writes float64 numbers so that they are read back exactly."""
    return {name: value.tolist() for name, value in loss.state_dict().items()}


def _blocks(predictions: Any, labels: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels, as tensors, in pieces that are not too large after they are enlarged."""
    if isinstance(predictions, list):  # of batches: eval_do_concat_batches=False
        for batch in zip(predictions, labels, strict=True):
            yield from _blocks(*batch)
        return
    if isinstance(predictions, tuple):  # some models return more than logits
        predictions = predictions[0]
    logits, target = torch.as_tensor(predictions), torch.as_tensor(labels)
    enlarged = target[:1].numel() * logits.shape[1] if logits.ndim == 4 else logits[:1].numel()
    rows = max(1, _BLOCK // max(1, enlarged))
    yield from zip(torch.split(logits, rows), torch.split(target, rows), strict=True)
