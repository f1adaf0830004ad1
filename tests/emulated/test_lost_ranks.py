"""A rank that dies or hangs in the middle of a step ends a run, and is named.

On an accelerator no wait of the host raises an error, and torch ends the process when a collective
exceeds its time. The run has to notice before that.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

from paceline.training.config import RunConfig
from paceline.training.toml_config import encode_config
from tests.distributed.small_runs import changed, small_run

STRATEGIES = ("ddp", "zero2", "fsdp")
_STEP = 4
"""Complete steps before the one in which rank 1 is lost."""
_LIMIT_S = 4.0
_SCENARIOS = """
import os, pathlib, signal, sys, time
import torch
from paceline.training import run as training_run
from paceline.training.launch import LaunchOptions, launch
from paceline.training.toml_config import read_config

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def stops():
    os.kill(os.getpid(), signal.SIGSTOP)

def sleeps():
    time.sleep(1000)

def losing(trouble, step):
    def build(config, layout, session):
        state = make(config, layout, session)
        num_passes = 0

        def begin(module, inputs, output):
            nonlocal num_passes
            num_passes += 1
            if session.rank == 1 and num_passes == step + 1:
                # The gradient of the first layer comes last: others have been sent by then.
                output.register_hook(lambda gradient: trouble())

        (embedding,) = (m for m in state.module.modules() if isinstance(m, torch.nn.Embedding))
        embedding.register_forward_hook(begin)
        return state

    return build

make = training_run.build
options = LaunchOptions(
    num_ranks=2, supervised=bool(int(sys.argv[2])), max_restarts=0, calibration=None,
    remembers=False,
    predict_final_loss=lambda config: None, report=print, guard=lambda rank: rank(),
)
for scenario in sys.argv[3:]:
    path, trouble = scenario.split(":")
    training_run.build = losing(globals()[trouble], int(sys.argv[1]))
    began = time.monotonic()
    try:
        code = launch(read_config(pathlib.Path(path)), options)
    except SystemExit as ended:  # Of ranks without a supervisor.
        code = ended.code
    print(code, time.monotonic() - began, flush=True)
    print("----", file=sys.stderr, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended."""

    exit_code: int
    seconds: float
    said: str


def _run(
    place: pathlib.Path, scenarios: Sequence[tuple[RunConfig, str]], *, is_supervised: bool = True
) -> list[Ended]:
    """Trains with each configuration and trouble, one after the other in one program."""
    words = []
    for number, (config, trouble) in enumerate(scenarios):
        path = place / f"{number}.toml"
        path.write_text(encode_config(config))
        words.append(f"{path}:{trouble}")
    result = subprocess.run(
        [sys.executable, "-c", _SCENARIOS, str(_STEP), str(int(is_supervised)), *words],
        capture_output=True,
        text=True,
        timeout=400,
    )
    told = result.stderr.split("----\n")
    ends = [line.split() for line in result.stdout.splitlines()]
    assert len(ends) == len(scenarios), result.stderr
    return [Ended(int(code), float(s), said) for (code, s), said in zip(ends, told, strict=False)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = small_run(tmp_path_factory.mktemp("lost"))
    return changed(run, "run", training={"steps": 8}, checkpoint={"every_steps": 99})


def _lost(config: RunConfig) -> list[str]:
    lines = (pathlib.Path(config.out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return [row["message"] for row in rows if row["kind"] == "event" and row["name"] == "lost"]


def test_a_rank_that_dies_is_named(config: RunConfig, tmp_path: pathlib.Path) -> None:
    runs = [changed(config, f"dies-{name}", parallel={"strategy": name}) for name in STRATEGIES]
    for ended in _run(tmp_path, [(run, "dies") for run in runs]):
        expected = f"rank 1 ended with exit code 137, in backward after step {_STEP}; given up"
        assert expected in ended.said
        assert ended.exit_code == 137


def _require_reported(run: RunConfig, ended: Ended, limit_s: float) -> None:
    expected = f"no step within {limit_s:g} s: rank 1 has not answered within 3 s"
    assert expected in ended.said
    assert "emulated device: watchdog" not in ended.said  # It would have ended the process.
    (event,) = _lost(run)
    assert event.startswith(expected)
    assert ended.exit_code == 75


@pytest.mark.slow
def test_a_rank_that_stops_is_named(config: RunConfig, tmp_path: pathlib.Path) -> None:
    watch = {"step_timeout_s": _LIMIT_S}
    runs = [
        changed(config, f"stops-{name}", parallel={"strategy": name}, watch=watch)
        for name in STRATEGIES
    ]
    for run, ended in zip(runs, _run(tmp_path, [(run, "stops") for run in runs]), strict=True):
        _require_reported(run, ended, _LIMIT_S)


@pytest.mark.slow
def test_the_timeout_of_collectives_names_the_rank(
    config: RunConfig, tmp_path: pathlib.Path
) -> None:
    limit_s = 2 * _LIMIT_S  # The ranks also have to find each other within it.
    run = changed(config, "default", parallel={"strategy": "zero2", "timeout_s": limit_s})
    (ended,) = _run(tmp_path, [(run, "stops")], is_supervised=False)
    _require_reported(run, ended, limit_s)


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named(config: RunConfig, tmp_path: pathlib.Path) -> None:
    watch = {"step_timeout_s": _LIMIT_S}
    runs = [
        changed(config, f"sleeps-{name}", parallel={"strategy": name}, watch=watch)
        for name in STRATEGIES
    ]
    for run, ended in zip(runs, _run(tmp_path, [(run, "sleeps") for run in runs]), strict=True):
        (event,) = _lost(run)
        assert f"rank 1 after step {_STEP}, in backward" in event
        assert "rank 1" in ended.said
        assert ended.exit_code == 75
