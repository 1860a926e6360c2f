"""The training loop, on Lightning Fabric: one process or many, CPU or GPU, killed and resumed."""

from __future__ import annotations

import json
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision, Precision
from lightning_fabric.strategies.single_device import SingleDeviceStrategy
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant.atomic import replace_file
from calibrant.calibrators import Temperature
from calibrant.distributed import gather, together
from calibrant.evaluation import look_like_probabilities
from calibrant.histogram import ConfidenceHistogram
from calibrant.layout import arrange
from calibrant.losses import AdaptiveLoss, Loss
from calibrant.options import RecipeError
from calibrant.predictions import write_predictions
from calibrant.statistics import Statistics, sum_dtype
from calibrant.training import TrainingError, checkpoint
from calibrant.training.batches import (
    Batch,
    evaluation_batches,
    on_device,
    steps_per_epoch,
    training_batches,
)
from calibrant.training.data import DataSets, Inputs, Split, load_data
from calibrant.training.display import Display
from calibrant.training.folder import (
    CHECKPOINTS,
    LEARNED,
    LOSS,
    RECIPE,
    RESULT,
    STORED,
    WEIGHTS,
    as_written,
    check_data,
    check_folder,
    in_order,
    is_finished,
    result_of,
    save_weights,
)
from calibrant.training.logs import Logs
from calibrant.training.models import create_model
from calibrant.training.optimization import (
    OPTIMIZERS,
    SCHEDULES,
    RunningAverage,
    load_moments,
    make_recordable,
    set_rates,
)
from calibrant.training.recipe import Recipe
from calibrant.training.step import Recorded, Step, check_classes

T = TypeVar("T")

_HIGHER_IS_BETTER = {"accuracy": True, "nll": False, "ece": False, "nll-after-temperature": False}


@dataclass(frozen=True, eq=False)
class _Validation(Statistics):
    """What a validation pass is summed up in.

    Attributes:
        nll: summed negative log-likelihood.
        count: elements in each cell of the confidence histogram.
        confidence: summed confidence in each cell.
        correct: correct elements in each cell.
    """

    nll: Tensor
    count: Tensor
    confidence: Tensor
    correct: Tensor

    @classmethod
    def of(cls, logits: Tensor, target: Tensor, ignore_index: int) -> _Validation:
        elements = arrange(logits, target, num_classes=logits.shape[1], ignore_index=ignore_index, soft=False)
        histogram = ConfidenceHistogram.of(elements)
        nll = F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
        total = nll.sum(dtype=sum_dtype(logits.device))
        return cls(histogram.samples, total, *histogram.tensors()[1:])

    def figures(self) -> dict[str, float]:
        """Accuracy, NLL and ECE."""
        samples = float(self.samples)
        if samples == 0:
            raise TrainingError("the validation data have no element that is not ignored")
        histogram = ConfidenceHistogram(self.samples, self.count, self.confidence, self.correct)
        bins = histogram.equal_width(15)
        return {
            "accuracy": float(self.correct.sum()) / samples,
            "nll": float(self.nll) / samples,
            "ece": float((bins.confidence - bins.correct).abs().sum()) / samples,
        }


def make_fabric(
    recipe: Recipe, *, accelerator: str = "auto", devices: int | str = "auto", nodes: int = 1
) -> Fabric:
    """Fabric for a recipe: what torchrun started, where it did, or else as many devices as asked for."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        devices, nodes = local, int(os.environ["WORLD_SIZE"]) // local
    if devices == "auto" and (accelerator == "cpu" or not torch.cuda.is_available()):
        devices = 1
    several = nodes > 1 or (isinstance(devices, int) and devices > 1)
    if isinstance(devices, int):
        _check_shares(recipe, devices * nodes)
    precision = recipe.precision
    if precision == "auto":
        gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        made_for_it = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16-mixed" if made_for_it else "32-true"
    try:
        return Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            precision=precision,  # type: ignore[arg-type]
            strategy="ddp" if several else "auto",
        )
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"cannot set up training: {' '.join(str(error).split())}") from error


def _check_shares(recipe: Recipe, processes: int) -> None:
    if recipe.batch_size % processes:
        raise RecipeError(
            f"batch_size {recipe.batch_size} cannot be shared among {processes} processes equally; "
            f"{recipe.batch_size // processes * processes or processes} can"
        )


def train(
    recipe: Recipe,
    output: str | Path,
    *,
    data_root: str | Path | None = None,
    data: DataSets | None = None,
    fabric: Fabric | None = None,
    progress: bool = False,
) -> Path:
    """Train what a recipe says, or go on where an earlier call was stopped.

    Whenever the process is killed, the same call goes on from the last checkpoint, and on a CPU ends
    with the very weights of a run that was left alone.

    Args:
        recipe: what to train.
        output: the run's folder, made if need be. A finished run is left as it is.
        data_root: where the data sets' files are.
        data: the recipe's data, where they have been loaded already.
        fabric: of processes that were launched already; by default one process on the best device.
        progress: whether to show it.

    Returns:
        The folder, with ``recipe.toml``, ``model.safetensors``, ``loss.safetensors``, logs, checkpoints,
        ``validation.npz`` and ``test.npz`` with logits and labels (where they take less than 1 GiB), and
        ``result.json``, which is written last.

    Raises:
        RecipeError: the recipe cannot be followed, or the folder holds a run of another one, or of other
            data. (Of a finished run, data are compared if they are given.)
        TrainingError: the loss became infinite.
        OSError: missing data, or a disk that cannot be written to; what was saved stays.

    >>> from tempfile import TemporaryDirectory
    >>> recipe = Recipe.load("digits-lt").override(["epochs=1", "loss=cals-alm"])
    >>> with TemporaryDirectory() as folder:
    ...     [path.name for path in sorted(train(recipe, folder).glob("*.npz"))]
    ['test.npz', 'validation.npz']
    """
    folder = Path(output)
    if fabric is None:
        fabric = make_fabric(recipe)
        fabric.launch()
    together(lambda: check_folder(folder, recipe), "checking the output folder")
    if agreed("whether the run is finished", is_finished(folder)):
        if data is not None:
            check_data(folder, result_of(folder).get("data"), data.fingerprint)
        return folder
    with ExitStack() as stack:
        display = stack.enter_context(Display(recipe, shown=progress and fabric.is_global_zero))
        if data is None:
            display.message("reading the data")
            data = together(lambda: load_data(recipe.data, data_root), "reading the data")
        torch.manual_seed(recipe.seed)
        random.seed(recipe.seed)
        training = _Training(recipe, data, fabric, folder, display)
        if fabric.is_global_zero:  # not before: a recipe that cannot be followed leaves no folder behind
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / RECIPE, recipe.to_toml().encode())
            training.logs = stack.enter_context(Logs(folder))
        if fabric.device.type == "cuda":
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = True
        stack.enter_context(training.writer)
        training.run()
    fabric.barrier()
    return folder


def check_begun(folder: Path, recipe: Recipe, data: DataSets) -> None:
    """See that a folder is new, or that the run in it, finished or not, is of this recipe and these data."""
    check_folder(folder, recipe)
    kept: Mapping[str, Any] = {}
    if is_finished(folder):
        kept = result_of(folder)
    else:
        with suppress(ValueError, FileNotFoundError):  # damage is for the run itself to mend and speak of
            kept = checkpoint.load(folder / CHECKPOINTS / checkpoint.LAST)
    check_data(folder, kept.get("data"), data.fingerprint)


def alone_on_gpu(fabric: Fabric) -> bool:
    """Whether there is one process, on a GPU."""
    return isinstance(fabric.strategy, SingleDeviceStrategy) and fabric.device.type == "cuda"


def agreed(what: str, value: T) -> T:
    """The value, if every process has the same one; else the machines do not share the output folder."""
    values = gather(value)
    if any(each != value for each in values):
        raise TrainingError(
            f"the processes do not agree on {what} ({values}): the output folder must be one that all see"
        )
    return value


class _Training:
    """The parts of a run, and how they move."""

    def __init__(
        self,
        recipe: Recipe,
        data: DataSets,
        fabric: Fabric,
        folder: Path,
        display: Display,
    ) -> None:
        self.recipe, self.data, self.fabric, self.folder = recipe, data, fabric, folder
        self.display, self.fingerprint = display, data.fingerprint
        self.logs: Logs | None = None
        _check_shares(recipe, fabric.world_size)
        if len(data.train) < fabric.world_size or len(data.validation) == 0:
            raise RecipeError(
                f"data {recipe.data.name!r} have {len(data.train)} training and {len(data.validation)} "
                f"validation elements; expected some of both, and to train with at least one for each "
                f"process, of which there are {fabric.world_size}"
            )
        if data.num_classes < 2:
            raise RecipeError(
                f"data {recipe.data.name!r} have the single class {data.class_names[0]!r}; expected two "
                "or more"
            )
        self.batch_size = min(recipe.batch_size, len(data.train) // fabric.world_size * fabric.world_size)
        self.steps = steps_per_epoch(len(data.train), self.batch_size, self._drop_last)
        self.network = self._create_network()
        try:
            optimizer = OPTIMIZERS[recipe.optimizer.name](self.network, **recipe.optimizer.options)
        except ValueError as error:
            raise RecipeError(f"optimizer {recipe.optimizer}: {error}") from None
        self.rates = self.learning_rates = [group["lr"] for group in optimizer.param_groups]
        alone = alone_on_gpu(fabric)
        scaled = getattr(fabric.strategy.precision, "scaler", None) is not None
        recorded = alone and recipe.record and not scaled
        if alone:
            self.data = on_device(data, fabric.device)
        if recorded:
            make_recordable(optimizer, fabric.device)
        wrapped = cast(nn.Module, torch.compile(self.network)) if recipe.compile else self.network
        self.model, self.optimizer = fabric.setup(wrapped, optimizer)
        self.loss = recipe.create_loss(data.num_classes, ignore_index=data.ignore_index).to(fabric.device)
        self.averaged = RunningAverage(self.network, recipe.average) if recipe.average else None
        self.epoch, self.step = 0, 0  # complete epochs, and batches of the one that has begun
        self.total_loss = torch.zeros((), device=fabric.device, dtype=sum_dtype(fabric.device))
        self.history: list[dict[str, float]] = []
        self.learned: dict[str, list[Tensor]] = {}
        self.best = math.nan
        self.writer = checkpoint.Writer(folder / CHECKPOINTS, background=alone)
        self.take_step: Callable[[Inputs, Tensor], None] = Step(
            recipe, data, fabric, self.model, self.optimizer, self.loss, self.averaged, self.total_loss
        )
        if recorded:
            self.take_step = Recorded(self.take_step, self.batch_size, display.note, self.writer.wait)
        elif alone and recipe.record:
            display.note(f"{recipe.precision} cannot be recorded as a CUDA graph; bf16-mixed is faster")
        if fabric.global_rank:  # the weights were drawn alike, but dropout should not be
            torch.manual_seed(recipe.seed + (fabric.global_rank << 32))
            random.seed(recipe.seed + (fabric.global_rank << 32))

    def _create_network(self) -> nn.Module:
        """The model, tried on one element so that what does not fit is said before anything is trained."""
        choice, data = self.recipe.model, self.data
        try:
            network = create_model(choice.name, data.num_classes, data.about, **choice.options)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"model {choice}: {error}") from error
        inputs, _ = data.validation.batch(torch.zeros(1, dtype=torch.long))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                logits = network.eval()(inputs)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else sorted(inputs)
                first = str(error).strip().partition("\n")[0]
                raise RecipeError(
                    f"model {choice} does not take an input of these data, {shape}: {first}"
                ) from error
            check_classes(logits, self.recipe, data)
            if look_like_probabilities(logits):
                warnings.warn(
                    f"model {choice} gives numbers in [0, 1] that add up to 1, as probabilities do; losses "
                    "take logits: leave its softmax out",
                    stacklevel=2,
                )
            gpu = self.fabric.device.type == "cuda"  # whose convolutions are made for that
            self.channels_last = gpu and _lay_channels_last(network, inputs)
        return network.to(self.fabric.device).train()

    @property
    def _drop_last(self) -> bool:
        # Processes with empty batches could not take part in a step.
        return self.recipe.drop_last or len(self.data.train) % self.batch_size < self.fabric.world_size

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are validated, adapted to and kept."""
        return self.network if self.averaged is None else self.averaged.module

    # ---------------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Train to the end, from wherever the last checkpoint was."""
        self._resume()
        while self.epoch < self.recipe.epochs:
            self._train_epoch()
        self._finish()

    def _train_epoch(self) -> None:
        recipe, fabric = self.recipe, self.fabric
        started = time.perf_counter()
        self.display.start_epoch(self.epoch, self.steps, self.step)
        batches = training_batches(
            self.data.train,
            seed=recipe.seed,
            epoch=self.epoch,
            batch_size=self.batch_size,
            drop_last=self._drop_last,
            first=self.step,
            rank=fabric.global_rank,
            processes=fabric.world_size,
            workers=recipe.workers,
            pinned=fabric.device.type == "cuda",
        )
        every = self._adapt_every()
        self.model.train()
        for batch in batches:
            self._train_step(self._on_device(batch))
            self.step += 1
            if every and (self.epoch * self.steps + self.step) % every == 0:
                self._mean_loss()
                self._validate(adapt=True)
                self.model.train()
            last = self.step == self.steps
            if recipe.checkpoint_batches and self.step % recipe.checkpoint_batches == 0 and not last:
                self._mean_loss()
                self._save()
            self.display.step(self.total_loss, self.step)
        self._end_epoch(started, adapt=every == 0 and isinstance(self.loss, AdaptiveLoss))

    def _adapt_every(self) -> int:
        """After how many batches the loss adapts in this epoch; 0 for at its end, or not at all."""
        if not isinstance(self.loss, AdaptiveLoss):
            return 0
        return [every for start, every in self.recipe.adaptation if start <= self.epoch][-1]

    def _train_step(self, batch: Batch) -> None:
        epoch = self.epoch + self.step / self.steps
        schedule = SCHEDULES[self.recipe.schedule.name]
        factor = schedule(epoch, self.recipe.epochs, **self.recipe.schedule.options)
        self.rates = [rate * factor for rate in self.learning_rates]
        set_rates(self.optimizer, self.rates)
        self.take_step(*batch)

    def _mean_loss(self) -> float:
        """The loss over the batches of this epoch and all processes; an error where training has diverged.

        What has diverged must not become a checkpoint: no resumed run could be saved from it. The weights
        are looked at too, for a step spoils them before any loss shows it.
        """
        total = self.total_loss.clone()
        if self.fabric.world_size > 1:
            dist.all_reduce(total)
        mean = float(total) / max(1, self.step) / self.fabric.world_size
        if not math.isfinite(mean):
            raise self._diverged(f"the training loss became {mean}")
        weights = [weight.detach() for weight in self.network.parameters() if weight.numel()]
        if not torch.stack(torch._foreach_norm(weights, math.inf)).isfinite().all():
            raise self._diverged("weights became infinite or NaN")
        return mean

    def _diverged(self, what: str) -> TrainingError:
        saved = any(self.writer.folder.glob("*"))
        kept = "; the last checkpoint is from before it" if saved else ""
        return TrainingError(
            f"{what} in epoch {self.epoch + 1}{kept}. A lower optimizer.lr, or a gradient_clip, may help"
        )

    def _end_epoch(self, started: float, *, adapt: bool) -> None:
        mean_loss = self._mean_loss()
        figures = self._validate(adapt=adapt, select=self.recipe.select)
        row = {
            "epoch": self.epoch + 1,
            "lr": self.rates[0],
            "train_loss": mean_loss,
            **{f"validation_{name.replace('-', '_')}": value for name, value in figures.items()},
            **_state_of(self.loss),
            "seconds": time.perf_counter() - started,
        }
        self.history.append(row)
        for name, buffer in self.loss.learned().items():
            self.learned.setdefault(name, []).append(buffer.detach().cpu().clone())
        self.epoch, self.step = self.epoch + 1, 0
        self.total_loss.zero_()
        best = self._keep_best(figures)
        if self.logs is not None:  # first: a run killed after the checkpoint would never write the last row
            self.logs.write(self.history, self.loss)
        self._save(best)
        self.display.end_epoch(row)

    def _keep_best(self, figures: Mapping[str, float]) -> dict[str, Any] | None:
        """The weights to keep, where they are better than all before."""
        if self.recipe.select == "last":
            return None
        value = figures[self.recipe.select]
        higher = _HIGHER_IS_BETTER[self.recipe.select]
        if not (math.isnan(self.best) or (value > self.best if higher else value < self.best)):
            return None
        self.best = value
        return {"epoch": self.epoch, "value": value, "model": self.evaluated.state_dict()}

    # ------------------------------------------------------------------------------------------- validation

    @torch.no_grad()
    def _validate(self, *, adapt: bool, select: str = "last") -> dict[str, float]:
        """Figures on the validation data, from which the loss learns if asked to."""
        self.loss.forget()
        self._share_buffers()
        sums: _Validation | None = None
        kept: list[tuple[Tensor, Tensor]] = []
        for logits, target in self.predictions(self.data.validation):
            if adapt:
                self.loss.observe(logits, target)
            found = _Validation.of(logits, target, self.data.ignore_index)
            sums = found if sums is None else sums + found
            if select == "nll-after-temperature":
                if not kept and logits[0].numel() * 4 * len(self.data.validation) > STORED:
                    raise RecipeError(
                        "select = 'nll-after-temperature' keeps the validation logits, which take more than "
                        f"{STORED >> 30} GiB here; choose 'nll'"
                    )
                kept.append((logits.cpu(), target.cpu()))
        if sums is None:  # a process without a share
            empty = torch.zeros(0, self.data.num_classes, device=self.fabric.device)
            sums = _Validation.of(empty, torch.zeros(0, dtype=torch.long, device=empty.device), -100)
        figures = sums.all_reduce().figures()
        if not math.isfinite(figures["nll"]):
            raise self._diverged("the NLL of the validation data became infinite or NaN")
        if adapt:
            self.loss.adapt()
        if select == "nll-after-temperature":
            gathered = [pair for share in gather(kept) for pair in share]
            calibrator = Temperature().fit_batches(gathered, ignore_index=self.data.ignore_index)
            total = count = 0.0
            for logits, target in gathered:
                found = _Validation.of(calibrator(logits), target, self.data.ignore_index)
                total, count = total + float(found.nll), count + float(found.samples)
            figures[select] = total / count
        return figures

    @torch.no_grad()
    def predictions(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of a part: logits and targets, batch by batch, on the device."""
        network = self.evaluated
        network.eval()
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision):  # only for steps: it would round the confidences
            precision = Precision()
        for batch in evaluation_batches(
            split,
            batch_size=self._evaluation_batch_size,
            rank=self.fabric.global_rank,
            processes=self.fabric.world_size,
            workers=self.recipe.workers,
            pinned=self.fabric.device.type == "cuda",
        ):
            inputs, target = self._on_device(batch)
            # Not the wrapped model: its calls wait for other processes, whose shares may have fewer batches.
            with precision.forward_context():
                logits = network(precision.convert_input(inputs))
            yield logits.float(), target

    def _share_buffers(self) -> None:
        """Give all processes the first one's statistics of batches, which are kept with the weights."""
        if self.fabric.world_size > 1:
            for buffer in self.evaluated.buffers():
                dist.broadcast(buffer, 0)

    @property
    def _evaluation_batch_size(self) -> int:
        return max(1, (self.recipe.evaluation_batch_size or self.batch_size) // self.fabric.world_size)

    def _on_device(self, batch: Batch) -> Batch:
        inputs, target = self.fabric.to_device(batch)
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, target

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self, best: dict[str, Any] | None = None) -> None:
        shares = gather((_random_state(), self.total_loss.cpu()))
        state = {
            "recipe": self.recipe.to_toml(),
            "data": self.fingerprint,
            "epoch": self.epoch,
            "step": self.step,
            "total_loss": [total_loss for _, total_loss in shares],
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.optimizer.state_dict()["state"],
            "precision": self.fabric.strategy.precision.state_dict(),
            "averaged": None if self.averaged is None else self.averaged.module.state_dict(),
            "loss": self.loss.state_dict(),
            "randomness": [randomness for randomness, _ in shares],
            "history": self.history,
            "learned": self.learned,
            "best": self.best,
        }
        # A full disk must not leave the others waiting.
        write = self.fabric.is_global_zero
        together(lambda: self.writer.write(state, best) if write else None, "writing a checkpoint")

    def _resume(self) -> None:
        state = checkpoint.load_last(self.writer.folder)
        if state is None:
            agreed("how far the run has come", (self.epoch, self.step))
            return
        check_data(self.folder, state.get("data"), self.fingerprint)
        self.network.load_state_dict(state["model"])
        load_moments(self.optimizer.optimizer, state["optimizer"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        self.loss.load_state_dict(state["loss"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.history, self.learned, self.best = state["history"], state["learned"], state["best"]
        rank, processes = self.fabric.global_rank, self.fabric.world_size
        if len(state["randomness"]) == processes:
            _restore_random_state(state["randomness"][rank])
            self.total_loss.copy_(state["total_loss"][rank])
        elif rank == 0:  # with more or fewer processes than before, one takes the losses of them all
            self.total_loss.copy_(torch.stack(state["total_loss"]).mean() * processes)
        agreed("how far the run has come", (self.epoch, self.step))
        self.display.resumed(self.epoch, self.step)

    # ---------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Keep the selected weights and what they predict."""
        self.writer.wait()
        epoch = self.epoch
        if self.recipe.select != "last":
            best = checkpoint.load_best(self.writer.folder)
            if best is None:
                raise TrainingError(
                    f"the best weights are damaged; delete the folder {self.folder} and train anew"
                )
            self.evaluated.load_state_dict(best["model"])
            epoch = best["epoch"]
        if self.fabric.is_global_zero:
            save_weights(self.evaluated, self.folder / WEIGHTS)
            save_weights(self.loss, self.folder / LOSS)
            if self.learned:
                over_epochs = {name: torch.stack(values) for name, values in self.learned.items()}
                replace_file(self.folder / LEARNED, save_tensors(over_epochs))
        for name in ("validation", "test"):
            split = getattr(self.data, name)
            if len(split):
                self.display.message(f"predicting {name}")
                self._store(split, self.folder / f"{name}.npz")
        if self.fabric.is_global_zero:
            constants = self.data.test.normalisation
            result = {
                "format": 1,
                "epoch": epoch,
                "epochs": self.epoch,
                "data": self.fingerprint,
                "normalisation": constants and {"mean": constants.mean, "std": constants.std},
                "history": self.history,
            }
            replace_file(self.folder / RESULT, (json.dumps(result, indent=1) + "\n").encode())

    def _store(self, split: Split, path: Path) -> None:
        """Write the predictions for a part, where they are not too many."""
        shares: list[tuple[Tensor, Tensor]] = []
        for logits, target in self.predictions(split):
            if not shares and logits[0].numel() * 4 * len(split) > STORED:
                return  # of every process alike; `calibrant.training.runs` predicts them anew
            shares.append((logits.cpu(), as_written(target.cpu(), self.data.ignore_index)))
        gathered = gather(shares)
        if self.fabric.is_global_zero:
            logits, labels = in_order(gathered, len(split))
            write_predictions(path, [(logits, labels)], len(split), self.data.class_names)


def _lay_channels_last(network: nn.Module, inputs: Inputs) -> bool:
    """Move a network's channels last in memory, and say so, if it takes images that lie so too."""
    weights = [*network.parameters(), *network.buffers()]
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or any(each.ndim > 4 for each in weights):
        return False
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        network(inputs.contiguous(memory_format=torch.channels_last))
    except Exception:  # it takes them as they were: only a layout that it relies on can be the reason
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False
    return True


def _state_of(loss: Loss) -> dict[str, float]:
    """What it has learned in a few numbers."""
    return {
        f"{name}_{what}": float(value)
        for name, buffer in loss.learned().items()
        for what, value in (("mean", buffer.mean()), ("min", buffer.min()), ("max", buffer.max()))
    }


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate()[1])}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"]), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
