"""Tests that the audit finds samples that were skipped, repeated or had other tokens."""

import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import RecordError
from paceline.data.audit import (
    AuditRow,
    AuditTrail,
    audit_row,
    check_audit,
    join_digest,
    read_audit,
    samples_digest,
    split_digest,
)

ROWS = np.arange(60).reshape(20, 3)


def digest_of(first: int, number: int) -> int:
    positions = np.arange(first, first + number)
    return samples_digest(positions, np.zeros_like(positions), ROWS[positions % 20])


def make_row(step: int, first: int, number: int) -> AuditRow:
    return audit_row(step, first, number, digest_of(first, number))


@settings(max_examples=50, deadline=None)
@given(cuts=st.sets(st.integers(1, 19)))
def test_digests_of_parts_add_up(cuts: set[int]) -> None:
    ends = [0, *sorted(cuts), 20]
    parts = [digest_of(a, b - a) for a, b in itertools.pairwise(ends)]
    assert sum(parts) % 2**64 == digest_of(0, 20)


def test_a_digest_never_changes() -> None:
    # Later versions must be able to check existing trails.
    assert f"{digest_of(0, 20):016x}" == "8351afaf6c4d620b"


def test_a_digest_depends_on_position_source_and_every_token() -> None:
    positions, sources = np.arange(4), np.zeros(4, dtype=np.int64)
    rows = ROWS[:4].copy()
    digests = {samples_digest(positions, sources, rows)}
    digests.add(samples_digest(positions + 1, sources, rows))
    digests.add(samples_digest(positions, sources + 1, rows))
    digests.add(samples_digest(positions, sources, rows[[1, 0, 2, 3]]))
    rows[3, 2] += 1
    digests.add(samples_digest(positions, sources, rows))
    assert len(digests) == 5


def test_a_whole_run_has_no_findings_in_any_order(tmp_path: pathlib.Path) -> None:
    ranks = [AuditTrail(tmp_path / "audit" / f"{rank}.jsonl") for rank in range(2)]
    for step in range(10):
        for rank, trail in enumerate(ranks):
            trail.append(make_row(step, step * 4 + rank * 2, 2))
    rows = list(read_audit(sorted(tmp_path.rglob("*.jsonl"))))
    assert len(rows) == 20
    assert check_audit(rows, digest_of) == []
    assert check_audit(rows[::-1], digest_of) == []


def test_gaps_repeats_and_other_tokens_are_found() -> None:
    rows = [make_row(step, step * 4, 4) for step in range(10)]
    findings = check_audit(rows[1:3] + rows[4:] + [rows[6]], digest_of)
    assert list(map(str, findings)) == [
        "samples 0 to 3 were never trained on; they are between the steps 1",
        "samples 12 to 15 were never trained on; they are between the steps 2, 4",
        "samples 24 to 27 were trained on more than once, in the steps 6",
    ]
    damaged = AuditRow(step=3, first_sample=12, num_samples=4, digest="0" * 16)
    findings = check_audit([*rows[:3], damaged, *rows[4:]], digest_of)
    assert list(map(str, findings)) == [
        "samples 12 to 15 do not match the tokens in the dataset; step 3"
    ]
    assert check_audit([*rows[:3], damaged, *rows[4:]]) == []


def test_a_partial_repeat_is_found_after_a_restart() -> None:
    rows = [make_row(0, 0, 4), make_row(1, 4, 4), make_row(1, 6, 6), make_row(2, 12, 4)]
    (finding,) = check_audit(rows, digest_of)
    assert (finding.problem, finding.first_sample, finding.num_samples) == ("repeat", 6, 2)


def test_a_run_may_begin_later() -> None:
    rows = [make_row(step, 100 + step * 4, 4) for step in range(3)]
    assert check_audit(rows, first_sample=100) == []
    assert [finding.problem for finding in check_audit(rows)] == ["gap"]


def test_a_damaged_line_is_named(tmp_path: pathlib.Path) -> None:
    AuditTrail(tmp_path / "audit.jsonl").append(make_row(0, 0, 4))
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"step": 1, "fir\n')
    with pytest.raises(RecordError, match=r"audit.jsonl:2: not a row"):
        list(read_audit([tmp_path / "audit.jsonl"]))


def test_half_a_last_line_does_not_count(tmp_path: pathlib.Path) -> None:
    trail = AuditTrail(tmp_path / "audit.jsonl")
    trail.append(make_row(0, 0, 4))
    with trail.path.open("a") as file:
        file.write('{"step": 1, "fir')
    assert [row.step for row in trail.read()] == [0]


def test_a_run_that_goes_on_forgets_later_rows(tmp_path: pathlib.Path) -> None:
    trail = AuditTrail(tmp_path / "audit.jsonl")
    trail.keep_up_to(1)
    for step in range(4):
        trail.append(make_row(step, step * 4, 4))
    trail.keep_up_to(1)
    assert [row.step for row in trail.read()] == [0, 1]
    assert list(tmp_path.iterdir()) == [trail.path]


@given(digests=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_digests_add_up_in_a_message_of_floats(digests: list[int]) -> None:
    sums = np.sum([split_digest(digest) for digest in digests], axis=0)
    assert join_digest(sums.tolist()) == sum(digests) % 2**64
