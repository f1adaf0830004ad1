"""Reads randomly damaged files of every kind that users pass to Paceline.

A file counts as lost if its reader raises anything but a one-line `PacelineError` or takes more
than 10 seconds. A kind of file has one more loss if the peak memory of the process exceeds 500 MB.
Appends one `fault` record per kind of file to the store.

    python scripts/hostile_files.py 2000 results/hostile-files.jsonl
"""

import argparse
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from fault_records import record_fault

from tests.hostile_files import FILES, MOST_BYTES, hostile_read, peak_bytes


def main() -> int:
    """Reads the damaged files, prints the problems, and records counts, times and memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int, help="damaged files of each sort")
    parser.add_argument("store", type=pathlib.Path)
    arguments = parser.parse_args()
    num_lost = 0
    for subject in FILES:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = [
                hostile_read(subject, seed, pathlib.Path(directory))
                for seed in range(arguments.number)
            ]
        problems = [problem for problem, _ in outcomes if problem]
        if peak_bytes() > MOST_BYTES:
            problems.append(f"{subject}: {peak_bytes():,} bytes of memory")
        num_lost += len(problems)
        for problem in problems:
            print(f"lost: {problem}")
        longest_s = max(seconds for _, seconds in outcomes)
        record_fault(
            arguments.store,
            subject=subject,
            fault="damaged file",
            num_tried=len(outcomes),
            num_lost=len(problems),
            metrics={"longest_s": longest_s, "peak_bytes": peak_bytes()},
        )
        print(f"at most {longest_s:.3f} s, {peak_bytes() / 1e6:.0f} MB", flush=True)
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
