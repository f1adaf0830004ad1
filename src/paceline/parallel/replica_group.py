"""The group of replicas that train together: membership, sums and commits of steps.

A step of a replica:

1. `begin_step` agrees with the other replicas, through the lighthouse, on the participants. A
   replica that is behind receives the state of one that is not, before it computes anything.
2. `add_up` sums a tensor over the replicas with torchft's `Manager.allreduce`. If a replica is
   lost, the sum is invalid, but no error is raised.
3. `commit` returns whether all sums of the step are valid. If not, replicas that know of the
   failure skip the update, and the remaining replicas repeat the step.

All servers listen on one address, by default loopback: any process that can reach a lighthouse or
a manager of torchft can stop the replicas.

Transfer of a replica's state to a replica that heals.

torchft's own transport listens on every interface and unpickles any data that it receives. This
transport listens on one address and accepts only tensors and plain values.
"""

import datetime
import functools
import http.server
import logging
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torchft
import torchft.manager
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed._serialization import _streaming_load
from torchft.checkpointing import http_transport
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.process_group import ProcessGroupGloo

from paceline.parallel.elastic import Members
from paceline.parallel.ranks.rendezvous import free_socket


class StateTransport(HTTPTransport[Any]):  # type: ignore[misc]
    """Serves the state of this replica on one address."""

    def __init__(self, address: str, timeout: datetime.timedelta) -> None:
        self._address = address

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

            def __init__(self, _everywhere: object, handler: Any) -> None:
                super().__init__((address, 0), handler)

        # Patches the server class: torchft has no other way to choose the address.
        torchfts = http_transport._IPv6HTTPServer
        http_transport._IPv6HTTPServer = Server
        try:
            super().__init__(timeout=timeout, num_chunks=0)
        finally:
            http_transport._IPv6HTTPServer = torchfts

    def address(self) -> str:
        """Returns the URL from which other replicas fetch the state."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    @classmethod
    def _load_from_address(cls, address: str, timeout: datetime.timedelta) -> object:
        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as answer:
            state: object = _streaming_load(answer, weights_only=True)
            return state


LOOPBACK = "127.0.0.1"


class ReplicaGroup:
    """This replica's membership in the group of replicas.

    `state` returns what another replica needs to heal, tensors and plain values, and `load` takes
    it. A replica that does not answer within `timeout_s` counts as lost; `quorum_timeout_s` is the
    time to wait for others to finish their step.
    """

    def __init__(
        self,
        *,
        number: int,
        lighthouse: str,
        state: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
        timeout_s: float,
        quorum_timeout_s: float,
        address: str = LOOPBACK,
    ) -> None:
        # For a lost replica, torchft logs only stack traces of its internals.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        timeout = datetime.timedelta(seconds=timeout_s)
        descriptor, port = free_socket(address)
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        self._has_healed = False

        def load_and_note(healed: dict[str, Any]) -> None:
            load(healed)
            self._has_healed = True

        server = torchft.manager.ManagerServer
        torchft.manager.ManagerServer = functools.partial(_bound_to, server, address)
        try:
            self._manager = torchft.Manager(
                pg=ProcessGroupGloo(timeout=timeout),
                load_state_dict=load_and_note,
                state_dict=state,
                min_replica_size=1,
                # The quorum comes first: the assignment of samples depends on the participants.
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=datetime.timedelta(seconds=quorum_timeout_s),
                rank=0,
                world_size=1,
                store_addr=address,
                store_port=port,
                lighthouse_addr=lighthouse,
                replica_id=f"replica_{number}",
                hostname=address,
                checkpoint_transport=StateTransport(address, timeout),
                # All replicas start with the same weights.
                init_sync=False,
            )
        finally:
            torchft.manager.ManagerServer = server

    @property
    def step(self) -> int:
        """Number of committed steps, including those received by healing."""
        step: int = self._manager.current_step()
        return step

    def resume(self, step: int) -> None:
        """Resumes at a step whose state was loaded from elsewhere."""
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin_step(self) -> Members:
        """Waits for the others, agrees on the participants, and heals this replica if needed."""
        self._has_healed = False
        self._manager.start_quorum()
        rank = self._manager.participating_rank()
        return Members(
            rank=0 if rank is None else rank,
            live=self._manager.num_participants(),
            has_healed=self._has_healed,
        )

    def add_up(self, tensor: Tensor) -> dist.Work:
        """Starts an in-place sum of a tensor over the replicas."""
        work: dist.Work = self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM)
        return work

    def commit(self) -> bool:
        """Returns whether every sum since `begin_step` includes all participants."""
        return bool(self._manager.should_commit())

    @property
    def problem(self) -> str:
        """The error of the step; empty if there was none."""
        error = self._manager.errored()
        return "" if error is None else " ".join(str(error.original_exception).split())

    def close(self) -> None:
        """Leaves the group."""
        self._manager.shutdown(wait=False)


def _bound_to(server: Callable[..., Any], address: str, **arguments: Any) -> Any:
    host = f"[{address}]" if ":" in address else address
    port = arguments["bind"].rpartition(":")[2]
    return server(**{**arguments, "bind": f"{host}:{port}"})
