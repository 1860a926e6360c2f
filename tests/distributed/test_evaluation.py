"""Processes with unequal shares of the data evaluate what one process with all of it evaluates.

Starting processes takes seconds, so one start serves all tests; they look at what it left behind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from calibrant.evaluation import Evaluation, Evaluator, evaluate

from ..evaluations import assert_same
from .processes import Results, in_processes

CLASSES = 5
SHARES = [slice(0, 70), slice(70, 100), slice(100, 100)]
IMAGES = [slice(0, 2), slice(2, 3), slice(3, 3)]
EVERYTHING = slice(0, 100)
RANKS = range(len(SHARES))
OPTIONS: dict[str, Any] = {
    "name": "shared",
    "resamples": 40,
    "background": 1,
    "class_counts": [500, 50, 50, 5, 5],
    "class_names": list("abcde"),
    "level": 0.9,
    "seed": 7,
}
WAYS = ["silent", "empty batch", "ignored batch"]

# From a stream, what one evaluation of all data has and a stream has not, or only nearly.
NOT_STREAMED = ["exact", "fingerprint", "replicates", "intervals", "adaptive_ece", "debiased_ece"]
NOT_STREAMED += ["sweep_ece", "smooth_ece", "nll_calibration", "nll_refinement", "kde_ece"]
NOT_STREAMED += ["brier_calibration", "brier_refinement"]
NOT_STREAMED += ["debiased_ece_l1", "sweep_ece_l1", "sweep_ece_width", "sweep_ece_width_l1"]
NOT_STREAMED += ["aurc", "augrc", "risk_at_coverage", "coverage_at_risk", "risk_coverage"]


def data() -> tuple[Tensor, Tensor]:
    """A hundred samples. The second rank's are tamer, which a mean of means would not survive."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(100, CLASSES, dtype=torch.float64, generator=generator)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    logits[SHARES[0]] *= 3
    target[[3, 75]] = -100
    return logits, target


def decisions() -> tuple[Tensor, Tensor]:
    logits, _ = data()
    return logits, (logits > 1).long()


def pictures() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(3, CLASSES, 6, 6, dtype=torch.float64, generator=generator)
    return logits, torch.randint(CLASSES, (3, 6, 6), generator=generator)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return in_processes(evaluate_apart, len(RANKS), tmp_path_factory.mktemp("evaluated"))


def evaluator(share: slice, way: str = "silent") -> Evaluator:
    """Fed in batches of up to 40, or in the given way where there are none."""
    stream = Evaluator(CLASSES, **OPTIONS)
    logits, target = data()
    if share.start < share.stop:
        for piece in zip(logits[share].split(40), target[share].split(40), strict=True):
            stream.update(*piece)
    elif way == "empty batch":
        stream.update(logits[share], target[share])
    elif way == "ignored batch":
        stream.update(logits[:4], torch.full((4,), -100))
    return stream


def outcome(stream: Evaluator) -> str:
    try:
        stream.compute()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "computed"


def evaluate_apart(rank: int) -> Results:
    streams = {way: evaluator(SHARES[rank], way) for way in WAYS}
    found: Results = {way: stream.compute().to_json() for way, stream in streams.items()}
    stream = streams["silent"]
    found["again"] = stream.compute().to_json()
    logits, target = data()
    found["later"] = stream.update(logits[rank : rank + 1], target[rank : rank + 1]).compute().to_json()

    per_image = Evaluator(CLASSES, per_image=True, background=0)
    if rank < 2:
        per_image.update(*(tensor[IMAGES[rank]] for tensor in pictures()))
    found["per image"] = per_image.compute().to_json()

    labels = Evaluator(binary=True, resamples=0)
    if rank < 2:
        labels.update(*(tensor[SHARES[rank]] for tensor in decisions()))
    found["labels"] = labels.compute().to_json()

    # Two groups that evaluate different data at the same time: the pair has all hundred samples.
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    share = [*SHARES[:2], slice(0, 40)][rank]
    found["group"] = evaluator(share).compute(single if rank == 2 else pair).to_json()

    found["nothing"] = outcome(Evaluator(CLASSES))
    found["ignored"] = outcome(Evaluator().update(logits, torch.full_like(target, -100)))
    # One process's own business: no other takes part.
    found["exact"] = evaluate(logits[: 20 + rank], target[: 20 + rank], resamples=5).samples
    if rank == 0:
        found["per image, alone"] = evaluate(*pictures(), per_image=True).samples
    return found


@pytest.mark.parametrize("way", WAYS)
def test_seventy_thirty_and_no_samples_equal_a_hundred(way: str, apart: list[Results]) -> None:
    alone = evaluator(EVERYTHING).compute()
    assert alone.samples == 98
    assert alone.intervals["ece"][0] < alone.ece
    for rank in RANKS:
        assert_same(Evaluation.from_json(apart[rank][way]), alone)


def test_they_equal_one_evaluation_of_all_data(apart: list[Results]) -> None:
    whole = evaluate(*data(), **OPTIONS)
    for rank in RANKS:
        assert_same(Evaluation.from_json(apart[rank]["silent"]), whole, without=NOT_STREAMED)


def test_no_share_would_do(apart: list[Results]) -> None:
    whole = Evaluation.from_json(apart[0]["silent"])
    shares = [evaluator(share).compute() for share in SHARES[:2]]
    for name in ("accuracy", "ece", "nll", "brier", "smooth_ece"):
        values = [getattr(share, name) for share in shares]
        assert abs(sum(values) / 2 - getattr(whole, name)) > 1e-4, name  # nor the mean of both


@pytest.mark.parametrize("key", [*WAYS, "later", "per image", "labels"])
def test_every_rank_has_the_same_evaluation(key: str, apart: list[Results]) -> None:
    assert apart[0][key] == apart[1][key] == apart[2][key]


def test_more_can_be_added_after_computing(apart: list[Results]) -> None:
    logits, target = data()
    alone = evaluator(EVERYTHING).update(logits[:3], target[:3]).compute()
    assert alone.samples == 101
    for rank in RANKS:
        assert apart[rank]["again"] == apart[rank]["silent"]
        assert_same(Evaluation.from_json(apart[rank]["later"]), alone)


def test_images_are_averaged_over_all_processes(apart: list[Results]) -> None:
    alone = Evaluator(per_image=True, background=0).update(*pictures()).compute()
    for rank in RANKS:
        assert_same(Evaluation.from_json(apart[rank]["per image"]), alone)
    logits, target = pictures()
    singles = [evaluate(logits[i : i + 1], target[i : i + 1], resamples=0).ece for i in range(3)]
    assert Evaluation.from_json(apart[2]["per image"]).ece == pytest.approx(sum(singles) / 3, abs=1e-12)


def test_labels_are_pooled_over_all_processes(apart: list[Results]) -> None:
    alone = Evaluator(binary=True, resamples=0).update(*decisions()).compute()
    for rank in RANKS:
        found = Evaluation.from_json(apart[rank]["labels"])
        assert_same(found, alone, without=["labels"])
        for ours, theirs in zip(found.labels, alone.labels, strict=True):
            assert_same(ours, theirs)


def test_a_group_pools_over_its_own_processes_only(apart: list[Results]) -> None:
    pair, single = evaluator(EVERYTHING).compute(), evaluator(slice(0, 40)).compute()
    for rank, expected in enumerate([pair, pair, single]):
        assert_same(Evaluation.from_json(apart[rank]["group"]), expected)


@pytest.mark.parametrize("key", ["nothing", "ignored"])
def test_every_rank_refuses_where_none_has_data(key: str, apart: list[Results]) -> None:
    for rank in RANKS:
        assert apart[rank][key].startswith("ValueError: nothing to evaluate")


def test_exact_evaluations_are_of_one_process(apart: list[Results]) -> None:
    assert [apart[rank]["exact"] for rank in RANKS] == [19, 20, 21]
    assert apart[0]["per image, alone"] == 3 * 6 * 6
