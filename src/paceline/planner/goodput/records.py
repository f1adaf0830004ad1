"""Records of simulated goodput."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from paceline.planner.goodput.options import Option
from paceline.planner.goodput.replay import llama3, variations
from paceline.planner.goodput.scenario import Scenario
from paceline.planner.goodput.simulate import Simulated, simulate
from paceline.records import CaseValue, Environment, Metric, Record

GOODPUT = "goodput"
REPLAY = "goodput_replay"


def option_records(
    chosen: Iterable[Option],
    environment: Environment,
    *,
    constants: str,
    trials: int,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> Iterator[Record]:
    """Simulates scenarios and yields one record per scenario.

    Args:
        chosen: The options to simulate.
        environment: Environment of the simulation.
        constants: Name of the set of constants behind the options.
        trials: Simulated runs per option.
        seed: Random seed of every simulation.
        done: Called after each option.
    """
    for option in chosen:
        scenario = option.scenario
        case: dict[str, CaseValue] = {
            "devices": scenario.devices,
            "recovery": option.recovery,
            "checkpoint": option.checkpoint,
            "spare_hosts": scenario.recovery.spare_hosts,
            "constants": constants,
            "days": scenario.days,
            "device_interval_h": scenario.failures.device_interval_h,
            "detection_s": scenario.recovery.detection_s,
            "restart_s": scenario.recovery.restart_s,
        }
        if scenario.replicas is not None:
            case["heal_s"] = scenario.replicas.heal_s
            case["devices_per_replica"] = scenario.replicas.devices_per_replica
        yield _record(GOODPUT, case, scenario, environment, trials, seed)
        done()


def replay_records(environment: Environment, *, trials: int, seed: int) -> Iterator[Record]:
    """Yields a record of Llama 3's simulated run for each variation of the assumptions."""
    for words, assumed in variations():
        case: dict[str, CaseValue] = {"run": "Llama 3 405B", "assumption": words}
        case |= {
            name: value
            for name, value in dataclasses.asdict(assumed).items()
            if name in ("detection_s", "restart_s")
        }
        yield _record(REPLAY, case, llama3(assumed), environment, trials, seed)


def _record(
    kind: str,
    case: dict[str, CaseValue],
    scenario: Scenario,
    environment: Environment,
    trials: int,
    seed: int,
) -> Record:
    found = simulate(scenario, trials=trials, seed=seed)
    return Record(
        kind=kind,
        case={**case, "trials": trials, "seed": seed},
        environment=environment,
        metrics=_metrics(scenario, found),
        outcome="ok",
    )


def _metrics(scenario: Scenario, found: Simulated) -> dict[str, Metric]:
    simulated = Metric(
        value=found.goodput, low=found.goodput - found.error, high=found.goodput + found.error
    )
    return {
        "goodput": simulated,
        "formula_goodput": Metric(value=scenario.formula()),
        **{f"{name}_share": Metric(value=share) for name, share in found.shares.items()},
        "failures_per_day": Metric(value=found.failures_per_day),
        "checkpoint_interval_s": Metric(value=scenario.cadence.interval_s),
    }
