"""Signals that ask a run to stop: they set a flag, which ranks check between steps.

A rank may be inside a collective, where Python's signal handlers do not run. A thread therefore
reads the pipe that the interpreter writes to when a signal arrives. The thread sets the flag, and
ends the process at a second signal or when the time for saving is over.
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
"""Signals within this time are one request: a launcher forwards signals that its process group has
already received."""
_CLOSE = 0
"""Byte that ends the thread; no signal has this number."""
_SHOW_CURSOR = "\x1b[?25h"
"""Shows the cursor, which a panel hides."""


class StopRequest:
    """Records SIGTERM, SIGUSR1 (Slurm's warning) and SIGINT while it is open.

    Nothing is saved inside a handler. A second SIGTERM or SIGUSR1 ends the process at once with
    exit code 143; a second SIGINT interrupts as usual.
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
        """Runs on the main thread, possibly late. Without a handler, no byte reaches the pipe."""
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
