"""Cross-entropy and CALS-ALM for tagging words in Hugging Face's Trainer, on made-up sentences.

A word has one to three pieces. The first one determines the tag of the word, nine times out of ten, and has
the label. The other pieces, and the padding, have the label -100 and do not count.
"""

import sys

if not __package__:
    del sys.path[0]  # this folder has files with the names of packages
import random
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

from calibrant import create_loss
from calibrant.integrations.transformers import Calibration


def sentence(dice: random.Random) -> dict[str, torch.Tensor]:
    pieces, labels = [], []
    for _ in range(dice.randint(3, 9)):
        piece, more = dice.randint(1, 300), dice.choices(range(301, 351), k=dice.randint(0, 2))
        pieces += [piece, *more]
        labels += [piece % 4 if dice.random() < 0.9 else dice.randrange(4), *[-100] * len(more)]
    return {"input_ids": torch.tensor(pieces), "labels": torch.tensor(labels)}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pieces = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": pieces, "attention_mask": (pieces > 0).long(), "labels": labels}


dice, results = random.Random(0), []
train, validation, test = ([sentence(dice) for _ in range(count)] for count in (300, 200, 1000))
arguments = {"num_train_epochs": 15, "learning_rate": 5e-3, "eval_strategy": "epoch", "save_strategy": "no"}
arguments |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "report_to": "none"}
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
losses = create_loss("ce", 4), create_loss("cals-alm", 4, margin=6)  # 6: the choice of its authors for text
for calibration in map(Calibration, losses):
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=BertForTokenClassification(BertConfig(vocab_size=351, num_labels=4, **sizes)),
            args=TrainingArguments(folder, per_device_eval_batch_size=100, use_cpu=True, **arguments),
            data_collator=collate,
            train_dataset=train,
            eval_dataset=validation,
            compute_loss_func=calibration.compute_loss,
            compute_metrics=calibration.compute_metrics,
            callbacks=[calibration],
        )
        trainer.train()
        results.append(trainer.predict(test).metrics)  # does not change the loss
for name, of in zip(("cross-entropy", "CALS-ALM"), results, strict=True):
    print(f"{name:14}accuracy {of['test_accuracy']:.1%}, NLL {of['test_nll']:.3f}, ECE {of['test_ece']:.1%}")
