"""Runs the loop once per seed, and keeps its decisions, predictions and measurements.

    python -m studies.loop.loops results/loop --config run.toml --work loops --seeds 0 1 2

An interrupted loop resumes; a finished one is only copied. Writes to seed-N below the given
directory.
"""

import pathlib
import shutil

from paceline.loop.directory import LAYOUT, MODEL, OUTCOME, PAGE, SWEEP_ENTRIES
from studies.harness.study import run_paceline, study_parser

KEPT = (
    "loop.json",
    MODEL,
    LAYOUT,
    OUTCOME,
    SWEEP_ENTRIES,
    "sweep/runs.jsonl",
    "sweep/checks.jsonl",
)


def main() -> None:
    """Runs every loop and copies its small files, and the report page of the first loop."""
    parser = study_parser(__doc__, store=None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--budget", default="1e14")
    parser.add_argument("--exploration", default="1")
    parser.add_argument("--deadline", default="60min")
    arguments = parser.parse_args()
    for place, seed in enumerate(arguments.seeds):
        work = arguments.work / f"seed-{seed}"
        run_paceline(
            *("loop", str(arguments.config), "--budget", arguments.budget),
            *("--exploration", arguments.exploration, "--deadline", arguments.deadline),
            *("--seed", seed, "--out", str(work)),
        )
        for name in (*KEPT, *((PAGE,) if place == 0 else ())):
            kept = arguments.out / work.name / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(work / name, kept)


if __name__ == "__main__":
    main()
