"""A Lightning callback that adapts the loss after every validation run and logs calibration metrics."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from calibrant.extras import MissingPackageError, require
from calibrant.inference import OwnRows, own_rows_in
from calibrant.integrations.adaptive import MOVES, Watch, learned_figures, uncompiled, warn
from calibrant.losses import AdaptiveLoss, Loss

__all__ = ["Calibration"]

Kind = TypeVar("Kind", bound=nn.Module)

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names of the same library. Often both are installed, and the user imports one of them."""


def _packages() -> list[ModuleType]:
    """The installed ones."""
    found = []
    for name in PACKAGES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    if not found:
        raise MissingPackageError("lightning", "lightning", __name__)
    return found


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # Derived from both, because each package's Trainer accepts only its own callbacks.
    Callback = type("Callback", tuple(package.Callback for package in _packages()), {})

# After Lightning, which brings torchmetrics along: the error about Lightning comes first if both are missing.
require("lightning", "torchmetrics", purpose=__name__)

from torchmetrics import Metric, MetricCollection

from calibrant.integrations.torchmetrics import (
    CalibrationError,
    ClasswiseCalibrationError,
    NegativeLogLikelihood,
)


@dataclass
class _Run:
    """The state of one run over an evaluation set."""

    loss: Loss | nn.CrossEntropyLoss | None
    metrics: MetricCollection
    index: int  # the loader to learn from and to measure
    own_rows: OwnRows  # counts the rows of a batch that are not repeats
    state: dict[str, Tensor]  # the buffers of the loss at the start of the run
    hook: RemovableHandle | None = None  # listens to the calls of the loss
    calls: int = 0  # how often the loss was called in the current batch
    last: tuple[Tensor, Tensor] | None = None  # logits and target of its last call
    exchanged: bool | None = None  # whether another callback replaces the buffers; None if not known yet
    unmeasured: bool = False  # whether the logits of a test run could not be found


class Calibration(Callback):
    """Lightning callback: adapts a calibrant loss after every validation run of ``fit``, and logs metrics.

    A training program changes in two lines::

        self.loss = calibrant.create_loss("cals-alm", num_classes)  # in the LightningModule
        trainer = Trainer(callbacks=[Calibration()])

    The callback reads logits and targets from the calls of the loss in ``validation_step``. The learned state
    is in the buffers of the loss, and so in every ``.ckpt``, including the one of the same validation run.
    The loss learns nothing from the sanity check, ``trainer.validate`` and ``trainer.test``. Elements that a
    distributed sampler repeats count once.

    It logs ``val/nll``, ``val/ece``, ``val/adaptive_ece`` and ``val/classwise_ece``; in ``trainer.test`` the
    same names begin with ``test/``. If the loss adapted, it also logs ``loss/passes`` and the mean, minimum
    and maximum of its learned state, such as ``loss/multiplier_mean``. For a loss that does not adapt it only
    logs metrics. For `torch.nn.CrossEntropyLoss` it also warns, and cannot log the class-wise error, because
    that loss does not know the number of classes.

    Args:
        loss: the name of the loss in the module (``"loss"``, ``"head.loss"``), if there are several.
        predictions: maps the output of ``validation_step`` (``test_step``) and the batch to logits
            ``(B, K, *S)`` and target ``(B, *S)``. Needed if a step does not call the loss exactly once. A
            function of three arguments without defaults also gets the module.
        metrics: a torchmetrics metric or collection of logits and targets to log instead of the default ones.
            The names are those of the collection, after ``val/`` or ``test/``. An empty collection logs
            nothing.
        dataloader_idx: the validation loader to learn from and to measure; the others are left out. In a
            test, the loader at the same place is measured, or the only one.
        timeout: seconds to wait for the other processes when the loss adapts; by default the process group's
            own time-out.
    """

    def __init__(
        self,
        loss: str | None = None,
        *,
        predictions: Callable[..., tuple[Tensor, Tensor]] | None = None,
        metrics: Metric | MetricCollection | None = None,
        dataloader_idx: int = 0,
        timeout: float | None = None,
    ) -> None:
        if loss is not None and not isinstance(loss, str):
            raise TypeError(
                f"loss must be the name of an attribute of the LightningModule, such as 'loss', got "
                f"{type(loss).__name__}; if there is only one loss, Calibration() finds it"
            )
        if metrics is not None and not isinstance(metrics, Metric | MetricCollection):
            raise TypeError(
                f"metrics must be a torchmetrics Metric or MetricCollection, got {type(metrics).__name__}"
            )
        if dataloader_idx < 0:
            raise ValueError(f"dataloader_idx must be at least 0, got {dataloader_idx}")
        self.loss = loss
        self.predictions = predictions
        # A copy, because the module may use the same metrics elsewhere.
        metrics = None if metrics is None else metrics.clone()
        self.metrics = MetricCollection([metrics]) if isinstance(metrics, Metric) else metrics
        self.dataloader_idx = dataloader_idx
        self.timeout = timeout
        self._run: _Run | None = None
        self._fitted: weakref.ref[Trainer] | None = None
        self._ignored: list[Loss] = []
        self._watch = Watch()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Exclude the loss from FSDP, which would cast its buffers to a lower precision."""
        strategy: Any = trainer.strategy
        if not any(ancestor.__name__ == "FSDPStrategy" for ancestor in type(strategy).__mro__):
            return
        options = strategy.kwargs
        given = options.get("ignored_modules")
        # Finding none is no error yet: the module may create the loss in its own hooks, which run later.
        losses = [loss for _, loss in _losses(pl_module, Loss).values()]
        if losses and options.get("ignored_states") is None and (given is None or given is self._ignored):
            options["ignored_modules"] = self._ignored = losses
        for loss in losses:
            loss.to(strategy.root_device)  # FSDP does not move ignored modules

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the loss, so that an error in its name comes before the first epoch; warn if it is not ours.

        Also warn if a callback seems to choose the best model by the value of a loss that adapts.
        """
        _, loss = self._find(pl_module)
        if trainer.is_global_zero and not isinstance(loss, Loss):
            measured = loss is not None or self.predictions is not None
            unknown = ", and val/classwise_ece is not logged because the number of classes is unknown"
            unknown = unknown if measured and self.metrics is None else ""
            text = (
                f"{type(pl_module).__name__} has no calibrant loss, so nothing adapts{unknown}: give it one, "
                'for example self.loss = calibrant.create_loss("cals-alm", num_classes)'
            )
            if not measured:
                text += "; and nothing is measured: pass predictions= to say where the logits are"
            warn(text)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [other for other in callbacks if isinstance(other, Calibration) and other is not self]
        if loss is not None and any(other._find(pl_module)[1] is loss for other in others):
            raise ValueError("there are two Calibration callbacks for the same loss: remove one of them")
        if trainer.is_global_zero and isinstance(loss, AdaptiveLoss):
            for other in callbacks:
                monitored = getattr(other, "monitor", None)
                if isinstance(monitored, str) and _names_a_loss(monitored):
                    instead = "" if self.metrics is not None else ". Monitor 'val/nll', which is logged here"
                    warn(
                        f"{type(other).__name__} monitors {monitored!r}. If that is the loss of "
                        f"{type(pl_module).__name__}: {MOVES}{instead}"
                    )
        self._fitted = weakref.ref(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the loss would never adapt."""
        _, loss = self._find(pl_module)
        self._watch = Watch()
        if not isinstance(loss, AdaptiveLoss) or not trainer.is_global_zero:
            return
        if not trainer.enable_validation:
            warn(
                f"{type(loss).__name__} adapts to validation data, but this fit has no validation: add a "
                "validation loader and a validation_step, and set limit_val_batches to other than 0"
            )
        elif not getattr(trainer, "fast_dev_run", False):
            self._watch = Watch.begin(loss)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Note that what the loss has learned is used."""
        self._watch.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the loss did not do its work."""
        loss = self._find(pl_module)[1]
        if isinstance(loss, Loss):
            self._watch.end(loss, "val_check_interval and check_val_every_n_epoch")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to listen to the calls of the loss."""
        self.teardown()
        module, loss = self._find(pl_module)
        batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        index = self.dataloader_idx
        if trainer.testing and len(batches) == 1:
            index = 0
        if index >= len(batches):
            raise ValueError(
                f"Calibration(dataloader_idx={index}): there is no such loader, only 0 to {len(batches) - 1}"
            )
        if module is None and self.predictions is None:
            if trainer.state.fn != "fit" and trainer.is_global_zero:  # on_fit_start has said it for a fit
                warn(
                    f"nothing is measured, because {type(pl_module).__name__} has no calibrant loss: pass "
                    "predictions= to say where the logits are"
                )
            return
        if isinstance(loss, Loss):
            loss.forget()
        metrics = _default_metrics(loss) if self.metrics is None else self.metrics
        metrics.reset()
        metrics = metrics.to(trainer.strategy.root_device)
        buffers = [] if loss is None else loss.named_buffers()
        state = {name: value.clone() for name, value in buffers}
        own_rows = own_rows_in(self._loader(trainer, index))
        self._run = run = _Run(loss, metrics, index, own_rows, state)
        if self.predictions is None and module is not None:
            run.hook = module.register_forward_hook(self._listen, with_kwargs=True)

    on_test_start = on_validation_start

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Count the calls of the loss anew for each batch."""
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
        """Let the loss and the metrics observe the batch."""
        run = self._run
        if run is None or dataloader_idx != run.index or run.unmeasured:
            return
        if self.predictions is None:
            problem = _problem(run.calls, "test_step" if trainer.testing else "validation_step")
            if problem is not None:
                if not trainer.testing:
                    raise RuntimeError(problem)
                run.unmeasured = True  # a test may work in its own way, so this is no error
                if trainer.is_global_zero:
                    warn(f"no metrics in this test: {problem}")
                return
            assert run.last is not None
            logits, target = run.last
        else:
            binary = isinstance(run.loss, Loss) and run.loss.binary
            given = (outputs, batch, pl_module) if _needs_three(self.predictions) else (outputs, batch)
            logits, target = _pair(self.predictions(*given), binary)
        run.last = None
        if trainer.sanity_checking:
            return
        keep = run.own_rows(len(logits))
        logits, target = logits[:keep].detach(), target[:keep]
        if trainer.state.fn == "fit" and isinstance(run.loss, Loss):
            with _own_state(run, run.loss):
                run.loss.observe(logits, target)
        if keep:
            run.metrics.update(logits, target)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adapt before any checkpoint of this run is written, and log the metrics."""
        run = self._run
        if run is None:
            return
        figures: dict[str, Any] = {}
        if not trainer.sanity_checking:
            if trainer.state.fn == "fit" and isinstance(run.loss, AdaptiveLoss):
                if not _same(run, run.loss):
                    raise RuntimeError(
                        "the state of the loss is not its own at the end of validation: a callback that "
                        "averages weights has replaced it. To let that callback restore the state first, put "
                        "Calibration after it in Trainer(callbacks=[...])"
                    )
                # First, because it is the only collective here with a time-out.
                run.loss.adapt(timeout=self.timeout)
                self._watch.waits = False
                figures |= {f"loss/{name}": value for name, value in learned_figures(run.loss).items()}
            if not run.unmeasured:
                stage = "test" if trainer.testing else "val"
                figures |= {f"{stage}/{name}": value for name, value in run.metrics.compute().items()}
        self.teardown()
        for name, value in figures.items():
            # The values are equal in all processes; without sync_dist Lightning would warn all the same.
            pl_module.log(name, value, sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    def teardown(self, *_: Any, **__: Any) -> None:
        """Discard an interrupted evaluation, and remove the hook from the module."""
        run, self._run = self._run, None
        if run is not None:
            if run.hook is not None:
                run.hook.remove()
            if isinstance(run.loss, Loss):
                run.loss.forget()
            run.metrics.reset()

    on_exception = teardown

    def _listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if self._run is not None:
            names = ("logits", "input", "target")  # torch calls logits "input"
            logits, target = (*args, *(kwargs[name] for name in names if name in kwargs))
            self._run.calls += 1
            self._run.last = logits, target

    def _find(self, pl_module: nn.Module) -> tuple[nn.Module, Loss | nn.CrossEntropyLoss] | tuple[None, None]:
        """The loss as it is called, compiled or not, and the loss itself; None if there is no loss."""
        found, kind = _losses(pl_module, Loss), type(pl_module).__name__
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
            others = list(_losses(pl_module, nn.CrossEntropyLoss).values())
            return others[0] if len(others) == 1 else (None, None)
        raise ValueError(
            f"{kind} has several calibrant losses ({', '.join(found)}): choose the one to adapt, for example "
            f"Calibration(loss={next(iter(found))!r})"
        )

    def _loader(self, trainer: Trainer, index: int) -> object:
        # After a fit, Lightning's val_dataloaders remain those of the fit, even while others are validated.
        if trainer.state.fn == "validate" and self._fitted is not None and self._fitted() is trainer:
            if trainer.world_size > 1 and trainer.is_global_zero:
                warn(
                    "elements that the distributed sampler of the validation loader repeats count twice in "
                    "these metrics, because this Trainer was used for fit before: validate with a new Trainer"
                )
            return None
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        flat = _packages()[0].utilities.CombinedLoader(loaders).flattened
        return flat[index] if index < len(flat) else None


def _losses(module: nn.Module, kind: type[Kind]) -> dict[str, tuple[nn.Module, Kind]]:
    """For each name in the module: the loss as it is called, compiled or not, and the loss itself."""
    found: dict[str, tuple[nn.Module, Kind]] = {}
    for name, part in module.named_modules():
        loss = uncompiled(part)
        if isinstance(loss, kind) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = part, loss
    return found


def _names_a_loss(monitored: str) -> bool:
    """Whether a monitored figure is called a loss, and is none of those that the callback logs.

    >>> [_names_a_loss(name) for name in ("val_loss", "val/loss", "Loss", "loss/multiplier_mean", "val/nll")]
    [True, True, True, False, False]
    """
    return "loss" in monitored.lower() and not monitored.startswith("loss/")


def _default_metrics(loss: Loss | nn.CrossEntropyLoss | None) -> MetricCollection:
    options = {"ignore_index": -100 if loss is None else loss.ignore_index}
    binary = isinstance(loss, Loss) and loss.binary
    kinds = ("ece", "adaptive_ece")
    metrics: dict[str, Metric] = {"nll": NegativeLogLikelihood(binary=binary, **options)}
    metrics |= {kind: CalibrationError(kind, binary=binary, **options) for kind in kinds}
    if isinstance(loss, Loss) and not binary:  # a loss of torch does not know the number of classes
        metrics["classwise_ece"] = ClasswiseCalibrationError(loss.num_classes, **options)
    return MetricCollection(dict(metrics))


def _needs_three(function: Callable[..., Any]) -> bool:
    """Whether a function has three positional parameters without a default."""
    parameters = signature(function).parameters.values()
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is Parameter.empty for each in parameters) == 3


def _problem(calls: int, step: str) -> str | None:
    """An error text if the loss was not called exactly once in a batch."""
    if calls == 1:
        return None
    found = "did not call the loss" if calls == 0 else f"called the loss {calls} times for one batch"
    return (
        f"{step} {found}, so the logits to learn from are not known: call the loss once, "
        "self.loss(logits, target), or tell the callback where the logits are, "
        "Calibration(predictions=lambda outputs, batch: (outputs['logits'], batch[1]))"
    )


def _pair(found: Any, binary: bool) -> tuple[Tensor, Tensor]:
    kinds = [type(part).__name__ for part in found] if isinstance(found, tuple | list) else None
    if kinds is not None and len(kinds) == 2 and all(isinstance(part, Tensor) for part in found):
        if found[0].ndim < 2 - binary:
            raise ValueError(
                "predictions(outputs, batch) must return logits of shape (B, K, *S) first, got shape "
                f"{tuple(found[0].shape)}"
            )
        return found[0], found[1]
    got = type(found).__name__ + ("" if kinds is None else f" of {', '.join(kinds) or 'nothing'}")
    raise TypeError(f"predictions(outputs, batch) must return two tensors, logits and target; got {got}")


def _same(run: _Run, loss: Loss) -> bool:
    """Whether the loss has the state of the start of the run, which is the state for training."""
    return all(torch.equal(value, run.state[name]) for name, value in loss.named_buffers())


@contextmanager
def _own_state(run: _Run, loss: Loss) -> Iterator[None]:
    """Give the loss its own state back, if a callback averages the weights of the module for this run."""
    if run.exchanged is None:
        run.exchanged = not _same(run, loss)
    buffers = dict(loss.named_buffers()) if run.exchanged else {}
    averaged = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.copy_(run.state[name])
        yield
    finally:
        for name, buffer in buffers.items():
            buffer.copy_(averaged[name])
