"""Cross-entropy and CALS-ALM with timm and its mixup, on long-tailed digits.

Margin 8 was chosen from 4, 6, 8 and 10 by the ECE on the validation data.
"""

import numpy
import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.functional import interpolate, one_hot
from torch.utils.data import DataLoader, TensorDataset

import calibrant

EPOCHS, MIXUP_OFF = 30, 10  # --epochs and --mixup-off-epoch of timm's train.py


def loader(rows, **options):
    return DataLoader(TensorDataset(images[rows], labels[rows]), **options)


def fit(loss):
    torch.manual_seed(0)  # the same weights, order and mixtures for every loss
    numpy.random.seed(0)
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.01, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=EPOCHS, warmup_epochs=2, warmup_lr=1e-4)
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0, num_classes=10)
    for epoch in range(EPOCHS):
        model.train()
        mixup.mixup_enabled = epoch < MIXUP_OFF
        for inputs, target in train:
            inputs, target = mixup(inputs, target)  # target: (B, 10) probabilities
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        scheduler.step(epoch + 1)
        calibrant.adapt_on(loss, model, validation)  # does nothing for losses that do not adapt
    return model


pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
pixels, labels = pixels[order].float().reshape(-1, 1, 8, 8) / 16, labels[order]
images = interpolate(pixels, size=(32, 32), mode="bilinear")
place = one_hot(labels).cumsum(0)[range(len(labels)), labels]  # 1: the first of its digit
tail = (80 * 80 ** (-labels / 9)).round()  # 80 training images of digit 0 down to 1 of digit 9
train = loader(place <= tail, batch_size=32, shuffle=True, drop_last=True)  # mixup needs even batches
validation = loader((place > 80) & (place <= 120), batch_size=100)
test = loader(place > 120, batch_size=100)
for key, options in {"ce": {}, "cals-alm": {"margin": 8}}.items():
    model = fit(calibrant.create_loss(key, 10, **options))
    result = calibrant.evaluate_on(model, test, resamples=0)
    print(f"{key:8} accuracy {result.accuracy:.1%}  ECE {result.ece:.1%}")
