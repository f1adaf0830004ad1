"""Tests that every kind of file gives the same documents once, and that dropped ones are named."""

import contextlib
import gzip
import json
import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from paceline.core.errors import DataError, PacelineError, UsageError
from paceline.core.units import MIB
from paceline.data import source_files
from paceline.data.documents import (
    Document,
    Found,
    LeftOut,
    Part,
    ReadOptions,
    SourceSpan,
    cut,
    first_byte,
    overlaps_itself,
    read_span,
    row_group_bytes,
)
from paceline.data.source_files import find_files
from tests.hostile_files import peak_bytes
from tests.unit.data.corpus import make_documents, write_jsonl


def _chunks(content: bytes, size: int, start: int) -> list[bytes]:
    return [content[i : i + size] for i in range(start, len(content), size)]


def _cut(content: bytes, separator: bytes, start: int, end: int | None, size: int) -> list[Part]:
    chunks = _chunks(content, size, first_byte(start, separator))
    return list(cut(chunks, separator, start=start, end=end, most_bytes=10))


@hypothesis.given(
    content=st.lists(st.sampled_from([b"a", b"b", b"<>", b"<", b">", b"\n"])).map(b"".join),
    separator=st.sampled_from([b"<>", b"\n", b"ab>"]),
    size=st.integers(1, 7),
    range_bytes=st.integers(1, 9),
)
def test_every_part_is_in_exactly_one_range(
    content: bytes, separator: bytes, size: int, range_bytes: int
) -> None:
    assert not overlaps_itself(separator)
    found = [
        part
        for start in range(0, len(content), range_bytes)
        for part in _cut(content, separator, start, min(start + range_bytes, len(content)), size)
    ]
    place = 0
    expected = []
    for text in content.split(separator):
        expected.append((place, text if len(text) <= 10 else None, len(text)))
        place += len(text) + len(separator)
    # The empty part after a final separator starts at the end of the file, in no range.
    expected = [each for each in expected if each[0] < len(content)]
    assert [part[:3] for part in found] == expected


@hypothesis.given(
    content=st.lists(st.sampled_from([b"a", b"aa", b"b", b"\n"])).map(b"".join),
    separator=st.sampled_from([b"aa", b"\n\n", b"aba", b""]),
    size=st.integers(1, 7),
)
def test_a_whole_stream_is_cut_as_bytes_are_split(
    content: bytes, separator: bytes, size: int
) -> None:
    expected = content.split(separator) if separator else [content]
    parts = _cut(content, separator, 0, None, size)
    assert [part.num_bytes for part in parts] == [len(text) for text in expected]
    assert [part.content for part in parts] == [
        text if len(text) <= 10 else None for text in expected
    ]
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_separators_that_overlap_themselves_are_known() -> None:
    assert overlaps_itself(b"\n\n")
    assert overlaps_itself(b"aba")
    assert not overlaps_itself(b"<|endoftext|>")


def test_a_range_within_a_long_part_stops_at_its_end() -> None:
    read = []

    def chunks() -> "list[bytes]":
        for number in range(1000):
            read.append(number)
            yield b"x" * 10

    assert list(cut(chunks(), b"\n", start=5, end=50, most_bytes=10)) == []
    assert len(read) < 10


DOCUMENTS = make_documents(30)
SEPARATOR = b"<|endoftext|>"


def _read(path: pathlib.Path, separator: bytes = SEPARATOR, most_bytes: int = 2000) -> list[Found]:
    (file,) = find_files([str(path)]).files
    options = ReadOptions(separator=separator, field="text", max_document_bytes=most_bytes)
    end = len(row_group_bytes(file, "text")) if file.kind == "parquet" else None
    return list(read_span(SourceSpan(file=file, start=0, end=end, num_bytes=0), options))


def _texts(found: list[Found]) -> list[str]:
    return [each.text for each in found if isinstance(each, Document)]


def _left_out(found: list[Found]) -> dict[str, list[int]]:
    reasons: dict[str, list[int]] = {}
    for each in found:
        if isinstance(each, LeftOut):
            reasons.setdefault(each.reason, []).append(each.location)
    return reasons


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.ndjson.zst", "a.txt", "a.md.gz", "a.txt.zst", "a.parquet"]
)
def test_every_kind_gives_the_same_documents(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / name
    lines = write_jsonl(tmp_path / "plain.jsonl", DOCUMENTS).read_bytes()
    content = lines if "json" in name else SEPARATOR.join(each.encode() for each in DOCUMENTS)
    if name.endswith(".parquet"):
        table = pyarrow.table({"id": list(range(30)), "text": DOCUMENTS})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif name.endswith(".gz"):
        # Several members, as parallel compressors write them.
        path.write_bytes(gzip.compress(content[:1000]) + gzip.compress(content[1000:]))
    elif name.endswith(".zst"):
        frame = zstandard.ZstdCompressor().compress
        path.write_bytes(frame(content[:1000]) + frame(content[1000:]))
    else:
        path.write_bytes(content)
    found = _read(path)
    assert _texts(found) == DOCUMENTS
    assert not _left_out(found)


def test_lines_that_are_no_documents_are_left_out_by_reason(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "after a byte order mark"}',
        b'{"text": "bad \xff byte"}',
        b'{"text": 3}',
        b'{"other": "x"}',
        b"[1, 2]",
        b"{torn",
        b"",
        b'{"text": " \\n"}',
        b'{"text": "lone \\ud800 surrogate"}',
        b'{"text": "' + b"x" * 3000 + b'"}',
        b'{"nested": ' + b"[" * 1900,
        b'{"text": "NUL \\u0000 stays"}\r',
    ]
    path.write_bytes(b"\n".join(lines))
    found = _read(path)
    assert _texts(found) == ["after a byte order mark", "NUL \x00 stays"]
    places = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    reasons = _left_out(found)
    assert reasons["invalid UTF-8"] == [places[1]]
    assert reasons["no text in field 'text'"] == places[2:5]
    assert reasons["empty"] == [places[7]]
    assert reasons["too long"] == [places[9]]
    assert sorted(reasons["invalid JSON"]) == [places[5], places[8], places[10]]


def test_parts_of_text_that_are_no_documents_are_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(SEPARATOR.join([b"one\x00", b"\xff", b" \n", b"x" * 3000, b"two", b"\n"]))
    found = _read(path)
    assert _texts(found) == ["one\x00", "two"]
    assert set(_left_out(found)) == {"invalid UTF-8", "empty", "too long"}
    path.write_bytes(b"")
    assert _left_out(_read(path)) == {"empty": [0]}


def test_parquet_rows_that_are_no_documents_are_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.parquet"
    rows = pyarrow.array([b"one", None, b"\xff", b"", b"x" * 3000], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path)
    found = _read(path)
    assert _texts(found) == ["one"]
    assert _left_out(found) == {
        "no text in field 'text'": [1],
        "invalid UTF-8": [2],
        "empty": [3],
        "too long": [4],
    }


def test_any_damaged_byte_of_parquet_is_an_error_or_documents(tmp_path: pathlib.Path) -> None:
    """Of some damage, pyarrow ends the process or takes gigabytes, unless it is asked in order."""
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["one", "two", None, "one", "three"]})
    pyarrow.parquet.write_table(table, path, row_group_size=4)
    content = path.read_bytes()
    before = peak_bytes()
    for position in range(len(content)):
        for flipped in (0x40, 0xFF):
            damaged = bytearray(content)
            damaged[position] ^= flipped
            path.write_bytes(damaged)
            with contextlib.suppress(PacelineError):
                _read(path)
    assert peak_bytes() < before + 500 * MIB


def test_columns_that_hold_no_text_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), path)
    with pytest.raises(UsageError, match=r"a\.parquet: no column 'text'; it has content"):
        _read(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), path)
    with pytest.raises(UsageError, match=r"contains int64"):
        _read(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("defect", ["truncated", "damaged"])
def test_truncated_and_damaged_files_are_named(
    tmp_path: pathlib.Path, name: str, defect: str
) -> None:
    path = tmp_path / name
    content = b"".join(
        json.dumps({"text": os.urandom(99).hex()}).encode() + b"\n" for _ in "ab" * 99
    )
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(content))
    elif name.endswith("zst"):
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": content.decode().split()}), path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(each ^ 255 for each in whole[middle:])
    path.write_bytes(whole[:middle] if defect == "truncated" else flipped)
    with pytest.raises(DataError, match=rf"{name}: .*{defect}"):
        _read(path, most_bytes=10**6)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_bombs_are_refused(
    tmp_path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "HARMLESS_BYTES", 2**22)
    path = tmp_path / name
    zeros = bytes(2**23)
    packed = gzip.compress(zeros) if name.endswith("gz") else zstandard.compress(zeros)
    path.write_bytes(packed)
    with pytest.raises(DataError, match=rf"{name}: .* over 200 times"):
        _read(path)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.txt.zst", "zstandard", "zstd"), ("a.parquet", "pyarrow", "parquet")],
)
def test_a_missing_package_names_its_extra(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt.zst").write_bytes(b"")
    (file,) = find_files([str(tmp_path / name)]).files
    monkeypatch.setitem(__import__("sys").modules, package, None)
    options = ReadOptions(separator=SEPARATOR, field="text", max_document_bytes=9)
    with pytest.raises(UsageError, match=rf"paceline\[{extra}\]"):
        list(read_span(SourceSpan(file=file, start=0, end=1, num_bytes=0), options))


@pytest.mark.parametrize("has_dictionary", [True, False])
def test_a_small_parquet_file_cannot_fill_memory(
    tmp_path: pathlib.Path, has_dictionary: bool
) -> None:
    """One text of a page is the value of 4,096 rows."""
    path = tmp_path / "bomb.parquet"
    text = "a" * 2**20
    if has_dictionary:
        rows = pyarrow.array([0] * 4096, pyarrow.int32())
        texts = pyarrow.DictionaryArray.from_arrays(rows, pyarrow.array([text]))
        options = {"use_dictionary": True, "store_schema": False}
    else:
        texts = pyarrow.array([text] * 512)
        options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    assert path.stat().st_size < 1e5
    program = """
import resource, sys
from paceline.data.documents import ReadOptions, SourceSpan, read_span
from paceline.data.source_files import find_files
[file] = find_files([sys.argv[1]]).files
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in read_span(
        SourceSpan(file=file, start=0, end=1, num_bytes=1),
        ReadOptions(separator=b"", field="text", max_document_bytes=2**24),
    ):
        pass
except Exception as error:
    print(type(error).__name__, error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, "GiB")
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    error, used = result.stdout.splitlines()
    assert error.startswith("DataError ")
    assert "that expand to more than" in error
    assert float(used.removesuffix(" GiB")) < 0.8, result.stdout
