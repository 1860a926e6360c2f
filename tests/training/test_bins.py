from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrant.histogram import Bins, ConfidenceHistogram, Outcomes, cell_edges
from calibrant.layout import arrange
from calibrant.metrics import adaptive_ece, ece
from calibrant.training.bins import BINS, TrainingConfidences, epoch_bins
from calibrant.training.loop import Loop, train
from calibrant.training.recipe import Recipe
from calibrant.training.runs import Run

CPU = torch.device("cpu")


def batch(size: tuple[int, ...], seed: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(size[0], classes, *size[1:], generator=generator)
    return logits, torch.randint(0, classes, size, generator=generator)


def confidences(logits: Tensor, target: Tensor) -> dict[str, np.ndarray]:
    """Of the predicted and of the true class, in double precision."""
    rows = logits.movedim(1, -1).reshape(-1, logits.shape[1]).double().softmax(1)
    return {"top": rows.amax(1).numpy(), "true": rows[torch.arange(len(rows)), target.flatten()].numpy()}


def in_bins(values: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and mean confidences in the bins ``(lo, hi]``; what lies outside is in the first and last."""
    place = np.array([int(np.sum(value > edges[1:-1])) for value in values])
    counts = np.array([(place == b).sum() for b in range(BINS)])
    means = np.array([values[place == b].mean() if counts[b] else 0.0 for b in range(BINS)])
    return counts, means


def validation(seed: int = 9) -> Bins:
    return ConfidenceHistogram.of(arrange(*batch((300,), seed))).equal_mass(BINS)


@pytest.mark.parametrize("shape", [(200,), (20, 3, 4)], ids=["rows", "pixels"])
def test_training_elements_are_looked_up_in_the_bins_of_the_validation_data(shape: tuple[int, ...]) -> None:
    found = TrainingConfidences(CPU, ignore_index=-100)
    batches = [batch(shape, seed) for seed in range(3)]
    for each in batches:
        found.add(*each)
    edges = cell_edges(CPU)[torch.linspace(1000, 1600, BINS + 1).long()]  # of cells, so that none straddles
    bins = Bins(edges, torch.ones(BINS), torch.zeros(BINS), torch.zeros(BINS))
    epoch = epoch_bins(found.pooled(), bins, None)
    every = [confidences(*each) for each in batches]
    for kind in ("top", "true"):
        values = np.concatenate([each[kind] for each in every])
        counts, means = in_bins(values, edges.numpy())
        assert epoch[f"train_{kind}_count"].tolist() == counts.tolist()
        np.testing.assert_allclose(epoch[f"train_{kind}_confidence"], means, atol=1e-6)
        assert values.min() < edges[0]
        assert values.max() > edges[-1]


def test_ignored_elements_do_not_count() -> None:
    logits, target = batch((10, 4), 0)
    target[3:, 1:] = 255
    found, expected = (TrainingConfidences(CPU, ignore_index=255) for _ in range(2))
    found.add(logits, target)
    kept = target.flatten() != 255
    expected.add(logits.movedim(1, -1).reshape(-1, 5)[kept], target.flatten()[kept])
    torch.testing.assert_close(found.sums, expected.sums)
    assert found.sums[0, 0].sum() == kept.sum() == 19


def test_bins_of_their_own_have_equal_mass_and_need_no_validation_data() -> None:
    found = TrainingConfidences(CPU, ignore_index=-100)
    logits, target = batch((3000,), 1)
    found.add(logits, target)
    epochs = [epoch_bins(found.pooled(), validation(seed), None) for seed in (1, 2)]
    assert torch.equal(epochs[0]["train_own_confidence"], epochs[1]["train_own_confidence"])
    values = np.sort(confidences(logits, target)["true"])
    np.testing.assert_allclose(epochs[0]["train_own_count"], 200, atol=25)  # whole cells, some crowded
    means = values.reshape(BINS, -1).mean(1)
    np.testing.assert_allclose(epochs[0]["train_own_confidence"], means, atol=0.02)


def test_bins_of_validation_and_test_data_are_stored_as_means() -> None:
    empty = TrainingConfidences(CPU, ignore_index=-100).pooled()
    first, second = validation(3), validation(4)
    epoch = epoch_bins(empty, first, second)
    for name, bins in (("validation", first), ("test", second)):
        gap = epoch[f"{name}_confidence"] - epoch[f"{name}_accuracy"]
        torch.testing.assert_close(gap, bins.gap)
        assert torch.equal(epoch[f"{name}_count"], bins.count)
        assert torch.equal(epoch[f"{name}_edges"], bins.edges)
    assert all(value.isfinite().all() for value in epoch.values())
    assert not epoch["train_true_confidence"].any()


def test_adding_changes_tensors_in_place_only() -> None:
    """A recorded step replays kernels on the memory that they were recorded with."""
    found = TrainingConfidences(CPU, ignore_index=-100)
    memory, logits = found.sums.data_ptr(), batch((4,), 0)[0].requires_grad_()
    found.add(logits, torch.zeros(4, dtype=torch.long))
    assert found.sums.data_ptr() == memory
    assert not found.sums.requires_grad


def test_a_run_whose_weights_rest_has_the_confidences_of_its_predictions(tmp_path: Path) -> None:
    recipe = Recipe.load("digits").override(
        ["epochs=2", "optimizer=sgd[lr=0,momentum=0,weight_decay=0]", "batch_size=32", "model.hidden=[8]"]
    )
    run = Run(train(recipe, tmp_path))
    for part in ("train", "validation"):
        (logits, labels) = (torch.cat(each) for each in zip(*run.predictions(part), strict=True))
        values = confidences(logits, labels)
        if part == "train":
            edges = run.bins["validation_edges"][-1].numpy()
            for kind in ("top", "true"):
                counts, means = in_bins(values[kind], edges)
                # Cells that straddle an edge are on one side of it.
                np.testing.assert_allclose(run.bins[f"train_{kind}_count"][0], counts, atol=8)
                np.testing.assert_allclose(run.bins[f"train_{kind}_confidence"][0], means, atol=2e-3)
        else:
            bins = Outcomes.of(arrange(logits, labels)).equal_mass(BINS)
            torch.testing.assert_close(
                run.bins["validation_confidence"][1] - run.bins["validation_accuracy"][1], bins.gap
            )
    assert run.bins["train_top_count"].sum(1).tolist() == [800.0, 800.0]
    assert run.bins["validation_edges"].shape == (2, BINS + 1)
    assert "test_count" not in run.bins


def test_bins_of_a_run_are_exact_where_confidences_crowd(tmp_path: Path) -> None:
    recipe = Recipe.load("digits").override(
        ["epochs=1", "optimizer=sgd[lr=0,momentum=0,weight_decay=0]", "model.hidden=[8]", "log_test=true"]
    )
    run = Run(train(recipe, tmp_path))
    for part in ("validation", "test"):
        logits, labels = (torch.cat(each) for each in zip(*run.predictions(part), strict=True))
        sizes = [len(group) for group in np.array_split(np.arange(len(labels)), BINS)]
        assert run.bins[f"{part}_count"][0].tolist() == sizes
        assert run.history[0][f"{part}_adaptive_ece"] == pytest.approx(adaptive_ece(logits, labels), abs=1e-6)
        assert run.history[0][f"{part}_ece"] == pytest.approx(ece(logits, labels), abs=1e-6)
        accuracy = (logits.argmax(1) == labels).double().mean().item()
        assert run.history[0][f"{part}_accuracy"] == pytest.approx(accuracy)


def test_logged_edges_are_those_of_the_loss_after_it_adapted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    edges = []
    end = Loop._end_epoch

    def noting(training: Loop, *arguments: Any, **options: Any) -> None:
        end(training, *arguments, **options)
        edges.append(training.parts.loss.edges.clone())  # type: ignore[operator]

    monkeypatch.setattr(Loop, "_end_epoch", noting)
    recipe = Recipe.load("digits").override(["epochs=3", "loss=adafocal", "model.hidden=[8]"])
    run = Run(train(recipe, tmp_path))
    assert torch.equal(run.bins["validation_edges"], torch.stack(edges))


def test_rounding_does_not_decide_the_cell_of_an_edge() -> None:
    votes = torch.tensor([[3, 2], [4, 1]] * 50) / 5  # 3/5 and 4/5, up to rounding
    logits = votes.log() + 5 * torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(100, dtype=torch.long)
    training = TrainingConfidences(CPU, -100)
    training.add(logits, target)
    cells = training.sums[0, 0].nonzero().squeeze(1)
    assert torch.equal(cells, ConfidenceHistogram.of(arrange(logits, target)).count.nonzero().squeeze(1))
    assert len(cells) == 2
