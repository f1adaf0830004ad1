"""The devices that Paceline knows, with the document behind every figure.

Conventions, the same for all:

* Peaks are dense. Where a vendor prints only the figure with 2:4 sparsity, it is halved
  here and the source says so.
* Peaks accumulate in float32. GeForce cards multiply half-precision matrices twice as fast
  when they accumulate in float16; that figure is not used.
* float32 means float32 operands, without rounding them to tfloat32; float64 uses the
  matrix units of devices that have them for it.
* Links count one direction of one device. Vendors add both directions up, so their figure
  is halved.
* Bytes are decimal and capacities as advertised: what a program can allocate is less.
"""

from collections.abc import Mapping

from paceline.core.errors import HardwareError, did_you_mean
from paceline.core.hardware import Device, Link, SourcedValue
from paceline.core.specs import DType
from paceline.core.units import GB


def _peaks(source: str, flops: Mapping[DType, float]) -> dict[DType, SourcedValue]:
    """Makes the peaks that one document states."""
    return {dtype: SourcedValue(value, source) for dtype, value in flops.items()}


def _link(name: str, both_directions_gb_per_s: float, source: str) -> Link:
    """Makes a link from the figure that vendors print, which adds both directions up."""
    derivation = f"{source}: {both_directions_gb_per_s:,} GB/s in both directions, halved"
    return Link(name=name, bytes_per_s=SourcedValue(both_directions_gb_per_s * GB / 2, derivation))


_V100_DATASHEET = "NVIDIA V100 datasheet, V100 SXM2"
_V100_PEAKS = _peaks(
    _V100_DATASHEET,
    {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12},
)
_V100_LINKS = (
    _link("NVLink 2", 300, _V100_DATASHEET),
    _link("PCIe 3.0 x16", 32, "NVIDIA V100 datasheet, interconnect bandwidth"),
)

_A100_DATASHEET = "NVIDIA A100 datasheet"
_A100_PEAKS = _peaks(
    f"{_A100_DATASHEET}, figures without sparsity",
    {
        "float64": 19.5e12,
        "float32": 19.5e12,
        "tfloat32": 156e12,
        "bfloat16": 312e12,
        "float16": 312e12,
    },
)
_A100_PCIE_LINK = _link("PCIe 4.0 x16", 64, _A100_DATASHEET)

_H100_DATASHEET = "NVIDIA H100 datasheet"
_H100_WHITEPAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, peak rates of H100 SXM5"
_H200_DATASHEET = "NVIDIA H200 datasheet, H200 SXM"

_HGX_SPECIFICATIONS = "NVIDIA HGX specifications, HGX B200"
_BLACKWELL_DATASHEET = "NVIDIA Blackwell datasheet, HGX B200"
_DGX_B200_DATASHEET = "NVIDIA DGX B200 datasheet"

_MI300X_DATASHEET = "AMD Instinct MI300X data sheet"
_TPU_V5P_GUIDE = "Google Cloud TPU v5p documentation, system architecture"

_GA102_WHITEPAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA_WHITEPAPER = "NVIDIA Ada GPU Architecture whitepaper"


DEVICES: tuple[Device, ...] = (
    Device(
        name="v100-sxm2-16gb",
        description="NVIDIA V100 SXM2 16 GB",
        reported_names=("Tesla V100-SXM2-16GB",),
        peak_flops=_V100_PEAKS,
        memory_bytes=SourcedValue(16 * GB, _V100_DATASHEET),
        memory_bytes_per_s=SourcedValue(900 * GB, _V100_DATASHEET),
        links=_V100_LINKS,
    ),
    Device(
        name="v100-sxm2-32gb",
        description="NVIDIA V100 SXM2 32 GB",
        reported_names=("Tesla V100-SXM2-32GB",),
        peak_flops=_V100_PEAKS,
        memory_bytes=SourcedValue(32 * GB, _V100_DATASHEET),
        memory_bytes_per_s=SourcedValue(900 * GB, _V100_DATASHEET),
        links=_V100_LINKS,
    ),
    Device(
        name="a100-sxm-40gb",
        description="NVIDIA A100 SXM4 40 GB",
        # Older drivers leave the vendor out.
        reported_names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        peak_flops=_A100_PEAKS,
        memory_bytes=SourcedValue(40 * GB, f"{_A100_DATASHEET}, A100 40GB SXM"),
        memory_bytes_per_s=SourcedValue(1_555 * GB, f"{_A100_DATASHEET}, A100 40GB SXM"),
        links=(_link("NVLink 3", 600, f"{_A100_DATASHEET}, SXM"), _A100_PCIE_LINK),
    ),
    Device(
        name="a100-sxm-80gb",
        description="NVIDIA A100 SXM4 80 GB",
        reported_names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        peak_flops=_A100_PEAKS,
        memory_bytes=SourcedValue(80 * GB, f"{_A100_DATASHEET}, A100 80GB SXM"),
        memory_bytes_per_s=SourcedValue(2_039 * GB, f"{_A100_DATASHEET}, A100 80GB SXM"),
        links=(_link("NVLink 3", 600, f"{_A100_DATASHEET}, SXM"), _A100_PCIE_LINK),
    ),
    Device(
        name="a100-pcie-80gb",
        description="NVIDIA A100 PCIe 80 GB",
        reported_names=("NVIDIA A100 80GB PCIe",),
        peak_flops=_A100_PEAKS,
        memory_bytes=SourcedValue(80 * GB, f"{_A100_DATASHEET}, A100 80GB PCIe"),
        memory_bytes_per_s=SourcedValue(1_935 * GB, f"{_A100_DATASHEET}, A100 80GB PCIe"),
        links=(
            _link("NVLink 3 bridge", 600, f"{_A100_DATASHEET}, PCIe, bridge between two cards"),
            _A100_PCIE_LINK,
        ),
    ),
    Device(
        name="h100-sxm",
        description="NVIDIA H100 SXM5 80 GB",
        reported_names=("NVIDIA H100 80GB HBM3",),
        peak_flops=_peaks(
            f"{_H100_WHITEPAPER}, figures without sparsity",
            {
                "float64": 66.9e12,
                "float32": 66.9e12,
                "tfloat32": 494.7e12,
                "bfloat16": 989.4e12,
                "float16": 989.4e12,
                "float8": 1_978.9e12,
            },
        ),
        memory_bytes=SourcedValue(80 * GB, f"{_H100_DATASHEET}, H100 SXM"),
        memory_bytes_per_s=SourcedValue(3_350 * GB, f"{_H100_DATASHEET}, H100 SXM"),
        links=(
            _link("NVLink 4", 900, f"{_H100_DATASHEET}, H100 SXM"),
            _link("PCIe 5.0 x16", 128, f"{_H100_DATASHEET}, H100 SXM"),
        ),
    ),
    Device(
        name="h100-pcie",
        description="NVIDIA H100 PCIe 80 GB",
        reported_names=("NVIDIA H100 PCIe",),
        peak_flops=_peaks(
            f"{_H100_DATASHEET}, H100 PCIe",
            {"float64": 51e12, "float32": 51e12},
        )
        | _peaks(
            f"{_H100_DATASHEET}, H100 PCIe, stated with sparsity, halved",
            {
                "tfloat32": 756e12 / 2,
                "bfloat16": 1_513e12 / 2,
                "float16": 1_513e12 / 2,
                "float8": 3_026e12 / 2,
            },
        ),
        memory_bytes=SourcedValue(80 * GB, f"{_H100_DATASHEET}, H100 PCIe"),
        memory_bytes_per_s=SourcedValue(2_000 * GB, f"{_H100_DATASHEET}, H100 PCIe, 2 TB/s"),
        links=(
            _link("NVLink 4 bridge", 600, f"{_H100_DATASHEET}, H100 PCIe, bridge of two cards"),
            _link("PCIe 5.0 x16", 128, f"{_H100_DATASHEET}, H100 PCIe"),
        ),
    ),
    Device(
        name="h200-sxm",
        description="NVIDIA H200 SXM5 141 GB",
        reported_names=("NVIDIA H200",),
        peak_flops=_peaks(_H200_DATASHEET, {"float64": 67e12, "float32": 67e12})
        | _peaks(
            f"{_H200_DATASHEET}, stated with sparsity, halved",
            {
                "tfloat32": 989e12 / 2,
                "bfloat16": 1_979e12 / 2,
                "float16": 1_979e12 / 2,
                "float8": 3_958e12 / 2,
            },
        ),
        memory_bytes=SourcedValue(141 * GB, _H200_DATASHEET),
        memory_bytes_per_s=SourcedValue(4_800 * GB, _H200_DATASHEET),
        links=(
            _link("NVLink 4", 900, _H200_DATASHEET),
            _link("PCIe 5.0 x16", 128, _H200_DATASHEET),
        ),
    ),
    # The launch brief gave a B200 192 GB; the boards that ship, and the later documents,
    # have 180 GB. The float64 and float32 peaks were lowered between the same editions.
    Device(
        name="b200-sxm",
        description="NVIDIA B200 SXM 180 GB",
        reported_names=("NVIDIA B200",),
        peak_flops=_peaks(
            f"{_HGX_SPECIFICATIONS}, total of eight devices divided by eight",
            {"float64": 296e12 / 8, "float32": 600e12 / 8},
        )
        | _peaks(
            f"{_HGX_SPECIFICATIONS}, total of eight devices with sparsity divided by sixteen",
            {
                "tfloat32": 18e15 / 16,
                "bfloat16": 36e15 / 16,
                "float16": 36e15 / 16,
                "float8": 72e15 / 16,
            },
        ),
        memory_bytes=SourcedValue(
            180 * GB, f"{_DGX_B200_DATASHEET}, 1,440 GB in eight devices, divided by eight"
        ),
        memory_bytes_per_s=SourcedValue(
            8_000 * GB, f"{_DGX_B200_DATASHEET}, 64 TB/s in eight devices, divided by eight"
        ),
        links=(
            _link("NVLink 5", 1_800, _BLACKWELL_DATASHEET),
            _link("PCIe 5.0 x16", 128, _BLACKWELL_DATASHEET),
        ),
    ),
    Device(
        name="mi300x",
        description="AMD Instinct MI300X 192 GB",
        reported_names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        peak_flops=_peaks(
            f"{_MI300X_DATASHEET}, matrix rates without sparsity",
            {
                "float64": 163.4e12,
                "float32": 163.4e12,
                "bfloat16": 1_307.4e12,
                "float16": 1_307.4e12,
                "float8": 2_614.9e12,
            },
        )
        | _peaks(
            f"{_MI300X_DATASHEET}, TF32 matrix rate without sparsity (xf32 in the ISA)",
            {"tfloat32": 653.7e12},
        ),
        memory_bytes=SourcedValue(192 * GB, _MI300X_DATASHEET),
        memory_bytes_per_s=SourcedValue(5_300 * GB, _MI300X_DATASHEET),
        links=(
            _link("Infinity Fabric", 7 * 128, f"{_MI300X_DATASHEET}, seven links of 128 GB/s"),
            _link("PCIe 5.0 x16", 128, _MI300X_DATASHEET),
        ),
    ),
    # Google states no float32 peak. The earlier figure of 4,800 Gbit/s per chip is one
    # direction: it equals half of 1,200 GB/s. The six links of the 3D torus share it, so
    # a collective along one axis has a third.
    Device(
        name="tpu-v5p",
        description="Google TPU v5p 95 GB",
        reported_names=("TPU v5p", "TPU v5"),
        peak_flops=_peaks(_TPU_V5P_GUIDE, {"bfloat16": 459e12}),
        memory_bytes=SourcedValue(95 * GB, f"{_TPU_V5P_GUIDE}, 95 GB (later editions say GiB)"),
        memory_bytes_per_s=SourcedValue(2_765 * GB, _TPU_V5P_GUIDE),
        links=(_link("ICI", 1_200, _TPU_V5P_GUIDE),),
    ),
    Device(
        name="rtx-3090",
        description="NVIDIA GeForce RTX 3090 24 GB",
        reported_names=("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        peak_flops=_peaks(
            f"{_GA102_WHITEPAPER}, appendix A, float32 accumulation without sparsity",
            {
                "float32": 35.6e12,
                "tfloat32": 35.6e12,
                "bfloat16": 71e12,
                "float16": 71e12,
            },
        ),
        memory_bytes=SourcedValue(24 * GB, f"{_GA102_WHITEPAPER}, appendix A"),
        memory_bytes_per_s=SourcedValue(936 * GB, f"{_GA102_WHITEPAPER}, appendix A"),
        links=(
            _link("NVLink 3 bridge", 112.5, f"{_GA102_WHITEPAPER}, third-generation NVLink"),
            _link("PCIe 4.0 x16", 64, f"{_GA102_WHITEPAPER}, PCIe Gen 4"),
        ),
    ),
    Device(
        name="rtx-4090",
        description="NVIDIA GeForce RTX 4090 24 GB",
        reported_names=("NVIDIA GeForce RTX 4090",),
        peak_flops=_peaks(
            f"{_ADA_WHITEPAPER}, appendix A, float32 accumulation without sparsity",
            {
                "float32": 82.6e12,
                "tfloat32": 82.6e12,
                "bfloat16": 165.2e12,
                "float16": 165.2e12,
                "float8": 330.3e12,
            },
        ),
        memory_bytes=SourcedValue(24 * GB, f"{_ADA_WHITEPAPER}, appendix A"),
        memory_bytes_per_s=SourcedValue(1_008 * GB, f"{_ADA_WHITEPAPER}, appendix A"),
        links=(
            _link(
                "PCIe 4.0 x16", 64, f"{_ADA_WHITEPAPER} (PCIe Gen 4), 16 lanes of 16 GT/s each way"
            ),
        ),
    ),
)


def known_devices() -> tuple[Device, ...]:
    """Returns every device of the table."""
    return DEVICES


def find_device(name: str) -> Device:
    """Finds a device by its identifier or by the name that its driver reports.

    Args:
        name: Such as h100-sxm, or NVIDIA H100 80GB HBM3.
    """
    for device in known_devices():
        if name == device.name or name in device.reported_names:
            return device
    names = [device.name for device in known_devices()]
    raise HardwareError(
        f"unknown hardware {name!r}: its peak and bandwidth are not in the table and are "
        f"not guessed; {did_you_mean(name, names)}known: {', '.join(names)}"
    )
