"""Tests of reading traces: complete, truncated, damaged and hostile."""

import gzip
import json
import pathlib
import random
import time

import pytest

from paceline.traces.analysis import analyse_trace
from paceline.traces.reader import MAX_EVENT_BYTES, AnyEvent, Event, TraceError, TraceReader
from tests.unit.traces.trace_files import Span, rank_name, write_trace

_SPANS = [
    Span("user_annotation", "paceline::step", 0, 1000),
    Span("cpu_op", 'a name with }, { and "quotes" \\ in it', 10, 5),
    Span("cpu_op", "aten::mm", 20.125, 300, input_dims=((4, 8), (8, 2))),
    Span("user_annotation", "gloo:all_reduce", 100, 500, thread=2),
    Span("cpu_op", "été 漢字", 700, 1),
]


def _names(path: pathlib.Path) -> list[str]:
    return [event.name for events in TraceReader(path, Event) for event in events]


def test_all_events_are_read(tmp_path: pathlib.Path) -> None:
    path = write_trace(tmp_path / "trace.json", _SPANS)
    assert _names(path) == [span.name for span in _SPANS]
    reader = TraceReader(path, AnyEvent)
    assert [event for events in reader for event in events] == [
        json.loads(json.dumps(span.as_event())) for span in _SPANS
    ]
    assert not reader.is_truncated


def test_a_list_alone_and_a_compressed_file_are_traces_too(tmp_path: pathlib.Path) -> None:
    events = json.dumps([span.as_event() for span in _SPANS])
    plain, compressed = tmp_path / "list.json", tmp_path / "trace.json.gz"
    plain.write_text(" \n" + events)
    compressed.write_bytes(gzip.compress(events.encode()))
    assert _names(plain) == _names(compressed) == [span.name for span in _SPANS]


def test_pieces_may_be_cut_anywhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "trace.json", _SPANS * 3)
    for size in (1, 2, 7, 64, 333):
        monkeypatch.setattr("paceline.traces.reader._PIECE_BYTES", size)
        assert _names(path) == [span.name for span in _SPANS * 3]


def test_a_file_that_was_cut_off_gives_the_events_before(tmp_path: pathlib.Path) -> None:
    whole = write_trace(tmp_path / "trace.json", _SPANS).read_bytes()
    list_end = whole.rindex(b"]")
    path = tmp_path / "cut.json"
    for length in range(whole.index(b'"traceEvents"') + 20, list_end, 13):
        path.write_bytes(whole[:length])
        reader = TraceReader(path, Event)
        names = [event.name for events in reader for event in events]
        assert reader.is_truncated
        assert names == [span.name for span in _SPANS][: len(names)]
    assert len(names) >= len(_SPANS) - 1


def test_an_event_may_be_cut_off_at_any_byte(tmp_path: pathlib.Path) -> None:
    event = (
        r'{"name": "a\\\"\ud83d\ude00 \u00e9", "args": [-1.5e-07, true, null, {}] , "漢": 1E+5 }'
    )
    path = tmp_path / "cut.json"
    whole = b'[{"name": "first"}, ' + event.encode()
    for length in range(len(whole) - len(event.encode()), len(whole)):
        path.write_bytes(whole[:length])
        reader = TraceReader(path, AnyEvent)
        assert [event["name"] for events in reader for event in events] == ["first"]
        assert reader.is_truncated
    # An error before the cut is damage, regardless of what is missing after it.
    path.write_bytes(whole[:-1].replace(b"true", b"tr e"))
    with pytest.raises(TraceError, match=f"byte {whole.index(b'true')}: "):
        list(TraceReader(path, AnyEvent))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no list of traceEvents"),
        (b"{}", "no list of traceEvents"),
        (b"\x7fELF", "no list of traceEvents"),
        (b'{"traceEvents": [{"name": 3}]}', "byte 17: not an event: Expected `str`"),
        (b'{"traceEvents": [{"name": "a" "b"}]}', "byte 30: "),
        (b'{"traceEvents": [{"name": "a"}, 7]}', "byte 32: an event is expected"),
        (b'{"traceEvents": [{"name": "\xff"}]}', "byte 17: not an event: 'utf-8'"),
        (b'{"traceEvents": [{"x": ' + b"[" * 200_000, "byte 17: .* nested too deeply"),
        (b'{"traceEvents": [{"pid": ' + b"9" * 5000 + b"}]}", "byte 17: .*out of range"),
        (b'{"traceEvents": [{"ts": 1e999}]}', "byte 17: .*out of range"),
        (
            b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"n","ts":1e300}]}',
            "which is impossible",
        ),
        (
            b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"n","dur":-1}]}',
            "which is impossible",
        ),
        (b'{"traceEvents": [{"name": "' + b"a" * (MAX_EVENT_BYTES + 2**21), "byte 17: an event of"),
        (b"\x1f\x8b not compressed", "not a gzip file|Unknown compression|Error"),
    ],
)
def test_what_is_no_trace_is_an_error_with_the_place(
    tmp_path: pathlib.Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(TraceError, match=problem) as caught:
        analyse_trace(path)
    assert str(path) in str(caught.value)
    assert time.monotonic() - began < 20


def test_a_missing_file_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        analyse_trace(tmp_path / "missing.json")


@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(tmp_path: pathlib.Path, number: int) -> None:
    whole = write_trace(tmp_path / "trace.json", _SPANS, rank_name(0, 3)).read_bytes()
    random_numbers = random.Random(0)
    path = tmp_path / "damaged.json"
    outcomes = {"read": 0, "refused": 0}
    slowest = 0.0
    for _ in range(number):
        path.write_bytes(_damaged(whole, random_numbers))
        began = time.monotonic()
        try:
            analyse_trace(path)
            outcomes["read"] += 1
        except TraceError as error:
            outcomes[
                "refused" if str(path) in str(error) else "refused without the file's name"
            ] += 1
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 20
    assert min(outcomes.values()) > number // 100


_PIECES = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\",
    b"\x00",
    b"\xff",
    b"1e999",
    b"-",
    b"NaN",
)


def _damaged(whole: bytes, numbers: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(numbers.randint(1, 4)):
        place = numbers.randrange(len(data))
        match numbers.randrange(5):
            case 0:
                data[place] = numbers.randrange(256)
            case 1:
                data[place:place] = numbers.choice(_PIECES) * numbers.choice((1, 1, 50))
            case 2:
                del data[place : place + numbers.randint(1, 40)]
            case 3:
                del data[place:]
            case _:
                data[place:place] = str(numbers.getrandbits(numbers.choice((8, 64, 400)))).encode()
        if not data:
            break
    return bytes(data)
