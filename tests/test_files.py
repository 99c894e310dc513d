from __future__ import annotations

import errno
import os
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


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        files.write_atomic(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"


@pytest.mark.parametrize("folder", ["/", ".", "sub"])
def test_a_folder_is_not_written_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        files.write_atomic(folder, "text")
    assert error.value.filename == folder
    assert list(tmp_path.iterdir()) == [tmp_path / "sub"]


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


def test_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, files.atomic_open(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a")


def test_file_and_link_in_place_of_a_folder_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("kept")
    for name in ("file", "link"):
        with files.staging_folder(tmp_path / name) as staging:
            (staging / "new").touch()
        assert (tmp_path / name / "new").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kept", "link"]
    assert not any((tmp_path / "kept").iterdir())
