"""Initial values, saved and loaded states, and agreement of ranks, on ranks of one process."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from paceline.core.errors import UsageError
from paceline.parallel import FullyShardedDataParallel
from paceline.parallel.fsdp.layers import WrapPolicy
from paceline.parallel.same_model import Changes, DisagreementError
from tests.unit.parallel.fsdp.ranks import (
    Blocks,
    data,
    fsdp_ranks,
    require_gradients,
    require_values,
    silent,
)
from tests.unit.parallel.simulation.messages import Region


class Model(nn.Module):
    """Layers of which two share a weight, a scalar, buffers, and too few rows for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.last = nn.Linear(4, 1)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.blocks[0].weight
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(self.tied(x)) * self.scale + self.frozen.sum()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_full_and_sharded_states_are_loaded_by_name(num_ranks: int) -> None:
    def program(rank: int) -> None:
        ours, oracle = FullyShardedDataParallel(Model()), Model()
        with torch.no_grad():
            for tensor in (*oracle.parameters(), oracle.seen):
                tensor.add_(1)
        shards = list(ours.parameters())
        ours.load_state_dict(oracle.state_dict())
        assert all(one is other for one, other in zip(ours.parameters(), shards, strict=True))
        require_values(ours, oracle, 0)
        torch.testing.assert_close(ours(data(0, rank)), oracle(data(0, rank)))
        other = FullyShardedDataParallel(Model())
        ranks.taken()
        other.load_state_dict(ours.state_dict())
        assert not ranks.taken()  # Shards of the same ranks need no messages.
        require_values(other, oracle, 0)
        around = nn.Sequential(other)  # The container is a part of another module.
        with torch.no_grad():
            for tensor in oracle.parameters():
                tensor.add_(1)
        around.load_state_dict({f"0.{name}": value for name, value in oracle.state_dict().items()})
        require_values(other, oracle, 0)
        with pytest.raises(RuntimeError, match=r"size mismatch for last\.weight"):
            ours.load_state_dict({**oracle.state_dict(), "last.weight": torch.zeros(2, 4)})
        with pytest.raises(RuntimeError, match="last"):
            ours.load_state_dict({**oracle.state_dict(), "last.weight": "text"})
        with pytest.raises(RuntimeError, match=r"Missing key.*last\.bias"):
            ours.load_state_dict({k: v for k, v in oracle.state_dict().items() if k != "last.bias"})
        with pytest.raises(UsageError, match=r"would replace the parameters.*without assign=True"):
            ours.load_state_dict(oracle.state_dict(), assign=True)

    with fsdp_ranks(num_ranks) as ranks:
        ranks.run(program)


def test_all_ranks_begin_with_the_values_of_the_first() -> None:
    def program(rank: int) -> None:
        model, oracle = Model(), Model()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()) if rank else ():
                tensor.fill_(rank)
        require_values(FullyShardedDataParallel(model), oracle, 0)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_shards_of_other_ranks_and_replicated_parameters_are_loaded_whole() -> None:
    policy = WrapPolicy(modules=(), classes=(nn.Linear,), rest="replicated")

    full: dict[int, Tensor] = {}

    def program(_rank: int) -> None:
        oracle = Model()
        with torch.no_grad():
            for tensor in oracle.parameters():
                tensor.add_(1)
        replicated = FullyShardedDataParallel(Model(), wrap=policy)
        assert not isinstance(replicated.module.frozen, DTensor)
        replicated.load_state_dict(oracle.state_dict())
        require_values(replicated, oracle, 0)
        sharded = FullyShardedDataParallel(oracle)
        state, gathered = sharded.state_dict(), sharded.full_state_dict()
        full.update({id(value): gathered[name] for name, value in state.items()})
        mesh = init_device_mesh("cpu", (2, 1))
        for options in ({"wrap": policy}, {"process_group": mesh}):
            ours = FullyShardedDataParallel(Model(), **options)
            ours.load_state_dict(state)
            for name, value in ours.full_state_dict().items():
                torch.testing.assert_close(value, gathered[name], msg=name)

    # torch's own gathering of a DTensor, which simulated ranks do not have.
    with (
        mock.patch.object(DTensor, "full_tensor", lambda shard: full[id(shard)]),
        fsdp_ranks(2) as ranks,
    ):
        ranks.run(program)


def _initialize(part: nn.Module) -> None:
    """Gives values that tell how often a module was initialised on its rank, and which rank."""
    with torch.no_grad():
        for number, tensor in enumerate((*part._parameters.values(), *part._buffers.values())):
            if tensor is not None:
                assert type(tensor) in (Tensor, nn.Parameter)
                assert not tensor.is_meta
                values = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
                tensor.copy_(values + number + 100 * dist.get_rank())


def _on_meta(**options: Any) -> FullyShardedDataParallel:
    with torch.device("meta"):
        model = Model()
    return FullyShardedDataParallel(model, **options)


def test_a_model_on_the_meta_device_is_initialised_once_and_alike() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        called: list[nn.Module] = []

        def initialize(part: nn.Module) -> None:
            called.append(part)
            _initialize(part)

        ours = _on_meta(initialize=initialize)
        assert len(called) == len(set(called))
        assert set(called) == {
            part for part in ours.module.modules() if part not in (ours.module.blocks,)
        }
        assert all(isinstance(p, DTensor) for p in ours.parameters())
        assert not ours.module.frozen.requires_grad
        assert ours.module.scale.requires_grad
        ours(data(0, rank)).sum().backward()
        return ours.full_state_dict()

    oracle = Model()
    with torch.no_grad():
        for part in (oracle, *oracle.blocks, oracle.last, oracle.norm):
            for number, tensor in enumerate((*part._parameters.values(), *part._buffers.values())):
                if tensor is not None:
                    values = torch.arange(tensor.numel(), dtype=torch.float32)
                    tensor.copy_(values.view(tensor.shape) + number)
        oracle.tied.bias.copy_(torch.arange(4.0) + 1)
    for num_ranks in (1, 2):
        with fsdp_ranks(num_ranks) as ranks:
            for state in ranks.run(program):
                for name, expected in oracle.state_dict().items():
                    assert torch.equal(state[name], expected), name


def test_only_modules_with_numbers_of_their_own_are_initialised_each_once() -> None:
    called: list[nn.Module] = []

    def program(_rank: int) -> None:
        with torch.device("meta"):
            shared = nn.Linear(2, 2)
            model = nn.Sequential(
                nn.Sequential(shared, nn.Tanh()),
                nn.Sequential(shared, nn.BatchNorm1d(2)),
                nn.Tanh(),
            )
        FullyShardedDataParallel(
            model, wrap=WrapPolicy(classes=(nn.Sequential,)), initialize=called.append
        )
        assert called == [shared, model[1][1]]

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_a_model_on_the_meta_device_has_one_full_layer_at_a_time() -> None:
    alive: list[int] = []

    def program(_rank: int) -> None:
        seen: list[Region] = []

        def initialize(part: nn.Module) -> None:
            # What earlier layers were given has no memory any more.
            alive.append(sum(region.tensor() is not None for region in seen))
            seen.extend(Region(parameter) for parameter in part.parameters(recurse=False))

        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        FullyShardedDataParallel(model, initialize=initialize)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)
    assert alive == [0, 0, 0, 0]


def test_a_model_on_the_meta_device_waits_for_a_state() -> None:
    def program(rank: int) -> None:
        oracle = Model()
        ours = _on_meta()
        ranks.taken()
        for device in ("cpu", torch.device("cpu")):
            _on_meta(device=device)
        # Nothing is broadcast: there are no values.
        assert not [line for line in ranks.taken() if "broadcast" in line]
        with pytest.raises(UsageError, match="have no values yet; pass initialize"):
            ours(data(0, rank))
        assert ours.module.seen.device.type == "cpu"
        ours.load_state_dict(oracle.state_dict())
        require_values(ours, oracle, 0)
        torch.testing.assert_close(ours(data(0, rank)), oracle(data(0, rank)))
        ours(data(0, rank)).sum().backward()
        for other in range(2):
            (oracle(data(0, other)).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_models_that_are_on_the_meta_device_in_part_are_refused() -> None:
    def program(_rank: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2))
        model.append(nn.Linear(2, 2))
        with pytest.raises(
            UsageError, match=r"'0\.bias' is on the meta device and '1\.bias' is not"
        ):
            FullyShardedDataParallel(model)
        with torch.device("meta"):
            hidden = nn.Sequential(nn.Linear(2, 2))
            hidden[0].register_buffer("mask", torch.ones(2), persistent=False)
        message = r"buffer '0\.mask' is on the meta device and in no checkpoint; pass initialize"
        with pytest.raises(UsageError, match=message):
            FullyShardedDataParallel(hidden)
        with torch.device("meta"):
            root = nn.Linear(2, 2)
            root.register_buffer("mask", torch.ones(2), persistent=False)
        with pytest.raises(UsageError, match="buffer 'mask' is on the meta device"):
            FullyShardedDataParallel(root)
        FullyShardedDataParallel(nn.Linear(2, 2))  # Its buffers have values.

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_a_model_on_the_meta_device_takes_a_mesh() -> None:
    def program(_rank: int) -> None:
        ours = _on_meta(initialize=_initialize, process_group=init_device_mesh("cpu", (2, 1)))
        assert ours.module.last.weight.to_local().shape == (1, 4)
        ours = _on_meta(initialize=_initialize, process_group=dist.new_group())
        assert ours.process_group is not dist.group.WORLD

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_models_and_settings_must_be_the_same_on_all_ranks() -> None:
    def models(rank: int) -> None:
        with pytest.raises(DisagreementError, match="rank 1 has parameter 'weight' of shape"):
            FullyShardedDataParallel(nn.Linear(2, 2 + rank))

    def settings(rank: int) -> None:
        with pytest.raises(
            DisagreementError, match=r"rank 0 has settings .*prefetch 1, where rank 1"
        ):
            FullyShardedDataParallel(nn.Linear(2, 2), prefetch=rank + 1)

    with fsdp_ranks(2) as ranks:
        ranks.run(models)
        ranks.run(settings)


def test_ranks_agree_once_on_what_they_freeze() -> None:
    agree = Changes.agree
    told: list[tuple[int, str]] = []

    def agreeing(changes: Changes, change: str, lines: list[str]) -> bool:
        told.append((dist.get_rank(), change))
        return agree(changes, change, lines)

    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Blocks(silent, 2))
        ranks.taken()
        ours.module.blocks[1].weight.requires_grad_(False)
        with torch.no_grad():
            ours(data(0, rank))  # Sends no gradients, so nothing has to be agreed on.
        assert rank not in dict(told)
        for _ in range(2):
            ours(data(0, rank)).sum().backward()
        assert [line.split()[0] for line in ranks.taken()].count("all-reduce") == 0

    with mock.patch.object(Changes, "agree", agreeing):
        with fsdp_ranks(2) as ranks:
            ranks.run(program)
        change = "parameter 'blocks.1.weight' was frozen"
        assert sorted(told) == [(0, change), (1, change)]
        told.clear()
        with fsdp_ranks(1) as ranks:
            ranks.run(program)
        assert not told  # One rank has nobody to agree with.


def test_ranks_that_freeze_different_parameters_say_so() -> None:
    def program(rank: int) -> None:
        ours = FullyShardedDataParallel(Blocks(silent, 2))
        ours.module.blocks[rank].weight.requires_grad_(False)
        with pytest.raises(
            DisagreementError, match=r"'blocks\.0\.weight' of shape .* frozen, where"
        ):
            ours(data(0, rank))

    with fsdp_ranks(2) as ranks:
        ranks.run(program)


def test_a_container_keeps_nothing_of_the_model_that_it_was_made_from() -> None:
    def program(rank: int) -> None:
        model = Model()
        before = copy.deepcopy(model)
        parameters = list(model.parameters())
        ours = FullyShardedDataParallel(model)
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(rank + 7)
        require_values(ours, before, 0)

    with fsdp_ranks(2) as ranks:
        ranks.run(program)
