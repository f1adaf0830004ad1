"""Tests that ranges that cover a stream yield each of its parts once, in bounded memory."""

import hypothesis
import hypothesis.strategies as st

from paceline.data.sources.text import Part, cut, first_byte, overlaps_itself


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
