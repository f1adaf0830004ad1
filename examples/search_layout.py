"""Searches the layouts of Llama 3 8B on 16 GPUs, and explains why another layout is slower."""

from paceline.core import find_device, model_preset
from paceline.planner.calibrations.pooled import calibration_of
from paceline.planner.search.advice import compare, not_told_apart
from paceline.planner.search.search import search
from paceline.planner.search.spec import SearchSpec, calibrated_performance

device = find_device("h100-sxm")
calibration = calibration_of("nemo", device.name, "bfloat16")
performance = calibrated_performance(calibration)
spec = SearchSpec(
    shape=model_preset("llama3-8B"),
    precision=calibration.training_precision,
    framework_settings=calibration.framework_settings,
    context_length=8192,
    global_batch=128,
    num_devices=16,
    memory_bytes=device.memory_bytes.value,
)
result = search(spec, performance, peak_flops=device.peak("bfloat16").value)
print(f"{result.num_candidates:,} layouts, {result.num_fitting:,} fit")
for choice in result.choices[: not_told_apart(result.choices)]:
    print(f"{choice.step_time_s.value:.2f} s, bound by {choice.bound}: {choice.name}")
other = compare("tp=8", result.best, spec, performance, None)
print(f"why not tp=8? {other.reason}")
