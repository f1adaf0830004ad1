"""Which modules are layers, what they gather, and what they refuse, on ranks of one process."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import UsageError
from paceline.parallel import FullyShardedDataParallel
from paceline.parallel.fsdp.layers import WrapPolicy
from tests.unit.parallel.fsdp.ranks import Ranks, fsdp_ranks, require_gradients, require_values


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with fsdp_ranks(2) as made:
        yield made


class Sized(nn.Module):
    """A module whose all-gather between two ranks has four times so many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 8 * size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight.sum())


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module, size: int = 0) -> None:
        super().__init__()
        self.first, self.second = first, second
        if size:
            self.gain = nn.Parameter(torch.linspace(1, 2, 8 * size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x * self.gain.mean() if hasattr(self, "gain") else x


class Listed(nn.Module):
    """Elements of a list, of lists and of dictionaries in a list, and lists of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(Sized(1), Sized(2)), Sized(4)])
        self.groups = nn.ModuleList(
            [
                nn.ModuleDict({"a": Sized(5), "b": Pair(Sized(6), Sized(7))}),
                nn.ModuleList([Sized(8)]),
            ]
        )
        self.shifts = nn.ParameterList([torch.ones(8 * 9), torch.ones(8 * 10)])
        self.factors = nn.ParameterDict({"c": nn.Parameter(torch.ones(8 * 11))})
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.groups[1][0](self.groups[0]["b"](self.groups[0]["a"](x)))
        return x + sum(shift.mean() for shift in self.shifts) * self.factors["c"].mean()


def _gathers(ranks: Ranks, make: Callable[[], nn.Module], **options: Any) -> list[list[int]]:
    """Returns the sizes of what the layers gather in forward, in order, against an oracle."""

    def program(rank: int) -> list[int]:
        model = make()
        oracle = copy.deepcopy(model)
        wrap = options.get("wrap")
        if callable(wrap):
            wrap = wrap(model)
        ours = FullyShardedDataParallel(model, wrap=wrap)
        inputs = [torch.linspace(-0.1, 0.1 + other, 8) for other in range(2)]
        ranks.taken()
        output = ours(inputs[rank])
        log = ranks.taken()
        output.sum().backward()
        for other in range(2):
            (oracle(inputs[other]).sum() / 2).backward()
        require_gradients(ours, oracle, rank, 2)
        require_values(ours, oracle)
        assert [name for name, _ in ours.named_parameters()] == [
            name for name, _ in oracle.named_parameters()
        ]
        assert not any(layer.num_present_bytes for layer in ours._layers)
        return [int(line.split()[1]) // 4 for line in log]

    first, second = ranks.run(program)
    assert first == second
    return [first]


def test_elements_of_lists_are_layers_and_so_are_other_modules_with_parameters(
    ranks: Ranks,
) -> None:
    # The model's own numbers; a pair in a list is one layer, one in a dictionary is two.
    assert _gathers(ranks, Listed) == [[9 + 10 + 11, 1 + 2, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("wrap", "gathers"),
    [
        (lambda _: WrapPolicy(classes=(Pair,)), [9 + 10 + 11, 1 + 2, 4, 5, 6 + 7, 8]),
        (lambda m: WrapPolicy(modules=(m.blocks[1],)), [9 + 10 + 11, 1, 2, 4, 5, 6, 7, 8]),
        (
            lambda m: WrapPolicy(classes=(Sized,), modules=(m.blocks[0],)),
            [9 + 10 + 11, 1 + 2, 4, 5, 6, 7, 8],
        ),
        (lambda _: WrapPolicy(classes=(Listed,)), [sum(range(1, 12)) - 3]),
    ],
)
def test_a_policy_chooses_layers_by_class_or_one_by_one(
    ranks: Ranks, wrap: Callable[[Any], WrapPolicy], gathers: list[int]
) -> None:
    assert _gathers(ranks, Listed, wrap=wrap) == [gathers]


def test_parameters_outside_of_layers_may_be_replicated_in_one_layer(ranks: Ranks) -> None:
    # Nothing is gathered for the numbers of the root and for the modules outside of pairs.
    policy = WrapPolicy(classes=(Pair,), rest="replicated")

    def program(rank: int) -> list[str]:
        model = Listed()
        oracle = copy.deepcopy(model)
        ours = FullyShardedDataParallel(model, wrap=policy)
        ranks.taken()
        inputs = [torch.linspace(-0.1, 0.1 + other, 8) for other in range(2)]
        ours(inputs[rank]).sum().backward()
        log = ranks.taken()
        for other in range(2):
            (oracle(inputs[other]).sum() / 2).backward()
        for name, parameter in ours.named_parameters():
            full = dict(oracle.named_parameters())[name]
            if name.startswith(("blocks.0", "groups.0.b")):
                assert type(parameter.grad) is not Tensor
            else:
                assert type(parameter.grad) is Tensor
                torch.testing.assert_close(parameter.grad, full.grad)
        require_values(ours, oracle)
        return [line for line in log if "reduce" in line]

    numbers = (4, 5, 8, 9, 10, 11)
    flags = 8  # Six, padded to a multiple of four.
    assert f"all-reduce {8 * sum(numbers) + flags}" in ranks.run(program)[0]


class Shared(nn.Module):
    """A weight that two layers share, a layer that is named twice, and one inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sized(1), Sized(1)
        self.second.weight = self.first.weight
        self.outer = nn.ModuleList([Pair(Sized(2), Sized(3), size=4)])
        self.inner = self.outer[0].first
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.outer[0](self.second(self.first(x))))


def test_shared_weights_and_modules_are_gathered_with_their_first_owner(ranks: Ranks) -> None:
    # The weight is still on its way into the second layer, and once more at the end.
    assert _gathers(ranks, Shared) == [[1, 1, 2 + 3 + 4, 1]]

    def program(_rank: int) -> None:
        model = Shared()
        ours = FullyShardedDataParallel(model)
        assert model.second.weight is model.first.weight
        assert len(list(ours.parameters())) == 4
        state = ours.full_state_dict()
        assert list(state) == list(Shared().state_dict())
        assert all(type(value) is Tensor for value in state.values())

    ranks.run(program)


def _known_log(ranks: Ranks, make: Callable[[], nn.Module], prefetch: int) -> list[str]:
    """Returns the launches and forwards of a pass whose order is known."""

    def program(_rank: int) -> list[str]:
        model = make()
        ours = FullyShardedDataParallel(model, prefetch=prefetch)
        for name, part in model.named_modules():
            if name:
                part.register_forward_pre_hook(lambda *_, name=name: ranks.note(name))
        for _ in range(2):
            ranks.taken()
            output = ours(torch.ones(8))
            log = ranks.taken()
            output.sum().backward()
        return log

    first, second = ranks.run(program)
    assert first == second
    return first


def test_a_module_inside_of_a_layer_is_no_layer_of_its_own_by_another_name(ranks: Ranks) -> None:
    # One layer ahead: while the second runs, all of the pair is on its way, and then the first.
    assert _known_log(ranks, Shared, 1) == [
        *("all-gather 4", "first", "all-gather 36", "second"),
        *("all-gather 4", "outer.0", "outer.0.first", "outer.0.second", "first"),
    ]


def test_a_module_with_two_names_is_one_layer(ranks: Ranks) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (Sized(size) for size in (1, 2, 3))
            self.named = nn.ModuleDict({"again": self.b})

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.named["again"](self.a(x)))

    assert _known_log(ranks, Named, 2) == [
        *("all-gather 4", "all-gather 8", "all-gather 12", "a", "b", "c")
    ]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 1, 4).repeat(1, 1, 2)
        return self.head(self.attention(x, x, x)[0])


def test_modules_that_read_their_children_are_one_layer(ranks: Ranks) -> None:
    (sizes,) = _gathers(ranks, Attention)
    assert len(sizes) == 2
    (sizes,) = _gathers(ranks, Attention, wrap=lambda _: WrapPolicy(classes=(nn.Linear,)))
    assert len(sizes) == 2


class Recurrent(nn.Module):
    """Has a module that notices in a list of its own when its parameters are set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(2, 1, 4))[0]


class ReadsAfterwards(nn.Module):
    """Reads a weight of its own after the layer that shares it has run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.view(2, 4))) @ self.weight


class Numbers(nn.Module):
    """Has a list of numbers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.ParameterList([torch.ones(4)]), torch.ones(4)])

    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 4) * self.shifts[0][0] + self.shifts[1]


@pytest.mark.parametrize("model", [Recurrent, ReadsAfterwards, Numbers])
def test_parameters_are_there_for_all_that_read_them(ranks: Ranks, model: Any) -> None:
    _gathers(ranks, model)


def test_a_hook_from_before_the_container_has_the_full_parameters(ranks: Ranks) -> None:
    def program(_rank: int) -> None:
        seen: list[type] = []
        model = nn.Sequential(Sized(1))
        model[0].register_forward_pre_hook(lambda part, _: seen.append(type(part.weight.data)))
        ours = FullyShardedDataParallel(model)
        ours(torch.ones(8))
        assert seen == [Tensor]

    ranks.run(program)


class _Calls(TorchDispatchMode):
    """Counts the calls of torch's operations, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_parameters_that_divide_evenly_are_copied_and_cut_in_one_call_per_layer(
    ranks: Ranks,
) -> None:
    def program(_rank: int) -> list[int]:
        numbers = []
        for size in (8, 6):  # Pieces of six numbers have gaps between them.
            model = nn.Sequential(*(Pair(Sized(1), Sized(1)) for _ in range(2)))
            for pair in model:
                pair.first.weight = nn.Parameter(torch.ones(size))
            wrap = WrapPolicy(classes=(Pair,))
            ours = FullyShardedDataParallel(model, wrap=wrap, reshard_after_forward=False)
            with _Calls() as calls:
                loss = ours(torch.ones(8)).sum()
            numbers.append(calls.counts["split_with_sizes_copy"])
            with _Calls() as calls:
                loss.backward()
            numbers.append(calls.counts["split_with_sizes"])
        return numbers

    assert ranks.run(program)[0] == [2, 2, 0, 2]


class _ReadsAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _Reader()(x, self.inner)


class _Reader(list):  # type: ignore[type-arg]
    """No module, cannot be hashed, and has a method with a `self` of its own."""

    def __call__(self, x: Tensor, inner: nn.Linear) -> Tensor:
        return x @ inner.weight


def test_a_module_that_reads_another_ones_parameters_is_named(ranks: Ranks) -> None:
    def program(_rank: int) -> None:
        for model, name in (
            (nn.Sequential(nn.Identity(), _ReadsAnother()), "1"),
            (_ReadsAnother(), "_ReadsAnother"),
        ):
            ours = FullyShardedDataParallel(model)
            message = f"module '{name}' reads parameters of another module.*WrapPolicy"
            with pytest.raises(UsageError, match=message) as caught:
                ours(torch.ones(2, 4))
            assert isinstance(caught.value.__cause__, RuntimeError)
        whole = FullyShardedDataParallel(_ReadsAnother(), wrap=WrapPolicy(classes=(_ReadsAnother,)))
        whole(torch.ones(2, 4)).sum().backward()

    ranks.run(program)


def test_other_errors_of_a_module_are_passed_on(ranks: Ranks) -> None:
    def program(_rank: int) -> None:
        for error in (RuntimeError("too small"), ZeroDivisionError()):
            model = nn.Sequential(nn.Linear(4, 4))
            ours = FullyShardedDataParallel(model)

            def fail(*_: Any, error: Exception = error) -> None:
                raise error

            model[0].register_forward_hook(fail)
            with pytest.raises(type(error)) as caught:
                ours(torch.ones(2, 4))
            assert caught.value is error
            # The model has its shards again, and nothing has memory.
            assert list(model.parameters()) == list(ours.parameters())
            assert not any(layer.num_present_bytes for layer in ours._layers)

    ranks.run(program)


class _Aliased(nn.Module):
    def __init__(self, keep: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.kept = keep(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    "keep",
    [lambda weight: [weight], lambda weight: (1, {"a": [weight]}), lambda weight: {"a": weight}],
)
def test_another_reference_to_a_parameter_is_refused(keep: Callable[[nn.Parameter], Any]) -> None:
    def program(_rank: int) -> None:
        with pytest.raises(UsageError, match="'_Aliased' keeps parameter 'weight' in 'kept' too"):
            FullyShardedDataParallel(_Aliased(keep))
        nested = nn.Sequential(nn.Linear(4, 4), _Aliased(keep))
        with pytest.raises(UsageError, match=r"'1' keeps parameter '1\.weight' in 'kept' too"):
            FullyShardedDataParallel(nested)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_a_parameter_that_is_a_buffer_too_is_refused() -> None:
    def program(_rank: int) -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("kept", model.weight)
        with pytest.raises(UsageError, match="'Linear' keeps parameter 'weight' in '_buffers' too"):
            FullyShardedDataParallel(model)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_attributes_that_are_no_reference_are_allowed() -> None:
    def program(_rank: int) -> None:
        for kept in (
            [1, "a"],
            {"a": torch.ones(2)},
            lambda: None,
            nn.Parameter(torch.ones(2)).data,
        ):
            FullyShardedDataParallel(_Aliased(lambda _, kept=kept: kept))
        # Another model's parameter is none of this container's.
        FullyShardedDataParallel(_Aliased(lambda _: [nn.Parameter(torch.ones(2))]))

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def test_a_policy_without_a_match_is_refused() -> None:
    def program(_rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(UsageError, match=r"none of \['Conv2d', 'LSTM'\]; name classes"):
            FullyShardedDataParallel(model, wrap=WrapPolicy(classes=(nn.Conv2d, nn.LSTM)))
        with pytest.raises(UsageError, match="none of the given modules; name classes"):
            FullyShardedDataParallel(model, wrap=WrapPolicy(modules=(nn.Linear(2, 2),)))

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def _int_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return model


def _compiled_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile()
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (_int_parameter, {}, r"parameter 'steps' is torch.int64; only real floating-point"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), {}, "'weight' is torch.complex64"),
        (_compiled_part, {}, "module '1' is compiled"),
        (lambda: torch.compile(nn.Linear(2, 2)), {}, "module 'OptimizedModule' is compiled"),
        (nn.GELU, {}, "no parameters"),
        *(
            (lambda: nn.Linear(2, 2), {name: torch.int32}, f"{name} must be a floating-point dtype")
            for name in ("compute_dtype", "reduce_dtype", "output_dtype")
        ),
        (lambda: nn.Linear(2, 2), {"prefetch": -1}, "prefetch must not be negative, got -1"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    make: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    def program(_rank: int) -> None:
        with pytest.raises(UsageError, match=message):
            FullyShardedDataParallel(make(), **options)

    with fsdp_ranks(1) as ranks:
        ranks.run(program)


def _replace(model: nn.Module) -> None:
    model[0].bias = nn.Parameter(torch.zeros(4))


def _remove(model: nn.Module) -> None:
    del model[0].bias


def _allocate_again(model: nn.Module) -> None:
    model.to_empty(device="cpu")


def _convert(model: nn.Module) -> None:
    model.double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace, r"parameter '0\.bias' was replaced after its container was created"),
        (_remove, r"parameter '0\.bias' was replaced after its container was created"),
        (_allocate_again, r"the memory of parameter '0\.weight' was replaced after its container"),
        (_convert, r"'0\.weight' was converted to torch\.float64 on cpu after .* torch\.float32"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_that_was_replaced_is_refused(
    change: Callable[[nn.Module], None], message: str, num_ranks: int
) -> None:
    def program(_rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        ours = FullyShardedDataParallel(model)
        ours(torch.ones(2, 4))
        change(model)
        with pytest.raises(UsageError, match=message):
            ours(torch.ones(2, 4))

    with fsdp_ranks(num_ranks) as ranks:
        ranks.run(program)


class _Returns(nn.Module):
    """Returns what a function makes of its parameter and its input."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.large = nn.Parameter(torch.randn(4, 2**17))
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self, x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, _: m.weight[:2], "layer '0' returns a view of its own parameters.*clone"),
        (lambda m, _: {"a": [m.large.T]}, "layer '0' returns a view of its own parameters"),
        (lambda m, x: iter([x @ m.weight.T]), "layer '0' returns a list_iterator, in which no"),
        (lambda m, x: {x @ m.weight.T}, "layer '0' returns a set, in which no tensor was found"),
    ],
)
def test_an_output_of_which_backward_could_not_tell_is_refused(
    ranks: Ranks, make: Callable[[Any, Tensor], Any], message: str
) -> None:
    def program(_rank: int) -> None:
        ours = FullyShardedDataParallel(nn.Sequential(_Returns(make)))
        with pytest.raises(UsageError, match=message):
            ours(torch.ones(2, 4))

    ranks.run(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda m, x: {"loss": (x @ m.weight.T).sum(), "none": None},
        lambda m, x: ([x @ m.weight.T], x.shape, x),
        lambda m, x: (x @ m.weight.T).to_sparse(),
    ],
)
def test_nested_and_sparse_outputs_are_watched(
    ranks: Ranks, make: Callable[[Any, Tensor], Any]
) -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = _Returns(make)
        oracle = copy.deepcopy(model)
        ours = FullyShardedDataParallel(nn.Sequential(model))

        def loss(output: Any) -> Tensor:
            if isinstance(output, dict):
                return output["loss"]
            first = output[0][0] if isinstance(output, tuple) else output
            return first.sum()

        ranks.taken()
        loss(ours(torch.full((2, 4), rank + 1.0))).backward()
        assert [line.split()[0] for line in ranks.taken()] == [
            *["all-gather"] * 4,  # Each twice: freed after the forward, gathered for backward.
            "reduce-scatter",
        ]
        for other in range(2):
            (loss(oracle(torch.full((2, 4), other + 1.0))) / 2).backward()
        oracle = nn.Sequential(oracle)
        require_gradients(ours, oracle, rank, 2)

    ranks.run(program)


def test_an_output_without_tensors_is_allowed_where_no_gradient_is_needed(ranks: Ranks) -> None:
    def program(_rank: int) -> None:
        ours = FullyShardedDataParallel(nn.Sequential(_Returns(lambda m, x: "text")))
        with torch.no_grad():
            assert ours(torch.ones(2, 4)) == "text"
        ours = FullyShardedDataParallel(nn.Sequential(_Returns(lambda m, x: None)))
        assert ours(torch.ones(2, 4)) is None

    ranks.run(program)


def test_a_layer_that_passes_its_input_on_is_not_needed_for_its_gradient(ranks: Ranks) -> None:
    class Carries(Sized):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, carried = pair
            return super().forward(x), carried

    def program(rank: int) -> list[str]:
        ours = FullyShardedDataParallel(nn.Sequential(Carries(1), Carries(2), Carries(3)))
        oracle = nn.Sequential(Carries(1), Carries(2), Carries(3))
        x = torch.ones(8, requires_grad=True) * 0.1
        for _ in range(2):
            ranks.taken()
            first, carried = ours((x, x * 1.0))
            ranks.taken()
            # The gradient of what is carried comes first, and needs no layer.
            loss = first.sum() + F.gelu(carried).sum()
            loss.backward(retain_graph=True)
            log = ranks.taken()
            first, carried = oracle((x, x * 1.0))
            (first.sum() + F.gelu(carried).sum()).backward(retain_graph=True)
        require_gradients(ours, oracle, rank, 2)
        return log

    assert [line for line in ranks.run(program)[0] if "gather" in line] == [
        "all-gather 8",
        "all-gather 4",
    ]
