"""Conformal sets: their definitions, the guarantee, storage and export."""

import io
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import betabinom
from torch import nn

from calibrant.calibrators import Calibrator, Temperature, load_calibrator, save_calibrator
from calibrant.conformal import (
    APS,
    CONFORMAL,
    LAC,
    RAPS,
    create_conformal,
    evaluate_sets,
    expected_coverage,
    load_conformal,
    save_conformal,
)
from calibrant.conformal.sets import quantile_rank
from tests.onnx_exporter import operators_listed_once

KINDS = [
    ("lac", {}),
    ("lac", {"class_conditional": True}),
    ("aps", {}),
    ("aps", {"never_empty": False}),
    ("raps", {"weight": 0.05, "size": 2}),
    ("raps", {"class_conditional": True, "never_empty": False}),
]
EXPORTED = [KINDS[1], KINDS[4]]
every = pytest.mark.parametrize(("key", "options"), KINDS, ids=[f"{key}-{o}" for key, o in KINDS])


def sampled(size, classes=5, seed=0, spread=2.0):
    """Logits, and labels drawn from their softmax: the posterior is known."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


def naive_score(key, options, probability, k):
    """The score of one class of one element."""
    if key == "lac":
        return 1 - probability[k]
    order = sorted(range(len(probability)), key=lambda j: -probability[j])
    rank = order.index(k) + 1
    score = sum(probability[j] for j in order[: rank if not options.get("never_empty", True) else rank - 1])
    if key == "raps":
        score += options.get("weight", 0.01) * max(0, rank - options.get("size", 5))
    return score


@every
@pytest.mark.parametrize(("size", "alpha"), [(60, 0.1), (99, 0.1), (250, 0.25)])
def test_sets_equal_their_definition(key, options, size, alpha):
    logits, target = sampled(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sets = create_conformal(key, alpha=alpha, **options).fit(logits, target)
    probability = logits.softmax(1).numpy()
    scores = np.array([naive_score(key, options, p, y) for p, y in zip(probability, target, strict=True)])
    thresholds = []
    for k in range(5):
        own = np.sort(scores[target == k] if options.get("class_conditional") else scores)
        rank = int(np.ceil(np.round((len(own) + 1) * (1 - alpha), 9)))
        thresholds.append(own[rank - 1] if rank <= len(own) else np.inf)
    np.testing.assert_allclose(sets.threshold.numpy(), thresholds, atol=1e-12)
    new, _ = sampled(40, seed=1)
    expected = [
        [naive_score(key, options, p, k) <= thresholds[k] for k in range(5)] for p in new.softmax(1).numpy()
    ]
    assert sets(new).tolist() == expected


@pytest.mark.parametrize(
    ("key", "options"),
    [("lac", {}), ("aps", {"never_empty": False}), ("raps", {"never_empty": False}), ("aps", {})],
)
def test_the_coverage_has_the_distribution_that_theory_promises(key, options):
    """With continuous scores: beta-binomial, over draws of held-out and new data, whatever the model."""
    held_out, new, alpha, trials = 80, 60, 0.1, 300
    logits, target = sampled(trials * (held_out + new), classes=8)
    logits = 3 * logits  # over-confident: the guarantee does not need calibrated probabilities
    parts = zip(logits.split(held_out + new), target.split(held_out + new), strict=True)
    covered = []
    for rows, labels in parts:
        sets = create_conformal(key, alpha=alpha, **options).fit(rows[:held_out], labels[:held_out])
        inside = sets(rows[held_out:]).gather(1, labels[held_out:].unsqueeze(1))
        covered.append(int(inside.sum()))
    rank = int(np.ceil((held_out + 1) * (1 - alpha)))
    theory = betabinom(new, rank, held_out + 1 - rank)
    error = 4 * theory.std() / np.sqrt(trials)
    assert np.mean(covered) >= (1 - alpha) * new - error
    if key == "aps" and not options:
        return  # all elements whose top class is right share a score, and the coverage is larger
    assert np.mean(covered) == pytest.approx(theory.mean(), abs=error)
    assert np.std(covered) == pytest.approx(theory.std(), rel=0.15)
    inside = (np.array(covered) >= theory.ppf(0.05)) & (np.array(covered) <= theory.ppf(0.95))
    assert 0.87 <= inside.mean() <= 0.97  # at least 90 %, because counts are whole


def test_every_class_is_covered_with_thresholds_of_its_own():
    """On data with classes of different difficulty, one threshold for all covers some too rarely."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(3, (30_000,), generator=generator)
    difficulty = torch.tensor([4.0, 2.0, 0.5])[target].unsqueeze(1)
    logits = difficulty * torch.eye(3)[target] + torch.randn(30_000, 3, generator=generator)
    worst = {}
    for conditional in (False, True):
        sets = LAC(alpha=0.1, class_conditional=conditional).fit(logits[:10_000], target[:10_000])
        figures = evaluate_sets(sets(logits[10_000:]), target[10_000:])
        worst[conditional] = min(each.coverage for each in figures.classes)
        assert figures.coverage == pytest.approx(0.9, abs=0.01)
    assert worst[False] < 0.85
    assert worst[True] == pytest.approx(0.9, abs=0.015)


def test_calibrated_probabilities_give_smaller_sets():
    logits, target = sampled(6000, classes=10, spread=1.5)
    logits = logits + 2 * torch.linspace(0, 1, 6000, dtype=torch.float64).unsqueeze(1) * logits
    sizes = [
        evaluate_sets(sets(x[3000:]), target[3000:]).size
        for x in (4 * logits, Temperature().fit(4 * logits[:1500], target[:1500])(4 * logits))
        for sets in [APS().fit(x[1500:3000], target[1500:3000])]
    ]
    assert sizes[1] < sizes[0]


def test_aps_is_never_empty_unless_asked_for():
    logits, target = sampled(500, spread=4.0)
    assert (APS().fit(logits, target)(logits).sum(1) >= 1).all()
    assert (RAPS().fit(logits, target)(logits).sum(1) >= 1).all()
    assert (APS(never_empty=False).fit(logits, target)(logits).sum(1) == 0).any()


@every
def test_images_float32_and_ignored_elements(key, options):
    logits, target = sampled(600)
    target[::7] = 255
    images, labels = logits.view(3, 10, 20, 5).permute(0, 3, 1, 2).float(), target.view(3, 10, 20)
    sets = create_conformal(key, **options).fit(images, labels, ignore_index=255)
    rows = create_conformal(key, **options).fit(
        images.permute(0, 2, 3, 1).reshape(-1, 5)[target != 255], target[target != 255]
    )
    assert torch.equal(sets.threshold, rows.threshold)
    found = sets(images)
    assert found.dtype == torch.bool
    assert found.shape == images.shape
    assert torch.equal(
        found.permute(0, 2, 3, 1).reshape(-1, 5), rows(images.permute(0, 2, 3, 1).reshape(-1, 5))
    )


@every
def test_batches_give_the_fit_of_all_data(key, options):
    logits, target = sampled(2000)
    target[::7] = 255
    whole = create_conformal(key, **options).fit(logits, target, ignore_index=255)
    batches = list(zip(logits.split(300), target.split(300), strict=True))
    batched = create_conformal(key, **options).fit_batches(batches, ignore_index=255)
    assert torch.equal(batched.threshold, whole.threshold)
    assert batched.num_classes == 5


def test_scores_are_computed_in_blocks(monkeypatch):
    """A fit to 260,000 pixels of 21 classes never holds the float64 scores of all of them."""
    found, scores = [], APS.scores
    monkeypatch.setattr(APS, "scores", lambda self, rows: found.append(rows.numel()) or scores(self, rows))
    logits = torch.randn(26, 21, 100, 100, generator=torch.Generator().manual_seed(0))
    APS().fit(logits, logits.argmax(1))
    assert sum(found) == logits.numel()
    assert max(found) < logits.numel() / 10


def test_an_element_at_the_threshold_is_covered_in_every_type():
    """Equal rows share a score. In float32 none of them may fall out by rounding."""
    rows = torch.tensor([[0.3, 0.1, -0.7], [1.7, 0.2, 0.1]]).repeat(200, 1)
    sets = LAC(alpha=0.1).fit(rows, torch.zeros(400, dtype=torch.long))
    assert sets(rows)[:, 0].all()
    assert sets.half()(rows)[:, 0].all()


def test_no_tolerance_is_added_to_the_threshold():
    """MAPIE accepts scores up to 1e-8 above it. With 1,000 classes that changes 1 % of the sets."""
    logits, target = sampled(2000, 1000)
    sets = LAC(alpha=0.1).fit(logits[:1000], target[:1000])
    scores = 1 - logits[1000:].softmax(1)
    found = sets(logits[1000:])
    assert torch.equal(found, scores <= sets.threshold)
    tolerant = scores <= sets.threshold + 1e-8
    assert 0.97 < (found == tolerant).all(1).double().mean() < 0.999


def test_too_few_elements_put_every_class_into_every_set():
    logits, target = sampled(8)
    with pytest.warns(UserWarning, match=r"too few held-out elements for alpha = 0\.1.*at least 9 elements"):
        sets = LAC().fit(logits, target)
    assert sets(logits).all()
    logits[:, 2] = -torch.inf  # ruled out
    assert not sets(logits)[:, 2].any()
    with pytest.warns(UserWarning, match=r"5 of 5 classes are in every set.*of each class are needed"):
        LAC(class_conditional=True).fit(*sampled(20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LAC().fit(*sampled(9))


@every
def test_saved_and_loaded(key, options, tmp_path):
    sets = create_conformal(key, alpha=0.2, **options).fit(*sampled(200))
    save_conformal(sets, tmp_path / "sets.safetensors", class_names=list("abcde"))
    loaded = load_conformal(tmp_path / "sets.safetensors")
    assert type(loaded) is type(sets)
    assert loaded.options() == sets.options()
    assert loaded.class_names == tuple("abcde")
    logits, _ = sampled(50, seed=2)
    assert torch.equal(loaded(logits), sets(logits))
    fresh = create_conformal(key, alpha=0.2, **options)
    fresh.load_state_dict(sets.state_dict())
    assert torch.equal(fresh(logits), sets(logits))


def test_a_calibrator_is_not_taken_for_sets_and_the_other_way_round(tmp_path):
    path, logits = tmp_path / "file.safetensors", sampled(100)
    save_calibrator(Temperature().fit(*logits), path)
    with pytest.raises(ValueError, match=r"not a conformal predictor .* 'calibrant-calibrator-1'"):
        load_conformal(path)
    assert not isinstance(LAC(), Calibrator)
    with pytest.raises(TypeError, match="takes a calibrator, got LAC; conformal sets have save_conformal"):
        save_calibrator(LAC().fit(*logits), path)
    with pytest.raises(ValueError, match="not a conformal predictor"):  # the file is as before
        load_conformal(path)
    save_conformal(LAC().fit(*logits), path)
    with pytest.raises(ValueError, match="not a calibrator"):
        load_calibrator(path)
    with pytest.raises(FileNotFoundError, match="no conformal predictor"):
        load_conformal(tmp_path / "none")
    save_conformal(LAC().fit(*logits), path, class_names=list("abcde"))
    with pytest.raises(ValueError, match="other classes"):
        load_conformal(path, class_names=list("edcba"))


@pytest.mark.parametrize(("key", "options"), EXPORTED)
def test_exported_by_torch(key, options):
    logits, target = sampled(300)
    model = nn.Sequential(
        Temperature().fit(logits, target), create_conformal(key, **options).fit(logits, target)
    )
    program = torch.export.export(
        model.eval(), (logits[:4].float(),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    assert torch.equal(torch.export.load(stream).module()(logits.float()), model(logits.float()))


@pytest.mark.parametrize(("key", "options"), EXPORTED)
def test_exported_to_onnx(key, options):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    logits, target = sampled(300)
    sets = create_conformal(key, **options).fit(logits, target).eval()
    with warnings.catch_warnings(), operators_listed_once():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            sets,
            (logits[:4].float(),),
            dynamo=True,
            verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    new = sampled(500, seed=3)[0].float()
    (found,) = session.run(None, {session.get_inputs()[0].name: new.numpy()})
    assert np.array_equal(found, sets(new).numpy())


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\]"):
        LAC(alpha=0)
    with pytest.raises(ValueError, match="alpha must be below 1"):
        LAC(alpha=1)
    with pytest.raises(ValueError, match="weight must"):
        RAPS(weight=-1)
    with pytest.raises(ValueError, match="size must"):
        RAPS(size=0)
    with pytest.raises(ValueError, match=r"unknown conformal sets 'asp'.*lac, aps, raps"):
        create_conformal("asp")
    for switch in ("class_conditional", "never_empty"):
        with pytest.raises(ValueError, match=f"{switch} must be True or False, got 'false'"):
            APS(**{switch: "false"})
    with pytest.raises(RuntimeError, match="LAC has learned nothing yet"):
        LAC()(torch.zeros(1, 3))
    assert list(CONFORMAL) == ["lac", "aps", "raps"]


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 3)])
def test_single_logits_get_an_advice_that_works(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = (logits > 0).long()
    with pytest.raises(ValueError, match=r"torch\.stack\(\[0 \* l, l\], 1\)"):
        LAC().fit(logits, target)
    with pytest.raises(ValueError, match=r"torch\.stack\(\[0 \* l, l\], 1\)"):
        LAC().fit(logits, target, binary=True)
    assert LAC().fit(torch.stack([0 * logits, logits], 1), target).num_classes == 2


@pytest.mark.parametrize(("count", "alpha", "rank"), [(99, 0.1, 90), (9, 0.1, 9), (8, 0.1, 9), (10, 0.5, 6)])
def test_the_rank_of_the_threshold(count, alpha, rank):
    """Also where (n + 1) · (1 - alpha) is a whole number that rounding exceeds."""
    assert quantile_rank(count, alpha) == rank


def test_the_expected_coverage_is_that_of_simulations():
    low, high = expected_coverage(200, 0.1)
    generator = np.random.default_rng(0)
    rank = int(np.ceil(201 * 0.9))
    drawn = np.sort(generator.random((4000, 200)), 1)[:, rank - 1]  # the coverage of uniform scores
    assert low == pytest.approx(np.quantile(drawn, 0.025), abs=0.004)
    assert high == pytest.approx(np.quantile(drawn, 0.975), abs=0.004)
    assert expected_coverage(5, 0.1) == (1.0, 1.0)


def test_print_shows_alpha_and_the_threshold():
    logits, target = sampled(200)
    assert repr(LAC()) == "LAC(alpha=0.1, not fitted)"
    sets = LAC().fit(logits, target)
    assert repr(sets) == f"LAC(alpha=0.1, 5 classes, threshold={sets.threshold[0]:.4g})"
    assert repr(sets.to("meta")) == "LAC(alpha=0.1, 5 classes, threshold=<5>)"
    each = LAC(alpha=0.2, class_conditional=True).fit(logits, target)
    assert repr(each) == "LAC(alpha=0.2, class_conditional=True, 5 classes, threshold=<5>)"


def test_batches_must_hold_the_same_elements_each_time():
    logits, target = sampled(100)

    class Growing:
        """Batches with more elements from pass to pass."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(logits, target)] * self.passes)

    with pytest.raises(ValueError, match="held 100 elements at first and 200 later"):
        APS().fit_batches(Growing())
