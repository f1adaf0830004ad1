import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from paceline.core import UsageError
from paceline.records import Metric
from paceline.reports.plots.registry import PLOTS, draw, drawable_plots
from paceline.reports.plots.style import save_figure
from paceline.reports.record_sets import EXPOSED
from tests.unit import record_factory
from tests.unit.record_factory import MEASURED_MEMORY, PREDICTED_MEMORY, prediction_of, step_record

attention_record = record_factory.attention_record
communication_record = record_factory.communication_record
ddp, traced = record_factory.data_parallel_record, record_factory.timeline_record
CASES = itertools.product(("small", "medium"), ("float32", "bfloat16"), (0, 5))
STEPS = [step_record(model=model, precision=name, warmup=count) for model, name, count in CASES]
STEPS.append(step_record(model="xl", warmup=0, outcome="skipped"))
ATTENTION = [
    attention_record(context, width) for context in (256, 1024, 4096) for width in (16, 64)
]
ATTENTION.append(attention_record(16384, 64, outcome="out_of_memory"))
SIZES = (10**6, 10**8)
COMMUNICATION = [communication_record(size, ranks) for size in SIZES for ranks in (2, 4)]
SHAPED = [communication_record(size, 4, link_rate_bits_per_s=2e9) for size in SIZES]
LINK = {"gradient_bytes": 4e8, "latency_s": 1e-4, "algorithm_bandwidth_bytes_per_s": 1e10}
BUCKETED = itertools.product(("torch_ddp", "ddp"), (1.0, 25.0))
STRATEGIES = [ddp("flat", None), ddp("ddp", "auto")]
STRATEGIES += [ddp(name, size, exposed_s=size / 1e3) for name, size in BUCKETED]
PREDICTED = [
    prediction_of(ddp("ddp", size), {**LINK, EXPOSED: exposed_s})
    for size, exposed_s in ((25.0, 0.02), (1.0, 0.001))
]
TRACED = [traced("flat", rank, exposed_s=0.1) for rank in (0, 1)]
TRACED += [traced("ddp", rank, exposed_s=0.02) for rank in (0, 1)]
MESSAGES = {"message_start_s": [0.2, 0.28], "message_end_s": [0.28, 0.31]}
TRACED += [prediction_of(traced("ddp", 0, exposed_s=0.01), MESSAGES)]
TRACED += [record_factory.memory_record(phase=phase) for phase in ("forward", "train")]
MEMORY = [*MEASURED_MEMORY, PREDICTED_MEMORY]
PIPELINES = [record_factory.pipeline_record(f"pipeline=2,micro={size}") for size in (1, 2)]
PIPELINES.append(prediction_of(PIPELINES[0], {"bubble": 0.5}))
GOODPUT = [
    record_factory.make_record(
        *("goodput", {"goodput": 0.9, "formula_goodput": 0.91}),
        devices=devices,
        recovery="restart",
        checkpoint="disk",
        spare_hosts=spares,
    )
    for devices in (1_024, 16_384)
    for spares in (0, 2)
]


def texts(labels: Iterable[Any]) -> list[str]:
    return [label.get_text().strip() for label in labels]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_written_twice_and_reproducibly(name: str, tmp_path: pathlib.Path) -> None:
    records = [*STEPS, *ATTENTION, *COMMUNICATION, *STRATEGIES, *PREDICTED, *TRACED, *MEMORY]
    records += [*GOODPUT, *PIPELINES]
    first, second = (
        {path.suffix: path.read_bytes() for path in save_figure(draw(name, records), folder, name)}
        for folder in (tmp_path / "first", tmp_path / "second")
    )
    assert first[".png"].startswith(b"\x89PNG")
    assert b"<svg" in first[".svg"]
    assert first == second


def test_only_what_can_be_compared_is_offered() -> None:
    assert drawable_plots([step_record()]) == ["step-time"]
    assert drawable_plots(STEPS) == ["step-time", "warmup", "precision"]
    assert drawable_plots(ATTENTION) == ["attention-time", "attention-memory"]
    assert drawable_plots(COMMUNICATION) == ["communication"]
    assert drawable_plots(MEMORY) == ["optimizer-memory"]
    assert drawable_plots(GOODPUT) == ["goodput"]
    assert drawable_plots(PIPELINES) == ["pipelines"]
    assert drawable_plots(STRATEGIES) == ["strategies", "bucket-size"]
    assert drawable_plots(STRATEGIES[:1]) == ["strategies"]
    assert drawable_plots([step_record(outcome="failed")]) == []
    with pytest.raises(UsageError, match=r"'warmup'.*no 'step' measurements"):
        draw("warmup", ATTENTION)


def test_bars_are_as_high_as_the_medians_and_no_error_bar_reaches_below_zero() -> None:
    unsteady = step_record(model="xl", seconds=0.4)
    forward = Metric(value=0.4, std=0.6, samples=(0.4, 1.6))
    metrics = {**unsteady.metrics, "forward_time_s": forward}
    records = [step_record(), msgspec.structs.replace(unsteady, metrics=metrics)]
    (axes,) = draw("step-time", records).axes
    heights = sorted(patch.get_height() for patch in axes.patches)
    assert heights == pytest.approx([100.0] * 3 + [400.0] * 3)
    assert texts(axes.get_xticklabels()) == ["small", "xl"]
    _steady, ends = axes.collections[0].get_segments()
    assert [end[1] for end in ends] == pytest.approx([0.0, 1000.0])
    assert axes.get_ylabel() == "time (ms), median ± standard deviation"


def test_warmup_shows_every_sample_and_cases_that_differ_as_lines_of_their_own() -> None:
    axes = draw("warmup", [step_record(warmup=count) for count in (0, 1, 5)]).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [len(line.get_ydata()) for line in dots] == [3, 3, 3]
    assert list(axes.containers[0][0].get_ydata()) == pytest.approx([310 / 3] * 3)
    assert texts(axes.get_xticklabels()) == ["0", "1", "5"]
    names = [f"precision {index}" for index in range(9)]
    many = [step_record(precision=name, warmup=count) for name in names for count in (0, 1)]
    labels = texts(draw("warmup", many).axes[0].get_legend().get_texts())
    assert labels == [f"{name}: mean ± standard deviation" for name in names]


@pytest.mark.parametrize(
    ("plot", "records", "label", "values"),
    [
        ("attention-memory", ATTENTION, "saved for backward, head dim 16", [2, 32, 512]),
        ("attention-memory", ATTENTION, "peak, head dim 64", [6, 96, 1536]),
        ("attention-time", ATTENTION, "backward, head dim 16", [0.131, 2.097, 33.55]),
        ("communication", SHAPED, "all_reduce", [1, 1]),
        # 2 Gbit/s are 0.25 GB/s; an all-reduce over 4 ranks sends 1.5 times its size.
        ("communication", SHAPED, "all_reduce: line rate", [0.25 / 1.5] * 2),
        ("bucket-size", STRATEGIES + PREDICTED, "ddp: predicted by the recurrence", [1, 20]),
    ],
)
def test_lines_go_through_their_figures(plot: str, records: Any, label: str, values: Any) -> None:
    lines = {line.get_label(): list(line.get_ydata()) for line in draw(plot, records).axes[0].lines}
    assert lines[label] == pytest.approx(values, rel=1e-3)


def test_strategies_are_phases_that_add_up_and_bucket_sizes_stand_beside_the_closed_form() -> None:
    axes = draw("strategies", STRATEGIES).axes[0]
    assert len(axes.patches) == 4 * 6
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches[-6:]]
    assert ends == pytest.approx([350, 350, 331, 355, 331, 355])
    axes = draw("bucket-size", STRATEGIES + PREDICTED).axes[0]
    (balanced,) = [line for line in axes.lines if "sqrt" in str(line.get_label())]
    # sqrt(4e8 * 1e10 * 1e-4) = 2e7 bytes.
    assert balanced.get_xdata()[0] == pytest.approx(2e7 / 2**20)
    assert len(axes.containers) == 2
    quartiles = axes.containers[1][2][0].get_segments()[1]
    assert quartiles[:, 1] == pytest.approx([0.85 * 25, 1.4 * 25])
    assert axes.get_xlabel() == "bucket size (MiB)"
    assert axes.get_ylabel() == "exposed communication (ms)"


def test_traced_steps_have_lanes_their_exposed_time_and_stacked_memory() -> None:
    flat, bucketed = draw("timelines", TRACED).axes
    lanes = ["rank 0 computes", "rank 0 sends", "rank 1 computes", "rank 1 sends"]
    assert texts(flat.get_yticklabels()) == lanes
    assert texts(bucketed.get_yticklabels()) == [*lanes, "predicted"]
    assert flat.get_title(loc="left") == "flat: a step of 420 ms"
    assert "exposed: 100 ms" in texts(flat.texts)
    assert "exposed: 20 ms" in texts(bucketed.texts)
    # Both memory timelines share one scale.
    forward, train = draw("memory-timeline", TRACED).axes
    assert forward.get_ylim() == train.get_ylim()
    assert forward.get_title(loc="left") == "forward: peak 6.00 MiB"
    # Six parts of 1 MiB each are stacked up to the peak.
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in forward.collections]
    assert tops == pytest.approx([1, 2, 3, 4, 5, 6])
    assert [line.get_xdata()[0] for line in forward.lines] == pytest.approx([100, 200])


def test_memory_by_strategy_is_stacked_and_predictions_hatched() -> None:
    first, *others = MEMORY
    metrics = {**first.metrics, "after_step_activations_bytes": Metric(value=0.0)}
    figure = draw("optimizer-memory", [msgspec.structs.replace(first, metrics=metrics), *others])
    for axes, before in zip(figure.axes, (200, 165), strict=True):
        bars = list(axes.patches)
        assert len(bars) == 3 * 5
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert ends[4::5] == pytest.approx([before, 160, 152])
        assert [bool(bar.get_hatch()) for bar in bars[4::5]] == [False, False, True]
        assert texts(axes.get_yticklabels()) == ["torch_ddp", "zero1"]
    assert "MiB" in figure.axes[-1].get_xlabel()
    assert texts(figure.legends[0].get_texts())[-1] == "predicted"
    without = draw("optimizer-memory", MEASURED_MEMORY)
    assert not any(bar.get_hatch() for axes in without.axes for bar in axes.patches)
    assert "predicted" not in texts(without.legends[0].get_texts())


def test_idle_time_of_a_pipeline_is_told_with_its_reasons() -> None:
    figure = draw("pipelines", PIPELINES)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == (
        "pipeline=2,micro=1: idle 75.0% of its work = measured bubble 65.0% (predicted 50.0%) + "
        "imbalance 10.0%\nmeasured bubble = order 50.0% + messages 15.0%"
    )
    assert "predicted" not in titles[1]
    assert texts(figure.axes[0].get_yticklabels()) == ["rank 0", "rank 1"]
