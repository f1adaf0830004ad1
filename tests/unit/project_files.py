"""The files of this checkout that belong to the project."""

import pathlib
import subprocess


def project_files(folder: pathlib.Path, pattern: str = ".") -> list[str]:
    """Returns the names below a folder that are tracked, or would be when added."""
    return subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
