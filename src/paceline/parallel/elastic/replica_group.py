"""The replicas that train together in a step: who they are, their sums, whether the step counts.

A step of a replica:

1. `begin_step` agrees with the others, through the lighthouse, on who takes part. A replica that is
   behind gets the state of one that is not, before it computes anything.
2. `add_up` adds a tensor up over the replicas, by torchft's `Manager.allreduce`. When a replica is
   lost, the sum is worthless and nothing raises.
3. `commit` says whether all sums of the step are right. If not, nobody who knows of it updates, and
   the step is done again by those that are left.

Everything listens on one address, loopback unless told otherwise: whoever reaches a lighthouse or a
manager of torchft may end the replicas.
"""

import datetime
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torchft
import torchft.manager
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.process_group import ProcessGroupGloo

from paceline.parallel.elastic.members import Members
from paceline.parallel.elastic.transport import StateTransport
from paceline.parallel.ranks.rendezvous import free_socket

LOOPBACK = "127.0.0.1"


class ReplicaGroup:
    """One replica among others.

    Args:
        number: Which of the run's replicas this is.
        lighthouse: Address of the lighthouse.
        state: Returns what another replica needs to heal: tensors and plain values.
        load: Takes the state of another replica.
        timeout_s: After which a replica that does not answer counts as lost.
        quorum_timeout_s: How long to wait for others to finish their step.
        address: What this replica listens on.
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
        # What it logs of a lost replica are stacks of its own.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        timeout = datetime.timedelta(seconds=timeout_s)
        self._store, port = _listen(address)
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
                # The quorum comes first: who takes part decides who computes which samples.
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
                # All begin with the same weights.
                init_sync=False,
            )
        finally:
            torchft.manager.ManagerServer = server

    @property
    def step(self) -> int:
        """Steps that this replica has committed, or was healed to."""
        step: int = self._manager.current_step()
        return step

    def resume(self, step: int) -> None:
        """Goes on from a state that was loaded from elsewhere."""
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin_step(self) -> Members:
        """Waits for the others and agrees on who takes part; heals if need be."""
        self._has_healed = False
        self._manager.start_quorum()
        rank = self._manager.participating_rank()
        return Members(
            rank=0 if rank is None else rank,
            live=self._manager.num_participants(),
            has_healed=self._has_healed,
        )

    def add_up(self, tensor: Tensor) -> dist.Work:
        """Starts to add a tensor up over the replicas, in place."""
        work: dist.Work = self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM)
        return work

    def commit(self) -> bool:
        """Whether the step counts: every sum since `begin_step` is that of all who take part."""
        return bool(self._manager.should_commit())

    @property
    def problem(self) -> str:
        """What went wrong in the step; empty if nothing."""
        error = self._manager.errored()
        return "" if error is None else " ".join(str(error.original_exception).split())

    def close(self) -> None:
        """Leaves the group."""
        self._manager.shutdown(wait=False)


def _bound_to(server: Callable[..., Any], address: str, **arguments: Any) -> Any:
    host = f"[{address}]" if ":" in address else address
    port = arguments["bind"].rpartition(":")[2]
    return server(**{**arguments, "bind": f"{host}:{port}"})


def _listen(address: str) -> tuple[TCPStore, int]:
    """Returns a store in which replicas meet, on one address only, and its port."""
    descriptor, port = free_socket(address)
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port
