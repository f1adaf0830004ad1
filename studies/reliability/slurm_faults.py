"""Runs each Slurm test several times, and records the results as injected faults.

Starts Slurm on this machine for every test (`paceline.lab.slurm`); requires its Debian packages.
Appends one `fault` record per test to the store.

    python -m studies.reliability.slurm_faults results/slurm-faults.jsonl
"""

import subprocess
import sys

from studies.harness.records import FaultRecords
from studies.harness.study import study_parser

TESTS = "tests/distributed/test_slurm_runs.py"
_COMMAND = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow")


def names() -> list[str]:
    """Returns the pytest ids of the tests."""
    listed = subprocess.run(
        [*_COMMAND, "--collect-only", TESTS], capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if line.startswith(TESTS)]


def main() -> int:
    """Runs the tests, prints failures and records counts."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    records = FaultRecords(arguments.store)
    for name in names():
        lost = 0
        for _ in range(arguments.rounds):
            result = subprocess.run([*_COMMAND, name], capture_output=True, text=True, check=False)
            if result.returncode:
                lost += 1
                print(result.stdout[-3000:])
        title = name.rpartition("::test_")[2].replace("_", " ")
        records.add("Slurm job", title, arguments.rounds, lost, case={"world_size": 2})
    return records.exit_code


if __name__ == "__main__":
    sys.exit(main())
