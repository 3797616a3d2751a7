"""Atomic writes: whole or not at all, without temporary files left behind."""

import os
from pathlib import Path

import pytest

from zinfer.system import atomic


def test_a_write_that_fails_leaves_the_old_content_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    atomic.write(path, "old")
    with pytest.raises(TypeError), atomic.writing(path) as stream:
        stream.writelines([b"ne", "w"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    atomic.write(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic.write(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        atomic.write(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


def test_a_written_file_keeps_its_permissions_and_a_link_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    atomic.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    for name in ("long" * 63, "é" * 127):
        atomic.write(tmp_path / name, "x")
        assert (tmp_path / name).read_text() == "x"
