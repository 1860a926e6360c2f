"""The training loop, on Lightning Fabric: one process or many, CPU or GPU, resumable at any time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save as save_tensors
from torch import Tensor

from calibrant.atomic import replace_file
from calibrant.distributed import agree, gather, readable_errors, together
from calibrant.evaluation.criterion import Criterion
from calibrant.histogram import Bins
from calibrant.losses import AdaptiveLoss
from calibrant.losses.adaptation import advise
from calibrant.losses.adaptive import summarised
from calibrant.options import RecipeError
from calibrant.statistics import sum_dtype
from calibrant.training import DivergedError, TrainingError, checkpoint, run_folder
from calibrant.training.batches import Batch, training_batches
from calibrant.training.bins import epoch_bins
from calibrant.training.bundle import ensure_bundle
from calibrant.training.calibration import check_method
from calibrant.training.compilation import compile_network, remember_compiled, should_compile
from calibrant.training.data import DataSets, Inputs, Split, load_data, shuffled
from calibrant.training.display import Display
from calibrant.training.fabric import Fabric
from calibrant.training.lock import FolderLock
from calibrant.training.logs import Logs
from calibrant.training.optimization import SCHEDULES, load_moments, set_rates
from calibrant.training.recipe import Recipe
from calibrant.training.run_lock import check_free, lock_of, wait_for
from calibrant.training.runs import Run
from calibrant.training.setup import Parts, is_single_gpu, launched, set_up, threads_that_suit
from calibrant.training.step import Recorded, Step
from calibrant.training.validation import measure_test, observe_part, store_predictions, validate

StopEarly = Callable[[Sequence[Mapping[str, float]]], bool]
"""A function of the log rows so far that returns whether training ends here."""


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    data_root: str | Path | None = None,
    data: DataSets | None = None,
    fabric: Fabric | None = None,
    progress: bool = False,
    stop_early: StopEarly | None = None,
    calibrate: str | None = None,
) -> Path:
    """Train by a recipe, or resume a run that was stopped.

    If the process is killed, the same call resumes from the last checkpoint. On a CPU it ends with exactly
    the weights of an uninterrupted run.

    Args:
        recipe: the recipe to follow.
        output: the folder of the run, created if needed. A finished run is left unchanged. If another process
            trains the same recipe there, the call waits until it ends.
        data_root: the folder with the files of the data sets.
        data: the data of the recipe, if they are loaded already.
        fabric: a launched Fabric; by default one process on the best device.
        progress: show the progress on the terminal.
        stop_early: called in the first process before every epoch but the first, with the log rows so far. If
            it returns true, training ends there. The run stays unfinished, and a later call continues it.
        calibrate: how to calibrate the bundle, see `calibrant.training.bundle.write_bundle`; None writes no
            bundle.

    Returns:
        The folder. It has ``recipe.toml``, ``model.safetensors``, ``loss.safetensors``, logs, checkpoints,
        ``validation.npz`` and ``test.npz`` with logits and labels (if they take less than 1 GiB), and
        ``result.json``, which is written last; and ``bundle``, with ``calibrate``.

    Raises:
        RecipeError: the recipe cannot be followed, or the folder holds a run of another recipe or of other
            data, or is in use for another recipe. (For a finished run, data are compared only if ``data`` is
            given.)
        ValueError: the processes of the run have different recipes or data, or see different folders.
        TrainingError: training diverged, a checkpoint does not fit the run, or the folder was replaced.
        OtherProcessError: another process of the run has ended.
        OSError: data are missing, or the disk cannot be written to. Saved checkpoints stay.

    Warns:
        AdaptationWarning: at the end of the run, an adaptive loss had no effect or was at its bounds, or it
            adapted only after the last step.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits-lt").override(["epochs=2", "loss=cals-alm"])
    >>> with TemporaryDirectory() as folder:
    ...     [path.name for path in sorted(train(recipe, folder).glob("*.npz"))]
    ['test.npz', 'validation.npz']
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe, got {recipe!r}; Recipe.load(name or path) reads one")
    folder = Path(output)
    if calibrate is not None:
        check_method(calibrate)
    fabric = fabric or launched(recipe)
    with ExitStack() as stack, readable_errors():
        agree({"recipe": recipe.to_toml()})
        together(lambda: check_free(folder, recipe), "checking the output folder")
        if not gather(run_folder.is_finished(folder))[0]:
            lock = lock_of(folder, recipe)
            stack.callback(lock.release)
            wait_for(lock, fabric)
            together(lambda: run_folder.check_folder(folder, recipe), "checking the output folder")
            finished = run_folder.is_finished(folder)  # by another process, meanwhile
            agree({"view of the output folder": "a finished run" if finished else "no finished run"})
            if not finished:
                display = stack.enter_context(Display(recipe, shown=progress and fabric.is_global_zero))
                data = _read(recipe, data, data_root, display)
                loop = Loop(set_up(recipe, data, fabric), folder, display, lock, stop_early)
                # Only now: a recipe that cannot be followed leaves no folder behind.
                if fabric.is_global_zero:
                    replace_file(folder / run_folder.RECIPE, recipe.to_toml().encode())
                    loop.logs = stack.enter_context(closing(Logs(folder)))
                if fabric.device.type == "cuda":
                    stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
                    torch.backends.cudnn.benchmark = True
                stack.enter_context(threads_that_suit(loop.parts))
                stack.enter_context(loop.writer)
                loop.run()
            fabric.barrier()
    if fabric.is_global_zero and (stop_early is None or run_folder.is_finished(folder)):
        run_folder.check_finished(folder, recipe, None if data is None else data.fingerprint)
        if calibrate is not None:
            run = Run(folder, None if data_root is None else Path(data_root), data)
            with Display(recipe, shown=progress) as display:
                ensure_bundle(run, calibrate, display.message)
    return folder


def _read(recipe: Recipe, given: DataSets | None, data_root: str | Path | None, display: Display) -> DataSets:
    """The data, read unless they are given; all processes have the same."""
    if given is None:
        display.message("reading the data")
    data = together(lambda: load_data(recipe.data, data_root) if given is None else given, "reading the data")
    agree({"data": data.fingerprint})
    if given is None:
        display.note(data.in_words)
    return data


def _training_part(parts: Parts) -> Split | None:
    """A random part of the training data to adapt to, if the recipe asks for it."""
    if parts.recipe.adapt_on == "validation" or not isinstance(parts.loss, AdaptiveLoss):
        return None
    train = parts.data.train
    # Epoch -1, so that it is the order of no epoch.
    chosen = shuffled(len(train), parts.recipe.seed, epoch=-1)[: len(parts.data.validation)]
    return train.subset(chosen.sort().values.to(train.device))


class Loop:
    """A training run in progress."""

    def __init__(
        self, parts: Parts, folder: Path, display: Display, lock: FolderLock, stop_early: StopEarly | None
    ) -> None:
        self.parts, self.folder, self.display = parts, folder, display
        self.lock, self.stop_early = lock, stop_early  # the first process holds the lock
        self.logs: Logs | None = None
        # For every file that another run must not use.
        self.origin = {"recipe": parts.recipe.to_toml(), "data": parts.fingerprint}
        self.epoch, self.step = 0, 0  # complete epochs, and the steps taken in the current one
        device = parts.fabric.device
        self.total_loss = torch.zeros((), device=device, dtype=sum_dtype(device))  # the sum over these steps
        self.history: list[dict[str, float]] = []  # a log row for each complete epoch
        self.learned: dict[str, Tensor] = {}  # the state of the loss after each epoch, (epochs, …), by name
        self.bins: dict[str, Tensor] = {}  # after each epoch, (epochs, …), by the names of `epoch_bins`
        self.validation_bins: Bins | None = None  # of the latest validation
        self.adapted_to = _training_part(parts)  # None for the validation data
        self.best = math.nan  # the best value of the recipe's criterion so far
        if parts.recipe.log_test and not len(parts.data.test):
            raise RecipeError(f"log_test needs test data; data {parts.recipe.data.name!r} have none")
        single_gpu = is_single_gpu(parts.fabric)
        self.writer = checkpoint.Writer(folder / run_folder.CHECKPOINTS, background=single_gpu)
        self.rates = parts.learning_rates
        self.plain_step = Step(parts, self.total_loss)
        self.take_step = self._recorded()
        self.compiling_is_open = True
        if single_gpu and parts.recipe.record and not parts.recorded:
            precision = parts.recipe.precision
            display.note(
                f"{precision} with gradient_clip cannot be recorded as a CUDA graph; bf16-mixed is faster"
            )

    def _recorded(self) -> Callable[[Inputs, Tensor], None]:
        """The step, recorded as a CUDA graph after its first calls if that is possible."""
        if not self.parts.recorded:
            return self.plain_step
        return Recorded(self.plain_step, self.parts.batch_size, self.display.note, self.writer.wait)

    def run(self) -> None:
        """Train to the end, from the last checkpoint if there is one; warn if the loss had no effect."""
        self._resume()
        while self.epoch < self.parts.recipe.epochs:
            # Not at the end of an epoch: a process killed between question and answer would not ask again.
            if self._stops_early():
                return
            self._train_epoch()
        self._finish()
        recipe = self.parts.recipe
        late = recipe.epochs == 1 and not 0 < recipe.adaptation[0][1] < self.parts.steps
        settings = "adapt = a number of batches; on the command line --set adapt=2" if late else None
        name = f"{recipe.loss}, seed {recipe.seed}"
        advise(self.parts.loss, name=name, ended=True, too_late=settings)

    def _stops_early(self) -> bool:
        """Whether `stop_early` ends the run here; the first process decides for all."""
        stop = self.stop_early
        if stop is None or self.epoch == 0:
            return False
        first = self.parts.fabric.is_global_zero
        return bool(gather(together(lambda: first and stop(self.history), "deciding on an early end"))[0])

    # ------------------------------------------------------------------------------------------------ epochs

    def _train_epoch(self) -> None:
        parts, recipe, fabric = self.parts, self.parts.recipe, self.parts.fabric
        started = time.perf_counter()
        self.display.start_epoch(self.epoch, parts.steps, self.step)
        batches = training_batches(
            parts.data.train,
            seed=recipe.seed,
            epoch=self.epoch,
            batch_size=parts.batch_size,
            drop_last=parts.drop_last,
            first=self.step,
            rank=fabric.global_rank,
            processes=fabric.world_size,
            workers=recipe.workers,
            pinned=fabric.device.type == "cuda",
        )
        adapt_every = self._adapt_every()
        parts.model.train()
        for number, batch in enumerate(batches):
            moved = parts.to_device(batch)
            if number == 0 and self.compiling_is_open and should_compile(parts, moved, self.history):
                self._compile(moved)
            if number == 0 and self.epoch == 1 and parts.recipe.compile is True:
                remember_compiled(parts, moved)
            self._train_step(moved)
            self.step += 1
            if adapt_every and self.step % adapt_every == 0:
                self._mean_loss()
                if self.adapted_to is None:
                    self._validate(adapt=True)
                else:
                    self._adapt()
                parts.model.train()
            last = self.step == parts.steps
            if recipe.checkpoint_batches and self.step % recipe.checkpoint_batches == 0 and not last:
                self._mean_loss()
                self._save()
            self.display.step(self.total_loss, self.step)
        self._end_epoch(started, adapt=adapt_every == 0 and isinstance(parts.loss, AdaptiveLoss))

    def _adapt_every(self) -> int:
        """The loss adapts after every so many batches of an epoch; 0 for at its end, or never."""
        if not isinstance(self.parts.loss, AdaptiveLoss):
            return 0
        every = [every for start, every in self.parts.recipe.adaptation if start <= self.epoch][-1]
        return min(every, self.parts.steps)

    def _train_step(self, batch: Batch) -> None:
        recipe = self.parts.recipe
        epoch = self.epoch + self.step / self.parts.steps
        factor = SCHEDULES[recipe.schedule.name](epoch, recipe.epochs, **recipe.schedule.options)
        self.rates = [rate * factor for rate in self.parts.learning_rates]
        set_rates(self.parts.optimizer.optimizer, self.rates)
        self.take_step(*batch)

    def _compile(self, batch: Batch) -> None:
        """Compile the network; if that fails, say so once and go on as before."""
        self.compiling_is_open = False
        self.display.message("compiling the network")
        self.take_step = self.plain_step  # frees the memory of the recorded step
        try:
            self.plain_step.compiled = compile_network(self.parts, batch)
        except Exception as error:
            reason = " ".join(str(error).split("\n")[:2]) or type(error).__name__
            self.display.note(f"the network cannot be compiled ({reason}); training goes on without")
        self.take_step = self._recorded()

    def _end_epoch(self, started: float, *, adapt: bool) -> None:
        mean_loss = self._mean_loss()
        figures = self._validate(adapt=adapt, select=self.parts.recipe.select)
        # Apart from the figures that `select` chooses by.
        test, test_bins = measure_test(self.parts) if self.parts.recipe.log_test else ({}, None)
        learned = {name: value.cpu() for name, value in self.parts.loss.learned().items()}
        row = {
            "epoch": self.epoch + 1,
            "lr": self.rates[0],
            "train_loss": mean_loss,
            **{f"validation_{name.replace('-', '_')}": value for name, value in figures.items()},
            **{f"test_{name}": value for name, value in test.items()},
            **{name: float(value) for name, value in summarised(learned).items()},
            "seconds": time.perf_counter() - started,
        }
        self.history.append(row)
        assert self.validation_bins is not None
        confidences = self.plain_step.confidences
        _append(self.learned, learned)
        _append(self.bins, epoch_bins(confidences.pooled(), self.validation_bins, test_bins))
        self.epoch, self.step = self.epoch + 1, 0
        self.total_loss.zero_()
        confidences.sums.zero_()
        best = self._keep_best(figures)
        if self.logs is not None:  # before the checkpoint: a run killed in between writes the row again
            self.lock.check()
            self.logs.write(self.history, learned)
        self._save(best)
        self.display.end_epoch(row, learned)

    def _mean_loss(self) -> float:
        """The mean loss over the steps of this epoch and all processes.

        The weights are checked too: a step can spoil them before any loss shows it. Neither may reach a
        checkpoint, because no resumed run could recover from it.
        """
        total, processes = self.total_loss.clone(), self.parts.fabric.world_size
        if processes > 1:
            dist.all_reduce(total)
        mean = float(total) / max(1, self.step) / processes
        if not math.isfinite(mean):
            raise self._diverged(f"the training loss became {mean}")
        weights = [weight.detach() for weight in self.parts.network.parameters() if weight.numel()]
        if not torch.stack(torch._foreach_norm(weights, math.inf)).isfinite().all():
            raise self._diverged("weights became infinite or NaN")
        return mean

    def _validate(self, *, adapt: bool, select: str = "last") -> dict[str, float]:
        """Figures on the validation data; the loss adapts if asked to."""
        observe = adapt and self.adapted_to is None
        figures, self.validation_bins = validate(self.parts, observe=observe, select=select)
        if not math.isfinite(figures["nll"]):
            raise self._diverged("the NLL of the validation data became infinite or NaN")
        if adapt:
            self._adapt()
        return figures

    def _adapt(self) -> None:
        """Let the loss adapt to what it has observed, or to the part of the training data."""
        if self.adapted_to is not None:
            observe_part(self.parts, self.adapted_to)
        self.parts.loss.adapt()

    def _diverged(self, what: str) -> DivergedError:
        saved = any(self.writer.folder.glob("*"))
        kept = "; the last checkpoint is from before it" if saved else ""
        return DivergedError(
            f"{what} in epoch {self.epoch + 1}{kept}. A lower optimizer.lr, or a gradient_clip, may help"
        )

    def _keep_best(self, figures: Mapping[str, float]) -> dict[str, Any] | None:
        """The weights to save as the best, if they are better than all before."""
        select = self.parts.recipe.select
        if select == "last":
            return None
        value = figures[select]
        better = value > self.best if Criterion.parse(select).higher_is_better else value < self.best
        if not (better or math.isnan(self.best)):
            return None
        self.best = value
        model = self.parts.evaluated.state_dict()
        return {**self.origin, "epoch": self.epoch, "value": value, "model": model}

    # ------------------------------------------------------------------------------------------- checkpoints

    def _save(self, best: dict[str, Any] | None = None) -> None:
        parts = self.parts
        sums = self.plain_step.confidences.sums
        processes = gather((checkpoint.random_state(), self.total_loss.cpu(), sums.cpu()))
        state = {
            **self.origin,
            "epoch": self.epoch,
            "step": self.step,
            "total_loss": [total_loss for _, total_loss, _ in processes],
            "confidences": [confidences for _, _, confidences in processes],
            "model": parts.network.state_dict(),
            "optimizer": parts.optimizer.optimizer.state_dict()["state"],
            "precision": parts.fabric.strategy.precision.state_dict(),
            "averaged": None if parts.averaged is None else parts.averaged.module.state_dict(),
            "loss": parts.loss.state_dict(),
            "randomness": [randomness for randomness, _, _ in processes],
            "history": self.history,
            "learned": self.learned,
            "bins": self.bins,
            "best": self.best,
        }

        def write() -> None:
            if parts.fabric.is_global_zero:
                self.lock.check()
                self.writer.write(state, best)

        # Together: a full disk must not leave the other processes waiting.
        together(write, "writing a checkpoint")

    def _resume(self) -> None:
        state = checkpoint.load_last(self.writer.folder)
        if state is not None:
            with self._fitting("checkpoint", state):
                self._restore(state)
        agree({"view of the checkpoints": f"epoch {self.epoch}, step {self.step}"})
        if state is not None:
            self.display.resumed(self.epoch, self.step)

    @contextmanager
    def _fitting(self, what: str, state: Mapping[str, Any]) -> Iterator[None]:
        """Refuse a state of another run, and turn errors about its content into a readable one."""
        run_folder.check_origin(
            self.folder, run_folder.CHECKPOINTS, state, self.parts.recipe, self.parts.fingerprint
        )
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
            raise TrainingError(
                f"the {what} in {self.writer.folder} does not fit the run ({reason}); delete this folder to "
                "train anew"
            ) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        parts = self.parts
        epoch, step, history = (state[name] for name in ("epoch", "step", "history"))
        learned, bins = state["learned"], state["bins"]
        if type(epoch) is not int or not 0 <= epoch <= parts.recipe.epochs:
            raise ValueError(f"epoch {epoch!r} of {parts.recipe.epochs}")
        if type(step) is not int or not 0 <= step <= parts.steps or (step and epoch == parts.recipe.epochs):
            raise ValueError(f"step {step!r} of {parts.steps} in epoch {epoch}")
        if [row["epoch"] for row in history] != list(range(1, epoch + 1)):
            raise ValueError(f"a history of {len(history)} epochs after {epoch}")
        if any(len(values) != epoch for values in (*learned.values(), *bins.values())):
            raise ValueError(f"a learned state or bins for another number of epochs than {epoch}")
        parts.network.load_state_dict(state["model"])
        load_moments(parts.optimizer.optimizer, state["optimizer"])
        parts.fabric.strategy.precision.load_state_dict(state["precision"])
        if parts.averaged is not None:
            parts.averaged.load_state_dict(state["averaged"])
        parts.loss.load_state_dict(state["loss"])
        self.epoch, self.step = epoch, step
        self.history, self.best = list(history), float(state["best"])
        self.learned = {name: torch.stack(list(values)) for name, values in learned.items()}
        self.bins = dict(bins)
        rank, processes = parts.fabric.global_rank, parts.fabric.world_size
        if len(state["randomness"]) == processes:
            checkpoint.restore_random_state(state["randomness"][rank])
            self.total_loss.copy_(state["total_loss"][rank])
            self.plain_step.confidences.sums.copy_(state["confidences"][rank])
        elif rank == 0:  # with another number of processes, the first one takes the sums of all
            self.total_loss.copy_(torch.stack(state["total_loss"]).mean() * processes)
            self.plain_step.confidences.sums.copy_(torch.stack(state["confidences"]).sum(0))

    # ------------------------------------------------------------------------------------------------ finish

    def _finish(self) -> None:
        """Write the selected weights, their predictions and the result."""
        parts, folder = self.parts, self.folder
        self.writer.wait()
        epoch = self.epoch
        if parts.recipe.select != "last":
            best = checkpoint.load_best(self.writer.folder)
            if best is None:
                raise TrainingError(
                    f"the best weights are damaged; delete the folder {folder} and train again"
                )
            with self._fitting("checkpoint of the best weights", best):
                parts.evaluated.load_state_dict(best["model"])
                epoch = int(best["epoch"])
        files = [run_folder.WEIGHTS, run_folder.LOSS, run_folder.BINS]
        if parts.fabric.is_global_zero:
            self.lock.check()
            run_folder.save_weights(parts.evaluated, folder / run_folder.WEIGHTS)
            run_folder.save_weights(parts.loss, folder / run_folder.LOSS)
            replace_file(folder / run_folder.BINS, save_tensors(self.bins))
            if self.learned:
                replace_file(folder / run_folder.LEARNED, save_tensors(self.learned))
                files.append(run_folder.LEARNED)
        for name in ("validation", "test"):
            split = getattr(parts.data, name)
            if len(split):
                self.display.message(f"predicting {name}")
                if store_predictions(parts, split, folder / f"{name}.npz"):
                    files.append(f"{name}.npz")
        if parts.fabric.is_global_zero:
            constants = parts.data.test.normalisation
            result = {
                "format": run_folder.FORMAT,
                **self.origin,
                "epoch": epoch,
                "epochs": self.epoch,
                "files": {name: run_folder.hash_of(folder / name) for name in files},
                "normalisation": constants and {"mean": constants.mean, "std": constants.std},
                "history": self.history,
            }
            self.lock.check()
            replace_file(folder / run_folder.RESULT, (json.dumps(result, indent=1) + "\n").encode())


def _append(over_epochs: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Add the tensors of an epoch to those of the epochs before it."""
    for name, value in new.items():
        over_epochs[name] = torch.cat([over_epochs.get(name, value[None][:0]), value[None]])
