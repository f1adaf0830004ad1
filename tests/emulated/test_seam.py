"""Every function of the seam that orders does, and copies that must not wait do not."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.checkpoint.dcp_writer import HostBuffers
from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.torch_batches import TorchLoader
from paceline.devices import accelerator
from paceline.parallel import FullyShardedDataParallel, RankPool, bucket_size
from paceline.parallel.bucket_size import measure_group
from paceline.parallel.ranks.pending import drain
from paceline.parallel.traffic import RunTimes
from tests import devices
from tests.emulated.test_device import DEVICE
from tests.unit.data.dataset_factory import write_dataset

_LONG_US = 20_000
"""Longest delay of a task: without a wait, the host would be far ahead of the device."""


@pytest.fixture
def slow_device(device_module: Any) -> Iterator[None]:
    """Delays every task of the device until the test is over."""
    with device_module.delays(1, _LONG_US):
        yield


def _queued(stream: torch.Stream) -> torch.Event:
    """Returns a point of a stream that a slow device reaches in some tenths of a second."""
    with stream:
        numbers = torch.ones(10, device=DEVICE)
        for _ in range(20):
            numbers.add_(1)
        return stream.record_event()


@pytest.mark.usefixtures("slow_device")
def test_waiting_for_a_device_waits_for_all_of_its_streams() -> None:
    point = _queued(torch.Stream(DEVICE))
    assert not point.query()
    accelerator.synchronize(DEVICE)
    assert point.query()


@pytest.mark.usefixtures("slow_device")
def test_waiting_for_a_stream_waits_for_the_current_one() -> None:
    point = _queued(torch.accelerator.current_stream(DEVICE))
    assert not point.query()
    accelerator.synchronize_stream(DEVICE)
    assert point.query()


@pytest.mark.usefixtures("slow_device")
def test_a_duration_is_read_when_it_is_over() -> None:
    began = accelerator.now(DEVICE)
    point = _queued(torch.accelerator.current_stream(DEVICE))
    assert not point.query()
    assert accelerator.seconds_between(began, accelerator.now(DEVICE)) > 0.01
    assert point.query()


@pytest.mark.parametrize("waits", [False, True])
def test_a_point_in_a_stream_orders_who_waits_for_it(device_module: Any, waits: bool) -> None:
    other = torch.Stream(DEVICE)
    with other:
        numbers = torch.ones(1000, device=DEVICE)
        point = accelerator.point_in_stream(DEVICE)
    assert point is not None
    if waits:
        accelerator.wait_in_stream(DEVICE, point)
    numbers.sum()
    assert bool(device_module.hazards()) != waits


def test_following_a_stream_orders_after_all_that_it_has_queued(device_module: Any) -> None:
    other = torch.Stream(DEVICE)
    with other:
        numbers = torch.ones(1000, device=DEVICE)
    accelerator.follow(DEVICE, other)
    numbers.sum()
    assert device_module.hazards() == []


def test_numbers_are_sent_without_a_wait(device_module: Any) -> None:
    device_module.clear()
    with device_module.forbidden_synchronizations():
        sent = accelerator.send_numbers([1.5, -2.0], DEVICE)
    assert sent.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("document_boundaries", [False, True])
def test_a_batch_travels_without_a_wait(
    tmp_path: pathlib.Path, device_module: Any, document_boundaries: bool
) -> None:
    write_dataset(tmp_path, [np.arange(1, 2 + number % 7) for number in range(40)], shard_tokens=64)
    config = LoaderConfig(
        sources=(SourceConfig(place=str(tmp_path)),),
        context_length=8,
        batch_size=2,
        document_boundaries=document_boundaries,
    )
    with TorchLoader(config) as host, TorchLoader(config, device=DEVICE) as loader:
        device_module.clear()
        with device_module.forbidden_synchronizations():
            batches = [next(loader) for _ in range(3)]
        for batch in batches:
            expected = next(host)
            for name in ("tokens", "targets", "positions", "document_ids"):
                found, value = getattr(batch, name), getattr(expected, name)
                assert (found is None) == (value is None)
                assert value is None or torch.equal(found.cpu(), value)
    assert device_module.hazards() == []


def test_a_save_waits_once_however_many_tensors_it_copies(device_module: Any) -> None:
    tensors = {index: torch.full((100,), float(index), device=DEVICE) for index in range(5)}
    buffers = HostBuffers()
    for _ in range(2):  # The second time, into the same memory.
        device_module.clear()
        copies = buffers.copy(tensors)  # type: ignore[arg-type]
        assert [kind for kind, _ in device_module.synchronizations()] == ["synchronize"]
        for index, copy in copies.items():
            assert torch.equal(copy, torch.full((100,), float(index)))  # type: ignore[arg-type]


@pytest.mark.usefixtures("slow_device")
def test_what_a_session_leaves_in_flight_is_over_when_it_ends() -> None:
    point = _queued(torch.Stream(DEVICE))
    assert not point.query()
    drain(DEVICE)
    assert point.query()


class _Message:
    """A message that writes numbers in a stream of its own."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(1000, device=DEVICE)
        program, own = torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)
        own.wait_stream(program)
        with own:
            self.numbers.add_(1)
            self._end = own.record_event()

    def wait(self) -> None:
        accelerator.wait_in_stream(DEVICE, self._end)


def test_timing_a_message_makes_nobody_wait_for_it(device_module: Any) -> None:
    """Otherwise statistics would hide that a program reads a message too early."""
    message = _Message()
    times = RunTimes(DEVICE)
    times.launch(message.numbers.nbytes, 1)
    times.watch(message, accelerator.new_stream(DEVICE))  # type: ignore[arg-type]
    message.numbers.sum()
    assert device_module.hazards() != []


def _measure(rank: int, _world_size: int) -> list[str]:
    device_module = devices.emulated()
    device_module.clear()
    group = dist.group.WORLD
    assert group is not None
    measure_group(group, devices.device_of(rank))
    return [kind for kind, _ in device_module.synchronizations()]


def _read_a_gathered_layer_in_two_streams(rank: int, _world_size: int, waits: bool) -> bool:
    """Returns whether reading full parameters in a second stream is a race."""
    device, device_module = devices.device_of(rank), devices.emulated()
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device))
    layer = model._layers[-1]
    device_module.clear()
    with torch.no_grad():
        layer.start_all_gather()
        layer.wait()  # In the program's stream.
        with torch.Stream(device):
            if waits:
                layer.wait()
            for parameter in layer.parameters:
                parameter.full.sum()
        is_race = bool(device_module.hazards())
        torch.accelerator.synchronize()
        layer.free()
    device_module.clear()
    return is_race


def test_a_message_is_timed_from_an_idle_device_to_an_idle_device() -> None:
    with RankPool(2, backend=devices.backend(), timeout_s=120) as pool:
        for kinds in pool.run(_measure):
            # The times of each size are agreed on by one more message, and those of starts at last.
            num_sizes = kinds.count("copy to the host") - 1
            assert num_sizes >= 1
            assert kinds.count("synchronize") == 2 * bucket_size._REPETITIONS * num_sizes


def test_a_layer_that_is_gathered_is_waited_for_by_every_stream() -> None:
    with RankPool(2, backend=devices.backend(), timeout_s=120) as pool:
        assert pool.run(_read_a_gathered_layer_in_two_streams, True) == [False, False]
        assert pool.run(_read_a_gathered_layer_in_two_streams, False) == [True, True]
