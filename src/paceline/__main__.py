"""The entry point of ``paceline`` and of ``python -m paceline``."""

import os
import sys


def _open_closed_streams() -> None:
    """Opens the standard streams that the caller has closed, so that no file takes their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        continue
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # For the whole process.
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def main() -> int:
    """Runs the command line; an interruption while it is imported is no error of Paceline."""
    _open_closed_streams()
    try:
        from paceline.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("paceline: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
