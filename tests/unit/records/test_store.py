import contextlib
import fcntl
import json
import multiprocessing
import pathlib
import random
import resource
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import RecordError
from paceline.records import Metric, Record, RecordStore, capture_environment, latest_per_case
from paceline.records.kinds import LINK_RATE, MEASURED_LINK_RATE, MEASURED_SITE_RATE, SITE_RATE
from paceline.records.store import case_key, decode_record

PLACE = {"device": "cpu", "hardware": "test", "threads": 1}


def make_record(value: float = 1.0, **case: Any) -> Record:
    return Record(
        kind="environment",
        case={**PLACE, **case},
        environment=capture_environment(),
        metrics={"all_reduce_time_s": Metric.from_samples([value])},
        outcome="ok",
    )


def test_records_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    store = RecordStore(tmp_path / "new" / "records.jsonl")
    records = [make_record(float(index)) for index in range(3)]
    for record in records:
        store.append(record)
    assert list(store.read()) == records


def test_a_missing_store_says_what_makes_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RecordError, match=r"nothing\.jsonl.*No such file.*paceline bench"):
        list(RecordStore(tmp_path / "nothing.jsonl").read())


def _append_many(path: str, writer: int, count: int) -> None:
    store = RecordStore(path)
    for index in range(count):
        # Lines longer than a pipe buffer or a page are the likeliest to be torn.
        store.append(
            make_record(float(index), backend=f"{writer}:" + "x" * random.randint(0, 9000))
        )


def test_several_writers_and_a_reader_do_not_disturb_each_other(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_append_many, args=(str(path), writer, 40)) for writer in range(4)
    ]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        if path.exists():
            list(RecordStore(path).read())
    for process in writers:
        process.join()
        assert process.exitcode == 0
    by_writer: dict[str, list[float]] = {}
    for record in RecordStore(path).read():
        writer = str(record.case["backend"]).partition(":")[0]
        by_writer.setdefault(writer, []).append(record.metrics["all_reduce_time_s"].value)
    assert len(by_writer) == 4
    assert all(values == [float(index) for index in range(40)] for values in by_writer.values())


def test_a_writer_waits_until_nobody_else_holds_the_file(tmp_path: pathlib.Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    store.append(make_record())
    before = store.path.read_bytes()
    writer = threading.Thread(target=store.append, args=(make_record(2.0),))
    with store.path.open("rb") as reader:
        # A shared lock, which also detects a writer that takes only a shared lock.
        fcntl.flock(reader, fcntl.LOCK_SH)
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert store.path.read_bytes() == before
    writer.join()
    assert len(list(store.read())) == 2


def _append_beyond_the_size_limit(path: str) -> None:
    size = pathlib.Path(path).stat().st_size
    # The kernel then writes part of the line and rejects the rest, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
    with pytest.raises(RecordError, match=r"records\.jsonl: cannot append.*too large.*--store"):
        RecordStore(path).append(make_record())


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: pathlib.Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    store.append(make_record())
    before = store.path.read_bytes()
    writer = multiprocessing.get_context("fork").Process(
        target=_append_beyond_the_size_limit, args=(str(store.path),)
    )
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert store.path.read_bytes() == before


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_always_full(tmp_path: pathlib.Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RecordError, match=r"cannot append a record"):
        RecordStore(tmp_path / "full").append(make_record())


def test_a_path_that_cannot_be_made_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot append a record: (Not a directory|File exists)"):
        RecordStore(tmp_path / "file" / "records.jsonl").append(make_record())


def test_a_torn_line_is_named_and_swallows_nothing(tmp_path: pathlib.Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    store.append(make_record())
    torn = msgspec.json.encode(make_record())[:100]
    with store.path.open("ab") as file:
        file.write(torn)
    store.append(make_record(2.0))
    with pytest.raises(RecordError, match=r"records\.jsonl:2: not a valid record.*truncated"):
        list(store.read())
    lines = store.path.read_bytes().splitlines()
    assert decode_record(lines[2]).metrics["all_reduce_time_s"].value == 2.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.update(extra=1), "extra"),
        (lambda raw: raw["case"].update(devise="cpu"), r"case\.devise"),
        (lambda raw: raw["case"].pop("threads"), r"case\.threads: missing"),
        (lambda raw: raw["environment"].update(host="x"), r"host.*environment"),
        (lambda raw: raw["metrics"]["all_reduce_time_s"].update(median=1), "median.*metrics"),
        (lambda raw: raw["metrics"]["all_reduce_time_s"].update(value="1"), r"metrics.*value"),
        (lambda raw: raw.update(kind="step2"), "kind: unknown record kind 'step2'"),
        (lambda raw: raw.update(outcome="fine"), "outcome"),
        (lambda raw: raw.update(outcome="failed"), "reason"),
        (lambda raw: raw.update(reason="none"), "reason"),
        (lambda raw: raw.update(schema=2), "schema"),
        (lambda raw: raw.pop("environment"), "environment"),
    ],
)
def test_every_defect_names_file_line_and_field(
    tmp_path: pathlib.Path, change: Any, complaint: str
) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    store.append(make_record())
    raw = json.loads(store.path.read_text())
    change(raw)
    with store.path.open("a") as file:
        file.write(json.dumps(raw) + "\n")
    with pytest.raises(RecordError, match=rf"records\.jsonl:2: .*{complaint}"):
        list(store.read())


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_damaged_bytes_never_escape_as_another_error(data: st.DataObject) -> None:
    line = bytearray(msgspec.json.encode(make_record()))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(line) - 1))
        line[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RecordError):
        decode_record(bytes(line[: data.draw(st.integers(0, len(line)))]))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RecordError):
        decode_record(b'{"case":' + b"[" * 100_000)


def test_the_newest_record_of_a_case_counts() -> None:
    first, second, other = make_record(1.0), make_record(2.0), make_record(3.0, world_size=2)
    assert latest_per_case([first, other, second]) == [second, other]


@pytest.mark.parametrize(
    ("nominal", "measured"), [(LINK_RATE, MEASURED_LINK_RATE), (SITE_RATE, MEASURED_SITE_RATE)]
)
def test_a_link_that_is_measured_again_is_the_same_link(nominal: str, measured: str) -> None:
    """Its measured rate differs on every run; its nominal rate does not."""
    first, again = (make_record(1.0, **{measured: rate}) for rate in (0.99e9, 1.01e9))
    assert latest_per_case([first, again]) == [again]
    assert case_key(first) == case_key(again)
    faster = make_record(1.0, **{nominal: 2e9, measured: 0.99e9})
    assert latest_per_case([first, faster]) == [first, faster]
