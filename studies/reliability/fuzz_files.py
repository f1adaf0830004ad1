"""Fuzzes the readers of every kind of file that users pass to Paceline, guided by coverage.

atheris (libFuzzer) changes an example of each kind, and goes on from what reaches new code. A file
counts as lost if its reader raises anything but a one-line `PacelineError`, takes more than ten
seconds of CPU time, does not end or takes more than a gigabyte. Such a file is kept in `--keep`,
and fuzzing goes on without it.

    python -m studies.reliability.fuzz_files results/fuzz-files.jsonl --minutes 30

Appends one `fault` record per kind of file. Needs atheris.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from studies.harness.records import FaultRecords
from studies.harness.study import ROOT, study_parser
from tests.hostile_files import FILES

_MOST_MB = 1000
_MOST_S = 120
"""After this time of the clock, a reader counts as one that does not end."""
_MOST_RUNS = 10_000
"""Executions of one process. atheris grows by 37 KB with each read of a shard, of which a process
without it keeps 2."""
_MOST_FOUND = 20
"""Losses of one kind of file after which its time is not used up."""
_FUZZ = "from studies.reliability.fuzz_reader import fuzz; fuzz()"


class Outcome:
    """What fuzzing one kind of file found.

    Args:
        subject: The kind of file.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.problems: list[str] = []
        self.numbers = {"executions": 0.0, "covered_edges": 0.0, "peak_bytes": 0.0, "cpu_s": 0.0}

    def take(self, log: str) -> None:
        """Adds what a process of libFuzzer printed."""
        for name, pattern in (
            ("covered_edges", r" cov: (\d+)"),
            ("peak_bytes", r"stat::peak_rss_mb: +(\d+)"),
        ):
            found = [float(each) for each in re.findall(pattern, log)]
            scale = 2**20 if name == "peak_bytes" else 1
            self.numbers[name] = max([self.numbers[name], *(each * scale for each in found)])
        executed = re.findall(r"stat::number_of_executed_units: +(\d+)", log)
        self.numbers["executions"] += sum(map(float, executed))


def fuzz_subject(subject: str, seconds: float, keep: pathlib.Path) -> Outcome:
    """Fuzzes one kind of file.

    Args:
        subject: The kind of file.
        seconds: Time to use.
        keep: Directory for files that a reader cannot cope with.
    """
    outcome = Outcome(subject)
    keep.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        corpus = pathlib.Path(directory) / "corpus"
        corpus.mkdir()
        (corpus / "example").write_bytes(FILES[subject][1]())
        while (left := deadline - time.monotonic()) > 1 and len(outcome.problems) < _MOST_FOUND:
            options = {
                "max_total_time": int(left),
                "runs": _MOST_RUNS,
                "timeout": _MOST_S,
                "rss_limit_mb": _MOST_MB,
                "print_final_stats": 1,
                "max_len": 20_000,
                "artifact_prefix": f"{keep}/{subject.replace(' ', '-')}-",
            }
            words = [f"-{name}={value}" for name, value in options.items()]
            log_path = pathlib.Path(directory) / "log"
            with log_path.open("wb") as log_file:
                process = subprocess.Popen(
                    [sys.executable, "-c", _FUZZ, subject, directory, *words, str(corpus)],
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=log_file,
                    stderr=log_file,
                )
                _, status, usage = os.wait4(process.pid, 0)
            # The wait has happened; the object would otherwise look for its process again.
            process.returncode = os.waitstatus_to_exitcode(status)
            log = log_path.read_text(encoding="utf-8", errors="replace")
            outcome.take(log)
            outcome.numbers["cpu_s"] += usage.ru_utime + usage.ru_stime
            if process.returncode != 0:
                outcome.problems.append(
                    f"{subject}: exit code {process.returncode}, {_problem(log)}"
                )
    return outcome


def _problem(log: str) -> str:
    """Returns the line of a log that says what went wrong."""
    for pattern in (r"AssertionError: .*", r"ERROR: libFuzzer: .*", r"\w*Error: .*"):
        if found := re.search(pattern, log):
            return found[0][:300]
    return log.strip().rpartition("\n")[2][:300]


def main() -> int:
    """Fuzzes the kinds of files, several at a time, and records what was found."""
    parser = study_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for each kind of file")
    parser.add_argument("--only", nargs="*", default=list(FILES), choices=list(FILES))
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("fuzz-found"))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="kinds at a time")
    arguments = parser.parse_args()
    records = FaultRecords(arguments.store)
    seconds = arguments.minutes * 60
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as threads:
        futures = [
            threads.submit(fuzz_subject, subject, seconds, arguments.keep)
            for subject in arguments.only
        ]
        for future in concurrent.futures.as_completed(futures):
            outcome = future.result()
            numbers = dict(outcome.numbers)
            num_executions = int(numbers.pop("executions"))
            records.add(
                outcome.subject,
                "fuzzed file",
                num_executions,
                outcome.problems,
                metrics={**numbers, "duration_s": seconds},
            )
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
