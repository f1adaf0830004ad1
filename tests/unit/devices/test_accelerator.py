"""One module knows what kinds of accelerators there are; everywhere else they are one."""

import pathlib
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import paceline
from paceline.core.errors import UsageError
from paceline.core.hardware import CUDA
from paceline.devices import accelerator

CPU = torch.device("cpu")
_MAY_NAME_KINDS = (
    "devices/accelerator.py",
    "core/hardware.py",  # The names that a user may give.
    "kernels/attention/",  # Triton's kernels, and the test of them on a device.
    "benchmarks/kernels.py",  # Triton's names of what it compiles for.
)


def test_only_the_seam_names_a_kind_of_accelerator() -> None:
    package = pathlib.Path(paceline.__file__).parent
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if not str(path.relative_to(package)).startswith(_MAY_NAME_KINDS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"torch\.cuda\b|[\"']cuda[\"']", line)
    ]
    assert not found


def _with(monkeypatch: pytest.MonkeyPatch, kind: str | None, number: int = 2) -> None:
    """Makes torch report accelerators of a kind."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number if kind else 0)


@pytest.mark.parametrize(
    ("kind", "name", "chosen"),
    [
        (None, "auto", "cpu"),
        (None, "cpu", "cpu"),
        ("cuda", "auto", "cuda"),
        ("cuda", "cpu", "cpu"),
        ("xpu", "auto", "xpu"),
        ("xpu", "xpu", "xpu"),
        ("mps", "auto", "cpu"),  # Ranks cannot communicate on it.
    ],
)
def test_auto_is_an_accelerator_with_collectives(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, name: str, chosen: str
) -> None:
    _with(monkeypatch, kind)
    assert accelerator.device_type(name) == chosen


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (None, "cuda", "torch sees no CUDA device here; use the device cpu"),
        ("cuda", "xpu", "torch sees no xpu device here; use the device cuda or cpu"),
        ("xpu", "cuda", "torch sees no CUDA device here; use the device xpu or cpu"),
    ],
)
def test_a_missing_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, name: str, message: str
) -> None:
    _with(monkeypatch, kind)
    with pytest.raises(UsageError, match=f"^{message}$"):
        accelerator.device_type(name)


def test_a_kind_of_device_has_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "cuda")
    assert accelerator.default_backend(CUDA) == "nccl"
    assert accelerator.default_backend("cpu") == "gloo"
    assert accelerator.device_type_of_backend("nccl") == CUDA
    assert accelerator.device_type_of_backend("gloo") == "cpu"
    assert accelerator.nth_device(CUDA, 1) == torch.device("cuda", 1)
    assert accelerator.nth_device("cpu", 1) == CPU
    assert [*map(str, accelerator.all_accelerators())] == ["cuda:0", "cuda:1"]
    assert accelerator.num_accelerators() == 2
    _with(monkeypatch, None)
    assert accelerator.all_accelerators() == []
    assert accelerator.num_accelerators() == 0
    assert accelerator.device_type_of_backend("nccl") == "cpu"
    assert accelerator.selected_device([torch.device("cuda"), CPU]) == CPU


def test_a_rank_computes_on_the_selected_device_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _with(monkeypatch, "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    selected = accelerator.selected_device([torch.device("cuda"), CPU])
    assert selected == torch.device("cuda", 1)
    assert accelerator.selected_device([CPU]) == CPU  # A group of gloo, on a machine with GPUs.


def test_a_cpu_has_a_clock_and_no_streams() -> None:
    before = accelerator.now(CPU)
    time.sleep(0.01)
    assert 0.01 <= accelerator.seconds_between(before, accelerator.now(CPU)) < 1
    assert accelerator.current_stream(CPU) is None
    assert accelerator.new_stream(CPU) is None
    assert accelerator.point_in_stream(CPU) is None
    assert accelerator.random_state(CPU) is None
    assert not accelerator.pins_memory(CPU)
    accelerator.select(CPU)
    accelerator.synchronize(CPU)
    accelerator.synchronize_stream(CPU)
    accelerator.free_cached_memory(CPU)


def test_tensors_without_data_have_no_streams_either() -> None:
    meta = torch.device("meta")
    accelerator.synchronize(meta)
    assert accelerator.current_stream(meta) is None
    assert accelerator.point_in_stream(meta) is None
    assert not accelerator.pins_memory(meta)


def test_the_profiler_records_the_device() -> None:
    host = ProfilerActivity.CPU
    assert accelerator.profiler_activities(CPU) == [host]
    assert accelerator.profiler_activities(torch.device("cuda")) == [host, ProfilerActivity.CUDA]
    assert accelerator.profiler_activities(torch.device("xpu")) == [host, ProfilerActivity.XPU]


def test_the_history_of_allocations_is_kept_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    calls: list[Any] = []
    recorder = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options), _dump_snapshot=calls.append
    )
    modules = {"cuda": SimpleNamespace(memory=recorder), "xpu": SimpleNamespace()}
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)
    for kind in ("cuda", "xpu", "cpu"):
        accelerator.start_memory_history(torch.device(kind))
        accelerator.write_memory_history(torch.device(kind), tmp_path)
        accelerator.stop_memory_history(torch.device(kind))
    assert calls == [{"max_entries": 1_000_000}, str(tmp_path), {"enabled": None}]


def test_peers_are_listed_where_torch_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "cuda", 3)
    module = SimpleNamespace(can_device_access_peer=lambda first, second: second == 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert accelerator.peer_links() == [
        "cuda:0 <-> cuda:2 peer access",
        "cuda:1 <-> cuda:2 peer access",
    ]
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert accelerator.peer_links() == []
    _with(monkeypatch, None)
    assert accelerator.peer_links() == []
