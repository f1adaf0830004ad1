"""Time of attention's passes: by stopwatch, or on CUDA by Triton's do_bench.

A pass on a GPU may take less time than launching it, and the next one finds its inputs in the
cache. do_bench times on the device and clears its cache in between, so the figures are comparable
with published kernel benchmarks. It measures for a duration rather than a number of calls: a first
call by stopwatch estimates the duration of the case's calls.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch._functorch.config

from paceline.benchmarks.attention.config import AttentionCase
from paceline.benchmarks.attention.run import AttentionRun
from paceline.benchmarks.harness.measure import Progress, sample

_NUM_MEASUREMENTS = 3


def timer_for(device_type: str) -> Literal["stopwatch", "do_bench"]:
    """Returns the timer for a type of device."""
    return "do_bench" if device_type == "cuda" else "stopwatch"


def time_passes(
    run: AttentionRun, case: AttentionCase, on_progress: Progress
) -> dict[str, list[float]]:
    """Returns the seconds of forward, of backward and of both."""
    if timer_for(run.device.type) == "do_bench":
        return do_bench_samples(run, case, on_progress)
    return sample(run.run, case, on_progress)


def do_bench_samples(
    run: AttentionRun, case: AttentionCase, on_progress: Progress
) -> dict[str, list[float]]:
    """Times each pass separately, and both together, with a third of the time limit each."""
    samples: dict[str, list[float]] = {}

    def measure(name: str, function: Callable[[], object]) -> None:
        samples[name] = _do_bench(function, run, case, seconds_each=laps[name])
        on_progress(len(samples), _NUM_MEASUREMENTS)

    with _graphs_that_can_be_kept(run, compiled=case.compiled):
        run.run()
        laps = run.run()
        measure("forward_time_s", run.forward)
        measure("both_time_s", run.both)
        # Last, so that the tensors kept for this one take no memory from the other measurements.
        output = run.forward()
        measure("backward_time_s", lambda: run.backward(output, keep_graph=True))
    return samples


def _do_bench(
    function: Callable[[], object], run: AttentionRun, case: AttentionCase, *, seconds_each: float
) -> list[float]:
    from triton.testing import do_bench

    limit_s = case.time_limit_s / _NUM_MEASUREMENTS
    warmup_s = min(case.warmup * seconds_each, limit_s / 2)
    measuring_s = min(case.steps * seconds_each, limit_s - warmup_s)
    milliseconds = do_bench(
        function,
        warmup=warmup_s * 1e3,
        rep=measuring_s * 1e3,
        grad_to_none=run.inputs,
        return_mode="all",
    )
    return [value / 1e3 for value in milliseconds]


@contextlib.contextmanager
def _graphs_that_can_be_kept(run: AttentionRun, *, compiled: bool) -> Iterator[None]:
    """Lets a compiled backward run repeatedly on the tensors that forward saved.

    By default it overwrites some of them, and torch refuses to do that while keeping the graph.
    Later measurements, such as memory, use an operation that is compiled as usual again.
    """
    if not compiled:
        yield
        return
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()
    run.run()
