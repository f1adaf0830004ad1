"""Records of a chaos run, one per fault and one of the whole, and the audit of what must hold."""

import dataclasses
import pathlib
from collections.abc import Iterator

from paceline.lab.chaos.run import ChaosConfig, ChaosOutcome, InjectedFault
from paceline.records import CaseValue, Environment, Metric, Record
from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.run_directory import METRICS, audit_run

FAULT = "chaos_fault"
RUN = "chaos_run"
_MOST_SAMPLES = 2_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosAudit:
    """Findings of an audit; empty if the run is equivalent to an undisturbed one."""

    num_steps: int
    """Number of steps whose samples were re-read."""
    findings: tuple[str, ...]


def audit_chaos(run: pathlib.Path, reference: pathlib.Path | None) -> ChaosAudit:
    """Checks that every sample was used exactly once, and compares losses with `reference`."""
    num_steps, wrong = audit_run(run)
    findings = [str(finding) for finding in wrong]
    if reference is not None:
        findings += _differences(_losses(run), _losses(reference), reference)
    return ChaosAudit(num_steps=num_steps, findings=tuple(findings))


def _losses(run: pathlib.Path) -> dict[int, float]:
    return {
        row.step: row.loss for row in MetricsFile(run / METRICS).read() if isinstance(row, StepRow)
    }


def _differences(
    losses: dict[int, float], expected: dict[int, float], reference: pathlib.Path
) -> list[str]:
    different = [step for step in expected if losses.get(step) != expected[step]]
    if different:
        return [
            f"{len(different)} of {len(expected)} losses differ from those of {reference}, the "
            f"first at step {min(different)}"
        ]
    if len(losses) > len(expected):
        return [f"{len(losses)} steps, but {reference} has only {len(expected)}"]
    return []


def chaos_records(
    config: ChaosConfig, outcome: ChaosOutcome, audit: ChaosAudit | None, environment: Environment
) -> Iterator[Record]:
    """Yields the records of a run's faults, then the record of the run."""
    case: dict[str, CaseValue] = {
        "command": " ".join(config.command),
        "seed": config.seed,
        "num_hosts": config.num_hosts,
    }
    for injected in outcome.injected:
        yield _fault_record(case, injected, environment)
    lost = [injected for injected in outcome.injected if injected.reason is not None]
    findings = () if audit is None else audit.findings
    wrong = [*([outcome.reason] if outcome.reason else []), *findings]
    if outcome.num_orphans:
        wrong.append(f"{outcome.num_orphans} processes outlived the command")
    stride = -(-len(outcome.steps) // _MOST_SAMPLES)
    yield Record(
        kind=RUN,
        case={**case, "for_s": config.for_s},
        environment=environment,
        metrics={
            "tried": Metric(value=len(outcome.injected)),
            "survived": Metric(value=len(outcome.injected) - len(lost)),
            "lost": Metric(value=len(lost)),
            "duration_s": Metric(value=outcome.duration_s),
            "num_starts": Metric(value=outcome.num_starts),
            "num_orphans": Metric(value=outcome.num_orphans),
            "audited_steps": Metric(value=0 if audit is None else audit.num_steps),
            "progress_s": Metric.from_samples(outcome.seconds[::stride]),
            "progress_step": Metric.from_samples([float(s) for s in outcome.steps[::stride]]),
        },
        outcome="failed" if wrong else "ok",
        reason="; ".join(wrong) or None,
    )


def _fault_record(
    case: dict[str, CaseValue], injected: InjectedFault, environment: Environment
) -> Record:
    metrics = {
        "at_s": injected.at_s,
        "lasts_s": injected.fault.lasts_s,
        "step": float(injected.step),
        "num_starts": float(injected.num_starts),
        **({} if injected.recovery_s is None else {"recovery_time_s": injected.recovery_s}),
    }
    return Record(
        kind=FAULT,
        case={
            **case,
            "fault": injected.fault.kind,
            "number": injected.fault.number,
            "target": injected.target,
        },
        environment=environment,
        metrics={name: Metric(value=value) for name, value in metrics.items()},
        outcome="ok" if injected.reason is None else "failed",
        reason=injected.reason,
    )
