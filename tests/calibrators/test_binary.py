"""Calibrators of single logits: yes-or-no decisions, one for each element or for each of several labels."""

import io
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from calibrant.calibrators import (
    CALIBRATORS,
    Calibrator,
    Temperature,
    choose,
    create_calibrator,
    load_calibrator,
    rank,
    save_calibrator,
)
from calibrant.calibrators.base import UnchangedLabelsWarning
from calibrant.evaluation import evaluate


def decisions(*shape: int) -> tuple[Tensor, Tensor]:
    """Logits that are too large: by 2 for the first label, by 3 for the second, and so on."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
    target = (torch.rand(*shape, generator=generator, dtype=torch.float64) < logits.sigmoid()).long()
    if len(shape) == 1:
        return 2 * logits, target
    factor = torch.arange(2, shape[1] + 2).view(1, -1, *(1,) * (len(shape) - 2))
    return factor * logits, target


@pytest.mark.parametrize("key", CALIBRATORS)
def test_each_label_gets_the_calibrator_of_its_pair(key: str) -> None:
    logits, target = decisions(300, 2)
    target[7, 1] = -100
    calibrator = create_calibrator(key).fit(logits, target, binary=True)
    calibrated = calibrator(logits)
    assert calibrated.shape == logits.shape
    for label in range(2):
        pairs = torch.stack([torch.zeros(300, dtype=torch.float64), logits[:, label]], 1)
        alone = create_calibrator(key).fit(pairs, target[:, label])
        expected = alone(pairs).softmax(1)[:, 1]
        torch.testing.assert_close(calibrated[:, label].sigmoid(), expected)


@pytest.mark.parametrize("key", CALIBRATORS)
def test_saved_and_loaded(key: str, tmp_path: Path) -> None:
    logits, target = decisions(200, 3)
    calibrator = create_calibrator(key).fit(logits, target, binary=True)
    expected = calibrator(logits)
    save_calibrator(calibrator, tmp_path / "c.safetensors", class_names=["a", "b", "c"])
    loaded = load_calibrator(tmp_path / "c.safetensors")
    assert loaded.class_names == ("a", "b", "c")
    assert torch.equal(loaded(logits), expected)
    with pytest.raises(ValueError, match=r"shape \(B, 3, \*S\) for 3 labels, as when this was fitted"):
        loaded(logits[:, :2])
    stream = io.BytesIO()
    torch.save(calibrator.state_dict(), stream)
    stream.seek(0)
    other = create_calibrator(key)
    other.load_state_dict(torch.load(stream))
    assert torch.equal(other(logits), expected)


@pytest.mark.parametrize("key", ["temperature", "platt", "isotonic", "beta"])
def test_exported(key: str) -> None:
    logits, target = decisions(200, 2)
    model = nn.Sequential(nn.Identity(), create_calibrator(key).fit(logits, target, binary=True))
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (logits[:8],), dynamic_shapes=({0: rows},)).module()
    torch.testing.assert_close(exported(logits), model(logits))


@pytest.mark.parametrize("key", CALIBRATORS)
def test_a_label_with_one_answer_is_left_as_it_is(key: str, tmp_path: Path) -> None:
    logits, target = decisions(200, 3)
    target[:, 1] = 0
    target[:5, 1] = -100
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator = create_calibrator(key).fit(logits, target, binary=True)
    assert [each.category for each in caught] == [UnchangedLabelsWarning]
    assert "label 1: the same answer in all" in str(caught[0].message)
    calibrated = calibrator(logits)
    assert torch.equal(calibrated[:, 1], logits[:, 1])
    others = create_calibrator(key).fit(logits[:, [0, 2]], target[:, [0, 2]], binary=True)
    assert torch.equal(calibrated[:, [0, 2]], others(logits[:, [0, 2]]))
    save_calibrator(calibrator, tmp_path / "c.safetensors")
    assert torch.equal(load_calibrator(tmp_path / "c.safetensors")(logits), calibrated)
    other = create_calibrator(key)
    other.load_state_dict(calibrator.state_dict())
    assert torch.equal(other(logits), calibrated)
    assert calibrator(logits.half()).dtype == torch.float32


class Divided(Calibrator):
    """A user's calibrator without learned state."""

    key = "divided"

    def fit_rows(self, rows: Tensor, labels: Tensor) -> None:
        pass

    def transform(self, rows: Tensor) -> Tensor:
        return rows / 2


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("key", CALIBRATORS)
def test_if_all_labels_have_one_answer_nothing_is_changed(key: str, labels: int) -> None:
    logits, target = decisions(50, labels)[0], torch.zeros(50, labels, dtype=torch.long)
    target[:, -1] = 1
    with pytest.warns(UnchangedLabelsWarning, match="the same answer in all of these data") as caught:
        calibrator = create_calibrator(key).fit(logits, target, binary=True)
    assert len(caught) == 1
    assert torch.equal(calibrator(logits), logits)
    assert calibrator.unchanged == tuple(range(labels))
    assert f"unchanged={', '.join(map(str, range(labels)))}" in repr(calibrator)


def test_labels_beyond_0_and_1_are_refused() -> None:
    logits, target = decisions(50, 4)
    with pytest.raises(ValueError, match=r"the target holds 0 and 1.* got labels from 0 to 2"):
        Temperature().fit(logits, 2 * target, binary=True)


def test_a_calibrator_that_learns_nothing_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALIBRATORS, Divided.key, Divided)
    logits, target = decisions(200, 3)
    target[:, 1] = 0
    with pytest.warns(UnchangedLabelsWarning, match="label 1: the same answer"):
        calibrator = Divided().fit(logits, target, binary=True)
    expected = logits / torch.tensor([2.0, 1.0, 2.0])
    assert torch.equal(calibrator(logits), expected)
    assert calibrator.unchanged == (1,)
    save_calibrator(calibrator, tmp_path / "c.safetensors")
    assert torch.equal(load_calibrator(tmp_path / "c.safetensors")(logits), expected)
    other = Divided()
    other.load_state_dict(calibrator.state_dict())
    assert torch.equal(other(logits), expected)
    assert calibrator.fit(2 * torch.eye(2), torch.arange(2)).unchanged == ()


def test_files_and_states_of_version_0_1(tmp_path: Path) -> None:
    """They do not list the labels with one answer: those have no tensors."""
    logits, target = decisions(200, 3)
    target[:, 1] = 0
    with pytest.warns(UnchangedLabelsWarning):
        calibrator = Temperature().fit(logits, target, binary=True)
    state = calibrator.state_dict()
    description = json.loads(bytes(state["_extra_state"].tolist()))
    assert description.pop("unchanged") == [1]
    state["_extra_state"] = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)
    other = Temperature()
    other.load_state_dict(state)
    assert torch.equal(other(logits), calibrator(logits))

    path = tmp_path / "c.safetensors"
    save_calibrator(calibrator, path)
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    description = json.loads(header["calibrator"])
    assert description.pop("unchanged") == [1]
    save_file(tensors, path, metadata=header | {"calibrator": json.dumps(description)})
    assert torch.equal(load_calibrator(path)(logits), calibrator(logits))

    expected = calibrator(logits)
    del calibrator.unchanged
    for part in calibrator.labels:
        del part.unchanged
    assert torch.equal(pickle.loads(pickle.dumps(calibrator))(logits), expected)


@pytest.mark.parametrize("unchanged", [[0, 1], [1, 99]])
def test_files_that_leave_out_what_was_learned_are_damaged(unchanged: list[int], tmp_path: Path) -> None:
    logits, target = decisions(200, 3)
    target[:, 1] = 0
    path = tmp_path / "c.safetensors"
    with pytest.warns(UnchangedLabelsWarning):
        save_calibrator(Temperature().fit(logits, target, binary=True), path)
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    description = json.loads(header["calibrator"]) | {"unchanged": unchanged}
    save_file(tensors, path, metadata=header | {"calibrator": json.dumps(description)})
    with pytest.raises(ValueError, match="damaged calibrator: ValueError it leaves the labels"):
        load_calibrator(path)


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_answers_of_any_type(kind: torch.dtype) -> None:
    logits, target = decisions(200, 3)
    expected = Temperature().fit(logits, target, binary=True)(logits)
    assert torch.equal(Temperature().fit(logits, target.to(kind), binary=True)(logits), expected)
    found = evaluate(logits, target.to(kind), binary=True, resamples=0)
    assert found == evaluate(logits, target, binary=True, resamples=0)


def test_156_is_no_answer_in_8_bits() -> None:
    logits, target = decisions(200, 3)
    target[3, 1] = 156  # -100 in 8 bits
    with pytest.raises(ValueError, match=r"the target holds 0 and 1.* got labels from 0 to 156"):
        Temperature().fit(logits, target.to(torch.uint8), binary=True)


def test_an_answer_may_be_ignored() -> None:
    logits, target = decisions(200, 2)
    with pytest.warns(UnchangedLabelsWarning, match="labels 0, 1: the same answer"):
        calibrator = Temperature().fit(logits, target, binary=True, ignore_index=1)
    assert calibrator.unchanged == (0, 1)


def test_logits_of_labels_with_one_answer_must_be_finite() -> None:
    logits, target = decisions(200, 2)
    target[:, 1], logits[7, 1] = 0, torch.nan
    with pytest.raises(ValueError, match="label 1: logits hold NaN or infinite numbers"):
        Temperature().fit(logits, target, binary=True)


def test_where_what_was_learned_is() -> None:
    calibrator = Temperature()
    with pytest.raises(AttributeError, match=r"no attribute 'temperature'; .* after fit\(logits, target\)"):
        _ = calibrator.temperature
    calibrator.fit(*decisions(200, 2), binary=True)
    with pytest.raises(AttributeError, match=r"no attribute 'temperature'; .* \.labels\[0\]\.temperature"):
        _ = calibrator.temperature
    assert calibrator.labels[0].temperature > 1
    with pytest.raises(AttributeError, match=r"no attribute 'temprature'$"):
        _ = calibrator.temprature


def test_a_networks_own_state_leaves_the_labels_as_they_are() -> None:
    logits, target = decisions(200, 3)
    target[:, 1] = 0
    with pytest.warns(UnchangedLabelsWarning):
        calibrator = Temperature().fit(logits, target, binary=True)
    model = nn.Sequential(nn.Linear(3, 3), calibrator)
    expected = calibrator(logits)
    state = {key: value for key, value in model.state_dict().items() if key.startswith("0.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert "1._extra_state" in missing
    assert not unexpected
    assert calibrator.unchanged == (1,)
    assert torch.equal(calibrator(logits), expected)
    with pytest.raises(RuntimeError, match=r"Missing key.*1\._extra_state"):
        model.load_state_dict(state)


def test_the_state_of_labels_replaces_that_of_classes() -> None:
    logits, target = decisions(200, 3)
    binary = Temperature().fit(logits, target, binary=True)
    other = Temperature().fit(2 * torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 1]))
    other.load_state_dict(binary.state_dict())
    assert torch.equal(other(logits), binary(logits))
    assert repr(other) == repr(binary)


def test_temperatures_of_the_labels() -> None:
    calibrator = Temperature().fit(*decisions(20_000, 3), binary=True)
    assert [round(float(each.temperature)) for each in calibrator.labels] == [2, 3, 4]
    assert calibrator.binary
    assert "binary" in repr(calibrator)


@pytest.mark.parametrize("shape", [(500,), (500, 1), (50, 1, 2, 5)])
def test_a_single_logit(shape: tuple[int, ...]) -> None:
    logits, target = decisions(*shape)
    calibrator = Temperature().fit(logits, target, binary=True)
    expected = Temperature().fit(torch.stack([0 * logits.flatten(), logits.flatten()], 1), target.flatten())
    torch.testing.assert_close(calibrator(logits), logits / expected.temperature)


def test_a_fit_replaces_an_earlier_one() -> None:
    logits, target = decisions(500)
    calibrator = Temperature().fit(torch.stack([0 * logits, logits], 1), target)
    calibrator.fit(logits, target, binary=True)
    assert calibrator.temperature is None
    calibrator.fit(torch.stack([0 * logits, logits], 1), target)
    assert not calibrator.binary
    assert calibrator(torch.zeros(2, 2)).shape == (2, 2)


def test_the_best_calibrator_of_a_single_logit() -> None:
    logits, target = decisions(500, 1)
    best = choose(logits, target, binary=True, candidates=["temperature"])
    assert best.binary
    assert best.key == "temperature"


def test_several_labels_are_ranked_by_all_of_their_decisions() -> None:
    logits, target = decisions(300, 2)
    target[:50, 1] = -100
    logits[:, 1] *= 3  # a temperature of its own
    both = rank(logits, target, binary=True, candidates=["temperature", "platt"])
    each = [
        rank(logits[:, [k]], target[:, [k]], binary=True, candidates=["temperature", "platt"]) for k in (0, 1)
    ]
    for key in ("identity", "temperature", "platt"):
        found, first, second = (
            next(candidate.nll for candidate in ranking.candidates if candidate.key == key)
            for ranking in (both, *each)
        )
        # The folds of the second label are others, because 50 elements without it are left out.
        expected = (300 * first + 250 * second) / 550
        assert found == pytest.approx(expected, rel=1e-9 if key == "identity" else 0.02)
    best = choose(logits, target, binary=True, candidates=["temperature"])
    assert [float(part.temperature) for part in best.labels] == pytest.approx(
        [
            float(Temperature().fit(logits[:, k], target[:, k], binary=True).labels[0].temperature)
            for k in (0, 1)
        ]
    )
    # Candidates are those of single decisions, and not of images.
    few = rank(logits[50:150], target[50:150], binary=True, folds=2)
    assert "local-temperature" not in [each.key for each in few.candidates]


def test_wrong_input_is_refused() -> None:
    logits, target = decisions(50, 2)
    with pytest.raises(ValueError, match="pass binary=True"):
        Temperature().fit(logits[:, 0], target[:, 0])
    with pytest.raises(ValueError, match="pass binary=True"):
        Temperature().fit(logits, target)
    with pytest.raises(ValueError, match=r"target must have the logits' shape \(50, 2\)"):
        Temperature().fit(logits, target[:, 0], binary=True)
    target[:, 1] = -100
    with pytest.raises(ValueError, match="label 1: nothing to fit"):
        Temperature().fit(logits, target, binary=True)


@pytest.mark.parametrize("key", ["temperature", "isotonic", "local-temperature"])
def test_labels_with_one_problem_give_one_warning(key: str) -> None:
    logits, target = decisions(300, 3)
    with pytest.warns(UserWarning, match="single logits look like") as caught:
        create_calibrator(key).fit(logits.sigmoid(), target, binary=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "label" not in str(caught[0].message)  # all of them


def test_a_warning_names_the_labels_that_it_is_about() -> None:
    logits, target = decisions(300, 3)
    logits[:, 2] = logits[:, 1]
    target[:, 1:] = (logits[:, 1:] > 0).long()
    with pytest.warns(UserWarning, match="^labels 1, 2: the temperature stopped at its bound") as caught:
        Temperature().fit(logits, target, binary=True)
    assert len(caught) == 1
