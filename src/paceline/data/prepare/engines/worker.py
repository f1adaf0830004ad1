"""A process of the local engine: does what it is sent, one task after another."""

import os
import traceback
from multiprocessing.connection import Connection

from paceline.core.errors import PacelineError
from paceline.core.processes import die_with_parent


def main(descriptor: int, parent_pid: int) -> None:
    """Answers tasks until nobody asks any more."""
    die_with_parent(parent_pid)
    with Connection(descriptor) as connection:
        while True:
            try:
                function, task = connection.recv()
            except EOFError:
                return
            answer: tuple[object, Exception | None]
            try:
                answer = (function(task), None)
            except PacelineError as error:
                answer = (None, error)
            except Exception as error:
                # Where it happened is lost on the way to the other process, unless it is said.
                error.add_note(f"in worker {os.getpid()}:\n{traceback.format_exc()}")
                answer = (None, error)
            connection.send(answer)
