"""Runs each Slurm test several times, and records the results as injected faults.

Starts Slurm on this machine for every test (`paceline.lab.slurm`); requires its Debian packages.
Appends one `fault` record per test to the store.

    python scripts/slurm_faults.py results/slurm-faults.jsonl
"""

import argparse
import pathlib
import subprocess
import sys

from fault_records import record_fault

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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    num_lost = 0
    for name in names():
        lost = 0
        for _ in range(arguments.rounds):
            result = subprocess.run([*_COMMAND, name], capture_output=True, text=True, check=False)
            if result.returncode:
                lost += 1
                print(result.stdout[-3000:])
        num_lost += lost
        title = name.rpartition("::test_")[2].replace("_", " ")
        record_fault(
            arguments.store,
            subject="Slurm job",
            fault=title,
            num_tried=arguments.rounds,
            num_lost=lost,
            case={"world_size": 2},
        )
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
