"""Groups ranks by host memory, and determines who keeps whose replica."""

import dataclasses

import torch.distributed as dist

from paceline.training.checkpoint.agreement import from_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run, as seen by one rank."""

    rank: int
    names: tuple[str, ...]
    """Identifier of each rank's host memory."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads its host: the first of the ranks that share its memory."""
        return self.names.index(self.names[self.rank]) == self.rank

    def on(self, name: str) -> list[int]:
        """Returns the ranks that share a host memory."""
        return [rank for rank, each in enumerate(self.names) if each == name]

    def keeper(self, rank: int) -> int | None:
        """Returns the keeper of a rank's replica: its counterpart on the next host.

        With one host, it is the next rank, which protects against a damaged file but not against a
        lost host. A single rank has no keeper.
        """
        if len(self.names) == 1:
            return None
        hosts = list(dict.fromkeys(self.names))
        if len(hosts) == 1:
            return (rank + 1) % len(self.names)
        own = hosts.index(self.names[rank])
        others = self.on(hosts[(own + 1) % len(hosts)])
        return others[self.on(hosts[own]).index(rank) % len(others)]


def find_hosts(name: str, group: dist.ProcessGroup | None) -> Hosts:
    """Determines which ranks share a host memory.

    Args:
        name: Identifier of this rank's host memory.
        group: Process group of all ranks.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    return Hosts(rank=rank, names=tuple(from_all(name, group)))
