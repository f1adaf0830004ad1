import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.accounting.overlap import (
    Communications,
    best_fsdp,
    smallest_batch_tokens,
    smallest_batch_tokens_of_any_mesh,
)

gammas = st.floats(100, 5000)
widths = st.integers(1024, 100_000)
axes = st.integers(1, 3)


def _times(
    batch: float, d_ff: int, fsdp: float, tensor: float, gamma: float, of_fsdp: int, of_tensor: int
) -> tuple[float, float, float]:
    """Returns the times of weights, activations and compute, in the formula's unit."""
    return (
        d_ff / (tensor * of_fsdp),
        batch / (fsdp * of_tensor),
        batch * d_ff / (fsdp * tensor * gamma),
    )


@given(gammas, widths, st.integers(1, 64), st.integers(1, 16), axes, axes)
def test_at_the_bound_computing_takes_as_long_as_communicating(
    gamma: float, d_ff: int, fsdp: int, tensor: int, of_fsdp: int, of_tensor: int
) -> None:
    for communications in ("add", "overlap"):
        batch = float(
            smallest_batch_tokens(
                gamma,
                d_ff,
                fsdp=fsdp,
                tensor=tensor,
                fsdp_axes=of_fsdp,
                tensor_axes=of_tensor,
                communications=communications,
            )
        )
        possible = tensor < of_tensor * d_ff / gamma
        assert np.isfinite(batch) == possible
        if possible:
            weights, activations, compute = _times(
                batch, d_ff, fsdp, tensor, gamma, of_fsdp, of_tensor
            )
            both = weights + activations if communications == "add" else max(weights, activations)
            assert both == pytest.approx(compute, rel=1e-6)


@given(gammas, widths, st.integers(2, 4096), axes, axes, st.sampled_from(["add", "overlap"]))
def test_no_split_needs_less_than_the_best(
    gamma: float,
    d_ff: int,
    num_devices: int,
    of_fsdp: int,
    of_tensor: int,
    communications: Communications,
) -> None:
    on_axes = {"fsdp_axes": of_fsdp, "tensor_axes": of_tensor}
    best = float(
        smallest_batch_tokens_of_any_mesh(
            gamma, d_ff, num_devices=num_devices, communications=communications, **on_axes
        )
    )
    fsdp = np.geomspace(1, num_devices, 50)
    needed = smallest_batch_tokens(
        gamma, d_ff, fsdp=fsdp, tensor=num_devices / fsdp, communications=communications, **on_axes
    )
    assert (needed >= best * (1 - 1e-9)).all()
    chosen = best_fsdp(best, d_ff, num_devices=num_devices, **on_axes)
    reached = smallest_batch_tokens(
        gamma,
        d_ff,
        fsdp=chosen,
        tensor=num_devices / chosen,
        communications=communications,
        **on_axes,
    )
    if np.isfinite(reached):
        assert float(reached) == pytest.approx(best, rel=1e-6)


def test_one_dimension_alone() -> None:
    alone = smallest_batch_tokens(
        2555.6, 53248, fsdp=64, tensor=1, fsdp_axes=2, tensor_axes=1, communications="overlap"
    )
    # gamma / M_X tokens per device.
    assert alone / 64 == pytest.approx(1277.8)
