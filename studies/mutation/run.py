"""Breaks the code of a room edit by edit, and reports which edits no ordinary test notices.

    scripts/mutate checkpoint            all mutants of a room
    scripts/mutate --sample 50           fifty of each room, evenly spread
    scripts/mutate health --survivors --tests tests/unit/health
                                         those again that survived the last time, on some tests
    scripts/mutate tonight               one room, by the day

The script runs `python -m studies.mutation.run`.

1. All mutants of the rooms are written into one instrumented copy of the package.
2. Every test of tests/unit and tests/distributed runs once, in 15 minutes: which mutants does it
   pass, also in the ranks that it starts? Tests that do not pass on the copy are left out.
3. Each mutant is active for tests that pass it, of as many files as `--seconds` allow. It is killed
   if one of them fails, or takes much longer than before.

Survivors are written to results/mutants/ROOM.jsonl. A survivor is marked as equivalent by a reason
there, which later runs keep. The exit code is 1 if fewer than `--least` per cent of the mutants
that are not equivalent were killed.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from studies.harness.study import ROOT
from studies.mutation import switch
from studies.mutation.mutants import Instrumenter, Mutant, Promises, instrument, source_files

ROOMS = (
    *("checkpoint", "data/loader", "data/sampling", "data/inspect", "training/step"),
    *("training/optimizers", "training/recovery", "training/run_checkpointer"),
    *("health", "parallel/zero", "parallel/fsdp"),
)
"""Whose mistakes lose or damage what somebody paid for."""
RESULTS = ROOT / "results/mutants"
_PACKAGE = ROOT / "src/paceline"
_SERVE = "from studies.mutation.worker import serve; serve()"
_TESTS = ("tests/unit", "tests/distributed")
_KEY = ("path", "function", "before", "after", "occurrence")
"""Fields of a survivor that identify it."""
_SLOWER, _EXTRA_S = 4.0, 15.0
"""A test that takes this many times as long, and so many seconds more, waits for something lost."""
_MOST_TESTS = 300
_MOST_LEFT_OUT = 0.05
"""Tests that may fail on the copy, per test that passes."""
_MOST_FILE_S = 900.0


@dataclasses.dataclass(frozen=True)
class Noted:
    """A test, and the mutants that it passes."""

    test: str
    seconds: float
    passed: frozenset[int]

    @property
    def file(self) -> str:
        """The test's file."""
        return self.test.partition("::")[0]

    @property
    def starts_ranks(self) -> bool:
        """Whether it is one of the tests that start ranks."""
        return self.test.startswith("tests/distributed")


class Worker:
    """A process that has imported all tests, with the instrumented package.

    Args:
        package: Directory that contains the instrumented package.
        shared: The file that says which mutant is active.
        files: The files of tests.
    """

    def __init__(self, package: pathlib.Path, shared: pathlib.Path, files: Sequence[str]) -> None:
        read_end, write_end = os.pipe()
        path = os.pathsep.join([str(package), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(write_end), *files],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": path,
                switch.SWITCH: str(shared),
                "OMP_NUM_THREADS": "1",
                "PYTEST_XDIST_WORKER": "mutation",  # One core, as each worker of the suites.
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_end,),
            text=True,
        )
        os.close(write_end)
        self._answers = os.fdopen(read_end)
        self._received()

    def _received(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        return dict(json.loads(line))

    def ask(self, **request: object) -> dict[str, Any]:
        """Sends a request and returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._received()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Workers:
    """Workers that share the requests, on as many threads.

    Args:
        place: Directory for the instrumented package and the shared files.
        files: The files of tests.
        number: How many; each has a core.
        num_mutants: The highest number of a mutant.
    """

    def __init__(
        self, place: pathlib.Path, files: Sequence[str], number: int, num_mutants: int
    ) -> None:
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(number)

        def start(index: int) -> Worker:
            shared = place / f"shared-{index}"
            shared.write_bytes(bytes(switch.NOTES + num_mutants + 1))
            return Worker(place, shared, files)

        self._workers = list(self._threads.map(start, range(number)))
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def ask_all(
        self, requests: Iterable[tuple[Any, dict[str, Any]]]
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields (key, answer) of each (key, request), as they come."""

        def ask(key: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            worker = self._free.get()
            try:
                return key, worker.ask(**request)
            finally:
                self._free.put(worker)

        futures = [self._threads.submit(ask, key, request) for key, request in requests]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def write_package(
    place: pathlib.Path, rooms: Sequence[str], edits: type[Instrumenter] = Promises
) -> dict[str, list[Mutant]]:
    """Writes the instrumented package; returns the mutants by room.

    Args:
        place: Directory for the package.
        rooms: The rooms.
        edits: What is edited in them.
    """
    package = place / "paceline"
    shutil.copytree(_PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(switch.__file__, package / "mutants_.py")
    found: dict[str, list[Mutant]] = {}
    first = 1
    for room in rooms:
        found[room] = []
        for source in source_files(_PACKAGE, room):
            path = str(source.relative_to(_PACKAGE))
            text, mutants = instrument(source, path, first, edits)
            (package / path).write_text(text, encoding="utf-8")
            found[room] += mutants
            first += len(mutants)
    return found


def note_tests(workers: Workers, files: Sequence[str]) -> list[Noted]:
    """Runs all tests once; returns those that pass. Ends the program if many do not."""
    noted: list[Noted] = []
    num_left_out = 0
    requests = ((file, {"note": True, "tests": [file], "seconds": _MOST_FILE_S}) for file in files)
    for number, (file, answer) in enumerate(workers.ask_all(requests)):
        tests = answer.get("tests", [])
        shared = frozenset[int]().union(*(each["setup"] for each in tests))
        for each in tests:
            if each["passed"]:
                passed = shared.union(each["call"])
                noted.append(Noted(each["test"], each["seconds"], passed))
            else:
                num_left_out += 1
                print(f"left out, fails on the copy: {each['test']}", flush=True)
        if "tests" not in answer:
            print(f"left out, {answer}: {file}", flush=True)
        print(f"{number + 1} of {len(files)} files of tests", end="\r", file=sys.stderr)
    if num_left_out > _MOST_LEFT_OUT * len(noted):
        sys.exit(f"{num_left_out} tests fail on the copy, and {len(noted)} pass: mend this first")
    return noted


def tests_of(mutant: Mutant, noted: Sequence[Noted], seconds: float) -> list[Noted]:
    """Returns tests that pass a mutant: without ranks up to half of the time, then with ranks.

    The quickest test of every file comes first, then the second of each, because tests of one file
    notice the same.
    """
    passing = [each for each in noted if mutant.number in each.passed]
    passing.sort(key=lambda each: each.seconds)
    places: dict[str, int] = collections.defaultdict(int)
    ordered: list[tuple[int, Noted]] = []
    for each in passing:
        ordered.append((places[each.file], each))
        places[each.file] += 1
    ordered.sort(key=lambda each: each[0])
    chosen: list[Noted] = []
    total = 0.0
    for with_ranks, most in ((False, seconds / 2), (True, seconds)):
        for _, each in ordered:
            if each.starts_ranks == with_ranks and total + each.seconds <= most:
                chosen.append(each)
                total += each.seconds
    return (chosen or passing[:1])[:_MOST_TESTS]


def _limit(usual_s: float) -> float:
    return usual_s * _SLOWER + _EXTRA_S


def run_mutants(
    workers: Workers, mutants: Sequence[Mutant], noted: Sequence[Noted], seconds: float
) -> dict[Mutant, str | None]:
    """Returns which test killed each mutant; None if it survived."""
    outcomes: dict[Mutant, str | None] = {}

    def requests() -> Iterator[tuple[Mutant, dict[str, Any]]]:
        for mutant in mutants:
            tests = tests_of(mutant, noted, seconds)
            if tests:
                yield (
                    mutant,
                    {
                        "active": mutant.number,
                        "tests": [each.test for each in tests],
                        "seconds": _limit(sum(each.seconds for each in tests)),
                        "seconds_of_one": _limit(max(each.seconds for each in tests)),
                    },
                )
            else:
                outcomes[mutant] = None

    began = time.monotonic()
    for mutant, answer in workers.ask_all(requests()):
        outcomes[mutant] = answer["by"] if answer["killed"] else None
        rate = (time.monotonic() - began) / len(outcomes)
        print(
            f"{len(outcomes)} of {len(mutants)} mutants, {sum(map(bool, outcomes.values()))} "
            f"killed, {rate * (len(mutants) - len(outcomes)) / 60:.0f} min left ",
            end="\r",
            file=sys.stderr,
        )
    return outcomes


class Survivors:
    """The survivors of a room, as results/mutants/ROOM.jsonl lists them.

    Args:
        room: The room.
    """

    def __init__(self, room: str) -> None:
        self._path = RESULTS / f"{room.replace('/', '-')}.jsonl"
        self.reasons: dict[tuple[str | int, ...], str] = {}
        self.keys: set[tuple[str | int, ...]] = set()
        self.sampled: int | None = None
        """How many mutants the last run chose, if not all."""
        if self._path.exists():
            summary, *rows = self._path.read_text(encoding="utf-8").splitlines()
            self.sampled = json.loads(summary).get("sampled")
            for line in rows:
                row = json.loads(line)
                key = tuple(row[name] for name in _KEY)
                self.keys.add(key)
                if row["equivalent"]:
                    self.reasons[key] = row["equivalent"]

    def write(self, num_mutants: int, num_run: int, survived: Sequence[Mutant]) -> float:
        """Writes the survivors of a run of all mutants, or of a sample; returns the score."""
        equivalent = [each for each in survived if each.key in self.reasons]
        score = 1 - (len(survived) - len(equivalent)) / max(1, num_run - len(equivalent))
        summary = {
            "mutants": num_mutants,
            **({"sampled": num_run} if num_run < num_mutants else {}),
            "killed": num_run - len(survived),
            "equivalent": len(equivalent),
            "score": round(score, 4),
        }
        rows = [
            {
                **{name: getattr(each, name) for name in ("line", *_KEY)},
                "equivalent": self.reasons.get(each.key, ""),
            }
            for each in sorted(survived, key=lambda each: (each.path, each.number))
        ]
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (summary, *rows)),
            encoding="utf-8",
        )
        return score


def run_room(
    workers: Workers,
    room: str,
    mutants: Sequence[Mutant],
    noted: Sequence[Noted],
    arguments: argparse.Namespace,
) -> float:
    """Runs the mutants of a room that were asked for, prints what survived, returns the score."""
    survivors = Survivors(room)
    chosen = mutants
    if arguments.survivors:
        chosen = [each for each in mutants if each.key in survivors.keys]
    elif arguments.sample:
        chosen = chosen[:: max(1, len(chosen) // arguments.sample)]
    outcomes = run_mutants(workers, chosen, noted, arguments.seconds)
    survived = [each for each in chosen if outcomes[each] is None]
    num_run = len(chosen)
    if arguments.survivors:  # The others of the last run were killed then.
        num_run = survivors.sampled or len(mutants)
    score = survivors.write(len(mutants), num_run, survived)
    for each in survived:
        if each.key not in survivors.reasons:
            print(each)
    print(f"{room}: {len(chosen)} mutants, {len(survived)} survived, {score:.1%}", flush=True)
    return score


def main() -> int:
    """Runs the mutants of the rooms; returns 1 if too many of a room survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", default=ROOMS, metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--sample", type=int, help="mutants of each room, evenly spread")
    parser.add_argument("--survivors", action="store_true", help="only those of the last run")
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests for each mutant")
    parser.add_argument("--tests", nargs="+", default=_TESTS, help="files and folders, not all")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="one per core")
    parser.add_argument("--least", type=float, default=85.0, help="per cent to be killed")
    arguments = parser.parse_args()
    names = list(arguments.rooms)
    if names == ["tonight"]:
        names = [ROOMS[datetime.date.today().toordinal() % len(ROOMS)]]
    files = [
        str(path.relative_to(ROOT))
        for place in (ROOT / each for each in arguments.tests)
        for path in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))
    ]
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        rooms = write_package(place, names)
        total = sum(map(len, rooms.values()))
        with Workers(place, files, arguments.workers, total) as workers:
            noted = note_tests(workers, files)
            scores = [
                run_room(workers, room, mutants, noted, arguments)
                for room, mutants in rooms.items()
            ]
    return 0 if all(score * 100 >= arguments.least for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
