"""Discrete-event simulation of a run on n devices, and its records.

Events are failures, planned interruptions and healed replicas. The time between two events is
computed in closed form, so the cost depends only on the number of events: about 3,000 for 100,000
devices in 60 days. Devices also fail during downtime, which then restarts. Every second of the run
is attributed to `PARTS`.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from paceline.core.units import Progress
from paceline.planner.goodput.options import Option, variations
from paceline.planner.goodput.scenario import DAY_S, DEVICES_PER_HOST, Scenario
from paceline.records import CaseValue, Environment, Metric, Record

PARTS = ("useful", "stall", "lost", "detection", "replacement", "restart", "load", "absent")
"""Useful training, stalls for saves, lost training, the phases of downtime, and the missing work of
absent replicas."""
_NORMAL_95 = 1.96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """Results of several random runs of one scenario."""

    goodput: float
    """Mean fraction of useful work, relative to all held devices."""
    error: float
    """Half-width of the 95% interval of `goodput`: the Monte Carlo error."""
    shares: dict[str, float]
    """Mean fraction of time in each of `PARTS`, relative to the devices that train."""
    failures_per_day: float


_EVENTS_PER_REPORT = 4096
"""Events between two calls that tell of the progress: about 0.2 s."""


def _untold(_done: int, _total: int) -> None:
    """Tells nobody of the progress."""


def simulate(
    scenario: Scenario, *, trials: int = 16, seed: int = 0, progress: Progress = _untold
) -> Simulated:
    """Simulates a scenario `trials` times with independent random streams from one seed.

    Calls `progress` now and then with the simulated seconds so far and in total.
    """
    duration_s = scenario.days * DAY_S
    runs = []
    for number, stream in enumerate(np.random.SeedSequence(seed).spawn(trials)):
        run = _Run(scenario, np.random.default_rng(stream))
        before_s = number * duration_s
        for now_s in run.play():
            progress(int(before_s + now_s), int(trials * duration_s))
        runs.append(run)
    reached = np.array([run.parts["useful"] for run in runs]) / duration_s * scenario.paid_share
    deviation = float(reached.std(ddof=1)) if trials > 1 else 0.0
    return Simulated(
        goodput=float(reached.mean()),
        error=_NORMAL_95 * deviation / math.sqrt(trials),
        shares={name: sum(run.parts[name] for run in runs) / trials / duration_s for name in PARTS},
        failures_per_day=sum(run.num_failures for run in runs) / trials / scenario.days,
    )


@dataclasses.dataclass(frozen=True)
class _Failure:
    is_job_wide: bool
    is_group: bool
    is_hardware: bool
    replica: int


class _Run:
    """One run. It trains whenever `_pending`, the remaining downtime, is empty."""

    def __init__(self, scenario: Scenario, random: np.random.Generator) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.num_failures = 0
        self._scenario = scenario
        self._cadence = scenario.cadence
        self._random = random
        self._now_s = 0.0
        self._pending: deque[tuple[str, float]] = deque()
        self._downtime: tuple[tuple[str, float], ...] = ()
        self._is_down = False
        # Where training resumed: the save number, and the position of save 0.
        self._first = 0
        self._base_s = 0.0
        self._up_s = 0.0
        self._durable = [0] * len(scenario.tiers)
        # Useful work by training position. The two differ once replicas are absent.
        self._positions = [0.0]
        self._useful = [0.0]
        self._healed_s: dict[int, float] = {}
        self._healing: list[tuple[float, int]] = []
        self._returning_hosts: list[float] = []
        self._spare_hosts = scenario.recovery.spare_hosts

    def play(self) -> Iterator[float]:
        """Simulates the run to its end; yields the simulated time now and then."""
        end_s = self._scenario.days * DAY_S
        failures = self._arrivals(self._scenario.interruption_s)
        planned_per_day = self._scenario.failures.planned_per_day
        plans = self._arrivals(DAY_S / planned_per_day if planned_per_day else math.inf)
        next_failure_s, next_plan_s = next(failures), next(plans)
        for number in itertools.count(1):
            if not number % _EVENTS_PER_REPORT:
                yield self._now_s
            next_healed_s = self._healing[0][0] if self._healing else math.inf
            event_s = min(next_failure_s, next_plan_s, next_healed_s, end_s)
            self._advance(event_s)
            if event_s == end_s:
                return
            if event_s == next_healed_s:
                self._rejoin()
            elif event_s == next_failure_s:
                next_failure_s = next(failures)
                self._fail(self._draw())
            else:
                next_plan_s = next(plans)
                self._stop_as_planned()

    def _arrivals(self, mean_s: float) -> Iterator[float]:
        """Yields the event times of a Poisson process."""
        if math.isinf(mean_s):
            while True:
                yield math.inf
        time_s = 0.0
        while True:
            for gap_s in self._random.exponential(mean_s, size=256):
                time_s += float(gap_s)
                yield time_s

    def _draw(self) -> _Failure:
        self.num_failures += 1
        failures = self._scenario.failures
        kind, hardware, place = self._random.random(3)
        is_job_wide = kind < failures.job_wide_share
        hardware_share = failures.hardware_share / max(1 - failures.job_wide_share, 1e-9)
        is_group = not is_job_wide and kind < failures.job_wide_share + failures.group_share
        return _Failure(
            is_job_wide=is_job_wide,
            is_group=is_group,
            is_hardware=not is_job_wide and hardware < hardware_share,
            replica=int(place * self._scenario.num_replicas),
        )

    @property
    def _capacity(self) -> float:
        return 1 - len(self._healed_s) / self._scenario.num_replicas

    def _advance(self, until_s: float) -> None:
        """Advances the clock: first through the remaining downtime, then through training."""
        while self._pending and self._now_s < until_s:
            name, seconds = self._pending.popleft()
            passed_s = min(seconds, until_s - self._now_s)
            self.parts[name] += passed_s
            self._now_s += passed_s
            if passed_s < seconds:
                self._pending.appendleft((name, seconds - passed_s))
                # The remaining difference may be below the clock's floating-point resolution.
                self._now_s = until_s
        if self._now_s < until_s:
            self._is_down = False
            self._train(until_s - self._now_s)
            self._now_s = until_s

    def _train(self, seconds: float) -> None:
        before_s = self._cadence.work_s(self._first, self._up_s)
        self._up_s += seconds
        worked_s = self._cadence.work_s(self._first, self._up_s) - before_s
        self.parts["stall"] += seconds - worked_s
        self.parts["useful"] += worked_s * self._capacity
        self.parts["absent"] += worked_s * (1 - self._capacity)
        self._positions.append(self._position_s)
        self._useful.append(self.parts["useful"])

    @property
    def _position_s(self) -> float:
        position_s = self._base_s + self._first * self._cadence.interval_s
        return position_s + self._cadence.work_s(self._first, self._up_s)

    def _fail(self, failure: _Failure) -> None:
        wait_s = self._wait_for_hosts(failure)
        replicas = self._scenario.replicas
        if replicas is not None and not failure.is_job_wide:
            for replica in self._hit(failure):
                healed_s = self._now_s + replicas.heartbeat_s + wait_s + replicas.heal_s
                self._healed_s[replica] = healed_s
                heapq.heappush(self._healing, (healed_s, replica))
            if self._capacity > 0:
                # An ongoing restart starts over, but does not wait for a host: it can proceed
                # without this replica.
                pause = (("detection", replicas.heartbeat_s), ("lost", replicas.step_s))
                self._pending = deque(self._downtime if self._is_down else pause)
                return
        self._healed_s.clear()
        self._healing.clear()
        detection_s = self._scenario.recovery.detection_s
        self._go_down(detection_s, wait_s, self._roll_back(failure))

    def _hit(self, failure: _Failure) -> list[int]:
        """Returns the replicas that a failure stops."""
        assert self._scenario.replicas is not None
        devices = self._scenario.failures.group_hosts * DEVICES_PER_HOST if failure.is_group else 1
        count = math.ceil(devices / self._scenario.replicas.devices_per_replica)
        total = self._scenario.num_replicas
        return [(failure.replica + offset) % total for offset in range(min(count, total))]

    def _rejoin(self) -> None:
        healed_s, replica = heapq.heappop(self._healing)
        # If the replica failed again while healing, a later entry supersedes this one.
        if self._healed_s.get(replica) == healed_s:
            del self._healed_s[replica]

    def _wait_for_hosts(self, failure: _Failure) -> float:
        """Allocates spares for failed hosts and returns the wait if there are too few."""
        recovery = self._scenario.recovery
        while self._returning_hosts and self._returning_hosts[0] <= self._now_s:
            heapq.heappop(self._returning_hosts)
            self._spare_hosts += 1
        if not failure.is_hardware:
            return 0.0
        wanted = self._scenario.failures.group_hosts if failure.is_group else 1
        taken = min(wanted, self._spare_hosts)
        self._spare_hosts -= taken
        for _ in range(taken):
            heapq.heappush(self._returning_hosts, self._now_s + recovery.repair_s)
        return recovery.replacement_s if taken < wanted else 0.0

    def _roll_back(self, failure: _Failure) -> float:
        """Rolls back to the newest usable save and returns its load time."""
        tiers = self._scenario.tiers
        self._durable = self._cadence.durable(self._first, self._up_s, self._durable)
        usable = [
            index for index, tier in enumerate(tiers) if not (tier.is_volatile and failure.is_group)
        ]
        # Among equally new saves, prefer the first tier, which loads fastest.
        best = max(usable, key=lambda index: (self._durable[index], -index))
        save = self._durable[best]
        position_s = self._base_s + save * self._cadence.interval_s
        useful_s = self._useful_at(position_s)
        self.parts["lost"] += self.parts["useful"] - useful_s
        self.parts["useful"] = useful_s
        self._first, self._up_s = save, 0.0
        # The loaded save is in the first tier again. No tier keeps a newer one.
        self._durable = [save, *(min(each, save) for each in self._durable[1:])]
        return tiers[best].load_s

    def _useful_at(self, position_s: float) -> float:
        """Returns the useful work at a position and discards all later positions."""
        index = bisect.bisect_right(self._positions, position_s)
        if index == len(self._positions):
            return self._useful[-1]
        low, high = self._positions[index - 1], self._positions[index]
        share = (position_s - low) / (high - low)
        useful_s = self._useful[index - 1] + share * (self._useful[index] - self._useful[index - 1])
        del self._positions[index:], self._useful[index:]
        self._positions.append(position_s)
        self._useful.append(useful_s)
        return useful_s

    def _stop_as_planned(self) -> None:
        """Saves at the current position and restarts; does nothing during downtime."""
        if self._is_down:
            return
        self._base_s = self._position_s
        self._first, self._up_s = 0, 0.0
        self._durable = [0] * len(self._scenario.tiers)
        last = self._scenario.tiers[-1]
        self._go_down(0.0, 0.0, last.load_s)
        self._pending.appendleft(("stall", last.stall_s + last.write_s))

    def _go_down(self, detection_s: float, wait_s: float, load_s: float) -> None:
        """Stops the run for detection, replacement, restart and load."""
        self._is_down = True
        self._downtime = (
            ("detection", detection_s),
            ("replacement", wait_s),
            ("restart", self._scenario.recovery.restart_s),
            ("load", load_s),
        )
        self._pending = deque(self._downtime)


GOODPUT = "goodput"
REPLAY = "goodput_replay"


def expected_failures(chosen: Iterable[Option], trials: int) -> float:
    """Returns the expected number of failures in the simulations, which their time follows."""
    scenarios = (option.scenario for option in chosen)
    return sum(trials * each.days * DAY_S / each.interruption_s for each in scenarios)


def option_records(
    chosen: Iterable[Option],
    environment: Environment,
    *,
    constants: str,
    trials: int,
    seed: int,
    done: Callable[[], None] = lambda: None,
    progress: Progress = _untold,
) -> Iterator[Record]:
    """Simulates scenarios and yields one record per scenario.

    Calls `done` after each scenario, and `progress` while one is simulated.
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
        yield _record(GOODPUT, case, scenario, environment, trials, seed, progress)
        done()


def replay_records(environment: Environment, *, trials: int, seed: int) -> Iterator[Record]:
    """Yields a record of Llama 3's simulated run for each variation of the assumptions."""
    for words, scenario in variations():
        case: dict[str, CaseValue] = {
            "run": "Llama 3 405B",
            "assumption": words,
            "detection_s": scenario.recovery.detection_s,
            "restart_s": scenario.recovery.restart_s,
        }
        yield _record(REPLAY, case, scenario, environment, trials, seed)


def _record(
    kind: str,
    case: dict[str, CaseValue],
    scenario: Scenario,
    environment: Environment,
    trials: int,
    seed: int,
    progress: Progress = _untold,
) -> Record:
    found = simulate(scenario, trials=trials, seed=seed, progress=progress)
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
