"""Signals that ask a run to stop: they set a flag, which ranks look at between steps.

A rank may be deep inside a collective, where Python's handlers do not run, so a thread reads what
the interpreter writes into a pipe when a signal comes. It sets the flag; it ends the process when a
second signal comes, or when the time for saving is over.
"""

import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn, Self

from paceline.core.processes import STOP_SIGNALS, STOPPED

_SAME_REQUEST_S = 1.0
"""Within it, signals are one request: a launcher passes on what its group was sent already."""
_CLOSE = 0
"""No signal's number."""
_SHOW_CURSOR = "\x1b[?25h"
"""A panel has hidden it."""


class StopRequest:
    """Notes SIGTERM, SIGUSR1 (Slurm's warning) and SIGINT while it is open.

    Nothing is saved inside a handler. A second SIGTERM or SIGUSR1 ends the process at once with
    exit code 143; a second SIGINT interrupts as usual.

    Args:
        grace_s: How long the process may take to save and leave after the first.
    """

    def __init__(self, grace_s: float) -> None:
        self.received: signal.Signals | None = None
        self._grace_s = grace_s
        self._first_s = 0.0
        self._num_interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {each: signal.signal(each, self._handle) for each in STOP_SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for each, handler in self._before.items():
            signal.signal(each, handler)
        os.write(self._writer, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Runs on the main thread, sooner or later; without it there would be no byte to read."""
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1 and self._is_another():
                raise KeyboardInterrupt

    def _watch(self) -> None:
        while True:
            left_s = None
            if self.received is not None:
                left_s = max(0.0, self._first_s + self._grace_s - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], left_s)
            if not ready:
                _leave(f"not saved within the {self._grace_s:g} s of checkpoint.grace_s")
            for number in os.read(self._reader, 64):
                if number == _CLOSE:
                    return
                if number not in STOP_SIGNALS:
                    continue
                if self.received is None:
                    self._first_s = time.monotonic()
                    self.received = signal.Signals(number)
                elif number != signal.SIGINT and self._is_another():
                    _leave(f"not saved: a second {signal.Signals(number).name}")

    def _is_another(self) -> bool:
        is_later = time.monotonic() - self._first_s >= _SAME_REQUEST_S
        return self.received is not None and is_later


def _leave(why: str) -> NoReturn:
    shown = _SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{shown}paceline: {why}; resume from the last checkpoint\n".encode())
    os._exit(STOPPED)
