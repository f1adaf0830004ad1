import json
import logging
import pathlib

import pytest
import torch

pytest.importorskip("triton")

from paceline.kernels.attention.layout import ForwardInputs
from paceline.kernels.attention.triton import backend
from paceline.kernels.attention.triton.backend import (
    TILINGS,
    candidates,
    search,
    triton_forward,
    tuned_tilings,
)
from paceline.kernels.attention.triton.launch import KernelLaunch, architecture_of
from paceline.kernels.attention.triton.tile_sizes import Tiling, choose_tilings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERY = torch.randn(1, 2, 40, 16, device=DEVICE)
KEY = torch.randn(1, 1, 40, 16, device=DEVICE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend._tuned.cache_clear()


def _seconds(launch: KernelLaunch) -> float:
    """Returns a fake time, lowest for tiles of 32 x 16 with few warps and stages."""
    blocks = (int(launch.constants[f"BLOCK_{side}"]) for side in ("QUERIES", "KEYS"))
    return _pretended_seconds(Tiling(*blocks, launch.tiling.num_warps, launch.tiling.num_stages))


def _pretended_seconds(tiling: Tiling) -> float:
    size = abs(tiling.block_queries - 32) + abs(tiling.block_keys - 16)
    return 1.0 + size + tiling.num_warps + tiling.num_stages


def test_the_fastest_of_each_kernel_is_found() -> None:
    starts = choose_tilings(architecture_of(QUERY.device), "float32", 16)
    tilings = search(QUERY, KEY, causal=True, measure=_seconds)
    for start, tiling in zip(starts, tilings, strict=True):
        assert tiling == min(candidates(start), key=_pretended_seconds)


def test_candidates_are_neighbours_that_tensor_cores_can_multiply() -> None:
    start = Tiling(16, 64, 4, 2)
    found = list(candidates(start))
    assert start in found
    assert len(set(found)) == len(found)
    assert {(tiling.block_queries, tiling.block_keys) for tiling in found} == {
        (16, 64),
        (16, 32),
        (32, 64),
        (16, 128),
    }
    assert {tiling.num_stages for tiling in found} == {1, 2, 3}


def test_what_does_not_fit_is_left_out() -> None:
    from triton.runtime.errors import OutOfResources

    def measure(launch: KernelLaunch) -> float:
        if launch.tiling.num_warps == 4:
            raise OutOfResources(2, 1, "shared memory")
        return _seconds(launch)

    def fail(_launch: KernelLaunch) -> float:
        raise RuntimeError("PassManager::run failed")

    tilings = search(QUERY, KEY, causal=False, measure=measure)
    assert {tiling.num_warps for tiling in tilings} == {8}
    table = choose_tilings(architecture_of(QUERY.device), "float32", 16)
    assert search(QUERY, KEY, causal=False, measure=fail) == table


def test_a_choice_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    num_measured = 0

    def measure(launch: KernelLaunch) -> float:
        nonlocal num_measured
        num_measured += 1
        return _seconds(launch)

    monkeypatch.setattr(backend, "_time_on_gpu", measure)
    state = torch.get_rng_state()
    first = tuned_tilings(QUERY, KEY, causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert num_measured > 10
    num_measured = 0
    backend._tuned.cache_clear()  # as in a new process
    assert tuned_tilings(QUERY, KEY, causal=True) == first
    assert num_measured == 0
    (kind,) = json.loads(TILINGS.path.read_text())
    assert kind.endswith("head_dim 16, 64 x 64, heads 2/1, causal")


@pytest.mark.parametrize("damage", ["{half a", "[]", '{"kind": [[16, 16, 4]]}'])
def test_a_damaged_cache_is_told_and_replaced(
    damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "_time_on_gpu", _seconds)
    TILINGS.path.parent.mkdir(parents=True)
    TILINGS.path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        tuned_tilings(QUERY, KEY, causal=True)
    assert "attention-tilings.json cannot be read" in caplog.text
    assert len(json.loads(TILINGS.path.read_text())) == 1


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(backend, "_time_on_gpu", _seconds)
    with caplog.at_level(logging.WARNING):
        tuned_tilings(QUERY, KEY, causal=True)
    assert "was not kept" in caplog.text


def test_attention_asks_only_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_time_on_gpu", _seconds)
    inputs = ForwardInputs(QUERY, KEY, KEY, diagonal=0, scale=0.25)
    plain, _ = triton_forward(inputs)
    assert not TILINGS.path.exists()
    monkeypatch.setenv("PACELINE_AUTOTUNE", "1")
    tuned, _ = triton_forward(inputs)
    assert TILINGS.path.exists()
    torch.testing.assert_close(tuned, plain)
