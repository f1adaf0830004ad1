"""A run that loses ranks or hosts resumes bitwise from memory, or from disk if necessary."""

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from paceline.parallel import RankError, RankPool
from paceline.training.config import RunConfig
from paceline.training.metrics import EventRow, MetricsFile
from paceline.training.run_checkpointer import RunCheckpointer
from tests.distributed.device_pool import DevicePool
from tests.distributed.small_runs import changed, losses_of, small_run, train_rank

Pools = Callable[[int], RankPool]
STEPS = 7
LAST_IN_MEMORY = 5
ON_DISK = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = small_run(tmp_path_factory.mktemp("memory"))
    return changed(
        run, "run", training={"steps": STEPS, "batch_size": 6}, checkpoint={"keep_last": 9}
    )


def _of_rank(config: RunConfig, rank: int) -> RunConfig:
    """Gives a rank its own memory directory, as if it were on a separate host."""
    memory = pathlib.Path(config.out).parent / f"{pathlib.Path(config.out).name}-host-{rank}"
    memory.mkdir(exist_ok=True)
    checkpoint = dataclasses.replace(config.checkpoint, memory_directory=str(memory))
    return dataclasses.replace(config, checkpoint=checkpoint)


def _train(rank: int, world_size: int, config: RunConfig) -> None:
    train_rank(rank, world_size, _of_rank(config, rank))


class _Lost(BaseException):
    """Simulates the end of a process."""


def _train_until_lost(rank: int, world_size: int, config: RunConfig, *, kill: bool) -> None:
    """Trains until memory has a state that is not on disk, and ends."""
    keep = RunCheckpointer.save_in_memory

    def keep_and_end(states: RunCheckpointer, step: int, *rest: Any) -> None:
        if step == LAST_IN_MEMORY:
            # The state in memory records which step is on disk; a slow disk may not have it yet.
            states._checkpointer.wait()
        keep(states, step, *rest)
        if step == LAST_IN_MEMORY:
            states._memory._checkpointer.wait()  # type: ignore[union-attr]
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise _Lost

    with (
        mock.patch.object(RunCheckpointer, "save_in_memory", keep_and_end),
        contextlib.suppress(_Lost),
    ):
        _train(rank, world_size, config)


def _lost(pool: RankPool, config: RunConfig, name: str, **sections: dict[str, Any]) -> RunConfig:
    """Trains a run that ends early, and returns its config."""
    lost = changed(config, name, **sections, checkpoint={"memory_every_steps": 1})
    pool.run(functools.partial(_train_until_lost, kill=False), lost)
    return lost


def _memory(config: RunConfig, rank: int) -> pathlib.Path:
    (found,) = pathlib.Path(_of_rank(config, rank).checkpoint.memory_directory).glob("paceline-*")
    return found


def _notices(config: RunConfig) -> list[str]:
    rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
    return [row.message for row in rows if isinstance(row, EventRow) and row.name == "checkpoint"]


def _tensors(config: RunConfig) -> dict[str, bytes]:
    """Returns the bytes of all tensors of the last checkpoint, from the files of all ranks."""
    last = pathlib.Path(config.out) / "checkpoints" / f"step-{STEPS:08d}"
    return {
        name: tensor.numpy().tobytes()
        for path in last.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.fixture(scope="module")
def whole(config: RunConfig, rank_pool: Pools) -> Callable[[str], RunConfig]:
    """Returns a function from a strategy to its uninterrupted run."""
    runs: dict[str, RunConfig] = {}

    def run(strategy: str) -> RunConfig:
        if strategy not in runs:
            runs[strategy] = changed(config, f"whole-{strategy}", parallel={"strategy": strategy})
            rank_pool(2).run(_train, runs[strategy])
        return runs[strategy]

    return run


def _require_same(config: RunConfig, expected: RunConfig) -> None:
    assert losses_of(config) == losses_of(expected)
    tensors = _tensors(expected)
    assert tensors
    assert _tensors(config) == tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "lost"),
    [*(("ddp", None), ("ddp", 1), ("zero2", 0)), *(("fsdp", None), ("fsdp", 1))],
)
def test_a_run_goes_on_from_memory_to_the_bit(
    config: RunConfig,
    rank_pool: Pools,
    whole: Callable[[str], RunConfig],
    strategy: str,
    lost: int | None,
) -> None:
    run = _lost(rank_pool(2), config, f"{strategy}-{lost}", parallel={"strategy": strategy})
    for rank in range(2):
        (step,) = _memory(run, rank).glob("step-*")
        assert step.name == f"step-{LAST_IN_MEMORY:08d}"
        assert _memory(run, rank).stat().st_mode & 0o777 == 0o700
    if lost is not None:
        shutil.rmtree(_memory(run, lost))  # As if a new host replaced it.
    rank_pool(2).run(_train, run)
    (notice,) = _notices(run)
    assert notice.startswith(f"step {LAST_IN_MEMORY} was restored from memory")
    # With replicated parameters every host needs all files, and has a copy of each.
    assert ("from other hosts" in notice) == (lost is not None)
    _require_same(run, whole(strategy))
    for rank in range(2):
        assert not list(pathlib.Path(f"{run.out}-host-{rank}").iterdir())


@pytest.mark.parametrize("axis", [pytest.param("tensor", marks=pytest.mark.slow), "pipeline"])
def test_a_layout_goes_on_from_memory_to_the_bit(
    config: RunConfig, rank_pool: Pools, axis: str
) -> None:
    expected = changed(config, f"whole-{axis}", parallel={axis: 2})
    rank_pool(2).run(_train, expected)
    run = _lost(rank_pool(2), config, f"lost-{axis}", parallel={axis: 2})
    rank_pool(2).run(_train, run)
    (notice,) = _notices(run)
    assert notice.startswith(f"step {LAST_IN_MEMORY} was restored from memory")
    _require_same(run, expected)


@pytest.mark.slow
def test_killed_processes_leave_their_memory(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    run = changed(config, "killed", checkpoint={"memory_every_steps": 1})
    with DevicePool(2, timeout_s=60) as pool, pytest.raises(RankError, match="rank"):
        pool.run(functools.partial(_train_until_lost, kill=True), run)
    rank_pool(2).run(_train, run)
    assert _notices(run) == [f"step {LAST_IN_MEMORY} was restored from memory"]
    _require_same(run, whole("ddp"))


def _flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_what_is_damaged_comes_from_its_replica_or_from_disk(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    run = _lost(rank_pool(2), config, "damaged", parallel={"strategy": "zero2"})
    name = "rank-00001-00000.safetensors"
    _flip(_memory(run, 1) / f"step-{LAST_IN_MEMORY:08d}" / name)
    rank_pool(2).run(_train, run)
    damaged, restored = _notices(run)
    assert name in damaged
    assert restored.startswith(f"step {LAST_IN_MEMORY} was restored from memory")
    _require_same(run, whole("zero2"))


def test_damaged_copies_fall_back_to_disk(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    run = _lost(rank_pool(2), config, "both-damaged")
    name = "rank-00001-00000.safetensors"
    step = f"step-{LAST_IN_MEMORY:08d}"
    _flip(_memory(run, 1) / step / name)
    _flip(_memory(run, 0) / step / "replicas" / name)
    rank_pool(2).run(_train, run)
    own, replica, restored = _notices(run)
    assert name in own
    assert name in replica
    assert restored == "restored from disk"
    _require_same(run, whole("ddp"))


def test_incomplete_memory_and_removed_checkpoints_are_passed_over(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    run = _lost(rank_pool(2), config, "incomplete")
    step = f"step-{LAST_IN_MEMORY:08d}"
    (_memory(run, 0) / step / "rank-00000-00000.safetensors").unlink()
    (_memory(run, 1) / step / "replicas" / "rank-00000-00000.safetensors").unlink()
    rank_pool(2).run(_train, run)
    missing, restored = _notices(run)
    assert "1 of 2 files are not in the memory of any host" in missing
    assert restored == "restored from disk"
    _require_same(run, whole("ddp"))
    removed = _lost(rank_pool(2), config, "removed")
    shutil.rmtree(pathlib.Path(removed.out) / "checkpoints" / f"step-{ON_DISK:08d}")
    rank_pool(2).run(_train, removed)
    (notice,) = _notices(removed)
    assert "step 3, which was on disk when it was saved, was removed" in notice
    _require_same(removed, whole("ddp"))


def test_one_host_and_another_number_of_ranks_go_on_from_memory(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    run = _lost(rank_pool(2), config, "other-ranks")
    shutil.rmtree(f"{run.out}-host-1")
    rank_pool(1).run(_train, run)
    assert _notices(run) == [f"step {LAST_IN_MEMORY} was restored from memory"]
    assert losses_of(run)[:LAST_IN_MEMORY] == losses_of(whole("ddp"))[:LAST_IN_MEMORY]
    assert losses_of(run) == pytest.approx(losses_of(whole("ddp")), rel=1e-5)


def _train_without_room(rank: int, world_size: int, config: RunConfig) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full if rank == 1 else None):
        _train(rank, world_size, config)


def test_a_full_memory_is_said_and_training_goes_on(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    run = changed(config, "full", checkpoint={"memory_every_steps": 1})
    rank_pool(2).run(_train_without_room, run)
    (notice,) = _notices(run)
    assert "checkpoint not saved in memory, training continues" in notice
    assert "No space left on device" in notice
    _require_same(run, whole("ddp"))


def test_where_there_is_no_tmpfs_training_goes_on(
    config: RunConfig, rank_pool: Pools, whole: Callable[[str], RunConfig]
) -> None:
    absent = str(pathlib.Path(config.out) / "absent")
    run = changed(
        config, "absent", checkpoint={"memory_every_steps": 1, "memory_directory": absent}
    )
    rank_pool(2).run(train_rank, run)
    (notice,) = _notices(run)
    assert "checkpoints in memory are off" in notice
    assert absent in notice
    _require_same(run, whole("ddp"))
