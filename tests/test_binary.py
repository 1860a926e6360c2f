"""Single logits and several labels from training to export, in Python and on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import calibrant
from calibrant import cli
from calibrant.calibrators import create_calibrator, load_calibrator
from calibrant.evaluation import Evaluation
from calibrant.reports.page import write_report


@pytest.mark.usefixtures("blank_pictures")
@pytest.mark.parametrize("labels", [1, 3], ids=["single logit", "several labels"])
def test_from_training_to_export(labels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs = torch.randn(900, 5)
    target = (inputs[:, :labels] + torch.randn(900, labels) > 0.5).long()
    train, held_out = slice(0, 150), slice(150, 900)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, labels))
    loss = calibrant.create_loss("cals-hr", 2, binary=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(inputs[train]), target[train]).backward()
        optimizer.step()
    calibrant.adapt_on(loss, model, [(inputs[held_out], target[held_out])])

    with torch.no_grad():
        logits = model(inputs[held_out])
    calibrator = create_calibrator("temperature").fit(logits, target[held_out], binary=True)
    before, after = (
        calibrant.evaluate(each, target[held_out], binary=True, resamples=0)
        for each in (logits, calibrator(logits))
    )
    assert after.ece < before.ece
    write_report([before, after], "python.html", fitted="temperature, fitted to these data")

    np.savez("held-out.npz", logits=logits.numpy(), labels=target[held_out].numpy())
    command = ["calibrate", "held-out.npz", "--binary", "--resamples", "0", "--output", "c.safetensors"]
    result = CliRunner().invoke(cli.app, [*command, "--report", "command.html", "--json", "e.json"])
    assert result.exit_code == 0, result.output
    found = [Evaluation.from_dict(each) for each in json.loads(Path("e.json").read_text())]
    assert [each.ece for each in found] == pytest.approx([before.ece, after.ece], abs=1e-6)
    assert "probability of yes" in Path("command.html").read_text()

    calibrated = nn.Sequential(model, load_calibrator("c.safetensors"))
    exported = torch.export.export(calibrated, (inputs[held_out],)).module()
    torch.testing.assert_close(exported(inputs[held_out]), calibrator(logits))
