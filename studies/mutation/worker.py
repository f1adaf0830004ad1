"""Runs tests on an instrumented package, in forks of one process that has imported everything.

Requests come as lines of JSON on stdin, and answers go to the file descriptor that is named on the
command line. A request has ``tests`` (ids, in order), ``seconds`` and either ``active``, the number
of a mutant, with ``seconds_of_one`` test, or ``note`` to ask which mutants each test passes.
"""

import contextlib
import json
import mmap
import multiprocessing
import os
import pathlib
import select
import signal
import sys
import tempfile
from multiprocessing import forkserver
from typing import IO, Any

import hypothesis
import pytest

from studies.mutation.switch import NOTES, SWITCH

_PRELOADED = ["paceline.parallel.ranks.launch", "paceline.training.run", "torch._dynamo"]
_ARGUMENTS = (
    *("-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"),
    "--hypothesis-profile=mutation",
)


class _Notes:
    """Learns which mutants each test passes; those of a fixture belong to its whole file."""

    def __init__(self, shared: memoryview) -> None:
        self._notes = shared[NOTES:]
        self._seconds = 0.0
        self.tests: list[dict[str, Any]] = []

    def _taken(self) -> list[int]:
        passed = [number for number, value in enumerate(bytes(self._notes)) if value]
        for number in passed:
            self._notes[number] = 0
        return passed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._seconds, self._setup = report.duration, self._taken()
            self._outcome = report.outcome
        elif report.when == "call":
            self._seconds += report.duration
            self._outcome = report.outcome
        else:
            self.tests.append(
                {
                    "test": report.nodeid,
                    "seconds": self._seconds,
                    "passed": self._outcome == "passed" and report.passed,
                    "setup": self._setup,
                    "call": self._taken(),
                }
            )


class _FirstFailure:
    """Remembers which test failed first."""

    def __init__(self) -> None:
        self.test: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.test is None:
            self.test = report.nodeid


def _run(tests: list[str], plugin: object, *options: str) -> int:
    return int(pytest.main([*_ARGUMENTS, *options, *tests], plugins=[plugin]))


def _answer_in_child(request: dict[str, Any], shared: memoryview, answer_file: IO[str]) -> None:
    """Runs the tests of a request, and writes the answer."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The server of the parent forks the ranks; only the parent may wait for it. The module has the
    # method under a name of its own.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    forkserver.ensure_running = lambda: None
    answer: dict[str, Any]
    if request.get("note"):
        notes = _Notes(shared)
        _run(request["tests"], notes)
        answer = {"tests": notes.tests}
    else:
        first = _FirstFailure()
        code = _run(request["tests"], first, "-x", f"--timeout={request['seconds_of_one']}")
        answer = {"killed": code != 0, "by": first.test or ("" if code else None)}
    json.dump(answer, answer_file)
    answer_file.flush()


def _answer(request: dict[str, Any], shared: memoryview) -> dict[str, Any]:
    """Forks a process for a request; a process that takes too long is killed."""
    shared[:NOTES].cast("Q")[0] = request.get("active", 0)
    with tempfile.TemporaryFile("w+") as answer_file:
        pid = os.fork()
        if pid == 0:
            try:
                _answer_in_child(request, shared, answer_file)
            finally:
                os._exit(0)
        descriptor = os.pidfd_open(pid)
        has_ended, _, _ = select.select([descriptor], [], [], request["seconds"])
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # And what its tests have left behind.
        os.waitpid(pid, 0)
        if not has_ended:
            return {"killed": True, "by": "time"}
        answer_file.seek(0)
        content = answer_file.read()
    return dict(json.loads(content)) if content else {"killed": True, "by": "crash"}


def serve() -> None:
    """Answers requests until stdin ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    hypothesis.settings.register_profile(
        "mutation",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        database=None,
        # The smallest failing example would take longer than the rest of the tests.
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    with pathlib.Path(os.environ[SWITCH]).open("r+b") as file:
        shared = memoryview(mmap.mmap(file.fileno(), 0))
    pytest.main([*_ARGUMENTS, "--collect-only", *sys.argv[2:]])
    multiprocessing.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), shared)) + "\n")
