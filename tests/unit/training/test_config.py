"""What contradicts itself in a config is refused by name, before anything is built."""

import json
import pathlib

import pytest

from paceline.cli.main import main
from paceline.core.errors import UsageError
from paceline.training.toml_config import decode_config

RUN = """
out = "run"
[data]
sources = [{ place = "tokens" }]
"""
THEIRS = "model.hugging_face=gpt2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([THEIRS, "model.d_model=64"], r"model\.d_model changes a preset"),
        ([THEIRS, "model.activation_checkpointing=full"], r"model\.activation_checkpointing knows"),
        ([THEIRS, "model.compile_blocks=true"], r"model\.compile_blocks knows the blocks of"),
        ([THEIRS, "optimizer.name=muon"], r"optimizer\.name muon trains the matrices of"),
        (
            ["evaluation.sample_prompt=So", "evaluation.sequences=0"],
            r"evaluation\.sample_prompt is continued after each evaluation",
        ),
    ],
)
def test_contradictions_are_named(changes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode_config(RUN, changes)


def test_nothing_is_predicted_of_a_hugging_face_model(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = decode_config(RUN, [THEIRS])
    with pytest.raises(UsageError, match=r"predicted for Paceline's own model only"):
        _ = config.model.shape
    (tmp_path / "run.toml").write_text(RUN)
    dry_run = ["train", str(tmp_path / "run.toml"), "--set", THEIRS, "--dry-run"]
    assert main(dry_run) == 0
    output = capsys.readouterr().out
    assert 'hugging_face = "gpt2"' in output
    assert "memory and time: not known of a Hugging Face model" in output
    assert main([*dry_run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"] is None
