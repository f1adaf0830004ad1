"""Starting ranks on this machine from a plain script.

Phases: spawn one process per rank; each joins a process group through a file in a private
directory, so that no port is opened for the rendezvous and nothing listens beyond loopback;
each runs the function and sends its result back; the first failure ends all ranks and
reaches the caller with that rank's traceback. A rank reports before it leaves the group, so
that the ranks that fail because it left cannot be first.
"""

import datetime
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.processes import die_with_parent

_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


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
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as directory:
        rendezvous = (pathlib.Path(directory) / "rendezvous").as_uri()
        processes: list[SpawnProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(sender, os.getpid(), rendezvous, rank, world_size, backend, timeout_s),
                    kwargs={"function": function, "arguments": arguments},
                    daemon=True,
                    name=f"paceline-rank-{rank}",
                )
                process.start()
                sender.close()
                processes.append(process)
                connections.append(receiver)
            return _collect(connections, timeout_s)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()


def _collect(connections: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    waiting = dict(zip(connections, range(len(connections)), strict=True))
    results: list[Any] = [None] * len(connections)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in waiting.values())
            raise RankError(f"rank {late} did not finish within {timeout_s:g} s")
        failures: list[tuple[float, str]] = []
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                failed_at, result = connection.recv()
            except EOFError:
                raise RankError(f"rank {rank} ended without a result (killed?)") from None
            if failed_at is None:
                results[rank] = result
            else:
                failures.append((failed_at, f"rank {rank} failed:\n{result}"))
        if failures:
            raise RankError(min(failures)[1])
    return results


def _rank_main(
    connection: Connection,
    parent_pid: int,
    rendezvous: str,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    *,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    die_with_parent(parent_pid)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    try:
        import torch.distributed as dist

        dist.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        connection.send((None, function(rank, world_size, *arguments)))
        dist.destroy_process_group()
    except BaseException:
        connection.send((time.monotonic(), traceback.format_exc()))
    connection.close()
