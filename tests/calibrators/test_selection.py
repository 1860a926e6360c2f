"""Choosing a calibrator by what it does for data that it was not fitted to."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from calibrant.calibrators import CALIBRATORS, Identity, Ranking, Temperature, choose, create_calibrator, rank
from calibrant.layout import as_logits
from calibrant.metrics import ece
from tests.calibrators.test_contract import sampled


def by_hand(key, logits, target, folds, seed):
    """The cross-validated NLL, sample by sample, of a plain loop over the folds."""
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    losses = torch.empty(len(target), dtype=torch.float64)
    for part in order.tensor_split(folds):
        others = torch.tensor([index for index in range(len(target)) if index not in set(part.tolist())])
        calibrator = create_calibrator(key).fit(logits[others].double(), target[others])
        losses[part] = F.cross_entropy(calibrator(logits[part].double()), target[part], reduction="none")
    return losses


def test_the_ranking_is_of_held_out_nll():
    logits, target = sampled(150, 3)
    keys = ["temperature", "beta", "isotonic"]
    ranking = rank(logits, target, candidates=keys, folds=4, seed=3)
    nothing = by_hand("identity", logits, target, 4, 3)
    assert {each.key for each in ranking.candidates} == {"identity", *keys}
    for each in ranking.candidates:
        losses = by_hand(each.key, logits, target, 4, 3)
        assert each.nll == pytest.approx(losses.mean().item(), rel=1e-9)
        error = (losses - nothing).std(correction=0).item() / 150**0.5
        assert each.standard_error == pytest.approx(error, rel=1e-6, abs=1e-12)
        assert each.seconds >= 0
    held_out = [each.nll for each in ranking.candidates]
    assert held_out == sorted(held_out)
    assert ranking.best is ranking.candidates[0]


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_the_winner_has_the_smallest_held_out_nll_of_acceptable_candidates(sharpness):
    logits, target = sampled(90, 3, sharpness=sharpness)
    shown = []
    winner = choose(logits, target, folds=2, show=shown.append)
    (ranking,) = shown
    assert winner.key == ranking.best.key
    assert ranking.best.nll == min(each.nll for each in ranking.candidates if each.acceptable)
    nothing = next(each for each in ranking.candidates if each.key == "identity")
    assert ranking.best.nll <= nothing.nll
    assert nothing.standard_error == 0


@pytest.mark.parametrize("shift", [0.0, 0.3, 4.0])
def test_more_parameters_than_a_temperature_need_a_clear_advantage(shift):
    logits, target = sampled(150, 3, sharpness=0.5)
    logits = logits + shift * torch.arange(3)
    keys = ["temperature", "vector", "isotonic", "beta"]
    ranking = rank(logits, target, candidates=keys, folds=3)
    held_out = {key: by_hand(key, logits, target, 3, 0) for key in ["identity", *keys]}
    simple = min((held_out["identity"], held_out["temperature"]), key=torch.mean)
    for each in ranking.candidates:
        gain = simple - held_out[each.key]
        clear = bool(gain.mean() > gain.std(correction=0) / 150**0.5)
        assert each.acceptable == (each.key in ("identity", "temperature") or clear)
    assert ranking.best.key == ("temperature" if shift < 4 else "vector")
    passed_over = (
        "temperature is chosen: vector has a lower NLL than temperature, but by less than a standard error."
    )
    assert (passed_over in str(ranking)) == (shift == 0)  # vector has the smallest NLL, by chance


def test_of_few_elements_only_few_parameters_are_learned():
    sizes = (99, 100, 499, 500)
    very_few, *few, enough = ({each.key for each in rank(*sampled(n, 3), folds=2).candidates} for n in sizes)
    assert very_few == {"identity", "temperature"}
    assert few == 2 * [{"identity", "temperature", "structured-vector", "vector"}]
    assert few[0] < enough


@pytest.mark.parametrize("samples", [99, 400])
@pytest.mark.filterwarnings("ignore:.* true classes have a probability of 0")
def test_true_classes_with_a_probability_of_0_bring_methods_that_cope_with_them(samples):
    votes = torch.rand(2 * samples, 10, generator=torch.Generator().manual_seed(0))
    target = torch.arange(2 * samples) % 10
    votes[torch.arange(2 * samples), target] += 0.5
    votes = (10 * (4 * votes).softmax(1)).round()  # of ten trees, about
    logits = as_logits(votes / votes.sum(1, keepdim=True))
    train, test = slice(samples), slice(samples, None)
    rankings = []
    chosen = choose(logits[train], target[train], show=rankings.append)
    assert "ensemble-temperature" in {each.key for each in rankings[0].candidates}
    temperature = Temperature().fit(logits[train], target[train])
    assert F.cross_entropy(chosen(logits[test]), target[test]) < F.cross_entropy(
        temperature(logits[test]), target[test]
    )
    assert ece(chosen(logits[test]), target[test]) < ece(temperature(logits[test]), target[test])


def test_several_labels_of_an_element_are_one_element():
    logits, target = torch.randn(99, 6), torch.randint(2, (99, 6))
    keys = {each.key for each in rank(logits, target, folds=2, binary=True).candidates}
    assert keys == {"identity", "temperature"}


def test_of_few_images_only_a_temperature_is_learned():
    few, enough = ({each.key for each in rank(*sampled(n, 3, 8, 8), folds=2).candidates} for n in (9, 10))
    assert few == {"identity", "temperature"}
    assert "local-temperature" in enough


def test_the_winner_is_fitted_to_all_of_the_data():
    logits, target = sampled(400, 3, sharpness=0.2)
    winner = choose(logits, target, candidates=["temperature"])
    assert isinstance(winner, Temperature)
    assert torch.equal(winner.temperature, Temperature().fit(logits, target).temperature)


def test_nothing_is_done_where_nothing_helps():
    wins = 0
    for seed in range(5):
        # Binning what is calibrated can only lose.
        logits, target = sampled(300, 4, seed=seed, sharpness=1.0)
        winner = choose(logits, target, candidates=["histogram-binning", "isotonic"])
        wins += isinstance(winner, Identity)
        assert winner.num_classes == 4
    assert wins == 5


def test_the_winner_helps_on_data_of_its_own():
    logits, target = sampled(1200, 4, spread=6.0, sharpness=0.3)
    winner = choose(logits[:500], target[:500], folds=2)
    before, after = (F.cross_entropy(each[500:], target[500:]) for each in (logits, winner(logits)))
    assert after < before - 0.3


def test_structure_that_no_temperature_has_is_found():
    logits, target = sampled(3000, 3, sharpness=1.0)
    shifted = logits + torch.tensor([3.0, 0.0, -3.0])
    ranking = rank(shifted, target, candidates=["temperature", "structured-vector"], folds=3)
    assert ranking.best.key == "structured-vector"
    assert ranking.candidates[0].nll < ranking.candidates[1].nll - 0.1


def test_the_same_seed_gives_the_same():
    logits, target = sampled(200, 3)

    def numbers(seed):
        ranking = rank(logits, target, candidates=["temperature", "platt"], folds=3, seed=seed)
        return [(each.key, each.nll, each.standard_error) for each in ranking.candidates]

    state = torch.get_rng_state()
    assert numbers(1) == numbers(1)
    assert numbers(1) != numbers(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_candidates_are_tried_once_and_doing_nothing_always():
    logits, target = sampled(60, 3)
    ranking = rank(logits, target, candidates=["beta", "identity", "beta"], folds=2)
    assert sorted(each.key for each in ranking.candidates) == ["beta", "identity"]
    assert [each.key for each in rank(logits, target, candidates=[], folds=2).candidates] == ["identity"]


def test_all_calibrators_can_be_candidates():
    logits, target = sampled(120, 3)
    ranking = rank(logits, target, candidates=list(CALIBRATORS), folds=2)
    assert {each.key for each in ranking.candidates} == set(CALIBRATORS)


def test_pairs_of_classes_are_left_out_where_there_are_many():
    few, many = (
        {each.key for each in rank(*sampled(500, classes), folds=2).candidates} for classes in (4, 21)
    )
    assert {"identity", "temperature", "structured-vector", "vector", "spline"} <= many < few
    assert not many & {"matrix", "structured-matrix", "dirichlet", "isotonic"}
    assert few <= set(CALIBRATORS)


def test_other_class_frequencies_are_found_by_default():
    logits, target = sampled(2000, 30)
    shift = torch.linspace(-4, 4, 30)
    assert rank(logits + shift, target, folds=2).best.key == "vector"
    assert rank(2 * logits, target, folds=2).best.key == "temperature"


def test_void_pixels_are_left_out():
    logits, target = sampled(3, 4, 6, 5)
    target[:, 0] = 255
    cropped, labels = logits[:, :, 1:], target[:, 1:]
    options = {"candidates": ["temperature", "beta"], "folds": 3}
    ours = rank(logits, target, ignore_index=255, **options)
    theirs = rank(cropped, labels, **options)
    assert [(each.key, each.nll) for each in ours.candidates] == [
        (each.key, pytest.approx(each.nll)) for each in theirs.candidates
    ]
    winner = choose(logits, target, ignore_index=255, **options)
    assert winner(logits).shape == logits.shape


@pytest.mark.filterwarnings("ignore:all labels are of one class")
@pytest.mark.parametrize(("samples", "folds"), [(5, 4), (10, 7), (6, 6), (2, 2)])
def test_there_are_as_many_folds_as_asked_for(monkeypatch, samples, folds):
    sizes = []
    fit = Identity.fit_rows
    monkeypatch.setattr(
        Identity, "fit_rows", lambda self, rows, labels: (sizes.append(len(labels)), fit(self, rows, labels))
    )
    rank(*sampled(samples, 3), candidates=[], folds=folds)
    assert len(sizes) == folds
    assert sum(samples - size for size in sizes) == samples
    assert max(sizes) - min(sizes) <= 1


def test_of_equals_doing_nothing_wins():
    logits = torch.zeros(30, 3)
    assert choose(logits, torch.arange(3).repeat(10), candidates=["temperature"], folds=2).key == "identity"


def test_parts_whose_fit_is_at_a_bound_count_as_not_calibrated():
    logits, target = 5 * torch.eye(3).repeat(10, 1), torch.arange(3).repeat(10)
    ranking = rank(logits, target, candidates=["temperature"], folds=2)  # all are right; a warning: an error
    assert [each.nll for each in ranking.candidates] == [ranking.best.nll] * 2
    assert ranking.best.key == "identity"


def test_a_single_error_does_not_rule_out_a_temperature():
    """Without it, four of five parts would be fitted with a temperature near 0, and lose on the error."""
    logits, target = 1.5 * torch.eye(3).repeat(40, 1), torch.arange(3).repeat(40)
    target[0] = 1
    ranking = rank(logits, target, candidates=["temperature"])
    assert ranking.best.key == "temperature"
    assert ranking.best.nll < 0.2 < ranking.candidates[1].nll


def test_the_table_has_every_candidate(capsys):
    logits, target = sampled(100, 3)
    choose(logits, target, candidates=["temperature", "platt"], folds=2, show=print)
    printed = capsys.readouterr().out
    ranking = rank(logits, target, candidates=["temperature", "platt"], folds=2)
    assert isinstance(ranking, Ranking)
    for each in ranking.candidates:
        line = next(line for line in printed.splitlines() if line.startswith(f"{each.key} "))
        assert f"{each.nll:.4f}" in line
        assert ("±" in line) == (each.key != "identity")
    assert "Held-out NLL" in printed


def test_nothing_is_shown_unasked(capsys):
    choose(*sampled(50, 3), candidates=["temperature"], folds=2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("function", [rank, choose])
def test_errors(function):
    logits, target = sampled(20, 3)
    for folds in (1, 0, -3):
        with pytest.raises(ValueError, match=f"folds must be .* 2.*, got {folds}"):
            function(logits, target, folds=folds)
    with pytest.raises(
        ValueError, match="20 elements cannot be divided into 21 folds: expected at least 21 of"
    ):
        function(logits, target, folds=21)
    with pytest.raises(ValueError, match="1 element cannot be divided into 5 folds"):
        function(logits[:1], target[:1])
    with pytest.raises(ValueError, match=r"unknown calibrator 'temprature' [(]did you mean 'temperature'"):
        function(logits, target, candidates=["temprature"])
    with pytest.raises(ValueError, match="nothing to fit"):
        function(logits, torch.full_like(target, -100))
    with pytest.raises(ValueError, match="NaN or infinite"):
        function(logits.masked_fill(logits > 1, torch.nan), target)
    with pytest.raises(ValueError, match="target must have shape"):
        function(logits, target[1:])
    with pytest.raises(TypeError, match="candidates must be a list of keys, got the string 'temperature'"):
        function(logits, target, candidates="temperature")


def test_unknown_keys_are_refused_before_anything_is_fitted(monkeypatch):
    monkeypatch.setattr(Temperature, "fit", lambda *_, **__: pytest.fail("fitted"))
    with pytest.raises(ValueError, match="unknown calibrator"):
        rank(*sampled(20, 3), candidates=["temperature", "unheard-of"])


def test_an_image_is_never_on_both_sides():
    """Folds are made of images: with two of them each is judged by what was fitted to the other."""
    generator = torch.Generator().manual_seed(0)
    posterior = torch.randn(2, 3, 20, 20, generator=generator)
    target = (posterior - (-torch.rand(posterior.shape, generator=generator).log()).log()).argmax(1)
    target[:, :2] = 255
    logits = posterior * torch.tensor([2.0, 4.0]).view(2, 1, 1, 1)
    ranking = rank(logits, target, candidates=["temperature"], folds=2, ignore_index=255)
    found = next(each.nll for each in ranking.candidates if each.key == "temperature")
    losses = []
    for fitted, judged in ((0, 1), (1, 0)):
        temperature = create_calibrator("temperature").fit(
            logits[fitted : fitted + 1], target[fitted : fitted + 1], ignore_index=255
        )
        calibrated = temperature(logits[judged : judged + 1].double())
        losses.append(
            torch.nn.functional.cross_entropy(calibrated, target[judged : judged + 1], ignore_index=255)
        )
    assert found == pytest.approx(float(sum(losses) / 2), rel=1e-6)
    with pytest.raises(ValueError, match="2 images cannot be divided into 5 folds"):
        rank(logits, target, ignore_index=255)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_images_in_any_type_and_images_without_labels(dtype):
    logits, target = sampled(6, 4, 6, 5)
    target[:3] = 255
    ranking = rank(logits, target.to(dtype), candidates=["temperature"], folds=3, ignore_index=255)
    expected = rank(logits[3:], target[3:], candidates=["temperature"], folds=3)
    assert [each.nll for each in ranking.candidates] == [each.nll for each in expected.candidates]


def test_images_of_a_class_that_8_bits_cannot_tell_from_ignored():
    logits, target = sampled(6, 200, 2, 2)
    target[:2] = 156
    found = [
        rank(logits, labels, candidates=["temperature", "local-temperature"], folds=3)
        for labels in (target, target.to(torch.uint8))
    ]
    assert [each.nll for each in found[0].candidates] == [each.nll for each in found[1].candidates]


def test_pixels_of_an_image_are_not_independent():
    # Each image four times over says no more about the images than once.
    logits, target = sampled(60, 3, 2, 2, seed=30)
    target[:, 0, 0] = -100
    keys = ["temperature", "structured-vector"]
    once = rank(logits, target, candidates=keys, folds=3)
    often = rank(logits.repeat(1, 1, 4, 1), target.repeat(1, 4, 1), candidates=["temperature"], folds=3)
    one, many = (
        next(each.standard_error for each in ranking.candidates if each.key == "temperature")
        for ranking in (once, often)
    )
    assert one == pytest.approx(many, rel=1e-3)
    # As the spread of the images' means says, where all have the same number of pixels.
    flat = by_image("temperature", logits, target, 3) - by_image("identity", logits, target, 3)
    assert one == pytest.approx(flat.std(correction=0).item() / 60**0.5, rel=1e-6)


def by_image(key, logits, target, folds):
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    means = torch.empty(len(target), dtype=torch.float64)
    for part in order.tensor_split(folds):
        others = torch.tensor([index for index in range(len(target)) if index not in set(part.tolist())])
        calibrator = create_calibrator(key).fit(logits[others].double(), target[others])
        losses = F.cross_entropy(calibrator(logits[part].double()), target[part], reduction="none")
        means[part] = losses.flatten(1).sum(1) / 3
    return means


def test_a_temperature_for_each_image_is_tried_on_images():
    logits, target = sampled(32, 3, 4, 4, seed=31)
    keys = {each.key for each in rank(logits, target, folds=2).candidates}
    assert "local-temperature" in keys
    # It counts ignored pixels too, and cannot where they hold nothing.
    target[:, 0] = -100
    logits[:, :, 0] = torch.nan
    assert "local-temperature" not in {each.key for each in rank(logits, target, folds=2).candidates}
    flat = sampled(100, 3, seed=32)
    assert "local-temperature" not in {each.key for each in rank(*flat, folds=2).candidates}


def test_images_of_unequal_difficulty_choose_their_own_temperatures():
    logits, target = sampled(40, 4, 8, 8, seed=33, spread=1.0, sharpness=1.0)
    factor = torch.linspace(0.5, 6, 40).view(-1, 1, 1, 1)
    target = logits - (-torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)).log()).log()
    assert choose(factor * logits, target.argmax(1), folds=3).key == "local-temperature"


def test_a_label_that_is_always_right_leaves_the_temperature_of_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 3, generator=generator)
    target = (torch.rand(200, 3, generator=generator) < logits.sigmoid()).long()
    target[:, 1] = (logits[:, 1] > 0).long()
    ranking = rank(5 * logits, target, candidates=["temperature"], binary=True)
    assert ranking.best.key == "temperature"


@pytest.mark.filterwarnings("ignore:these logits look like probabilities")
def test_probabilities_in_place_of_logits_are_ranked_too():
    logits, target = sampled(100, 3)
    assert rank(logits.softmax(1), target, candidates=["temperature"]).best.key == "temperature"


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("choosing", [rank, choose])
def test_labels_of_a_single_class_are_warned_of_once(choosing, binary):
    logits = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0, 1]]).expand(60, 2).clone() if binary else torch.ones(60, dtype=torch.long)
    target[:5] = -100
    with pytest.warns(UserWarning, match="same answer|of one class") as caught:
        choosing(logits, target, candidates=["temperature"], binary=binary)
    assert len(caught) == 1
    assert {each.filename for each in caught} == {__file__}
    target[5] = 1 - target[5]
    with warnings.catch_warnings(action="error"):
        rank(logits, target, candidates=["temperature"], binary=binary)
