"""Rendezvous: the store through which ranks create a process group.

Ranks of one host use a file. Ranks of several hosts use a socket that the first rank binds to one
address. Under torchrun the elastic agent already has a store, but it outlives an attempt: restarted
ranks may read the addresses of dead ranks from it, and never connect. The restart count as a prefix
does not help: it does not change when a host joins. The first rank of every attempt therefore opens
a separate store, and the agent's store only holds its address:

1. The first rank opens the store, puts a nonce into it, and overwrites one key of the agent's store
   with address, port, nonce and world size.
2. The others read that key and connect. The store of a dead attempt does not answer. The store of
   an attempt that is about to end has another nonce, another world size, or an entry for this rank.
   In all these cases, read the key again.
3. Every rank signs in and waits for the others. If the key changes meanwhile, a newer attempt has
   replaced this one: go back to 2.
"""

import contextlib
import dataclasses
import datetime
import errno
import ipaddress
import json
import os
import pathlib
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, UsageError
from paceline.parallel.ranks.placement import RENDEZVOUS_FILE, Placement

_KEY = "paceline/attempt"
_NONCE = "paceline/nonce"
_NUM_JOINED = "paceline/joined"
_CONNECT_TIMEOUT = datetime.timedelta(seconds=3)
"""Timeout of one try: a dead host does not refuse a connection, it never answers."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


class RendezvousError(PacelineError):
    """Ranks did not connect in time; the message names the missing ranks or the store."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attempt:
    """The agent's store entry for the newest attempt."""

    address: str
    port: int
    nonce: str
    world_size: int


def make_store(placement: Placement, timeout: datetime.timedelta) -> Store:
    """Returns the store for ranks that were not started by an elastic agent."""
    if placement.world_size == 1:
        return HashStore()
    if (path := os.environ.get(RENDEZVOUS_FILE)) is not None:
        store = FileStore(path, placement.world_size)
        store.set_timeout(timeout)
        return store
    address, port = placement.master_address, placement.master_port
    if address is None or port is None:
        raise UsageError("RANK is set but MASTER_ADDR and MASTER_PORT are not; set both")
    return TCPStore(
        address,
        port,
        placement.world_size,
        is_master=placement.rank == 0,
        timeout=timeout,
        master_listen_fd=_bound_socket(address, port) if placement.rank == 0 else None,
    )


def _bound_socket(address: str, port: int) -> int:
    """Returns a socket that listens on one address only; the store takes ownership of it."""
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )[0]
        # Many systems resolve a host's own name to a loopback address, which no other host reaches.
        resolved = ipaddress.ip_address(str(socket_address[0]))
        if resolved.is_loopback and address not in ("localhost", str(resolved)):
            raise UsageError(
                f"{address} is {resolved} on this host, which other hosts cannot reach; set "
                "MASTER_ADDR to an address that they can"
            )
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(socket_address)
            listener.listen()
            return listener.detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"rank 0 cannot listen on {address}:{port}: another program listens there; set "
                "MASTER_PORT to a free port on all ranks"
            ) from error
        raise UsageError(
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}; set MASTER_ADDR to an "
            "address of its host"
        ) from error


def attempt_store(placement: Placement, timeout: datetime.timedelta) -> Store:
    """Returns the store of this attempt only, found through the store of torchrun's agent."""
    assert placement.master_address is not None
    assert placement.master_port is not None
    agent = TCPStore(
        placement.master_address,
        placement.master_port,
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    deadline = _Deadline(timeout)
    if placement.rank == 0:
        return _open_attempt(agent, placement, timeout, deadline)
    seen = "nothing"
    while True:
        attempt = _read_attempt(agent)
        if attempt is not None and attempt.world_size == placement.world_size:
            seen = f"{attempt.address}:{attempt.port}"
            store = _join_attempt(agent, attempt, placement, deadline)
            if store is not None:
                store.set_timeout(timeout)
                return store
        if deadline.is_over():
            raise RendezvousError(
                f"rank {placement.rank}: no store of rank 0 answers after {deadline.seconds:g} s; "
                f"torchrun's store at {placement.master_address}:{placement.master_port} names "
                f"{seen}. Can this host reach it?"
            )
        deadline.pause()


class _Deadline:
    """A deadline with growing pauses for polling."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.seconds = timeout.total_seconds()
        self._end = time.monotonic() + self.seconds
        self._pause_s = _FIRST_PAUSE_S

    def is_over(self) -> bool:
        """Returns whether the deadline has passed."""
        return time.monotonic() > self._end

    def pause(self) -> None:
        """Sleeps, longer with each call."""
        time.sleep(self._pause_s)
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 1.3)


def _open_attempt(
    agent: Store, placement: Placement, timeout: datetime.timedelta, deadline: _Deadline
) -> Store:
    assert placement.master_address is not None
    assert placement.master_port is not None
    address = "127.0.0.1"
    if placement.num_hosts > 1:
        address = _own_address(placement.master_address, placement.master_port)
    descriptor, port = free_socket(address)
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    attempt = _Attempt(
        address=address, port=port, nonce=secrets.token_hex(8), world_size=placement.world_size
    )
    store.set(_NONCE, attempt.nonce)
    _sign_in(store, placement.rank)
    agent.set(_KEY, json.dumps(dataclasses.asdict(attempt)))
    while store.add(_NUM_JOINED, 0) < placement.world_size:
        if deadline.is_over():
            missing = [
                str(rank)
                for rank in range(placement.world_size)
                if not store.check([_rank_key(rank)])
            ]
            raise RendezvousError(
                f"rank 0: {len(missing)} of {placement.world_size} ranks did not connect to "
                f"{address}:{port} within {deadline.seconds:g} s: {', '.join(missing)}"
            )
        deadline.pause()
    return store


def _join_attempt(
    agent: Store, attempt: _Attempt, placement: Placement, deadline: _Deadline
) -> Store | None:
    """Returns the attempt's store once all ranks have signed in; None if it is the wrong one."""
    # Probes the port first: TCPStore logs a warning for each try, and the store may be dead.
    try:
        with socket.create_connection(
            (attempt.address, attempt.port), _CONNECT_TIMEOUT.total_seconds()
        ):
            pass
        store = TCPStore(
            attempt.address,
            attempt.port,
            is_master=False,
            timeout=_CONNECT_TIMEOUT,
            wait_for_workers=False,
        )
        if store.get(_NONCE).decode() != attempt.nonce or not _sign_in(store, placement.rank):
            return None
        while store.add(_NUM_JOINED, 0) < placement.world_size:
            if deadline.is_over() or _read_attempt(agent) != attempt:
                return None
            deadline.pause()
    except (OSError, dist.DistError):
        return None
    return store


def _sign_in(store: Store, rank: int) -> bool:
    """Signs a rank in; returns False if it already was, so the store is of an older attempt."""
    is_first = store.add(_rank_key(rank), 1) == 1
    if is_first:
        store.add(_NUM_JOINED, 1)
    return is_first


def _rank_key(rank: int) -> str:
    return f"paceline/rank/{rank}"


def _read_attempt(agent: Store) -> _Attempt | None:
    if not agent.check([_KEY]):
        return None
    return _Attempt(**json.loads(agent.get(_KEY)))


def _own_address(address: str, port: int) -> str:
    """Returns the local address of the route to another host; sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def free_socket(address: str) -> tuple[int, int]:
    """Returns a listening socket on one address only, for a store to take over, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        return listener.detach(), port


@contextlib.contextmanager
def rendezvous_path() -> Iterator[str]:
    """Yields the path of an empty file for a `FileStore`.

    On Linux the file is in memory and its path refers to this process, so nothing is left on disk
    even if this process is killed; only processes of the same user can open it. On other systems it
    is in a private temporary directory.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("paceline-rendezvous")
        try:
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as directory:
            yield str(pathlib.Path(directory) / "rendezvous")
