"""What the emulated device must flag in bad programs, and must not in good ones."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DEVICE = torch.device("emulated", 0)


def _streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)


def _read_in_another_stream() -> tuple[torch.Stream, torch.Stream, Tensor]:
    """Returns the current stream, another one, and numbers of the first that the other reads."""
    own, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    other.wait_stream(own)
    with other:
        numbers.sum()
    return own, other, numbers


# Bad programs: what each must be told.


def _read_without_wait() -> None:
    _, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    with other:
        numbers.sum()


def _write_without_wait() -> None:
    _, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    numbers.sum()
    with other:
        numbers.fill_(2)


def _wait_for_an_older_point() -> None:
    own, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    early = torch.Event(DEVICE)
    early.record(own)
    numbers.mul_(2)
    early.wait(other)
    with other:
        numbers.sum()


def _wait_of_another_stream() -> None:
    own, other = _streams()
    third = torch.Stream(DEVICE)
    numbers = torch.ones(1000, device=DEVICE)
    third.wait_stream(own)
    with other:
        numbers.sum()


def _same_column() -> None:
    _, other = _streams()
    matrix = torch.zeros(50, 50, device=DEVICE)
    torch.accelerator.synchronize()
    matrix[:, 3].fill_(1)
    with other:
        matrix[:, 3].fill_(2)


def _crossing_row_and_column() -> None:
    _, other = _streams()
    matrix = torch.zeros(50, 50, device=DEVICE)
    torch.accelerator.synchronize()
    matrix[:, 3].fill_(1)
    with other:
        matrix[7].fill_(2)


def _free_while_another_stream_reads() -> None:
    _own, _other, numbers = _read_in_another_stream()
    del numbers
    torch.ones(1000, device=DEVICE)


def _reuse_after_a_wait_that_came_too_late() -> None:
    own, other, numbers = _read_in_another_stream()
    del numbers
    torch.ones(1000, device=DEVICE)
    own.wait_stream(other)


def _change_pinned_memory_in_flight(module: Any) -> None:
    host = torch.ones(1000).pin_memory()
    with module.delays(seed=1, most_us=50_000):
        for _ in range(20):
            torch.ones(10, device=DEVICE)
        host.to(DEVICE, non_blocking=True)
        host.fill_(3)
        torch.accelerator.synchronize()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (_read_without_wait, "race: read by aten::sum"),
        (_write_without_wait, "race: write by aten::fill_"),
        (_wait_for_an_older_point, "race: read by aten::sum"),
        (_wait_of_another_stream, "race: read by aten::sum"),
        (_same_column, "race: write by aten::fill_"),
        (_crossing_row_and_column, "race: write by aten::fill_"),
        (_free_while_another_stream_reads, "reused memory: write by aten::fill_"),
        (_reuse_after_a_wait_that_came_too_late, "reused memory: write by aten::fill_"),
    ],
)
def test_a_bad_program_is_flagged(
    device_module: Any, program: Callable[[], None], told: str
) -> None:
    program()
    found = device_module.hazards()
    assert found
    assert told in found[0]
    assert "test_device.py:" in found[0]  # The line of the program, not of torch.


def test_hazards_are_written_to_a_file_for_tests_of_commands(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.txt"
    monkeypatch.setenv("EMULATED_HAZARDS_FILE", str(file))
    _wait_of_another_stream()
    torch.accelerator.synchronize()
    assert "race: read by aten::sum" in file.read_text()


def test_pinned_memory_that_changes_in_flight_is_flagged(device_module: Any) -> None:
    _change_pinned_memory_in_flight(device_module)
    (found,) = device_module.hazards()
    assert "pinned memory changed" in found


# Good programs.


def _wait_for_a_stream() -> None:
    own, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    other.wait_stream(own)
    with other:
        numbers.mul_(2)
    own.wait_stream(other)
    numbers.sum()


def _wait_for_an_event_of_a_third_stream() -> None:
    own, other = _streams()
    third = torch.Stream(DEVICE)
    numbers = torch.ones(1000, device=DEVICE)
    third.wait_stream(own)
    event = torch.Event(DEVICE)
    event.record(third)
    event.wait(other)
    with other:
        numbers.mul_(2)
    own.wait_stream(other)


def _wait_on_the_host() -> None:
    _, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with other:
        numbers.mul_(2)
    torch.accelerator.synchronize()


def _two_readers() -> None:
    own, other = _streams()
    numbers = torch.ones(1000, device=DEVICE)
    other.wait_stream(own)
    numbers.sum()
    with other:
        numbers.sum()
    own.wait_stream(other)


def _columns() -> None:
    _, other = _streams()
    matrix = torch.zeros(50, 50, device=DEVICE)
    torch.accelerator.synchronize()
    matrix[:, ::2].fill_(1)
    with other:
        matrix[:, 1::2].fill_(2)
    torch.accelerator.synchronize()


def _halves() -> None:
    _, other = _streams()
    numbers = torch.zeros(50, device=DEVICE)
    torch.accelerator.synchronize()
    numbers[:25].fill_(1)
    with other:
        numbers[25:].fill_(2)
    torch.accelerator.synchronize()


def _free_with_record_stream() -> None:
    _own, other, numbers = _read_in_another_stream()
    numbers.record_stream(other)
    del numbers
    torch.ones(1000, device=DEVICE)


def _free_and_wait_before_reuse() -> None:
    own, other, numbers = _read_in_another_stream()
    del numbers
    own.wait_stream(other)
    torch.ones(1000, device=DEVICE)


def _free_after_a_wait() -> None:
    own, other, numbers = _read_in_another_stream()
    own.wait_stream(other)
    del numbers
    torch.ones(1000, device=DEVICE)


def _train_in_one_stream() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(4, 16, device=DEVICE)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "program",
    [
        *(_wait_for_a_stream, _wait_for_an_event_of_a_third_stream, _wait_on_the_host),
        *(_two_readers, _columns, _halves, _free_with_record_stream, _free_after_a_wait),
        _free_and_wait_before_reuse,
        _train_in_one_stream,
    ],
)
@pytest.mark.parametrize("seed", [None, 1])
def test_a_good_program_is_not_flagged(
    device_module: Any, program: Callable[[], None], seed: int | None
) -> None:
    if seed is None:
        program()
    else:
        with device_module.delays(seed):
            program()
    assert device_module.hazards() == []


# Asynchrony, synchronisation and memory.


def test_work_is_launched_and_the_host_goes_on(device_module: Any) -> None:
    factor = torch.randn(400, 400, device=DEVICE)
    end = torch.Event(DEVICE)
    device_module.clear()
    with device_module.delays(seed=1, most_us=50_000):
        for _ in range(20):
            factor = factor @ factor
        end.record(torch.accelerator.current_stream(DEVICE))
        assert not end.query()
        end.synchronize()
    assert end.query()
    assert [kind for kind, _ in device_module.synchronizations()] == ["event.synchronize"]


def _items(numbers: Tensor) -> float:
    return float(numbers.sum())


@pytest.mark.parametrize(
    ("wait", "kind"),
    [
        (_items, "item"),
        (lambda numbers: numbers.cpu(), "copy to the host"),
        (lambda numbers: numbers.nonzero(), "result of aten::nonzero"),
        (lambda numbers: numbers[numbers > 0], "result of aten::"),
        (lambda _: torch.ones(3).to(DEVICE), "copy from the host"),
        (lambda _: torch.tensor([1.0, 2.0], device=DEVICE), "copy from the host"),
        (lambda _: torch.ones(3).to(DEVICE, non_blocking=True), "non_blocking copy from pageable"),
        (lambda _: torch.accelerator.synchronize(), "synchronize"),
    ],
)
def test_waits_of_the_host_are_counted_and_can_be_forbidden(
    device_module: Any, wait: Callable[[Tensor], object], kind: str
) -> None:
    numbers = torch.ones(10, device=DEVICE)
    wait(numbers)
    counted = device_module.synchronizations()
    assert any(each.startswith(kind) for each, _ in counted), counted
    assert all("test_device.py:" in line for _, line in counted)
    with (
        pytest.raises(RuntimeError, match=f"the host must not wait here: {kind}"),
        device_module.forbidden_synchronizations(),
    ):
        wait(numbers)


def test_pinned_copies_do_not_wait(device_module: Any) -> None:
    host = torch.arange(10.0).pin_memory()
    back = torch.empty(10).pin_memory()
    with device_module.forbidden_synchronizations():
        doubled = host.to(DEVICE, non_blocking=True) * 2
        back.copy_(doubled, non_blocking=True)
    torch.accelerator.synchronize()
    assert back.tolist() == [2.0 * number for number in range(10)]


def test_a_copy_that_is_read_too_early_is_not_the_last_one(device_module: Any) -> None:
    back = torch.full((10,), 7.0).pin_memory()
    with device_module.delays(seed=1, most_us=50_000):
        for _ in range(20):
            torch.ones(10, device=DEVICE)
        back.copy_(torch.full((10,), 7.0, device=DEVICE), non_blocking=True)
        assert bool(back.isnan().all())
        torch.accelerator.synchronize()
    assert back.tolist() == [7.0] * 10


def test_memory_is_counted_as_cuda_counts_it() -> None:
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    first = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    second = torch.empty(512, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated(DEVICE) == before + 1536
    del first
    assert torch.accelerator.memory_allocated(DEVICE) == before + 512
    assert torch.accelerator.max_memory_allocated(DEVICE) == before + 1536
    del second
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated(DEVICE) == before


def test_a_peak_is_reset_to_what_is_allocated() -> None:
    kept = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    torch.empty(8192, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    allocated = torch.accelerator.memory_allocated(DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == allocated
    torch.empty(1024, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == allocated + 1024
    assert torch.accelerator.memory_allocated(DEVICE) == allocated
    assert kept.numel() == 4096


def test_freed_memory_is_kept_until_it_is_released(device_module: Any) -> None:
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved(DEVICE)
    free, total = torch.accelerator.get_memory_info(DEVICE)
    numbers = torch.empty(2**20, dtype=torch.uint8, device=DEVICE)
    address = numbers.data_ptr()
    assert torch.accelerator.memory_reserved(DEVICE) == reserved + 2**20
    assert torch.accelerator.get_memory_info(DEVICE) == (free - 2**20, total)
    del numbers
    assert torch.accelerator.memory_reserved(DEVICE) == reserved + 2**20
    # A tensor of this size takes it again, in this stream only.
    assert torch.empty(2**20, dtype=torch.uint8, device=DEVICE).data_ptr() == address
    with torch.Stream(DEVICE):
        assert torch.empty(2**20, dtype=torch.uint8, device=DEVICE).data_ptr() != address
    device_module.clear()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(DEVICE) == reserved
    assert torch.accelerator.get_memory_info(DEVICE) == (free, total)
    # The device is awaited first, because its tasks may still use the memory.
    assert [kind for kind, _ in device_module.synchronizations()] == ["empty_cache"]


def test_an_allocator_releases_what_it_has_kept_before_it_gives_up(device_module: Any) -> None:
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved(DEVICE)
    device_module.C.limit_memory(0, reserved + 2**21)
    try:
        torch.empty(2**20, dtype=torch.uint8, device=DEVICE)  # Kept, and too small for the next.
        torch.empty(2**21, dtype=torch.uint8, device=DEVICE)
        assert torch.accelerator.memory_reserved(DEVICE) == reserved + 2**21
    finally:
        device_module.C.limit_memory(0, 0)


def test_memory_used_in_another_stream_is_not_reused_before_its_end(device_module: Any) -> None:
    torch.accelerator.empty_cache()  # What tests before have left would be reused first.
    own, other, numbers = _read_in_another_stream()
    torch.accelerator.synchronize()
    address = numbers.data_ptr()
    with device_module.delays(seed=1, most_us=50_000):
        other.wait_stream(own)
        with other:
            for _ in range(20):
                numbers.sum()
        numbers.record_stream(other)
        del numbers
        second = torch.empty(1000, device=DEVICE)
        assert second.data_ptr() != address
        torch.accelerator.synchronize()
    assert device_module.hazards() == []
    assert torch.empty(1000, device=DEVICE).data_ptr() == address


def test_freed_memory_can_be_poisoned(device_module: Any) -> None:
    torch.accelerator.empty_cache()  # What was freed before is not poisoned.
    with device_module.poison():
        torch.ones(1000, device=DEVICE)
        assert bool(torch.empty(1000, device=DEVICE).isnan().all())


def test_too_much_memory_is_refused(device_module: Any) -> None:
    torch.accelerator.empty_cache()
    reserved = device_module.C.memory(0)["reserved"]
    device_module.C.limit_memory(0, reserved + 2**20)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="emulated device out of memory"):
            torch.empty(2**21, dtype=torch.uint8, device=DEVICE)
        torch.empty(2**19, dtype=torch.uint8, device=DEVICE)
    finally:
        device_module.C.limit_memory(0, 0)


def test_errors_of_the_device_appear_late() -> None:
    indices = torch.tensor([12], device=DEVICE)
    table = torch.ones(10, 2, device=DEVICE)
    torch.nn.functional.embedding(indices, table)
    with pytest.raises(RuntimeError, match="asynchronous error"):
        torch.accelerator.synchronize()


def test_devices_are_not_mixed() -> None:
    here, there = torch.ones(2, device=DEVICE), torch.ones(2, device="emulated:1")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="two devices"):
        here + torch.ones(2)
    assert (here + torch.tensor(1.0)).tolist() == [2.0, 2.0]
    assert there.to(DEVICE).tolist() == [1.0, 1.0]


# Numbers.


def test_random_numbers_continue_from_a_state() -> None:
    torch.manual_seed(5)
    torch.rand(3, device=DEVICE)
    state = torch.get_device_module("emulated").get_rng_state(DEVICE)
    expected = torch.rand(3, device=DEVICE).tolist()
    torch.get_device_module("emulated").set_rng_state(state, DEVICE)
    assert torch.rand(3, device=DEVICE).tolist() == expected
    own = torch.Generator(DEVICE).manual_seed(5)
    other = torch.Generator().manual_seed(5)
    ours = torch.randn(3, device=DEVICE, generator=own)
    assert ours.tolist() == torch.randn(3, generator=other).tolist()


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_training_equals_that_on_a_cpu(precision: torch.dtype | None) -> None:
    def losses(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        made: list[nn.Module] = [nn.Embedding(17, 8), nn.LayerNorm(8), nn.Linear(8, 17)]
        model = nn.Sequential(*made).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(17, (6, 5), generator=torch.Generator().manual_seed(1)).to(device)
        found = []
        for _ in range(5):
            with torch.autocast(device.type, dtype=precision, enabled=precision is not None):
                logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(DEVICE) == pytest.approx(losses(torch.device("cpu")), abs=1e-6)


def test_tied_parameters_stay_tied() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.ModuleList([first, second]).to(DEVICE)
    assert model[0].weight is model[1].weight
