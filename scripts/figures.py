"""Generates the tables and figures of the docs from committed records and the hardware table.

    python scripts/figures.py

Studies have programs that make their own tables and figures, which this one runs at the end. A test
compares all tables with the committed files, so that docs and records stay consistent.
"""

import io
import json
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING

from docs_diagrams import plot_stages
from docs_pages import benchmarks, gallery
from rich.console import Console

from paceline.accounting import count_parameters, model_state_bytes, step_memory
from paceline.accounting.collectives import ring_time_s, tree_all_reduce_time_s
from paceline.core import BatchShape, model_preset, precision_preset
from paceline.core.hardware import known_devices
from paceline.core.strategies import StrategyName
from paceline.core.units import GB, GIB, format_decimal
from paceline.data.inspect import DocumentLengths
from paceline.lab.chaos import FAULT
from paceline.loop.demo import draw_demo
from paceline.planner.goodput.options import LLAMA3_DEVICE_INTERVAL_H, LLAMA3_EFFECTIVE
from paceline.planner.goodput.scenario import best_interval_s, goodput, interruption_interval_s
from paceline.planner.goodput.simulate import GOODPUT, REPLAY
from paceline.records import Record, RecordStore, latest_per_case
from paceline.records.kinds import PREDICTION
from paceline.reports.plots.attention import plot_tiles
from paceline.reports.plots.registry import draw
from paceline.reports.plots.reliability import plot_chaos
from paceline.reports.plots.strategies import plot_designs
from paceline.reports.plots.style import dark, save_figure
from paceline.reports.plots.training_run import plot_document_lengths, plot_losses, plot_phases
from paceline.reports.tables.measurements import implementations_table, kernels_table
from paceline.reports.tables.predictions import with_predictions
from paceline.reports.tables.profile import (
    attention_table,
    flops_table,
    memory_table,
    operator_table,
    work_table,
)
from paceline.reports.tables.reliability import (
    chaos_table,
    gains_table,
    goodput_table,
    replay_table,
)
from paceline.reports.tables.table import Table, View, records_table, render_markdown
from paceline.reports.training_run import read_run
from paceline.training.panel import RunPanel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EXPOSED = "exposed_communication_s"

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"
TRAINING_RUN = RESULTS / "training-run"
TABLES = ROOT / "docs" / "generated"
IMAGES = ROOT / "docs" / "images"
STUDIES = ("data", "loop", "parallel", "planner", "reliability", "scaling", "training")
"""Folders of studies/ with a program `figures.py`."""

# For each table: its store, kind of record, and view.
TABLE_SOURCES: dict[str, tuple[str, str, View]] = {
    "step-sizes": ("step-sizes", "step", "time"),
    "step-memory": ("step-sizes", "step", "memory"),
    "step-warmup": ("step-warmup", "step", "time"),
    "step-precision": ("step-precision", "step", "time"),
    "step-context": ("step-context", "step", "time"),
    "attention-naive": ("attention-naive", "attention", "time"),
    "attention-overhead": ("attention-overhead", "comparison", "time"),
    "harness-overhead": ("harness-overhead", "comparison", "time"),
    "communication-lab": ("communication-lab", "comm", "time"),
    "communication-lab-fit": ("communication-lab", "collective_fit", "time"),
    "communication-loopback": ("communication-loopback", "comm", "time"),
    "communication-loopback-fit": ("communication-loopback", "collective_fit", "time"),
    "communication-overhead": ("communication-overhead", "comparison", "time"),
    "ddp-2gbit": ("ddp-2gbit", "ddp", "time"),
    "ddp-memory": ("ddp-2gbit", "ddp", "memory"),
    "ddp-1gbit": ("ddp-1gbit", "ddp", "time"),
    "ddp-200mbit": ("ddp-200mbit", "ddp", "time"),
    "ddp-unshaped": ("ddp-unshaped", "ddp", "time"),
    "ddp-loopback": ("ddp-loopback", "ddp", "time"),
    "ddp-compile": ("ddp-compile", "ddp", "time"),
    "sharding-loopback": ("sharding-loopback", "ddp", "time"),
    "sharding-1gbit": ("sharding-1gbit", "ddp", "time"),
    "sharding-1gbit-4-hosts": ("sharding-1gbit-4-hosts", "ddp", "time"),
    "sharding-steps-memory": ("sharding-loopback", "ddp", "memory"),
    "sharding-memory": ("sharding-memory", "optimizer", "time"),
    "sharding-exchange": ("sharding-exchange", "comm", "time"),
    "profile-ddp": ("profile-ddp", "timeline", "time"),
    "train-overhead": ("train-overhead", "comparison", "time"),
    "checkpoint-stall": ("checkpoint-stall", "comparison", "time"),
    "trace-scale": ("trace-scale", "trace_analysis", "time"),
    "store-latency": ("store-latency", "rendezvous", "time"),
    "watch-overhead": ("watch-overhead", "comparison", "time"),
    "elastic-overhead": ("elastic-overhead", "comparison", "time"),
    "layout-overhead": ("layout-overhead", "comparison", "time"),
    "layout-exposed": ("pipelines", "layout_trace", "time"),
    "pipelines": ("pipelines", "pipeline", "time"),
    "pipelines-large": ("pipelines-large", "pipeline", "time"),
}
# For each figure: its store and kind of plot.
PICTURE_SOURCES = {
    "step-time": ("step-sizes", "step-time"),
    "step-context": ("step-context", "step-time"),
    "warmup": ("step-warmup", "warmup"),
    "precision": ("step-precision", "precision"),
    "attention-time": ("attention-naive", "attention-time"),
    "attention-memory": ("attention-naive", "attention-memory"),
    "attention-flash-time": ("attention-flash", "attention-time"),
    "attention-flash-memory": ("attention-flash", "attention-memory"),
    "communication-lab": ("communication-lab", "communication"),
    "communication-loopback": ("communication-loopback", "communication"),
    "ddp-2gbit": ("ddp-2gbit", "strategies"),
    "ddp-bucket-size": ("ddp-2gbit", "bucket-size"),
    "sharding-1gbit": ("sharding-1gbit", "strategies"),
    "sharding-memory": ("sharding-memory", "optimizer-memory"),
    "profile-timelines": ("profile-ddp", "timelines"),
    "profile-memory": ("profile-step", "memory-timeline"),
    "goodput": ("goodput", "goodput"),
    "pipelines": ("pipelines", "pipelines"),
}

# Tables that are not a plain view of a store, by store; those of studies included.
OTHER_TABLES = {
    "attention-flash": ("attention-flash",),
    "kernels": ("kernels",),
    "profile-step": (
        *("profile-work-forward", "profile-work-training", "profile-operators-forward"),
        *("profile-operators-backward", "profile-attention", "profile-flops"),
        "profile-allocations",
    ),
    "profile-memory": ("profile-memory",),
    "data-loader": ("data-loader", "data-resume"),
    "data-prepare": ("data-prepare",),
    "train-continue": ("train-continue",),
    "step-backtest": ("step-backtest",),
    "calibration-repeats": ("calibration-repeats",),
    "scaling-course": ("scaling-course",),
    "scaling-porian": ("scaling-porian",),
    "scaling-studies": ("scaling-coverage", "scaling-warnings", "scaling-design"),
    "scaling-speed": ("scaling-speed",),
    "chaos": ("chaos",),
    "plan-search": (
        "plan-search",
        "plan-search-nvidia",
        "plan-search-llama3",
        "plan-search-100000",
    ),
    "plan-search-experts": ("plan-search-experts", "plan-search-experts-nvidia"),
    "plan-search-speed": ("plan-search-speed",),
    "kills": ("kills", "recovery", "reliability"),
    "replicas": ("replicas",),
    "hook-cost": ("hook-cost",),
    "layouts": ("layouts", "layout-times"),
    "layout-scale": ("layout-scale",),
    "planner-unseen": ("planner-unseen", "planner-after-runs"),
    "planner-experts": ("planner-experts",),
    "planner-validation": ("planner-accuracy", "planner-regret", "planner-ablation"),
    "goodput": ("goodput", "goodput-gains", "goodput-gains-measured", "goodput-replay"),
}
# Diagrams, which need no records.
SCHEMES = {
    "attention-tiles": plot_tiles,
    "data-parallel-designs": plot_designs,
    "sharding-stages": plot_stages,
}


def read(name: str) -> list[Record]:
    """Returns the newest record of each case of a committed store."""
    return latest_per_case(RecordStore(RESULTS / f"{name}.jsonl").read())


def hardware_tables() -> str:
    """Returns a table of device specifications and a table of their sources."""
    formats = ("bfloat16", "float16", "tfloat32", "float32", "float8")
    headers = ("device", *formats, "memory", "bandwidth", "links, one direction")
    lines = [f"| {' | '.join(headers)} |", f"| {' | '.join('---' for _ in headers)} |"]
    sources = ["| device | figure | source |", "| --- | --- | --- |"]
    for device in known_devices():
        peaks = [
            format_decimal(device.peak_flops[dtype].value, "FLOP/s")
            if dtype in device.peak_flops
            else "-"
            for dtype in formats
        ]
        links = "; ".join(
            f"{link.name} {format_decimal(link.bytes_per_s.value, 'B/s')}" for link in device.links
        )
        memory = f"{device.memory_bytes.value / GB:.0f} GB"
        bandwidth = format_decimal(device.memory_bytes_per_s.value, "B/s")
        lines.append(
            f"| `{device.name}` | {' | '.join(peaks)} | {memory} | {bandwidth} | {links} |"
        )
        figures = {
            **device.peak_flops,
            "memory": device.memory_bytes,
            "bandwidth": device.memory_bytes_per_s,
            **{link.name: link.bytes_per_s for link in device.links},
        }
        by_source: dict[str, list[str]] = {}
        for name, figure in figures.items():
            by_source.setdefault(figure.source, []).append(name)
        for source, names in by_source.items():
            sources.append(f"| `{device.name}` | {', '.join(names)} | {source} |")
    return "\n".join([*lines, "", "### Where each figure is stated", "", *sources]) + "\n"


def predictions(store: str) -> str:
    """Returns a table of predicted and measured exposed communication by bucket size."""
    measured = {
        record.case["bucket_size_mb"]: record.metrics[_EXPOSED].value
        for record in read(store)
        if record.kind == "ddp" and record.case["strategy"] == "ddp"
    }
    headers = ("bucket size", "messages", "predicted exposed (ms)", "measured exposed (ms)")
    lines = [f"| {' | '.join(headers)} |", f"| {' | '.join('---' for _ in headers)} |"]
    for record in read(store):
        if record.kind == PREDICTION:
            size = record.case["bucket_size_mb"]
            seen = f"{measured[size] * 1e3:.1f}" if size in measured else "-"
            lines.append(
                f"| {size:g} MiB | {record.metrics['num_messages'].value:.0f} "
                f"| {record.metrics[_EXPOSED].value * 1e3:.1f} | {seen} |"
            )
    return "\n".join(lines) + "\n"


# Subjects of the two profiled steps.
FORWARD_ONLY = "small, batch 4, context 256, float32, naive attention, forward"
TRAINING = "small, batch 4, context 256, float32, naive attention, train"


def profile_tables() -> dict[str, Table]:
    """Returns the tables that answer the courses' profiling questions."""
    steps = read("profile-step")
    largest = [
        record
        for record in steps
        if record.kind == "allocation" and record.case["subject"] == TRAINING
    ]
    return {
        "profile-work-forward": work_table(steps, FORWARD_ONLY),
        "profile-work-training": work_table(steps, TRAINING),
        "profile-operators-forward": operator_table(steps, FORWARD_ONLY, "forward"),
        "profile-operators-backward": operator_table(steps, TRAINING, "backward"),
        "profile-attention": attention_table(steps, FORWARD_ONLY),
        "profile-flops": flops_table(steps),
        "profile-memory": memory_table([*read("profile-memory"), *steps]),
        "profile-allocations": records_table(largest),
    }


def _table(records: list[Record], kind: str, view: View) -> Table:
    chosen = [record for record in records if record.kind == kind]
    return records_table(with_predictions(chosen, records), view)


_STAGES: tuple[StrategyName, ...] = ("torch_ddp", "zero1", "zero2", "fsdp")


def models_memory() -> str:
    """Returns a table of the courses' models: peak memory by stage, predicted and measured."""
    measured = {
        (record.case["model"], record.case["strategy"]): record.metrics["peak_before_step_bytes"]
        for record in read("sharding-memory")
        if record.kind == "optimizer" and record.outcome == "ok"
    }
    batch = BatchShape(num_sequences=4, context_length=128)
    lines = [
        f"| model | parameters | ranks | {' | '.join(_STAGES)} |",
        f"| --- | --- | --- | {' | '.join('---' for _ in _STAGES)} |",
    ]
    for model in ("small", "medium", "large", "xl", "2.7B"):
        shape = model_preset(model)
        for num_ranks in (2, 8, 64):
            cells = []
            for strategy in _STAGES:
                memory = step_memory(shape, batch, precision_preset("float32"), strategy, num_ranks)
                seen = measured.get((model, strategy)) if num_ranks == 2 else None
                beside = "" if seen is None else f" (measured {seen.value / GIB:.2f})"
                cells.append(f"{memory['before_step'].total / GIB:.2f}{beside}")
            total = count_parameters(shape).total
            lines.append(f"| {model} | {total:,} | {num_ranks} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_lengths() -> "Figure":
    """Draws the document lengths of the worked example."""
    shown = json.loads((RESULTS / "data-corpus.json").read_text(encoding="utf-8"))
    lengths = DocumentLengths(**{**shown["lengths"], "counts": tuple(shown["lengths"]["counts"])})
    return plot_document_lengths(lengths, "the corpus of the worked example", 2048)


def training_panel() -> str:
    """Returns the terminal panel of the committed run after two thirds of its steps."""
    run = read_run(TRAINING_RUN)
    panel = RunPanel("run", run.expected)
    for row in run.rows:
        if row.step <= run.expected.num_steps * 2 // 3:
            panel.log(row)
    console = Console(file=io.StringIO(), width=96)
    with console.capture() as captured:
        console.print(panel)
    return f"```text\n{captured.get()}```\n"


DRAWN = {
    **SCHEMES,
    "data-lengths": draw_lengths,
    "chaos": lambda: plot_chaos([each for each in read("chaos") if each.case["num_hosts"] == 0]),
    "demo": lambda: draw_demo(RESULTS / "demo"),
    "demo-dark": lambda: dark(lambda: draw_demo(RESULTS / "demo")),
    "training-loss": lambda: plot_losses(read_run(TRAINING_RUN)),
    "training-phases": lambda: plot_phases(read_run(TRAINING_RUN)),
}
"""Figures of this program that are not a plot of one store."""

DRAWN_FROM = {
    **{name: store for name, (store, _plot) in PICTURE_SOURCES.items()},
    **dict.fromkeys(("loop-target", "loop-errors"), "loop"),
    **dict.fromkeys(("training-loss", "training-phases"), "training-run"),
    **dict.fromkeys(("scaling-profiles", "scaling-laws"), "scaling-course"),
    **dict.fromkeys(("scaling-surface", "scaling-residuals"), "scaling-course"),
    **{
        name: name
        for name in ("chaos", "planner-memory", "planner-unseen", "scaling-porian", "step-backtest")
    },
    "data-lengths": "data-corpus",
    "demo": "demo",
    "layouts-backtest": "layouts",
    "plan-front": "plan-search",
    "planner-accuracy": "planner-validation",
}
"""The file or directory of results/ that each figure shows, those of studies included."""


def scale_by_ranks() -> str:
    """Returns a table of memory, communication and goodput by number of ranks, from formulas."""
    shape = model_preset("llama3-8B")
    precision = precision_preset("bfloat16")
    gradient_bytes = 4 * count_parameters(shape).total
    line = {"latency_s": 10e-6, "bytes_per_s": 50e9}
    # The failure rate is that of a published run: 16,384 devices, 54 days, 419 interruptions.
    headers = (
        *("ranks", *(f"{strategy} (GiB)" for strategy in _STAGES)),
        *("ring (s)", "of it latency (s)", "tree (s)", "hours between failures", "goodput"),
    )
    lines = [f"| {' | '.join(headers)} |", f"| {' | '.join('---' for _ in headers)} |"]
    for num_ranks in (8, 64, 512, 4096):
        held = []
        for strategy in _STAGES:
            states = model_state_bytes(shape, precision, strategy, num_ranks)
            total = states.parameters + states.gradients + states.optimizer_state
            held.append(f"{int(total) / GIB:.2f}")
        ring_s = float(ring_time_s("all_reduce", gradient_bytes, num_ranks, **line))
        latency_s = float(ring_time_s("all_reduce", 0, num_ranks, **line))
        tree_s = float(tree_all_reduce_time_s(gradient_bytes, num_ranks, **line))
        between_s = float(interruption_interval_s(LLAMA3_DEVICE_INTERVAL_H, num_ranks))
        share = goodput(
            interval_s=best_interval_s(30.0, between_s),
            stall_s=30.0,
            downtime_s=600.0,
            interruption_s=between_s,
        )
        cells = (
            *(f"{num_ranks:,}", *held, f"{ring_s:.2f}", f"{latency_s:.3f}", f"{tree_s:.2f}"),
            *(f"{between_s / 3600:,.1f}", f"{float(share):.1%}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# Simulated sizes that the table shows; the figure shows all.
_SIZES = (1_024, 16_384, 100_000)


def goodput_tables() -> dict[str, Table]:
    """Returns the tables of goodput at three sizes, the gain of each measure, and the replay."""
    records = read("goodput")
    simulated = [record for record in records if record.kind == GOODPUT]
    cluster, measured = (
        [each for each in simulated if each.case["constants"] == name]
        for name in ("cluster", "measured")
    )
    return {
        "goodput": goodput_table([each for each in cluster if each.case["devices"] in _SIZES]),
        "goodput-gains": gains_table(cluster),
        "goodput-gains-measured": gains_table(measured),
        "goodput-replay": replay_table(
            [each for each in records if each.kind == REPLAY], LLAMA3_EFFECTIVE
        ),
    }


def _tables_by_store() -> dict[str, list[str]]:
    """Returns the names of all tables that show a store's records."""
    found: dict[str, list[str]] = {}
    for name, (store, *_) in TABLE_SOURCES.items():
        found.setdefault(store, []).append(name)
    for store, names in OTHER_TABLES.items():
        found.setdefault(store, []).extend(names)
    return found


def tables() -> dict[str, str]:
    """Returns every table of this program by its file name."""
    made = {
        f"{name}.md": render_markdown(_table(read(store), kind, view))
        for name, (store, kind, view) in TABLE_SOURCES.items()
    }
    several = {**profile_tables(), **goodput_tables()}
    rendered = {f"{name}.md": render_markdown(table) for name, table in several.items()}
    others = {
        "attention-flash.md": render_markdown(implementations_table(read("attention-flash"))),
        "kernels.md": render_markdown(kernels_table(read("kernels"))),
        "hardware.md": hardware_tables(),
        "ddp-predicted.md": predictions("ddp-2gbit"),
        "sharding-models.md": models_memory(),
        "scale-ranks.md": scale_by_ranks(),
        "training-panel.md": training_panel(),
        "chaos.md": render_markdown(
            chaos_table([each for each in read("chaos") if each.kind == FAULT])
        ),
        "benchmarks.md": benchmarks(_tables_by_store(), read),
        "gallery.md": gallery(DRAWN_FROM),
    }
    return {**made, **rendered, **others}


def main() -> int:
    """Writes tables and figures, and runs the programs of the studies."""
    TABLES.mkdir(parents=True, exist_ok=True)
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")
    for name, (store, plot) in PICTURE_SOURCES.items():
        save_figure(draw(plot, read(store)), IMAGES, name)
    for name, make in DRAWN.items():
        save_figure(make(), IMAGES, name)
    for study in STUDIES:
        subprocess.run([sys.executable, "-m", f"studies.{study}.figures"], cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
