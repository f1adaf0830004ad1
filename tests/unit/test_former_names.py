"""Files and commands with the strategy names of earlier versions are read as today's."""

import pathlib
import re
from typing import get_args

import msgspec
import pytest
from torch import nn

from paceline.core.errors import UsageError
from paceline.core.strategies import FORMER_NAMES, StrategyName, find_strategy, with_current_names
from paceline.loop.demo import read_outcome
from paceline.loop.directory import LoopDirectory
from paceline.parallel.strategies import apply_strategy
from paceline.records.store import RecordStore
from paceline.training.config import ParallelConfig
from paceline.training.toml_config import decode_config, encode_config, read_config

RESULTS = pathlib.Path(__file__).parents[2] / "results"
FORMER_WORD = re.compile(rb'"(?:[^"]*[ ,])?(bucketed|sharded_optimizer|sharded|fully_sharded)"')
REMOVED = ("torch_zero_view", "sharded_per_bucket")
BASE = """
out = "run"
model.preset = "bytes-6M"
data.sources = [{ place = "tokens", weight = 1.0 }]
"""
STORES = [
    path for path in sorted(RESULTS.rglob("*.jsonl")) if FORMER_WORD.search(path.read_bytes())
]
former = pytest.mark.parametrize(("former", "current"), FORMER_NAMES.items())


@former
def test_configs_and_flags_accept_former_names(former: str, current: str) -> None:
    assert find_strategy(former) == current
    assert ParallelConfig(strategy=former).strategy == current  # type: ignore[arg-type]
    config = decode_config(f'{BASE}[parallel]\nstrategy = "{former}"\n')
    assert config.parallel.strategy == current
    assert decode_config(BASE, (f"parallel.strategy={former}",)) == config
    assert decode_config(BASE, settings={"parallel": {"strategy": former}}) == config
    assert former not in encode_config(config).split('"')


def test_a_strategy_that_is_no_name_is_still_an_error() -> None:
    with pytest.raises(UsageError, match=r"parallel.strategy"):
        decode_config(BASE + "[parallel]\nstrategy = [1]\n")
    with pytest.raises(UsageError, match=r"did you mean 'fsdp' .* or 'torch_fsdp2'"):
        find_strategy("zero3")


def test_every_kind_of_committed_record_is_read() -> None:
    """No former name is left in a committed record, whatever its kind."""
    kinds = set()
    for path in STORES:
        lines = path.read_bytes().splitlines()
        for line, record in zip(lines, RecordStore(path).read(), strict=True):
            if FORMER_WORD.search(line):
                kinds.add(record.kind)
            case = msgspec.json.encode(record.case)
            assert not FORMER_WORD.search(case), (path, case)
            strategy = record.case.get("strategy", "none")
            assert strategy in (*get_args(StrategyName), *REMOVED), (path, strategy)
    assert kinds == {
        *("comparison", "construction", "ddp", "fault", "fuzz", "optimizer"),
        *("prediction", "timeline", "training_run"),
    }


def test_only_the_names_of_strategies_change() -> None:
    line = b'{"strategy":"torch_ddp","note":"sharded","subject":"sharded over two ranks"}'
    assert with_current_names(line) == line
    label = b'{"subject":"2 ranks, bucketed","strategy": "sharded"}'
    assert with_current_names(label) == b'{"subject":"2 ranks, ddp","strategy": "zero2"}'


def test_committed_directories_are_read() -> None:
    for name in ("training-run/config.toml", "demo/run/config.toml", "loop/run.toml"):
        assert (
            b'"' + read_config(RESULTS / name).parallel.strategy.encode() + b'"'
            not in (RESULTS / name).read_bytes()
        )
    for seed in ("seed-0", "seed-1", "seed-2"):
        layout = LoopDirectory(RESULTS / "loop" / seed).layout()
        assert layout is not None
        assert {each.strategy for each in layout.candidates} <= set(get_args(StrategyName))
    assert read_outcome(RESULTS / "demo").strategy == "zero2"


def test_a_wrapper_is_found_by_a_former_name() -> None:
    module = nn.Linear(2, 2)
    assert apply_strategy("none", module) is module
    with pytest.raises(UsageError, match="strategy 'zero1' has no buckets"):
        apply_strategy("sharded_optimizer", module, 25.0)  # type: ignore[arg-type]
