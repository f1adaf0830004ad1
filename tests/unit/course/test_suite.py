"""Tests of the suite: it runs missing cases, records failures, and runs nothing twice."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from paceline.course import suite as suite_module
from paceline.course.suite import Suite, SuiteCase
from paceline.records import RecordStore, capture_environment
from tests.unit.record_factory import step_record

# Stands in for paceline: writes a record, or behaves as its model's name says.
PROGRAM = """
import os, sys, time
import msgspec
from paceline.records import RecordStore, capture_environment
from tests.unit.record_factory import step_record
model, store = sys.argv[1], RecordStore(sys.argv[2])
print("looking at", model, flush=True)
if model == "broken":
    print("paceline: error: the network is down", file=sys.stderr)
    sys.exit(3)
if model == "crashed":
    os.kill(os.getpid(), 9)
if model == "hanging":
    print(os.getpid(), file=open(sys.argv[2] + ".pid", "w"), flush=True)
    time.sleep(60)
if model == "partial":
    store.append(step_record(model=model))
    sys.exit(2)
if model == "some":
    store.append(step_record(model=model))
    store.append(msgspec.structs.replace(
        step_record(model=model, outcome="skipped", context=9), environment=capture_environment()))
    sys.exit(0)
if model == "large":
    store.append(msgspec.structs.replace(
        step_record(model=model, outcome="skipped"), environment=capture_environment()))
    sys.exit(0)
if model == "ranked":
    print("host 0 rank 1 | paceline: error: no room", file=sys.stderr)
    print("paceline lab: host 0 rank 1 failed", file=sys.stderr)
    sys.exit(1)
if model == "unlucky":
    store.append(step_record(model=model, outcome="failed"))
    sys.exit(1)
if model != "silent":
    store.append(step_record(model=model))
"""
ROOT = pathlib.Path(__file__).parents[3]


def case(model: str, seconds: float = 1.0, **options: object) -> SuiteCase:
    return SuiteCase(
        name=model,
        deliverables=("benchmarking_script",),
        verb="bench step",
        kind="step",
        fields={"model": model, "warmup": 5},
        seconds=seconds,
        **options,  # type: ignore[arg-type]
    )


class FakeCommands(Suite):
    """A suite whose commands run `PROGRAM`, which takes no time."""

    def _command_line(self, case: SuiteCase, directory: pathlib.Path) -> list[str]:
        store = self.store.path if case.records_in == "store" else directory / "records.jsonl"
        return [sys.executable, "-c", PROGRAM, case.name, str(store)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))


def make(tmp_path: pathlib.Path, *cases: SuiteCase) -> FakeCommands:
    return FakeCommands(
        cases=cases, store=RecordStore(tmp_path / "store.jsonl"), workspace=tmp_path / "work"
    )


def attempts(suite: Suite) -> dict[object, tuple[str, str | None]]:
    return {
        record.case["name"]: (record.outcome, record.reason)
        for record in suite.store.read()
        if record.kind == "attempt"
    }


def test_a_failing_case_is_an_entry_and_not_the_end(tmp_path: pathlib.Path) -> None:
    names = ("first", "broken", "ranked", "crashed", "unlucky", "silent", "last")
    suite = make(tmp_path, *(case(name) for name in names))
    said: list[str] = []
    assert suite.run(said.append) == 5
    assert attempts(suite) == {
        "first": ("ok", None),
        "broken": ("failed", "exit code 3: the network is down"),
        "ranked": ("failed", "exit code 1: no room"),
        "crashed": ("failed", "exit code 137: looking at crashed"),
        "unlucky": ("failed", "a reason"),
        "silent": ("failed", "it wrote none of its records"),
        "last": ("ok", None),
    }
    assert said[0].startswith("[1/7, about 7 s left] paceline bench step --model first --warmup 5")
    assert any("failed: exit code 3: the network is down" in line for line in said)
    assert "looking at first" in (tmp_path / "work" / "first" / "log.txt").read_text()


def test_what_is_there_is_not_run_again_and_what_failed_is(tmp_path: pathlib.Path) -> None:
    suite = make(tmp_path, case("first"), case("broken"), case("second"))
    suite.store.append(step_record(model="first"))
    suite.store.append(step_record(model="second", warmup=1))
    assert [each.name for each in suite.missing()] == ["broken", "second"]
    said: list[str] = []
    assert suite.run(said.append) == 1
    assert said[0] == f"1 of 3 cases are already in {suite.store.path}"
    assert [each.name for each in suite.missing()] == ["broken"]


def test_too_little_memory_is_an_answer_on_the_same_machine(tmp_path: pathlib.Path) -> None:
    suite = make(tmp_path, case("first"))
    record = step_record(model="first", outcome="skipped")
    here = capture_environment()
    smaller = msgspec.structs.replace(here, memory_bytes=2**30)
    suite.store.append(msgspec.structs.replace(record, environment=smaller))
    assert suite.missing()
    suite.store.append(msgspec.structs.replace(record, environment=here))
    assert not suite.missing()


def test_an_attempt_says_what_was_too_large(tmp_path: pathlib.Path) -> None:
    suite = make(tmp_path, case("large"))
    assert suite.run(lambda _text: None) == 1
    assert attempts(suite)["large"] == ("skipped", "a reason")
    assert not suite.missing()


def test_what_was_too_large_among_others_is_part_of_the_answer(tmp_path: pathlib.Path) -> None:
    suite = make(tmp_path, case("some"))
    assert suite.run(lambda _text: None) == 0
    assert attempts(suite)["some"] == ("ok", None)


def test_an_old_failure_is_not_todays_reason(tmp_path: pathlib.Path) -> None:
    suite = make(tmp_path, case("silent"))
    suite.store.append(step_record(model="silent", outcome="failed"))
    suite.run(lambda _text: None)
    assert attempts(suite)["silent"] == ("failed", "it wrote none of its records")


def test_a_hanging_case_is_stopped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_module, "_SHORTEST_LIMIT_S", 1.0)
    monkeypatch.setattr(suite_module, "_SLOWEST", 1.0)
    suite = make(tmp_path, case("hanging"))
    assert suite.run(lambda _text: None) == 1
    assert attempts(suite)["hanging"] == ("timeout", "timed out after 1 s")


@pytest.mark.parametrize("records_in", ["store", "directory"])
def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: pathlib.Path, records_in: str
) -> None:
    partial = case("partial", records_in=records_in)
    partial = dataclasses.replace(partial, fields={"model": ("partial", "other")})
    suite = make(tmp_path, partial)
    said: list[str] = []
    assert suite.run(said.append) == 0
    reason = "exit code 2: looking at partial (partial results kept)"
    assert attempts(suite)["partial"] == ("failed", reason)
    assert said[-1].startswith(f"  incomplete: {reason}")
    assert suite.missing() == [partial]


def test_a_slow_machine_has_longer_limits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {}

    def remember(case: SuiteCase, pace: float) -> float:
        limits[case.name] = limit_s(case, pace)
        return 60.0

    limit_s = suite_module._limit_s
    monkeypatch.setattr(suite_module, "_limit_s", remember)
    monkeypatch.setattr(suite_module, "_SHORTEST_LIMIT_S", 5.0)
    make(tmp_path, case("first", seconds=0.001), case("broken", seconds=2.0), case("last")).run(
        lambda _text: None
    )
    assert limits["first"] == 5.0
    assert limits["broken"] > 100 * 12.0
    assert limits["last"] > 6.0


def test_records_of_a_directory_are_collected(tmp_path: pathlib.Path) -> None:
    suite = make(tmp_path, case("first", records_in="directory"))
    assert suite.run(lambda _text: None) == 0
    assert [record.kind for record in suite.store.read()] == ["step", "attempt"]


def _is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_goes_on_where_it_was_killed(tmp_path: pathlib.Path, how: signal.Signals) -> None:
    code = (
        "import pathlib, sys\n"
        "from tests.unit.course.test_suite import case, make\n"
        "names = ('first', 'hanging', 'last')\n"
        "make(pathlib.Path(sys.argv[1]), *map(case, names)).run(print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    pid_file = tmp_path / "store.jsonl.pid"
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(how)
    process.wait(30)
    hanging = int(pid_file.read_text())
    while _is_running(hanging):
        assert time.monotonic() < deadline
        time.sleep(0.02)

    suite = make(tmp_path, case("first"), case("last"))
    assert [each.name for each in suite.missing()] == ["last"]
    assert suite.run(lambda _text: None) == 0
    models = [record.case.get("model") for record in suite.store.read() if record.kind == "step"]
    assert models == ["first", "last"]
