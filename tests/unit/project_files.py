"""Lists the files of this checkout that belong to the project."""

import pathlib
import subprocess


def project_files(folder: pathlib.Path, pattern: str = ".") -> list[str]:
    """Returns the paths below a folder that git tracks or would add."""
    return subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
