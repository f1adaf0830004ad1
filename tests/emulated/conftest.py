"""Tests on the emulated device; they are collected where it is loaded (`scripts/test emulated`)."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

if "emulated_device" not in sys.modules:
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def device_module() -> Iterator[Any]:
    """Yields what tests ask of the device, which has forgotten what other tests did."""
    import emulated_device  # type: ignore[import-not-found]

    emulated_device.clear()
    yield emulated_device
    emulated_device.clear()
