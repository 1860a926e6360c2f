"""Two processes under torchrun train, adapt and resume with Trainer as one process does.

Starting processes takes seconds, so one start serves all tests; they look at what it left behind. This file
is also the program that torchrun starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainerCallback, TrainingArguments

from calibrant import create_loss
from calibrant.integrations.transformers import Calibration

ROOT = Path(__file__).parents[2]
CLASSES = 3
STEP = 4  # sentences per optimizer step, on all processes
SIZES = [7, 5]
"""Sizes of the validation set. In batches of two, the second process has one or two repeats."""

Results = dict[str, Any]


def tagged(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sentences with 8, 7, ... 1 labelled words."""
    words = torch.randint(1, 20, (count, 8), generator=torch.Generator().manual_seed(seed))
    labels = words % CLASSES
    for number, row in enumerate(labels):
        row[8 - number % 8 :] = -100
    return [{"input_ids": row, "labels": tags} for row, tags in zip(words, labels, strict=True)]


class InOrder(Trainer):
    """A trainer that does not shuffle: two processes then take the sentences of a step by turns."""

    def get_train_dataloader(self) -> DataLoader:
        return self.accelerator.prepare(DataLoader(self.train_dataset, self.args.train_batch_size))


class Noting(TrainerCallback):
    """Records the number of elements in each adaptation pass, on all processes."""

    def __init__(self, loss: nn.Module) -> None:
        self.samples: list[int] = []
        adapt = loss.adapt

        def noting(**options: Any) -> Any:
            statistics = adapt(**options)
            self.samples.append(int(statistics.samples))
            return statistics

        loss.adapt = noting


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def run(folder: Path, size: int, processes: int, resume: int | None = None) -> Results:
    torch.manual_seed(0)
    model = BertForTokenClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).double()  # gradients that are averaged are rounded differently from those of a larger batch
    loss = create_loss("cals-alm", CLASSES, margin=0.5)
    noting = Noting(loss)
    calibration = Calibration(loss, timeout=60)
    trainer = InOrder(
        model=model,
        args=TrainingArguments(
            str(folder / f"{size} on {processes}"),
            per_device_train_batch_size=1,
            average_tokens_across_devices=True,  # the default since transformers 4.54
            gradient_accumulation_steps=STEP // processes,
            per_device_eval_batch_size=2,
            num_train_epochs=3,
            eval_strategy="epoch",
            save_strategy="epoch",
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if processes > 1 else None,
        ),
        train_dataset=tagged(16, seed=0),
        eval_dataset=tagged(size, seed=1),
        compute_loss_func=calibration.compute_loss,
        compute_metrics=calibration.compute_metrics,
        callbacks=[calibration, noting],
    )
    checkpoint = None if resume is None else f"{trainer.args.output_dir}/checkpoint-{resume}"
    trainer.train(resume_from_checkpoint=checkpoint)
    learned = snapshot(loss)
    metrics = trainer.evaluate()
    return {
        "loss": learned,
        "loss after evaluating": snapshot(loss),
        "model": snapshot(model),
        "samples": noting.samples,
        "metrics": {name: metrics[f"eval_{name}"] for name in ("loss", "accuracy", "nll", "ece")},
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = {str(size): run(folder, size, 2) for size in SIZES}
    found["resumed"] = run(folder, SIZES[0], 2, resume=4)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def together(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("together")
    python = str(programs / "python")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "-m", "tests.distributed.test_transformers", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("alone")
    return {str(size): run(folder, size, 1) for size in SIZES}


def assert_close(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


def assert_identical(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


@pytest.mark.parametrize("size", SIZES)
def test_two_processes_learn_what_one_learns(size: int, together: list[Results], alone: Results) -> None:
    fresh, expected = create_loss("cals-alm", CLASSES, margin=0.5), alone[str(size)]
    assert not torch.equal(expected["loss"]["multiplier"], fresh.multiplier)
    for found in together:
        assert_close(found[str(size)]["model"], expected["model"])
        assert_close(found[str(size)]["loss"], expected["loss"])


@pytest.mark.parametrize("size", SIZES)
def test_every_element_counts_once(size: int, together: list[Results], alone: Results) -> None:
    elements = sum(8 - number for number in range(size))
    for found in (alone, *together):
        assert found[str(size)]["samples"] == [elements] * 3


@pytest.mark.parametrize("size", SIZES)
def test_both_processes_hold_the_same_bits(size: int, together: list[Results]) -> None:
    first, second = (found[str(size)] for found in together)
    assert_identical(second["loss"], first["loss"])
    assert_identical(second["model"], first["model"])


@pytest.mark.parametrize("size", SIZES)
def test_an_evaluation_after_training_is_of_all_data_and_leaves_the_loss_alone(
    size: int, together: list[Results], alone: Results
) -> None:
    for found in together:
        assert_identical(found[str(size)]["loss after evaluating"], found[str(size)]["loss"])
        metrics, expected = dict(found[str(size)]["metrics"]), dict(alone[str(size)]["metrics"])
        # Trainer's own loss is a mean over batches, with other weights for repeats and tokens.
        assert metrics.pop("loss") == pytest.approx(expected.pop("loss"), rel=0.5)
        assert metrics == pytest.approx(expected, rel=1e-4)


def test_two_processes_that_resume_end_where_uninterrupted_ones_do(together: list[Results]) -> None:
    for found in together:
        whole, resumed = found[str(SIZES[0])], found["resumed"]
        assert resumed["samples"] == whole["samples"][1:]
        assert_identical(resumed["loss"], whole["loss"])
        assert_identical(resumed["model"], whole["model"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
