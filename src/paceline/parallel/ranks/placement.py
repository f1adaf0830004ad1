"""Determines this process's rank from the environment variables of its launcher.

Launchers: torchrun (and all that set RANK and WORLD_SIZE the same way, such as
`paceline lab run`), Slurm with one task per rank, Slurm with one task per host that starts
a rank per GPU, and none. Except for queries to Slurm's `scontrol`, these are pure functions of
the environment, so every case can be tested without a cluster.
"""

import dataclasses
import subprocess
from collections.abc import Mapping
from typing import Literal

from paceline.core.errors import UsageError

RENDEZVOUS_FILE = "PACELINE_RENDEZVOUS_FILE"
"""Set for ranks that Paceline starts itself: the file of their rendezvous."""

Launcher = Literal["torchrun", "slurm", "spawn", "none"]

# Set by srun. An sbatch script, a single process regardless of the number of tasks, has only
# SLURM_PROCID.
_SLURM_STEP = "SLURM_STEP_ID"

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Above the ports of common services, below the kernel's ephemeral port range.
_FIRST_PORT = 15_000
_NUM_PORTS = 15_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The position of one rank among all ranks, and the address of their rendezvous."""

    launcher: Launcher
    """The launcher that started it."""
    rank: int
    """Index among all ranks."""
    world_size: int
    """Number of all ranks."""
    local_rank: int
    """Index among the ranks of this host, and of its accelerator if all are visible."""
    local_world_size: int
    """Number of ranks on this host."""
    host: int
    """Index of this host."""
    num_hosts: int
    """Number of hosts."""
    master_address: str | None = None
    """Address of the rendezvous; None for a single rank or a rendezvous in a file."""
    master_port: int | None = None
    """Port of the rendezvous."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} is not below the world size {self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            raise UsageError(
                f"local rank {self.local_rank} is not below the {self.local_world_size} ranks of "
                "this host"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPlacement:
    """The position of a process that must start the ranks of its host."""

    host: int
    num_hosts: int
    ranks_per_host: int
    master_address: str | None = None
    master_port: int | None = None


def find_placement(
    environment: Mapping[str, str], ranks_per_host: int
) -> Placement | HostPlacement:
    """Returns this process's placement among the ranks.

    `ranks_per_host` applies only if no launcher has started the ranks: in a plain script, or in
    the only Slurm task of a host.
    """
    if "RANK" in environment:
        return _from_variables(environment)
    if _SLURM_STEP in environment:
        return _from_slurm(environment, ranks_per_host)
    if ranks_per_host > 1:
        return HostPlacement(host=0, num_hosts=1, ranks_per_host=ranks_per_host)
    return local_placement("none", 0, 1)


def local_placement(launcher: Launcher, rank: int, world_size: int) -> Placement:
    """Returns the placement of a rank of a single-host run."""
    return Placement(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        host=0,
        num_hosts=1,
    )


def is_launched(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher has, or may have, started this process as one of several ranks."""
    if "RANK" in environment:
        return True
    # A Slurm step with one task is a shell or a plain script, not one rank of several.
    return _SLURM_STEP in environment and environment.get("SLURM_STEP_NUM_TASKS") != "1"


def accelerator_index(placement: Placement, num_visible: int) -> int:
    """Returns the index of this rank's accelerator among the visible ones.

    A launcher may make all accelerators of the host visible to each rank, or only its own.
    """
    if num_visible >= placement.local_world_size:
        return placement.local_rank
    if num_visible == 1:
        return 0
    raise UsageError(
        f"{placement.local_world_size} ranks on this host, but rank {placement.rank} sees "
        f"{num_visible} accelerators; give each rank one, or all of them"
    )


def slurm_accelerators(environment: Mapping[str, str]) -> int | None:
    """Returns the number of accelerators that Slurm allocated on this host, None if unknown."""
    return _integer(environment, "SLURM_GPUS_ON_NODE", None)


def job_port(environment: Mapping[str, str]) -> int:
    """Returns a port derived from the Slurm job, to avoid collisions between jobs on one host."""
    job = _integer(environment, "SLURM_JOB_ID", 0) or 0
    step = _integer(environment, "SLURM_STEP_ID", 0) or 0
    return _FIRST_PORT + (job * 61 + step) % _NUM_PORTS


def _from_variables(environment: Mapping[str, str]) -> Placement:
    rank = _required(environment, "RANK")
    world_size = _required(environment, "WORLD_SIZE")
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", None)
    if local_world_size is None:
        if environment.get("MASTER_ADDR", "localhost") not in _LOOPBACK:
            raise UsageError(
                "RANK and WORLD_SIZE are set but LOCAL_WORLD_SIZE, the number of ranks on this "
                "host, is not; set it too"
            )
        local_world_size = world_size
    local_rank = _integer(environment, "LOCAL_RANK", None)
    host = _integer(environment, "GROUP_RANK", None)
    return Placement(
        launcher="spawn" if RENDEZVOUS_FILE in environment else "torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        host=rank // local_world_size if host is None else host,
        num_hosts=_integer(environment, "GROUP_WORLD_SIZE", None)
        or -(-world_size // local_world_size),
        master_address=environment.get("MASTER_ADDR"),
        master_port=_integer(environment, "MASTER_PORT", None),
    )


def _from_slurm(environment: Mapping[str, str], ranks_per_host: int) -> Placement | HostPlacement:
    num_tasks = _required(environment, "SLURM_STEP_NUM_TASKS")
    num_hosts = _required(environment, "SLURM_STEP_NUM_NODES")
    host = _required(environment, "SLURM_NODEID")
    address = environment.get("MASTER_ADDR") or (
        _first_slurm_address(environment) if num_hosts > 1 else "127.0.0.1"
    )
    port = _integer(environment, "MASTER_PORT", None) or job_port(environment)
    if num_tasks == num_hosts and ranks_per_host > 1:
        return HostPlacement(
            host=host,
            num_hosts=num_hosts,
            ranks_per_host=ranks_per_host,
            master_address=address,
            master_port=port,
        )
    return Placement(
        launcher="slurm",
        rank=_required(environment, "SLURM_PROCID"),
        world_size=num_tasks,
        local_rank=_required(environment, "SLURM_LOCALID"),
        local_world_size=_tasks_on_host(environment, host),
        host=host,
        num_hosts=num_hosts,
        master_address=address,
        master_port=port,
    )


def _tasks_on_host(environment: Mapping[str, str], host: int) -> int:
    """Returns the number of tasks on a host, from Slurm's compressed list such as ``2(x3),1``."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, repeat = part.partition("(x")
        if count:
            counts += [int(count)] * int(repeat.rstrip(")") or 1)
    if host < len(counts):
        return counts[host]
    return _required(environment, "SLURM_STEP_NUM_TASKS")


def _first_slurm_address(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST")
    if not nodes:
        raise UsageError("SLURM_STEP_NODELIST is not set: was this started by srun?")
    first = _scontrol("show", "hostnames", nodes).split()[0]
    # A node's name need not resolve; the Slurm controller knows its address.
    for field in _scontrol("show", "node", "--oneliner", first).split():
        if field.startswith("NodeAddr="):
            return field.removeprefix("NodeAddr=")
    return first


def _scontrol(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"cannot ask Slurm for the hosts of this job: {error}; set MASTER_ADDR instead"
        ) from error


def _required(environment: Mapping[str, str], name: str) -> int:
    value = _integer(environment, name, None)
    if value is None:
        raise UsageError(f"{name} is not set, although related variables are; check the launcher")
    return value


def _integer(environment: Mapping[str, str], name: str, default: int | None) -> int | None:
    if name not in environment:
        return default
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(f"{name} is {environment[name]!r}; it must be a whole number") from None
