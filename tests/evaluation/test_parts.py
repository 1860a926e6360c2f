"""Data in parts: the figures of the whole, and errors and warnings of workers in this process."""

import pickle
import sys
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from calibrant.evaluation import Evaluator, evaluate_parts, parts
from calibrant.extras import MissingPackageError
from calibrant.predictions import BadFileError, batches_of
from tests.programs import started_by

LOGITS = 2 * torch.randn(300, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET = torch.randint(4, (300,), generator=torch.Generator().manual_seed(1))
SLICES = [slice(0, 7), slice(7, 7), slice(7, 150), slice(150, 300)]


def batches(rows):
    yield from zip(LOGITS[rows].split(40), TARGET[rows].split(40), strict=True)


@pytest.mark.parametrize("options", [{}, {"class_counts": [200, 50, 5, 1], "bins": 10, "name": "mine"}])
def test_the_figures_are_those_of_the_whole(options):
    found = evaluate_parts(SLICES, batches, **options)
    expected = Evaluator(**options).update(LOGITS, TARGET).compute()
    assert found.samples == 300
    assert found.name == expected.name
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, abs=1e-12), name


def test_progress_and_arguments():
    seen = []
    evaluate_parts(SLICES, batches, resamples=0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(ValueError, match="no parts"):
        evaluate_parts([], batches)
    with pytest.raises(ValueError, match="jobs"):
        evaluate_parts(SLICES, batches, jobs=0)
    with pytest.raises(ValueError, match="on must be"):
        evaluate_parts(SLICES, batches, on="mars")


def test_without_ray_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"calibrant\[ray\]"):
        evaluate_parts(SLICES, batches, on="ray")


def here(work, given, jobs):
    yield from map(work, given)


def test_errors_and_warnings_of_workers_arrive(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "_in_processes", here)
    probabilities = LOGITS.softmax(1).numpy()
    paths = [tmp_path / f"{number}.npz" for number in range(3)]
    for path in paths[:2]:
        np.savez(path, logits=probabilities, labels=TARGET.numpy())
    with pytest.warns(UserWarning, match="add up to 1") as caught:
        evaluate_parts(paths[:2], batches_of, jobs=2, resamples=0)
    assert len(caught) == 1  # not one for each part
    assert caught[0].filename == __file__
    np.savez(paths[2], logits=LOGITS.numpy(), labels=TARGET.numpy() + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BadFileError, match=r"2\.npz: has label \d at row") as problem:
            evaluate_parts(paths, batches_of, jobs=2, resamples=0)
    again = pickle.loads(pickle.dumps(problem.value))
    assert (type(again), str(again)) == (BadFileError, str(problem.value))


def test_the_work_of_a_worker_can_be_sent():
    work = partial(parts._result, read=partial(batches_of, ignore_index=0), options={"bins": 10})
    assert pickle.loads(pickle.dumps(work)).keywords["options"] == {"bins": 10}


def only_the_first_ends(number):
    if number:
        time.sleep(60)
    yield LOGITS, TARGET


def stop(done, total):
    raise KeyboardInterrupt


def test_an_interruption_ends_the_workers_without_a_word(monkeypatch, programs):
    """While one part is done, others are worked on, and others wait."""
    said, before = [], threading.enumerate()
    monkeypatch.setattr(threading, "excepthook", said.append)
    with started_by(programs / "python"), pytest.raises(KeyboardInterrupt):
        evaluate_parts(range(20), only_the_first_ends, jobs=2, resamples=0, progress=stop)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(60)
    assert said == []
