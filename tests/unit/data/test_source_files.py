"""Tests that sources are found in a fixed order, and that unreadable ones are named."""

import os
import pathlib

import pytest

from paceline.core.errors import DataError, UsageError
from paceline.data.source_files import find_files


def _touch(directory: pathlib.Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_directories_are_walked_in_order(tmp_path: pathlib.Path) -> None:
    _touch(tmp_path, "b.jsonl.gz", "a/z.txt", "a/B.MD", "c.idx", "c.bin", ".git/x.txt", ".y.txt")
    _touch(tmp_path, "picture.png", "out/tokenizer.json")
    found = find_files([str(tmp_path), str(tmp_path / "a" / "z.txt")], str(tmp_path / "out"))
    names = [os.path.relpath(file.name, tmp_path) for file in found.files]
    assert names == ["a/B.MD", "a/z.txt", "b.jsonl.gz", "c.idx"]
    assert [file.kind for file in found.files] == ["text", "text", "jsonl", "megatron"]
    assert [file.compression for file in found.files] == [None, None, "gzip", None]
    assert found.unknown == ((str(tmp_path / "picture.png"), 1),)


def test_a_file_that_is_named_is_read_as_text(tmp_path: pathlib.Path) -> None:
    _touch(tmp_path, "LICENSE")
    (file,) = find_files([str(tmp_path / "LICENSE")]).files
    assert file.kind == "text"
    with pytest.raises(UsageError, match="no file of a known kind"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "no such file"),
        ("s3://bucket/x", "download it"),
        ("pipe", "neither a file nor a directory"),
        ("a.parquet.gz", "decompress"),
        ("b.bin", r"name .*b\.idx"),
        ("d.idx", r"d\.bin"),
        (os.fsdecode(b"\xff.txt"), "rename it"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: pathlib.Path, name: str, message: str) -> None:
    _touch(tmp_path, "a.parquet.gz", "b.bin", "b.idx", "d.idx", os.fsdecode(b"\xff.txt"))
    os.mkfifo(tmp_path / "pipe")
    source = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UsageError, match=message):
        find_files([source])


def test_a_file_that_changes_is_named(tmp_path: pathlib.Path) -> None:
    _touch(tmp_path, "a.txt", "b.bin", "b.idx")
    text, index = find_files([str(tmp_path)]).files
    text.require_unchanged()
    index.require_unchanged()
    (tmp_path / "a.txt").write_text("longer")
    (tmp_path / "b.bin").write_text("longer")
    with pytest.raises(DataError, match=r"a\.txt changed.* 1 bytes and has 6"):
        text.require_unchanged()
    with pytest.raises(DataError, match=r"b\.idx changed"):
        index.require_unchanged()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: No such file"):
        text.require_unchanged()


def test_a_link_that_leads_out_of_a_directory_is_not_read(tmp_path: pathlib.Path) -> None:
    """A corpus from somebody else may have a link to a private file of whoever prepares it."""
    (tmp_path / "private.txt").write_text("a key")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "own.txt").write_text("text")
    (corpus / "inside.txt").symlink_to(corpus / "own.txt")
    (corpus / "outside.txt").symlink_to(tmp_path / "private.txt")
    found = find_files([str(corpus)])
    assert [pathlib.Path(file.name).name for file in found.files] == ["inside.txt", "own.txt"]
    assert found.outside == ((str(corpus / "outside.txt"), 5),)
    named = find_files([str(corpus / "outside.txt")])
    assert [pathlib.Path(file.name).name for file in named.files] == ["outside.txt"]
    (corpus / "own.txt").unlink()
    (corpus / "inside.txt").unlink()
    with pytest.raises(UsageError, match="lead out of the directory"):
        find_files([str(corpus)])
