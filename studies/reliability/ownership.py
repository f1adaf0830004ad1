"""Starts, kills and resumes two or three commands on one directory, in random interleavings.

Commands fight for the directory of a run (one rank, or two that a supervisor forks), of a sweep, of
a dataset, or for a store of records. An actor of an interleaving starts its command, kills it
(SIGKILL or SIGTERM), or leaves it alone, at random moments; in the end one command goes on to the
end. What the directory then holds is compared with that of one undisturbed command:

- lost: a step, sample, run, shard or acknowledged record is missing, or a value differs;
- doubled: one is there twice, or a file is left over;
- mislabelled: a run has another outcome, or a command was refused without an owner.

Commands are forked from a process that has imported torch, because importing it takes longer than
these runs. With --hosts, the commands of an interleaving run on that many hosts of the lab, which
share the directory; this needs root. Appends one `fault` record per subject to the store.

    python -m studies.reliability.ownership results/ownership.jsonl --interleavings 200
"""

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.cli.main import main as paceline
from paceline.core.lock import LOCK
from paceline.core.processes import ForkedProcess, die_with_parent
from paceline.data.loader.config import SourceConfig
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import prepare
from paceline.lab.network import Host, hosts
from paceline.loop import executors
from paceline.loop.executors import LocalExecutor
from paceline.loop.run_config import limits_of
from paceline.loop.sweep import SweepRunner
from paceline.loop.sweep_design import BATCH, FIT, RATE, PlannedRun, SweepSpec
from paceline.loop.sweep_directory import SweepDirectory
from paceline.records import Record, RecordStore, capture_environment
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    StepConfig,
)
from paceline.training.metrics import EventRow, MetricsFile, StepRow
from paceline.training.run_directory import METRICS, audit_run
from studies.harness.records import FaultRecords
from studies.harness.runs import write_config
from studies.harness.study import study_parser

IN_USE = "is in use ("
_STEPS = 60
_EVENTS = 8
_LONGEST_PAUSE_S = 0.5
_PATIENCE_S = 180.0
_MOST_ENDS = 6
"""Commands that may be started in the end before one of them has to succeed."""
_RECORDS = 40


@dataclasses.dataclass(frozen=True)
class Difference:
    """What went wrong in an interleaving."""

    kind: str
    """lost, doubled or mislabelled."""
    what: str


Command = Callable[[pathlib.Path], int]
"""What an actor does with the directory; runs in a process of its own."""
Check = Callable[[pathlib.Path, pathlib.Path], list[Difference]]
"""Compares a directory with that of an undisturbed command."""


class Actor:
    """Starts the same command again and again, each time in a process of its own."""

    def __init__(
        self, command: Command, place: pathlib.Path, log: pathlib.Path, host: Host | None = None
    ) -> None:
        self._command, self._place, self._log, self._host = command, place, log, host
        self.process: ForkedProcess | None = None
        self.refusals = 0
        self.wrong: list[Difference] = []
        self._was_killed = False

    def start(self) -> None:
        """Forks a process that runs the command, with its output in the log."""
        self._log.unlink(missing_ok=True)
        self._was_killed = False
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            enter(self._host)
            run_forked(lambda: self._command(self._place), self._log, parent)
        self.process = ForkedProcess(pid)

    def poll(self) -> int | None:
        """Returns the exit code of a process that has ended by itself, else None."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.process = None
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        if code == 2 and IN_USE in text:
            self.refusals += 1
            if len(text.strip().splitlines()) != 1:
                self.wrong.append(Difference("mislabelled", f"more than a line: {text}"))
        elif code not in (0, 143) and not self._was_killed:
            self.wrong.append(Difference("mislabelled", f"exit code {code}: {text[-400:]}"))
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the running process."""
        if self.process is not None:
            self._was_killed = True
            self.process.send_signal(number)


def enter(host: Host | None) -> None:
    """Moves this process into the network of a host."""
    if host is None:
        return
    words = host.command(["true"])
    pid = words[words.index("--target") + 1]
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def run_forked(function: Callable[[], int], log: pathlib.Path, parent: int) -> None:
    """Runs a function in this forked process, as the program of the process; does not return."""
    die_with_parent(parent)
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        code = function()
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def interleave(
    command: Command,
    check: Check,
    place: pathlib.Path,
    whole: pathlib.Path,
    seed: int,
    on: Sequence[Host] = (),
) -> tuple[int, list[Difference]]:
    """Disturbs commands on one directory; returns the number of refusals, and what is wrong."""
    draw = random.Random(seed)
    logs = place.with_suffix(".logs")
    logs.mkdir()
    actors = [
        Actor(command, place, logs / f"{number}.txt", on[number % len(on)] if on else None)
        for number in range(draw.choice((2, 3)))
    ]
    for _event in range(_EVENTS):
        actor = draw.choice(actors)
        actor.poll()
        if actor.process is None:
            actor.start()
        else:
            actor.send(draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        time.sleep(draw.uniform(0, _LONGEST_PAUSE_S))
    _wait(actors)
    for _attempt in range(_MOST_ENDS):
        actors[0].start()
        if _wait(actors) == 0:
            break
    else:
        return 0, [Difference("lost", "no command went on to the end")]
    wrong = [difference for actor in actors for difference in actor.wrong]
    return sum(actor.refusals for actor in actors), [*wrong, *check(place, whole)]


def _wait(actors: Sequence[Actor]) -> int | None:
    """Waits until all processes have ended; returns the exit code of the last one to end."""
    deadline = time.monotonic() + _PATIENCE_S
    last = None
    while any(actor.process for actor in actors):
        for actor in actors:
            code = actor.poll()
            last = last if code is None else code
        if time.monotonic() > deadline:
            for actor in actors:
                actor.send(signal.SIGKILL)
            return None
        time.sleep(0.01)
    return last


class TrainingRuns:
    """`paceline train` on one run directory."""

    def __init__(self, base: RunConfig, ranks: int) -> None:
        self._base, self._ranks = base, ranks

    def command(self, place: pathlib.Path) -> int:
        """Trains."""
        path = write_config(dataclasses.replace(self._base, out=str(place)))
        supervised = ("--supervise",) if self._ranks > 1 else ()
        return paceline(["train", str(path), "--ranks", str(self._ranks), "--json", *supervised])

    def check(self, place: pathlib.Path, whole: pathlib.Path) -> list[Difference]:
        """Compares steps, losses and samples."""
        return compare_runs(place, whole)


def compare_runs(place: pathlib.Path, whole: pathlib.Path) -> list[Difference]:
    """Compares the steps, losses, samples and outcome of two runs."""
    rows = list(MetricsFile(place / METRICS).read())
    losses = [(row.step, row.loss) for row in rows if isinstance(row, StepRow)]
    expected = [
        (row.step, row.loss)
        for row in MetricsFile(whole / METRICS).read()
        if isinstance(row, StepRow)
    ]
    wrong = _counted(collections.Counter(losses), collections.Counter(expected), f"{place} step")
    wrong += [Difference("lost", f"{place}: {finding}") for finding in audit_run(place)[1]]
    ends = [row for row in rows if isinstance(row, EventRow) and row.name == "finished"]
    if not ends:
        wrong.append(Difference("mislabelled", f"{place} has not finished"))
    return wrong


def _counted(
    found: "collections.Counter[Any]", expected: "collections.Counter[Any]", what: str
) -> list[Difference]:
    lost = [Difference("lost", f"{what} {each}") for each in expected - found]
    return lost + [Difference("doubled", f"{what} {each}") for each in found - expected]


class Sweeps:
    """A sweep whose five short runs are planned already."""

    def __init__(self, base: RunConfig) -> None:
        self._base = base
        limits = limits_of(base, epochs=4.0, seed=0)
        self._spec = SweepSpec(target=1e9, largest=1e8, **limits)

    def command(self, place: pathlib.Path) -> int:
        """Runs the sweep; its runs are forked, not executed."""

        def fork_run(command: Sequence[str], *, log: pathlib.Path, **_: Any) -> ForkedRun:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                run_forked(lambda: paceline(list(command[3:])), log, parent)
            return ForkedRun(pid)

        executors.start_child = fork_run  # type: ignore[assignment]
        runner = SweepRunner(
            directory=PlannedSweep(place, self._runs()),
            make_executor=lambda _state: LocalExecutor(1),
            ranks=1,
            threads=lambda _state: 1,
            on_change=lambda: None,
        )
        from paceline.cli.output import guarded
        from paceline.core.processes import termination_as_exit

        def run() -> int:
            with termination_as_exit():
                runner.run(self._spec, self._base)
            return 0

        return guarded(run)

    def _runs(self) -> tuple[PlannedRun, ...]:
        purposes = ((RATE, 1.0), (RATE, 2.0), (BATCH, 1.0), (FIT, 1.0), (FIT, 0.5))
        shape = self._base.model.shape
        return tuple(
            PlannedRun(
                name=f"{purpose}-{number}",
                purpose=purpose,
                shape=shape,
                steps=8,
                batch_size=4,
                learning_rate=1e-3 * factor,
                warmup_steps=1,
                parameters=20_000,
                tokens=8 * 4 * 16,
                flops=1e6 * (number + 1),
                learning_rate_factor=factor if purpose == RATE else 1.0,
            )
            for number, (purpose, factor) in enumerate(purposes)
        )

    def check(self, place: pathlib.Path, whole: pathlib.Path) -> list[Difference]:
        """Compares the rows of the sweep, and each of its runs."""
        wrong = []
        for name in ("runs.jsonl", "checks.jsonl"):
            rows, expected = _rows(place / name), _rows(whole / name)
            wrong += _counted(collections.Counter(rows), collections.Counter(expected), name)
        for run in sorted((whole / "runs").iterdir()):
            wrong += compare_runs(place / "runs" / run.name, run)
        return wrong


class PlannedSweep(SweepDirectory):
    """A sweep's directory that is planned when it begins."""

    def __init__(self, path: pathlib.Path, runs: tuple[PlannedRun, ...]) -> None:
        super().__init__(path)
        self._runs = runs

    def begin(self, spec: SweepSpec, base: RunConfig) -> Any:
        """Begins a sweep with the given runs."""
        state = super().begin(spec, base)
        if not state.runs:
            self.keep(msgspec.structs.replace(state, runs=self._runs, is_refined=True))
        return self.state()


class ForkedRun(ForkedProcess):
    """A forked run of a sweep, with what else a sweep asks of its processes."""

    def terminate(self) -> None:
        """Asks the run to stop."""
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        """Waits for the end."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("run", timeout)
            time.sleep(0.005)
        return code


def _rows(path: pathlib.Path) -> list[str]:
    """Returns what a sweep says of its runs, without what depends on the clock and on kills."""
    kept = ("name", "outcome", "reason", "final_loss", "num_steps", "tokens")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [json.dumps({name: row[name] for name in kept}) for row in rows]


class Preparations:
    """`paceline data prepare` into one directory, with two workers."""

    def __init__(self, text: pathlib.Path) -> None:
        self._text = text

    def command(self, place: pathlib.Path) -> int:
        """Prepares."""
        return paceline(
            [
                *("data", "prepare", str(self._text), "--tokenizer", "bytes"),
                *("--out", str(place), "--workers", "1", "--shard-tokens", "20000"),
            ]
        )

    def check(self, place: pathlib.Path, whole: pathlib.Path) -> list[Difference]:
        """Compares every file."""
        found, expected = (
            {
                path.relative_to(each).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in each.rglob("*")
                if path.is_file() and path.name != LOCK
            }
            for each in (place, whole)
        )
        return _counted(
            collections.Counter(found.items()), collections.Counter(expected.items()), "file"
        )


class Stores:
    """Writers of one store of records, each of which says what it has appended."""

    def command(self, place: pathlib.Path) -> int:
        """Appends records, and notes each in a file of its own afterwards."""
        place.mkdir(exist_ok=True)
        environment = capture_environment()
        store = RecordStore(place / "records.jsonl")
        writer = f"{os.getpid()}-{time.monotonic_ns()}"
        for number in range(_RECORDS):
            case = {"subject": writer, "fault": str(number)}
            store.append(
                Record(kind="fault", case=case, environment=environment, metrics={}, outcome="ok")
            )
            with (place / f"{writer}.said").open("a") as said:
                said.write(f"{number}\n")
        return 0

    def check(self, place: pathlib.Path, _whole: pathlib.Path) -> list[Difference]:
        """Compares the records with what was said."""
        found = collections.Counter(
            (str(record.case["subject"]), str(record.case["fault"]))
            for record in RecordStore(place / "records.jsonl").read()
        )
        said = [
            (path.stem, number)
            for path in place.glob("*.said")
            for number in path.read_text().split()
        ]
        lost = [Difference("lost", f"record {each}") for each in said if each not in found]
        return lost + [
            Difference("doubled", f"record {each}") for each, times in found.items() if times > 1
        ]


def subjects(place: pathlib.Path) -> dict[str, tuple[Command, Check, int]]:
    """Returns the commands by name, each with its check and its share of 20 interleavings."""
    text = place / "text"
    text.mkdir(parents=True)
    for number in range(40):
        lines = "".join(f"{number} {line} green bottles\n" for line in range(400))
        (text / f"{number}.txt").write_text(lines)
    tokens = str(place / "tokens")
    prepare(PrepareConfig(sources=(str(text),), tokenizer="bytes", out=tokens, heldout=0.2))
    base = RunConfig(
        out="run",
        model=ModelConfig(num_layers=1, d_model=32, d_ff=64, num_heads=2, num_kv_heads=2),
        data=DataConfig(sources=(SourceConfig(place=tokens),), context_length=16),
        training=StepConfig(steps=_STEPS, batch_size=4),
        parallel=ParallelConfig(device="cpu"),
        checkpoint=CheckpointConfig(every_steps=4),
        evaluation=EvaluationConfig(sequences=4),
        logging=LoggingConfig(every_steps=100),
    )
    alone, supervised = TrainingRuns(base, 1), TrainingRuns(base, 2)
    sweeps, preparations, stores = Sweeps(base), Preparations(text), Stores()
    return {
        "run": (alone.command, alone.check, 6),
        "supervised run": (supervised.command, supervised.check, 5),
        "sweep": (sweeps.command, sweeps.check, 4),
        "dataset": (preparations.command, preparations.check, 3),
        "store": (stores.command, stores.check, 2),
    }


def disturb(
    place: pathlib.Path, number: int, seed: int, on: Sequence[Host] = ()
) -> dict[str, list[list[Difference]]]:
    """Returns what went wrong in every interleaving, by subject."""
    found: dict[str, list[list[Difference]]] = {}
    for subject, (command, check, share) in subjects(place).items():
        whole = place / f"{subject}-whole"
        actor = Actor(command, whole, place / "whole.txt")
        actor.start()
        if _wait([actor]) != 0:
            raise RuntimeError(f"{subject}: {(place / 'whole.txt').read_text()}")
        found[subject] = []
        refusals = 0
        for trial in range(max(1, number * share // 20)):
            directory = place / f"{subject}-{trial}"
            refused, wrong = interleave(
                command, check, directory, whole, seed * 100_000 + trial, on
            )
            refusals += refused
            found[subject].append(wrong)
            for each in wrong:
                print(f"{subject} {trial}: {each.kind}: {each.what}", flush=True)
        print(f"{subject}: {len(found[subject])} interleavings, {refusals} refusals", flush=True)
    return found


def main() -> int:
    """Disturbs, and appends a record per subject."""
    parser = study_parser(__doc__)
    parser.add_argument("--interleavings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--place", type=pathlib.Path, help="directory, instead of a temporary one")
    arguments = parser.parse_args()
    records = FaultRecords(arguments.store)
    with contextlib.ExitStack() as stack:
        place = arguments.place
        if place is None:
            place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        on = stack.enter_context(hosts(arguments.hosts)) if arguments.hosts > 1 else ()
        found = disturb(place, arguments.interleavings, arguments.seed, on)
        fault = "interleaved commands" + (f", {arguments.hosts} hosts" if on else "")
        for subject, trials in found.items():
            num_lost = sum(bool(wrong) for wrong in trials)
            records.add(subject, fault, len(trials), num_lost)
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
