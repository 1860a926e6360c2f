"""Every term's hand-written gradient against autograd of its plain formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant import layout
from calibrant.kernels import (
    Correctness,
    Discrimination,
    Entropy,
    Exclusion,
    Formula,
    LogLikelihood,
    LowerProbability,
    MarginPenalty,
    MeanLogLikelihood,
    SquaredError,
    Term,
    TopDoubt,
    TopProbability,
    WeightedSum,
    reduce_classes,
    reduce_each,
    terms,
)
from calibrant.kernels.block import Block, Scratch
from calibrant.layout import Elements, along_classes, arrange, blocks
from calibrant.losses.conditional_smoothing import _SquaredDistances
from calibrant.losses.penalties import PENALTIES, hinge

CLASSES = 5
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.25, 3.0], dtype=torch.float64)
RHO = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25], dtype=torch.float64)
MULTIPLIER = torch.tensor([1e-6, 0.5, 1.0, 0.0, 2.0], dtype=torch.float64)
MARGIN = torch.tensor([0.5, 1.0, 0.0, 1.5, 0.3], dtype=torch.float64)
UNIT = torch.tensor([1.0, 0.5, 2.0, 0.7, 1.5], dtype=torch.float64)
SCALAR = torch.tensor(0.5, dtype=torch.float64)
OFFSET = torch.tensor([0.5, -1.0, 0.0, 1.5, 0.25], dtype=torch.float64)
RANKS = [(1,), (2,), (3,), (1, 2), (1, 2, 3), ()]


def penalty(name, margin=1.0, unit=2.0):
    def build(logits):
        weight, multiplier = along_classes(RHO, logits), along_classes(MULTIPLIER, logits)
        return PENALTIES[name].on_margin(
            shaped(margin, logits), unit=shaped(unit, logits), weight=weight, multiplier=multiplier
        )

    return build


def hinged(margin, multiplier=None):
    def build(logits):
        factors = None if multiplier is None else along_classes(multiplier, logits)
        allowed = shaped(margin, logits)
        return MarginPenalty(hinge(allowed, factors), margin=allowed, unit=1.0)

    return build


def shaped(value, logits):
    """A number per class along the class axis; a single number as it is."""
    return along_classes(value, logits) if isinstance(value, Tensor) and value.ndim else value


def product(left, right):
    """``left · exp(right)`` and its derivatives: slopes that differ from element to element."""
    growth = (0.1 * right).exp()
    return left * growth, growth, 0.1 * left * growth


def bent(x):
    """A curved function of one number and its derivative."""
    return (0.3 * x).sin(), 0.3 * (0.3 * x).cos()


# What each term says it is, written for one element at a time: its log-softmax, logits, label, probabilities.


def ranked_below(log_s, label, ranks):
    below = sorted((p for p in log_s.exp().tolist() if p < log_s[label].exp().item()), reverse=True)
    if not ranks:
        return sum(below) / max(1, len(below))
    return sum(below[rank - 1] for rank in ranks if rank <= len(below)) / len(ranks)


def penalized(name, margin=1.0, unit=2.0):
    """The penalty functions of the augmented Lagrangian, branch by branch."""

    def one(z, rho, lam):
        if name == "phr":
            return lam * z + rho / 2 * z * z if lam + rho * z >= 0 else -lam * lam / (2 * rho)
        if z < 0:
            return lam * z / (1 - rho * z)
        cubic = rho**2 / 6 * z**3 if name == "p2" else 0.0
        return lam * z + lam * rho * z * z + cubic

    def total(log_s, logits, label):
        z = ((logits.max() - logits - margin) / unit).tolist()
        return sum(one(*arguments) for arguments in zip(z, RHO.tolist(), MULTIPLIER.tolist(), strict=True))

    return total


def pairs(log_s, logits, label):
    others = [k for k in range(len(logits)) if k != label]
    return -0.5 * sum(F.logsigmoid(logits[i] - logits[j]) for i in others for j in others if i != j)


@dataclass
class Case:
    """A term for logits of a given shape and type.

    ``meaning`` computes it for one element from ``(log_softmax, logits, label)``.
    """

    name: str
    build: Callable[[Tensor], Term]
    meaning: Callable[[Tensor, Tensor, int], float | Tensor]
    soft: bool = False

    def __str__(self):
        return self.name


BASIC = [
    Case("likelihood", lambda logits: LogLikelihood(), lambda s, x, y: s[y], soft=True),
    Case("mean-likelihood", lambda logits: MeanLogLikelihood(), lambda s, x, y: s.mean(), soft=True),
    Case(
        "weighted-mean-likelihood",
        lambda logits: MeanLogLikelihood(along_classes(WEIGHT, logits)),
        lambda s, x, y: (WEIGHT * s).mean(),
        soft=True,
    ),
    Case("top-probability", lambda logits: TopProbability(), lambda s, x, y: s.exp().max(), soft=True),
    Case("top-doubt", lambda logits: TopDoubt(), lambda s, x, y: 1 - s.exp().max(), soft=True),
    Case("entropy", lambda logits: Entropy(), lambda s, x, y: -(s * s.exp()).sum(), soft=True),
    Case(
        "precise-entropy",
        lambda logits: Entropy(precise=True),
        lambda s, x, y: -(s * s.exp()).sum(),
        soft=True,
    ),
    Case(
        "penalty-on-squared-distances",
        lambda logits: _SquaredDistances(1.0, top=0.7, others=0.3),
        lambda s, x, y: (
            0.7 * (x.max() - x.min() - 1).clamp_min(0) ** 2
            + 0.3 * ((x.max() - x - 1).clamp_min(0) ** 2).sum()
        ),
        soft=True,
    ),
    Case(
        "squared-error",
        lambda logits: SquaredError(),
        lambda s, x, y: (s.exp() - F.one_hot(torch.tensor(y), len(s))).square().sum(),
        soft=True,
    ),
    *(
        Case(
            f"lower-probability-{'+'.join(map(str, ranks)) or 'all'}",
            lambda logits, ranks=ranks: LowerProbability(ranks),
            lambda s, x, y, ranks=ranks: ranked_below(s, y, ranks),
        )
        for ranks in RANKS
    ),
    *(Case(f"penalty-{name}", penalty(name), penalized(name), soft=True) for name in PENALTIES),
    *(
        Case(
            f"penalty-{name}-off-the-grid",
            penalty(name, margin=0.3, unit=0.7),
            penalized(name, margin=0.3, unit=0.7),
            soft=True,
        )
        for name in PENALTIES
    ),
    Case(
        "hinge",
        hinged(1.0),
        lambda s, x, y: (x.max() - x - 1.0).clamp_min(0).sum(),
        soft=True,
    ),
    Case(
        "hinge-with-multiplier",
        hinged(0.8, WEIGHT),
        lambda s, x, y: (WEIGHT * (x.max() - x - 0.8).clamp_min(0)).sum(),
        soft=True,
    ),
    *(
        Case(f"penalty-{name}-{kind}", penalty(name, margin, unit), penalized(name, margin, unit), soft=True)
        for name, kind, margin, unit in (
            ("phr", "margin-and-unit-per-class", MARGIN, UNIT),
            ("p2", "scalar-tensors", SCALAR, 2 * SCALAR),
            ("p3", "margin-per-class", MARGIN, 2.0),
        )
    ),
    Case(
        "hinge-scalar-tensor",
        hinged(SCALAR),
        lambda s, x, y: (x.max() - x - SCALAR).clamp_min(0).sum(),
        soft=True,
    ),
    Case(
        "hinge-per-class-with-multiplier",
        hinged(MARGIN, WEIGHT),
        lambda s, x, y: (WEIGHT * (x.max() - x - MARGIN).clamp_min(0)).sum(),
        soft=True,
    ),
    Case(
        "discrimination",
        lambda logits: Discrimination(),
        lambda s, x, y: -sum(F.logsigmoid(x[y] - x[j]) for j in range(len(x)) if j != y),
    ),
    Case("exclusion", lambda logits: Exclusion(), pairs),
]
"""Every term that is not made of others."""

COMPOSED = [
    Case(
        "sum-of-likelihood-and-entropy",
        lambda logits: WeightedSum((-1.0, LogLikelihood()), (-0.3, Entropy())),
        lambda s, x, y: -s[y] + 0.3 * (s * s.exp()).sum(),
        soft=True,
    ),
    Case(
        "sum-of-likelihood-and-hinge",
        lambda logits: WeightedSum((-1.0, LogLikelihood()), (0.1, hinged(1.0)(logits))),
        lambda s, x, y: -s[y] + 0.1 * (x.max() - x - 1.0).clamp_min(0).sum(),
        soft=True,
    ),
    Case(
        "formula-of-likelihood-and-lower-probability",
        lambda logits: Formula(product, LogLikelihood(), LowerProbability((1,))),
        lambda s, x, y: s[y] * math.exp(0.1 * ranked_below(s, y, (1,))),
    ),
    Case(
        "formula-of-error-and-discrimination",
        lambda logits: Formula(product, SquaredError(), Discrimination()),
        lambda s, x, y: (
            (s.exp() - F.one_hot(torch.tensor(y), len(s))).square().sum()
            * torch.exp(-0.1 * sum(F.logsigmoid(x[y] - x[j]) for j in range(len(x)) if j != y))
        ),
    ),
    Case(
        "formula-within-sum",
        lambda logits: WeightedSum(
            (2.0, Formula(product, LogLikelihood(), TopProbability())), (-0.5, MeanLogLikelihood())
        ),
        lambda s, x, y: 2 * s[y] * torch.exp(0.1 * s.exp().max()) - 0.5 * s.mean(),
    ),
]

CASES = [*BASIC, *COMPOSED]
SOFT = [case for case in CASES if case.soft]


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


ROWS, IMAGES = (7, CLASSES), (3, CLASSES, 7)
SHAPES = pytest.mark.parametrize("shape", [ROWS, IMAGES], ids=["rows", "images"])

CUTS = {
    "rows": (ROWS, 1 << 18, [7]),
    "some-rows": (ROWS, 3 * CLASSES, [3, 3, 1]),
    "images": (IMAGES, 1 << 18, [21]),
    "columns": (IMAGES, 3 * CLASSES, [3, 3, 1] * 3),
    "some-images": (IMAGES, 2 * 7 * CLASSES, [14, 7]),
}


@pytest.fixture
def cut(monkeypatch):
    """Make blocks so small that there are several, and see that there are."""

    def apply(limit, shape, sizes=None):
        monkeypatch.setattr(layout, "_CPU_BLOCK", limit)
        probe = torch.empty(shape[0], 1, *shape[2:])
        found = [probe[index].numel() for index in blocks(shape, probe.device)]
        assert sizes is None or found == sizes

    return apply


def batch(shape, *, soft=False, ties=True, seed=0, dtype=torch.float64):
    """Logits of many ties, on a grid that holds the margins too, or without any."""
    generator = torch.Generator().manual_seed(seed)
    elements = torch.Size(shape[:1] + shape[2:])
    number, classes = elements.numel(), shape[1]
    label = torch.randint(classes, (number,), generator=generator)
    if ties:
        rows = torch.randint(-3, 4, (number, classes), generator=generator) / 2
        rows[0] = 1.0  # everything ties
        rows[1, label[1]] = 2.0  # the label alone is on top
        rows[2, label[2]] = -2.0  # nothing is below the label
    else:
        rows = torch.randn(number, classes, generator=generator, dtype=torch.float64) * 2
    if soft:
        target = torch.rand(number, classes, generator=generator, dtype=torch.float64).softmax(1)
        target[-1] = F.one_hot(label[-1], classes)
    logits = rows.to(dtype).view(*elements, classes).movedim(-1, 1).contiguous()
    if soft:
        return logits, target.to(dtype).view(*elements, classes).movedim(-1, 1).contiguous()
    return logits, label.view(elements)


def by_autograd(case, elements, upstream=None):
    """Value and gradient of the plain formula over the whole batch at once."""
    logits = elements.logits.detach().requires_grad_()
    target = elements.target if elements.soft else elements.target.unsqueeze(1)
    value = case.build(logits).value(Block(logits, target)).squeeze(1)
    upstream = torch.ones_like(value) if upstream is None else upstream
    return value.detach(), torch.autograd.grad(value, logits, upstream)[0]


def fused(case, elements, upstream=None):
    logits = elements.logits.detach().requires_grad_()
    value = reduce_classes(replace(elements, logits=logits), case.build(logits))
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    return value.detach(), logits.grad


def assert_fused_is_autograd(case, elements, upstream=None, *, what=""):
    found, expected = fused(case, elements, upstream), by_autograd(case, elements, upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}" if what else text
        )


def test_the_fused_path_is_the_one_under_test():
    elements = arrange(*batch((7, CLASSES)))
    elements.logits.requires_grad_()
    value = reduce_classes(elements, LogLikelihood())
    assert "BlockwiseReduction" in value.grad_fn.next_functions[0][0].name()


def test_every_term_has_a_case():
    classes = {
        value
        for value in vars(terms).values()
        if isinstance(value, type) and hasattr(value, "linearize") and value.__module__ == terms.__name__
    }
    logits = torch.zeros(1, CLASSES, dtype=torch.float64)
    assert classes - {Correctness} <= {type(case.build(logits)) for case in CASES}


# ----------------------------------------------------------------------------------------- what it means


@by_name(CASES)
@SHAPES
def test_value_is_the_formula(case, shape):
    logits, target = batch(shape)
    value = reduce_classes(arrange(logits, target), case.build(logits))
    assert value.shape == target.shape
    rows = logits.movedim(1, -1).reshape(-1, CLASSES)
    for row, label, found in zip(rows, target.reshape(-1).tolist(), value.reshape(-1).tolist(), strict=True):
        expected = float(case.meaning(row.log_softmax(0), row, label))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@SHAPES
def test_probability_targets_mean_what_they_say(shape):
    logits, target = batch(shape, soft=True)
    elements = arrange(logits, target, soft=True)
    likelihood = (target * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(reduce_classes(elements, LogLikelihood()), likelihood, rtol=1e-12, atol=1e-12)
    error = (target - logits.softmax(1)).square().sum(1)
    torch.testing.assert_close(reduce_classes(elements, SquaredError()), error, rtol=1e-12, atol=1e-12)


@SHAPES
def test_one_hot_targets_are_labels(shape):
    logits, target = batch(shape)
    one_hot = F.one_hot(target, CLASSES).movedim(-1, 1).double()
    for case in SOFT:
        hard = fused(case, arrange(logits, target))
        soft = fused(case, arrange(logits, one_hot, soft=True))
        torch.testing.assert_close(hard, soft, rtol=1e-12, atol=1e-12)


@SHAPES
def test_correctness(shape):
    logits, target = batch(shape)
    value, gradient = fused(Case("", lambda logits: Correctness(), None), arrange(logits, target))
    assert torch.equal(value, (logits.argmax(1) == target).double())
    assert torch.equal(gradient, torch.zeros_like(logits))


# ----------------------------------------------------------------------------- the hand-written gradient


@by_name(CASES)
def test_fused_is_autograd(case, cut):
    for name, (shape, limit, sizes) in CUTS.items():
        cut(limit, shape, sizes)
        for ties, seed in ((False, 0), (True, 0), (True, 1)):
            elements = arrange(*batch(shape, ties=ties, seed=seed))
            assert_fused_is_autograd(case, elements, what=f"{name}, ties={ties}, seed={seed}")


@by_name(SOFT)
def test_fused_is_autograd_with_probability_targets(case, cut):
    for name, (shape, limit, sizes) in CUTS.items():
        cut(limit, shape, sizes)
        for ties in (False, True):
            elements = arrange(*batch(shape, soft=True, ties=ties), soft=True)
            assert elements.soft
            assert_fused_is_autograd(case, elements, what=f"{name}, ties={ties}")


@by_name(SOFT)
@SHAPES
def test_fused_is_autograd_with_targets_of_any_mass(case, shape, cut):
    cut(3 * CLASSES, shape)
    elements = arrange(*batch(shape, soft=True), soft=True)
    mass = elements.given * (0.5 + elements.given)  # losses refuse such targets; terms know nothing of it
    assert_fused_is_autograd(case, replace(elements, given=mass, _target=None))


@by_name(CASES)
@SHAPES
def test_without_a_gradient_the_value_is_the_same(case, shape, cut):
    elements = arrange(*batch(shape))
    expected, _ = by_autograd(case, elements)
    cut(3 * CLASSES, shape)
    value = reduce_classes(elements, case.build(elements.logits))
    assert not value.requires_grad
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        logits = elements.logits.clone().requires_grad_()
        value = reduce_classes(replace(elements, logits=logits), case.build(logits))
    assert not value.requires_grad
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@by_name(CASES)
def test_other_strides(case, cut):
    cut(3 * CLASSES, (4, CLASSES))
    logits, target = batch((2, CLASSES, 3, 4))
    expected = by_autograd(case, arrange(logits, target))
    for view in (
        logits.to(memory_format=torch.channels_last),
        torch.nn.functional.pad(logits, (1, 2, 3, 0))[:, :, 3:, 1:-2],
        logits.movedim(1, 0).contiguous().movedim(0, 1),
    ):
        leaf = view.detach().requires_grad_()
        elements = arrange(leaf, target)
        value = reduce_classes(elements, case.build(elements.logits))
        value.sum().backward()
        torch.testing.assert_close(
            value.detach().reshape(-1), expected[0].reshape(-1), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(leaf.grad.flatten(2), expected[1], rtol=1e-12, atol=1e-12)


@by_name(CASES)
def test_broadcast_logits(case):
    logits, _ = batch((7, CLASSES))
    target = torch.arange(CLASSES)
    assert_fused_is_autograd(case, arrange(logits[-1:].expand(CLASSES, CLASSES), target))


@by_name(CASES)
def test_empty_batches(case):
    for shape in ((0, CLASSES), (0, CLASSES, 4), (2, CLASSES, 0)):
        logits = torch.empty(shape, dtype=torch.float64, requires_grad=True)
        target = torch.empty(shape[:1] + shape[2:], dtype=torch.int64)
        elements = Elements(logits, target, target == 0)
        value = reduce_classes(elements, case.build(logits))
        assert value.shape == target.shape
        value.sum().backward()
        assert logits.grad.shape == shape


def several(logits):
    return [LogLikelihood(), hinged(1.0)(logits), TopProbability(), Correctness(), Entropy()]


@pytest.mark.parametrize("unused", [(), (1,), (0, 1, 2, 4)])
def test_several_terms_in_one_pass(unused, cut):
    """Each with a factor of its own for each element, or none where its result is not used."""
    for name, (shape, limit, sizes) in CUTS.items():
        cut(limit, shape, sizes)
        for ties in (False, True):
            elements = arrange(*batch(shape, ties=ties))
            factor = torch.linspace(-1, 2, elements.target.numel(), dtype=torch.float64)
            factor = factor.view(elements.target.shape)
            logits = elements.logits.detach().requires_grad_()
            found = reduce_each(replace(elements, logits=logits), *several(logits))
            total, expected = 0 * logits.sum(), torch.zeros_like(logits)
            for number, (value, term) in enumerate(zip(found, several(logits), strict=True)):
                plain, gradient = (
                    by_autograd(
                        Case("", lambda logits, term=term: term, None), elements, (number + 1) * factor
                    )
                    if not isinstance(term, Correctness)
                    else (reduce_classes(elements, term), 0)
                )
                torch.testing.assert_close(value.detach(), plain, rtol=1e-12, atol=1e-12)
                if number not in unused:
                    total = total + ((number + 1) * factor * value).sum()
                    expected = expected + gradient
            total.backward()
            torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-12, msg=name)


@SHAPES
def test_several_terms_have_second_derivatives_and_batched_gradients(shape, cut):
    cut(3 * CLASSES, shape)
    elements = arrange(*batch(shape, ties=False))

    def total(logits):
        likelihood, confidence, entropy = reduce_each(
            replace(elements, logits=logits), LogLikelihood(), TopProbability(), Entropy()
        )
        return torch.stack([(likelihood * confidence).sum(), (entropy * likelihood).sum()])

    logits = elements.logits.detach().requires_grad_()
    torch.autograd.gradcheck(total, logits)
    torch.autograd.gradgradcheck(total, logits)
    one_by_one = torch.autograd.functional.jacobian(total, logits)
    batched = torch.autograd.functional.jacobian(total, logits, vectorize=True)
    torch.testing.assert_close(batched, one_by_one)
    torch.testing.assert_close(torch.func.jacrev(total)(logits.detach()), one_by_one)


def test_doubt_and_entropy_keep_their_digits_where_the_network_is_sure(cut):
    cut(3 * CLASSES, IMAGES)
    logits, target = batch(IMAGES, ties=False)
    logits[:, 2] += torch.linspace(0, 80, 7, dtype=torch.float64)
    for term in (TopDoubt(), Entropy(precise=True)):
        single = logits.float()
        found = reduce_classes(arrange(single, target), term).double()
        assert found.min() < 1e-30
        s = single.double().log_softmax(1)
        others = s.exp().scatter(1, s.argmax(1, keepdim=True), 0).sum(1)
        expected = others
        if isinstance(term, Entropy):
            # The top class adds -p log p with log p = log(1 - others).
            top = -(1 - others) * (-others).log1p()
            expected = top - (s.exp() * s).scatter(1, s.argmax(1, keepdim=True), 0).sum(1)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


@by_name(CASES)
@SHAPES
def test_a_constant_added_to_the_logits_changes_nothing(case, shape):
    logits, target = batch(shape)
    value, gradient = fused(case, arrange(logits, target))
    shifted_value, shifted_gradient = fused(case, arrange(logits + 1024.0, target))
    torch.testing.assert_close(shifted_value, value, rtol=0, atol=0)
    torch.testing.assert_close(shifted_gradient, gradient, rtol=0, atol=0)
    torch.testing.assert_close(gradient.sum(1), torch.zeros_like(value), rtol=0, atol=1e-12)


@SHAPES
def test_exclusion_visits_all_pairs_in_parts(shape, monkeypatch):
    exclusion = next(case for case in CASES if case.name == "exclusion")
    elements = arrange(*batch(shape))
    expected = fused(exclusion, elements)
    numbers = elements.logits.numel()
    for step in (1, 2, 4):
        monkeypatch.setattr(terms, "_PAIRS", step * numbers)
        assert len(Exclusion._parts(elements.logits)) == math.ceil(CLASSES / step)
        assert_fused_is_autograd(exclusion, elements)
        torch.testing.assert_close(fused(exclusion, elements), expected, rtol=1e-12, atol=1e-12)


def test_scratch_memory_fits_whatever_comes_next():
    scratch = Scratch()
    for shape in [(3, 5), (1, 5), (3, 5), (4, 5), (2, 5, 3)]:
        scratch.restart()
        first, second = (scratch.take(torch.empty(shape)) for _ in range(2))
        assert first.shape == second.shape == shape
        first.fill_(1)
        second.fill_(2)
        assert (first == 1).all()


# ------------------------------------------------------------------------------------------ composition


@by_name(BASIC)
@SHAPES
def test_every_term_can_stand_in_a_formula(case, shape, cut):
    """A formula hands each term a factor that differs from element to element."""
    cut(3 * CLASSES, shape)
    curved = Case("", lambda logits: Formula(bent, case.build(logits)), None)
    assert_fused_is_autograd(curved, arrange(*batch(shape)))


ALIKE = {
    "mean-likelihood",
    "lower-probability-2",
    "lower-probability-3",
    "lower-probability-1+2+3",
    *(case.name for case in BASIC if case.name.startswith("penalty-") and case.name[8:] not in PENALTIES),
    "hinge",
    "hinge-scalar-tensor",
    "hinge-per-class-with-multiplier",
}
"""Terms that differ from another one in nothing but their numbers."""


@by_name(BASIC)
def test_every_two_terms_can_be_summed(case, cut):
    """Also two that both want to write over the block, in either order: one with rows, one with images."""
    batches = [arrange(*batch(shape)) for shape in (ROWS, IMAGES)]
    cut(2 * 7 * CLASSES, IMAGES)
    wrong = []
    for other in (other for other in BASIC if other.name not in ALIKE):
        elements = batches[BASIC.index(case) < BASIC.index(other)]
        pair = Case(
            "",
            lambda logits, other=other: WeightedSum((0.7, case.build(logits)), (-1.3, other.build(logits))),
            None,
        )
        found, expected = fused(pair, elements), by_autograd(pair, elements)
        if not all(
            torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True)
        ):
            wrong.append(other.name)
    assert not wrong


# --------------------------------------------------------------------------------- scaled and offset logits


@by_name(CASES)
@pytest.mark.parametrize(
    ("shape", "scale", "offset"),
    [
        (ROWS, 0.7, None),
        (ROWS, None, OFFSET),
        (IMAGES, SCALAR, OFFSET),
    ],
    ids=["scale", "offset", "tensors, images"],
)
def test_scale_and_offset(case, shape, scale, offset, cut):
    """A term of ``scale · l + offset``, against autograd of the same, ties included."""
    cut(3 * CLASSES, shape)
    for ties, soft in ((False, False), (True, False), (True, True)):
        if soft and not case.soft:
            continue
        elements = arrange(*batch(shape, ties=ties, soft=soft), soft=soft)
        constants = {"scale": scale, "offset": offset}
        logits = elements.logits.clone().requires_grad_()
        value = reduce_classes(replace(elements, logits=logits), case.build(logits), **constants)
        upstream = torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view(value.shape)
        (gradient,) = torch.autograd.grad(value, logits, upstream, retain_graph=True)

        plain = elements.logits.clone().requires_grad_()
        moved = plain * (1.0 if scale is None else scale)
        moved = moved if offset is None else moved + along_classes(offset, plain)
        target = elements.target if soft else elements.target.unsqueeze(1)
        expected = case.build(moved).value(Block(moved, target)).squeeze(1)
        (slope,) = torch.autograd.grad(expected, plain, upstream)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)
        unchanged = reduce_classes(elements, case.build(logits), **constants)
        torch.testing.assert_close(unchanged, expected.detach(), rtol=1e-12, atol=1e-12)
        (differentiable,) = torch.autograd.grad(value, logits, upstream, create_graph=True)
        torch.testing.assert_close(differentiable, slope, rtol=1e-12, atol=1e-12)


def test_scale_and_offset_by_finite_differences():
    elements = arrange(*batch((3, CLASSES), ties=False))
    term = penalty("phr", MARGIN, UNIT)(elements.logits)

    def function(logits):
        return reduce_classes(replace(elements, logits=logits), term, scale=SCALAR, offset=OFFSET)

    assert torch.autograd.gradcheck(function, (elements.logits.clone().requires_grad_(),))


def test_scale_and_offset_are_constants_of_the_forward_pass():
    """Buffers that an adaptation moves in place before the backward pass, or between two of them."""
    elements = arrange(*batch((7, CLASSES)))
    scale, offset = SCALAR.clone().requires_grad_(), OFFSET.clone().requires_grad_()
    logits = elements.logits.clone().requires_grad_()
    value = reduce_classes(replace(elements, logits=logits), LogLikelihood(), scale=scale, offset=offset)
    (first,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
    with torch.no_grad():
        scale.mul_(3)
        offset.zero_()
    (second,) = torch.autograd.grad(value.sum(), logits)
    assert torch.equal(first, second)
    assert scale.grad is None
    assert offset.grad is None


# ------------------------------------------------------------------------------------------- backward


@by_name(CASES)
@pytest.mark.parametrize(("shape", "expected"), [(ROWS, 1 / 21), (IMAGES, 1.0)], ids=["rows", "images"])
def test_upstream_gradients_that_are_not_uniform(case, shape, expected, cut):
    cut(3 * CLASSES, shape)
    elements = replace(arrange(*batch(shape)), expected=expected)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(elements.valid.shape, generator=generator, dtype=torch.float64)
    assert_fused_is_autograd(case, elements, upstream)


@by_name(CASES)
def test_uniform_upstream_gradients_other_than_expected(case):
    elements = replace(arrange(*batch((7, CLASSES))), expected=0.25)
    for factor in (0.25, 1.0, -3.0, 0.0):
        upstream = torch.full((7,), factor, dtype=torch.float64)
        assert_fused_is_autograd(case, elements, upstream, what=f"factor {factor}")


@by_name(CASES)
@pytest.mark.parametrize(
    ("shape", "uniform"), [(ROWS, True), (IMAGES, False)], ids=["as-expected", "otherwise"]
)
def test_a_second_backward_over_a_retained_graph(case, shape, uniform, cut):
    cut(3 * CLASSES, shape)
    elements = arrange(*batch(shape))
    logits = elements.logits.requires_grad_()
    value = reduce_classes(elements, case.build(logits))
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    upstream = torch.ones_like(upstream) if uniform else upstream
    gradients = []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(value, logits, upstream, retain_graph=True)
        gradients.append(gradient.clone())
        gradient.mul_(17)  # it belongs to the caller now: whatever happens to it must not come back
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    expected = by_autograd(case, elements, upstream)[1]
    torch.testing.assert_close(gradients[1], expected, rtol=1e-12, atol=1e-12)


def test_two_losses_on_the_same_logits():
    logits, target = batch((7, CLASSES))
    leaf = logits.requires_grad_()
    elements = arrange(leaf, target)
    total = sum(reduce_classes(elements, case.build(leaf)).sum() for case in CASES)
    total.backward()
    expected = sum(by_autograd(case, elements)[1] for case in CASES)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-11, atol=1e-11)


def test_an_upstream_gradient_is_left_alone():
    elements = arrange(*batch((7, CLASSES)))
    logits = elements.logits.requires_grad_()
    upstream = torch.arange(7, dtype=torch.float64)
    reduce_classes(elements, LogLikelihood()).backward(upstream)
    assert upstream.tolist() == list(range(7))
    assert logits.grad.abs().sum() > 0


@by_name(CASES)
def test_gradients_by_finite_differences(case):
    """Of rows: for images, the tests above and the next one compare with autograd of the plain formula."""
    elements = arrange(*batch((2, CLASSES), ties=False))
    term = case.build(elements.logits)

    def function(logits):
        return reduce_classes(replace(elements, logits=logits), term)

    logits = elements.logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (logits,))
    assert torch.autograd.gradgradcheck(function, (logits,))


@by_name(CASES)
@SHAPES
def test_the_gradient_that_can_be_differentiated_is_the_same(case, shape):
    elements = arrange(*batch(shape))
    logits = elements.logits.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(elements.valid.shape, generator=generator, dtype=torch.float64)
    value = reduce_classes(elements, case.build(logits))
    (differentiable,) = torch.autograd.grad(value, logits, upstream, create_graph=True)
    (plain,) = torch.autograd.grad(value, logits, upstream)
    torch.testing.assert_close(differentiable, plain, rtol=1e-12, atol=1e-12)


def test_targets_that_require_a_gradient_get_one():
    logits, target = batch((7, CLASSES), soft=True)
    target.requires_grad_()
    value = reduce_classes(arrange(logits.requires_grad_(), target, soft=True), LogLikelihood())
    value.sum().backward()
    torch.testing.assert_close(target.grad, logits.detach().log_softmax(1), rtol=1e-12, atol=1e-12)
    expected = target.detach() - logits.detach().softmax(1)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------- precision


def narrow(shape, dtype, *, ties, soft=False):
    logits, target = batch(shape, ties=ties, soft=soft, dtype=torch.float32)
    return logits.to(dtype), target


@by_name(CASES)
@pytest.mark.parametrize(("shape", "dtype"), [(ROWS, torch.float16), (IMAGES, torch.bfloat16)])
def test_16_bit_logits(case, shape, dtype, cut):
    cut(3 * CLASSES, shape)
    for ties in (False, True):
        logits, target = narrow(shape, dtype, ties=ties)
        value, gradient = fused(case, arrange(logits, target))
        expected_value, expected_gradient = fused(case, arrange(logits.float(), target))
        assert value.dtype == torch.float32
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        torch.testing.assert_close(value, expected_value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient.to(dtype), rtol=0, atol=0)


@by_name(SOFT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_with_probability_targets(case, dtype):
    logits, target = narrow((7, CLASSES), dtype, ties=False, soft=True)
    _, gradient = fused(case, arrange(logits, target, soft=True))
    _, expected = fused(case, arrange(logits.float(), target, soft=True))
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_survive_the_mean_over_many_elements(dtype):
    """A loss scale lifts small gradients into float16's range; after rounding to float16 it is too late."""
    elements = 1_000_000
    logits, target = narrow((7, CLASSES), dtype, ties=False)
    batch = replace(arrange(logits, target), expected=1 / elements)
    upstream = torch.full((7,), 2.0**16 / elements)
    likelihood = CASES[0]
    _, gradient = fused(likelihood, batch, upstream)
    _, expected = fused(likelihood, replace(batch, logits=logits.float()), upstream)
    assert expected.abs().min() > torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(gradient.float(), expected, rtol=3 * torch.finfo(dtype).eps, atol=0)


@by_name(CASES)
@SHAPES
def test_float32_is_close_to_float64(case, shape):
    logits, target = batch(shape, ties=False, dtype=torch.float32)
    value, gradient = fused(case, arrange(logits, target))
    expected_value, expected_gradient = fused(case, arrange(logits.double(), target))
    assert value.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected_value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)


@by_name([case for case in BASIC if "penalty" not in case.name])  # whose cubes may well overflow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_have_finite_gradients(case, dtype):
    large = 6e4 if dtype == torch.float16 else 1e30
    logits = torch.tensor([[large, 0, 0, 0, -large], [-large, large, large, 0, 0], [0.0] * 5], dtype=dtype)
    for label in range(CLASSES):
        value, gradient = fused(case, arrange(logits, torch.full((3,), label)))
        assert gradient.isfinite().all()
        assert value.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_error_keeps_its_digits_near_certainty(dtype):
    """``(1 - p)² + Σ s_k²`` with p next to 1, where ``s - 1`` would be rounding noise."""
    logits = torch.tensor([[12.0, 0.0, -1.0]], dtype=dtype)
    value = reduce_classes(arrange(logits, torch.tensor([0])), SquaredError())
    probability = logits.double().softmax(1)[0]
    expected = (probability[1] + probability[2]).square() + probability[1:].square().sum()
    rounding = 4 * torch.finfo(dtype).eps * (probability[1] + probability[2]).item()
    torch.testing.assert_close(value.double()[0], expected, rtol=0, atol=rounding)


@by_name(CASES)
def test_autocast_changes_nothing(case):
    logits, target = batch((7, CLASSES), ties=False, dtype=torch.float32)
    expected = fused(case, arrange(logits, target))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused(case, arrange(logits, target))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
