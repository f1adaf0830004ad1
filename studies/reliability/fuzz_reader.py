"""Reads what atheris makes of an example file, until the time is over or a reader fails.

The arguments are the kind of file, a directory for it, and arguments of libFuzzer. The package is
instrumented while it is imported, so nothing may import it before.
"""

import pathlib
import sys

import atheris

with atheris.instrument_imports(include=["paceline"]):
    from tests.hostile_files import read_content


def fuzz() -> None:
    """Reads files until libFuzzer ends the process."""
    subject, directory, *arguments = sys.argv[1:]

    def read(content: bytes) -> None:
        problem, _ = read_content(subject, content, pathlib.Path(directory))
        if problem:
            raise AssertionError(problem)

    atheris.Setup(["fuzz", *arguments], read)
    atheris.Fuzz()
