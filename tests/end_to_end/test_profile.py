"""Tests of profiles through the command line, also in the lab: records, figures and traces."""

import json
import pathlib

import pytest

from paceline.records import Record
from tests import devices
from tests.end_to_end.test_communication import BIN, by_kind, require_lab, run

PACELINE = str(BIN / "paceline")
SMALL = [
    *("--model", "bytes-34M", "--num-layers", "2", "--d-model", "64", "--num-heads", "2"),
    *("--batch", "2", "--context", "32", "--json", "--device", devices.of_commands()),
]


def _require_parts(records: list[Record]) -> None:
    for record in by_kind(records, "timeline"):
        value = {name: metric.samples for name, metric in record.metrics.items()}
        parts = [
            value["compute_s"],
            value["contention_s"],
            value["exposed_communication_s"],
            value["idle_s"],
        ]
        for whole, *terms in zip(value["step_time_s"], *parts, strict=True):
            assert sum(terms) == pytest.approx(whole, rel=1e-6)
        if record.case["rank"] == 0:
            assert "reported_exposed_s" in value


@pytest.mark.slow
def test_strategies_are_traced_and_drawn(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "profile"
    records = run(
        PACELINE, "profile", "ddp", *SMALL, "--rounds", "3", "--out", str(out), cwd=tmp_path
    )
    timelines = by_kind(records, "timeline")
    assert [(r.case["strategy"], r.case["rank"]) for r in timelines] == [
        (strategy, rank) for strategy in ("naive", "flat", "overlapped", "ddp") for rank in (0, 1)
    ]
    _require_parts(records)
    assert len(by_kind(records, "prediction")) == 4
    flat = [r for r in timelines if r.case["strategy"] == "flat"]
    assert all(len(r.metrics["message_start_s"].samples) == 1 for r in flat)
    for record in timelines:
        # Messages in flight together each count their exposed time, so the sum may be larger.
        exposed = record.metrics["message_exposed_s"].samples
        assert sum(exposed) >= 0.999 * record.metrics["drawn_exposed_s"].value
    assert {path.name for path in out.iterdir()} == {
        "trace.json", "records.jsonl", "timelines.png", "timelines.svg",
    }  # fmt: skip
    analysed = run(PACELINE, "profile", "trace", str(out / "trace.json"), "--json", cwd=tmp_path)
    labels = {r.case["label"] for r in by_kind(analysed, "trace_step")}
    assert "flat" in labels
    kinds = {r.case["work"] for r in by_kind(analysed, "operator")}
    assert {"matmul", "optimizer"} <= kinds


@pytest.mark.slow
def test_profiles_work_in_the_lab(tmp_path: pathlib.Path) -> None:
    require_lab()
    lab = [PACELINE, "lab", "run", "--hosts", "2", "--rate", "50mbit", "--", PACELINE]
    arguments = ["--strategies", "flat", "--rounds", "3", "--out", str(tmp_path / "profile")]
    records = run(*lab, "profile", "ddp", *SMALL, *arguments, cwd=tmp_path)
    _require_parts(records)
    (first, _second) = by_kind(records, "timeline")
    assert first.case["link_rate_bits_per_s"] == 50e6
    # At this rate a flat step mostly waits, and the trace agrees with the container's report.
    exposed, reported = (
        first.metrics[name].value for name in ("exposed_communication_s", "reported_exposed_s")
    )
    assert exposed == pytest.approx(reported, rel=0.05)
    assert first.metrics["overlapped_communication_s"].value < 0.05 * exposed


def test_a_step_is_profiled(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "profile"
    arguments = ["--attention", "naive", "--phase", "train", "--out", str(out)]
    records = run(PACELINE, "profile", "step", *SMALL, *arguments, cwd=tmp_path)
    operators = by_kind(records, "operator")
    ranges = {record.case["range"] for record in operators}
    assert {
        "whole step", "forward", "backward", "optimizer",
        "attention_scores", "attention_softmax", "attention_values",
    } <= ranges  # fmt: skip
    flops = {
        record.case["range"]: record.metrics["flops"].value
        for record in operators
        if (record.case["work"], record.case["operator"]) == ("matmul", "all")
    }
    expected = {
        record.case["range"]: record.metrics["flops"].value
        for record in by_kind(records, "prediction")
        if record.case["predicts"] == "operator"
    }
    assert {name: flops[name] for name in expected} == pytest.approx(expected)
    assert set(expected) == {"forward", "backward"}
    (memory,) = by_kind(records, "memory_timeline")
    at_peak = {
        name: memory.metrics[f"{name}_at_peak_bytes"].value
        for name in (
            "parameters",
            "optimizer_state",
            "other",
            "gradients",
            "activations",
            "temporary",
        )
    }
    assert sum(at_peak.values()) == memory.metrics["peak_bytes"].value
    assert at_peak["optimizer_state"] >= 2 * at_peak["parameters"]
    places = [record.case["place"] for record in by_kind(records, "allocation")]
    assert any("paceline/models" in place or "paceline/kernels" in place for place in places)
    assert {path.name for path in out.iterdir()} == {
        "trace.json", "records.jsonl", "memory-timeline.png", "memory-timeline.svg",
    }  # fmt: skip
    events = json.loads((out / "trace.json").read_bytes())["traceEvents"]
    assert any(event["name"] == "paceline::attention_softmax" for event in events)
