"""Checks the invariants of a run that must hold despite faults."""

import dataclasses
import pathlib

from paceline.training.audit import audit_run
from paceline.training.metrics.rows import MetricsFile, StepRow
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
