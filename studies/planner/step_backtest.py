"""Predicts and measures training steps on this machine, for the backtest of predictions.

    python -m studies.planner.step_backtest results/step-backtest.jsonl
    paceline plan backtest results/step-backtest.jsonl

For every placement (one rank, two ranks on loopback, two lab hosts with shaped links, which need
root) and every model, it calibrates, predicts, and only then measures. Appends calibration,
prediction and measurement records to the store. Takes about 35 minutes on two cores. With --ranks 4
it measures only the smallest model, with four ranks on loopback.
"""

import pathlib
import sys
import tempfile
import time

from studies.harness.study import run_paceline, study_parser

MODELS = ("bytes-6M", "bytes-34M", "words-44M")
BATCHES = ("2", "5")
# Larger models take ten minutes each on the slowest link.
LABS = {"2gbit": MODELS, "500mbit": MODELS[:1]}
STRATEGIES = (*("none", "naive", "flat", "overlapped", "ddp", "torch_ddp"), *("zero1", "zero2"))
ROUNDS = ("--warmup", "1", "--rounds", "5")


def main() -> None:
    """Measures every model at every placement."""
    parser = study_parser(__doc__)
    parser.add_argument("--ranks", choices=["4"], default=None)
    arguments = parser.parse_args()
    lab = ["lab", "run", "--hosts", "2"]
    places: list[tuple[list[str], list[str], tuple[str, ...]]] = [
        ([], ["--world-size", "1"], MODELS),
        ([], ["--world-size", "2"], MODELS),
        *(([*lab, "--rate", rate, "--"], [], models) for rate, models in LABS.items()),
    ]
    if arguments.ranks:
        places = [([], ["--world-size", arguments.ranks], MODELS[:1])]
    for launcher, ranks, models in places:
        for model in models:
            _measure(arguments.store, launcher, ranks, model)


def _measure(store: pathlib.Path, launcher: list[str], ranks: list[str], model: str) -> None:
    alone = ranks == ["--world-size", "1"]
    strategies = ["--strategies", *(("none",) if alone else STRATEGIES)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        calibration = str(pathlib.Path(directory) / "calibration.jsonl")
        shapes = ["--model", model, "--batch", *BATCHES]
        shapes += [*ranks, "--store", calibration]
        run_paceline("calibrate", *shapes, launcher=launcher)
        question = ["--calibration", calibration, "--model", model, "--batch", *BATCHES]
        run_paceline("plan", "step", *question, *strategies, "--store", str(store))
        with store.open("ab") as file:
            file.write(pathlib.Path(calibration).read_bytes())
    for batch in BATCHES:
        case = ["--model", model, "--batch", batch, *strategies, *ROUNDS, *ranks]
        run_paceline("bench", "ddp", *case, "--store", str(store), launcher=launcher)
    where = " ".join((*launcher, *ranks))
    print(f"{model} {where}: {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
