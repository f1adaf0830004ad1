"""Reads randomly damaged files of every kind that users pass to Paceline.

A file counts as lost if its reader raises anything but a one-line `PacelineError` or takes more
than 10 seconds. A kind of file has one more loss if the peak memory of the process exceeds 500 MB.
Appends one `fault` record per kind of file to the store.

    python -m studies.reliability.hostile_files results/hostile-files.jsonl 2000
"""

import pathlib
import sys
import tempfile

from studies.harness.records import FaultRecords
from studies.harness.study import study_parser
from tests.hostile_files import FILES, MOST_BYTES, hostile_read, peak_bytes


def main() -> int:
    """Reads the damaged files, prints the problems, and records counts, times and memory."""
    parser = study_parser(__doc__)
    parser.add_argument("number", type=int, help="damaged files of each sort")
    arguments = parser.parse_args()
    records = FaultRecords(arguments.store)
    for subject in FILES:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = [
                hostile_read(subject, seed, pathlib.Path(directory))
                for seed in range(arguments.number)
            ]
        problems = [problem for problem, _ in outcomes if problem]
        if peak_bytes() > MOST_BYTES:
            problems.append(f"{subject}: {peak_bytes():,} bytes of memory")
        longest_s = max(seconds for _, seconds in outcomes)
        numbers = {"longest_s": longest_s, "peak_bytes": peak_bytes()}
        records.add(subject, "damaged file", len(outcomes), problems, metrics=numbers)
        print(f"at most {longest_s:.3f} s, {peak_bytes() / 1e6:.0f} MB", flush=True)
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
