"""Which calibrator a run gets, and to what it is fitted."""

import pytest
import torch

from calibrant.calibrators import Ranked, Ranking, create_calibrator
from calibrant.training import RecipeError, Run, calibration
from tests.training.test_bundle import small_run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("elements", [0, 1, 2, 600])
def test_calibrators_are_compared_from_two_validation_elements_on(small, monkeypatch, elements):
    torch.manual_seed(0)
    labels = torch.arange(elements) % 3
    batches = [(torch.randn(elements, 3), labels)]
    monkeypatch.setattr(Run, "predictions", lambda run, part: batches)
    given = []

    def noted(logits, target, *, folds, binary):
        assert not binary
        given.append(len(logits))
        assert 2 <= folds <= 5
        return Ranking((Ranked("vector", 0.0, 0.0, 0.0), Ranked("identity", 1.0, 0.0, 0.0)))

    monkeypatch.setattr(calibration, "rank", noted)
    found, _ = calibration.fitted_calibrator(small, "auto")
    assert given == ([elements] if elements > 1 else [])
    assert found.num_classes == 3
    assert elements > 1 or found.key == "identity"


def test_a_calibrator_at_its_bound_is_passed_over(small, monkeypatch):
    batches = [
        (2 * torch.eye(3).repeat(9, 1), torch.arange(27) % 3)
    ]  # all correct: any confidence is too low
    monkeypatch.setattr(Run, "predictions", lambda run, part: batches)
    with pytest.warns(UserWarning, match="stopped at its bound"):
        create_calibrator("temperature").fit(*batches[0])
    reason = calibration.fitted_temperature(small)[1]
    assert "stopped at its bound" in reason
    assert reason.endswith(
        "every validation label is predicted correctly, so nothing says how confident to be"
    )
    assert calibration.fitted_calibrator(small, "auto")[1] == reason
    ranking = Ranking((Ranked("temperature", 0.1, 0.0, 0.0), Ranked("identity", 0.2, 0.0, 0.0)))
    monkeypatch.setattr(calibration, "rank", lambda *data, **options: ranking)
    calibrator, found = calibration.fitted_calibrator(small, "auto")
    assert (calibrator.key, found) == ("identity", reason)


def test_few_elements_of_another_class_balance_get_an_offset_for_each_class(small, monkeypatch):
    """As after training on a long tail: the logits of one class are too high."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=generator)
    labels = (logits - (-torch.rand(300, 3, generator=generator).log()).log()).argmax(1)
    batches = [(logits + torch.tensor([4.0, 0.0, 0.0]), labels)]
    monkeypatch.setattr(Run, "predictions", lambda run, part: batches)
    assert calibration.fitted_calibrator(small, "auto")[0].key in ("vector", "structured-vector")


def test_calibrators_that_are_not_clearly_better_are_passed_over(small, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(60, 3, generator=generator), torch.arange(60) % 3)]
    monkeypatch.setattr(Run, "predictions", lambda run, part: batches)
    for acceptable, expected in ((True, "vector"), (False, "temperature")):
        best = Ranked("vector", 0.4, 0.1, 0.0, acceptable)
        ranking = Ranking((best, Ranked("temperature", 0.5, 0.1, 0.0), Ranked("identity", 0.9, 0.0, 0.0)))
        monkeypatch.setattr(calibration, "rank", lambda *data, ranking=ranking, **options: ranking)
        assert calibration.fitted_calibrator(small, "auto")[0].key == expected


def overconfident_maps(images, size):
    """Logits and labels of pixels, with three times the logits that the labels are drawn by."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(images, 3, size, size, generator=generator)
    noise = -(-torch.rand(logits.shape, generator=generator).log()).log()
    labels = (logits + noise).argmax(1)
    labels[:, : size // 2] = -100
    return 3 * logits, labels


@pytest.mark.parametrize("images", [2, 7])
def test_large_maps_are_compared_by_some_pixels_of_every_image(small, monkeypatch, images):
    logits, labels = overconfident_maps(images, 40)
    monkeypatch.setattr(calibration, "_MANY", 3 * images * 300)
    some, theirs = calibration._part(logits, labels)
    assert some.shape == (images, 3, 300)
    assert (theirs != -100).all()
    for image in range(images):
        assert pixels(some[image], theirs[image]) <= pixels(logits[image], labels[image])
    monkeypatch.setattr(Run, "predictions", lambda run, part: [(logits, labels)])
    monkeypatch.setattr(
        calibration, "rank", lambda *_, **options: Ranking((Ranked("temperature", 0.0, 0.0, 0.0),))
    )
    found, reason = calibration.fitted_calibrator(small, "auto")
    assert reason == ""
    whole = create_calibrator("temperature").fit(logits, labels)  # not only to the pixels that are compared
    assert float(found.temperature) == pytest.approx(float(whole.temperature), rel=1e-6)
    assert float(found.temperature) == pytest.approx(3, rel=0.15)


def pixels(logits, labels):
    """The logits and the label of each pixel."""
    return set(map(tuple, torch.cat([logits.flatten(1), labels.flatten()[None]]).T.tolist()))


def test_large_maps_are_ranked_by_image(small, monkeypatch):
    logits, labels = overconfident_maps(2, 40)
    monkeypatch.setattr(calibration, "_MANY", 3 * 2 * 300)
    monkeypatch.setattr(Run, "predictions", lambda run, part: [(logits, labels)])
    assert calibration.fitted_calibrator(small, "auto")[0].key != "identity"


def test_logits_that_no_calibrator_can_be_fitted_to_are_left_as_they_are(small, monkeypatch):
    batches = [(torch.full((9, 3), -torch.inf), torch.zeros(9, dtype=torch.long))]
    monkeypatch.setattr(Run, "predictions", lambda run, part: batches)
    with pytest.warns(UserWarning, match="no calibrator was fitted to the validation data: logits hold NaN"):
        assert calibration.fitted_calibrator(small, "auto")[0].key == "identity"
    with pytest.raises(RecipeError, match="calibrator platt cannot be fitted to the validation data"):
        calibration.fitted_calibrator(Run(small.folder, small.data_root), "platt")


def test_predictions_that_are_not_stored_get_a_temperature(small, monkeypatch):
    logits, labels = small.predictions("validation")[0]
    monkeypatch.setattr(Run, "predictions", lambda run, part: ((logits, labels),))
    assert calibration.fitted_calibrator(Run(small.folder, small.data_root), "auto")[0].key == "temperature"
