"""Cross-entropy and CALS-ALM in Hugging Face's Trainer, on handwritten digits written as sentences.

Nothing is downloaded. An image is a sentence of 16 words, one for the brightness of each of its parts.
The margin is the choice of the authors of CALS-ALM for text. The test data are used once.
"""

import sys

if not __package__:
    del sys.path[0]  # this folder has files with the names of packages
import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import ModernBertConfig, ModernBertForSequenceClassification, Trainer, TrainingArguments

from calibrant import create_loss
from calibrant.integrations.transformers import Calibration

images, labels = load_digits(return_X_y=True)
brightness = torch.tensor(images).view(-1, 4, 2, 4, 2).mean((2, 4)).round().long().flatten(1)  # 0 to 16
words = 17 * torch.arange(16) + brightness
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
sentences = [{"input_ids": words[i], "labels": int(labels[i])} for i in order]
train, validation, test = sentences[:700], sentences[700:1100], sentences[1100:]

results = []
for key, options in (("ce", {}), ("cals-alm", {"margin": 6})):
    torch.manual_seed(0)
    config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    special = {f"{name}_token_id": 272 for name in ("pad", "bos", "eos", "cls", "sep")}
    config |= {"vocab_size": 273, "classifier_pooling": "mean", "num_labels": 10, **special}
    calibration = Calibration(create_loss(key, 10, **options))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=ModernBertForSequenceClassification(ModernBertConfig(**config)),
            args=TrainingArguments(
                folder,
                num_train_epochs=20,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=400,
                learning_rate=3e-3,
                eval_strategy="epoch",  # the loss adapts after each evaluation
                save_strategy="no",
                report_to="none",
                use_cpu=True,  # remove this line on a GPU
            ),
            train_dataset=train,
            eval_dataset=validation,
            compute_loss_func=calibration.compute_loss,
            compute_metrics=calibration.compute_metrics,
            callbacks=[calibration],
        )
        trainer.train()
        results.append((key, trainer.predict(test).metrics))  # does not change the loss

print("loss      accuracy     NLL     ECE")
for key, figures in results:
    print(f"{key:10}{figures['test_accuracy']:8.1%}{figures['test_nll']:8.3f}{figures['test_ece']:8.1%}")
