"""Measures the growth of memory and file descriptors of a run over half an hour.

A small model trains until its time is up, then receives SIGTERM and must exit within two minutes
without leaving a process. Every few seconds, the proportional set size and the file descriptors of
all processes of the run are summed. With `--chaos` the run is supervised while `paceline lab chaos`
kills and stops ranks and damages checkpoints; samples with missing ranks, or with ranks younger
than 10 s, are dropped.

Growth is the median of the last quarter over that of the second, because caches fill in the first.
Appends one `fault` record to the store.

    python -m studies.reliability.soak results/soak.jsonl
    python -m studies.reliability.soak results/soak.jsonl --ranks 4 --chaos
"""

import os
import pathlib
import re
import signal
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

from paceline.training.config import ParallelConfig
from paceline.training.run_directory import audit_run
from studies.harness.records import FaultRecords
from studies.harness.runs import run_to_disturb, steps_of, write_config
from studies.harness.study import PACELINE, start_paceline, study_parser
from tests.processes import children_of, is_running

_EVERY_S = 5.0
_YOUNGEST_S = 10.0
"""Minimum age of the processes in a sample."""
_END_S = 120.0
_MOST_GROWTH = 0.01


class Sample(NamedTuple):
    """Resources of all processes of the run at one moment."""

    memory_bytes: int
    descriptors: int


def descendants(pid: int) -> list[int]:
    """Returns all descendants of a process."""
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants(child)]
    return found


def age_s(pid: int) -> float:
    """Returns the seconds since a process started."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return since_boot - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def sample(processes: list[int]) -> Sample | None:
    """Returns the total resources of processes; None if one is too young or has just ended."""
    memory = descriptors = 0
    try:
        for pid in processes:
            if age_s(pid) < _YOUNGEST_S:
                return None
            rolled_up = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
            found = re.search(r"^Pss:\s+(\d+) kB", rolled_up, re.MULTILINE)
            memory += 1024 * int(found[1]) if found else 0
            descriptors += sum(1 for _ in pathlib.Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    return Sample(memory, descriptors)


def soak(command: list[str], log: pathlib.Path, num_processes: int, seconds: float) -> list[Sample]:
    """Runs a command for a while; returns the samples in which all its processes were running."""
    samples = []
    process = start_paceline(*command, log=log)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(_EVERY_S)
        if process.poll() is not None:
            raise RuntimeError(f"ended too early: {log.read_text(errors='replace')[-2000:]}")
        processes = descendants(process.pid)
        taken = sample(processes) if len(processes) == num_processes else None
        if taken is not None:
            samples.append(taken)
    processes = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait(_END_S)
    left = [pid for pid in processes if is_running(pid)]
    if left:
        raise RuntimeError(f"processes {left} are left")
    return samples


def growth(values: list[int]) -> float:
    """Returns the last quarter's median over the second quarter's, minus one."""
    quarter = len(values) // 4
    early = statistics.median(values[quarter : 2 * quarter])
    return statistics.median(values[-quarter:]) / early - 1


def main() -> int:
    """Runs the soak, and prints and records the growth."""
    parser = study_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--chaos", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        config = run_to_disturb(
            place,
            "run",
            steps=10**7,
            saves_every=100,
            parallel=ParallelConfig(strategy="zero2", device="cpu", timeout_s=60),
        )
        path = write_config(config)
        command = ["train", str(path), "--ranks", str(arguments.ranks)]
        num_processes = arguments.ranks
        if arguments.chaos:
            # The supervisor is a descendant too, like the ranks.
            num_processes += 1
            chaos = ["lab", "chaos", "--run", config.out, "--kill-every", "60s", "--every", "90s"]
            chaos += ["--stop", "5s", "--corrupt", "--no-restart", "--for", "10h", "--"]
            command = [*chaos, *PACELINE, *command, "--supervise", "--max-restarts", "1000"]
        samples = soak(command, place / "log", num_processes, 60 * arguments.minutes)
        num_steps = max(row.step for row in steps_of(config))
        _, findings = audit_run(pathlib.Path(config.out))
        memory = growth([each.memory_bytes for each in samples])
        descriptors = growth([each.descriptors for each in samples])
        print(f"{len(samples)} samples, {num_steps:,} steps, memory {memory:+.2%}", flush=True)
        for finding in findings:
            print(finding)
        records = FaultRecords(arguments.store)
        is_lost = memory > _MOST_GROWTH or descriptors > 0 or bool(findings)
        records.add(
            "soak with chaos" if arguments.chaos else "soak",
            "time",
            1,
            int(is_lost),
            case={"strategy": "zero2", "world_size": arguments.ranks},
            metrics={
                "time_s": 60 * arguments.minutes,
                "num_steps": num_steps,
                "memory_bytes": [float(each.memory_bytes) for each in samples],
                "memory_growth": memory,
                "descriptors": [float(each.descriptors) for each in samples],
                "descriptor_growth": descriptors,
            },
        )
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
