"""What a container does with the gradients of each pass, compared with one process."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from paceline.parallel import ShardedDataParallel, ShardedOptimizer
from tests.unit.parallel.zero.ranks import DECAYING, ONE_EACH, SHAPES, Part, Parts, Twins, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::paceline.parallel.OverlapWarning")

ALL = tuple(range(len(SHAPES)))


@pytest.mark.parametrize("bucket_size_mb", [ONE_EACH, 64 / 2**20, None])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_equals_one_process(num_ranks: int, bucket_size_mb: float | None) -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, num_ranks, bucket_size_mb=bucket_size_mb)
        for number in range(4):
            twins.backward(number)
            twins.step(set_to_none=number % 2 == 0)
            twins.require_equal()

    on_ranks(num_ranks, program)


def _accumulate(twins: Twins, *passes: Sequence[Sequence[int]], sends: Sequence[bool]) -> None:
    """Runs passes with the parts that each rank uses; only some are sent."""
    for number, (used, is_sent) in enumerate(zip(passes, sends, strict=True)):
        if is_sent:
            twins.backward(number, *used)
        else:
            with twins.ours.no_sync():
                twins.backward(number, *used)


USES: dict[str, tuple[Sequence[Sequence[int]], ...]] = {
    "all parts": ((ALL, ALL), (ALL, ALL), (ALL, ALL)),
    "the same part missing on one rank": ((ALL, (0, 2)), (ALL, (0, 2)), (ALL, (0, 2))),
    "by turns": (((0, 1), (0, 3)), ((0, 3), (0, 1)), ((0, 1, 2), (0, 4))),
    "only in the first pass": ((ALL, ALL), ((0,), (0,)), ((0,), (0,))),
    "only in the last pass": (((0,), (0,)), ((0,), (0,)), (ALL, ALL)),
    "only in the first pass of the other rank": ((ALL, (0,)), ((0,), (0,)), ((0,), (0,))),
    "only in the last pass of the other rank": (((0,), (0,)), ((0,), (0,)), ((0,), ALL)),
    "some in no pass": (((0, 1), (1, 2)), ((1,), (0,)), ((2,), (0, 1))),
}


@pytest.mark.parametrize(
    "sends", [(True, True, True), (False, False, True), (True, False, True), (False, True, True)]
)
@pytest.mark.parametrize("bucket_size_mb", [ONE_EACH, 64 / 2**20])
@pytest.mark.parametrize("uses", USES)
def test_passes_add_up(uses: str, bucket_size_mb: float, sends: tuple[bool, ...]) -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, bucket_size_mb=bucket_size_mb)
        for _ in range(2):
            _accumulate(twins, *USES[uses], sends=sends)
            twins.step()
            twins.require_equal()

    on_ranks(2, program)


def test_each_step_has_missing_parts_of_its_own() -> None:
    """A rank that had no gradient in one step has one in the next, and the other way round."""

    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        for number, used in enumerate(((ALL, (0,)), ((0,), ALL), (ALL, (0, 2)), ((0,), (0,)))):
            twins.backward(number, *used)
            twins.step()
            twins.require_equal()

    on_ranks(2, program)


@pytest.mark.parametrize("uses", ["all parts", "the same part missing on one rank", "by turns"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clears", ["container", "optimizer"])
def test_gradients_are_dropped_or_set_to_zero_without_a_step(
    clears: str, set_to_none: bool, uses: str
) -> None:
    """A gradient of zero lets momentum and weight decay act, no gradient does not."""

    def program(rank: int) -> None:
        twins = Twins(rank, 2)

        def clear() -> None:
            for side in (twins.ours if clears == "container" else twins.sharded, twins.whole):
                side.zero_grad(set_to_none=set_to_none)

        first, second, _ = USES[uses]
        for number, used in enumerate((first, second)):
            twins.backward(10 * number, *used)
            clear()
            if number == 0:
                twins.step(clear=False)
                twins.require_equal()
            twins.backward(10 * number + 1, (0,), (0,))
            twins.step(clear=False)
            twins.require_equal()
            clear()

    on_ranks(2, program)


def test_clearing_before_any_pass_changes_nothing() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        for set_to_none in (True, False):
            twins.ours.zero_grad(set_to_none)
            twins.sharded.zero_grad(set_to_none)
        assert twins.sharded.gradient_tensors() == []
        twins.step(set_to_none=False)
        twins.backward(0)
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


def test_the_norm_counts_gradients_that_only_another_rank_has() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, bucket_size_mb=ONE_EACH)
        for number, used in enumerate((((0, 1, 2), (3,)), (ALL, ALL))):
            twins.backward(number, *used)
            norm = twins.ours.clip_grad_norm_(0.5)
            expected = nn.utils.clip_grad_norm_(twins.alone.parameters(), 0.5)
            torch.testing.assert_close(norm, expected)
            twins.step()
            twins.require_equal()

    on_ranks(2, program)


def test_the_gradients_of_shards_include_those_that_only_another_rank_had() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, bucket_size_mb=ONE_EACH)
        twins.backward(0, (0, 1, 2), (2,))
        present = {twins.ours.module.parts[index].value for index in (0, 1, 2)}
        own = [s for s in twins.sharded.shards() if s.parameter in present]
        gradients = twins.sharded.gradient_tensors()
        assert [g.numel() for g in gradients] == [s.end - s.start for s in own]

    on_ranks(2, program)


def test_the_norm_of_nothing_is_zero() -> None:
    def program(rank: int) -> float:
        return float(Twins(rank, 2).ours.clip_grad_norm_(1.0))

    assert on_ranks(2, program) == [0.0, 0.0]


def test_after_clipping_a_part_that_nobody_used_may_still_be_used() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, bucket_size_mb=None)
        for number, used in enumerate((ALL, (0, 1), ALL, (0, 2), ALL)):
            twins.backward(number, used, used)
            twins.ours.clip_grad_norm_(1e9)
            if number in (0, 2):
                twins.step()
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


def test_a_gradient_that_was_dropped_from_a_shard_begins_at_zero() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, bucket_size_mb=None)
        twins.backward(0)
        for shard in twins.sharded.shards():
            if shard.parameter is twins.ours.module.parts[1].value:
                shard.tensor.grad = None
        twins.alone.parts[1].value.grad = None
        twins.backward(1)
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


def test_a_gradient_that_was_dropped_from_a_shard_is_no_gradient_of_the_step() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        twins.backward(0)
        for shard in twins.sharded.shards():
            if shard.parameter is twins.ours.module.parts[1].value:
                shard.tensor.grad = None
        twins.alone.parts[1].value.grad = None
        # What is set beside a shard's gradient does not count.
        twins.ours.module.parts[2].value.grad = torch.ones(7)
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


def test_weights_count() -> None:
    weights = (3.0, 1.0)

    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        twins.ours.set_gradient_weight(weights[rank])
        twins.backward(0, only_here=True)
        for other, weight in enumerate(weights):
            (twins.alone(other, 0) * weight / sum(weights)).backward()
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


def test_a_local_gradient_is_not_the_steps_yet() -> None:
    """A pass in no_sync adds to the next pass that is sent, not to a step in between."""

    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        with twins.ours.no_sync():
            twins.backward(0, only_here=True)
        twins.sharded.step()
        twins.require_equal()
        twins.backward(1, only_here=True)
        for flat in twins.flats:
            assert not flat.local_gradients
        for number in (0, 1):
            for other in range(2):
                (twins.alone(other, number) / 2).backward()
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


@pytest.mark.parametrize("clears", ["container", "optimizer"])
def test_a_local_gradient_can_be_dropped(clears: str) -> None:
    """Afterwards a gradient that is set by hand is the step's, as if there had been no pass."""

    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        with twins.ours.no_sync():
            twins.backward(0, only_here=True)
        (twins.ours if clears == "container" else twins.sharded).zero_grad()
        for model in (twins.ours, twins.alone):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


class SharedGradient(nn.Module):
    """Gives two parameters gradients that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((5,), float(n))) for n in range(2))

    def forward(self, rank: int, number: int, _used: object = None) -> torch.Tensor:
        own = torch.arange(5.0) + 10 * number + rank
        return torch.sin(own + (self.first + self.second)).sum()


@pytest.mark.parametrize("sends", [(True, False, False, True), (False, False, True, True)])
def test_parameters_whose_gradients_are_one_tensor(sends: tuple[bool, ...]) -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, SharedGradient, bucket_size_mb=ONE_EACH)
        for _ in range(2):
            _accumulate(twins, *[()] * 4, sends=sends)
            twins.step()
            twins.require_equal()

    on_ranks(2, program)


def test_complex_parameters_are_sent_as_pairs() -> None:
    def make() -> nn.Module:
        return Parts(((3,), (2, 3), (), (5,)), torch.complex64)

    def program(rank: int) -> None:
        twins = Twins(rank, 2, make, bucket_size_mb=None)
        for number, used in enumerate(((ALL[:4], ALL[:4]), ((0, 1), (0, 3)))):
            twins.backward(number, *used)
            twins.step()
            twins.require_equal()

    on_ranks(2, program)


class Strided(nn.Module):
    """Parameters that are dense in another order, or not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(shape, 1, torch.float32) for shape in ((4, 6), (4, 6)))
        self.parts[0].value = nn.Parameter(torch.randn(6, 4).T.fill_(0.5))
        self.parts[1].value = nn.Parameter(torch.ones(4, 12)[:, ::2])

    def forward(self, rank: int, number: int, _used: object = None) -> torch.Tensor:
        return self.parts[0](rank, number) + self.parts[1](rank, number)


def test_parameters_of_any_strides() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 3, Strided, bucket_size_mb=None)
        for number in range(3):
            twins.backward(number)
            twins.step()
            twins.require_equal()
        assert twins.ours.module.parts[0].value.stride() == (1, 4)

    on_ranks(3, program)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.float32)
        self.parts = nn.ModuleList(Part((5,), n, dtype) for n, dtype in enumerate(dtypes))

    def forward(self, rank: int, number: int, used: Sequence[int] | None = None) -> torch.Tensor:
        chosen = range(3) if used is None else used
        return torch.stack([self.parts[index](rank, number).double() for index in chosen]).sum()


def test_parameters_of_several_dtypes() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2, TwoDtypes, bucket_size_mb=None)
        for number, used in enumerate((((0, 1, 2), (0, 1, 2)), ((0, 1), (0, 2)), ((0,), (0, 1)))):
            twins.backward(number, *used)
            twins.step()
            twins.require_equal()

    on_ranks(2, program)


def test_gradients_set_by_hand_are_taken_by_the_step() -> None:
    def program(rank: int) -> None:
        twins = Twins(rank, 2)
        for model in (twins.ours, twins.alone):
            for number, parameter in enumerate(model.parameters()):
                if number != 2:
                    parameter.grad = torch.full_like(parameter, 1.0 + number)
        twins.step()
        twins.require_equal()
        # A reduced gradient stays what it is, and a missing one may be set beside it.
        twins.backward(0, (0, 1), (0, 1))
        for model in (twins.ours.module, twins.alone):
            model.parts[3].value.grad = torch.ones(())
        twins.step()
        twins.require_equal()

    on_ranks(2, program)


def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are() -> None:
    def program(rank: int) -> None:
        alone = Parts()
        ours = ShardedDataParallel(Parts(), 64 / 2**20)
        chosen = (0, 3)
        sharded = ShardedOptimizer(
            [ours.module.parts[index].value for index in chosen], torch.optim.SGD, **DECAYING
        )
        whole = torch.optim.SGD([alone.parts[index].value for index in chosen], **DECAYING)
        for number in range(2):
            ours(rank, number).backward()
            torch.stack([alone(other, number) / 2 for other in range(2)]).sum().backward()
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad()
            ours.zero_grad()
            alone.zero_grad()
        for own, expected in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, expected)

    on_ranks(2, program)
