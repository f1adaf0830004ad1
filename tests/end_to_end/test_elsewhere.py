"""Tests of the programs of examples/elsewhere: Paceline's parts in users' own training loops."""

import json
import pathlib
import subprocess
import sys

import pytest

ELSEWHERE = pathlib.Path(__file__).parents[2] / "examples" / "elsewhere"


def _losses(*command: str) -> list[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in result.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("plain_torch", ()),
        pytest.param("lightning_module", (), marks=pytest.mark.slow),
        pytest.param("lightning_module", ("--strategy", "zero2"), marks=pytest.mark.slow),
        pytest.param("hugging_face", ("--strategy", "zero2"), marks=pytest.mark.slow),
        pytest.param("hugging_face", (), marks=pytest.mark.slow),
        pytest.param("hugging_face", ("--strategy", "torch_fsdp2"), marks=pytest.mark.slow),
    ],
)
def test_a_loop_has_the_same_losses_on_one_rank_and_on_two(
    program: str, options: tuple[str, ...]
) -> None:
    command = [sys.executable, str(ELSEWHERE / f"{program}.py"), *options]
    alone, together = (_losses(*command, "--ranks", str(ranks)) for ranks in (1, 2))
    assert len(alone) == 5
    assert alone == together


def test_a_script_of_accelerate_has_the_same_losses_on_one_rank_and_on_two() -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    script = str(ELSEWHERE / "accelerate_script.py")
    alone, together = (_losses(*launch, "--num_processes", str(ranks), script) for ranks in (1, 2))
    assert len(alone) == 5
    assert alone == together


def test_the_notebook_goes_from_a_budget_to_a_picture(tmp_path: pathlib.Path) -> None:
    notebook = ELSEWHERE / "budget_to_plan.ipynb"
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        assert cell["cell_type"] == "markdown" or cell["outputs"] == []
    made = tmp_path / "made.ipynb"
    execute = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", str(notebook)]
    subprocess.run(
        [*execute, "--output-dir", str(tmp_path), "--output", made.name],
        capture_output=True,
        check=True,
    )
    cells = json.loads(made.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    texts = "".join("".join(output.get("text", "")) for output in outputs)
    assert "train " in texts
    assert " days" in texts
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
