"""Converts a chaos run to records: one per fault and one for the whole run.

Checks the invariants of a run that must hold despite faults.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

from paceline.lab.chaos.config import ChaosConfig
from paceline.lab.chaos.run import ChaosOutcome, Tried
from paceline.records import CaseValue, Environment, Metric, Record
from paceline.training.audit import audit_run
from paceline.training.metrics import MetricsFile, StepRow
from paceline.training.run_files import METRICS


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


FAULT = "chaos_fault"
RUN = "chaos_run"
_MOST_SAMPLES = 2_000


def chaos_records(
    config: ChaosConfig, outcome: ChaosOutcome, audit: ChaosAudit | None, environment: Environment
) -> Iterator[Record]:
    """Yields the records of a run's faults, then the record of the run."""
    case: dict[str, CaseValue] = {
        "command": " ".join(config.command),
        "seed": config.seed,
        "num_hosts": config.num_hosts,
    }
    for tried in outcome.tried:
        yield _fault_record(case, tried, environment)
    lost = [tried for tried in outcome.tried if tried.reason is not None]
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
            "tried": Metric(value=len(outcome.tried)),
            "survived": Metric(value=len(outcome.tried) - len(lost)),
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


def _fault_record(case: dict[str, CaseValue], tried: Tried, environment: Environment) -> Record:
    metrics = {
        "at_s": tried.at_s,
        "lasts_s": tried.fault.lasts_s,
        "step": float(tried.step),
        "num_starts": float(tried.num_starts),
        **({} if tried.recovery_s is None else {"recovery_time_s": tried.recovery_s}),
    }
    return Record(
        kind=FAULT,
        case={
            **case,
            "fault": tried.fault.kind,
            "number": tried.fault.number,
            "target": tried.target,
        },
        environment=environment,
        metrics={name: Metric(value=value) for name, value in metrics.items()},
        outcome="ok" if tried.reason is None else "failed",
        reason=tried.reason,
    )
