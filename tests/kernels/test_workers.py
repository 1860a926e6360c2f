"""Blocks in several threads: the same results, the caller's settings untouched, errors passed on."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from calibrant import create_loss, layout
from calibrant.histogram import ConfidenceHistogram
from calibrant.kernels import nan_if_invalid, reduction, sum_by_class
from calibrant.kernels.workers import map_blocks
from calibrant.layout import arrange
from calibrant.metrics import Predictions
from calibrant.metrics.classwise import ClassGaps


@pytest.fixture
def threads():
    """Set the number of torch's threads, and restore it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(layout, "_CPU_BLOCK", 1 << 12)


def batch(shape, ignored=False):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    target = torch.randint(shape[1], shape[:1] + shape[2:], generator=generator)
    if ignored:
        target[0] = -100
    return logits, target


SHAPES = pytest.mark.parametrize("shape", [(700, 30), (3, 7, 50, 60)], ids=["rows", "images"])


@SHAPES
@pytest.mark.parametrize(
    "key",
    ["cals-alm", "mbls", "brier", "dual-focal", "ls", "acls", "nacl", "mdca", "avuc", "sb-ece", "mmce"],
)
def test_losses_do_not_depend_on_the_number_of_threads(key, shape, threads):
    logits, target = batch(shape, ignored=True)
    results = []
    for count in (1, 2, 5):
        threads(count)
        leaf = logits.clone().requires_grad_()
        value = create_loss(key, shape[1])(leaf, target)
        value.backward()
        results.append((value.detach(), leaf.grad))
    for value, gradient in results[1:]:
        assert torch.equal(value, results[0][0])
        assert torch.equal(gradient, results[0][1])


@SHAPES
@pytest.mark.parametrize("key", ["cals-alm", "acls", "nacl", "mdca", "avuc", "sb-ece", "mmce"])
def test_losses_do_not_depend_on_the_blocks(key, shape, threads, monkeypatch):
    logits, target = batch(shape, ignored=True)
    target[1:].view(-1)[::7] = -100
    results = []
    for numbers in (1 << 12, 1 << 30):
        monkeypatch.setattr(layout, "_CPU_BLOCK", numbers)
        leaf = (4 * logits).double().requires_grad_()
        value = create_loss(key, shape[1])(leaf, target)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(*results)


def test_no_thread_holds_on_to_the_gradient(threads, monkeypatch):
    """Autograd copies a gradient that is still referenced elsewhere: a second tensor of the logits' size."""
    threads(2)
    logits, target = batch((700, 30))
    made = []
    evaluate = reduction._evaluate_with_gradient

    def spy(*arguments):
        result = evaluate(*arguments)
        made.append(result[1].data_ptr())
        return result

    monkeypatch.setattr(reduction, "_evaluate_with_gradient", spy)
    for _ in range(20):
        leaf = logits.clone().requires_grad_()
        create_loss("ls", 30)(leaf, target).backward()
        assert leaf.grad.data_ptr() == made[-1]


@SHAPES
def test_statistics_do_not_depend_on_the_number_of_threads(shape, threads):
    elements = arrange(*batch(shape, ignored=True))
    results = []
    for count in (1, 2, 5):
        threads(count)
        predictions = Predictions.of_elements(elements)
        results.append(
            [
                *ConfidenceHistogram.of(elements).tensors(),
                *ClassGaps.of(elements).tensors(),
                *sum_by_class(elements, lambda shifted: (shifted, shifted.square())),
                predictions.confidence,
                predictions.prediction,
                predictions.squared_error,
            ]
        )
    for tensors in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tensors, results[0], strict=True))


def test_invalid_logits_are_found_in_any_block(threads):
    threads(2)
    logits, target = batch((700, 30))
    assert nan_if_invalid(arrange(logits, target)) == 0
    for row in (0, 350, 699):
        broken = logits.clone()
        broken[row, 3] = torch.inf
        assert nan_if_invalid(arrange(broken, target)).isnan()


def test_invalid_logits_are_found_in_vmap():
    logits, target = batch((700, 30))
    several = torch.stack([logits, logits.index_fill(0, torch.tensor([3]), torch.inf)])
    found = torch.func.vmap(lambda each: nan_if_invalid(arrange(each, target)))(several)
    assert found.isnan().tolist() == [False, True]


def test_finite_logits_whose_sum_overflows_are_valid():
    logits, target = batch((700, 30))
    assert nan_if_invalid(arrange(torch.full_like(logits, 3e38), target)) == 0


def test_results_come_in_order_and_from_several_threads(threads):
    threads(2)
    logits, _ = batch((700, 30))
    meeting = threading.Barrier(2, timeout=30)

    def function(index, scratch):
        if index[0].start in (0, 136):  # the first two blocks wait for one another
            meeting.wait()
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        return index[0].start

    assert map_blocks(function, logits) == list(range(0, 700, 136))


def test_settings_of_the_caller_and_of_later_threads_stay(threads):
    threads(3)
    logits, target = batch((700, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        create_loss("ls", 30)(logits.requires_grad_(), target).backward()
    assert torch.get_num_threads() == 3
    assert torch.is_grad_enabled()
    found = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [3]


def test_one_thread_means_none_of_ours(threads):
    threads(1)
    logits, _ = batch((700, 30))
    names = map_blocks(lambda index, scratch: threading.current_thread().name, logits)
    assert set(names) == {threading.current_thread().name}


def test_errors_reach_the_caller_and_the_next_call_works(threads):
    threads(2)
    logits, _ = batch((700, 30))

    def fail(index, scratch):
        raise IndexError(f"at {index[0].start}")

    with pytest.raises(IndexError, match="at "):
        map_blocks(fail, logits)
    assert len(map_blocks(lambda index, scratch: None, logits)) == 6


def test_the_process_ends_well_after_an_interruption():
    """At its end a thread may still be inside torch."""
    program = """
import _thread, signal, torch
from calibrant.kernels.workers import in_threads

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job in the background ignores

def work(thread):
    if thread == 0:  # a second interruption can come while Python prints the error
        _thread.interrupt_main()
    x = torch.ones(400, 400)
    for _ in range(300):
        x @ x

in_threads(work, 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
    assert "terminate" not in done.stderr
    assert done.returncode in (130, -signal.SIGINT)


def test_inference_mode(threads):
    threads(2)
    logits, target = batch((700, 30))
    loss = create_loss("cals-alm", 30)
    expected = loss(logits, target)
    with torch.inference_mode():
        assert torch.equal(loss(logits.clone(), target.clone()), expected)
    elements = arrange(logits, target)
    histogram = ConfidenceHistogram.of(replace(elements, logits=logits))
    assert not histogram.count.is_inference()


def test_calls_from_several_threads_at_once(threads):
    threads(2)
    logits, target = batch((700, 30))
    expected = Predictions.of(logits, target).confidence
    wrong = []

    def call():
        for _ in range(5):
            if not torch.equal(Predictions.of(logits, target).confidence, expected):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_threads_of_its_own(programs):
    """In a process of its own: pytest's threads are none of the matter."""
    program = """
import os, torch
from calibrant import create_loss, layout
layout._CPU_BLOCK = 1 << 12
torch.set_num_threads(2)
logits, target = torch.randn(700, 30), torch.randint(30, (700,))
loss = create_loss("ls", 30)
before = loss(logits, target)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0 if torch.equal(loss(logits, target), before) else 1)
"""
    subprocess.run([programs / "python", "-c", program], check=True, timeout=60)
