"""What a run measures of itself: a row per step, in a file that only grows."""

import os
import pathlib
from collections.abc import Iterator

import msgspec

from paceline.core.errors import RecordError


class StepRow(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One training step, as all ranks agree on it."""

    step: int
    """Steps that are done, this one included."""
    tokens: int
    """Tokens that the run has trained on."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    """Of the first rank: from one step's end to the next."""
    data_wait_s: float
    """Of that, waiting for the batch."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """The model on held-out text."""

    step: int
    loss: float
    bits_per_byte: float
    sample: str | None = None
    """How the model continues the prompt."""


class EventRow(msgspec.Struct, frozen=True, kw_only=True, tag="event", tag_field="kind"):
    """Something that happened once: started, resumed, saved, stopped."""

    step: int
    name: str
    message: str


STARTED = "started"
"""The event with which every attempt of a run begins."""

MetricsRow = StepRow | EvaluationRow | EventRow

_DECODER = msgspec.json.Decoder(MetricsRow)


class MetricsFile:
    """Rows of a run in a JSON Lines file; the first rank writes.

    Args:
        path: The file, which is made with its first row.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def append(self, row: MetricsRow) -> None:
        """Appends a row in one write, so that a reader sees whole lines."""
        with self.path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def read(self) -> Iterator[MetricsRow]:
        """Yields the rows; half a line at the end, of a run that was killed, does not count."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield _DECODER.decode(line)
                except msgspec.DecodeError as error:
                    raise RecordError(
                        f"{self.path}:{number}: not a row of a run: {error}"
                    ) from error

    def keep_up_to(self, step: int) -> None:
        """Forgets the rows of later steps, which a resumed run makes again.

        The file is replaced as a whole: a crash meanwhile leaves the old one.
        """
        if not self.path.exists():
            return
        kept = [row for row in self.read() if row.step <= step]
        beside = self.path.with_suffix(".unfinished")
        beside.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        beside.replace(self.path)
