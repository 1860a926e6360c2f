"""Training on a GPU: recorded steps are the steps of the plain loop, and nothing waits for them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calibrant.losses import LOSSES
from calibrant.training import batches, checkpoint, loop, setup
from calibrant.training.data import DataSets
from calibrant.training.data.augmentation import NORMALISATIONS
from calibrant.training.data.in_memory import ImageSplit
from calibrant.training.display import Display, _DelayedMean
from calibrant.training.fabric import Fabric, MixedPrecision
from calibrant.training.loop import TrainingError, train
from calibrant.training.models.cifar_resnet import StochasticDepth
from calibrant.training.recipe import Recipe
from calibrant.training.runs import Run
from calibrant.training.setup import make_fabric
from calibrant.training.step import Recorded

from .run_folders import assert_close, result, rows, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

IMAGES = [
    "data=cifar10",  # the data are handed over, made up
    "model=cnn[width=8]",
    "batch_size=16",
    "evaluation_batch_size=50",
    "drop_last=false",  # 102 images are six batches and a smaller one
    "epochs=2",
    "optimizer=sgd[lr=0.05,momentum=0.9,nesterov=true]",
    "schedule=cosine[warmup=1]",
    "gradient_clip=0.5",
    "precision=32-true",
]


def recipe_of(*changes: str) -> Recipe:
    return Recipe.load("digits-lt").override([*IMAGES, *changes])


def made_up() -> DataSets:
    """Small images of four classes, told apart by their brightness."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int, augmentation: Any = "none") -> ImageSplit:
        labels = torch.arange(count) % 4
        noise = torch.randint(0, 120, (count, 3, 12, 12), generator=generator)
        pixels = (noise + 30 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
        return ImageSplit(pixels, labels, NORMALISATIONS["cifar10"], augmentation)

    parts = (part(102, "crop-flip"), part(60), part(30))
    return DataSets(*parts, ("a", "b", "c", "d"), {"channels": 3, "image_size": 12})


class Small(nn.Module):
    """A network with dropout, and something that it does on the way.

    Args:
        num_classes: K.
        habit: what: ``none``, ``wait`` for a number, ``stop`` until the device is done, ``view`` images as
            if their channels were the outer axis, or ``drop`` all features of half of the batches.
    """

    def __init__(self, num_classes: int, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(800, num_classes)
        self.gate = StochasticDepth(0.5) if habit == "drop" else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.habit == "wait" and float(images.sum()) == 0.123:
            raise AssertionError
        if self.habit == "stop" and images.is_cuda:
            torch.cuda.synchronize()
        found = self.gate(self.layers(images))
        return self.head(found.view(len(found), -1) if self.habit == "view" else found.flatten(1))


def small(num_classes: int, *, habit: str = "none") -> nn.Module:
    return Small(num_classes, habit)


SMALL = "model=tests.training.test_cuda:small"


@pytest.fixture(autouse=True)
def exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the display was told."""
    found: list[str] = []
    monkeypatch.setattr(Display, "note", lambda self, text: found.append(text))
    return found


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """The steps of the runs, as they were made."""
    found: list[Recorded] = []
    plain = Recorded.__init__

    def noting(self: Recorded, *arguments: Any) -> None:
        found.append(self)
        plain(self, *arguments)

    monkeypatch.setattr(Recorded, "__init__", noting)
    yield found
    found.clear()


def plainly(recipe: Recipe, folder: Path, data: DataSets | None = None, fabric: Fabric | None = None) -> Path:
    """The run of a loop without recordings, with floats for learning rates and batches from the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Recorded", lambda step, *_: step)
        patch.setattr(setup, "recordable", lambda optimizer, device: optimizer)
        patch.setattr(setup, "on_device", lambda data, device: data)
        return train(recipe, folder, data=data or made_up(), fabric=fabric)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="sgd"),
        pytest.param(["average=0.8"], id="average"),
        pytest.param(["accumulate=2", "loss=ce[class_weight=[1,2,3,4]]"], id="accumulated"),
        pytest.param(["loss=cals-alm[margin=0.5]", "adapt=3"], id="adaptive"),
        pytest.param(["loss=adafocal", "adapt=4"], id="adafocal"),
        pytest.param(["optimizer=adam[lr=0.002]", "loss=mbls[margin=1]"], id="adam"),
        pytest.param(["optimizer=adamw[lr=0.002]", "select=nll"], id="adamw"),
        pytest.param([SMALL], id="dropout"),
        pytest.param([f"{SMALL}[habit=drop]"], id="stochastic depth"),
    ],
)
def test_recorded_steps_are_those_of_the_plain_loop(
    changes: list[str], recordings: list[Recorded], said: list[str], tmp_path: Path
) -> None:
    recipe = recipe_of(*changes)
    recorded = train(recipe, tmp_path / "recorded", data=made_up())
    assert [each.graph is not None for each in recordings] == [True]
    assert not [text for text in said if "recorded" in text]
    assert_close(recorded, plainly(recipe, tmp_path / "plain"), tolerance=1e-4)
    assert isinstance(rows(recorded)[0]["lr"], float)


def test_a_network_with_stochastic_depth_can_be_recorded(
    recordings: list[Recorded], said: list[str], tmp_path: Path
) -> None:
    train(recipe_of("model=cifar-resnet-110-sd", "epochs=1"), tmp_path, data=made_up())
    assert recordings[0].graph is not None, said


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_recorded(
    loss: str, recordings: list[Recorded], said: list[str], tmp_path: Path
) -> None:
    train(recipe_of(f"loss={loss}", "epochs=2"), tmp_path, data=made_up())
    assert recordings[0].graph is not None, said


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_a_step_spoiled_end_training(
    value: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = loop.Loop._train_step

    def spoiling(training: loop.Loop, batch: Any) -> None:
        plain(training, batch)
        if (training.epoch, training.step) == (1, training.parts.steps - 1):
            with torch.no_grad():
                next(training.parts.network.parameters())[-1, -1, -1, -1] = value

    monkeypatch.setattr(loop.Loop, "_train_step", spoiling)
    with pytest.raises(TrainingError, match="weights became infinite or NaN in epoch 2"):
        train(recipe_of(), tmp_path, data=made_up())
    assert checkpoint.load(tmp_path / "checkpoints" / "last.pt")["epoch"] == 1


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(batches, "_AT_ONCE", 2)
    plain = loop.Loop._train_step
    glance, replayed = _DelayedMean(), 0

    def watched(training: loop.Loop, batch: Any) -> None:
        nonlocal replayed
        assert isinstance(training.take_step, Recorded)
        if training.take_step.graph is not None:
            # The mode is that of all threads, and writing a checkpoint in another one waits for the device.
            training.writer.wait()
            # It stays so while the next batches are made.
            torch.cuda.set_sync_debug_mode("error" if training.step < training.parts.steps - 1 else "default")
            replayed += 1
        plain(training, batch)
        glance.mean(training.total_loss, training.step + 1)

    monkeypatch.setattr(loop.Loop, "_train_step", watched)
    try:
        train(recipe_of("batch_size=4", "average=0.9"), tmp_path, data=made_up())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert replayed == 2 * 26 - 4


def test_the_data_lie_on_the_device_and_the_channels_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held: list[loop.Loop] = []
    plain = loop.Loop.run
    monkeypatch.setattr(loop.Loop, "run", lambda self: (held.append(self), plain(self))[-1])
    before = torch.backends.cudnn.benchmark
    train(recipe_of("epochs=1", "precision=auto"), tmp_path, data=made_up())
    assert torch.backends.cudnn.benchmark == before
    (training,) = held
    assert {part.device.type for part in (training.parts.data.train, training.parts.data.validation)} == {
        "cuda"
    }
    assert "bf16" in str(training.parts.fabric.strategy.precision.precision)
    weights = [each for each in training.parts.network.parameters() if each.ndim == 4 and each.shape[1] > 1]
    assert weights
    images, _ = training.parts.to_device(training.parts.data.validation.batch(torch.arange(5, device="cuda")))
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (*weights, images))
    assert isinstance(training.take_step, Recorded)
    assert training.take_step._batch is not None
    assert training.take_step._batch[0].is_contiguous(memory_format=torch.channels_last)


def test_a_network_that_relies_on_another_layout_gets_it(recordings: list[Recorded], tmp_path: Path) -> None:
    recipe = recipe_of(f"{SMALL}[habit=view]")
    viewing = train(recipe, tmp_path / "viewing", data=made_up())
    assert [each.graph is not None for each in recordings] == [True]
    assert_close(viewing, plainly(recipe, tmp_path / "plain"), tolerance=1e-4)


def test_a_checkpoint_being_written_is_not_taken_for_waiting(
    recordings: list[Recorded], said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write, take = checkpoint.Writer._write_aside, Recorded._take_aside

    def write_during_a_watched_step(*arguments: Any) -> None:
        for _ in range(20):
            if torch.cuda.get_sync_debug_mode():
                break
            time.sleep(0.01)
        write(*arguments)

    def take_slowly(*arguments: Any) -> None:
        take(*arguments)
        if torch.cuda.get_sync_debug_mode():
            time.sleep(0.3)

    monkeypatch.setattr(checkpoint.Writer, "_write_aside", write_during_a_watched_step)
    monkeypatch.setattr(Recorded, "_take_aside", take_slowly)
    train(recipe_of("checkpoint_batches=2", "epochs=1"), tmp_path, data=made_up())
    assert recordings[0].graph is not None, said


def test_what_is_stored_is_not_rounded(tmp_path: Path) -> None:
    run = Run(train(recipe_of("precision=bf16-mixed"), tmp_path, data=made_up()), loaded=made_up())
    ((stored, _),) = run.predictions("test")
    again = torch.cat([logits for logits, _ in run._predicted(run.data.test)])
    torch.testing.assert_close(stored, again.cpu(), rtol=1e-4, atol=1e-4)


class Killed(BaseException):
    """Nothing catches it on the way out, as nothing catches a kill."""


def kill(recipe: Recipe, folder: Path, step: int, accelerator: str = "auto") -> None:
    """Train up to a step."""
    plain, taken = loop.Loop._train_step, 0

    def dying(training: loop.Loop, batch: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            raise Killed
        plain(training, batch)

    fabric = make_fabric(recipe, accelerator=accelerator, devices=1)
    fabric.launch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_train_step", dying)
        with pytest.raises(Killed):
            train(recipe, folder, data=made_up(), fabric=fabric)


EXACT = [
    "loss=cals-alm[margin=0.5]",
    "adapt=5",
    "average=0.9",
    "checkpoint_batches=3",
    "select=nll",
    "epochs=3",
]


@pytest.mark.parametrize("model", ["model=cnn[width=8]", SMALL], ids=["cnn", "dropout"])
def test_a_resumed_run_ends_as_one_left_alone(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(*EXACT, model)
    undisturbed = train(recipe, tmp_path / "undisturbed", data=made_up())
    kill(recipe, tmp_path / "killed", 12)
    kept = checkpoint.load(tmp_path / "killed" / "checkpoints" / "last.pt")
    assert (kept["epoch"], kept["step"]) == (1, 3)
    assert isinstance(kept["history"][0]["lr"], float)
    train(recipe, tmp_path / "killed", data=made_up())
    assert_close(tmp_path / "killed", undisturbed, tolerance=1e-4)
    assert result(undisturbed)["epochs"] == 3


@pytest.mark.parametrize("optimizer", ["sgd[lr=0.05]", "adam[lr=0.002]"])
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_another_kind_of_device_goes_on(first: str, optimizer: str, tmp_path: Path) -> None:
    recipe = recipe_of(*EXACT, f"optimizer={optimizer}")
    undisturbed = train(recipe, tmp_path / "undisturbed", data=made_up())
    kill(recipe, tmp_path / "killed", 12, first)
    fabric = make_fabric(recipe, accelerator="cpu" if first == "cuda" else "cuda", devices=1)
    fabric.launch()
    train(recipe, tmp_path / "killed", data=made_up(), fabric=fabric)
    assert_close(tmp_path / "killed", undisturbed, tolerance=1e-3)


@pytest.mark.parametrize("habit", ["wait", "stop"])
def test_a_network_that_cannot_be_recorded_trains_all_the_same(
    habit: str, recordings: list[Recorded], said: list[str], tmp_path: Path
) -> None:
    stubborn = train(recipe_of(f"{SMALL}[habit={habit}]"), tmp_path / "stubborn", data=made_up())
    assert [each.graph for each in recordings] == [None]
    assert len([text for text in said if "cannot be recorded as a CUDA graph" in text]) == 1
    assert_close(stubborn, plainly(recipe_of(SMALL), tmp_path / "plain"), tolerance=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw[lr=0.002]"])
def test_a_gradient_scaler_skips_recorded_steps_too(
    optimizer: str, recordings: list[Recorded], said: list[str], tmp_path: Path
) -> None:
    recipe = recipe_of("precision=16-mixed", "gradient_clip=0.0", "epochs=4", f"optimizer={optimizer}")
    found, scales = [], []
    for run in (train, plainly):
        # Gradients overflow until the scale is small enough, which takes more steps than the warm-up.
        plugin = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=2.0**26))
        fabric = Fabric(accelerator="cuda", devices=1, plugins=plugin)
        fabric.launch()
        folder = run(recipe, tmp_path / run.__name__, data=made_up(), fabric=fabric)
        found.append({name: each for name, each in tensors(folder).items() if name.startswith("model")})
        scales.append(plugin.scaler.get_scale())
    assert [each.graph is not None for each in recordings] == [True]
    assert not [text for text in said if "recorded" in text]
    assert scales[0] == scales[1] < 2.0**21
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)


def test_a_gradient_scaler_with_clipped_gradients_is_not_recorded(
    recordings: list[Recorded], said: list[str], tmp_path: Path
) -> None:
    folder = train(recipe_of("precision=16-mixed"), tmp_path, data=made_up())
    assert recordings == []
    assert len([text for text in said if "16-mixed with gradient_clip cannot be recorded" in text]) == 1
    assert all(value.isfinite().all() for value in tensors(folder).values())


def test_recording_can_be_left_alone(recordings: list[Recorded], said: list[str], tmp_path: Path) -> None:
    train(recipe_of("record=false"), tmp_path, data=made_up())
    assert recordings == []
    assert not any("recorded" in text for text in said)


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(*EXACT)
    undisturbed = train(recipe, tmp_path / "undisturbed", data=made_up())
    plain, saved = torch.save, 0

    def full(state: Any, stream: Any) -> None:
        nonlocal saved
        saved += 1
        if saved > 3:
            raise OSError(28, "No space left on device")
        plain(state, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", full)
        with pytest.raises(OSError, match="No space left on device"):
            train(recipe, tmp_path / "full", data=made_up())
    assert checkpoint.load_last(tmp_path / "full" / "checkpoints") is not None
    train(recipe, tmp_path / "full", data=made_up())
    assert_close(tmp_path / "full", undisturbed, tolerance=1e-4)


def test_the_bar_sees_the_loss_a_moment_later() -> None:
    glance, total = _DelayedMean(), torch.zeros((), device="cuda")
    assert glance.mean(total, 1) is None
    torch.cuda.synchronize()
    total += 6
    assert glance.mean(total, 2) == 0
    torch.cuda.synchronize()
    total.zero_()
    assert glance.mean(total, 3) == 3
