from __future__ import annotations

import os
import random
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrant.training import checkpoint
from calibrant.training.checkpoint import Writer, load, load_best, load_last, save, save_last

STATE = {
    "number": 3,
    "tensor": torch.arange(40.0),
    "text": 'name = "a"',
    "history": [{"epoch": 1, "loss": 0.25}],
    "nothing": None,
}


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    plain = {name: value for name, value in state.items() if name != "tensor"}
    return plain == {name: value for name, value in other.items() if name != "tensor"} and torch.equal(
        state["tensor"], other["tensor"]
    )


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "state.pt", STATE)
    assert same(load(tmp_path / "deep" / "state.pt"), STATE)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["state.pt"]


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Each byte of a checkpoint is damaged once: it is refused, or it did not matter."""
    path = tmp_path / "state.pt"
    save(path, STATE)
    content = path.read_bytes()
    draws = random.Random(0)
    refused = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1 << draws.randrange(8)
        path.write_bytes(damaged)
        try:
            state = load(path)
        except ValueError as error:
            assert str(error) == f"the checkpoint {path} is damaged"  # noqa: PT017
            refused += 1
        else:
            assert same(state, STATE), position
    assert refused > 100


def test_no_missing_end_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save(path, STATE)
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"state\.pt is damaged$"):
            load(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list; expected a dict"):
        load(tmp_path / "list.pt")


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_a_checkpoint_cannot_run_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Harmful()}, "harmful.pt")
    with pytest.raises(ValueError, match="is damaged"):
        load(Path("harmful.pt"))
    assert not Path("harmed").exists()


def test_compressed_members_are_not_decompressed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save(path, STATE)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=r"state\.pt is damaged$") as caught:
        load(path)
    assert "is compressed" in str(caught.value.__cause__)


def test_a_file_that_may_not_be_read_is_no_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        load(tmp_path / "folder.pt")


# ---- The last one and the one before --------------------------------------------------------------


def test_the_newest_is_loaded_and_the_one_before_kept(tmp_path: Path) -> None:
    assert load_last(tmp_path) is None
    for number in (1, 2, 3):
        save_last(tmp_path, {"number": number})
        assert load_last(tmp_path) == {"number": number}
    assert load(tmp_path / checkpoint.PREVIOUS) == {"number": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "previous.pt"}


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-9], lambda content: b"", lambda content: b"PK" * 50]
)
def test_damage_gives_a_warning_and_the_one_before(damage: Any, tmp_path: Path) -> None:
    for number in (1, 2):
        save_last(tmp_path, {"number": number})
    last = tmp_path / checkpoint.LAST
    last.write_bytes(damage(last.read_bytes()))
    with pytest.warns(UserWarning, match=r"last\.pt is damaged; going back to the one before$"):
        assert load_last(tmp_path) == {"number": 1}


def test_with_both_damaged_there_is_none(tmp_path: Path) -> None:
    for number in (1, 2):
        save_last(tmp_path, {"number": number})
    for name in (checkpoint.LAST, checkpoint.PREVIOUS):
        (tmp_path / name).write_bytes(b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load_last(tmp_path) is None
    first, second = (str(each.message) for each in caught)
    assert first.endswith("last.pt is damaged; going back to the one before")
    assert second.endswith("previous.pt is damaged; starting anew")


def test_a_damaged_one_does_not_take_the_place_of_the_good_one_before(tmp_path: Path) -> None:
    """Else a second piece of damage would leave none."""
    for number in (1, 2):
        save_last(tmp_path, {"number": number})
    (tmp_path / checkpoint.LAST).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        load_last(tmp_path)
    save_last(tmp_path, {"number": 3})
    (tmp_path / checkpoint.LAST).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert load_last(tmp_path) == {"number": 1}


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_between_renames_one_is_always_there(
    renames: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in (1, 2):
        save_last(tmp_path, {"number": number})
    plain, done = Path.replace, 0

    def dying(path: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            raise KeyboardInterrupt
        done += 1
        return plain(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            save_last(tmp_path, {"number": 3})
    assert load_last(tmp_path) == {"number": 2}
    save_last(tmp_path, {"number": 4})
    assert load_last(tmp_path) == {"number": 4}
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "previous.pt"}


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".new-last.pt.0a1b2c3d").write_bytes(b"half")
    (tmp_path / ".best.pt.0a1b2c3d").write_bytes(b"half")
    save_last(tmp_path, {"number": 1})
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt"}


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_full_disk_is_one_clear_error(
    written: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk fills up while torch writes to the file, at its first piece or a later one."""
    save_last(tmp_path, {"number": 1})

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream, self.left = stream, written

        def write(self, content: bytes) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return self.stream.write(content)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

    plain = torch.save
    monkeypatch.setattr(checkpoint.torch, "save", lambda state, stream: plain(state, Full(stream)))
    with pytest.raises(OSError, match=r"^cannot write .*last\.pt: No space left on device$"):
        save_last(tmp_path, STATE)
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt"}
    assert load_last(tmp_path) == {"number": 1}


# ---- In the background ------------------------------------------------------------------------------


def test_what_is_written_is_the_state_of_the_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed = threading.Event()
    plain = checkpoint.save_last

    def waiting(folder: Path, state: Any) -> None:
        assert allowed.wait(10)
        plain(folder, state)

    monkeypatch.setattr(checkpoint, "save_last", waiting)
    state = {"weights": torch.zeros(3), "history": [1]}
    with Writer(tmp_path, background=True) as writer:
        writer.write(state, {"weights": state["weights"]})
        state["weights"] += 1  # type: ignore[operator]
        state["history"].append(2)  # type: ignore[union-attr]
        assert load_last(tmp_path) is None  # training has gone on before it was written
        allowed.set()
    last, best = load_last(tmp_path), load_best(tmp_path)
    assert last is not None
    assert best is not None
    assert last["history"] == [1]
    assert not last["weights"].any()
    assert not best["weights"].any()


@pytest.mark.parametrize("how", ["next", "wait", "end"])
def test_a_full_disk_is_noticed_in_the_background(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(state: Any, stream: Any) -> None:
        raise OSError(28, "No space left on device")

    save_last(tmp_path, {"epoch": 1})
    monkeypatch.setattr(checkpoint.torch, "save", full)
    writer = Writer(tmp_path, background=True)
    writer.write({"epoch": 2}, {"epoch": 2})
    notice = {
        "next": lambda: writer.write({"epoch": 3}),
        "wait": writer.wait,
        "end": lambda: writer.__exit__(None),
    }
    with pytest.raises(OSError, match="No space left on device"):
        notice[how]()
    monkeypatch.undo()
    assert load_last(tmp_path) == {"epoch": 1}


def test_an_error_of_training_is_not_hidden_by_one_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(state: Any, stream: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)

    def fail() -> None:
        with Writer(tmp_path, background=True) as writer:
            writer.write({"epoch": 2})
            raise KeyError("training")

    with (
        pytest.warns(
            UserWarning, match=r"checkpoint could not be written: cannot write .*: No space left on device"
        ),
        pytest.raises(KeyError, match="training"),
    ):
        fail()
