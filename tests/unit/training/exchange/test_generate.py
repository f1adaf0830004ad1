"""Tests that ``paceline generate`` samples from the model, for a run and for its export."""

import json
import pathlib

import pytest
import torch

from paceline.cli.main import main
from paceline.models import TransformerLM
from tests.unit.training.exchange.small_runs import SHAPE, save_run

PROMPT = "So it goes. 你"


def _generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def _likeliest(model: TransformerLM, prompt: str, number: int) -> str:
    tokens = torch.tensor(list(prompt.encode()))
    for _ in range(number):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1].argmax()[None]])
    return bytes(tokens.tolist()).decode(errors="replace")


def test_it_says_what_the_model_says(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_run(tmp_path / "run", steps=(10, 20))
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    greedy = ("--prompt", PROMPT, "--tokens", "30", "--temperature", "0")
    text = _generate(capsys, run, *greedy)
    assert text == f"{_likeliest(model, PROMPT, 30)}\n"
    assert _generate(capsys, run, *greedy, "--step", "10") != text
    assert main(["checkpoint", "export", run, "--out", out]) == 0
    capsys.readouterr()
    assert _generate(capsys, out, *greedy) == text
    answer = json.loads(_generate(capsys, run, *greedy, "--json"))
    assert answer["prompt"] + answer["text"] + "\n" == text
    assert (answer["step"], answer["num_tokens"]) == (20, 30)


def test_chance_has_a_seed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run")
    drawn = [
        _generate(capsys, str(tmp_path / "run"), "--tokens", "20", "--top-k", "9", "--seed", seed)
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_continued_is_said(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert main(["generate", *arguments]) != 0
        return capsys.readouterr().err

    save_run(tmp_path / "run")
    run = str(tmp_path / "run")
    long = "x" * SHAPE.max_context_length
    assert "fills the model's context" in error(run, "--prompt", long)
    assert "no complete checkpoint" in error(str(tmp_path / "nowhere"))
    assert "--tokens 0" in error(run, "--tokens", "0")
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in error(run)
