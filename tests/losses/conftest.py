"""What the tests of the losses share."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from calibrant import LOSSES, create_loss
from calibrant.losses import AdaptiveLoss, Loss

ADAPTIVE = [key for key, loss in LOSSES.items() if issubclass(loss, AdaptiveLoss)]
SOFT = [key for key, loss in LOSSES.items() if loss.accepts_probabilities]


@pytest.fixture(params=LOSSES)
def key(request: pytest.FixtureRequest) -> str:
    """Every loss in turn, a newly registered one included."""
    return request.param


@pytest.fixture(scope="session")
def quick_compiler() -> Iterator[None]:
    """`torch.compile` without a measurement of its guards, and without a search for garbage, in every graph.

    Each takes a good part of the time of a small one. A version of torch without them only stays slower.
    """
    import torch._dynamo.guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "run_gc_after_compile", False, raising=False)
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


def adapted_loss(key: str, num_classes: int, passes: int = 3, **arguments: object) -> Loss:
    """A loss whose state is not the one it started with, where it has any."""
    loss = create_loss(key, num_classes, **arguments)
    if isinstance(loss, AdaptiveLoss):
        for logits, target in validation_batches(num_classes, passes):
            loss.observe(logits, target)
            loss.adapt()
    return loss


@cache
def validation_batches(num_classes: int, number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            6 * torch.randn(200, num_classes, generator=generator, dtype=torch.float64),
            torch.randint(num_classes, (200,), generator=generator),
        )
        for _ in range(number)
    ]


def peak_memory(run: Callable[[], object]) -> int:
    """The most bytes that torch held at once during a call, beyond what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events, torch 2.11 warns that events of earlier cycles are dropped.
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    level = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak
