"""The battery: what is missing is run, failures are entries, and nothing is run twice."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from paceline.records import RecordStore, capture_environment
from paceline.workflows import suite as battery_module
from paceline.workflows.cases import BatteryCase, Expected
from paceline.workflows.suite import Battery
from tests.unit.reports.factory import step_record

# Stands in for paceline: leaves a record, or does what its model's name says.
PROGRAM = """
import os, sys, time
import msgspec
from paceline.records import RecordStore, capture_environment
from tests.unit.reports.factory import step_record
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


def case(model: str, **options: object) -> BatteryCase:
    return BatteryCase(
        name=model,
        deliverables=("benchmarking_script",),
        arguments=("bench", "step", "--model", model),
        expected=(Expected(kind="step", fields={"model": model, "warmup": 5}),),
        seconds=1.0,
        **options,  # type: ignore[arg-type]
    )


class StandIn(Battery):
    """A battery whose commands take no time."""

    def _command_line(self, case: BatteryCase, directory: pathlib.Path) -> list[str]:
        store = self.store.path if case.records_in == "store" else directory / "records.jsonl"
        return [sys.executable, "-c", PROGRAM, case.name, str(store)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))


def make(tmp_path: pathlib.Path, *cases: BatteryCase) -> StandIn:
    return StandIn(
        cases=cases, store=RecordStore(tmp_path / "store.jsonl"), workspace=tmp_path / "work"
    )


def attempts(battery: Battery) -> dict[object, tuple[str, str | None]]:
    return {
        record.case["name"]: (record.outcome, record.reason)
        for record in battery.store.read()
        if record.kind == "attempt"
    }


def test_a_failing_case_is_an_entry_and_not_the_end(tmp_path: pathlib.Path) -> None:
    names = ("first", "broken", "ranked", "crashed", "unlucky", "silent", "last")
    battery = make(tmp_path, *(case(name) for name in names))
    said: list[str] = []
    assert battery.run(said.append) == 5
    assert attempts(battery) == {
        "first": ("ok", None),
        "broken": ("failed", "exit code 3: the network is down"),
        "ranked": ("failed", "exit code 1: no room"),
        "crashed": ("failed", "exit code 137: looking at crashed"),
        "unlucky": ("failed", "a reason"),
        "silent": ("failed", "it left none of its records"),
        "last": ("ok", None),
    }
    assert said[0].startswith("[1/7, about 7 s left] paceline bench step --model first")
    assert any("no answer: exit code 3: the network is down" in line for line in said)
    assert "looking at first" in (tmp_path / "work" / "first" / "log.txt").read_text()


def test_what_is_there_is_not_run_again_and_what_failed_is(tmp_path: pathlib.Path) -> None:
    battery = make(tmp_path, case("first"), case("broken"), case("second"))
    battery.store.append(step_record(model="first"))
    battery.store.append(step_record(model="second", warmup=1))
    assert [each.name for each in battery.missing()] == ["broken", "second"]
    said: list[str] = []
    assert battery.run(said.append) == 1
    assert said[0] == f"1 of 3 cases are in {battery.store.path} already"
    assert [each.name for each in battery.missing()] == ["broken"]


def test_too_little_memory_is_an_answer_on_the_same_machine(tmp_path: pathlib.Path) -> None:
    battery = make(tmp_path, case("first"))
    record = step_record(model="first", outcome="skipped")
    here = capture_environment()
    smaller = msgspec.structs.replace(here, memory_bytes=2**30)
    battery.store.append(msgspec.structs.replace(record, environment=smaller))
    assert battery.missing()
    battery.store.append(msgspec.structs.replace(record, environment=here))
    assert not battery.missing()


def test_an_attempt_says_what_was_too_large(tmp_path: pathlib.Path) -> None:
    battery = make(tmp_path, case("large"))
    assert battery.run(lambda _text: None) == 1
    assert attempts(battery)["large"] == ("skipped", "a reason")
    assert not battery.missing()


def test_what_was_too_large_among_others_is_part_of_the_answer(tmp_path: pathlib.Path) -> None:
    battery = make(tmp_path, case("some"))
    assert battery.run(lambda _text: None) == 0
    assert attempts(battery)["some"] == ("ok", None)


def test_an_old_failure_is_not_todays_reason(tmp_path: pathlib.Path) -> None:
    battery = make(tmp_path, case("silent"))
    battery.store.append(step_record(model="silent", outcome="failed"))
    battery.run(lambda _text: None)
    assert attempts(battery)["silent"] == ("failed", "it left none of its records")


def test_a_hanging_case_is_stopped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery_module, "_SHORTEST_LIMIT_S", 1.0)
    monkeypatch.setattr(battery_module, "_SLOWEST", 1.0)
    battery = make(tmp_path, case("hanging"), case("last"))
    assert battery.run(lambda _text: None) == 1
    assert attempts(battery)["hanging"] == ("timeout", "stopped after 1 s")
    assert attempts(battery)["last"] == ("ok", None)


def test_records_of_a_directory_are_collected(tmp_path: pathlib.Path) -> None:
    battery = make(tmp_path, case("first", records_in="directory"))
    assert battery.run(lambda _text: None) == 0
    assert [record.kind for record in battery.store.read()] == ["step", "attempt"]


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
        "from tests.unit.workflows.test_suite import case, make\n"
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

    battery = make(tmp_path, case("first"), case("last"))
    assert [each.name for each in battery.missing()] == ["last"]
    assert battery.run(lambda _text: None) == 0
    models = [record.case.get("model") for record in battery.store.read() if record.kind == "step"]
    assert models == ["first", "last"]
