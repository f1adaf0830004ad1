"""Tests on the emulated device; they are collected where it is loaded (`scripts/test emulated`)."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests import devices

if not devices.is_emulated():
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def device_module() -> Iterator[Any]:
    """Yields what tests ask of the device, which has forgotten what other tests did."""
    emulated_device = devices.emulated()
    emulated_device.clear()
    yield emulated_device
    emulated_device.clear()
