"""Tests that directories of earlier versions are still read."""

import json
import pathlib

import msgspec
import pytest

from paceline.loop.directory import SWEEP_ENTRIES, LoopDirectory
from paceline.loop.sweep_directory import SweepDirectory, read_result
from paceline.predict.history import HistoryEntry
from tests.unit.loop.fake_runs import BASE, SPEC

LOOPS = pathlib.Path(__file__).parents[3] / "results" / "loop"


@pytest.mark.parametrize(
    "path", [each.parent for each in sorted(LOOPS.rglob("loop.json"))], ids=lambda path: path.name
)
def test_committed_loops_are_read(path: pathlib.Path) -> None:
    loop = LoopDirectory(path)
    assert loop.spec().sweep.target == loop.spec().budget > 0
    model, layout, outcome = loop.model(), loop.layout(), loop.outcome()
    assert model is not None
    assert layout is not None
    assert outcome is not None
    assert outcome.run_flops == model.run.flops
    entries = (path / SWEEP_ENTRIES).read_bytes()
    assert msgspec.json.decode(entries, type=tuple[HistoryEntry, ...])


def test_a_sweep_of_an_earlier_version_is_read(tmp_path: pathlib.Path) -> None:
    question = {
        "target": SPEC.target,
        "largest": SPEC.largest,
        "vocab_size": SPEC.vocab_size,
        "context_length": SPEC.context_length,
        "most_tokens": SPEC.most_tokens,
        "seed": SPEC.seed,
    }
    state = {"question": question, "at_once": 2, "runs": [], "is_refined": False}
    (tmp_path / "sweep.json").write_text(json.dumps(state))
    sweep = SweepDirectory(tmp_path)
    assert sweep.begin(SPEC, BASE).spec == SPEC
    sweep.keep(sweep.state())
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written == {**state, "question": {**question, "ladder": None}}
    (tmp_path / "ended.json").write_text('{"outcome": "failed", "reason": "x", "time_s": 1.0}')
    result = read_result(tmp_path)
    assert result is not None
    assert (result.outcome, result.reason) == ("failed", "x")
