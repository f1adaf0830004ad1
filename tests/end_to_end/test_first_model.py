"""Tests that commands and program of the page on a first model run as printed."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "first-model.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_from_its_first_command_to_its_last(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers", reason="loads what is exported")
    commands = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "load.py").write_text(program)
    script = "\n".join(["set -e", *commands, "python load.py"])
    search_path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": search_path},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert time.monotonic() - began < 600
    lines = done.stdout.splitlines()
    assert "run: 150 steps, every sample exactly once" in lines
    assert float(lines[-1]) < 4  # The loss, computed by transformers.
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "from step" in metrics  # It resumed instead of starting over.
    assert (tmp_path / "run.html").stat().st_size > 10_000
