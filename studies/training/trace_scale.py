"""Measures the speed and peak memory of analysing a synthetic trace of a given size.

    python -m studies.training.trace_scale results/trace-scale.jsonl --gigabytes 2

The trace resembles torch's: nested operators with shapes, annotations, collectives on a separate
thread, several ranks, many steps. It is written to a temporary directory and analysed in a separate
process, whose peak resident memory the kernel reports. Appends one `trace_analysis` record to the
store.
"""

import json
import pathlib
import sys
import tempfile
import time

from paceline.core.units import GB
from paceline.traces.analysis import analyse_trace
from studies.harness.records import append_record, machine_case
from studies.harness.study import in_fresh_process, resident_peak_bytes, study_parser

_LAYERS = 48
_RANKS = 2
_REPETITIONS = 8
_OPERATORS = (
    ("aten::linear", [[512, 768], [768, 768]]),
    ("aten::softmax", [[4, 12, 128, 128]]),
    ("aten::mul", [[4, 128, 768], [4, 128, 768]]),
    ("aten::rms_norm", [[4, 128, 768]]),
)


def step_events(rank: int, start_us: float) -> list[str]:
    """Returns the events of one step of one rank."""
    events: list[str] = []

    def add(
        category: str, name: str, start: float, duration: float, thread: int, **extra: object
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": thread}
        event |= {"ts": round(start_us + start, 3), "dur": duration, "args": extra}
        events.append(json.dumps(event))

    at = 0.0
    for layer in range(_LAYERS):
        for operator, dims in _OPERATORS * _REPETITIONS:
            inputs = {"Input Dims": dims, "External id": layer, "Sequence number": layer}
            add("cpu_op", operator, at, 90.5, 1, **inputs)
            add("cpu_op", operator.replace("linear", "mm"), at + 5, 80.25, 1, **inputs)
            at += 95
        add("user_annotation", "gloo:all_reduce", at, 300, 2, **{"External id": layer})
    add("user_annotation", "paceline::step", 0, at + 50, 1)
    return events


def write_trace(path: pathlib.Path, num_bytes: int) -> None:
    """Writes a trace of at least `num_bytes` bytes."""
    written = 0
    start_us = 0.0
    with path.open("w", encoding="utf-8") as file:
        names = []
        for rank in range(_RANKS):
            name = {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "args": {"name": f"rank {rank}"},
            }
            names.append(json.dumps(name))
        file.write('{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join(names))
        while written < num_bytes:
            for rank in range(_RANKS):
                text = ",\n" + ",\n".join(step_events(rank, start_us))
                file.write(text)
                written += len(text)
            start_us += 200_000
        file.write("\n]}\n")


def analyse(path: pathlib.Path) -> dict[str, float]:
    """Analyses a trace, and returns the cost."""
    began = time.perf_counter()
    analysis = analyse_trace(path)
    seconds = time.perf_counter() - began
    return {
        "time_s": seconds,
        "bytes_per_s": path.stat().st_size / seconds,
        "resident_peak_bytes": resident_peak_bytes(),
        "num_events": analysis.num_events,
        "num_steps": len(analysis.steps),
    }


def main() -> int:
    """Measures and records one trace size."""
    parser = study_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-trace-scale-") as directory:
        path = pathlib.Path(directory) / "trace.json"
        write_trace(path, round(arguments.gigabytes * GB))
        size = path.stat().st_size
        numbers = in_fresh_process(analyse, path)
    append_record(
        arguments.store, "trace_analysis", {"size_bytes": size, **machine_case()}, numbers
    )
    speed, peak = numbers["bytes_per_s"] / 1e6, numbers["resident_peak_bytes"] / 1e6
    print(f"{speed:.0f} MB/s, peak {peak:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
