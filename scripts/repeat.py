"""Runs a test suite several times in a row to find flaky tests and leaked resources.

    python scripts/repeat.py 20 tests/distributed > results/distributed-repeats.md

After each round, no new process, network namespace or temporary file of Paceline may be left. Stops
at the first failure. Prints a Markdown table with one row per round.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import time


def leftovers() -> set[str]:
    """Returns everything that a round could leave behind: processes, namespaces, files."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if re.search(r"paceline|slurm|munged|torchrun|all_reduce\.py", command):
                found.add(f"process {process.name}: {command}")
            found.add(f"namespace {(process / 'ns' / 'net').readlink()}")
        except OSError:
            continue
    for path in pathlib.Path(tempfile.gettempdir()).glob("paceline-*"):
        found.add(f"file {path.name}")
    return found


def main() -> int:
    """Repeats the test suite and prints a table of the rounds."""
    rounds, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu and not slow", *arguments]
    print(f"`pytest {' '.join(arguments)}`, {rounds} rounds in a row\n")
    print("| round | result | seconds | left behind |\n| --- | --- | --- | --- |", flush=True)
    before = leftovers()
    for index in range(int(rounds)):
        started = time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True)
        seconds = time.monotonic() - started
        summary = re.sub(r" in .*", "", result.stdout.strip().splitlines()[-1])
        time.sleep(1)  # The kernel takes a moment to remove the last processes.
        left = leftovers() - before
        shown = ", ".join(sorted(left)) or "nothing"
        print(f"| {index + 1} | {summary} | {seconds:.0f} | {shown} |", flush=True)
        if result.returncode or left:
            sys.stderr.write(result.stdout)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
