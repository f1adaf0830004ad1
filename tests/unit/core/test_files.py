import os
import pathlib

import pytest

from paceline.core.files import UNFINISHED, atomic_file, create_atomically


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        _write_half(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _write_half(path: pathlib.Path) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        (_unfinished,) = path.parent.glob(f"{UNFINISHED}*")
        raise KeyboardInterrupt


def test_an_existing_file_is_not_created_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    assert create_atomically(path, b"one")
    assert not create_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path: pathlib.Path) -> None:
    previous = os.umask(0o077)
    try:
        with atomic_file(tmp_path / "private") as file:
            file.write(b"secret")
        create_atomically(tmp_path / "created", b"secret")
    finally:
        os.umask(previous)
    for name in ("private", "created"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
