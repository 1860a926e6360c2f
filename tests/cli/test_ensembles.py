"""An ensemble from training to export: members on the command line, the same figures in Python."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calibrant.calibrators import Temperature, load_calibrator
from calibrant.ensembles import Diversity, pool
from calibrant.evaluation import Evaluation, evaluate
from calibrant.predictions import open_ensemble, open_predictions, write_predictions
from calibrant.reports.page import write_report
from calibrant.training.runs import Run

from .commands import fail, printed

SEEDS = (0, 1)


class Ensemble(nn.Module):
    """The calibrated probabilities of several models."""

    def __init__(self, members: list[nn.Module], calibrator: nn.Module) -> None:
        super().__init__()
        self.members, self.calibrator = nn.ModuleList(members), calibrator

    def forward(self, inputs: Tensor) -> Tensor:
        logits = torch.stack([member(inputs) for member in self.members])
        probabilities: Tensor = self.calibrator(pool(logits)).softmax(1)
        return probabilities


def test_members_with_single_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logits = 2 * torch.randn(2, 60, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(2, (60, 3), generator=torch.Generator().manual_seed(1))
    for name, member in zip("ab", logits, strict=True):
        np.savez(f"{name}.npz", logits=member, labels=labels)
    options = ("--ensemble", "--binary", "--resamples", 0, "--json", "e.json")
    shown = printed("evaluate", *options, "a.npz", "b.npz")
    means = Diversity.of(logits, labels, binary=True).means()
    assert f"disagree in {100 * means['disagreement']:.2f} % of all pairs" in shown
    pooled, *members = [Evaluation.from_dict(plain) for plain in json.loads(Path("e.json").read_text())]
    expected = evaluate(pool(logits, binary=True), labels, binary=True, resamples=0)
    assert (pooled.ece, pooled.nll) == (pytest.approx(expected.ece), pytest.approx(expected.nll))
    assert pooled.binary
    assert len(members) == 2


def test_trained_evaluated_calibrated_reported_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ("--set", "epochs=1", "--accelerator", "cpu", "--calibrate", "none")
    for seed in SEEDS:
        printed("train", "digits-lt", "--loss", "focal", "--seed", seed, *quick, "--output", f"r{seed}")
    for part in ("validation", "test"):
        file = open_ensemble([f"r{seed}/{part}.npz" for seed in SEEDS])
        write_predictions(Path(f"{part}.npz"), file.batches(), file.rows, file.class_names)

    files = [f"r{seed}/test.npz" for seed in SEEDS]
    shown = printed(
        *("evaluate", "--ensemble", *files, "--resamples", 0, "--json", "e.json", "--report", "e.html")
    )
    assert "Members of the ensemble disagree in" in shown
    pooled, *_ = [Evaluation.from_dict(plain) for plain in json.loads(Path("e.json").read_text())]
    printed(
        *("calibrate", "validation.npz", "--test", "test.npz", "--resamples", 0, "--json", "c.json"),
        *("--output", "c.safetensors"),
    )
    printed("apply", "c.safetensors", "test.npz", "--output", "calibrated.npz")

    # The same in Python, from logits (M, N, K).
    runs = [Run(Path(f"r{seed}")) for seed in SEEDS]
    members = {
        part: [next(iter(run.predictions(part))) for run in runs]  # type: ignore[arg-type]
        for part in ("validation", "test")
    }
    logits = {part: pool(torch.stack([each for each, _ in found])) for part, found in members.items()}
    target = {part: found[0][1] for part, found in members.items()}
    before = evaluate(logits["test"], target["test"], resamples=0)
    assert (pooled.ece, pooled.nll) == (pytest.approx(before.ece), pytest.approx(before.nll))
    calibrator = Temperature().fit(logits["validation"], target["validation"])
    stored = load_calibrator("c.safetensors")
    assert isinstance(stored, Temperature)
    assert float(stored.temperature) == pytest.approx(float(calibrator.temperature), rel=1e-5)
    after = evaluate(calibrator(logits["test"]), target["test"], name="calibrated", resamples=0)
    _, found = [Evaluation.from_dict(plain) for plain in json.loads(Path("c.json").read_text())]
    assert found.nll == pytest.approx(after.nll, rel=1e-5)
    write_report([before, after], "python.html")
    assert all(Path(name).stat().st_size > 1000 for name in ("e.html", "python.html"))

    inputs, _ = runs[0].data.test.batch(torch.arange(len(target["test"])))
    ensemble = Ensemble([run.model.cpu() for run in runs], calibrator).eval()
    graph = torch.export.export(ensemble, (inputs,)).module()
    calibrated, _ = open_predictions("calibrated.npz").load()
    torch.testing.assert_close(graph(inputs), calibrated.softmax(1), rtol=1e-4, atol=1e-5)


def test_logits_of_all_members_in_one_file_get_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"logits": torch.zeros(2, 20, 3), "labels": torch.arange(20) % 3}, "members.pt")
    assert "store each member of an ensemble in a file of its own, and use --ensemble" in fail(
        "evaluate", "members.pt"
    )
    with pytest.raises(ValueError, match=r"calibrant.ensembles.pool\(logits\)"):
        evaluate(torch.zeros(2, 20, 3), torch.arange(20) % 3)
