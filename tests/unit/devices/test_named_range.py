import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from paceline.devices.named_range import named_range


def test_the_profiler_sees_a_range() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, named_range("mine"):
        torch.ones(3).sum()
    assert "mine" in {event.name for event in profiler.events()}


def test_on_a_gpu_it_is_an_nvtx_range_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with named_range("outer"), pytest.raises(ValueError, match="inside"), named_range("inner"):
        raise ValueError("inside")
    assert calls == ["outer", "inner", "pop", "pop"]


def test_a_compiled_graph_has_none() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        with named_range("mine"):
            return 2 * x

    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
