"""Specs, presets and hardware: the frozen descriptions that all other packages take as input."""

from paceline.core.errors import HardwareError, PacelineError, RecordError, ShapeError, UsageError
from paceline.core.hardware import Device, Link, SourcedValue, find_device, known_devices
from paceline.core.plan import Estimate, ParallelLayout, Plan
from paceline.core.presets import model_preset, preset_names
from paceline.core.specs import BatchShape, DType, ModelShape, Precision, precision_preset

__all__ = [
    "BatchShape",
    "DType",
    "Device",
    "Estimate",
    "HardwareError",
    "Link",
    "ModelShape",
    "PacelineError",
    "ParallelLayout",
    "Plan",
    "Precision",
    "RecordError",
    "ShapeError",
    "SourcedValue",
    "UsageError",
    "find_device",
    "known_devices",
    "model_preset",
    "precision_preset",
    "preset_names",
]
