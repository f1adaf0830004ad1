"""Tests of who is corrupted: ranks that differ from most, and ranks that changed by themselves."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.core.strategies import StrategyName
from paceline.health.checksum import StateChecksum, StateTensor, compare_replicas, state_tensors
from tests.unit.health.ranks import agreed, on_ranks

CPU = torch.device("cpu")
NAMES = ("embedding", "attention", "head")


def _named(
    changes: dict[str, float] | None = None,
    *,
    names: tuple[str, ...] = NAMES,
    is_replicated: bool = True,
) -> list[StateTensor]:
    """Returns a state whose tensors begin with other numbers where `changes` says so."""
    found = []
    for size, name in enumerate(names, start=5):
        values = torch.arange(float(size))
        values[0] = (changes or {}).get(name, 0.0)
        found.append(StateTensor(name=name, values=values, is_replicated=is_replicated))
    return found


def _compared(
    *changes: dict[str, float], names: tuple[str, ...] = NAMES
) -> Callable[[int], str | None]:
    """Returns the comparison of ranks of which each has its own changes."""
    return lambda rank: compare_replicas(_named(changes[rank], names=names), CPU)


def test_agreement_costs_one_message_of_two_numbers() -> None:
    found, messages = on_ranks(3, _compared({}, {}, {}))
    assert found == [None] * 3
    assert messages == ["all-reduce of 2 x torch.int64 among 3"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("corrupted", [0, 1, 2])
def test_the_minority_is_named_with_the_first_tensor_that_differs(
    name: str, corrupted: int
) -> None:
    changes: list[dict[str, float]] = [{}, {}, {}]
    changes[corrupted] = dict.fromkeys(NAMES[NAMES.index(name) :], 7.0)
    expected = f"rank {corrupted} differs from 2 of 3 ranks, first in {name}"
    assert agreed(3, _compared(*changes)) == expected


def test_a_state_of_one_tensor_is_compared_too() -> None:
    found = agreed(3, _compared({}, {"all": 1.0}, {}, names=("all",)))
    assert found == "rank 1 differs from 2 of 3 ranks, first in all"


def test_every_rank_of_the_minority_is_named_with_its_own_tensor() -> None:
    found = agreed(5, _compared({}, {"head": 1.0}, {}, {"attention": 1.0}, {}))
    assert found == (
        "rank 1 differs from 3 of 5 ranks, first in head; "
        "rank 3 differs from 3 of 5 ranks, first in attention"
    )


def test_a_message_names_four_ranks_at_most() -> None:
    found = agreed(11, _compared(*[{"head": 1.0}] * 5, *[{}] * 6))
    assert re.findall(r"rank (\d+) differs from 6 of 11", found) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_a_majority_nobody_is_blamed(num_ranks: int) -> None:
    half: list[dict[str, float]] = [{}] * (num_ranks // 2)
    found = agreed(num_ranks, _compared(*half, *[{"attention": 2.0}] * (num_ranks // 2)))
    assert found.startswith(f"ranks 0 and {num_ranks // 2} differ, first in attention, and without")
    assert "set watch.hash_at_rest" in found


def test_swapped_tensors_differ_though_all_bits_are_there() -> None:
    def program(rank: int) -> str | None:
        first, second = torch.zeros(4), torch.ones(4)
        values = (second, first) if rank == 1 else (first, second)
        tensors = [
            StateTensor(name=name, values=each, is_replicated=True)
            for name, each in zip(("first", "second"), values, strict=True)
        ]
        return compare_replicas(tensors, CPU)

    assert agreed(3, program) == "rank 1 differs from 2 of 3 ranks, first in first"


def test_shards_may_differ_among_ranks() -> None:
    """Of a sharded state, every rank has other values; only what all have whole is compared."""

    def program(rank: int) -> str | None:
        shards = _named({"embedding": float(rank)}, is_replicated=False)
        whole = [StateTensor(name="norm", values=torch.ones(3), is_replicated=True)]
        return compare_replicas([*shards, *whole], CPU)

    assert on_ranks(2, program)[0] == [None, None]


@pytest.mark.parametrize(
    ("strategy", "has_all_weights", "has_all_state"),
    [("ddp", True, True), ("zero2", True, False), ("fsdp", False, False)],
)
def test_a_state_is_weights_and_what_optimizers_keep_of_each(
    strategy: StrategyName, has_all_weights: bool, has_all_state: bool
) -> None:
    """Only what the strategy leaves whole on all ranks can be compared among them."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["hint"] = "no tensor"
    found = state_tensors(model, [optimizer], strategy)
    momenta = [optimizer.state[each]["momentum_buffer"] for each in (model.weight, model.bias)]
    for tensor, values in zip(found, [model.weight, model.bias, *momenta], strict=True):
        assert torch.equal(tensor.values, values)
    assert [(tensor.name, tensor.is_replicated) for tensor in found] == [
        ("weight", has_all_weights),
        ("bias", has_all_weights),
        ("momentum_buffer of weight", has_all_state),
        ("momentum_buffer of bias", has_all_state),
    ]


def test_a_state_without_a_checksum_is_not_damaged() -> None:
    assert not StateChecksum(_named, CPU).is_damaged()


def test_a_state_is_damaged_until_its_checksum_is_taken_again() -> None:
    tensors = _named()
    checksum = StateChecksum(lambda: tensors, CPU)
    checksum.update()
    assert not checksum.is_damaged()
    tensors[1].values[2] += 1
    assert checksum.is_damaged()
    assert checksum.is_damaged(), "a look does not repair it"
    checksum.update()
    assert not checksum.is_damaged()


def test_shards_are_checked_at_rest() -> None:
    tensors = _named(is_replicated=False)
    checksum = StateChecksum(lambda: tensors, CPU)
    checksum.update()
    tensors[2].values[0] = -1.0
    assert checksum.is_damaged()


def test_all_ranks_learn_which_ones_are_damaged_and_where() -> None:
    def program(rank: int) -> tuple[str, str]:
        tensors = _named()
        checksum = StateChecksum(lambda: tensors, CPU)
        checksum.update()
        if rank:
            for tensor in tensors[rank:]:
                tensor.values[0] = 9.0
        checksum.is_damaged()
        damaged = checksum.explain()
        checksum.update()  # As after a rollback.
        return damaged, checksum.explain()

    assert agreed(3, program) == (
        "rank 1: attention has changed since the last update; "
        "rank 2: head has changed since the last update",
        "",
    )
