"""Several predictions for each element: pooled probabilities and differences between members."""

import math

import pytest
import torch
from torch import nn

from calibrant import evaluate, evaluate_on
from calibrant.ensembles import Diversity, disagreement, mutual_information, pool
from calibrant.inference import predictions_on

MEMBERS, ROWS, K = 5, 40, 3
LOGITS = 3 * torch.randn(MEMBERS, ROWS, K, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(K, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_probabilities_are_averaged(shape, dtype):
    logits = torch.randn(MEMBERS, 6, K, *shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    pooled = pool(logits)
    assert pooled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = logits.double().softmax(2).mean(0)
    torch.testing.assert_close(pooled.double().softmax(1), expected, rtol=1e-5, atol=1e-7)


def test_pooling_neither_overflows_nor_underflows():
    logits = torch.tensor([[[1000.0, 0.0, -torch.inf]], [[1000.0, 0.0, -torch.inf]]])
    assert pool(logits).tolist() == [[0.0, -1000.0, -torch.inf]]
    assert torch.equal(pool(LOGITS[:1]).argmax(1), LOGITS[0].argmax(1))


def test_mutual_information_by_its_definition():
    probabilities = LOGITS.double().softmax(2)
    mean = probabilities.mean(0)
    expected = (probabilities * (probabilities / mean).log()).sum(2).mean(0)
    torch.testing.assert_close(mutual_information(LOGITS.double()), expected)
    assert mutual_information(LOGITS[:1].repeat(3, 1, 1)).max() < 1e-6
    sure = torch.full((K, 1, K), -torch.inf)
    sure[range(K), 0, range(K)] = 0.0
    assert mutual_information(sure).item() == pytest.approx(math.log(K))


def test_disagreement_counts_pairs():
    predicted = LOGITS.argmax(2)
    pairs = [(first, second) for first in range(MEMBERS) for second in range(first)]
    expected = torch.stack([predicted[i] != predicted[j] for i, j in pairs]).float().mean(0)
    torch.testing.assert_close(disagreement(LOGITS), expected)
    images = LOGITS.view(MEMBERS, 2, 20, K).movedim(-1, 2)
    torch.testing.assert_close(disagreement(images), expected.view(2, 20))
    with pytest.raises(ValueError, match="at least 2 members"):
        disagreement(LOGITS[:1])


def test_diversity_adds_up_and_leaves_out_ignored_elements():
    target = TARGET.clone()
    target[:10] = -100
    parts = [Diversity.of(LOGITS[:, rows], target[rows]) for rows in (slice(0, 25), slice(25, None))]
    means = (parts[0] + parts[1]).means()
    assert means["mutual_information"] == pytest.approx(mutual_information(LOGITS[:, 10:]).mean().item())
    assert means["disagreement"] == pytest.approx(disagreement(LOGITS[:, 10:]).mean().item())
    assert means["entropy"] > means["member_entropy"]


def test_labels_in_8_bits_are_not_taken_for_ignored_ones():
    logits, target = torch.randn(2, 4, 200), torch.tensor([156, 156, 3, 4], dtype=torch.uint8)
    assert Diversity.of(logits, target).samples == 4


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 2)])
def test_decisions_are_those_of_two_classes(shape):
    logits = 3 * torch.randn(MEMBERS, 6, *shape, generator=torch.Generator().manual_seed(3))
    pairs = torch.stack([torch.zeros_like(logits), logits], 2)
    target = torch.ones(6, *shape).long()
    target[0] = -100
    torch.testing.assert_close(pool(logits, binary=True).sigmoid(), logits.sigmoid().mean(0))
    for score in (mutual_information, disagreement):
        found = score(logits, binary=True)
        assert found.shape == (6, *shape)
        torch.testing.assert_close(found, score(pairs))
    means = Diversity.of(logits, target, binary=True).means()
    assert means == Diversity.of(pairs, target).means()
    if shape == (1,):
        assert means == Diversity.of(logits, target.squeeze(1), binary=True).means()


def test_probabilities_instead_of_single_logits_are_told():
    with pytest.warns(UserWarning, match=r"these single logits look like probabilities"):
        pool(torch.rand(3, 100, generator=torch.Generator().manual_seed(0)), binary=True)


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"target must have shape \(40,\), got \(40, 1\)"):
        Diversity.of(LOGITS, TARGET[:, None])
    with pytest.raises(ValueError, match=r"target must have the logits' shape \(40, 3\), got \(40,\)"):
        Diversity.of(LOGITS, TARGET, binary=True)
    with pytest.raises(ValueError, match=r"got \(40,\).*calibrant\.ensembles\.pool\(logits\)"):
        evaluate(LOGITS, TARGET)
    with pytest.raises(ValueError, match=r"\(M, B, K, \*S\).*got \(40, 3\)"):
        pool(LOGITS[0])
    with pytest.raises(TypeError, match="list: stack them"):
        pool(list(LOGITS))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.off = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Dropout(0)
        self.last = nn.Linear(8, K)

    def forward(self, inputs):
        assert not self.training
        assert not self.norm.training
        return self.last(self.off(self.dropout(self.norm(inputs))))


BATCHES = [
    (torch.randn(4, 8, generator=torch.Generator().manual_seed(s)), torch.arange(4) % K) for s in range(2)
]


def test_mc_dropout():
    model = Net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    members = [logits for logits, _ in predictions_on(model, BATCHES, passes=6, pooled=False)]
    assert [tuple(logits.shape) for logits in members] == [(6, 4, K)] * 2
    assert (members[0] != members[0][:1]).any()  # dropout is active
    torch.manual_seed(0)
    pooled = [logits for logits, _ in predictions_on(model, BATCHES, passes=6)]
    for found, logits in zip(pooled, members, strict=True):
        torch.testing.assert_close(found, pool(logits))
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    (once, _), _ = predictions_on(model, BATCHES)  # one pass is deterministic
    torch.testing.assert_close(once, next(iter(predictions_on(model, BATCHES)))[0])
    torch.manual_seed(0)
    expected = evaluate(torch.cat(pooled), torch.cat([target for _, target in BATCHES]), resamples=0)
    torch.manual_seed(0)
    assert evaluate_on(model, BATCHES, passes=6, resamples=0).nll == pytest.approx(expected.nll)


def test_passes_without_dropout_are_refused():
    model = nn.Sequential(nn.Linear(8, K), nn.Dropout(0.0)).train()
    with pytest.raises(ValueError, match="passes=3 needs a model with dropout layers"):
        list(predictions_on(model, BATCHES, passes=3))
    assert model.training
    with pytest.raises(ValueError, match="passes"):
        list(predictions_on(model, BATCHES, passes=0))


def test_models_and_versions_of_an_input():
    models = nn.ModuleList([Net() for _ in range(3)]).eval()

    def ensemble(models, batch):
        inputs, target = batch
        return pool(torch.stack([model(inputs) for model in models])), target

    (found, _), _ = predictions_on(models, BATCHES, forward=ensemble)
    expected = torch.stack([model(BATCHES[0][0]).softmax(1) for model in models]).mean(0)
    torch.testing.assert_close(found.exp(), expected)

    def flipped(model, batch):
        inputs, target = batch
        return pool(torch.stack([model(inputs), model(inputs.flip(1))])), target

    (found, _), _ = predictions_on(models[0], BATCHES, forward=flipped)
    expected = (models[0](BATCHES[0][0]).softmax(1) + models[0](BATCHES[0][0].flip(1)).softmax(1)) / 2
    torch.testing.assert_close(found.exp(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 4, 2)])
def test_single_logits_average_the_probabilities_of_yes(shape):
    logits = 4 * torch.randn(MEMBERS, 6, *shape, generator=torch.Generator().manual_seed(3))
    pooled = pool(logits, binary=True)
    assert pooled.shape == logits.shape[1:]
    torch.testing.assert_close(pooled.sigmoid(), logits.sigmoid().mean(0))


@pytest.mark.parametrize("labels", [1, 3])
def test_mc_dropout_of_single_logits(labels):
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, labels))
    inputs, target = BATCHES[0][0], torch.arange(4 * labels).view(4, labels) % 2
    torch.manual_seed(0)
    ((members, _),) = predictions_on(model, [(inputs, target)], passes=6, pooled=False, binary=True)
    assert members.shape == (6, 4, labels)
    torch.manual_seed(0)
    ((pooled, _),) = predictions_on(model, [(inputs, target)], passes=6, binary=True)
    torch.testing.assert_close(pooled.sigmoid(), members.sigmoid().mean(0))
    torch.manual_seed(0)
    found = evaluate_on(model, [(inputs, target)], passes=6, binary=True, resamples=0)
    expected = evaluate(pooled, target, binary=True, resamples=0)
    assert (found.nll, found.accuracy) == pytest.approx((expected.nll, expected.accuracy))


@pytest.mark.parametrize("function", [pool, mutual_information, disagreement])
def test_one_class_is_refused(function):
    with pytest.raises(ValueError, match=r"got \(5, 40, 1\); for single logits there is binary=True"):
        function(LOGITS[:, :, :1])
