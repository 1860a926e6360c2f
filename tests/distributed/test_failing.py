"""No process waits for ever for another one that has no data, fails, or never arrives."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from calibrant import Evaluator, adapt_on, create_loss, evaluate_on
from calibrant.distributed import OtherProcessError, gather, readable_errors
from calibrant.training import Choice, Recipe, compare
from calibrant.training import train as train_by
from calibrant.training.data import load_data
from calibrant.training.setup import make_fabric

from .processes import Results, in_processes

K, FEATURES, SIZE = 3, 5, 11


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("failing")
    return in_processes(partial(scenarios, folder), 2, folder)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = 3 * torch.randn(SIZE, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(K, (SIZE,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, K)).double()


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def broken(batches: list[tuple[Tensor, Tensor]]) -> Any:
    yield batches[0]
    raise OSError("the disk is gone")


def figures(evaluation: Any) -> list[float]:
    return [evaluation.samples, evaluation.accuracy, evaluation.ece, evaluation.nll, evaluation.brier]


class Wrapper(nn.Module):
    """A wrapper around DDP, such as that of Fabric."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def scenarios(folder: Path, rank: int) -> Results:
    found: Results = {}
    batches = [data()[:4], data()[4:]]

    # One rank fails, then a clean pass follows.
    for key in ("cals-alm", "adafocal"):
        loss = create_loss(key, K)
        share = broken(batches) if rank == 1 else batches
        found[f"{key} fails"] = outcome(lambda loss=loss, share=share: adapt_on(loss, network(), share))
        found[f"{key} passes"] = loss.passes.item()
        found[f"{key} then"] = outcome(lambda loss=loss: adapt_on(loss, network(), batches))
    share = broken(batches) if rank == 1 else batches
    found["evaluation fails"] = outcome(lambda: evaluate_on(network(), share))

    # Uneven numbers of batches through DDP, whose forward would broadcast the buffers of batch normalisation.
    share = batches if rank == 0 else []
    for way in ("uneven", "wrapped"):
        model = DistributedDataParallel(network())
        if rank == 1:
            model.module[1].running_mean += 1  # as after a step on its own data
        used = model if way == "uneven" else Wrapper(model)
        loss = create_loss("cals-alm", K)
        found[f"{way} samples"] = adapt_on(loss, used, share).samples.item()
        found[f"{way} figures"] = figures(evaluate_on(used, share, resamples=0))
        found[f"{way} multiplier"] = loss.multiplier.clone()
        found[f"{way} in step"] = model.require_forward_param_sync

    # Evaluators without a number of classes, or with different numbers.
    evaluator = Evaluator(resamples=0)
    if rank == 0:
        evaluator.update(torch.randn(4, K), torch.tensor([0, 1, 2, 0]))
    found["empty evaluator"] = evaluator.compute().samples
    found["nobody has data"] = outcome(Evaluator().compute)
    other = Evaluator(resamples=0).update(torch.randn(2, K + rank), torch.tensor([0, 1]))
    found["other classes"] = outcome(other.compute)
    other = Evaluator(bins=15 - 5 * rank, resamples=0).update(torch.randn(2, K), torch.tensor([0, 1]))
    found["other bins"] = outcome(other.compute)

    # Losses of different kinds, with different numbers of classes, or with different options.
    for what, key, classes, options in (
        ("other kind", "cals-alm" if rank else "adafocal", K, {}),
        ("other number", "cals-hr", K + rank, {}),
        ("other options", "cals-alm", K, {"margin": 10.0 - rank}),
    ):
        loss = create_loss(key, classes, **options)
        loss.observe(torch.randn(4, classes), torch.tensor([0, 1, 2, 0]))
        found[what] = outcome(loss.adapt)
        found[f"{what} unchanged"] = loss.passes.item() == 0 and loss._observed is None
    found["no loss adapts"] = outcome(create_loss("focal" if rank else "ce", K).adapt)
    found["one loss adapts"] = outcome(create_loss("cals-hr" if rank else "ce", K).adapt)
    loader = DataLoader(data(), 4, sampler=DistributedSampler(data(), shuffle=False))
    loss = create_loss("cals-alm", K)
    found["padded samples"] = adapt_on(loss, model, loader).samples.item()
    found["padded figures"] = figures(evaluate_on(model, loader, resamples=0))
    found["padded multiplier"] = loss.multiplier.clone()

    # Runs and comparisons of different recipes or data.
    os.environ |= {"TORCHELASTIC_RUN_ID": "", "MASTER_ADDR": "", "MASTER_PORT": ""}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    plain = Recipe.load("digits-lt").override(["epochs=1", "model.hidden=[2]", "workers=0"])
    fabric = make_fabric(plain, accelerator="cpu", devices=2)
    fabric.launch()
    mine, output = plain.override([f"loss={('ce', 'focal')[rank]}"]), folder / "run"
    found["other recipe"] = outcome(lambda: train_by(mine, output, fabric=fabric))
    read = load_data(Choice("digits", {"split_seed": rank}))
    found["other data"] = outcome(lambda: train_by(plain, output, data=read, fabric=fabric))
    mine = plain.override([f"batch_size={32 + rank}"])
    found["other comparison"] = outcome(lambda: compare(mine, ["ce"], [0], output, fabric=fabric))
    found["other losses"] = outcome(
        lambda: compare(plain, ["ce", "ls"][: rank + 1], [0], output, fabric=fabric)
    )
    found["other seeds"] = outcome(lambda: compare(plain, ["ce"], [rank], output, fabric=fabric))
    found["output"] = output.exists()

    # One rank never arrives. The last scenario, because gloo's connection is unusable after a time-out.
    if rank == 0:
        loss.observe(torch.randn(4, K), torch.tensor([0, 1, 2, 0]))
        state = loss.multiplier.clone()
        found["timeout"] = outcome(lambda: loss.adapt(timeout=0.5))
        found["unchanged"] = torch.equal(state, loss.multiplier) and loss._observed is None
        (folder / "gave up").touch()
    else:
        for _ in range(300):  # alive all the time, but busy with something else
            if (folder / "gave up").exists():
                break
            time.sleep(0.1)
        found["timeout"] = "did something else"
    return found


@pytest.mark.parametrize("what", ["cals-alm", "adafocal", "evaluation"])
def test_all_fail_if_one_does(what: str, found: list[Results]) -> None:
    assert found[1][f"{what} fails"] == "OSError: the disk is gone"
    assert found[0][f"{what} fails"].startswith("OtherProcessError: 1 of 2 processes failed while ")
    assert found[0][f"{what} fails"].endswith(": OSError: the disk is gone")
    assert issubclass(OtherProcessError, RuntimeError)


@pytest.mark.parametrize("key", ["cals-alm", "adafocal"])
def test_nothing_was_learned_and_the_next_pass_is_clean(key: str, found: list[Results]) -> None:
    for each in found:
        assert each[f"{key} passes"] == 0
        assert each[f"{key} then"] == "done"


@pytest.mark.parametrize("way", ["uneven", "wrapped", "padded"])
def test_shares_of_any_size_through_ddp_equal_one_process(way: str, found: list[Results]) -> None:
    loss = create_loss("cals-alm", K)
    statistics = adapt_on(loss, network(), [data()[:]])
    alone = figures(evaluate_on(network(), [data()[:]], resamples=0))
    for each in found:
        assert each[f"{way} samples"] == statistics.samples == SIZE
        assert torch.equal(each[f"{way} multiplier"], found[0][f"{way} multiplier"])
        torch.testing.assert_close(each[f"{way} multiplier"], loss.multiplier, rtol=1e-12, atol=0)
        assert each[f"{way} figures"] == pytest.approx(alone, rel=1e-9)


def test_the_next_training_step_of_ddp_is_as_it_was(found: list[Results]) -> None:
    assert all(each[f"{way} in step"] for each in found for way in ("uneven", "wrapped"))


def test_evaluators_agree_on_the_number_of_classes(found: list[Results]) -> None:
    for each in found:
        assert each["empty evaluator"] == 4
        assert each["nobody has data"].startswith("ValueError: nothing to evaluate")
        assert each["other classes"].endswith("different numbers of classes, from 3 to 4")


def test_evaluators_agree_on_their_options(found: list[Results]) -> None:
    for each in found:
        assert each["other bins"] == "ValueError: all processes need the same bins, got 10 and 15"


def test_losses_agree_on_kind_classes_and_options(found: list[Results]) -> None:
    for each in found:
        start = "ValueError: all processes need the same loss, got "
        assert each["other kind"].startswith(start)
        assert "AdaFocal(3, " in each["other kind"]
        assert "AugmentedLagrangian(3, " in each["other kind"]
        assert each["other number"].startswith(start + "HeuristicMultipliers(3, ")
        assert "HeuristicMultipliers(4, " in each["other number"]
        assert "margin=10.0" in each["other options"]
        assert "margin=9.0" in each["other options"]
        assert all(each[f"other {what} unchanged"] for what in ("kind", "number", "options"))


def test_losses_agree_on_whether_they_adapt(found: list[Results]) -> None:
    for each in found:
        assert each["no loss adapts"] == "done"
        start = "ValueError: all processes need the same loss, got HeuristicMultipliers(3, "
        assert each["one loss adapts"].startswith(start)
        assert each["one loss adapts"].endswith(" and a loss that does not adapt")


def test_processes_with_different_recipes_or_data_train_nothing(found: list[Results]) -> None:
    start = "ValueError: all processes need the same"
    for each in found:
        assert each["other recipe"] == f'{start} recipe, got loss = "ce" and loss = "focal"'
        assert each["other data"].startswith(f"{start} data, got ")
        assert each["other comparison"] == f"{start} recipe, got batch_size = 32 and batch_size = 33"
        assert each["other losses"] == f"{start} losses, got ce and ce, ls"
        assert each["other seeds"] == f"{start} seeds, got 0 and 1"
        assert not each["output"]


def test_a_process_that_never_comes_is_not_waited_for(found: list[Results]) -> None:
    assert found[0]["timeout"].startswith("RuntimeError: process 0 of 2 waited for the others")
    assert "within 0.5 seconds" in found[0]["timeout"]
    assert re.search(r"\(.*timed? ?out.*\)$", found[0]["timeout"], re.IGNORECASE)  # and not: closed by peer
    assert found[0]["unchanged"]


def leave(rank: int) -> Results:
    loss = create_loss("cals-alm", K)
    loss.observe(torch.randn(4, K), torch.tensor([0, 1, 2, 0]))
    if rank == 1:
        return {"outcome": "left"}

    def exchange() -> None:
        with readable_errors():
            gather(rank)

    return {"outcome": outcome(loss.adapt), "exchange": outcome(exchange)}


def test_a_process_that_is_gone_is_reported(tmp_path: Any) -> None:
    stayed, left = in_processes(leave, 2, tmp_path)
    assert left["outcome"] == "left"
    assert stayed["outcome"].startswith("RuntimeError: process 0 of 2 waited for the others")
    assert stayed["exchange"].startswith("OtherProcessError: process 0 of 2 lost the connection to another")


def skip(skipping: int, rank: int) -> Results:
    """One process goes on to its next training step, a collective of DDP, while the other adapts."""
    model, loss = DistributedDataParallel(network()), create_loss("cals-alm", K)
    inputs, target = data()[:]
    loss(model(inputs), target).backward()
    start = time.monotonic()
    if rank == skipping:
        return {"outcome": outcome(lambda: loss(model(inputs), target).backward())}
    found = outcome(lambda: adapt_on(loss, model, [(inputs, target)], timeout=1))
    return {"outcome": found, "seconds": time.monotonic() - start, "passes": loss.passes.item()}


@pytest.mark.parametrize("skipping", [0, 1])
def test_a_process_in_another_collective_is_reported(skipping: int, tmp_path: Any) -> None:
    """Gloo would abort the program."""
    stayed = in_processes(partial(skip, skipping), 2, tmp_path)[1 - skipping]
    assert stayed["outcome"].startswith(f"RuntimeError: process {1 - skipping} of 2 waited for the others")
    assert "within 1 seconds" in stayed["outcome"]
    assert stayed["seconds"] < 20  # the time-out of the process group is 60 s
    assert stayed["passes"] == 0


# ---- FSDP -----------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A network that contains its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, K)).double()
        self.loss = create_loss("cals-alm", K, margin=1)

    def forward(self, inputs: Tensor, target: Tensor | None = None) -> Tensor:
        logits = self.network(inputs)
        return logits if target is None else self.loss(logits, target)


def train(classifier: Classifier, rows: slice, loader: Any) -> Results:
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
    inputs, target = (tensor[:10][rows] for tensor in data()[:])
    samples = []
    for _ in range(4):
        optimizer.zero_grad()
        classifier(inputs, target).backward()
        optimizer.step()
        samples.append(adapt_on(classifier.loss, classifier, loader).samples.item())
    return {
        "loss": {name: value.clone() for name, value in classifier.loss.state_dict().items()},
        "samples": samples,
    }


def train_sharded(rank: int) -> Results:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    classifier = Classifier()
    fully_shard(classifier, mesh=init_device_mesh("cpu", (2,)))
    sharded = all(type(parameter).__name__ == "DTensor" for parameter in classifier.parameters())
    loader = DataLoader(data(), 4, sampler=DistributedSampler(data(), shuffle=False))
    return {**train(classifier, slice(rank, None, 2), loader), "sharded": sharded}


def test_fully_sharded_data_parallel_keeps_the_state_of_the_loss_whole(tmp_path: Any) -> None:
    alone = train(Classifier(), slice(None), [data()[:]])
    assert alone["samples"] == [SIZE] * 4
    assert not torch.equal(alone["loss"]["multiplier"], Classifier().loss.multiplier)
    first, second = in_processes(train_sharded, 2, tmp_path)
    assert first["sharded"]
    for each in (first, second):
        assert each["samples"] == alone["samples"]
        for name, value in alone["loss"].items():
            assert torch.equal(each["loss"][name], first["loss"][name])
            torch.testing.assert_close(each["loss"][name], value, rtol=1e-9, atol=1e-12)


def test_state_cast_behind_the_losss_back_is_refused() -> None:
    loss = create_loss("cals-alm", K)
    loss.multiplier.data = loss.multiplier.data.bfloat16()  # what FSDP's MixedPrecision(buffer_dtype=) does
    for use in (loss, loss.observe):
        with pytest.raises(
            TypeError, match=r"multiplier was converted to torch.bfloat16.*ignored_modules=\[loss\]"
        ):
            use(torch.randn(2, K), torch.tensor([0, 1]))
