import dataclasses
import logging
import pathlib
import types

import msgspec
import pytest
import torch
from torch import Tensor

from paceline.kernels import explain_backend
from paceline.kernels.attention import api, self_test
from paceline.kernels.attention.op import attention_op
from paceline.kernels.attention.self_test import (
    CASES,
    RESULTS,
    TOLERANCES,
    Attention,
    Case,
    CaseResult,
    SelfTest,
    TestedDType,
    compare,
    objection_to_triton,
    run_self_test,
    setting_of,
    torch_attention,
    triton_attention,
)

CPU = torch.device("cpu")
SMALL = Case(
    dtype="float32", head_dim=16, causal=True, batch=1, num_heads=4, num_kv_heads=2, length=100
)
DEVICE = torch.device("cuda:0")
NAMES = ("output", "dq", "dk", "dv")


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    scale = query.shape[-1] ** -0.5
    output, _ = attention_op(query, key, value, 0 if causal else None, scale, "tiled")
    return output


def changed(change: Attention) -> Attention:
    """Returns SDPA whose output a wrong kernel has changed."""

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        return change(query, key, torch_attention(query, key, value, causal), causal)

    return attend


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_right_implementation_passes(dtype: TestedDType, causal: bool) -> None:
    case = dataclasses.replace(SMALL, dtype=dtype, causal=causal, length=300, is_timed=False)
    (result,) = compare(CPU, [case], tiled_attention)
    assert tuple(result.errors) == NAMES
    assert all(0 < error < TOLERANCES[dtype] for error in result.errors.values())
    assert result.fault is None
    assert result.time_s is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off if there is a GPU")
def test_the_kernels_pass_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    (result,) = compare(CPU, [dataclasses.replace(SMALL, is_timed=False)], triton_attention)
    assert result.fault is None
    assert tuple(result.errors) == NAMES
    assert result.time_s is None


def _with_a_late_position_lost(_q: Tensor, _k: Tensor, output: Tensor, _c: bool) -> Tensor:
    lost = torch.ones_like(output)
    lost[:, :, 270] = 0
    return output * lost


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        # Late positions of a causal mask are small next to the first ones.
        (changed(_with_a_late_position_lost), "output"),
        (lambda q, k, v, _causal: torch_attention(q, k, v, False), "output"),
        # Right forward, wrong backward.
        (lambda q, k, v, c: torch_attention(q * 2 - q.detach(), k, v, c), "dq"),
        (lambda q, k, v, c: torch_attention(q, k * 2 - k.detach(), v, c), "dk"),
        (lambda q, k, v, c: torch_attention(q, k, v * 2 - v.detach(), c), "dv"),
    ],
)
def test_a_wrong_kernel_is_found(dtype: TestedDType, wrong: Attention, name: str) -> None:
    case = dataclasses.replace(SMALL, dtype=dtype, length=300)
    (result,) = compare(CPU, [case], wrong)
    assert str(result.fault).startswith(f"{name} differs by ")
    assert result.time_s is None
    objection = SelfTest(setting="", cases=(result,)).objection
    assert "wrong on this device (" in str(objection)
    assert str(case) in str(objection)


def test_reduced_precision_of_float32_is_found() -> None:
    def truncate(tensor: Tensor) -> Tensor:
        return tensor + ((tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) - tensor).detach()

    def tf32(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        return torch_attention(truncate(query), truncate(key), truncate(value), causal)

    (result,) = compare(CPU, [SMALL], tf32)
    assert str(result.fault).startswith("output differs by ")


def test_a_kernel_that_fails_ends_the_test() -> None:
    def fail(*_arguments: object) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    results = compare(CPU, [SMALL, SMALL], fail)
    assert len(results) == 1
    assert results[0].fault == "RuntimeError: an illegal memory access was encountered"
    (result,) = compare(CPU, [SMALL], changed(lambda _q, _k, output, _c: output * float("nan")))
    assert result.fault == "some results are not finite"


def test_the_slower_of_two_right_ones_is_not_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def taking(seconds: float) -> Attention:
        def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
            nonlocal now_s
            now_s += seconds
            return torch_attention(query, key, value, causal)

        return attend

    monkeypatch.setattr(self_test, "time", types.SimpleNamespace(perf_counter=lambda: now_s))
    slow = SelfTest(setting="", cases=compare(CPU, [SMALL], taking(0.003), taking(0.002)))
    assert str(slow.objection).endswith(
        "no faster than SDPA on this device "
        "(float32, 100 tokens, heads of 16, causal: 3 ms against 2 ms)"
    )
    fast = SelfTest(setting="", cases=compare(CPU, [SMALL], taking(0.001), taking(0.002)))
    assert fast.objection is None
    mixed = dataclasses.replace(fast, cases=fast.cases + slow.cases)
    assert mixed.objection == slow.objection


def test_every_tiling_of_the_table_and_every_mask_is_covered() -> None:
    timed = {(case.dtype, case.head_dim, case.causal) for case in CASES if case.is_timed}
    assert len(timed) == 2 * 3 * 2
    ragged = [case for case in CASES if not case.is_timed]
    assert {(case.dtype, case.causal) for case in ragged} == {
        (dtype, causal) for dtype in TOLERANCES for causal in (True, False)
    }
    assert all(case.length % 16 and case.num_kv_heads < case.num_heads for case in ragged)


def _result(*, error: float = 0.0, time_s: float | None = 1.0) -> CaseResult:
    return CaseResult(
        case=SMALL, errors=dict.fromkeys(NAMES, error), time_s=time_s, sdpa_time_s=2.0
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pytest.MonkeyPatch:
    """A machine that says it has a GPU, and a new cache directory."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_AUTOTUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    objection_to_triton.cache_clear()
    return monkeypatch


def _record(*results: CaseResult) -> None:
    setting = setting_of(DEVICE)
    with RESULTS.locked():
        RESULTS.add(setting, SelfTest(setting=setting, cases=results))
    objection_to_triton.cache_clear()  # as in a new process


def test_a_recorded_verdict_decides(gpu: pytest.MonkeyPatch) -> None:
    assert explain_backend(DEVICE).backend == "sdpa"
    for results, backend, reason in (
        ([_result(), _result(time_s=None)], "triton", "right and faster than SDPA"),
        ([_result(), _result(error=3e-5)], "sdpa", "wrong on this device"),
        ([_result(), _result(time_s=2.0)], "sdpa", "no faster than SDPA"),
        ([_result(time_s=None)], "sdpa", "have not been tested"),
        ([], "sdpa", "have not been tested"),
    ):
        _record(*results)
        choice = explain_backend(DEVICE)
        assert choice.backend == backend
        assert reason in choice.reason
    _record(_result())
    assert explain_backend(DEVICE, dtype=torch.bfloat16).backend == "triton"
    assert explain_backend(DEVICE, return_lse=True).backend == "triton"
    assert explain_backend(DEVICE, head_dim=300).backend == "sdpa"
    assert explain_backend(DEVICE, head_dim=300, return_lse=True).backend == "tiled"


@pytest.mark.parametrize("other", ["device", "capability", "torch", "triton", "kernels", "tilings"])
def test_a_record_of_another_setting_does_not_count(gpu: pytest.MonkeyPatch, other: str) -> None:
    import triton

    _record(_result())
    assert explain_backend(DEVICE).backend == "triton"
    if other == "device":
        gpu.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    elif other == "capability":
        gpu.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    elif other == "torch":
        gpu.setattr(torch, "__version__", "2.99.0")
    elif other == "triton":
        gpu.setattr(triton, "__version__", "3.99.0")
    elif other == "kernels":
        gpu.setattr(self_test, "_digest", lambda: "of other sources")
    else:
        gpu.setenv("PACELINE_AUTOTUNE", "1")
    objection_to_triton.cache_clear()
    assert "have not been tested" in explain_backend(DEVICE).reason


@pytest.mark.filterwarnings("error:Dynamo detected a call to a .*cache")
def test_a_look_at_the_record_compiles_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(tensor: Tensor) -> Tensor:
        chosen = explain_backend(DEVICE, head_dim=tensor.shape[-1]).backend
        return tensor + 1 if chosen == "triton" else tensor

    def objection(_device: torch.device) -> None:
        (tmp_path / "read").write_text("The compiler can trace no access to files.")

    pytest.importorskip("triton")
    monkeypatch.setattr(api, "objection_to_triton", objection)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2, 3)), torch.ones(2, 3))


def test_the_digest_changes_with_a_kernel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = self_test._digest()
    (tmp_path / "triton").mkdir()
    (tmp_path / "self_test.py").write_bytes(pathlib.Path(self_test.__file__).read_bytes())
    for source in (pathlib.Path(self_test.__file__).parent / "triton").glob("*.py"):
        (tmp_path / "triton" / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(self_test, "__file__", str(tmp_path / "self_test.py"))
    assert self_test._digest() == own
    with (tmp_path / "triton" / "forward.py").open("a") as kernel:
        kernel.write("# faster\n")
    assert self_test._digest() != own


@pytest.mark.parametrize("damage", ["{half a", "[]", '{"x": {"cases": 1}}', "\xff"])
def test_a_damaged_record_is_told_and_ignored(
    gpu: pytest.MonkeyPatch, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    RESULTS.path.parent.mkdir(parents=True)
    RESULTS.path.write_bytes(damage.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert "have not been tested" in explain_backend(DEVICE).reason
        explain_backend(DEVICE)
    assert caplog.text.count("attention-self-test.json cannot be read") == 1


def test_a_self_test_is_recorded_for_later_processes(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(self_test, "CASES", (SMALL,))
    gpu.setattr(self_test, "compare", lambda _device, _cases, _candidate: (_result(),))
    assert explain_backend(DEVICE).backend == "sdpa"
    result = run_self_test(DEVICE)
    assert explain_backend(DEVICE).backend == "triton"
    assert RESULTS.read() == {setting_of(DEVICE): result}
    assert msgspec.json.decode(msgspec.json.encode(result), type=SelfTest) == result


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_the_kernels_are_right_on_this_gpu(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run_self_test(DEVICE)
    assert [case.fault for case in result.cases] == [None] * len(CASES)
    choice = explain_backend(DEVICE)
    assert choice.backend == ("sdpa" if result.objection else "triton")
    objection_to_triton.cache_clear()
