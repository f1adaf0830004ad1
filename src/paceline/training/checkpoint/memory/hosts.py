"""Which ranks share a memory, and who keeps whose replica."""

import dataclasses

import torch.distributed as dist

from paceline.training.checkpoint.agreement import from_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run, as one of its ranks sees them."""

    rank: int
    names: tuple[str, ...]
    """What each rank calls its host's memory."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its host: the first of those that share its memory."""
        return self.names.index(self.names[self.rank]) == self.rank

    def on(self, name: str) -> list[int]:
        """Returns the ranks that share a memory."""
        return [rank for rank, each in enumerate(self.names) if each == name]

    def keeper(self, rank: int) -> int | None:
        """Returns who keeps the replica of a rank's files: its counterpart on the next host.

        With one host it is the next rank: that helps against a damaged file, not a lost host.
        A rank alone has none.
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
    """Finds out who shares a memory with whom.

    Args:
        name: What this rank's memory is called.
        group: All ranks.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    return Hosts(rank=rank, names=tuple(from_all(name, group)))
