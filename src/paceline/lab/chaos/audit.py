"""What must hold of a run whatever was done to it."""

import dataclasses
import pathlib

from paceline.training.audit import audit_run
from paceline.training.metrics.rows import MetricsFile, StepRow
from paceline.training.run_files import METRICS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosAudit:
    """What was found wrong; nothing where the run is as if it had never been disturbed."""

    num_steps: int
    """Steps whose samples were read again."""
    findings: tuple[str, ...]


def audit_chaos(run: pathlib.Path, reference: pathlib.Path | None) -> ChaosAudit:
    """Checks that every sample was used exactly once, and losses against another run's."""
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
    if not different and len(losses) == len(expected):
        return []
    first = min(different, default=max(expected, default=0))
    return [
        f"{len(different)} of {len(expected)} losses differ from those of {reference}, the first "
        f"at step {first}"
    ]
