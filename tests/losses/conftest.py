"""What the tests of the losses share."""

from collections.abc import Callable

import pytest
import torch

from calibrant import LOSSES, create_loss
from calibrant.losses import AdaptiveLoss, Loss

ADAPTIVE = [key for key, loss in LOSSES.items() if issubclass(loss, AdaptiveLoss)]
SOFT = [key for key, loss in LOSSES.items() if loss.accepts_probabilities]


@pytest.fixture(params=LOSSES)
def key(request: pytest.FixtureRequest) -> str:
    """Every loss in turn, a newly registered one included."""
    return request.param


def adapted_loss(key: str, num_classes: int, passes: int = 3, **arguments: object) -> Loss:
    """A loss whose state is not the one it started with, where it has any."""
    loss = create_loss(key, num_classes, **arguments)
    generator = torch.Generator().manual_seed(11)
    for _ in range(passes):
        logits = 6 * torch.randn(200, num_classes, generator=generator, dtype=torch.float64)
        loss.observe(logits, torch.randint(num_classes, (200,), generator=generator))
        loss.adapt()
    return loss


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
