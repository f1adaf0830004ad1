"""Tests of the hardware table: complete, sourced, with dense peaks and one-directional links."""

from collections import Counter
from collections.abc import Iterator

import pytest

from paceline.core.errors import HardwareError
from paceline.core.hardware import Device, SourcedValue, find_device, known_devices
from paceline.core.specs import DType
from paceline.core.units import GB

EXPECTED_NAMES = {
    "v100-sxm2-16gb",
    "v100-sxm2-32gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "a100-pcie-80gb",
    "h100-sxm",
    "h100-pcie",
    "h200-sxm",
    "b200-sxm",
    "mi300x",
    "tpu-v5p",
    "rtx-3090",
    "rtx-4090",
}

every_device = pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)


def figures_of(device: Device) -> Iterator[SourcedValue]:
    yield from device.peak_flops.values()
    yield device.memory_bytes
    yield device.memory_bytes_per_s
    for link in device.links:
        yield link.bytes_per_s


def test_every_promised_device_is_known() -> None:
    assert {device.name for device in known_devices()} >= EXPECTED_NAMES


def test_no_name_stands_for_two_devices() -> None:
    names = Counter(
        name.lower() for device in known_devices() for name in (device.name, *device.reported_names)
    )
    assert [name for name, count in names.items() if count > 1] == []


@every_device
def test_the_case_of_a_name_does_not_matter(device: Device) -> None:
    for name in (device.name, *device.reported_names):
        assert find_device(name.upper()) is find_device(name.lower()) is device


@every_device
def test_every_figure_is_positive_and_has_a_source(device: Device) -> None:
    for figure in figures_of(device):
        assert figure.value > 0
        assert figure.source.strip()


@every_device
def test_no_source_is_an_address(device: Device) -> None:
    assert [figure.source for figure in figures_of(device) if "://" in figure.source] == []


@every_device
def test_every_device_is_described_completely(device: Device) -> None:
    assert device.description
    assert device.reported_names
    assert device.links
    assert {"bfloat16", "float16"} & set(device.peak_flops)


@every_device
def test_narrower_operands_are_never_slower(device: Device) -> None:
    order: tuple[DType, ...] = ("float32", "tfloat32", "bfloat16", "float8")
    peaks = [device.peak(dtype).value for dtype in order if dtype in device.peak_flops]
    assert peaks == sorted(peaks)
    if {"bfloat16", "float16"} <= set(device.peak_flops):
        assert device.peak("bfloat16").value == device.peak("float16").value
    if {"float32", "float16"} <= set(device.peak_flops):
        assert device.peak("float16").value >= device.peak("float32").value


@every_device
def test_links_are_listed_fastest_first_and_slower_than_memory(device: Device) -> None:
    rates = [link.bytes_per_s.value for link in device.links]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < device.memory_bytes_per_s.value


@every_device
def test_links_say_that_their_figure_is_halved(device: Device) -> None:
    for link in device.links:
        assert "in both directions, halved" in link.bytes_per_s.source


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("v100-sxm2-32gb", "float16", 125e12),
        ("a100-sxm-80gb", "bfloat16", 312e12),
        ("a100-sxm-80gb", "float32", 19.5e12),
        ("a100-sxm-80gb", "tfloat32", 156e12),
        ("h100-sxm", "bfloat16", 989.4e12),
        ("h100-sxm", "float8", 1978.9e12),
        ("h100-pcie", "bfloat16", 756.5e12),
        ("h200-sxm", "bfloat16", 989.5e12),
        ("b200-sxm", "bfloat16", 2.25e15),
        ("b200-sxm", "float8", 4.5e15),
        ("mi300x", "bfloat16", 1307.4e12),
        ("mi300x", "tfloat32", 653.7e12),
        ("tpu-v5p", "bfloat16", 459e12),
        ("rtx-3090", "bfloat16", 71e12),
        ("rtx-4090", "bfloat16", 165.2e12),
    ],
)
def test_peaks_are_dense_with_float32_accumulation(name: str, dtype: DType, flops: float) -> None:
    assert find_device(name).peak(dtype).value == flops


@pytest.mark.parametrize(
    ("name", "capacity", "bandwidth"),
    [
        ("v100-sxm2-16gb", 16 * GB, 0.9e12),
        ("v100-sxm2-32gb", 32 * GB, 0.9e12),
        ("a100-sxm-40gb", 40 * GB, 1.555e12),
        ("a100-sxm-80gb", 80 * GB, 2.039e12),
        ("a100-pcie-80gb", 80 * GB, 1.935e12),
        ("h100-sxm", 80 * GB, 3.35e12),
        ("h100-pcie", 80 * GB, 2e12),
        ("h200-sxm", 141 * GB, 4.8e12),
        ("b200-sxm", 180 * GB, 8e12),
        ("mi300x", 192 * GB, 5.3e12),
        ("tpu-v5p", 95 * GB, 2.765e12),
        ("rtx-3090", 24 * GB, 0.936e12),
        ("rtx-4090", 24 * GB, 1.008e12),
    ],
)
def test_memory_is_as_advertised(name: str, capacity: int, bandwidth: float) -> None:
    device = find_device(name)
    assert device.memory_bytes.value == capacity
    assert device.memory_bytes_per_s.value == bandwidth


@pytest.mark.parametrize(
    ("name", "link_name", "rate"),
    [
        ("v100-sxm2-32gb", "NVLink 2", 150e9),
        ("a100-sxm-80gb", "NVLink 3", 300e9),
        ("h100-sxm", "NVLink 4", 450e9),
        ("b200-sxm", "NVLink 5", 900e9),
        ("mi300x", "Infinity Fabric", 448e9),
        ("tpu-v5p", "ICI", 600e9),
        ("rtx-3090", "NVLink 3 bridge", 56.25e9),
        ("rtx-4090", "PCIe 4.0 x16", 32e9),
    ],
)
def test_fastest_link_counts_one_direction(name: str, link_name: str, rate: float) -> None:
    link = find_device(name).links[0]
    assert link.name == link_name
    assert link.bytes_per_s.value == rate


@pytest.mark.parametrize(
    ("reported_name", "name"),
    [
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5p", "tpu-v5p"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_device_is_found_by_the_name_its_driver_reports(reported_name: str, name: str) -> None:
    assert find_device(reported_name) is find_device(name)


@pytest.mark.parametrize("name", ["NVIDIA H100 NVL", "h100", "NVIDIA GeForce RTX 4090 D", ""])
def test_unknown_device_is_an_error_that_names_it_and_lists_the_known(name: str) -> None:
    with pytest.raises(HardwareError) as caught:
        find_device(name)
    message = str(caught.value)
    assert repr(name) in message
    for known in EXPECTED_NAMES:
        assert known in message


def test_format_that_a_device_lacks_is_an_error_that_lists_what_it_has() -> None:
    with pytest.raises(HardwareError, match=r"a100-sxm-80gb.*float8.*known: .*bfloat16"):
        find_device("a100-sxm-80gb").peak("float8")
