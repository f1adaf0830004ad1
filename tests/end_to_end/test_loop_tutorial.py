"""Tests that the loop tutorial's commands run as printed, to a page and a sample."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "loop-tutorial.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_tutorial_from_its_first_command_to_its_last(tmp_path: pathlib.Path) -> None:
    commands = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(commands) == 4
    search_path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    history = str(tmp_path / "history.jsonl")
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *commands])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": search_path, "PACELINE_HISTORY": history},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for stage in ("calibrate:", "fit: learning_rate_rule:", "fit: best N", "choose:", "plan:"):
        assert stage in done.stderr
    assert (tmp_path / "loop" / "loop.html").stat().st_size > 50_000
    assert "held-out loss" in done.stdout
