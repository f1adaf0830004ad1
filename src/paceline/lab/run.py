"""Runs a command once per rank on the hosts of the lab.

Rank 0's standard output passes through unchanged, so that it can be piped. All other output goes to
standard error, with the host and rank in front of each line. The first rank that fails ends the
others and determines the exit code.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from paceline.core.processes import termination_as_exit, wait_for_group
from paceline.lab.network import INTERFACE, Host, LinkShape, hosts
from paceline.lab.probe import measure_link
from paceline.records.environment import threads_per_rank
from paceline.records.links import link_variables

# A host's namespace contains nothing else, so any port is free.
_MASTER_PORT = 15_000

_GRACE_S = 60.0
"""Time for ranks to save their state when asked to stop; a second request cuts it short."""


def run_in_lab(
    command: Sequence[str], *, num_hosts: int, ranks_per_host: int, link: LinkShape
) -> int:
    """Creates hosts, measures their link, runs the command on them, and cleans up."""
    with termination_as_exit(), hosts(num_hosts, link) as made:
        environment = {}
        # A single host has a link too, but no traffic crosses it.
        if num_hosts > 1:
            measured = measure_link(made[1], made[0], link.rate_bits_per_s)
            sys.stderr.write(f"paceline lab: measured link bandwidth {measured / 1e6:.0f} Mbit/s\n")
            environment = link_variables(
                rate_bits_per_s=link.rate_bits_per_s,
                measured_rate_bits_per_s=measured,
                loss=link.loss,
                delay_s=link.delay_s,
            )
        return run_on_hosts(command, made, ranks_per_host, environment)


def run_on_hosts(
    command: Sequence[str],
    made: Sequence[Host],
    ranks_per_host: int,
    environment: Mapping[str, str],
) -> int:
    """Runs the command once per rank and returns the exit code of the group."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    pumps: list[threading.Thread] = []
    for rank in range(len(made) * ranks_per_host):
        host = made[rank // ranks_per_host]
        process = subprocess.Popen(
            host.command(command),
            env={**os.environ, **rank_environment(made, rank, ranks_per_host), **environment},
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        name = f"host {host.index} rank {rank}"
        processes[name] = process
        pumps += [_pump(stream, name) for stream in (process.stdout, process.stderr) if stream]
    exit_code, culprit = wait_for_group(processes, grace_s=_GRACE_S)
    for pump in pumps:
        pump.join(timeout=5)
    if culprit is not None:
        sys.stderr.write(f"paceline lab: {culprit} failed with exit code {exit_code}\n")
    return exit_code


def rank_environment(made: Sequence[Host], rank: int, ranks_per_host: int) -> dict[str, str]:
    """Returns the environment variables that define a rank and its process group."""
    world_size = len(made) * ranks_per_host
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(rank // ranks_per_host),
        "MASTER_ADDR": made[0].address,
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        # torch warns on every connection that these addresses have no host names.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(world_size))),
    }


def _pump(stream: IO[bytes], name: str) -> threading.Thread:
    def copy() -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            # Keep draining if stderr is closed, so that ranks never block on a full pipe.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{name} | {text}\n")
        stream.close()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread
