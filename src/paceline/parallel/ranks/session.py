"""Joins the process group, regardless of how the process was started.

`distributed_session` joins the process group that torchrun, Slurm or `paceline lab run`
describe in the environment. If no launcher has started ranks (a plain script, or one Slurm
task per host with several GPUs), it starts copies of the running script, one per rank, and
exits with their exit code: the body runs in the copies only.

Ranks on one host rendezvous in a file or on a socket bound to loopback, and communicate over
loopback. Ranks on several hosts rendezvous on a socket bound to the first host's address.
torch.distributed has no authentication, so sockets listen on as few addresses as possible.
"""

import contextlib
import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from paceline.core.errors import UsageError
from paceline.core.host import threads_per_rank
from paceline.core.processes import (
    TERMINATION_GRACE_S,
    die_with_agent,
    start_child,
    termination_as_exit,
    wait_for_group,
)
from paceline.devices import accelerator
from paceline.parallel.ranks.heartbeats import Phase, beat
from paceline.parallel.ranks.pending import abandon, drain
from paceline.parallel.ranks.placement import (
    RENDEZVOUS_FILE,
    HostPlacement,
    Placement,
    accelerator_index,
    find_placement,
    slurm_accelerators,
)
from paceline.parallel.ranks.rendezvous import attempt_store, make_store, rendezvous_path

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A rank, its device and its backend."""

    placement: Placement
    """This rank's position among all ranks."""
    device: torch.device
    """The device that it computes on."""
    backend: str
    """nccl, gloo or another accelerator's."""

    @property
    def rank(self) -> int:
        """This process's index among all ranks."""
        return self.placement.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.placement.world_size


@contextlib.contextmanager
def distributed_session(
    *,
    ranks_per_host: int | None = None,
    device: str = "auto",
    timeout_s: float = 600.0,
    grace_s: float = TERMINATION_GRACE_S,
) -> Iterator[Session]:
    """Joins the process group on entry and leaves it on exit.

    Args:
        ranks_per_host: Number of ranks to start if no launcher has; by default one per accelerator,
            or one. Ignored under torchrun, the lab and Slurm with a task per rank.
        device: auto, cpu or the type of the accelerators: cuda means NCCL and the GPU of the
            local rank, cpu gloo.
        timeout_s: Timeout of each collective.
        grace_s: Time that ranks started here have to exit when this process receives a stop signal,
            which it forwards to them.
    """
    die_with_agent(os.environ)
    device_type = accelerator.device_type(device)
    if ranks_per_host is None:
        ranks_per_host = _default_ranks_per_host(device_type)
    placement = find_placement(os.environ, ranks_per_host)
    if isinstance(placement, HostPlacement):
        raise SystemExit(_run_copies(placement, grace_s))
    own_device = torch.device(device_type)
    if device_type != "cpu":
        index = accelerator_index(placement, accelerator.num_accelerators())
        own_device = torch.device(device_type, index)
        accelerator.select(own_device)
    backend = accelerator.default_backend(device_type)
    join_process_group(placement, backend, own_device, timeout_s)
    try:
        yield Session(placement=placement, device=own_device, backend=backend)
    except BaseException:
        # A failed rank keeps its connections until its process exits. If it closed them earlier,
        # its peers would fail too, and the launcher could blame one of them. A single rank has no
        # peers.
        abandon()
        if placement.world_size == 1:
            dist.destroy_process_group()
        raise
    drain(own_device)
    dist.destroy_process_group()


def join_process_group(
    placement: Placement, backend: str, device: torch.device, timeout_s: float
) -> None:
    """Initialises torch.distributed for this rank."""
    beat(Phase.RENDEZVOUS)
    timeout = datetime.timedelta(seconds=timeout_s)
    if placement.num_hosts == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    device_id = None if device.type == "cpu" else device
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and placement.world_size > 1:
        store = attempt_store(placement, timeout)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # Without an agent store, torchrun uses a new port for every attempt.
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    else:
        store = make_store(placement, timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timeout,
        device_id=device_id,
    )


def _default_ranks_per_host(device_type: str) -> int:
    accelerators = slurm_accelerators(os.environ)
    if accelerators is not None:
        return accelerators
    return 1 if device_type == "cpu" else accelerator.num_accelerators()


def _run_copies(host: HostPlacement, grace_s: float) -> int:
    """Runs one copy of this script per local rank and returns their exit code."""
    if hasattr(sys, "ps1") or sys.orig_argv[1:] in ([], ["-"]):
        raise UsageError(
            "distributed_session starts copies of the running script, and there is none here; "
            "use run_ranks in a notebook or an interactive session"
        )
    command = [sys.executable, *sys.orig_argv[1:]]
    world_size = host.num_hosts * host.ranks_per_host
    threads = threads_per_rank(host.ranks_per_host)
    with rendezvous_path() as path, termination_as_exit():
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(host.ranks_per_host),
            "GROUP_RANK": str(host.host),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
        if host.num_hosts == 1:
            shared[RENDEZVOUS_FILE] = path
        else:
            shared["MASTER_ADDR"] = str(host.master_address)
            shared["MASTER_PORT"] = str(host.master_port)
        processes = {}
        for local_rank in range(host.ranks_per_host):
            rank = host.host * host.ranks_per_host + local_rank
            processes[f"rank {rank}"] = start_child(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
            )
        exit_code, culprit = wait_for_group(processes, grace_s=grace_s)
    if culprit is not None:
        sys.stderr.write(f"paceline: {culprit} failed with exit code {exit_code}\n")
    return exit_code
