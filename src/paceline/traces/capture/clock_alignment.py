"""Measures the clock offsets between ranks.

Ranks under one kernel share a clock. Clocks of different hosts are compared by exchanging messages,
as NTP does: the peer's clock is assumed to be read halfway between sending and receiving. The
fastest of many exchanges is used; its error is at most half its duration.
"""

import pathlib
import time

import torch
import torch.distributed as dist

_EXCHANGES = 16
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def clock_offset_ns(num_ranks: int, device: torch.device) -> int:
    """Returns the nanoseconds to add to this rank's clock to get rank 0's; collective call.

    Ranks from `num_ranks` on do not record and get zero.
    """
    rank = dist.get_rank()
    kernels: list[str] = [_kernel()]
    dist.broadcast_object_list(kernels, src=0, device=device)
    needs_exchange = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    needs_exchange[rank] = 0 < rank < num_ranks and kernels[0] != _kernel()
    dist.all_reduce(needs_exchange)
    offset = 0
    for peer in needs_exchange.nonzero().flatten().tolist():
        if rank == 0:
            _answer(peer, device)
        elif rank == peer:
            offset = _ask(device)
    return offset


def _answer(peer: int, device: torch.device) -> None:
    for _ in range(_EXCHANGES):
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(clock, src=peer)
        clock.fill_(time.time_ns())
        dist.send(clock, dst=peer)


def _ask(device: torch.device) -> int:
    exchanges = []
    for _ in range(_EXCHANGES):
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        sent = time.time_ns()
        dist.send(clock, dst=0)
        dist.recv(clock, src=0)
        theirs = int(clock.item())
        received = time.time_ns()
        exchanges.append((received - sent, theirs - (sent + received) // 2))
    return min(exchanges)[1]


def _kernel() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"unknown, rank {dist.get_rank()}"
