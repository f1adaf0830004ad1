"""Measures the speed and peak memory of analysing a synthetic trace of a given size.

    python scripts/trace_scale.py results/trace-scale.jsonl --gigabytes 2

The trace resembles torch's: nested operators with shapes, annotations, collectives on a separate
thread, several ranks, many steps. It is written to a temporary directory and analysed in a separate
process, whose peak resident memory the kernel reports. Appends one `trace_analysis` record to the
store.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from paceline.benchmarks.harness.records import measured, resolve_device
from paceline.core.units import GB
from paceline.parallel.ranks.hardware import describe_hardware
from paceline.records import RecordStore

_LAYERS = 48
_RANKS = 2
_REPETITIONS = 8
_OPERATORS = (
    ("aten::linear", [[512, 768], [768, 768]]),
    ("aten::softmax", [[4, 12, 128, 128]]),
    ("aten::mul", [[4, 128, 768], [4, 128, 768]]),
    ("aten::rms_norm", [[4, 128, 768]]),
)
_ANALYSE = """
import pathlib, resource, sys, time
from paceline.traces.analysis import analyse_trace
began = time.perf_counter()
analysis = analyse_trace(pathlib.Path(sys.argv[1]))
seconds = time.perf_counter() - began
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, analysis.num_events,
      len(analysis.steps))
"""


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


def main() -> int:
    """Measures and records one trace size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=pathlib.Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-trace-scale-") as directory:
        path = pathlib.Path(directory) / "trace.json"
        write_trace(path, round(arguments.gigabytes * GB))
        size = path.stat().st_size
        result = subprocess.run(
            [sys.executable, "-c", _ANALYSE, str(path)], check=True, capture_output=True, text=True
        )
    seconds, peak, num_events, num_steps = (float(text) for text in result.stdout.split())
    record = measured(
        "trace_analysis",
        {"size_bytes": size, **describe_hardware(resolve_device("cpu")).as_case()},
        {
            "time_s": seconds,
            "bytes_per_s": size / seconds,
            "resident_peak_bytes": peak,
            "num_events": num_events,
            "num_steps": num_steps,
        },
    )
    RecordStore(arguments.store).append(record)
    sys.stdout.write(f"{size / seconds / 1e6:.0f} MB/s, peak {peak / 1e6:.0f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
