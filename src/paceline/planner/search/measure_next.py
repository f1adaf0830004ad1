"""Which of your own runs to measure next, so that a plan's interval narrows most.

Candidates are the fastest layouts of the asked model on one host, and on four, sixteen, ... times
as many devices up to those asked, with as many sequences per device. What is asked are the fastest
layouts on the asked devices. `paceline.planner.calibrations.next_run` chooses among them.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.plan import SHARDINGS
from paceline.planner.calibrations.cases import Case
from paceline.planner.calibrations.next_run import choose_runs, deviations_of, measured_covariance
from paceline.planner.calibrations.predictor import Predictor
from paceline.planner.calibrations.prior import CONSTANTS, Posterior, effects_of
from paceline.planner.published import PublishedRun
from paceline.planner.search.search import Candidate, NoLayoutError, search
from paceline.planner.search.spec import PerformanceModel, SearchSpec

_ALTERNATIVES = 4
"""Layouts of each number of devices that are considered."""
_NARROWING = 1.645
"""Standard deviations of half of a 90% interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredNext:
    """A run to measure, and what the asked plan's interval is once it has been measured."""

    choice: Candidate
    devices: int
    global_batch: int
    half_width: float
    """Factor minus 1, from the constants alone: what no run of the framework shows comes on top."""


def runs_to_measure(
    posterior: Posterior,
    known: Case,
    spec: SearchSpec,
    performance: PerformanceModel,
    *,
    number: int = 3,
) -> tuple[float, list[MeasuredNext]]:
    """Returns the half-width of the asked plan now, and the runs to measure, most useful first.

    Args:
        posterior: The framework's constants after the runs that are known.
        known: One of these runs: its framework, device and dtype are those of the runs to measure.
        spec: What is asked.
        performance: What these constants predict with.
        number: How many runs to choose.
    """
    offered = [
        (asked, choice) for asked in _smaller(spec) for choice in _choices(asked, performance)
    ]
    if not any(asked.num_devices == spec.num_devices for asked, _ in offered):
        raise UsageError(
            f"no layout of the model fits {spec.num_devices:,} devices, so there is no plan to "
            "measure for; give other --devices or another --batch-tokens"
        )
    slopes = _slopes(posterior, [_case(known, asked, choice) for asked, choice in offered])
    of_plan = np.array([asked.num_devices == spec.num_devices for asked, _ in offered])
    covariance = posterior.covariance
    chosen = choose_runs(slopes, covariance, number, asked=slopes[of_plan])
    found = []
    for place in chosen:
        covariance = measured_covariance(slopes[[place]], covariance)
        asked, choice = offered[place]
        found.append(
            MeasuredNext(
                choice=choice,
                devices=asked.num_devices,
                global_batch=asked.global_batch,
                half_width=_half_width(slopes[of_plan], covariance),
            )
        )
    return _half_width(slopes[of_plan], posterior.covariance), found


def _half_width(slopes: np.ndarray, covariance: np.ndarray) -> float:
    deviation = float(np.sqrt(np.mean(deviations_of(slopes, covariance) ** 2)))
    return float(np.expm1(_NARROWING * deviation))


def _smaller(spec: SearchSpec) -> Iterator[SearchSpec]:
    """Yields the spec on fewer devices, and itself last."""
    count = spec.devices_per_host
    while count < spec.num_devices:
        batch = max(1, spec.global_batch * count // spec.num_devices)
        yield dataclasses.replace(spec, num_devices=count, global_batch=batch)
        count *= 4
    yield spec


def _choices(spec: SearchSpec, performance: PerformanceModel) -> tuple[Candidate, ...]:
    try:
        return search(spec, performance, top=_ALTERNATIVES).choices
    except NoLayoutError:
        return ()  # The model does not fit on so few devices.


def _slopes(posterior: Posterior, cases: list[Case]) -> np.ndarray:
    predictor = Predictor(cases, CONSTANTS, effects_of, posterior.effects)
    return predictor.slopes(posterior.point)[1]


def _case(known: Case, spec: SearchSpec, choice: Candidate) -> Case:
    layout, batch = choice.layout, choice.batch
    run = PublishedRun(
        id=choice.name,
        source="to be measured",
        framework=known.run.framework,
        model=known.run.model,
        device=known.run.device,
        precision=known.run.precision,
        unit="s/iteration",
        measured=choice.step_time_s.value,
        devices=choice.devices,
        context_length=spec.context_length,
        global_batch=spec.global_batch,
        micro_batch=batch.num_sequences,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        interleave=layout.pipeline_interleave,
        context=layout.context,
        expert=layout.expert,
        data=layout.data_parallel,
        zero=SHARDINGS.index(layout.sharding),  # type: ignore[arg-type]
        shard=layout.shard,
        replicate=layout.replicate,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.activation_checkpointing,
    )
    return dataclasses.replace(
        known,
        run=run,
        step_s=choice.step_time_s.value,
        shape=spec.shape,
        experts=spec.experts,
        micro_batch=batch.num_sequences,
        num_micro_batches=batch.accumulation_steps,
    )
