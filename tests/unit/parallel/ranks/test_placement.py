import dataclasses

import pytest

from paceline.core import UsageError
from paceline.parallel.ranks import placement as placement_module
from paceline.parallel.ranks.placement import (
    HostPlacement,
    Placement,
    accelerator_index,
    find_placement,
    is_launched,
    job_port,
)

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture(autouse=True)
def scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*arguments: str) -> str:
        if arguments[:2] == ("show", "hostnames"):
            return "n1\nn2\n"
        assert arguments == ("show", "node", "--oneliner", "n1")
        return "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=box Port=17001"

    monkeypatch.setattr(placement_module, "_scontrol", answer)


def test_alone() -> None:
    placement = find_placement({}, ranks_per_host=1)
    assert isinstance(placement, Placement)
    assert (placement.launcher, placement.rank, placement.world_size) == ("none", 0, 1)


def test_a_plain_script_is_to_start_its_ranks() -> None:
    assert find_placement({}, ranks_per_host=4) == HostPlacement(
        host=0, num_hosts=1, ranks_per_host=4
    )


def test_torchrun_on_two_hosts() -> None:
    environment = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "first",
        "MASTER_PORT": "1234",
    }
    placement = find_placement(environment, ranks_per_host=2)
    assert placement == Placement(
        launcher="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        host=1,
        num_hosts=2,
        master_address="first",
        master_port=1234,
    )


def test_torchrun_says_how_many_hosts_there_are() -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    placement = find_placement(environment | {"GROUP_WORLD_SIZE": "2"}, ranks_per_host=1)
    assert isinstance(placement, Placement)
    assert placement.num_hosts == 2


def test_a_step_of_one_task_is_not_launched() -> None:
    assert is_launched({"RANK": "0"})
    assert is_launched({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    assert not is_launched({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert not is_launched({"SLURM_PROCID": "0"})


def test_the_user_may_say_where_slurms_ranks_meet() -> None:
    environment = SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    placement = find_placement(environment, ranks_per_host=1)
    assert (placement.master_address, placement.master_port) == ("10.0.0.1", 1234)


def test_a_rank_uses_its_own_accelerator() -> None:
    placement = find_placement(SLURM, ranks_per_host=1)
    assert isinstance(placement, Placement)
    assert accelerator_index(placement, num_visible=8) == 1
    assert accelerator_index(placement, num_visible=1) == 0
    crowded = dataclasses.replace(placement, local_world_size=4)
    with pytest.raises(UsageError, match="sees 2 accelerators"):
        accelerator_index(crowded, num_visible=2)


def test_slurm_with_a_task_per_rank() -> None:
    placement = find_placement(SLURM, ranks_per_host=2)
    assert placement == Placement(
        launcher="slurm",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        host=1,
        num_hosts=2,
        master_address="127.0.0.1",
        master_port=job_port(SLURM),
    )


def test_slurm_with_a_task_per_host_is_to_start_a_rank_per_gpu() -> None:
    environment = SLURM | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    placement = find_placement(environment, ranks_per_host=2)
    assert placement == HostPlacement(
        host=1,
        num_hosts=2,
        ranks_per_host=2,
        master_address="127.0.0.1",
        master_port=job_port(SLURM),
    )
    one_gpu = find_placement(environment, ranks_per_host=1)
    assert isinstance(one_gpu, Placement)
    assert (one_gpu.rank, one_gpu.world_size, one_gpu.local_world_size) == (1, 2, 1)


def test_the_script_of_a_batch_job_is_alone() -> None:
    environment = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}
    placement = find_placement(environment, ranks_per_host=1)
    assert isinstance(placement, Placement)
    assert placement.launcher == "none"


def test_slurm_on_one_host_stays_on_loopback() -> None:
    environment = SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    placement = find_placement(environment | {"SLURM_STEP_TASKS_PER_NODE": "4"}, ranks_per_host=1)
    assert placement.master_address == "127.0.0.1"


@pytest.mark.parametrize(
    ("tasks", "host", "expected"),
    [("2(x3),1", 0, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("1,3", 1, 3)],
)
def test_tasks_per_host_are_expanded(tasks: str, host: int, expected: int) -> None:
    environment = SLURM | {
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(host),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_NUM_NODES": "4",
    }
    placement = find_placement(environment, ranks_per_host=1)
    assert isinstance(placement, Placement)
    assert placement.local_world_size == expected


def test_jobs_and_steps_get_ports_of_their_own() -> None:
    ports = {
        job_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(100, 200)
        for step in range(3)
    }
    assert len(ports) == 300
    assert all(15_000 <= port < 30_000 for port in ports)
    assert 29500 not in {job_port({"SLURM_JOB_ID": str(job)}) for job in range(10)}


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not below"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "5"}, "local rank 5"),
        ({"SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS is not set"),
    ],
)
def test_a_broken_environment_names_the_variable(
    environment: dict[str, str], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        find_placement(environment, ranks_per_host=1)
