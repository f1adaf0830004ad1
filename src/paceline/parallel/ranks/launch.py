"""Launches ranks on this machine from a plain program, to run functions on them.

1. Fork one process per rank.
2. Each joins a process group through a file of the program, so the rendezvous opens no port and
   nothing listens beyond loopback.
3. Each runs the functions that it receives and sends the results back.

The first failure ends all ranks and is raised in the caller with that rank's traceback. A rank
reports before it leaves the group, so ranks that fail as a consequence cannot report first.

Ranks are forked from a fork server that has only imported torch: it has no threads and no CUDA
context. The first pool of a program waits for one import of torch instead of one per rank; every
later pool, for example after a failure, starts in 0.2 s.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Self

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.host import threads_per_rank
from paceline.core.processes import ignore_sigint
from paceline.devices import accelerator
from paceline.parallel.ranks.pending import abandon, drain
from paceline.parallel.ranks.placement import RENDEZVOUS_FILE, Placement, local_placement
from paceline.parallel.ranks.rendezvous import rendezvous_path
from paceline.parallel.ranks.session import join_process_group


class RankError(PacelineError):
    """A rank failed, ended without a result, or did not finish in time."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    backend: str = "gloo",
    timeout_s: float = 120.0,
) -> list[Any]:
    """Runs ``function(rank, world_size, *arguments)`` on every rank of a new process group.

    The function, its arguments and its results are pickled, so the function must be
    importable. Returns the results by rank; raises `RankError` with the traceback of the
    first rank that failed.

    Args:
        function: The function, importable by the ranks.
        world_size: Number of ranks.
        arguments: Arguments of the function, equal for every rank.
        backend: gloo or nccl.
        timeout_s: Timeout of each collective, and of the whole run.
    """
    with RankPool(world_size, backend=backend, timeout_s=timeout_s) as pool:
        return pool.run(function, *arguments)


class RankPool:
    """A pool of persistent ranks, so that running a second function costs milliseconds.

    A failure ends all ranks, and the next `run` starts new ones. Ranks never outlive the program
    that started them.

    Args:
        world_size: Number of ranks.
        backend: gloo or nccl.
        timeout_s: Timeout of each collective.
        run_timeout_s: Timeout of a whole run; `timeout_s` by default.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout_s: float = 120.0,
        run_timeout_s: float | None = None,
    ) -> None:
        self.world_size = world_size
        self._backend = backend
        self._timeout_s = timeout_s
        self._run_timeout_s = timeout_s if run_timeout_s is None else run_timeout_s
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._rendezvous = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs ``function(rank, world_size, *arguments)`` on every rank; returns results by rank.

        Args:
            function: The function, importable by the ranks.
            arguments: Arguments of the function, pickled, equal for every rank.
        """
        if not self._processes:
            self._start()
        try:
            # A rank that has already exited breaks the pipe; `_collect` reports which, and why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for connection in self._connections:
                    connection.send((function, arguments))
            return self._collect()
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Shuts the ranks down; kills those that have not exited after ten seconds."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        rendezvous = self._rendezvous.enter_context(rendezvous_path())
        try:
            for rank in range(self.world_size):
                own_end, ranks_end = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(
                        ranks_end,
                        dict(os.environ),
                        rendezvous,
                        local_placement("spawn", rank, self.world_size),
                        self._backend,
                        self._timeout_s,
                    ),
                    daemon=True,
                    name=f"paceline-rank-{rank}",
                )
                with ignore_sigint():
                    process.start()
                ranks_end.close()
                self._processes.append(process)
                self._connections.append(own_end)
        except BaseException:
            self._kill()
            raise

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + self._run_timeout_s
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results: list[Any] = [None] * self.world_size
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise RankError(
                    f"{len(late)} of {self.world_size} ranks did not finish within "
                    f"{self._run_timeout_s:g} s: {', '.join(map(str, late))}"
                )
            failures: list[tuple[float, str]] = []
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed_at, result = connection.recv()
                except (EOFError, ConnectionResetError):
                    # Sorted last: a failure with a traceback is more useful.
                    failed_at, result = math.inf, "it ended without a result (killed?)"
                if failed_at is None:
                    results[rank] = result
                else:
                    failures.append((failed_at, f"rank {rank} failed: {result}"))
            if failures:
                raise RankError(min(failures)[1])
        return results

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._rendezvous.close()


def _end_with_program() -> None:
    """Kills this rank as soon as the program that started the pool has ended.

    The kernel's parent-death signal does not help. The parent is the fork server, which outlives
    the program as long as a rank lives: every rank holds open the pipe whose end-of-file ends the
    server.
    """
    program = multiprocessing.parent_process()
    assert program is not None
    wait([program.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(
    connection: Connection,
    environment: dict[str, str],
    rendezvous: str,
    placement: Placement,
    backend: str,
    timeout_s: float,
) -> None:
    threading.Thread(target=_end_with_program, daemon=True).start()
    # The fork server still has the environment of the program's first pool.
    os.environ.clear()
    os.environ.update(environment)
    rank, world_size = placement.rank, placement.world_size
    os.environ[RENDEZVOUS_FILE] = rendezvous
    try:
        torch.set_num_threads(threads_per_rank(world_size))
        device = accelerator.nth_device(accelerator.device_type_of_backend(backend), rank)
        accelerator.select(device)
        join_process_group(placement, backend, device, timeout_s)
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:  # The pool was closed.
                break
            connection.send((None, function(rank, world_size, *arguments)))
        drain(device)
        dist.destroy_process_group()
    except BaseException:
        abandon()
        connection.send((time.monotonic(), "\n" + traceback.format_exc()))
    connection.close()
