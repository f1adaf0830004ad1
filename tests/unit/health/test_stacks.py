"""Tests of what a hanging rank writes down: the stacks of its threads and its last collective."""

import json
import pathlib
import threading
from typing import Any

import pytest
import torch

from paceline.health.hang import LastCollective, dump_stacks, last_collective

_RECORDER = "_dump_fr_trace_json"


def _entry(**changes: Any) -> dict[str, Any]:
    """Returns an entry as torch 2.13 records it."""
    return {
        "collective_seq_id": 12,
        "input_dtypes": ["Float"],
        "input_sizes": [[30, 100]],
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        **changes,
    }


def _record(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> None:
    _answer(monkeypatch, json.dumps({"entries": entries, "version": "2.10"}).encode())


def _answer(monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception) -> None:
    def dump() -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch._C._distributed_c10d, _RECORDER, dump, raising=False)


def _waits_elsewhere(has_begun: threading.Event, over: threading.Event) -> None:
    has_begun.set()
    over.wait()


def _holds_everything_up(directory: pathlib.Path, rank: int) -> pathlib.Path:
    return dump_stacks(directory, rank)


def test_the_stacks_of_all_threads_are_written(tmp_path: pathlib.Path) -> None:
    has_begun, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=_waits_elsewhere, args=(has_begun, over), daemon=True)
    thread.start()
    has_begun.wait()
    path = _holds_everything_up(tmp_path, 3)
    over.set()
    thread.join()
    assert path == tmp_path / "rank-3.txt"
    text = path.read_text()
    assert "_holds_everything_up" in text
    assert "_waits_elsewhere" in text


def test_the_directory_is_made_once_and_the_newest_stacks_count(tmp_path: pathlib.Path) -> None:
    stacks = tmp_path / "run" / "stacks"
    assert "_holds_everything_up" in _holds_everything_up(stacks, 0).read_text()
    again = dump_stacks(stacks, 0).read_text()
    assert "_holds_everything_up" not in again
    dump_stacks(stacks, 1)
    assert (stacks / "rank-0.txt").read_text() == again


def test_what_the_flight_recorder_has_is_written_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _record(monkeypatch, _entry())
    dump_stacks(tmp_path, 2)
    recorded = json.loads((tmp_path / "rank-2.flight.json").read_text())
    assert recorded == {"entries": [_entry()], "version": "2.10"}


@pytest.mark.parametrize("answer", [b"not JSON", RuntimeError("no recorder"), None])
def test_without_a_flight_recorder_there_are_only_stacks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception | None
) -> None:
    """It is no documented part of torch, so it may be missing, or answer with anything."""
    if answer is None:
        monkeypatch.delattr(torch._C._distributed_c10d, _RECORDER, raising=False)
    else:
        _answer(monkeypatch, answer)
    path = dump_stacks(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [path]
    assert last_collective() is None


def test_the_last_collective_is_the_newest_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    _record(monkeypatch, _entry(), _entry(collective_seq_id=13, profiling_name="gloo:broadcast"))
    assert last_collective() == LastCollective(number=13, text="broadcast of 3 kelements (Float)")


def test_messages_between_two_ranks_are_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have sent different numbers of them at the same point."""
    message = _entry(is_p2p=True, profiling_name="gloo:send", collective_seq_id=99)
    _record(monkeypatch, message, _entry(), message)
    assert last_collective() == LastCollective(number=12, text="all_reduce of 3 kelements (Float)")
    _record(monkeypatch, message)
    assert last_collective() is None


def test_a_collective_over_several_tensors_has_the_elements_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = _entry(input_sizes=[[2, 3], [4], []], input_dtypes=["BFloat16", "Long", "Long"])
    _record(monkeypatch, entry)
    found = last_collective()
    assert found is not None
    assert found.text == "all_reduce of 11 elements (BFloat16)"


def test_what_a_recorder_leaves_out_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier has no tensors, and other versions of torch name other fields."""
    barrier = _entry(input_sizes=[], input_dtypes=[], profiling_name="nccl:barrier")
    _record(monkeypatch, barrier)
    assert last_collective() == LastCollective(number=12, text="barrier of 0 elements (?)")
    _record(monkeypatch, _entry(profiling_name="all_reduce"))
    found = last_collective()
    assert found is not None
    assert found.text == "collective of 3 kelements (Float)"
    _record(monkeypatch, {})
    assert last_collective() == LastCollective(number=0, text="collective of 0 elements (?)")
    _record(monkeypatch)
    assert last_collective() is None
