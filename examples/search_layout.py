"""Searches the layouts of Llama 3 8B on 16 GPUs, and explains why another layout is slower."""

from paceline.core import find_device, model_preset
from paceline.planner.calibrations.store import find_calibration
from paceline.planner.search.advice import compare, not_told_apart
from paceline.planner.search.search import search
from paceline.planner.search.spec import SearchQuestion, calibrated_costs

device = find_device("h100-sxm")
calibration = find_calibration(None, device.name, "bfloat16")
costs = calibrated_costs(calibration)
question = SearchQuestion(
    shape=model_preset("llama3-8B"),
    precision=calibration.training_precision,
    conventions=calibration.conventions,
    context_length=8192,
    global_batch=128,
    num_devices=16,
    memory_bytes=device.memory_bytes.value,
)
result = search(question, costs, peak_flops=device.peak("bfloat16").value)
print(f"{result.num_candidates:,} layouts, {result.num_fitting:,} fit")
for choice in result.choices[: not_told_apart(result.choices)]:
    print(f"{choice.step_time_s.value:.2f} s, bound by {choice.bound}: {choice.name}")
other = compare("tp=8", result.best, question, costs, None)
print(f"why not tp=8? {other.reason}")
