"""An audit trail, to check after a run that every sample was trained on exactly once.

The digest of a range of the stream is the sum, modulo 2^64, of a hash of each sample with its
position and source. The digests of all ranks therefore add up to the digest of the step, and the
digests of steps to that of the run, regardless of how the positions were divided. A trail is a JSON
Lines file with one row per range. The same check applies to the rows of one rank, of all ranks, or
of all attempts of a restarted run.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.data.sampling import IndexArray
from paceline.records.store import RowFile

_POSITION_WORDS = 4
"""32-bit words for position and source."""
DIGEST_PARTS = 4
"""Number of 16-bit parts in which a digest is sent."""


def samples_digest(positions: IndexArray, sources: IndexArray, rows: npt.NDArray[np.int64]) -> int:
    """Returns the digest of samples, whose tokens are `rows`, at `positions` of the stream."""
    # Each row of the records is hashed in one call. uint32 holds every token and makes the digest
    # independent of the stored dtype.
    num_samples, length = rows.shape
    records = np.empty((num_samples, _POSITION_WORDS + length), dtype="<u4")
    keys = np.stack([positions, sources], axis=1).astype("<i8")
    records[:, :_POSITION_WORDS] = keys.view("<u4")
    records[:, _POSITION_WORDS:] = rows
    content = records.data.cast("B")
    ends = range(0, len(content) + 1, records.strides[0])
    hashes = [
        blake3.blake3(content[start:end]).digest(8) for start, end in itertools.pairwise(ends)
    ]
    return int(np.frombuffer(b"".join(hashes), dtype="<u8").sum(dtype=np.uint64))


def split_digest(digest: int) -> list[float]:
    """Returns a digest as 16-bit parts, whose sums over ranks are exact in float64.

    This lets digests travel with the loss of a step in the same message.
    """
    return [float(digest >> shift & 0xFFFF) for shift in range(0, 16 * DIGEST_PARTS, 16)]


def join_digest(sums: Sequence[float]) -> int:
    """Returns the digest whose parts, summed over ranks, are `sums`."""
    return sum(int(part) << 16 * number for number, part in enumerate(sums)) % 2**64


class AuditRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One range of the stream that was trained on."""

    step: int
    """The step that trained on it."""
    first_sample: int
    """Its first position."""
    num_samples: int
    """Number of positions."""
    digest: str
    """Its digest in hexadecimal, because not every JSON parser preserves 64-bit integers."""


def audit_row(step: int, first_sample: int, num_samples: int, digest: int) -> AuditRow:
    """Returns the audit row of a range."""
    return AuditRow(
        step=step, first_sample=first_sample, num_samples=num_samples, digest=f"{digest:016x}"
    )


class AuditTrail(RowFile[AuditRow]):
    """The audit trail of one writer; each rank that writes has its own file.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, AuditRow, "a row of an audit trail")


def read_audit(paths: Iterable[str | os.PathLike[str]]) -> Iterator[AuditRow]:
    """Yields the rows of several files."""
    for path in paths:
        yield from AuditTrail(path).read()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """A range of the stream that was not trained on exactly once, or with other tokens."""

    problem: str
    """gap, repeat or digest."""
    first_sample: int
    """The first position of the range."""
    num_samples: int
    """Number of positions."""
    steps: tuple[int, ...]
    """The steps that trained on it; for a gap, the adjacent steps."""

    def __str__(self) -> str:
        end = self.first_sample + self.num_samples
        steps = ", ".join(map(str, self.steps))
        text = {
            "gap": "were never trained on; they are between the steps",
            "repeat": "were trained on more than once, in the steps",
            "digest": "do not match the tokens in the dataset; step",
        }[self.problem]
        return f"samples {self.first_sample:,} to {end - 1:,} {text} {steps}"


def check_audit(
    rows: Iterable[AuditRow],
    digest_of: Callable[[int, int], int] | None = None,
    *,
    first_sample: int = 0,
) -> list[AuditFinding]:
    """Returns the ranges that were not trained on exactly once.

    Args:
        rows: All rows of a run, in any order.
        digest_of: Maps the first position and the length of a range to its expected digest, such as
            `BatchReader.digest`; None checks only gaps and repeats.
        first_sample: The first position of the run.
    """
    ordered = sorted(rows, key=lambda row: (row.first_sample, row.num_samples, row.step))
    findings = []
    reached, reached_step = first_sample, None
    for row in ordered:
        end = row.first_sample + row.num_samples
        around = (row.step,) if reached_step is None else (reached_step, row.step)
        if row.first_sample > reached:
            findings.append(_finding("gap", reached, row.first_sample, around))
        if row.first_sample < reached:
            findings.append(_finding("repeat", row.first_sample, min(end, reached), around))
        if digest_of and f"{digest_of(row.first_sample, row.num_samples):016x}" != row.digest:
            findings.append(_finding("digest", row.first_sample, end, (row.step,)))
        if end > reached:
            reached, reached_step = end, row.step
    return findings


def _finding(problem: str, start: int, end: int, steps: Iterable[int]) -> AuditFinding:
    unique = tuple(step for step, _ in itertools.groupby(steps))
    return AuditFinding(problem=problem, first_sample=start, num_samples=end - start, steps=unique)
