"""Specs, presets and hardware: the frozen descriptions that all other packages take as input."""

from paceline.core.errors import PacelineError, UsageError
from paceline.core.hardware import Device, find_device
from paceline.core.plan import Estimate, ParallelLayout, Plan
from paceline.core.presets import model_preset, preset_names
from paceline.core.specs import BatchShape, ModelShape, Precision, precision_preset

__all__ = [
    "BatchShape",
    "Device",
    "Estimate",
    "ModelShape",
    "PacelineError",
    "ParallelLayout",
    "Plan",
    "Precision",
    "UsageError",
    "find_device",
    "model_preset",
    "precision_preset",
    "preset_names",
]
