"""Tests of the documented limits on who can reach a rank, without starting ranks."""

import os
import pathlib
import stat
import sys

import pytest
import torch
import torch.distributed as dist

from paceline.parallel.ranks.placement import Placement
from paceline.parallel.ranks.rendezvous import rendezvous_path
from paceline.parallel.ranks.session import LOOPBACK_INTERFACE, join_process_group

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("num_hosts", "chosen", "expected"),
    [(1, None, LOOPBACK_INTERFACE), (1, "eth7", "eth7"), (2, None, None)],
)
def test_ranks_of_one_host_talk_over_loopback(
    monkeypatch: pytest.MonkeyPatch, num_hosts: int, chosen: str | None, expected: str | None
) -> None:
    seen: list[str | None] = []
    for name in INTERFACES:
        monkeypatch.setenv(name, chosen or "")
        if chosen is None:
            monkeypatch.delenv(name)

    def join(*_arguments: object, **_keywords: object) -> None:
        seen.extend(os.environ.get(name) for name in INTERFACES)

    monkeypatch.setattr(dist, "init_process_group", join)
    placement = Placement(
        launcher="none",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        host=0,
        num_hosts=num_hosts,
    )
    join_process_group(placement, "gloo", torch.device("cpu"), 1.0)
    assert seen == [expected] * 2


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_only_this_user_reaches_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with rendezvous_path() as path:
        directory = pathlib.Path(path).parent
        assert stat.S_IMODE(directory.stat().st_mode) & 0o077 == 0
        assert directory.stat().st_uid == os.getuid()
        pathlib.Path(path).write_text("met")
        # Opening it again reads what was written: all ranks use the same file.
        assert pathlib.Path(path).read_text() == "met"
    assert not (platform == "darwin" and directory.exists())
