"""Tests that the programs of examples/ and the README's Python run as printed."""

import pathlib
import re
import subprocess
import sys
from typing import get_args

import pytest
import torch

from paceline.core.presets import model_preset
from paceline.core.strategies import StrategyName
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader
from paceline.models import TransformerLM, next_token_loss
from paceline.records import RecordStore
from tests.unit.data.dataset_factory import random_documents, write_dataset
from tests.unit.record_factory import step_record

ROOT = pathlib.Path(__file__).parents[2]


def test_read_records(tmp_path: pathlib.Path) -> None:
    store = RecordStore(tmp_path / "records.jsonl")
    store.append(step_record(seconds=0.5))
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "read_records.py", store.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "small 1024.0\n"


def test_the_readmes_python(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout.splitlines()[0] == "128625408"


@pytest.mark.slow
def test_accumulate_and_clip_gives_the_same_losses_on_any_number_of_ranks() -> None:
    losses = [
        subprocess.run(
            [sys.executable, ROOT / "examples" / "accumulate_and_clip.py", "--ranks", str(ranks)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for ranks in (1, 3)
    ]
    assert len(losses[0].splitlines()) == 5
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_sharded_training_is_continued_by_another_number_of_ranks(tmp_path: pathlib.Path) -> None:
    def losses(ranks: int, steps: int, checkpoint: str | None) -> list[str]:
        options = [] if checkpoint is None else ["--checkpoint", str(tmp_path / checkpoint)]
        command = [sys.executable, ROOT / "examples" / "sharded_training.py"]
        return subprocess.run(
            [*command, "--ranks", str(ranks), "--steps", str(steps), *options],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()

    uninterrupted = losses(1, 6, None)
    assert len(uninterrupted) == 6
    assert losses(2, 3, "checkpoint") + losses(3, 6, "checkpoint") == uninterrupted


@pytest.mark.slow
def test_sites_of_the_outer_loop_learn_and_end_equal() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "outer_loop.py", "--site-ranks", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    *steps, last = result.stdout.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in steps]
    assert losses[-1] < losses[0] / 4
    assert last == "24 steps, sites are equal"


def test_long_context() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "long_context.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    backend, difference = result.stdout.splitlines()
    assert backend.startswith("sdpa: on CPUs")
    assert float(difference.rpartition(" ")[2]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [("ddp", "fsdp"), pytest.param(get_args(StrategyName)[1:], marks=pytest.mark.slow)],
)
def test_any_strategy_gives_the_same_losses(strategies: tuple[StrategyName, ...]) -> None:
    def losses(chosen: list[StrategyName], *options: str) -> set[str]:
        command = [sys.executable, ROOT / "examples" / "any_strategy.py", "--ranks", "2", *options]
        result = subprocess.run([*command, *chosen], capture_output=True, text=True, check=True)
        by_strategy = dict(line.split(": ") for line in result.stdout.splitlines())
        assert list(by_strategy) == chosen
        return set(by_strategy.values())

    (plain,) = losses([*strategies])
    assert len(plain.split()) == 4
    (clipped,) = losses([*strategies], "--max-norm", "0.1")
    assert clipped != plain


def test_batches_are_read_by_any_number_of_ranks(tmp_path: pathlib.Path) -> None:
    tokens = tmp_path / "tokens"
    write_dataset(tokens, random_documents(6000), shard_tokens=1000)
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "read_tokens.py", tokens],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"step {step}" for step in range(6)]
    config = LoaderConfig(
        sources=(SourceConfig(place=str(tokens)),), context_length=64, batch_size=12, seed=1
    )
    with TokenLoader(config) as alone:
        digests = [f"{next(alone).digest:016x}" for _ in range(6)]
    assert [line.rpartition(" ")[2] for line in lines] == digests


def test_search_layout_finds_one_and_says_why_not_another() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "search_layout.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *found, reason = result.stdout.splitlines()
    assert re.fullmatch(r"[\d,]+ layouts, [\d,]+ fit", first)
    assert found
    assert reason.startswith("why not tp=8? a step takes ")


@pytest.mark.slow
def test_a_layout_has_the_loss_and_the_norm_of_one_process() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "layout.py", "--ranks", "4"],
        capture_output=True,
        text=True,
        check=True,
    )
    torch.manual_seed(0)
    model = TransformerLM(model_preset("bytes-6M"))
    losses = []
    for data_rank in range(2):
        torch.manual_seed(1 + data_rank)
        tokens = torch.randint(256, (2, 65))
        losses.append(next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert result.stdout == f"loss {loss.item():.4f}, gradient norm {norm.item():.4f}\n"
