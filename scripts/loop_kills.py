"""Kills a loop (-9) at random moments, and compares what it comes to with a loop left in peace.

python scripts/loop_kills.py loops/seed-0 --config run.toml --work killed --store kills.jsonl
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys

from paceline.records import Metric, Record, RecordStore, capture_environment
from paceline.training.audit import audit_run
from paceline.workflows.loop.directory import MODEL, LoopDirectory
from paceline.workflows.sweep.directory import ENDED

_FINISHED = '"name":"finished"'


def main() -> None:
    """Kills, resumes, compares; writes a row for every kill and one for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peaceful", type=pathlib.Path, help="directory of a loop that has ended")
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--store", type=pathlib.Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--longest-s", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    peaceful, killed = LoopDirectory(arguments.peaceful), LoopDirectory(arguments.work)
    question = peaceful.question()
    command = [sys.executable, "-m", "paceline", "loop", str(arguments.config)]
    command += ["--budget", f"{question.budget:g}", "--exploration", f"{question.exploration:g}"]
    command += ["--seed", str(question.seed), "--out", str(killed.path)]
    command += ["--at-once", str(peaceful.sweep.state().at_once or 1)]
    history = killed.path.with_name(f"{killed.path.name}-history.jsonl")
    environment = os.environ | {"PACELINE_HISTORY": str(history)}
    chance, store = random.Random(arguments.seed), RecordStore(arguments.store)
    machine = capture_environment()
    for number in range(1, arguments.kills + 1):
        after_s = chance.uniform(5.0, arguments.longest_s)
        lived = _kill_after(command, environment, after_s)
        case = {"number": number, "stage": _stage(killed), "seed": arguments.seed}
        metrics = {"after_s": Metric(value=after_s), "num_ended": Metric(value=_num_ended(killed))}
        store.append(
            Record(
                kind="loop_kill",
                case=case | {"ended_before": lived},
                environment=machine,
                metrics=metrics,
                outcome="ok",
            )
        )
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    store.append(
        Record(
            kind="loop_after_kills",
            case={"seed": arguments.seed},
            environment=machine,
            metrics={name: Metric(value=value) for name, value in _compare(peaceful, killed)},
            outcome="ok",
        )
    )


def _kill_after(command: list[str], environment: dict[str, str], seconds: float) -> bool:
    """Starts the loop and kills it; returns whether it had ended by itself."""
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        running.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGKILL)
        running.wait()
        return False
    return True


def _stage(loop: LoopDirectory) -> str:
    """Returns what the loop was at."""
    if loop.outcome() is not None:
        return "compared"
    if loop.layout() is not None:
        return "train"
    if loop.model() is not None:
        return "plan"
    return "sweep" if loop.sweep.exists else "calibrate"


def _num_ended(loop: LoopDirectory) -> int:
    return len(list(loop.path.glob(f"**/{ENDED}")))


def _compare(peaceful: LoopDirectory, killed: LoopDirectory) -> list[tuple[str, float]]:
    runs = [path.parent for path in killed.path.glob(f"**/{ENDED}")]
    finished = [(run / "metrics.jsonl").read_text().count(_FINISHED) for run in runs]
    wrong = sum(len(audit_run(run)[1]) for run in runs)
    return [
        ("num_runs", len(runs)),
        ("num_runs_in_peace", _num_ended(peaceful)),
        ("most_endings_of_a_run", max(finished)),
        ("samples_wrong", wrong),
        ("same_model", float(_model(peaceful) == _model(killed))),
        ("same_layout", float(_chosen(peaceful) == _chosen(killed))),
        ("same_sweep_losses", float(_sweep_losses(peaceful) == _sweep_losses(killed))),
        ("heldout_loss_in_peace", _loss(peaceful)),
        ("heldout_loss", _loss(killed)),
    ]


def _model(loop: LoopDirectory) -> bytes:
    return (loop.path / MODEL).read_bytes()


def _chosen(loop: LoopDirectory) -> tuple[int, str]:
    """Returns what times have decided, which differ from day to day themselves."""
    layout = loop.layout()
    assert layout is not None
    return layout.chosen.ranks, layout.chosen.strategy


def _sweep_losses(loop: LoopDirectory) -> dict[str, float | None]:
    runs = loop.sweep.state().runs
    return {row.name: row.final_loss for row in loop.sweep.rows(*{run.purpose for run in runs})}


def _loss(loop: LoopDirectory) -> float:
    outcome = loop.outcome()
    assert outcome is not None
    (loss,) = [each.measured for each in outcome.entries if each.quantity == "heldout_loss"]
    return loss


if __name__ == "__main__":
    main()
