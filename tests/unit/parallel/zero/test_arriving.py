"""Parameters in flight: who waits, for how long they are marked, and which streams are ordered."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.devices import accelerator
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.zero.flat_parameters import ArrivingParameters

CPU = torch.device("cpu")


class Transfer:
    """A message that gives parameters their new value when somebody waits for it."""

    def __init__(self, parameters: Sequence[nn.Parameter], value: float = 7.0) -> None:
        self._targets = [parameter.data for parameter in parameters]
        self._value = value
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        for target in self._targets:
            target.fill_(self._value)

    def pending(self) -> Pending:
        return Pending("all-gather", 8, [self], CPU)  # type: ignore[list-item]


def _send(parameters: Sequence[nn.Parameter]) -> tuple[ArrivingParameters, Transfer]:
    arriving = ArrivingParameters(parameters, CPU)
    transfer = Transfer(parameters)
    arriving.start(transfer.pending())
    return arriving, transfer


def _make(num: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(num)]


def _saved(value: Any) -> Any:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return torch.load(content, weights_only=False)


READERS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "arithmetic": lambda p: p + 0,
    "a keyword": lambda p: torch.add(input=torch.zeros(()), other=p),
    "only keywords": lambda p: torch.mul(input=p, other=1),
    "a list": lambda p: torch._foreach_add([p], 0.0)[0],
    "with other parameters": lambda p: torch._foreach_add([nn.Parameter(torch.zeros(3)), p], 0.0)[
        1
    ],
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "item": lambda p: torch.tensor([x.item() for x in p]),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_gets_the_new_value_and_its_plain_class_back(reader: str) -> None:
    parameters = _make()
    arriving, transfer = _send(parameters)
    assert arriving.are_in_flight
    assert [type(parameter).__name__ for parameter in parameters] == ["Parameter", "Parameter"]
    assert all(type(parameter) is not nn.Parameter for parameter in parameters)
    assert isinstance(parameters[0], nn.Parameter)
    value = READERS[reader](parameters[0])
    assert value.tolist() == [7.0] * 3
    assert type(value) in (Tensor, nn.Parameter)
    assert all(type(parameter) is nn.Parameter for parameter in parameters)
    assert not arriving.are_in_flight
    assert transfer.num_waits == 1


def test_what_needs_no_value_does_not_wait() -> None:
    parameters = _make()
    arriving, transfer = _send(parameters)
    for parameter in parameters:
        assert parameter.grad is None
        parameter.grad = torch.ones(3)
        parameter.requires_grad = True
        assert parameter.requires_grad
        assert parameter.is_leaf
    assert arriving.are_in_flight
    assert transfer.num_waits == 0


class Own(Tensor):
    """A tensor whose calls are its own."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        cls.calls.append(function.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(keywords or {}))


def test_other_subclasses_get_their_call_after_the_wait() -> None:
    Own.calls.clear()
    (parameter,) = _make(1)
    _send([parameter])
    own = torch.ones(3).as_subclass(Own)
    assert torch.add(parameter, own, alpha=2).tolist() == [9.0] * 3
    _send([parameter])
    assert torch.add(own, other=parameter).tolist() == [8.0] * 3
    assert Own.calls.count("add") == 2


class OwnParameter(nn.Parameter):
    """A parameter of a class of its own."""


def test_each_parameter_gets_its_own_class_back() -> None:
    own, plain = OwnParameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    arriving, _ = _send([own, plain])
    assert (type(own).__name__, type(plain).__name__) == ("OwnParameter", "Parameter")
    assert isinstance(own, OwnParameter)
    arriving.wait()
    assert (type(own), type(plain)) == (OwnParameter, nn.Parameter)


def test_nothing_is_in_flight_before_a_start() -> None:
    arriving = ArrivingParameters(_make(), CPU)
    assert not arriving.are_in_flight
    arriving.wait()
    assert arriving.waits == []


def test_what_has_arrived_already_is_not_marked() -> None:
    parameters = _make()
    arriving = ArrivingParameters(parameters, CPU)
    arriving.start(Pending("all-gather", 0, [], CPU))
    assert not arriving.are_in_flight
    assert all(type(parameter) is nn.Parameter for parameter in parameters)


def test_a_parameter_may_be_gone_before_it_arrives() -> None:
    parameters = _make(3)
    arriving = ArrivingParameters(parameters, CPU)
    transfer = Transfer(parameters)
    reference = weakref.ref(parameters[1])
    del parameters[1]
    gc.collect()
    assert reference() is None
    arriving.start(transfer.pending())
    assert type(parameters[0]) is not nn.Parameter
    del parameters[0]
    gc.collect()
    arriving.wait()
    assert type(parameters[0]) is nn.Parameter


def test_an_error_reaches_every_reader() -> None:
    class Failing:
        def wait(self) -> None:
            raise RuntimeError("connection reset")

    parameters = _make()
    arriving = ArrivingParameters(parameters, CPU)
    arriving.start(Pending("all-gather", 8, [Failing()], CPU))  # type: ignore[list-item]
    for parameter in parameters:
        for _ in range(2):
            with pytest.raises(Exception, match=r"all-gather of 8 B failed: connection reset"):
                parameter.detach()
    assert arriving.are_in_flight


def test_after_a_wait_on_a_cpu_nothing_is_kept() -> None:
    parameters = _make()
    arriving = ArrivingParameters(parameters, CPU)
    pending = Transfer(parameters).pending()
    reference = weakref.ref(pending)
    arriving.start(pending)
    del pending
    arriving.wait()
    gc.collect()
    assert reference() is None
    arriving.wait()
    assert len(arriving.waits) == 1


def test_waits_are_timed_on_a_cpu() -> None:
    arriving, _ = _send(_make())
    assert arriving.is_timed
    arriving.wait()
    ((began, ended),) = arriving.waits
    assert began <= ended
    transfer_of_next = Transfer(_make())
    arriving.start(transfer_of_next.pending())
    arriving.is_timed = False
    arriving.wait()
    assert transfer_of_next.num_waits == 1
    assert len(arriving.waits) == 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The current stream of a device that has streams, as the last entry."""
    current = ["compute"]
    monkeypatch.setattr(accelerator, "current_stream", lambda _device: current[-1])
    return iter([current]).__next__()


def test_every_stream_waits_by_itself_until_the_sender_has(streams: list[str]) -> None:
    parameters = _make()
    arriving, transfer = _send(parameters)
    assert not arriving.is_timed  # Events in a stream cost time; only statistics need them.
    streams.append("side")
    for _ in range(2):
        parameters[0].detach()
        torch._foreach_add(parameters, 1.0)
    assert transfer.num_waits == 1
    assert arriving.are_in_flight  # The compute stream has yet to wait.
    assert type(parameters[1]) is not nn.Parameter
    streams.append("compute")
    parameters[1].detach()
    assert transfer.num_waits == 2
    assert not arriving.are_in_flight
    assert type(parameters[1]) is nn.Parameter
    streams.append("another")
    arriving.wait()
    assert transfer.num_waits == 3
    arriving.wait()
    assert transfer.num_waits == 3


def test_only_waits_that_are_timed_are_recorded_on_a_gpu(streams: list[str]) -> None:
    arriving, _ = _send(_make())
    arriving.wait()
    assert arriving.waits == []
    arriving.is_timed = True
    streams.append("another")
    arriving.wait()
    assert len(arriving.waits) == 1


def test_the_sender_is_the_stream_of_the_last_start(streams: list[str]) -> None:
    parameters = _make()
    arriving, _ = _send(parameters)
    arriving.wait()
    streams.append("side")
    arriving.start(Transfer(parameters).pending())
    streams.append("compute")
    arriving.wait()
    assert arriving.are_in_flight
    streams.append("side")
    arriving.wait()
    assert not arriving.are_in_flight
