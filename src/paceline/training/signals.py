"""Signals that ask a run to stop: they set a flag, which ranks look at between steps."""

import signal
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Notes SIGTERM, SIGUSR1 (Slurm's warning) and SIGINT while it is open.

    Nothing is saved inside the handler: a rank may be in the middle of a collective. A second
    SIGINT interrupts as usual.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
