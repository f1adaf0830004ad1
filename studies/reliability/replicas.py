"""Kills elastic replicas, and the launcher with its lighthouse, and checks that the run recovers.

A run with `parallel.elastic = "replicas"` loses one replica after another, each after all are back
and ten more steps are done. Some kills hit the launcher, whose process contains the lighthouse; the
command is then started again. For each killed replica, the study measures how long the other
replicas paused and how long it took until all were back. At the end, every step must be recorded,
every sample used exactly once, and no process left.

Appends two `fault` records to the store: kills of replicas and kills of the launcher. Requires
torchft (`pip install 'paceline[elastic]'`).

    python -m studies.reliability.replicas results/replicas.jsonl
"""

import argparse
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable

from paceline.training.config import ParallelConfig, RunConfig
from paceline.training.metrics import EventRow, MetricsFile, MetricsRow, StepRow
from paceline.training.run_directory import audit_run
from studies.harness.records import FaultRecords
from studies.harness.runs import run_to_disturb, steps_of, write_config
from studies.harness.study import start_paceline, study_parser
from tests.processes import children_of, is_running

_STEPS_BETWEEN = 10
_LONGEST_S = 180.0
_POLL_S = 0.005


class Run:
    """The training command, which is started again after its launcher was killed."""

    def __init__(self, config: RunConfig, num_replicas: int) -> None:
        self._log = pathlib.Path(f"{config.out}.log")
        self._command = ["train", str(write_config(config)), "--ranks", str(num_replicas)]
        self._metrics = pathlib.Path(config.out) / "metrics.jsonl"
        self._num_replicas = num_replicas
        self.launch()

    def launch(self) -> None:
        """Starts the command."""
        self.process = start_paceline(*self._command, log=self._log)

    def rows(self) -> list[MetricsRow]:
        """Returns the metrics rows of the run so far."""
        return list(MetricsFile(self._metrics).read()) if self._metrics.exists() else []

    def num_steps(self) -> int:
        """Returns the number of completed steps."""
        return max((row.step for row in self.rows() if isinstance(row, StepRow)), default=0)

    def num_live(self) -> int:
        """Returns the number of live replicas, from the last event that states it."""
        said = [row.message for row in self.rows() if isinstance(row, EventRow)]
        found = re.findall(
            rf"(\d+) of {self._num_replicas} (?:replicas|from step)", "\n".join(said)
        )
        return int(found[-1]) if found else 0

    def wait(self, until: Callable[[], bool]) -> float:
        """Waits until a condition is true; returns the seconds that it took."""
        began = time.monotonic()
        while not until():
            if self.process.poll() is not None or time.monotonic() - began > _LONGEST_S:
                raise RuntimeError(self._log.read_text(errors="replace")[-3000:])
            time.sleep(_POLL_S)
        return time.monotonic() - began


def study(run: Run, arguments: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Kills; returns the others' pauses, the replicas' absences, and the launcher kills."""
    chance = random.Random(arguments.seed)
    paused_s: list[float] = []
    away_s: list[float] = []
    num_launchers = 0

    def has_more_than(number: int) -> Callable[[], bool]:
        return lambda: run.num_steps() > number

    for number in range(1, arguments.kills + 1):
        run.wait(lambda: run.num_live() == arguments.replicas)
        run.wait(has_more_than(run.num_steps() + _STEPS_BETWEEN))
        replicas = children_of(run.process.pid)
        if number % arguments.launcher_every == 0:
            os.kill(run.process.pid, signal.SIGKILL)
            run.process.wait()
            deadline = time.monotonic() + 5
            while any(map(is_running, replicas)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if any(map(is_running, replicas)):
                raise RuntimeError("replicas have outlived their launcher")
            num_launchers += 1
            run.launch()
            seconds = run.wait(has_more_than(run.num_steps()))
            print(f"{number}: launcher, next step after {seconds:.1f} s", flush=True)
            continue
        os.kill(chance.choice(replicas), signal.SIGKILL)
        run.wait(lambda: run.num_live() < arguments.replicas)
        # The event precedes the first step without the lost replica, which is the longest.
        run.wait(has_more_than(run.num_steps()))
        paused = max(row.step_time_s for row in run.rows()[-20:] if isinstance(row, StepRow))
        seconds = run.wait(lambda: run.num_live() == arguments.replicas)
        paused_s.append(paused)
        away_s.append(seconds)
        print(f"{number}: others paused {paused:.2f} s, back after {seconds:.1f} s", flush=True)
    return paused_s, away_s, num_launchers


def main() -> int:
    """Trains, kills, and prints and records the results."""
    parser = study_parser(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--launcher-every", type=int, default=10, help="one of so many")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--heartbeat-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = run_to_disturb(
            pathlib.Path(directory),
            "killed",
            steps=10**6,
            saves_every=50,
            parallel=ParallelConfig(
                device="cpu",
                elastic="replicas",
                timeout_s=60,
                heartbeat_timeout_s=arguments.heartbeat_s,
            ),
        )
        run = Run(config, arguments.replicas)
        try:
            paused_s, away_s, num_launchers = study(run, arguments)
        except BaseException:
            run.process.kill()  # Its replicas end with it.
            raise
        processes = children_of(run.process.pid)
        run.process.send_signal(signal.SIGTERM)
        wrong = [] if run.process.wait(60) == 143 else ["the run did not stop when asked"]
        wrong += ["a process is left" for each in processes if is_running(each)]
        steps = [row.step for row in steps_of(config)]
        if steps != list(range(1, max(steps) + 1)):
            wrong.append("steps are missing, or were told twice")
        _, findings = audit_run(pathlib.Path(config.out))
        wrong += [str(finding) for finding in findings]
        case = {"world_size": arguments.replicas, "heartbeat_timeout_s": arguments.heartbeat_s}
        records = FaultRecords(arguments.store)
        records.add(
            "replicas",
            "SIGKILL of a replica",
            len(paused_s),
            len(paused_s) if wrong else 0,  # The responsible kill is unknown.
            case=case,
            metrics={"paused_s": paused_s, "away_s": away_s},
        )
        records.add(
            "replicas",
            "SIGKILL of the launcher and its lighthouse",
            num_launchers,
            num_launchers if wrong else 0,
            case=case,
        )
        for each in wrong:
            print(f"lost: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
