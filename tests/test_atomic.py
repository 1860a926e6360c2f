"""Files are replaced whole or not at all; modes and links survive; errors name the right file."""

import errno
import os
import stat

import pytest

from calibrant.atomic import replace_file, replacing


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_mode(tmp_path, bits):
    path = tmp_path / "out.json"
    path.write_text("before")
    path.chmod(bits)
    replace_file(path, b"after")
    assert path.read_text() == "after"
    assert mode(path) == bits


@pytest.mark.parametrize(
    ("refused", "before", "after"),
    [("owner", 0o660, 0o660), ("group", 0o660, 0o600), ("group", 0o664, 0o644), ("group", 0o604, 0o644)],
)
def test_the_rights_of_a_group_go_to_no_other_group(tmp_path, monkeypatch, refused, before, after):
    path, calls = tmp_path / "out.json", []

    def chown(_, owner, group):
        if owner != -1 if refused == "owner" else group != -1:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        calls.append((owner, group))

    path.write_text("before")
    path.chmod(before)
    monkeypatch.setattr(os, "chown", chown)
    replace_file(path, b"after")
    assert path.read_text() == "after"
    assert mode(path) == after
    kept = path.stat()
    assert calls == [(-1, kept.st_gid) if refused == "owner" else (kept.st_uid, -1)]


@pytest.mark.parametrize("number", [1, 2])
def test_the_file_of_a_standard_stream_is_written_in_place(tmp_path, number):
    path, saved = tmp_path / "out", os.dup(number)
    (tmp_path / "link").symlink_to(path)
    with path.open("wb") as output:
        try:
            os.dup2(output.fileno(), number)
            os.write(number, b"first\n")
            replace_file(tmp_path / "link", b"content\n")
            os.write(number, b"last\n")
        finally:
            os.dup2(saved, number)
            os.close(saved)
    assert path.read_text() == "first\ncontent\nlast\n"


def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "out.json", b"")
    finally:
        os.umask(before)
    assert mode(tmp_path / "out.json") == 0o640


def test_a_private_file_is_never_readable_by_others(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("before")
    path.chmod(0o600)
    with replacing(path) as stream:
        stream.write(b"secret")
        stream.flush()
        (partial,) = (each for each in tmp_path.iterdir() if each != path)
        assert mode(partial) == 0o600


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path, exists):
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.write_text("before")
    link.symlink_to("elsewhere/target")
    replace_file(link, b"after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["elsewhere", "link", "target"]


def test_a_loop_of_links_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=r"cannot write .*a: .*symbolic links"):
        replace_file(tmp_path / "a", b"")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_error_of_the_source_is_not_called_an_error_of_the_output(tmp_path):
    with (
        pytest.raises(FileNotFoundError) as caught,
        replacing(tmp_path / "out") as stream,
    ):
        stream.write((tmp_path / "source").read_bytes())
    assert caught.value.filename == str(tmp_path / "source")
    assert "cannot write" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_output_names_it_and_keeps_its_number(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot write .*none/out: No such file") as caught:
        replace_file(tmp_path / "none" / "out", b"")
    assert caught.value.errno == errno.ENOENT


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_output(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*out: File too large") as caught:
            replace_file(tmp_path / "out", b"content" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("problem", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_is_interrupted_leaves_the_old_file_and_nothing_else(tmp_path, problem):
    path = tmp_path / "out"
    path.write_text("before")

    def interrupted():
        with replacing(path) as stream:
            stream.write(b"half")
            raise problem

    with pytest.raises(problem):
        interrupted()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
