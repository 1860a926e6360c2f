"""The loop over a model's predictions: modes, devices, forms of batches, and rows that a sampler repeats."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from calibrant.inference import own_rows, predictions_on

K = 3


def pairs(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, K, generator=generator), torch.randint(K, (size,), generator=generator))
        for size in sizes
    ]


class Contiguous(Sampler[int]):
    """An unknown sampler with the attributes of a known one."""

    def __init__(self) -> None:
        self.dataset, self.rank, self.num_replicas = range(5), 1, 2

    def __iter__(self) -> Iterator[int]:
        return iter([3, 4, 0])

    def __len__(self) -> int:
        return 3


class OrderedDistributedSampler(Contiguous):
    """timm's sampler by name, which is not a subclass of torch's."""


class TestOwnRows:
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("replicas", [1, 2, 3, 4])
    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    @pytest.mark.parametrize("size", [1, 2, 7, 8, 12])
    def test_every_element_is_one_processs_own_once(
        self, size: int, batch_size: int, replicas: int, shuffle: bool
    ) -> None:
        data = torch.arange(size)
        kept: Counter[int] = Counter()
        for rank in range(replicas):
            sampler = DistributedSampler(range(size), replicas, rank, shuffle=shuffle, seed=1)
            loader, seen = DataLoader(data, batch_size, sampler=sampler), 0
            for batch in loader:
                kept.update(batch[: own_rows(loader, seen, len(batch))].tolist())
                seen += len(batch)
        assert kept == Counter(range(size))

    def test_data_that_a_sampler_drops_are_not_missed(self) -> None:
        sampler = DistributedSampler(range(7), 2, 0, shuffle=False, drop_last=True)
        loader = DataLoader(range(7), 3, sampler=sampler)
        assert [own_rows(loader, 0, 3), own_rows(loader, 3, 1)] == [3, 1]

    def test_the_sampler_of_a_batch_sampler_counts(self) -> None:
        sampler = DistributedSampler(range(5), 2, 1, shuffle=False)
        loader = DataLoader(range(5), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
        assert [own_rows(loader, 0, 2), own_rows(loader, 2, 1)] == [2, 0]

    def test_timms_sampler_counts(self) -> None:
        loader = DataLoader(range(5), 3, sampler=OrderedDistributedSampler())
        assert own_rows(loader, 0, 3) == 2

    @pytest.mark.parametrize(
        "loader", [DataLoader(range(5), 3, sampler=Contiguous()), DataLoader(range(5), 3), [torch.ones(3)]]
    )
    def test_nothing_is_left_out_of_other_data(self, loader: object) -> None:
        assert own_rows(loader, 0, 3) == 3
        assert own_rows(loader, 3, 2) == 2


class TestPredictions:
    def test_every_batch_comes_with_its_target(self) -> None:
        batches = pairs(4, 2)
        found = list(predictions_on(nn.Identity(), batches))
        assert all(
            torch.equal(a, b)
            for got, given in zip(found, batches, strict=True)
            for a, b in zip(got, given, strict=True)
        )

    def test_repeats_of_the_loaders_sampler_are_cut_off(self) -> None:
        inputs, target = pairs(5)[0]
        data = TensorDataset(inputs, target)
        sampler = DistributedSampler(data, 2, 1, shuffle=False)
        found = list(predictions_on(nn.Identity(), DataLoader(data, 2, sampler=sampler)))
        assert [len(logits) for logits, _ in found] == [2, 0]
        assert torch.equal(found[0][0], inputs[[1, 3]])
        assert found[1][0].shape == (0, K)
        assert found[1][1].shape == (0,)

    def test_the_callers_word_on_repeats_counts(self) -> None:
        found = list(predictions_on(nn.Identity(), pairs(4, 4, 1), own_rows=lambda rows: rows // 2))
        assert [len(target) for _, target in found] == [2, 2, 0]

    def test_rows_of_flattened_logits_belong_to_elements(self) -> None:
        inputs, target = torch.randn(5, 2, K), torch.randint(K, (5, 2))
        data = TensorDataset(inputs, target)
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, shuffle=False))

        def flat(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
            return model(batch[0]).flatten(0, 1), batch[1].flatten()

        found = list(predictions_on(nn.Identity(), loader, forward=flat))
        assert [len(logits) for logits, _ in found] == [4, 0]
        assert torch.equal(found[0][1], target[[1, 3]].flatten())

        def uneven(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
            logits, labels = flat(model, batch)
            return logits[:3], labels[:3]

        loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1, shuffle=False))
        with pytest.raises(ValueError, match="1 of 3 elements in this batch are repeats"):
            list(
                predictions_on(
                    nn.Identity(), loader, forward=lambda m, b: (uneven(m, b)[0][:2], b[1][:, 0][:2])
                )
            )

    def test_batches_of_another_form(self) -> None:
        batches = [{"pixels": inputs, "labels": target} for inputs, target in pairs(4, 2)]
        found = predictions_on(
            nn.Identity(), batches, forward=lambda model, batch: (model(batch["pixels"]), batch["labels"])
        )
        assert all(
            torch.equal(logits, batch["pixels"]) for (logits, _), batch in zip(found, batches, strict=True)
        )

    @pytest.mark.parametrize("batch", [torch.ones(2, K), (torch.ones(2, K),), {"x": torch.ones(2, K)}])
    def test_a_batch_that_is_no_pair_is_named(self, batch: object) -> None:
        with pytest.raises(
            TypeError, match=r"pairs \(input, target\), got .*pass forward=lambda model, batch"
        ):
            list(predictions_on(nn.Identity(), [batch]))

    @pytest.mark.parametrize("target", [2, np.int64(2), torch.tensor(2)])
    def test_a_data_set_without_a_loader_is_named(self, target: object) -> None:
        with pytest.raises(
            TypeError, match=r"expected batches, got a single element .*2\)?; wrap .*DataLoader"
        ):
            list(predictions_on(nn.Identity(), [(torch.ones(K), target)]))

    def test_a_model_without_logits_is_named(self) -> None:
        def forward(model: nn.Module, batch: object) -> tuple[object, object]:
            return {"logits": 0}, None

        with pytest.raises(TypeError, match="a tensor of logits, got dict of 1"):
            list(predictions_on(nn.Identity(), pairs(2), forward=forward))

    def test_modes_come_back_when_the_loop_is_left(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(K, K))
        model[0].eval()
        predictions = predictions_on(model, pairs(2, 2))
        next(predictions)
        assert not any(module.training for module in model.modules())
        predictions.close()
        assert [module.training for module in model.modules()] == [True, False, True]

    def test_no_gradients_inside_and_the_callers_outside(self) -> None:
        model = nn.Linear(K, K)
        for logits, _ in predictions_on(model, pairs(2)):
            assert not logits.requires_grad
            assert torch.is_grad_enabled()
