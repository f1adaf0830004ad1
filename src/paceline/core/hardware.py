"""Devices and links; each figure names its source document.

Peaks are dense: vendors advertise the doubled figure of 2:4 sparsity, which training does not
use. Hardware that is missing from the table is an error, never a guess: a utilisation computed
from the wrong peak is worse than none. Conventions of the table:

* Where a vendor publishes only the figure with sparsity, it is halved and the source says so.
* Peaks accumulate in float32. GeForce cards multiply half-precision matrices twice as fast
  when they accumulate in float16; that figure is not used.
* float32 means float32 operands that are not rounded to tfloat32. float64 peaks use
  the matrix units of devices whose matrix units support float64.
* Link bandwidth is per device and per direction. Vendors publish the sum of both directions,
  so their figure is halved.
* Bytes are decimal and capacities are as advertised: a program can allocate less.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from paceline.core.errors import HardwareError, did_you_mean
from paceline.core.specs import DType
from paceline.core.units import GB

CUDA: Final = "cuda"
"""The type of NVIDIA's devices and of AMD's, for which there are Triton kernels."""
DeviceName = Literal["auto", "cpu", "cuda", "xpu"]
"""auto is the accelerator if there is one; a missing one is rejected where it is used."""


@dataclasses.dataclass(frozen=True)
class SourcedValue:
    """A number and its source."""

    value: float
    """The number, in the unit of the field that holds it."""
    source: str
    """The document that states the number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between devices."""

    name: str
    """The vendor's name for it."""
    bytes_per_s: SourcedValue
    """Bandwidth per device and direction, summed over all lanes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as specified by its vendor."""

    name: str
    """Identifier used in plans and records."""
    description: str
    """Display name, with form factor and memory size."""
    reported_names: tuple[str, ...]
    """Names that the driver reports, as torch returns them."""
    peak_flops: Mapping[DType, SourcedValue]
    """Dense matmul FLOP/s by operand dtype, accumulating in float32."""
    memory_bytes: SourcedValue
    """Memory capacity as advertised."""
    memory_bytes_per_s: SourcedValue
    """Memory bandwidth."""
    links: tuple[Link, ...]
    """Links to other devices, fastest first."""

    def peak(self, dtype: DType) -> SourcedValue:
        """Returns the peak FLOP/s for operands of `dtype`; raises if it is not known."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise HardwareError(f"{self.name} has no known peak for {dtype}; known: {known}")
        return self.peak_flops[dtype]


def _peaks(
    source: str, flops: Mapping[DType | Literal["half"], float]
) -> dict[DType, SourcedValue]:
    """Returns the peak FLOP/s from one document; half sets both bfloat16 and float16."""
    peaks: dict[DType, SourcedValue] = {}
    for name, value in flops.items():
        dtypes: tuple[DType, ...] = ("bfloat16", "float16") if name == "half" else (name,)
        peaks |= dict.fromkeys(dtypes, SourcedValue(value, source))
    return peaks


def _memory(gb: float, gb_per_s: float, *sources: str) -> tuple[SourcedValue, SourcedValue]:
    """Returns a memory's capacity and bandwidth, from a common document or one document each."""
    return SourcedValue(gb * GB, sources[0]), SourcedValue(gb_per_s * GB, sources[-1])


def _link(name: str, both_directions_gb_per_s: float, source: str) -> Link:
    """Returns a link from the published bandwidth, which is the sum of both directions."""
    derivation = f"{source}: {both_directions_gb_per_s:,} GB/s in both directions, halved"
    return Link(name=name, bytes_per_s=SourcedValue(both_directions_gb_per_s * GB / 2, derivation))


def _device(
    name: str,
    description: str,
    *reported_names: str,
    peaks: Mapping[DType, SourcedValue],
    memory: tuple[SourcedValue, SourcedValue],
    links: tuple[Link, ...],
) -> Device:
    return Device(
        name=name,
        description=description,
        reported_names=reported_names,
        peak_flops=peaks,
        memory_bytes=memory[0],
        memory_bytes_per_s=memory[1],
        links=links,
    )


_V100 = "NVIDIA V100 datasheet, V100 SXM2"
_V100_PEAKS = _peaks(_V100, {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12})
_V100_LINKS = (
    _link("NVLink 2", 300, _V100),
    _link("PCIe 3.0 x16", 32, "NVIDIA V100 datasheet, interconnect bandwidth"),
)

_A100 = "NVIDIA A100 datasheet"
_A100_PEAKS = _peaks(
    f"{_A100}, figures without sparsity",
    {"float64": 19.5e12, "float32": 19.5e12, "tfloat32": 156e12, "half": 312e12},
)
_A100_PCIE_LINK = _link("PCIe 4.0 x16", 64, _A100)
_A100_SXM_LINKS = (_link("NVLink 3", 600, f"{_A100}, SXM"), _A100_PCIE_LINK)

_H100_WHITEPAPER = (
    "NVIDIA H100 Tensor Core GPU Architecture whitepaper, peak rates of H100 SXM5, figures "
    "without sparsity"
)
_H100_SXM = "NVIDIA H100 datasheet, H100 SXM"
_H100_PCIE = "NVIDIA H100 datasheet, H100 PCIe"
_H200 = "NVIDIA H200 datasheet, H200 SXM"

_HGX_B200 = "NVIDIA HGX specifications, HGX B200"
_BLACKWELL = "NVIDIA Blackwell datasheet, HGX B200"
_DGX_B200 = "NVIDIA DGX B200 datasheet"

_MI300X = "AMD Instinct MI300X data sheet"
_TPU_V5P = "Google Cloud TPU v5p documentation, system architecture"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"


DEVICES: tuple[Device, ...] = (
    _device(
        *("v100-sxm2-16gb", "NVIDIA V100 SXM2 16 GB", "Tesla V100-SXM2-16GB"),
        peaks=_V100_PEAKS,
        links=_V100_LINKS,
        memory=_memory(16, 900, _V100),
    ),
    _device(
        *("v100-sxm2-32gb", "NVIDIA V100 SXM2 32 GB", "Tesla V100-SXM2-32GB"),
        peaks=_V100_PEAKS,
        links=_V100_LINKS,
        memory=_memory(32, 900, _V100),
    ),
    _device(
        # Older drivers omit the vendor.
        *("a100-sxm-40gb", "NVIDIA A100 SXM4 40 GB", "NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        peaks=_A100_PEAKS,
        links=_A100_SXM_LINKS,
        memory=_memory(40, 1_555, f"{_A100}, A100 40GB SXM"),
    ),
    _device(
        *("a100-sxm-80gb", "NVIDIA A100 SXM4 80 GB", "NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        peaks=_A100_PEAKS,
        links=_A100_SXM_LINKS,
        memory=_memory(80, 2_039, f"{_A100}, A100 80GB SXM"),
    ),
    _device(
        *("a100-pcie-80gb", "NVIDIA A100 PCIe 80 GB", "NVIDIA A100 80GB PCIe"),
        peaks=_A100_PEAKS,
        links=(
            _link("NVLink 3 bridge", 600, f"{_A100}, PCIe, bridge between two cards"),
            _A100_PCIE_LINK,
        ),
        memory=_memory(80, 1_935, f"{_A100}, A100 80GB PCIe"),
    ),
    _device(
        *("h100-sxm", "NVIDIA H100 SXM5 80 GB", "NVIDIA H100 80GB HBM3"),
        peaks=_peaks(_H100_WHITEPAPER, {"float64": 66.9e12, "float32": 66.9e12})
        | _peaks(_H100_WHITEPAPER, {"tfloat32": 494.7e12, "half": 989.4e12, "float8": 1_978.9e12}),
        links=(_link("NVLink 4", 900, _H100_SXM), _link("PCIe 5.0 x16", 128, _H100_SXM)),
        memory=_memory(80, 3_350, _H100_SXM),
    ),
    _device(
        *("h100-pcie", "NVIDIA H100 PCIe 80 GB", "NVIDIA H100 PCIe"),
        peaks=_peaks(_H100_PCIE, {"float64": 51e12, "float32": 51e12})
        | _peaks(
            f"{_H100_PCIE}, stated with sparsity, halved",
            {"tfloat32": 756e12 / 2, "half": 1_513e12 / 2, "float8": 3_026e12 / 2},
        ),
        links=(
            _link("NVLink 4 bridge", 600, f"{_H100_PCIE}, bridge of two cards"),
            _link("PCIe 5.0 x16", 128, _H100_PCIE),
        ),
        memory=_memory(80, 2_000, _H100_PCIE, f"{_H100_PCIE}, 2 TB/s"),
    ),
    _device(
        *("h200-sxm", "NVIDIA H200 SXM5 141 GB", "NVIDIA H200"),
        peaks=_peaks(_H200, {"float64": 67e12, "float32": 67e12})
        | _peaks(
            f"{_H200}, stated with sparsity, halved",
            {"tfloat32": 989e12 / 2, "half": 1_979e12 / 2, "float8": 3_958e12 / 2},
        ),
        links=(_link("NVLink 4", 900, _H200), _link("PCIe 5.0 x16", 128, _H200)),
        memory=_memory(141, 4_800, _H200),
    ),
    # The launch brief stated 192 GB for a B200; shipped boards and later documents have
    # 180 GB. The float64 and float32 peaks were lowered between the same editions.
    _device(
        *("b200-sxm", "NVIDIA B200 SXM 180 GB", "NVIDIA B200"),
        peaks=_peaks(
            f"{_HGX_B200}, total of eight devices divided by eight",
            {"float64": 296e12 / 8, "float32": 600e12 / 8},
        )
        | _peaks(
            f"{_HGX_B200}, total of eight devices with sparsity divided by sixteen",
            {"tfloat32": 18e15 / 16, "half": 36e15 / 16, "float8": 72e15 / 16},
        ),
        links=(_link("NVLink 5", 1_800, _BLACKWELL), _link("PCIe 5.0 x16", 128, _BLACKWELL)),
        memory=_memory(
            *(180, 8_000, f"{_DGX_B200}, 1,440 GB in eight devices, divided by eight"),
            f"{_DGX_B200}, 64 TB/s in eight devices, divided by eight",
        ),
    ),
    _device(
        *("mi300x", "AMD Instinct MI300X 192 GB", "AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        peaks=_peaks(
            f"{_MI300X}, matrix rates without sparsity",
            {"float64": 163.4e12, "float32": 163.4e12, "half": 1_307.4e12, "float8": 2_614.9e12},
        )
        | _peaks(
            f"{_MI300X}, TF32 matrix rate without sparsity (xf32 in the ISA)",
            {"tfloat32": 653.7e12},
        ),
        links=(
            _link("Infinity Fabric", 7 * 128, f"{_MI300X}, seven links of 128 GB/s"),
            _link("PCIe 5.0 x16", 128, _MI300X),
        ),
        memory=_memory(192, 5_300, _MI300X),
    ),
    # Google states no float32 peak. The earlier figure of 4,800 Gbit/s per chip is for one
    # direction: it equals half of 1,200 GB/s. It is the total of the six links of the 3D
    # torus, so a collective along one axis gets a third.
    _device(
        *("tpu-v5p", "Google TPU v5p 95 GB", "TPU v5p", "TPU v5"),
        peaks=_peaks(_TPU_V5P, {"bfloat16": 459e12}),
        links=(_link("ICI", 1_200, _TPU_V5P),),
        memory=_memory(95, 2_765, f"{_TPU_V5P}, 95 GB (later editions say GiB)", _TPU_V5P),
    ),
    _device(
        *("rtx-3090", "NVIDIA GeForce RTX 3090 24 GB"),
        *("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        peaks=_peaks(
            f"{_GA102}, appendix A, float32 accumulation without sparsity",
            {"float32": 35.6e12, "tfloat32": 35.6e12, "half": 71e12},
        ),
        links=(
            _link("NVLink 3 bridge", 112.5, f"{_GA102}, third-generation NVLink"),
            _link("PCIe 4.0 x16", 64, f"{_GA102}, PCIe Gen 4"),
        ),
        memory=_memory(24, 936, f"{_GA102}, appendix A"),
    ),
    _device(
        *("rtx-4090", "NVIDIA GeForce RTX 4090 24 GB", "NVIDIA GeForce RTX 4090"),
        peaks=_peaks(
            f"{_ADA}, appendix A, float32 accumulation without sparsity",
            {"float32": 82.6e12, "tfloat32": 82.6e12, "half": 165.2e12, "float8": 330.3e12},
        ),
        links=(_link("PCIe 4.0 x16", 64, f"{_ADA} (PCIe Gen 4), 16 lanes of 16 GT/s each way"),),
        memory=_memory(24, 1_008, f"{_ADA}, appendix A"),
    ),
)


def known_devices() -> tuple[Device, ...]:
    """Returns every device in the table."""
    return DEVICES


def device_spelling(name: str) -> str:
    """Returns the identifier of a device that is named in any case; any other name unchanged."""
    for device in known_devices():
        if name.lower() in map(str.lower, (device.name, *device.reported_names)):
            return device.name
    return name


def find_device(name: str) -> Device:
    """Returns a device by its identifier or by the name that its driver reports, in any case.

    Args:
        name: For example h100-sxm or NVIDIA H100 80GB HBM3.
    """
    spelled = device_spelling(name)
    for device in known_devices():
        if device.name == spelled:
            return device
    names = [device.name for device in known_devices()]
    raise HardwareError(
        f"unknown hardware {name!r}: its peak and bandwidth are not in the table and are "
        f"not guessed; {did_you_mean(name, names)}known: {', '.join(names)}"
    )
