"""Cross-entropy, MbLS and CALS-ALM for segmentation: which digit does each pixel belong to?

Margin 6 was chosen from 4, 6, 8 and 10 by the ECE on the validation images.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import interpolate, max_pool2d
from torch.utils.data import DataLoader, TensorDataset

import calibrant

CLASSES, VOID, EPOCHS = 11, 255, 50  # background and ten digits; pixels around the ink are void


def scenes(digits, count):
    """Images (N, 1, 32, 32) of four digits each, with noise, and the class of each pixel (N, 32, 32)."""
    chosen = digits[torch.randint(len(digits), (4 * count,))]
    images = interpolate(pixels[chosen].reshape(-1, 1, 8, 8) / 16, scale_factor=2, mode="bilinear")
    ink = images > 0.5
    near = max_pool2d(ink.float(), 3, stride=1, padding=1) > 0
    target = torch.where(ink, labels[chosen].reshape(-1, 1, 1, 1) + 1, torch.where(near, VOID, 0))
    both = torch.cat([images, target], 1).reshape(count, 2, 2, 2, 16, 16)  # scene, row, column, what, pixels
    both = both.permute(0, 3, 1, 4, 2, 5).reshape(count, 2, 32, 32)
    shifts = torch.randint(32, (count, 2)).tolist()
    both = torch.stack([scene.roll(by, (1, 2)) for scene, by in zip(both, shifts, strict=True)])
    images, target = both[:, :1], both[:, 1].long()
    return TensorDataset(images + 0.1 * torch.randn(images.shape), target)


def fit(loss):
    torch.manual_seed(0)  # the same weights and order for every loss
    layers = [nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(32, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(32, CLASSES, 4, stride=2, padding=1))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, EPOCHS * len(train))
    for _ in range(EPOCHS):
        for images, target in train:
            optimizer.zero_grad()
            loss(model(images), target).backward()  # logits (B, 11, 32, 32), labels (B, 32, 32)
            optimizer.step()
            schedule.step()
        calibrant.adapt_on(loss, model, validation)  # does nothing for losses that do not adapt
    return calibrant.evaluate_on(model, test, ignore_index=VOID, resamples=0)


torch.manual_seed(0)
pixels, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
pixels, digits = pixels.float(), torch.randperm(len(labels))
train = DataLoader(scenes(digits[:120], 40), 10, shuffle=True)  # the three parts have different digits
validation, test = (DataLoader(scenes(part, 100), 50) for part in (digits[120:800], digits[800:]))
for key, options in {"ce": {}, "mbls": {"margin": 6}, "cals-alm": {"margin": 6}}.items():
    result = fit(calibrant.create_loss(key, CLASSES, ignore_index=VOID, **options))
    print(
        f"{key:8} pixel accuracy {result.accuracy:.1%}  mean IoU {result.mean_iou:.1%}  ECE {result.ece:.1%}"
    )
