"""Trains alternatives to a loop with its budget, the FLOPs of its final run.

    python -m studies.loop.baselines out.jsonl loops/seed-0 --config run.toml --work baselines

A random search spreads the FLOPs over eight runs of random size and learning rate. The rule of
thumb spends all of them on one model with 20 tokens per parameter, at a learning rate of 1e-3.
Writes one row per run to the store. The same command resumes an interrupted comparison.
"""

import pathlib

import msgspec
import numpy as np

from paceline.core.host import threads_per_rank
from paceline.loop.directory import LoopDirectory
from paceline.loop.executors import LocalExecutor, make_task
from paceline.loop.sweep_design import PlannedRun, Rule, SweepSpec, find_shape, planned_run
from paceline.loop.sweep_directory import SweepDirectory
from paceline.scaling.model_shapes import rule_of_thumb_parameters
from paceline.training.toml_config import read_config
from studies.harness.study import study_parser

RANDOM, RULE = "random", "rule"
_NUM_RANDOM = 8
_SIZES = 10.0
"""Random sizes differ from the rule of thumb's by up to this factor, in both directions."""
_RATES = 3e-4, 3e-2
_USUAL_RATE = 1e-3
_AT_ONCE = 2


def main() -> None:
    """Trains the missing runs, and writes a row for every run."""
    parser = study_parser(__doc__)
    parser.add_argument("loop", type=pathlib.Path, help="directory of a loop that has ended")
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    loop = LoopDirectory(arguments.loop)
    outcome = loop.outcome()
    if outcome is None:
        parser.error(f"{arguments.loop} has not ended")
    spec = loop.spec().sweep
    flops = outcome.run_flops
    # Longest run first, so that no core idles at the end.
    runs = [_rule_run(spec, flops), *_random_runs(spec, flops / _NUM_RANDOM)]
    directory = SweepDirectory(arguments.work)
    state = directory.begin(spec, read_config(arguments.config))
    directory.keep(msgspec.structs.replace(state, runs=tuple(runs)))
    _make(directory, runs)
    rows = [msgspec.json.encode(row) + b"\n" for row in directory.rows(RANDOM, RULE)]
    arguments.store.write_bytes(b"".join(rows))


def _random_runs(spec: SweepSpec, flops: float) -> list[PlannedRun]:
    """Returns runs of random sizes and learning rates, both log-uniform."""
    generator = np.random.default_rng(spec.seed)
    middle = rule_of_thumb_parameters(flops)
    runs: list[PlannedRun] = []
    while len(runs) < _NUM_RANDOM:
        size = middle * _SIZES ** generator.uniform(-1, 1)
        rate = float(np.exp(generator.uniform(*np.log(_RATES))))
        shape = find_shape(spec, size)
        if shape is None:
            continue
        name = f"{RANDOM}-{len(runs) + 1:02d}"
        run = planned_run(spec, name, RANDOM, shape, flops, Rule())
        if spec.most_tokens is None or run.tokens <= spec.most_tokens:
            runs.append(_with_rate(run, rate))
    return sorted(runs, key=lambda run: -run.steps)


def _rule_run(spec: SweepSpec, flops: float) -> PlannedRun:
    """Returns a run of the model with 20 tokens per parameter."""
    shape = find_shape(spec, rule_of_thumb_parameters(flops))
    if shape is None:
        raise SystemExit(f"no model has 20 tokens per parameter with {flops:.3g} FLOPs")
    return _with_rate(planned_run(spec, RULE, RULE, shape, flops, Rule()), _USUAL_RATE)


def _with_rate(run: PlannedRun, rate: float) -> PlannedRun:
    factor = run.learning_rate_factor * rate / run.learning_rate
    return msgspec.structs.replace(run, learning_rate=rate, learning_rate_factor=factor)


def _make(directory: SweepDirectory, runs: list[PlannedRun]) -> None:
    tasks = [
        make_task(run.name, directory.run_config(run), ranks=1, threads=threads_per_rank(_AT_ONCE))
        for run in directory.open_runs(runs)
    ]
    for label in LocalExecutor(_AT_ONCE).run(tasks):
        print(label, flush=True)


if __name__ == "__main__":
    main()
