"""A worker process of the local engine, which runs one task at a time."""

import os
import traceback
from multiprocessing.connection import Connection

from paceline.core.errors import PacelineError
from paceline.core.processes import die_with_parent


def main(descriptor: int, parent_pid: int) -> None:
    """Runs tasks from the connection until it is closed."""
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
                # Tracebacks are lost between processes, so they are attached as notes.
                error.add_note(f"in worker {os.getpid()}:\n{traceback.format_exc()}")
                answer = (None, error)
            connection.send(answer)
