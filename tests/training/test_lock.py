"""The lock of a folder, and what it protects: no run is published under the name of another."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from calibrant.options import RecipeError
from calibrant.training import TrainingError, checkpoint, loop, run_lock
from calibrant.training.lock import FolderLock
from calibrant.training.loop import train
from calibrant.training.recipe import Recipe
from calibrant.training.run_folder import result_of
from calibrant.training.runs import Run
from tests.permissions import read_only

RECIPE = Recipe.load("digits-lt").override(
    [
        "epochs=2",
        "batch_size=32",
        "data=synthetic[classes=4,features=5,train_size=64,validation_size=40,test_size=31]",
        "model.hidden=[4]",
        "select=nll",
        "average=0.5",
        "loss=cals-alm[margin=0.3]",
    ]
)
OTHER = RECIPE.override(["loss=focal"])


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_SECONDS_BETWEEN_ATTEMPTS", 0.02)


@contextmanager
def child(action: Callable[[], object]) -> Iterator[int]:
    """A forked process that does something and then sleeps until it is killed."""
    ready, done = os.pipe()
    process = os.fork()
    if process == 0:
        with suppress(BaseException):
            action()
            os.write(done, b".")
            time.sleep(60)
        os._exit(1)
    try:
        assert os.read(ready, 1) == b"."
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(ready)
        os.close(done)


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


# ---- The lock itself ------------------------------------------------------------------------------


def test_a_lock_excludes_other_processes_and_ends_with_its_own(tmp_path: Path) -> None:
    with child(FolderLock(tmp_path / "deep" / "run", "ce, seed 3").acquire) as process:
        mine = FolderLock(tmp_path / "deep" / "run")
        assert not mine.acquire()
        assert mine.holder().startswith(f"process {process} on {os.uname().nodename} since ")
        assert mine.holder().endswith("(ce, seed 3)")
        end(process)
        assert mine.holder() == ""
        assert mine.acquire()
        mine.release()


def test_forked_workers_do_not_keep_the_lock(tmp_path: Path) -> None:
    def lock_and_fork() -> None:
        FolderLock(tmp_path).acquire()
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "worker").write_text(str(worker))

    with child(lock_and_fork) as process:
        assert not FolderLock(tmp_path).acquire()
        end(process)
        worker = int((tmp_path / "worker").read_text())
        try:
            with FolderLock(tmp_path) as mine:
                mine.check()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_threads_of_one_process_exclude_one_another(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, "first"), FolderLock(tmp_path, "second")
    assert first.acquire()
    for _ in range(2):  # the attempt does not release the first lock
        assert not second.acquire()
        assert second.holder().endswith("(first)")
        first.check()
    first.release()
    assert second.holder() == ""
    assert second.acquire()
    second.release()


def test_a_new_folder_without_content_is_removed_and_an_old_one_kept(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("old/run", "new/run"):
        with FolderLock(tmp_path / name):
            assert (tmp_path / name).is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    with FolderLock(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()
    with FolderLock(tmp_path / "kept"):
        (tmp_path / "kept" / "file").touch()
    assert (tmp_path / "kept" / "file").exists()


def test_a_waiting_process_notices_that_the_folder_was_removed(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run")
    assert first.acquire()
    waiting = threading.Thread(target=second.__enter__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        waiting.start()
        time.sleep(0.05)
        first.release()
        waiting.join()
    second.check()
    assert (tmp_path / "run").is_dir()
    second.release()


def test_a_replaced_folder_is_noticed(tmp_path: Path) -> None:
    mine = FolderLock(tmp_path / "run")
    assert mine.acquire()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TrainingError, match="run was deleted or replaced while this process worked in it"):
        mine.check()
    other = FolderLock(tmp_path / "run")
    assert other.acquire()
    with pytest.raises(TrainingError, match="deleted or replaced"):
        mine.check()
    mine.release()
    other.check()
    other.release()


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path).acquire()
    assert (tmp_path / "precious").read_text() == "content"


def test_a_lost_lock_is_noticed_and_the_new_holder_is_named(tmp_path: Path) -> None:
    mine = FolderLock(tmp_path, "mine")
    assert mine.acquire()
    (tmp_path / ".lock").open().close()  # closing any descriptor of the file releases a record lock
    with child(FolderLock(tmp_path, "theirs").acquire) as process:
        with pytest.raises(
            TrainingError, match=rf"was locked by process {process} on .* \(theirs\) meanwhile"
        ):
            mine.check()
        mine.release()
        assert FolderLock(tmp_path).holder().endswith("(theirs)")


def test_a_lost_lock_that_was_not_noticed_leaves_the_name_of_the_new_holder(tmp_path: Path) -> None:
    mine = FolderLock(tmp_path / "run", "mine")
    assert mine.acquire()
    (tmp_path / "run" / ".lock").open().close()
    with child(FolderLock(tmp_path / "run", "theirs").acquire):
        mine.release()
        assert FolderLock(tmp_path / "run").holder().endswith("(theirs)")


@pytest.mark.parametrize("problem", [FileNotFoundError, FileExistsError])
def test_a_folder_that_is_removed_while_it_is_created_is_not_locked(
    problem: type[OSError], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def removed(path: Path, **_: Any) -> None:
        raise problem(path)

    lock = FolderLock(tmp_path / "deep" / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", removed)
        assert not lock.acquire()
    assert lock.acquire()
    lock.release()


def test_a_file_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(FileExistsError):
        FolderLock(tmp_path / "run").acquire()


def test_a_full_disk_names_the_lock_and_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = FolderLock(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"^cannot write \S+\.lock: No space left on device$"):
            lock.acquire()
    assert lock.acquire()
    lock.release()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_place_where_nothing_can_be_created_is_refused_at_once() -> None:
    """The system answers as if a folder had been removed meanwhile; waiting for it would not end."""
    for place in (Path("/proc/run"), Path("/proc/run/deep"), Path("/proc")):
        with pytest.raises(PermissionError, match=r"/proc"):
            FolderLock(place).acquire()
        with pytest.raises(PermissionError, match=rf"{place} cannot be written to: /proc "):
            train(RECIPE, place)


@pytest.mark.parametrize("name", ["", "run", "deep/run"])
def test_a_folder_that_is_read_only_is_refused_at_once(name: str) -> None:
    with TemporaryDirectory() as temporary:  # others may not enter the folders of tmp_path
        folder = Path(temporary)
        with read_only(folder):
            with pytest.raises(PermissionError, match=f"{folder} does not allow it"):
                train(RECIPE, folder / name)
            with pytest.raises(PermissionError):
                FolderLock(folder / name).acquire()


def test_a_lock_file_that_is_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match=r"not a regular file: .*\.lock"):
        FolderLock(tmp_path).acquire()
    asked = threading.Thread(target=FolderLock(tmp_path).holder, daemon=True)
    asked.start()
    asked.join(5)
    waits = asked.is_alive()
    if waits:  # let it end
        os.close(os.open(tmp_path / ".lock", os.O_WRONLY | os.O_NONBLOCK))
    assert not waits


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gives_one_warning(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(
        UserWarning, match="cannot be locked, because its file system does not support it"
    ) as said:
        train(RECIPE, tmp_path)
    assert len(said) == 1
    assert Run(tmp_path).recipe == RECIPE


# ---- Runs in a folder that is in use --------------------------------------------------------------


def hold(folder: Path, recipe: Recipe) -> FolderLock:
    """What a run does before it reads its data."""
    held = run_lock.lock_of(folder, recipe)
    assert held.acquire()
    return held


def test_another_recipe_is_refused_while_a_run_works_in_the_folder(tmp_path: Path) -> None:
    with child(lambda: hold(tmp_path, OTHER)) as process:
        said = (
            rf"in use by process {process} on .* \(.*: digits-lt, focal, seed 0\) for another recipe; choose"
        )
        for stale in (None, OTHER, RECIPE):  # the last: of a run that failed before its first checkpoint
            if stale is not None:
                (tmp_path / "recipe.toml").write_text(stale.to_toml())
            with pytest.raises(RecipeError, match=said):
                train(RECIPE, tmp_path)
        (tmp_path / "recipe.toml").write_text(OTHER.to_toml())
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "last.pt").touch()
        with pytest.raises(RecipeError, match=said):  # and not that the folder may be deleted
            train(RECIPE, tmp_path)
        (tmp_path / "checkpoints" / "last.pt").unlink()
        end(process)
        train(RECIPE, tmp_path)  # nothing had been trained
    assert Run(tmp_path).recipe == RECIPE


@pytest.mark.parametrize("stale", [None, RECIPE, OTHER])
def test_the_same_recipe_waits_and_takes_over(stale: Recipe | None, tmp_path: Path) -> None:
    if stale is not None:
        (tmp_path / "recipe.toml").write_text(stale.to_toml())
    with child(lambda: hold(tmp_path, RECIPE)) as process:
        killer = threading.Timer(0.3, end, (process,))
        killer.start()
        with pytest.warns(UserWarning, match=rf"in use by process {process} .* for the same recipe; waiting"):
            train(RECIPE, tmp_path)
        killer.join()
    assert Run(tmp_path).recipe == RECIPE


def test_the_same_recipe_waits_and_finds_the_run_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two threads, whose locks exclude one another as those of two processes do."""
    trained = []
    plain = loop.Loop.run

    def noting(training: loop.Loop) -> None:
        trained.append(threading.current_thread())
        time.sleep(0.2)
        plain(training)

    monkeypatch.setattr(loop.Loop, "run", noting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=train, args=(RECIPE, tmp_path)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(trained) == 1
    assert Run(tmp_path).recipe == RECIPE


def test_a_run_whose_folder_is_replaced_writes_nothing_into_the_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = loop.Loop._train_epoch
    others = []

    def replacing(training: loop.Loop) -> None:
        if training.epoch == 1:
            shutil.rmtree(tmp_path / "run")
            others.append(hold(tmp_path / "run", OTHER))
        plain(training)

    monkeypatch.setattr(loop.Loop, "_train_epoch", replacing)
    with pytest.raises(TrainingError, match="was deleted or replaced"):
        train(RECIPE, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}
    others[0].release()


def test_predicting_from_a_run_in_progress_names_the_process(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.to_toml())
    with (
        child(lambda: hold(tmp_path, RECIPE)) as process,
        pytest.raises(RecipeError, match=rf"is not finished; process {process} on .* works on it"),
    ):
        Run(tmp_path)


# ---- Files of another run -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its last epoch."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(RECIPE, folder)
    return folder


@pytest.fixture(scope="module")
def finished(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(begun, folder)
    return train(RECIPE, folder)


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
@pytest.mark.parametrize("what", ["recipe", "data"])
def test_a_checkpoint_of_another_run_is_refused(name: str, what: str, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / name
    state = checkpoint.load(path)
    checkpoint.save(path, {**state, what: OTHER.to_toml() if what == "recipe" else "another"})
    (tmp_path / "recipe.toml").unlink()  # even if nothing else says so
    said = (
        r"belongs to another recipe \(there: loss = \"focal\""
        if what == "recipe"
        else "data have changed since the run"
    )
    with pytest.raises(RecipeError, match=said):
        train(RECIPE, tmp_path)
    assert not (tmp_path / "result.json").exists()


ALTERED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no recipe": lambda state: state.pop("recipe"),
    "no model": lambda state: state.pop("model"),
    "no optimizer": lambda state: state.pop("optimizer"),
    "no loss": lambda state: state.pop("loss"),
    "no average": lambda state: state.update(averaged=None),
    "no randomness": lambda state: state.pop("randomness"),
    "an epoch too many": lambda state: state.update(epoch=3),
    "an epoch too few": lambda state: state.update(epoch=1),
    "a negative epoch": lambda state: state.update(epoch=-1),
    "half an epoch": lambda state: state.update(epoch=1.5),
    "a step in no epoch": lambda state: state.update(step=1),
    "a step too many": lambda state: state.update(epoch=1, step=99, history=state["history"][:1]),
    "a row too few": lambda state: state["history"].pop(),
    "a learned state too few": lambda state: state["learned"].update(
        multiplier=state["learned"]["multiplier"][:-1]
    ),
    "weights of other shapes": lambda state: state["model"].update({"1.weight": torch.zeros(3, 5)}),
    "a weight too few": lambda state: state["model"].popitem(),
    "moments of other shapes": lambda state: state["optimizer"][0].update(momentum_buffer=torch.zeros(3, 5)),
    "a loss of other shapes": lambda state: state["loss"].update(multiplier=torch.zeros(9)),
    "something else for best": lambda state: state.update(best="good"),
    "a text as history": lambda state: state.update(history="text"),
    "a broken generator": lambda state: state["randomness"][0].update(torch=torch.zeros(3)),
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_checkpoint_is_refused_in_one_line(what: str, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / "last.pt"
    state = checkpoint.load(path)
    ALTERED[what](state)
    checkpoint.save(path, state)
    with pytest.raises((TrainingError, RecipeError)) as refusal:
        train(RECIPE, tmp_path)
    text = str(refusal.value)
    assert f"{tmp_path / 'checkpoints'}" in text
    assert "does not fit the run" in text or "does not say which recipe" in text
    assert "\n" not in text
    assert not (tmp_path / "result.json").exists()


def test_altered_best_weights_are_refused(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / "best.pt"
    state = checkpoint.load(path)
    del state["model"]
    checkpoint.save(path, state)
    with pytest.raises(TrainingError, match=r"the checkpoint of the best weights in .* does not fit the run"):
        train(RECIPE, tmp_path)


def damaged_results(content: str) -> dict[str, str]:
    plain = json.loads(content)
    without = {f"no {key}": json.dumps({k: v for k, v in plain.items() if k != key}) for key in plain}
    del without["no normalisation"]
    rows = [{"epoch": 1}, {"epoch": 2}]
    values: list[Any] = ["x", None, True, [0.5]]
    odd = {
        f"{value!r} as {name}": json.dumps(
            {**plain, "history": [*plain["history"][:-1], {**plain["history"][-1], name: value}]}
        )
        for value in values
        for name in ("validation_accuracy", "train_loss")
    }
    return {
        "nothing": "",
        "an empty object": "{}",
        "a list": "[]",
        "null": "null",
        "cut off": content[: len(content) // 2],
        "not UTF-8": "\udcff",
        "nested": "[" * 100_000,
        "other rows": json.dumps({**plain, "history": rows}),
        "a row too few": json.dumps({**plain, "history": plain["history"][:1]}),
        "no epochs": json.dumps({**plain, "history": [], "epochs": 0}),
        "true as epochs": json.dumps({**plain, "history": plain["history"][:1], "epochs": True}),
        "the best epoch after the last": json.dumps({**plain, "epoch": 3}),
        "a hash that is a number": json.dumps({**plain, "files": {"test.npz": 3}}),
        **odd,
        **without,
    }


def test_damaged_results_are_refused_in_one_line(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "result.json"
    for what, content in damaged_results(path.read_text()).items():
        path.write_bytes(content.encode(errors="surrogateescape"))
        for action in (lambda: train(RECIPE, tmp_path), lambda: Run(tmp_path)):
            with pytest.raises(RecipeError, match=r"result\.json is damaged, or not the result") as refusal:
                action()
            assert "\n" not in str(refusal.value), what
    path.unlink()  # what the message advises
    train(RECIPE, tmp_path)
    assert result_of(tmp_path)["files"] == result_of(finished)["files"]


def test_a_result_of_another_recipe_is_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "recipe.toml").write_text(OTHER.to_toml())
    for recipe in (RECIPE, OTHER):
        with pytest.raises(RecipeError, match="another recipe"):
            train(recipe, tmp_path)
    with pytest.raises(RecipeError, match=r"result\.json belongs to another recipe"):
        Run(tmp_path)
    (tmp_path / "recipe.toml").unlink()
    with pytest.raises(RecipeError, match=r"result\.json belongs to another recipe"):
        train(OTHER, tmp_path)


def test_a_result_with_fewer_epochs_than_the_recipe_is_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "result.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "epoch": 1, "epochs": 1, "history": plain["history"][:1]}))
    for action in (lambda: train(RECIPE, tmp_path), lambda: Run(tmp_path)):
        with pytest.raises(RecipeError, match=r"result\.json has epochs = 1, expected 2 as in the recipe"):
            action()


@pytest.mark.parametrize("name", ["model.safetensors", "test.npz", "learned.safetensors", "bins.safetensors"])
def test_five_flipped_bits_are_noticed(name: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / name
    content = bytearray(path.read_bytes())
    for position in range(5):
        content[-200 - 7 * position] ^= 1
    early = Run(tmp_path / "run")
    path.write_bytes(content)
    said = rf"{name} is damaged or was changed: its SHA-256 is not the one"
    with pytest.raises(RecipeError, match=said):
        Run(tmp_path / "run")
    if name == "model.safetensors":  # otherwise the stored predictions would do
        (tmp_path / "run" / "test.npz").unlink()
    stem = name.removesuffix(".safetensors")
    with pytest.raises(RecipeError, match=said):
        getattr(early, stem) if stem in ("learned", "bins") else early.predict("test", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_a_file_that_is_not_of_the_run_is_not_read(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "test.npz", tmp_path / "train.npz")
    (batch, *_) = Run(tmp_path).predictions("train")
    assert len(batch[1]) == 32  # of 64 training elements, and not the 31 in the file


def test_stored_evaluations_that_were_changed_or_are_of_another_run_are_computed_anew(
    finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    computed: list[str] = []
    plain, results = Run._results_on, {}

    def computing(run: Run, batches: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
        computed.extend(keys)
        if not results:
            results.update(plain(run, batches, keys, *arguments, **options))
        return {key: results[key] for key in keys}

    monkeypatch.setattr(Run, "_results_on", computing)
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    expected = Run(tmp_path).results(["temperature"], resamples=10)
    path = tmp_path / "evaluation.json"
    kept = json.loads(path.read_text())
    changed = json.loads(path.read_text())
    changed["results"][""]["evaluation"]["accuracy"] = 0.999
    for content in (
        *("[]", "[" * 100_000, path.read_text()[:-50]),
        *(json.dumps(each) for each in (changed, {**kept, "metrics": ["ece"]}, {**kept, "run": "another"})),
    ):
        path.write_text(content)
        computed.clear()
        assert Run(tmp_path).results(["temperature"], resamples=10) == expected
        assert computed == ["", "temperature"]
        assert json.loads(path.read_text()) == kept
