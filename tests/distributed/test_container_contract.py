"""The contract of every reducer container: names, versions, checkpoints, clipping."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from paceline.parallel import DataParallelContainer, RankPool
from tests.distributed.toys import (
    CONTAINERS,
    MODELS,
    data,
    loss_of,
    make_pair,
    oracle_backward,
    require_equal,
)

Pools = Callable[[int], RankPool]


class _Versioned(nn.Linear):
    """Remembers the version in the state that it loads."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _versions(_rank: int, _world_size: int, container: str) -> None:
    inner, plain = (nn.Sequential(_Versioned(4, 4)) for _ in range(2))
    ours = CONTAINERS[container](inner)
    plain.load_state_dict(ours.state_dict())
    assert plain[0].seen == 2
    ours.load_state_dict(plain.state_dict())
    assert inner[0].seen == 2
    outer, plain_outer = nn.ModuleDict({"model": ours}), nn.ModuleDict({"model": plain})
    del plain[0].seen
    plain_outer.load_state_dict(outer.state_dict())
    assert plain[0].seen == 2
    outer.load_state_dict(plain_outer.state_dict())


@pytest.mark.parametrize("container", CONTAINERS)
def test_versions_of_modules_are_saved_and_loaded(rank_pool: Pools, container: str) -> None:
    rank_pool(2).run(_versions, container)


def _names(rank: int, _world_size: int, container: str) -> None:
    ours, oracle = make_pair(rank, "tied", container)
    assert isinstance(ours, DataParallelContainer)
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in oracle.named_parameters()
    ]
    for name, parameter in ours.named_parameters():
        assert ours.get_parameter(name) is parameter
    modules = dict(nn.ModuleDict({"outer": ours}).named_modules())
    assert {f"outer.{name}" for name, _ in oracle.named_modules() if name} < set(modules)
    with pytest.raises(RuntimeError, match=r"Missing key.*\"first\.bias\""):
        ours.load_state_dict({"first.weight": oracle.first.weight})


@pytest.mark.parametrize("container", CONTAINERS)
def test_names_are_those_of_the_inner_module(rank_pool: Pools, container: str) -> None:
    rank_pool(2).run(_names, container)


def _checkpoint(rank: int, world_size: int, container: str, model: str, full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    ours, oracle = make_pair(rank, model, container)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, oracle)]
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    state, of_optimizer = get_state_dict(ours, optimizers[0], options=options)
    plain = get_state_dict(oracle, optimizers[1], options=options)
    assert list(state) == list(plain[0]) == list(get_model_state_dict(ours, options=options))
    assert of_optimizer["state"].keys() == plain[1]["state"].keys()
    assert of_optimizer["param_groups"][0]["params"] == plain[1]["param_groups"][0]["params"]
    other, _ = make_pair(rank, model, container)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    restarted = torch.optim.AdamW(other.parameters(), lr=0.5)
    set_state_dict(
        other, restarted, model_state_dict=state, optim_state_dict=of_optimizer, options=options
    )
    for step in (1, 2):
        loss_of(other(data(step, rank), rank)).backward()
        oracle_backward(oracle, step, world_size)
        for optimizer in (restarted, optimizers[1]):
            optimizer.step()
        require_equal(other, oracle)
        for module in (other, oracle):
            module.zero_grad()
    set_model_state_dict(oracle, get_model_state_dict(other, options=options), options=options)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("model", ["layered", "tied"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_distributed_checkpoint_knows_the_state(
    rank_pool: Pools, container: str, model: str, full: bool
) -> None:
    rank_pool(2).run(_checkpoint, container, model, full)


def _save(rank: int, _world_size: int, path: str) -> None:
    ours, _ = make_pair(rank, "layered", "ddp")
    dcp.save(get_model_state_dict(ours), checkpoint_id=path)


def _load(rank: int, _world_size: int, path: str) -> None:
    torch.manual_seed(5)
    ours = CONTAINERS["flat"](MODELS["layered"]())
    state = get_model_state_dict(ours)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(ours, state)
    torch.manual_seed(0)
    require_equal(ours, MODELS["layered"]())
    assert ours.full_state_dict().keys() == ours.module.state_dict().keys()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_loads_at_another_world_size(rank_pool: Pools, tmp_path: Any) -> None:
    rank_pool(2).run(_save, str(tmp_path))
    rank_pool(3).run(_load, str(tmp_path))


def _clip(rank: int, world_size: int, container: str, norm_type: float, max_norm: float) -> None:
    ours, oracle = make_pair(rank, "layered", container)
    loss_of(ours(data(0, rank), rank)).backward()
    oracle_backward(oracle, 0, world_size)
    norm = ours.clip_grad_norm_(max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected, atol=0, rtol=1e-6)
    require_equal(ours, oracle)
    ours.module.first.bias.grad[0] = float("nan")
    assert not ours.clip_grad_norm_(max_norm, norm_type).isfinite()
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        ours.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=True)
    dist.barrier()


@pytest.mark.parametrize(
    ("norm_type", "max_norm"), [(2.0, 0.01), (2.0, 1e3), (1.0, 0.1), (float("inf"), 0.01)]
)
@pytest.mark.parametrize("container", CONTAINERS)
def test_clipping_is_that_of_one_process(
    rank_pool: Pools, container: str, norm_type: float, max_norm: float
) -> None:
    rank_pool(3).run(_clip, container, norm_type, max_norm)
