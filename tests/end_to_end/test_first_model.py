"""The page that leads to a first model: its commands and its program run as they are printed."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "first-model.md").read_text(encoding="utf-8")
KILLED = 137


def _run(place: pathlib.Path, command: list[str] | str) -> subprocess.CompletedProcess[str]:
    search_path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=place,
        capture_output=True,
        text=True,
        shell=isinstance(command, str),
        env={**os.environ, "PATH": search_path},
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_from_its_first_command_to_its_last(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers", reason="loads what is exported")
    began = time.monotonic()
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = [line.removeprefix("$ ") for line in "".join(blocks).splitlines()]
    done = {command: _run(tmp_path, command) for command in commands}
    for command, result in done.items():
        expected = KILLED if command.startswith("timeout") else 0
        assert result.returncode == expected, f"{command}\n{result.stderr}"
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    loaded = _run(tmp_path, [sys.executable, "-c", program])
    assert loaded.returncode == 0, loaded.stderr
    assert float(loaded.stdout) < 4
    assert time.monotonic() - began < 600
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "from step" in metrics  # It went on, and did not begin again.
    assert "every sample exactly once" in done["paceline data audit run"].stdout
    assert (tmp_path / "run.html").stat().st_size > 10_000
