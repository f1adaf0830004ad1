"""Measures layouts of four ranks, and reports the errors of the plan.

    python -m studies.parallel.layouts results/layouts.jsonl
    python -m studies.parallel.layouts results/layouts.jsonl --only-read

For every place (four ranks on loopback; two hosts of two ranks with shaped links, which need root)
and every model, it calibrates, measures all layouts in turn and predicts them. Appends `layout`
records and their predictions to the store; --only-read skips this. It then prints the errors of
step time, each prediction corrected by the other cases, the errors of memory, and the regret. The
regret is the relative extra time of the layout with the smallest predicted time over the fastest
measured one, median of the rounds. These predictions are corrected without the cases of the same
model at the same place.
"""

import pathlib
import tempfile

from paceline.records import Record, RecordStore
from studies.harness.study import run_paceline, study_parser
from studies.parallel.figures import choices, read_study, summary

# At least one layer for each of four stages; models with shorter steps run more rounds.
MODELS = {
    ("--model", "bytes-6M"): "15",
    ("--model", "bytes-34M", "--num-layers", "4"): "9",
    ("--model", "words-44M", "--num-layers", "4"): "5",
}
RATES = (None, "2gbit", "500mbit")
LAYOUTS = (
    *("replicate=4,micro=2", "shard=4,micro=2", "replicate=2,shard=2,micro=2"),
    *("pipeline=4,micro=1", "pipeline=2,replicate=2,micro=1"),
    "pipeline=2,interleave=2,replicate=2,micro=1",
    *("tensor=2,replicate=2,micro=4", "tensor=2,sp=1,shard=2,micro=4"),
    *("tensor=2,pipeline=2,micro=2", "context=2,replicate=2,micro=4"),
)


def main() -> None:
    """Measures, unless --only-read is given, and prints a summary."""
    parser = study_parser(__doc__)
    parser.add_argument("--only-read", action="store_true")
    arguments = parser.parse_args()
    if not arguments.only_read:
        for model, rounds in MODELS.items():
            with tempfile.TemporaryDirectory() as directory:
                calibration = pathlib.Path(directory) / "calibration.jsonl"
                # The two ranks of one host; `measure` calibrates all four over the link.
                calibrate([], model, calibration, "--world-size", "2")
                for rate in RATES:
                    measure(arguments.store, calibration, model, rate, rounds)
    summarise(list(RecordStore(arguments.store).read()))


def calibrate(
    launcher: list[str], model: tuple[str, ...], store: pathlib.Path, *ranks: str
) -> None:
    """Calibrates ranks on a model's micro-batch sizes."""
    batches = ["--batch", "1", "2", "4", "--time-limit-s", "25"]
    case = ["calibrate", *model, *batches, "--store", str(store)]
    run_paceline(*case, *ranks, launcher=launcher)


def measure(
    store: pathlib.Path,
    calibration: pathlib.Path,
    model: tuple[str, ...],
    rate: str | None,
    rounds: str,
) -> None:
    """Calibrates, measures and predicts one model at one place."""
    launcher, ranks = [], ["--world-size", "4"]
    if rate is not None:
        launcher = ["lab", "run", "--hosts", "2", "--ranks-per-host", "2", "--rate", rate, "--"]
        ranks = []
    calibrate(launcher, model, calibration, *ranks)
    case = [*model, "--batch-size", "8", "--layouts", *LAYOUTS, "--warmup", "1"]
    known = ["--rounds", rounds, "--calibration", str(calibration), "--store", str(store), *ranks]
    run_paceline("bench", "layout", *case, *known, launcher=launcher)


def summarise(records: list[Record]) -> None:
    """Prints errors of time and memory, and the regret of every model and place."""
    study = read_study(records)
    print(summary(study))
    for choice in choices(study):
        names = (
            f"{choice.chosen.labels['layout']} chosen, {choice.fastest.labels['layout']} fastest"
        )
        print(f"{' at '.join(choice.place)}: regret {choice.regret:.1%} ({names})")


if __name__ == "__main__":
    main()
