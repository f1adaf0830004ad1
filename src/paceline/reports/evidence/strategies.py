"""Records of data-parallel strategies, and the metrics that they are compared by."""

from collections.abc import Sequence

from paceline.records import Record
from paceline.reports.evidence.comparison import Ratio, compare
from paceline.reports.evidence.fields import case_number
from paceline.reports.evidence.groups import Evidence, comparable_groups, includes
from paceline.reports.evidence.provenance import same_run

STRATEGIES = ("none", "naive", "flat", "overlapped", "bucketed", "torch_ddp")
"""Strategies in display order."""
OVER = ("strategy", "bucket_size_mb")
"""Case fields that distinguish strategies."""
EXPOSED = "exposed_communication_s"
_STEP = "step_time_s"


def strategy_groups(evidence: Evidence, *needed: str) -> list[list[Record]]:
    """Returns, for every place, a group of measured strategies that includes all in `needed`."""
    found = [
        record
        for record in evidence.find("ddp", strategy=STRATEGIES, compile="none")
        if record.metrics and step_seconds(record) > 0 and has_peers(record)
    ]
    return comparable_groups(found, OVER, holds=includes("strategy", *needed))


def has_peers(record: Record) -> bool:
    """Returns whether the world size exceeds 1; a single rank sends nothing."""
    return case_number(record, "world_size") > 1


def of_strategies(group: Sequence[Record], *names: str) -> list[Record]:
    """Returns the records of the named strategies, in the order of `names`."""
    return [record for name in names for record in group if record.case["strategy"] == name]


def step_seconds(record: Record) -> float:
    """Returns the step time."""
    return record.metrics[_STEP].value


def exposed_seconds(record: Record) -> float:
    """Returns the exposed communication: the wait for communication after backward."""
    return record.metrics[EXPOSED].value


def strategy_ratio(subject: Record, baseline: Record, metric: str = _STEP) -> Ratio | None:
    """Compares two strategies; round by round within one run, whose steps are interleaved."""
    in_turn = same_run(subject, baseline)
    return compare(subject.metrics[metric], baseline.metrics[metric], in_turn=in_turn)
