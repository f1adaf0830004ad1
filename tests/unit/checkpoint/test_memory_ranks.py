"""Tests of memory checkpoints of several ranks: when hosts publish, what they send and free."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.checkpoint.format import read_block
from paceline.checkpoint.memory import FromMemory, MemoryCheckpointer, load_newest_in_memory
from paceline.checkpoint.memory_storage import MemoryStorage, Messages
from paceline.checkpoint.restore import Source
from paceline.parallel.zero.optimizer_checkpoint import FlatPiece
from tests.unit.checkpoint.ranks import Ranks, checkpoint_ranks

_ELEMENTS = 6
"""Elements of the saved tensor that each rank has."""
SEEDS = range(6)


class Hosts:
    """Memory of hosts below a directory; `names` has one letter per rank."""

    def __init__(self, place: pathlib.Path, names: str) -> None:
        self.place = place
        self.names = names
        (place / "checkpoints").mkdir()
        for name in set(names):
            (place / name).mkdir()

    def open(self, rank: int) -> MemoryCheckpointer:
        return MemoryCheckpointer(
            str(self.place / self.names[rank]), str(self.place / "checkpoints")
        )

    def held(self, name: str) -> pathlib.Path:
        (found,) = (self.place / name).glob("paceline-*")
        return found

    def files(self, name: str) -> set[str]:
        """Returns the files of steps that a host holds."""
        held = self.held(name)
        return {
            path.relative_to(held).as_posix()
            for path in held.rglob("step-*/**/*")
            if path.is_file()
        }


def _part(rank: int, num_ranks: int, step: int) -> dict[str, Any]:
    values = torch.arange(_ELEMENTS, dtype=torch.float32) + 100 * rank + 1000 * step
    return {"x": FlatPiece.of(values, rank * _ELEMENTS, num_ranks * _ELEMENTS)}


def _whole(num_ranks: int, step: int) -> torch.Tensor:
    return torch.cat(
        [_part(rank, num_ranks, step)["x"].as_subclass(torch.Tensor) for rank in range(num_ranks)]
    )


def _save(ranks: Ranks, hosts: Hosts, *steps: int, seed: int = 0) -> None:
    def program(rank: int) -> None:
        memory = hosts.open(rank)
        for step in steps:
            memory.save(step, _part(rank, len(hosts.names), step), {"step": step}, {"rank": rank})
            memory.wait()
        memory.close()

    ranks.run(program, seed)


def _load(ranks: Ranks, hosts: Hosts, seed: int = 0) -> list[tuple[FromMemory, torch.Tensor]]:
    """Returns what each rank loads of the whole tensor."""

    def program(rank: int) -> tuple[FromMemory, torch.Tensor]:
        memory = hosts.open(rank)
        state = {"x": torch.zeros(len(hosts.names) * _ELEMENTS)}
        found = load_newest_in_memory(memory, lambda source: source.load(state), lambda _: "")
        memory.close()
        return found, state["x"]

    return ranks.run(program, seed)


def _own(rank: int) -> str:
    return f"rank-{rank:05d}-00000.safetensors"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("names", ["aa", "ab", "aabb"])
def test_every_host_holds_its_files_replicas_and_the_manifest(
    tmp_path: pathlib.Path, names: str, seed: int
) -> None:
    hosts = Hosts(tmp_path, names)
    with checkpoint_ranks(len(names)) as ranks:
        _save(ranks, hosts, 3, 4, seed=seed)
        loaded = _load(ranks, hosts, seed)
    for found, values in loaded:
        assert found.restored is not None
        assert (found.restored.step, found.restored.identity) == (4, {"step": 4})
        assert found.restored.ranks == [{"rank": rank} for rank in range(len(names))]
        assert torch.equal(values, _whole(len(names), 4))
    others = {"aa": {"a": "01"}, "ab": {"a": "1", "b": "0"}, "aabb": {"a": "23", "b": "01"}}[names]
    for name in set(names):
        own = {_own(rank) for rank, each in enumerate(names) if each == name}
        replicas = {f"replicas/{_own(int(rank))}" for rank in others[name]}
        assert hosts.files(name) == {
            f"step-00000004/{file}" for file in {"manifest.json", *own, *replicas}
        }
        for replica in replicas:
            kept = hosts.held(name) / "step-00000004" / replica
            (original,) = (
                path for path in tmp_path.rglob(kept.name) if path.parent.name != "replicas"
            )
            assert kept.read_bytes() == original.read_bytes()


def _noting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, notes: list[str]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        notes.append(name)
        return result

    monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_host_publishes_before_all_replicas_have_arrived(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    hosts = Hosts(tmp_path, "abc")
    notes: list[str] = []
    _noting(monkeypatch, Messages, "wait", notes)
    _noting(monkeypatch, MemoryStorage, "publish_here", notes)
    _noting(monkeypatch, MemoryStorage, "remove_others", notes)
    with checkpoint_ranks(3) as ranks:
        _save(ranks, hosts, 1, seed=seed)
    assert notes == ["wait"] * 3 + ["publish_here"] * 3 + ["remove_others"] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_forgotten_is_forgotten_on_all_hosts_once_a_rank_goes_on(
    tmp_path: pathlib.Path, seed: int
) -> None:
    hosts = Hosts(tmp_path, "aab")
    with checkpoint_ranks(3) as ranks:
        _save(ranks, hosts, 1)

        def forget(rank: int) -> list[set[str]]:
            memory = hosts.open(rank)
            memory.forget_others(None)
            left = [hosts.files(name) for name in "ab"]
            memory.close()
            return left

        assert ranks.run(forget, seed) == [[set(), set()]] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_freed_on_every_host_when_the_run_ends(tmp_path: pathlib.Path, seed: int) -> None:
    hosts = Hosts(tmp_path, "aab")
    with checkpoint_ranks(3) as ranks:

        def program(rank: int) -> bool:
            memory = hosts.open(rank)
            memory.save(1, _part(rank, 3, 1), None)
            memory.wait()
            memory.finish()
            return memory.group is None

        assert ranks.run(program, seed) == [True] * 3
        assert len(ranks.destroyed) == 3
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]


def test_every_host_sweeps_what_killed_processes_left_there(tmp_path: pathlib.Path) -> None:
    hosts = Hosts(tmp_path, "aab")
    with checkpoint_ranks(3) as ranks:
        _save(ranks, hosts, 1)
        for name in "ab":
            (hosts.held(name) / "step-00000002.tmp-killed").mkdir()
        ranks.run(lambda rank: hosts.open(rank).close())
    for name in "ab":
        assert not list(hosts.held(name).glob("*.tmp-*"))
        assert "step-00000001/manifest.json" in hosts.files(name)


def test_sending_changes_no_file_of_the_sender(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is mapped so that a write to the mapping stays private."""
    hosts = Hosts(tmp_path, "ab")
    send = Messages.send

    def send_and_scribble(messages: Messages, content: torch.Tensor, rank: int) -> None:
        copy = content.clone()
        content.zero_()
        send(messages, copy, rank)

    monkeypatch.setattr(Messages, "send", send_and_scribble)
    with checkpoint_ranks(2) as ranks:
        _save(ranks, hosts, 1)
    for rank, name in enumerate("ab"):
        other = "ba"[rank]
        own = hosts.held(name) / "step-00000001" / _own(rank)
        replica = hosts.held(other) / "step-00000001" / "replicas" / _own(rank)
        assert any(own.read_bytes())
        assert own.read_bytes() == replica.read_bytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_host_gets_each_block_that_it_lacks_once(tmp_path: pathlib.Path, seed: int) -> None:
    hosts = Hosts(tmp_path, "ab")
    with checkpoint_ranks(2) as ranks:
        _save(ranks, hosts, 1)
        held = hosts.held("b")
        shutil.rmtree(held / "step-00000001")
        ranks.post.delivered.clear()
        loaded = _load(ranks, hosts, seed)
        assert ranks.post.delivered == {(0, 1): 2 * _ELEMENTS * 4}
    assert [found.received_bytes for found, _ in loaded] == [0, 2 * _ELEMENTS * 4]
    for found, values in loaded:
        assert found.restored is not None
        assert found.findings == []
        assert torch.equal(values, _whole(2, 1))


def test_a_file_that_cannot_be_read_is_sent_as_damage_of_the_same_size(
    tmp_path: pathlib.Path,
) -> None:
    """The rank that lacks it must not wait for ever, nor take it for data."""
    hosts = Hosts(tmp_path, "ab")
    with checkpoint_ranks(2) as ranks:
        _save(ranks, hosts, 1)
        held = hosts.held("b")
        for path in held.rglob("step-*/**/*.safetensors"):
            path.unlink()

        def program(rank: int) -> FromMemory:
            memory = hosts.open(rank)

            def load(source: Source) -> None:
                for path in hosts.held("a").rglob("step-*/**/*.safetensors"):
                    path.unlink(missing_ok=True)
                source.load({"x": torch.zeros(2 * _ELEMENTS)})

            found = load_newest_in_memory(memory, load, lambda _: "")
            memory.close()
            return found

        for found in ranks.run(program):
            assert found.restored is None
            assert {finding.name for finding in found.findings} == {"damaged"}
            assert len(found.findings) == 2  # From the originals, and from the replicas.


def test_what_one_rank_has_read_no_rank_reads_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, "aa")
    num_read = [0, 0]
    with checkpoint_ranks(2) as ranks:
        _save(ranks, hosts, 1)

        def counted(*arguments: Any) -> bytes:
            num_read[ranks.device.rank] += 1
            return read_block(*arguments)

        monkeypatch.setattr("paceline.checkpoint.restore.read_block", counted)

        def program(rank: int) -> None:
            memory = hosts.open(rank)
            # The first rank needs what the second has saved, and the other way round.
            room = torch.zeros(_ELEMENTS)
            state = {"x": FlatPiece.of(room, (1 - rank) * _ELEMENTS, 2 * _ELEMENTS)}
            found = load_newest_in_memory(memory, lambda source: source.load(state), lambda _: "")
            memory.close()
            assert found.restored is not None

        ranks.run(program)
    assert num_read == [1, 1]


def test_damage_that_one_rank_finds_is_raised_on_all(tmp_path: pathlib.Path) -> None:
    hosts = Hosts(tmp_path, "ab")
    with checkpoint_ranks(2) as ranks:
        _save(ranks, hosts, 1)
        for name in "ab":
            for path in hosts.held(name).rglob(_own(1)):
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)

        def program(rank: int) -> list[str]:
            memory = hosts.open(rank)
            room = torch.zeros(_ELEMENTS)
            state = {"x": FlatPiece.of(room, 0, 2 * _ELEMENTS)}
            found = load_newest_in_memory(memory, lambda source: source.load(state), lambda _: "")
            memory.close()
            assert found.restored is None
            return [finding.message for finding in found.findings]

        first, second = ranks.run(program)
    assert first == second
    assert len(first) == 2
    assert all(_own(1) in message and "do not match their digest" in message for message in first)
