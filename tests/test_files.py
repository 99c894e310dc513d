from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow import files


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "file"
    files.write_atomic(path, "old")
    with pytest.raises(RuntimeError), files.atomic_open(path) as file:  # noqa: PT012
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_staging_folder_replaces_the_final_folder_as_a_whole(tmp_path: Path) -> None:
    final = tmp_path / "new" / "folder"
    for text in ("first", "second"):
        with files.staging_folder(final) as staging:
            (staging / "sub").mkdir()
            (staging / "sub" / "file").write_text(text)
            assert not final.exists() or (final / "sub" / "file").read_text() == "first"
        assert (final / "sub" / "file").read_text() == text
        assert list(final.parent.iterdir()) == [final]


def test_failed_staging_folder_keeps_the_old_folder(tmp_path: Path) -> None:
    final = tmp_path / "folder"
    final.mkdir()
    (final / "file").write_text("old")
    files.staging_path(final).mkdir()  # left by a killed process
    (files.staging_path(final) / "stale").touch()
    with pytest.raises(RuntimeError), files.staging_folder(final) as staging:  # noqa: PT012
        assert not list(staging.iterdir())
        raise RuntimeError
    assert (final / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [final]


def test_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises_code("folder-not-writable"):
        files.make_folder(tmp_path / "file" / "folder")


def _hold(folder: Path, held: object, release: object) -> None:
    with files.lock_folder(folder):
        held.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


def test_lock_folder_excludes_another_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "folder", held, release))
    process.start()
    try:
        assert held.wait(30)
        with raises_code("folder-locked"), files.lock_folder(tmp_path / "folder"):
            pass
        waited = threading.Event()

        def on_wait() -> None:
            waited.set()
            release.set()

        with files.lock_folder(tmp_path / "folder", on_wait=on_wait):
            assert waited.is_set()
    finally:
        release.set()
        process.join()
    with files.lock_folder(tmp_path / "folder"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def fail(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    for on_wait in (None, pytest.fail):
        with files.lock_folder(tmp_path, on_wait=on_wait):
            pass
    assert capsys.readouterr().err.count("has no locks") == 1


def test_write_to_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    """A real limit of the file size, in a process of its own."""
    resource = pytest.importorskip("resource")
    files.write_atomic(tmp_path / "file", "old")
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # Python ignores SIGXFSZ
        try:
            files.write_atomic(tmp_path / "file", "new" * 1000)
        except OSError as error:
            os._exit(10 + files.is_disk_full(error))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
