"""The entry point of ``paceline`` and of ``python -m paceline``."""

import sys


def main() -> int:
    """Runs the command line; an interruption while it is imported is no error of Paceline."""
    try:
        from paceline.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("paceline: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
