"""Tests of ``paceline checkpoint list`` and ``verify``, which do not import torch."""

import json
import pathlib
import subprocess
import sys

import pytest

from paceline.cli.main import main
from tests.unit.checkpoint.runs import save_steps


def test_an_intact_place(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path, [10, 20])
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("complete") == 2
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "2 checkpoints are intact" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "10"]) == 0
    assert "1 checkpoint is intact" in capsys.readouterr().out


def test_a_damaged_place(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path, [10, 20])
    file = tmp_path / "step-00000020" / "rank-00000-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "saved by rank 0, is corrupted" in capsys.readouterr().out
    file.unlink()
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], bool(row["problem"])) for row in rows] == [(10, False), (20, True)]
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "20", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["name"] == "size"
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "30"]) == 1
    assert "no checkpoint of step 30" in capsys.readouterr().err


def test_nothing_there(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 0
    assert "no checkpoints" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 1
    assert "nowhere: no checkpoints to verify" in capsys.readouterr().err


def test_torch_is_not_loaded(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [10])
    program = (
        "import sys; from paceline.cli.main import main; "
        "code = main(['checkpoint', 'verify', sys.argv[1]]); "
        "sys.exit(code or int('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
