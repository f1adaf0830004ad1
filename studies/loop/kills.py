"""Kills a loop (-9) at random moments, resumes it, and compares it with an uninterrupted loop.

    python -m studies.loop.kills kills.jsonl loops/seed-0 --config run.toml --work killed

Appends one `fault` record to the store.
"""

import collections
import os
import pathlib
import random
import subprocess
import sys

from paceline.loop.directory import LoopDirectory
from paceline.loop.sweep_directory import ENDED
from paceline.training.run_directory import audit_run
from studies.harness.records import FaultRecords
from studies.harness.study import PACELINE, study_parser
from studies.loop.figures import heldout_loss

_STAGES = ("calibrate", "sweep", "plan", "train")
_FINISHED = '"name":"finished"'


def main() -> None:
    """Kills and resumes the loop until it ends; records the comparison."""
    parser = study_parser(__doc__)
    parser.add_argument(
        "uninterrupted", type=pathlib.Path, help="directory of a loop that has ended"
    )
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--longest-s", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    uninterrupted, killed = LoopDirectory(arguments.uninterrupted), LoopDirectory(arguments.work)
    spec = uninterrupted.spec()
    command = [*PACELINE, "loop", str(arguments.config)]
    command += ["--budget", f"{spec.budget:g}", "--exploration", f"{spec.exploration:g}"]
    command += ["--seed", str(spec.seed), "--out", str(killed.path)]
    command += ["--at-once", str(uninterrupted.sweep.state().at_once or 1)]
    history = killed.path.with_name(f"{killed.path.name}-history.jsonl")
    environment = os.environ | {"PACELINE_HISTORY": str(history)}
    chance = random.Random(arguments.seed)
    moments, stages = [], []
    for _ in range(arguments.kills):
        moments.append(chance.uniform(5.0, arguments.longest_s))
        _kill_after(command, environment, moments[-1])
        stages.append(_stage(killed))
        print(f"killed after {moments[-1]:.0f} s: {stages[-1]}", flush=True)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    record(arguments.store, uninterrupted, killed, moments, stages, arguments.seed)


def _kill_after(command: list[str], environment: dict[str, str], seconds: float) -> None:
    """Starts the loop and kills it after `seconds`, in which it must not end by itself."""
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        code = running.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
    else:
        sys.exit(f"the loop exited with {code} before it was killed; give a smaller --longest-s")


def _stage(loop: LoopDirectory) -> str:
    """Returns the stage at which the loop was killed."""
    if loop.layout() is not None:
        return "train"
    if loop.model() is not None:
        return "plan"
    return "sweep" if loop.sweep.exists else "calibrate"


def record(
    store: pathlib.Path,
    uninterrupted: LoopDirectory,
    killed: LoopDirectory,
    moments: list[float],
    stages: list[str],
    seed: int,
) -> None:
    """Compares both loops and appends the record; any difference counts every kill as lost."""
    expected, found = _facts(uninterrupted), _facts(killed)
    runs = _runs(killed)
    twice = sum((run / "metrics.jsonl").read_text().count(_FINISHED) > 1 for run in runs)
    wrong = sum(len(audit_run(run)[1]) for run in runs)
    counts = collections.Counter(stages)
    is_lost = bool(found != expected or twice or wrong)
    FaultRecords(store).add(
        "loop",
        "SIGKILL",
        len(stages),
        len(stages) if is_lost else 0,
        case={"seed": seed},
        metrics={
            "killed_after_s": moments,
            **{f"kills_{stage}": counts[stage] for stage in _STAGES},
            "runs_finished_twice": twice,
            "samples_wrong": wrong,
            **found,
            **{f"uninterrupted_{name}": value for name, value in expected.items()},
        },
    )


def _facts(loop: LoopDirectory) -> dict[str, float]:
    """Returns what a kill must not change."""
    model, outcome = loop.model(), loop.outcome()
    assert model is not None
    assert outcome is not None
    purposes = {run.purpose for run in loop.sweep.state().runs}
    losses = [row.final_loss or 0.0 for row in loop.sweep.rows(*purposes)]
    return {
        "num_runs": len(_runs(loop)),
        "sum_of_sweep_losses": sum(sorted(losses)),
        "parameters": model.run.parameters,
        "tokens": model.run.tokens,
        "predicted_loss": model.loss.value,
        "heldout_loss": heldout_loss(outcome),
    }


def _runs(loop: LoopDirectory) -> list[pathlib.Path]:
    """Returns the directories of the small runs, pilot runs and the final run."""
    return [path.parent for path in loop.path.glob(f"**/{ENDED}")]


if __name__ == "__main__":
    main()
