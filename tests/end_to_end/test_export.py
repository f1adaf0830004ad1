"""Tests that commands and program of the page on export and generation run as printed."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
_SMALL = (
    *("--set", "model.num_layers=2", "--set", "model.d_model=32", "--set", "model.num_heads=4"),
    *("--set", "model.num_kv_heads=2", "--set", "model.d_ff=64", "--set", "training.steps=30"),
    *("--set", "evaluation.sample_prompt=All this", "--set", "evaluation.sample_tokens=8"),
)


def _run(place: pathlib.Path, command: list[str] | str) -> str:
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, shell=isinstance(command, str)
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_page_from_its_first_command_to_its_last(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers", reason="loads what is exported")
    (tmp_path / "corpus").mkdir()
    for number in range(100):
        text = "All this happened, more or less. " * 40
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number}: {text}")
    paceline = [sys.executable, "-m", "paceline"]
    prepared = ("--tokenizer", "bytes", "--out", "tokens", "--heldout", "0.2")
    _run(tmp_path, [*paceline, "data", "prepare", "corpus", *prepared])
    (tmp_path / "run.toml").write_text(_run(tmp_path, [*paceline, "train", "init"]))
    _run(tmp_path, [*paceline, "train", "run.toml", "--ranks", "2", *_SMALL])

    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).splitlines():
        printed = _run(tmp_path, line.removeprefix("$ ").replace("paceline", " ".join(paceline), 1))
        assert printed or ">" in line
    greedy = ["--prompt", "All this", "--tokens", "64", "--temperature", "0"]
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    theirs = _run(tmp_path, [sys.executable, "-c", program])
    for model in ("run", "model"):
        assert _run(tmp_path, [*paceline, "generate", model, *greedy]) == theirs
    assert "finished" in (tmp_path / "further" / "metrics.jsonl").read_text(encoding="utf-8")
