"""Adaptive losses and calibration metrics in Lightning: one callback for what a validation run has to do."""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from calibrant.inference import OwnRows, own_rows_in
from calibrant.losses import AdaptiveLoss, Loss

__all__ = ["Calibration"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which the same library is installed."""


def _packages() -> list[ModuleType]:
    """Those that are installed: with `lightning` mostly both, of which the user imports one."""
    found = []
    for name in PACKAGES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    if not found:
        raise ImportError(
            "calibrant.integrations.lightning needs the package lightning or pytorch_lightning: "
            'pip install "calibrant[lightning]"'
        )
    return found


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # A callback of both, because each package's Trainer takes its own only.
    Callback = type("Callback", tuple(package.Callback for package in _packages()), {})

# After Lightning, which brings torchmetrics along: who has neither is told about the former.
from torchmetrics import Metric, MetricCollection  # noqa: E402

from calibrant.integrations.torchmetrics import CalibrationError, ClasswiseCalibrationError  # noqa: E402


@dataclass
class _Run:
    """One run over an evaluation set."""

    loss: Loss
    metrics: MetricCollection
    index: int
    """Of the loader that counts."""
    own_rows: OwnRows
    """Of the rows of its batches."""
    state: dict[str, Tensor]
    """Of the loss, at the beginning."""
    hook: RemovableHandle | None = None
    calls: int = 0
    """Of the loss, in this batch."""
    last: tuple[Tensor, Tensor] | None = None
    """What it was called with."""
    exchanged: bool | None = None
    """Whether its values are others during the run; None before the first batch."""
    unmeasured: bool = False
    """Whether a test run turned out not to show its logits."""


class Calibration(Callback):
    """Adapts a calibrant loss at the end of every validation run of ``fit``, and logs calibration metrics.

    The two lines of a training program that change::

        self.loss = calibrant.create_loss("cals-alm", num_classes)  # in the LightningModule
        trainer = Trainer(callbacks=[Calibration()])

    Logits and targets are those with which ``validation_step`` calls the loss. What the loss learns is in its
    buffers and so in every ``.ckpt``, that of the same validation run included. Nothing is learned in the
    sanity check, in ``trainer.validate`` and in ``trainer.test``. Elements that a distributed sampler repeats
    count once.

    It logs ``val/ece``, ``val/adaptive_ece`` and ``val/classwise_ece``, in ``trainer.test`` the same as
    ``test/…``; and, where the loss adapted, ``loss/passes`` and mean, least and greatest of what it learned,
    such as ``loss/multiplier_mean``. With a loss that does not adapt only metrics are logged.

    Args:
        loss: where in the module the loss is (``"loss"``, ``"head.loss"``), if it has several.
        predictions: from what ``validation_step`` (``test_step``) returned and the batch to logits
            ``(B, K, *S)`` and target ``(B, *S)``: for steps that do not call the loss just once.
        metrics: what to log instead, a torchmetrics metric or collection that takes logits and targets. Names
            are those of the collection, after ``val/`` or ``test/``. An empty one logs nothing.
        dataloader_idx: the validation loader to learn from and to measure; the others do not matter. Of
            test loaders the one at the same place is measured, or the only one.
        timeout: seconds that a process waits for the others when the loss adapts, before it raises; by
            default as long as its process group does.
    """

    def __init__(
        self,
        loss: str | None = None,
        *,
        predictions: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None,
        metrics: Metric | MetricCollection | None = None,
        dataloader_idx: int = 0,
        timeout: float | None = None,
    ) -> None:
        if loss is not None and not isinstance(loss, str):
            raise TypeError(
                f"loss must be the name of an attribute of the LightningModule, such as 'loss', got "
                f"{type(loss).__name__}; where there is one loss, Calibration() finds it"
            )
        if metrics is not None and not isinstance(metrics, Metric | MetricCollection):
            raise TypeError(
                f"metrics must be a torchmetrics Metric or MetricCollection, got {type(metrics).__name__}"
            )
        if dataloader_idx < 0:
            raise ValueError(f"dataloader_idx must be at least 0, got {dataloader_idx}")
        self.loss = loss
        self.predictions = predictions
        # A copy: the module may use the same metrics for something else.
        metrics = None if metrics is None else metrics.clone()
        self.metrics = MetricCollection([metrics]) if isinstance(metrics, Metric) else metrics
        self.dataloader_idx = dataloader_idx
        self.timeout = timeout
        self._run: _Run | None = None
        self._fitted: weakref.ref[Trainer] | None = None
        self._ignored: list[Loss] = []

    # ---- Before training --------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the loss out of FSDP, which would cast its buffers to the type of the computation."""
        strategy: Any = trainer.strategy
        if not any(ancestor.__name__ == "FSDPStrategy" for ancestor in type(strategy).__mro__):
            return
        options = strategy.kwargs
        given = options.get("ignored_modules")
        # None found is no error yet: the module may create it in its own hooks, which come later.
        losses = [loss for _, loss in _losses(pl_module).values()]
        if losses and options.get("ignored_states") is None and (given is None or given is self._ignored):
            options["ignored_modules"] = self._ignored = losses
        for loss in losses:
            loss.to(strategy.root_device)  # FSDP does not move what it ignores

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for the loss, so that a missing one is known before the first epoch."""
        _, loss = self._find(pl_module)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [other for other in callbacks if isinstance(other, Calibration) and other is not self]
        if any(other._find(pl_module)[1] is loss for other in others):
            raise ValueError("there are two Calibration callbacks for the same loss: one is enough")
        self._fitted = weakref.ref(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of a loss that would never adapt."""
        _, loss = self._find(pl_module)
        if isinstance(loss, AdaptiveLoss) and not trainer.enable_validation and trainer.is_global_zero:
            warnings.warn(
                f"calibrant: {type(loss).__name__} adapts to validation data, but this fit has no validation:"
                " it needs a validation loader, a validation_step, and limit_val_batches other than 0",
                stacklevel=2,
            )

    # ---- The hooks of an evaluation run -----------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen to the loss."""
        self._begin(trainer, pl_module, trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen to the loss."""
        self._begin(trainer, pl_module, trainer.num_test_batches)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Expect the loss to be called once."""
        if self._run is not None:
            self._run.calls, self._run.last = 0, None

    on_test_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Observe the batch."""
        run = self._run
        if run is None or dataloader_idx != run.index or run.unmeasured:
            return
        if self.predictions is None:
            problem = _problem(run.calls, "test_step" if trainer.testing else "validation_step")
            if problem is not None:
                if not trainer.testing:
                    raise RuntimeError(problem)
                # A program that tests in its own way keeps running.
                run.unmeasured = True
                if trainer.is_global_zero:
                    warnings.warn(f"calibrant: no metrics in this test: {problem}", stacklevel=2)
                return
            assert run.last is not None
            logits, target = run.last
        else:
            logits, target = _pair(self.predictions(outputs, batch))
        run.last = None
        if trainer.sanity_checking:
            return
        keep = run.own_rows(len(logits))
        logits, target = logits[:keep].detach(), target[:keep]
        if trainer.state.fn == "fit":
            with _own_state(run):
                run.loss.observe(logits, target)
        if keep:
            run.metrics.update(logits, target)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adapt, before any checkpoint of this run is written, and log."""
        run = self._run
        if run is None:
            return
        figures: dict[str, Any] = {}
        if not trainer.sanity_checking:
            if trainer.state.fn == "fit" and isinstance(run.loss, AdaptiveLoss):
                if not _same(run):
                    raise RuntimeError(
                        "the state of the loss is not its own at the end of validation, as callbacks that "
                        "average weights exchange it: put Calibration after them in "
                        "Trainer(callbacks=[...]), so that they have put it back"
                    )
                # First, because it is the one exchange between processes that can be given a time-out.
                run.loss.adapt(timeout=self.timeout)
                figures |= _summary(run.loss)
            if not run.unmeasured:
                stage = "test" if trainer.testing else "val"
                figures |= {f"{stage}/{name}": value for name, value in run.metrics.compute().items()}
        self._drop()
        for name, value in figures.items():
            # Equal in all processes already; without sync_dist Lightning would warn that it cannot know that.
            pl_module.log(name, value, sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget an evaluation that was interrupted."""
        self._drop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        self._drop()

    # ---- Parts ------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer, pl_module: LightningModule, batches: list[Any]) -> None:
        self._drop()
        module, loss = self._find(pl_module)
        index = self.dataloader_idx
        if trainer.testing and len(batches) == 1:
            index = 0
        if index >= len(batches):
            raise ValueError(
                f"Calibration(dataloader_idx={index}): there is no such loader, only 0 to {len(batches) - 1}"
            )
        loss.forget()
        metrics = _default_metrics(loss) if self.metrics is None else self.metrics
        metrics.reset()
        metrics = metrics.to(trainer.strategy.root_device)
        state = {name: value.clone() for name, value in loss.named_buffers()}
        own_rows = own_rows_in(self._loader(trainer, index))
        self._run = run = _Run(loss, metrics, index, own_rows, state)
        if self.predictions is None:
            run.hook = module.register_forward_hook(self._listen, with_kwargs=True)

    def _listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if self._run is not None:
            logits, target = (*args, *(kwargs[name] for name in ("logits", "target") if name in kwargs))
            self._run.calls += 1
            self._run.last = logits, target

    def _drop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            if run.hook is not None:
                run.hook.remove()
            run.loss.forget()
            run.metrics.reset()

    def _find(self, pl_module: nn.Module) -> tuple[nn.Module, Loss]:
        found, kind = _losses(pl_module), type(pl_module).__name__
        if self.loss is not None:
            if self.loss in found:
                return found[self.loss]
            raise ValueError(
                f"Calibration(loss={self.loss!r}): {kind} has no calibrant loss of that name, only "
                f"{', '.join(found) or 'none at all'}"
            )
        if len(found) == 1:
            return next(iter(found.values()))
        if not found:
            raise ValueError(
                f"{kind} has no calibrant loss: give it one, as in "
                'self.loss = calibrant.create_loss("cals-alm", num_classes)'
            )
        raise ValueError(
            f"{kind} has several calibrant losses ({', '.join(found)}): say which one is to be adapted, as "
            f"in Calibration(loss={next(iter(found))!r})"
        )

    def _loader(self, trainer: Trainer, index: int) -> object:
        # After a fit, Lightning's val_dataloaders keep naming the fit's, also while others are validated.
        if trainer.state.fn == "validate" and self._fitted is not None and self._fitted() is trainer:
            if trainer.world_size > 1 and trainer.is_global_zero:
                warnings.warn(
                    "calibrant: elements that the validation loader repeats to serve all processes alike "
                    "count twice in these metrics, because this Trainer was used for fit before: validate "
                    "with a new one",
                    stacklevel=2,
                )
            return None
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        flat = list(_flat(loaders))
        return flat[index] if index < len(flat) else None


def _losses(module: nn.Module) -> dict[str, tuple[nn.Module, Loss]]:
    """By where they are: what is called, and the loss, which torch.compile hides in it."""
    found: dict[str, tuple[nn.Module, Loss]] = {}
    for name, part in module.named_modules():
        loss = getattr(part, "_orig_mod", part)
        if isinstance(loss, Loss) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = part, loss
    return found


def _default_metrics(loss: Loss) -> MetricCollection:
    ignored = loss.ignore_index
    return MetricCollection(
        {
            "ece": CalibrationError("ece", ignore_index=ignored),
            "adaptive_ece": CalibrationError("adaptive_ece", ignore_index=ignored),
            "classwise_ece": ClasswiseCalibrationError(loss.num_classes, ignore_index=ignored),
        }
    )


def _problem(calls: int, step: str) -> str | None:
    """What is wrong with so many calls of the loss in one batch."""
    if calls == 1:
        return None
    often = "did not call the loss" if calls == 0 else f"called the loss {calls} times for one batch"
    return (
        f"{step} {often}, so the logits to learn from are not known: let it call the loss once, as in "
        "self.loss(logits, target), or say where they are, as in "
        "Calibration(predictions=lambda outputs, batch: (outputs['logits'], batch[1]))"
    )


def _pair(found: Any) -> tuple[Tensor, Tensor]:
    kinds = [type(part).__name__ for part in found] if isinstance(found, tuple | list) else None
    if kinds is not None and len(kinds) == 2 and all(isinstance(part, Tensor) for part in found):
        if found[0].ndim < 2:
            raise ValueError(
                "predictions(outputs, batch) must return logits of shape (B, K, *S) first, got shape "
                f"{tuple(found[0].shape)}"
            )
        return found[0], found[1]
    got = type(found).__name__ + ("" if kinds is None else f" of {', '.join(kinds) or 'nothing'}")
    raise TypeError(f"predictions(outputs, batch) must return two tensors, logits and target; got {got}")


def _flat(loaders: Any) -> Iterator[object]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from _flat(loader)
    elif loaders is not None:
        yield loaders


def _same(run: _Run) -> bool:
    """Whether the loss has the values of the beginning, which are those that training uses."""
    return all(torch.equal(value, run.state[name]) for name, value in run.loss.named_buffers())


@contextmanager
def _own_state(run: _Run) -> Iterator[None]:
    """The loss with its own values, where a callback has put averages into the module for this run."""
    if run.exchanged is None:
        run.exchanged = not _same(run)
    if not run.exchanged:
        yield
        return
    others = {name: value.clone() for name, value in run.loss.named_buffers()}
    try:
        _put(run.loss, run.state)
        yield
    finally:
        _put(run.loss, others)


def _put(loss: Loss, values: Mapping[str, Tensor]) -> None:
    for name, buffer in loss.named_buffers():
        buffer.copy_(values[name])


def _summary(loss: AdaptiveLoss) -> dict[str, Tensor]:
    figures = {"loss/passes": loss.passes.to(torch.float32)}
    for name, value in loss.learned().items():
        if value.numel() == 1:
            figures[f"loss/{name}"] = value.reshape(())
        else:
            figures[f"loss/{name}_mean"] = value.mean()
            figures[f"loss/{name}_min"], figures[f"loss/{name}_max"] = value.aminmax()
    return figures
